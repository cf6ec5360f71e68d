"""Cross entropies of rows with class indices: a kernel forward, and one more backward or none.

In one visit forward reads the logits once and writes their gradient while each row is on chip, for an upstream that is
known by then: 1, or `grad_scale`. Backward hands it out; for another upstream it is multiplied once more, which the
device decides by itself. To recompute, forward writes the rows' losses alone, and backward is such a visit, for the
upstream that has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...plan import Prologue
from ...plan.mean import plan_mean, plan_share, plan_total
from ...plan.problem import ALIGNMENT, Operand
from ...plan.rescale import matrices, plan_rescale
from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.forms import Place, guard
from ..common.state import TENSORS, batched, recorder
from .kernels import scaled

# In float16 a probability over the number of rows underflows before a loss scale is known.
ONE_VISIT = (torch.bfloat16, torch.float32)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Loss:
    """What a call asks for besides tensors.

    reduction: "mean" of the rows that count, "sum", or "none". squares: the factor on the squared logsumexps. scale: of
    the logits, a number or a float32 tensor (..., 1) with one for each row; softcap: of their multiples, 0 for none.
    smoothing: the share of all classes in a target.
    grad_scale: the upstream that the gradient is written for, a number or a tensor of one. inplace: over the logits.
    dtype: of the result. invariant: whether the bits of a row must not depend on its company.
    """

    reduction: str
    ignore_index: int
    scale: float | Tensor = 1.0
    squares: float = 0.0
    grad_scale: float | Tensor = 1.0
    inplace: bool = False
    dtype: torch.dtype = torch.float32
    invariant: bool = False
    softcap: float = 0.0
    smoothing: float = 0.0

    @property
    def rates(self) -> Tensor | None:
        """The scale where it is one of each row."""
        return self.scale if isinstance(self.scale, Tensor) else None

    def factors(self, target: Tensor, weights: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """What the sum of the rows' losses is multiplied by (None for 1), and the gradient of a row's loss in its
        scores, which a scale of each row still multiplies: float32 numbers of the device."""
        given = isinstance(self.grad_scale, Tensor)
        number = (1.0 if self.rates is not None else self.scale) * (1.0 if given else self.grad_scale)
        if self.reduction == "sum":
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
                visit(rows, target, factor, asked) if form is None else form.visit(rows, target, factor)
            )
        else:
            losses, gradient = visit(rows, target, (weights * factor).unsqueeze(-1), asked)
            losses = losses * weights
        if asked.inplace:
            torch.autograd.graph.increment_version(rows)
        ctx.gradient, ctx.grad_scale = gradient, asked.grad_scale
        return total(losses, share, asked.dtype)

    @staticmethod
    def backward(ctx, upstream):
        gradient, upstream = ctx.gradient, upstream.resolve_neg()
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


class Recomputed(torch.autograd.Function):
    """(logits (..., C), target (...) int64, weights of the rows (...) or None, asked, form or None, again) -> the loss,
    or those of the rows.

    Keeps the logits and numbers of each row. again: the same of logits by functions that are differentiable twice.
    """

    @staticmethod
    def forward(ctx, rows, target, weights, asked, form, again):
        losses = losses_of(rows, target, asked) if form is None else form.losses(rows, target)
        losses, share = losses if weights is None else losses * weights, None
        if asked.reduction == "none":
            loss = losses.to(asked.dtype)
        elif asked.reduction == "mean" and weights is None:
            loss, share = mean(losses, target, asked.ignore_index, asked.dtype)
        else:
            share = weights.sum().reciprocal() if asked.reduction == "mean" else None
            loss = total(losses, share, asked.dtype)
        ctx.save_for_backward(rows, target, weights, share, asked.rates)
        ctx.asked, ctx.form, ctx.again = asked, form, again
        return loss

    @staticmethod
    def backward(ctx, upstream):
        rows, target, weights, share, _ = ctx.saved_tensors  # which looks whether any was written over
        asked, differentiable = ctx.asked, torch.is_grad_enabled()
        if differentiable or batched(upstream):
            with torch.enable_grad():
                leaf = rows if differentiable else rows.detach().requires_grad_()
                loss = ctx.again(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf, upstream, create_graph=differentiable)
            return gradient, None, None, None, None, None
        alpha = upstream.resolve_neg().to(torch.float32) if share is None else share * upstream
        alpha = alpha if asked.rates is not None or asked.scale == 1 else alpha * asked.scale
        alpha = alpha if weights is None else alpha * weights
        if ctx.form is None:
            alpha = alpha.unsqueeze(-1) if alpha.dim() else alpha
            _, gradient = visit(rows, target, alpha, asked)
        else:
            _, gradient = ctx.form.visit(rows, target, alpha.contiguous())
        return gradient, None, None, None, None, None


recomputed = recorder(Recomputed)


def losses_of(rows: Tensor, target: Tensor, asked: Loss) -> Tensor:
    """The rows' losses in float32. Raises NotPlanned where no kernel keeps the rows on chip."""
    losses = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    prologue, numbers = asked_of_kernel(asked)
    operands = operands_of(rows, asked.rates, None, target, None, losses)
    launch.run(
        "logsumexp",
        operands,
        (rows.dim() - 1,),
        prologue=prologue,
        numbers=numbers,
        invariant=asked.invariant,
    )
    return losses


