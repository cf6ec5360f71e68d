"""Softmax and log_softmax of scores in every state of torch: their gradients, and calls with and without `out`.

`Softmax` and its gradient are each an autograd function and an operator (`common/operators.py`). Both end in `kernels`,
which launches. Calls that repeat skip all of this: see `forms`.
"""

from __future__ import annotations

import torch

from ..common.arguments import DTYPES, check_memory, check_out, served
from ..common.formulas import INF, backward_formula, finished, formula, kept, summed_to, wide
from ..common.operators import Function, needed, operator_of, ways_of
from ..common.spec import Operands, Spec
from ..common.state import Ways, jvp_rule, recorded, transformed, unseen
from . import kernels

Tensor = torch.Tensor


class Softmax(Function):
    """(input, bias, mask, scale, spec) -> result; keeps the result, the mask, and what a tensor scale needs."""

    @staticmethod
    def forward(input, bias, mask, scale, spec):
        if served(input, spec.dtype, bias, scale):
            return kernels.forward(input, bias, mask, scale, spec)
        return formula(input, bias, mask, scale, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, bias, mask, scale, spec = inputs
        of_scale = scale is not None and needed(ctx, 4)[3]
        ctx.save_for_backward(output, mask, scale, input if of_scale else None)
        if transformed():
            ctx.save_for_forward(output, mask, scale, input)
        ctx.spec = spec if spec.dtype is input.dtype else spec.changed(dtype=input.dtype)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)

    @staticmethod
    def backward(ctx, grad):
        output, mask, scale, input = ctx.saved_tensors
        alone, spec = ctx.bias is None and scale is None, ctx.spec
        to_input, to_bias, _, to_scale = (True, False, False, False) if alone else needed(ctx, 4)
        if not (to_bias or to_scale):
            return _gradient(grad, output, mask, scale, spec), None, None, None, None
        d = _gradient(grad, output, mask, None, spec.changed(factor=1.0))
        of_input = of_bias = of_scale = None
        if to_input:
            of_input = (
                d if scale is None and spec.factor == 1 else d * (spec.factor if scale is None else scale)
            )
            of_input = of_input.to(spec.dtype)
        if to_bias:
            shape, dtype = ctx.bias
            of_bias = summed_to(d, shape).to(dtype)
        if to_scale:
            w = wide(d.dtype, scale.dtype)
            # An x that is infinite or NaN has no share, being masked or of probability 0 (or else d is NaN itself).
            x = input.to(w)
            product = d.to(w) * torch.where(x.isfinite(), x, 0.0)
            of_scale = summed_to(product, scale.shape).to(scale.dtype)
        return of_input, of_bias, None, of_scale, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, input_tangent, bias_tangent, _, scale_tangent, *__):
        output, mask, scale, input = saved
        spec = ctx.spec
        dtypes = [t.dtype for t in (input_tangent, bias_tangent, scale_tangent) if t is not None]
        t = torch.zeros_like(output, dtype=wide(*dtypes))
        if input_tangent is not None:
            t = t + input_tangent * (spec.factor if scale is None else scale)
        if scale_tangent is not None:
            t = t + scale_tangent * input
        if bias_tangent is not None:
            t = t + bias_tangent
        keep = kept(output.shape, mask, spec.causal, output.device)
        if keep is not None:
            t = torch.where(keep, t, 0.0)
        spec = spec.changed(factor=1.0, dtype=output.dtype)
        if spec.log:
            y = output.to(t.dtype)
            t = t - (t * y.exp()).sum(spec.dims, keepdim=True)
            return (t if keep is None else torch.where(y == -INF, 0.0, t)).to(output.dtype)
        return Gradient.apply(t.to(output.dtype), output, mask, None, spec)


class Gradient(Function):
    """(grad, output, mask, scale, spec) -> the gradient of the input, of `spec.dtype`, differentiable again."""

    full = 2
    forward = staticmethod(kernels.backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.spec = inputs
        ctx.save_for_backward(*tensors)
        if transformed():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, upstream):
        """By torch's operations, and once more the kernel."""
        grad, output, mask, scale = ctx.saved_tensors
        spec, of_scale = ctx.spec.changed(dtype=grad.dtype), None
        if scale is not None:
            w = wide(upstream.dtype, scale.dtype)
            if needed(ctx, 4)[3]:
                plain = _gradient(grad, output, mask, None, spec.changed(dtype=w))
                of_scale = summed_to(upstream.to(w) * plain, scale.shape).to(scale.dtype)
            upstream = upstream.to(w) * scale
        w = wide(upstream.dtype, grad.dtype, output.dtype)
        u, g, y = finished(upstream.to(w), mask, spec), grad.to(w), output.to(w)
        if spec.log:
            p = y.exp()
            if mask is not None or spec.causal is not None:
                u, g = (torch.where(y == -INF, 0.0, t) for t in (u, g))
            along = u - (u * p).sum(spec.dims, keepdim=True)
            if mask is not None or spec.causal is not None:
                along = torch.where(y == -INF, 0.0, along)
            of_grad, of_output = along.to(grad.dtype), -u * p * g.sum(spec.dims, keepdim=True)
        else:
            inverse = spec.inverse_alpha
            of_grad = _gradient(upstream, output, mask, None, spec)  # the map from grad is symmetric
            of_output = u * (g - inverse * (g * y).sum(spec.dims, keepdim=True))
            of_output = of_output - inverse * g * (u * y).sum(spec.dims, keepdim=True)
        return of_grad, of_output.to(output.dtype), None, of_scale, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, grad_tangent, output_tangent, *_):
        grad, output, mask, _ = saved
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
            d = d + Gradient.apply(grad_tangent, output, mask, None, spec.changed(dtype=w))
        return d.to(spec.dtype)


