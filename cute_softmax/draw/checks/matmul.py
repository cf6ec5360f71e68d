"""softmax_matmul's movements checked on a Plan's own numbers: fragments, ldmatrix, the banks of swizzled tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from layouts import Layout

from ...plan import WARP
from ...plan import matmul_layouts as named
from ...plan.hardware import ARCHITECTURES
from ...plan.matmul import MatmulPlan
from ...plan.matmul_backward import MatmulBackwardPlan
from ...plan.matmul_class import BLOCK_ROWS, LINE_N, RESERVED, SLAB, TILE_N, WARPGROUP
from ...plan.problem import ALIGNMENT, ITEM_SIZE
from .common import requests_of, uncovered, wavefronts
from .report import Report, Traffic

MATRIX = 8  # rows of a matrix that the tensor cores and ldmatrix read at once, 16 bytes each
Memory = Callable[[tuple[int, int]], int]
# Of an ldmatrix the bytes that its lanes give, and of each lane those that the operand wants in its values.
Load = tuple[list[int], list[list[int]]]


def check(plan: MatmulPlan | MatmulBackwardPlan) -> Report:
    """Coverage of the CTA's tile and of the columns, what ldmatrix leaves in registers, alignment, sectors of what
    threads load and store themselves, and wavefronts of shared memory."""
    return _forward(plan) if isinstance(plan, MatmulPlan) else _backward(plan)


def _forward(plan: MatmulPlan) -> Report:
    c = plan.kernel
    problems = [*_uncovered("the accumulators", c.depth), *_fits(c)]
    if c.rows != BLOCK_ROWS * c.blocks * (1 if c.alternate else c.warpgroups):
        problems.append(f"blocks of {BLOCK_ROWS} rows do not fill the tile of {c.rows}")
    wgmma = c.instruction == "wgmma"
    for name, size in (("S", c.score_stage_bytes), ("V", c.value_stage_bytes)):
        if not (name == "S" and c.lines) and size % named.swizzle(1).period:
            problems.append(f"{name}: stages of {size} bytes do not begin where the swizzle does")
    steps = math.ceil(plan.columns / TILE_N)
    if not c.causal and not (plan.parts - 1) * plan.part_steps < steps <= plan.parts * plan.part_steps:
        problems.append(f"{plan.parts} parts of {plan.part_steps} steps, and there are {steps}")
    for i, (name, dtype) in enumerate(zip("SV", c.dtypes, strict=False)):
        strides, unit = plan.operand_strides[i], ALIGNMENT if wgmma else c.access[i]
        if (
            name == "S" and c.lines
        ):  # without wgmma all of the 16 bytes around a row is loaded, wherever it begins
            strides = (named.LINES * strides[0], *strides[1:]) if wgmma else ()
        if any(n * ITEM_SIZE[dtype] % unit for n in strides):
            problems.append(f"{name}: {c.loads} cannot step by {strides} elements of {dtype}")
    size = ITEM_SIZE[c.dtypes[0]]
    tile = named.first_stage(named.by_rows(size, c.rows, TILE_N, 1))
    if c.lines:
        # Each eighth row begins alike: those are neighbours where TMA loads them.
        step = 0 if wgmma else plan.operand_strides[0][0] * size
        words = [
            [a + a // (LINE_N * size) * step % ALIGNMENT // 4 * 4 for a in lanes]
            for lanes in pairs(Layout((c.rows, LINE_N), (LINE_N, 1)), size)
        ]
        words += [[4 + a for a in lanes] for lanes in words]
        shared = [f"sS, read in words, of which two are shifted into one: {wavefronts(words, 2 * size)}."]
    elif size == 2:
        problems += [f"S: {p}" for p in misplaced(score_loads(tile))]
        shared = [f"sS, read by ldmatrix: {_given(score_loads(tile))}."]
    else:
        shared = [f"sS, read in pairs: {wavefronts(pairs(tile, size), 2 * size)}."]
    values = named.first_stage(named.by_columns(ITEM_SIZE[c.dtypes[1]], c.depth, TILE_N, 1))
    if wgmma:
        rows = operand_rows(values, ITEM_SIZE[c.dtypes[1]], (c.depth, TILE_N), across=True)
        shared.append(f"sV, read by the tensor cores: {wavefronts(rows, ALIGNMENT, 'a row of 8')}.")
    else:
        loads = [*value_loads(values, c.depth)]
        problems += [f"V: {p}" for p in misplaced(loads, transposed=True)]
        shared.append(f"sV, read by ldmatrix: {_given(loads)}.")
    if size == 2 and not c.lines:
        shared.append(f"sS without its swizzle: {_given(score_loads(tile.inner))}.")
    traffic = () if c.split else (stores_of(plan),)
    coverage = (
        f"every score of a block of {BLOCK_ROWS} rows has one thread and every sum one register; "
        f"{c.loads} load{'s' * wgmma} {c.score_stage_bytes + c.value_stage_bytes:,} bytes a step"
        if not problems
        else "see the problems"
    )
    return Report(plan, tuple(problems), f"Coverage: {coverage}.", traffic, tuple(shared))


def _backward(plan: MatmulBackwardPlan) -> Report:
    c = plan.kernel
    item, half = (ITEM_SIZE[d] for d in c.dtypes[:2])
    problems = [*_uncovered("dP^T", c.rows), *_uncovered("dV", c.share_depth), *_fits(c)]
    if c.slabs * SLAB != c.columns or c.share_depth * c.shares != c.depth:
        problems.append(f"warpgroups do not share {c.columns} columns of S and {c.depth} of V")
    if any(n * half % ALIGNMENT for n in plan.strides["grad"]):
        problems.append(f"dO: TMA cannot step by {plan.strides['grad']} elements")
    shared = []
    if c.lines:
        shared.append(f"sS, element by element: {wavefronts(line_elements(plan), item)}.")
    else:
        tile = named.first_stage(named.by_rows(item, c.rows, c.columns, 1))
        loads = [*score_loads(tile, transposed=True)]
        problems += [f"S: {p}" for p in misplaced(loads, transposed=True)]
        shared.append(f"sS, read by ldmatrix and written by stmatrix: {_given(loads)}.")
        if any(n * item % ALIGNMENT for name in ("scores", "dscores") for n in plan.strides[name]):
            problems.append(f"S: TMA cannot step by {plan.strides['scores']} elements")
    grad = named.first_stage(named.by_rows(half, c.rows, c.depth, 1))
    rows = operand_rows(grad, half, (c.rows, c.depth), across=False)
    told = wavefronts(rows, ALIGNMENT, "a row of 8")
    shared.append(f"sO, read by the tensor cores for both products: {told}.")
    each = f" in each of {c.shares} warpgroups" * (c.shares > 1)
    coverage = f"every score has one thread{each}, every sum of dV one register"
    if problems:
        coverage = "see the problems"
    return Report(plan, tuple(problems), f"Coverage: {coverage}.", tuple(values_of(plan)), tuple(shared))


def _uncovered(name: str, columns: int) -> list[str]:
    """What is wrong with a warpgroup's fragment of so many columns."""
    return uncovered(name, named.fragment(columns), (BLOCK_ROWS, columns))


