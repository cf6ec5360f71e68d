"""The k largest logarithms of a softmax over a long row that a cluster's CTAs hold in shared memory, for few rows.

load a share -> reduce, a part at a time -> exchange states and maxima -> collect elements -> the first CTA selects

The CTAs of a cluster tell each other the largest elements of their threads, or of several groups of a thread's. About
the k-th largest of all these is a bound that at least k elements reach, and few more: of groups there are many more. A
thread whose largest element reaches it looks at its elements once more, and puts those that do in places of the first
CTA, which ranks them. If there are more than places, as in a row whose elements are all equal, that CTA takes the row
alone (see `long`).
"""

import operator
from dataclasses import replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from ...plan.maths import WARP
from ...plan.topk_long import COUNT, LARGER, LEAST, MOST_OF_ALL, STAGES, STEPS, WORDS
from ..common import reduce
from ..common.copy import largest, unpack
from ..common.index import ceil_div, larger, select, smaller
from ..common.reduce import tree
from .candidates import LOWEST, Candidates, add, key_of, put
from .long import MOST_NUMBER, LongTopkKernel, Memory
from .noted import NONE, Noted, below, exceeds, narrowed
from .shares import Share

PARTS = 4  # of a share, each of which is waited for apart


class HeldTopkKernel(LongTopkKernel):
    """The kernel of one Plan class that has clusters."""

    @property
    def staged(self) -> int:
        return self.spec.staged // (self.dtype.width // 8)

    def units(self, smem: cutlass.memory.SmemAllocator, sX: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Behind the tiles that are under way where the first CTA reads the row alone."""
        s = self.spec
        layout = cute.make_layout((s.vector, s.room.unit, s.noted))
        sV = cute.make_tensor(sX.iterator + STAGES * s.tile, layout)
        columns = cute.recast_ptr(sV.iterator + cute.cosize(layout), dtype=Int32)
        return sV, cute.make_tensor(columns, cute.make_layout(s.noted))

    def exchanged(self, smem: cutlass.memory.SmemAllocator) -> tuple[cute.Tensor | None, cute.Pointer]:
        """(numbers of the maxima of all CTAs' groups, the mbarrier of their states)."""
        s, sG = self.spec, None
        if s.most:
            sG = smem.allocate_tensor(
                Int32, cute.make_layout(s.maxima.shape, stride=s.maxima.stride), byte_alignment=16
            )
            observe("maxima", sG)
        return sG, smem.allocate_array(Int64, num_elems=1)

    @cute.jit
    def row(self, share: Share, math: cutlass.Constexpr, memory: Memory, tidx: Int32):
        """Find what this CTA's share of a row has; the first one of the cluster stores the results."""
        s, sW, candidates, noted = self.spec, memory.sW, memory.candidates, memory.noted
        sG, barrier = memory.exchanged
        self.ask(share, memory.sX, tidx)
        if tidx < WORDS:
            limits = select(tidx == MOST_OF_ALL, Int32(NONE), Int32(0))
            sW[tidx] = select(tidx == LEAST, Int32(MOST_NUMBER), limits)
        if tidx == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()

        # Behind the copies, which need not wait for what it takes to find it.
        chosen = self.chosen(share, tidx)
        state, above = self.reduce(share, math.exp, memory.sX, chosen, tidx)
        (seen, _), key = state, LOWEST
        if const_expr(s.edges):
            key = self.edge(memory.sE, tidx)
            state, above = self.with_scalar(math, key, state, above, chosen)
        reached = state[0]

        # All CTAs of the cluster have begun: their memory is there, and cleared.
        cute.arch.cluster_wait()
        if const_expr(s.most):
            self.tell(share, noted, seen, sG, tidx)
        if const_expr(s.chosen):
            above = cute.arch.warp_redux_sync(above, "add")
            if tidx % WARP == 0:
                add_in(sW, LARGER, above)
        state = math.whole.lanes(state, WARP)
        state = reduce.across_warps(math.whole, state, memory.buffer, barrier, Int32(0), s.cluster_n)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        if const_expr(s.most):
            numbers = [sG[i + tidx % WARP] for i in range(0, cute.size(sG), WARP)]
            bound = bound_of(numbers, candidates.k, s.most <= WARP)
            self.collect_held(share, memory.sX, candidates, reached, noted.limit(below(bound)), tidx)
            if const_expr(s.edges):
                add(candidates, key, noted.least(bound))
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        self.end(share, math, memory, state, chosen, tidx)

    @cute.jit
    def end(
        self,
        share: Share,
        math: cutlass.Constexpr,
        memory: Memory,
        state: tuple,
        chosen: Float32,
        tidx: Int32,
    ):
        """Let the first CTA of the cluster store the results of the row, all of whose shares have come to it."""
        sW, candidates, noted = memory.sW, memory.candidates, memory.noted
        fits = share.number == 0
        if const_expr(self.spec.most):
            fits = fits & (sW[COUNT] <= candidates.places)
            if (share.number == 0) & (sW[COUNT] > candidates.places):
                whole, own = self.alone(share, memory)
                super().row(whole, math, own, tidx, chosen)
        if fits:
            self.finish(share, math, candidates, noted, state, sW[LARGER], chosen, tidx)

    # A share.

    def parts(self, share: Share) -> list[tuple[Int32, Int32]]:
        """(first, end) of the tiles of each part."""
        each = ceil_div(share.tiles, PARTS)
        return [(part * each, smaller((part + 1) * each, share.tiles)) for part in range(PARTS)]

    @cute.jit
    def ask(self, share: Share, sX: cute.Tensor, tidx: Int32):
        """Start to load all of this thread's vectors, each part as a group."""
        for first, end in self.parts(share):
            for number in cutlass.range(first, end, unroll=1):
                self.copy(share, sX, number, tidx)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def reduce(
        self, share: Share, exp: cutlass.Constexpr, sX: cute.Tensor, chosen: Float32, tidx: Int32
    ) -> tuple:
        """((maximum, sum) of this thread's vectors, how many elements are larger than the chosen one)."""
        seen, total, above = Float32(-float("inf")), Float32(0.0), Int32(0)
        tXrX = [cute.make_rmem_tensor(self.spec.vector, self.dtype) for _ in range(STEPS)]
        for part, (first, end) in enumerate(self.parts(share)):
            cute.arch.cp_async_wait_group(PARTS - 1 - part)
            for number in cutlass.range(first, end, unroll=1):
                self.hold(share, sX, number, tidx, tXrX)
                seen, total, above = self.fold(exp, tXrX, [largest(tXrX, [])], seen, total, above, chosen)
        return (seen, total), above

    @cute.jit
    def tell(self, share: Share, noted: Noted, seen: Float32, sG: cute.Tensor, tidx: Int32):
        """Let all CTAs know the number of the largest element of this thread's group. seen: this thread's largest."""
        s = self.spec
        exists = self.vector(share, Int32(0), 0, tidx) < share.end
        number = select(exists, noted.number(seen), Int32(NONE))
        for bit in cutlass.range_constexpr(s.lanes.bit_length() - 1):
            number = larger(number, cute.arch.shuffle_sync_bfly(number, 1 << bit))
        at = cute.crd2idx((tidx // s.lanes, share.number), sG.layout)
        for first in cutlass.range_constexpr(0, s.cluster_n, s.lanes):
            peer = first + tidx % s.lanes
            if peer < s.cluster_n:
                store_in(sG, at, peer, number)

    @cute.jit
    def collect_held(
        self,
        share: Share,
        sX: cute.Tensor,
        candidates: Candidates,
        seen: Float32,
        limit: Float32,
        tidx: Int32,
    ):
        """Put this thread's elements above a limit in places of the cluster's first CTA. seen: the largest of them, and
        of what is no vector."""
        V, sK, sW = self.spec.vector, candidates.sK, candidates.sW
        tXrX = [cute.make_rmem_tensor(V, self.dtype) for _ in range(STEPS)]
        if exceeds(seen, limit):
            for number in cutlass.range(share.tiles, unroll=1):
                # -inf where there is no vector.
                self.hold(share, sX, number, tidx, tXrX)
                which, column = Uint32(0), share.head + self.vector(share, number, 0, tidx) * V
                for u in cutlass.range_constexpr(STEPS):
                    exists = self.vector(share, number, u, tidx) < share.end
                    for v, x in enumerate(unpack(tXrX[u])):
                        reaches = exists & exceeds(x, limit)
                        which = which | select(reaches, Uint32(1 << (u * V + v)), Uint32(0))
                if which != 0:
                    tXsX = self.slots(sX, number, tidx)
                    place = add_in(sW, COUNT, Int32(cute.arch.popc(which)))
                    put(which, place, candidates.places, partial(keep, tXsX, sK, column))

    def alone(self, share: Share, memory: Memory) -> tuple[Share, Memory]:
        """The whole row as one share, and shared memory as `LongTopkKernel.row` has it."""
        s = self.spec
        vectors = (share.columns - share.head) // s.vector
        tiles = ceil_div(vectors, s.threads * STEPS)
        at = dict(share.at)  # of its own: what a branch on the GPU is given comes out of it as other values
        whole = replace(
            share, at=at, number=Int32(0), shares=Int32(1), first=Int32(0), end=vectors, tiles=tiles
        )
        sX = cute.make_tensor(memory.sX.iterator, cute.make_layout((s.tile, STAGES)))
        buffer = cute.make_tensor(memory.buffer.iterator, cute.make_layout((1, (s.threads // WARP, 1))))
        noted = replace(memory.noted, end=share.head + vectors * s.vector)
        return whole, replace(memory, sX=sX, buffer=buffer, noted=noted)


@cute.jit
def bound_of(numbers: list[Int32], k: Int32, enough: cutlass.Constexpr[bool]) -> Int32:
    """A number that at least k of a warp's numbers reach, and few more or, where many are equal, the largest such.
    enough: whether lanes are no fewer than k, so that one number of each is enough."""
    high, low = numbers[0], numbers[0]
    for n in numbers[1:]:
        high, low = larger(high, n), smaller(low, n)
    if const_expr(enough):
        low = high
    high, low = cute.arch.warp_redux_sync(high, "max"), cute.arch.warp_redux_sync(low, "min")

    def reaching(middle: Int32) -> Int32:
        reach = [select(n >= middle, Int32(1), Int32(0)) for n in numbers]
        return cute.arch.warp_redux_sync(tree(operator.add, reach), "add")

    return narrowed(low, high, k, reaching)


def keep(tXsX: cute.Tensor, sK: cute.Tensor, column: Int32, place: Int32, i: Int32):
    """Put the key of element i of a thread's vectors of a tile, whose first one has a column, in a place of the first
    CTA."""
    V = cute.size(tXsX, mode=[0])
    x = tXsX[i % V, i // V].to(Float32)
    store_in(sK, place, Int32(0), key_of(x, column + i // V * (WARP * V) + i % V))


def store_in(sX: cute.Tensor, place: Int32, rank: Int32, number: Int32 | Int64):
    """Store a number in the shared memory of a cluster's CTA, at a place that this one has, too."""
    cute.arch.inline_ptx(
        f"st.shared::cluster.b{number.width} [{{$r0}}], {{$r1}};",
        read_only_args=[cute.arch.map_dsmem_ptr(sX.iterator + place, rank).toint(), number],
    )


def add_in(sX: cute.Tensor, place: int, number: Int32) -> Int32:
    """Add a number in the shared memory of a cluster's first CTA; what was there before."""
    return cute.arch.inline_ptx(
        "atom.relaxed.cluster.shared::cluster.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[cute.arch.map_dsmem_ptr(sX.iterator + place, Int32(0)).toint(), number],
    )
