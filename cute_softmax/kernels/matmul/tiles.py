"""How softmax(S) @ V is cut into tiles of rows, columns of V and parts of the columns of S, and who takes which."""

from dataclasses import dataclass
from itertools import islice

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...plan.matmul_class import TILE_N, MatmulClass
from ..common.copy import global_pointer
from ..common.index import ceil_div, divided, divisor, select


@dataclass(frozen=True)
class Grid:
    """How many tiles and works there are; and what a work's number is divided by, see `divisor`.

    by_tiles: batches, where tiles are causal, else tiles of rows. by_modes: the last two batch modes.
    """

    row_tiles: Int32
    depth_tiles: Int32
    batches: Int32
    works: Int32
    by_depth_tiles: cute.FastDivmodDivisorV2
    by_parts: cute.FastDivmodDivisorV2
    by_tiles: cute.FastDivmodDivisorV2
    by_modes: tuple

    def modes(self, batch: Int32) -> tuple[Int32, ...]:
        """The coordinates of a batch."""
        rest, mode_2 = divided(batch, self.by_modes[1])
        return *divided(rest, self.by_modes[0]), mode_2


def grid_of(spec: MatmulClass, shape: tuple, batch: tuple, parts: Int32) -> Grid:
    """Of a call, on the host. shape: M, N, D."""
    row_tiles, depth_tiles = ceil_div(shape[0], spec.rows), ceil_div(shape[2], spec.depth)
    batches = batch[0] * batch[1] * batch[2]
    works = batches * row_tiles * depth_tiles * parts
    divisors = (divisor(n) for n in (depth_tiles, parts, batches if spec.causal else row_tiles))
    return Grid(row_tiles, depth_tiles, batches, works, *divisors, tuple(divisor(n) for n in batch[1:]))


@dataclass(frozen=True)
class Call:
    """A call as its kernels get it.

    rows, columns, depth: M, N, D. parts, part_steps: into how many parts the columns are cut, and the steps of each.
    scores, values: of S and V, (address, row stride, batch strides) where they are read without TMA; where each eighth
    row of S is a tensor to it, (address, row stride, rows from batch to batch).
    scale, offset: see `cute_softmax.plan.MatmulPlan`.
    mask, bias, sink: (address, row and column stride, batch strides), or nothing. out, lse, sums, stats: addresses of
    the result, of the log-sum-exps, if wanted, of the parts' results, if there are several, and of the given
    log-sum-exps.
    """

    rows: Int32
    columns: Int32
    depth: Int32
    grid: Grid
    parts: Int32
    part_steps: Int32
    scores: tuple
    values: tuple
    scale: Float32
    offset: Int32
    mask: tuple[Int64, ...]
    bias: tuple[Int64, ...]
    sink: tuple[Int64, ...]
    out: Int64
    lse: Int64 | None
    sums: Int64 | None
    stats: Int64 | None


def call_of(
    spec: MatmulClass,
    shape: tuple,
    batch: tuple,
    parts: tuple,
    scores: tuple,
    values: tuple,
    scale: Float32,
    offset: Int32,
    operands: tuple,
) -> Call:
    """The call of a launch. shape: M, N, D; batch: sizes of its three modes; operands: those behind S and V."""
    left = iter(operands)
    extra = [tuple(islice(left, 6 if there else 0)) for there in (spec.mask, spec.bias, spec.sink)]
    results = (next(left) if there else None for there in (True, spec.lse, spec.split, spec.stats))
    grid = grid_of(spec, shape, batch, parts[0])
    return Call(*shape, grid, *parts, scores, values, scale, offset, *extra, *results)


