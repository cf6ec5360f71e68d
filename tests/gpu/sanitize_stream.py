"""Rows that come tile after tile, of every math that reads alone, for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import checking
import pytest
import streams
from families import Case
from sanitize_short import check_scores, work_of
from sanitizing import Job, sent, timed

from cute_softmax.plan.stream import StreamClass
from cute_softmax.runtime import launch

# Whole tiles and not, on vector boundaries and not.
PLACES = {9000: (0, 0), 8195: (1, 2)}


def check(case: Case) -> float:
    """`check_scores` of a call that is streamed."""
    with pytest.MonkeyPatch.context() as patch:
        streams.forced(patch)
        return check_scores(case)


def check_pair(pair: streams.Pair) -> float:
    """The seconds of a call on two inputs that is streamed. Raises AssertionError on a wrong result."""
    with pytest.MonkeyPatch.context() as patch:
        streams.forced(patch)
        found, on_device = [], replace(pair, x=sent(pair.x), target=sent(pair.target))
        seconds = timed(lambda: found.append(on_device.launched()))
    pair.check(found[0].cpu())
    return seconds


def jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Each class once."""
    seen: set[StreamClass] = set()
    with pytest.MonkeyPatch.context() as patch:
        streams.forced(patch)
        for name in names:
            for columns, place in PLACES.items():
                for case in streams.cases(columns, checking.DTYPES[name], place):
                    kernel = work_of(case, case.placed()[0]).plan(launch.device_facts(0)).kernel
                    if case.math in maths and kernel not in seen:
                        seen.add(kernel)
                        what = f"{case.math} {'/'.join(kernel.dtypes)} {kernel.name}"
                        yield Job((kernel,), case.x.numel(), what, partial(check, case))
                for pair in streams.pairs(columns, (checking.DTYPES[name],) * 2, place):
                    kernel = pair.kernel()
                    if "logsumexp" in maths and kernel not in seen:
                        seen.add(kernel)
                        what = f"logsumexp {'/'.join(kernel.dtypes)} {kernel.name}"
                        yield Job((kernel,), pair.x.numel(), what, partial(check_pair, pair))
