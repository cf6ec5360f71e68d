"""Launches of rows that ranks share, all ranks' at once, by the compiled code: see `ptx`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from compiled import compile_and_read
from ptx import Grid, Memory, parse

from cute_softmax.kernels.ranks import COME
from cute_softmax.plan import Prologue
from cute_softmax.plan.choose import kernel_order
from cute_softmax.plan.hardware import H200, Device
from cute_softmax.plan.prologue import facts_of
from cute_softmax.plan.ranks import HEADER, sharers
from cute_softmax.runtime.launch import DTYPE_NAMES, Call, Work

HALF = 1 << 14
PATIENCE = 1 << 40  # steps of the emulation


class Workspaces:
    """The workspaces of all ranks, in one memory."""

    def __init__(self, ranks: int):
        self.each = [torch.zeros((HEADER + 2 * HALF) // 8, dtype=torch.int64) for _ in range(ranks)]
        self.peers = torch.tensor([w.data_ptr() for w in self.each])
        self.alarms = torch.zeros(ranks, dtype=torch.int32)

    def numbers(self, rank: int, patience: int = PATIENCE) -> dict[str, int]:
        """What a launch of a rank is given."""
        return {
            "workspace": self.each[rank].data_ptr(),
            "alarm": self.alarms.data_ptr() + 4 * rank,
            "peers": self.peers.data_ptr(),
            "half": HALF,
            "rank": rank,
            "ranks": len(self.each),
            "patience": patience,
        }

    @property
    def come(self) -> list[torch.Tensor]:
        """Of each workspace the last launch that each rank has come to."""
        return [w.view(torch.int32)[COME : COME + len(self.each)] for w in self.each]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.each, self.peers, self.alarms]


def launch(
    folder: Path,
    monkeypatch,
    workspaces: Workspaces,
    math: str,
    tensors: list[dict[str, torch.Tensor]],
    numbers: list[dict[str, float]],
    prologue: Prologue,
    clusters: int = 2,
    seed: int | None = None,
    patience: int = PATIENCE,
    absent: tuple[int, ...] = (),
):
    """One launch of each rank. tensors, numbers: of each rank, by their names; absent: ranks that do not launch.

    Returns the plan of the first.
    """
    full = [name for name in ("dy", "x", "y", "dx") if name in tensors[0]]
    dtypes = tuple(DTYPE_NAMES[tensors[0][name].dtype] for name in full)
    columns = max(named[full[0]].shape[1] for named in tensors)
    prologue = replace(prologue, ranks=sharers(math, H200.architecture, dtypes, columns))
    facts = facts_of(math, True, prologue)
    device = Device(H200.architecture, multiprocessors=1 << 20, l2=H200.l2)
    calls, places = [], [(t.data_ptr(), t.numel() * t.element_size()) for t in workspaces.tensors]
    for rank, named in enumerate(tensors):
        names = [*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs]
        shape = named[facts.inputs[0]].shape
        operands = [t if t.shape == shape else t.unsqueeze(-1).expand(shape) for t in map(named.get, names)]
        places += [(t.data_ptr(), t.untyped_storage().nbytes()) for t in operands]
        plan = Work(math, tuple(operands), (1,), prologue=prologue).plan(device)
        given = numbers[rank] | workspaces.numbers(rank, patience)
        found = []
        call = Call(
            plan,
            lambda stream, *arguments, found=found: found.extend(arguments),
            kernel_order(math, prologue),
        )
        call(0, *[t.data_ptr() for t in operands], numbers=[given[name] for name in prologue.numbers])
        calls.append((plan, found))
    calls = [call for rank, call in enumerate(calls) if rank not in absent]
    plans = [plan for plan, _ in calls]
    assert len({plan.kernel for plan in plans}) == 1
    c = plans[0].kernel
    compiled = compile_and_read(c, folder, monkeypatch, to_run=True)
    clusters = min(clusters, plans[0].tiles)
    parameters = [arguments[:2] + arguments[3:] for _, arguments in calls]  # without the number of clusters
    memory, numbers = Memory(places), [own[3:] for own in parameters]
    Grid(parse(compiled.ptx, "_rendezvous_"), memory, (len(calls), 1), (1, 1), 0, seed, len(calls)).run(
        *numbers
    )
    program, grid = parse(compiled.ptx, "_kernel_"), (clusters * len(calls), c.cluster_n)
    Grid(program, memory, grid, (1, c.cluster_n), compiled.shared, seed, len(calls)).run(*parameters)
    return plans[0]
