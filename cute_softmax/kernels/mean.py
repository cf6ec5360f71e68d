"""Counts the targets of rows, or adds up their losses: a launch where torch's operations take three, two of many rows.

The order of additions depends on the number of rows alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..plan import WARP
from ..plan.mean import THREADS, UNROLL, MeanClass
from .common.copy import DTYPES, element
from .common.early import begins_early, wait_for_stream
from .common.index import ceil_div, select, smaller
from .common.reduce import SUM, across_warps


class MeanKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.mean`."""

    def __init__(self, spec: MeanClass):
        self.spec = spec
        self.result = DTYPES[spec.dtypes[1]]

    @cute.jit
    def __call__(
        self,
        stream,
        ctas: Int64,
        elements: Int64,
        each: Int64,
        ignore: Int64,
        number: Int64,
        *operands: Int64,
    ):
        """Launch. operands: the addresses of the class's operands; the others as `MeanPlan.arguments` has them."""
        grid = [Int32(ctas) if const_expr(self.spec.sliced) else 1, 1, 1]
        self.kernel(elements, each, ignore, number, operands).launch(
            grid=grid,
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=begins_early(self.spec, grid),
        )

    @cute.kernel
    def kernel(self, elements: Int64, each: Int64, ignore: Int64, number: Int64, operands: tuple):
        s = self.spec
        wait_for_stream(s.early)
        tidx, _, _ = cute.arch.thread_idx()
        at = dict(zip(s.operands, operands, strict=True))
        scale = element(Float32, at["factor"])[0] if const_expr("factor" in at) else Float32(1.0)
        counts = "fp32" if s.counted else "int64"
        sources = [(at[name], DTYPES[counts if name == "targets" else "fp32"]) for name in s.sources]
        totals = [Float32(0.0) for _ in sources]
        cta, ctas, first, count = 0, 1, 0, Int32(elements)
        if const_expr(s.sliced):
            cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            first = cta * each
            count = Int32(smaller(each, elements - first))
        for turn in cutlass.range(ceil_div(count, THREADS), unroll=UNROLL):
            i = turn * THREADS + tidx
            # Beyond the end the last one, so that no load waits for a branch.
            last = first + Int64(smaller(i, count - 1))
            found = [element(dtype, address, last)[0] for address, dtype in sources]
            totals = [
                t + select(i < count, term_of(x, ignore), Float32(0.0))
                for t, x in zip(totals, found, strict=True)
            ]
        totals = [self.over_all(total) for total in totals]
        share = Float32(1.0) / totals[-1]
        if const_expr(s.sliced):
            results = {"sums": totals}
        elif const_expr(s.math == "share"):
            results = {"result": [share * Int32(number).bitcast(Float32), share]}
        elif const_expr(s.math == "mean"):
            results = {"result": [totals[0] * share], "share": [share]}
        else:
            results = {"result": [totals[0] * scale]}
        for name in results:
            dtype = self.result if const_expr(name == "result") else Float32
            for j in cutlass.range_constexpr(len(results[name])):
                gY = element(dtype, at[name], j * ctas + cta)
                value = results[name][j].to(dtype)
                if tidx == 0:
                    gY[0] = value

    @staticmethod
    def over_all(total: Float32) -> Float32:
        """The sum over all threads."""
        smem = cutlass.memory.SmemAllocator()
        buffer = smem.allocate_tensor(Float32, cute.make_layout((1, (THREADS // WARP, 1))), byte_alignment=8)
        return across_warps(SUM, SUM.lanes((total,), WARP), buffer, None, Int32(0), 1)[0]


def term_of(x: Float32 | Int64, ignore: Int64) -> Float32:
    """What an element adds: itself or, of a target, 1 if it is not ignored."""
    return x if x.dtype is Float32 else select(x != ignore, Float32(1.0), Float32(0.0))
