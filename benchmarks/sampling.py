"""Probabilities to sample tokens from as an operation: its modes, inputs, and the callables of the providers.

`softmax(logits / temperature, -1)` in float32, at one temperature for all rows, or one a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .cases import T_A_ROW, TEMPERATURE, Case

Call = Callable[..., Tensor]


def of_all(case: Case) -> float | None:
    """The temperature of all rows; None where each has its own."""
    return None if case.mode == T_A_ROW else float(case.mode.removeprefix(TEMPERATURE))


def temperatures(case: Case, device: torch.device) -> Tensor | None:
    """The temperatures of a case's rows, from 0.5 to 1.5; None where all have the same."""
    if case.mode != T_A_ROW:
        return None
    generator = torch.Generator(device=device).manual_seed(2)
    return torch.rand(case.shape[:-1], device=device, generator=generator) + 0.5


def called(case: Case, function: Callable[[Tensor, float | Tensor], Tensor]) -> Call:
    """A function of logits and temperatures as the operation."""
    of_all_rows = of_all(case)
    return function if of_all_rows is None else lambda logits: function(logits, of_all_rows)


def torchs(logits: Tensor, temperature: float | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As torch's users write it."""
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    return torch.softmax(logits.to(dtype) / temperature, -1)


# The probabilities in float64.
expected = partial(torchs, dtype=torch.float64)
