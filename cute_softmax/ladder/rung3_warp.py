"""Rung 3: one warp per row. Neighbouring lanes read neighbouring elements and merge their states by shuffles."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

WARP, WARPS = 32, 4
LOWEST = -3.4028234663852886e38


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    """Launch a block of four warps for every four rows of mX (M, N)."""
    blocks = cute.ceil_div(mX.shape[0], WARPS)
    kernel(mX, mY).launch(grid=(blocks, 1, 1), block=(WARP * WARPS, 1, 1), stream=stream)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    M, N = mX.shape

    # Tile: four rows. A thread is (lane, warp): lanes go along a row, warps down; values are steps of 32 columns.
    K = cute.ceil_div(N, WARP)
    tiler = (WARPS, WARP * K)
    tv = cute.make_layout(((WARP, WARPS), K), stride=((WARPS, 1), WARPS * WARP))
    observe("tv", tv)
    cX = cute.make_identity_tensor(mX.shape)  # whose elements are their own coordinates
    gX, gY, cX = (cute.local_tile(m, tiler, (bidx, 0)) for m in (mX, mY, cX))
    tXgX, tXgY, tXcX = (cute.composition(g, tv)[tidx, None] for g in (gX, gY, cX))

    if tXcX[0][0] < M:
        # Reduce, in each lane. Predicate: the row may end within the last step.
        row_max, total = Float32(LOWEST), Float32(0.0)
        for k in cutlass.range(K):
            if tXcX[k][1] < N:
                x = tXgX[k].to(Float32)
                larger = cute.arch.fmax(row_max, x)
                scaled = total * cute.math.exp(row_max - larger, fastmath=True)
                row_max, total = larger, scaled + cute.math.exp(x - larger, fastmath=True)
        # Reduce, over the lanes: in five rounds with partners twice as far apart each time.
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(row_max, offset=1 << i)
            larger = cute.arch.fmax(row_max, other)
            total *= cute.math.exp(row_max - larger, fastmath=True)
            row_max, total = larger, total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
        # Finish and store.
        inverse = 1.0 / total
        for k in cutlass.range(K):
            if tXcX[k][1] < N:
                y = cute.math.exp(tXgX[k].to(Float32) - row_max, fastmath=True) * inverse
                tXgY[k] = y.to(mY.element_type)
