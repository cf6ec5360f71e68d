"""Two kernels that know nothing of this package's softmax, drawn from the layouts that they trace.

A transpose through swizzled shared memory, and the copy and product of an SGEMM-like tile. Each ``observe``
line is all that drawing a kernel asks of it. ``figures()`` traces both on the CPU and returns their
figures.
"""

from __future__ import annotations

import os

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor

from layouts.figures import Figure, mma_fragments, swizzle_banks, thread_value, tiled_copy
from layouts.trace import Value, observe, observing

TILE = 32


@cute.kernel
def transpose_kernel(mA: cute.Tensor, mB: cute.Tensor):
    """One CTA of 256 threads transposes one 32 x 32 tile: 4 B loads and stores along rows of both."""
    thread = cute.arch.thread_idx()[0]
    row, column, _ = cute.arch.block_idx()
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=32)
    threads = cute.make_layout((8, 32), stride=(32, 1))
    copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((4, 1)))
    swizzled = cute.make_composed_layout(
        cute.make_swizzle(5, 0, 5), 0, cute.make_layout((TILE, TILE), stride=(TILE, 1))
    )
    turned = cute.make_composed_layout(
        cute.make_swizzle(5, 0, 5), 0, cute.make_layout((TILE, TILE), stride=(1, TILE))
    )
    observe("copy", copy)
    observe("sA", swizzled)
    observe("sB", turned)
    buffer = cutlass.memory.SmemAllocator().allocate_array(cutlass.Float32, TILE * TILE)
    sA, sB = cute.make_tensor(buffer, swizzled), cute.make_tensor(buffer, turned)
    gA = cute.local_tile(mA, (TILE, TILE), (row, column))
    gB = cute.local_tile(mB, (TILE, TILE), (column, row))
    mine = copy.get_slice(thread)
    rA = cute.make_rmem_tensor_like(mine.partition_S(gA))
    cute.copy(copy, mine.partition_S(gA), rA)
    cute.copy(copy, rA, mine.partition_D(sA))
    cute.arch.sync_threads()
    cute.copy(copy, mine.partition_S(sB), rA)
    cute.copy(copy, rA, mine.partition_D(gB))


@cute.jit
def transpose(mA: cute.Tensor, mB: cute.Tensor):
    grid = (cute.size(mA, mode=[0]) // TILE, cute.size(mA, mode=[1]) // TILE, 1)
    transpose_kernel(mA, mB).launch(grid=grid, block=(256, 1, 1))


@cute.kernel
def tile_product_kernel(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    """One warp: copies A (16 x 16) and B (8 x 16) to registers and adds their product to C (16 x 8)."""
    thread = cute.arch.thread_idx()[0]
    op = cute.nvgpu.warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, (1, 1, 1))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float16, num_bits_per_copy=64)
    threads = cute.make_layout((8, 4), stride=(4, 1))
    copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((2, 4), stride=(4, 1)))
    sA_layout = cute.make_composed_layout(
        cute.make_swizzle(1, 3, 3), 0, cute.make_layout((16, 16), stride=(16, 1))
    )
    observe("mma", mma)
    observe("copyA", copy)
    observe("fragmentA", cute.make_tiled_copy_A(atom, mma))
    observe("sA", sA_layout)
    sA = cute.make_tensor(cutlass.memory.SmemAllocator().allocate_array(cutlass.Float16, 256), sA_layout)
    mine = copy.get_slice(thread)
    rA = cute.make_rmem_tensor_like(mine.partition_S(mA))
    cute.copy(copy, mine.partition_S(mA), rA)
    cute.autovec_copy(rA, mine.partition_D(sA))
    cute.arch.sync_threads()
    part = mma.get_slice(thread)
    tA, tB, tC = part.partition_A(sA), part.partition_B(mB), part.partition_C(mC)
    fA, fB, fC = mma.make_fragment_A(tA), mma.make_fragment_B(tB), mma.make_fragment_C(tC)
    cute.autovec_copy(tA, fA)
    cute.autovec_copy(tB, fB)
    fC.fill(0.0)
    cute.gemm(mma, fC, fA, fB, fC)
    cute.autovec_copy(fC, tC)


@cute.jit
def tile_product(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    tile_product_kernel(mA, mB, mC).launch(grid=(1, 1, 1), block=(32, 1, 1))


def _tensor(dtype: type, rows: int, columns: int):
    return make_fake_compact_tensor(dtype, (rows, columns), stride_order=(1, 0), assumed_align=16)


def traced() -> dict[str, dict[str, Value]]:
    """What both kernels observe when they are built for sm_90a; needs no GPU."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    options = "--gpu-arch=sm_90a"
    with observing() as first:
        f32 = cutlass.Float32
        cute.compile(transpose, _tensor(f32, 1024, 1024), _tensor(f32, 1024, 1024), options=options)
    with observing() as second:
        f16 = cutlass.Float16
        operands = (_tensor(f16, 16, 16), _tensor(f16, 8, 16), _tensor(cutlass.Float32, 16, 8))
        cute.compile(tile_product, *operands, options=options)
    return {"transpose": first, "tile_product": second}


def figures() -> dict[str, Figure]:
    """The figures of both kernels, by name."""
    found = traced()
    turn, product = found["transpose"], found["tile_product"]
    copy = turn["copy"]
    mma = product["mma"]
    return {
        "transpose_copy": thread_value(
            copy.tv, copy.tiler, title="Transpose: one pass of the copy", element_bytes=4
        ),
        "transpose_smem": swizzle_banks(
            turn["sA"], 4, access_bytes=4, title="Transpose: the tile in shared memory"
        ),
        "product_mma": mma_fragments(mma.shape_mnk, mma.a, mma.b, mma.c, title="Tile product: the MMA atom"),
        "product_copy": tiled_copy(
            product["copyA"].tv,
            product["fragmentA"].tv,
            product["copyA"].tiler,
            names=("copied by", "used by"),
            title="Tile product: A changes hands",
            element_bytes=2,
        ),
    }
