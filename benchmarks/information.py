"""Numbers of rows as operations: entropies, divergences of another softmax, the largest log-probabilities; references
in float64, and the callables of the providers.

"entropy" and "kl_div" are the forward, which gives a number of each row, "entropy_gradient" and "kl_div_gradient"
forward and backward, which return the gradient of the logits. Inputs: logits, a teacher's logits, and what comes in
from above. "topk_log_softmax" is the forward, k numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import Case

Call = Callable[..., Tensor]
OfRows = Callable[[Tensor, Tensor], Tensor]  # of logits and a teacher's


def torchs(case: Case) -> OfRows:
    """As torch's users write it."""
    if case.op.startswith("entropy"):

        def entropy(x: Tensor, _: Tensor) -> Tensor:
            logs = torch.log_softmax(x, -1)
            return -(logs.exp() * logs).sum(-1)

        return entropy
    if case.op == "topk_log_softmax":
        return lambda x, _: torch.log_softmax(x, -1).topk(case.k)[0]

    def divergence(x: Tensor, target: Tensor) -> Tensor:
        logs = torch.log_softmax(x, -1)
        others = torch.log_softmax(target, -1)
        return torch.nn.functional.kl_div(logs, others, reduction="none", log_target=True).sum(-1)

    return divergence


def ours(case: Case) -> OfRows:
    """This package's."""
    import cute_softmax

    if case.op.startswith("entropy"):
        return lambda x, _: cute_softmax.entropy(x)
    if case.op == "topk_log_softmax":
        return lambda x, _: cute_softmax.topk_log_softmax(x, case.k).values
    return lambda x, target: cute_softmax.kl_div(x, target, reduction="none")


def expected(case: Case, logits: Tensor, target: Tensor) -> Tensor:
    """The numbers in float64."""
    return torchs(case)(logits.double(), target.double())


def expected_gradient(case: Case, logits: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of the logits in float64, what the magnitudes of its terms amount to)."""
    logs = torch.log_softmax(logits.double(), -1)
    p, grad = logs.exp(), upstream.double().unsqueeze(-1)
    if case.op == "entropy_gradient":
        entropy = -(p * logs).sum(-1, keepdim=True)
        return -grad * p * (logs + entropy), grad.abs() * p * (logs.abs() + entropy)
    teacher = torch.softmax(target.double(), -1)
    return grad * (p - teacher), grad.abs() * (p + teacher)


class Informed:
    """What a provider has that gives an `OfRows` for a case."""

    def of_rows(self, case: Case) -> OfRows:
        raise NotImplementedError

    def _forward(self, case: Case) -> Call:
        numbers = self.of_rows(case)
        return lambda logits, target, upstream: numbers(logits, target)

    def _gradient(self, case: Case) -> Call:
        numbers = self.of_rows(case)

        def call(logits: Tensor, target: Tensor, upstream: Tensor) -> Tensor:
            leaf = logits.detach().requires_grad_()
            (found,) = torch.autograd.grad(numbers(leaf, target), leaf, upstream)
            return found

        return call

    entropy = kl_div = topk_log_softmax = _forward
    entropy_gradient = kl_div_gradient = _gradient
