"""Rung 6: 128-bit accesses. A tiled copy distributes vectors, and one comparison covers a whole vector."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

THREADS, LOWEST = 256, -3.4028234663852886e38


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    kernel(mX, mY).launch(grid=(mX.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    tidx, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    N, dtype = mX.shape[1], mX.element_type

    # Tile: one row in K steps of 256 vectors of V elements, as wide as the rows' alignment allows.
    V = mX.iterator.alignment * 8 // dtype.width
    K = cute.ceil_div(N, THREADS * V)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=V * dtype.width)
    copy = cute.make_tiled_copy_tv(atom, cute.make_layout((1, THREADS)), cute.make_layout((1, V)))
    smem = cutlass.memory.SmemAllocator()
    sR = smem.allocate_tensor(Float32, cute.make_layout((THREADS, 2)))
    sX = smem.allocate_tensor(dtype, cute.make_layout((1, THREADS * V * K)), byte_alignment=16)
    cX = cute.make_identity_tensor(mX.shape)
    gX, gY, cX = (cute.local_tile(m, sX.shape, (row, 0)) for m in (mX, mY, cX))
    tXgX, tXgY, tXcX, tXsX = (copy.get_slice(tidx).partition_S(g) for g in (gX, gY, cX, sX))
    observe("copy", copy)
    observe("tXcX", tXcX)  # ((V, 1), 1, K)

    # Load and reduce: vector by vector, and then over the block as on rung 4.
    row_max, total = Float32(LOWEST), Float32(0.0)
    for k in cutlass.range_constexpr(K):
        if tXcX[0, 0, k][1] < N:
            cute.copy(atom, tXgX[None, None, k], tXsX[None, None, k])
            x = tXsX[None, None, k].load().to(Float32)
            larger = x.reduce(cute.ReductionOp.MAX, row_max, 0)
            scaled, row_max = total * cute.math.exp(row_max - larger, fastmath=True), larger
            total = cute.math.exp(x - larger, fastmath=True).reduce(cute.ReductionOp.ADD, scaled, 0)
    sR[tidx, 0], sR[tidx, 1] = row_max, total
    for half in (128, 64, 32, 16, 8, 4, 2, 1):
        cute.arch.sync_threads()
        if tidx < half:
            larger = cute.arch.fmax(sR[tidx, 0], sR[tidx + half, 0])
            total = sR[tidx, 1] * cute.math.exp(sR[tidx, 0] - larger, fastmath=True)
            total += sR[tidx + half, 1] * cute.math.exp(sR[tidx + half, 0] - larger, fastmath=True)
            sR[tidx, 0], sR[tidx, 1] = larger, total
    cute.arch.sync_threads()
    row_max, inverse = sR[0, 0], 1.0 / sR[0, 1]
    for k in cutlass.range_constexpr(K):
        if tXcX[0, 0, k][1] < N:
            y = cute.math.exp(tXsX[None, None, k].load().to(Float32) - row_max, fastmath=True) * inverse
            tXgY[None, None, k].store(y.to(dtype))