def differentiable(
    grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """`kernels.backward` where a gradient of the gradient may be wanted."""
    if scale is None:
        return Gradient.apply(grad, output, mask, None, spec)
    wider = spec.changed(dtype=wide(spec.dtype))
    return (Gradient.apply(grad, output, mask, None, wider) * scale).to(spec.dtype)


# What is not given to an operator stands for a plain softmax: scores that are the input itself.
_NUMBERS = "bool log=False, float factor=1.0, SymInt? causal=None, float alpha=1.0, bool zero=False, "
_NUMBERS += "bool invariant=False"
_SOFTMAX = ways_of(
    Softmax,
    kernels.forward,
    operator_of(
        "softmax",
        "(Tensor input, SymInt[] dim, ScalarType dtype, bool online=True, Tensor? bias=None, Tensor? mask=None, "
        f"Tensor? scale=None, {_NUMBERS}) -> Tensor",
        Softmax,
        Spec,
        lambda input, bias, mask, scale, spec: torch.empty_like(input, dtype=spec.dtype),
        like=0,
    ),
)
_GRADIENT = Ways(
    kernels.backward,
    differentiable,
    differentiable,
    operator_of(
        "softmax_backward",
        "(Tensor grad, Tensor output, SymInt[] dim, ScalarType input_dtype, Tensor? mask=None, Tensor? scale=None, "
        f"{_NUMBERS}) -> Tensor",
        Gradient,
        Spec,
        lambda grad, output, mask, scale, spec: torch.empty_like(output, dtype=spec.dtype),
        like=1,
    ),
)


def serve(
    input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """The result in any state of torch; what no kernel takes by torch's operations."""
    if not served(input, spec.dtype, bias, scale):
        return formula(input, bias, mask, scale, spec)
    return _SOFTMAX.serve((input, bias, mask, scale, spec), (input, bias, mask, scale), (input, bias, scale))


def _gradient(grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec) -> Tensor:
    return _GRADIENT.serve((grad, output, mask, scale, spec), (grad, output, mask), (grad, output, scale))


def gradient(grad: Tensor, output: Tensor, spec: Spec) -> Tensor:
    """The gradient of a softmax or its logarithm from its result, itself differentiable."""
    if not (served(output, spec.dtype) and grad.dtype in DTYPES):
        return backward_formula(grad, output, None, None, spec)
    return _gradient(grad, output, None, None, spec)


def into(out: Tensor, input: Tensor, operands: Operands, spec: Spec) -> Tensor:
    """The result in a tensor of the caller's."""
    given = [t for t in operands if t is not None]
    check_out(out, input.shape, spec.dtype, input.device, (input, *given))
    if not served(input, spec.dtype, operands.bias, operands.scale):
        return out.copy_(formula(input, *operands, spec))
    if not unseen(input, out, *given):
        return out.copy_(_SOFTMAX.serve((input, *operands, spec), (input, out, *given), ()))
    check_memory(out, input, *given)
    return kernels.forward(input, *operands, spec, out)


class _InPlace(torch.autograd.Function):
    """`Softmax` into its own input."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, spec):
        if served(input, spec.dtype, bias, scale):
            kernels.forward(input, bias, mask, scale, spec, input)
        else:
            input.copy_(formula(input, bias, mask, scale, spec))
        ctx.mark_dirty(input)
        Softmax.setup_context(ctx, (input, bias, mask, scale, spec), input)
        return input

    backward = Softmax.backward


def in_place(input: Tensor, operands: Operands, spec: Spec) -> Tensor:
    """The result in the input itself. Raises ValueError for a scale whose gradient is wanted."""
    if recorded(operands.scale):
        raise ValueError(
            "softmax_ overwrites the input, which the gradient of scale needs: use softmax, or a scale that "
            "does not require a gradient"
        )
    if not unseen(input, *operands):
        return input.copy_(serve(input, *operands, spec))
    if recorded(input, operands.bias):
        return _InPlace.apply(input, *operands, spec)
    return into(input, input, operands, spec)
