"""Layouts as grids: plain and hierarchical ones, and a swizzled one beside its unswizzled self."""

from __future__ import annotations

from .. import ints
from ..access import BANK_BYTES, BANKS, banks_of
from ..algebra import AnyLayout, ComposedLayout, Layout, Swizzle
from ..style import bank_paint, thread_paint
from .grid import Grid, arrange, beside, cell_size, draw, headed, stacked, starts
from .scene import Canvas, Facts, Figure, Swatch, finish

MAX_PANELS = 8
PANEL = 704  # px of each of two panels side by side
IntTuple = ints.IntTuple


def matrix_modes(layout: AnyLayout) -> tuple[IntTuple, IntTuple, tuple[IntTuple, ...]]:
    """(row mode, column mode, further modes) of a shape; a vector is one row."""
    modes = ints.as_tuple(layout.shape)
    if len(modes) == 1:
        return 1, modes[0], ()
    return modes[0], modes[1], modes[2:]


def offset_at(layout: AnyLayout, row: int, column: int, rest: tuple[IntTuple, ...] = ()) -> int:
    """The offset of (row, column, *rest); a layout of one mode takes the column alone."""
    rank = len(ints.as_tuple(layout.shape))
    if rank == 1:
        return layout(column)
    return layout((row, column, *rest))


def axis_label(mode: IntTuple, index: int) -> tuple[str, ...]:
    """One line with the index, and under it the nested coordinate where the mode nests."""
    if isinstance(mode, tuple) and len(mode) > 1:
        return str(index), ints.show(ints.index_to_coordinate(index, mode))
    return (str(index),)


def layout_grid(layout: AnyLayout, *, title: str | None = None, element_bytes: int = 0) -> Figure:
    """The offsets of ``layout``: rows and columns are its first two modes, further modes are panels.

    Nested modes show both the index and the nested coordinate, with thick borders around each innermost
    block. ``element_bytes`` adds byte addresses; a vector is one row.
    """
    ints.at_least(0, element_bytes=element_bytes)
    row_mode, column_mode, rest = matrix_modes(layout)
    rows, columns = ints.product(row_mode), ints.product(column_mode)
    size = cell_size([(str(layout.cosize - 1),)])
    size = (max(size[0], max(6.2 * len(axis_label(column_mode, columns - 1)[-1]) + 6, 34)), 28)

    def panel(further: tuple[IntTuple, ...]) -> Canvas:
        def cell(r: int, c: int):
            offset = offset_at(layout, r, c, further)
            coordinate = ints.show((r, c, *further) if layout.rank > 1 else c)
            byte = offset * element_bytes if element_bytes else None
            facts = Facts(coordinate=coordinate, start=offset, stop=offset + 1, byte=byte)
            return thread_paint(offset), (str(offset),), facts

        grid = Grid(
            rows,
            columns,
            cell,
            size,
            row_label=lambda r: "  ".join(axis_label(row_mode, r)),
            column_label=lambda c: axis_label(column_mode, c),
            thick_rows=starts(list(ints.leaves(row_mode))),
            thick_columns=starts(list(ints.leaves(column_mode))),
        )
        return draw(grid, *arrange(grid))

    panels, slowest_last = ints.product(rest), tuple(ints.product(m) for m in reversed(rest))
    drawn = [ints.index_to_coordinate(i, slowest_last)[::-1] for i in range(min(panels, MAX_PANELS))]
    parts = [headed(_panel_name(f), panel(f)) if f else panel(f) for f in drawn]
    if panels > MAX_PANELS:
        more = Canvas()
        more.words(0, 12, f"⋯ {panels - MAX_PANELS} more panels like these ⋯", "axis")
        parts.append(more)
    lead = f"{layout} · {layout.size:,} coordinates, offsets 0 to {layout.cosize - 1:,} in elements"
    return finish(
        stacked(parts),
        title or f"Layout {layout}",
        lead,
        f"Grid of the layout {layout}: {rows} rows by {columns} columns; a cell holds its offset in elements.",
        [Swatch("t3", "n", "offset in elements; colour = offset mod 8")],
    )


