"""The Kullback-Leibler divergence of two softmaxes, and the cross entropy of one against probabilities: row by row,
with their gradients, in every state of torch.

Forward is one read of both inputs, and so is the gradient in either of them; what is kept beside them is a number of
each row. Rows that no kernel holds on chip (strided or very long ones) are torch's operations'. Eager calls that repeat
have a form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.arguments import served
from ..common.forms import Place, guard
from ..common.formulas import over, shape_of_rows, wide
from ..common.operators import Function, needed, operator_of, ways_of
from ..common.state import TENSORS, Ways, batched, jvp_rule, recorder, transformed, unseen
from .kernels import product, scaled

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pair:
    """Everything about a call but its tensors: the dimensions of rows, the positive factor on logits, whether the call
    is batch-invariant; whether the target has logits (a divergence) or weights (a cross entropy); and of a gradient the
    operand that it is one in, "input" or "target"."""

    dims: tuple[int, ...]
    scale: float = 1.0
    invariant: bool = False
    weights: bool = False
    of: str = ""

    @property
    def against(self) -> str:
        """What of a prologue a launch has; empty where there is no kernel."""
        if not self.weights:
            return self.of or "loss"
        return "" if self.of == "target" else "weights"

    def logs(self, tensor: Tensor) -> Tensor:
        """The log-probabilities in torch's operations."""
        s = tensor.to(wide(tensor.dtype))
        return over(torch.log_softmax, s if self.scale == 1 else s * self.scale, self.dims)


class Divergence(Function):
    """(input, target, pair) -> the loss of each row, float32, with size 1 in the reduced dimensions."""

    full = 2

    @staticmethod
    def forward(input, target, pair):
        if on_kernel(input, target):
            loss = torch.empty(
                shape_of_rows(input.shape, pair.dims), dtype=torch.float32, device=input.device
            )
            if _launched("logsumexp", (input, target, loss.expand(input.shape)), pair):
                return loss
        return formula(input, target, pair)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, target, ctx.pair = inputs
        ctx.save_for_backward(input, target, output)
        if transformed():
            ctx.save_for_forward(input, target, output)

    @staticmethod
    def backward(ctx, grad):
        wanted, saved = needed(ctx, 2), ctx.saved_tensors
        pairs = (replace(ctx.pair, of=name) for name in ("input", "target"))
        found = [gradient(*saved, grad, p) if w else None for p, w in zip(pairs, wanted, strict=True)]
        return *found, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, of_input, of_target, _):
        input, target, _ = saved
        pair, found = ctx.pair, 0.0
        for tangent, name in ((of_input, "input"), (of_target, "target")):
            if tangent is not None:
                d = gradient_formula(input, target, None, torch.ones_like(saved[2]), replace(pair, of=name))
                found = found + (d.to(saved[2].dtype) * tangent).sum(pair.dims, keepdim=True)
        return found


class Gradient(Function):
    """(input, target, losses, their gradient, pair) -> the gradient of the operand that `pair` says, in a new tensor
    like it."""

    full = 2

    @staticmethod
    def forward(input, target, loss, grad, pair):
        if pair.against and on_kernel(input, target) and not batched(grad):
            result = torch.empty_like(input if pair.of == "input" else target)
            groups = [torch.mul(grad.to(torch.float32), pair.scale).contiguous()]
            groups += [loss] if pair.against == "target" else []
            operands = input, target, *(t.expand(input.shape) for t in groups), result
            if _launched("softmax", operands, pair, alpha="groups"):
                return result
        return gradient_formula(input, target, loss, grad, pair)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.pair = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, upstream):
        """By autograd of the formula. What the losses change is in the gradients of the inputs."""
        input, target, _, grad = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (input, target, grad)]
            d = gradient_formula(leaves[0], leaves[1], None, leaves[2], ctx.pair)
            of_input, of_target, of_grad = torch.autograd.grad(d, leaves, upstream, allow_unused=True)
        return of_input, of_target, None, of_grad, None


def on_kernel(input: Tensor, target: Tensor) -> bool:
    """Whether our kernels may serve them; torch's operations do all else."""
    return served(input, torch.float32, target) and input.numel() > 0


def _launched(name: str, operands: tuple[Tensor, ...], pair: Pair, **parts: str) -> bool:
    """Whether a kernel has been launched: there is none where rows do not fit on chip."""
    prologue, numbers = scaled(pair.scale, against=pair.against, **parts)
    try:
        launch.run(name, operands, pair.dims, prologue=prologue, numbers=numbers, invariant=pair.invariant)
    except NotPlanned:
        return False
    return True


def formula(input: Tensor, target: Tensor, pair: Pair) -> Tensor:
    """`Divergence` in torch's operations, differentiable."""
    if pair.weights:
        logs = pair.logs(input)
        return -(target.to(logs.dtype) * logs).sum(pair.dims, keepdim=True)
    p = pair.logs(target)
    return product(p.exp(), p - pair.logs(input)).sum(pair.dims, keepdim=True)


