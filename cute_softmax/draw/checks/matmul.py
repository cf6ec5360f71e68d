"""softmax_matmul's movements checked on a Plan's own numbers: fragments, ldmatrix, the banks of swizzled tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from layouts import Layout, access

from ...plan import WARP
from ...plan import matmul_layouts as named
from ...plan.hardware import ARCHITECTURES
from ...plan.matmul import MatmulPlan
from ...plan.matmul_backward import SLAB, MatmulBackwardPlan
from ...plan.matmul_class import BLOCK_ROWS, LINE_N, RESERVED, TILE_N
from ...plan.problem import ALIGNMENT, ITEM_SIZE
from .report import Report, Traffic

MATRIX = 8  # rows of a matrix that the tensor cores and ldmatrix read at once, 16 bytes each
Memory = Callable[[tuple[int, int]], int]


def check(plan: MatmulPlan | MatmulBackwardPlan) -> Report:
    """Coverage of the CTA's tile and of the columns, what ldmatrix leaves in registers, alignment, sectors of what
    threads load and store themselves, and wavefronts of shared memory."""
    return _forward(plan) if isinstance(plan, MatmulPlan) else _backward(plan)


def _forward(plan: MatmulPlan) -> Report:
    c = plan.kernel
    problems = [*_exact("the accumulators", c.depth), *_fits(c)]
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
        shared = [f"sS, read in words, of which two are shifted into one: {told(words, 2 * size)}."]
    elif size == 2:
        problems += [f"S: {p}" for p in misplaced(tile)]
        shared = [f"sS, read by ldmatrix: {told(matrix_rows(tile), ALIGNMENT)}."]
    else:
        shared = [f"sS, read in pairs: {told(pairs(tile, size), 2 * size)}."]
    values = named.first_stage(named.by_columns(ITEM_SIZE[c.dtypes[1]], c.depth, TILE_N, 1))
    if wgmma:
        rows = operand_rows(values, ITEM_SIZE[c.dtypes[1]], (c.depth, TILE_N), across=True)
        shared.append(f"sV, read by the tensor cores: {told(rows, ALIGNMENT, 'a row of 8')}.")
    else:
        problems += [f"V: {p}" for p in misplaced_values(values, c.depth)]
        shared.append(f"sV, read by ldmatrix: {told(value_rows(values, c.depth), ALIGNMENT)}.")
    if size == 2 and not c.lines:
        shared.append(f"sS without its swizzle: {told(matrix_rows(tile.inner), ALIGNMENT)}.")
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
    problems = [*_exact("dP^T", c.rows), *_exact("dV", c.share_depth), *_fits(c)]
    if c.slabs * SLAB != c.columns or c.share_depth * c.shares != c.depth:
        problems.append(f"warpgroups do not share {c.columns} columns of S and {c.depth} of V")
    if any(n * half % ALIGNMENT for n in plan.strides["grad"]):
        problems.append(f"dO: TMA cannot step by {plan.strides['grad']} elements")
    shared = []
    if c.lines:
        words = list(line_elements(plan))
        shared.append(f"sS, element by element: {told(words, item)}.")
    else:
        tile = named.first_stage(named.by_rows(item, c.rows, c.columns, 1))
        problems += [f"S: {p}" for p in misplaced(tile, transposed=True)]
        rows = matrix_rows(tile, transposed=True)
        shared.append(f"sS, read by ldmatrix and written by stmatrix: {told(rows, ALIGNMENT)}.")
        if any(n * item % ALIGNMENT for name in ("scores", "dscores") for n in plan.strides[name]):
            problems.append(f"S: TMA cannot step by {plan.strides['scores']} elements")
    grad = named.first_stage(named.by_rows(half, c.rows, c.depth, 1))
    rows = operand_rows(grad, half, (c.rows, c.depth), across=False)
    shared.append(f"sO, read by the tensor cores for both products: {told(rows, ALIGNMENT, 'a row of 8')}.")
    told_all = "see the problems" if problems else (
        f"every score has one thread{f' in each of {c.shares} warpgroups' * (c.shares > 1)}, "
        "every sum of dV one register"
    )  # fmt: skip
    return Report(plan, tuple(problems), f"Coverage: {told_all}.", tuple(values_of(plan)), tuple(shared))


def _exact(name: str, columns: int) -> Iterator[str]:
    """What is wrong with a warpgroup's fragment of so many columns."""
    found = access.coverage(named.fragment(columns), (BLOCK_ROWS, columns))
    if not found.exact:
        yield f"{name}: {len(found.missing)} elements have no thread and {len(found.repeated)} have several"


def _fits(c) -> Iterator[str]:
    room = ARCHITECTURES[c.architecture].shared_memory - RESERVED
    if c.shared_memory > room:
        yield f"{c.shared_memory} bytes of shared memory, and there is room for {room}"