def _panel_name(further: tuple[IntTuple, ...]) -> str:
    return ", ".join(f"mode {i + 2} = {v}" for i, v in enumerate(further))


def swizzle_banks(
    layout: ComposedLayout,
    element_bytes: int,
    *,
    title: str | None = None,
    access_bytes: int = 16,
    space: str = "smem",
) -> Figure:
    """A swizzled layout of shared memory beside its unswizzled self, coloured by bank.

    Cells are pieces of ``access_bytes`` (or of one element where it is larger) along whichever of the first
    two modes is contiguous. Offsets of ``layout`` are in elements of ``element_bytes``. Each cell names the
    banks (4 bytes each, 32 of them) that the piece lies in, so that a column of equal colours is a
    conflict.
    """
    ints.at_least(1, element_bytes=element_bytes, access_bytes=access_bytes)
    if access_bytes > element_bytes and access_bytes % element_bytes:
        raise ValueError(
            f"access_bytes must be a multiple of element_bytes, got {access_bytes} and {element_bytes}"
        )
    row_mode, column_mode, rest = matrix_modes(layout)
    if rest:
        raise ValueError(f"a swizzle figure draws two modes, got the shape {ints.show(layout.shape)}")
    plain = ComposedLayout(Swizzle(0, 0, 0), layout.offset, layout.inner)
    along_columns = _contiguous_columns(layout.inner)
    fold = max(1, access_bytes // element_bytes)
    rows, columns = ints.product(row_mode), ints.product(column_mode)
    if (columns if along_columns else rows) % fold:
        raise ValueError(f"{layout} has no whole number of runs of {access_bytes} bytes to draw as cells")
    rows, columns = (rows, columns // fold) if along_columns else (rows // fold, columns)
    groups = max(1, BANKS * BANK_BYTES // max(access_bytes, element_bytes))

    last_label = f"{BANKS - access_bytes // BANK_BYTES}..{BANKS - 1}" if access_bytes > BANK_BYTES else "31"
    size = cell_size([(last_label, f"@{layout.cosize * element_bytes}")], 48)
    compact = columns * size[0] > PANEL
    if compact:  # the address only in the cell's facts
        size = (cell_size([(last_label,)], 22)[0], 20.0)

    def panel(which: AnyLayout) -> Canvas:
        def cell(r: int, c: int):
            at = (r, c * fold) if along_columns else (r * fold, c)
            offset = offset_at(which, *at)
            byte = offset * element_bytes
            first, banks = byte // BANK_BYTES % BANKS, banks_of(byte, access_bytes)
            facts = Facts(
                coordinate=ints.show(at),
                space=space,
                start=offset,
                stop=offset + fold,
                byte=byte,
                bank=banks,
            )
            lines = (banks,) if compact else (banks, f"@{byte}")
            return bank_paint(first * groups // BANKS, groups), lines, facts

        step = fold if along_columns else 1
        grid = Grid(rows, columns, cell, size, column_label=lambda c: (str(c * step),), unit=step)
        return draw(grid, *arrange(grid, PANEL, fold=False))

    body = beside(
        [
            headed(f"without swizzle: {layout.inner}", panel(plain)),
            headed(f"with swizzle: {layout}", panel(layout)),
        ],
        46,
    )
    address = "" if compact else ", and under them its byte address"
    lead = (
        f"One cell = {max(access_bytes, element_bytes)} bytes, elements of {element_bytes} bytes: its "
        f"shared-memory banks{address}. {layout.outer} repeats every {layout.outer.period:,} elements."
    )
    return finish(
        body,
        title or f"Swizzle {layout.outer}",
        lead,
        f"The layout {layout} beside {layout.inner}, one cell per {access_bytes} bytes, coloured by bank.",
        [
            Swatch(bank_paint(0, groups), "low", "first banks"),
            Swatch(bank_paint(groups - 1, groups), "high", "last banks"),
            *([] if compact else [Swatch("plain", "@n", "byte address in the buffer")]),
        ],
    )


def _contiguous_columns(layout: Layout) -> bool:
    """Whether the columns of a matrix layout are its contiguous mode."""
    columns = layout[1] if layout.rank > 1 else layout[0]
    return any(stride == 1 and size > 1 for size, stride in columns.flat_modes())
