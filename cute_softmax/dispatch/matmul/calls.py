"""softmax(S) @ V without the softmax matrix, in every state of torch: its gradient and its operator."""

from __future__ import annotations

import torch

from ..common.placements import meet
from ..common.state import Ways, batched, recorder, unseen
from . import backward as matmul_backward
from .formulas import composed, gradients, log_sums
from .kernels import forward
from .placements import tell_products
from .request import FIELDS, Request, Results, Upstream, request_of


@torch.library.custom_op("cute_softmax::softmax_matmul", mutates_args=())
def operator(
    scores: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
    zero: bool,
    stats: torch.Tensor | None = None,
    invariant: bool = False,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result, log-sum-exps: an empty tensor where they are known)."""
    return both(request_of(scores, values, mask, bias, scale, causal, zero, stats, invariant, sink))


def both(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `operator`."""
    if request.on_kernel():
        result, lse = forward(request, True)
    else:
        result, lse = composed(request)
        result = result.contiguous()
        lse = lse if lse is None else lse.to(torch.promote_types(lse.dtype, torch.float32)).contiguous()
    return result, request.stats.new_empty(0) if lse is None else lse


def _fake(*fields):
    request = request_of(*fields)
    values, stats, shape = request.values, request.stats, request.shape()
    wide = torch.promote_types(request.scores.dtype, torch.float32)
    lse = values.new_empty(shape[:-1], dtype=wide) if stats is None else stats.new_empty(0)
    return values.new_empty(shape), lse


operator.register_fake(_fake)
tell_products(
    "softmax_matmul", FIELDS, _fake, lambda given: ("output", "lse" if given.get("stats") is None else "")
)


def _save(ctx, request: Request, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # a result that is not used has no gradient to be read
    result, lse = output
    *tensors, stats, ctx.spec = request
    ctx.save_for_backward(*tensors, result, lse if stats is None else stats)
    ctx.known = stats is not None


def _gradients(ctx, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple:
    """The gradients of scores, values, mask, bias and sink."""
    *tensors, result, lse = ctx.saved_tensors
    request = Request(*tensors, None, ctx.spec)
    grad = torch.zeros_like(result) if grad is None else grad.resolve_neg()
    grad_lse = grad_lse if grad_lse is None else grad_lse.resolve_neg()
    if ctx.known and torch.is_grad_enabled():  # to gradients of gradients it is a function of the scores
        lse = log_sums(request.scores, request.mask, request.bias, request.spec, request.sink)
    upstream = Upstream(result, lse, grad, None if ctx.known else grad_lse)
    # Gradients of gradients need torch's operations.
    if request.on_kernel() and not torch.is_grad_enabled():
        direct = unseen(grad, upstream.lse_grad) and not batched(grad, upstream.lse_grad)
        way = matmul_backward.anyhow if direct else matmul_backward.by_operator
        wants_bias = request.bias is not None and ctx.needs_input_grad[3]
        to_scores, to_values, to_bias, to_sink = way(request, upstream, wants_bias)
    else:
        to_scores, to_values, to_bias, to_sink = gradients(request, upstream)
    return to_scores, to_values, None, to_bias, to_sink


def _of_operator(ctx, *grads):
    *found, to_sink = _gradients(ctx, *grads)
    return *found, *[None] * 5, to_sink


operator.register_autograd(
    _of_operator,
    setup_context=lambda ctx, inputs, output: _save(ctx, request_of(*inputs), output),
)


class Product(torch.autograd.Function):
    """`operator` of an eager call, by its form if it has one: the dispatcher costs more host time than the launches."""

    @staticmethod
    def forward(ctx, *inputs):
        *fields, form = inputs
        request = Request(*fields)
        outputs = both(request) if form is None else form.run(request.tensors(), True)
        _save(ctx, request, outputs)
        return outputs

    @staticmethod
    def backward(ctx, grad, grad_lse):
        return *_gradients(ctx, grad, grad_lse), None, None, None


# -- Calls -------------------------------------------------------------------------------------------------------------


def _transformed(request: Request, return_lse: bool) -> Results:
    # Whatever is made of the scores, the sums are functions of them.
    return composed(request._replace(stats=None), return_lse)


def _by_operator(request: Request, _: bool) -> tuple[torch.Tensor, torch.Tensor]:
    meet(*request.tensors())
    return operator(*request.fields())


record = recorder(Product)
_WAYS = Ways(
    direct=forward,
    recorded=lambda request, _: record(*request, None),
    transformed=_transformed,
    operator=_by_operator,
)


def serve(request: Request, return_lse: bool) -> Results:
    """(the result, its log-sum-exps or None), on any device and in any state of torch."""
    request = request.constant()
    # To autograd and to transforms known sums are functions of the scores.
    whole = request.stats is not None and (request.recorded() or not unseen())
    if not (request.on_kernel() or whole):
        return composed(request, return_lse)
    return _WAYS.serve((request, return_lse), request.tensors(), request.leaves())
