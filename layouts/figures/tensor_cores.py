"""Tensor cores at work: operands from registers and from shared memory, ldmatrix, and one thread's registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import ints
from ..access import banks_of
from ..algebra import AnyLayout
from ..style import bank_paint, thread_paint
from .grid import Drawn, Grid, Runs, beside, draw, headed, multiplied, windows
from .scene import Canvas, Facts, Figure, Swatch, finish
from .threads import _fold, _turned, tile_grid, tile_of

PIECE = 16  # bytes: a row of an 8 x 8 matrix of 16-bit numbers
GROUPS = 8  # of four banks, which a piece lies in
MATRIX = 8  # rows and columns
WARP_ROWS = 16
PIECE_WIDTH = 52.0  # px at least
EDGE_COLUMNS = 16  # drawn at the left of a wide operand


def warp_rows(rows: int, warp: int) -> Runs:
    """A warp's 16 rows whole, and of every other warp the first row."""
    runs: list[range] = []
    for w in range(rows // WARP_ROWS):
        run = range(w * WARP_ROWS, w * WARP_ROWS + (WARP_ROWS if w == warp else 1))
        if runs and runs[-1].stop == run.start:
            run = range(runs.pop().start, run.stop)
        runs.append(run)
    return runs


def _columns(count: int, unit: int, first: int) -> Runs:
    """The first columns and the last ones, in cells of `unit` columns."""
    if count <= 2 * first:
        return [range(count // unit)]
    return [range(first // unit), range((count - MATRIX) // unit, count // unit)]


def _pieces(
    memory: Callable[[tuple[int, int]], int],
    rows: int,
    columns: int,
    element_bytes: int,
    space: str,
    width: float,
    down: bool = False,
) -> Grid:
    """Shared memory in pieces of 16 bytes, `down` where its neighbours follow each other down the rows drawn."""
    fold = PIECE // element_bytes
    height, wide = (fold, 1) if down else (1, fold)

    def cell(r: int, c: int):
        at = (r * height, c * wide)
        offset = memory(at)
        byte = offset * element_bytes
        banks = banks_of(byte, PIECE)
        facts = Facts(
            coordinate=f"({at[0]}, {at[1]})",
            space=space,
            start=offset,
            stop=offset + fold,
            byte=byte,
            bank=banks,
            note="read by the tensor cores, by address",
        )
        return bank_paint(byte // PIECE % GROUPS, GROUPS), (f"@{byte}", f"b{banks}"), facts

    return Grid(
        rows // height,
        columns // wide,
        cell,
        (width, 34),
        row_label=lambda r: str(r * height),
        column_label=lambda c: (str(c * wide),),
        unit=wide,
    )


def shared_operand_product(
    shape_mnk: tuple[int, int, int],
    a: AnyLayout,
    c: AnyLayout,
    b_memory: AnyLayout,
    *,
    names: tuple[str, str, str] = ("A", "B", "C"),
    spaces: tuple[str, str] = ("sA", "sB"),
    a_shared: bool = False,
    b_down: bool = False,
    element_bytes: int = 2,
    warp: int = 0,
    title: str | None = None,
) -> Figure:
    """An instruction of a warpgroup's tensor cores: B from shared memory above C, A left of C.

    ``a`` is the thread-value layout of A (M, K), or with ``a_shared`` its layout in shared memory; ``c`` that of C
    (M, N). ``b_memory`` maps (n, k), as CuTe has B, to an offset of ``element_bytes`` in shared memory; ``b_down``:
    neighbours there are neighbours of k. The rows of ``warp`` are drawn whole, and the first row of every other warp.
    """
    m, n, k = shape_mnk
    rows, first = warp_rows(m, warp), MATRIX if b_down else EDGE_COLUMNS
    tile = tile_of(c, (m, n))
    grid = replace(tile_grid(tile, space=names[2], least=46), row_name="m", column_name="n")
    # Columns of B stand over those of C.
    column = max(PIECE_WIDTH if b_down else 0, grid.size[0] / tile.fold)
    grid = replace(grid, size=(column * tile.fold, grid.size[1]))
    drawn_c = draw(grid, rows, [_columns(n, tile.fold, first)])
    wide = column * (1 if b_down else PIECE // element_bytes)
    pieces = _pieces(lambda at: b_memory(at[::-1]), k, n, element_bytes, spaces[1], wide, b_down)
    pieces = replace(pieces, row_name="k", column_name="n")
    drawn_b = draw(pieces, [range(pieces.rows)], [_columns(n, pieces.unit, first)])
    if a_shared:
        left = replace(_pieces(a, m, k, element_bytes, spaces[0], PIECE_WIDTH), row_name="m", column_name="k")
    else:
        left = replace(tile_grid(tile_of(a, (m, k)), space=names[0]), row_name="m", column_name="k")
    drawn_a = draw(left, rows, [[range(left.columns)]])
    where = {True: "shared memory", False: "registers"}
    canvases = [
        headed(f"{names[0]}  {m} \u00d7 {k}: {where[a_shared]}", drawn_a),
        headed(f"{names[1]}  {k} \u00d7 {n}: shared memory, {PIECE} bytes a cell", drawn_b),
        headed(f"{names[2]}  {m} \u00d7 {n}: registers", drawn_c),
    ]
    told = [f"{names[0]} {a}", f"{names[1]} {b_memory}", f"{names[2]} {c}"]
    return finish(
        multiplied(f"{names[2]} = {names[0]} \u00b7 {names[1]} + {names[2]}", *canvases, told),
        title or f"wgmma {m} \u00d7 {n} \u00d7 {k}",
        f"One instruction of four warps, {m} \u00d7 {n} \u00d7 {k} (M \u00d7 N \u00d7 K): which thread holds which "
        f"element of what lies in registers, and where the rest lies. Each warp has {WARP_ROWS} rows.",
        f"Operands of a warpgroup's matrix product {m}x{n}x{k}: {'; '.join(told)}.",
        [
            Swatch("t0", "T0", "thread of the warpgroup; colour = thread mod 8"),
            Swatch("plain", "V0..1", "value: which of the thread's registers, in elements"),
            Swatch(bank_paint(0, GROUPS), "@0", "byte in the stage of shared memory, and its banks: low"),
            Swatch(bank_paint(GROUPS - 1, GROUPS), "@112", "and high"),
            Swatch("plain", "\u2503", "thick line: another warp of 32 threads"),
        ],
    )


def matrix_load(
    source: AnyLayout,
    fragment: AnyLayout,
    tiler: tuple[int, int],
    memory: AnyLayout,
    *,
    space: str = "smem",
    warp: int = 0,
    transposed: bool = False,
    title: str | None = None,
) -> Figure:
    """An ldmatrix of four 8 x 8 matrices by one warp: whose address is whose, and who then holds what.

    ``source`` and ``fragment`` are thread-value layouts over a tile of ``tiler``; ``memory`` maps (row, column) of what
    is drawn to an offset in shared memory. ``transposed``: the tile's columns are the rows that are drawn, which lie
    in memory side by side.
    """
    rows = range(warp * WARP_ROWS, (warp + 1) * WARP_ROWS)
    down, across = (range(tiler[1]), rows) if transposed else (rows, range(tiler[1]))
    edges = frozenset(range(0, max(tiler) + 1, MATRIX))

    def bank_below(cell: Callable[[int, int], Drawn]) -> Callable[[int, int], Drawn]:
        def named(r: int, c: int) -> Drawn:
            paint, (thread, _, bank), facts = cell(r, c)
            return paint, (thread, bank), facts

        return named

    def side(tv: AnyLayout, heading: str, **options) -> Canvas:
        tile = tile_of(tv, tiler)
        if transposed:
            tile = _turned(tile)
            tile = replace(tile, fold=_fold(tile.owners, tile.rows, tile.columns, None))
        grid = tile_grid(tile, **options)
        if options:
            grid = replace(grid, cell=bank_below(grid.cell), size=(grid.size[0] + 6, 34))
        grid = replace(
            grid,
            thick_rows=edges,
            thick_columns=frozenset(n // tile.fold for n in edges),
        )
        columns = range(across.start // tile.fold, across.stop // tile.fold)
        return headed(heading, draw(grid, [down], [[columns]]))

    where = (
        "one to a lane of each of the eight quads" if transposed else "in pairs to the four lanes of a quad"
    )
    parts = [
        side(source, "addresses", space=space, memory=memory, element_bytes=2, shared=True),
        side(fragment, "elements, then in registers"),
    ]
    return finish(
        beside(parts, 44),
        title or "ldmatrix",
        f"Warp {warp}: four 8 \u00d7 8 matrices by one instruction. A row of a matrix is {PIECE} bytes side by side in "
        f"shared memory, whose address one lane gives; its eight elements go {where}.",
        f"ldmatrix: addresses {source}, elements {fragment}.",
        [
            Swatch("t0", "T0", "thread; colour = thread mod 8"),
            Swatch("plain", "V0..1", "value: which of the thread's elements"),
            Swatch("plain", "b0..3", "the banks of shared memory that it lies in, of 32"),
            Swatch("plain", "\u2503", "thick line: another matrix"),
        ],
    )


def thread_registers(
    tv: AnyLayout,
    tiler: tuple[int, int],
    thread: int,
    *,
    group: str = "group",
    names: tuple[str, str] = ("row", "column"),
    title: str | None = None,
) -> Figure:
    """One thread's registers of 16-bit elements in their order, 8 elements a line, and what place of the tile each
    holds.

    ``tv`` maps (thread, value) to the column-major index in a tile of ``tiler`` (rows, columns); ``group`` names what a
    line is.
    """
    rows, per, packed = tiler[0], MATRIX, 2
    values = tv.size // ints.product(ints.as_tuple(tv.shape)[0])

    def cell(g: int, i: int):
        value = g * per + i
        index = tv(thread, value)
        place = f"({index % rows}, {index // rows})"
        facts = Facts(
            threads=(thread,),
            value=str(value),
            coordinate=place,
            note=f"register {value // packed}, half {value % packed}",
        )
        return thread_paint(i // 2), (place, f"V{value}"), facts

    grid = Grid(
        values // per,
        per,
        cell,
        (74, 34),
        row_label=lambda g: f"{group} {g}",
        column_label=lambda i: (f"+{i}",),
        row_name="",
        column_name="element",
        thick_columns=frozenset(range(0, per, packed)),
    )
    lines = windows(grid.rows, 16)
    return finish(
        draw(grid, lines, [[range(per)]]),
        title or f"Registers of thread {thread}",
        f"{tv} \u00b7 thread {thread} holds {values} elements of the {tiler[0]} \u00d7 {tiler[1]} tile; "
        f"cells name their ({names[0]}, {names[1]}).",
        f"Registers of thread {thread} of the thread-value layout {tv}, {per} elements a line.",
        [
            Swatch("t0", "(0, 2)", "place in the tile; one colour = one 8 \u00d7 8 matrix of a line"),
            Swatch("plain", "V0", "value: which of the thread's elements"),
            Swatch("plain", "\u2503", "thick line: another register of 32 bits"),
        ],
    )