def matrix_rows(tile: Memory, transposed: bool = False) -> Iterator[list[int]]:
    """The bytes that the lanes of a warp give to each ldmatrix of a block of 64 rows (transposed: columns) and 64
    columns of 16 bits; tile: (row, column) of S -> element."""
    source = named.matrices(TILE_N, transposed=transposed)
    for k in range(TILE_N // named.INSTRUCTION_K):
        for warp in range(BLOCK_ROWS // named.WARP_ROWS):
            places = [divmod(source(warp * WARP + lane, 8 * k), BLOCK_ROWS) for lane in range(WARP)]
            yield [2 * tile(at if transposed else at[::-1]) for at in places]


def misplaced(tile: Memory, transposed: bool = False) -> Iterator[str]:
    """Which elements an ldmatrix does not leave where the operand wants them.

    By the PTX manual: element (i, e) of the j-th matrix goes to lane 4 i + e / 2, or transposed to lane 4 e + i / 2,
    there to the register j.
    """
    fragment = named.fragment(TILE_N)
    columns = TILE_N // named.INSTRUCTION_K
    requests = list(matrix_rows(tile, transposed))
    for k in range(columns):
        for warp in range(4):
            addresses = requests[k * 4 + warp]
            for lane, address in enumerate(addresses):
                j, i = divmod(lane, MATRIX)
                for e in range(MATRIX):
                    row, half = (e, i) if transposed else (i, e)
                    thread, value = warp * WARP + 4 * row + half // 2, 8 * k + 2 * j + half % 2
                    m, n = fragment(thread, value) % BLOCK_ROWS, fragment(thread, value) // BLOCK_ROWS
                    wanted = tile((n, m) if transposed else (m, n))
                    if wanted * 2 != address + 2 * e:
                        yield f"thread {thread}, value {value}: byte {address + 2 * e}, wanted is {wanted * 2}"
                        return


def value_rows(tile: Memory, depth: int) -> Iterator[list[int]]:
    """The bytes that the lanes of a warp give to each ldmatrix of a step's V; tile: (column, row) -> element."""
    source = named.value_matrices()
    for k in range(0, TILE_N, 16):
        for n in range(0, depth, 16):
            index = [source(lane, 0) for lane in range(WARP)]
            yield [2 * tile((n + i % 16, k + i // 16)) for i in index]


def misplaced_values(tile: Memory, depth: int) -> Iterator[str]:
    """`misplaced` of V as the B operand of mma.sync."""
    fragment = named.values_fragment()
    for request, addresses in enumerate(value_rows(tile, depth)):
        k, n = (16 * i for i in divmod(request, depth // 16))
        for lane, address in enumerate(addresses):
            j, i = divmod(lane, MATRIX)
            for e in range(MATRIX):
                thread, value = 4 * e + i // 2, 2 * j + i % 2
                index = fragment(thread, value)
                wanted = 2 * tile((n + index % 16, k + index // 16))
                if wanted != address + 2 * e:
                    yield f"thread {thread}, value {value}: byte {address + 2 * e}, wanted is {wanted}"
                    return


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
    width = c.vector * ITEM_SIZE[c.dtypes[2]]
    tv = named.stored() if c.vector == 8 else named.fragment(32)
    vectors = 16 // c.vector
    columns = min(plan.depth, c.depth)
    found = []
    for j in range(math.ceil(columns / 32)):
        for v in range(vectors):
            for warp in range(4):
                index = [tv(warp * WARP + lane, v * c.vector) for lane in range(WARP)]
                places = [(i % BLOCK_ROWS, 32 * j + i // BLOCK_ROWS) for i in index]
                lanes = [
                    (row * plan.depth + column) * ITEM_SIZE[c.dtypes[2]]
                    if row < plan.rows and column < plan.depth
                    else None
                    for row, column in places
                ]
                if any(a is not None for a in lanes):
                    found.append(access.global_request(lanes, width))
    return Traffic(
        "out", width, len(found), sum(r.sectors for r in found), sum(r.ideal_sectors for r in found)
    )


def values_of(plan: MatmulBackwardPlan) -> Iterator[Traffic]:
    """What a warpgroup loads of V and stores of dV for its first slab: pairs, as the fragment has them."""
    c = plan.kernel
    tv = named.fragment(c.share_depth)
    for name, key, dtype in (("V", "values", c.dtypes[1]), ("dV", "dvalues", c.dtypes[2])):
        item, stride = ITEM_SIZE[dtype], plan.strides[key][0]
        found = []
        for value in range(0, c.share_depth // 2, 2):
            for warp in range(4):
                places = [divmod(tv(warp * WARP + lane, value), BLOCK_ROWS) for lane in range(WARP)]
                lanes = [
                    (row * stride + column) * item if row < plan.columns and column < plan.depth else None
                    for column, row in places
                ]
                if any(a is not None for a in lanes):
                    found.append(access.global_request(lanes, 2 * item))
        sectors, ideal = sum(r.sectors for r in found), sum(r.ideal_sectors for r in found)
        yield Traffic(name, 2 * item, len(found), sectors, ideal)


def told(requests: Iterable[Sequence[int]], width: int, each: str = "a lane") -> str:
    """What requests cost, in words."""
    found = [access.shared_request(lanes, width) for lanes in requests]
    wavefronts, ideal = sum(r.wavefronts for r in found), sum(r.ideal for r in found)
    a_request = f"{wavefronts / len(found):.4g}"
    return (
        f"{width} bytes {each}, {a_request} wavefront{'' if a_request == '1' else 's'} a request, "
        f"{wavefronts - ideal} bank conflicts"
    )
