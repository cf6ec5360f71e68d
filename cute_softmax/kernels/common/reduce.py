"""Reductions over the threads of a row: lanes of a warp, warps of a CTA, CTAs of a cluster.

One template serves every operator. An operator gives

- `identity`: the state of a thread that has seen nothing, a tuple of Float32;
- `lanes(state, width, start)`: the states of `width` neighbouring lanes merged, the result in each of them; with
  `start` > 1 only those of every start-th lane, so that `start` results lie side by side;
- `merge(a, b)`: two states merged in one thread; `merge_all(states)`: a list of them; `all(numbers)`, of an operator on
  one number: the same of plain numbers;
- `refer(stage, state, carry)`: what a state contributes to a math's stage, given the results of the stages before.

Between warps a state travels through the reduction buffer in shared memory, shape
``(rows, (warps_per_row, cluster_n), stage)`` in order (1, 0, 2): the peers of a row lie next to each other, so
that one synchronised load fetches all of them into the lanes of a warp and one warp reduction ends the work.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Int128, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T

from ...plan import WARP
from ...plan.modes import power_of_two
from . import online
from .index import select


def tree(op: Callable, values: Iterable) -> object:
    """Combine per-thread values pairwise: depth log2(n) instead of a chain of n.

    Values are taken one at a time and equal subtrees merged at once, so that no more than log2(n) of them are
    alive: a generator keeps its terms out of the registers.
    """
    subtrees = []  # (depth, value), depths falling
    for value in values:
        depth = 0
        while subtrees and subtrees[-1][0] == depth:
            value = op(subtrees.pop()[1], value)
            depth += 1
        subtrees.append((depth, value))
    result = subtrees.pop()[1]
    while subtrees:
        result = op(subtrees.pop()[1], result)
    return result


class Scalar:
    """An associative operator on one number."""

    at_once = False  # see `Online`

    def __init__(self, op: Callable, identity: float):
        self.op = op
        self.identity = (identity,)

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        if start == 1:
            return (cute.arch.warp_reduction(state[0], self.op, threads_in_group=width),)
        (value,) = state
        while start < width:
            value = self.op(value, cute.arch.shuffle_sync_bfly(value, offset=start))
            start *= 2
        return (value,)

    def over(self, numbers: Iterable[Float32], width: int) -> tuple:
        """The state of the numbers that each of `width` neighbouring lanes has, in all of these."""
        return self.lanes((tree(self.op, numbers),), width)

    def merge(self, a: tuple, b: tuple) -> tuple:
        return (self.op(a[0], b[0]),)

    def all(self, numbers: list) -> Float32:
        """Several numbers merged in one thread."""
        return tree(self.op, numbers)

    def merge_all(self, states: list) -> tuple:
        return (self.all([number for (number,) in states]),)

    def refer(self, stage: int, state: tuple, carry: tuple) -> Float32:
        return state[0]


def two_sum(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """a + b, rounded, and what the rounding lost, exactly. Source: Knuth, "The Art of Computer Programming", 4.2.2."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


class Compensated(Scalar):
    """A sum that is rounded once for all lanes, and once for all numbers that a thread merges.

    Where one term outweighs all others each addition to it would lose what is below its last place, and all of them in
    the same direction. Of a few equal terms the additions together round as much as all else in a softmax.
    """

    BATCH = 8  # terms of a thread added as they are: rows of 4096 elements summed to 1 within 1.6 ulp

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        return self.lanes_of(state[0], Float32(0.0), width, start)

    def over(self, numbers: Iterable[Float32], width: int) -> tuple:
        numbers = iter(numbers)
        batches = iter(lambda: list(itertools.islice(numbers, self.BATCH)), [])
        return self.lanes_of(*self.added(tree(self.op, batch) for batch in batches), width)

    def lanes_of(self, total: Float32, lost: Float32, width: int, start: int = 1) -> tuple:
        """`lanes`, of sums that have lost something to rounding already."""
        while start < width:
            others = [cute.arch.shuffle_sync_bfly(x, offset=start) for x in (total, lost)]
            total, more = two_sum(total, others[0])
            lost = (lost + others[1]) + more
            start *= 2
        return (self.rounded(total, lost),)

    def all(self, numbers: list) -> Float32:
        return self.rounded(*self.added(numbers))

    def added(self, numbers: Iterable[Float32]) -> tuple[Float32, Float32]:
        """(the sum of numbers that are added one after another, what its additions lost to rounding)."""
        numbers = iter(numbers)
        total, lost = next(numbers), Float32(0.0)
        for number in numbers:
            total, more = two_sum(total, number)
            lost = lost + more
        return total, lost

    def rounded(self, total: Float32, lost: Float32) -> Float32:
        """The sum and what its rounding lost; of an infinite sum that is nothing, though NaN was computed."""
        return total + select(lost == lost, lost, Float32(0.0))


MAX = Scalar(online.maximum, -float("inf"))
SUM = Scalar(operator.add, 0.0)
COMPENSATED = Compensated(operator.add, 0.0)


