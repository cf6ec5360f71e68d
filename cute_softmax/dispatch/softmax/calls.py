"""Softmax and log_softmax of scores in every state of torch: autograd, transforms, operators, and which of them it is.

Eager calls, functorch's transforms and forward-mode AD go through the autograd functions `Forward` and `Gradient`;
whatever must see an operator (torch.compile, export, dispatch modes, subclasses) through the torch.library operators.
Both end in `softmax_kernels`, which launches. Calls that repeat skip all of this: see `forms`.
"""

from __future__ import annotations

import torch

from ..common.arguments import DTYPES, check_memory, check_out, float_dtype, out_dtype, served
from ..common.formulas import INF, backward_formula, finished, formula, kept, summed_to, wide
from ..common.spec import Scores, Spec
from ..common.state import Ways, jvp_rule, of_function, recorded, transformed, unseen
from . import kernels
from .kernels import backward

Tensor = torch.Tensor


def input_gradients(gradient, grad: Tensor, saved: tuple, shapes: tuple, needs: tuple, spec: Spec) -> tuple:
    """Gradients of (input, bias, scale), None where not needed.

    gradient(grad, output, mask, scale or None, spec, dtype): of the scores times the scale. saved: (output, mask,
    scale, input or None); shapes: of (bias, scale) or None, dtypes beside them.
    """
    output, mask, scale, input = saved
    (input_dtype, bias_shape, bias_dtype) = shapes
    to_input, to_bias, to_scale = needs
    if not (to_bias or to_scale):
        return gradient(grad, output, mask, scale, spec, input_dtype), None, None
    d = gradient(grad, output, mask, None, spec.changed(scale=1.0), input_dtype)
    of_input = of_bias = of_scale = None
    if to_input:
        of_input = d if scale is None and spec.scale == 1 else (d * (spec.scale if scale is None else scale))
        of_input = of_input.to(input_dtype)
    if to_bias:
        of_bias = summed_to(d, bias_shape).to(bias_dtype)
    if to_scale:
        w = wide(d.dtype, scale.dtype)
        # An x that is infinite or NaN has no share, being masked or of probability 0 (or else d is NaN itself).
        x = input.to(w)
        product = d.to(w) * torch.where(x.isfinite(), x, 0.0)
        of_scale = summed_to(product, scale.shape).to(scale.dtype)
    return of_input, of_bias, of_scale


def second_gradients(gradient, upstream: Tensor, grad: Tensor, output: Tensor, mask, spec: Spec) -> tuple:
    """The gradients of `backward`'s result with respect to (grad, output): torch's operations, and once more the
    kernel."""
    w = wide(upstream.dtype, grad.dtype, output.dtype)
    u, g, y = finished(upstream.to(w), mask, spec), grad.to(w), output.to(w)
    if spec.log:
        p = y.exp()
        if mask is not None or spec.causal is not None:
            u, g = (torch.where(y == -INF, 0.0, t) for t in (u, g))
        along = u - (u * p).sum(spec.dims, keepdim=True)
        if mask is not None or spec.causal is not None:
            along = torch.where(y == -INF, 0.0, along)
        return along.to(grad.dtype), (-u * p * g.sum(spec.dims, keepdim=True)).to(output.dtype)
    inverse = spec.inverse_alpha
    to_output = u * (g - inverse * (g * y).sum(spec.dims, keepdim=True))
    to_output = to_output - inverse * g * (u * y).sum(spec.dims, keepdim=True)
    # The map from grad is symmetric.
    return gradient(upstream, output, mask, None, spec, grad.dtype), to_output.to(output.dtype)


