"""The (max, sum of exponentials) state of a softmax: the only code that evaluates exp2 and merges partial states.

A state describes a part of a row: `max` is the largest element seen and `sum` is the sum of
``exp(x - reference(max))``. It is right for a part that has seen nothing but -inf or padding (max = -inf,
sum = 0), and it carries NaN: `maximum` propagates it, so one NaN makes its whole row NaN; +inf does the same
through ``inf - inf``. Both are what torch does.

Source of the recurrence: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
import struct
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# What the float32 constant loses of log2(e).
LOG2_E_TAIL = LOG2_E - struct.unpack("f", struct.pack("f", LOG2_E))[0]
# 2 ** f for |f| <= 0.5, the highest power first: the polynomial of degree 6 of least relative error with p(0) = 1
# (2e-09 in exact arithmetic, 7.9e-08 in float32).
EXP2 = (
    0.0001535231733606489,
    0.0013400170123159748,
    0.009618449959953385,
    0.05550329349680741,
    0.24022647742414116,
    0.6931472041819232,
    1.0,
)
ROUND = 1.5 * 2.0**23  # added and taken away again, it rounds a smaller number to an integer
LOWEST = -3.4028234663852886e38  # the most negative finite float32
VANISHES = -200.0  # exp(-200) is zero in float32: clamping a difference here changes no result


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

    def __init__(self, source: str):
        self.far = self.FAR[source]

    def scale(self, ref: Float32) -> Float32:
        far = cute.arch.fmax(ref, -ref) >= Float32(self.far)
        return Float32(cutlass.select_(far, Float32(1.0), Float32(LOG2_E)))

    def power(self, x: Float32, ref: Float32) -> Float32:
        """exp(x - ref)."""
        scale = self.scale(ref)
        return cute.math.exp2(cute.math.fma(x, scale, -rounded_product(ref, scale)), fastmath=True)

    def ratio(self, old: Float32, new: Float32) -> Float32:
        """exp(old - new) of two references, new >= old."""
        scale = self.scale(new)
        exponent = rounded_product(old, scale) - rounded_product(new, scale)
        return cute.math.exp2(exponent, fastmath=True)

    def slope(self, ref: Float32, scale: Float32) -> Float32:
        """What a score is multiplied by in the exponent of 2 of exp(scale * (x - ref))."""
        product = ref * scale
        far = cute.arch.fmax(product, -product) >= Float32(self.far)
        return Float32(cutlass.select_(far, scale, scale * Float32(LOG2_E)))

    def shift(self, ref: Float32, slope: Float32, headroom: float) -> Float32:
        """What is added to it, so that the power of `ref` itself is 2 ** headroom."""
        return Float32(headroom) - rounded_product(ref, slope)

    def power_on(self, x: Float32, slope: Float32, shift: Float32) -> Float32:
        """exp(scale * (x - ref)) * 2 ** headroom."""
        return cute.math.exp2(cute.math.fma(x, slope, shift), fastmath=True)

    def fall(self, old: Float32, new: Float32, slope: Float32) -> Float32:
        """exp(scale * (old - new)) of two references, at most 1, with the slope of `new`."""
        exponent = rounded_product(old, slope) - rounded_product(new, slope)
        return cute.math.exp2(cute.arch.fmin(exponent, Float32(0.0)), fastmath=True)


def rounded_product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded: the compiler must not join it with an addition into an FMA."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


class Precise:
    """Exponentials to 1 ulp beyond the rounding of the difference, for results stored in float32."""

    @staticmethod
    def power(x: Float32, ref: Float32) -> Float32:
        """exp(x - ref).

        ex2.approx alone is off by 2 ulp, and rounding (x - ref) * log2(e) costs more than that. So the exponent is
        cut into a whole part, whose power of two ex2.approx gives exactly, and a fraction, found with FMAs to the
        last bit and put into a polynomial. What remains is what torch has, too: half an ulp of the difference.
        """
        difference = maximum(x - ref, Float32(VANISHES))
        whole = cute.math.fma(difference, Float32(LOG2_E), Float32(ROUND)) - ROUND
        fraction = cute.math.fma(difference, Float32(LOG2_E), -whole)
        fraction = cute.math.fma(difference, Float32(LOG2_E_TAIL), fraction)
        power = Float32(EXP2[0])
        for coefficient in EXP2[1:]:
            power = cute.math.fma(power, fraction, Float32(coefficient))
        return power * cute.math.exp2(whole, fastmath=True)

    ratio = power


def rescale(
    total: Float32, old_max: Float32, new_max: Float32, exp: Fast | type[Precise] = Precise
) -> Float32:
    """A sum taken relative to old_max, made relative to new_max >= old_max; exp: which exponential."""
    return total * exp.ratio(reference(old_max), reference(new_max))
