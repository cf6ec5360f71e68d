"""The (max, sum of exponentials) state of a softmax: the only code that evaluates exp2 and merges partial states.

A state describes a part of a row: `max` is the largest element seen and `sum` is the sum of
``exp(x - reference(max))``. It is right for a part that has seen nothing but -inf or padding (max = -inf,
sum = 0), and it carries NaN: `maximum` propagates it, so one NaN makes its whole row NaN; +inf does the same
through ``inf - inf``. Both are what torch does.

Source of the recurrence: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
import struct
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
# What the float32 constant loses of log2(e).
LOG2_E_TAIL = LOG2_E - struct.unpack("f", struct.pack("f", LOG2_E))[0]
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


def exp_fast(x: Float32, ref: Float32) -> Float32:
    """exp(x - ref), about 2 ulp beyond the rounding of the difference: for results stored in 16 bits.

    The difference is taken first: x * log2(e) alone would overflow for the largest bfloat16 values.
    """
    return cute.math.exp2((x - ref) * LOG2_E, fastmath=True)


def exp_precise(x: Float32, ref: Float32) -> Float32:
    """exp(x - ref) with the error of exp2 alone, for results stored in float32.

    What rounding loses of the difference (Knuth's two-sum), of its product with log2(e) and of log2(e) itself is
    added to the fraction of the exponent; its whole part is a power of two, which is exact. Without this the error
    of half an ulp of x - ref, some 5e-7 at a distance of 10, would be the largest of all.
    """
    difference = maximum(x - ref, Float32(VANISHES))
    minus_ref = difference - x
    rounding = (x - (difference - minus_ref)) - (ref + minus_ref)
    rounding = cute.arch.fmax(
        rounding, Float32(-1.0)
    )  # where the difference was clamped it may be NaN or -inf
    whole = cute.math.fma(difference, Float32(LOG2_E), Float32(ROUND)) - ROUND
    fraction = cute.math.fma(difference, Float32(LOG2_E), -whole)
    fraction = cute.math.fma(difference, Float32(LOG2_E_TAIL), fraction)
    fraction = cute.math.fma(rounding, Float32(LOG2_E), fraction)
    return cute.math.exp2(fraction, fastmath=True) * cute.math.exp2(whole, fastmath=True)


def rescale(total: Float32, old_max: Float32, new_max: Float32, exp: Callable = exp_precise) -> Float32:
    """A sum taken relative to old_max, made relative to new_max >= old_max; exp: which exponential."""
    return total * exp(reference(old_max), reference(new_max))
