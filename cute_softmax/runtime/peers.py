"""Workspaces of ranks that write into each other's memory: where kernels of rows that they share exchange states.

A group of ranks of one host gets one workspace a rank, of a few megabytes, made together at the first call and kept:
its size does not depend on what is computed in it. What a kernel does there: `kernels.ranks`.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..plan.ranks import HEADER, LANES
from ..version import __version__
from .launch import device_facts

HALF = 4 << 20  # bytes of states of one launch; as many of the next lie beside them
# Nanoseconds that a kernel waits for a peer: it may still be compiling, or reading its batch.
PATIENCE = 300 * 10**9

_known: dict[tuple[str, int], Workspace | None] = {}
_making = threading.Lock()
# By device the stream of the last launch: those of different streams must not wait for each other's SMs.
_last: dict[int, torch.cuda.Stream] = {}


@dataclass
class Workspace:
    """This rank's workspace and those of its peers. memory: kept alive, as peers write into it."""

    group: dist.ProcessGroup
    device: int
    memory: torch.Tensor
    handle: object
    peers: torch.Tensor
    alarm: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32, pin_memory=True))

    def __post_init__(self):
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._alarm = self.alarm.numpy()
        self.numbers = {
            "workspace": self.memory.data_ptr(),
            "alarm": self.alarm.data_ptr(),
            "peers": self.peers.data_ptr(),
            "half": HALF,
            "rank": self.rank,
            "ranks": self.ranks,
            "patience": PATIENCE,
        }

    def rows(self, words: int, ctas: int) -> int:
        """Rows of one launch, each with so many numbers of so many CTAs of each rank."""
        return HALF // (8 * words * ctas * self.ranks)

    def check(self) -> None:
        """Raise RuntimeError if a peer has not come in time in an earlier launch."""
        if self._alarm[0]:
            raise RuntimeError(
                f"rank {self.rank} waited for a peer in a kernel on rows that ranks share, longer than "
                f"{self.numbers['patience'] / 1e9:g} seconds: its results are NaN, and the group can share no more rows"
            )

    def turn(self) -> None:
        """Let the launch that follows on the current stream wait for the one before it, whatever its stream."""
        stream, last = torch.cuda.current_stream(self.device), _last.get(self.device)
        if last is not None and last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(last.record_event())
        _last[self.device] = stream


def reaches(group: dist.ProcessGroup) -> bool | None:
    """Whether a group's ranks write into each other's memory; None where they have not tried yet."""
    found = [workspace for (name, _), workspace in _known.items() if name == group.group_name]
    return found[-1] is not None if found else None


def workspace_of(group: dist.ProcessGroup, device: int) -> Workspace | None:
    """The workspace of a group, None where its ranks do not all reach each other's memory.

    All ranks of the group must ask for it at the same time when they do so first; while a graph is captured there is
    none that was not there before. CUTE_SOFTMAX_PEERS=0 in the environment, of all ranks, says that none is made.
    """
    if os.environ.get("CUTE_SOFTMAX_PEERS") == "0":
        return None
    key = group.group_name, device
    found = _known.get(key)
    if found is not None and found.group is group:
        return found
    if key in _known and found is None:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    with _making:
        _known[key] = _made(group, device)
    return _known[key]


def _made(group: dist.ProcessGroup, device: int) -> Workspace | None:
    facts = device_facts(device)
    properties = torch.cuda.get_device_properties(device)
    mine = (socket.gethostname(), facts, __version__, torch.__version__, HALF)
    every = _told((*mine, str(properties.uuid)), group)
    alike = len({told[:-1] for told in every}) == 1 and len({told[-1] for told in every}) == len(every)
    if not alike or len(every) > LANES or facts.architecture.cluster_limit == 1:
        return None
    try:
        workspace = _shared(group, device)
    except Exception as error:  # whatever the driver or torch has against it: all ranks must know
        workspace, reason = None, str(error)
    else:
        reason = ""
    failed = [told for told in _told(reason, group) if told]
    return None if failed else workspace


def _told(mine: object, group: dist.ProcessGroup) -> list:
    """What every rank of a group says."""
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def _shared(group: dist.ProcessGroup, device: int) -> Workspace:
    from torch.distributed import _symmetric_memory as symmetric

    with torch.cuda.device(device):
        memory = symmetric.empty(HEADER + 2 * HALF, dtype=torch.uint8, device=torch.device("cuda", device))
        handle = symmetric.rendezvous(memory, group)
        memory.zero_()
        offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
        peers = torch.tensor([p + offset for p in handle.buffer_ptrs], device=memory.device)
        torch.cuda.synchronize()
    return Workspace(group, device, memory, handle, peers)
