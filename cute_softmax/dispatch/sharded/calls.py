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
from ..heads.kernels import (
    Rows,
    at_chosen,
    gradient_of_rows,
    in_pieces,
    invariant_sum,
    product,
    statistics,
    statistics_formula,
)
from ..softmax import kernels
from .states import Slice, by_blocks, gathered, in_order, merged, of_all_blocks, share

Tensor = torch.Tensor


def _local(input: Tensor, scale: float, entropies: bool, invariant: bool = False) -> list[Tensor]:
    """[max, log, entropy if it is asked for] of a slice's rows: (..., 1), float32 or wider."""
    rows = Rows((input.dim() - 1,), scale, "entropy" if entropies else "", invariant)
    if not input.shape[-1]:  # a slice of nothing
        empty = input.new_full((*input.shape[:-1], 1), -torch.inf, dtype=wide(input.dtype))
        return [empty, empty, torch.zeros_like(empty)][: 2 + entropies]
    if not on_kernel(input):
        return list(statistics_formula(input, rows))
    if entropies:
        return list(statistics(input, rows))
    # The row math of chosen elements has no entropy to work out.
    index = torch.zeros((*input.shape[:-1], 1), dtype=torch.int64, device=input.device)
    return list(statistics(input, rows, index)[1:])


def _gathered(
    input: Tensor, scale: float, entropies: bool, part: Slice, scores: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """([max, log, entropy if it is asked for, score if there is one] of all slices or blocks of them, in order, each
    (parts, ..., 1); the first of these of this slice itself, if it is one block).

    scores: of the chosen elements, -inf where they lie elsewhere.
    """
    if part.block is None:
        numbers = _local(input, scale, entropies)
        return gathered([*numbers, *([] if scores is None else [scores])], part.group), numbers
    numbers = by_blocks(input, part, lambda rows: _local(rows, scale, entropies, invariant=True))
    nothing = [-torch.inf, -torch.inf, *[0.0] * entropies]
    if scores is not None:
        numbers.append(torch.nn.functional.pad(scores, (0, numbers[0].shape[-1] - 1), value=-torch.inf))
        nothing.append(-torch.inf)
    return of_all_blocks(numbers, part, nothing), []


class Numbers(torch.autograd.Function):
    """(slice's elements, index into whole rows or None, scale, entropies, slice) -> (log-probability at the index,
    logsumexp, entropy) of whole rows, (..., 1) in float32; what is not asked for is None."""

    @staticmethod
    def forward(ctx, input, index, scale, entropies, part: Slice):
        local = here = found = scores = None
        if index is not None:
            local, here = part.local(index)
            scores = input.new_full(local.shape, -torch.inf, dtype=wide(input.dtype))
            if input.shape[-1]:
                scores = torch.where(here, input.gather(-1, local).to(scores.dtype) * scale, -torch.inf)
        (tops, logs, *rest), own = _gathered(input, scale, entropies, part, scores)
        top, log = merged(tops, logs)
        shares = share(tops, logs, top, log)
        if index is not None:
            found = rest.pop().amax(0) - top - log
        entropy = in_order(product(shares.exp(), rest[0] - shares)) if entropies else None
        mine = shares[dist.get_rank(part.group)] if own else None
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        of_slice = (*own[:2], mine) if own else (None, None, None)
        ctx.save_for_backward(input, local, here, found, *of_slice, top, log, entropy)
        return found, top + log, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, of_lse, of_entropy):
        input, local, here, found, top, log, mine, whole_top, whole_log, entropy = ctx.saved_tensors
        if not any(g is not None for g in (grad, of_lse, of_entropy)):
            return None, None, None, None, None
        total = torch.zeros_like(whole_top) if of_lse is None else of_lse
        total = total if grad is None else total - grad
        if mine is not None and on_kernel(input):
            # The softmax of the slice alone is the row's over the slice's share of the sum.
            weight = mine.exp()
            beside = mine if entropy is None else mine + entropy
            down = None if of_entropy is None else of_entropy * weight
            rows = Rows((input.dim() - 1,), ctx.scale)
            d = gradient_of_rows(input, rows, top, log, beside, total * weight, down, empty_rows=True)
        else:
            d = torch.empty_like(input)
            rows = [whole_top, whole_log, total, *([] if of_entropy is None else [entropy, of_entropy])]

            def finish(d: Tensor, x: Tensor, top: Tensor, log: Tensor, total: Tensor, *more: Tensor) -> None:
                logs = x.to(top.dtype) * ctx.scale - top - log
                p = logs.exp()
                term = p * total
                if more:
                    term = term - more[1] * product(p, logs + more[0])
                d.copy_(term.mul_(ctx.scale))

            in_pieces(finish, [d, input, *rows], input.dim() - 1)
        if grad is not None and input.shape[-1]:
            values = at_chosen(local, found, grad, total)
            if of_entropy is not None:
                values = values - of_entropy * product(found.exp(), found + entropy)
            d.scatter_(-1, local, torch.where(here, (values * ctx.scale).to(d.dtype), d.gather(-1, local)))
        return d, None, None, None, None


def _sum(rows: Tensor) -> Tensor:
    """The sums of rows, (..., 1), in an order that their length decides alone."""
    return invariant_sum(rows) if on_kernel(rows) else rows.sum(-1, keepdim=True)


class Softmax(torch.autograd.Function):
    """(slice's elements, scale, log, result dtype, slice) -> the slice of the rows' softmax, or of its logarithm."""

    @staticmethod
    def forward(ctx, input, scale, log, dtype, part: Slice):
        numbers, own = _gathered(input, scale, False, part)
        top, total = merged(*numbers)
        result = torch.empty_like(input, dtype=dtype)
        if log or part.block or not on_kernel(input):

            def finish(y: Tensor, x: Tensor, top: Tensor, total: Tensor) -> None:
                logs = (x.to(top.dtype) * scale).sub_(top).sub_(total)
                y.copy_(logs if log else logs.exp_())

            in_pieces(finish, [result, input, top, total], input.dim() - 1)
        else:
            factors = share(*own, top, total).exp()
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
        part = ctx.part
        blocks = max(-(-part.width // part.block), 1) if part.block else 1
        sums = result.new_zeros((*result.shape[:-1], blocks), dtype=type_)

        def add(dy: Tensor, y: Tensor, total: Tensor) -> None:
            terms = dy.to(type_) if ctx.log else dy.to(type_) * y
            if part.block is None:
                total.copy_(terms.sum(-1, keepdim=True))
            elif part.width:
                total.copy_(by_blocks(terms, part, lambda rows: [_sum(rows)])[0])

        in_pieces(add, [grad, result, sums], kept)
        if part.block is None:
            total = in_order(gathered([sums], part.group)[0])
        else:
            total = in_order(of_all_blocks([sums], part, [0.0])[0])
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
