"""Columns in two passes, of every math, for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import pytest
import sweeps
from sanitizing import Job, received, sent, timed

from cute_softmax.runtime import launch


def check(one: sweeps.Columns) -> float:
    """The seconds of a call. Raises AssertionError on a wrong result."""
    buffers, full = one.guarded(), one.inputs
    inputs = [b.tensor.clone() for b in buffers[:full]]
    copies = [sent(b.tensor) for b in buffers]
    if one.in_place:
        copies[-1] = copies[0]
    work = one.work(copies)
    with pytest.MonkeyPatch.context() as patch:
        sweeps.forced(patch)
        seconds = timed(lambda: launch.run(*work))
    one.check(inputs, [received(b, copy) for b, copy in zip(buffers[full:], copies[full:], strict=True)])
    return seconds


def jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Each call: classes are few, and what they do at the ends of lines and parts depends on the shape."""
    with pytest.MonkeyPatch.context() as patch:
        sweeps.forced(patch)
        for dtype in names:
            for one in sweeps.calls(dtype):
                if one.math in maths:
                    work = one.work([b.tensor for b in one.guarded()])
                    kernel = work.plan(launch.device_facts(0), one.in_place).kernel
                    what = (
                        f"{one.math} {'/'.join(kernel.dtypes)} {kernel.name}, {'x'.join(map(str, one.shape))}"
                    )
                    yield Job((kernel,), prod(one.shape), what, partial(check, one))
