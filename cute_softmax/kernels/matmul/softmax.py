"""The numbers of a row of softmax(S) @ V: what its exponentials refer to, and what becomes of their sum."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from ...plan.matmul_class import MatmulClass
from ..common import online
from ..common.index import select

# The exponential of a row's reference is 2 ** HEADROOM, as small exponentials lose bits in float16, and a thread's sum
# of 16 exponentials may reach BOUND before the reference is moved: below what float16 holds, and so high that it rarely
# happens.
HEADROOM = 4.0
BOUND = 2.0**14
KNOWN_HEADROOM = 14.0  # where sums are given: then no exponential exceeds 1
TINY = 1e-30  # a scale of 0 leaves masked scores masked


@dataclass(frozen=True)
class Softmax:
    """The numbers of a row in a class of kernels."""

    spec: MatmulClass

    @property
    def exp(self) -> online.Fast:
        """Its exponentials."""
        return online.Fast(self.spec.dtypes[0])

    def factor(self, scale: Float32) -> Float32:
        """What packed scores are multiplied by in the exponent; their sign is changed before."""
        if self.spec.wide or not self.spec.scaled:
            return Float32(1.0)
        return cute.arch.fmax(cute.arch.fmax(scale, -scale), Float32(TINY))

    def log_sum(self, ref: Float32, total: Float32, scale: Float32, sink: Float32 | None = None) -> Float32:
        """The logarithm of a row's sum of exponentials, with the sink's if there is one."""
        log = finite(ref) * self.factor(scale) + cute.math.log(total) - Float32(HEADROOM * online.LN_2)
        if sink is None:
            return log
        exp, largest = online.Near(), online.maximum(log, sink)
        largest = online.reference(largest)
        both = largest + exp.log(exp.exponential(log, largest) + exp.exponential(sink, largest), largest)
        return select(sink == Float32(float("inf")), sink, both)  # as of such a score

    def inverse(self, total: Float32, ref: Float32, scale: Float32, sink: Float32 | None = None) -> Float32:
        """What a row's sums are multiplied by."""
        if self.spec.stats:
            return total
        alone = total
        if sink is not None:
            # Beyond float32's range it leaves nothing of the others.
            power = (sink - finite(ref) * self.factor(scale)) * Float32(online.LOG2_E) + Float32(HEADROOM)
            power = select(power == Float32(float("inf")), Float32(float("nan")), power)
            total = total + cute.math.exp2(power, fastmath=True)
        inverse = cute.arch.rcp_approx(total)
        if self.spec.zero:
            inverse = select(alone == 0.0, Float32(0.0), inverse)
        if sink is not None:  # where nothing counts but a sink, small as it may be
            inverse = select((alone == 0.0) & (sink > Float32(-float("inf"))), Float32(0.0), inverse)
        return inverse


def finite(ref: Float32) -> Float32:
    """A reference; 0 for rows that have seen nothing but -inf."""
    return select(ref == Float32(-float("inf")), Float32(0.0), ref)
