"""What our kernels compute of scores, in torch's operations.

For CPU and float64 tensors, for gradients of gradients, and for what no kernel is planned for. They differentiate, and
hold wherever torch's operations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .spec import Spec

INF = float("inf")


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """What arithmetic is done in: float32, or float64 where a tensor has it."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def kept(shape: Sequence[int], mask: torch.Tensor | None, causal: int | None, device: object):
    """Where elements count, broadcastable to the shape; None if everywhere."""
    if causal is None:
        return mask
    rows, columns = (torch.arange(n, device=device) for n in shape[-2:])
    below = columns <= rows[:, None] + causal
    return below if mask is None else mask & below


def compose(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: torch.Tensor | None,
    spec: Spec,
) -> torch.Tensor:
    """The scores, in float32 (float64 where an operand has it)."""
    dtype = wide(input.dtype, spec.dtype, *(t.dtype for t in (bias, scale) if t is not None))
    keep = kept(input.shape, mask, spec.causal, input.device)
    x = input.to(dtype)
    if keep is not None:  # whatever lies there, NaN even, is nobody's factor
        x = torch.where(keep, x, 0.0)
    if scale is not None:
        x = x * scale.to(dtype)
    elif spec.factor != 1:
        x = x * spec.factor
    if bias is not None:
        x = x + bias.to(dtype)
    return x if keep is None else torch.where(keep, x, -INF)


def result_of(
    scores: torch.Tensor, masked: bool, spec: Spec, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """The softmax of composed scores by ATen."""
    function = torch.log_softmax if spec.log else torch.softmax
    if sink is not None:
        function = partial(_beside, function, _column(sink, scores, spec.dims))
    if spec.zero:
        empty = empty_rows(scores, spec.dims)
        y = over(function, scores.masked_fill(empty, 0.0), spec.dims)
        y = torch.where(empty, scores, y) if spec.log else y.masked_fill(empty, 0.0)
    else:
        y = over(function, scores, spec.dims)
    if spec.log and masked:  # a constant: what flows back to it reaches nothing
        y = y.masked_fill(y == -INF, -INF)
    if spec.alpha != 1:
        y = y * spec.alpha
    return y.to(spec.dtype)


def _beside(function, column: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor:
    """What `function` makes of scores beside one column more, and not of that."""
    if not scores.dim():
        return _beside(function, column, scores.unsqueeze(0), 0).squeeze(0)
    # A copy, so that the column is not kept.
    return function(torch.cat([scores, column], dim), dim).narrow(dim, 0, scores.shape[dim]).clone()


def _column(sink: torch.Tensor, scores: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sinks of scores as one column more of what `over` hands to its function."""
    if not scores.dim():
        return sink.to(scores.dtype).reshape(1)
    whole = sink.to(scores.dtype).expand(shape_of_rows(scores.shape, dims))
    return whole if len(dims) == 1 else _flat(whole, dims)


def _flat(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A tensor with the reduced dimensions last, as one."""
    return tensor.movedim(tuple(dims), _last(dims)).flatten(-len(dims))


def _last(dims: Sequence[int]) -> list[int]:
    """As many dimensions, the last ones."""
    return [-i - 1 for i in range(len(dims))][::-1]


def log_sum(scores: torch.Tensor, sink: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The logsumexp of scores beside sinks, without the reduced dimensions."""
    if not scores.dim():
        return log_sum(scores.unsqueeze(0), sink.reshape(1), dims)
    column = sink.to(scores.dtype).expand(shape_of_rows(scores.shape, dims))
    return torch.logsumexp(torch.cat([_flat(scores, dims), _flat(column, dims)], -1), -1)


def sink_log(scores: torch.Tensor, sink: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The logarithms of sinks in the softmax beside scores, with the reduced dimensions of size 1; of one of -inf
    -inf, even where there is nothing else."""
    sink = sink.to(scores.dtype)
    return torch.where(sink == -INF, sink, sink - torch.logaddexp(sink, torch.logsumexp(scores, dims, True)))


def sink_gradient(
    grad: torch.Tensor, output: torch.Tensor, log: torch.Tensor, mask: torch.Tensor | None, spec: Spec
) -> torch.Tensor:
    """The gradients of the rows' sinks, with the reduced dimensions of size 1. log: see `sink_log`."""
    w = wide(grad.dtype, output.dtype)
    g, y = grad.to(w), output.to(w)
    if not spec.log:
        g = g * y
    elif mask is not None or spec.causal is not None:
        g = torch.where(y == -INF, 0.0, g)
    return torch.where(log == -INF, 0.0, -log.exp() * g.sum(spec.dims, keepdim=True))


def shape_of_rows(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The shape of one number a row: the reduced dimensions of size 1."""
    return [1 if d in dims else n for d, n in enumerate(shape)]


def empty_rows(scores: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Where nothing of a row is left, with the reduced dimensions of size 1."""
    empty = scores == -INF
    for d in dims:
        empty = empty.all(d, keepdim=True)
    return empty


def over(function, input: torch.Tensor, dims: Sequence[int], *arguments: object) -> torch.Tensor:
    """`function(tensor, dim, ...)` of ATen over any dimensions at once."""
    if len(dims) == 1:
        return function(input, dims[0], *arguments)
    found = function(_flat(input, dims), -1, *arguments)
    return found.unflatten(-1, [input.shape[d] for d in dims]).movedim(_last(dims), tuple(dims))


def formula(input, bias, mask, scale, spec: Spec, sink: torch.Tensor | None = None) -> torch.Tensor:
    """The whole forward in torch operations."""
    if spec.plain and bias is None and mask is None and scale is None and sink is None:
        return over(torch.log_softmax if spec.log else torch.softmax, input, spec.dims, spec.dtype)
    scores = compose(input, bias, mask, scale, spec)
    if sink is not None:
        scores = scores.to(wide(scores.dtype, sink.dtype))
    return result_of(scores, mask is not None or spec.causal is not None, spec, sink)


def backward_formula(
    grad: torch.Tensor,
    output: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor | None,
    spec: Spec,
) -> torch.Tensor:
    """The gradient of the input in torch operations."""
    w = wide(grad.dtype, output.dtype)
    g, y = grad.to(w), output.to(w)
    if spec.log:
        if mask is not None or spec.causal is not None:
            g = torch.where(y == -INF, 0.0, g)
        d = g - y.exp() * g.sum(spec.dims, keepdim=True)
    else:
        dot = (g * y).sum(spec.dims, keepdim=True)
        d = y * (g - (dot if spec.alpha == 1 else dot * spec.inverse_alpha))
    d = finished(d, mask, spec)
    return (d if scale is None else d * scale).to(spec.dtype)


def finished(d: torch.Tensor, mask: torch.Tensor | None, spec: Spec) -> torch.Tensor:
    """A gradient of the scores times the factor, and zero where nothing counts."""
    keep = kept(d.shape, mask, spec.causal, d.device)
    if keep is not None:
        d = torch.where(keep, d, 0.0)
    return d if spec.factor == 1 else d * spec.factor


def summed_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The sum over what was broadcast; 16 bits are added in float32."""
    return tensor if tuple(tensor.shape) == tuple(shape) else tensor.sum_to_size(tuple(shape))
