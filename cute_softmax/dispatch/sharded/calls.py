"""Functions of rows that several ranks share, and their gradients.

Numbers of rows come out alike on every rank, and so must what flows back into them: each rank then has the gradient of
its slice without a further collective. A softmax comes out as slices; its gradient takes one sum over the ranks, of 4
bytes a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..common.formulas import wide
from ..common.spec import Spec
from ..heads.calls import on_kernel
from ..heads.kernels import at_chosen, gradient_of_rows, in_pieces, product, statistics, statistics_formula
from ..softmax import kernels
from .states import Slice, gathered, in_order, merged, share

Tensor = torch.Tensor


def _local(input: Tensor, scale: float, entropies: bool) -> list[Tensor]:
    """[max, log, entropy if it is asked for] of a slice's rows: (..., 1), float32 or wider."""
    dims = (input.dim() - 1,)
    if not input.shape[-1]:  # a slice of nothing
        empty = input.new_full((*input.shape[:-1], 1), -torch.inf, dtype=wide(input.dtype))
        return [empty, empty, torch.zeros_like(empty)][: 2 + entropies]
    if not on_kernel(input):
        top, log, entropy = statistics_formula(input, dims, scale)
        return [top, log, entropy][: 2 + entropies]
    if entropies:
        return list(statistics(input, dims, scale))
    # The row math of chosen elements has no entropy to work out.
    index = torch.zeros((*input.shape[:-1], 1), dtype=torch.int64, device=input.device)
    return list(statistics(input, dims, scale, index, False)[1:])


class Numbers(torch.autograd.Function):
    """(slice's elements, index into whole rows or None, scale, entropies, slice) -> (log-probability at the index,
    logsumexp, entropy) of whole rows, (..., 1) in float32; what is not asked for is None."""

    @staticmethod
    def forward(ctx, input, index, scale, entropies, part: Slice):
        numbers = _local(input, scale, entropies)
        local = here = found = None
        if index is not None:
            local, here = part.local(index)
            scores = input.gather(-1, local).to(numbers[0].dtype) if input.shape[-1] else numbers[0]
            numbers.append(torch.where(here, scores * scale, -torch.inf))
        tops, logs, *rest = gathered(numbers, part.group)
        top, log = merged(tops, logs)
        shares = share(tops, logs, top, log)
        if index is not None:
            found = rest.pop().amax(0) - top - log
        entropy = in_order(product(shares.exp(), rest[0] - shares)) if entropies else None
        mine = shares[dist.get_rank(part.group)]
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, local, here, found, numbers[0], numbers[1], top, log, mine, entropy)
        return found, top + log, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, of_lse, of_entropy):
        input, local, here, found, top, log, whole_top, whole_log, mine, entropy = ctx.saved_tensors
        if not any(g is not None for g in (grad, of_lse, of_entropy)):
            return None, None, None, None, None
        total = torch.zeros_like(top) if of_lse is None else of_lse
        total = total if grad is None else total - grad
        if on_kernel(input):
            # The softmax of the slice alone is the row's over the slice's share of the sum.
            weight = mine.exp()
            beside = mine if entropy is None else mine + entropy
            down = None if of_entropy is None else of_entropy * weight
            rows = (input.dim() - 1,), ctx.scale, top, log, beside
            d = gradient_of_rows(input, *rows, total * weight, down, empty_rows=True)
        else:
            logs = input.to(top.dtype) * ctx.scale - whole_top - whole_log
            d = logs.exp() * total
            if of_entropy is not None:
                d = d - of_entropy * product(logs.exp(), logs + entropy)
            d = (d * ctx.scale).to(input.dtype)
        if grad is not None and input.shape[-1]:
            values = at_chosen(local, found, grad, total)
            if of_entropy is not None:
                values = values - of_entropy * product(found.exp(), found + entropy)
            d.scatter_(-1, local, torch.where(here, (values * ctx.scale).to(d.dtype), d.gather(-1, local)))
        return d, None, None, None, None


class Softmax(torch.autograd.Function):
    """(slice's elements, scale, log, result dtype, slice) -> the slice of the rows' softmax, or of its logarithm."""

    @staticmethod
    def forward(ctx, input, scale, log, dtype, part: Slice):
        numbers = _local(input, scale, False)
        top, total = merged(*gathered(numbers, part.group))
        result = torch.empty_like(input, dtype=dtype)
        if log or not on_kernel(input):

            def finish(y: Tensor, x: Tensor, top: Tensor, total: Tensor) -> None:
                logs = (x.to(top.dtype) * scale).sub_(top).sub_(total)
                y.copy_(logs if log else logs.exp_())

            in_pieces(finish, [result, input, top, total], input.dim() - 1)
        else:
            factors = share(*numbers, top, total).exp()
            # A slice of nothing but -inf is 0; a whole row of it has a factor of NaN.
            spec = Spec((input.dim() - 1,), dtype, factor=scale, zero=True)
            kernels.forward(input, None, None, None, spec, result, factors=factors)
        ctx.scale, ctx.log, ctx.part, ctx.dtype = scale, log, part, input.dtype
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        kept, type_ = result.dim() - 1, wide(result.dtype)
        sums = result.new_zeros((*result.shape[:-1], 1), dtype=type_)

        def add(dy: Tensor, y: Tensor, total: Tensor) -> None:
            terms = dy.to(type_) if ctx.log else dy.to(type_) * y
            total.copy_(terms.sum(-1, keepdim=True))

        in_pieces(add, [grad, result, sums], kept)
        total = in_order(gathered([sums], ctx.part.group)[0])
        d = torch.empty_like(result, dtype=ctx.dtype)

        def finish(d: Tensor, dy: Tensor, y: Tensor, total: Tensor) -> None:
            wide_dy = dy.to(type_)
            term = wide_dy - y.to(type_).exp_() * total if ctx.log else (wide_dy - total) * y
            d.copy_(term.mul_(ctx.scale))

        in_pieces(finish, [d, grad, result, total], kept)
        return d, None, None, None, None


class Sum(torch.autograd.Function):
    """(numbers, slice) -> their sum over the ranks. What flows back is the same on every rank, and goes to each."""

    @staticmethod
    def forward(ctx, numbers, part: Slice):
        return in_order(gathered([numbers], part.group)[0])

    @staticmethod
    def backward(ctx, grad):
        return grad, None
