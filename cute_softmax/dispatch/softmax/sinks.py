"""Softmax and log_softmax of scores with a sink, and their gradients, in every state of torch.

Beside its result the kernel gives the logarithm of each row's sink in the softmax. So the gradient of the sink is one
more number of each row for the kernel that makes that of the scores, from the sum that it has anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..common.arguments import served
from ..common.formulas import (
    INF,
    compose,
    finished,
    formula,
    shape_of_rows,
    sink_gradient,
    sink_log,
    summed_to,
    wide,
)
from ..common.operators import Function, needed, operator_of, ways_of
from ..common.spec import Spec
from ..common.state import Ways, jvp_rule
from . import functions, kernels
from .functions import NUMBERS, gradient_of, keep, parted, tangent_of

Tensor = torch.Tensor


class SoftmaxWithSink(Function):
    """(input, bias, mask, scale, sink, spec) -> (result, the logarithms of the rows' sinks in the softmax).

    The logarithms are in float32 or wider, the reduced dimensions of size 1. Keeps what `Softmax` does, and them.
    """

    @staticmethod
    def forward(input, bias, mask, scale, sink, spec):
        if served(input, spec.dtype, bias, scale, sink):
            return kernels.forward_with_sink(input, bias, mask, scale, sink, spec)
        scores = compose(input, bias, mask, scale, spec)
        log = sink_log(scores.to(wide(scores.dtype, sink.dtype)), sink, spec.dims)
        return formula(input, bias, mask, scale, spec, sink), log

    @staticmethod
    def setup_context(ctx, inputs, output):
        *scored, sink, spec = inputs
        ctx.set_materialize_grads(False)
        keep(ctx, *scored, spec, *output)
        ctx.sink = sink.shape, sink.dtype

    @staticmethod
    def backward(ctx, grad, of_log):
        output, mask, scale, input, log = ctx.saved_tensors
        to_sink, of_sink = needed(ctx, 5)[4], None
        grad = torch.zeros_like(output) if grad is None else grad

        def of_scores(scale: Tensor | None, spec: Spec) -> Tensor:
            nonlocal of_sink
            if not to_sink:
                d = gradient_of(grad, output, mask, scale, spec)
            else:
                d, of_sink = gradients_of(grad, output, log, mask, scale, spec)
            if of_log is None:
                return d
            # Of a gradient of the sink's gradient.
            of_sink = of_log * (1 - log.exp()) + (0 if of_sink is None else of_sink)
            more = finished(-of_log * probabilities(output, d.dtype, spec), mask, spec)
            return (d + (more if scale is None else more * scale)).to(d.dtype)

        found = parted(ctx, scale, input, of_scores)
        if to_sink:
            shape, dtype = ctx.sink
            of_sink = summed_to(of_sink, shape).to(dtype)
        return *found, of_sink if to_sink else None, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, *tangents):
        output, *_, log = saved
        t, counts = tangent_of(ctx, saved, *tangents[:4])
        of_sink = torch.zeros_like(log) if tangents[4] is None else tangents[4].to(log.dtype)
        p, y = probabilities(output, t.dtype, ctx.spec), output.to(t.dtype)
        none = log == -INF
        of_lse = (p * t).sum(ctx.spec.dims, keepdim=True)
        of_lse = of_lse + torch.where(none, 0.0, log.exp() * of_sink)
        to_output = t - of_lse if ctx.spec.log else y * (t - of_lse)
        if ctx.spec.log and counts is not None:
            to_output = torch.where(y == -INF, 0.0, to_output)
        return to_output.to(output.dtype), torch.where(none, 0.0, of_sink - of_lse).to(log.dtype)


class GradientWithSink(Function):
    """(grad, output, the sinks' logarithms, mask, scale, spec) -> (the gradient of the input, of `spec.dtype`, those of
    the rows' sinks)."""

    full = 2
    forward = staticmethod(kernels.backward_with_sink)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.spec = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *upstream):
        """By autograd of what is differentiable."""
        return *by_autograd(differentiable, ctx.saved_tensors, ctx.spec, upstream), None


def by_autograd(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor | None, ...],
    spec: Spec,
    upstream: tuple[Tensor, ...],
) -> list[Tensor | None]:
    """The gradients of the tensors, those that have any, by autograd of a function of them and a spec; differentiable
    again where that is wanted."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: what is given twice is two tensors to the function, each with a gradient of its own.
        leaves = [
            t if t is None or t.dtype is torch.bool else t.view_as(t) if t.requires_grad else t.detach()
            for t in tensors
        ]
        used = [t for t in leaves if t is not None and t.requires_grad]
        made = torch.autograd.grad(
            function(*leaves, spec), used, upstream, create_graph=again, allow_unused=True
        )
    found = iter(made)
    return [None if t is None or not t.requires_grad else next(found) for t in leaves]


def probabilities(output: Tensor, dtype: torch.dtype, spec: Spec) -> Tensor:
    """The softmax of which there is the result."""
    y = output.to(wide(dtype, output.dtype))
    return y.exp() if spec.log else y * spec.inverse_alpha


def differentiable(
    grad: Tensor, output: Tensor, log: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """`kernels.backward_with_sink` where a gradient of the gradient may be wanted."""
    of_input = functions.differentiable(grad, output, mask, scale, spec)
    return of_input, sink_gradient(grad, output, log, mask, spec)


def rows_like(tensor: Tensor, spec: Spec, *dtypes: torch.dtype) -> Tensor:
    """An empty tensor of one number a row."""
    return tensor.new_empty(shape_of_rows(tensor.shape, spec.dims), dtype=wide(*dtypes))


_SOFTMAX = ways_of(
    SoftmaxWithSink,
    kernels.forward_with_sink,
    operator_of(
        "softmax_with_sink",
        "(Tensor input, SymInt[] dim, ScalarType dtype, bool online=True, Tensor? bias=None, Tensor? mask=None, "
        f"Tensor? scale=None, Tensor? sink=None, {NUMBERS}) -> (Tensor, Tensor)",
        SoftmaxWithSink,
        Spec,
        lambda input, bias, mask, scale, sink, spec: (
            torch.empty_like(input, dtype=spec.dtype),
            rows_like(
                input, spec, *(t.dtype for t in (input, bias, scale, sink) if t is not None), spec.dtype
            ),
        ),
        like=0,
    ),
)
_GRADIENT = Ways(
    kernels.backward_with_sink,
    differentiable,
    differentiable,
    operator_of(
        "softmax_with_sink_backward",
        "(Tensor grad, Tensor output, SymInt[] dim, ScalarType input_dtype, Tensor? sink_log=None, "
        f"Tensor? mask=None, Tensor? scale=None, {NUMBERS}) -> (Tensor, Tensor)",
        GradientWithSink,
        Spec,
        lambda grad, output, log, mask, scale, spec: (
            torch.empty_like(output, dtype=spec.dtype),
            rows_like(output, spec, grad.dtype, output.dtype),
        ),
        like=1,
    ),
)


def serve(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    sink: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithms of the sinks, of what our kernels serve, in any state of torch."""
    return _SOFTMAX.serve(
        (input, bias, mask, scale, sink, spec), (input, bias, mask, scale, sink), (input, bias, scale, sink)
    )


def gradients_of(
    grad: Tensor, output: Tensor, log: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """`GradientWithSink` in any state of torch."""
    return _GRADIENT.serve(
        (grad, output, log, mask, scale, spec), (grad, output, log, mask), (grad, output, log, scale)
    )


class InPlaceWithSink(torch.autograd.Function):
    """`SoftmaxWithSink` into its own input."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, sink, spec):
        call = input, bias, mask, scale, sink, spec
        if served(input, spec.dtype, bias, scale, sink):
            _, log = kernels.forward_with_sink(*call, input)
        else:
            found, log = SoftmaxWithSink.forward(*call)
            input.copy_(found)
        ctx.mark_dirty(input)
        SoftmaxWithSink.setup_context(ctx, call, (input, log))
        return input, log

    backward = SoftmaxWithSink.backward
