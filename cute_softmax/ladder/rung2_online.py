"""Rung 2: maximum and sum in one pass, two reads instead of three. Still one thread per row.

The sum is relative to the largest element so far, and is scaled down when a larger one comes. Source: Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

THREADS = 128
LOWEST = -3.4028234663852886e38  # not -inf: of a row that begins with -inf, -inf - -inf would be NaN


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    """Launch a block for every 128 rows of mX (M, N)."""
    blocks = cute.ceil_div(mX.shape[0], THREADS)
    kernel(mX, mY).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    M, N = mX.shape

    # Tile and partition: as on rung 1.
    tiler = (THREADS, N)
    tv = cute.make_layout((THREADS, N), stride=(1, THREADS))
    observe("tv", tv)
    gX, gY = (cute.local_tile(mT, tiler, (bidx, 0)) for mT in (mX, mY))
    tXgX, tXgY = (cute.composition(gT, tv)[tidx, None] for gT in (gX, gY))

    if bidx * THREADS + tidx < M:
        # Reduce: one state (max, sum), element after element.
        row_max, total = Float32(LOWEST), Float32(0.0)
        for k in cutlass.range(N):
            x = tXgX[k].to(Float32)
            larger = cute.arch.fmax(row_max, x)
            scaled = total * cute.math.exp(row_max - larger, fastmath=True)
            row_max, total = larger, scaled + cute.math.exp(x - larger, fastmath=True)

        # Finish and store.
        inverse = 1.0 / total
        for k in cutlass.range(N):
            exponential = cute.math.exp(tXgX[k].to(Float32) - row_max, fastmath=True)
            tXgY[k] = (exponential * inverse).to(mY.element_type)
