"""Cross entropy of tokens as an operation: forward and backward of the mean, which gives the gradient of the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .cases import CAPPED, SMOOTHED, Case

Loss = Callable[[Tensor, Tensor], Tensor]
SHARE, CAP = 0.1, 3.0  # of the label smoothing; that of the scores, which the random ones reach


def gradient(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """A call of both directions."""

    def call(logits: Tensor, tokens: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf, tokens), leaf)
        return found

    return call


class OverTheLogits:
    """A loss that writes its gradient over the logits: on a copy of them, which only the first calls renew.

    Later ones work on what is left there; their time is the same, and does not hold that of a copy.
    """

    RENEWED = 2  # the call that is checked, and that whose memory is measured

    def __init__(self, loss: Loss) -> None:
        self._call = gradient(loss)
        self._calls = 0
        self._copy = torch.empty(0)

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        if self._copy.shape != logits.shape:
            self._copy = logits.clone()
        elif self._calls < self.RENEWED:
            self._copy.copy_(logits)
        self._calls += 1
        return self._call(self._copy, tokens)


def of(loss: Loss, case: Case) -> Loss:
    """A loss as the case's mode asks for it, of one that takes `label_smoothing` and `softcap`."""
    arguments = {SMOOTHED: {"label_smoothing": SHARE}, CAPPED: {"softcap": CAP}}.get(case.mode, {})
    return partial(loss, **arguments)


def torchs(case: Case) -> Loss:
    """torch's loss, of scores that its operations cap where the mode asks for that."""
    loss = torch.nn.functional.cross_entropy
    if case.mode == CAPPED:
        return lambda logits, tokens: loss(CAP * torch.tanh(logits / CAP), tokens)
    return of(loss, case)


def evenly(mode: str) -> float:
    """The share of all classes evenly in the target."""
    return SHARE if mode == SMOOTHED else 0.0


def expected(logits: Tensor, tokens: Tensor, rows: int, mode: str = "") -> Tensor:
    """The gradient of the mean over so many rows, in float64."""
    share, tangents = evenly(mode), torch.tanh(logits.double() / CAP)
    d = torch.softmax(tangents * CAP if mode == CAPPED else logits.double(), -1)
    d.scatter_add_(-1, tokens.unsqueeze(-1), d.new_full((1, 1), share - 1.0).expand(len(d), 1))
    d -= share / d.shape[-1]
    return (d * (1 - tangents.square()) if mode == CAPPED else d).div_(rows)
