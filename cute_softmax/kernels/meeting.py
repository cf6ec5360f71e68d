"""A meeting point in global memory: CTAs that share a group hand over their partial states and wait for the others.

No CTA waits for ever. Whoever has waited for longer than `patience` leaves its part to be finished by the CTA that
comes last, which by then certainly runs: so a kernel makes progress however few of its CTAs are resident, be it
that other kernels hold the rest of the GPU, or that two such kernels each hold half of it.

Each tile of groups has `parts` + 2 words, zero before the launch:

    arrived | given up | state of part 0, 1, ... (0: its own CTA will finish it; GIVEN_UP; TAKEN by another CTA)

A CTA that gives up marks its part, fences, and looks once more whether all have arrived; the last to arrive has
counted itself, fences, and looks whether anybody gave up. At least one of the two sees the other.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

GIVEN_UP, TAKEN = 1, 2
HEADER = 2  # words before the parts'


def words(parts: int) -> int:
    """Words of a tile's meeting point."""
    return HEADER + parts


def _word(address: Int64, index: Int32 | int) -> cute.Pointer:
    return cute.make_ptr(Int32, address + Int64(index) * 4, cute.AddressSpace.gmem, assumed_align=4)


def _read(word: cute.Pointer) -> Int32:
    return cute.arch.load(word, Int32, sem="acquire", scope="gpu")


@cute.jit
def arrive(address: Int64, parts: Int32) -> Boolean:
    """Count this CTA in, after its threads' writes to global memory; whether it is the last. For one thread."""
    cute.arch.fence_acq_rel_gpu()
    before = cute.arch.atomic_add(_word(address, 0), Int32(1), sem="acq_rel", scope="gpu")
    cute.arch.inline_ptx("fence.sc.gpu;")
    return before == parts - 1


@cute.jit
def wait(address: Int64, part: Int32, parts: Int32, patience: Int32) -> Boolean:
    """Whether all have arrived; False after `patience` nanoseconds, the part being given up. For one thread."""
    arrived = _read(_word(address, 0))
    begin = cute.arch.globaltimer()
    waited = Int64(0)
    while (arrived < parts) & (waited < patience):
        arrived = _read(_word(address, 0))
        waited = cute.arch.globaltimer() - begin
    met = arrived >= parts
    if not met:
        cute.arch.atomic_exch(_word(address, HEADER + part), Int32(GIVEN_UP), sem="relaxed", scope="gpu")
        cute.arch.atomic_add(_word(address, 1), Int32(1), sem="release", scope="gpu")
        cute.arch.inline_ptx("fence.sc.gpu;")
        if _read(_word(address, 0)) >= parts:
            met = take(address, part)
    return met


@cute.jit
def any_given_up(address: Int64) -> Boolean:
    """Whether some part may wait for another CTA. For the last to arrive."""
    return _read(_word(address, 1)) > 0


@cute.jit
def take(address: Int64, part: Int32) -> Boolean:
    """Take a part that was given up; False if its own CTA has it, or another took it."""
    before = cute.arch.atomic_cas(
        _word(address, HEADER + part), cmp=Int32(GIVEN_UP), val=Int32(TAKEN), sem="acq_rel", scope="gpu"
    )
    return before == GIVEN_UP
