"""Rung 4: one block per row. 256 threads share it and merge their states in shared memory, as a tree."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

THREADS, LOWEST = 256, -3.4028234663852886e38


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    """Launch a block for every row of mX (M, N)."""
    kernel(mX, mY).launch(grid=(mX.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    tidx, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    N = mX.shape[1]

    # Tile: one row, in steps of 256 columns. Shared memory: the state (max, sum) of each thread.
    K = cute.ceil_div(N, THREADS)
    tv = cute.make_layout((THREADS, K), stride=(1, THREADS))
    sR = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((THREADS, 2)))
    observe("tv", tv)
    observe("sR", sR)
    cX = cute.make_identity_tensor(mX.shape)
    gX, gY, cX = (cute.local_tile(m, (1, THREADS * K), (row, 0)) for m in (mX, mY, cX))
    tXgX, tXgY, tXcX = (cute.composition(g, tv)[tidx, None] for g in (gX, gY, cX))

    # Reduce, in each thread, then over the block: at each level half of the threads take in the other half's.
    row_max, total = Float32(LOWEST), Float32(0.0)
    for k in cutlass.range(K):
        if tXcX[k][1] < N:
            x = tXgX[k].to(Float32)
            larger = cute.arch.fmax(row_max, x)
            scaled = total * cute.math.exp(row_max - larger, fastmath=True)
            row_max, total = larger, scaled + cute.math.exp(x - larger, fastmath=True)
    sR[tidx, 0], sR[tidx, 1] = row_max, total
    for half in (128, 64, 32, 16, 8, 4, 2, 1):
        cute.arch.sync_threads()
        if tidx < half:
            larger = cute.arch.fmax(sR[tidx, 0], sR[tidx + half, 0])
            total = sR[tidx, 1] * cute.math.exp(sR[tidx, 0] - larger, fastmath=True)
            total += sR[tidx + half, 1] * cute.math.exp(sR[tidx + half, 0] - larger, fastmath=True)
            sR[tidx, 0], sR[tidx, 1] = larger, total
    cute.arch.sync_threads()
    # Finish and store.
    row_max, inverse = sR[0, 0], 1.0 / sR[0, 1]
    for k in cutlass.range(K):
        if tXcX[k][1] < N:
            y = cute.math.exp(tXgX[k].to(Float32) - row_max, fastmath=True) * inverse
            tXgY[k] = y.to(mY.element_type)
