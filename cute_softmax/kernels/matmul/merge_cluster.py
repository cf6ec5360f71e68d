"""What softmax(S) @ V does where two CTAs of a cluster have a half of the columns each: they exchange in shared memory.

A thread holds the same rows and columns of the result as its fellow in the other CTA. So nothing needs a place of its
own: of two blocks of 64 rows each CTA keeps one. It leaves its threads' registers of the other as they are, in the
stages that nobody reads any more; adds what the other CTA left of the block it keeps, and finishes that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...plan.matmul_class import BLOCK_ROWS, WARPGROUP
from ...plan.matmul_layouts import WARP_ROWS
from .softmax import finite
from .softmax_rows import Block
from .tiles import Work

NUMBERS = 4  # of an access to shared memory: 16 bytes
AT_A_TIME = 8  # accesses that are under way before one is used
ALL_READ = 1  # the barrier of the warpgroups that multiply


@cute.jit
def merge_halves(blocks: list, work: Work):
    """Finish the blocks that this CTA keeps. A CTA keeps the same ones in every call: sums have one order."""
    s = blocks[0].spec
    rank = cute.arch.block_idx_in_cluster()
    keeps = [block.row // BLOCK_ROWS % 2 == rank for block in blocks]
    cute.arch.barrier(barrier_id=ALL_READ, number_of_threads=s.warpgroups * WARPGROUP)
    for b in cutlass.range_constexpr(s.blocks):
        if not keeps[b]:
            leave(blocks[b])
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            add(blocks[b], cute.arch.map_dsmem_ptr(place_left(blocks[b]), 1 - rank))
    cute.arch.cluster_arrive()
    for b in cutlass.range_constexpr(s.blocks):
        if keeps[b]:
            blocks[b].finish(work)
    cute.arch.cluster_wait()  # the other CTA has read what was left here


def place_left(block: Block) -> cute.Pointer:
    """Where a thread of either CTA leaves its first four numbers of a block."""
    # By what the loop has in registers anyway.
    slot, warp = block.row // (2 * BLOCK_ROWS), block.row % BLOCK_ROWS // WARP_ROWS
    at = block.base + slot * block.spec.left_bytes + (warp * 32 + block.lane) * (NUMBERS * 4)
    return cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=NUMBERS * 4)


def leave(block: Block):
    """Store a thread's accumulators, then its references and sums."""
    place, states = place_left(block), cute.make_rmem_tensor(NUMBERS, Float32)
    for h in range(2):
        states[h], states[2 + h] = block.rRef[h], block.rTotal[h]
    fours = cute.size(block.rO) // NUMBERS
    for i in range(fours):
        four = cute.make_tensor(block.rO.iterator + i * NUMBERS, cute.make_layout(NUMBERS))
        cute.autovec_copy(four, four_left(place, i))
    cute.autovec_copy(states, four_left(place, fours))


def add(block: Block, place: cute.Pointer):
    """Add what the other CTA left."""
    rO, rRef, rTotal, softmax = block.rO, block.rRef, block.rTotal, block.softmax
    fours = cute.size(rO) // NUMBERS
    states = cute.make_rmem_tensor(NUMBERS, Float32)
    cute.autovec_copy(four_left(place, fours), states)
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
        read = [cute.make_rmem_tensor(NUMBERS, Float32) for _ in range(min(AT_A_TIME, fours - first))]
        for i, numbers in enumerate(read):
            cute.autovec_copy(four_left(place, first + i), numbers)
        for i, numbers in enumerate(read):
            for e in range(NUMBERS):
                at, h = (first + i) * NUMBERS + e, e // 2
                rO[at] = rO[at] * own[h] + numbers[e] * other[h]


def four_left(place: cute.Pointer, i: int) -> cute.Tensor:
    """A thread's i-th four numbers: those of a warpgroup lie side by side."""
    return cute.make_tensor(place + i * WARPGROUP * NUMBERS, cute.make_layout(NUMBERS))
