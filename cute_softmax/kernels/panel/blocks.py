"""Columns off a vector boundary: what is common to blocks that are shifted (`shift`), to those that are kept
(`aligned`), and to those of several rows (`abreast`)."""

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..common.copy import element, store
from .chunks import Chunks
from .work import Item


class BlockChunks(Chunks):
    """Chunks whose results are stored in the aligned blocks of memory: `finish_blocks` does so."""

    @cute.jit
    def finish(self, item: Item, at: Int32, where: Int32 | list, states: list):
        """Compute and store the results of a chunk; with scalars where memory's rows begin or end in the panel."""
        if self.ends(item):
            self.finish_blocks(item, at, where, states, True)
        else:
            self.finish_blocks(item, at, where, states, False)

    def ends(self, item: Item) -> Boolean:
        """Whether some block may have other elements than the panel's."""
        return item.line.ends

    def store_scalars(self, address: Int64, block: cute.Tensor, exists: Callable[[int], Boolean]):
        """Store those elements of a block at an address that exist, by their numbers."""
        dtype = block.element_type
        for v in range(self.spec.vector):
            scalar = cute.make_rmem_tensor(1, dtype)
            scalar[0] = block[v]
            there = exists(v)
            store(scalar, element(dtype, address + v * (dtype.width // 8)), None, there)
