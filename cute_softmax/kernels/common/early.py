"""Programmatic dependent launch: a kernel is launched while what precedes it in its stream still runs, and waits for
its end before it touches global memory. So its launch takes no time of its own.

Only then the next kernel may be launched in the same way, as soon as all CTAs have come so far and an SM has room. So
each sees what it would see if they ran one after another, and at most two overlap.

A grid of more CTAs is launched as usual: the GPU starts 0.81 CTAs per nanosecond that wait and tell it so, and a third
more at least of others. 310688 x 432, bf16, has 155344 CTAs: 192 us instead of 129 (H200, 2026-11-26).

The wait comes first: behind what could be prepared it costs registers, and a few classes a CTA per SM. Products, whose
CTAs have an SM's registers divided among them, prepare before it, and each of their roles waits for itself.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .index import select

MOST_CTAS = 2048  # started in 2.5 us


def begins_early(spec: Any, grid: Sequence[Any]) -> Any:
    """Whether the kernel of a Plan class is launched so, with a grid of (x, y, 1) CTAs."""
    if not spec.early:
        return False
    return select(Int64(grid[0]) * grid[1] <= MOST_CTAS, Int32(1), Int32(0))


@cute.jit
def wait_for_stream(early: cutlass.Constexpr[bool]):
    """Wait until all that precedes this kernel has ended and its results can be seen; then let the next one begin."""
    if const_expr(early):
        x, y, _ = cute.arch.grid_dim()
        if Int64(x) * y <= MOST_CTAS:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
