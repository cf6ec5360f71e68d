"""The sweep movement checked on a Plan's own numbers; the arithmetic is that of `kernels/sweep_work.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan import SweepPlan
from ...plan.problem import ITEM_SIZE
from .common import requests_of, traffic, uncovered
from .report import Report


def requests(plan: SweepPlan, operand: int) -> Iterator[list[int | None]]:
    """The threads' byte addresses in each request of the lines that the first CTA loads first, None where there is
    nothing."""
    c, (_, pitch) = plan.kernel, plan.operand_strides[operand]
    size, offset = ITEM_SIZE[c.dtypes[operand]], plan.problem.offsets[operand]
    for u in range(min(c.steps, plan.lines)):
        columns = [c.tv(thread, u * c.vector) // c.steps for thread in range(c.threads)]
        if operand in c.facts.beside:  # of the rows of memory in which vectors begin and end
            for end in (0, c.vector - 1):
                rows = [u * plan.abreast + (column + end) // plan.columns for column in columns]
                inside = zip(rows, columns, strict=True)
                at = [offset + row * pitch if column < plan.width else None for row, column in inside]
                yield from requests_of(at, size)
            continue
        at = [offset + u * pitch + column if column < plan.width else None for column in columns]
        yield from requests_of(at, size, c.vector, c.vector)


def check(plan: SweepPlan) -> Report:
    """Coverage of a panel's first lines and of all lines by parts, alignment and sectors of requests."""
    c = plan.kernel
    problems = uncovered(f"{c.steps} lines of a panel", c.tv, c.tiler)
    if plan.lines * plan.width + plan.rest != plan.length * plan.columns:
        problems.append(f"{plan.lines} lines and {plan.rest} elements are not {plan.length} rows")
    if not (plan.parts - 1) * plan.share < max(plan.lines, 1) <= plan.parts * plan.share + (not plan.lines):
        problems.append(f"{plan.parts} parts of {plan.share} are not {plan.lines} lines")
    moved = tuple(traffic(c, lambda operand: requests(plan, operand), problems))
    told = "every element of a panel's lines has exactly one thread" if not problems else "see the problems"
    return Report(plan, tuple(problems), f"Coverage: {told}.", moved, ())
