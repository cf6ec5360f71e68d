"""Cross entropy of tokens as an operation: forward and backward of the mean, which gives the gradient of the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


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


def expected(logits: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of the mean over so many rows, in float64."""
    d = torch.softmax(logits.double(), -1)
    return d.scatter_add_(-1, tokens.unsqueeze(-1), d.new_full((1, 1), -1.0).expand(len(d), 1)).div_(rows)