def _fits(c) -> Iterator[str]:
    room = ARCHITECTURES[c.architecture].shared_memory - RESERVED
    if c.shared_memory > room:
        yield f"{c.shared_memory} bytes of shared memory, and there is room for {room}"


def score_loads(tile: Memory, transposed: bool = False) -> Iterator[Load]:
    """The ldmatrix of a block of 64 rows (transposed: columns) and 64 columns of 16 bits; tile: (row, column) of S ->
    element."""
    source, fragment = named.matrices(TILE_N, transposed=transposed), named.fragment(TILE_N)

    def byte(index: int) -> int:
        column, row = divmod(index, BLOCK_ROWS)
        return 2 * tile((column, row) if transposed else (row, column))

    for first in range(0, TILE_N // 2, MATRIX):
        for threads in (range(t, t + WARP) for t in range(0, WARPGROUP, WARP)):
            yield (
                [byte(source(t, first)) for t in threads],
                [[byte(fragment(t, first + v)) for v in range(MATRIX)] for t in threads],
            )


def value_loads(tile: Memory, depth: int) -> Iterator[Load]:
    """The ldmatrix of a step's V for a warp's mma.sync; tile: (column, row) -> element."""
    source, fragment = named.value_matrices(), named.values_fragment()
    for k in range(0, TILE_N, 16):
        for n in range(0, depth, 16):
            byte = [2 * tile((n + i % 16, k + i // 16)) for i in range(256)]
            yield (
                [byte[source(lane, 0)] for lane in range(WARP)],
                [[byte[fragment(lane, v)] for v in range(MATRIX)] for lane in range(WARP)],
            )


def misplaced(loads: Iterable[Load], transposed: bool = False) -> Iterator[str]:
    """Which element an ldmatrix does not leave where the operand wants it: the first.

    By the PTX manual: element (i, e) of the j-th matrix goes to lane 4 i + e / 2, or transposed to lane 4 e + i / 2,
    there to the register j.
    """
    for n, (given, wanted) in enumerate(loads):
        for lane, address in enumerate(given):
            j, i = divmod(lane, MATRIX)
            for e in range(MATRIX):
                row, half = (e, i) if transposed else (i, e)
                thread, value = 4 * row + half // 2, 2 * j + half % 2
                if wanted[thread][value] != address + 2 * e:
                    found, wants = address + 2 * e, wanted[thread][value]
                    yield f"ldmatrix {n}, lane {thread}, value {value}: byte {found}, wanted is {wants}"
                    return


def _given(loads: Iterable[Load]) -> str:
    return wavefronts((given for given, _ in loads), ALIGNMENT)


def pairs(tile: Memory, item: int) -> Iterator[list[int]]:
    """The bytes at which the lanes of a warp load the pairs of their fragment."""
    fragment = named.fragment(TILE_N)
    for value in range(0, TILE_N // 2, 2):
        for warp in range(4):
            index = [fragment(warp * WARP + lane, value) for lane in range(WARP)]
            yield [item * tile((i % BLOCK_ROWS, i // BLOCK_ROWS)) for i in index]


def operand_rows(tile: Memory, item: int, size: tuple[int, int], across: bool) -> Iterator[list[int]]:
    """The bytes of the eight rows of 16 bytes of each matrix that the tensor cores read at once.

    size: of the tile; across: its first mode is the one whose neighbours lie side by side.
    """
    along = ALIGNMENT // item
    steps = (along, MATRIX) if across else (MATRIX, along)
    for a in range(0, size[0], steps[0]):
        for b in range(0, size[1], steps[1]):
            rows = ((a, b + i) if across else (a + i, b) for i in range(MATRIX))
            yield [item * tile(at) for at in rows]


def line_elements(plan: MatmulBackwardPlan) -> Iterator[list[int]]:
    """The bytes at which the lanes of the first warp find their elements of lines, which begin as in memory."""
    c = plan.kernel
    item, fragment = ITEM_SIZE[c.dtypes[0]], named.fragment(c.rows)
    step = plan.strides["scores"][0] * item
    for value in range(c.rows // 2):
        places = [divmod(fragment(lane, value), BLOCK_ROWS) for lane in range(WARP)]
        yield [row * c.pitch * item + row * step % ALIGNMENT + column * item for row, column in places]


def stores_of(plan: MatmulPlan) -> Traffic:
    """The stores of the first block of 64 rows of the result."""
    c = plan.kernel
    item = ITEM_SIZE[c.dtypes[2]]
    tv = named.stored() if c.vector == 8 else named.fragment(32)

    def requests() -> Iterator[list[int | None]]:
        for first in range(0, min(plan.depth, c.depth), 32):
            for value in range(0, 16, c.vector):
                yield from _of_matrix(tv, value, first, (plan.rows, plan.depth), plan.depth, item)

    return Traffic.of("out", c.vector * item, requests())


def values_of(plan: MatmulBackwardPlan) -> Iterator[Traffic]:
    """What a warpgroup loads of V and stores of dV for its first slab: pairs, as the fragment has them."""
    c = plan.kernel
    tv, size = named.fragment(c.share_depth), (plan.columns, plan.depth)
    for name, key, dtype in (("V", "values", c.dtypes[1]), ("dV", "dvalues", c.dtypes[2])):
        item, pitch = ITEM_SIZE[dtype], plan.strides[key][0]
        every = (_of_matrix(tv, v, 0, size, pitch, item) for v in range(0, c.share_depth // 2, 2))
        yield Traffic.of(name, 2 * item, (lanes for requests in every for lanes in requests))


def _of_matrix(
    tv: Layout, value: int, first: int, size: tuple[int, int], pitch: int, item: int
) -> Iterator[list[int | None]]:
    """The requests of a warpgroup for a value of its fragment, in a matrix whose rows are `pitch` apart and at whose
    column `first` the fragment begins: none for what lies past the matrix."""
    places = [divmod(tv(thread, value), BLOCK_ROWS) for thread in range(WARPGROUP)]
    inside = [
        row * pitch + first + column if row < size[0] and first + column < size[1] else None
        for column, row in places
    ]
    return requests_of(inside, item)
