"""Softmax and log_softmax of scores, and their gradients, by our kernels: tensors to launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ...plan import Prologue
from ...runtime import launch
from ..common.arguments import served
from ..common.formulas import backward_formula, kept, shape_of_rows, sink_gradient
from ..common.spec import Spec
from ..common.state import batched

Tensor = torch.Tensor

# Made once: a dataclass takes longer to make than to find.
_prologue = lru_cache(Prologue)


def _work(
    math: str,
    inputs: Sequence[Tensor],
    operands: Sequence[Tensor],
    spec: Spec,
    prologue: Prologue,
    alpha: float,
    *results: Tensor,
) -> launch.Work:
    """A launch with the numbers that its prologue takes at run time; alpha: the number, if it is one."""
    result, *of_rows = results
    numbers: list[float | int] = []
    if prologue.scale == "number":
        numbers.append(spec.factor)
    if prologue.alpha == "number":
        numbers.append(alpha)
    query = None
    if prologue.causal:
        numbers.append(offset_within(spec.causal, result.shape))
        query = result.dim() - 2
    tensors = (*inputs, *[t.expand(result.shape) for t in operands], result)
    tensors += (*[t.expand(result.shape) for t in of_rows],)
    online = spec.online or math != "softmax"  # of all else there is one way
    return launch.Work(math, tensors, spec.dims, online, prologue, numbers, query, spec.invariant)


def offset_within(offset: int, shape: Sequence[int]) -> int:
    """What an offset of the diagonal means to a matrix: beyond it no more than at its edge."""
    return max(-shape[-2], min(offset, shape[-1]))


def forward(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    out: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The result, by a kernel, into `out` or a new tensor of the input's memory format.

    factors: of each row (size 1 in the reduced dimensions), instead of `spec.alpha`.
    """
    result = torch.empty_like(input, dtype=spec.dtype) if out is None else out
    if not input.numel():
        return result
    launch.run(*forward_work(input, bias, mask, scale, spec, result, factors))
    return result


def forward_with_sink(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    sink: Tensor,
    spec: Spec,
    out: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` of scores with a sink, and the logarithms of the rows' sinks in the softmax: float32, the reduced
    dimensions of size 1."""
    result = torch.empty_like(input, dtype=spec.dtype) if out is None else out
    log = numbers_of_rows(input, spec.dims)
    if input.numel():
        launch.run(*forward_work(input, bias, mask, scale, spec, result, factors, sink=sink, sink_log=log))
    return result, log


def numbers_of_rows(input: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A new tensor for one number a row: float32, the reduced dimensions of size 1; 0 for rows of nothing."""
    make = torch.empty if input.numel() else torch.zeros
    return make(shape_of_rows(input.shape, dims), dtype=torch.float32, device=input.device)


def forward_work(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    result: Tensor,
    factors: Tensor | None = None,
    math: str = "",
    sink: Tensor | None = None,
    sink_log: Tensor | None = None,
) -> launch.Work:
    """The launch of `forward`, or with a sink of `forward_with_sink`; math: of scores, if it is another."""
    prologue = _prologue(
        scale=_form(scale, spec.factor),
        bias=bias is not None,
        mask=mask is not None,
        causal=spec.causal is not None,
        alpha=_form(factors, spec.alpha),
        zero=spec.zero,
        sink=sink is not None,
    )
    operands = [t for t in (bias, mask) if t is not None]
    operands += [t.float() for t in (scale, factors) if t is not None]
    operands += [t for t in (sink,) if t is not None]
    results = [t for t in (result, sink_log) if t is not None]
    return _work(math or spec.math, (input,), operands, spec, prologue, spec.alpha, *results)


def _form(groups: Tensor | None, number: float) -> str:
    """Of a factor: a number of each row, or one of all, or none where that is 1."""
    return "groups" if groups is not None else "number" if number != 1 else ""


def backward(grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec) -> Tensor:
    """The gradient of the input; not itself differentiable."""
    if batched(grad, output) or not served(output, spec.dtype, scale, grad):
        return backward_formula(grad, output, mask, scale, spec)
    return _launched(grad, output, mask, scale, spec)


def backward_with_sink(
    grad: Tensor, output: Tensor, log: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """`backward`, and the gradients of the rows' sinks: float32, the reduced dimensions of size 1. log: see
    `forward_with_sink`."""
    if batched(grad, output) or not served(output, spec.dtype, scale, log, grad):
        to_input = backward_formula(grad, output, mask, scale, spec)
        return to_input, sink_gradient(grad, output, log, mask, spec)
    of_sink = numbers_of_rows(output, spec.dims)
    return _launched(grad, output, mask, scale, spec, log, of_sink), of_sink


def _launched(
    grad: Tensor,
    output: Tensor,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    *of_rows: Tensor,
) -> Tensor:
    """The gradient of the input by a kernel. of_rows: the sinks' logarithms, and a tensor for their gradients."""
    result = torch.empty_like(output, dtype=spec.dtype)
    if output.numel():
        if lie_apart(grad, output, spec.dims):
            grad = torch.empty_like(output, dtype=grad.dtype).copy_(grad)
        launch.run(*backward_work(grad, output, mask, scale, spec, result, *of_rows))
    return result


def backward_work(
    grad: Tensor,
    output: Tensor,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    result: Tensor,
    sink_log: Tensor | None = None,
    of_sink: Tensor | None = None,
) -> launch.Work:
    """The launch of `backward`, or with a sink of `backward_with_sink`."""
    factors = scale
    if mask is not None and not spec.zero:
        # Rows of NaN in which nothing counts have a gradient of zero. (Where they are zero, so is this by itself.)
        some = rows_left(mask, spec, output)
        factor = spec.factor if scale is None else scale.float()
        factors = some if scale is None and factor == 1 else some * factor
    prologue = _prologue(
        scale=_form(factors, spec.factor),
        mask=spec.log and mask is not None,  # of which it has no operand: the logarithm is -inf there
        causal=spec.causal is not None,
        alpha=_form(None, spec.alpha),
        sink=sink_log is not None,
    )
    operands = [t.float() for t in (factors, sink_log) if t is not None]
    results = [t for t in (result, of_sink) if t is not None]
    math = f"{spec.math}_backward"
    return _work(math, (grad, output), operands, spec, prologue, spec.inverse_alpha, *results)


def rows_left(mask: Tensor, spec: Spec, output: Tensor) -> Tensor:
    """Where something of a row counts, with the reduced dimensions of size 1; no more of it than the mask has."""
    keep = kept(output.shape, mask, spec.causal, output.device)
    keep = keep.view((1,) * (output.dim() - keep.dim()) + keep.shape)
    for d in spec.dims if output.dim() else ():
        keep = keep.any(d, keepdim=True)
    return keep


def lie_apart(grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Whether a gradient is better laid out like the result first.

    Autograd hands over expanded and transposed gradients, too (that of `sum` has strides of 0). Element by element
    they would be read, and all else with them, at a fraction of the memory's speed.
    """
    if grad.stride() == output.stride():
        return False
    apart = [
        d
        for d, (n, a, b) in enumerate(zip(grad.shape, grad.stride(), output.stride(), strict=True))
        if n > 1 and a != b
    ]
    # Rows of other strides are read as fast.
    nearest = min((output.stride(d) for d in range(output.dim()) if output.shape[d] > 1), default=1)
    return any(d in dims or output.stride(d) == nearest for d in apart)
