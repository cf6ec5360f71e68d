"""What softmax(S) @ V does where the CTAs of a cluster have parts of the columns: they exchange in shared memory.

A thread holds the same rows and columns of the result as its fellows in the other warpgroups and CTAs. So registers are
left as they are, in the stages that nobody reads any more; or beside them, where the next tile is on its way to them.

Two CTAs that have blocks of rows keep one of every two blocks each: a CTA leaves the other one, adds what the other CTA
left of the block it keeps, and finishes that. Warpgroups that take turns with the steps of the same rows leave all they
have, and each adds up some of the columns; in a cluster it sends them to the CTA that finishes them.
"""

import operator
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.matmul_class import BLOCK_ROWS, WARPGROUP, MatmulClass
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
PIECE = WARPGROUP * NUMBERS * 4  # bytes of an access of a warpgroup
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
            place = place_left(blocks[b], left, slot_of(blocks[b]))
            leave(blocks[b], place)
            # The sums are each thread's: adding up a quad's here makes every product wait for the one before.
            leave_states(blocks[b], four_left(place, s.depth // 8), totals)
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


@dataclass(frozen=True)
class Meeting:
    """Where results meet in shared memory.

    left: the address where warpgroups leave theirs. landed: where those of a cluster's CTAs land; met: the mbarrier
    that counts their bytes; or None.
    """

    left: Int32
    landed: Int32 | None = None
    met: cute.Pointer | None = None

    @cute.jit
    def initialise(self, tidx: Int32):
        """Initialise the mbarrier, by the first thread, before a fence."""
        if const_expr(self.met is None):
            return
        if tidx == 0:
            cute.arch.mbarrier_init(self.met, 1)

    @cute.jit
    def open(self):
        """Tell the cluster that results may land here; behind the fence."""
        if const_expr(self.met is not None):
            cute.arch.cluster_arrive_relaxed()


def meeting_of(smem: cutlass.memory.SmemAllocator, spec: MatmulClass, stages: Int32) -> Meeting:
    """Where results meet; stages: where those of the scores lie, which nobody reads any more at the end of a CTA."""
    if spec.kept_bytes:
        return Meeting(smem.allocate(spec.kept_bytes, byte_alignment=NUMBERS * 4).toint())
    if spec.landed_bytes:
        landed = smem.allocate(spec.landed_bytes, byte_alignment=NUMBERS * 4).toint()
        return Meeting(stages, landed, smem.allocate_array(Int64, num_elems=1))
    return Meeting(stages)


@cute.jit
def merge_shares(block: Block, work: Work, share: Int32, meeting: Meeting):
    """Add up what all warpgroups of the CTA, or of its cluster, have of the same rows, each some of the columns, and
    finish these, or hand them over to the second launch.

    CTAs of a cluster add up what their own warpgroups have, and send each other the columns that each finishes: that
    takes a third of the time of reading them from each other between two barriers (H200, 2026-11-26).
    """
    s, left = block.spec, here(meeting.left)
    block = replace(block, lane=here(block.lane), row=here(block.row))
    threads, first = s.warpgroups * WARPGROUP, work.row_tile * s.rows
    row = warp_of(block) * WARP_ROWS
    exists = cutlass.Boolean(True) if const_expr(s.eighths) else first + row < block.call.rows
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    if exists:
        totals = [block.total(h) for h in range(2)]
        leave(block, place_left(block, left, share))
        if block.lane % QUAD == 0:
            leave_states(block, four_at(states_left(block, left, share)), totals)
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=threads)
    if const_expr(s.cluster == 1):
        if exists:
            finish_columns(block, work, Int32(0), share, sums_left(block, left, share))
    else:
        if share == 0 and warp_of(block) == 0:
            with cute.arch.elect_one():
                rows = block.call.rows - first
                warps = 4 if const_expr(s.eighths) else cutlass.min(cute.ceil_div(rows, WARP_ROWS), 4)
                cute.arch.mbarrier_arrive_and_expect_tx(meeting.met, warps * (s.landed_bytes // 4))
        cute.arch.cluster_wait()  # until all are open
        if exists:
            send_columns(block, share, meeting, sums_left(block, left, share))
            cute.arch.mbarrier_wait(meeting.met, 0)
            rank = cute.arch.block_idx_in_cluster()
            finish_columns(block, work, rank, share, sums_landed(block, meeting, share))


@dataclass(frozen=True)
class Sums:
    """What was left or has landed of the same rows, added up.

    refs, totals, weights: of a thread's two rows, what their exponentials refer to, their sums, and what the numbers of
    each place are multiplied by. places: where its first four numbers lie; stride: of the next, in such pieces of a
    warpgroup.
    """

    refs: list
    totals: list
    weights: list
    places: list
    stride: int

    def four(self, i: int) -> list[Float32]:
        """A thread's i-th four numbers, of two columns and two rows."""
        numbers = read_all([four_left(place, i * self.stride) for place in self.places])
        terms = [
            [n[e] * w for n, w in zip(numbers, self.weights[e // 2], strict=True)] for e in range(NUMBERS)
        ]
        return [tree(operator.add, found) for found in terms]


def sums_of(block: Block, states: list, places: list, stride: int) -> Sums:
    """states: where those of a thread's quad lie."""
    states = read_all([four_at(place) for place in states])
    refs, totals, weights = [], [], []
    for h in range(2):
        ref, falls = one_reference(block, [state[h] for state in states])
        sums = [state[2 + h] * fall for state, fall in zip(states, falls, strict=True)]
        # Given ones are those of all columns.
        totals.append(states[0][2 + h] if block.spec.stats else tree(operator.add, sums))
        refs.append(ref)
        weights.append(falls)
    return Sums(refs, totals, weights, places, stride)


def one_reference(block: Block, refs: list[Float32]) -> tuple[Float32, list[Float32]]:
    """The largest reference of a row, and what is multiplied with what refers to each of them."""
    softmax, ref = block.softmax, tree(cute.arch.fmax, refs)
    slope = softmax.exp.slope(finite(ref), softmax.factor(block.call.scale))
    return ref, [softmax.exp.fall(finite(old), finite(ref), slope) for old in refs]


def sums_left(block: Block, left: Int32, share: Int32) -> Sums:
    """Of a warpgroup's part of the columns, what those of its CTA have left."""
    s = block.spec
    first = share * (s.depth // 8 // s.shares) * PIECE
    states = [states_left(block, left, g) for g in range(s.shares)]
    return sums_of(block, states, [place_left(block, left, g, first) for g in range(s.shares)], 1)


def sums_landed(block: Block, meeting: Meeting, share: Int32) -> Sums:
    """Of the columns that a warpgroup finishes, what has landed: by CTA, within by column."""
    s = block.spec
    first = share * s.taken * s.cluster * PIECE
    states = [states_landed(block, meeting, rank) for rank in range(s.cluster)]
    places = [place_left(block, meeting.landed, 0, first + rank * PIECE) for rank in range(s.cluster)]
    return sums_of(block, states, places, s.cluster)


@cute.jit
def send_columns(block: Block, share: Int32, meeting: Meeting, sums: Sums):
    """Send a warpgroup's part of what the CTA has to those who finish it, and one of them the references and sums."""
    s, rank = block.spec, cute.arch.block_idx_in_cluster()
    own = s.depth // 8 // s.shares
    for i in cutlass.range_constexpr(own):
        piece = share * own + i
        at = (piece % s.pieces * s.cluster + rank) * PIECE
        send(sums.four(i), place_left(block, meeting.landed, 0, at), meeting.met, piece // s.pieces)
    if share == 0:
        for first in cutlass.range_constexpr(0, s.cluster, QUAD):
            to = first + block.lane % QUAD
            if to < s.cluster:
                send([*sums.refs, *sums.totals], states_landed(block, meeting, rank), meeting.met, to)


def send(numbers: list[Float32], place: cute.Pointer, barrier: cute.Pointer, rank: Int32):
    """Store four numbers at a place in the shared memory of a cluster's CTA, whose mbarrier counts the bytes."""
    four = cute.make_rmem_tensor(NUMBERS, Float32)
    for i, number in enumerate(numbers):
        four[i] = number
    words = cute.recast_tensor(four, Int32)
    cute.arch.store_async_dsmem(place, tuple(words[i] for i in range(NUMBERS)), barrier, rank)


@cute.jit
def finish_columns(block: Block, work: Work, rank: Int32, share: Int32, sums: Sums):
    """Finish the columns of one of the warpgroups, or hand them over. rank: of its CTA."""
    s, call, softmax = block.spec, block.call, block.softmax
    sinks = [None] * 2 if s.split else [block.sink(work, h) for h in range(2)]
    first = share * s.taken
    if first < s.pieces:
        inverses = [Float32(1.0)] * 2
        if const_expr(not s.split):
            inverses = [softmax.inverse(sums.totals[h], sums.refs[h], call.scale, sinks[h]) for h in range(2)]
        for i in cutlass.range_constexpr(s.taken):
            numbers = sums.four(i)
            column = work.depth_tile * s.depth + (rank * s.pieces + first + i) * 8 + block.lane % QUAD * 2
            for h in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32 if s.split else DTYPES[s.dtypes[2]])
                for e in cutlass.range_constexpr(2):
                    pair[e] = (numbers[2 * h + e] * inverses[h]).to(pair.element_type)
                store_pair(block, work, h, column, pair)
    if const_expr(s.split or s.lse):
        once = (rank == 0) & (share == 0) & (block.lane % QUAD == 0)
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


def place_left(block: Block, left: Int32, slot: Int32 | int, first: Int32 | int = 0) -> cute.Pointer:
    """Where a thread of any CTA leaves its first four numbers of a block, or those `first` bytes behind; slot: of the
    blocks that a CTA leaves."""
    at = left + slot * block.spec.left_bytes + first + (warp_of(block) * 32 + block.lane) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def states_left(block: Block, left: Int32, slot: Int32 | int) -> cute.Pointer:
    """Where a quad leaves the references and sums of its two rows: behind the block's numbers."""
    at = left + slot * block.spec.left_bytes + BLOCK_ROWS * block.spec.depth * 4
    at = at + (warp_of(block) * (32 // QUAD) + block.lane // QUAD) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def states_landed(block: Block, meeting: Meeting, rank: Int32 | int) -> cute.Pointer:
    """Where those of a cluster's CTA land: behind all numbers."""
    return states_left(block, meeting.landed + rank * (BLOCK_ROWS * 2 * 4), 0)


def warp_of(block: Block) -> Int32:
    """A warp among those of its block, by what the loop has in registers anyway."""
    return block.row % BLOCK_ROWS // WARP_ROWS


def slot_of(block: Block) -> Int32:
    """Which of the blocks that a CTA of a pair leaves this is."""
    return block.row // (2 * BLOCK_ROWS)


def leave(block: Block, place: cute.Pointer):
    """Store a thread's accumulators."""
    for i in range(cute.size(block.rO) // NUMBERS):
        four = cute.make_tensor(block.rO.iterator + i * NUMBERS, cute.make_layout(NUMBERS))
        cute.autovec_copy(four, four_left(place, i))


def leave_states(block: Block, place: cute.Tensor, totals: list[Float32]):
    """Store the references and sums of a thread's rows."""
    states = cute.make_rmem_tensor(NUMBERS, Float32)
    for h in range(2):
        states[h], states[2 + h] = block.rRef[h], totals[h]
    cute.autovec_copy(states, place)


def add(block: Block, place: cute.Pointer):
    """Add what the other CTA left."""
    rO, rRef, rTotal = block.rO, block.rRef, block.rTotal
    fours = cute.size(rO) // NUMBERS
    (states,) = read_all([four_left(place, fours)])
    weights = []
    for h in range(2):
        rRef[h], (own, other) = one_reference(block, [rRef[h], states[h]])
        if not block.spec.stats:  # which are those of all columns
            rTotal[h] = rTotal[h] * own + states[2 + h] * other
        weights.append((own, other))
    for first in range(0, fours, AT_A_TIME):
        read = read_all([four_left(place, i) for i in range(first, min(first + AT_A_TIME, fours))])
        for i, numbers in enumerate(read):
            for e in range(NUMBERS):
                at, (own, other) = (first + i) * NUMBERS + e, weights[e // 2]
                rO[at] = rO[at] * own + numbers[e] * other


def four_left(place: cute.Pointer, i: Int32 | int) -> cute.Tensor:
    """A thread's i-th four numbers, of two columns and two rows. Those of a warpgroup lie side by side."""
    return four_at(place + i * WARPGROUP * NUMBERS)


def four_at(place: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(place, cute.make_layout(NUMBERS))
