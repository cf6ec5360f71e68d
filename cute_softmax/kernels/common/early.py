"""Programmatic dependent launch: a kernel is launched while what precedes it in its stream still runs, and waits for
its end before it touches global memory. So its launch takes no time of its own.

Only then the next kernel may be launched in the same way, as soon as all CTAs have come so far and an SM has room. So
each sees what it would see if they ran one after another, and at most two overlap.

A grid of more CTAs is launched as usual: the GPU starts 0.81 CTAs per nanosecond that wait and tell it so, and a third
more at least of others. 310688 x 432, bf16, has 155344 CTAs: 192 us instead of 129 (H200, 2026-11-26).

Where CTAs of two such grids hardly fit on the SMs together, those of the next one take what room there is, and some SMs
have half as many again as others: 12 rows of 524288 bf16 took 12.3 us instead of 10.2 (H200, 2026-11-30). So grids of
many CTAs let the next one begin when they store their results, or end.

A kernel finds its rows before it waits: 60 instructions fewer stand between the end of what precedes it and its first
load, which saves few rows 4 to 17% of 1 to 3 us. CTAs of clusters and of columns of which there are more than two for
each SM wait first all the same: they would take up to 1.2 times as long (H200, 2026-11-27; docs/experiments.md). Each
role of a product waits for itself.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .index import select

SMS = 128  # of the GPUs that can do it, in round numbers
MOST_CTAS = 16 * SMS  # started in 2.5 us
FEW_CTAS = 2 * SMS


def begins_early(spec: Any, grid: Sequence[Any]) -> Any:
    """Whether the kernel of a Plan class is launched so, with a grid of (x, y, 1) CTAs."""
    if not spec.early:
        return False
    return select(Int64(grid[0]) * grid[1] <= MOST_CTAS, Int32(1), Int32(0))


@cute.jit
def wait_for_stream(
    early: cutlass.Constexpr[bool],
    above: cutlass.Constexpr[int] = 0,
    upto: cutlass.Constexpr[int] = MOST_CTAS,
    told: cutlass.Constexpr[int] = MOST_CTAS,
):
    """Wait until all that precedes this kernel has ended and its results can be seen; then let the next one begin.

    above, upto: of how many CTAs a grid waits here. told: of how many it lets the next one begin; see `let_next_begin`.
    """
    if const_expr(early and above < upto):
        ctas = _ctas()
        if (ctas > above) & (ctas <= upto):
            cute.arch.griddepcontrol_wait()
            if ctas <= told:
                cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def let_next_begin(early: cutlass.Constexpr[bool], told: cutlass.Constexpr[int]):
    """Let the next kernel begin, if a grid of more CTAs than `told` has waited: before it stores its results."""
    if const_expr(early):
        ctas = _ctas()
        if (ctas > told) & (ctas <= MOST_CTAS):
            cute.arch.griddepcontrol_launch_dependents()


def _ctas() -> Int64:
    """Of this grid."""
    x, y, _ = cute.arch.grid_dim()
    return Int64(x) * y
