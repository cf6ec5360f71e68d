"""A grid of cells with its axes: row indices left, column indices on top, folded or elided where it is
large."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..style import text_width
from .scene import Canvas, Facts

MAX_WIDTH = 1480  # px for cells; with labels and margins a figure stays under 1600
MAX_LINES = 32  # grid rows of all bands together before columns are elided
MAX_ROWS = 20  # rows drawn of a grid that has more than MAX_LINES
MAX_BANDS = 8  # bands of one period each before the middle ones are elided
MAX_CELLS = 640  # cells of one grid, so that a file stays well under 300 KB

Runs = list[range]
Drawn = tuple[str, tuple[str, ...], Facts]


@dataclass(frozen=True)
class Grid:
    """What to draw: ``cell(row, column)`` gives paint, lines and facts.

    ``column_label`` gives one or two lines; ``thick_rows`` and ``thick_columns`` are the indices before
    which a thick border runs; ``unit`` says how many tile columns one cell stands for, for the counts of
    what is elided.
    """

    rows: int
    columns: int
    cell: Callable[[int, int], Drawn]
    size: tuple[float, float]
    row_label: Callable[[int], str] = str
    column_label: Callable[[int], Sequence[str]] = lambda c: (str(c),)
    row_name: str = "row"
    column_name: str = "column"
    thick_rows: Collection[int] = ()
    thick_columns: Collection[int] = ()
    unit: int = 1
    edge: int | None = None  # the column before which the data ends

    @property
    def framed(self) -> bool:
        """Whether a thick border runs around the whole."""
        return bool(self.thick_rows or self.thick_columns)


def windows(count: int, limit: int, keep: Sequence[int] = ()) -> Runs:
    """At most about ``limit`` of ``count`` indices: the first, the last, and those around each of
    ``keep``."""
    if count <= limit:
        return [range(count)]
    inner = sorted(k for k in set(keep) if 0 < k < count)
    share = max(2, limit // (len(inner) + 2))
    parts = [range(0, share)]
    parts += [range(max(0, k - share // 2), min(count, k + share // 2)) for k in inner]
    parts.append(range(count - share, count))
    merged = [parts[0]]
    for part in parts[1:]:
        if part.start <= merged[-1].stop + 1:
            merged[-1] = range(merged[-1].start, max(part.stop, merged[-1].stop))
        else:
            merged.append(part)
    return merged


def arrange(
    grid: Grid,
    width: float = MAX_WIDTH,
    keep: Sequence[int] = (),
    fold: bool = True,
    period: int = 0,
    keep_rows: Sequence[int] = (),
) -> tuple[Runs, list[Runs]]:
    """(rows, bands): which rows are drawn, those around `keep_rows` among them, and the columns of each band below
    the other.

    Columns that do not fit one band are folded into more, if all lines stay under ``MAX_LINES``, else into
    bands of ``period`` columns that are elided at the same places, else into one that is elided.
    """
    across = max(4, int(width // grid.size[0]))
    rows = windows(grid.rows, MAX_LINES if grid.rows <= MAX_LINES else MAX_ROWS, keep_rows)
    if grid.columns <= across:
        return rows, [[range(grid.columns)]]
    folded = _band(grid.columns, across)
    lines = grid.rows * -(-grid.columns // folded)
    if fold and lines <= MAX_LINES and grid.rows * grid.columns <= MAX_CELLS:
        starts = range(0, grid.columns, folded)
        return rows, [[range(s, min(s + folded, grid.columns))] for s in starts]

    def elided(columns: int, keep: Sequence[int]) -> Runs:
        places = {k for k in keep if 0 < k < columns}
        return windows(columns, max(4, int((width - 110 * (1 + len(places))) // grid.size[0])), keep)

    if fold and period and grid.columns % period == 0 and grid.rows * grid.columns // period <= MAX_LINES:
        runs = elided(period, [k % period for k in keep])
        steps = windows(grid.columns // period, MAX_BANDS, [k // period for k in keep])
        starts = [s * period for run in steps for s in run]
        return rows, [[range(run.start + s, run.stop + s) for run in runs] for s in starts]
    return rows, [elided(grid.columns, keep)]


def _band(columns: int, across: int) -> int:
    """Columns in a band: the largest number up to ``across`` that divides ``columns``, or a power of
    two."""
    divisors = [d for d in range(across, across // 2, -1) if columns % d == 0]
    return divisors[0] if divisors else 1 << (across.bit_length() - 1)


def draw(grid: Grid, rows: Runs, bands: list[Runs]) -> Canvas:
    """The grid on a canvas of its own, bands below each other and in words what lies between them."""
    canvas = Canvas()
    for i, band in enumerate(bands):
        y = canvas.bottom + 16 if i else 0
        missing = band[0].start - bands[i - 1][-1].stop if i else 0
        if missing:
            canvas.words(40, y + 12, _gap_words(missing, grid.unit), "axis")
            y += 26
        canvas.place(_draw_band(grid, rows, band), 0, y)
    return canvas


def _places(
    runs: Runs, step: float, gap: Callable[[int], float]
) -> tuple[list[tuple[int, float]], list, float]:
    """(index, position) of each drawn index, (position, extent, count) of each gap, and the total
    extent."""
    places, gaps, at = [], [], 0.0
    for i, run in enumerate(runs):
        if i:
            missing = run.start - runs[i - 1].stop
            gaps.append((at, gap(missing), missing))
            at += gap(missing)
        for index in run:
            places.append((index, at))
            at += step
    return places, gaps, at


def _gap_words(missing: int, unit: int) -> str:
    return f"⋯ {missing * unit:,} more ⋯"


def _draw_band(grid: Grid, rows: Runs, band: Runs) -> Canvas:
    canvas = Canvas()
    wide, high = grid.size
    columns, column_gaps, total_w = _places(
        band, wide, lambda n: text_width(_gap_words(n, grid.unit), "axis") + 14
    )
    lines, row_gaps, total_h = _places(rows, high, lambda n: 22)
    heads = {c: tuple(grid.column_label(c)) for c, _ in columns}
    depth = max((len(h) for h in heads.values()), default=0)
    left = max((text_width(grid.row_label(r), "axis") for r, _ in lines), default=0) + 10
    left = max(left, text_width(grid.row_name, "axis") + 8)
    top = 13.0 * depth + 6
    for c, x in columns:
        for level, text in enumerate(heads[c]):
            canvas.words(left + x + wide / 2, 10 + 13 * level, text, "axis", "middle")
    canvas.words(left - 8, 10 + 13 * (depth - 1), grid.row_name, "axis", "end")
    canvas.words(left + total_w + 8, 10 + 13 * (depth - 1), grid.column_name, "axis")
    for r, y in lines:
        canvas.words(left - 6, top + y + high / 2 + 3.5, grid.row_label(r), "axis", "end")
        for c, x in columns:
            paint, words, facts = grid.cell(r, c)
            canvas.cell(left + x, top + y, grid.size, paint, words, facts)
    # Gaps are named beside the first block, and within a row: between two there may be a line.
    first_w, first_row = len(band[0]) * wide, ((len(rows[0]) - 1) // 2 + 0.5) * high
    for x, extent, missing in column_gaps:
        middle = left + x + extent / 2
        canvas.words(middle, top + first_row + 3.5, _gap_words(missing, grid.unit), "axis", "middle")
    for y, extent, missing in row_gaps:
        words, middle = f"⋯ {missing:,} more rows ⋯", top + y + extent / 2 + 3.5
        if (
            grid.framed and len(band) == 1 and text_width(words, "axis") > first_w
        ):  # the frame would cross them
            canvas.words(left + first_w + 8, middle, words, "axis")
        else:
            canvas.words(left + first_w / 2, middle, words, "axis", "middle")
    _borders(canvas, grid, columns, lines, (left, top), (total_w, total_h))
    return canvas


def _borders(canvas: Canvas, grid: Grid, columns, lines, origin, total) -> None:
    """Thick lines before the indices of ``thick_*``, and around the whole where there are any."""
    (left, top), (total_w, total_h) = origin, total
    for c, x in columns:
        if c == grid.edge:
            canvas.stroke([(left + x, top - 4), (left + x, top + total_h + 8)], "edge")
    if not grid.framed:
        return
    inner = columns[0][0], lines[0][0]
    for c, x in columns:
        if c in grid.thick_columns and c != inner[0]:
            canvas.stroke([(left + x, top), (left + x, top + total_h)], "thick")
    for r, y in lines:
        if r in grid.thick_rows and r != inner[1]:
            canvas.stroke([(left, top + y), (left + total_w, top + y)], "thick")
    canvas.stroke(outline(left, top, total), "thick")


def outline(x: float, y: float, size: tuple[float, float]) -> list[tuple[float, float]]:
    """The corners of a rectangle, closed."""
    right, bottom = x + size[0], y + size[1]
    return [(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]


def cell_size(labels: Sequence[Sequence[str]], least: float = 34) -> tuple[float, float]:
    """The smallest even size that holds every one of ``labels`` (lines: the first larger)."""
    wide = max(
        (text_width(t, "cell" if i == 0 else "small") for ls in labels for i, t in enumerate(ls)), default=0
    )
    most = max((len(ls) for ls in labels), default=1)
    return max(least, 2 * round(wide / 2 + 3)), max(24, most * 13.0 + 8)


def beside(parts: Sequence[Canvas], gap: float, signs: Sequence[str] = ()) -> Canvas:
    """Canvases side by side, top-aligned or, with signs between them, centred on one line."""
    canvas, x = Canvas(), 0.0
    height = max(p.bottom for p in parts)
    for i, part in enumerate(parts):
        canvas.place(part, x, (height - part.bottom) / 2 if signs else 0)
        x += part.right + gap
        if i < len(signs):
            canvas.words(x - gap / 2, height / 2 + 9, signs[i], "sign", "middle")
    return canvas


def stacked(parts: Sequence[Canvas], gap: float = 22) -> Canvas:
    """Canvases below each other, left-aligned."""
    canvas = Canvas()
    for i, part in enumerate(parts):
        canvas.place(part, 0, canvas.bottom + gap if i else 0)
    return canvas


def multiplied(
    formula: str, left: Canvas, top: Canvas, result: Canvas, lines: Sequence[str] = (), gap: float = 34
) -> Canvas:
    """``result = left @ top`` as it is written: one above, the other beside the result, ``lines`` in the corner."""
    canvas = Canvas()
    across = max(left.right, *(text_width(line, "axis") for line in lines), 0) + gap
    below = top.bottom + gap - 8
    # Row labels differ in width: the columns of both stand over each other at the right.
    canvas.place(top, across + result.right - top.right, 0)
    canvas.place(left, 0, below)
    canvas.place(result, across, below)
    canvas.words(0, 14, formula, "formula")
    for i, line in enumerate(lines):
        canvas.words(0, 36 + 17 * i, line, "axis")
    return canvas


def headed(words: str, part: Canvas) -> Canvas:
    """``part`` under a heading."""
    canvas = Canvas()
    canvas.words(0, 12, words, "head")
    canvas.place(part, 0, 24)
    return canvas


def starts(sizes: Sequence[int]) -> range:
    """Indices at which a block of ``sizes[0]`` begins, where the mode nests (two sizes or more)."""
    nested = len(sizes) > 1 and sizes[0] > 1
    return range(0, math.prod(sizes), sizes[0]) if nested else range(0)


def boundaries(values: Sequence[object]) -> frozenset[int]:
    """Indices at which a sequence of values changes."""
    return frozenset(i + 1 for i, (a, b) in enumerate(pairwise(values)) if a != b)
