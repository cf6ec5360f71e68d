"""Layouts of coordinates as grids: which element of a tensor each place of a partition stands for."""

from __future__ import annotations

from .. import ints
from ..algebra import check_enumerable
from ..coordinates import CoordinateValue
from ..style import thread_paint
from .grid import Grid, arrange, cell_size, draw, starts
from .plain import axis_label, matrix_modes
from .scene import Facts, Figure, Swatch, finish


def coordinate_grid(value: CoordinateValue, *, title: str | None = None) -> Figure:
    """The coordinates of ``value``: rows and columns are its first mode and all others.

    Raises ``ValueError`` for more than ``MOST_COORDINATES`` places.
    """
    check_enumerable(value, value.size)
    row_mode, column_mode, rest = matrix_modes(value)
    rows, columns = ints.product(row_mode), ints.product((column_mode, *rest))
    whole = (column_mode, *rest) if rest else column_mode
    rank = len(ints.as_tuple(value.shape))

    def at(r: int, c: int) -> tuple[int, ...]:
        if rank == 1:
            return value(c)
        further = ints.index_to_coordinate(c, whole)
        return value((r, *further) if rest else (r, further))

    def cell(r: int, c: int):
        found = at(r, c)
        facts = Facts(coordinate=ints.show(found), note=f"place ({r}, {c})")
        return thread_paint(found[-1]), (ints.show(found),), facts

    width, _ = cell_size([(ints.show(at(rows - 1, columns - 1)),)])
    grid = Grid(
        rows,
        columns,
        cell,
        (max(width, 40), 28),
        row_label=lambda r: "  ".join(axis_label(row_mode, r)),
        column_label=lambda c: axis_label(whole, c),
        thick_rows=starts(list(ints.leaves(row_mode))),
        thick_columns=starts(list(ints.leaves(whole))),
    )
    return finish(
        draw(grid, *arrange(grid)),
        title or f"Coordinates {value}",
        f"{value} · {value.size:,} places, each of which stands for a coordinate of {len(value.axes)} axes",
        f"Grid of the coordinates of {value}: {rows} rows by {columns} columns.",
        [Swatch("t3", "(r,c)", "a coordinate; colour = its last axis mod 8")],
    )
