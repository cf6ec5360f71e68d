"""Rows of V on their way to the tensor cores, once for all steps of a tile, and rows of dV on theirs back."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...plan.matmul_backward import MatmulBackwardClass
from ...plan.matmul_class import SLAB, WARPGROUP
from ..common.copy import DTYPES, global_pointer, in_shared, pack
from ..common.index import dot
from .backward_walk import Memory, Thread, Walk, Work


def sync_slab(spec: MatmulBackwardClass, slab: Int32):
    """Wait for all warpgroups of a slab."""
    cute.arch.barrier(barrier_id=1 + spec.slabs + slab, number_of_threads=spec.shares * WARPGROUP)


@cute.jit
def share_values(walk: Walk, work: Work, thread: Thread, memory: Memory, column: Int32):
    """The slab's rows of V into shared memory, as the left operand; each warpgroup loads its share of columns."""
    s, slab = walk.spec, thread.slab
    row = thread.warp * 16 + thread.index % 32 // 4
    held = cute.make_rmem_tensor(s.share_depth // 4, Int32)
    load_values(walk, work, held, column, thread.pair + thread.share * s.share_depth)
    sync_slab(s, slab)  # nobody multiplies by the last tile's any more
    base = (slab * s.depth + thread.share * s.share_depth) * SLAB + thread.pair
    for h in cutlass.range_constexpr(2):
        for k in cutlass.range_constexpr(s.share_depth // 8):
            # As `by_rows`: boxes of 64 columns, in which the pieces of 8 are exchanged.
            begin = (row + 8 * h) * SLAB + (((k % 8) ^ (row % 8)) * 8)
            address = (memory.V + base + k // 8 * (SLAB * SLAB) + begin).toint()
            in_shared(Int32, address)[0] = held[k * 2 + h]
    cute.arch.fence_proxy("async.shared", space="cta")
    sync_slab(s, slab)


@cute.jit
def load_values(walk: Walk, work: Work, rV: cute.Tensor, column: Int32, pair: Int32):
    """This warpgroup's rows of V as the left operand; zeros outside. pair: the thread's first column."""
    call, words = walk.call, cute.recast_tensor(rV, Int32)
    words.fill(0)
    address, *strides = call.V
    pieces = walk.spec.share_depth // 8
    for h in cutlass.range_constexpr(2):
        if column + 8 * h < call.N:
            # One address a row: nothing else of the CTA runs between two tiles.
            begin = dot([column + 8 * h, *work.batch], strides) + pair
            pointer = global_pointer(Int32, address, begin // 2, 4)
            row = cute.make_tensor(pointer, cute.make_layout(pieces, stride=4))
            for k in cutlass.range_constexpr(pieces):
                if 8 * k + pair < call.D:
                    words[k * 2 + h] = row[k]


@cute.jit
def store_values(walk: Walk, work: Work, rdV: cute.Tensor, column: Int32, pair: Int32):
    """This warpgroup's rows of dV. pair: the thread's first column."""
    call, dtype = walk.call, DTYPES[walk.spec.dtypes[2]]
    address, *strides = call.dV
    pieces = walk.spec.share_depth // 8
    for h in cutlass.range_constexpr(2):
        if column + 8 * h < call.N:
            begin = dot([column + 8 * h, work.split, *work.batch], strides) + pair
            pointer = global_pointer(dtype, address, begin, dtype.width // 4)
            row = cute.make_tensor(pointer, cute.make_layout((2, pieces), stride=(1, 8)))
            for k in cutlass.range_constexpr(pieces):
                if 8 * k + pair < call.D:
                    pack(iter([rdV[k * 4 + h * 2], rdV[k * 4 + h * 2 + 1]]), row[None, k])
