"""The (max, sum of exponentials) state of a softmax: the only code that evaluates exp2 and merges partial states.

A state describes a part of a row: `max` is the largest element seen and `sum` is the sum of
``exp(x - reference(max))``. It is right for a part that has seen nothing but -inf or padding (max = -inf,
sum = 0), and it carries NaN: `maximum` propagates it, so one NaN makes its whole row NaN; +inf does the same
through ``inf - inf``. Both are what torch does.

Source of the recurrence: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
import struct
from collections.abc import Iterable, Iterator
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Float32, Int32

from .index import select

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# What the float32 constants lose of log2(e) and of log(2).
LOG2_E_TAIL, LN_2_TAIL = (n - struct.unpack("f", struct.pack("f", n))[0] for n in (LOG2_E, LN_2))
# (tanh(u) / u - 1) / u ** 2 by powers of u ** 2, the highest first, for |u| <= 0.55: of least relative error of the
# tangent (1e-09 in exact arithmetic).
TANH = (
    -0.006274239092154532,
    0.02107167869193921,
    -0.053852309802689916,
    0.13332586137189167,
    -0.3333331755961933,
)
NEAR_0 = 0.55
ROUND = 1.5 * 2.0**23  # added to a smaller number it makes it an integer, in the sum's last bits
BIAS = 127  # of the exponent of a float32
POWERS = 252  # of two, around 1: what a float32's exponent has room for
LOWEST = -3.4028234663852886e38  # the most negative finite float32
VANISHES = -200.0  # exp(-200) and 2 ** -200 are zero in float32: clamping a difference here changes no result


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger of two numbers; NaN if either is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def reference(maximum_seen: Float32) -> Float32:
    """What is subtracted before the exponential: the maximum, but finite where that is -inf.

    -inf - (-inf) would be NaN in every thread whose part of the row is all -inf or padding.
    """
    return maximum(maximum_seen, Float32(LOWEST))


class Fast:
    """Exponentials about 2 ulp off: for results stored in 16 bits. One FMA and one ex2 each.

    An element's exponent is ``x * scale - round(ref * scale)``, rounded once; the second term is the same for all
    that share a reference, so that its rounding cancels in the quotient. For that `ratio` must round alike.

    source: the elements' dtype. Where its numbers lie so far apart that two different ones are e^100 apart, scale is
    1 instead of log2(e): then the product is exact, where the rounding of a huge one would be a huge factor.
    """

    # From here on neighbours differ by 128 and more. (A float16 ends before, but the reference of nothing does not.)
    FAR: ClassVar = {"bf16": 2.0**15, "fp16": 2.0**30, "fp32": 2.0**30}
    unit: ClassVar = LN_2

    def __init__(self, source: str):
        self.far = self.FAR[source]

    def scale(self, ref: Float32) -> Float32:
        far = cute.arch.fmax(ref, -ref) >= Float32(self.far)
        return select(far, Float32(1.0), Float32(LOG2_E))

    @staticmethod
    def score(x: Float32) -> Float32:
        """What an element stands for."""
        return x

    @staticmethod
    def product(ref: Float32, scale: Float32) -> Float32:
        """ref * scale, rounded."""
        return rounded_product(ref, scale)

    def line(self, ref: Float32) -> tuple[Float32, Float32]:
        """What exponents are relative to a reference, as (factor of an element, what is added)."""
        scale = self.scale(ref)
        return scale, -self.product(ref, scale)

    def exponent(self, x: Float32, ref: Float32) -> Float32:
        """The exponent of 2 in exp(x - ref)."""
        return cute.math.fma(x, *self.line(ref))

    def exponential(self, x: Float32, ref: Float32) -> Float32:
        """exp(x - ref)."""
        return cute.math.exp2(self.exponent(x, ref), fastmath=True)

    def exponentials(self, values: Iterable[Float32], ref: Float32) -> Iterator[Float32]:
        """`exponential` of each; what they have in common is computed once, and not left to the compiler to find."""
        line = self.line(ref)
        return (cute.math.exp2(cute.math.fma(x, *line), fastmath=True) for x in values)

    def power(self, x: Float32, ref: Float32) -> tuple[Float32, Float32]:
        """exp(x - ref), and its logarithm in units of `unit`: finite, even where the exponential is 0."""
        exponent = maximum(self.exponent(x, ref), Float32(VANISHES))
        return cute.math.exp2(exponent, fastmath=True), exponent

    def norm(self, total: Float32, ref: Float32) -> Float32:
        """What `unit` times a logarithm of `power` exceeds that of the softmax by, of which `total` is the sum."""
        return self.log(total, ref) + self.exponent(ref, ref) * Float32(LN_2)

    def fallen(self, old: Float32, new: Float32) -> Float32:
        """The exponent of 2 in exp(old - new) of two references, new >= old."""
        scale = self.scale(new)
        return self.product(old, scale) - self.product(new, scale)

    def ratio(self, old: Float32, new: Float32) -> Float32:
        """exp(old - new) of two references, new >= old."""
        return cute.math.exp2(self.fallen(old, new), fastmath=True)

    def slope(self, ref: Float32, scale: Float32) -> Float32:
        """What a score is multiplied by in the exponent of 2 of exp(scale * (x - ref))."""
        product = ref * scale
        far = cute.arch.fmax(product, -product) >= Float32(self.far)
        return select(far, scale, scale * Float32(LOG2_E))

    def shift(self, ref: Float32, slope: Float32, headroom: float) -> Float32:
        """What is added to it, so that the power of `ref` itself is 2 ** headroom."""
        return Float32(headroom) - rounded_product(ref, slope)

    def exponential_on(self, x: Float32, slope: Float32, shift: Float32) -> Float32:
        """exp(scale * (x - ref)) * 2 ** headroom."""
        return cute.math.exp2(cute.math.fma(x, slope, shift), fastmath=True)

    def fall(self, old: Float32, new: Float32, slope: Float32) -> Float32:
        """exp(scale * (old - new)) of two references, at most 1, with the slope of `new`."""
        exponent = rounded_product(old, slope) - rounded_product(new, slope)
        return cute.math.exp2(cute.arch.fmin(exponent, Float32(0.0)), fastmath=True)

    def log(self, total: Float32, ref: Float32) -> Float32:
        """The logarithm of a sum of these exponentials over that of the reference itself: where nothing else counts,
        exactly 0, though no power of two is exact.
        """
        return cute.math.log(self.relative(total, ref))

    def relative(self, total: Float32, ref: Float32) -> Float32:
        """A sum of these exponentials over that of the reference itself."""
        return quotient(total, self.exponential(ref, ref))


class Near:
    """Exponentials of the rounded difference: for what is taken the logarithm of. One more addition than `Fast`.

    The exponential of the reference itself is exactly 1, and so the logarithm of a sum exactly 0 where nothing else
    counts.
    """

    unit: ClassVar = 1.0

    @staticmethod
    def score(x: Float32) -> Float32:
        """What an element stands for."""
        return x

    @staticmethod
    def difference(x: Float32, ref: Float32) -> Float32:
        """x - ref."""
        return x - ref

    def of(self, difference: Float32) -> Float32:
        """exp(difference)."""
        return cute.math.exp2(difference * Float32(LOG2_E), fastmath=True)

    def exponential(self, x: Float32, ref: Float32) -> Float32:
        """exp(x - ref)."""
        return self.of(self.difference(x, ref))

    def exponentials(self, values: Iterable[Float32], ref: Float32) -> Iterator[Float32]:
        """`exponential` of each."""
        return (self.exponential(x, ref) for x in values)

    def power(self, x: Float32, ref: Float32) -> tuple[Float32, Float32]:
        """exp(x - ref), and its logarithm: finite, even where the exponential is 0."""
        difference = maximum(self.difference(x, ref), Float32(VANISHES))
        return self.of(difference), difference

    def norm(self, total: Float32, ref: Float32) -> Float32:
        """What a logarithm of `power` exceeds that of the softmax by, of which `total` is the sum."""
        return self.log(total, ref)

    def ratio(self, old: Float32, new: Float32) -> Float32:
        """exp(old - new) of two references, new >= old; 1 for equal ones."""
        return self.of(self.difference(old, new))

    @staticmethod
    def log(total: Float32, ref: Float32) -> Float32:
        """The logarithm of a sum of these exponentials."""
        return cute.math.log(total)

    @staticmethod
    def relative(total: Float32, ref: Float32) -> Float32:
        """A sum of these exponentials over that of the reference itself."""
        return total

    def fallen(self, old: Float32, new: Float32) -> Float32:
        """The exponent in `ratio`, in units of `unit`."""
        return self.difference(old, new)


def quotient(a: Float32, b: Float32) -> Float32:
    """a / b, to about half an ulp; exactly 1 for equal numbers."""
    inverse = cute.arch.rcp_approx(b)
    found = a * inverse
    return cute.math.fma(cute.math.fma(-b, found, a), inverse, found)


def rounded_product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded: the compiler must not join it with an addition into an FMA."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def rounded_sum(a: Float32, b: Float32) -> Float32:
    """a + b of two rounded numbers: the compiler must not join a product that one of them is with it into an FMA."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def saturated(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, from 0 to 1; 0 for NaN."""
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def rounded_down(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded towards -inf."""
    return cute.arch.inline_ptx(
        "fma.rm.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


class Precise(Near):
    """Exponentials to 1 ulp beyond the rounding of the difference, for results stored in float32."""

    def of(self, difference: Float32) -> Float32:
        """exp(difference), as CUDA's own expf makes it.

        Rounding (x - ref) * log2(e) alone would cost more than 2 ulp. So the exponent is cut into a whole part, whose
        power of two is made of bits, and a fraction, found with FMAs to the last bit, for ex2.approx. What remains is
        what torch has, too: half an ulp of the difference. Where the whole part has no room in an exponent the fraction
        has the rest: all of -inf.
        """
        place = saturated(difference, Float32(LOG2_E / POWERS), Float32(0.5))
        biased = rounded_down(place, Float32(POWERS), Float32(ROUND + 1))
        whole = biased - Float32(ROUND + BIAS)
        fraction = cute.math.fma(difference, Float32(LOG2_E), -whole)
        fraction = cute.math.fma(difference, Float32(LOG2_E_TAIL), fraction)
        power = (biased.bitcast(Int32) << 23).bitcast(Float32)
        return power * cute.math.exp2(fraction, fastmath=True)


class Corrected(Near):
    """Exponentials to 2 ulp beyond the rounding of the difference, for results stored in float32 of 16-bit elements: in
    half the instructions of `Precise`, as such rows have less to load meanwhile."""

    def of(self, difference: Float32) -> Float32:
        """exp(difference): ex2.approx of the rounded exponent, and to first order what the rounding has lost."""
        difference = maximum(difference, Float32(VANISHES))
        exponent = rounded_product(difference, Float32(LOG2_E))
        lost = cute.math.fma(exponent, Float32(-LN_2), difference)
        lost = cute.math.fma(exponent, Float32(-LN_2_TAIL), lost)
        exponential = cute.math.exp2(exponent, fastmath=True)
        return cute.math.fma(exponential, lost, exponential)


class Scaled:
    """Exponentials of scaled elements, exp(factor * (x - ref)): the factor is part of a product or an FMA that is there
    anyway. References are elements, too.

    factor: positive. The elements that have exp(factor * x) nearest to that of the reference are either the same as
    it or, where `far` is reached, too far from it to count: then any factor will do that is not smaller and whose
    products are exact, a power of two.
    """

    far: float

    def __init__(self, factor: Float32, far: float):
        self.factor, self.far = factor, far

    def score(self, x: Float32) -> Float32:
        """x * factor, rounded."""
        return rounded_product(x, self.factor)

    def at(self, ref: Float32, factor: Float32) -> Float32:
        """`factor` where the reference is near, else the power of two; 1 for the reference of nothing."""
        product = ref * self.factor
        far = cute.arch.fmax(product, -product) >= Float32(self.far)
        bits = (self.factor.bitcast(Int32) + Int32(0x007FFFFF)) & Int32(0x7F800000)
        factor = select(far, bits.bitcast(Float32), factor)
        return select(ref <= Float32(LOWEST), Float32(1.0), factor)

    @staticmethod
    def product(ref: Float32, scale: Float32) -> Float32:
        """ref * scale, rounded and finite for the reference of nothing."""
        return maximum(rounded_product(ref, scale), Float32(LOWEST))


class ScaledFast(Scaled, Fast):
    """`Fast` of scaled elements."""

    def scale(self, ref: Float32) -> Float32:
        return self.at(ref, self.factor * Float32(LOG2_E))


class ScaledNear(Scaled, Near):
    """`Near` of scaled elements. Differences are off by what the reference's product lost by rounding, all alike."""

    def line(self, ref: Float32) -> tuple[Float32, Float32]:
        """Of differences, see `Fast.line`."""
        scale = self.at(ref, self.factor)
        return scale, -self.product(ref, scale)

    def difference(self, x: Float32, ref: Float32) -> Float32:
        """factor * (x - ref)."""
        return cute.math.fma(x, *self.line(ref))

    def exponentials(self, values: Iterable[Float32], ref: Float32) -> Iterator[Float32]:
        """`exponential` of each, see `Fast.exponentials`."""
        line = self.line(ref)
        return (self.of(cute.math.fma(x, *line)) for x in values)

    def ratio(self, old: Float32, new: Float32) -> Float32:
        """exp(factor * (old - new)) of two references, new >= old, by the rounded products that differences are from:
        1 for equal ones."""
        return self.of(self.fallen(old, new))

    def log(self, total: Float32, ref: Float32) -> Float32:
        """What is to be subtracted from a difference: the logarithm of a sum of these exponentials."""
        return self.difference(ref, ref) + cute.math.log(quotient(total, self.exponential(ref, ref)))

    def fallen(self, old: Float32, new: Float32) -> Float32:
        """The exponent in `ratio`, by the rounded products."""
        scale = self.at(new, self.factor)
        return self.product(old, scale) - self.product(new, scale)


class ScaledPrecise(ScaledNear, Precise):
    """`Precise` of scaled elements."""


def scaled(exp: Fast | Near, factor: Float32) -> Scaled:
    """The exponentials of `exp` with every difference times the factor."""
    if isinstance(exp, Fast):
        return ScaledFast(factor, exp.far)
    return (ScaledPrecise if isinstance(exp, Precise) else ScaledNear)(factor, Fast.FAR["fp32"])


def less_one(x: Float32) -> Float32:
    """exp(x) - 1 for x <= 0, to 2 ulp: near 0 by the series, where the difference would cancel."""
    series = Float32(1 / 40320)
    for factorial in (5040, 720, 120, 24, 6, 2, 1):
        series = cute.math.fma(series, x, Float32(1 / factorial))
    far = Precise().exponential(x, Float32(0.0)) - 1.0
    return select(x > -0.35, series * x, far)


def tanh(x: Float32) -> Float32:
    """The hyperbolic tangent, to 3 ulp: near 0 by a polynomial, where the quotient would cancel."""
    square = x * x
    near = Float32(TANH[0])
    for coefficient in TANH[1:]:
        near = cute.math.fma(near, square, Float32(coefficient))
    near = cute.math.fma(near * square, x, x)
    size = cute.arch.fmax(x, -x)
    power = cute.math.exp2(size * Float32(-2 * LOG2_E), fastmath=True)
    far = 1.0 - 2.0 * power * cute.arch.rcp_approx(1.0 + power)
    return select(size < NEAR_0, near, select(x < 0.0, -far, far))


def capped(score: Float32, cap: Float32, rough: bool = False) -> Float32:
    """cap * tanh(score / cap): for all of a row's elements and the one that is chosen, rounded alike.

    rough: as near as a few ulp of the cap, in a quarter of the instructions: for results that are stored in 16 bits.
    """
    inverse = quotient(Float32(1.0), cap)
    if not rough:
        return rounded_product(cap, tanh(score * inverse))
    power = cute.math.exp2(score * (inverse * Float32(2 * LOG2_E)), fastmath=True)
    return cute.math.fma(-2.0 * cap, cute.arch.rcp_approx(1.0 + power), cap)


def cap_slope(score: Float32, cap: Float32) -> Float32:
    """The derivative of `capped` by what it is of, where it is this score."""
    share = score * quotient(Float32(1.0), cap)
    return cute.math.fma(-share, share, Float32(1.0))


def rescale(total: Float32, old_max: Float32, new_max: Float32, exp: Fast | Near) -> Float32:
    """A sum taken relative to old_max, made relative to new_max >= old_max; exp: which exponential."""
    return total * exp.ratio(reference(old_max), reference(new_max))
