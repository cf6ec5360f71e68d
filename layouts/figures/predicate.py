"""What bounds a load: the predicate tensor at the end of a row."""

from __future__ import annotations

from collections.abc import Sequence

from .. import ints
from ..algebra import Layout
from .grid import MAX_WIDTH, Grid, arrange, beside, cell_size, draw, headed, stacked
from .scene import Canvas, Facts, Figure, Swatch, count, finish


class _Vectors:
    """Where the vectors (a, m, k) of each thread lie in the CTA's tile."""

    def __init__(self, predicate: Layout, tv: Layout, tiler: Sequence[int], vector: int):
        if predicate.rank != 3:
            raise ValueError(f"a predicate has three modes (vectors, rows, steps), got {predicate}")
        self.counts = tuple(mode.size for mode in predicate)
        self.rows, self.columns = tiler
        self.vector, self.tv = vector, tv
        a, m, k = self.counts
        self.threads = tv[0].size
        values = tv[1].size
        self.inside = values == vector * a * m * k
        if not self.inside and values != vector * a:
            raise ValueError(
                f"the thread-value layout {tv} gives a thread {values} values; the predicate "
                f"{ints.show(predicate.shape)} counts {a} x {m} x {k} vectors of {vector}"
            )
        self.tile = (self.rows, self.columns) if self.inside else (self.rows * m, self.columns * k)

    def place(self, thread: int, a: int, m: int, k: int) -> tuple[int, int]:
        """(row, column) in the tile of the first element of a thread's vector."""
        first = a + self.counts[0] * (m + self.counts[1] * k) if self.inside else a
        index = self.tv(thread, first * self.vector)
        row, column = index % self.rows, index // self.rows
        return (row, column) if self.inside else (row + m * self.rows, column + k * self.columns)

    def all(self) -> dict[tuple[int, int], tuple[int, int, int, int]]:
        """(row, column of the first element) -> (thread, a, m, k)."""
        a, m, k = (range(n) for n in self.counts)
        return {
            self.place(t, i, j, s): (t, i, j, s) for t in range(self.threads) for i in a for j in m for s in k
        }


