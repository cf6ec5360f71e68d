"""The sweep movement checked on a Plan's own numbers; the arithmetic is that of `kernels/sweep_work.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan import WARP, SweepPlan
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
        if operand in c.facts.beside:
            for rows in _rows(plan, u, columns):
                at = [None if row is None else offset + row * pitch for row in rows]
                yield from requests_of(at, size)
            continue
        at = [offset + u * pitch + column if column < plan.width else None for column in columns]
        yield from requests_of(at, size, c.vector, c.vector)


def _rows(plan: SweepPlan, line: int, columns: list[int]) -> Iterator[list[int | None]]:
    """The rows of memory in which the threads' vectors of a line begin; then those in which they end, in warps of which
    some vector ends in another row than it begins in. None for threads without a vector, and in the other warps."""
    begin, end = (
        [line * plan.abreast + (n + v) // plan.columns if n < plan.width else None for n in columns]
        for v in (0, plan.kernel.vector - 1)
    )
    apart = {t // WARP for t, ends in enumerate(zip(begin, end, strict=True)) if ends[0] != ends[1]}
    yield begin
    yield [row if t // WARP in apart else None for t, row in enumerate(end)]


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