class Forward(torch.autograd.Function):
    """(input, bias, mask, scale, spec) -> result; keeps the result, the mask, and what a tensor scale needs."""

    @staticmethod
    def forward(input, bias, mask, scale, spec):
        if served(input, spec.dtype, bias, scale):
            return kernels.forward(input, bias, mask, scale, spec)
        return formula(input, bias, mask, scale, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, bias, mask, scale, spec = inputs
        of_scale = scale is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(output, mask, scale, input if of_scale else None)
        if transformed():
            ctx.save_for_forward(output, mask, scale, input)
        ctx.spec = spec
        ctx.shapes = (input.dtype, None, None) if bias is None else (input.dtype, bias.shape, bias.dtype)

    @staticmethod
    def backward(ctx, grad):
        needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3))
        gradient = differentiable if torch.is_grad_enabled() else backward
        d = input_gradients(gradient, grad, ctx.saved_tensors, ctx.shapes, needs, ctx.spec)
        return d[0], d[1], None, d[2], None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, input_tangent, bias_tangent, _, scale_tangent, *__):
        output, mask, scale, input = saved
        spec = ctx.spec
        dtypes = [t.dtype for t in (input_tangent, bias_tangent, scale_tangent) if t is not None]
        t = torch.zeros_like(output, dtype=wide(*dtypes))
        if input_tangent is not None:
            t = t + input_tangent * (spec.scale if scale is None else scale)
        if scale_tangent is not None:
            t = t + scale_tangent * input
        if bias_tangent is not None:
            t = t + bias_tangent
        keep = kept(output.shape, mask, spec.causal, output.device)
        if keep is not None:
            t = torch.where(keep, t, 0.0)
        spec = spec.changed(scale=1.0)
        if spec.log:
            y = output.to(t.dtype)
            t = t - (t * y.exp()).sum(spec.dims, keepdim=True)
            return (t if keep is None else torch.where(y == -INF, 0.0, t)).to(output.dtype)
        return Gradient.apply(t.to(output.dtype), output, mask, spec, output.dtype)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return over_batch(Forward.apply, info, in_dims, arguments, 1)


class Gradient(torch.autograd.Function):
    """(grad, output, mask, spec, dtype) -> the gradient of the input, differentiable again."""

    @staticmethod
    def forward(grad, output, mask, spec, dtype):
        return backward(grad, output, mask, None, spec, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, result, mask, ctx.spec, ctx.dtype = inputs
        ctx.save_for_backward(grad, result, mask)
        if transformed():
            ctx.save_for_forward(grad, result, mask)

    @staticmethod
    def backward(ctx, upstream):
        grad, output, mask = ctx.saved_tensors
        gradient = differentiable if torch.is_grad_enabled() else backward
        return *second_gradients(gradient, upstream, grad, output, mask, ctx.spec), None, None, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, grad_tangent, output_tangent, *_):
        grad, output, mask = saved
        spec = ctx.spec
        w = wide(grad.dtype, output.dtype)
        g, y, d = grad.to(w), output.to(w), torch.zeros_like(output, dtype=w)
        if output_tangent is not None:
            t = output_tangent.to(w)
            if spec.log:
                if mask is not None or spec.causal is not None:
                    g = torch.where(y == -INF, 0.0, g)
                d = -t * y.exp() * g.sum(spec.dims, keepdim=True)
            else:
                inverse = spec.inverse_alpha
                d = t * (g - inverse * (g * y).sum(spec.dims, keepdim=True))
                d = d - inverse * y * (g * t).sum(spec.dims, keepdim=True)
            d = finished(d, mask, spec)
        if grad_tangent is not None:
            d = d + Gradient.apply(grad_tangent, output, mask, spec, w)
        return d.to(ctx.dtype)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return over_batch(Gradient.apply, info, in_dims, arguments, 2)


def differentiable(
    grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec, dtype: torch.dtype
) -> Tensor:
    """`backward` where a gradient of the gradient may be wanted."""
    if scale is None:
        return Gradient.apply(grad, output, mask, spec, dtype)
    return (Gradient.apply(grad, output, mask, spec, wide(dtype)) * scale).to(dtype)


def over_batch(function, info, in_dims: tuple, arguments: tuple, full: int) -> tuple[Tensor, int]:
    """A vmap rule: `function` of arguments with the batch in front, and where its result has it.

    The first `full` tensors have all dimensions; the others broadcast to them. Dimensions of a spec count from the
    front, so they move by one.
    """
    rank = arguments[0].dim() - (in_dims[0] is not None)
    made = []
    for i, (a, d) in enumerate(zip(arguments, in_dims, strict=True)):
        if isinstance(a, Spec):
            a = a.changed(dims=tuple(d + 1 for d in a.dims))
        elif isinstance(a, Tensor):
            if d is not None:
                a = a.movedim(d, 0)
                a = a[(slice(None), *[None] * (rank + 1 - a.dim()))]
            elif i < full:
                a = a.expand(info.batch_size, *a.shape)
            if rank == 0:  # a row of one element
                a = a.unsqueeze(-1)
        made.append(a)
    result = function(*made)
    return (result.squeeze(-1) if rank == 0 else result), 0


# -- Operators ---------------------------------------------------------------------------------------------------------
#
# What is not given stands for a plain softmax: scores that are the input itself.


