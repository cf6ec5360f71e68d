"""The forms of heads over rows: eager calls that repeat, and what autograd records of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.forms import Place, guard
from ..common.formulas import shape_of_rows
from ..common.state import batched, recorder, unseen
from .calls import Gradient, Head, Statistics, gradient_formula, on_kernel, serve_head
from .kernels import Parts, factors_of, scaled

Tensor = torch.Tensor
# A microsecond less than `to`, which parses its arguments.
_CASTS = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}


class Form:
    """All eager calls of a head on tensors of one device, shapes, strides and dtypes, with at most one element of each
    row chosen: decided once.

    dim: as the caller gave it, compared by `is`; dims: what it means. asked: the dtype of results as the caller gave
    it. The scale may differ, unless it is 1.
    Raises NotPlanned where no kernel serves the calls.
    """

    def __init__(
        self,
        head: Head,
        input: Tensor,
        index: Tensor | None,
        dim: int,
        dims: tuple[int, ...],
        scale: float,
        dtype: torch.dtype,
        softcap: float = 0.0,
        asked: torch.dtype | None = None,
    ):
        self._head, self._dim, self._scaled = head, dim, scale != 1
        # What no gradient is to be made of, the kernel stores as it is asked for.
        direct = head.only_found and dtype in _CASTS and not input.requires_grad
        self._stored = dtype if direct else torch.float32
        self._cast = None if dtype is self._stored else _CASTS.get(dtype, lambda t: t.to(dtype))
        self._asked = asked
        self._matches = guard(input) if index is None else guard(input, index)
        self._place, self._records = Place(input), input.requires_grad
        self._narrow = index is not None and index.dtype is not torch.int64
        self._rows = head.rows(dims, scale, softcap)
        self._length = self._rows.length(input)
        self._shape = tuple(shape_of_rows(input.shape, dims))
        result = [n for d, n in enumerate(input.shape) if d not in dims]
        # Kept for gradients: maxima, logarithms of the sums, what is beside them; each begins with a whole vector.
        strides = math.ceil(math.prod(result) / 4) * 4, *torch.empty(result, device="meta").stride()
        self._kept = 2 + bool(head.beside), *result
        kept = torch.empty_strided(self._kept, strides, dtype=torch.float32, device=input.device)
        groups, results, addresses = [*kept], [(self._kept, strides, torch.float32)], ["a0"]
        if index is not None:
            found = torch.empty(index.shape, dtype=self._stored, device=input.device)
            groups = [index.long(), found, *groups]
            results.insert(0, (tuple(found.shape), found.stride(), self._stored))
            addresses += ["a1", "b0"]
        addresses += [f"b{len(results) - 1} + {4 * strides[0] * i}" for i in range(len(kept))]
        math_name = self._rows.math(index is not None)
        call = self._bound(math_name, input, groups, scale, even=head.beside == "even")
        offsets = [0] if index is None else [0, None]
        self._run = forms.launching(call, self._place, self._anywhere, results, offsets, addresses)
        self._strides = torch.empty_like(input, device="meta").stride()
        self._gradients: dict[Parts, Callable[..., Tensor | None]] = {}

    def fits(
        self,
        input: Tensor,
        index: Tensor | None,
        scale: float,
        dim: object,
        softcap: float = 0.0,
        asked: torch.dtype | None = None,
    ) -> bool:
        """Whether a call is of this form."""
        return (
            self._dim is dim
            and self._asked is asked
            and self._rows.softcap == softcap
            and self._rows.invariant is inside()
            and type(scale) in (float, int)
            and (scale != 1) is self._scaled
            and (self._matches(input) if index is None else self._matches(input, index))
        )

    def __call__(
        self, input: Tensor, index: Tensor | None = None, scale: float = 1.0
    ) -> Tensor | tuple[Tensor, ...]:
        """The result of a call of this form, recorded by autograd where it records."""
        if self._narrow:
            index = index.long()
        if self._records and torch.is_grad_enabled():
            return record(input, index, scale, self)
        return self.results(*self.numbers(input, index, scale))

    def numbers(self, input: Tensor, index: Tensor | None, scale: float) -> tuple[Tensor | None, Tensor]:
        """(log-probabilities, what is kept of each row): in float32, but for log-probabilities without a gradient."""
        if index is None:
            return None, self._run(input, *self._numbers(scale))
        return self._run(input, index, *self._numbers(scale))

    def _anywhere(self, input: Tensor, *others: Tensor | float) -> Tensor | tuple[Tensor, Tensor]:
        """What `_run` returns, for an input that is misaligned or on another device than the current one."""
        index = others[0] if others and isinstance(others[0], Tensor) else None
        scale = others[-1 - bool(self._rows.softcap)] if self._scaled else 1.0
        column = None if index is None else index.view(self._shape)
        found, *numbers = Statistics.forward(input, column, replace(self._rows, scale=scale))
        kept = torch.stack([t.view(self._kept[1:]) for t in numbers[: self._kept[0]]])
        return kept if index is None else (found.view(index.shape).to(self._stored), kept)

    def results(self, found: Tensor | None, kept: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the function returns."""
        results = self._head.results(found, kept)
        if self._cast is None:
            return results
        return tuple(map(self._cast, results)) if type(results) is tuple else self._cast(results)

    def backward(
        self,
        input: Tensor,
        index: Tensor | None,
        found: Tensor | None,
        kept: Tensor,
        scale: float,
        grads: tuple,
    ) -> Tensor | None:
        """The gradient of the input."""
        grad, of_lse, of_beside = self._head.upstream(*grads)
        differentiable = torch.is_grad_enabled() or batched(grad, of_lse, of_beside)
        if not differentiable:
            d = self._in_one(input, index, found, kept, scale, grad, of_lse, of_beside)
            if d is not None:
                return d
        index, found, grad, of_lse, of_beside, top, log, *rest = (
            None if t is None else t.reshape(self._shape)
            for t in (index, found, grad, of_lse, of_beside, *kept)
        )
        function = gradient_formula if differentiable else Gradient.forward
        rows = replace(self._rows, scale=scale)
        return function(
            input, index, found, top, log, rest[0] if rest else log, grad, of_lse, of_beside, rows
        )

    def _in_one(
        self,
        input: Tensor,
        index: Tensor | None,
        found: Tensor | None,
        kept: Tensor,
        scale: float,
        grad: Tensor | None,
        of_lse: Tensor | None,
        of_beside: Tensor | None,
    ) -> Tensor | None:
        """The gradient by one kernel, where there is one, for tensors as the form has them."""
        rows = self._rows if scale == self._rows.scale else replace(self._rows, scale=scale)
        beside = kept[2] if rows.beside else None
        parts, groups, factor = factors_of(rows, self._length, grad, of_lse, of_beside, index, found, beside)
        run = self._gradients.get(parts)
        if run is None:
            run = self._gradients[parts] = self._gradient(parts, input, groups, scale)
        return run(input, *groups, *self._numbers(scale), factor)

    def _gradient(self, parts: Parts, input: Tensor, groups: list[Tensor], scale: float) -> Callable:
        """A launcher of such gradients, which returns None where it cannot."""
        try:
            call = self._bound("softmax", input, groups, scale, **parts.prologue)
        except NotPlanned:
            return _nothing
        results = ((tuple(input.shape), self._strides, input.dtype),)
        return forms.launching(call, self._place, _nothing, results, [0, *[None] * len(groups)])

    def _numbers(self, scale: float) -> tuple[float, ...]:
        return (*((scale,) if self._scaled else ()), *((self._rows.softcap,) if self._rows.softcap else ()))

    def _bound(
        self, name: str, input: Tensor, groups: list[Tensor], scale: float, **parts: object
    ) -> launch.Call:
        """The Call on the input and tensors of a number each row; of a gradient, which is written last."""
        operands = [input, *(t.view(self._shape).expand(input.shape) for t in groups)]
        operands += [torch.empty_like(input, device="meta")] * (name == "softmax")
        rows = self._rows
        prologue, _ = scaled(scale, rows.softcap, **parts)
        return launch.call_of(
            name, operands, rows.dims, aligned=True, prologue=prologue, invariant=rows.invariant
        )


