"""Columns off a vector boundary, kept in the aligned blocks that memory has them in.

Rows of memory of an odd length begin anywhere, but all rows of a thread begin alike: they lie a multiple of a vector's
elements apart. So a thread keeps its blocks as they are, and has the same columns in each of its rows, `shift` before
those that it would have in rows that begin at a block. Threads above and below it have others: states are merged, and
read again, by column (`merge`), and nothing else differs. A panel's columns are those that all of its threads have.

    blocks of row 0    | a b c d e f g h | i j k l m n o p |            shift = 0
    of row 1           | . . . a b c d e | f g h i j k l m | n o p      shift = 3
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..common.copy import load_async, store
from ..common.index import smaller
from .blocks import BlockChunks
from .work import Chunk, Item, Launch, left, places


class AlignedChunks(BlockChunks):
    """Chunks of such columns."""

    @cute.jit
    def fetch_vectors(self, launch: Launch, chunk: Chunk, i: int, base: Int32, policy: Int64 | None):
        """Load blocks of input i; what follows memory's row may lie outside the tensor."""
        s, padding, itemsize = self.spec, self.padding(launch, i), launch.mX[i].itemsize
        tXgX = [self.vector(launch, i, at) for at in places(launch, i, chunk.starts[i], chunk.at)]
        exist = smaller(chunk.wanted * itemsize, s.vector * itemsize)
        for k in cutlass.range_constexpr(s.chunk_steps):
            tXsX = launch.shared.tXsX[i][None, base + k]
            if chunk.left > k * s.down:
                load_async(tXgX[k], tXsX, s.access[i], policy, s.prefetches, exist)
            else:
                for v in cutlass.range_constexpr(s.vector):
                    tXsX[v] = padding[v]

    def finish_blocks(self, item: Item, at: Int32, where: Int32 | list, states: list, ends: bool):
        """Each lane stores its blocks but for those that the next panel has, too."""
        s, launch, line, i = self.spec, item.launch, item.line, len(self.inputs)
        rest, (ours, whole) = left(item, at), stores(item)
        for k, address in enumerate(places(launch, i, item.starts[i], at)):
            tXrY, exists = self.results(item, k, at, where, states), ours & (rest > k * s.down)
            store(tXrY, self.vector(launch, i, address), self.hint(launch, tXrY), exists & whole)
            if ends:
                split = exists & (whole == 0)
                self.store_scalars(address, tXrY, lambda v, split=split: split & line.has(v))


def stores(item: Item) -> tuple[Boolean, Boolean]:
    """(whether a lane stores its blocks; whether all of each are groups). The block behind the panel's last column is
    the next panel's first if it begins there."""
    launch, line = item.launch, item.line
    first = (launch.lane > 0) | (item.shift == 0) | (line.column < 0)
    end = launch.spacing // item.launch.spec.vector
    ours = first & ((launch.lane < end) | ((launch.lane == end) & (item.shift > 0)))
    return ours & (line.beside > 0), (line.column >= 0) & (line.beside >= launch.spec.vector)
