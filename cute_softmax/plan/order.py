"""The order in which a plan adds up a row: what the bits of its results depend on, beside the row's values.

Everything here is a fixed tree. A thread takes its elements in the order of its vectors and adds them pairwise; lanes
of a warp meet butterfly by butterfly, then warps and the CTAs of a cluster in one more such tree, then parts of a row.
Which element stands where in that tree is decided by a few numbers of the plan, and those are its `Order`. Rows per
thread, CTAs that share an SM, the staging of loads and their widths, cache policies and the size of the grid are not
among them: they say when things happen, not in which order numbers are added.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from .panel_plan import PanelPlan
from .row import RowClass
from .row_plan import Plan
from .short_plan import ShortPlan


class Order(NamedTuple):
    """The order of one plan's rows. Plans of equal orders give equal bits for equal rows.

    math: the row math, with what it computes before and after; dtypes: of its full operands; precise: whether results
        are worth a float32's rounding; logs: whether exponentials are those of log_softmax.
    recurrence: vectors after which a thread's running maximum moves; 0 where the maximum of a warp's lanes comes first.
    keeps: whether results are made of exponentials that refer to a maximum of a part of the row.
    vector: elements of a vector; head: elements of the row before its first one; None where that depends on the row.
    steps: vectors of a thread; threads: that stand along the row in a CTA; ctas: of a cluster; share: elements that
        each takes; parts: of a row; chunk: elements that a CTA takes at a time; readers: threads that merge the
        parts' states, and how many each takes at once.
    """

    math: str
    dtypes: tuple[str, ...]
    precise: bool
    logs: bool
    recurrence: int
    keeps: bool
    vector: int
    head: int | None
    steps: int
    threads: int
    ctas: int
    share: int
    parts: int = 1
    chunk: int = 0
    readers: tuple[int, int] = (0, 0)

    @property
    def digest(self) -> str:
        """Eight digits that tell orders apart."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:8]


def order_of(plan: Plan | ShortPlan | PanelPlan) -> Order:
    """The order of a plan's rows.

    Raises ValueError for a plan whose vectors lie across groups (the column movement): no batch-invariant one does.
    """
    if isinstance(plan, ShortPlan):
        return _of_short(plan)
    return _of_row(plan) if isinstance(plan, Plan) else _of_panel(plan)


def recurrence_of(c: RowClass) -> int:
    """Vectors that a thread of a class of the row movement takes at a time, each part with a maximum of its own; 0
    where a maximum of all lanes comes first, and for sums and maxima alone."""
    if c.math in ("amax", "sum") or c.math.endswith("_backward") or not c.online:
        return 0
    staged = c.staging[0] != "direct"
    by_parts = staged if c.math != "softmax" else c.keeps_shared or (staged and not c.keep)
    return c.part if by_parts or c.prologue.averages or c.prologue.softcap else 0


def _of_row(plan: Plan) -> Order:
    c = plan.row_class
    head, reference = 0, c.facts.reference
    if c.edges:
        starts = [s for n, s in zip(plan.kept, plan.operand_strides[reference], strict=True) if n > 1]
        alike = not any(s % c.vector for s in starts)
        head = min(-plan.problem.offsets[reference] % c.vector, plan.columns) if alike else None
    return Order(
        math="_".join(filter(None, (c.math, c.prologue.name, "" if c.online else "two_pass"))),
        dtypes=c.dtypes[: c.facts.full],
        precise=c.precise,
        logs=c.logs,
        recurrence=recurrence_of(c),
        keeps=c.keep and bool(c.facts.outputs),
        vector=c.vector,
        head=head,
        steps=c.steps,
        threads=c.threads_per_row,
        ctas=c.cluster_n,
        share=plan.share,
    )


def _of_short(plan: ShortPlan) -> Order:
    """A thread has all of a row: what its class has room for beyond that adds nothing."""
    c = plan.kernel
    return Order(
        math="_".join(filter(None, (c.math, c.prologue.name))),
        dtypes=c.dtypes[: c.facts.full],
        precise=c.precise,
        logs=False,
        recurrence=0,
        keeps=False,
        vector=plan.columns,
        head=0,
        steps=1,
        threads=1,
        ctas=1,
        share=plan.columns,
    )


def _of_panel(plan: PanelPlan) -> Order:
    c = plan.kernel
    if c.orientation != "row":
        raise ValueError(
            f"{c.name}: vectors across groups have no order along them that a row's plan could share"
        )
    return Order(
        math="_".join(filter(None, (c.math, c.prologue.name))),
        dtypes=c.dtypes[: c.facts.full],
        precise=c.precise,
        logs=False,
        recurrence=c.chunk_steps if c.streaming else 0,
        keeps=False,
        vector=c.vector,
        head=None if c.edges else 0,
        steps=c.steps,
        threads=c.down,
        ctas=c.cluster_n,
        share=plan.share,
        parts=plan.parts,
        chunk=c.chunk,
        readers=(c.readers, c.loads) if c.exchange else (0, 0),
    )
