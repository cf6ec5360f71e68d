"""Eager calls of softmax and log_softmax on scores: their forms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..plan import NotPlanned
from ..runtime import launch
from . import ops, routes, rules
from .forms import Forms, guard
from .scores import Scores, Spec

Tensor = torch.Tensor
_forms = Forms()
_NUMBERS = ("scale", "alpha")


class Form:
    """All eager calls on scores whose tensors have one device, shapes, strides and dtypes: decided once.

    given: the keyword arguments of the first call; found, spec: what they mean. Of other calls the numbers scale and
    alpha, and an offset of the diagonal, may differ.
    Raises NotPlanned where no kernel serves the calls.
    """

    def __init__(
        self, input: Tensor, dim: object, dtype: object, given: dict[str, object], found: Scores, spec: Spec
    ):
        self.dim, self.dtype, self.spec = dim, dtype, spec
        self.names = frozenset(given)
        self.tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        self.matches = guard(input, *(given[name] for name in self.tensors))
        self.others = [(n, _alike(n, value)) for n, value in given.items() if n not in self.tensors]
        self.records = any(t is not None and t.requires_grad for t in (input, found.bias, found.scale))
        self.full = [name for name in ("bias", "mask") if name in self.tensors]
        self.scaled = "scale" in self.tensors
        prologue = rules.prologue_of(*found.operands, spec)
        self.numbers = [name for name in prologue.numbers if name != "offset"]  # of its own name
        self.causal = spec.causal is not None
        result = torch.empty_like(input, dtype=spec.dtype)
        self.shape, self.strides, self.device = tuple(result.shape), result.stride(), result.get_device()
        operands = [given[name] for name in self.full] + ([found.scale.float()] if self.scaled else [])
        self.call = launch.call_of(
            spec.math,
            (input, *(t.expand(input.shape) for t in operands), result),
            spec.dims,
            spec.online or spec.log,
            aligned=True,
            prologue=prologue,
            query=input.dim() - 2 if self.causal else None,
        )
        self.alone = torch.cuda.device_count() == 1

    def fits(
        self, input: Tensor, dim: object, dtype: object, online: bool, log: bool, given: dict[str, object]
    ) -> bool:
        """Whether a call is of this form. `is`, because 1, 1.0 and True are equal."""
        if not (
            self.dim is dim
            and self.dtype is dtype
            and self.spec.online is online
            and self.spec.log is log
            and given.keys() == self.names
            and self.matches(input, *[given[name] for name in self.tensors])
        ):
            return False
        return all([alike(given[name]) for name, alike in self.others])

    def __call__(self, input: Tensor, given: dict[str, object]) -> Tensor:
        """The result of a call of this form."""
        scale = given["scale"] if self.scaled else None
        operands = input, given.get("bias"), given.get("mask"), scale
        numbers = [given[name] for name in self.numbers]
        if self.causal:
            offset = 0 if given["causal"] is True else given["causal"]
            numbers.append(rules.offset_within(offset, self.shape))
        if self.records and torch.is_grad_enabled():
            return _apply(*operands, self, numbers)
        return self.run(*operands, numbers)

    def run(
        self, input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, numbers: list
    ) -> Tensor:
        """The result, whatever the addresses and the current device."""
        addresses = [t.data_ptr() for t in (input, bias, mask) if t is not None]
        aligned = not any([address & 15 for address in addresses])
        if not (aligned and (self.alone or torch._C._cuda_getDevice() == self.device)):
            return rules.forward(input, bias, mask, scale, self.spec_of(numbers))
        result = ops._empty_strided_cuda(self.shape, self.strides, self.spec.dtype)
        if scale is not None:
            scale = scale.float()  # alive until the launch
            addresses.append(scale.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.call(stream, *addresses, result.data_ptr(), numbers=numbers)
        return result

    def spec_of(self, numbers: list) -> Spec:
        """That of a call with these numbers: scale, alpha and the offset, those that there are."""
        names = [*self.numbers, "causal"] if self.causal else self.numbers
        return self.spec.changed(**dict(zip(names, numbers, strict=True))) if names else self.spec


class Recorded(torch.autograd.Function):
    """`rules.Forward` of a call whose form is known."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, form: Form, numbers: list):
        result = form.run(input, bias, mask, scale, numbers)
        rules.Forward.setup_context(ctx, (input, bias, mask, scale, form.spec_of(numbers)), result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return *rules.Forward.backward(ctx, grad), None


_apply = ops.apply_of(Recorded)


def _alike(name: str, value: object) -> Callable[[object], bool]:
    """Whether another value of an argument that is no tensor makes a call of the same form."""
    if name in _NUMBERS:  # 1 is none
        return lambda other: type(other) in (float, int) and (other == 1) is (value == 1)
    if name == "causal" and type(value) is int:
        return lambda other: type(other) is int
    if name == "empty_rows":
        return lambda other: type(other) is str and other == value
    return lambda other: other is value


def find(
    input: Tensor, dim: object, dtype: object, online: bool, log: bool, given: dict[str, object]
) -> Form | None:
    """The form of an eager call, if it has been made before."""
    form = _forms.latest
    if form is not None and form.fits(input, dim, dtype, online, log, given):
        return form
    return _forms.find(input, dim, dtype, online, log, given)


def made(
    input: Tensor, dim: object, dtype: object, given: dict[str, object], found: Scores, spec: Spec
) -> Form | None:
    """A new form for an eager call, remembered; None where none can serve it."""
    told_apart = type(dim) in (int, tuple) and not any(
        type(value) not in (float, int)
        for name, value in given.items()
        if name in _NUMBERS and value is not found.scale
    )
    served = input.numel() and rules.served(input, spec.dtype, found.bias, found.scale)
    if not (told_apart and served and routes.unseen(input, *found.operands)):
        return None
    try:
        form = Form(input, dim, dtype, given, found, spec)
    except NotPlanned:
        return None
    _forms.remember(input, form)
    return form
