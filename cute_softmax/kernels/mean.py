"""One CTA that counts the targets of rows, or adds up their losses: one launch where torch's operations take three.

The order of additions depends on the number of rows alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..plan import WARP
from ..plan.mean import THREADS, UNROLL, MeanClass
from .common.copy import DTYPES, element
from .common.index import ceil_div, select
from .common.reduce import SUM, across_warps


class MeanKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.mean`."""

    def __init__(self, spec: MeanClass):
        self.spec = spec
        self.source, self.result = (DTYPES[name] for name in spec.dtypes)

    @cute.jit
    def __call__(
        self,
        stream,
        elements: Int64,
        ignore: Int64,
        number: Int64,
        address: Int64,
        factor: Int64,
        result: Int64,
    ):
        """Launch. address, factor, result: of the elements, of what their sum is multiplied by, of the results."""
        self.kernel(elements, ignore, number, address, factor, result).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, elements: Int64, ignore: Int64, number: Int64, address: Int64, factor: Int64, result: Int64
    ):
        tidx, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        buffer = smem.allocate_tensor(Float32, cute.make_layout((1, (THREADS // WARP, 1))), byte_alignment=8)
        scale = element(Float32, factor)[0] if const_expr(self.spec.shared) else Float32(1.0)
        total, count = Float32(0.0), Int32(elements)
        for turn in cutlass.range(ceil_div(count, THREADS), unroll=UNROLL):
            i = turn * THREADS + tidx
            # Beyond the end the last one, so that no load waits for a branch.
            gX = element(self.source, address, Int64(select(i < count, i, count - 1)))
            if const_expr(self.spec.math == "share"):
                term = select(gX[0] != ignore, Float32(1.0), Float32(0.0))
            else:
                term = gX[0]
            total = total + select(i < count, term, Float32(0.0))
        (total,) = across_warps(SUM, SUM.lanes((total,), WARP), buffer, None, Int32(0), 1)
        if const_expr(self.spec.math == "share"):
            share = Float32(1.0) / total
            results = [share * Int32(number).bitcast(Float32), share]
        else:
            results = [total * scale]
        for j in cutlass.range_constexpr(len(results)):
            gY, value = element(self.result, result, j), results[j].to(self.result)
            if tidx == 0:
                gY[0] = value
