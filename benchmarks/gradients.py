"""The gradients of softmax(S) @ V as an operation: float64 references, and the callables of the providers.

Inputs: scores, values, and what comes in from above (of the product's shape). An output is the gradients of the scores
and of the values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch import config

from .cases import AND_CAUSAL, Case

Gradients = tuple[Tensor, Tensor]


class Backward:
    """The backward alone, as autograd runs it: the first call also runs the forward, which is kept for the others."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._forward = forward
        self._inputs: tuple[Tensor, ...] = ()

    def __call__(self, scores: Tensor, values: Tensor, grad: Tensor) -> Gradients:
        if not self._inputs or self._inputs[0] is not scores:
            self._inputs = scores, values
            self._leaves = [t.detach().requires_grad_() for t in self._inputs]
            # Compiled code that may overwrite what it has saved could run once only.
            with config.patch(donated_buffer=False):
                self._result = self._forward(*self._leaves)
        return torch.autograd.grad(self._result, self._leaves, grad, retain_graph=True)


def expected(case: Case, scores: Tensor, values: Tensor, grad: Tensor) -> tuple[Gradients, Gradients]:
    """The gradients for one matrix of scores in float64, and what the magnitudes of their terms add up to."""
    scores, values, grad = (t.double() for t in (scores, values, grad))
    if case.mode.endswith(AND_CAUSAL):
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    powers = torch.softmax(scores, -1)
    inner, largest = grad @ values.mT, grad.abs() @ values.abs().mT
    found = powers * (inner - (powers * inner).sum(-1, True)), powers.mT @ grad
    return found, (powers * (largest + (powers * largest).sum(-1, True)), powers.mT @ grad.abs())
