"""Dimensions that do not merge: how many a kernel takes an index apart into, and where an index leads."""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Mode

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