def visit(rows: Tensor, target: Tensor, alpha: Tensor, asked: Loss) -> tuple[Tensor, Tensor]:
    """(the rows' losses in float32, alpha times their gradients in the scores, times the scale of each row). Raises
    NotPlanned where no kernel keeps the rows on chip."""
    losses = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    gradient = rows if asked.inplace else torch.empty_like(rows)
    prologue, numbers = asked_of_kernel(asked, alpha="groups")
    alpha = alpha if asked.rates is None else alpha * asked.rates
    operands = operands_of(rows, asked.rates, alpha, target, gradient, losses)
    launch.run(
        "softmax", operands, (rows.dim() - 1,), prologue=prologue, numbers=numbers, invariant=asked.invariant
    )
    return losses, gradient


def asked_of_kernel(asked: Loss, alpha: str = "") -> tuple[Prologue, tuple[float, ...]]:
    """The prologue of losses, or with an alpha of a visit, and its numbers."""
    squares, even = asked.squares != 0, asked.smoothing != 0
    prologue, numbers = scaled(
        asked.scale, asked.softcap, alpha=alpha, target="loss", squares=squares, even=even
    )
    more = *[asked.squares] * prologue.squares, *[asked.smoothing] * prologue.even
    return prologue, (*numbers, asked.ignore_index, *more)


def operands_of(
    rows: Tensor,
    rates: Tensor | None,
    alpha: Tensor | None,
    target: Tensor,
    gradient: Tensor | None,
    losses: Tensor,
) -> tuple[Tensor, ...]:
    """What a launch takes, all of the rows' shape: that of losses alone has neither alpha nor gradient."""
    numbers = [t.expand(rows.shape) for t in (rates, alpha) if t is not None]
    index, losses = (t.unsqueeze(-1).expand(rows.shape) for t in (target, losses))
    return (rows, *numbers, index, *[gradient] * (gradient is not None), losses)


