"""Log-probabilities of chosen tokens as an operation: inputs, float64 references, and the callables of the providers.

"selective_log_softmax" is the forward; "selective_gradient" forward and backward, which returns the gradient of the
logits. With entropy, the entropy of each row is added to its log-probability. Inputs: logits, one token of each row,
and what comes in from above (one number per row).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import WITH_ENTROPY, Case

Call = Callable[..., Tensor]
Numbers = Callable[[Tensor, Tensor], Tensor]  # of logits and tokens


def tokens_of(case: Case, device: torch.device) -> Tensor:
    """A token of each row."""
    generator = torch.Generator(device=device).manual_seed(4)
    return torch.randint(case.shape[-1], case.shape[:-1], device=device, generator=generator)


def torchs(case: Case) -> Numbers:
    """As torch's users write it."""

    def numbers(logits: Tensor, tokens: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        found = logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return found - (logs.exp() * logs).sum(-1) if case.mode == WITH_ENTROPY else found

    return numbers


def ours(case: Case) -> Numbers:
    """This package's."""
    from cute_softmax import selective_log_softmax

    if case.mode == WITH_ENTROPY:
        return lambda logits, tokens: sum(selective_log_softmax(logits, tokens, return_entropy=True))
    return selective_log_softmax


def fused(case: Case, both: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Numbers:
    """By a function that gives log-probabilities and entropies in float32, rounded as the others' results are."""

    def numbers(logits: Tensor, tokens: Tensor) -> Tensor:
        found, entropy = both(logits, tokens)
        return (found + entropy if case.mode == WITH_ENTROPY else found).to(logits.dtype)

    return numbers


def expected(logits: Tensor, tokens: Tensor, mode: str = "") -> Tensor:
    """The numbers in float64."""
    logs = torch.log_softmax(logits.double(), -1)
    found = logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return found - (logs.exp() * logs).sum(-1) if mode == WITH_ENTROPY else found


def expected_gradient(
    logits: Tensor, tokens: Tensor, upstream: Tensor, mode: str = ""
) -> tuple[Tensor, Tensor]:
    """(the gradient of the logits in float64, what the magnitudes of its terms amount to)."""
    grad, logs = upstream.double().unsqueeze(-1), torch.log_softmax(logits.double(), -1)
    p = logs.exp()
    d = (-p * grad).scatter_add_(-1, tokens.unsqueeze(-1), grad)
    if mode != WITH_ENTROPY:
        return d, d.abs()
    entropy = -(p * logs).sum(-1, keepdim=True)
    return d - grad * p * (logs + entropy), d.abs() + grad.abs() * p * (logs.abs() + entropy)


def forward(function: Numbers) -> Call:
    def call(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
        return function(logits, tokens)

    return call


def gradient(function: Numbers) -> Call:
    def call(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf, tokens), leaf, upstream)
        return found

    return call
