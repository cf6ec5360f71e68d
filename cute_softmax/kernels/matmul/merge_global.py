"""What softmax(S) @ V does where the columns of S are cut into parts: their results are kept, and merged in a second
launch of the same call."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..common.copy import global_pointer
from .softmax_rows import QUAD, finite, get, put, put_if

MERGE_THREADS = 128
MERGE_COLUMNS = 4  # that a thread reads at a time: 16 bytes
FEW_ROWS = 64


class Parts:
    """What the kernels do where their class has `split`."""

    @cute.jit
    def hand_over(self, this, block, work, share: Int32 | int, lane: Int32):
        """Store what a part of the columns adds up to, for `merge`: per row and part the accumulators of all
        columns of V, then (reference, sum)."""
        s = self.spec
        pieces = this.parts * s.shares
        padded = this.depth_tiles * s.depth
        sums = self.address_of_parts(this.results)
        states = sums + Int64(this.batches) * this.rows * pieces * padded * 4
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

    @property
    def merge_loads(self) -> int:
        """Parts that a thread reads at a time."""
        return 8 if self.spec.rows <= FEW_ROWS else 4

    @property
    def merge_lanes(self) -> int:
        """Threads that merge a row: of few rows all of a CTA, as there are many parts; else a warp."""
        return MERGE_THREADS if self.spec.rows <= FEW_ROWS else 32

    def launch_merge(self, shape: tuple, sizes: tuple, parts: Int32, scale: Float32, results: tuple, stream):
        """Launch the merge, on the host, behind the launch of the parts, if there are any. shape: rows, columns,
        columns of V."""
        if const_expr(self.spec.split):
            rows, _, depth = shape
            groups = Int64(sizes[0]) * sizes[1] * sizes[2] * rows
            of_cta = MERGE_THREADS // self.merge_lanes
            self.merge((groups, depth, parts * self.spec.shares), scale, results).launch(
                grid=[Int32((groups + of_cta - 1) // of_cta), 1, 1],
                block=[MERGE_THREADS, 1, 1],
                stream=stream,
            )

    @cute.kernel
    def merge(self, shape: tuple, scale: Float32, results: tuple):
        """shape: rows of all batches, columns of V, results of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lanes = self.merge_lanes
        group = Int64(cta) * (MERGE_THREADS // lanes) + tidx // lanes
        if group < shape[0]:
            self.merge_row(shape, group, tidx % lanes, scale, results)

    @cute.jit
    def merge_row(self, shape: tuple, group: Int64, thread: Int32, scale: Float32, results: tuple):
        """Add up the parts of one row, in their order; thread: of those that share the row, whole warps."""
        s = self.spec
        groups, depth, pieces = shape
        padded = cute.ceil_div(depth, s.depth) * s.depth
        sums = self.address_of_parts(results)
        states = sums + groups * pieces * padded * 4

        # The largest reference, and the sum relative to it: a lane takes every 32nd part.
        lane = thread % 32
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
            put_if(thread == 0, Float32, results[1], group, lse, 0, 1)

        out = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
        rounded = cute.make_rmem_tensor(MERGE_COLUMNS, self.dtypes[2])
        width = min(s.vector, MERGE_COLUMNS)
        step = self.merge_lanes * MERGE_COLUMNS
        for column in cutlass.range(thread * MERGE_COLUMNS, depth, step, unroll=1):
            out.fill(0.0)
            for first in cutlass.range(0, pieces, self.merge_loads, unroll=1):
                # All are on their way before one is used; beyond the last part it is read again, for nothing.
                read = []
                for i in cutlass.range_constexpr(self.merge_loads):
                    slot = group * pieces + cutlass.min(first + i, pieces - 1)
                    pointer = global_pointer(Float32, sums, slot * padded + column, MERGE_COLUMNS * 4)
                    numbers = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(MERGE_COLUMNS)), numbers)
                    read.append((numbers, get(states, slot * 2)))
                for i in cutlass.range_constexpr(self.merge_loads):
                    numbers, reference = read[i]
                    weight = self.exp.fall(finite(reference), finite(ref), slope)
                    for e in cutlass.range_constexpr(MERGE_COLUMNS):
                        term = cutlass.select_(first + i < pieces, numbers[e] * weight, Float32(0.0))
                        out[e] = out[e] + Float32(term)
            for e in cutlass.range_constexpr(MERGE_COLUMNS):
                rounded[e] = (out[e] * inverse).to(self.dtypes[2])
            for e in cutlass.range_constexpr(0, MERGE_COLUMNS, width):
                at = group * depth + column + e
                put_if(column + e < depth, self.dtypes[2], results[0], at, rounded, e, width)
