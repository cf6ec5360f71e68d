"""What is drawn is what the kernel has: Plan classes are traced on the CPU and their layouts compared.

Tracing stops before the compiler, needs no GPU and takes about 0.04 s a class. Those of `test_compile` are compared to
their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from classes import FAMILY, REDUCTIONS, intervals, operands, sample, selected
from compiled import layouts_of
from traced import trace, wrong

from cute_softmax.draw import drawn
from cute_softmax.plan import MATHS, RowClass
from cute_softmax.plan.hardware import ARCHITECTURES
from layouts import Layout, ints
from layouts.trace import differences

# (dtypes of input and output, edges, elements of a load or None for whole vectors, also in two passes). The
# widest dtype decides the vector; fp16 is laid out as bf16 is.
KINDS = (
    (("bf16", "bf16"), False, None, True),
    (("bf16", "bf16"), True, None, False),
    (("fp16", "fp16"), True, 2, False),
    (("fp32", "fp32"), False, None, False),
)


def every_class(architecture: str) -> Iterator[RowClass]:
    """Every second Plan class of sm_90a, and every sixth of the others, in the kinds above."""
    for math, online in MATHS:
        count = len(MATHS[math, online].inputs)
        for pair, edges, access, two_pass in KINDS:
            if (not online or math in (*REDUCTIONS, *FAMILY)) and not two_pass:
                continue  # their configurations and layouts are those of softmax
            width = (access,) * count if access else None
            form = {"edges": edges, "width": width, "online": online}
            found = selected(math, intervals(math, architecture, operands(math, pair), **form))
            for interval in sample(found, 2 if architecture == "sm_90a" else 6):
                yield interval.row_class


def swapped(layout: Layout) -> Iterator[Layout]:
    """Layouts with two strides exchanged that give other offsets."""
    strides, offsets = list(ints.leaves(layout.stride)), layout.offsets()
    for i in range(len(strides)):
        for j in range(i):
            other = list(strides)
            other[i], other[j] = other[j], other[i]
            mutant = Layout(layout.shape, ints.unflatten(iter(other), layout.shape))
            if mutant.offsets() != offsets:
                yield mutant


class SwappedPredicate(RowClass):
    """A class whose kernel stores its bits step by step instead of row by row."""

    @property
    def predicate(self) -> Layout:
        return Layout((self.rows_per_thread, 1, self.steps), (1, 0, self.rows_per_thread))


class SwappedBuffer(RowClass):
    """A class whose kernel puts rows of the buffer next to each other instead of peers."""

    @property
    def reduction_buffer(self) -> Layout:
        return Layout.ordered((2, (self.warps_per_row, self.cluster_n), 2), (0, 1, 2))


class SwappedThreads(RowClass):
    """A class whose threads run down the rows first."""

    @property
    def tv(self) -> Layout:
        (threads, values), (thread_stride, value_stride) = super().tv.shape, super().tv.stride
        return Layout((threads[::-1], values), (thread_stride[::-1], value_stride))


def mutants() -> Iterator[tuple[RowClass, RowClass]]:
    """(class, mutant of it), for the first class that shows the difference."""
    for mutant in (SwappedPredicate, SwappedBuffer, SwappedThreads):
        for c in every_class("sm_90a"):
            values = {f.name: getattr(c, f.name) for f in fields(c)}
            if mutant is SwappedPredicate and c.rows_per_thread == 1:
                values |= {"rows_per_thread": 2, "steps": 2} if not c.exchanges else {}
            honest, other = RowClass(**values), mutant(**values)
            if differences(drawn(honest), drawn(other)):
                yield honest, other
                break
        else:
            raise AssertionError(f"no class shows what {mutant.__name__} changes")


def trace_all(architecture: str, folder: Path) -> dict:
    """The classes traced and what is wrong with them."""
    found = {"classes": 0, "layouts": 0, "swaps": 0, "wrong": [], "missed": []}
    for c in every_class(architecture):
        ours, theirs = drawn(c), layouts_of(c, folder)
        found["wrong"] += [f"{c.math} {c.dtypes} {c.name}: {line}" for line in wrong(c, theirs)]
        for name, layout in ours.items():
            for mutant in swapped(layout):
                found["swaps"] += 1
                if not differences({name: mutant}, theirs):
                    found["missed"].append(f"{c.name}: {name} drawn as {mutant}")
        found["classes"] += 1
        found["layouts"] += len(ours)
    return found


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_class_is_drawn_as_its_kernel_is(architecture, tmp_path):
    found = trace_all(architecture, tmp_path)
    assert found["wrong"] == []
    assert found["missed"] == []
    assert (
        found["classes"] >= (60 if architecture == "sm_90a" else 20)
        and found["layouts"] >= 3 * found["classes"] // 2
    )
    assert found["swaps"] >= found["classes"]


def test_a_kernel_with_a_swapped_stride_is_caught():
    found = {type(other).__name__: differences(drawn(c), trace(other)) for c, other in mutants()}
    assert len(found) == 3
    for name, lines in found.items():
        assert lines, f"{name}: the traced mutant passes for what is drawn"
