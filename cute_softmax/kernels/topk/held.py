"""The k largest logarithms of a softmax over a long row that a cluster's CTAs hold in shared memory, for few rows.

load a share -> reduce, a part at a time -> exchange states and maxima -> collect elements -> the first CTA selects

The CTAs of a cluster tell each other the largest elements of their threads, or of several groups of a thread's. About
the k-th largest of all these is a bound that at least k elements reach, and few more: of groups there are many more. A
thread whose largest element reaches it looks at its elements once more, and puts those that do in places of the first
CTA, which ranks them. If there are more than places, as in a row whose elements are all equal, that CTA takes the row
alone (see `long`).
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ...plan.maths import WARP
from ...plan.topk_long import COUNT, LARGER, LEAST, MOST_OF_ALL, STAGES, STEPS, WORDS
from ..common import online, reduce
from ..common.copy import largest, unpack
from ..common.index import ceil_div, select, smaller
from ..common.reduce import tree
from .candidates import LOWEST, Candidates, add, key_of
from .long import MOST_NUMBER, LongTopkKernel, Memory
from .noted import NONE, below, bound_of_groups, exceeds
from .shares import Share

PARTS = 4  # of a share, each of which is waited for apart


class HeldTopkKernel(LongTopkKernel):
    """The kernel of one Plan class that has clusters."""

    def memory(self, smem: cutlass.memory.SmemAllocator, share: Share, k: Int32, tidx: Int32) -> Memory:
        s = self.spec
        layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        buffer = smem.allocate_tensor(Int64, layout, byte_alignment=8)
        observe("reduction_buffer", buffer)
        elements = s.staged // (self.dtype.width // 8)
        sX = smem.allocate_tensor(self.dtype, cute.make_layout(elements), byte_alignment=16)
        sW = smem.allocate_tensor(Int32, cute.make_layout(WORDS), byte_alignment=16)
        candidates, noted = None, None
        if s.most:
            sK = smem.allocate_tensor(Int64, cute.make_layout(s.places), byte_alignment=16)
            candidates = Candidates(sK, sW, tidx, k, s.threads)
            # Behind the tiles that are under way where the first CTA reads the row alone.
            layout = cute.make_layout((s.vector, s.room.unit, s.noted))
            sV = cute.make_tensor(sX.iterator + STAGES * s.tile, layout)
            columns = cute.recast_ptr(sV.iterator + cute.cosize(layout), dtype=Int32)
            noted = self.noted(share, sV, cute.make_tensor(columns, cute.make_layout(s.noted)), sW, tidx)
        sX = cute.make_tensor(sX.iterator, cute.make_layout(s.smem.shape, stride=s.smem.stride))
        observe("smem", sX)
        return Memory(sX, sW, self.edge_memory(smem), buffer, candidates, noted, self.exchanged(smem))

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
    def row(self, share: Share, math: cutlass.Constexpr, memory: Memory, chosen: Float32, tidx: Int32):
        """Find what this CTA's share of a row has; the first one of the cluster stores the results."""
        s, sW, candidates, noted = self.spec, memory.sW, memory.candidates, memory.noted
        sG, barrier = memory.exchanged
        if tidx < WORDS:
            sW[tidx] = select(
                tidx == LEAST, Int32(MOST_NUMBER), select(tidx == MOST_OF_ALL, Int32(NONE), Int32(0))
            )
        if tidx == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()

        (seen, total), above, tops = self.reduce(share, math.exp, memory.sX, chosen, tidx)
        key, of_vectors = LOWEST, (seen, total)
        if const_expr(s.edges):
            if tidx < 2 * s.vector:
                key = memory.sE[tidx]
            (seen, total), above = self.with_scalar(math, key, (seen, total), above, chosen)

        # All CTAs of the cluster have begun: their memory is there, and cleared.
        cute.arch.cluster_wait()
        if const_expr(s.most):
            numbers = self.numbers(share, noted, of_vectors[0], tops)
            for peer in cutlass.range_constexpr(s.cluster_n):
                for i in cutlass.range_constexpr(s.spread):
                    at = cute.crd2idx((tidx, i, share.number), sG.layout)
                    store_in(sG, at, Int32(peer), numbers[i])
        if const_expr(s.chosen):
            above = cute.arch.warp_redux_sync(above, "add")
            if tidx % WARP == 0:
                add_in(sW, LARGER, above)
        state = math.whole.lanes((seen, total), WARP)
        state = reduce.across_warps(math.whole, state, memory.buffer, barrier, Int32(0), s.cluster_n)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        if const_expr(s.most):
            numbers = [sG[tidx, i, peer] for peer in range(s.cluster_n) for i in range(s.spread)]
            bound = bound_of_groups(noted, candidates.k, s.most <= s.threads, numbers, Int32(NONE))
            self.collect_held(share, memory.sX, candidates, seen, noted.limit(below(bound)), tidx)
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
                super().row(*self.alone(share, math, memory), chosen, tidx)
        if fits:
            self.finish(share, math, candidates, noted, state, sW[LARGER], chosen, tidx)

    # A share.

    @cute.jit
    def reduce(
        self, share: Share, exp: cutlass.Constexpr, sX: cute.Tensor, chosen: Float32, tidx: Int32
    ) -> tuple:
        """((maximum, sum) of this thread's vectors, how many elements are larger than the chosen one, the maxima of its
        groups). All vectors are asked for before any is waited for."""
        s = self.spec
        each = ceil_div(share.tiles, PARTS)
        for part in cutlass.range_constexpr(PARTS):
            for number in cutlass.range(part * each, smaller((part + 1) * each, share.tiles), unroll=1):
                self.copy(share, sX, number, tidx)
            cute.arch.cp_async_commit_group()
        seen, total, above = Float32(-float("inf")), Float32(0.0), Int32(0)
        tops = [seen for _ in range(s.spread)] if s.spread > 1 else []
        tXrX = [cute.make_rmem_tensor(s.vector, self.dtype) for _ in range(STEPS)]
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.cp_async_wait_group(PARTS - 1 - part)
            for number in cutlass.range(part * each, smaller((part + 1) * each, share.tiles), unroll=1):
                self.hold(share, sX, number, tidx, tXrX)
                maxima = [largest([x], []) for x in tXrX] if s.spread > 1 else [largest(tXrX, [])]
                seen, total, above = self.fold(exp, tXrX, maxima, seen, total, above, chosen)
                tops = [tree(online.maximum, [top, *maxima[i :: len(tops)]]) for i, top in enumerate(tops)]
        return (seen, total), above, tops

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
        V, sK, sW, places = self.spec.vector, candidates.sK, candidates.sW, candidates.places
        if exceeds(seen, limit):
            for number in cutlass.range(share.tiles, unroll=1):
                tXsX = self.slots(sX, number, tidx)
                for u in cutlass.range_constexpr(STEPS):
                    vector = self.vector(share, number, u, tidx)
                    tXrX, which = cute.make_rmem_tensor(V, self.dtype), Int32(0)
                    if vector < share.end:
                        cute.autovec_copy(tXsX[None, u], tXrX)
                        for v, x in enumerate(unpack(tXrX)):
                            which = which | select(exceeds(x, limit), Int32(1 << v), Int32(0))
                    if which != 0:
                        place, column = add_in(sW, COUNT, cute.arch.popc(which)), share.head + vector * V
                        # Few as a rule: a turn for each of them.
                        while (which != 0) & (place < places):
                            v = cute.arch.popc((which ^ (which - 1)) >> 1)  # the first one
                            store_in(sK, place, Int32(0), key_of(tXsX[v, u].to(Float32), column + v))
                            which, place = which & (which - 1), place + 1

    def alone(self, share: Share, math: object, memory: Memory) -> tuple[Share, object, Memory]:
        """What `LongTopkKernel.row` takes for the whole row."""
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
        return whole, math, replace(memory, sX=sX, buffer=buffer, noted=noted)


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
