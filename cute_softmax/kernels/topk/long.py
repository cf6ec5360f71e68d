"""The k largest logarithms of a softmax over a long row, and a chosen element's, with its rank: one read of the row.

coordinates -> load a tile ahead -> for each tile: load the next, reduce, collect candidates -> select -> store

A CTA takes the tiles of its share in the order of their columns. Of the first one, the k-th largest of the threads'
maxima is a bound that at least k elements reach; what does not reach it is none of the k largest, and of later tiles
neither is what equals it. Candidates are few then, and the bound rises where they become many. Where they would be more
than there are places for, as in a row whose elements are all equal, the bound is the k-th largest of all to the last
bit. Where CTAs share a row the last of them to end merges what they found.
"""

import operator
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ...plan.maths import WARP
from ...plan.topk_long import (
    COUNT,
    LARGER,
    STAGES,
    STEPS,
    THREADS,
    WORDS,
    LongTopkClass,
)
from ..common import online, reduce
from ..common.copy import DTYPES, Fragment, element, global_pointer, load_async, read_policy, unpack
from ..common.index import ceil_div, larger, select, smaller
from ..common.reduce import tree
from ..maths.maths import Statistics
from .candidates import (
    EXACT,
    KEYS,
    LOWEST,
    ROUGH,
    Candidates,
    add,
    beyond,
    bound,
    bound_of,
    drop,
    key_of,
    reaches,
)
from .shares import Share, fill, gather, hand_over, last_of

INDEX_ERROR = "cute_softmax.topk_log_softmax: index %lld in row %lld is out of range: a row has %d elements"


@dataclass(frozen=True)
class Tile:
    """This thread's part of a tile: its vectors in shared memory, (V, STEPS), whether they exist, the column of the
    first; and the scalar at an edge, where rows have those, its column, and whether it exists.

    Vectors are read where they are needed: rarely again, and not kept in registers for that."""

    tXsX: cute.Tensor
    exist: list[Boolean]
    column: Int32
    edge: tuple[Float32, Int32, Boolean] | None

    def keys(self) -> list[Int64]:
        """The keys of all elements, LOWEST for what does not exist."""
        found = []
        for u, exists in enumerate(self.exist):
            found += [select(exists, key, LOWEST) for key in self.keys_of(u)]
        if self.edge is not None:
            x, column, exists = self.edge
            found.append(select(exists, key_of(x, column), LOWEST))
        return found

    def vector(self, u: int) -> cute.Tensor:
        """Vector u in registers."""
        tXrX = cute.make_rmem_tensor(self.tXsX.shape[0], self.tXsX.element_type)
        cute.autovec_copy(self.tXsX[None, u], tXrX)
        return tXrX

    def keys_of(self, u: int) -> list[Int64]:
        """The keys of the elements of vector u, as if it existed."""
        column = self.column + u * THREADS * self.tXsX.shape[0]
        return [key_of(x, column + v) for v, x in enumerate(unpack(self.vector(u)))]


class LongTopkKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.topk_long.LongTopkClass`."""

    def __init__(self, spec: LongTopkClass):
        self.spec = spec
        self.dtype = DTYPES[spec.dtypes[0]]
        # Scores that are scaled may have any float32's distance from each other.
        self.math = Statistics("fp32" if spec.scaled else spec.dtypes[0], online=True)
        names = []
        for name in spec.operands:
            names += [name, f"{name}_stride"] if name in ("x", "index") else [name]
        self.names = [*["scratch"] * spec.split, *["scale"] * spec.scaled, *names]

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int64,
        columns: Int32,
        k: Int32,
        shares: Int32,
        tiles: Int32,
        evict_last: Int32,
        *operands: Int64,
    ):
        """Launch.

        k: at most a quarter of `spec.places`, or half of them; shares, tiles: CTAs of a row, and tiles of each.
        operands: zeroed memory as `LongTopkPlan.scratch` has it, the bits of the scale, then addresses in bytes, of x
        and index with the elements from row to row.
        """
        s = self.spec
        self.kernel(columns, k, shares, tiles, evict_last, operands).launch(
            grid=[Int32(rows) * shares, 1, 1],
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1,
        )

    @cute.kernel
    def kernel(
        self, columns: Int32, k: Int32, shares: Int32, tiles: Int32, evict_last: Int32, operands: tuple
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        observe("tv", cute.make_layout(s.tv.shape, stride=s.tv.stride))
        at = dict(zip(self.names, operands, strict=True))
        share = self.share_of(cta, tidx, columns, shares, tiles, evict_last, at)

        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        buffer = smem.allocate_tensor(Int64, layout, byte_alignment=8)
        observe("reduction_buffer", buffer)
        layout = cute.make_layout(s.smem.shape, stride=s.smem.stride)
        sX = smem.allocate_tensor(self.dtype, layout, byte_alignment=16)
        observe("smem", sX)
        sW = smem.allocate_tensor(Int32, cute.make_layout(WORDS), byte_alignment=16)
        candidates = None
        if const_expr(s.places):
            sK = smem.allocate_tensor(Int64, cute.make_layout(s.places), byte_alignment=16)
            candidates = Candidates(sK, sW, tidx, k)
        if tidx < WORDS:
            sW[tidx] = Int32(0)
        cute.arch.barrier()

        math = self.math
        if const_expr(s.scaled):
            math = math.scaled(Int32(at["scale"]).bitcast(Float32))
        chosen, exists, index = Float32(0.0), Boolean(True), Int64(0)
        if const_expr(s.chosen):
            index = element(Int64, at["index"], share.row * at["index_stride"])[0]
            exists = (index >= 0) & (index < columns)
            chosen = element(self.dtype, at["x"], share.start + select(exists, index, Int64(0)))[0]
            chosen = chosen.to(Float32)

        state, above = self.walk(share, math, candidates, sX, chosen, tidx)
        state = math.whole.lanes(state, WARP)
        state = reduce.across_warps(math.whole, state, buffer, None, Int32(0), 1)
        if const_expr(s.chosen):
            above = self.total(sW, above, tidx)
        if const_expr(s.split):
            if const_expr(s.places):
                self.select(candidates, partial(hand_over, share, k))
                fill(share, candidates)
            if last_of(share, state, above, sW, tidx) != 0:
                state, above = gather(share, math, candidates, tidx)
                self.finish(share, math, candidates, state, above, chosen, exists, index, tidx)
        else:
            self.finish(share, math, candidates, state, above, chosen, exists, index, tidx)

    # What is read.

    def share_of(
        self,
        cta: Int32,
        tidx: Int32,
        columns: Int32,
        shares: Int32,
        tiles: Int32,
        evict_last: Int32,
        at: dict[str, Int64],
    ) -> Share:
        """What this CTA reads."""
        s, V = self.spec, self.spec.vector
        row, number = Int64(cta // shares), cta % shares
        start, head = row * at["x_stride"], Int32(0)
        if s.edges:
            misaligned = Int32((at["x"] // (self.dtype.width // 8) + start) & Int64(V - 1))
            head = smaller((V - misaligned) & (V - 1), columns)
        vectors, each = (columns - head) // V, tiles * (THREADS * STEPS)
        first = number * each
        end = smaller(vectors, first + each)
        count = larger(ceil_div(end - first, THREADS * STEPS), Int32(1))
        # Slots 0 .. V-2 are those of the head, V-1 .. 2V-3 of the tail.
        after = head + vectors * V + tidx - (V - 1)
        at_head = (tidx < head) & (number == 0)
        at_tail = (tidx >= V - 1) & (after < columns) & (number == 0)
        edge = select(at_head, tidx, after)
        policy = read_policy(evict_last)
        return Share(
            row, number, shares, columns, start, head, first, end, count, edge, at_head, at_tail, at, policy
        )

    def vector(self, share: Share, tile: Int32, u: int, tidx: Int32) -> Int32:
        """The number of this thread's vector u of a tile."""
        return share.first + tile * (THREADS * STEPS) + (u * THREADS + tidx)

    def slots(self, sX: cute.Tensor, tile: Int32, tidx: Int32) -> cute.Tensor:
        """tXsX: this thread's places for the vectors of a tile in shared memory, (V, STEPS)."""
        V = self.spec.vector
        at = cute.crd2idx((tidx * V, tile % STAGES), sX.layout)
        return cute.make_tensor(
            (sX.iterator + at).align(V * self.dtype.width // 8),
            cute.make_layout((V, STEPS), stride=(1, THREADS * V)),
        )

    @cute.jit
    def load(self, share: Share, sX: cute.Tensor, tile: Int32, tidx: Int32):
        """Start to load this thread's vectors of a tile into its places, as one group; -inf where there are none."""
        V, tXsX = self.spec.vector, self.slots(sX, tile, tidx)
        nothing = cute.make_rmem_tensor(V, self.dtype)
        nothing.fill(self.dtype(-float("inf")))
        for u in cutlass.range_constexpr(STEPS):
            number = self.vector(share, tile, u, tidx)
            at = share.start + share.head + Int64(number) * V
            pointer = global_pointer(self.dtype, share.at["x"], at, V * self.dtype.width // 8)
            if number < share.end:
                load_async(cute.make_tensor(pointer, cute.make_layout(V)), tXsX[None, u], V, share.policy)
            else:
                cute.autovec_copy(nothing, tXsX[None, u])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_edge(self, share: Share) -> Float32:
        """This thread's scalar at the edges of a row, or -inf."""
        held = cute.make_rmem_tensor(1, self.dtype)
        held.fill(self.dtype(-float("inf")))
        gE = element(self.dtype, share.at["x"], share.start + share.edge)
        if share.at_head | share.at_tail:
            held[0] = gE[0]
        return held[0].to(Float32)

    # The tiles.

    @cute.jit
    def walk(
        self,
        share: Share,
        math: cutlass.Constexpr,
        candidates: Candidates | None,
        sX: cute.Tensor,
        chosen: Float32,
        tidx: Int32,
    ) -> tuple:
        """(this thread's (maximum, sum) of its part of the share, how many elements are larger than the chosen one);
        candidates are collected."""
        # A name of its own: what a loop on the GPU calls methods of would be carried through it.
        s, exp, exponential = self.spec, math.exp, math.exp.exponential
        for number in cutlass.range_constexpr(STAGES - 1):
            self.load(share, sX, Int32(number), tidx)
        at_edge = Float32(0.0)
        if const_expr(s.edges):
            at_edge = self.load_edge(share)
        seen, total, above = Float32(-float("inf")), Float32(0.0), Int32(0)
        reached, count = LOWEST, Int32(0)
        for number in cutlass.range(share.tiles, unroll=1):
            self.load(share, sX, number + (STAGES - 1), tidx)
            vectors = [self.vector(share, number, u, tidx) for u in range(STEPS)]
            edge = None
            if const_expr(s.edges):
                here = (share.at_head & (number == 0)) | (share.at_tail & (number == share.tiles - 1))
                edge = select(here, at_edge, Float32(-float("inf"))), share.edge, here
            column = share.head + vectors[0] * s.vector
            cute.arch.cp_async_wait_group(STAGES - 1)
            tile = Tile(self.slots(sX, number, tidx), [v < share.end for v in vectors], column, edge)
            tXrX, scalars = [tile.vector(u) for u in range(STEPS)], [] if edge is None else [edge[0]]
            maxima = [*(Fragment([lambda v=v: v], [], True).maximum() for v in tXrX), *scalars]

            before, seen = seen, online.maximum(seen, tree(online.maximum, maxima))
            ref = online.reference(seen)
            elements = Fragment([lambda v=v: v for v in tXrX], scalars, True)
            terms = (self.counted(x, exponential(x, ref), chosen) for x in elements)
            numbers = tree(lambda a, b: tuple(map(operator.add, a, b)), terms)
            total = online.rescale(total, before, seen, exp) + numbers[0]
            if const_expr(s.chosen):
                above = above + numbers[1]
            if const_expr(s.places):
                if number == 0:
                    reached = bound(candidates, partial(self.top, tile, maxima), ROUGH)
                self.collect(candidates, tile, maxima, reached, number == 0)
                cute.arch.barrier()
                came = candidates.sW[COUNT]
                cute.arch.barrier()
                reached = beyond(reached)
                if came > s.places:
                    reached = beyond(drop(candidates, count, EXACT, tile.keys))
                elif came > candidates.k + s.places // 4:
                    reached = cutlass.max(reached, beyond(drop(candidates, came, ROUGH)))
                count = candidates.sW[COUNT]
                # Before one thread counts on, all have read.
                cute.arch.barrier()
        return (seen, total), above

    def counted(self, x: Float32, term: Float32, chosen: Float32) -> tuple:
        """What an element adds to the sum and, where one is chosen, to the number of larger ones."""
        return (term, select(x > chosen, Int32(1), Int32(0))) if self.spec.chosen else (term,)

    def top(self, tile: Tile, maxima: list[Float32]) -> list[Int64]:
        """What the largest of this thread's elements of a tile reaches."""
        exist = [*tile.exist, *([] if tile.edge is None else [tile.edge[2]])]
        return [
            tree(cutlass.max, [select(e, bound_of(x), LOWEST) for x, e in zip(maxima, exist, strict=True)])
        ]

    @cute.jit
    def collect(
        self,
        candidates: Candidates,
        tile: Tile,
        maxima: list,
        reached: Int64,
        first: Boolean,
    ):
        """Make candidates of the elements that reach a bound. first: whether some may equal its value."""
        least, V = KEYS.element(reached), self.spec.vector
        for u in cutlass.range_constexpr(STEPS):
            if tile.exist[u] & reaches(maxima[u], least, first):
                keys = tile.keys_of(u)
                for v in cutlass.range_constexpr(V):
                    add(candidates, keys[v], reached)
        if const_expr(tile.edge is not None):
            x, column, exists = tile.edge
            if exists:
                add(candidates, key_of(x, column), reached)

    @cute.jit
    def total(self, sW: cute.Tensor, above: Int32, tidx: Int32) -> Int32:
        """The sum over all threads."""
        above = cute.arch.warp_redux_sync(above, "add")
        if tidx % WARP == 0:
            cute.arch.atomic_add(sW.iterator + LARGER, above)
        cute.arch.barrier()
        return sW[LARGER]

    # What is selected.

    @cute.jit
    def select(self, candidates: Candidates, store: cutlass.Constexpr):
        """Give the k largest candidates, as far as there are so many, to `store(place, key)`: the largest has place 0.

        Each counts how many are larger, so there must be few. All threads come from a barrier.
        """
        sK, sW, k = candidates.sK, candidates.sW, candidates.k
        few = k + self.spec.places // 16
        if sW[COUNT] > few:
            drop(candidates, sW[COUNT], ROUGH)
        if sW[COUNT] > few:
            drop(candidates, sW[COUNT], EXACT)
        count = sW[COUNT]
        for i in cutlass.range(candidates.tidx, count, THREADS, unroll=1):
            key, place = sK[i], Int32(0)
            for j in cutlass.range(count, unroll=4):
                place = place + select(sK[j] > key, Int32(1), Int32(0))
            if place < k:
                store(place, key)

    @cute.jit
    def finish(
        self,
        share: Share,
        math: cutlass.Constexpr,
        candidates: Candidates | None,
        state: tuple,
        above: Int32,
        chosen: Float32,
        exists: Boolean,
        index: Int64,
        tidx: Int32,
    ):
        """Store the results of a row."""
        s, at, row = self.spec, share.at, share.row
        row_max, log = math.group_results(state)
        found = math.exp.score(chosen) - row_max - log
        if const_expr(s.places):
            self.select(candidates, partial(self.store, share, math, candidates.k, row_max, log))
        if tidx == 0:
            element(Float32, at["max"], row)[0] = row_max
            element(Float32, at["log"], row)[0] = log
            if const_expr(s.chosen):
                element(Float32, at["found"], row)[0] = found
                element(Int64, at["ranks"], row)[0] = Int64(above)
                if exists ^ True:
                    cute.printf(INDEX_ERROR, index, row, share.columns)
                    cute.arch.inline_ptx("trap;")

    def store(
        self,
        share: Share,
        math: object,
        k: Int32,
        row_max: Float32,
        log: Float32,
        place: Int32,
        key: Int64,
    ):
        """Store one of the k largest."""
        at = share.row * k + place
        gV, gI = element(Float32, share.at["values"], at), element(Int64, share.at["indices"], at)
        gV[0] = math.exp.score(KEYS.element(key)) - row_max - log
        gI[0] = Int64(KEYS.index(key))
