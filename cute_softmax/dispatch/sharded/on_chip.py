"""Rows that ranks share and keep on chip while they exchange states through each other's memory: tensors to launches.

See `kernels.ranks` for the exchange, and `runtime.peers` for the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...plan import NotPlanned, Prologue
from ...plan.hardware import Device
from ...plan.ranks import LANES, sharers, words_of
from ...runtime import launch
from ...runtime.peers import Workspace, reaches, workspace_of
from ..heads import loss as of_losses
from ..heads.kernels import scaled
from .kernels import matrix
from .states import Shared, group_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Exchange:
    """How launches on slices of rows exchange states. sharers: see `Prologue.ranks`."""

    workspace: Workspace
    sharers: str

    def asks(self, prologue: Prologue) -> Prologue:
        """The prologue of a launch, which exchanges."""
        return replace(prologue, ranks=self.sharers)

    def run(
        self, math: str, tensors: Sequence[Tensor], prologue: Prologue, numbers: dict[str, float]
    ) -> None:
        """Launch a row math on slices, (rows, elements), with what belongs to them, expanded to that shape.

        numbers: of the prologue, by name.
        """
        prologue, given = self.asks(prologue), numbers | self.workspace.numbers
        most = self.workspace.rows(words_of(math, prologue), int(self.sharers.split("x")[1]))
        self.workspace.check()
        for first in range(0, tensors[0].shape[0], most):
            self.workspace.turn()
            cut = [t[first : first + most] for t in tensors]
            launch.run(math, cut, (1,), prologue=prologue, numbers=[given[name] for name in prologue.numbers])


def sharers_of(
    math: str, dtypes: Sequence[torch.dtype], shape: tuple[int, int], ranks: int, device: Device
) -> str | None:
    """Who shares slices, (rows, columns), that stay on chip, as `Prologue.ranks` has it; None where they are too long,
    or there are too many ranks. dtypes: of the full operands."""
    rows, columns = shape
    names = tuple(launch.DTYPE_NAMES[dtype] for dtype in dtypes)
    try:
        found = sharers(math, device.architecture, names, columns, rows)
    except NotPlanned:
        return None
    return found if int(found.split("x")[1]) * ranks <= LANES else None


def exchange_of(
    math: str, dtypes: Sequence[torch.dtype], shape: tuple[int, int], asked: Shared, device: int
) -> Exchange | None:
    """How slices, (rows, columns), are kept on chip; None where that cannot be, see `sharers_of`, or their ranks do not
    reach each other. All ranks must ask alike, at the same time."""
    found = sharers_of(math, dtypes, shape, asked.ranks, launch.device_facts(device))
    workspace = workspace_of(group_of(asked.group), device) if found else None
    return None if workspace is None else Exchange(workspace, found)


def explained(
    input: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | int, device: Device, log: bool, scale: float
) -> str:
    """How a softmax of slices, (..., elements), runs, in words. input: such a slice, or a tensor that describes it;
    group: the ranks that share rows, or how many there are."""
    ranks = group if type(group) is int else dist.get_world_size(group)
    rows, columns = input.shape[:-1].numel(), input.shape[-1]
    math = "log_softmax" if log else "softmax"
    x, y = (torch.empty(rows, columns, dtype=d, device="meta") for d in (input.dtype, dtype))
    found = sharers_of(math, (input.dtype, dtype), x.shape, ranks, device) if ranks > 1 and columns else None
    reached = None if type(group) is int else reaches(group)
    prologue, _ = scaled(scale)
    gathered = "one all-gather of the states, 8 bytes per row from each; slices are read before and after it"
    if found is None or reached is False:
        groups = [torch.empty(rows, 1, device="meta").expand(rows, columns) for _ in range(2)]
        states = replace(prologue, state="alone")
        plan = launch.Work("logsumexp", (x, *groups), (1,), prologue=states).plan(device)
        how = f"{gathered}, first by the following kernel"
    else:
        plan = launch.Work(math, (x, y), (1,), prologue=replace(prologue, ranks=found)).plan(device)
        how = "slices stay on chip and are read once, as ranks write states into each other's memory"
        how += "" if reached else f", if they can access it; otherwise {gathered}"
    return f"{math} of rows shared by {ranks} ranks: {how}\n{plan.explain()}"


def softmax(input: Tensor, output: Tensor, asked: Shared, exchange: Exchange) -> None:
    """The slice of the softmax of rows, or of its logarithm, into `output`; both (..., elements)."""
    prologue, numbers = scaled(asked.scale)
    named = dict(zip(prologue.numbers, numbers, strict=True))
    _run("log_softmax" if asked.log else "softmax", [input], output, exchange, prologue, named)


def gradient(grad: Tensor, result: Tensor, output: Tensor, asked: Shared, exchange: Exchange) -> None:
    """The gradient of a slice from that of its softmax, or of its logarithm, into `output`."""
    prologue, numbers = scaled(asked.scale)
    named = dict(zip(prologue.numbers, numbers, strict=True))
    math = "log_softmax_backward" if asked.log else "softmax_backward"
    _run(math, [grad, result], output, exchange, prologue, named)


def loss(input: Tensor, target: Tensor, asked: Shared, exchange: Exchange) -> Tensor:
    """A scalar cross entropy of slices, (..., elements), whose gradient is written with it; recorded by autograd."""
    loss = of_losses.Loss(asked.reduction, asked.ignore, asked.scale, asked.squares, dtype=asked.dtype)
    return of_losses.in_one_visit(input, target, None, loss, Visit(loss, asked, exchange))


@dataclass(frozen=True)
class Visit:
    """How `heads.loss.OneVisit` visits slices."""

    loss: of_losses.Loss
    asked: Shared
    exchange: Exchange

    def visit(self, input: Tensor, target: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows' losses in float32, alpha times the gradient of the slice in its scores)."""
        width = self.asked.width
        gradient = torch.empty_like(input)
        losses = torch.empty(input.shape[:-1], dtype=torch.float32, device=input.device)
        prologue, numbers = of_losses.asked_of_kernel(self.loss, alpha="groups")
        named = dict(zip(prologue.numbers, numbers, strict=True))
        named |= {"start": self.asked.start, "size": self.asked.size}
        cut, to = input[..., :width], gradient[..., :width]
        _run("softmax", [cut], to, self.exchange, prologue, named, [alpha, target], [losses])
        gradient[..., width:].zero_()
        return losses, gradient


def _run(
    math: str,
    inputs: list[Tensor],
    output: Tensor,
    exchange: Exchange,
    prologue: Prologue,
    numbers: dict[str, float],
    of_rows: Sequence[Tensor] = (),
    results: Sequence[Tensor] = (),
) -> None:
    """of_rows: what is read of each row, or one of all; results: numbers of rows, which lie side by side."""
    to = matrix(output)
    made = torch.empty(output.shape, dtype=output.dtype, device=output.device) if to is None else output
    *read, written = [matrix(t if matrix(t) is not None else t.contiguous()) for t in (*inputs, made)]
    beside, after = (
        [t.reshape(-1, 1).expand(written.shape) for t in tensors] for tensors in (of_rows, results)
    )
    exchange.run(math, [*read, *beside, written, *after], prologue, numbers)
    if to is None:
        output.copy_(made)
