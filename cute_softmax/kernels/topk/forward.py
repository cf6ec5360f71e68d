"""The k largest of each row with their probabilities: one read of the row, and nothing but shuffles between lanes.

coordinates -> load -> sort in a lane -> take the largest of the lanes k times -> probabilities -> store
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ...plan.topk import TopkClass
from ..common import online
from ..common.copy import DTYPES, element, unpack
from ..common.early import begins_early, wait_for_stream
from ..common.index import select, smaller
from ..common.reduce import SUM, tree
from .rows import columns_of, load_row
from .select import Keys, alike, largest


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

        k: at most `spec.most`. x, stride: address in bytes of the rows, and elements from one to the next; values,
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
        wait_for_stream(s.early)
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)
        lane, row = tidx % s.threads_per_row, cta * s.rows + tidx // s.threads_per_row
        first, cX = columns_of(s, tv, tidx)

        # Rows past the end are worked on as the last one, and not stored.
        rX = cute.make_rmem_tensor((s.vector, s.vectors), self.dtypes[0])
        rX.fill(-float("inf"))
        load_row(s, rX, x, Int64(smaller(row, rows - 1)) * stride, first, cX, columns)

        # What lies behind the row's end is -inf of a higher index than all that there is, and comes last.
        flat = cute.make_tensor(rX.iterator, cute.make_layout(s.elements))
        rE, rI = cute.make_rmem_tensor(s.slots, Float32), cute.make_rmem_tensor(s.slots, Int32)
        if const_expr(s.rough):
            begin = Int64(smaller(row, rows - 1)) * stride
            doubt = self.roughly(rE, rI, flat, cX, first, lane, k, x, begin, columns)
            if cute.arch.vote_any_sync(doubt):
                self.exactly(rE, rI, flat, cX, first, lane, k)
        else:
            self.exactly(rE, rI, flat, cX, first, lane, k)

        # The largest of all is the first one's, of the row's first lane.
        top = rE[0]
        if const_expr(s.threads_per_row > 1):
            top = cute.arch.shuffle_sync(top, offset=tidx % 32 // s.threads_per_row * s.threads_per_row)
        top = online.reference(top)
        numbers = [i * s.threads_per_row + lane for i in range(s.slots)]
        exp = online.Precise() if s.precise else online.Near()
        powers = [exp.exponential(rE[i], top) for i in range(s.slots)]
        if const_expr(s.renormalize):
            terms = [select(i < k, e, Float32(0.0)) for i, e in zip(numbers, powers, strict=True)]
        else:
            # A sum of many rounds less than its terms.
            terms = (online.Near().exponential(number, top) for number in unpack(flat))
        (total,) = SUM.lanes((tree(operator.add, terms),), s.threads_per_row)

        for i in cutlass.range_constexpr(s.slots):
            at = Int64(row) * k + numbers[i]
            gV, gI = element(self.dtypes[1], values, at), element(self.index, indices, at)
            value = online.quotient(powers[i], total).to(self.dtypes[1])
            index = self.index(rI[i])
            if row < rows and numbers[i] < k:
                gV[0] = value
                gI[0] = index

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
        """Find the elements and indices of this lane's share of the k largest: of slot s number
        ``s * threads_per_row + lane``."""
        rC, _ = self.choose(self.keys, rX, cX, first, lane, k)
        for i in cutlass.range_constexpr(self.spec.slots):
            rE[i] = self.keys.element(rC[i])
            rI[i] = self.keys.index(rC[i])

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
    ) -> Boolean:
        """`exactly` by rough keys, and whether these may be wrong. begin: of the row, whose elements are read again:
        rough keys lack their last bits."""
        rC, doubt = self.choose(self.rough, rX, cX, first, lane, k)
        for i in cutlass.range_constexpr(self.spec.slots):
            rI[i] = self.rough.index(rC[i])
            rE[i] = element(Float32, x, begin + smaller(rI[i], columns - 1))[0]
        return doubt

    @cute.jit
    def choose(
        self,
        keys: cutlass.Constexpr,
        rX: cute.Tensor,
        cX: cutlass.Constexpr[list],
        first: Int32,
        lane: Int32,
        k: Int32,
    ) -> tuple:
        """(rC, doubt): this lane's share of the k largest keys of its row, and whether rough ones may be wrong."""
        s = self.spec
        rK = cute.make_rmem_tensor(s.length, type(keys.lowest))
        for i, key in enumerate(largest(keys.lane_keys(rX, cX, first), s.elements, s.length)):
            rK[i] = key
        rC = cute.make_rmem_tensor(s.slots, type(keys.lowest))
        # Names of their own: what a loop on the GPU calls methods of would be carried through it.
        largest_of_lanes, lowest, last, rough = keys.largest_of_lanes, keys.lowest, keys.last, keys.rough
        before, doubt = lowest, Boolean(False)
        for i in cutlass.range_constexpr(s.slots):
            rC[i] = lowest
            if const_expr(s.threads_per_row == 1):
                rC[i] = rK[i] if i < s.length else lowest
            else:
                turns = smaller(k - i * s.threads_per_row, Int32(s.threads_per_row))
                for j in cutlass.range(turns, unroll=1):
                    found = largest_of_lanes(rK[0], s.threads_per_row)
                    rC[i] = select(lane == j, found, rC[i])
                    if const_expr(rough):
                        doubt = doubt | alike(before, found, last)
                        before = found
                    # No two keys are equal: one lane had it, whose next one moves up.
                    had = rK[0] == found
                    for n in cutlass.range_constexpr(s.length - 1):
                        rK[n] = select(had, rK[n + 1], rK[n])
                    rK[s.length - 1] = select(had, lowest, rK[s.length - 1])
        if const_expr(rough):
            # The next one may be as large as the last, and a list that was used up has forgotten its lane's next.
            following = largest_of_lanes(rK[0], s.threads_per_row)
            doubt = doubt | alike(before, following, last)
            if const_expr(s.length < s.elements):
                doubt = doubt | (rK[0] == lowest)
        return rC, doubt
