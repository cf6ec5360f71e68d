"""P^T of a step of softmax_matmul's backward, and which of its elements count."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint32, const_expr

from ..common.copy import DTYPES, global_pointer, unpack
from ..common.index import dot
from ..common.online import LOG2_E

ALL = 0xFFFFFFFF  # the bits of a thread's elements that count, a step has 32 at most


class Exponentials:
    """How `MatmulBackwardKernel` makes probabilities of scores."""

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """(register, block of 8 rows, row of the pair, column of the pair) of a thread's part of S^T."""
        for j in range(self.spec.rows // 8):
            for h in range(2):
                for k in range(2):
                    yield j * 4 + h * 2 + k, j, k, h

    @cute.jit
    def exponentials(
        self,
        this,
        rS,
        exps,
        stage: Int32,
        m: Int32,
        column: Int32,
        pair: Int32,
        head: Int32,
        batch: tuple,
    ) -> Uint32:
        """P^T: exp of the scores of this thread less their rows' log-sum-exp, zero where they do not count. Returns
        one bit for each: whether it counts."""
        s = self.spec
        row = m * s.rows + pair
        counts = Uint32(ALL)
        scores = unpack(rS)
        for i, j, k, h in self.each():
            lse = this.sL[j * 8 + pair + k, 0, stage]
            # Subtracted before the change of base: near the maximum, where exponentials are large, nothing is lost.
            if const_expr(s.bias != ""):
                bias = self.element(
                    this, DTYPES[s.bias], this.bias, row + 8 * j + k, column + 8 * h, head, batch
                )
                exponent = cute.math.fma(scores[i], this.scale, bias.to(Float32)) - lse
            else:
                exponent = cute.math.fma(scores[i], this.scale, -lse)
            exponential = cute.math.exp2(exponent * LOG2_E, fastmath=True)
            if const_expr(s.mask):
                mask = self.element(this, Uint8, this.mask, row + 8 * j + k, column + 8 * h, head, batch)
                counts = drop(counts, mask == 0, i)
            if const_expr(s.lines):
                # What lies behind the last row in shared memory may be anything.
                exponential = Float32(cutlass.select_(row + 8 * j + k < this.M, exponential, Float32(0.0)))
            exps[i] = exponential
        if const_expr(s.causal):
            # Only blocks on the diagonal have columns that do not count.
            beyond = column - this.offset - row
            if m * s.rows + this.offset < column + 8:
                for i, j, k, h in self.each():
                    counts = drop(counts, beyond + 8 * h > 8 * j + k, i)
        if const_expr(s.hides):
            self.hide_exponentials(this, exps, counts, pair, stage)
        return counts

    @cute.jit
    def hide_exponentials(self, this, exps, counts: Uint32, pair: Int32, stage: Int32):
        """Zero where a score does not count, but in a row that is NaN everything is, as in torch."""
        if counts != ALL:
            for i, j, k, _ in self.each():
                lse = this.sL[j * 8 + pair + k, 0, stage]
                kept = (counts >> i & 1 != 0) | (lse != lse)
                exps[i] = Float32(cutlass.select_(kept, exps[i], Float32(0.0)))

    def element(self, this, dtype, operand, row: Int32, column: Int32, head: Int32, batch: tuple):
        """An element of a mask or bias; outside, some other one."""
        address, *strides = operand
        within = [cutlass.min(row, this.M - 1), cutlass.min(column, this.N - 1), head, *batch]
        pointer = global_pointer(dtype, address, dot(within, strides), dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]


def drop(bits: Uint32, condition: Boolean, i: int) -> Uint32:
    """The bits without bit i, if the condition holds."""
    return bits & Uint32(cutlass.select_(condition, Uint32(ALL ^ (1 << i)), Uint32(ALL)))


@cute.jit
def hide(values, counts: Uint32):
    """Zero where a bit is missing."""
    if counts != ALL:
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = Float32(cutlass.select_(counts >> i & 1 != 0, values[i], Float32(0.0)))
