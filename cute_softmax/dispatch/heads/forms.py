"""The forms of heads over rows: eager calls that repeat, and what autograd records of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ..common import forms
from ..common.forms import Forms, Place, guard
from ..common.state import batched, recorder, unseen
from .calls import HEADS, Gradient, Rows, Statistics, converted, gradient_formula, on_kernel, serve_head
from .kernels import scaled

Tensor = torch.Tensor
# By what tells calls of a function apart beside tensors: the dimensions of an entropy, what else a selective one gives.
entropies, selected = Forms(), Forms()


class Form:
    """All eager calls of a head on tensors of one device, shapes, strides and dtypes, with at most one element of each
    row chosen: decided once.

    asked: the argument that tells calls apart, compared by `is`. The scale may differ, unless it is 1.
    Raises NotPlanned where no kernel serves the calls.
    """

    def __init__(
        self,
        name: str,
        input: Tensor,
        index: Tensor | None,
        asked: object,
        dims: tuple[int, ...],
        scale: float,
        dtype: torch.dtype,
    ):
        self._head, self._asked, self._scaled, self._dtype = HEADS[name], asked, scale != 1, dtype
        self._matches = guard(input) if index is None else guard(input, index)
        self._place, self._records = Place(input), input.requires_grad
        self._rows = Rows(dims, scale, self._head.entropies)
        self._shape = tuple(1 if d in dims else n for d, n in enumerate(input.shape))
        result = [n for d, n in enumerate(input.shape) if d not in dims]
        # Kept for gradients: maxima, logarithms of the sums, entropies.
        kept = torch.empty((2 + self._head.entropies, *result), dtype=torch.float32, device=input.device)
        self._kept, self._found = (tuple(kept.shape), kept.stride()), None
        self._pitch = kept.stride(0) * kept.element_size()
        groups = [*kept]
        if index is not None:
            found = torch.empty(index.shape, dtype=torch.float32, device=input.device)
            self._found = tuple(found.shape), found.stride()
            groups = [index.long(), found, *groups]
        self._call = self._bound(name, input, groups, scale)
        self._strides = torch.empty_like(input, device="meta").stride()
        self._gradient = None

    def fits(self, input: Tensor, index: Tensor | None, scale: float, asked: object) -> bool:
        """Whether a call is of this form."""
        return (
            self._asked is asked
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
            [first, first + pitch, first + 2 * pitch] if self._rows.entropies else [first, first + pitch]
        )
        self._call(self._place.stream(), *addresses, numbers=(scale,) if self._scaled else ())
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
        grad, of_lse, of_entropy = self._head.upstream(*grads)
        differentiable = torch.is_grad_enabled() or batched(grad, of_lse, of_entropy)
        if not differentiable and of_lse is None and of_entropy is None:
            d = self._at_target(input, index, found, grad, scale)
            if d is not None:
                return d
        index, found, grad, of_lse, of_entropy, top, log, *rest = (
            None if t is None else t.reshape(self._shape)
            for t in (index, found, grad, of_lse, of_entropy, *kept)
        )
        function = gradient_formula if differentiable else Gradient.forward
        rows = replace(self._rows, scale=scale)
        return function(
            input, index, found, top, log, rest[0] if rest else log, grad, of_lse, of_entropy, rows
        )

    def _at_target(
        self, input: Tensor, index: Tensor, found: Tensor, grad: Tensor, scale: float
    ) -> Tensor | None:
        """The gradient by one kernel, where there is one, for tensors as the form has them."""
        address = input.data_ptr()
        if address & 15 or not self._place.current():
            return None
        factors = torch.mul(grad.to(torch.float32), -scale).contiguous()
        if self._gradient is None:
            groups = factors, index, found
            try:
                self._gradient = self._bound("softmax", input, groups, scale, alpha="groups", target=True)
            except NotPlanned:
                self._gradient = ()
        if not self._gradient:
            return None
        d = forms.empty_strided(tuple(input.shape), self._strides, input.dtype)
        addresses = address, factors.data_ptr(), index.data_ptr(), found.data_ptr(), d.data_ptr()
        self._gradient(self._place.stream(), *addresses, numbers=(scale,) if self._scaled else ())
        return d

    def _bound(
        self, math: str, input: Tensor, groups: list[Tensor], scale: float, **parts: object
    ) -> launch.Call:
        """The Call on the input and tensors of a number each row; of a gradient, which is written last."""
        operands = [input, *(t.view(self._shape).expand(input.shape) for t in groups)]
        operands += [torch.empty_like(input, device="meta")] * (math == "softmax")
        prologue, _ = scaled(scale, **parts)
        return launch.call_of(math, operands, self._rows.dims, aligned=True, prologue=prologue)


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
    known: Forms,
    name: str,
    input: Tensor,
    index: Tensor | None,
    asked: object,
    dims: tuple[int, ...],
    scale: float,
    dtype: torch.dtype,
) -> Tensor | tuple[Tensor, ...]:
    """The results of a call of a head that is the first of its form, or has none."""
    one = index is None or index.dim() < input.dim() or index.shape[-1] == 1
    if (
        one
        and input.dim()
        and type(asked) in (int, bool, tuple)
        and unseen(input, index)
        and on_kernel(input)
    ):
        try:
            form = Form(name, input, index, asked, dims, scale, dtype)
        except NotPlanned:
            pass
        else:
            known.remember(input, form)
            return form(input, index, scale)
    return serve_head(name, input, index, dims, scale, dtype)
