"""Few columns, in whole vectors of several rows of memory that lie side by side.

Rows that follow each other without gaps are one stretch of memory. As many of them as make whole vectors are one row of
a panel, whose columns are those of all these rows, so that a thread has the same columns in all its vectors:

    rows of 3, vectors of 4 | a b c a | b c a b | c a b c |
                            | a b c a | b c a b | c a b c |
                            | a b c a | b c . .                the last row of the panel, which may be shorter

A group has several columns, whose partial results are merged (`merge`). All else takes columns as they come.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...plan import PanelClass
from ..common.copy import load_async, store
from ..common.index import select
from .blocks import BlockChunks
from .work import Chunk, Item, Launch, left, places


class AbreastChunks(BlockChunks):
    """Chunks of such rows."""

    @cute.jit
    def fetch_vectors(self, launch: Launch, chunk: Chunk, i: int, base: Int32, policy: Int64 | None):
        """Load vectors of input i; the last may end outside the tensor."""
        s, padding, itemsize = self.spec, self.padding(launch, i), launch.mX[i].itemsize
        tXgX = [self.vector(launch, i, at) for at in places(launch, i, chunk.starts[i], chunk.at)]
        for k in cutlass.range_constexpr(s.chunk_steps):
            tXsX = launch.shared.tXsX[i][None, base + k]
            if chunk.left > k * s.down:
                exist = select(is_last(s, chunk.left, k), chunk.wanted, s.vector) * itemsize
                load_async(tXgX[k], tXsX, s.access[i], policy, s.prefetches, exist)
            else:
                for v in cutlass.range_constexpr(s.vector):
                    tXsX[v] = padding[v]

    @cute.jit
    def align(self, item: Item, at: Int32, base: Int32):
        """Pad a vector that ends outside the tensor."""
        s, launch = self.spec, item.launch
        if self.ends(item):
            rest = left(item, at)
            for i in cutlass.range_constexpr(len(self.inputs)):
                padding = self.padding(launch, i)
                for k in cutlass.range_constexpr(s.chunk_steps):
                    tXsX = launch.shared.tXsX[i][None, base + k]
                    for v in cutlass.range_constexpr(s.vector):
                        if is_last(s, rest, k) & (v >= item.tail):
                            tXsX[v] = padding[v]

    def ends(self, item: Item) -> Boolean:
        """Whether this thread's last vector ends outside the tensor."""
        return item.tail < self.spec.vector

    def finish_blocks(self, item: Item, at: Int32, where: Int32 | list, states: list, ends: bool):
        """Each thread stores its vectors."""
        s, launch, rest, i = self.spec, item.launch, left(item, at), len(self.inputs)
        for k, address in enumerate(places(launch, i, item.starts[i], at)):
            tXrY, exists = self.results(item, k, at, where, states), rest > k * s.down
            whole = exists
            if ends:
                last = is_last(s, rest, k)
                whole = exists & (last == 0)
                self.store_scalars(address, tXrY, lambda v, last=last: last & (v < item.tail))
            store(tXrY, self.vector(launch, i, address), self.hint(launch, tXrY), whole)


def is_last(s: PanelClass, rest: Int32, k: int) -> Boolean:
    """Whether vector k of a thread that has so many left is the last."""
    return rest - k * s.down == 1
