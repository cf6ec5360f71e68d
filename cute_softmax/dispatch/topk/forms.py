"""The forms of choices: eager calls that repeat."""

from __future__ import annotations

import torch

from ...runtime.invariance import inside
from ..common.forms import Forms, Place, guard
from ..common.state import recorder, unseen
from .calls import Chosen, on_kernel, serve
from .kernels import Choice, call_of, choose, matrix

Tensor = torch.Tensor
known = Forms()


class Form:
    """All eager calls on tensors of one device, shape, strides and dtype whose other arguments are equal: decided once.

    options: the arguments that are no tensors, as the caller gave them.
    """

    __slots__ = ("_call", "_matches", "_options", "_place", "_records", "_types", "choice", "follower")

    def __init__(self, input: Tensor, choice: Choice, options: tuple):
        self._matches, self._options, self._types = guard(input), options, [*map(type, options)]
        self._place, self._records, self.choice = Place(input), input.requires_grad, choice
        rows = matrix(input)
        # Of others a copy is read, and addresses decide how wide: those are planned call by call.
        usual = (
            input.numel() and choice.k and rows.data_ptr() == input.data_ptr() and not rows.data_ptr() & 15
        )
        self._call = call_of(rows, choice) if usual else None

    def fits(self, input: Tensor, options: tuple) -> bool:
        """Whether a call is of this form."""
        # 1 and True are equal, and tensors have an equality of their own.
        return (
            [*map(type, options)] == self._types
            and options == self._options
            and self.choice.invariant is inside()
            and self._matches(input)
        )

    def __call__(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The results of a call of this form, recorded by autograd where it records."""
        if self._records and torch.is_grad_enabled():
            return record(input, self)
        return self.run(input)

    def run(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """`choose` for tensors of this form."""
        call = None if input.data_ptr() & 15 or not self._place.current() else self._call
        return choose(input, self.choice, call)


class Recorded(torch.autograd.Function):
    """(input, form) -> the results of the form; kept and differentiated as by `Chosen`."""

    @staticmethod
    def forward(ctx, input, form):
        output = form.run(input)
        Chosen.setup_context(ctx, (input, form.choice), output)
        return output

    @staticmethod
    def backward(ctx, grad, _):
        return Chosen.backward(ctx, grad, _)


record = recorder(Recorded)


def first(input: Tensor, choice: Choice, options: tuple) -> tuple[Tensor, Tensor]:
    """The results of a call that is the first of its form, or has none."""
    if unseen(input) and on_kernel(input, choice.dtype):
        form = Form(input, choice, options)
        known.remember(input, form)
        return form(input)
    return serve(input, choice)
