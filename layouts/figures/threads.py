"""Who owns which element: thread-value layouts, tiled copies and the fragments of an MMA atom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from .. import ints
from ..access import banks_of, owners
from ..algebra import AnyLayout
from ..style import thread_paint
from .grid import (
    MAX_WIDTH,
    Grid,
    arrange,
    beside,
    boundaries,
    cell_size,
    draw,
    headed,
    multiplied,
    stacked,
    windows,
)
from .scene import Canvas, Facts, Figure, Swatch, finish, ranges

Owners = tuple[tuple[int, int], ...]
Memory = Callable[[tuple[int, int]], int]  # (row, column) -> offset; a layout is one
MAX_FOLD = 64


@dataclass(frozen=True)
class Tile:
    """The owners of a tile's elements, and how many neighbours of a row are one cell (``fold``).

    Neighbours fold where the same threads own them with consecutive values: one vector of one thread.
    """

    tv: AnyLayout
    rows: int
    columns: int
    owners: list[Owners]
    fold: int

    def at(self, row: int, column: int) -> Owners:
        return self.owners[row + column * self.rows]

    @property
    def threads(self) -> int:
        return ints.product(ints.as_tuple(self.tv.shape)[0])

    @property
    def values(self) -> int:
        return self.tv.size // self.threads


def tile_of(tv: AnyLayout, tiler: Sequence[int], memory: Memory | None = None) -> Tile:
    """The tile that ``tv`` fills; ``ValueError`` naming the first element without an owner.

    Neighbours fold only where ``memory``, if given, has them side by side too.
    """
    rows, columns = (1, *tiler) if len(tiler) == 1 else tiler
    found = owners(tv, (rows, columns))
    for i, owner in enumerate(found):
        if not owner:
            missing = sum(1 for o in found if not o)
            raise ValueError(
                f"{tv} does not fill the {rows} x {columns} tile: {missing} of its {rows * columns} elements "
                f"have no thread, first (row {i % rows}, column {i // rows})"
            )
    return Tile(tv, rows, columns, found, _fold(found, rows, columns, memory))


def _fold(found: list[Owners], rows: int, columns: int, memory: Memory | None) -> int:
    """How many neighbouring columns are one cell: a number that divides the columns, and each that does not continue
    the vectors of those before it."""
    threads, values = ([tuple([owner[i] for owner in owners]) for owners in found] for i in (0, 1))
    following = {few: tuple([v + 1 for v in few]) for few in set(values)}

    @cache
    def places(c: int) -> list[int]:
        return [memory((r, c)) for r in range(rows)]

    def continues(c: int) -> bool:
        before, here = slice((c - 1) * rows, c * rows), slice(c * rows, (c + 1) * rows)
        if threads[here] != threads[before] or values[here] != [following[few] for few in values[before]]:
            return False
        return memory is None or places(c) == [place + 1 for place in places(c - 1)]

    fold = columns
    for c in range(1, columns):
        if c % fold and not continues(c):
            fold = math.gcd(fold, c)
    return max(n for n in range(1, min(fold, MAX_FOLD) + 1) if fold % n == 0)


def owner_label(threads: Sequence[int]) -> str:
    """``T5``, ``T0,1``, ``T0..31`` for a run, ``T0..96/32`` for a step of 32, else the first with the
    count."""
    few = sorted(set(threads))
    if len(few) <= 2:
        return "T" + ",".join(map(str, few))
    steps = {b - a for a, b in pairwise(few)}
    if len(steps) == 1:
        step = steps.pop()
        return f"T{few[0]}..{few[-1]}" + (f"/{step}" if step > 1 else "")
    return f"T{few[0]},{few[1]}+{len(few) - 2}"


def value_label(first: int, fold: int) -> str:
    """``V3`` or ``V0..7``."""
    return f"V{first}" if fold == 1 else f"V{first}..{first + fold - 1}"


def tile_grid(
    tile: Tile,
    *,
    space: str = "",
    memory: Memory | None = None,
    element_bytes: int = 0,
    shared: bool = False,
    least: float = 40,
) -> Grid:
    """The tile as a grid of one cell per vector, painted by its first thread."""
    ints.at_least(0, element_bytes=element_bytes)
    fold = tile.fold

    def label(owner: Owners, *place: str) -> tuple[str, ...]:
        values = sorted({v for _, v in owner})
        first = value_label(values[0], fold) + ("" if len(values) == 1 else f"+{len(values) - 1}")
        return owner_label([t for t, _ in owner]), first, *place

    def cell(r: int, c: int):
        owner = tile.at(r, c * fold)
        threads = tuple(sorted({t for t, _ in owner}))
        span = str(c * fold) if fold == 1 else f"{c * fold}..{c * fold + fold - 1}"
        place = {}
        if memory is not None:
            start = memory((r, c * fold))
            place = {"start": start, "stop": start + fold}
            if element_bytes:
                place["byte"] = start * element_bytes
            if element_bytes and shared:
                place["bank"] = banks_of(start * element_bytes, fold * element_bytes)
        facts = Facts(
            threads=threads,
            value=ranges([v + i for _, v in owner for i in range(fold)]),
            coordinate=f"({r}, {span})",
            space=space,
            **place,
        )
        banks = (f"b{facts.bank}",) if facts.bank else ()
        return thread_paint(threads[0]), label(owner, *banks), facts

    banks = ("b28..31",) if shared and element_bytes and memory is not None else ()
    labels = {label(tile.at(r, c), *banks) for r in range(tile.rows) for c in range(0, tile.columns, fold)}
    size = cell_size(sorted(labels), least)
    row_owner = [tuple(t // 32 for t, _ in tile.at(r, 0)) for r in range(tile.rows)]
    column_owner = [tuple(t // 32 for t, _ in tile.at(0, c * fold)) for c in range(tile.columns // fold)]
    return Grid(
        tile.rows,
        tile.columns // fold,
        cell,
        size,
        column_label=lambda c: (str(c * fold),),
        thick_rows=boundaries(row_owner),
        thick_columns=boundaries(column_owner),
        unit=fold,
    )


Points = dict[tuple[int, int], int]


def _factors(tile: Tile) -> tuple[Points, Points] | None:
    """(thread grid, value grid), by place in the tile, if the tile is one placed over the other, else None.

    The thread grid holds the first thread of each place of value 0, the value grid the values of thread 0.
    """
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for i, owner in enumerate(tile.owners):
        for pair in owner:
            places[pair] = (i % tile.rows, i // tile.rows)
    threads = {places[t, 0]: t for t in reversed(range(tile.threads))}
    values = {places[0, v]: v for v in reversed(range(tile.values))}
    if len(threads) * len(values) != tile.rows * tile.columns or not (_full(threads) and _full(values)):
        return None
    return threads, values


def _full(points: Points) -> bool:
    """Whether ``points`` are all crossings of the rows and columns that occur."""
    return len({r for r, _ in points}) * len({c for _, c in points}) == len(points)


def _number_grid(points: Points, letter: str, name: str) -> Canvas:
    """A small grid of threads or values, its axes naming the places in the tile."""
    rows, columns = sorted({r for r, _ in points}), sorted({c for _, c in points})
    size = (cell_size([(f"{letter}{max(points.values())}",), (f"{columns[-1]}",)], 30)[0], 20)

    def cell(r: int, c: int):
        number = points[rows[r], columns[c]]
        threads = (number,) if letter == "T" else ()
        value = str(number) if letter == "V" else ""
        facts = Facts(threads=threads, value=value)
        return thread_paint(number) if letter == "T" else "plain", (f"{letter}{number}",), facts

    grid = Grid(
        len(rows),
        len(columns),
        cell,
        size,
        row_label=lambda r: str(rows[r]),
        column_label=lambda c: (str(columns[c]),),
        thick_columns=frozenset(i + 1 for i, (a, b) in enumerate(pairwise(columns)) if b - a > columns[1]),
    )
    across = windows(grid.columns, max(6, int(480 // size[0])))
    return headed(f"{name} {len(rows)} \u00d7 {len(columns)}", draw(grid, windows(grid.rows, 8), [across]))


def _equation(tile: Tile) -> Canvas | None:
    factors = _factors(tile)
    if factors is None:
        return None
    shared = tile.threads // len(factors[0])
    threads = _number_grid(
        factors[0], "T", "thread grid" if shared == 1 else f"first of {shared} owners, grid"
    )
    values = _number_grid(factors[1], "V", "value grid")
    result = Canvas()
    result.words(0, 12, f"tile {tile.rows} \u00d7 {tile.columns}", "head")
    result.words(0, 30, "drawn below", "lead")
    return beside([threads, values, result], 44, ("∘", "="))


def _lead(tile: Tile, element_bytes: int) -> str:
    cell = "one element"
    if tile.fold > 1:
        cell = f"{tile.fold} neighbouring elements of one thread"
        if element_bytes:
            cell += f" ({tile.fold * element_bytes} bytes)"
    return (
        f"{tile.tv} · {tile.threads:,} threads \u00d7 {tile.values:,} values over {tile.rows:,} \u00d7 "
        f"{tile.columns:,} "
        f"elements · one cell = {cell}"
    )


def _swatches(tile: Tile, shared: bool = False) -> list[Swatch]:
    entries = [
        Swatch("t0", "T0", "thread; colour = thread mod 8"),
        Swatch("plain", value_label(0, tile.fold), "value: which of the thread's registers, in elements"),
    ]
    several = {owner_label([t for t, _ in o]) for o in tile.owners if len({t for t, _ in o}) > 2}
    if several:
        sample = min(several, key=lambda s: (len(s), s))
        entries.append(Swatch("t0", sample, "all threads that own the element (first..last/step)"))
    if tile.threads > 32:
        entries.append(Swatch("plain", "┃", "thick line: another warp of 32 threads"))
    if shared:
        entries.append(Swatch("plain", "b0..3", "the banks of shared memory that it lies in, of 32"))
    return entries


def thread_value(
    tv: AnyLayout,
    tiler: Sequence[int],
    *,
    title: str | None = None,
    space: str = "",
    memory: Memory | None = None,
    element_bytes: int = 0,
    shared: bool = False,
    keep: Sequence[int] = (),
    keep_rows: Sequence[int] = (),
    step: int = 0,
    fold: bool = True,
) -> Figure:
    """A thread-value layout over its tile, and above it the tile as thread grid over value grid.

    ``tv`` maps (thread, value) to the column-major index in a tile of ``tiler`` (rows, columns). ``memory``
    maps (row, column) to an offset in elements of ``element_bytes`` in the tensor ``space``, for the cells'
    facts; ``shared`` says that this is shared memory, whose banks are named too. Where columns are elided,
    those around each of ``keep`` are drawn, and rows around ``keep_rows``; each band is a ``step`` of so
    many columns if given; without ``fold`` there is but one band. Raises ``ValueError`` where ``tv``
    leaves a hole in the tile or points past it.
    """
    tile = tile_of(tv, tiler, memory)
    grid = tile_grid(tile, space=space, memory=memory, element_bytes=element_bytes, shared=shared)
    parts = [p for p in [_equation(tile)] if p is not None]
    kept = [column // tile.fold for column in keep]
    lines = arrange(grid, keep=kept, fold=fold, period=step // tile.fold, keep_rows=keep_rows)
    parts.append(headed(f"tile {tile.rows} \u00d7 {tile.columns}", draw(grid, *lines)))
    return finish(
        stacked(parts, 26),
        title or "Thread-value layout",
        _lead(tile, element_bytes),
        f"Thread-value layout {tv} over a tile of {tile.rows} by {tile.columns} elements: each cell names "
        "the "
        f"thread and the value that own it.",
        _swatches(tile, shared and bool(element_bytes) and memory is not None),
    )


def tiled_copy(
    source: AnyLayout,
    destination: AnyLayout,
    tiler: Sequence[int],
    *,
    title: str | None = None,
    names: tuple[str, str] = ("source", "destination"),
    memories: tuple[Memory | None, Memory | None] = (None, None),
    element_bytes: int = 0,
    rows: Sequence[range] | None = None,
) -> Figure:
    """A tiled copy: what each thread reads, and beside it what it writes, in the same colours.

    ``source`` and ``destination`` are thread-value layouts over the same tile; ``memories`` are as
    in ``thread_value``; ``rows`` says which rows are drawn. They stand side by side where both fit, else below
    each other.
    """
    parts, tiles = [], []
    for tv, name, memory in zip((source, destination), names, memories, strict=True):
        tile = tile_of(tv, tiler, memory)
        grid = tile_grid(tile, space=name, memory=memory, element_bytes=element_bytes)
        half = (MAX_WIDTH - 120) / 2
        narrow = tile.columns / tile.fold * grid.size[0] <= half
        tiles.append(tile)
        found, bands = arrange(grid)
        parts.append((headed(f"{name}: {tv}", draw(grid, rows or found, bands)), narrow))
    canvases = [p for p, _ in parts]
    body = beside(canvases, 40) if all(n for _, n in parts) else stacked(canvases)
    same = (
        "the same threads read and write each element"
        if _same_owners(*tiles)
        else ("some elements change hands between threads")
    )
    return finish(
        body,
        title or "Tiled copy",
        f"{tiles[0].threads:,} threads \u00d7 {tiles[0].values:,} values; {same}",
        f"Tiled copy over {tiler}: source {source}, destination {destination}.",
        _swatches(tiles[0]),
    )


def _same_owners(a: Tile, b: Tile) -> bool:
    return all({t for t, _ in x} == {t for t, _ in y} for x, y in zip(a.owners, b.owners, strict=True))


def mma_fragments(
    shape_mnk: tuple[int, int, int],
    a: AnyLayout,
    b: AnyLayout,
    c: AnyLayout,
    *,
    title: str | None = None,
) -> Figure:
    """The A, B and C fragments of an MMA atom: B above C, A left of C, as the product is written.

    ``a``, ``b``, ``c`` are thread-value layouts as CuTe gives them, over (M, K), (N, K) and (M, N). B is
    drawn as K by N. An operand that every thread shares is read from shared memory and drawn in one colour.
    """
    m, n, k = shape_mnk
    canvases = {}
    for name, tv, tiler in (("A", a, (m, k)), ("B", b, (n, k)), ("C", c, (m, n))):
        tile = tile_of(tv, tiler)
        if max(n, k) <= 32:  # unfolded, so that the columns of B stand over those of C
            tile = replace(tile, fold=1)
        grid = tile_grid(_turned(tile) if name == "B" else tile, space=name, least=44)
        names = {"A": ("m", "k"), "B": ("k", "n"), "C": ("m", "n")}[name]
        grid = replace(grid, row_name=names[0], column_name=names[1])
        sizes = {"A": f"{m} \u00d7 {k}", "B": f"{k} \u00d7 {n}", "C": f"{m} \u00d7 {n}"}[name]
        drawn = draw(grid, *arrange(grid, 720, fold=False))
        shared = tile.threads > 1 and all(len(o) == tile.threads for o in tile.owners)
        where = ", shared memory: every thread reads it" if shared else ""
        canvases[name] = headed(f"{name}  {sizes}{where}", drawn)
    told = [f"{name} {tv}" for name, tv in (("A", a), ("B", b), ("C", c))]
    return finish(
        multiplied("C = A · B + C", canvases["A"], canvases["B"], canvases["C"], told),
        title or f"MMA atom {m} \u00d7 {n} \u00d7 {k}",
        f"Fragments of one {m} \u00d7 {n} \u00d7 {k} (M \u00d7 N \u00d7 K) matrix product: which thread "
        "holds which element.",
        f"Fragments of an MMA atom {m}x{n}x{k}: A {a}, B {b}, C {c}.",
        [
            Swatch("t0", "T0", "thread; colour = thread mod 8"),
            Swatch("plain", "V0", "value in its registers"),
        ],
    )


def _turned(tile: Tile) -> Tile:
    """The tile transposed: rows become columns, one element per cell."""
    flipped = [tile.owners[r + c * tile.rows] for r in range(tile.rows) for c in range(tile.columns)]
    return Tile(tile.tv, tile.columns, tile.rows, flipped, 1)
