"""Figures of Plans of the short movement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.figures.scene import count
from layouts.html import Step

from ..plan import WARP
from ..plan.short import DENSE, ShortClass
from ..plan.short_plan import ShortPlan
from . import common
from .common import space


@dataclass(frozen=True)
class View(common.View):
    """What the figures of a Plan show: the stretch of the first warp."""

    plan: ShortPlan

    where: ClassVar[str] = ""
    usual: ClassVar[int] = 1
    aside: ClassVar[frozenset[str]] = frozenset()
    counted: ClassVar[str] = " in a warp"

    @property
    def threads(self) -> int:
        return WARP


def drawn(c: ShortClass) -> dict[str, Layout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    return {"tv": c.tv} if c.whole else {"tv": c.tv, "smem": c.smem}


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    return {"tile": tile(view), "rows": _rows(view)}


def tile(view: View) -> Figure:
    """The first stretch in global memory."""
    p, c = view.plan, view.kernel
    name, width = space(c.facts.inputs[0]), WARP * c.vector
    end = min(p.rows, p.warp_rows) * p.columns
    figure = draw.thread_value(
        c.tv,
        (1, c.elements),
        memory=lambda at: p.problem.offsets[0] + at[1],
        space=name,
        element_bytes=view.size,
        keep=tuple(sorted({view.followed * c.vector, (end - 1) // c.vector * c.vector})),
        step=width,
        title=f"{name}: the first stretch in global memory, lane by lane",
    )
    notes = [
        f"{count(min(p.rows, p.warp_rows), 'row')} of {p.columns}, one behind another: {end:,} elements, whose vectors "
        f"of {c.vector} the {WARP} lanes of a warp take side by side, K = {count(c.steps, 'time')}."
    ]
    if end < c.elements:
        notes.append(
            f"The stretch ends at element {end:,}: vectors behind it are drawn here and neither loaded nor stored"
            + (f"; its last {count(end % c.vector, 'element')} go one by one." if end % c.vector else ".")
        )
    others = [space(n) for n, how in zip(c.facts.inputs[1:], c.laid[1:], strict=True) if how == DENSE]
    others += [space(n) for n in c.facts.outputs]
    notes += [f"{' and '.join(others)}: the same lanes at the same elements."] if others else []
    notes += [f"{space(n)}: one element a row, which the row's thread stores." for n in c.facts.group_outputs]
    notes += [f"{told}." for told in p.beside]
    return figure.noted(*notes, *replace(view.report, shared=()).lines())


def _rows(view: View) -> Figure:
    p, c = view.plan, view.kernel
    name = space(c.facts.inputs[0], "r" if c.whole else "s")
    figure = draw.thread_value(
        p.rows_tv,
        (p.warp_rows, p.columns),
        memory=lambda at: p.place(at[0] * p.columns + at[1]),
        space=name,
        element_bytes=view.size,
        shared=not c.whole,
        title=f"{name}: which thread has which row",
    )
    if c.whole:
        return figure.noted(
            f"A vector holds {count(c.rows_per_thread, 'row')}: rows stay in the registers that they were loaded to."
        )
    notes = [
        f"A thread takes whole rows, {count(c.rows_per_thread, 'row')} at once, and adds each up alone: nothing is "
        "exchanged between threads. Results take the places of elements."
    ]
    if p.pairs:
        notes.append(
            "Rows of an odd length begin in the middle of a word every other time: neighbouring rows are one thread's, "
            "so that at each turn all lanes read rows that begin alike, from words in different banks."
        )
    if p.skew:
        notes.append(
            "Rows are an even number of vectors: a place is left empty behind every 8, for other banks."
        )
    return figure.noted(*notes, *view.report.shared)


def walk(view: View) -> list[Step]:
    """The steps of the explorer: row 0 on its way through the figures of the Plan."""
    p, c = view.plan, view.kernel

    def in_stretch(facts) -> bool:
        column = facts.coordinate.partition(", ")[2].rstrip(")").partition("..")[0]
        return column.isdigit() and int(column) < p.columns

    def in_row(facts) -> bool:
        return facts.coordinate.startswith("(0, ")

    where = "registers" if c.whole else "shared memory"
    return [
        Step(
            f"Global memory to {where}",
            "The lanes of a warp load the vectors of its stretch side by side, whatever the length of rows.",
            "tile",
            in_stretch,
        ),
        Step(
            "A row in its thread",
            "Row 0 is all one thread's, which reduces it and turns its elements into results.",
            "rows",
            in_row,
        ),
        Step(
            f"From {where} to the output",
            "Results are stored as the elements were loaded: each row has been read once and is written once."
            if c.facts.outputs
            else "Each thread stores the one number of its row.",
            "tile",
            in_stretch,
        ),
    ]


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    p, c = view.plan, view.kernel
    return (
        f"{c.math} of {p.rows:,} rows of {p.columns:,}, {' to '.join(dict.fromkeys(c.dtypes))}",
        f"class {c.name} for {c.architecture}; first stretch, {WARP} threads of a warp",
    )
