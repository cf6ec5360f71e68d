"""Few columns: how clusters share the panels of a tensor that would leave SMs idle, in no more steps than they need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from .modes import power_of_two
from .panel_class import PanelClass
from .panel_configs import (
    BYTES_OF_A_THREAD,
    COLUMNS_OF_FEW,
    CTAS_OF_A_STEP,
    HELD_OF_FEW,
    NARROWEST_BYTES,
    PANELS_OF_FEW,
    REACHED,
    READ_OF_FEW,
    STEPS_OF_AN_EXCHANGE,
    STEPS_OF_FEW,
    THREADS_OF_FEW,
    VECTOR_BYTES_OF_FEW,
    PanelConfig,
)
from .panel_groups import Groups
from .panel_plan import PanelPlan
from .problem import ALIGNMENT


def plan_few(g: Groups) -> PanelPlan | None:
    """The plan of few columns that clusters hold, of the least cost.

    None where they were more than two for each SM, held less than a panel, or more than parts are slower for.
    """
    if g.orientation == "row" or g.invariant or g.inputs * g.length * g.groups * g.smallest > HELD_OF_FEW:
        return None
    found: list[Way] = []
    for threads in THREADS_OF_FEW:
        found = sorted((*found, *_ways(g, threads)), key=attrgetter("cost"))
        if found and not (found[0].is_long and found[0].has_room):
            break
    c = next(filter(g.holds, (way.made for way in found)), None)
    return g.plan(c, 1, g.share(c, c.cluster_n)) if c else None


@dataclass(frozen=True)
class Way:
    """A way to share few columns.

    one: the class of a CTA with one step; panels: how many there are; cluster: CTAs that share one; steps: of a thread.
    """

    groups: Groups
    one: PanelClass
    panels: int
    cluster: int
    steps: int

    @property
    def made(self) -> PanelClass:
        return replace(self.one, steps=self.steps, cluster_n=self.cluster)

    @property
    def ctas(self) -> int:
        return self.panels * self.cluster

    @property
    def is_faster(self) -> bool:
        """Whether it is than parts: all CTAs hold so many bytes at most, and each reads so many of a tensor, whole
        sectors of L2, of which narrow panels have a part."""
        g, one = self.groups, self.one
        held = g.inputs * one.columns * one.tile * self.steps * g.smallest
        sectors = max(one.width, min(NARROWEST_BYTES, g.groups * g.smallest))
        return held * self.ctas <= HELD_OF_FEW and sectors * g.share(one, self.cluster) <= READ_OF_FEW

    @property
    def is_long(self) -> bool:
        """Whether a thread has so many bytes of a tensor that more threads are faster."""
        return self.steps * self.one.vector * self.groups.smallest > BYTES_OF_A_THREAD

    @property
    def has_room(self) -> bool:
        """Whether each CTA has an SM for itself."""
        return self.ctas <= self.groups.device.multiprocessors * (REACHED if self.cluster == 16 else 1)

    @property
    def cost(self) -> tuple[float, int, int]:
        """What is planned by, the least first: steps, and CTAs of all panels, those of clusters. They start together,
        which takes twice as long, and exchange their states. Of equal costs the fewest threads; and of few steps those
        that exchange the fewest states, of many steps those that read the widest panels."""
        ctas = self.ctas * self.one.threads / THREADS_OF_FEW[0]
        more = ctas + CTAS_OF_A_STEP * STEPS_OF_AN_EXCHANGE if self.cluster > 1 else ctas / 2
        states = -self.cluster if self.is_long else self.cluster
        return CTAS_OF_A_STEP * self.steps + more, self.one.threads, states


def _ways(g: Groups, threads: int) -> Iterator[Way]:
    """Those with so many threads: panels ever narrower, clusters ever larger."""
    part = power_of_two(math.ceil(g.groups / PANELS_OF_FEW))
    many = g.groups >= PANELS_OF_FEW * COLUMNS_OF_FEW
    narrowest = COLUMNS_OF_FEW if many else min(part, NARROWEST_BYTES // g.smallest)
    size = ALIGNMENT // g.widest
    # Of two inputs whole vectors are faster, unless a panel is a single one; blocks and rows side by side are whole.
    pairs = g.inputs > 1 and narrowest * size >= 2 * ALIGNMENT
    whole = pairs or g.shifted or g.rows_abreast > 1
    vector_bytes = ALIGNMENT if whole else min(VECTOR_BYTES_OF_FEW, narrowest * size)
    for one in g.widths(PanelConfig(threads, 1, vector_bytes=vector_bytes), narrowest):
        panels = g.panels(one)
        most = min(2 * g.device.multiprocessors // panels, g.device.architecture.cluster_limit)
        for cluster in (1 << i for i in range(most.bit_length())):
            share = g.share(one, cluster)
            steps = next((n for n in STEPS_OF_FEW if n * one.tile >= share), 0)
            way = Way(g, one, panels, cluster, steps)
            if steps and share * (cluster - 1) < g.length and way.is_faster:
                yield way
