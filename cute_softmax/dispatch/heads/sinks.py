"""logsumexp beside a sink in every state of torch: its launches, operators and gradients."""

from __future__ import annotations

from functools import partial

import torch

from ...runtime.invariance import in_force
from ..common.arguments import served
from ..common.formulas import INF, formula, log_sum, sink_log, summed_to, wide
from ..common.operators import Function, operator_of, ways_of
from ..common.spec import Spec
from ..common.state import Ways, batched, jvp_rule, transformed
from ..softmax import kernels
from ..softmax.sinks import by_autograd, rows_like
from ..softmax.sinks import serve as softmax
from .reductions import Reduction, check_input, forward, into, on_kernel, shape_of

Tensor = torch.Tensor


class LogSumExpWithSink(Function):
    """(input, sink, reduction) -> its result."""

    @staticmethod
    def forward(input, sink, reduction):
        if on_kernel(input, reduction.dtype, sink):
            return forward(input, reduction, sink)
        return composed(input, sink, reduction)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, sink, ctx.reduction = inputs
        ctx.save_for_backward(input, sink)
        if transformed():
            ctx.save_for_forward(input, sink, output)

    @staticmethod
    def backward(ctx, grad):
        """One more read of the input, whose softmax comes with the sinks' own logarithms in it."""
        input, sink = ctx.saved_tensors
        r = ctx.reduction
        factors = r.whole(grad, input.dim()).to(torch.promote_types(input.dtype, torch.float32))
        spec = Spec(r.dims, input.dtype, invariant=r.invariant)
        call = input, factors, sink
        of_input, log = _TIMES_SOFTMAX.serve((*call, spec), call, call)
        return of_input, summed_to(factors * log.exp(), sink.shape).to(sink.dtype), None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, of_sink, _):
        input, sink, output = saved
        r, w = ctx.reduction, wide(input.dtype, sink.dtype)
        whole = r.whole(output.to(w), input.dim())
        found = torch.zeros_like(whole)
        if tangent is not None:
            found = found + ((input.to(w) - whole).exp() * tangent).sum(r.dims, keepdim=True)
        if of_sink is not None:
            found = found + torch.where(sink == -INF, 0.0, (sink.to(w) - whole).exp() * of_sink)
        return found.view(output.shape).to(output.dtype)


class TimesSoftmax(Function):
    """(input, factors, sink, spec) -> (factors times the softmax of the input beside the sink, of `spec.dtype`, the
    logarithms of the rows' sinks in it). factors: one a row, the reduced dimensions of size 1."""

    @staticmethod
    def forward(input, factors, sink, spec):
        if batched(factors) or not served(input, spec.dtype, sink, factors):
            scores = input.to(wide(input.dtype, sink.dtype))
            log = sink_log(scores, sink, spec.dims)
            found = formula(input, None, None, None, spec.changed(dtype=scores.dtype), sink)
            return (found * factors).to(spec.dtype), log
        return kernels.forward_with_sink(input, None, None, None, sink, spec, factors=factors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.spec = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *upstream):
        return *by_autograd(_differentiable, ctx.saved_tensors, ctx.spec, upstream), None


def _differentiable(input: Tensor, factors: Tensor, sink: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """`TimesSoftmax` where a gradient of the gradient may be wanted."""
    found, log = softmax(input, None, None, None, sink, spec.changed(dtype=factors.dtype))
    return (found * factors).to(spec.dtype), log


def composed(input: Tensor, sink: Tensor, r: Reduction) -> Tensor:
    """The result by torch's operations."""
    dtype = r.dtype or torch.get_default_dtype()
    x = input.to(wide(input.dtype if input.is_floating_point() else dtype, sink.dtype))
    found = log_sum(x, sink, r.dims)
    return found.view(shape_of.__wrapped__(input.shape, r.dims, r.keepdim)).to(dtype)


_LOG_SUM = ways_of(
    LogSumExpWithSink,
    LogSumExpWithSink.forward,
    operator_of(
        "logsumexp_with_sink",
        "(Tensor input, Tensor sink, SymInt[] dim, bool keepdim, ScalarType dtype, bool invariant=False) -> Tensor",
        LogSumExpWithSink,
        partial(Reduction, "logsumexp"),
        lambda input, sink, r: input.new_empty(
            shape_of.__wrapped__(input.shape, r.dims, r.keepdim), dtype=r.dtype
        ),
    ),
)
_TIMES_SOFTMAX = Ways(
    TimesSoftmax.forward,
    _differentiable,
    _differentiable,
    operator_of(
        "logsumexp_with_sink_backward",
        "(Tensor input, Tensor factors, Tensor sink, SymInt[] dim, ScalarType dtype, bool invariant=False) "
        "-> (Tensor, Tensor)",
        TimesSoftmax,
        Spec,
        lambda input, factors, sink, spec: (
            torch.empty_like(input, dtype=spec.dtype),
            rows_like(input, spec, input.dtype, sink.dtype),
        ),
        like=0,
    ),
)


def log_sum_exp(
    input: Tensor,
    sink: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    out: Tensor | None = None,
) -> Tensor:
    """`reductions.reduce` of a logsumexp beside a sink."""
    check_input("logsumexp", input)
    if out is not None:
        return into(out, "logsumexp", input, dims, keepdim, dtype, partial(log_sum_exp, input, sink), sink)
    r = Reduction("logsumexp", dims, keepdim, dtype, in_force())
    if not on_kernel(input, dtype, sink):
        return composed(input, sink, r)
    return _LOG_SUM.serve((input, sink, r), (input, sink), (input, sink))
