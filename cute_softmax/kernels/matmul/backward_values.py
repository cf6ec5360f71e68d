"""Rows of V on their way to the tensor cores, and rows of dV on theirs back."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.copy import global_pointer
from ..common.index import dot
from ..common.tensor_cores import WARPGROUP

SLAB = 64  # rows of V, which are columns of S, of a warpgroup


def swizzled(raw: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """The tensor of a swizzled layout in raw shared memory."""
    return cute.make_tensor(cute.recast_ptr(raw, layout.inner, raw.dtype), layout.outer)


class ValueRows:
    """How `MatmulBackwardKernel` reads V, once for all steps of a tile, and writes dV."""

    def sync_slab(self, slab: Int32):
        """All warpgroups of a slab."""
        threads = self.spec.shares * WARPGROUP
        cute.arch.barrier(barrier_id=1 + self.spec.slabs + slab, number_of_threads=threads)

    @cute.jit
    def share_values(
        self, this, column: Int32, pair: Int32, batch: tuple, row: Int32, slab: Int32, share: Int32
    ):
        """The slab's rows of V into shared memory, as the left operand; each warpgroup loads its share of columns."""
        s = self.spec
        held = cute.make_rmem_tensor(s.share_depth // 4, Int32)
        self.load_values(this, held, column, pair + share * s.share_depth, batch)
        self.sync_slab(slab)  # nobody multiplies by the last tile's any more
        base = (slab * s.depth + share * s.share_depth) * SLAB + pair
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(s.share_depth // 8):
                # As `by_rows`: boxes of 64 columns, in which the pieces of 8 are exchanged.
                begin = (row + 8 * h) * SLAB + (((k % 8) ^ (row % 8)) * 8)
                address = (this.rawV + base + k // 8 * (SLAB * SLAB) + begin).toint()
                pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = held[k * 2 + h]
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_slab(slab)

    @cute.jit
    def load_values(self, this, rV, column: Int32, pair: Int32, batch: tuple):
        """This warpgroup's rows of V as the left operand; zeros outside."""
        words = cute.recast_tensor(rV, Int32)
        words.fill(0)
        address, *strides = this.V
        pieces = self.spec.share_depth // 8
        for h in cutlass.range_constexpr(2):
            if column + 8 * h < this.N:
                # One address a row: nothing else of the CTA runs between two tiles.
                begin = dot([column + 8 * h, *batch], strides) + pair
                pointer = global_pointer(Int32, address, begin // 2, 4)
                row = cute.make_tensor(pointer, cute.make_layout(pieces, stride=4))
                for k in cutlass.range_constexpr(pieces):
                    if 8 * k + pair < this.D:
                        words[k * 2 + h] = row[k]

    @cute.jit
    def store_values(self, this, rdV, column: Int32, pair: Int32, split: Int32, batch: tuple):
        """This warpgroup's rows of dV."""
        address, *strides = this.dV
        pieces = self.spec.share_depth // 8
        for h in cutlass.range_constexpr(2):
            if column + 8 * h < this.N:
                begin = dot([column + 8 * h, split, *batch], strides) + pair
                pointer = global_pointer(self.dv_dtype, address, begin, self.dv_dtype.width // 4)
                row = cute.make_tensor(pointer, cute.make_layout((2, pieces), stride=(1, 8)))
                for k in cutlass.range_constexpr(pieces):
                    if 8 * k + pair < this.D:
                        both = cute.make_rmem_tensor(2, Float32)
                        both[0], both[1] = rdV[k * 4 + h * 2], rdV[k * 4 + h * 2 + 1]
                        row[None, k].store(both.load().to(self.dv_dtype))