@dataclass(frozen=True)
class Work:
    """A tile that a CTA takes: its place, and how many steps of columns it has.

    modes: the coordinates of its batch. first: its first step; steps: of each warpgroup, where they take turns: the
    last ones may find nothing. columns: the first that its part does not have.
    shifts: bytes that this thread's two rows begin after a multiple of 16, where rows begin anywhere.
    """

    exists: cutlass.Boolean
    row_tile: Int32
    depth_tile: Int32
    part: Int32
    batch: Int32
    modes: tuple[Int32, ...]
    first: Int32
    steps: Int32
    columns: Int32
    shifts: tuple[Int32, ...] = ()


@dataclass(frozen=True)
class Tiles:
    """The tiles of a call, and the CTA that takes some of them."""

    spec: cutlass.Constexpr[MatmulClass]
    call: Call
    cta: Int32
    ctas: Int32

    def work(self, turn: Int32) -> Work:
        """The tile that this CTA takes in its turn.

        Tiles of one batch follow each other, so that V is in L2. Causal ones come in the order of their length, the
        longest first, and every second turn in reverse: CTAs then end together.
        """
        s, call, grid = self.spec, self.call, self.call.grid
        index = turn * self.ctas + self.cta
        if s.causal:
            backwards = turn * self.ctas + self.ctas - 1 - self.cta
            index = select(turn % 2 == 1, backwards, index)
        if s.cluster > 1:
            part, rest = index % s.cluster, index // s.cluster
            rest, depth_tile = divided(rest, grid.by_depth_tiles)
        else:
            rest, depth_tile = divided(index, grid.by_depth_tiles)
            rest, part = divided(rest, grid.by_parts)
        end = call.columns
        if s.causal:
            row_tile, batch = divided(rest, grid.by_tiles)
            row_tile = grid.row_tiles - 1 - row_tile
            last = cutlass.min((row_tile + 1) * s.rows, call.rows) - 1
            end = cutlass.min(end, last + call.offset + 1)
        else:
            batch, row_tile = divided(rest, grid.by_tiles)
        first = part * call.part_steps
        steps = cutlass.min(cutlass.max(cute.ceil_div(end, TILE_N), 1) - first, call.part_steps)
        return Work(
            exists=index < grid.works,
            row_tile=row_tile,
            depth_tile=depth_tile,
            part=part,
            batch=batch,
            modes=grid.modes(batch),
            first=first,
            steps=cute.ceil_div(steps, s.shares),
            columns=cutlass.min(call.columns, (first + steps) * TILE_N),
        )


def tiles_of(spec: MatmulClass, call: Call) -> Tiles:
    """The tiles of a call, in a kernel."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return Tiles(spec, call, cta, ctas)


def here(number: Int32) -> Int32:
    """The number; what follows from it is not computed, and held in registers, before a loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])


def matrix(dtype: type, operand: tuple, shape: tuple, batch: tuple, transposed: bool = False) -> cute.Tensor:
    """A tensor in global memory, for TMA, as (rows, columns, batch modes), or (columns, rows, batch modes); modes that
    are broadcast have one element.

    operand: address, row stride, batch strides; all strides are multiples of 16 bytes.
    """
    address, row, *strides = operand
    once = [stride == 0 for stride in strides]
    sizes = [select(o, Int32(1), n) for o, n in zip(once, batch, strict=True)]
    strides = [select(o, Int64(8), n) for o, n in zip(once, strides, strict=True)]
    strides = [cute.assume(n, divby=8) for n in (row, *strides)]
    pointer = global_pointer(dtype, address, Int64(0), 16)
    if transposed:
        layout = cute.make_layout((*shape[::-1], *sizes), stride=(1, *strides))
    else:
        layout = cute.make_layout((*shape, *sizes), stride=(strides[0], 1, *strides[1:]))
    return cute.make_tensor(pointer, layout)


def place(mX: cute.Tensor, work: Work) -> tuple:
    """The batch coordinates of a work in a tensor of `matrix`: 0 where it is broadcast."""
    return tuple(cutlass.min(b, n - 1) for b, n in zip(work.modes, mX.shape[2:], strict=True))
