"""Figures of Plans of the topk movement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.figures.scene import count
from layouts.html import Step
from layouts.walk import row_walk

from ..plan.topk import TopkClass, TopkPlan
from . import common


@dataclass(frozen=True)
class View(common.View):
    """What the figures of a Plan show: the tile of the first CTA."""

    plan: TopkPlan

    where: ClassVar[str] = ""
    usual: ClassVar[int] = 0  # the first lane of the first row

    @property
    def name(self) -> str:
        """The rows' operand: what is read, or, where that is the k probabilities, what is written."""
        return common.space("dx" if self.kernel.renormalize and not self.kernel.forward else "x")

    def memory(self, at: tuple[int, int]) -> int:
        """(row, column) of the tile -> offset in the rows' tensor, in elements."""
        p, c = self.plan, self.kernel
        stride = p.columns if c.renormalize and not c.forward else p.operand_strides[0][0]
        return at[0] * stride + at[1]


def drawn(c: TopkClass) -> dict[str, Layout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    return {"tv": c.tv} if c.forward else {"tv": c.tv, "spread": c.spread}


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    c = view.kernel
    found = {"tile": tile(view)}
    if not c.forward:
        found["spread"] = _spread(view)
    if c.threads_per_row > 1:
        found["shuffle"] = _shuffle(view)
    return found


def tile(view: View) -> Figure:
    """The first tile in global memory."""
    p, c = view.plan, view.kernel
    figure = draw.thread_value(
        c.tv,
        c.tiler,
        memory=view.memory,
        space=view.name,
        element_bytes=view.size,
        step=c.threads_per_row * c.vector,
        title=f"{view.name}: the first tile in global memory",
    )
    notes = [
        f"{count(c.rows, 'row')} of {count(c.threads_per_row, 'lane')} each; a lane has "
        f"{count(c.vectors, 'vector')} of {count(c.vector, 'neighbouring element')}."
    ]
    if p.columns < c.capacity:
        notes.append(
            f"Rows have {count(p.columns, 'column')}: vectors behind these are not loaded, and are -inf."
        )
    if c.forward:
        notes.append(
            f"A lane sorts its {count(c.elements, 'element')}, with their indices, and keeps the {c.length} largest."
        )
    return figure.noted(*notes)


def _spread(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_value(
        c.tv,
        c.tiler,
        memory=c.spread,
        space="sG",
        element_bytes=4,
        shared=True,
        step=c.threads_per_row * c.vector,
        title=f"sG: the k gradients of a row among zeros, {c.spread}",
    )
    return figure.noted(
        "The lanes of a row put 0 everywhere, then each of the k numbers at its index, and read what is theirs. They "
        "are of one warp, which waits for itself alone."
    )


def _shuffle(view: View) -> Figure:
    c = view.kernel
    figure = draw.warp_shuffle(c.threads_per_row, warp=view.warp)
    if not c.forward:
        return figure.noted("Merged: the sum of each gradient times its probability.")
    if not c.takes:
        return figure.noted(
            f"The sorted lists of two lanes are merged into one of their {c.kept} largest, which both have a part of; "
            "then those of two and two lanes, until all lanes have a part of one list. A key holds an element and its "
            "index: no two are equal."
        )
    return figure.noted(
        f"The largest key of the lanes' first ones is found by one instruction of the warp (redux.sync), {view.plan.k} "
        "times; the lane that had it moves up. A key holds an element and its index: no two are equal."
    )


def walk(view: View) -> list[Step]:
    """The steps of the explorer: row 0 of the tile on its way through the figures of the Plan."""
    c = view.kernel
    taken = "the largest element, k times" if c.takes else "the largest of two lists"
    carried = taken if c.forward else "the sum of gradients times probabilities"
    return row_walk(
        0,
        tile="tile",
        staged="" if c.forward else "spread",
        shuffle="shuffle",
        end=min(view.plan.columns, c.capacity),
        exchanges=[(carried, 0)],
    )


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    p, c = view.plan, view.kernel
    return (
        f"{c.math} of {p.rows:,} rows of {p.columns:,}, k = {p.k}",
        f"class {c.name} for {c.architecture}; first tile, {c.threads:,} threads per CTA",
    )
