"""What softmax(S) @ V does where the columns of S are cut into parts: their results are kept, and merged in a second
launch of the same call."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.matmul_class import BLOCK_ROWS, MatmulClass
from ...plan.matmul_layouts import QUAD
from ..common.copy import DTYPES, in_global
from .memory import get, put, put_if, sink_of
from .softmax import Softmax, finite
from .softmax_rows import Block
from .tiles import Call, Work, modes_of

MERGE_THREADS = 128
MERGE_COLUMNS = 4  # that a thread reads at a time: 16 bytes


@cute.jit
def hand_over(block: Block, work: Work, share: Int32 | int):
    """Store what a part of the columns adds up to, for `Merge`: per row and part the accumulators of all columns of V,
    then (reference, sum)."""
    s, call, lane = block.spec, block.call, block.lane
    pieces = call.parts * s.shares
    padded = block.tiles.depth_tiles * s.depth
    states = call.sums + Int64(block.tiles.batches) * call.rows * pieces * padded * 4
    for h in cutlass.range_constexpr(2):
        total = block.total(h)
        row = block.row_of(work, h)
        if row < call.rows:
            slot = (Int64(work.batch) * call.rows + row) * pieces + work.part * s.shares + share
            pair = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(s.depth // 8):
                for e in cutlass.range_constexpr(2):
                    pair[e] = block.rO[4 * j + 2 * h + e]
                column = work.depth_tile * s.depth + lane % QUAD * 2 + 8 * j
                put(Float32, call.sums, slot * padded + column, pair, 0, 2)
            if lane % QUAD == 0:
                pair[0], pair[1] = block.rRef[h], total
                put(Float32, states, slot * 2, pair, 0, 2)


class Merge:
    """The second kernel of a class with `split`."""

    def __init__(self, spec: MatmulClass):
        self.spec, self.softmax = spec, Softmax(spec)
        few = spec.rows <= BLOCK_ROWS
        # Threads that merge a row, and parts that one reads at a time: of few rows there are many parts.
        self.lanes, self.loads = (MERGE_THREADS, 8) if few else (32, 4)

    def launch(self, call: Call, stream):
        """Launch, on the host, behind the launch of the parts."""
        groups = Int64(call.batch[0]) * call.batch[1] * call.batch[2] * call.rows
        of_cta = MERGE_THREADS // self.lanes
        results = call.out, call.lse, call.sums
        shape = groups, call.depth, call.parts * self.spec.shares
        sinks = (call.rows, call.batch, call.sink) if self.spec.sink else ()
        self.merge(shape, call.scale, results, sinks).launch(
            grid=[Int32((groups + of_cta - 1) // of_cta), 1, 1],
            block=[MERGE_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def merge(self, shape: tuple, scale: Float32, results: tuple, sinks: tuple):
        """shape: rows of all batches, columns of V, results of a row; results: addresses, see `Call`; sinks: M, the
        sizes of the batch modes, and the operand; or nothing."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        group = Int64(cta) * (MERGE_THREADS // self.lanes) + tidx // self.lanes
        if group < shape[0]:
            self.merge_row(shape, group, tidx % self.lanes, scale, results, self.sink(group, sinks))

    def sink(self, group: Int64, sinks: tuple) -> Float32 | None:
        """The sink of a row of all batches, if there is one."""
        if not self.spec.sink:
            return None
        rows, batch, operand = sinks
        modes = modes_of(Int32(group // rows), batch)
        return sink_of(self.spec, operand, Int32(group % rows), modes, rows)

    @cute.jit
    def merge_row(
        self,
        shape: tuple,
        group: Int64,
        thread: Int32,
        scale: Float32,
        results: tuple,
        sink: Float32 | None,
    ):
        """Add up the parts of one row, in their order; thread: of those that share the row, whole warps."""
        s, dtype = self.spec, DTYPES[self.spec.dtypes[2]]
        (groups, depth, pieces), (to_out, to_lse, sums) = shape, results
        padded = cute.ceil_div(depth, s.depth) * s.depth
        states = sums + groups * pieces * padded * 4

        # The largest reference, and the sum relative to it: a lane takes every 32nd part.
        lane = thread % 32
        ref, total = Float32(-float("inf")), Float32(0.0)
        for p in cutlass.range(lane, pieces, 32, unroll=1):
            ref = cute.arch.fmax(ref, get(states, (group * pieces + p) * 2))
        ref = cute.arch.warp_reduction(ref, cute.arch.fmax)
        slope = self.softmax.exp.slope(finite(ref), self.softmax.factor(scale))
        for p in cutlass.range(lane, pieces, 32, unroll=1):
            slot = (group * pieces + p) * 2
            total += get(states, slot + 1) * self.softmax.exp.fall(
                finite(get(states, slot)), finite(ref), slope
            )
        total = cute.arch.warp_reduction(total, operator.add)
        if const_expr(s.stats):
            total = get(states, group * pieces * 2 + 1)  # as of all parts
        inverse = self.softmax.inverse(total, ref, scale, sink)
        if const_expr(s.lse):
            lse = cute.make_rmem_tensor(1, Float32)
            lse[0] = self.softmax.log_sum(ref, total, scale, sink)
            put_if(thread == 0, Float32, to_lse, group, lse, 0, 1)

        out = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
        rounded = cute.make_rmem_tensor(MERGE_COLUMNS, dtype)
        width = min(s.vector, MERGE_COLUMNS)
        step = self.lanes * MERGE_COLUMNS
        for column in cutlass.range(thread * MERGE_COLUMNS, depth, step, unroll=1):
            out.fill(0.0)
            for first in cutlass.range(0, pieces, self.loads, unroll=1):
                # All are on their way before one is used; beyond the last part it is read again, for nothing.
                read = []
                for i in cutlass.range_constexpr(self.loads):
                    slot = group * pieces + cutlass.min(first + i, pieces - 1)
                    numbers = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
                    cute.autovec_copy(
                        in_global(Float32, sums, slot * padded + column, MERGE_COLUMNS), numbers
                    )
                    read.append((numbers, get(states, slot * 2)))
                for i in cutlass.range_constexpr(self.loads):
                    numbers, reference = read[i]
                    weight = self.softmax.exp.fall(finite(reference), finite(ref), slope)
                    for e in cutlass.range_constexpr(MERGE_COLUMNS):
                        term = cutlass.select_(first + i < pieces, numbers[e] * weight, Float32(0.0))
                        out[e] = out[e] + Float32(term)
            for e in cutlass.range_constexpr(MERGE_COLUMNS):
                rounded[e] = (out[e] * inverse).to(dtype)
            for e in cutlass.range_constexpr(0, MERGE_COLUMNS, width):
                at = group * depth + column + e
                put_if(column + e < depth, dtype, to_out, at, rounded, e, width)
