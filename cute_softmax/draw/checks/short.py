"""The short movement checked on a Plan's own numbers; the arithmetic is that of `kernels/short.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan import WARP
from ...plan.problem import ITEM_SIZE
from ...plan.short import SINGLE
from ...plan.short_plan import ShortPlan
from .common import requests_of, traffic, uncovered, wavefronts
from .report import Report


def requests(plan: ShortPlan, operand: int) -> Iterator[list[int | None]]:
    """The lanes' byte addresses in each request for the vectors of the first stretch, None where there is none."""
    c = plan.kernel
    left = min(plan.rows, plan.warp_rows) * plan.columns
    offset, size = plan.problem.offsets[operand], ITEM_SIZE[c.dtypes[operand]]
    for k in range(c.steps):
        first = [c.tv(lane, k * c.vector) for lane in range(WARP)]
        at = [offset + e if e + c.vector <= left else None for e in first]
        yield from requests_of(at, size, c.vector, c.accesses[operand])


def rows_requests(plan: ShortPlan, operand: int) -> tuple[int, list[list[int]]]:
    """(bytes of an access, the lanes' byte addresses of each) with which rows are read from shared memory at the first
    two turns; a pair of halves is a word."""
    size = ITEM_SIZE[plan.kernel.dtypes[operand]]
    elements, found = plan.piece(operand), []
    for turn in range(min(2, plan.turns)):
        rows = [plan.shared_row(operand, plan.row_at(lane, turn)) for lane in range(WARP)]
        starts = [row * plan.columns for row in rows]
        for j in range(0, plan.columns, elements):
            at = [(s + j) // elements * elements for s in starts]
            found.append([plan.place(e) * size for e in at])
    return elements * size, found


def check(plan: ShortPlan) -> Report:
    """Coverage of a stretch by vectors and by rows, alignment and sectors of its requests, and the wavefronts of reads
    of rows from shared memory."""
    c = plan.kernel
    problems = uncovered(f"a stretch of {c.elements} elements", c.tv, (1, c.elements))
    if plan.warp_rows * plan.columns > c.elements:
        problems.append(f"{plan.warp_rows} rows of {plan.columns} are more than {c.elements} elements")
    problems += uncovered(f"{plan.warp_rows} rows", plan.rows_tv, (plan.warp_rows, plan.columns))
    moved = tuple(traffic(c, lambda operand: requests(plan, operand), problems))
    told = "every element of a stretch has exactly one thread" if not problems else "see the problems"
    shared = []
    if not c.whole:
        for i, name in enumerate(c.facts.inputs):
            if c.laid[i] == SINGLE:
                continue
            width, found = rows_requests(plan, i)
            shared.append(f"Rows of {name} in shared memory: {wavefronts(found, width)}.")
    return Report(plan, tuple(problems), f"Coverage: {told}.", moved, tuple(shared))
