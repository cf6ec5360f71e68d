"""P^T of a step of softmax_matmul's backward, and which of its elements count."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint32, const_expr

from ..common.copy import DTYPES, unpack
from ..common.index import select
from ..common.online import LOG2_E
from .backward_walk import Step, Thread, Walk, each
from .memory import nearest

ALL = 0xFFFFFFFF  # the bits of a thread's elements that count, a step has 32 at most


@cute.jit
def exponentials(
    walk: Walk,
    thread: Thread,
    step: Step,
    column: Int32,
    sL: cute.Tensor,
    stage: Int32,
    rS: cute.Tensor,
    exps: cute.Tensor,
) -> Uint32:
    """P^T: exp of the scores of this thread less their rows' log-sum-exp, zero where they do not count. Returns one bit
    for each: whether it counts.

    column: this thread's first column of S. sL: numbers of rows.
    """
    s, call = walk.spec, walk.call
    row, limits = step.m * s.rows + thread.pair, (call.M, call.N)
    counts = Uint32(ALL)
    scores = unpack(rS)
    for i, j, k, h in each(s.rows):
        lse = sL[j * 8 + thread.pair + k, 0, stage]
        # Subtracted before the change of base: near the maximum, where exponentials are large, nothing is lost.
        if const_expr(s.bias != ""):
            at = row + 8 * j + k, column + 8 * h
            bias = nearest(DTYPES[s.bias], call.bias, *at, step.modes, limits)
            exponent = cute.math.fma(scores[i], call.scale, bias.to(Float32)) - lse
        else:
            exponent = cute.math.fma(scores[i], call.scale, -lse)
        exponential = cute.math.exp2(exponent * LOG2_E, fastmath=True)
        if const_expr(s.mask):
            at = row + 8 * j + k, column + 8 * h
            mask = nearest(Uint8, call.mask, *at, step.modes, limits)
            counts = drop(counts, mask == 0, i)
        if const_expr(s.lines):
            # What lies behind the last row in shared memory may be anything.
            exponential = select(row + 8 * j + k < call.M, exponential, Float32(0.0))
        exps[i] = exponential
    if const_expr(s.causal):
        # Only blocks on the diagonal have columns that do not count.
        beyond = column - call.offset - row
        if step.m * s.rows + call.offset < column + 8:
            for i, j, k, h in each(s.rows):
                counts = drop(counts, beyond + 8 * h > 8 * j + k, i)
    if const_expr(s.hides):
        hide_exponentials(s.rows, exps, counts, sL, thread.pair, stage)
    return counts


@cute.jit
def hide_exponentials(
    rows: cutlass.Constexpr[int],
    exps: cute.Tensor,
    counts: Uint32,
    sL: cute.Tensor,
    pair: Int32,
    stage: Int32,
):
    """Zero where a score does not count, but in a row that is NaN everything is, as in torch."""
    if counts != ALL:
        for i, j, k, _ in each(rows):
            lse = sL[j * 8 + pair + k, 0, stage]
            kept = (counts >> i & 1 != 0) | (lse != lse)
            exps[i] = select(kept, exps[i], Float32(0.0))


def drop(bits: Uint32, condition: Boolean, i: int) -> Uint32:
    """The bits without bit i, if the condition holds."""
    return bits & select(condition, Uint32(ALL ^ (1 << i)), Uint32(ALL))


@cute.jit
def hide(values: cute.Tensor, counts: Uint32):
    """Zero where a bit is missing."""
    if counts != ALL:
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = select(counts >> i & 1 != 0, values[i], Float32(0.0))
