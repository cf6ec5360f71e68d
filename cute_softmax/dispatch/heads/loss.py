"""Both directions of a cross entropy in one visit: the gradient is written while each row is on chip.

Forward reads the logits once and writes their gradient, for an upstream that is known by then: 1, or `grad_scale`.
Backward hands it out; for another upstream it is multiplied once more, which the device decides by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...plan import Prologue
from ...plan.mean import plan_share, plan_total
from ...plan.rescale import plan_rescale
from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.forms import Place, guard
from ..common.state import TENSORS, batched, recorder
from .kernels import scaled

Tensor = torch.Tensor


@dataclass(frozen=True)
class Loss:
    """What a call asks for besides tensors.

    mean: of the rows that count; else their sum. squares: the factor on the squared logsumexps. scale: of the logits;
    softcap: of their multiples, 0 for none. smoothing: the share of all classes in a target.
    grad_scale: the upstream that the gradient is written for, a number or a tensor of one. inplace: over the logits.
    dtype: of the result. invariant: whether the bits of a row must not depend on its company.
    """

    mean: bool
    ignore_index: int
    scale: float = 1.0
    squares: float = 0.0
    grad_scale: float | Tensor = 1.0
    inplace: bool = False
    dtype: torch.dtype = torch.float32
    invariant: bool = False
    softcap: float = 0.0
    smoothing: float = 0.0

    def factors(self, target: Tensor, weights: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """What the sum of the rows' losses is multiplied by (None for 1), and the gradient of a row's loss in its
        scores: float32 numbers of the device."""
        given = isinstance(self.grad_scale, Tensor)
        number = self.scale * (1.0 if given else self.grad_scale)
        if not self.mean:
            share, factor = None, torch.as_tensor(number, dtype=torch.float32, device=target.device)
        elif weights is None:
            factor, share = shares(target, self.ignore_index, number)
        else:
            share = weights.sum().reciprocal()
            factor = share * number
        return share, factor * self.grad_scale.to(torch.float32).view(()) if given else factor


class OneVisit(torch.autograd.Function):
    """(logits (..., C), target (...) int64, weights of the rows (...) or None, asked, form or None) -> the loss."""

    @staticmethod
    def forward(ctx, rows, target, weights, asked, form):
        share, factor = asked.factors(target, weights)
        if weights is None:
            losses, gradient = (
                visit(rows, target, factor, asked) if form is None else form(rows, target, factor)
            )
        else:
            losses, gradient = visit(rows, target, (weights * factor).unsqueeze(-1), asked)
            losses = losses * weights
        ctx.gradient, ctx.grad_scale = gradient, asked.grad_scale
        return total(losses, share, asked.dtype)

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
            return gradient * ratio, None, None, None, None
        rescale(gradient, ratio if ratio.dtype in launch.DTYPE_NAMES else ratio.to(torch.float32))
        return gradient, None, None, None, None


in_one_visit = recorder(OneVisit)


def visit(rows: Tensor, target: Tensor, alpha: Tensor, asked: Loss) -> tuple[Tensor, Tensor]:
    """(the rows' losses in float32, alpha times their gradients in the scores). Raises NotPlanned where no kernel keeps
    the rows on chip."""
    losses, lse = torch.empty((2, *rows.shape[:-1]), dtype=torch.float32, device=rows.device)
    gradient = rows if asked.inplace else torch.empty_like(rows)
    prologue, numbers = _asked_of_kernel(asked)
    operands = _operands(rows, alpha, target, gradient, losses, lse)
    launch.run(
        "softmax", operands, (rows.dim() - 1,), prologue=prologue, numbers=numbers, invariant=asked.invariant
    )
    if asked.inplace:
        torch.autograd.graph.increment_version(rows)
    return losses, gradient


def _asked_of_kernel(asked: Loss) -> tuple[Prologue, tuple[float, ...]]:
    """The prologue of a visit, and its numbers."""
    prologue, numbers = scaled(
        asked.scale,
        asked.softcap,
        alpha="groups",
        target="loss",
        squares=asked.squares != 0,
        even=asked.smoothing != 0,
    )
    more = *[asked.squares] * prologue.squares, *[asked.smoothing] * prologue.even
    return prologue, (*numbers, asked.ignore_index, *more)


def _operands(
    rows: Tensor, alpha: Tensor, target: Tensor, gradient: Tensor, losses: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """What a launch takes, all of the rows' shape."""
    index, losses, lse = (t.unsqueeze(-1).expand(rows.shape) for t in (target, losses, lse))
    return rows, alpha.expand(rows.shape), index, gradient, losses, lse


class Form:
    """All eager calls on tensors of one device, shapes, strides and dtypes, without a weight, with the same other
    arguments: decided once. Raises NotPlanned where no kernel serves them in one visit."""

    def __init__(self, rows: Tensor, target: Tensor, asked: Loss, arguments: tuple):
        self.asked, self._arguments = asked, arguments
        self._matches = guard(rows, target)
        # Each result of the rows begins with a whole vector.
        pitch = -(-math.prod(rows.shape[:-1]) // 4) * 4
        losses, lse = torch.empty(2, pitch, dtype=torch.float32, device=rows.device)
        losses, lse = (self._of_rows(t, rows) for t in (losses, lse))
        prologue, self._numbers = _asked_of_kernel(asked)
        gradient = rows if asked.inplace else torch.empty_like(rows, device="meta")
        operands = _operands(rows, losses.new_empty(()), target, gradient, losses, lse)
        dims = (rows.dim() - 1,)
        call = launch.call_of(
            "softmax", operands, dims, aligned=True, prologue=prologue, invariant=asked.invariant
        )
        results = [((2, pitch), (pitch, 1), torch.float32)]
        results += [(tuple(rows.shape), gradient.stride(), rows.dtype)] * (not asked.inplace)
        addresses = ["a0", "a1", "a2", "a0" if asked.inplace else "b1", "b0", f"b0 + {4 * pitch}"]
        self._run = forms.launching(call, Place(rows), self._anywhere, results, [0, None, None], addresses)

    @staticmethod
    def _of_rows(numbers: Tensor, rows: Tensor) -> Tensor:
        return numbers[: math.prod(rows.shape[:-1])].view(rows.shape[:-1])

    def fits(self, input: Tensor, target: Tensor, arguments: tuple) -> bool:
        """Whether a call is of this form."""
        return (
            self._arguments == arguments
            and self.asked.invariant is inside()
            and torch.is_grad_enabled()
            and type(target) in TENSORS
            and self._matches(input, target)
        )

    def __call__(self, rows: Tensor, target: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """`visit` of such a call."""
        found = self._run(rows, factor, target, *self._numbers)
        if self.asked.inplace:
            torch.autograd.graph.increment_version(rows)
        numbers, gradient = (found, rows) if self.asked.inplace else found
        return self._of_rows(numbers[0], rows), gradient

    def _anywhere(
        self, rows: Tensor, factor: Tensor, target: Tensor, *_: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What `_run` returns, for rows that are misaligned or on another device than the current one."""
        losses, gradient = visit(rows, target, factor, self.asked)
        numbers = losses.reshape(1, -1)
        return numbers if self.asked.inplace else (numbers, gradient)


known = forms.Forms()


def rescale(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor whose rows are contiguous by a number of its device, in place; 1 leaves it untouched."""
    rows, device = (
        tensor.view(1, -1) if tensor.is_contiguous() else tensor.view(-1, tensor.shape[-1]),
        tensor.get_device(),
    )
    operands = launch.operand(rows), launch.operand(factor)
    call = _call(device, plan_rescale, tuple(rows.shape), operands)
    call.on_device(device, tensor.data_ptr(), factor.data_ptr())


def shares(target: Tensor, ignore_index: int, number: float) -> Tensor:
    """(a number over how many of int64 targets are not ignored, one over that), float32."""
    target, device = target.contiguous(), target.get_device()
    result = torch.empty(2, dtype=torch.float32, device=target.device)
    call = _call(device, plan_share, target.numel(), ignore_index, launch.float_bits(number))
    call.on_device(device, target.data_ptr(), 0, result.data_ptr())
    return result


def total(numbers: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of float32 numbers that lie side by side, times a factor of the device's."""
    device = numbers.get_device()
    result = torch.empty((), dtype=dtype, device=numbers.device)
    call = _call(device, plan_total, numbers.numel(), launch.DTYPE_NAMES[dtype], factor is not None)
    call.on_device(device, numbers.data_ptr(), 0 if factor is None else factor.data_ptr(), result.data_ptr())
    return result


@lru_cache(maxsize=1024)
def _call(device: int, plan_of: Callable, *arguments: object) -> launch.Call:
    """The Call of a plan without a prologue."""
    plan = plan_of(*arguments, launch.device_facts(device))
    return launch.Call(plan, launch.function_of(plan.kernel))
