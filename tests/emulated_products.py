"""What the kernels of products are launched with: what the host computes from a launch's numbers, once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from math import ceil, prod

from ptx_tensors import TensorMap

from cute_softmax.kernels.matmul import merge_global, tiles
from cute_softmax.kernels.matmul.backward_walk import Call
from cute_softmax.plan.matmul_class import LINE_N, TILE_N
from cute_softmax.plan.matmul_layouts import LINES
from cute_softmax.plan.problem import ITEM_SIZE
from cute_softmax.runtime import launch

ROW = 128  # bytes of a box's row
NO_FIELDS = 0  # of a TiledMma: the kernel sets it


def left_behind(call: launch.Call, arguments: Sequence[int]) -> list[tuple[int, int]]:
    """(address, bytes) of what one launch leaves to the next."""
    plan, c = call.plan, call.plan.kernel
    if c.movement == "matmul" and c.split:
        return [(arguments[-1 - c.stats], plan.parts_bytes)]
    if c.movement in ("matmul_delta", "matmul_backward"):
        ctas = arguments[4] if c.movement == "matmul_delta" else blocks(c, arguments)
        return [(arguments[call.places[plan.operands.index("numbers")]], ctas * 2 * c.rows * 4)]
    return []


def launches_of(plan, numbers: Sequence[int]) -> Iterator[tuple[str, tuple[int, int], list]]:
    """(what the kernel's name says, its grid, its parameters) of each kernel of a launch of these numbers."""
    kernels = {"matmul": forward, "matmul_delta": delta, "matmul_backward": backward}[plan.kernel.movement]
    for kernel, grid, given in kernels(plan.kernel, *numbers):
        yield kernel, grid, [*flat(given)]


def forward(c, rows, columns, depth, batch_0, batch_1, batch_2, ctas, parts, steps, *more):
    batch, tma = (batch_0, batch_1, batch_2), c.instruction == "wgmma"
    (all_rows, batch_rows), (scale, offset, *operands) = (more[:2], more[2:]) if tma else ((0, 0), more)
    S, V = operands[:5], operands[5:10]
    read = ((S[0], S[1], batch_rows), ()) if tma else (S, V)
    call = tiles.call_of(
        c, (rows, columns, depth), batch, (parts, steps), *read, scale, offset, operands[10:]
    )
    if tma:
        kind, other = c.dtypes[:2]
        whole, tile = [(S, (columns, rows, *batch))], (ROW // ITEM_SIZE[kind], c.rows)
        if c.lines:
            whole, tile = eighths(S, all_rows, columns, batch), (LINE_N, c.rows // LINES)
        of_S = [matrix(kind, *of_lines, tile, ones=True) for of_lines in whole]
        of_V = matrix(other, V, (depth, columns, *batch), (ROW // ITEM_SIZE[other], TILE_N), ones=True)
        maps = [across(one) for one in of_S], (of_V, packed(of_V.sizes))
        yield "MatmulKernel", (ctas, 1), (maps, NO_FIELDS, call)
    else:
        yield "MmaKernel", (ctas, 1), call
    if c.split:
        merge, groups = merge_global.Merge(c), call.grid.batches * rows
        grid = ceil(groups / merge.rows), ceil(depth / (merge.lanes * merge_global.MERGE_COLUMNS))
        sinks = (rows, call.grid, call.sink) if c.sink else ()
        yield "Merge", grid, ((groups, depth, parts), scale, (call.out, call.lse, call.sums), sinks)


def eighths(S: Sequence[int], rows: int, columns: int, batch: Sequence[int]) -> Iterator[tuple]:
    """(operand, sizes) of rows k, k + 8, .. of scores whose rows begin anywhere, for all k."""
    address, row, *strides = S
    for k in range(LINES):
        first = address + 2 * row * k if k < rows else address
        before = first % 16 // 2
        count = max(ceil((rows - k) / LINES), 1)
        yield (first - 2 * before, LINES * row, *strides), (columns + before, count, *batch)


def matrix(
    dtype: str, operand: Sequence[int], sizes: Sequence[int], box: Sequence[int], ones: bool = False
) -> TensorMap:
    """The map of a matrix with batch modes. ones: those without a stride have one element."""
    address, *strides = operand
    item, (width, rows, *batch) = ITEM_SIZE[dtype], sizes
    if ones:
        batch = [n if stride else 1 for n, stride in zip(batch, strides[1:], strict=True)]
        strides = [stride or 8 for stride in strides]
    strides = tuple(item * stride for stride in strides)
    return TensorMap(address, item, (width, rows, *batch), strides, (*box, 1, 1, 1), item * box[0] == ROW)


def across(tensor_map: TensorMap) -> tuple[TensorMap, int]:
    """A map and the sizes of its tensor, whose rows come first."""
    width, rows, *batch = tensor_map.sizes
    return tensor_map, packed((rows, width, *batch))


def delta(c, rows, depth, heads, inner, ctas, *more):
    yield "", (ctas, 1), (rows, depth, heads, inner, more)


def backward(c, rows, columns, depth, heads, inner, outer, splits, ctas, offset, scale, factor, *operands):
    S, dO, V, stats, dS, dV = (
        operands[begin:end] for begin, end in ((0, 5), (5, 10), (10, 14), (14, 15), (15, 20), (20, 25))
    )
    mask, bias = operands[25:31] if c.mask else (), operands[-6:] if c.bias else ()
    modes, (kind, other) = (rows, heads, inner, outer), c.dtypes[:2]
    maps = [matrix(other, dO, (depth, *modes), (ROW // ITEM_SIZE[other], c.rows))]
    if not c.lines:
        box = ROW // ITEM_SIZE[kind], c.rows
        maps += [matrix(kind, operand, (columns, *modes), box) for operand in (S, dS)]
    numbers = 2 * c.rows, blocks(c, (rows, columns, depth, heads, inner, outer))
    of_rows = TensorMap(stats[0], 4, numbers, (4 * numbers[0],), (numbers[0], 1))
    call = Call(
        rows, columns, depth, heads, inner, outer, splits, offset, scale, factor, V, dV, S, dS, mask, bias
    )
    yield "", (ctas, 1), ([across(one) for one in maps], (of_rows, numbers[1]), call)


def blocks(c, numbers: Sequence[int]) -> int:
    """Of rows, of the heads and batches of a backward pass."""
    rows, _, _, *batch = numbers[:6]
    return ceil(rows / c.rows) * prod(batch)


def flat(given) -> Iterator:
    """The parameters of a kernel that is called with this."""
    if isinstance(given, TensorMap):
        yield given
    elif is_dataclass(given):
        for field in fields(given):
            value = getattr(given, field.name)
            yield from flat(divisors(value) if field.name.startswith("by_") else value)
    elif isinstance(given, (tuple, list)):
        for value in given:
            yield from flat(value)
    elif given is not None:
        yield launch.float_bits(given) if isinstance(given, float) else given


def divisors(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    """What kernels divide by as they get it: the number, a reciprocal of 32 bits and two shifts; and the number."""
    if isinstance(numbers, tuple):
        return tuple(given for number in numbers for given in divisors(number))
    bits = (numbers - 1).bit_length()
    reciprocal = ((1 << bits) - numbers << 32) // numbers + 1
    shifts = min(bits, 1) | max(bits - 1, 0) << 8
    return numbers | reciprocal << 32 | shifts << 64, numbers


def packed(numbers: Sequence[int]) -> int:
    """Numbers of 32 bits that are one parameter."""
    return sum(number << 32 * k for k, number in enumerate(numbers))
