"""Figures of Plans of the sweep movement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.figures.scene import count
from layouts.figures.slots import Slots, Use, slots
from layouts.html import Step

from ..plan import SweepClass, SweepPlan
from ..plan.sweep import MERGED, MERGERS, TURNS
from . import common
from .common import space


@dataclass(frozen=True)
class View(common.View):
    """What the figures of a Plan show: the first CTA of the first pass, and a CTA that merges states."""

    plan: SweepPlan

    where: ClassVar[str] = " of the first CTA"
    usual: ClassVar[int] = 1
    aside: ClassVar[frozenset[str]] = frozenset({"reduction_buffer"})


def drawn(c: SweepClass) -> dict[str, Layout]:
    """The layouts of a class that its kernels have and figures draw; see `draw.drawn`."""
    return {"tv": c.tv, "reduction_buffer": c.reduction_buffer}


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    return {"tile": tile(view), "reduction_buffer": _reduction_buffer(view)}


def tile(view: View) -> Figure:
    """What the first CTA loads first of a line after the other."""
    p, c = view.plan, view.kernel
    name, (_, line) = space(c.facts.inputs[0]), p.operand_strides[0]
    figure = draw.thread_value(
        c.tv,
        c.tiler,
        memory=lambda at: p.problem.offsets[0] + at[0] * line + at[1],
        space=name,
        element_bytes=view.size,
        keep=(view.followed * c.vector, min(p.width, c.columns) - 1),
        title=f"{name}: the first {count(c.steps, 'line')} of a panel in global memory",
    )
    rows = (
        "A line is a row of memory"
        if p.abreast == 1
        else f"A line is {p.abreast} rows of memory side by side"
    )
    notes = [
        f"{rows}: {count(p.width, 'column')}, {line:,} elements from one line to the next. A thread has the same "
        f"vector of all of them, and so the same columns; a CTA takes {count(p.share, 'line')} of {p.lines:,}.",
    ]
    if p.rest:
        notes.append(f"The line behind them has {count(p.rest, 'element')}, which the last part takes.")
    if p.width < c.columns:
        notes.append(f"The line ends with column {p.width:,}: the threads behind it do nothing.")
    if c.facts.outputs:
        notes.append(
            f"The second pass loads the same vectors again, in {TURNS} CTAs for each of the first, the last lines "
            "first."
        )
    named = (*c.facts.inputs, *c.facts.outputs)
    others = [space(named[i]) for i in c.facts.main[1:]]
    if beside := [space(named[i]) for i in c.facts.beside]:
        notes.append(
            f"{' and '.join(beside)}: one element for each row of memory. A thread loads that of the row in which its "
            "vector begins and, if some vector of its warp ends in another, that of the row in which its own ends."
        )
    if others:
        notes.append(
            f"{' and '.join(others)}: the same threads at the same columns, by strides of their own."
        )
    return figure.noted(*notes, *view.report.lines())


def _reduction_buffer(view: View) -> Figure:
    p, c = view.plan, view.kernel
    readers, layout = MERGERS // MERGED, c.reduction_buffer

    def use(reader: int, column: int) -> Use:
        thread = reader * MERGED + column
        return Use(
            (thread,), f"T{thread}", f"thread {thread} writes it; thread {column} reads all of its column"
        )

    buffer = Slots(
        heading="the first number of each state",
        space="sS",
        layout=Layout((readers, MERGED), (layout.stride[2], layout.stride[1])),
        element_bytes=4,
        use=use,
        shared=True,
        row_name="reader",
    )
    figure = slots(
        [buffer],
        title="sS: states of columns on their way to one thread",
        lead=f"{count(readers, 'state')} of each of {count(MERGED, 'column')}: {layout}.",
        who="who writes the slot",
    )
    return figure.noted(
        f"Between the passes {MERGERS} threads merge the states of {MERGED} columns: of a column there are "
        f"{count(p.parts * p.abreast, 'state')}, one for each part and row of a line, which lie {p.columns:,} states "
        f"apart in global memory. Each of {readers} threads merges every {readers}th, then one thread theirs."
    )


def walk(view: View) -> list[Step]:
    """The steps of the explorer: the columns of a thread on their way through the figures of the Plan."""
    c = view.kernel
    return [
        Step(
            "Down the lines",
            "A thread loads its vector of several lines at once and folds them into the states of its columns, which "
            "stay in its registers until its part has ended.",
            "tile",
            view.own,
        ),
        Step(
            "States of a column",
            "The states of all parts and rows of a line are merged by the second kernel.",
            "reduction_buffer",
            lambda facts: facts.coordinate.endswith("column 0)"),
        ),
        Step(
            "Up the lines",
            "The third kernel loads the same vectors again, from the last line to the first, and stores their results."
            if c.facts.outputs
            else "The results of columns are stored as they are merged: elements are read once.",
            "tile",
            view.own,
        ),
    ]


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    p, c = view.plan, view.kernel
    return (
        f"{c.math} of {p.problem.groups:,} groups of {p.problem.length:,}, {' to '.join(c.own_dtypes)}",
        f"class {c.name} for {c.architecture}; first panel, {c.threads:,} threads per CTA",
    )
