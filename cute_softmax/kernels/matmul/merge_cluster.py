"""What softmax(S) @ V does where the CTAs of a cluster have parts of the columns: they exchange in shared memory.

A thread holds the same rows and columns of the result as its fellows in the other warpgroups and CTAs. So registers are
left as they are, in the stages that nobody reads any more; or beside them, where the next tile is on its way to them.

Two CTAs that have blocks of rows keep one of every two blocks each: a CTA leaves the other one, adds what the other CTA
left of the block it keeps, and finishes that. Warpgroups that take turns with the steps of the same rows, of one CTA or
of all of a cluster, leave all they have, and each adds up some of the columns.
"""

import operator
from dataclasses import dataclass, replace

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
from .tiles import Work, here

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
            leave(blocks[b], left, slot_of(blocks[b]), totals)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            add(blocks[b], left, 1 - rank)
    cute.arch.cluster_arrive()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            blocks[b].finish(work)
    cute.arch.cluster_wait()  # the other CTA has read what was left here


@cute.jit
def merge_shares(block: Block, work: Work, share: Int32, left: Int32):
    """Add up what all warpgroups of the CTA, or of its cluster, have of the same rows, each some of the columns, and
    finish these, or hand them over to the second launch.

    CTAs of a cluster first add up what their own warpgroups have, and leave that: an SM reads 14 bytes a clock from
    other ones, and more than 30 from its own memory (H200, 2026-11-26)."""
    s = block.spec
    left, block = here(left), replace(block, lane=here(block.lane), row=here(block.row))
    threads = s.warpgroups * WARPGROUP
    exists = warp_exists(block, work)
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    if exists:
        leave(block, left, share, [block.total(h) for h in range(2)])
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    if const_expr(s.cluster == 1):
        if exists:
            finish_columns(block, work, share, read_left(block, left, range(s.shares), [None]))
    else:
        rank = cute.arch.block_idx_in_cluster()
        if exists:
            leave_columns(block, left, share, read_left(block, left, range(s.shares), [None]))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if exists:
            sums = read_left(block, left, [s.shares], range(s.cluster))
            finish_columns(block, work, rank * s.shares + share, sums)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # all have read what was left here


def warp_exists(block: Block, work: Work) -> cutlass.Boolean:
    """Whether any of a warp's rows may exist."""
    first = work.row_tile * block.spec.rows + block.row - block.lane // QUAD
    return cutlass.Boolean(True) if block.spec.eighths else first < block.call.rows


