"""Rung 1: one thread per row. It reads its row three times: for the maximum, for the sum, for the results."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

THREADS = 128


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    """Launch a block for every 128 rows of mX (M, N)."""
    blocks = cute.ceil_div(mX.shape[0], THREADS)
    kernel(mX, mY).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    # Coordinates.
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    M, N = mX.shape

    # Tile: 128 whole rows. (thread, value) -> index in the tile, whose rows count fastest: thread t has row t.
    tiler = (THREADS, N)
    tv = cute.make_layout((THREADS, N), stride=(1, THREADS))
    observe("tv", tv)  # for the figures of the tutorial; a launch knows nothing of it
    gX, gY = (cute.local_tile(mT, tiler, (bidx, 0)) for mT in (mX, mY))

    # Partition: this thread's elements.
    tXgX, tXgY = (cute.composition(gT, tv)[tidx, None] for gT in (gX, gY))

    # Predicate: the last block may have more threads than rows.
    if bidx * THREADS + tidx < M:
        # Reduce.
        row_max = -Float32.inf
        for k in cutlass.range(N):
            row_max = cute.arch.fmax(row_max, tXgX[k].to(Float32))
        total = Float32(0.0)
        for k in cutlass.range(N):
            total += cute.math.exp(tXgX[k].to(Float32) - row_max, fastmath=True)

        # Finish and store.
        inverse = 1.0 / total
        for k in cutlass.range(N):
            exponential = cute.math.exp(tXgX[k].to(Float32) - row_max, fastmath=True)
            tXgY[k] = (exponential * inverse).to(mY.element_type)
