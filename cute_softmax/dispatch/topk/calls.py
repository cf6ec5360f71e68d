"""The k largest elements of rows with their probabilities, in every state of torch."""

from __future__ import annotations

import torch

from ..common.arguments import served
from ..common.operators import Function, operator_of, ways_of
from ..common.state import Ways, batched, jvp_rule, recorder, transformed
from .kernels import Choice, Spread, choose, formula, gradient, gradient_formula

Tensor = torch.Tensor


def on_kernel(input: Tensor, dtype: torch.dtype, *others: Tensor) -> bool:
    """Whether our kernels serve it; torch's operations do all else."""
    return served(input, dtype, *others) and input.numel() > 0


class Chosen(Function):
    """(input, choice) -> (probabilities, indices). Keeps the indices, and the input or, where they say all that the
    gradient needs, the probabilities."""

    @staticmethod
    def forward(input, choice):
        return (choose if on_kernel(input, choice.dtype) else formula)(input, choice)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, choice = inputs
        values, indices = output
        ctx.choice, ctx.columns, ctx.dtype = choice, input.shape[-1], input.dtype
        ctx.mark_non_differentiable(indices)
        kept = (values if choice.renormalize else input), indices
        ctx.save_for_backward(*kept)
        if transformed():
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx, grad, _):
        source, indices = ctx.saved_tensors
        c = ctx.choice
        spread = Spread(c.dims, ctx.columns, c.renormalize, ctx.dtype, c.invariant)
        return gradient_of(source, indices, grad, spread), None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, *_):
        source, indices = saved
        dtype = torch.promote_types(source.dtype, torch.float32)
        t, index = tangent.to(dtype), indices.long()
        if ctx.choice.renormalize:
            p, t = source.to(dtype), t.gather(-1, index)
            found = p * (t - (p * t).sum(-1, keepdim=True))
        else:
            p = torch.softmax(source.to(dtype), -1)
            found = (p * (t - (p * t).sum(-1, keepdim=True))).gather(-1, index)
        return found.to(ctx.choice.dtype), None


class Gradient(Function):
    """(the input or the k probabilities, indices, upstream gradient, spread) -> the gradient of the input."""

    full = 3

    @staticmethod
    def forward(source, indices, grad, spread):
        kernel = on_kernel(source, spread.dtype, grad) and not batched(grad)
        return (gradient if kernel else gradient_formula)(source, indices, grad, spread)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.spread = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, upstream):
        """By autograd of the formula."""
        source, indices, grad = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (source, grad)]
            d = gradient_formula(leaves[0], indices, leaves[1], ctx.spread)
            of_source, of_grad = torch.autograd.grad(d, leaves, upstream)
        return of_source, None, of_grad, None


def _fake(input, choice):
    shape = (*input.shape[:-1], choice.k)
    return input.new_empty(shape, dtype=choice.dtype), input.new_empty(shape, dtype=choice.index_dtype)


_CHOSEN = ways_of(
    Chosen,
    Chosen.forward,
    operator_of(
        "topk_softmax",
        "(Tensor input, SymInt[] dim, SymInt k, bool renormalize, ScalarType dtype, ScalarType index_dtype, "
        "bool invariant=False) -> (Tensor, Tensor)",
        Chosen,
        Choice,
        _fake,
    ),
)
_GRADIENT = Ways(
    Gradient.forward,
    recorder(Gradient),
    gradient_formula,  # which is differentiable in forward mode, too
    operator_of(
        "topk_softmax_backward",
        "(Tensor source, Tensor indices, Tensor grad, SymInt[] dim, SymInt columns, bool renormalize, "
        "ScalarType dtype, bool invariant=False) -> Tensor",
        Gradient,
        Spread,
        lambda source, indices, grad, spread: source.new_empty(
            (*indices.shape[:-1], spread.columns), dtype=spread.dtype
        ),
    ),
)


def serve(input: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """(probabilities, indices), on any device and in any state of torch."""
    if not on_kernel(input, choice.dtype):
        return formula(input, choice)
    return _CHOSEN.serve((input, choice), (input,), (input,))


def gradient_of(source: Tensor, indices: Tensor, grad: Tensor, spread: Spread) -> Tensor:
    """`Gradient` in any state of torch."""
    tensors = source, indices, grad
    return _GRADIENT.serve((*tensors, spread), tensors, (source, grad))
