"""Figures of Plans of the topk movement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layouts import Layout
from layouts import figures as draw
from layouts.access import WARP
from layouts.figures import Facts, Figure
from layouts.figures.grid import Grid, arrange
from layouts.figures.grid import draw as draw_grid
from layouts.figures.scene import Swatch, count, finish
from layouts.html import Step
from layouts.style import thread_paint
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
    if c.forward and not c.takes:
        return _merges(view)
    figure = draw.warp_shuffle(c.threads_per_row, warp=view.warp)
    if not c.forward:
        return figure.noted("Merged: the sum of each gradient times its probability.")
    return figure.noted(
        f"The largest key of the lanes' first ones is found by one instruction of the warp (redux.sync), {view.plan.k} "
        "times; the lane that had it moves up. A key holds an element and its index: no two are equal."
    )


def _merges(view: View) -> Figure:
    """Who merges lists with whom, and which places of the result each lane has."""
    c = view.kernel

    def cell(r: int, lane: int):
        bits, mine = c.places_after(r)
        first = sum((lane >> bit & 1) << i for i, bit in enumerate(reversed(bits))) * mine
        has = f"{first}" if mine == 1 else f"{first}-{first + mine - 1}"
        partner, note = lane, "sorts its own elements"
        if r:
            partner = lane ^ sum(1 << bit for bit in (*c.places_after(r - 1)[0], r - 1))
            note = (
                f"merge {r}: exchanges keys with lane {partner} first; {count(1 << r, 'lane')} have one list"
            )
        facts = Facts(threads=(view.warp * WARP + lane,), value=f"places {has}", note=note)
        return thread_paint(lane >> r), (f"L{partner}", has), facts

    grid = Grid(
        1 + len(c.merges),
        WARP,
        cell,
        (45, 34),
        row_label=lambda r: c.merges[r - 1] if r else "own",
        row_name="list",
        column_name="lane",
        thick_columns=frozenset(range(0, WARP, c.threads_per_row))
        if c.threads_per_row < WARP
        else frozenset(),
    )
    figure = finish(
        draw_grid(grid, *arrange(grid)),
        f"Lists of {c.threads_per_row} lanes are merged into one of {c.kept}",
        f"Warp {view.warp}: a merge of two groups of lanes in each line.",
        f"Merges of sorted lists over groups of {c.threads_per_row} lanes.",
        [
            Swatch("t0", "L3", "the lane whose keys come first; one colour = one list"),
            Swatch("plain", "2-3", "places of that list that the lane has"),
        ],
    )
    return figure.noted(
        "A list grows until it has as many keys as are kept. Then each lane keeps half of its keys at each merge, down "
        "to one, of which there are copies. A key holds an element and its index: no two are equal."
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