def _nothing(*_: object) -> None:
    """In the place of a launcher, where there is none."""


class Recorded(torch.autograd.Function):
    """(input, index, scale, form) -> the results of the form."""

    @staticmethod
    def forward(ctx, input, index, scale, form):
        found, kept = form.numbers(input, index, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, index, found, kept)
        ctx.form, ctx.scale = form, scale
        return form.results(found, kept)

    @staticmethod
    def backward(ctx, *grads):
        if not any(g is not None for g in grads):
            return None, None, None, None
        return ctx.form.backward(*ctx.saved_tensors, ctx.scale, grads), None, None, None


record = recorder(Recorded)


def first(
    head: Head,
    input: Tensor,
    index: Tensor | None,
    dim: object,
    dims: tuple[int, ...],
    scale: float,
    dtype: torch.dtype,
    softcap: float = 0.0,
    asked: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The results of a call that is the first of its form, or has none."""
    one = index is None or index.dim() < input.dim() or index.shape[-1] == 1
    if one and input.dim() and type(dim) is int and unseen(input, index) and on_kernel(input):
        try:
            form = Form(head, input, index, dim, dims, scale, dtype, softcap, asked)
        except NotPlanned:
            pass
        else:
            head.known.remember(input, form)
            return form(input, index, scale)
    return serve_head(head, input, index, dims, scale, dtype, softcap)
