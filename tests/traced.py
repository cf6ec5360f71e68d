"""Whether a kernel has the layouts that are drawn of its class, by what it tells while it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from unittest.mock import patch

from cute_softmax.draw import drawn
from cute_softmax.plan import PanelClass, RowClass
from layouts.trace import CoordinateValue, Value, differences, observing


class EnoughError(Exception):
    """All that is drawn has been told."""


class Wanted(dict):
    """What is told, until nothing of these names is missing."""

    def __init__(self, names: set[str]):
        super().__init__()
        self.missing = names

    def __setitem__(self, name: str, value: Value):
        super().__setitem__(name, value)
        self.missing.discard(name)
        if not self.missing:
            raise EnoughError


def trace(c: RowClass | PanelClass) -> dict[str, Value]:
    """What the kernel of a class tells, up to the last of its layouts that are drawn.

    What follows takes two thirds of the time and has no layouts, as kernels that are compiled to their end show.
    """
    from cute_softmax.runtime.compile import compile_class

    wanted = Wanted(set(drawn(c)) | ({"tXcX"} if isinstance(c, RowClass) else set()))
    with observing(wanted), suppress(EnoughError):
        compile_class(c)
    return dict(wanted)


def trace_to_the_end(c: object) -> dict[str, Value]:
    """All that the kernel of a class tells. What it is compiled to is left out, which takes half of the time."""
    from cutlass.cutlass_dsl import CuTeDSL

    from cute_softmax.runtime.compile import compile_class

    stop = patch.object(CuTeDSL, "_compile_or_jit_module", side_effect=EnoughError)
    with observing() as seen, stop, suppress(EnoughError):
        compile_class(c)
    return seen


def wrong(c: RowClass | PanelClass, told: Mapping[str, Value]) -> list[str]:
    """How what a kernel told differs from what is drawn of its class."""
    ours, theirs = drawn(c), dict(told)
    partition = theirs.pop("tXcX", None)
    found = differences(ours, theirs)
    found += [f"{name}: the kernel has it and no figure draws it" for name in theirs.keys() - ours.keys()]
    if isinstance(c, RowClass):
        found += partition_differences(c, partition)
        if theirs["tv"].tiler != c.step_tiler:
            found.append(f"tiler: drawn as {c.step_tiler}, but the kernel has {theirs['tv'].tiler}")
    return found


def partition_differences(c: RowClass, partition: CoordinateValue) -> list[str]:
    """How the partitioned coordinates tXcX differ from ((V, M), 1, K) and from the drawn tile."""
    shape = ((c.vector, c.rows_per_thread), 1, c.steps)
    if partition.shape != shape:
        return [f"tXcX: drawn as {shape}, but the kernel has {partition.shape}"]
    height, width = c.step_tiler
    first = c.tv(0, 0)
    found = []
    for v in range(c.vector):
        for m in range(c.rows_per_thread):
            index = c.tv(0, v + m * c.vector) - first
            for k in range(c.steps):
                ours = index % height, index // height + k * width
                theirs = (*partition((v, m), 0, k), 0)[:2]
                if ours != theirs:
                    found.append(
                        f"tXcX: value ({v}, {m}), step {k} drawn at {ours}, but the kernel has {theirs}"
                    )
    return found
