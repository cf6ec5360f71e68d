"""Both directions of a cross entropy in one visit: the gradient is written while each row is on chip.

Forward reads the logits once and writes their gradient, for an upstream that is known by then: 1, or `grad_scale`.
Backward hands it out; for another upstream it is multiplied once more, which the device decides by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...plan.problem import Operand
from ...plan.rescale import plan_rescale
from ...runtime import launch
from ..common.state import batched, recorder
from .kernels import scaled

Tensor = torch.Tensor


@dataclass(frozen=True)
class Loss:
    """What a call asks for besides tensors.

    mean: of the rows that count; else their sum. squares: the factor on the squared logsumexps. scale: of the logits.
    grad_scale: the upstream that the gradient is written for, a number or a tensor of one. inplace: over the logits.
    """

    mean: bool
    ignore_index: int
    scale: float = 1.0
    squares: float = 0.0
    grad_scale: float | Tensor = 1.0
    inplace: bool = False

    def denominator(self, target: Tensor, weights: Tensor | None) -> Tensor | None:
        """What the sum of the rows' losses is divided by."""
        if not self.mean:
            return None
        return (target != self.ignore_index).sum() if weights is None else weights.sum()

    def factor(self, rows: Tensor, denominator: Tensor | None) -> Tensor:
        """What the gradient of a row's loss in its scores is multiplied by, a float32 on the device."""
        number = self.grad_scale * self.scale
        if denominator is None:
            return torch.as_tensor(number, dtype=torch.float32, device=rows.device)
        inverse = denominator.reciprocal()  # of a count, too, a float32
        return inverse if type(number) is float and number == 1 else inverse * number


class OneVisit(torch.autograd.Function):
    """(logits (..., C), target (...) int64, weights of the rows (...) or None, asked) -> the loss, a float32."""

    @staticmethod
    def forward(ctx, rows, target, weights, asked):
        denominator = asked.denominator(target, weights)
        factor = asked.factor(rows, denominator)
        alpha = factor if weights is None else (weights * factor).unsqueeze(-1)
        losses, gradient = visit(rows, target, alpha, asked)
        total = losses.sum() if weights is None else (losses * weights).sum()
        ctx.gradient, ctx.grad_scale = gradient, asked.grad_scale
        return total if denominator is None else total / denominator

    @staticmethod
    def backward(ctx, upstream):
        gradient = ctx.gradient
        if gradient is None or torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy keeps nothing but one gradient, to be handed out once: for a second backward pass "
                "through a call, or a gradient of its gradient, make it with one_visit=False"
            )
        ctx.gradient = None
        one = type(ctx.grad_scale) is float and ctx.grad_scale == 1
        ratio = upstream if one else upstream.to(torch.float32) / ctx.grad_scale
        if batched(upstream):
            return gradient * ratio, None, None, None
        rescale(gradient, ratio if ratio.dtype in launch.DTYPE_NAMES else ratio.to(torch.float32))
        return gradient, None, None, None


in_one_visit = recorder(OneVisit)


def visit(rows: Tensor, target: Tensor, alpha: Tensor, asked: Loss) -> tuple[Tensor, Tensor]:
    """(the rows' losses in float32, alpha times their gradients in the scores). Raises NotPlanned where no kernel keeps
    the rows on chip."""
    prologue, numbers = scaled(asked.scale, alpha="groups", target="loss", squares=asked.squares != 0)
    numbers = *numbers, asked.ignore_index, *[asked.squares] * prologue.squares
    losses, lse = torch.empty((2, *rows.shape[:-1]), dtype=torch.float32, device=rows.device)
    gradient = rows if asked.inplace else torch.empty_like(rows)
    columns = (t.unsqueeze(-1).expand(rows.shape) for t in (target, losses, lse))
    index, *results = columns
    operands = rows, alpha.expand(rows.shape), index, gradient, *results
    launch.run("softmax", operands, (rows.dim() - 1,), prologue=prologue, numbers=numbers)
    if asked.inplace:
        torch.autograd.graph.increment_version(rows)
    return losses, gradient


def rescale(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor whose rows are contiguous by a number of its device, in place; 1 leaves it untouched."""
    rows = tensor.view(1, -1) if tensor.is_contiguous() else tensor.view(-1, tensor.shape[-1])
    operands = launch.operand(rows), launch.operand(factor)
    call = _rescale(tensor.get_device(), tuple(rows.shape), operands)
    call.on_device(tensor.get_device(), tensor.data_ptr(), factor.data_ptr())


@lru_cache(maxsize=1024)
def _rescale(device: int, shape: tuple[int, int], operands: tuple[Operand, Operand]) -> launch.Call:
    plan = plan_rescale(shape, operands, launch.device_facts(device))
    return launch.Call(plan, launch.function_of(plan.kernel))
