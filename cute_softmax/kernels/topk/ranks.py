"""The places of a row's candidates: each counts how many are larger.

Many of them are first put in the order of bins, which are intervals of their numbers of the same length: a candidate
that knows how many are in larger bins counts larger ones in its own alone.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ...plan.maths import WARP
from ...plan.topk_long import BINS, COUNT, COUNTS, MANY
from ..common.index import larger, select, smaller
from ..common.reduce import sums_so_far
from .candidates import Candidates


def bin_of(key: Int64, high: Int32, shift: Int32) -> Int32:
    """The bin of a key. high: the largest number; shift: bits of a number that a bin does not tell apart."""
    return Int32(Uint32(high - Int32(key >> Int64(32))) >> Uint32(shift))


@cute.jit
def extent(candidates: Candidates, numbers: list[Int32], exist: list[Boolean]) -> tuple[Int32, Int32]:
    """The largest number of all threads and the smallest, of those that exist. All threads come to a barrier."""
    sW, lane, warp = candidates.sW, candidates.tidx % WARP, candidates.tidx // WARP
    warps = candidates.threads // WARP
    high, low = Int32(-(1 << 31)), Int32((1 << 31) - 1)
    for number, exists in zip(numbers, exist, strict=True):
        high = larger(high, number)
        low = smaller(low, select(exists, number, low))
    sW[COUNTS + warp] = cute.arch.warp_redux_sync(high, "max")
    sW[COUNTS + warps + warp] = cute.arch.warp_redux_sync(low, "min")
    cute.arch.barrier()
    high = cute.arch.warp_redux_sync(sW[COUNTS + lane % warps], "max")
    return high, cute.arch.warp_redux_sync(sW[COUNTS + warps + lane % warps], "min")


@cute.jit
def begin_bins(sB: cute.Tensor, lane: Int32):
    """Of a warp: where bins begin, in place of their sizes, the first of which is behind a word."""
    own = BINS // WARP
    sizes = [sB[lane * own + j + 1] for j in range(own)]
    size = sum(sizes[1:], sizes[0])
    begin = sums_so_far(size, lane) - size
    for j in cutlass.range_constexpr(own):
        sB[lane * own + j + 1] = begin
        begin = begin + sizes[j]


@cute.jit
def in_bins(
    candidates: Candidates, count: Int32, most: cutlass.Constexpr[int], sB: cute.Tensor
) -> tuple[Int32, Int32]:
    """Put the first `count` candidates, at most `most`, in the order of bins, the largest first; what `bin_of` asks
    for.

    sB: `BINS` words and one more, which are then where each bin begins, and the last one ends. All threads of the CTA
    come from a barrier, and find one behind it.
    """
    sK, tidx = candidates.sK, candidates.tidx
    keys = candidates.held(count, most)
    exist = [tidx + i * candidates.threads < count for i in range(len(keys))]
    for i in cutlass.range(tidx, BINS + 1, candidates.threads, unroll=1):
        sB[i] = Int32(0)
    high, low = extent(candidates, [Int32(key >> Int64(32)) for key in keys], exist)
    shift = larger(Int32(33 - BINS.bit_length()) - Int32(cute.arch.clz(high - low)), Int32(0))
    for i in cutlass.range_constexpr(len(keys)):
        if exist[i]:
            cute.arch.atomic_add(sB.iterator + bin_of(keys[i], high, shift) + 1, Int32(1))
    cute.arch.barrier()
    if tidx < WARP:
        begin_bins(sB, tidx)
    cute.arch.barrier()
    # Where a bin begins becomes where it ends, and the next one begins.
    for i in cutlass.range_constexpr(len(keys)):
        if exist[i]:
            place = cute.arch.atomic_add(sB.iterator + bin_of(keys[i], high, shift) + 1, Int32(1))
            sK[place] = keys[i]
    cute.arch.barrier()
    return high, shift


@cute.jit
def rank(
    candidates: Candidates,
    sB: cute.Tensor,
    most: cutlass.Constexpr[int],
    store: cutlass.Constexpr[Callable[[Int32, Int64], None]],
):
    """Give the k largest candidates, as far as there are so many, to `store(place, key)`: the largest has place 0.
    most: candidates, at most.

    sB: see `in_bins`. All threads come from a barrier.
    """
    sK, count = candidates.sK, candidates.sW[COUNT]
    many, high, shift = count > MANY, Int32(0), Int32(0)
    if many:
        high, shift = in_bins(candidates, count, most, sB)
    for i in cutlass.range(candidates.tidx, count, candidates.threads, unroll=1):
        key, begin, end = sK[i], Int32(0), count
        if many:
            bin = bin_of(key, high, shift)
            begin, end = sB[bin], sB[bin + 1]
        place = begin
        for j in cutlass.range(begin, end, unroll=4):
            place = place + select(sK[j] > key, Int32(1), Int32(0))
        if place < candidates.k:
            store(place, key)
