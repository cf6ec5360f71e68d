"""Rows that ranks share and keep on chip while they exchange states through each other's memory: tensors to launches.

See `kernels.ranks` for the exchange, and `runtime.peers` for the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...plan import NotPlanned, Prologue
from ...plan.ranks import LANES, sharers, words_of
from ...runtime import launch
from ...runtime.peers import Workspace, workspace_of
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


def exchange_of(
    math: str, dtypes: Sequence[torch.dtype], asked: Shared, columns: int, device: int
) -> Exchange | None:
    """How slices of so many columns are kept on chip; None where their rows are too long, or their ranks do not reach
    each other. All ranks must ask alike, at the same time. dtypes: of the full operands."""
    names = tuple(launch.DTYPE_NAMES[dtype] for dtype in dtypes)
    try:
        found = sharers(math, launch.device_facts(device).architecture, names, columns)
    except NotPlanned:
        return None
    if int(found.split("x")[1]) * asked.ranks > LANES:
        return None
    workspace = workspace_of(group_of(asked.group), device)
    return None if workspace is None else Exchange(workspace, found)


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


def _run(
    math: str,
    inputs: list[Tensor],
    output: Tensor,
    exchange: Exchange,
    prologue: Prologue,
    numbers: dict[str, float],
) -> None:
    to = matrix(output)
    made = torch.empty(output.shape, dtype=output.dtype, device=output.device) if to is None else output
    rows = [t if matrix(t) is not None else t.contiguous() for t in (*inputs, made)]
    exchange.run(math, [matrix(t) for t in rows], prologue, numbers)
    if to is None:
        output.copy_(made)
