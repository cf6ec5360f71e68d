"""What softmax(S) @ V does where the columns of S are cut into parts: their results are kept, and merged in a second
launch of the same call."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .matmul_rows import QUAD, finite, get, put, put_if

MERGE_THREADS = 128
MERGE_LOADS = 4  # parts that a thread reads at a time


class Parts:
    """What the kernels do where their class has `split`."""

    @cute.jit
    def hand_over(self, this, block, work, share: Int32 | int, lane: Int32):
        """Store what a part of the columns adds up to, for `merge`: per row and part (reference, sum), then the
        accumulators of all columns of V."""
        s = self.spec
        pieces = this.parts * s.shares
        padded = this.depth_tiles * s.depth
        states = self.address_of_parts(this.results)
        sums = states + Int64(this.batches) * this.rows * pieces * 8
        for h in cutlass.range_constexpr(2):
            total = self.total(block, h)
            row = self.row(work, block, h)
            if row < this.rows:
                slot = (Int64(work.batch) * this.rows + row) * pieces + work.part * s.shares + share
                pair = cute.make_rmem_tensor(2, Float32)
                for j in cutlass.range_constexpr(s.depth // 8):
                    for e in cutlass.range_constexpr(2):
                        pair[e] = block.rO[4 * j + 2 * h + e]
                    column = work.depth_tile * s.depth + lane % QUAD * 2 + 8 * j
                    put(Float32, sums, slot * padded + column, pair, 0, 2)
                if lane % QUAD == 0:
                    pair[0], pair[1] = block.rRef[h], total
                    put(Float32, states, slot * 2, pair, 0, 2)

    def address_of_parts(self, results: tuple) -> Int64:
        return results[1 + self.spec.lse]

    @cute.kernel
    def merge(self, shape: tuple, scale: Float32, results: tuple):
        """A CTA adds up the parts of one row, in their order."""
        s = self.spec
        groups, depth, pieces = shape
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        group = Int64(cta)
        padded = cute.ceil_div(depth, s.depth) * s.depth
        states = self.address_of_parts(results)
        sums = states + groups * pieces * 8

        # The largest reference, and the sum relative to it: a lane takes every 32nd part.
        lane = tidx % 32
        ref, total = Float32(-float("inf")), Float32(0.0)
        for p in cutlass.range(lane, pieces, 32, unroll=1):
            ref = cute.arch.fmax(ref, get(states, (group * pieces + p) * 2))
        ref = cute.arch.warp_reduction(ref, cute.arch.fmax)
        slope = self.exp.slope(finite(ref), self.factor(scale))
        for p in cutlass.range(lane, pieces, 32, unroll=1):
            slot = (group * pieces + p) * 2
            total += get(states, slot + 1) * self.exp.fall(finite(get(states, slot)), finite(ref), slope)
        total = cute.arch.warp_reduction(total, operator.add)
        if const_expr(s.stats):
            total = get(states, group * pieces * 2 + 1)  # as of all parts
        inverse = self.inverse(total)
        if const_expr(s.lse):
            lse = cute.make_rmem_tensor(1, Float32)
            lse[0] = self.log_sum(ref, total, scale)
            put_if(tidx == 0, Float32, results[1], group, lse, 0, 1)

        for column in cutlass.range(tidx, depth, MERGE_THREADS, unroll=1):
            out = Float32(0.0)
            for p in cutlass.range(pieces, unroll=MERGE_LOADS):
                slot = group * pieces + p
                weight = self.exp.fall(finite(get(states, slot * 2)), finite(ref), slope)
                out += get(sums, slot * padded + column) * weight
            one = cute.make_rmem_tensor(1, self.dtypes[2])
            one[0] = (out * inverse).to(self.dtypes[2])
            put(self.dtypes[2], results[0], group * depth + column, one, 0, 1)
