"""The forms of heads over rows: eager calls that repeat, and what autograd records of them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.forms import Place, guard
from ..common.formulas import shape_of_rows
from ..common.state import batched, recorder, unseen
from .calls import Gradient, Head, Statistics, converted, gradient_formula, on_kernel, serve_head
from .kernels import Parts, factors_of, scaled

Tensor = torch.Tensor


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
        self._head, self._dim, self._scaled, self._dtype = head, dim, scale != 1, dtype
        self._asked = asked
        self._matches = guard(input) if index is None else guard(input, index)
        self._place, self._records = Place(input), input.requires_grad
        self._rows = head.rows(dims, scale, softcap)
        self._length = self._rows.length(input)
        self._shape = tuple(shape_of_rows(input.shape, dims))
        result = [n for d, n in enumerate(input.shape) if d not in dims]
        # Kept for gradients: maxima, logarithms of the sums, what is beside them; each begins with a whole vector.
        strides = math.ceil(math.prod(result) / 4) * 4, *torch.empty(result, device="meta").stride()
        self._kept, self._found = ((2 + bool(head.beside), *result), strides), None
        self._pitch = 4 * strides[0]
        kept = torch.empty_strided(*self._kept, dtype=torch.float32, device=input.device)
        groups = [*kept]
        if index is not None:
            found = torch.empty(index.shape, dtype=torch.float32, device=input.device)
            self._found = tuple(found.shape), found.stride()
            groups = [index.long(), found, *groups]
        math_name = self._rows.math(index is not None)
        self._call = self._bound(math_name, input, groups, scale, even=head.beside == "even")
        self._strides = torch.empty_like(input, device="meta").stride()
        self._gradients: dict[Parts, launch.Call | None] = {}

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
            and (self._matches(input) if self._found is None else self._matches(input, index))
        )

    def __call__(
        self, input: Tensor, index: Tensor | None = None, scale: float = 1.0
    ) -> Tensor | tuple[Tensor, ...]:
        """The result of a call of this form, recorded by autograd where it records."""
        if index is not None:
            index = index.long()
        if self._records and torch.is_grad_enabled():
            return record(input, index, scale, self)
        return self.results(*self.numbers(input, index, scale))

    def numbers(self, input: Tensor, index: Tensor | None, scale: float) -> tuple[Tensor | None, Tensor]:
        """(log-probabilities, what is kept of each row), in float32."""
        address, found = input.data_ptr(), None
        if address & 15 or not self._place.current():
            column = None if index is None else index.view(self._shape)
            found, *numbers = Statistics.forward(input, column, replace(self._rows, scale=scale))
            numbers = torch.stack([t.view(self._kept[0][1:]) for t in numbers[: self._kept[0][0]]])
            return None if index is None else found.view(index.shape), numbers
        addresses = [address]
        if index is not None:
            found = forms.empty_strided(*self._found, torch.float32)
            addresses += index.data_ptr(), found.data_ptr()
        kept = forms.empty_strided(*self._kept, torch.float32)
        first, pitch = kept.data_ptr(), self._pitch
        addresses += (
            [first, first + pitch, first + 2 * pitch] if self._rows.beside else [first, first + pitch]
        )
        self._call(self._place.stream(), *addresses, numbers=self._numbers(scale))
        return found, kept

    def results(self, found: Tensor | None, kept: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the function returns."""
        results = self._head.results(found, kept)
        return results if self._dtype is torch.float32 else converted(results, self._dtype)

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
        address = input.data_ptr()
        if address & 15 or not self._place.current():
            return None
        rows = self._rows if scale == self._rows.scale else replace(self._rows, scale=scale)
        beside = kept[2] if rows.beside else None
        parts, groups = factors_of(rows, self._length, grad, of_lse, of_beside, index, found, beside)
        if parts not in self._gradients:
            try:
                self._gradients[parts] = self._bound("softmax", input, groups, scale, **parts.prologue)
            except NotPlanned:
                self._gradients[parts] = None
        call = self._gradients[parts]
        if call is None:
            return None
        d = forms.empty_strided(tuple(input.shape), self._strides, input.dtype)
        addresses = address, *[t.data_ptr() for t in groups], d.data_ptr()
        call(self._place.stream(), *addresses, numbers=self._numbers(scale))
        return d

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
