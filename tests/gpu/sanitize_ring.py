"""The jobs of rows that ranks share and keep on chip for `sanitize.py`: one rank, whose only peer is itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from checking import DTYPES, Guarded, random
from sanitize_shards import TOLERANCE
from sanitizing import Job, received, sent, timed

from cute_softmax.dispatch.heads.loss import Loss
from cute_softmax.dispatch.sharded import on_chip
from cute_softmax.dispatch.sharded.states import Shared
from cute_softmax.plan import choose
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.ranks import HEADER, THREADS, sharers
from cute_softmax.runtime import launch

HALF = 1 << 18
PATIENCE = 10**12  # nanoseconds: a sanitizer takes its time
CLUSTERS, TURNS = 2, 9  # so that each place of a ring is filled twice
# Columns of slices by bytes of an element: several rows a CTA, one, several CTAs a row, and rings of three places; on
# vector boundaries and not.
COLUMNS = {2: (1000, 333, 5003, 12000, 45000, 120000), 4: (600, 333, 2601, 6000, 22001, 60000)}
LOSS = "loss"
MATHS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", LOSS)


class Alone:
    """The workspace of a group of one rank, as `runtime.peers.Workspace` is one of several."""

    def __init__(self):
        self.memory = torch.zeros((HEADER + 2 * HALF) // 8, dtype=torch.int64).to("cuda")
        self.peers = torch.tensor([self.memory.data_ptr()]).to("cuda")
        self.alarm = torch.zeros(1, dtype=torch.int32).to("cuda")
        self.numbers = {
            "workspace": self.memory.data_ptr(),
            "alarm": self.alarm.data_ptr(),
            "peers": self.peers.data_ptr(),
            "half": HALF,
            "rank": 0,
            "ranks": 1,
            "patience": PATIENCE,
        }

    def rows(self, words: int, ctas: int) -> int:
        return HALF // (8 * words * ctas)

    def check(self) -> None:
        assert not self.alarm.item(), "a state has not come"

    def turn(self) -> None:
        pass


def few(patch: pytest.MonkeyPatch) -> None:
    """Let as few clusters run as make each go round its ring."""
    patch.setattr(choose, "_resident", lambda c, device: CLUSTERS)


class Planned(on_chip.Exchange):
    """Notes the class of a launch in place of launching it."""

    def run(self, math, tensors, prologue, numbers):
        work = launch.Work(math, tuple(tensors), (1,), prologue=self.asks(prologue))
        self.workspace.append(work.plan(launch.device_facts(0)).kernel)


def call(math: str, exchange: on_chip.Exchange, x, dy, y, to, target, alpha) -> tuple[torch.Tensor, ...]:
    """A row math of slices: results into `to`, or of a loss what is returned. y: the softmax, or its logarithm."""
    asked = Shared("", 0, x.shape[1], x.shape[1], dtype=x.dtype, log=math.startswith("log"))
    if math == LOSS:
        return on_chip.Visit(Loss("sum", -100), asked, exchange).visit(x, target, alpha)
    if math.endswith("backward"):
        on_chip.gradient(dy, y, to, asked, exchange)
    else:
        on_chip.softmax(x, to, asked, exchange)
    return ()


def check(math: str, who: str, dtype: torch.dtype, shape: tuple[int, int]) -> float:
    """Two launches of a row math beside float64: the second one in the other half of the workspace. who: as
    `Prologue.ranks` has it."""
    x, dy = random(shape, dtype, 1, 2.0), random(shape, dtype, 2)
    target = torch.arange(shape[0]) * 331 % shape[1]
    target[::4] = -100
    leaf, log = x.double().requires_grad_(), math.startswith("log")
    y = (torch.log_softmax if log else torch.softmax)(leaf, -1).detach()
    workspace, made, found = Alone(), Guarded(shape, dtype), []
    to = sent(made.tensor)
    tensors = [t.to("cuda") for t in (x, dy, y.to(dtype))]
    beside = target.to("cuda"), torch.ones(()).to("cuda")

    def launches() -> None:
        for _ in range(2):
            found[:] = call(math, on_chip.Exchange(workspace, who), *tensors, to, *beside)

    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        seconds = timed(launches)
    workspace.check()
    if math == LOSS:
        each = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
        (exact,) = torch.autograd.grad(each.sum(), leaf)
        losses, got = (t.cpu() for t in found)
        assert torch.allclose(losses.double(), each.detach(), rtol=1e-5, atol=1e-5), "the losses are wrong"
    else:
        g, y = dy.double(), y.to(dtype).double() if math.endswith("backward") else y
        gradient = g - y.exp() * g.sum(-1, keepdim=True) if log else y * (g - (g * y).sum(-1, keepdim=True))
        exact, got = gradient if math.endswith("backward") else y, received(made, to)
    tolerance = 4 * TOLERANCE[dtype]
    assert torch.allclose(got.double(), exact, rtol=tolerance, atol=tolerance), "the numbers are wrong"
    return seconds


def jobs(device: Device, dtypes: list[str]) -> Iterator[Job]:
    """Each math, dtype and length."""
    for name in dtypes:
        dtype = DTYPES[name]
        if dtype not in TOLERANCE:
            continue
        for math in MATHS:
            for columns in COLUMNS[dtype.itemsize]:
                full = 3 if math.endswith("backward") else 2
                own = "softmax" if math == LOSS else math
                who = sharers(own, device.architecture, (name,) * full, columns)  # of many rows
                rows = CLUSTERS * TURNS * (THREADS // int(who.split("x")[0])) - 1
                x = torch.empty(rows, columns, dtype=dtype, device="meta")
                kernels, index = [], torch.empty(rows, dtype=torch.int64, device="meta")
                call(math, Planned(kernels, who), x, x, x, x, index, torch.empty((), device="meta"))
                what = f"rows on chip {name} {math}: {kernels[0].name}"
                yield Job((*kernels,), x.numel(), what, partial(check, math, who, dtype, (rows, columns)))
