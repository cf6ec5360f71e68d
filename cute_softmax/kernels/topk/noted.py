"""What of a long row may be among its k largest: vectors with an element that reaches a bound, noted as they come.

A thread notes its vectors of a tile in units. Where few come all of them are one unit, whose largest element is known,
so that noting it takes the fewest instructions; where many come each is one, so that less is looked at again.

A bound is a number that at least k elements reach: the k-th largest of the maxima of groups of elements, about, as no
element is in two of them. With more groups than k there are few elements between that and the k-th largest of all.
Threads keep the maximum of what they have seen anyway.

Of elements that come after those which a bound was made of only larger ones count: where they are equal, those of lower
indices win.

A warp notes in places of its own, so that none waits for another. A warp of which no place is left goes on counting.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ...plan.maths import WARP
from ...plan.topk_long import COUNT, LEAST, MOST_OF_ALL
from ..common.copy import largest, unpack
from ..common.index import larger, select, smaller
from ..common.reduce import threads_that
from .candidates import KEYS, LOWEST, Candidates, add, key_of, put
from .select import normal, ordered

NONE = -(1 << 31)  # a bound below all numbers


@dataclass(frozen=True)
class Noted:
    """The vectors of one CTA's row that a warp has noted.

    sV: places of all warps, (V, vector of a unit, place); sC: the columns of their first elements; sW: words, of which
    LEAST and MOST_OF_ALL are those between which the numbers of groups lie; tidx: the thread; places: of a warp;
    end: the column where the share's vectors end; spare_bits: the last ones of a float32 that the row's dtype does not
    have.
    """

    sV: cute.Tensor
    sC: cute.Tensor
    sW: cute.Tensor
    tidx: Int32
    places: int
    end: Int32
    spare_bits: int

    @property
    def unit(self) -> int:
        """Vectors of a unit."""
        return cute.size(self.sV, mode=[1])

    def place(self, i: Int32) -> cute.Tensor:
        """The place of a vector: the first of a unit has the number of its place times `unit`."""
        V = cute.size(self.sV, mode=[0])
        at = (self.sV.iterator + i * V).align(V * self.sV.element_type.width // 8)
        return cute.make_tensor(at, cute.make_layout(V))

    @property
    def first(self) -> Int32:
        """The first one of a warp's vectors in shared memory."""
        return self.tidx // WARP * self.places * self.unit

    def element(self, i: Int32, v: Int32) -> Float32:
        """One element of a vector."""
        return self.place(i)[v].to(Float32)

    def elements(self, i: Int32) -> tuple[list[Float32], Int32]:
        """A vector's elements, and the column of its first one."""
        V = cute.size(self.sV, mode=[0])
        tXrX = cute.make_rmem_tensor(V, self.sV.element_type)
        cute.autovec_copy(self.place(i), tXrX)
        return unpack(tXrX), self.sC[i // self.unit] + i % self.unit * (WARP * V)

    def number(self, x: Float32) -> Int32:
        """The number of an element: above NONE, and larger for larger elements."""
        return ordered(normal(x).bitcast(Int32), KEYS.kept) >> self.spare_bits

    def limit(self, bound: Int32) -> Float32:
        """What elements are not at most whose number is above a bound, infinity at most. NaN is not at most anything,
        and nothing at most NaN, the limit where no bound is known."""
        infinity = 0x7F800000 >> self.spare_bits
        least = larger(bound, Int32(NONE >> self.spare_bits))
        least = smaller(least, Int32(infinity)) << self.spare_bits
        # -0, which equals 0, has the number below that of 0.
        least = least - select(least == -1, Int32(1), Int32(0))
        return ordered(least, KEYS.kept).bitcast(Float32)

    def may_exceed(self, bound: Int32) -> Boolean:
        """Whether there may be elements above a bound: it is not that of NaN."""
        return bound < 0x7FFFFFFF >> self.spare_bits

    def least(self, bound: Int32) -> Int64:
        """A key that all elements which reach a bound reach; one above LOWEST, which stands for none."""
        number = Int64(larger(bound, Int32(NONE >> self.spare_bits))) << Int64(32 + self.spare_bits)
        return larger(number, LOWEST + 1)

    def bound(self, key: Int64) -> Int32:
        """The highest bound that all keys reach which reach a key."""
        return Int32(key >> Int64(32 + self.spare_bits))


def below(bound: Int32) -> Int32:
    """The number above which those are that reach a bound; all elements where it is NONE."""
    return larger(bound, Int32(NONE + 1)) - 1


def exceeds(x: Float32, limit: Float32) -> Boolean:
    """Whether an element is above a limit, as NaN is: a comparison of floats, where numbers take several operations."""
    return (x <= limit) ^ True


@cute.jit
def note(
    noted: Noted,
    vectors: list[cute.Tensor],
    column: Int32,
    maxima: list[Float32],
    limit: Float32,
    may: Boolean,
    count: Int32,
) -> Int32:
    """Note those of a warp's units that have an element above a limit, if any may be; how many the warp has noted, of
    which `count` before. maxima: of this thread's units; column: of its first element."""
    reaching = [may & exceeds(x, limit) for x in maxima]
    which = cute.arch.vote_ballot_sync(reduce(operator.or_, reaching))
    if which != 0:
        V, unit = cute.size(vectors[0]), noted.unit
        lane, first = noted.tidx % WARP, noted.tidx // WARP * noted.places
        for u in cutlass.range_constexpr(0, len(vectors), unit):
            reaches = reaching[u // unit]
            if const_expr(unit < len(vectors)):
                which = cute.arch.vote_ballot_sync(reaches)
            place = count + cute.arch.popc(which & ((Int32(1) << lane) - 1))
            if reaches & (place < noted.places):
                for v in cutlass.range_constexpr(unit):
                    cute.autovec_copy(vectors[u + v], noted.place((first + place) * unit + v))
                noted.sC[first + place] = column + u * (WARP * V)
            count = count + cute.arch.popc(which)
    return count


@cute.jit
def sift(noted: Noted, count: Int32, limit: Float32) -> Int32:
    """Keep those of the units that a warp has noted that have an element above a limit, in its first places; how many.
    All threads of the CTA come from a barrier, and find one behind it."""
    V, unit, lane = cute.size(noted.sV, mode=[0]), noted.unit, noted.tidx % WARP
    tXrX = [cute.make_rmem_tensor(V, noted.sV.element_type) for _ in range(unit)]
    begin, kept, more = Int32(0), Int32(0), Boolean(True)
    while more:
        i, column = begin + lane, Int32(0)
        exists = i < count
        if exists:
            for v in cutlass.range_constexpr(unit):
                cute.autovec_copy(noted.place(noted.first + i * unit + v), tXrX[v])
            column = noted.sC[noted.first // unit + i]
        # No place is written before all threads of its warp have read: it is that of one of them, or of one before.
        begin = begin + WARP
        more = threads_that(begin < count) > 0
        kept = note(noted, tXrX, column, [largest(tXrX, [])], limit, exists, kept)
    cute.arch.barrier()
    return kept


@cute.jit
def reaching(noted: Noted, count: Int32, trial: Int64) -> Int32:
    """How many elements of this thread's share of what its warp has noted have a key that reaches a bound."""
    found = Int32(0)
    first = noted.first
    for i in cutlass.range(first + noted.tidx % WARP, first + count * noted.unit, WARP, unroll=1):
        elements, column = noted.elements(i)
        if column < noted.end:
            for v in cutlass.range_constexpr(len(elements)):
                found = found + select(key_of(elements[v], column + v) >= trial, Int32(1), Int32(0))
    return found


@cute.jit
def add_noted(noted: Noted, count: Int32, candidates: Candidates, bound: Int64):
    """Make candidates of the elements of this thread's share of what its warp has noted whose keys reach a bound."""
    first = noted.first
    for i in cutlass.range(first + noted.tidx % WARP, first + count * noted.unit, WARP, unroll=1):
        elements, column = noted.elements(i)
        if column < noted.end:
            for v in cutlass.range_constexpr(len(elements)):
                add(candidates, key_of(elements[v], column + v), bound)


@cute.jit
def add_above(noted: Noted, count: Int32, candidates: Candidates, limit: Float32):
    """Make candidates of the elements above a limit of this thread's share of what its warp has noted. Places for those
    of a vector are found at once."""
    sK, sW, first = candidates.sK, candidates.sW, noted.first
    for i in cutlass.range(first + noted.tidx % WARP, first + count * noted.unit, WARP, unroll=1):
        (elements, column), which = noted.elements(i), Int32(0)
        for v in cutlass.range_constexpr(len(elements)):
            which = which | select(exceeds(elements[v], limit), Int32(1 << v), Int32(0))
        if (which != 0) & (column < noted.end):
            place = cute.arch.atomic_add(sW.iterator + COUNT, cute.arch.popc(which))
            put(which, place, candidates.places, partial(keep, noted, sK, i, column))


def keep(noted: Noted, sK: cute.Tensor, i: Int32, column: Int32, place: Int32, v: Int32):
    """Put the key of an element of a vector, whose first one has a column, in a place."""
    sK[place] = key_of(noted.element(i, v), column + v)


@cute.jit
def bound_of_groups(
    noted: Noted, k: Int32, enough: cutlass.Constexpr[bool], numbers: list[Int32], before: Int32
) -> Int32:
    """A number that at least k of all threads' groups reach, and few more or, where many are equal, the largest such.
    enough: whether threads are no fewer than k, so that one group of each is enough; numbers: of the maxima of this
    thread's groups, NONE for one without elements; before: a bound that is known."""
    sW, tidx = noted.sW, noted.tidx
    high, low = numbers[0], numbers[0]
    for n in numbers[1:]:
        high, low = larger(high, n), smaller(low, n)
    if const_expr(enough):
        low = high
    high, low = cute.arch.warp_redux_sync(high, "max"), cute.arch.warp_redux_sync(low, "min")
    if tidx % WARP == 0:
        # Neither is set back: both only rise as more is seen, and the least that has been one is a bound still.
        cute.arch.atomic_max(sW.iterator + MOST_OF_ALL, high)
        cute.arch.atomic_min(sW.iterator + LEAST, low)
    cute.arch.barrier()
    high, low = sW[MOST_OF_ALL], larger(before, sW[LEAST])
    return narrowed(low, high, k, lambda middle: sum(threads_that(n >= middle) for n in numbers))


@cute.jit
def narrowed(
    low: Int32, high: Int32, k: Int32, reaching: cutlass.Constexpr[Callable[[Int32], Int32]]
) -> Int32:
    """Between two numbers one that at least k reach, and few more or, where many are equal, the largest such.
    reaching: how many reach a number; of `low` it is k at least."""
    few = k + (k >> 3) + 2
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up
        count = reaching(middle)
        low = select(count >= k, middle, low)
        high = select(count > few, high, select(count >= k, middle, middle - 1))
    return low
