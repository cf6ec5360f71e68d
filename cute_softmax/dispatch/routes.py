"""The way of a call on scores: which of kernel, formula, operator and autograd function serves it.

`functional` and `family` check what is theirs and come here; `rules` does the work.
"""

from __future__ import annotations

import torch

from . import ops, rules
from .arguments import check_memory, check_out, float_dtype, out_dtype
from .scores import Scores, Spec, formula

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_apply = ops.apply_of(rules.Forward)


def watched(*tensors: torch.Tensor | None) -> bool:
    """Whether a dispatch mode or a subclass of tensors must see an operator."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        t is not None and type(t) not in _TENSORS for t in tensors
    )


def unseen(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing of torch but autograd looks at an eager call on these, so that it may go straight to a kernel."""
    return not (ops.transformed() or watched(*tensors))


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records a call on these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def softmax(
    input: torch.Tensor,
    scores: Scores,
    dims: tuple[int, ...],
    dtype: torch.dtype | None,
    *,
    log: bool = False,
    out: torch.Tensor | None = None,
    online: bool = True,
) -> torch.Tensor:
    """The softmax of checked scores or its logarithm, on any device and in any state of torch."""
    name = "log_softmax" if log else "softmax"
    result = float_dtype(input, dtype, name)
    source = input
    if not input.dtype.is_floating_point:
        input = input.to(result)
    if out is not None:
        return _into(
            out, input, scores, scores.spec(dims, out_dtype(out, source, dtype, result), log, online)
        )
    spec = scores.spec(dims, result, log, online)
    if not rules.served(input, result, scores.bias, scores.scale):
        return formula(input, *scores.operands, spec)
    if torch.compiler.is_compiling():
        return rules.operator(input, *scores.operands, spec)
    if ops.transformed():
        return rules.Forward.apply(input, *scores.operands, spec)
    if watched(input, *scores.operands):
        return rules.operator(input, *scores.operands, spec)
    if recorded(input, scores.bias, scores.scale):
        return _apply(input, *scores.operands, spec)
    return rules.forward(input, *scores.operands, spec)


def gradient(grad: torch.Tensor, output: torch.Tensor, spec: Spec, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a softmax or its logarithm from its result, itself differentiable."""
    if not (rules.served(output, dtype) and grad.dtype in rules.DTYPES):
        return rules.backward_formula(grad, output, None, spec, dtype)
    if torch.compiler.is_compiling():
        return rules.operator_gradient(grad, output, None, None, spec, dtype)
    if ops.transformed():
        return rules.Gradient.apply(grad, output, None, spec, dtype)
    if watched(grad, output):
        return rules.operator_gradient(grad, output, None, None, spec, dtype)
    if recorded(grad, output):
        return rules.Gradient.apply(grad, output, None, spec, dtype)
    return rules.backward(grad, output, None, None, spec, dtype)


def _into(out: torch.Tensor, input: torch.Tensor, scores: Scores, spec: Spec) -> torch.Tensor:
    given = [t for t in scores.operands if t is not None]
    check_out(out, input.shape, spec.dtype, input.device, (input, *given))
    if not rules.served(input, spec.dtype, scores.bias, scores.scale):
        return out.copy_(formula(input, *scores.operands, spec))
    if torch.compiler.is_compiling() or ops.transformed() or watched(input, out, *given):
        return out.copy_(rules.operator(input, *scores.operands, spec))
    check_memory(out, input, *given)
    return rules.forward(input, *scores.operands, spec, out)


class _InPlace(torch.autograd.Function):
    """`rules.Forward` into its own input."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, spec):
        if rules.served(input, spec.dtype, bias, scale):
            rules.forward(input, bias, mask, scale, spec, input)
        else:
            input.copy_(formula(input, bias, mask, scale, spec))
        ctx.mark_dirty(input)
        rules.Forward.setup_context(ctx, (input, bias, mask, scale, spec), input)
        return input

    backward = rules.Forward.backward


def softmax_in_place(input: torch.Tensor, scores: Scores, dims: tuple[int, ...]) -> torch.Tensor:
    """`softmax` that overwrites its input. Raises ValueError for a scale whose gradient is wanted."""
    spec = scores.spec(dims, float_dtype(input, input.dtype))
    if scores.scale is not None and recorded(scores.scale):
        raise ValueError(
            "softmax_ overwrites the input, which the gradient of scale needs: use softmax, or a scale that "
            "does not require a gradient"
        )
    if torch.compiler.is_compiling() or ops.transformed() or watched(input, *scores.operands):
        return input.copy_(softmax(input, scores, dims, input.dtype))
    if recorded(input, scores.bias):
        return _InPlace.apply(input, *scores.operands, spec)
    return _into(input, input, scores, spec)
