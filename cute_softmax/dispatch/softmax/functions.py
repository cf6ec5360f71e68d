"""Softmax and log_softmax of scores, and their gradients, in every state of torch.

`Softmax` and its gradient are each an autograd function and an operator (`common/operators.py`). Both end in `kernels`,
which launches. Scores with a sink have others of their own, see `sinks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..common.arguments import served
from ..common.formulas import INF, finished, formula, kept, summed_to, wide
from ..common.operators import Function, needed, operator_of, ways_of
from ..common.spec import Spec
from ..common.state import Ways, jvp_rule, transformed
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
        keep(ctx, *inputs, output)

    @staticmethod
    def backward(ctx, grad):
        output, mask, *saved = ctx.saved_tensors
        return *parted(ctx, *saved, lambda *factors: gradient_of(grad, output, mask, *factors)), None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, *tangents):
        output, mask, *_ = saved
        t, counts = tangent_of(ctx, saved, *tangents[:4])
        spec = ctx.spec.changed(factor=1.0, dtype=output.dtype)
        if spec.log:
            y = output.to(t.dtype)
            t = t - (t * y.exp()).sum(spec.dims, keepdim=True)
            return (t if counts is None else torch.where(y == -INF, 0.0, t)).to(output.dtype)
        return Gradient.apply(t.to(output.dtype), output, mask, None, spec)


def keep(ctx, input, bias, mask, scale, spec: Spec, output: Tensor, *others: Tensor) -> None:
    """Keep what derivatives of scores need: the result, the mask, and what a tensor scale needs; and others."""
    of_scale = scale is not None and needed(ctx, 4)[3]
    ctx.save_for_backward(output, mask, scale, input if of_scale else None, *others)
    if transformed():
        ctx.save_for_forward(output, mask, scale, input, *others)
    ctx.spec = spec if spec.dtype is input.dtype else spec.changed(dtype=input.dtype)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def parted(
    ctx, scale: Tensor | None, input: Tensor | None, of_scores: Callable[[Tensor | None, Spec], Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of (input, bias, mask, scale), from that of the scores times what is given: a tensor scale and
    the spec's factor."""
    alone, spec = ctx.bias is None and scale is None, ctx.spec
    to_input, to_bias, _, to_scale = (True, False, False, False) if alone else needed(ctx, 4)
    if not (to_bias or to_scale):
        return of_scores(scale, spec), None, None, None
    d = of_scores(None, spec.changed(factor=1.0))
    of_input = of_bias = of_scale = None
    if to_input:
        of_input = d if scale is None and spec.factor == 1 else d * (spec.factor if scale is None else scale)
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
    return of_input, of_bias, None, of_scale


def tangent_of(ctx, saved, input_tangent, bias_tangent, _, scale_tangent) -> tuple[Tensor, Tensor | None]:
    """(the tangent of the scores, where they count: see `formulas.kept`)."""
    output, mask, scale, input, *_ = saved
    dtypes = [t.dtype for t in (input_tangent, bias_tangent, scale_tangent) if t is not None]
    t = torch.zeros_like(output, dtype=wide(*dtypes))
    if input_tangent is not None:
        t = t + input_tangent * (ctx.spec.factor if scale is None else scale)
    if scale_tangent is not None:
        t = t + scale_tangent * input
    if bias_tangent is not None:
        t = t + bias_tangent
    counts = kept(output.shape, mask, ctx.spec.causal, output.device)
    return t if counts is None else torch.where(counts, t, 0.0), counts


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
                plain = gradient_of(grad, output, mask, None, spec.changed(dtype=w))
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
            of_grad = gradient_of(upstream, output, mask, None, spec)  # the map from grad is symmetric
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
NUMBERS = "bool log=False, float factor=1.0, SymInt? causal=None, float alpha=1.0, bool zero=False, "
NUMBERS += "bool invariant=False"
_SOFTMAX = ways_of(
    Softmax,
    kernels.forward,
    operator_of(
        "softmax",
        "(Tensor input, SymInt[] dim, ScalarType dtype, bool online=True, Tensor? bias=None, Tensor? mask=None, "
        f"Tensor? scale=None, {NUMBERS}) -> Tensor",
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
        f"{NUMBERS}) -> Tensor",
        Gradient,
        Spec,
        lambda grad, output, mask, scale, spec: torch.empty_like(output, dtype=spec.dtype),
        like=1,
    ),
)


def softmax_of(
    input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """`Softmax` of what our kernels serve, in any state of torch."""
    return _SOFTMAX.serve((input, bias, mask, scale, spec), (input, bias, mask, scale), (input, bias, scale))


def gradient_of(
    grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """`Gradient` in any state of torch."""
    return _GRADIENT.serve((grad, output, mask, scale, spec), (grad, output, mask), (grad, output, scale))
