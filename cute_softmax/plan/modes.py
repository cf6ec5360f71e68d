"""Dimensions that do not merge: how many a kernel takes an index apart into, and where an index leads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .maths import Math
from .problem import Mode, Problem

# So many kept or reduced modes kernels are built for: few, so that classes are few.
MODES = (1, 2, 5)


def padded(modes: Sequence[Mode], operands: int, counts: Sequence[int] = MODES) -> tuple[Mode, ...] | None:
    """The modes, the slowest first, filled up with those of one element to a number in `counts`; None for too many."""
    count = next((n for n in counts if len(modes) <= n), None)
    if count is None:
        return None
    return (Mode(1, (0,) * operands),) * (count - len(modes)) + tuple(modes)


def offset_of(index: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The offset of an index in modes of these sizes and strides, the slowest first, whose size does not count."""
    offset = 0
    for size, stride in zip(sizes[:0:-1], strides[:0:-1], strict=True):
        index, coordinate = divmod(index, size)
        offset += coordinate * stride
    return offset + index * strides[0]


def step_of(mode: Mode, facts: Math) -> int:
    """How far apart neighbours of a mode lie, in all main operands together; modes of one element count for none."""
    return sum(abs(mode.strides[i]) for i in facts.main) if mode.size > 1 else 1 << 62


def access_of(vector: int, place: Sequence[int], reference: Sequence[int]) -> int:
    """Elements of a load where vectors begin as those of another operand do. place, reference: offset and strides of
    the operand and of that other."""
    return math.gcd(vector, *(a - b for a, b in zip(place, reference, strict=True)))


def rows_of_vectors(
    problem: Problem, others: Sequence[Mode], reduced: Mode, inner: Mode, vector: int, facts: Math
) -> int | None:
    """How many rows of memory along the inner mode, which follow each other along the reduced one, make whole vectors
    that begin on their boundaries: 1 where a row does; None where none do, or where they do not follow each other.

    others: the kept modes beside the inner one.
    """
    begins = [problem.offsets[i] for i in facts.main] + [m.strides[i] for m in others for i in facts.main]
    if any(n % vector for n in begins) or any(inner.strides[i] != 1 for i in facts.main):
        return None
    steps = {reduced.strides[i] for i in facts.main}
    if not any(n % vector for n in (inner.size, *steps)):
        return 1
    return vector // math.gcd(vector, inner.size) if steps == {inner.size} else None


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
