"""What softmax(S) @ V does where the CTAs of a cluster have parts of the columns: they exchange in shared memory.

A thread holds the same rows and columns of the result as its fellows in the other warpgroups and CTAs. So registers are
left as they are, in the stages that nobody reads any more; or beside them, where the next tile is on its way to them.

Two CTAs that have blocks of rows keep one of every two blocks each: a CTA leaves the other one, adds what the other CTA
left of the block it keeps, and finishes that. Warpgroups that take turns with the steps of the same rows, of one CTA or
of all of a cluster, leave all they have, and each adds up some of the columns.
"""

import operator
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.matmul_class import BLOCK_ROWS, WARPGROUP
from ...plan.matmul_layouts import QUAD, WARP_ROWS
from ..common.copy import DTYPES
from ..common.reduce import tree
from .memory import put_if
from .merge_global import part_of
from .softmax import finite
from .softmax_rows import Block
from .tiles import Work

NUMBERS = 4  # of an access to shared memory: 16 bytes
AT_A_TIME = 8  # accesses that are under way before one is used
ALL_READ = 1  # the barrier of the warpgroups that multiply


@cute.jit
def merge_halves(blocks: list, work: Work, left: Int32):
    """Finish the blocks that this CTA keeps. A CTA keeps the same ones in every call: sums have one order."""
    s = blocks[0].spec
    rank = cute.arch.block_idx_in_cluster()
    keeps = [block.row // BLOCK_ROWS % 2 == rank for block in blocks]
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=s.warpgroups * WARPGROUP)
    for b in cutlass.range_constexpr(s.blocks):
        if not keeps[b]:
            totals = [blocks[b].rTotal[h] for h in range(2)]
            leave(blocks[b], place_left(blocks[b], left, slot_of(blocks[b])), totals)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            place = place_left(blocks[b], left, slot_of(blocks[b]))
            add(blocks[b], cute.arch.map_dsmem_ptr(place, 1 - rank))
    cute.arch.cluster_arrive()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            blocks[b].finish(work)
    cute.arch.cluster_wait()  # the other CTA has read what was left here


