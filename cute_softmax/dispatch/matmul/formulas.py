"""softmax(S) @ V and its gradients in torch's operations, for what our kernels do not serve."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..common import arguments
from ..common.formulas import compose
from ..common.spec import Spec
from ..common.state import recorded
from ..softmax.calls import serve as softmax

HALVES = (torch.bfloat16, torch.float16)


class Request(NamedTuple):
    """A checked call: ``softmax(scale * scores + bias, -1) @ values``.

    causal: column j of row i counts if j <= i + causal, None: all do; zero: what a row without anything that counts
    gives, 0 instead of NaN. stats: the rows' log-sum-exps, if they are known.
    """

    scores: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    causal: int | None
    zero: bool
    stats: torch.Tensor | None = None

    @property
    def batch(self) -> torch.Size:
        """The batch dimensions of the result."""
        batch, others = self.scores.shape[:-2], self.values.shape[:-2]
        return batch if batch == others else torch.broadcast_shapes(batch, others)

    @property
    def on_kernel(self) -> bool:
        """Whether our kernels serve it; all else is composed."""
        return arguments.on_gpu(self.values) and self.values.dtype in HALVES

    @property
    def recorded(self) -> bool:
        """Whether autograd records the call."""
        return recorded(self.scores, self.values, self.bias)


def modified(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    """scale * scores + bias, -inf where it does not count, in float32 or more."""
    spec = Spec((scores.dim() - 1,), scores.dtype, factor=scale, causal=causal)
    return compose(scores, bias, mask, None, spec)


def formula(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    """The rows' log-sum-exps in torch's operations."""
    return torch.logsumexp(modified(scores, mask, bias, scale, causal), -1)


def composed(request: Request, wants_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, log-sum-exps or None) in two steps: the softmax, and a product by torch."""
    scores, values, mask, bias, scale, causal, zero, stats = request
    if stats is not None:
        exponentials = torch.exp(modified(scores, mask, bias, scale, causal) - stats.unsqueeze(-1))
        if zero:
            exponentials = exponentials.masked_fill(stats.isneginf().unsqueeze(-1), 0.0)
        return exponentials.to(values.dtype) @ values, None
    shapes = [t.shape for t in (scores, mask, bias) if t is not None]
    scores = scores.expand(torch.broadcast_shapes(*shapes))
    dims, dtype = (scores.dim() - 1,), arguments.float_dtype(scores, None)
    spec = Spec(dims, dtype, factor=scale, causal=causal, zero=zero)
    exponentials = softmax(scores, bias, mask, None, spec)
    lse = formula(scores, mask, bias, scale, causal) if wants_lse else None
    return exponentials.to(values.dtype) @ values, lse


def gradients(
    request: Request,
    result: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of scores, values and bias, in torch operations: the softmax is formed again."""
    scores, values, mask, bias, scale, causal, *_ = request
    x = modified(scores, mask, bias, scale, causal)
    # Rows without a score that counts: exp(-inf - -inf) is not what they added.
    exponentials = torch.exp(x - lse.nan_to_num(nan=math.nan, neginf=0.0).unsqueeze(-1))
    delta = (grad.to(exponentials.dtype) * result).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    inner = exponentials * (grad @ values.mT - delta)
    if mask is not None or causal is not None:
        inner = inner.masked_fill(x == -math.inf, 0.0)
    to_values = (exponentials.to(grad.dtype).mT @ grad).sum_to_size(values.shape)
    to_scores = (inner * scale).sum_to_size(scores.shape).to(scores.dtype)
    return to_scores, to_values, None if bias is None else inner.sum_to_size(bias.shape).to(bias.dtype)
