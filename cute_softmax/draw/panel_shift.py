"""Lines of columns that begin anywhere: the blocks that are copied, and whose vectors their elements become."""

from __future__ import annotations

from layouts.figures import Facts, Figure
from layouts.figures.grid import Grid, arrange, cell_size, draw
from layouts.figures.scene import Swatch, count, finish
from layouts.style import thread_paint

from ..plan import PanelPlan
from ..plan.problem import ITEM_SIZE
from .common import space

# Lines that are drawn: the first of the panel, if they begin at different places.
LINES = 4


def blocks(plan: PanelPlan) -> Figure:
    """The blocks of the first rows of the first panel, and the groups that their threads have in them."""
    c, name = plan.kernel, space(plan.kernel.facts.inputs[0])
    one = ITEM_SIZE[c.dtypes[0]]
    starts = _starts(plan)
    shifts = [start % c.vector for start in starts]
    there = min(plan.abreast, plan.advance + c.overlap)

    def cell(row: int, column: int):
        group, holder = column - shifts[row], row * c.across + column // c.vector
        coordinate = f"(element {row}, column {group})"
        if column - column % c.vector - shifts[row] >= there:
            return "ghost", ("", ""), Facts(coordinate=coordinate, note="not copied")
        if not 0 <= group < plan.abreast:
            return (
                "ghost",
                (f"T{holder}", ""),
                Facts((holder,), coordinate=coordinate, note="no group of this row"),
            )
        byte = (starts[row] + group) * one
        facts = Facts(
            (holder,), coordinate=coordinate, space=name, byte=byte, note=f"in thread {holder}'s block"
        )
        return thread_paint(holder), (f"T{holder}", f"c{group}"), facts

    columns = c.across * c.vector
    grid = Grid(
        len(starts),
        columns,
        cell,
        cell_size([(f"T{len(starts) * c.across}", f"c{columns}")], 30),
        row_name="element",
        column_name="in memory",
        thick_columns=frozenset(range(0, columns, c.vector)),
    )
    size = c.vector * one
    return _drawn(
        grid,
        columns,
        f"Blocks of {size} bytes in memory, which threads keep",
        "Blocks that threads keep.",
        _lead("row", shifts, size),
        [
            Swatch(thread_paint(1), "T1 c9", "group 9 of the panel, in thread 1's block"),
            Swatch("ghost", "", "not used"),
        ],
    ).noted(
        f"A thread's rows lie {c.down} elements of the groups apart, which are whole blocks: it has the same groups in "
        "all of them. Threads above and below it have others, so states are merged and read again by group.",
        f"All rows of threads have the panel's first {c.columns - c.slots + 1} groups, of which {plan.advance} are its "
        "own; what lies beyond is the next panel's.",
    )


def lines(plan: PanelPlan) -> Figure:
    """Two rows for each of some lines of the first panel: its blocks in memory, and the vectors that begin further
    on."""
    c, name = plan.kernel, space(plan.kernel.facts.inputs[0])
    one = ITEM_SIZE[c.dtypes[0]]
    starts = _starts(plan)
    boundary = c.extra * c.vector
    shifts = [start % boundary for start in starts]

    def cell(row: int, column: int):
        line, vectors = divmod(row, 2)
        group = column - shifts[line]  # of the panel
        coordinate = f"(element {line}, column {group})"
        byte = (starts[line] + group) * one
        holder = group // c.slots if vectors else column // c.vector
        inside = 0 <= group < min(c.lanes * c.slots, plan.abreast)
        if vectors and not inside:
            return "ghost", ("", ""), Facts(coordinate=coordinate, note="no group of this line")
        if vectors:
            facts = Facts(
                (holder,), coordinate=coordinate, space=name, note=f"shifted into thread {holder}'s vector"
            )
            return thread_paint(holder), (f"T{holder}", f"c{group}"), facts
        copied = holder % c.lanes
        what = "copied by" if holder < c.lanes else "behind the line, copied by"
        lies = Facts(
            (copied,), coordinate=coordinate, space=name, byte=byte, note=f"block {what} thread {copied}"
        )
        first = holder * c.vector - shifts[line]
        if first + c.vector <= 0 or first >= min(c.lanes * c.vector, plan.abreast):
            return "ghost", ("", ""), Facts(coordinate=coordinate, note="not copied")
        return thread_paint(copied), (f"T{copied}", f"b{holder}"), lies

    columns = (c.lanes + c.extra) * c.vector
    grid = Grid(
        2 * len(starts),
        columns,
        cell,
        cell_size([(f"T{c.lanes - 1}", f"c{columns}")], 30),
        row_label=lambda row: f"{row // 2} {'vectors' if row % 2 else 'blocks'}",
        row_name="element",
        column_name="in memory",
        thick_rows=frozenset(range(0, 2 * len(starts), 2)),
        thick_columns=frozenset(range(0, columns, c.vector)),
    )
    return _drawn(
        grid,
        c.lanes * c.vector,
        f"Blocks of {c.vector * one} bytes in memory, and the vectors that they become",
        "Lines that are shifted.",
        _lead("line", shifts, boundary * one),
        [
            Swatch(thread_paint(1), "T1 b1", "block 1 of the line, which thread 1 copies"),
            Swatch(thread_paint(1), "T1 c9", "group 9 of the panel, in thread 1's vector"),
            Swatch("ghost", "", "not used"),
        ],
    ).noted(
        f"A line is {count(c.lanes, 'lane')} and {count(c.extra, 'block')} more. Each lane extracts its vector from "
        "two blocks in shared memory, by selecting words and with one funnel shift per word.",
        *(
            [
                f"Results go back the same way: each lane stores the block in which its vector begins, and gets its "
                f"first elements from the previous lane. Neighbouring lines share {count(c.overlap, 'group')}, so "
                "that every block is whole in one of them; scalars are needed only where rows in memory begin and end."
            ]
            if c.overlap
            else []
        ),
    )


def _starts(plan: PanelPlan) -> list[int]:
    """Where the lines that are drawn begin in memory, in elements."""
    return [plan.problem.offsets[0] + plan.element(0, e) for e in range(min(plan.length, LINES))]


def _lead(what: str, shifts: list[int], boundary: int) -> str:
    """How far behind boundaries of so many bytes these begin."""
    return (
        f"The first {count(len(shifts), 'element')} of the first panel's groups: each {what} begins "
        f"{', '.join(map(str, shifts))} elements after a boundary of {boundary} bytes."
    )


def _drawn(grid: Grid, keep: int, title: str, what: str, lead: str, swatches: list[Swatch]) -> Figure:
    """The figure of a grid around the column `keep`."""
    body = draw(grid, *arrange(grid, keep=(keep,), fold=False))
    return finish(body, title, lead, f"{what} {lead}", swatches)