class Form:
    """All eager calls on tensors of one device, shapes, strides and dtypes, without a weight, with the same other
    arguments: decided once. visits: in one visit, or to be recomputed. Raises NotPlanned where no kernel serves them.
    """

    def __init__(self, rows: Tensor, target: Tensor, asked: Loss, arguments: tuple, visits: bool):
        self.asked, self.visits = asked, visits
        self._arguments, self._types = arguments, [*map(type, arguments)]
        self._matches = guard(rows, target)
        losses = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
        alpha = losses.unsqueeze(-1) if asked.reduction == "none" else losses.new_empty(())
        gradient = rows if asked.inplace else torch.empty_like(rows, device="meta")
        of_rows = losses.shape, losses.stride(), torch.float32
        results = [of_rows] + [(rows.shape, gradient.stride(), rows.dtype)] * (not asked.inplace)
        addresses = ["a0", "a1", "a2", "a0" if asked.inplace else "b1", "b0"]
        operands = operands_of(rows, None, alpha, target, gradient, losses)
        self._visit = self._launching("softmax", "groups", operands, results, addresses, self._visit_anywhere)
        if not visits:
            operands = operands_of(rows, None, None, target, None, losses)
            addresses = ["a0", "a1", "b0"]
            self._losses = self._launching(
                "logsumexp", "", operands, [of_rows], addresses, self._losses_anywhere
            )

    def _launching(
        self,
        name: str,
        alpha: str,
        operands: tuple[Tensor, ...],
        results: list[tuple],
        addresses: list[str],
        anywhere: Callable,
    ) -> Callable:
        """`forms.launching` of the logits and what lies beside them. addresses: see there."""
        prologue, self._numbers = asked_of_kernel(self.asked, alpha)
        rows = operands[0]
        call = launch.call_of(
            name,
            operands,
            (rows.dim() - 1,),
            aligned=True,
            prologue=prologue,
            invariant=self.asked.invariant,
            copies=True,
        )
        offsets = [0, None, None] if alpha else [0, None]
        return forms.launching(call, Place(rows), anywhere, results, offsets, addresses)

    def fits(self, input: Tensor, target: Tensor, arguments: tuple) -> bool:
        """Whether a call is of this form."""
        return (
            [*map(type, arguments)] == self._types
            and self._arguments == arguments
            and self.asked.invariant is inside()
            and (torch.is_grad_enabled() or not self.visits)
            and type(target) in TENSORS
            and self._matches(input, target)
        )

    def losses(self, rows: Tensor, target: Tensor) -> Tensor:
        """`losses_of` of such a call."""
        return self._losses(rows, target, *self._numbers)

    def visit(self, rows: Tensor, target: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """`visit` of such a call. alpha: a number, or of reduction "none" one of each row."""
        found = self._visit(rows, alpha, target, *self._numbers)
        return (found, rows) if self.asked.inplace else found

    def _losses_anywhere(self, rows: Tensor, target: Tensor, *_: float) -> Tensor:
        """What `_losses` returns, for rows that are misaligned, copied, or on another device than the current one."""
        return losses_of(rows, target, self.asked)

    def _visit_anywhere(
        self, rows: Tensor, alpha: Tensor, target: Tensor, *_: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Likewise of `_visit`."""
        found = visit(rows, target, alpha.unsqueeze(-1) if alpha.dim() else alpha, self.asked)
        return found[0] if self.asked.inplace else found


known = forms.Forms()


def rescale(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor by a number of its device, in place; 1 leaves it untouched."""
    device, name, of_factor = tensor.get_device(), launch.DTYPE_NAMES[tensor.dtype], launch.operand(factor)
    shape, pitch, begins = matrices(tuple(tensor.shape), tensor.stride())
    for begin in begins:
        address = tensor.data_ptr() + begin * tensor.itemsize
        operands = Operand(name, (pitch, 1), address % ALIGNMENT), of_factor
        (call,) = _calls(device, plan_rescale, shape, operands)
        call.on_device(device, address, factor.data_ptr())


def shares(target: Tensor, ignore_index: int, number: float) -> Tensor:
    """(a number over how many of int64 targets are not ignored, one over that), float32."""
    result = torch.empty(2, dtype=torch.float32, device=target.device)
    bits = launch.float_bits(number)
    _add_up((target.contiguous(),), (result,), plan_share, target.numel(), ignore_index, bits)
    return result


def total(numbers: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of float32 numbers that lie side by side, times a factor of the device's."""
    name = launch.DTYPE_NAMES.get(dtype, "fp32")
    result = torch.empty((), dtype=launch.TORCH_DTYPES[name], device=numbers.device)
    rest = (result,) if factor is None else (factor, result)
    _add_up((numbers,), rest, plan_total, numbers.numel(), name, factor is not None)
    return result.to(dtype)


def mean(numbers: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the sum of float32 numbers that lie side by side over how many of int64 targets are not ignored, one over that
    in float32)."""
    name = launch.DTYPE_NAMES.get(dtype, "fp32")
    result = torch.empty((), dtype=launch.TORCH_DTYPES[name], device=numbers.device)
    share = torch.empty((), dtype=torch.float32, device=numbers.device)
    sources = numbers, target.contiguous()
    _add_up(sources, (result, share), plan_mean, numbers.numel(), ignore_index, name)
    return result.to(dtype), share


def _add_up(sources: Iterable[Tensor], rest: Sequence[Tensor], plan_of: Callable, *arguments: object) -> None:
    """Launch what adds up the sources; rest: the other operands of the last launch."""
    device = rest[-1].get_device()
    *slices, whole = _calls(device, plan_of, *arguments)
    for call in slices:
        shape = len(call.plan.kernel.sources), call.plan.ctas
        sums = torch.empty(shape, dtype=torch.float32, device=rest[-1].device)
        call.on_device(device, *[t.data_ptr() for t in (*sources, sums)])
        sources = sums.unbind()
    whole.on_device(device, *[t.data_ptr() for t in (*sources, *rest)])


@lru_cache(maxsize=1024)
def _calls(device: int, plan_of: Callable, *arguments: object) -> tuple[launch.Call, ...]:
    """The Calls of the plan, or the plans, without a prologue."""
    made = plan_of(*arguments, launch.device_facts(device))
    plans = made if isinstance(made, tuple) else (made,)
    return tuple(launch.Call(plan, launch.function_of(plan.kernel)) for plan in plans)
