"""The largest of a softmax as an operation: inputs, float64 references, and the callables of the providers.

"topk_softmax" is the forward, which returns the k probabilities; "topk_gradient" forward and backward, which returns
the gradient of the logits. Inputs: logits, and what comes in from above (k numbers a row). The logits of a row are
different numbers, so that all agree which are chosen; in which order is seen in the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import RENORMALIZED, Case

Call = Callable[[Tensor, Tensor], Tensor]
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]

# Bits of positive bfloat16 from 1/8 to 2: exact in any type, and in as many bits of a float32 as QuACK looks at.
_FIRST, _COUNT = 0x3E00, 512


def renormalized(case: Case) -> bool:
    """Whether the probabilities are those of the chosen among themselves."""
    return case.mode.endswith(RENORMALIZED)


def logits_of(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of different numbers from -2 to 2, each in an order of its own."""
    columns = case.shape[-1]
    half = -(-columns // 2)
    if half > _COUNT:
        raise ValueError(f"{columns} experts: there are {2 * _COUNT} different logits")
    bits = torch.arange(half, device=device) * (_COUNT // half) + _FIRST
    numbers = bits.to(torch.int16).view(torch.bfloat16)
    numbers = torch.cat([numbers, -numbers])[:columns].to(dtype)
    generator = torch.Generator(device=device).manual_seed(1)
    return numbers[torch.rand(case.shape, device=device, generator=generator).argsort(-1)]


def expected(case: Case, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities in float64, indices)."""
    wide = logits.double()
    found, indices = wide.topk(case.k)
    if renormalized(case):
        return torch.softmax(found, -1), indices
    return torch.softmax(wide, -1).gather(-1, indices), indices


def expected_gradient(case: Case, logits: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of the logits in float64, what the magnitudes of its terms amount to)."""
    values, indices = expected(case, logits)
    few = renormalized(case)
    p, index = (
        (values, torch.arange(case.k, device=logits.device))
        if few
        else (torch.softmax(logits.double(), -1), indices)
    )
    g = torch.zeros_like(p).scatter_(-1, index.expand_as(indices), upstream.double())
    parts = p * (g - (p * g).sum(-1, True)), p * (g.abs() + (p * g).abs().sum(-1, True))
    if not few:
        return parts
    return tuple(torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, indices, part) for part in parts)


def torchs(case: Case) -> Choose:
    """As torch's users write it; renormalized, a softmax of few numbers is the least work."""
    if renormalized(case):

        def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
            found, indices = logits.topk(case.k)
            return torch.softmax(found, -1), indices

        return choose
    return lambda logits: torch.softmax(logits, -1).topk(case.k)


class Router:
    """What a provider has that gives a `Choose` for a case."""

    def router(self, case: Case) -> Choose:
        raise NotImplementedError

    def topk_softmax(self, case: Case) -> Call:
        choose = self.router(case)
        return lambda logits, upstream: choose(logits)[0]

    def topk_gradient(self, case: Case) -> Call:
        choose = self.router(case)

        def call(logits: Tensor, upstream: Tensor) -> Tensor:
            leaf = logits.detach().requires_grad_()
            (found,) = torch.autograd.grad(choose(leaf)[0], leaf, upstream)
            return found

        return call
