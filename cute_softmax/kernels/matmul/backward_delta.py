"""What the backward of softmax(S) @ V needs of each row: its log-sum-exp, and delta = sum(dO * O), less the gradient of
the log-sum-exp if there is one. That times the sink's share of the row is the sink's gradient."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.matmul_backward import DELTA_LANES as LANES
from ...plan.matmul_backward import MatmulDeltaClass
from ..common import online
from ..common.copy import DTYPES, global_pointer, in_global, unpack
from ..common.early import begins_early, wait_for_stream
from ..common.index import dot, select
from ..common.reduce import SUM, tree
from .memory import get, put_if


class MatmulDeltaKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.MatmulDeltaClass`. A CTA makes one block of numbers:
    those that are subtracted from the exponents of `rows` rows, then those subtracted from dP."""

    def __init__(self, spec: MatmulDeltaClass):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]

    @cute.jit
    def __call__(
        self,
        stream,
        M: Int32,
        D: Int32,
        heads: Int32,
        inner: Int32,
        ctas: Int32,
        empty_zeros: Int32,
        factor: Float32,
        *operands: Int64,
    ):
        """Launch.

        empty_zeros: whether rows without anything in them have probabilities of zero, not NaN. factor: of delta.
        operands: address in bytes and strides in elements of dO (row, head, inner, outer), and the same of O, lse and,
            if the class has it, the gradient of lse; of a class with sinks these and their gradients; the result's
            address.
        """
        s = self.spec
        grid = [ctas, 1, 1]
        self.kernel(M, D, heads, inner, empty_zeros, factor, operands).launch(
            grid=grid, block=[s.rows * LANES, 1, 1], stream=stream, use_pdl=begins_early(s, grid)
        )

    @cute.kernel
    def kernel(
        self,
        M: Int32,
        D: Int32,
        heads: Int32,
        inner: Int32,
        empty_zeros: Int32,
        factor: Float32,
        operands: tuple,
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_blocks = (M + s.rows - 1) // s.rows
        m, rest = cta % row_blocks, cta // row_blocks
        head, rest = rest % heads, rest // heads
        lane, mine = tidx % LANES, tidx // LANES
        row = m * s.rows + mine

        place = [row, head, rest % inner, rest // inner]
        given = [(operands[i], dot(place, operands[i + 1 : i + 5])) for i in range(0, len(operands) - 1, 5)]
        products = cute.make_rmem_tensor(s.vector, Float32)
        products.fill(0.0)
        lse, share = Float32(float("inf")), Float32(0.0)
        wait_for_stream(s.early)
        if row < M:
            held = [cute.make_rmem_tensor((s.vector, s.vectors), dtype) for dtype in self.dtypes]
            for i in cutlass.range_constexpr(2):
                held[i].fill(0.0)
                address, begin = given[i]
                for k in cutlass.range_constexpr(s.vectors):
                    column = (k * LANES + lane) * s.vector
                    if column < D:
                        gX = in_global(self.dtypes[i], address, begin + column, s.vector)
                        cute.autovec_copy(gX, held[i][None, k])
            for k in cutlass.range_constexpr(s.vectors):
                grad, output = (unpack(held[i][None, k]) for i in range(2))
                for j in cutlass.range_constexpr(s.vector):
                    products[j] = cute.math.fma(grad[j], output[j], products[j])
            lse = get(*given[2])
            if const_expr(s.lse_grad):
                products[0] -= get(*given[3]) / LANES
            nothing = select(empty_zeros != 0, Float32(float("inf")), Float32(float("nan")))
            # Of a row with +inf in it nothing is a number.
            lse = select(lse == float("inf"), Float32(float("nan")), lse)
            if const_expr(s.sink):
                sink = get(*given[-2])
                share = online.Precise().exponential(sink, lse)
                share = select(sink == -float("inf"), Float32(0.0), share)
            lse = select(lse == -float("inf"), nothing, lse)
        total = tree(operator.add, [products[j] for j in range(s.vector)])
        (total,) = SUM.lanes((total,), LANES)
        if lane == 0:
            out = global_pointer(Float32, operands[-1], Int64(cta) * (2 * s.rows) + mine, 4)
            result = cute.make_tensor(out, cute.make_layout(2, stride=s.rows))
            result[0] = lse
            result[1] = total * factor
            if const_expr(s.sink):
                of_sink = cute.make_rmem_tensor(1, Float32)
                of_sink[0] = select(share == 0.0, Float32(0.0), -share * total)
                put_if(row < M, Float32, *given[-1], of_sink, 0, 1)
