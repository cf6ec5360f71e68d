"""Rung 7: shuffles inside the block's reduction. One of the tree's nine barriers is left."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from layouts.trace import observe

THREADS, WARP, WARPS, LOWEST = 256, 32, 8, -3.4028234663852886e38


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    kernel(mX, mY).launch(grid=(mX.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def lanes_reduce(row_max: Float32, total: Float32, width: cutlass.Constexpr[int]):  # of neighbouring lanes
    larger = cute.arch.warp_reduction_max(row_max, threads_in_group=width)
    total *= cute.math.exp(row_max - larger, fastmath=True)
    return larger, cute.arch.warp_reduction_sum(total, threads_in_group=width)


@cute.kernel
def kernel(mX: cute.Tensor, mY: cute.Tensor):
    tidx, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    N, dtype = mX.shape[1], mX.element_type
    V = mX.iterator.alignment * 8 // dtype.width
    K = cute.ceil_div(N, THREADS * V)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=V * dtype.width)
    copy = cute.make_tiled_copy_tv(atom, cute.make_layout((1, THREADS)), cute.make_layout((1, V)))
    smem = cutlass.memory.SmemAllocator()
    # The reduction buffer: (row, (warp of the row, block of the cluster), number of the state).
    sR = smem.allocate_tensor(Float32, cute.make_ordered_layout((1, (WARPS, 1), 2), order=(1, 0, 2)))
    sX = smem.allocate_tensor(dtype, cute.make_layout((1, THREADS * V * K)), byte_alignment=16)
    cX = cute.make_identity_tensor(mX.shape)
    gX, gY, cX = (cute.local_tile(m, sX.shape, (row, 0)) for m in (mX, mY, cX))
    tXgX, tXgY, tXcX, tXsX = (copy.get_slice(tidx).partition_S(g) for g in (gX, gY, cX, sX))
    observe("copy", copy)
    observe("sR", sR)
    # Load and reduce: as on rung 6; then over the lanes; then over the warps, through the buffer.
    row_max, total = Float32(LOWEST), Float32(0.0)
    for k in cutlass.range_constexpr(K):
        if tXcX[0, 0, k][1] < N:
            cute.copy(atom, tXgX[None, None, k], tXsX[None, None, k])
            x = tXsX[None, None, k].load().to(Float32)
            larger = x.reduce(cute.ReductionOp.MAX, row_max, 0)
            scaled, row_max = total * cute.math.exp(row_max - larger, fastmath=True), larger
            total = cute.math.exp(x - larger, fastmath=True).reduce(cute.ReductionOp.ADD, scaled, 0)
    row_max, total = lanes_reduce(row_max, total, WARP)
    if tidx % WARP == 0:
        sR[0, (tidx // WARP, 0), 0], sR[0, (tidx // WARP, 0), 1] = row_max, total
    cute.arch.sync_threads()
    row_max, total = lanes_reduce(sR[0, (tidx % WARPS, 0), 0], sR[0, (tidx % WARPS, 0), 1], WARPS)
    for k in cutlass.range_constexpr(K):
        if tXcX[0, 0, k][1] < N:
            y = cute.math.exp(tXsX[None, None, k].load().to(Float32) - row_max, fastmath=True) * (1.0 / total)
            tXgY[None, None, k].store(y.to(dtype))