def gradient_formula(input: Tensor, target: Tensor, loss: Tensor | None, grad: Tensor, pair: Pair) -> Tensor:
    """`Gradient` in torch's operations, differentiable; the losses are computed anew."""
    if pair.weights:
        q = pair.logs(input)
        if pair.of == "target":
            return (-grad * q).to(target.dtype)
        w = target.to(q.dtype)
        return (grad * (q.exp() * w.sum(pair.dims, keepdim=True) - w) * pair.scale).to(input.dtype)
    p, q = pair.logs(target), pair.logs(input)
    if pair.of == "input":
        return (grad * (q.exp() - p.exp()) * pair.scale).to(input.dtype)
    terms = product(p.exp(), p - q)
    return (grad * (terms - p.exp() * terms.sum(pair.dims, keepdim=True)) * pair.scale).to(target.dtype)


def _fake(input: Tensor, target: Tensor, pair: Pair) -> Tensor:
    return input.new_empty(shape_of_rows(input.shape, pair.dims), dtype=wide(input.dtype, target.dtype))


_DIVERGENCE = ways_of(
    Divergence,
    Divergence.forward,
    operator_of(
        "kl_div",
        "(Tensor input, Tensor target, SymInt[] dim, float scale, bool invariant=False, bool weights=False) -> Tensor",
        Divergence,
        Pair,
        _fake,
    ),
)
_GRADIENT = Ways(
    Gradient.forward,
    gradient_formula,
    gradient_formula,
    operator_of(
        "kl_div_backward",
        "(Tensor input, Tensor target, Tensor loss, Tensor grad, SymInt[] dim, float scale, str of, "
        "bool invariant=False, bool weights=False) -> Tensor",
        Gradient,
        Pair,
        lambda input, target, loss, grad, pair: (input if pair.of == "input" else target).new_empty(
            input.shape
        ),
    ),
)


def serve(input: Tensor, target: Tensor, pair: Pair) -> Tensor:
    """`Divergence` on any device and in any state of torch."""
    if not on_kernel(input, target):
        return formula(input, target, pair)
    return _DIVERGENCE.serve((input, target, pair), (input, target), (input, target))


def gradient(*call) -> Tensor:
    """`Gradient` in any state of torch."""
    return _GRADIENT.serve(call, call[:-1], call[:-1])


# -- Calls that repeat -------------------------------------------------------------------------------------------------

known = forms.Forms()


class Form:
    """All eager calls on tensors of one device, shapes, strides and dtypes whose other arguments are equal: decided
    once. options: the arguments that are no tensors, as the caller gave them; result: the dtype of the loss."""

    __slots__ = (
        *("_matches", "_numbers", "_options", "_records", "_run", "_types"),
        *("follower", "pair", "result"),
    )

    def __init__(self, input: Tensor, target: Tensor, pair: Pair, options: tuple, result: torch.dtype):
        self._matches = guard(input, target)
        self._options, self._types = options, [*map(type, options)]
        self._records, self.pair, self.result = input.requires_grad or target.requires_grad, pair, result
        loss = torch.empty(shape_of_rows(input.shape, pair.dims), dtype=torch.float32, device=input.device)
        prologue, self._numbers = scaled(pair.scale, against=pair.against)
        operands, how = (input, target, loss.expand(input.shape)), {"prologue": prologue}
        try:
            call = launch.call_of(
                "logsumexp", operands, pair.dims, aligned=True, invariant=pair.invariant, **how
            )
        except NotPlanned:
            self._run = self._anywhere
        else:
            results = [(loss.shape, loss.stride(), torch.float32)]
            self._run = forms.launching(call, Place(input), self._anywhere, results, [0, 0])

    def fits(self, input: Tensor, target: Tensor, options: tuple) -> bool:
        """Whether a call is of this form."""
        return (
            [*map(type, options)] == self._types
            and options == self._options
            and self.pair.invariant is inside()
            and type(target) in TENSORS
            and self._matches(input, target)
        )

    def __call__(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, recorded by autograd where it records."""
        if self._records and torch.is_grad_enabled():
            return record(input, target, self)
        return self.losses(input, target)

    def losses(self, input: Tensor, target: Tensor) -> Tensor:
        """`Divergence.forward` for tensors of this form."""
        return self._run(input, target, *self._numbers)

    def _anywhere(self, input: Tensor, target: Tensor, *_: float) -> Tensor:
        return Divergence.forward(input, target, self.pair)


class Recorded(torch.autograd.Function):
    """(input, target, form) -> the losses of the form; kept and differentiated as by `Divergence`."""

    @staticmethod
    def forward(ctx, input, target, form):
        loss = form.losses(input, target)
        Divergence.setup_context(ctx, (input, target, form.pair), loss)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return Divergence.backward(ctx, grad)


record = recorder(Recorded)


def first(input: Tensor, target: Tensor, pair: Pair, options: tuple, result: torch.dtype) -> Tensor:
    """The losses of a call that is the first of its form, or has none."""
    if unseen(input, target) and on_kernel(input, target):
        form = Form(input, target, pair, options, result)
        known.remember(input, form)
        return form(input, target)
    return serve(input, target, pair)
