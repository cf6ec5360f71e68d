"""What softmax(S) @ V does where the columns of S are cut into parts: their results are kept, and merged in a second
launch of the same call."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.matmul_class import MatmulClass
from ...plan.matmul_layouts import QUAD
from ..common.copy import DTYPES, in_global, in_shared
from ..common.early import begins_early, wait_for_stream
from .memory import get, put, put_if, sink_of
from .softmax import Softmax, finite
from .softmax_rows import Block
from .tiles import Call, Work

MERGE_THREADS = 128
MERGE_COLUMNS = 4  # that a thread reads at a time: 16 bytes
STATES = 8  # that a lane reads at a time


def part_of(block: Block, work: Work, row: Int32) -> tuple:
    """(columns of V of a part, address of the parts' states, number of a row's part) of what is kept for `Merge`: per
    row and part the accumulators of all columns of V, then (reference, sum)."""
    call = block.call
    padded = call.grid.depth_tiles * block.spec.depth
    states = call.sums + Int64(call.grid.batches) * call.rows * call.parts * padded * 4
    return padded, states, (Int64(work.batch) * call.rows + row) * call.parts + work.part


@cute.jit
def hand_over(block: Block, work: Work):
    """Store what a part of the columns adds up to, for `Merge`."""
    s, call, lane = block.spec, block.call, block.lane
    for h in cutlass.range_constexpr(2):
        total = block.total(h)
        row = block.row_of(work, h)
        if row < call.rows:
            padded, states, slot = part_of(block, work, row)
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
    """The second kernel of a class with `split`.

    rows: that a CTA merges; lanes: threads that have different columns of a row; groups: of threads that
    have the same ones, of different parts. loads: parts that a thread reads at a time.
    """

    def __init__(self, spec: MatmulClass):
        self.spec, self.softmax = spec, Softmax(spec)
        self.groups, self.loads = spec.mergers, spec.merge_loads
        self.rows, self.lanes = (1, MERGE_THREADS // self.groups) if self.groups > 1 else (4, 32)

    def launch(self, call: Call, stream):
        """Launch, on the host, behind the launch of the parts."""
        groups = Int64(call.grid.batches) * call.rows
        results = call.out, call.lse, call.sums
        shape = groups, call.depth, call.parts
        sinks = (call.rows, call.grid, call.sink) if self.spec.sink else ()
        lines = cute.ceil_div(call.depth, self.lanes * MERGE_COLUMNS)
        grid = [Int32((groups + self.rows - 1) // self.rows), lines, 1]
        self.merge(shape, call.scale, results, sinks).launch(
            grid=grid,
            block=[MERGE_THREADS, 1, 1],
            stream=stream,
            use_pdl=begins_early(self.spec, grid),
        )

    @cute.kernel
    def merge(self, shape: tuple, scale: Float32, results: tuple, sinks: tuple):
        """shape: rows of all batches, columns of V, results of a row; results: addresses, see `Call`; sinks: M, the
        grid of the call, and the operand; or nothing."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, chunk, _ = cute.arch.block_idx()
        threads = self.lanes * self.groups
        row = Int64(cta) * self.rows + tidx // threads
        column = (chunk * self.lanes + tidx % self.lanes) * MERGE_COLUMNS
        wait_for_stream(self.spec.early)
        if row < shape[0]:
            place = column, tidx % threads // self.lanes, tidx % 32
            self.merge_row(shape, row, place, scale, results, self.sink(row, sinks))

    def sink(self, row: Int64, sinks: tuple) -> Float32 | None:
        """The sink of a row of all batches, if there is one."""
        if not self.spec.sink:
            return None
        rows, grid, operand = sinks
        modes = grid.modes(Int32(row // rows))
        return sink_of(self.spec, operand, Int32(row % rows), modes, rows)

    @cute.jit
    def merge_row(
        self,
        shape: tuple,
        row: Int64,
        place: tuple,
        scale: Float32,
        results: tuple,
        sink: Float32 | None,
    ):
        """Add up the parts of one row, in their order within each group. place: the first column, the group, and the
        lane in the warp, of which all share the row."""
        s, dtype = self.spec, DTYPES[self.spec.dtypes[2]]
        (rows, depth, parts), (to_out, to_lse, sums) = shape, results
        column, group, lane = place
        padded = cute.ceil_div(depth, s.depth) * s.depth
        states = sums + rows * parts * padded * 4 + row * parts * 8
        # The numbers of the first parts are on their way while the states are read. Columns beyond V's are not there.
        numbers = sums + (row * parts * padded + cutlass.min(column, padded - MERGE_COLUMNS)) * 4
        source = numbers, states, padded, parts
        read = self.read(source, group)

        # The largest reference, and the sum relative to it.
        ref, total = Float32(-float("inf")), Float32(0.0)
        for first in cutlass.range(lane, parts, 32 * STATES, unroll=1):
            for i in cutlass.range_constexpr(STATES):
                p = cutlass.min(first + i * 32, parts - 1)
                ref = cute.arch.fmax(ref, get(states, Int64(p) * 2))
        ref = cute.arch.warp_reduction(ref, cute.arch.fmax)
        slope = self.softmax.exp.slope(finite(ref), self.softmax.factor(scale))
        for first in cutlass.range(lane, parts, 32 * STATES, unroll=1):
            for i in cutlass.range_constexpr(STATES):
                p = first + i * 32
                slot = Int64(cutlass.min(p, parts - 1)) * 2
                fall = self.softmax.exp.fall(finite(get(states, slot)), finite(ref), slope)
                total += Float32(cutlass.select_(p < parts, get(states, slot + 1) * fall, Float32(0.0)))
        total = cute.arch.warp_reduction(total, operator.add)
        if const_expr(s.stats):
            total = get(states, Int64(1))  # as of all parts
        inverse = self.softmax.inverse(total, ref, scale, sink)
        if const_expr(s.lse):
            lse = cute.make_rmem_tensor(1, Float32)
            lse[0] = self.softmax.log_sum(ref, total, scale, sink)
            put_if((column == 0) & (group == 0), Float32, to_lse, row, lse, 0, 1)

        out = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
        out.fill(0.0)
        self.add(out, read, group, parts, ref, slope)
        step = self.groups * self.loads
        for first in cutlass.range(group + step, parts, step, unroll=1):
            self.add(out, self.read(source, first), first, parts, ref, slope)
        if const_expr(self.groups > 1):
            self.add_groups(out, group, column)
        if group == 0:
            rounded = cute.make_rmem_tensor(MERGE_COLUMNS, dtype)
            width = min(s.vector, MERGE_COLUMNS)
            for e in cutlass.range_constexpr(MERGE_COLUMNS):
                rounded[e] = (out[e] * inverse).to(dtype)
            for e in cutlass.range_constexpr(0, MERGE_COLUMNS, width):
                at = row * depth + column + e
                put_if(column + e < depth, dtype, to_out, at, rounded, e, width)

    def read(self, source: tuple, first: Int32) -> list[tuple]:
        """(a thread's numbers, reference) of so many parts, a group apart; beyond the last one it is read again, for
        nothing."""
        numbers, states, padded, parts = source
        read = []
        for i in range(self.loads):
            p = Int64(cutlass.min(first + i * self.groups, parts - 1))
            four = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
            cute.autovec_copy(in_global(Float32, numbers, p * padded, MERGE_COLUMNS), four)
            read.append((four, get(states, p * 2)))
        return read

    def add(self, out: cute.Tensor, read: list, first: Int32, parts: Int32, ref: Float32, slope: Float32):
        """Add parts that were read."""
        for i, (four, reference) in enumerate(read):
            weight = self.softmax.exp.fall(finite(reference), finite(ref), slope)
            counts = first + i * self.groups < parts
            for e in range(MERGE_COLUMNS):
                out[e] = out[e] + Float32(cutlass.select_(counts, four[e] * weight, Float32(0.0)))

    @cute.jit
    def add_groups(self, out: cute.Tensor, group: Int32, column: Int32):
        """Add up what the groups of a CTA have, in the first one."""
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate(self.groups * self.lanes * MERGE_COLUMNS * 4, byte_alignment=16).toint()
        lane = column // MERGE_COLUMNS % self.lanes

        def of(group: Int32 | int) -> cute.Tensor:
            at = sums + (group * self.lanes + lane) * (MERGE_COLUMNS * 4)
            return in_shared(Float32, at, MERGE_COLUMNS)

        cute.autovec_copy(out, of(group))
        cute.arch.barrier()
        four = cute.make_rmem_tensor(MERGE_COLUMNS, Float32)
        for g in cutlass.range_constexpr(1, self.groups):
            cute.autovec_copy(of(g), four)
            for e in cutlass.range_constexpr(MERGE_COLUMNS):
                out[e] = out[e] + four[e]
