"""softmax(S) @ V and its gradients in torch's operations, for what our kernels do not serve."""

from __future__ import annotations

import math

import torch

from ..common.arguments import float_dtype
from ..common.formulas import compose, log_sum
from ..common.spec import Spec
from ..softmax.calls import serve as softmax
from .request import Request, Upstream

# Of scores, values, bias and sink.
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def log_sums(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: Spec,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows' log-sum-exps."""
    x = compose(scores, bias, mask, None, spec)
    return torch.logsumexp(x, -1) if sink is None else log_sum(x, sink, (x.dim() - 1,))


def composed(request: Request, wants_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, log-sum-exps or None) in two steps: the softmax, and a product by torch."""
    scores, values, mask, bias, sink, stats, spec = request
    if stats is not None:
        exponentials = torch.exp(compose(scores, bias, mask, None, spec) - stats.unsqueeze(-1))
        if spec.zero:
            exponentials = exponentials.masked_fill(stats.isneginf().unsqueeze(-1), 0.0)
        return exponentials.to(values.dtype) @ values, None
    shapes = [t.shape for t in (scores, mask, bias, sink) if t is not None]
    scores = scores.expand(torch.broadcast_shapes(*shapes))
    of_softmax = spec.changed(dims=(scores.dim() - 1,), dtype=float_dtype(scores, None))
    exponentials = softmax(scores, bias, mask, None, of_softmax, sink)
    lse = log_sums(scores, mask, bias, spec, sink) if wants_lse else None
    return exponentials.to(values.dtype) @ values, lse


def gradients(request: Request, upstream: Upstream) -> Gradients:
    """The gradients of scores, values, bias and sink, in torch operations: the softmax is formed again."""
    (scores, values, mask, bias, sink, _, spec), (result, lse, grad, lse_grad) = request, upstream
    x = compose(scores, bias, mask, None, spec)
    # Rows without a score that counts: exp(-inf - -inf) is not what they added.
    exponentials = torch.exp(x - lse.nan_to_num(nan=math.nan, neginf=0.0).unsqueeze(-1))
    delta = (grad.to(exponentials.dtype) * result).sum(-1, keepdim=True)
    if lse_grad is not None:
        delta = delta - lse_grad.unsqueeze(-1)
    inner = exponentials * (grad @ values.mT - delta)
    if mask is not None or spec.causal is not None:
        inner = inner.masked_fill(x == -math.inf, 0.0)
    to_values = (exponentials.to(grad.dtype).mT @ grad).sum_to_size(values.shape)
    to_scores = (inner * spec.factor).sum_to_size(scores.shape).to(scores.dtype)
    to_bias = None if bias is None else inner.sum_to_size(bias.shape).to(bias.dtype)
    to_sink = None
    if sink is not None:
        share = torch.exp(sink.to(delta.dtype) - lse.unsqueeze(-1))
        of_rows = torch.where(sink == -math.inf, 0.0, -share * delta)
        to_sink = of_rows.sum_to_size(sink.shape).to(sink.dtype)
    return to_scores, to_values, to_bias, to_sink