class Online:
    """The pair (max, sum of exponentials relative to it).

    exp: see `online.rescale`; total: the operator of the sum between lanes. The few sums of CTAs are added pairwise: to
    compensate them, too, takes registers that clusters lack.
    """

    identity = (-float("inf"), 0.0)

    def __init__(self, exp: online.Fast | online.Near, total: Scalar = SUM):
        self.exp, self.total = exp, total

    @property
    def at_once(self) -> bool:
        """Whether the few states that a thread has read are merged at once, and not one after another: instead of two
        exponentials a state one. Where these are short, registers for all states cost more."""
        return isinstance(self.exp, online.Near)

    def seen_from(self, state: tuple, row_max: Float32) -> tuple[Float32, ...]:
        """The sums of a state, relative to a maximum that is no smaller."""
        seen, total = state
        return (online.rescale(total, seen, row_max, self.exp),)

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        # All maxima first, then each sum is rescaled once: one exponential instead of one per shuffle.
        (row_max,) = MAX.lanes(state[:1], width, start)
        (total,) = self.seen_from(state, row_max)
        return (row_max, *self.total.lanes((total,), width, start))

    def merge(self, a: tuple, b: tuple) -> tuple:
        return self.merge_all([a, b])

    def merge_all(self, states: list) -> tuple:
        # As in `lanes`: each sum is rescaled once.
        row_max = tree(online.maximum, [state[0] for state in states])
        totals = zip(*(self.seen_from(state, row_max) for state in states), strict=True)
        return (row_max, *(tree(operator.add, t) for t in totals))

    def refer(self, stage: int, state: tuple, carry: tuple) -> Float32:
        return state[0] if stage == 0 else self.seen_from(state, carry[0])[stage - 1]


class Separate(Online):
    """Pairs whose products are rounded before they are added: of the same elements two states in one kernel are the
    same, which they are not where the compiler joins the products of one of them with sums."""

    def seen_from(self, state: tuple, row_max: Float32) -> tuple[Float32, ...]:
        seen, total = state
        ratio = self.exp.ratio(online.reference(seen), online.reference(row_max))
        return (online.rounded_product(total, ratio),)


class Weighted(Online):
    """The triple (max, sum of exponentials relative to it, sum of the same times their exponents of 2)."""

    identity = (-float("inf"), 0.0, 0.0)

    def seen_from(self, state: tuple, row_max: Float32) -> tuple[Float32, Float32]:
        """Both sums relative to a maximum that is no smaller."""
        seen, total, weighted = state
        # A part that has seen nothing adds 0 times something finite.
        fallen = self.exp.fallen(online.reference(seen), online.reference(row_max))
        shift = online.maximum(fallen, Float32(online.VANISHES))
        moved = (online.rescale(t, seen, row_max, self.exp) for t in (total, weighted + total * shift))
        return tuple(moved)

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        (row_max,) = MAX.lanes(state[:1], width, start)
        return (row_max, *(SUM.lanes((t,), width, start)[0] for t in self.seen_from(state, row_max)))


class Averaged(Online):
    """(max, sum of exponentials relative to it, sum of the differences to it, how many elements there are).

    Differences are those of elements, whatever the exponentials multiply them by.
    """

    identity = (-float("inf"), 0.0, 0.0, 0.0)

    def seen_from(self, state: tuple, row_max: Float32) -> tuple[Float32, Float32, Float32]:
        """All three relative to a maximum that is no smaller."""
        seen, total, fallen, count = state
        # Finite, so that a part without elements adds 0.
        shift = online.maximum(online.reference(seen) - online.reference(row_max), Float32(online.LOWEST))
        return online.rescale(total, seen, row_max, self.exp), fallen + count * shift, count

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        (row_max,) = MAX.lanes(state[:1], width, start)
        total, *others = self.seen_from(state, row_max)
        sums = (SUM.lanes((t,), width, start)[0] for t in others)
        return (row_max, *self.total.lanes((total,), width, start), *sums)


class Both:
    """Two states side by side, each with its own operator."""

    def __init__(self, first: Online, second: Online):
        self.parts, self.at_once = (first, second), first.at_once
        self.identity = (*first.identity, *second.identity)

    def apart(self, state: tuple) -> tuple[tuple, tuple]:
        """The two states."""
        count = len(self.parts[0].identity)
        return state[:count], state[count:]

    def lanes(self, state: tuple, width: int, start: int = 1) -> tuple:
        pairs = zip(self.parts, self.apart(state), strict=True)
        return sum((op.lanes(own, width, start) for op, own in pairs), ())

    def merge(self, a: tuple, b: tuple) -> tuple:
        return self.merge_all([a, b])

    def merge_all(self, states: list) -> tuple:
        each = zip(*map(self.apart, states), strict=True)
        return sum((op.merge_all(list(own)) for op, own in zip(self.parts, each, strict=True)), ())


