"""The k largest logarithms of a softmax over a long row that the threads of a cluster hold in registers, for few rows.

load a share -> reduce -> exchange states and maxima -> collect elements -> the first CTA selects

The CTAs of a cluster tell each other the largest elements of groups of threads. About the k-th largest of all these is
a bound that at least k elements reach, and few more: of groups there are many more. A thread whose largest element
reaches it looks at its elements once more, and sends those that do to places of the first CTA, which ranks them. If
there are more than places, as in a row whose elements are all equal, that CTA reads the row again, alone (see `long`).

What CTAs send to each other is counted by mbarriers. Barriers of a cluster order all that a thread has done before:
behind the first loads each warp would wait for its own.
"""

import operator
from dataclasses import replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from ...plan.maths import WARP
from ...plan.topk_long import BARRIERS, BOUND, COUNT, KEY, STEPS
from ..common import online, reduce
from ..common.copy import Fragment, forget, global_pointer, largest, load, unpack, vector_of, words_of
from ..common.index import ceil_div, larger, select, smaller
from ..common.reduce import sums_so_far, tree
from ..maths.entropy import Statistics
from .candidates import LOWEST, Candidates, key_of, put
from .long import LongTopkKernel, Memory
from .noted import NONE, Noted, below, exceeds, narrowed
from .shares import Share

# Mbarriers: for what the CTAs of a row send to all, and what they have found, to the first one.
STATES, MAXIMA, FOUND = range(BARRIERS)