@torch.library.custom_op(
    "cute_softmax::softmax",
    mutates_args=(),
    schema="(Tensor input, SymInt[] dim, ScalarType dtype, bool online=True, Tensor? bias=None, Tensor? mask=None, "
    "Tensor? scale=None, bool log=False, float factor=1.0, SymInt? causal=None, float alpha=1.0, bool zero=False) "
    "-> Tensor",
)
def softmax_operator(
    input, dim, dtype, online=True, bias=None, mask=None, scale=None, log=False, factor=1.0, causal=None, alpha=1.0,
    zero=False,
):  # fmt: skip
    spec = Spec(tuple(dim), dtype, log, factor, causal, alpha, zero, online)
    if served(input, dtype, bias, scale):
        return kernels.forward(input, bias, mask, scale, spec)
    # A new tensor in the strides that the fake promises, whatever ATen's came out as.
    return torch.empty_like(input, dtype=dtype).copy_(formula(input, bias, mask, scale, spec))


@torch.library.custom_op(
    "cute_softmax::softmax_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor output, SymInt[] dim, ScalarType input_dtype, Tensor? mask=None, Tensor? scale=None, "
    "bool log=False, float factor=1.0, SymInt? causal=None, float alpha=1.0, bool zero=False) -> Tensor",
)
def gradient_operator(
    grad,
    output,
    dim,
    input_dtype,
    mask=None,
    scale=None,
    log=False,
    factor=1.0,
    causal=None,
    alpha=1.0,
    zero=False,
):
    spec = Spec(tuple(dim), output.dtype, log, factor, causal, alpha, zero)
    result = backward(grad, output, mask, scale, spec, input_dtype)
    expected = torch.empty_like(output, dtype=input_dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)


@softmax_operator.register_fake
def _(input, dim, dtype, *rest):
    return torch.empty_like(input, dtype=dtype)


@gradient_operator.register_fake
def _(grad, output, dim, input_dtype, *rest):
    return torch.empty_like(output, dtype=input_dtype)


