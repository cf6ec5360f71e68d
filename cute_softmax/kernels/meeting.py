"""A meeting point in global memory: CTAs that share a panel hand over their partial states and wait for the merged.

The last to arrive merges the states of all parts, in the order of the parts, and raises a flag; the others wait for
that flag and read one state a column, not one a column and part. No CTA waits for ever: whoever has waited for longer
than `patience` leaves its part to be finished by the last to arrive, which by then certainly runs. So a kernel makes
progress however few of its CTAs are resident, be it that other kernels hold the rest of the GPU, or that two such
kernels each hold half of it.

Each panel has `words(parts)` words, zero before the launch:

    arrived | merged | given up | state of part 0, 1, ... (0: its own CTA will finish it; GIVEN_UP; TAKEN by another)

A CTA that gives up marks its part, fences, and looks once more for the flag; the last to arrive raises the flag,
fences, and looks whether anybody gave up. At least one of the two sees the other.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

GIVEN_UP, TAKEN = 1, 2
ARRIVED, MERGED, ANY_GIVEN_UP = 0, 1, 2
HEADER = 3  # words before the parts'


def words(parts: int) -> int:
    """Words of a panel's meeting point."""
    return HEADER + parts


def _word(address: Int64, index: Int32 | int) -> cute.Pointer:
    return cute.make_ptr(Int32, address + Int64(index) * 4, cute.AddressSpace.gmem, assumed_align=4)


def _read(word: cute.Pointer) -> Int32:
    return cute.arch.load(word, Int32, sem="acquire", scope="gpu")


@cute.jit
def arrive(address: Int64, parts: Int32) -> Boolean:
    """Count this CTA in, after its threads' writes to global memory; whether it is the last. For one thread."""
    cute.arch.fence_acq_rel_gpu()
    before = cute.arch.atomic_add(_word(address, ARRIVED), Int32(1), sem="acq_rel", scope="gpu")
    cute.arch.fence_acq_rel_gpu()
    return before == parts - 1


@cute.jit
def announce(address: Int64):
    """Tell the others that the merged states can be read, after this CTA's writes of them. For one thread."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.atomic_exch(_word(address, MERGED), Int32(1), sem="release", scope="gpu")
    cute.arch.inline_ptx("fence.sc.gpu;")


@cute.jit
def wait(address: Int64, part: Int32, patience: Int32) -> Boolean:
    """Whether the merged states can be read; False after `patience` nanoseconds, the part being given up. For one
    thread."""
    word = _word(address, MERGED)
    merged = _read(word)
    begin = cute.arch.globaltimer()
    waited = Int64(0)
    while (merged == 0) & (waited < patience):
        merged = _read(word)
        waited = cute.arch.globaltimer() - begin
    met = merged != 0
    if not met:
        cute.arch.atomic_exch(_word(address, HEADER + part), Int32(GIVEN_UP), sem="relaxed", scope="gpu")
        cute.arch.atomic_add(_word(address, ANY_GIVEN_UP), Int32(1), sem="release", scope="gpu")
        cute.arch.inline_ptx("fence.sc.gpu;")
        if _read(word) != 0:
            met = take(address, part)
    return met


@cute.jit
def any_given_up(address: Int64) -> Boolean:
    """Whether some part may wait for another CTA. For the last to arrive."""
    return _read(_word(address, ANY_GIVEN_UP)) > 0


@cute.jit
def take(address: Int64, part: Int32) -> Boolean:
    """Take a part that was given up; False if its own CTA has it, or another took it."""
    before = cute.arch.atomic_cas(
        _word(address, HEADER + part), cmp=Int32(GIVEN_UP), val=Int32(TAKEN), sem="acq_rel", scope="gpu"
    )
    return before == GIVEN_UP
