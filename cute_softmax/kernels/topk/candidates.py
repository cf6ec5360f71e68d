"""Candidates for the k largest of a long row, in shared memory: keys in no order, of which too small ones are dropped.

A key is the number of an element, then its index (`select.Keys`): no two are equal, so whatever the order in which
threads come, the same are found. A bound is a number that at least k keys reach, so that all smaller ones can go. It is
looked for bit by bit from the highest on: a bit belongs to it if as many keys are at least what has been found with
this bit. The upper half of a key's number, 16 bits, makes a bound that a few more reach; all bits the k-th largest key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...plan.topk_long import COUNT, COUNTS
from ..common.index import select
from .select import Keys, normal, ordered, wide_key

KEYS = Keys(Float32, 1 << 31)  # of all dtypes: each is a float32
LOWEST = KEYS.lowest  # below all keys
HIGH, ROUGH, EXACT = 63, 48, 0  # bits: the highest, and the last ones that are looked for


def key_of(x: Float32, column: Int32) -> Int64:
    """The key of an element."""
    return wide_key(ordered(normal(x).bitcast(Int32), KEYS.kept), Int32(KEYS.last) - column)


@dataclass(frozen=True)
class Candidates:
    """The candidates of one CTA's row.

    sK: their places; sW: words, of which COUNT says how many came, be it more than there are places; tidx: the thread,
    of so many threads; k: how many are wanted.
    """

    sK: cute.Tensor
    sW: cute.Tensor
    tidx: Int32
    k: Int32
    threads: int

    @property
    def places(self) -> int:
        """How many places there are."""
        return cute.size(self.sK)

    def held(self, count: Int32, most: int) -> list[Int64]:
        """This thread's share of the first `count` candidates, of `most` at most."""
        places = [self.tidx + i * self.threads for i in range(math.ceil(most / self.threads))]
        return [select(place < count, self.sK[place], LOWEST) for place in places]


@cute.jit
def put(
    which: Int32 | Uint32,
    place: Int32,
    places: cutlass.Constexpr[int],
    store: cutlass.Constexpr[Callable[[Int32, Int32], None]],
):
    """Give places from one on, as far as there are any, to the elements that the bits of a mask stand for:
    `store(place, bit)`. There are few as a rule: a turn for each of them, instead of one for each bit."""
    while (which != 0) & (place < places):
        store(place, Int32(cute.arch.popc((which ^ (which - 1)) >> 1)))  # the first one
        which, place = which & (which - 1), place + 1


@cute.jit
def add(candidates: Candidates, key: Int64, bound: Int64):
    """Put a key that reaches a bound in a place, if there still is one."""
    sK, sW = candidates.sK, candidates.sW
    if key >= bound:
        place = cute.arch.atomic_add(sW.iterator + COUNT, Int32(1))
        if place < candidates.places:
            sK[place] = key


@cute.jit
def reaching(candidates: Candidates, count: Int32, trial: Int64) -> Int32:
    """How many of this thread's share of the first `count` candidates reach a bound."""
    found = Int32(0)
    for i in cutlass.range(candidates.tidx, count, candidates.threads, unroll=1):
        found = found + select(candidates.sK[i] >= trial, Int32(1), Int32(0))
    return found


@cute.jit
def bound(
    candidates: Candidates,
    counts: cutlass.Constexpr[list[Callable[[Int64], Int32]]],
    last: cutlass.Constexpr[int],
) -> Int64:
    """What at least k of all threads' keys reach, as far as the bits down to the last one say; below all keys where
    there are not as many. counts: each gives how many of this thread's keys reach a bound."""
    sW, tidx, k, steps = candidates.sW, candidates.tidx, candidates.k, HIGH - last + 1
    if tidx < steps:
        sW[COUNTS + tidx] = Int32(0)
    cute.arch.barrier()
    found = LOWEST
    for i in cutlass.range(steps, unroll=1):
        trial = found ^ (
            Int64(1) << Int64(HIGH - i)
        )  # the highest bit is a sign: set in LOWEST, and so cleared
        ones = [count(trial) for count in counts]
        count = cute.arch.warp_redux_sync(sum(ones[1:], ones[0]), "add")
        if (tidx % 32 == 0) & (count > 0):
            cute.arch.atomic_add(sW.iterator + COUNTS + i, count)
        cute.arch.barrier()
        found = select(sW[COUNTS + i] >= k, trial, found)
    cute.arch.barrier()
    return found


@cute.jit
def drop(
    candidates: Candidates,
    count: Int32,
    last: cutlass.Constexpr[int],
    counts: cutlass.Constexpr[list] = (),
    add_others: cutlass.Constexpr[Callable[[Int64], None] | None] = None,
) -> Int64:
    """Keep those of the first `count` candidates, and of this thread's other keys, that reach a bound; what it is.

    counts: of other keys, see `bound`; add_others: adds those that reach a bound. Of all bits (EXACT) k are left. All
    threads of the CTA call it, behind a barrier, and find one behind it.
    """
    found = bound(candidates, [partial(reaching, candidates, count), *counts], last)
    mine = candidates.held(count, candidates.places)
    rK = cute.make_rmem_tensor(len(mine), Int64)
    for i in cutlass.range_constexpr(len(mine)):
        rK[i] = mine[i]
    cute.arch.barrier()
    if candidates.tidx == 0:
        candidates.sW[COUNT] = Int32(0)
    cute.arch.barrier()
    # What stands for no key reaches nothing.
    least = cutlass.max(found, LOWEST + 1)
    for i in cutlass.range_constexpr(len(mine)):
        add(candidates, rK[i], least)
    if const_expr(add_others is not None):
        add_others(least)
    cute.arch.barrier()
    return found
