"""Multiply a tensor in place by a number of the device's; where that is 1, the tensor is not touched.

So a gradient that was written for an upstream of 1 is right for every other, and costs nothing more for that one,
though the host never learns which it was.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..plan.rescale import THREADS, RescaleClass
from .common.copy import DTYPES, element, in_global, pack, store, unpack
from .common.early import begins_early, wait_for_stream
from .common.index import smaller


class RescaleKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.rescale`."""

    def __init__(self, spec: RescaleClass):
        self.spec = spec
        self.dtype, self.factor = (DTYPES[name] for name in spec.dtypes)

    @cute.jit
    def __call__(
        self,
        stream,
        columns: Int32,
        ctas: Int32,
        pitch: Int64,
        total: Int64,
        address: Int64,
        factor: Int64,
    ):
        """Launch. address, factor: of the tensor, and of the number that it is multiplied by."""
        grid = [ctas, 1, 1]
        self.kernel(columns, pitch, total, address, factor).launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=begins_early(self.spec, grid)
        )

    @cute.kernel
    def kernel(self, columns: Int32, pitch: Int64, total: Int64, address: Int64, factor: Int64):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        wait_for_stream(self.spec.early)
        number = element(self.factor, factor)[0].to(Float32)
        if number != 1.0:
            line, lines = Int64(cta), (total + columns - 1) // columns
            while line < lines:
                left = Int32(smaller(total - line * columns, Int64(columns)))
                self.line(address, line * pitch, left, tidx, number)
                line += ctas

    @cute.jit
    def line(self, address: Int64, begin: Int64, left: Int32, tidx: Int32, number: Float32):
        """The `left` elements of a line: whole vectors, then what is behind them one by one."""
        V = self.spec.vector
        column = tidx * V
        while column + V <= left:
            gX = in_global(self.dtype, address, begin + column, V)
            rX = cute.make_rmem_tensor(V, self.dtype)
            cute.autovec_copy(gX, rX)
            pack(iter([x * number for x in unpack(rX)]), rX)
            store(rX, gX)
            column += THREADS * V
        column = left // V * V + tidx
        if column < left:
            gX = element(self.dtype, address, begin + column)
            gX[0] = (gX[0].to(Float32) * number).to(self.dtype)
