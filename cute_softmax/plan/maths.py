"""What plans know of the row maths: their tensors, and what partial results weigh."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
CACHE_LINE = 128  # bytes


@dataclass(frozen=True)
class Math:
    """What a plan must know of a row math: its tensors, and what one exchange between warps carries."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: int  # exchanges per row
    state_bytes: int  # of one exchanged state


MATHS = {
    ("softmax", True): Math(("x",), ("y",), stages=1, state_bytes=8),  # online: one (max, sum) pair
    ("softmax", False): Math(("x",), ("y",), stages=2, state_bytes=4),  # max, then sum
    ("softmax_backward", True): Math(("dy", "y"), ("dx",), stages=1, state_bytes=4),
}


class NotPlanned(NotImplementedError, ValueError):
    """A problem that no movement serves yet."""
