"""Calls of softmax and log_softmax in every state of torch, with and without `out`.

What autograd and torch.compile see of them stands in `functions` and, of scores with a sink, in `sinks`. Calls that
repeat skip all of this: see `forms`.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from ..common.arguments import check_memory, check_out, served
from ..common.formulas import backward_formula, formula
from ..common.spec import Operands, Spec
from ..common.state import recorded, unseen
from . import kernels, sinks
from .functions import Softmax, gradient_of, softmax_of

Tensor = torch.Tensor


def serve(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    sink: Tensor | None = None,
) -> Tensor:
    """The result in any state of torch; what no kernel takes by torch's operations."""
    if not served(input, spec.dtype, bias, scale, sink):
        return formula(input, bias, mask, scale, spec, sink)
    if sink is not None:
        return sinks.serve(input, bias, mask, scale, sink, spec)[0]
    return softmax_of(input, bias, mask, scale, spec)


def gradient(grad: Tensor, output: Tensor, spec: Spec) -> Tensor:
    """The gradient of a softmax or its logarithm from its result, itself differentiable."""
    if not served(output, spec.dtype, grad):
        return backward_formula(grad, output, None, None, spec)
    return gradient_of(grad, output, None, None, spec)


def into(out: Tensor, input: Tensor, operands: Operands, spec: Spec) -> Tensor:
    """The result in a tensor of the caller's."""
    *scored, sink = operands
    given = [t for t in operands if t is not None]
    check_out(out, input.shape, spec.dtype, input.device, (input, *given))
    if not served(input, spec.dtype, operands.bias, operands.scale, sink, out):
        return out.copy_(formula(input, *scored, spec, sink))
    if not unseen(input, out, *given):
        with torch.no_grad():
            return out.copy_(serve(input, *scored, spec, sink))
    check_memory(out, input, *given)
    increment_version(out)  # so that autograd sees what it has kept of it written over
    if sink is not None:
        return kernels.forward_with_sink(input, *operands, spec, out)[0]
    return kernels.forward(input, *scored, spec, out)


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
    *scored, sink = operands
    if recorded(operands.scale):
        raise ValueError(
            "softmax_ overwrites the input, which the gradient of scale needs: use softmax, or a scale that "
            "does not require a gradient"
        )
    records = recorded(input, operands.bias, sink)
    # Of a function that changes a view torch takes no second result.
    if not unseen(input, *operands) or (records and sink is not None and input._is_view()):
        return input.copy_(serve(input, *scored, spec, sink))
    if records:
        if served(input, spec.dtype, operands.bias, operands.scale, sink):
            check_memory(input, input, *operands)
        if sink is not None:
            return sinks.InPlaceWithSink.apply(input, *operands, spec)[0]
        return _InPlace.apply(input, *scored, spec)
    return into(input, input, operands, spec)