def threads_that(which: Boolean) -> Int32:
    """Of how many threads of the CTA it is true. All of them come, as to a barrier, which it is."""
    found = nvvm.barrier(
        reduction_op=nvvm.BarrierReduction.POPC,
        reduction_predicate=Int32(which).ir_value(),
        results=[T.i32()],
    )
    return Int32(found)


def sums_so_far(number: Int32, lane: Int32) -> Int32:
    """Of a warp: the sum of the numbers of all lanes up to this one."""
    total = number
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(total, distance)
        total = total + select(lane >= distance, other, Int32(0))
    return total


def slot_type(op: Scalar | Online) -> type:
    """The element of the reduction buffer: 4 bytes for one number, 8 for a pair, 16 for more."""
    return {1: Float32, 2: Int64, 3: Int128, 4: Int128}[len(op.identity)]


def pack(state: tuple) -> Float32 | Int64 | Int128:
    """A state as one element of the reduction buffer."""
    if len(state) == 1:
        return state[0]
    if len(state) > 2:
        four = cute.make_rmem_tensor(4, Float32)
        for i, number in enumerate((*state, Float32(0.0))[:4]):
            four[i] = number
        return cute.recast_tensor(four, Int128)[0]
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = state
    return cute.recast_tensor(pair, Int64)[0]


def unpack(slot: Float32 | Int64 | Int128, count: int = 3) -> tuple:
    """The inverse of `pack`; count: of a slot that has room for four numbers, how many the state has."""
    if slot.width == 32:
        return (slot,)
    if slot.width == 128:
        four = cute.make_rmem_tensor(4, Float32)
        cute.recast_tensor(four, Int128)[0] = slot
        return tuple(four[i] for i in range(count))
    pair = cute.make_rmem_tensor(2, Float32)
    cute.recast_tensor(pair, Int64)[0] = slot
    return pair[0], pair[1]


@cute.jit
def across_warps(
    op: cutlass.Constexpr,
    state: tuple,
    buffer: cute.Tensor,
    barrier: cute.Pointer | None,
    phase: Int32,
    cluster_n: cutlass.Constexpr[int],
    apart: cutlass.Constexpr[bool] = False,
) -> tuple:
    """Merge the states of all warps (and, with a barrier, all CTAs of the cluster) that share a row.

    buffer: one stage of the reduction buffer, shape (rows, (warps_per_row, cluster_n)).
    barrier: the mbarrier of this stage, None without a cluster; phase: its parity.
    state: equal in all lanes of a warp, as `op.lanes` leaves it; so is the result. It may be smaller than the buffer's
        elements: those of another stage are larger. apart: whether the warps of a row wait for no others, without a
        cluster.
    """
    words = buffer.element_type.width // 32
    state = (*state, *[Float32(0.0) for _ in range(words - len(state))])
    rows, (warps_per_row, _) = buffer.shape
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    row, peer = warp // warps_per_row, warp % warps_per_row
    if const_expr(cluster_n == 1):
        if lane == 0:
            buffer[row, peer] = pack(state)
        if const_expr(apart and rows > 1):
            # Barrier 0 is that of the whole CTA.
            cute.arch.barrier(barrier_id=row + 1, number_of_threads=warps_per_row * WARP)
        else:
            cute.arch.barrier()
    else:
        rank = cute.arch.block_idx_in_cluster()
        if warp == 0:
            with cute.arch.elect_one():
                received = rows * warps_per_row * cluster_n * buffer.element_type.width // 8
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, received)
        # Lane i hands this warp's state to CTA i.
        if lane < cluster_n:
            store_remote(state, buffer, (row, (peer, rank)), barrier, lane)
        cute.arch.mbarrier_wait(barrier, phase)
    peers = warps_per_row * cluster_n
    # Few peers lie in as few neighbouring lanes, again and again: fewer shuffles bring them to all.
    width = min(power_of_two(peers), WARP)
    lane = lane % width
    states = []
    for i in cutlass.range_constexpr(0, peers, width):
        seen = tuple(Float32(v) for v in op.identity)
        if const_expr(peers - i >= width) or i + lane < peers:
            seen = unpack(buffer[row, i + lane], len(op.identity))
        states.append(seen)
    if const_expr(op.at_once and len(states) > 1):
        states = [op.merge_all(states)]
    return op.lanes(functools.reduce(op.merge, states), width)


def store_remote(state: tuple, buffer: cute.Tensor, at: tuple, barrier: cute.Pointer, rank: Int32):
    """st.async `state` into the same slot of CTA `rank`'s buffer; its mbarrier counts the bytes."""
    state = (*state, Float32(0.0)) if len(state) == 3 else state
    numbers = cute.make_rmem_tensor(max(len(state), 2), Float32)
    for i, number in enumerate(state):
        numbers[i] = number
    words = cute.recast_tensor(numbers, Int32)
    slot = buffer.iterator + cute.crd2idx(at, buffer.layout)
    value = tuple(words[i] for i in range(len(state))) if len(state) > 1 else words[0]
    cute.arch.store_async_dsmem(slot, value, barrier, rank)
