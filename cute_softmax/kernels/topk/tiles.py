"""What a CTA of a long row reads of it: tiles, from global memory by way of shared memory to registers, and the scalars
at the row's edges.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...plan.maths import WARP
from ...plan.topk_long import AHEAD, LongTopkClass
from ..common.copy import element, global_pointer, load_async, read_policy
from ..common.index import at_edges, ceil_div, head_of, larger, smaller
from .candidates import LOWEST, key_of
from .shares import Share


class Tiles:
    """The tiles of rows of one Plan class, of elements of a dtype."""

    def __init__(self, spec: LongTopkClass, dtype: type):
        self.spec, self.dtype = spec, dtype

    def share_of(
        self,
        cta: Int32,
        tidx: Int32,
        columns: Int32,
        shares: Int32,
        each: Int32,
        evict_last: Int32,
        at: dict[str, Int64],
    ) -> Share:
        """What this CTA reads."""
        s, V = self.spec, self.spec.vector
        row, number = Int64(cta // shares), cta % shares
        start, head = row * at["x_stride"], Int32(0)
        if s.edges:
            head = head_of(at["x"] // (self.dtype.width // 8) + start, V, columns)
        vectors = (columns - head) // V
        first = number * each
        end = smaller(vectors, first + each)
        count = larger(ceil_div(end - first, self.spec.threads * self.spec.steps), Int32(1))
        policy = read_policy(evict_last)
        return Share(row, number, shares, columns, start, head, first, end, count, at, policy)

    def vector(self, share: Share, tile: Int32, u: int, tidx: Int32) -> Int32:
        """The number of this thread's vector u of a tile, of which each warp has a part of its own: there is nothing
        to do for those behind the end of a row."""
        return share.first + tile * (self.spec.threads * self.spec.steps) + (self.place(tidx) + u * WARP)

    def place(self, tidx: Int32) -> Int32:
        """The number of this thread's first vector in a tile."""
        return tidx + (tidx & -WARP) * (self.spec.steps - 1)

    def slots(self, sX: cute.Tensor, tile: Int32, tidx: Int32) -> cute.Tensor:
        """tXsX: this thread's places for the vectors of a tile in shared memory, (V, steps)."""
        V = self.spec.vector
        at = cute.crd2idx((self.place(tidx) * V, tile % cute.size(sX, mode=[1])), sX.layout)
        return cute.make_tensor(
            (sX.iterator + at).align(V * self.dtype.width // 8),
            cute.make_layout((V, self.spec.steps), stride=(1, WARP * V)),
        )

    @cute.jit
    def load(self, share: Share, sX: cute.Tensor, tile: Int32, tidx: Int32):
        """Start to load this thread's vectors of a tile into its places, as one group."""
        self.copy(share, sX, tile, tidx)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy(self, share: Share, sX: cute.Tensor, tile: Int32, tidx: Int32):
        """Start to load this thread's vectors of a tile into its places, those that exist."""
        V, tXsX = self.spec.vector, self.slots(sX, tile, tidx)
        at = share.start + share.head + Int64(self.vector(share, tile, 0, tidx)) * V
        pointer = global_pointer(self.dtype, share.at["x"], at, V * self.dtype.width // 8)
        for u in cutlass.range_constexpr(self.spec.steps):
            gX = cute.make_tensor(pointer + u * WARP * V, cute.make_layout(V))
            if self.vector(share, tile, u, tidx) < share.end:
                load_async(gX, tXsX[None, u], V, share.policy, AHEAD)

    @cute.jit
    def hold(self, share: Share, sX: cute.Tensor, tile: Int32, tidx: Int32, tXrX: list[cute.Tensor]):
        """Take this thread's vectors of a tile to registers; -inf where there are none, in the last one."""
        tXsX = self.slots(sX, tile, tidx)
        if share.first + (tile + 1) * (self.spec.threads * self.spec.steps) <= share.end:
            for u in cutlass.range_constexpr(self.spec.steps):
                cute.autovec_copy(tXsX[None, u], tXrX[u])
        else:
            for u in cutlass.range_constexpr(self.spec.steps):
                tXrX[u].fill(self.dtype(-float("inf")))
                if self.vector(share, tile, u, tidx) < share.end:
                    cute.autovec_copy(tXsX[None, u], tXrX[u])

    @cute.jit
    def load_edge(self, share: Share, sE: cute.Tensor, tidx: Int32):
        """Put the key of this thread's scalar at the edges of a row, LOWEST where it has none, in its place in shared
        memory, so that no register holds it."""
        V = self.spec.vector
        if tidx < 2 * V:
            tail = share.head + (share.columns - share.head) // V * V
            column, exists = at_edges(tidx, share.head, tail, V - 1, share.columns)
            sE[tidx] = LOWEST
            if (share.number == 0) & exists:
                x = element(self.dtype, share.at["x"], share.start + column)[0].to(Float32)
                sE[tidx] = key_of(x, column)

    @cute.jit
    def edge(self, sE: cute.Tensor, tidx: Int32) -> Int64:
        """What `load_edge` has put there; LOWEST for threads that have no place."""
        key = LOWEST
        if tidx < 2 * self.spec.vector:
            key = sE[tidx]
        return key
