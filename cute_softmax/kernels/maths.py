"""Row maths: what is loaded, reduced and written. A movement calls them; they know nothing of memory.

A row math has

- `inputs`, `outputs`, `group_outputs`: the names of its tensors, in the order of the kernel's operands; those of the
  last kind have one element per row;
- `padding`: per input, what an element outside the row counts as;
- `reductions`: the operators of its stages, in order;
- `keep`: whether converted values stay in registers between the passes over the row;
- `partial(stage, values, carry, width)`: this thread's part of one row, merged over `width` lanes; returns the
  state and whatever the thread wants to keep for `finish`;
- `collect(values)`: the state of this thread's elements alone: no lane is asked and nothing is kept. States of parts
  of a row, merged by the operator of the one stage, are its state. Of maths that are online or have one stage;
- `finish(values, kept, carry)`: the row's results, one iterable per output;
- `group_results(carry)`: one number per group output.

`values` holds one `copy.Fragment` per input: the elements of the row that this thread owns. `carry` holds the
states of the finished stages, each merged over the whole row.
"""

import operator
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from . import online
from .online import exp_fast, exp_precise
from .reduce import MAX, SUM, Online, tree


class RowMath:
    """What most row maths share: no result beyond the full ones, and nothing kept."""

    outputs: tuple[str, ...] = ()
    group_outputs: tuple[str, ...] = ()
    keep = False

    def finish(self, values: list, kept: object, carry: list) -> list:
        return []

    def group_results(self, carry: list) -> list[Float32]:
        return []


class Softmax(RowMath):
    """y = exp(x - max) / sum(exp(x - max)), online (one exchange of pairs) or in two passes (max, then sum).

    precise: for results stored in float32.
    keep: hold the exponentials in registers until the end; without it they are evaluated again, which costs a
        second exp2 per element and halves the registers of a 16-bit row.
    part: without `keep`, the online recurrence advances by so many vectors at a time.
    """

    inputs = ("x",)
    outputs = ("y",)
    padding = (-float("inf"),)

    def __init__(self, *, online: bool, precise: bool, keep: bool, part: int = 2):
        self.online, self.precise, self.keep, self.part = online, precise, keep, part
        self.exp = exp_precise if precise else exp_fast
        self.pair = Online(self.exp)
        self.reductions = (self.pair,) if online else (MAX, SUM)

    def sum_of_powers(self, values: list, ref: Float32) -> Float32:
        return tree(operator.add, (self.exp(v, ref) for v in values))

    def collect(self, values: list) -> tuple:
        (x,) = values
        seen = x.maximum()
        return seen, self.sum_of_powers(x, online.reference(seen))

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        (x,) = values
        if self.online and not self.keep:
            state = None
            for part in x.parts(self.part):
                part_max = tree(online.maximum, part)
                seen = part_max if state is None else online.maximum(state[0], part_max)
                total = self.sum_of_powers(part, online.reference(seen))
                state = (
                    seen,
                    total if state is None else online.rescale(state[1], state[0], seen, self.exp) + total,
                )
            return self.pair.lanes(state, width), None
        if stage == 1:
            seen = carry[0][0]
        else:
            (seen,) = MAX.lanes((x.maximum(),), width)
            if not self.online:
                return (seen,), None
        ref = online.reference(seen)
        powers = [self.exp(v, ref) for v in x] if self.keep else (self.exp(v, ref) for v in x)
        (total,) = SUM.lanes((tree(operator.add, powers),), width)
        return ((seen, total) if self.online else (total,)), (seen, powers)

    def finish(self, values: list, kept: tuple | None, carry: list) -> list:
        row_max, total = carry[0] if self.online else (carry[0][0], carry[1][0])
        inverse = cute.arch.rcp_approx(total)  # total >= 1, or 0 where all is -inf, or NaN
        if not self.keep:
            ref = online.reference(row_max)
            return [self.quotients((self.exp(v, ref) for v in values[0]), total, inverse)]
        seen, powers = kept
        if self.online:
            # The powers refer to the maximum of this warp.
            correction = online.rescale(Float32(1.0), seen, row_max, self.exp)
            if self.precise:
                powers = (p * correction for p in powers)
            else:
                inverse = inverse * correction
        return [self.quotients(powers, total, inverse)]

    def quotients(self, powers: Iterator[Float32], total: Float32, inverse: Float32) -> Iterator[Float32]:
        for power in powers:
            quotient = power * inverse
            if self.precise:
                # One step of long division: the rounding of the quotient itself is what remains.
                quotient = cute.math.fma(cute.math.fma(-total, quotient, power), inverse, quotient)
            yield quotient


class SoftmaxBackward(RowMath):
    """dx = y * (dy - sum(dy * y))."""

    inputs = ("dy", "y")
    outputs = ("dx",)
    padding = (0.0, 0.0)
    reductions = (SUM,)

    def __init__(self, *, keep: bool):
        self.keep = keep

    def collect(self, values: list) -> tuple:
        dy, y = values
        return (tree(operator.add, (a * b for a, b in zip(dy, y, strict=True))),)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        return SUM.lanes(self.collect(values), width), None

    def finish(self, values: list, kept: None, carry: list) -> list:
        dy, y = values
        ((dot,),) = carry
        return [(b * (a - dot) for a, b in zip(dy, y, strict=True))]


class LogSumExp(Softmax):
    """lse = max + log(sum(exp(x - max))): online, as softmax, but the elements are read and nothing else."""

    outputs = ()
    group_outputs = ("lse",)

    def __init__(self, *, precise: bool):
        super().__init__(online=True, precise=precise, keep=False)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        # The maximum of all lanes first: their sums then refer to the same number and need no correction.
        (x,) = values
        (seen,) = MAX.lanes((x.maximum(),), width)
        return (seen, *SUM.lanes((self.sum_of_powers(x, online.reference(seen)),), width)), None

    def finish(self, values: list, kept: None, carry: list) -> list:
        return []

    def group_results(self, carry: list) -> list[Float32]:
        ((row_max, total),) = carry
        result = row_max + cute.math.log(total)
        # +inf in the row has made the sum NaN; without NaN among the elements the result is +inf, as in torch.
        infinity = Float32(float("inf"))
        return [Float32(cutlass.select_(row_max == infinity, infinity, result))]


class Maximum(RowMath):
    """max of a row; NaN if one element is NaN."""

    inputs = ("x",)
    group_outputs = ("max",)
    padding = (-float("inf"),)
    reductions = (MAX,)

    def collect(self, values: list) -> tuple:
        return (values[0].maximum(),)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        return MAX.lanes(self.collect(values), width), None

    def group_results(self, carry: list) -> list[Float32]:
        return [carry[0][0]]


class Sum(RowMath):
    """Sum of a row: pairwise within a thread, then over lanes, warps and CTAs, all in float32."""

    inputs = ("x",)
    group_outputs = ("total",)
    padding = (0.0,)
    reductions = (SUM,)

    def collect(self, values: list) -> tuple:
        return (tree(operator.add, values[0]),)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        return SUM.lanes(self.collect(values), width), None

    def group_results(self, carry: list) -> list[Float32]:
        return [carry[0][0]]
