"""What the figures of panels show: which panel, whose thread, where data ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

from layouts import Layout
from layouts.figures import Slots, Use

from ..plan import WARP, PanelPlan
from . import common
from .common import exchanged

SHARED, GLOBAL = "shared memory", "global memory"


@dataclass(frozen=True)
class View(common.View):
    """What the figures of a Plan show: the first panel in its first CTA; the predicate, where data ends."""

    plan: PanelPlan

    @property
    def flat(self) -> bool:
        """Whether the CTA has one group, drawn from left to right."""
        return self.kernel.orientation == "row"

    def tiler(self, steps: int) -> tuple[int, int]:
        """(rows, columns) of the drawing of so many steps."""
        height = self.kernel.down * self.kernel.unit * steps
        return (1, height) if self.flat else (height, self.kernel.columns)

    def place(self, element: int, group: int) -> tuple[int, int]:
        """(row, column) of the drawing."""
        return (group, element) if self.flat else (element, group)

    @property
    def start(self) -> int:
        """The first group of the last panel."""
        return self.plan.panel(self.plan.tiles - 1).start

    @cached_property
    def last(self) -> tuple[int, int]:
        """(part, CTA of its cluster) with the end of the last group, or of its body."""
        at = max(self.plan.pieces(self.start)[1] - 1, 0) // self.plan.share
        return at // self.kernel.cluster_n, at % self.kernel.cluster_n

    @cached_property
    def final(self) -> range:
        """The elements that this CTA holds at the end: its last chunks."""
        c, held = self.kernel, self.plan.bounds(*self.last, self.start)
        chunks = -(-len(held) // c.chunk)
        first = held.start + max(chunks - c.buffers, 0) * c.chunk
        return range(first, held.stop)

    @cached_property
    def usual(self) -> int:
        """The first lane of the warp with the end of a group."""
        c = self.kernel
        down = max(len(self.final) - 1, 0) % (c.down * c.unit) // c.unit
        return down * c.across // WARP * WARP

    @cached_property
    def first(self) -> int:
        """The first element of the followed thread."""
        return self.kernel.tv(self.followed, 0) % (self.kernel.down * self.kernel.unit)

    def shift(self, element: int) -> int:
        """Groups from the first of the first panel to that of its first thread in the row of an element, which keeps
        its aligned block; 0 where no thread does."""
        plan, c = self.plan, self.kernel
        return (plan.problem.offsets[0] + plan.element(0, element)) % c.vector if c.aligned else 0

    def memory(self, operand: int) -> Callable[[tuple[int, int]], int]:
        """(row, column) of the first CTA's tile -> offset in an operand's tensor, in elements."""

        plan, c, shift = self.plan, self.kernel, cache(self.shift)
        of_group, of_element = (cache(partial(of, operand)) for of in (plan.group, plan.element))
        column = cache(c.column)

        def offset(at: tuple[int, int]) -> int:
            element, group = self.place(*at)
            if c.edges:
                element += plan.pieces(group)[0]
            if not c.shifted:
                return of_group(group) + of_element(element)
            # Blocks that threads keep, or lines that overlap, of the last kept mode.
            group = group - shift(element) if c.aligned else column(group // c.slots) + group % c.slots
            return group * plan.operand_strides[operand][0] + of_element(element)

        return offset

    @cached_property
    def where(self) -> str:
        """Which CTA is drawn, for titles; empty where there is but one to a panel."""
        c, names = self.kernel, []
        if c.cluster_n > 1:
            names.append(f"CTA 0 (of 0 to {c.cluster_n - 1})")
        if c.exchange:
            names.append(f"part 0 (of 0 to {self.plan.parts - 1})")
        return "".join(f", {n}" for n in names)

    @cached_property
    def exchanges(self) -> list[tuple[str, int]]:
        """What each exchange between threads carries, and its stage of the reduction buffer."""
        c = self.kernel
        if c.down == 1:  # each thread has its groups for itself
            return []
        return [(name, stage) for stage, name in enumerate(exchanged(c.math, False, c.stages))]

    def slots(
        self,
        heading: str,
        where: str,
        layout: Layout,
        element_bytes: int,
        other: str,
        use: Callable[[int, int], Use],
        base: int = 0,
        role: str = "",
    ) -> Slots:
        """A buffer whose layout has the shape (group, `other`); use(group, other) says who has a slot, and role what
        slots are."""
        (groups, others), (group_stride, other_stride) = layout.shape, layout.stride
        turned = Layout((others, groups), (other_stride, group_stride))
        return Slots(
            heading,
            where,
            layout if self.flat else turned,
            element_bytes,
            use if self.flat else lambda r, c: use(c, r),
            base=base,
            shared=where.startswith(SHARED),
            row_name="column" if self.flat else other,
            column_name=other if self.flat else "column",
            role=role,
        )
