"""What of a long row may be among its k largest: vectors with an element that reaches a bound, noted as they come.

A bound is the upper half of an element's number, which at least k elements reach. It is the k-th largest of the maxima
of groups of elements, as no element is in two of them: with more groups than k there are few elements between that and
the k-th largest of all. Threads keep the maximum of what they have seen anyway.

Of elements that come after those which a bound was made of only larger ones count: where they are equal, those of lower
indices win.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...plan.maths import WARP
from ...plan.topk_long import LEAST, MOST_OF_ALL, NOTED, THREADS
from ..common.copy import largest, unpack
from ..common.index import larger, select
from ..common.reduce import threads_that
from .candidates import KEYS, Candidates, add, key_of
from .select import normal, ordered

NONE = 0  # a bound that everything reaches
BIAS = 1 << 15


def number_of(x: Float32) -> Int32:
    """The upper half of the number of an element: positive, above NONE, and larger for larger elements."""
    return (ordered(normal(x).bitcast(Int32), KEYS.kept) >> 16) + BIAS


def element_of(bound: Int32) -> Float32:
    """The least element that reaches a bound: NaN for NONE."""
    return ordered((bound - BIAS) << 16, KEYS.kept).bitcast(Float32)


def key_of_bound(bound: Int32) -> Int64:
    """The least key that reaches a bound."""
    return Int64(bound - BIAS) << Int64(48)


def bound_of_key(key: Int64) -> Int32:
    """The highest bound that all keys reach which reach a key."""
    return Int32(key >> Int64(48)) + BIAS


def reaches(x: Float32, least: Float32, equal: Boolean) -> Boolean:
    """Whether an element may reach a bound of which `least` is the least element: if it is not smaller and, unless
    `equal`, not the same. NaN reaches all, and all reach NaN."""
    return ((x <= least) ^ True) | (equal & (x == least))


@dataclass(frozen=True)
class Noted:
    """The vectors of one CTA's row that are noted.

    sV: their places, (V, place); sC: the columns of their first elements; sW: words, of which NOTED says how many there
    are, LEAST and MOST_OF_ALL between which numbers of groups lie; tidx: the thread; spare: how many fit beside those
    of a whole tile.
    """

    sV: cute.Tensor
    sC: cute.Tensor
    sW: cute.Tensor
    tidx: Int32
    spare: int

    def place(self, i: Int32) -> cute.Tensor:
        """The place of a vector."""
        V = cute.size(self.sV, mode=[0])
        at = (self.sV.iterator + i * V).align(V * self.sV.element_type.width // 8)
        return cute.make_tensor(at, cute.make_layout(V))

    def vector(self, i: Int32) -> cute.Tensor:
        """A vector in registers."""
        tXrX = cute.make_rmem_tensor(cute.size(self.sV, mode=[0]), self.sV.element_type)
        cute.autovec_copy(self.place(i), tXrX)
        return tXrX


@cute.jit
def note(
    noted: Noted,
    vectors: list[cute.Tensor],
    columns: list[Int32],
    exist: list[Boolean],
    top: Float32,
    bound: Int32,
    equal: Boolean,
) -> Int32:
    """Note those of a thread's vectors that have an element which reaches a bound; how many places are taken, as far as
    this thread knows. top: the largest of them all; columns: of their first elements; equal: whether elements that
    equal the bound count."""
    least, taken = element_of(bound), Int32(0)
    if reaches(top, least, equal):
        for u in cutlass.range_constexpr(len(vectors)):
            if exist[u] & reaches(largest([vectors[u]], []), least, equal):
                place = cute.arch.atomic_add(noted.sW.iterator + NOTED, Int32(1))
                cute.autovec_copy(vectors[u], noted.place(place))
                noted.sC[place] = columns[u]
                taken = place + 1
    return taken


@cute.jit
def reaching(noted: Noted, trial: Int64) -> Int32:
    """How many elements of this thread's share of what is noted have a key that reaches a bound."""
    found = Int32(0)
    for i in cutlass.range(noted.tidx, noted.sW[NOTED], THREADS, unroll=1):
        elements, column = unpack(noted.vector(i)), noted.sC[i]
        for v in cutlass.range_constexpr(len(elements)):
            found = found + select(key_of(elements[v], column + v) >= trial, Int32(1), Int32(0))
    return found


@cute.jit
def add_noted(noted: Noted, candidates: Candidates, bound: Int64):
    """Make candidates of the elements of this thread's share of what is noted that reach a bound."""
    for i in cutlass.range(noted.tidx, noted.sW[NOTED], THREADS, unroll=1):
        elements, column = unpack(noted.vector(i)), noted.sC[i]
        for v in cutlass.range_constexpr(len(elements)):
            add(candidates, key_of(elements[v], column + v), bound)


@cute.jit
def bound_of_groups(noted: Noted, k: Int32, numbers: list[Int32], before: Int32) -> Int32:
    """The largest number that at least k of all threads' groups reach, of which there are no fewer. numbers: of the
    maxima of this thread's groups, NONE for one without elements; before: a bound that is known."""
    sW, tidx = noted.sW, noted.tidx
    high, low = numbers[0], numbers[0]
    for n in numbers[1:]:
        high, low = larger(high, n), cutlass.min(low, n)
    high, low = cute.arch.warp_redux_sync(high, "max"), cute.arch.warp_redux_sync(low, "min")
    if tidx % WARP == 0:
        # Neither is set back: both only rise as more is seen, and the least that has been one is a bound still.
        cute.arch.atomic_max(sW.iterator + MOST_OF_ALL, high)
        cute.arch.atomic_min(sW.iterator + LEAST, low)
    cute.arch.barrier()
    high, low = sW[MOST_OF_ALL], larger(before, sW[LEAST])
    while low < high:
        middle, count = (low + high + 1) >> 1, Int32(0)
        for n in numbers:
            count = count + threads_that(n >= middle)
        enough = count >= k
        low, high = select(enough, middle, low), select(enough, high, middle - 1)
    return low
