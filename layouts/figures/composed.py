"""A composition with its operands: two layouts as grids, and beside them what they come to."""

from __future__ import annotations

from .. import ints
from ..algebra import Layout
from ..operations import composition
from ..style import thread_paint
from .grid import Grid, arrange, beside, cell_size, draw, headed, starts
from .plain import axis_label, matrix_modes, offset_at
from .scene import Canvas, Facts, Figure, Swatch, finish

PANEL = 440  # px of each of three panels side by side


def composed(outer: Layout, inner: Layout, *, title: str | None = None) -> Figure:
    """``outer`` o ``inner`` = result, as three grids of two modes each.

    A coordinate goes through ``inner`` to a number, which ``outer`` takes as its coordinate: a cell of the inner
    layout has the colour of the cell of the outer one that it leads to, and so has the cell of the result at its
    own place; what no coordinate leads to has none. Raises ``ValueError`` for a layout of more than two modes, and
    where the two do not compose.
    """
    for layout in (outer, inner):
        if matrix_modes(layout)[2]:
            raise ValueError(f"a composition is drawn of two modes, got the shape {ints.show(layout.shape)}")
    result = composition(outer, inner)
    reached = {inner(i) for i in range(inner.size)}

    def leads_to(r: int, c: int, note: str) -> Facts:
        """Of a coordinate's cells, in the inner layout and in the result: both are linked to the outer one's."""
        offset = offset_at(result, r, c)
        return Facts(coordinate=ints.show((r, c)), space="A", start=offset, stop=offset + 1, note=note)

    def of_outer(r: int, c: int):
        rows = ints.product(matrix_modes(outer)[0])
        index, offset = r + rows * c, offset_at(outer, r, c)
        note = f"A({index}) = {offset}"
        return index, (str(offset), f"A({index})"), Facts(space="A", start=offset, stop=offset + 1, note=note)

    def of_inner(r: int, c: int):
        index = offset_at(inner, r, c)
        note = f"B({r}, {c}) = {index}, a coordinate of A"
        return index, (str(index), f"B({r},{c})"), leads_to(r, c, note)

    def of_result(r: int, c: int):
        index, offset = offset_at(inner, r, c), offset_at(result, r, c)
        note = f"A(B({r}, {c})) = A({index}) = {offset}"
        return index, (str(offset), f"A({index})"), leads_to(r, c, note)

    def panel(name: str, layout: Layout, cell) -> Canvas:
        row_mode, column_mode, _ = matrix_modes(layout)
        rows, columns = ints.product(row_mode), ints.product(column_mode)
        size = cell_size(
            [(str(layout.cosize - 1), f"B({rows - 1},{columns - 1})"), ("0", f"A({outer.size - 1})")]
        )

        def painted(r: int, c: int):
            index, lines, facts = cell(r, c)
            return thread_paint(index) if index in reached else "plain", lines, facts

        grid = Grid(
            rows,
            columns,
            painted,
            size,
            row_label=lambda r: "  ".join(axis_label(row_mode, r)),
            column_label=lambda c: axis_label(column_mode, c),
            thick_rows=starts(list(ints.leaves(row_mode))),
            thick_columns=starts(list(ints.leaves(column_mode))),
        )
        return headed(f"{name}: {layout}", draw(grid, *arrange(grid, PANEL)))

    body = beside(
        [panel("A", outer, of_outer), panel("B", inner, of_inner), panel("A \u2218 B", result, of_result)],
        52,
        ["\u2218", "="],
    )
    return finish(
        body,
        title or f"Composition {outer} \u2218 {inner}",
        f"(A \u2218 B)(c) = A(B(c)) \u00b7 the result is {result}",
        f"The layouts {outer} and {inner} beside their composition {result}; colours follow the coordinate of A.",
        [
            Swatch("t1", "A(9)", "colour = coordinate of A mod 8"),
            Swatch("plain", "A(1)", "not in the result"),
        ],
    )