class HeldTopkKernel(LongTopkKernel):
    """The kernel of one Plan class that has clusters."""

    def exchanged(self, smem: cutlass.memory.SmemAllocator) -> tuple[cute.Tensor | None, cute.Pointer]:
        """(numbers of the maxima of all CTAs' groups, the mbarriers of states, maxima and candidates)."""
        s, sG = self.spec, None
        if s.most:
            sG = smem.allocate_tensor(
                Int32, cute.make_layout(s.maxima.shape, stride=s.maxima.stride), byte_alignment=16
            )
            observe("maxima", sG)
        return sG, smem.allocate_array(Int64, num_elems=BARRIERS)

    def whole(self, math: Statistics) -> object:
        """With how many elements are larger than the chosen one."""
        return reduce.Both(math.whole, reduce.SUM) if self.spec.chosen else math.whole

    def memory(self, smem: cutlass.memory.SmemAllocator, share: Share, k: Int32, tidx: Int32) -> Memory:
        memory = super().memory(smem, share, k, tidx)
        self.open(memory, tidx)
        return memory

    @cute.jit
    def open(self, memory: Memory, tidx: Int32):
        """Let others write to this CTA's memory."""
        s = self.spec
        sG, barriers = memory.exchanged
        if tidx == 0:
            memory.sW[COUNT] = Int32(0)
            cute.arch.mbarrier_init(barriers + STATES, 1)
            if const_expr(s.most):
                cute.arch.mbarrier_init(barriers + MAXIMA, 1)
                cute.arch.mbarrier_init(barriers + FOUND, s.cluster_n * (s.threads // WARP))
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + MAXIMA, 4 * cute.size(sG))
            cute.arch.fence_acq_rel_cluster()
        cute.arch.mbarrier_init_fence()
        # What this thread has written it has released itself: if all did, each would wait for its own loads.
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def row(self, share: Share, math: cutlass.Constexpr, memory: Memory, tidx: Int32):
        """Find what this CTA's share of a row has; the first one of the cluster stores the results."""
        s, (sG, barriers) = self.spec, memory.exchanged
        index = self.index(share)
        tXrX = self.ask(share, tidx)
        chosen = self.chosen(share, index)
        state, above = self.reduce(math.exp, tXrX, chosen)
        (seen, _), key = state, LOWEST
        if const_expr(s.edges):
            key = self.tiles.edge(memory.sE, tidx)
            state, above = self.with_scalar(math, key, state, above, chosen)

        # All CTAs of the cluster have begun: their memory is there, and open.
        cute.arch.cluster_wait()
        if const_expr(s.most):
            self.tell(share, memory.noted, seen, sG, barriers + MAXIMA, tidx)
        op = self.whole(math)
        if const_expr(s.chosen):
            # It counts what registers hold exactly.
            state = (*state, Float32(above))
        state = op.lanes(state, WARP)
        state = reduce.across_warps(op, state, memory.buffer, barriers + STATES, Int32(0), s.cluster_n)
        if const_expr(s.chosen):
            above = Int32(state[2])

        if const_expr(s.most):
            cute.arch.mbarrier_wait(barriers + MAXIMA, 0)
            bound = self.bound(memory, tidx)
            self.collect_held(share, memory, tXrX, seen, key, bound, tidx)
        self.end(share, math, memory, state[:2], above, chosen, tidx)
        # At the end: registers that loads are on their way to would have to be kept during the call.
        self.refuse(share, index, tidx)

    @cute.jit
    def end(
        self,
        share: Share,
        math: cutlass.Constexpr,
        memory: Memory,
        state: tuple,
        above: Int32,
        chosen: Float32,
        tidx: Int32,
    ):
        """Let the first CTA of the cluster store the results of the row, all of whose shares have come to it."""
        sW, candidates, noted = memory.sW, memory.candidates, memory.noted
        fits = share.number == 0
        if const_expr(self.spec.most):
            if share.number == 0:
                cute.arch.mbarrier_wait(memory.exchanged[1] + FOUND, 0)
            fits = fits & (sW[COUNT] <= candidates.places)
            if (share.number == 0) & (sW[COUNT] > candidates.places):
                whole, own = self.alone(share, memory)
                super().row(whole, math, own, tidx, chosen)
        if fits:
            self.finish(share, math, candidates, noted, state, above, chosen, tidx)

    # A share.

    def own(self, share: Share, i: int, tidx: Int32) -> Int32:
        """The number of this thread's vector i."""
        return share.first + (tidx + i * self.spec.threads)

    @cute.jit
    def ask(self, share: Share, tidx: Int32) -> list[cute.Tensor]:
        """Start to load all of this thread's vectors; -inf where there are none."""
        s, V = self.spec, self.spec.vector
        tXrX = [cute.make_rmem_tensor(V, self.dtype) for _ in range(s.held)]
        at = share.start + share.head + Int64(self.own(share, 0, tidx)) * V
        pointer = global_pointer(self.dtype, share.at["x"], at, V * self.dtype.width // 8)
        for i in cutlass.range_constexpr(s.held):
            tXrX[i].fill(self.dtype(-float("inf")))
            if self.own(share, i, tidx) < share.end:
                load(
                    cute.make_tensor(pointer + i * s.threads * V, cute.make_layout(V)),
                    tXrX[i],
                    V,
                    share.policy,
                )
        return tXrX

    def reduce(self, exp: cutlass.Constexpr, tXrX: list[cute.Tensor], chosen: Float32) -> tuple:
        """((maximum, sum) of this thread's vectors, how many elements are larger than the chosen one)."""
        seen, total, above = Float32(-float("inf")), Float32(0.0), Int32(0)
        for i in range(0, len(tXrX), STEPS):
            part = tXrX[i : i + STEPS]
            before, seen = seen, online.maximum(seen, largest(part, []))
            total = online.rescale(total, before, seen, exp)
            for vector in part:
                sums = self.sums(Fragment([lambda v=vector: v], [], True), exp, seen, chosen)
                total = total + sums[0]
                if self.spec.chosen:
                    above = above + sums[1]
        return (seen, total), above

    # What may be among the largest.

    @cute.jit
    def tell(
        self,
        share: Share,
        noted: Noted,
        seen: Float32,
        sG: cute.Tensor,
        barrier: cute.Pointer,
        tidx: Int32,
    ):
        """Send the number of the largest element of this thread's group to all CTAs. seen: this thread's largest.

        Neighbours send several groups' together, each to other CTAs: what CTAs send to each other has its price by the
        piece."""
        s, lanes = self.spec, self.spec.lanes
        exists = self.own(share, 0, tidx) < share.end
        number = select(exists, noted.number(seen), Int32(NONE))
        for bit in cutlass.range_constexpr(lanes.bit_length() - 1):
            number = larger(number, cute.arch.shuffle_sync_bfly(number, 1 << bit))
        count = min(4, WARP // lanes)
        numbers = tuple(cute.arch.shuffle_sync_bfly(number, i * lanes) for i in range(1, count))
        numbers, senders = (number, *numbers), count * lanes
        at = cute.crd2idx((tidx // senders * count, share.number), sG.layout)
        for first in cutlass.range_constexpr(0, s.cluster_n, senders):
            peer = first + tidx % senders
            if peer < s.cluster_n:
                send(sG, at, peer, numbers, barrier)

    @cute.jit
    def bound(self, memory: Memory, tidx: Int32) -> Int32:
        """`bound_of` what has come: all warps would take turns to find the same."""
        sW = memory.sW
        if tidx < WARP:
            sG, candidates = memory.exchanged[0], memory.candidates
            sW[BOUND] = bound_of(sG, tidx, candidates.k, self.spec.most <= WARP)
        cute.arch.barrier()
        return sW[BOUND]

    @cute.jit
    def collect_held(
        self,
        share: Share,
        memory: Memory,
        tXrX: list[cute.Tensor],
        seen: Float32,
        key: Int64,
        bound: Int32,
        tidx: Int32,
    ):
        """Send this thread's elements that reach a bound, and its scalar, to places of the cluster's first CTA. seen:
        the largest of the elements; key: of the scalar."""
        candidates, noted, barrier = memory.candidates, memory.noted, memory.exchanged[1] + FOUND
        V, sK, lane = self.spec.vector, candidates.sK, tidx % WARP
        limit, each = noted.limit(below(bound)), WARP // V
        # Vectors by words that have a bit for each of their elements.
        parts = [(first, tXrX[first : first + each]) for first in range(0, len(tXrX), each)]
        which = [Uint32(0) for _ in parts]
        if exceeds(seen, limit):
            which = [self.reaching(share, vectors, first, limit, tidx) for first, vectors in parts]
        count = sum(Int32(cute.arch.popc(w)) for w in which)
        scalar = key >= noted.least(bound)
        if const_expr(self.spec.edges):
            count = count + select(scalar, Int32(1), Int32(0))
        sent = Int32(0)
        if cute.arch.vote_any_sync(count > 0):
            place, sent = places(candidates, count, lane)
            for (first, vectors), w in zip(parts, which, strict=True):
                column = share.head + self.own(share, first, tidx) * V
                store = partial(keep, vectors, sK, column, self.spec.threads * V, barrier)
                put(w, place, candidates.places, store)
                place = place + Int32(cute.arch.popc(w))
            if const_expr(self.spec.edges) and scalar & (place < candidates.places):
                send(sK, place, Int32(0), halves(key), barrier)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, KEY * sent, 0)

    @cute.jit
    def reaching(
        self, share: Share, vectors: list[cute.Tensor], first: int, limit: Float32, tidx: Int32
    ) -> Uint32:
        """A bit for each element of this thread's vectors from the first one on that is above a limit."""
        V, which = self.spec.vector, Uint32(0)
        for i in cutlass.range_constexpr(len(vectors)):
            exists = self.own(share, first + i, tidx) < share.end
            if exists & exceeds(largest([vectors[i]], []), limit):
                forget(vectors[i])
                for v, x in enumerate(unpack(vectors[i])):
                    which = which | select(exceeds(x, limit), Uint32(1 << (i * V + v)), Uint32(0))
        return which

    # Where there are more than places.

    def alone(self, share: Share, memory: Memory) -> tuple[Share, Memory]:
        """The whole row as one share, and shared memory as `LongTopkKernel.row` has it."""
        s = self.spec
        vectors = (share.columns - share.head) // s.vector
        tiles = ceil_div(vectors, s.threads * s.steps)
        at = dict(share.at)  # of its own: what a branch on the GPU is given comes out of it as other values
        whole = replace(
            share, at=at, number=Int32(0), shares=Int32(1), first=Int32(0), end=vectors, tiles=tiles
        )
        buffer = cute.make_tensor(memory.buffer.iterator, cute.make_layout((1, (s.threads // WARP, 1))))
        noted = replace(memory.noted, end=share.head + vectors * s.vector)
        return whole, replace(memory, buffer=buffer, noted=noted)


@cute.jit
def bound_of(sG: cute.Tensor, lane: Int32, k: Int32, enough: cutlass.Constexpr[bool]) -> Int32:
    """Of a warp: a number that at least k of a tensor's reach, and few more or, where many are equal, the largest such.
    enough: whether lanes are no fewer than k, so that one number of each is enough."""
    size = cute.size(sG)
    rest = size % WARP
    numbers = [sG[i + lane] for i in range(0, size - rest, WARP)]
    high, low = numbers[0], numbers[0]
    for n in numbers[1:]:
        high, low = larger(high, n), smaller(low, n)
    if const_expr(rest > 0):
        n = select(lane < rest, sG[size - rest + lane % rest], Int32(NONE))
        high, low = larger(high, n), select(lane < rest, smaller(low, n), low)
        numbers.append(n)
    if const_expr(enough):
        low = high
    high, low = cute.arch.warp_redux_sync(high, "max"), cute.arch.warp_redux_sync(low, "min")

    def reaching(middle: Int32) -> Int32:
        reach = [select(n >= middle, Int32(1), Int32(0)) for n in numbers]
        return cute.arch.warp_redux_sync(tree(operator.add, reach), "add")

    return narrowed(low, high, k, reaching)


@cute.jit
def places(candidates: Candidates, count: Int32, lane: Int32) -> tuple[Int32, Int32]:
    """(the first of as many places of the cluster's first CTA as a thread asks for, how many of those that its warp has
    got exist)."""
    first, last, end = Int32(0), WARP - 1, sums_so_far(count, lane)
    if lane == last:
        first = add_in(candidates.sW, COUNT, end)
    first, wanted = cute.arch.shuffle_sync(first, last), cute.arch.shuffle_sync(end, last)
    return first + end - count, larger(smaller(candidates.places - first, wanted), Int32(0))


def keep(
    vectors: list[cute.Tensor],
    sK: cute.Tensor,
    column: Int32,
    apart: int,
    barrier: cute.Pointer,
    place: Int32,
    i: Int32,
):
    """Send the key of element i of vectors, whose first one has a column, and which are so far apart, to a place."""
    V = cute.size(vectors[0])
    words = [word for vector in vectors for word in words_of(vector)]
    each = len(vectors) * V // len(words)
    word = words[0]
    for j in range(1, len(words)):
        word = select(i // each == j, words[j], word)
    elements = unpack(vector_of([word], vectors[0].element_type))
    x = elements[0] if each == 1 else select(i % each == 1, elements[1], elements[0])
    send(sK, place, Int32(0), halves(key_of(x, column + i // V * apart + i % V)), barrier)


def send(sX: cute.Tensor, place: Int32, rank: Int32, words: tuple[Int32, ...], barrier: cute.Pointer):
    """Store 1, 2 or 4 words in the shared memory of a cluster's CTA, at a place that this one has, too. Its mbarrier
    counts the bytes."""
    to = (sX.iterator + place).align(4 * len(words))
    cute.arch.store_async_dsmem(to, words if len(words) > 1 else words[0], barrier, rank)


def halves(key: Int64) -> tuple[Int32, Int32]:
    """The words of a key, the lower one first."""
    return Int32(key), Int32(key >> Int64(32))


def add_in(sX: cute.Tensor, place: int, number: Int32) -> Int32:
    """Add a number in the shared memory of a cluster's first CTA; what was there before."""
    return cute.arch.inline_ptx(
        "atom.relaxed.cluster.shared::cluster.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[cute.arch.map_dsmem_ptr(sX.iterator + place, Int32(0)).toint(), number],
    )
