"""A GPU with room for one CTA: others hold all shared memory but what it needs, so that CTAs run in turn."""

import contextlib
import functools

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64

# Shared memory that the system takes of each CTA's, and what shared memory is given out in.
RESERVED, UNIT = 1024, 128


@cute.kernel
def hold(nanoseconds: Int64):
    begin = cute.arch.globaltimer()
    while cute.arch.globaltimer() - begin < nanoseconds:
        pass


@functools.cache
def holder(size: int):
    """What launches `blocks` CTAs that hold `size` bytes of shared memory each."""

    @cute.jit
    def launch(blocks: Int32, nanoseconds: Int64, stream: cuda.CUstream):
        hold(nanoseconds).launch(grid=(blocks, 1, 1), block=(32, 1, 1), smem=size, stream=stream)

    return cute.compile(launch, Int32(1), Int64(1), cuda.CUstream(0))


@contextlib.contextmanager
def room_for_one(shared_memory: int, milliseconds: int = 20):
    """Within, CTAs of `shared_memory` bytes run one at a time; AssertionError if what was launched outlasted that."""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    size = facts.shared_memory_per_block_optin
    left = (size - RESERVED - shared_memory) // UNIT * UNIT - UNIT
    assert left + 2 * (shared_memory + RESERVED) > size, f"two CTAs of {shared_memory} bytes fit"
    holders = [(holder(size), facts.multi_processor_count - 1), (holder(left), 1)]
    torch.cuda.synchronize()
    ends = []
    for launch, blocks in holders:
        stream = torch.cuda.Stream()
        launch(Int32(blocks), Int64(milliseconds * 1_000_000), cuda.CUstream(stream.cuda_stream))
        ends.append(stream.record_event())
    torch.cuda._sleep(2_000_000)  # until all of them hold what they hold
    yield
    torch.cuda.current_stream().synchronize()
    assert not any(end.query() for end in ends), "the GPU was free again before the kernel had ended"
