"""The yardsticks: copies that move what an operation must."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import masked, routers
from .cases import FEW_ROWS, Case

Call = Callable[..., Tensor | tuple[Tensor, ...]]


class CopyOfAsManyBytes:
    """A copy that reads and writes `traffic` bytes in all; for each input from a source of its own."""

    def __init__(self, traffic: int) -> None:
        self._words = max(traffic // 8, 1)
        self._sources: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        source = self._sources.get(x.data_ptr())
        if source is None:
            source = self._sources[x.data_ptr()] = torch.empty(self._words, device=x.device)
            if not torch.cuda.is_current_stream_capturing():  # what is captured would run in every replay
                source.normal_()
        return torch.empty_like(source).copy_(source)


class Copy:
    """The yardstick: the same bytes through torch's own copy, its add for two inputs, its sum for reads alone; where
    the result has another width, a copy of one width that moves as many; of `softmax_matmul` the product alone, for few
    rows a copy that moves as many bytes; of its gradients the scores'."""

    def softmax(self, case: Case) -> Call:
        if case.result != case.dtype:
            return CopyOfAsManyBytes(case.traffic)
        return lambda x, *others: torch.empty_like(x).copy_(x)

    def softmax_backward(self, case: Case) -> Call:
        return lambda dy, y: torch.add(y, dy, out=torch.empty_like(y))

    def masked_softmax(self, case: Case) -> Call:
        return masked.copied(case)

    def selective_log_softmax(self, case: Case) -> Call:
        return lambda logits, tokens, upstream: torch.sum(logits, -1)

    def selective_gradient(self, case: Case) -> Call:
        def call(logits: Tensor, tokens: Tensor, upstream: Tensor) -> Tensor:
            torch.sum(logits, -1)
            return torch.empty_like(logits).copy_(logits)

        return call

    def entropy(self, case: Case) -> Call:
        return lambda logits, target, upstream: torch.sum(logits, -1)

    def entropy_gradient(self, case: Case) -> Call:
        def call(logits: Tensor, target: Tensor, upstream: Tensor) -> Tensor:
            torch.sum(logits, -1)
            return torch.empty_like(logits).copy_(logits)

        return call

    def kl_div(self, case: Case) -> Call:
        def call(logits: Tensor, target: Tensor, upstream: Tensor) -> Tensor:
            torch.sum(target, -1)
            return torch.sum(logits, -1)

        return call

    def kl_div_gradient(self, case: Case) -> Call:
        def call(logits: Tensor, target: Tensor, upstream: Tensor) -> Tensor:
            torch.sum(target, -1)
            torch.sum(logits, -1)
            return torch.add(logits, target, out=torch.empty_like(logits))

        return call

    topk_log_softmax = entropy

    def topk_softmax(self, case: Case) -> Call:
        return lambda logits, upstream: torch.sum(logits, -1)

    def topk_gradient(self, case: Case) -> Call:
        def call(logits: Tensor, upstream: Tensor) -> Tensor:
            torch.sum(logits, -1)
            # A gradient of few elements needs no other.
            return torch.zeros_like(logits) if routers.renormalized(case) else logits.clone()

        return call

    log_softmax, log_softmax_backward, sampling = softmax, softmax_backward, softmax

    def cross_entropy(self, case: Case) -> Call:
        return lambda logits, tokens: torch.empty_like(logits).copy_(logits)

    def sum(self, case: Case) -> Call:
        return lambda x: torch.sum(x, case.dim)

    logsumexp = amax = sum

    def softmax_matmul(self, case: Case) -> Call:
        if case.shape[-2] > FEW_ROWS:
            return torch.matmul

        def call(s: Tensor, v: Tensor) -> Tensor:
            # A copy reads and writes: as many bytes as both have.
            half = v.flatten()[: (s.numel() + v.numel()) // 2]
            return torch.empty_like(half).copy_(half)

        return call

    def softmax_matmul_backward(self, case: Case) -> Call:
        return lambda s, v, grad: torch.empty_like(s).copy_(s)