@cute.jit
def merge_shares(block: Block, work: Work, share: Int32, left: Int32):
    """Add up what all warpgroups of the CTA, or of its cluster, have of the same rows, each some of the columns, and
    finish these, or hand them over to the second launch."""
    s = block.spec
    left, block = here(left), replace(block, lane=here(block.lane), row=here(block.row))
    threads = s.warpgroups * WARPGROUP
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    leave(block, place_left(block, left, share), [block.total(h) for h in range(2)])
    rank = Int32(0)
    if const_expr(s.cluster > 1):
        rank = cute.arch.block_idx_in_cluster()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    add_shares(block, work, rank * s.shares + share, left)
    if const_expr(s.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # all have read what was left here


@cute.jit
def add_shares(block: Block, work: Work, taker: Int32, left: Int32):
    """Of all that was left add up the columns of one of the warpgroups, and store them. taker: its number among all."""
    s, call, softmax = block.spec, block.call, block.softmax
    own = place_left(block, left, 0)
    ctas = [own] if s.cluster == 1 else [cute.arch.map_dsmem_ptr(own, r) for r in range(s.cluster)]
    places = [place + g * (s.left_bytes // 4) for place in ctas for g in range(s.shares)]
    fours = s.depth // 8
    states = read_all([four_left(place, fours) for place in places])
    weights, totals, refs = [], [], []
    for h in cutlass.range_constexpr(2):
        ref = tree(cute.arch.fmax, [state[h] for state in states])
        slope = softmax.exp.slope(finite(ref), softmax.factor(call.scale))
        weights.append([softmax.exp.fall(finite(state[h]), finite(ref), slope) for state in states])
        sums = [state[2 + h] * weight for state, weight in zip(states, weights[h], strict=True)]
        totals.append(states[0][2 + h] if s.stats else tree(operator.add, sums))  # given are those of all
        refs.append(ref)
    sinks = [None] * 2 if s.split else [block.sink(work, h) for h in range(2)]
    take = -(-fours // len(places))
    first = taker * take
    if first < fours:
        inverses = [Float32(1.0)] * 2
        if const_expr(not s.split):
            inverses = [softmax.inverse(totals[h], refs[h], call.scale, sinks[h]) for h in range(2)]
        for i in cutlass.range_constexpr(take):
            numbers = read_all([four_left(place, first + i) for place in places])
            column = work.depth_tile * s.depth + (first + i) * 8 + block.lane % QUAD * 2
            for h in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32 if s.split else DTYPES[s.dtypes[2]])
                for e in cutlass.range_constexpr(2):
                    terms = [n[2 * h + e] * weight for n, weight in zip(numbers, weights[h], strict=True)]
                    pair[e] = (tree(operator.add, terms) * inverses[h]).to(pair.element_type)
                store_pair(block, work, h, column, pair)
    if const_expr(s.split or s.lse):
        once = (taker == 0) & (block.lane % QUAD == 0)
        for h in cutlass.range_constexpr(2):
            row = block.row_of(work, h)
            if const_expr(s.split):
                state = cute.make_rmem_tensor(2, Float32)
                state[0], state[1] = refs[h], totals[h]
                _, states_at, slot = part_of(block, work, row)
                put_if(once & (row < call.rows), Float32, states_at, slot * 2, state, 0, 2)
            else:
                one = cute.make_rmem_tensor(1, Float32)
                one[0] = softmax.log_sum(refs[h], totals[h], call.scale, sinks[h])
                group = Int64(work.batch) * call.rows + row
                once_here = once & (row < call.rows) & (work.depth_tile == 0)
                put_if(once_here, Float32, call.lse, group, one, 0, 1)


def store_pair(block: Block, work: Work, h: int, column: Int32, pair: cute.Tensor):
    """Store two neighbouring results of a thread's h-th row."""
    s, call = block.spec, block.call
    row = block.row_of(work, h)
    if s.split:
        padded, _, slot = part_of(block, work, row)
        put_if(row < call.rows, Float32, call.sums, slot * padded + column, pair, 0, 2)
        return
    at, width = (Int64(work.batch) * call.rows + row) * call.depth + column, min(s.vector, 2)
    for e in range(0, 2, width):
        inside = (row < call.rows) & (column + e < call.depth)
        put_if(inside, pair.element_type, call.out, at + e, pair, e, width)


def read_all(fours: list[cute.Tensor]) -> list[cute.Tensor]:
    """What was left, in registers: all of it is under way before any is used."""
    read = [cute.make_rmem_tensor(NUMBERS, Float32) for _ in fours]
    for four, numbers in zip(fours, read, strict=True):
        cute.autovec_copy(four, numbers)
    return read


def place_left(block: Block, left: Int32, slot: Int32 | int) -> cute.Pointer:
    """Where a thread of any CTA leaves its first four numbers of a block; slot: of the blocks that a CTA leaves."""
    warp = block.row % BLOCK_ROWS // WARP_ROWS  # by what the loop has in registers anyway
    at = left + slot * block.spec.left_bytes + (warp * 32 + block.lane) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def here(number: Int32) -> Int32:
    """The number; what follows from it is not computed, and held in registers, before a loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])


def slot_of(block: Block) -> Int32:
    """Which of the blocks that a CTA of a pair leaves this is."""
    return block.row // (2 * BLOCK_ROWS)


def leave(block: Block, place: cute.Pointer, totals: list[Float32]):
    """Store a thread's accumulators, then its references and sums."""
    states = cute.make_rmem_tensor(NUMBERS, Float32)
    for h in range(2):
        states[h], states[2 + h] = block.rRef[h], totals[h]
    fours = cute.size(block.rO) // NUMBERS
    for i in range(fours):
        four = cute.make_tensor(block.rO.iterator + i * NUMBERS, cute.make_layout(NUMBERS))
        cute.autovec_copy(four, four_left(place, i))
    cute.autovec_copy(states, four_left(place, fours))


def add(block: Block, place: cute.Pointer):
    """Add what the other CTA left."""
    rO, rRef, rTotal, softmax = block.rO, block.rRef, block.rTotal, block.softmax
    fours = cute.size(rO) // NUMBERS
    (states,) = read_all([four_left(place, fours)])
    own, other = [], []
    for h in range(2):
        ref = cute.arch.fmax(rRef[h], states[h])
        slope = softmax.exp.slope(finite(ref), softmax.factor(block.call.scale))
        own.append(softmax.exp.fall(finite(rRef[h]), finite(ref), slope))
        other.append(softmax.exp.fall(finite(states[h]), finite(ref), slope))
        rRef[h] = ref
        if not block.spec.stats:  # which are those of all columns
            rTotal[h] = rTotal[h] * own[h] + states[2 + h] * other[h]
    for first in range(0, fours, AT_A_TIME):
        read = read_all([four_left(place, i) for i in range(first, min(first + AT_A_TIME, fours))])
        for i, numbers in enumerate(read):
            for e in range(NUMBERS):
                at, h = (first + i) * NUMBERS + e, e // 2
                rO[at] = rO[at] * own[h] + numbers[e] * other[h]


def four_left(place: cute.Pointer, i: Int32 | int) -> cute.Tensor:
    """A thread's i-th four numbers, of two columns and two rows; behind them references and sums. Those of a warpgroup
    lie side by side."""
    return cute.make_tensor(place + i * WARPGROUP * NUMBERS, cute.make_layout(NUMBERS))