def by_operator(
    input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """The operator's result for a spec."""
    return softmax_operator(
        input, list(spec.dims), spec.dtype, spec.online, bias, mask, scale, spec.log, spec.scale, spec.causal,
        spec.alpha, spec.zero,
    )  # fmt: skip


def gradient_by_operator(grad, output, mask, scale, spec: Spec, dtype) -> Tensor:
    """The gradient of the input by the operator; as `softmax_kernels.backward`."""
    return gradient_operator(
        grad,
        output,
        list(spec.dims),
        dtype,
        mask,
        scale,
        spec.log,
        spec.scale,
        spec.causal,
        spec.alpha,
        spec.zero,
    )


def _needed(ctx, *places: int) -> tuple[bool, ...]:
    """Whether gradients of these arguments are wanted; of those that a caller left out none is."""
    needs = ctx.needs_input_grad
    return tuple(i < len(needs) and needs[i] for i in places)


def _save(ctx, inputs, output):
    input, dim, dtype, online, bias, mask, scale, *numbers = inputs
    of_scale = scale is not None and ctx.needs_input_grad[6]
    ctx.save_for_backward(output, mask, scale, input if of_scale else None)
    ctx.spec = Spec(tuple(dim), dtype, *numbers, online)
    ctx.shapes = (input.dtype, None, None) if bias is None else (input.dtype, bias.shape, bias.dtype)


def _gradients(ctx, grad):
    needs = _needed(ctx, 0, 4, 6)
    d = input_gradients(gradient_by_operator, grad, ctx.saved_tensors, ctx.shapes, needs, ctx.spec)
    return d[0], None, None, None, d[1], None, d[2], *[None] * 5


def _save_backward(ctx, inputs, output):
    grad, result, dim, _, mask, scale, *numbers = inputs
    ctx.save_for_backward(grad, result, mask, scale)
    ctx.spec = Spec(tuple(dim), result.dtype, *numbers)


def _second_gradients(ctx, upstream):
    grad, output, mask, scale = ctx.saved_tensors
    to_scale = None
    if scale is not None:
        w = wide(upstream.dtype, scale.dtype)
        if ctx.needs_input_grad[5]:
            plain = gradient_by_operator(grad, output, mask, None, ctx.spec, w)
            to_scale = summed_to(upstream.to(w) * plain, scale.shape).to(scale.dtype)
        upstream = upstream.to(w) * scale
    d = second_gradients(gradient_by_operator, upstream, grad, output, mask, ctx.spec)
    return *d, None, None, None, to_scale, *[None] * 5


softmax_operator.register_autograd(_gradients, setup_context=_save)
gradient_operator.register_autograd(_second_gradients, setup_context=_save_backward)


@softmax_operator.register_vmap
def _(info, in_dims, input, dim, dtype, online=True, bias=None, mask=None, scale=None, *numbers):
    def function(input, bias, mask, scale):
        return softmax_operator(input, [d + 1 for d in dim], dtype, online, bias, mask, scale, *numbers)

    places = [in_dims[i] if i < len(in_dims) else None for i in (0, 4, 5, 6)]
    return over_batch(function, info, places, (input, bias, mask, scale), 1)


@gradient_operator.register_vmap
def _(info, in_dims, grad, output, dim, input_dtype, mask=None, scale=None, *numbers):
    def function(grad, output, mask, scale):
        return gradient_operator(grad, output, [d + 1 for d in dim], input_dtype, mask, scale, *numbers)

    places = [in_dims[i] if i < len(in_dims) else None for i in (0, 1, 4, 5)]
    return over_batch(function, info, places, (grad, output, mask, scale), 2)


# -- Calls -------------------------------------------------------------------------------------------------------------

_SOFTMAX = of_function(Forward, kernels.forward, by_operator)


def _gradient(grad, output, mask, scale, spec, dtype):
    return Gradient.apply(grad, output, mask, spec, dtype)


_GRADIENT = Ways(backward, _gradient, _gradient, gradient_by_operator)


def softmax(
    input: Tensor,
    scores: Scores,
    dims: tuple[int, ...],
    dtype: torch.dtype | None,
    *,
    log: bool = False,
    out: Tensor | None = None,
    online: bool = True,
) -> Tensor:
    """The softmax of checked scores or its logarithm, on any device and in any state of torch."""
    result = float_dtype(input, dtype, "log_softmax" if log else "softmax")
    source = input
    if not input.dtype.is_floating_point:
        input = input.to(result)
    if out is not None:
        return into(out, input, scores, scores.spec(dims, out_dtype(out, source, dtype, result), log, online))
    spec = scores.spec(dims, result, log, online)
    arguments = input, *scores.operands, spec
    if not served(input, result, scores.bias, scores.scale):
        return formula(*arguments)
    return _SOFTMAX.serve(arguments, (input, *scores.operands), (input, scores.bias, scores.scale))


def gradient(grad: Tensor, output: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """The gradient of a softmax or its logarithm from its result, itself differentiable."""
    if not (served(output, dtype) and grad.dtype in DTYPES):
        return backward_formula(grad, output, None, spec, dtype)
    return _GRADIENT.serve((grad, output, None, None, spec, dtype), (grad, output), (grad, output))


def into(out: Tensor, input: Tensor, scores: Scores, spec: Spec) -> Tensor:
    """`softmax` into a tensor of the caller's."""
    given = [t for t in scores.operands if t is not None]
    check_out(out, input.shape, spec.dtype, input.device, (input, *given))
    arguments = input, *scores.operands, spec
    if not served(input, spec.dtype, scores.bias, scores.scale):
        return out.copy_(formula(*arguments))
    if not unseen(input, out, *given):
        return out.copy_(_SOFTMAX.serve(arguments, (input, out, *given), ()))
    check_memory(out, input, *given)
    return kernels.forward(*arguments, out)


class _InPlace(torch.autograd.Function):
    """`Forward` into its own input."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, spec):
        if served(input, spec.dtype, bias, scale):
            kernels.forward(input, bias, mask, scale, spec, input)
        else:
            input.copy_(formula(input, bias, mask, scale, spec))
        ctx.mark_dirty(input)
        Forward.setup_context(ctx, (input, bias, mask, scale, spec), input)
        return input

    backward = Forward.backward


def softmax_in_place(input: Tensor, scores: Scores, dims: tuple[int, ...]) -> Tensor:
    """`softmax` that overwrites its input. Raises ValueError for a scale whose gradient is wanted."""
    spec = scores.spec(dims, float_dtype(input, input.dtype))
    if scores.scale is not None and recorded(scores.scale):
        raise ValueError(
            "softmax_ overwrites the input, which the gradient of scale needs: use softmax, or a scale that "
            "does not require a gradient"
        )
    if not unseen(input, *scores.operands):
        return input.copy_(softmax(input, scores, dims, input.dtype))
    if recorded(input, scores.bias):
        return _InPlace.apply(input, *scores.operands, spec)
    return into(input, input, scores, spec)
