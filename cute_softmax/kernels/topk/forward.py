"""The k largest of each row with their probabilities: one read of the row, and nothing but shuffles between lanes.

coordinates -> load -> sort in a lane -> merge the lanes' lists, or take their largest k times -> probabilities -> store
"""

import operator
from functools import partial, reduce

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr

from layouts.trace import observe

from ...plan.problem import ALIGNMENT
from ...plan.topk import TopkClass
from ..common import online
from ..common.copy import DTYPES, element, in_global, unpack
from ..common.early import SMS, begins_early, let_next_begin, wait_for_stream
from ..common.index import select, smaller
from ..common.reduce import SUM, tree
from .rows import across_vectors, columns_of, lane_tensor, load_row
from .select import (
    Keys,
    balanced,
    doubtful,
    exchange,
    lane_of,
    largest,
    merged,
    ordered,
    places,
    settled,
    wide_key,
)

TAKEN = Int32(-(1 << 31))  # below all `ordered` numbers


class TopkKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.topk.TopkClass`."""

    def __init__(self, spec: TopkClass):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.index = DTYPES[spec.index]
        self.keys = Keys(self.dtypes[0], spec.capacity)
        self.rough = Keys(self.dtypes[0], spec.capacity, rough=True)

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int32,
        columns: Int32,
        k: Int32,
        ctas: Int32,
        x: Int64,
        stride: Int64,
        values: Int64,
        indices: Int64,
    ):
        """Launch.

        k: at most `spec.kept`. x, stride: address in bytes of the rows, and elements from one to the next; values,
        indices: addresses of the results, contiguous (rows, k).
        """
        grid = [ctas, 1, 1]
        self.kernel(rows, columns, k, x, stride, values, indices).launch(
            grid=grid,
            block=[self.spec.threads, 1, 1],
            stream=stream,
            use_pdl=begins_early(self.spec, grid),
        )

    @cute.kernel
    def kernel(
        self, rows: Int32, columns: Int32, k: Int32, x: Int64, stride: Int64, values: Int64, indices: Int64
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)
        lane, row = tidx % s.threads_per_row, cta * s.rows + tidx // s.threads_per_row
        first, cX = columns_of(s, tv, tidx)

        # Rows past the end are worked on as the last one, and not stored.
        begin = Int64(smaller(row, rows - 1)) * stride
        gX = lane_tensor(s, self.dtypes[0], x, begin + first, cX)
        rX = cute.make_rmem_tensor((s.vector, s.vectors), self.dtypes[0])
        told = s.half_full * SMS
        wait_for_stream(s.early, told=told)
        load_row(s, gX, rX, first, cX, columns)

        # What lies behind the row's end is -inf of a higher index than all that there is, and comes last.
        flat = cute.make_tensor(rX.iterator, cute.make_layout(s.elements))
        rE, rI = cute.make_rmem_tensor(s.slots, Float32), cute.make_rmem_tensor(s.slots, Int32)
        finish = partial(self.results, rE, rI, flat, lane, row, rows, k, values, indices)
        if const_expr(s.rough):
            chosen, start = self.roughly(rE, rI, flat, cX, first, lane, k, x, begin, columns)
        else:
            self.exactly(rE, rI, flat, cX, first, lane, k)
        let_next_begin(s.early, told)
        finish()
        # Rarely run, and so behind all else: a jump over it would wait for instructions that nothing fetched ahead.
        if const_expr(s.rough):
            wrong = cute.arch.vote_any_sync(start < k)
            if wrong:
                self.one_by_one(rE, rI, chosen, start, gX, cX, first, lane, k, columns)
                finish()

    @cute.jit
    def results(
        self,
        rE: cute.Tensor,
        rI: cute.Tensor,
        rX: cute.Tensor,
        lane: Int32,
        row: Int32,
        rows: Int32,
        k: Int32,
        values: Int64,
        indices: Int64,
    ):
        """Store this lane's share of the k largest as probabilities and indices; rX: its elements of the row."""
        s = self.spec
        # The largest of all is the first one's, of the row's first lane.
        top = rE[0]
        if const_expr(s.threads_per_row > 1):
            top = cute.arch.shuffle_sync(top, offset=cute.arch.lane_idx() - lane)
        top = online.reference(top)
        numbers = places(s, lane)
        exp = online.Precise() if s.precise else online.Near()
        powers = [exp.exponential(rE[i], top) for i in range(s.slots)]
        if const_expr(s.renormalize):
            terms = [select(i < k, e, Float32(0.0)) for i, e in zip(numbers, powers, strict=True)]
        else:
            # A sum of many rounds less than its terms.
            terms = (online.Near().exponential(number, top) for number in unpack(rX))
        # Taken one after another, all are in the first lanes.
        width = s.kept if s.takes and s.renormalize else s.threads_per_row
        (total,) = SUM.lanes((tree(operator.add, terms),), width)

        rV = cute.make_rmem_tensor(s.slots, self.dtypes[1])
        rP = cute.make_rmem_tensor(s.slots, self.index)
        for i in cutlass.range_constexpr(s.slots):
            rV[i] = online.quotient(powers[i], total).to(self.dtypes[1])
            rP[i] = self.index(rI[i])
        if row < rows:
            for held, address in ((rV, values), (rP, indices)):
                self.store(held, address, Int64(row) * k, numbers, k)

    @cute.jit
    def store(
        self,
        held: cutlass.Constexpr[cute.Tensor],
        address: Int64,
        begin: Int64,
        numbers: cutlass.Constexpr[list],
        k: Int32,
    ):
        """Store results in the places from `begin` on, of a lane at once where all lanes' are whole vectors."""
        slots = self.spec.slots
        if k % slots == 0:
            if numbers[0] < k:
                align = min(slots * held.element_type.width // 8, ALIGNMENT)
                at = in_global(held.element_type, address, begin + numbers[0], slots, align)
                cute.autovec_copy(held, at)
        else:
            for i in cutlass.range_constexpr(slots):
                if numbers[i] < k:
                    element(held.element_type, address, begin + numbers[i])[0] = held[i]

    @cute.jit
    def exactly(
        self,
        rE: cute.Tensor,
        rI: cute.Tensor,
        rX: cute.Tensor,
        cX: cutlass.Constexpr[list],
        first: Int32,
        lane: Int32,
        k: Int32,
    ):
        """Find the elements and indices of this lane's share of the k largest, of the places that it has."""
        chosen, _, _ = self.choose(self.keys, rX, cX, first, lane, k)
        for i in cutlass.range_constexpr(self.spec.slots):
            rE[i] = self.keys.element(chosen[i])
            rI[i] = self.keys.index(chosen[i])

    @cute.jit
    def roughly(
        self,
        rE: cute.Tensor,
        rI: cute.Tensor,
        rX: cute.Tensor,
        cX: cutlass.Constexpr[list],
        first: Int32,
        lane: Int32,
        k: Int32,
        x: Int64,
        begin: Int64,
        columns: Int32,
    ) -> tuple[list, Int32]:
        """`exactly` by rough keys: (these; the first place that may be wrong as far as this lane sees, k for none).
        begin: of the row, whose elements are read again: rough keys lack their last bits."""
        s, last = self.spec, self.rough.last
        # Where no element has bits that its key lacks, keys that are alike are of elements that are equal.
        bits = reduce(operator.or_, [rX[j].bitcast(Int32) for j in range(s.elements)])
        lost = cute.arch.vote_any_sync(bits & last != 0)
        chosen, beyond, incomplete = self.choose(self.rough, rX, cX, first, lane, k)
        first_lane = cute.arch.lane_idx() - lane
        of_lane = lambda number, i: cute.arch.shuffle_sync(number, first_lane + i)  # noqa: E731
        unsure, near = doubtful(s, chosen, beyond, lane, k, of_lane)
        for i in cutlass.range_constexpr(s.slots):
            rI[i] = self.rough.index(chosen[i])
            rE[i] = self.rough.element(chosen[i])
        if lost:
            for i in cutlass.range_constexpr(s.slots):
                rE[i] = element(Float32, x, begin + smaller(rI[i], columns - 1))[0]
        if cute.arch.vote_any_sync(lost & reduce(operator.or_, near)):
            elements, indices = ([r[i] for i in range(s.slots)] for r in (rE, rI))
            elements, indices = settled(s, elements, indices, near, lane, of_lane)
            for i in cutlass.range_constexpr(s.slots):
                rE[i] = elements[i]
                rI[i] = indices[i]
        wrong = [select(u, number, k) for u, number in zip(unsure, places(s, lane), strict=True)]
        start = select(incomplete, Int32(0), reduce(smaller, wrong))
        if const_expr(s.length < min(s.kept, s.elements)):  # a lane may have forgotten what is chosen
            lost = lost | incomplete
        return chosen, select(lost, start, k)

    @cute.jit
    def one_by_one(
        self,
        rE: cute.Tensor,
        rI: cute.Tensor,
        chosen: list,
        start: Int32,
        gX: cute.Tensor,
        cX: cutlass.Constexpr[list],
        first: Int32,
        lane: Int32,
        k: Int32,
        columns: Int32,
    ):
        """`exactly`, in the places from the least start of a row's lanes on: the largest element that is left is taken
        for each of them. chosen: rough keys, which are right up to there."""
        s, keys, group = self.spec, self.keys, self.spec.threads_per_row
        start = cute.arch.warp_reduction(start, cutlass.min, threads_in_group=group)
        numbers = places(s, lane)
        highest = reduce(
            cutlass.max,
            [select(n == start, key, self.rough.lowest) for n, key in zip(numbers, chosen, strict=True)],
        )
        highest = cute.arch.warp_reduction(highest, cutlass.max, threads_in_group=group) | self.rough.last
        rX = cute.make_rmem_tensor((s.vector, s.vectors), Float32)
        load_row(s, gX, rX, first, cX, columns)
        rN = cute.make_rmem_tensor(s.elements, Int32)
        for i, bits in enumerate(keys.bits(cute.make_tensor(rX.iterator, cute.make_layout(s.elements)))):
            number = ordered(bits, keys.kept)
            rN[i] = select(number > highest, TAKEN, number)
        code = Int32(keys.last) - first
        key_element, key_index = keys.element, keys.index
        for j in cutlass.range(cute.arch.warp_redux_sync(start, "min"), k, unroll=1):
            best = tree(cutlass.max, [rN[i] for i in range(s.elements)])
            column = tree(
                cutlass.min,
                [select(rN[i] == best, Int32(cX[i]), Int32(s.capacity)) for i in range(s.elements)],
            )
            mine = wide_key(best, code - column)
            top = cute.arch.warp_reduction(mine, cutlass.max, threads_in_group=group)
            taken = select((mine == top) & (j >= start), column, Int32(-1))
            for i in cutlass.range_constexpr(s.elements):
                rN[i] = select(taken == cX[i], TAKEN, rN[i])
            for i in cutlass.range_constexpr(s.slots):
                here = (numbers[i] == j) & (j >= start)
                rE[i] = select(here, key_element(top), rE[i])
                rI[i] = select(here, key_index(top), rI[i])

    def choose(
        self, keys: Keys, rX: cute.Tensor, cX: list, first: Int32, lane: Int32, k: Int32
    ) -> tuple[list, Numeric, Boolean]:
        """(this lane's share of the k largest keys of its row; of rough ones the largest that was left out of lists of
        several lanes, and whether this lane's own list may lack one that is as large)."""
        s = self.spec
        one = cute.arch.grid_dim()[1]
        change = exchange if keys.wide else balanced(one)
        if s.loads_first:
            rX, cX = across_vectors(s, rX, cX)
        found = largest(keys.lane_keys(rX, cX, first, one), s.elements, s.length, change)
        if s.takes:
            mine, used_up = self.take(keys, found, lane, k)
            return [mine], keys.lowest, used_up
        chosen, out = merged(s, found, lane, cute.arch.shuffle_sync_bfly, change)
        if not keys.rough:
            return chosen, keys.lowest, Boolean(False)
        beyond = reduce(cutlass.max, out, keys.lowest)
        beyond = cute.arch.warp_reduction(beyond, cutlass.max, threads_in_group=s.threads_per_row)
        incomplete = Boolean(False)
        if s.length < s.elements:
            at_end = lane_of(s, Int32((1 << len(s.place_bits)) - 1))
            least = cute.arch.shuffle_sync(chosen[-1], cute.arch.lane_idx() - lane + at_end)
            incomplete = (found[-1] & ~keys.last) >= (least & ~keys.last)
        return chosen, beyond, incomplete

    @cute.jit
    def take(self, keys: cutlass.Constexpr, found: cutlass.Constexpr[list], lane: Int32, k: Int32) -> tuple:
        """`choose` in whole warps, of sorted lists: the largest of their first keys, k times, and of rough ones once
        more; and whether this lane's list is used up, so that its next one is forgotten."""
        s = self.spec
        rK = cute.make_rmem_tensor(s.length, type(keys.lowest))
        for i in cutlass.range_constexpr(s.length):
            rK[i] = found[i]
        # Names of their own: what a loop on the GPU calls methods of would be carried through it.
        largest_of_lanes, lowest = keys.largest_of_lanes, keys.lowest
        mine = lowest
        for j in cutlass.range(k + int(keys.rough), unroll=1):
            first = largest_of_lanes(rK[0])
            mine = select(lane == j, first, mine)
            # No two keys are equal: one lane had it, whose next one moves up.
            had = rK[0] == first
            for n in cutlass.range_constexpr(s.length - 1):
                rK[n] = select(had, rK[n + 1], rK[n])
            rK[s.length - 1] = select(had, lowest, rK[s.length - 1])
        return mine, (rK[0] == lowest) if const_expr(s.length < s.elements) else Boolean(False)
