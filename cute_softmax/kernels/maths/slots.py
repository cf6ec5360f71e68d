"""The states of several groups side by side, in a thread's registers: rS, (number, slot)."""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32

from .maths import RowMath


def nothing(math: RowMath, slots: int, numbers: int = 0) -> cute.Tensor:
    """rS of slots that have seen nothing. numbers: that each has room for, zeros behind those of a state."""
    identity = math.whole.identity
    rS = cute.make_rmem_tensor((max(len(identity), numbers), slots), Float32)
    if numbers:
        rS.fill(0.0)
    for v in range(slots):
        for n, number in enumerate(identity):
            rS[n, v] = Float32(number)
    return rS


def absorb(math: RowMath, rS: cute.Tensor, totals: Callable[[int, list[tuple]], list[Float32]]) -> None:
    """Fold elements into the states. totals(stage, carry): what they add to a stage, per slot; carry: per slot, the
    results of the stages before."""
    slots = range(rS.shape[1])
    before = [tuple(rS[n, v] for n in range(len(math.whole.identity))) for v in slots]
    carry = [() for _ in slots]
    for stage, op in enumerate(math.reductions):
        found = totals(stage, carry)
        for v in slots:
            carry[v] += (op.op(found[v], math.whole.refer(stage, before[v], carry[v])),)
    for v in slots:
        for n, number in enumerate(carry[v]):
            rS[n, v] = number
