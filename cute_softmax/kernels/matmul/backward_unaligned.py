"""Scores that TMA cannot read as tiles: rows off 16-byte boundaries, or of float32.

A line is what a CTA needs of a row of S. It comes to shared memory by a bulk copy of its own: the whole 16 bytes around
it, so that it begins there as it does in global memory, somewhere within the first 16 bytes. Where a line of dS begins
as that of S it takes its place and is sent by a bulk copy, too, but for the elements at its ends that share 16 bytes
with others; elsewhere dS goes out element by element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...plan.matmul_class import SLAB, WARPGROUP
from ..common.copy import DTYPES, element, in_shared
from ..common.index import dot, select
from .backward_values import sync_slab
from .backward_walk import Memory, Step, Thread, Walk, each


@cute.jit
def write_lines(
    walk: Walk,
    thread: Thread,
    memory: Memory,
    step: Step,
    tile: cute.Pointer,
    rS: cute.Tensor,
    column: Int32,
    before: Int32,
):
    """dS to global memory: from the place of S, or straight. tile: the stage of S; column: this thread's first; before:
    the stage of the step before, or -1."""
    s, slab = walk.spec, thread.slab
    if const_expr(s.sent):
        if const_expr(s.shares > 1):
            sync_slab(s, slab)  # the other warpgroups of the slab have read S, too
        if thread.share == 0:
            store_in_lines(walk, step, tile, rS, column - step.n * s.columns, thread.pair)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + slab, number_of_threads=WARPGROUP)
            send_lines(walk, thread, step, tile)
        cute.arch.cp_async_bulk_commit_group()
        # dS of the step before must have left.
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        leave(memory, before)
    else:
        if thread.share == 0:
            store_lines(walk, thread, step, rS, column)


@cute.jit
def leave(memory: Memory, stage: Int32):
    """A thread is done with a stage, if there is one. Each says so itself: racecheck follows bulk copies without a
    tensor map, but not a thread that speaks for its warp."""
    if stage >= 0:
        cute.arch.mbarrier_arrive(memory.ring.empty + stage)


@cute.jit
def load_lines(
    walk: Walk, memory: Memory, step: Step, bar: cute.Pointer, stage: Int32, lane: Int32, worker: Int32
):
    """S line by line: the whole 16 bytes around a line's columns, wherever they begin; a lane loads a line."""
    s, call = walk.spec, walk.call
    item = DTYPES[s.dtypes[0]].width // 8
    share = s.rows // s.producers
    columns = cutlass.min(call.N - step.n * s.columns, s.columns)
    row = worker * share + lane
    start = line(walk, call.S, step, row)
    end = (start + columns * item + 15) // 16 * 16
    inside = (lane < share) & (step.m * s.rows + row < call.M)
    size = select(inside, Int32(end - start // 16 * 16), 0)
    # Numbers of rows and dO report to the same barrier.
    first = (worker == 0) & (lane == 0)
    others = select(first, Int32(s.step_bytes - s.score_bytes), 0)
    cute.arch.mbarrier_arrive_and_expect_tx(bar, size + others)
    if size > 0:
        to = memory.S + stage * s.score_elements + row * s.pitch
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[Int32(to.toint()), start // 16 * 16, size, Int32(bar.toint())],
        )


def line(walk: Walk, operand: tuple, step: Step, row: Int32 | int) -> Int64:
    """The address of S or dS at a row of a tile and its first column."""
    s = walk.spec
    address, *strides = operand
    begin = dot([step.m * s.rows + row, *step.modes], strides) + step.n * s.columns
    return address + begin * (DTYPES[s.dtypes[0]].width // 8)


def load_from_lines(walk: Walk, step: Step, tile: cute.Pointer, rS: cute.Tensor, in_tile: Int32, pair: Int32):
    """S^T from lines that begin somewhere within their first 16 bytes."""
    places = places_of(walk, step, tile, in_tile, pair)
    for i, _, _, _ in each(walk.spec.rows):
        rS[i] = places[i][0]


def store_in_lines(walk: Walk, step: Step, tile: cute.Pointer, rS: cute.Tensor, in_tile: Int32, pair: Int32):
    """dS^T to where `load_from_lines` has found S^T."""
    places = places_of(walk, step, tile, in_tile, pair)
    for i, _, _, _ in each(walk.spec.rows):
        places[i][0] = rS[i]


def places_of(walk: Walk, step: Step, tile: cute.Pointer, in_tile: Int32, pair: Int32) -> list[cute.Tensor]:
    """This thread's elements of the lines in shared memory."""
    s, dtype = walk.spec, DTYPES[walk.spec.dtypes[0]]
    item = dtype.width // 8
    # What an address is within 16 bytes needs no more than 32 bits, and repeats every 8 rows.
    first = Int32(line(walk, walk.call.S, step, 0) & 15)
    apart = Int32(walk.call.S[1] & 15) * item
    begins = []
    for k in range(2):
        row = pair + k
        shift = (first + row * apart) & 15
        begins.append(tile.toint() + row * (s.pitch * item) + shift + in_tile * item)
    return [in_shared(dtype, begins[k] + 8 * (j * s.pitch + h) * item) for _, j, k, h in each(s.rows)]


@cute.jit
def send_lines(walk: Walk, thread: Thread, step: Step, tile: cute.Pointer):
    """The slab's part of each line from shared to global memory. One thread sends the whole 16 bytes of a part and
    stores the elements before them, another those behind; all warps share them, as a warp starts its copies one
    after another."""
    s, call, dtype = walk.spec, walk.call, DTYPES[walk.spec.dtypes[0]]
    item, slab = dtype.width // 8, thread.slab
    share, lane = s.rows // 4, thread.index % 32
    row, end = thread.index // 32 * share + lane % share, lane // share
    count = cutlass.min(call.N - step.n * s.columns - slab * SLAB, SLAB)
    if (step.m * s.rows + row < call.M) & (count > 0) & (end < 2):
        begin = line(walk, call.dS, step, row)
        source = tile.toint() + row * (s.pitch * item) + Int32(begin & 15) + slab * (SLAB * item)
        begin += slab * (SLAB * item)
        before = cutlass.min(Int32(-begin & 15) // item, count)
        whole = (count - before) * item // 16 * 16
        behind = before + whole // item
        if (end == 0) & (whole > 0):
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                read_only_args=[begin + before * item, Int32(source + before * item), whole],
            )
        first = select(end == 0, Int32(0), behind)
        last = select(end == 0, before, count)
        for i in cutlass.range_constexpr(16 // item - 1):
            if first + i < last:
                place = (first + i) * item
                to = element(dtype, begin + place)
                to[0] = in_shared(dtype, source + place)[0]


@cute.jit
def store_lines(walk: Walk, thread: Thread, step: Step, rS: cute.Tensor, column: Int32):
    """dS^T straight to global memory, element by element."""
    s, call = walk.spec, walk.call
    address, *strides = call.dS
    for i, j, k, h in each(s.rows):
        row = step.m * s.rows + 8 * j + thread.pair + k
        if (row < call.M) & (column + 8 * h < call.N):
            begin = dot([row, *step.modes], strides) + (column + 8 * h)
            to = element(DTYPES[s.dtypes[0]], address, begin)
            to[0] = rS[i]


@cute.jit
def clear_lines(walk: Walk, step: Step, lane: Int32):
    """Zeros into a tile of dS, element by element; by one warp."""
    s, call, dtype = walk.spec, walk.call, DTYPES[walk.spec.dtypes[0]]
    rows = cutlass.min(call.M - step.m * s.rows, s.rows)
    columns = cutlass.min(call.N - step.n * s.columns, s.columns)
    for row in cutlass.range(rows, unroll=1):
        begin = line(walk, call.dS, step, row)
        for column in cutlass.range(lane, columns, 32, unroll=1):
            to = element(dtype, begin + column * (dtype.width // 8))
            to[0] = dtype(0.0)