def predicate_tensor(
    predicate: Layout,
    tv: Layout,
    tiler: Sequence[int],
    n: int,
    *,
    vector: int,
    column_start: int = 0,
    rows_inside: int | None = None,
    row_bits: bool = False,
    thread: int | None = None,
    element_bytes: int = 0,
    title: str | None = None,
) -> Figure:
    """The predicate tensor of a row of ``n`` elements in a CTA's tile: which vectors are loaded.

    ``predicate`` maps (vector of the thread's block, row, step) to a stored bit, counted as the modes
    (size[0,1], size[1], size[2]) of a partition of shape ((V, M), rows, K); stride 0 over rows means
    that all rows share it. ``tv`` maps (thread, value) into a tile of ``tiler``; rows and steps either
    repeat that tile or are among its values. The tile begins at column ``column_start`` of the row, and only
    its first ``rows_inside`` rows exist (all, if left out), which ``row_bits`` says are bits apart, one a
    row of the thread; without them a stored bit knows both. ``vector`` and ``n`` are in elements. The upper
    part shows one cell per vector at the end of the row, the lower part what the threads on either side of
    it, and ``thread`` if given, store. Raises ``ValueError`` where a vector would straddle the end, and
    where rows share bits, some of them do not exist and no bits apart say so.
    """
    ints.at_least(1, vector=vector)
    ints.at_least(0, n=n, column_start=column_start, element_bytes=element_bytes)
    if (n - column_start) % vector:  # vectors begin where the tile does
        raise ValueError(
            f"n = {n} is no multiple of the vector of {vector} elements from column {column_start} on: one vector "
            "would straddle the end of the row; narrow the vector or split the row (see row_pieces)"
        )
    vectors = _Vectors(predicate, tv, tiler, vector)
    found = vectors.all()
    rows, columns = vectors.tile
    inside = min(max(n - column_start, 0), columns)
    edge = inside // vector
    exist = rows if rows_inside is None else rows_inside
    if exist < rows and not row_bits and any(len(s) > 1 for s in _rows_of_bits(predicate).values()):
        raise ValueError(
            f"{exist} of {rows} rows exist, and rows share bits of {predicate}: without bits of rows they cannot tell"
        )

    def cell(r: int, c: int):
        if (r, c * vector) not in found:
            raise ValueError(f"no thread's vector begins at (row {r}, column {c * vector}) of the tile")
        thread, a, m, k = found[r, c * vector]
        holds = c < edge and r < exist
        skipped = "skipped: past the end of the row" if r < exist else "skipped: past the last row"
        start = column_start + c * vector
        bit = predicate((a, m, k))
        decides = f"r{a + predicate[0].size * m}" if row_bits and c < edge and r >= exist else f"b{bit}"
        facts = Facts(
            threads=(thread,),
            value=f"predicate ({a}, {m}, {k}) = bit {bit}",
            coordinate=f"({r}, {start}..{start + vector - 1})",
            note="loaded" if holds else skipped,
            role="loaded" if holds else "skipped",
        )
        return (
            "true" if holds else "false",
            (f"T{thread}", f"{'true' if holds else 'false'} {decides}"),
            facts,
        )

    own = [] if thread is None else [vectors.place(thread, 0, 0, 0)]
    keep, keep_rows = [edge, *(c // vector for _, c in own)], [exist, *(r for r, _ in own)]
    size = cell_size([(f"T{vectors.threads - 1}", f"false b{predicate.cosize - 1}")], 46)
    grid = Grid(
        rows,
        columns // vector,
        cell,
        size,
        column_label=lambda c: (str(column_start + c * vector),),
        thick_columns=frozenset(range(0, columns // vector, vectors.columns // vector)) - {0},
        unit=vector,
        edge=edge if 0 < edge < columns // vector else None,
    )
    tile = headed(
        f"tile {rows} \u00d7 {columns}, one cell per vector",
        draw(grid, *arrange(grid, keep=keep, fold=False, keep_rows=keep_rows)),
    )
    shown = _boundary_threads(found, edge, columns // vector, vector, exist if exist < rows else 0)
    shown += [] if thread is None or thread in shown else [thread]
    stores = [_store(vectors, predicate, t, n - column_start, exist, row_bits) for t in shown]
    lines: list[list[Canvas]] = [[]]
    for store in stores:
        if lines[-1] and sum(s.right + 60 for s in lines[-1]) + store.right > MAX_WIDTH:
            lines.append([])
        lines[-1].append(store)
    body = stacked([tile, *(beside(line, 60) for line in lines)], 30)
    a, m, k = vectors.counts
    elements = f"{count(a * m * k * vector, 'element')} in {count(a * m * k, 'vector')}"
    swatches = [
        Swatch("true", "true", "inside the row: loaded"),
        Swatch("false", "false", "past the end: skipped"),
        Swatch("plain", "b3", "stored bit of the thread that decides it"),
    ]
    if predicate.cosize < predicate.size:
        swatches.append(Swatch("ghost", "= b3", "stride 0: the same bit again, nothing stored"))
    if row_bits:
        swatches.append(Swatch("plain", "r0", "bit of a row: whether it exists"))
    stored = count(predicate.cosize, "stored bit") + (f" and {a * m} of rows" if row_bits else "")
    bytes_each = f" ({vector * element_bytes} bytes)" if element_bytes else ""
    return finish(
        body,
        title or f"Predicate tensor at N = {n:,}",
        f"predicate {predicate} · row of {n:,} elements, tile at columns {column_start:,} to "
        f"{column_start + columns - 1:,} · one cell = {vector} elements{bytes_each} · "
        f"{stored} a thread decide {elements}",
        f"Predicate tensor {predicate} for a row of {n} elements in a tile of {rows} by {columns}: "
        f"vectors before column {n} are loaded, those after it skipped"
        + ("; rows share their bits." if predicate.cosize < predicate.size else "."),
        swatches,
    )


def _rows_of_bits(predicate: Layout) -> dict[int, set[tuple[int, int]]]:
    """The rows of a thread that each stored bit is about."""
    a, m, k = (range(mode.size) for mode in predicate)
    found: dict[int, set[tuple[int, int]]] = {}
    for row in ((i, j) for i in a for j in m):
        for step in k:
            found.setdefault(predicate((*row, step)), set()).add(row)
    return found


def _boundary_threads(found: dict, edge: int, across: int, vector: int, bottom: int) -> list[int]:
    """The threads of the last vector inside and of the first one outside; else those on either side of
    row ``bottom``, the first that does not exist; thread 0 where there is no end at all."""
    if not 0 < edge < across:
        return list(dict.fromkeys(found[r, 0][0] for r in (bottom - 1, bottom))) if bottom else [0]
    ends = [found[0, c * vector][0] for c in (edge - 1, edge)]
    return list(dict.fromkeys(ends + ([found[bottom, 0][0]] if bottom else [])))


def _store(vectors: _Vectors, predicate: Layout, thread: int, end: int, exist: int, row_bits: bool) -> Canvas:
    """One thread's predicate tensor: stored bits, and ghosts where stride 0 repeats them; then the bits of rows."""
    a, m, k = vectors.counts
    first: dict[int, tuple[int, int]] = {}

    def cell(r: int, step: int):
        place = (r % a, r // a, min(step, k - 1))
        row, column = vectors.place(thread, *place)
        if step == k:
            there = row < exist
            facts = Facts(
                threads=(thread,), value=f"bit of row {r}", note=f"row {row} exists: {there}".lower()
            )
            return "true" if there else "false", (f"r{r}", "true" if there else "false"), facts
        bit = predicate(place)
        holds = column < end and (row_bits or row < exist)
        stored = first.setdefault(bit, (r, step)) == (r, step)
        paint = ("true" if holds else "false") if stored else "ghost"
        facts = Facts(
            threads=(thread,),
            value=f"bit {bit}",
            note=f"predicate ({place[0]}, {place[1]}, {place[2]}), column {column}: {holds}".lower(),
        )
        return paint, (f"b{bit}" if stored else f"= b{bit}", "true" if holds else "false"), facts

    grid = Grid(
        a * m,
        k + row_bits,
        cell,
        (60, 36),
        row_label=lambda r: f"({r % a},{r // a}) row {vectors.place(thread, r % a, r // a, 0)[0]}",
        column_label=lambda s: ("row" if s == k else str(s),),
        row_name="modes 0,1",
        column_name="step",
        thick_columns=frozenset({k} if row_bits else ()),
    )
    bits = count(predicate.cosize, "bit") + (f" and {a * m} of rows" if row_bits else "")
    return headed(f"thread {thread} stores {bits}", draw(grid, *arrange(grid, 640)))
