"""Log-probabilities of chosen tokens as an operation: inputs, float64 references, and the callables of the providers.

"selective_log_softmax" is the forward; "selective_gradient" forward and backward, which returns the gradient of the
logits. Inputs: logits, one token of each row, and what comes in from above (one number per row).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import Case

Call = Callable[..., Tensor]


def tokens_of(case: Case, device: torch.device) -> Tensor:
    """A token of each row."""
    generator = torch.Generator(device=device).manual_seed(4)
    return torch.randint(case.shape[-1], case.shape[:-1], device=device, generator=generator)


def torchs(logits: Tensor, tokens: Tensor) -> Tensor:
    """As torch's users write it."""
    return torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def expected(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities in float64."""
    wide = logits.double()
    return wide.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(wide, -1)


def expected_gradient(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of the logits in float64."""
    grad = upstream.double().unsqueeze(-1)
    return (-torch.softmax(logits.double(), -1) * grad).scatter_add_(-1, tokens.unsqueeze(-1), grad)


def forward(function: Callable[[Tensor, Tensor], Tensor]) -> Call:
    def call(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
        return function(logits, tokens)

    return call


def gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Call:
    def call(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf, tokens), leaf, upstream)
        return found

    return call
