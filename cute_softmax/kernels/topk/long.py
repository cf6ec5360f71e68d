"""The k largest logarithms of a softmax over a long row, and a chosen element's, with its rank: one read of the row.

coordinates -> load a tile ahead -> for each tile: load the next, reduce, note vectors -> candidates -> select -> store

A CTA takes the tiles of its share in the order of their columns. Of the first one, and again each time that four times
as much has been seen, about the k-th largest of groups' maxima is a bound that at least k elements reach (`noted`):
vectors without an element that reaches it have none of the k largest. Those with one are noted by their warp.
Where much has been noted it is sifted by the bound of that time, which is made anew. When the row has ended, or before
where many are noted, candidates are made of the elements that reach the bound (`candidates`): a few times k at most, as
a rule, which count their places among each other. Where they would be more than there are places for, as in a row whose
elements are all equal, the bound is the k-th largest of all to the last bit. Where CTAs share a row the last of them to
end merges what they found.

The threads of a CTA meet for a bound, and not at other tiles. Where a warp has no place left for what it has to note,
as in a row that rises, the row is read again, and all meet at each tile, where candidates are made as often as places
run out.
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
    BINS,
    COUNT,
    LARGER,
    LEAST,
    MOST_OF_ALL,
    SPARE_BITS,
    STAGES,
    WORDS,
    LongTopkClass,
)
from ..common import online, reduce
from ..common.copy import DTYPES, Fragment, element, largest
from ..common.early import MOST_CTAS, SMS, begins_early, wait_for_stream
from ..common.index import ceil_div, larger, select, smaller
from ..common.reduce import threads_that, tree
from ..maths.entropy import Statistics
from .candidates import EXACT, KEYS, LOWEST, ROUGH, Candidates, add, drop
from .noted import NONE, Noted, add_above, add_noted, below, bound_of_groups, note, reaching, sift
from .ranks import rank
from .shares import Share, fill, gather, hand_over, last_of
from .tiles import Tiles

INDEX_ERROR = "cute_softmax.topk_log_softmax: index %lld in row %lld is out of range: a row has %d elements"
MOST_NUMBER = (1 << 31) - 1  # no number of a group is larger
NEVER = 1 << 30  # a tile that is none
# Sixteenths of the CTAs of clusters that there is room for: if there are more, the next kernel's would be in the way.
FULL = 13
LATE = 2  # tiles, for which no better bound is looked for


@dataclass(frozen=True)
class Memory:
    """Shared memory of a CTA: sX, tiles, (column, stage); sW, words; sE, keys of the scalars at a row's edges, None
    without any; the reduction buffer; what is selected from, None where nothing is; what only `held` has."""

    sX: cute.Tensor
    sW: cute.Tensor
    sE: cute.Tensor | None
    buffer: cute.Tensor
    candidates: Candidates | None
    noted: Noted | None
    exchanged: tuple[cute.Tensor | None, cute.Pointer] | None = None


class LongTopkKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.topk_long.LongTopkClass`."""

    def __init__(self, spec: LongTopkClass):
        self.spec = spec
        self.dtype, self.result = (DTYPES[name] for name in spec.dtypes)
        self.tiles = Tiles(spec, self.dtype)
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
        each: Int32,
        evict_last: Int32,
        *operands: Int64,
    ):
        """Launch.

        k: at most half of `spec.places`; shares, each: CTAs of a row, and vectors of each.
        operands: zeroed memory as `LongTopkPlan.scratch` has it, the bits of the scale, then addresses in bytes, of x
        and index with the elements from row to row.
        """
        s = self.spec
        grid = [Int32(rows) * shares, 1, 1]
        self.kernel(columns, k, shares, each, evict_last, operands).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            cluster=[s.cluster_n, 1, 1] if const_expr(s.cluster_n > 1) else None,
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1,
            use_pdl=begins_early(s, grid),
        )

    @cute.kernel
    def kernel(
        self, columns: Int32, k: Int32, shares: Int32, each: Int32, evict_last: Int32, operands: tuple
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        observe("tv", cute.make_layout(s.tv.shape, stride=s.tv.stride))
        at = dict(zip(self.names, operands, strict=True))
        share = self.tiles.share_of(cta, tidx, columns, shares, each, evict_last, at)

        memory = self.memory(cutlass.memory.SmemAllocator(), share, k, tidx)
        wait_for_stream(s.early, told=FULL * s.min_blocks * SMS // 16 if s.held else MOST_CTAS)
        math = self.math
        if const_expr(s.scaled):
            math = math.scaled(Int32(at["scale"]).bitcast(Float32))
        if const_expr(s.edges):
            self.tiles.load_edge(share, memory.sE, tidx)
        self.row(share, math, memory, tidx)

    def memory(self, smem: cutlass.memory.SmemAllocator, share: Share, k: Int32, tidx: Int32) -> Memory:
        s = self.spec
        layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        slot = reduce.slot_type(self.whole(self.math))
        buffer = smem.allocate_tensor(slot, layout, byte_alignment=slot.width // 8)
        observe("reduction_buffer", buffer)
        layout = cute.make_layout(s.smem.shape, stride=s.smem.stride)
        sX = smem.allocate_tensor(self.dtype, layout, byte_alignment=16)
        observe("smem", sX)
        sW = smem.allocate_tensor(Int32, cute.make_layout(WORDS), byte_alignment=16)
        candidates, noted = None, None
        if s.most:
            sK = smem.allocate_tensor(Int64, cute.make_layout(s.places), byte_alignment=16)
            candidates = Candidates(sK, sW, tidx, k, s.threads)
            layout = cute.make_layout((s.vector, s.room.unit, s.noted))
            sV = smem.allocate_tensor(self.dtype, layout, byte_alignment=16)
            sC = smem.allocate_tensor(Int32, cute.make_layout(s.noted), byte_alignment=16)
            end, each = share.head + share.end * s.vector, s.noted // (s.threads // WARP)
            noted = Noted(sV, sC, sW, tidx, each, end, SPARE_BITS[s.dtypes[0]])
        sE = None
        if s.edges:
            sE = smem.allocate_tensor(Int64, cute.make_layout(2 * s.vector), byte_alignment=16)
        return Memory(sX, sW, sE, buffer, candidates, noted, self.exchanged(smem))

    def exchanged(self, smem: cutlass.memory.SmemAllocator) -> None:
        """What the CTAs of a row exchange in shared memory: nothing."""

    def whole(self, math: Statistics) -> object:
        """The operator that merges the states of a row's warps."""
        return math.whole

    @cute.jit
    def row(
        self,
        share: Share,
        math: cutlass.Constexpr,
        memory: Memory,
        tidx: Int32,
        chosen: Float32 | None = None,
    ):
        """Find what this CTA's share of a row has, and store the results of the row if it is the last one to end.
        chosen: the element that the row's index chooses, if it is known."""
        # Names of their own: what a loop on the GPU calls methods of would be carried through it.
        s, walk, sW, sE = self.spec, self.walk, memory.sW, memory.sE
        candidates, noted = memory.candidates, memory.noted
        if const_expr(chosen is None):
            index = self.index(share)
            self.refuse(share, index, tidx)
            chosen = self.chosen(share, index)
        state, above, bound = (Float32(0.0), Float32(0.0)), Int32(0), Int32(NONE)
        careful, lost = Boolean(False), Boolean(True)
        while lost:
            state, above, bound, lost = walk(
                share, math, candidates, noted, memory.sX, sW, chosen, tidx, careful
            )
            careful = lost
        if const_expr(s.edges):
            state, above = self.with_edge(math, candidates, noted, bound, sE, state, above, chosen, tidx)
        state = math.whole.lanes(state, WARP)
        state = reduce.across_warps(math.whole, state, memory.buffer, None, Int32(0), 1)
        if const_expr(s.chosen):
            above = self.total(sW, above, tidx)
        if const_expr(s.split):
            if const_expr(s.most):
                self.select(candidates, noted, partial(hand_over, share, candidates.k))
                fill(share, candidates)
            if last_of(share, state, above, sW, tidx) != 0:
                state, above = gather(share, math, candidates, tidx)
                self.finish(share, math, candidates, noted, state, above, chosen, tidx)
        else:
            self.finish(share, math, candidates, noted, state, above, chosen, tidx)

    # What is read.

    def index(self, share: Share) -> Int64:
        """What chooses an element of the row; 0 where nothing does."""
        if self.spec.chosen:
            return element(Int64, share.at["index"], share.row * share.at["index_stride"])[0]
        return Int64(0)

    def exists(self, share: Share, index: Int64) -> Boolean:
        """Whether an index chooses an element."""
        return (index >= 0) & (index < share.columns)

    def chosen(self, share: Share, index: Int64) -> Float32:
        """The element that the row's index chooses, if there is one."""
        if self.spec.chosen:
            at = share.start + select(self.exists(share, index), index, Int64(0))
            return element(self.dtype, share.at["x"], at)[0].to(Float32)
        return Float32(0.0)

    @cute.jit
    def refuse(self, share: Share, index: Int64, tidx: Int32):
        """End the kernel if an index chooses no element."""
        wrong = (self.exists(share, index) ^ True) & (share.number == 0) & (tidx == 0)
        if const_expr(self.spec.chosen) and wrong:
            cute.printf(INDEX_ERROR, index, share.row, share.columns)
            cute.arch.inline_ptx("trap;")

    # The tiles.

    @cute.jit
    def walk(
        self,
        share: Share,
        math: cutlass.Constexpr,
        candidates: Candidates | None,
        noted: Noted | None,
        sX: cute.Tensor,
        sW: cute.Tensor,
        chosen: Float32,
        tidx: Int32,
        careful: Boolean,
    ) -> tuple:
        """(this thread's (maximum, sum) of its vectors of the share, how many elements are larger than the chosen one,
        a bound of the k largest, whether some that may be among them were not noted); candidates are collected.

        careful: all threads meet at each tile, so that candidates are made before places run out.
        """
        # A name of its own: what a loop on the GPU calls methods of would be carried through it.
        s, exp = self.spec, math.exp
        for number in cutlass.range_constexpr(STAGES - 1):
            self.tiles.load(share, sX, Int32(number), tidx)
        # Behind what of a walk before looks at them.
        cute.arch.barrier()
        if tidx < WORDS:
            limits = select(tidx == LEAST, Int32(MOST_NUMBER), Int32(NONE))
            sW[tidx] = select((tidx == LEAST) | (tidx == MOST_OF_ALL), limits, Int32(0))
        cute.arch.barrier()
        seen, total, above = Float32(-float("inf")), Float32(0.0), Int32(0)
        count, held, coming, lost = Int32(0), Int32(0), Int32(0), Boolean(False)
        bound, limit = Int32(NONE), Float32(0.0)
        # Of a single group it is what has been seen.
        tops = [seen for _ in range(s.groups)] if s.groups > 1 else []
        maxima = [seen for _ in range(s.steps // s.room.unit)]
        tXrX = [cute.make_rmem_tensor(s.vector, self.dtype) for _ in range(s.steps)]
        # Tiles of which this warp has a part.
        own = ceil_div(
            share.end - self.tiles.vector(share, Int32(0), 0, tidx) + tidx % WARP,
            self.spec.threads * self.spec.steps,
        )
        # Once more when the tiles have ended, to make candidates of what is noted.
        for number in cutlass.range(share.tiles + bool(s.most), unroll=1):
            last = number == share.tiles
            if number < own:
                self.tiles.load(share, sX, number + (STAGES - 1), tidx)
                cute.arch.cp_async_wait_group(STAGES - 1)
                self.tiles.hold(share, sX, number, tidx, tXrX)
                maxima, parts = self.maxima(tXrX)
                seen, total, above = self.fold(exp, tXrX, maxima, seen, total, above, chosen)
                if const_expr(s.most):
                    # Of parts a group has the same number each.
                    tops = [tree(online.maximum, [top, *parts[i :: len(tops)]]) for i, top in enumerate(tops)]
            if const_expr(s.most):
                met = (number == coming) | last | careful
                limit_here = limit
                if met:
                    held = candidates.sW[COUNT]
                    # So many of each warp that all together, one candidate of each, are few.
                    each = (s.room.few - held) // (s.threads // WARP)
                    crowded = threads_that(count > select(last, each, Int32(s.room.spare))) > 0
                    if crowded | (last ^ True):
                        numbers = self.numbers(share, noted, seen, tops)
                        enough = s.most <= s.threads
                        bound = bound_of_groups(noted, candidates.k, enough, numbers, bound)
                    if crowded | last:
                        lost = lost | (threads_that(count > noted.places) > 0)
                        count = smaller(count, Int32(noted.places))
                        # Of what a thread has in a tile together few units come.
                        if const_expr(s.room.unit < s.steps) and crowded:
                            count = sift(noted, count, noted.limit(below(bound)))
                        bound = self.collect(candidates, noted, count, held, bound)
                        count = Int32(0)
                    # Again when four times as much has been seen, but not so late that a better bound is of no use.
                    coming = 4 * coming + 3
                    coming = select(share.tiles > coming + LATE, coming, Int32(NEVER))
                    # Of a bound that this tile has a part in those that equal it count.
                    limit_here, limit = noted.limit(below(bound)), noted.limit(bound)
                if number < own:
                    may = met | noted.may_exceed(bound)
                    column = share.head + self.tiles.vector(share, number, 0, tidx) * s.vector
                    count = note(noted, tXrX, column, maxima, limit_here, may, count)
        return (seen, total), above, bound, lost

    def fold(
        self,
        exp: object,
        tXrX: list[cute.Tensor],
        maxima: list[Float32],
        seen: Float32,
        total: Float32,
        above: Int32,
        chosen: Float32,
    ) -> tuple[Float32, Float32, Int32]:
        """(maximum, sum, how many are larger than the chosen element) of what has been seen, and of a tile of which
        maxima are known."""
        before, seen = seen, online.maximum(seen, tree(online.maximum, maxima))
        sums = self.sums(Fragment([lambda v=v: v for v in tXrX], [], True), exp, seen, chosen)
        total = online.rescale(total, before, seen, exp) + sums[0]
        return seen, total, above + sums[1] if self.spec.chosen else above

    def sums(self, elements, exp: object, seen: Float32, chosen: Float32) -> tuple:
        """What elements add to the sum, relative to a maximum, and to the number of those larger than the chosen."""
        ref = online.reference(seen)
        terms = (self.counted(x, exp.exponential(x, ref), chosen) for x in elements)
        return tree(lambda a, b: tuple(map(operator.add, a, b)), terms)

    def counted(self, x: Float32, term: Float32, chosen: Float32) -> tuple:
        """What an element adds to the sum and, where one is chosen, to the number of larger ones."""
        return (term, select(x > chosen, Int32(1), Int32(0))) if self.spec.chosen else (term,)

    def maxima(self, tXrX: list[cute.Tensor]) -> tuple[list[Float32], list[Float32]]:
        """The largest element of each unit of this thread's in a tile, and of each part that groups are made of: units,
        or halves of vectors where there are more groups than these."""
        unit, half = self.spec.room.unit, self.spec.vector // 2
        if self.spec.groups <= self.spec.steps:
            units = [largest(tXrX[u : u + unit], []) for u in range(0, self.spec.steps, unit)]
            return units, units
        halves = [cute.make_tensor(x.iterator + i, cute.make_layout(half)) for x in tXrX for i in (0, half)]
        parts = [largest([x], []) for x in halves]
        return [tree(online.maximum, parts[i : i + 2 * unit]) for i in range(0, len(parts), 2 * unit)], parts

    # What may be among the largest.

    def numbers(self, share: Share, noted: Noted, seen: Float32, tops: list[Float32]) -> list[Int32]:
        """The numbers of this thread's groups: NONE for those of which there is no element."""
        tops = tops or [seen]
        first = [i * self.spec.steps // len(tops) for i in range(len(tops))]
        exist = [self.tiles.vector(share, Int32(0), u, noted.tidx) < share.end for u in first]
        return [select(e, noted.number(t), Int32(NONE)) for e, t in zip(exist, tops, strict=True)]

    @cute.jit
    def collect(self, candidates: Candidates, noted: Noted, count: Int32, held: Int32, bound: Int32) -> Int32:
        """Make candidates of what is noted; the bound for what comes then. count: how many vectors this warp has noted;
        held: how many candidates there are. All threads of the CTA come from a barrier, and find one behind it."""
        s, sW = self.spec, candidates.sW
        add_above(noted, count, candidates, noted.limit(below(bound)))
        cute.arch.barrier()
        came = sW[COUNT]
        if came > s.places:
            found = drop(
                candidates,
                held,
                EXACT,
                [partial(reaching, noted, count)],
                partial(add_noted, noted, count, candidates),
            )
            bound = larger(bound, noted.bound(found))
        elif came > s.room.few:
            bound = larger(bound, noted.bound(drop(candidates, came, ROUGH)))
        return bound

    @cute.jit
    def with_edge(
        self,
        math: cutlass.Constexpr,
        candidates: Candidates | None,
        noted: Noted | None,
        bound: Int32,
        sE: cute.Tensor,
        state: tuple,
        above: Int32,
        chosen: Float32,
        tidx: Int32,
    ) -> tuple:
        """What `walk` gives, and this thread's scalar at the edges of a row. It becomes a candidate when all else has
        come: a bound that the tail had a part in would leave out elements that equal it, of lower indices."""
        s, key = self.spec, self.tiles.edge(sE, tidx)
        state, above = self.with_scalar(math, key, state, above, chosen)
        if const_expr(s.most):
            count = candidates.sW[COUNT]
            cute.arch.barrier()
            if count > s.places - 2 * s.vector:
                drop(candidates, count, EXACT)
            add(candidates, key, noted.least(bound))
        return state, above

    def with_scalar(
        self, math: object, key: Int64, state: tuple, above: Int32, chosen: Float32
    ) -> tuple[tuple, Int32]:
        """A state, and how many elements are larger than the chosen one, with a scalar that has a key: LOWEST for
        none."""
        edge = select(key == LOWEST, Float32(-float("inf")), KEYS.element(key))
        seen = online.maximum(state[0], edge)
        sums = self.sums([edge], math.exp, seen, chosen)
        total = online.rescale(state[1], state[0], seen, math.exp) + sums[0]
        return (seen, total), above + sums[1] if self.spec.chosen else above

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
    def select(self, candidates: Candidates, noted: Noted, store: cutlass.Constexpr):
        """`ranks.rank` of the candidates, or of fewer, in the memory of what was noted. All threads come from a
        barrier."""
        few = self.spec.room.few
        if candidates.sW[COUNT] > few:
            drop(candidates, candidates.sW[COUNT], ROUGH)
        if candidates.sW[COUNT] > few:
            drop(candidates, candidates.sW[COUNT], EXACT)
        sB = cute.recast_ptr(noted.sV.iterator, dtype=Int32)
        rank(candidates, cute.make_tensor(sB, cute.make_layout(BINS + 1)), few, store)

    @cute.jit
    def finish(
        self,
        share: Share,
        math: cutlass.Constexpr,
        candidates: Candidates | None,
        noted: Noted | None,
        state: tuple,
        above: Int32,
        chosen: Float32,
        tidx: Int32,
    ):
        """Store the results of a row."""
        s, at, row = self.spec, share.at, share.row
        row_max, log = math.group_results(state)
        found = (math.exp.score(chosen) - row_max - log).to(self.result)
        if const_expr(s.most):
            self.select(candidates, noted, partial(self.store, share, math, candidates.k, row_max, log))
        gF = element(self.result, at["found"], row) if s.chosen else None
        if tidx == 0:
            element(Float32, at["max"], row)[0] = row_max
            element(Float32, at["log"], row)[0] = log
            if const_expr(s.chosen):
                gF[0] = found
                element(Int64, at["ranks"], row)[0] = Int64(above)

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
        gV, gI = element(self.result, share.at["values"], at), element(Int64, share.at["indices"], at)
        gV[0] = (math.exp.score(KEYS.element(key)) - row_max - log).to(self.result)
        gI[0] = Int64(KEYS.index(key))
