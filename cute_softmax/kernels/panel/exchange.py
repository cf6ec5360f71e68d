"""An exchange point in global memory: CTAs that share a panel hand over their partial states and read all the others'.

A state is published in pairs of numbers, each in one store whose own bits say that it is there: never zero, which its
slot was before the launch. (A sum of exponentials is 0 only beside a maximum of -inf; an odd number is paired with 1.)
So everybody reads the slots of all parts until none is zero, and merges them in the order of the parts:
one trip through L2 after the last has come, and no fence.

No CTA waits for ever: whoever has waited for longer than `patience` gives its part up and leaves it to the last to
arrive, which by then certainly runs. So a kernel makes progress however few of its CTAs are resident: where other
kernels hold the rest of the GPU, and where two such kernels hold half of it each.

Each panel has `plan.panel_class.exchange_words` words, zero before the launch:

    arrived + GIVE_UP * given up | of part 0, 1, ... 0: its own CTA will finish it; GIVEN_UP; TAKEN by another

A CTA counts itself in when it has published. One that gives up marks its part and counts that in the same word. Of the
two counts one is first: either the last to arrive learns that a part was given up, or the CTA that gives up learns
that all have arrived and takes its part again.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ...plan.panel_class import HEADER
from ..common import reduce
from ..common.copy import global_pointer

GIVEN_UP, TAKEN = 1, 2
COUNT = 0
GIVE_UP = 1 << 16


def _word(address: Int64, index: Int32 | int) -> cute.Pointer:
    return global_pointer(Int32, address, Int64(index), 4)


@cute.jit
def publish(address: Int64, state: tuple):
    """Write a state so that others may find it there."""
    padded = (*state, Float32(1.0)) if const_expr(len(state) % 2) else state
    for i in cutlass.range_constexpr(len(padded) // 2):
        at = global_pointer(Int64, address, i, 8)
        cute.arch.store(at, reduce.pack(padded[2 * i : 2 * i + 2]), sem="relaxed", scope="gpu")


def expect(address: Int64):
    """Load the 128 bytes around an address into L2 before anybody waits for them: what was cleared before the launch
    has left it when hundreds of megabytes have passed."""
    cute.arch.inline_ptx("prefetch.global.L2::evict_last [{$r0}];", read_only_args=[address])


def look(address: Int64, seen: Int64) -> Int64:
    """The pair of a state at an address, or 0 if it is not there yet; not read again if it was `seen`."""
    return cute.arch.inline_ptx(
        "{.reg .pred p; setp.eq.s64 p, {$r1}, 0; mov.b64 {$w0}, {$r1}; "
        "@p ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];}",
        write_only_types=[Int64],
        read_only_args=[address, seen],
    )


def arrive(address: Int64) -> Int32:
    """Count this CTA in, whose states are published; what was counted before. For one thread."""
    return cute.arch.atomic_add(_word(address, COUNT), Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def give_up(address: Int64, part: Int32, parts: Int32) -> Boolean:
    """Leave a part to the last to arrive; True if all have arrived, and this CTA has its part again. For one thread."""
    cute.arch.atomic_exch(_word(address, HEADER + part), Int32(GIVEN_UP), sem="relaxed", scope="gpu")
    cute.arch.fence_acq_rel_gpu()
    before = cute.arch.atomic_add(_word(address, COUNT), Int32(GIVE_UP), sem="acq_rel", scope="gpu")
    again = Boolean(False)
    if before % GIVE_UP == parts:
        again = take(address, part)
    return again


@cute.jit
def waits(address: Int64, parts: Int32) -> Boolean:
    """Whether all have arrived and some part may wait for another CTA. For one thread."""
    count = cute.arch.load(_word(address, COUNT), Int32, sem="acquire", scope="gpu")
    return (count % GIVE_UP == parts) & (count >= GIVE_UP)


@cute.jit
def take(address: Int64, part: Int32) -> Boolean:
    """Take a part that was given up; False if its own CTA has it, or another took it. For one thread."""
    before = cute.arch.atomic_cas(
        _word(address, HEADER + part), cmp=Int32(GIVEN_UP), val=Int32(TAKEN), sem="acq_rel", scope="gpu"
    )
    return before == GIVEN_UP