@dataclass(frozen=True)
class Sums:
    """What was left of the same rows, added up.

    places: where a thread's numbers lie. refs, totals, weights: of its two rows, what their exponentials refer to,
    their sums, and what the numbers of each place are multiplied by.
    """

    places: list
    refs: list
    totals: list
    weights: list

    def four(self, i: Int32) -> list[Float32]:
        """A thread's i-th four numbers, of two columns and two rows."""
        numbers = read_all([four_left(place, i) for place in self.places])
        terms = [
            [n[e] * w for n, w in zip(numbers, self.weights[e // 2], strict=True)] for e in range(NUMBERS)
        ]
        return [tree(operator.add, found) for found in terms]


def read_left(block: Block, left: Int32, slots: list, ranks: list) -> Sums:
    """What was left in these slots by the CTAs of these ranks; rank None: by this CTA."""
    s, softmax = block.spec, block.softmax

    def of_all(place) -> list:
        pairs = [(place(block, left, slot), rank) for rank in ranks for slot in slots]
        return [p if rank is None else cute.arch.map_dsmem_ptr(p, rank) for p, rank in pairs]

    states = read_all([four_at(place) for place in of_all(states_left)])
    refs, totals, weights = [], [], []
    for h in range(2):
        ref = tree(cute.arch.fmax, [state[h] for state in states])
        slope = softmax.exp.slope(finite(ref), softmax.factor(block.call.scale))
        weights.append([softmax.exp.fall(finite(state[h]), finite(ref), slope) for state in states])
        sums = [state[2 + h] * weight for state, weight in zip(states, weights[h], strict=True)]
        totals.append(states[0][2 + h] if s.stats else tree(operator.add, sums))  # given are those of all
        refs.append(ref)
    return Sums(of_all(place_left), refs, totals, weights)


@cute.jit
def leave_columns(block: Block, left: Int32, share: Int32, sums: Sums):
    """Leave a warpgroup's part of the columns of what the CTA's have added up to, behind what these left."""
    s = block.spec
    place, take = place_left(block, left, s.shares), s.depth // 8 // s.shares
    for i in cutlass.range_constexpr(take):
        four = cute.make_rmem_tensor(NUMBERS, Float32)
        for e, number in enumerate(sums.four(share * take + i)):
            four[e] = number
        cute.autovec_copy(four, four_left(place, share * take + i))
    if share == 0:
        leave_states(block, left, s.shares, sums.refs, sums.totals)


@cute.jit
def finish_columns(block: Block, work: Work, taker: Int32, sums: Sums):
    """Finish the columns of one of the warpgroups, or hand them over. taker: its number among all."""
    s, call, softmax = block.spec, block.call, block.softmax
    fours = s.depth // 8
    sinks = [None] * 2 if s.split else [block.sink(work, h) for h in range(2)]
    take = -(-fours // (s.cluster * s.shares))
    first = taker * take
    if first < fours:
        inverses = [Float32(1.0)] * 2
        if const_expr(not s.split):
            inverses = [softmax.inverse(sums.totals[h], sums.refs[h], call.scale, sinks[h]) for h in range(2)]
        for i in cutlass.range_constexpr(take):
            numbers = sums.four(first + i)
            column = work.depth_tile * s.depth + (first + i) * 8 + block.lane % QUAD * 2
            for h in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32 if s.split else DTYPES[s.dtypes[2]])
                for e in cutlass.range_constexpr(2):
                    pair[e] = (numbers[2 * h + e] * inverses[h]).to(pair.element_type)
                store_pair(block, work, h, column, pair)
    if const_expr(s.split or s.lse):
        once = (taker == 0) & (block.lane % QUAD == 0)
        for h in cutlass.range_constexpr(2):
            row = block.row_of(work, h)
            if const_expr(s.split):
                state = cute.make_rmem_tensor(2, Float32)
                state[0], state[1] = sums.refs[h], sums.totals[h]
                _, states_at, slot = part_of(block, work, row)
                put_if(once & (row < call.rows), Float32, states_at, slot * 2, state, 0, 2)
            else:
                one = cute.make_rmem_tensor(1, Float32)
                one[0] = softmax.log_sum(sums.refs[h], sums.totals[h], call.scale, sinks[h])
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
    at = left + slot * block.spec.left_bytes + (warp_of(block) * 32 + block.lane) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def states_left(block: Block, left: Int32, slot: Int32 | int) -> cute.Pointer:
    """Where a quad leaves the references and sums of its two rows: behind the block's numbers."""
    at = left + slot * block.spec.left_bytes + BLOCK_ROWS * block.spec.depth * 4
    at = at + (warp_of(block) * (32 // QUAD) + block.lane // QUAD) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def warp_of(block: Block) -> Int32:
    """A warp among those of its block, by what the loop has in registers anyway."""
    return block.row % BLOCK_ROWS // WARP_ROWS


def slot_of(block: Block) -> Int32:
    """Which of the blocks that a CTA of a pair leaves this is."""
    return block.row // (2 * BLOCK_ROWS)


def leave(block: Block, left: Int32, slot: Int32 | int, totals: list[Float32]):
    """Store a thread's accumulators, and its rows' references and sums."""
    place = place_left(block, left, slot)
    for i in range(cute.size(block.rO) // NUMBERS):
        four = cute.make_tensor(block.rO.iterator + i * NUMBERS, cute.make_layout(NUMBERS))
        cute.autovec_copy(four, four_left(place, i))
    leave_states(block, left, slot, [block.rRef[h] for h in range(2)], totals)


@cute.jit
def leave_states(block: Block, left: Int32, slot: Int32 | int, refs: list[Float32], totals: list[Float32]):
    """Store the references and sums of a thread's two rows, which the lanes of a quad share."""
    states = cute.make_rmem_tensor(NUMBERS, Float32)
    for h in cutlass.range_constexpr(2):
        states[h], states[2 + h] = refs[h], totals[h]
    if block.lane % QUAD == 0:
        cute.autovec_copy(states, four_at(states_left(block, left, slot)))


def add(block: Block, left: Int32, rank: Int32):
    """Add what the other CTA left."""
    rO, rRef, rTotal, softmax = block.rO, block.rRef, block.rTotal, block.softmax
    fours, slot = cute.size(rO) // NUMBERS, slot_of(block)
    place, at = (cute.arch.map_dsmem_ptr(p(block, left, slot), rank) for p in (place_left, states_left))
    (states,) = read_all([four_at(at)])
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
    """A thread's i-th four numbers, of two columns and two rows. Those of a warpgroup lie side by side."""
    return four_at(place + i * WARPGROUP * NUMBERS)


def four_at(place: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(place, cute.make_layout(NUMBERS))
