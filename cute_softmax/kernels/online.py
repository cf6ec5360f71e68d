"""The (max, sum of exponentials) state of a softmax: the only code that evaluates exp2 and merges partial states.

A state describes a part of a row: `max` is the largest element seen and `sum` is the sum of
``exp(x - reference(max))``. It is right for a part that has seen nothing but -inf or padding (max = -inf,
sum = 0), and it carries NaN: `maximum` propagates it, so one NaN makes its whole row NaN; +inf does the same
through ``inf - inf``. Both are what torch does.

Source of the recurrence: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
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
HUGE = 2.0**126  # times log2(e) it is still finite
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
    """

    @staticmethod
    def scale(ref: Float32) -> Float32:
        """log2(e), but less where the product would overflow: there neighbours lie so far apart that any will do."""
        far = cute.arch.fmax(ref, -ref) > Float32(HUGE)
        return Float32(cutlass.select_(far, Float32(LOG2_E / 4), Float32(LOG2_E)))

    @classmethod
    def power(cls, x: Float32, ref: Float32) -> Float32:
        """exp(x - ref)."""
        scale = cls.scale(ref)
        return cute.math.exp2(cute.math.fma(x, scale, -(ref * scale)), fastmath=True)

    @classmethod
    def ratio(cls, old: Float32, new: Float32) -> Float32:
        """exp(old - new) of two references, new >= old."""
        scale = cls.scale(new)
        return cute.math.exp2(old * scale - new * scale, fastmath=True)


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
    total: Float32, old_max: Float32, new_max: Float32, exp: type[Fast] | type[Precise] = Precise
) -> Float32:
    """A sum taken relative to old_max, made relative to new_max >= old_max; exp: which exponential."""
    return total * exp.ratio(reference(old_max), reference(new_max))
