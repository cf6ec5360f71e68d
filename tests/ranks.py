"""Ranks of the tests of rows that they share: processes of their own, with gloo on the CPU or NCCL on a GPU each.

What they do stands in `on_ranks`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 120
WORKS = ["on_ranks", "on_ranks_torch", "on_ranks_gpu", "on_ranks_chip"]
PRELOAD = [*WORKS, "torch", "torch.distributed.nn", "torch.distributed.tensor", "cute_softmax", "simulated"]


def run(world: int, work: Callable, backend: str = "gloo", **arguments: object) -> None:
    """Run ``work(rank, world, **arguments)`` on so many ranks; raises AssertionError with the first rank's traceback
    that failed."""
    # From a process that has imported torch, and nothing begun.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "store"))
        every = [
            context.Process(
                target=_rank, args=(rank, world, backend, meeting, work, arguments, said), daemon=True
            )
            for rank in range(world)
        ]
        for process in every:
            process.start()
        failed = []
        for _ in every:
            try:
                rank, text = said.get(timeout=TIMEOUT)
            except queue.Empty:
                failed.append("a rank said nothing")
                break
            if text:
                failed.append(f"rank {rank}: {text}")
                break
        for process in every:
            process.join(1 if failed else TIMEOUT)
        # Of a rank that crashed the others say only that it no longer answers.
        died = {rank: -p.exitcode for rank, p in enumerate(every) if (p.exitcode or 0) < 0}
        for process in every:
            process.kill()
            process.join(TIMEOUT)
    assert not failed, f"{failed[0]}\nranks that died, by signal: {died}"


def _rank(rank: int, world: int, backend: str, meeting: str, work: Callable, arguments: dict, said) -> None:
    try:
        import torch
        import torch.distributed as dist

        faulthandler.enable()
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
        work(rank, world, **arguments)
        dist.barrier()
        dist.destroy_process_group()
        said.put((rank, ""))
    except BaseException:
        said.put((rank, traceback.format_exc()))


def place() -> str:
    """The device of this rank's tensors."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def cuts(kind: str, columns: int, world: int) -> list[int]:
    """Where slices begin, and the end of the last: equally long, unequally, or some of nothing."""
    if kind == "equal":
        return [columns // world * i for i in range(world + 1)]
    if kind == "empty":  # all of it on the last but one rank
        return [0] * max(world - 1, 1) + [columns] * (world - max(world - 1, 1) + 1)
    return [columns * i * i // world**2 for i in range(world + 1)]


def installed(kernels: bool):
    """On the CPU: kernels' launches simulated, or torch's operations as CPU tensors have them."""
    import pytest
    import simulated

    return simulated.install(pytest.MonkeyPatch()) if kernels and place() == "cpu" else None
