"""The gradient of a row from those of its k largest elements' probabilities: one write of the row.

A row's k gradients meet its lanes in shared memory, where all other elements have 0. Then it is the gradient of a
softmax: ``p * (g - sum(g * p))``, over the row or, where the probabilities are renormalized, over the k elements.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ...plan.topk import TopkClass
from ..common import online
from ..common.copy import DTYPES, element, in_shared, pack, unpack
from ..common.early import begins_early, wait_for_stream
from ..common.index import select, smaller
from ..common.reduce import MAX, SUM, tree
from .rows import columns_of, lane_tensor, load_row, store_row


class TopkBackwardKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.topk.TopkClass`."""

    def __init__(self, spec: TopkClass):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.index = DTYPES[spec.index]

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int32,
        columns: Int32,
        k: Int32,
        ctas: Int32,
        source: Int64,
        source_stride: Int64,
        grad: Int64,
        grad_stride: Int64,
        grad_step: Int64,
        indices: Int64,
        result: Int64,
    ):
        """Launch.

        source: address in bytes of the rows, or with `renormalize` of the k probabilities, both with contiguous
        columns; grad: of the k gradients; indices: of the k indices, and result: of the gradient, both contiguous.
        """
        given = (source, source_stride, grad, grad_stride, grad_step, indices, result)
        grid = [ctas, 1, 1]
        self.kernel(rows, columns, k, given).launch(
            grid=grid,
            block=[self.spec.threads, 1, 1],
            stream=stream,
            use_pdl=begins_early(self.spec, grid),
        )

    @cute.kernel
    def kernel(self, rows: Int32, columns: Int32, k: Int32, given: tuple):
        s = self.spec
        source, source_stride, *_, result = given
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)
        lane, mine = tidx % s.threads_per_row, tidx // s.threads_per_row
        row = cta * s.rows + mine
        last = Int64(
            smaller(row, rows - 1)
        )  # rows past the end are worked on as the last one, and not stored
        first, cX = columns_of(s, tv, tidx)

        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(s.spread.shape, stride=s.spread.stride)
        sG = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        observe("spread", sG)
        rG = cute.make_rmem_tensor((s.vector, s.vectors), Float32)
        rG.fill(0.0)
        for i in cutlass.range_constexpr(s.vectors):
            cute.autovec_copy(rG[None, i], self.places(sG, mine, first + cX[i * s.vector]))
        cute.arch.sync_warp()  # a row's lanes are of one warp

        wait_for_stream(s.early)
        turns = (k + s.threads_per_row - 1) // s.threads_per_row
        dot = Float32(0.0)
        if const_expr(s.renormalize):
            for turn in cutlass.range(turns, unroll=1):
                g, y, _ = self.number(given, last, turn * s.threads_per_row + lane, k)
                dot = cute.math.fma(g, y, dot)
            (dot,) = SUM.lanes((dot,), s.threads_per_row)
        for turn in cutlass.range(turns, unroll=1):
            i = turn * s.threads_per_row + lane
            g, y, index = self.number(given, last, i, k)
            if const_expr(s.renormalize):
                g = (g - dot) * y
            if i < k:
                sG[mine, index] = g
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(s.vectors):
            cute.autovec_copy(self.places(sG, mine, first + cX[i * s.vector]), rG[None, i])
        flat = cute.make_tensor(rG.iterator, cute.make_layout(s.elements))
        spread = [flat[j] for j in range(s.elements)]

        if const_expr(not s.renormalize):
            rX = cute.make_rmem_tensor((s.vector, s.vectors), self.dtypes[0])
            gX = lane_tensor(s, self.dtypes[0], source, last * source_stride + first, cX)
            load_row(s, gX, rX, first, cX, columns)
            x = unpack(cute.make_tensor(rX.iterator, cute.make_layout(s.elements)))
            (top,) = MAX.lanes((tree(online.maximum, x),), s.threads_per_row)
            exp, top = online.Precise() if s.precise else online.Near(), online.reference(top)
            powers = [exp.exponential(number, top) for number in x]
            (total,) = SUM.lanes((tree(operator.add, powers),), s.threads_per_row)
            p = [online.quotient(e, total) for e in powers]
            products = (a * b for a, b in zip(spread, p, strict=True))
            (dot,) = SUM.lanes((tree(operator.add, products),), s.threads_per_row)
            spread = [a * (g - dot) for a, g in zip(p, spread, strict=True)]

        rD = cute.make_rmem_tensor((s.vector, s.vectors), self.dtypes[2])
        pack(iter(spread), cute.make_tensor(rD.iterator, cute.make_layout(s.elements)))
        gD = lane_tensor(s, self.dtypes[2], result, last * columns + first, cX)
        store_row(s, rD, gD, first, cX, columns if row < rows else 0)

    @cute.jit
    def number(self, given: tuple, row: Int64, i: Int32, k: Int32) -> tuple:
        """(gradient, probability where it is read, index) of a row's number i; of those that there are not, of its
        last one, without its gradient."""
        source, source_stride, grad, grad_stride, grad_step, indices, _ = given
        at = smaller(i, k - 1)
        g = element(self.dtypes[1], grad, row * grad_stride + at * grad_step)[0].to(Float32)
        y = Float32(0.0)
        if const_expr(self.spec.renormalize):
            y = element(self.dtypes[0], source, row * source_stride + at)[0].to(Float32)
        index = Int32(element(self.index, indices, row * k + at)[0])
        return select(i < k, g, Float32(0.0)), y, index

    def places(self, sG: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """The places of a vector in shared memory."""
        V, pointer = self.spec.vector, sG.iterator + cute.crd2idx((row, column), sG.layout)
        return in_shared(Float32, pointer.toint(), V, align=min(4 * V, 16))
