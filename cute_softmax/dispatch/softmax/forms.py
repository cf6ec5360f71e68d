"""The forms of softmax and log_softmax: eager calls that repeat, and what autograd records of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ...runtime.invariance import inside
from ..common.arguments import served
from ..common.forms import MOST_OF_A_SHAPE, Place, guard, launching
from ..common.spec import Operands, Spec
from ..common.state import batched, recorder, unseen
from . import kernels
from .functions import Softmax, differentiable
from .kernels import lie_apart, numbers_of_rows, offset_within
from .sinks import SoftmaxWithSink

Tensor = torch.Tensor
_NUMBERS = ("scale", "alpha")


class Form:
    """All eager calls of softmax or log_softmax on tensors of one device, shapes, strides and dtypes: decided once.

    given: the keyword arguments of the first call; operands, spec: what they mean. Of other calls the numbers scale and
    alpha, and an offset of the diagonal, may differ.

    matches(input, *tensors): whether tensors are of this form, see `guard`.
    run(input, *call): the result for tensors of this form; `call` is nothing where scores are the input itself, else
        bias, mask, scale, sink and the prologue's numbers. With a sink there are two results, see `SoftmaxWithSink`.
    record(input): the first, recorded by autograd.
    Raises NotPlanned where no kernel serves the calls.
    """

    def __init__(
        self,
        input: Tensor,
        dim: object,
        dtype: object,
        given: dict[str, object],
        operands: Operands,
        spec: Spec,
    ):
        self.dim, self.dtype, self.online, self.spec = dim, dtype, spec.online, spec
        self.invariant = spec.invariant
        self.of_input = spec if spec.dtype is input.dtype else spec.changed(dtype=input.dtype)
        self.names = given.keys() | ()
        self.tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        self.matches = guard(input, *(given[name] for name in self.tensors))
        self.requires_grad = any(
            t is not None and t.requires_grad for t in (input, operands.bias, operands.scale, operands.sink)
        )
        self.backwards: tuple[tuple[Callable, Callable], ...] = ()  # (whether it is for tensors, a launcher)
        self._operands = [name for name, t in zip(Operands._fields, operands, strict=True) if t is not None]
        self._latest = [], spec
        if not given:
            self.run = launcher(
                spec.math, (input,), torch.empty_like(input, dtype=spec.dtype), spec.dims, spec.online, self._anywhere,
                spec.invariant,
            )  # fmt: skip
            if self.requires_grad:
                self.record = recorded(self)
            return
        self._others = [(n, _alike(n, value)) for n, value in given.items() if n not in self.tensors]
        self._shape = tuple(input.shape)
        result = torch.empty_like(input, dtype=spec.dtype)
        *scored, sink = operands
        self._sunk = sink is not None
        log = numbers_of_rows(input, spec.dims) if self._sunk else None
        work = kernels.forward_work(input, *scored, spec, result, sink=sink, sink_log=log)
        call, names = work.call(aligned=True), work.prologue.numbers
        self.numbers = [name for name in names if name != "offset"]  # as arguments; `causal` means the offset
        self._fields = [{"scale": "factor", "alpha": "alpha", "offset": "causal"}[name] for name in names]
        offsets = [None if name == "scale" else 0 for name in ("input", *self._operands)]
        results = [(tuple(t.shape), t.stride(), t.dtype) for t in (result, log) if t is not None]
        self._launch = launching(call, Place(result), self._anywhere, results, offsets)
        self.run = self._run

    def fits(self, input: Tensor, dim: object, dtype: object, online: bool, given: dict[str, object]) -> bool:
        """Whether a call is of this form. `is`, because 1, 1.0 and True are equal."""
        alike = self.dim is dim and self.dtype is dtype and self.online is online
        if not alike or self.invariant is not inside():
            return False
        if not given:
            return not self.names and self.matches(input)
        return (
            given.keys() == self.names
            and self.matches(input, *[given[name] for name in self.tensors])
            and all([alike(given[name]) for name, alike in self._others])
        )

    def __call__(self, input: Tensor, given: dict[str, object]) -> Tensor:
        """The result of a call of this form, recorded by autograd where it records."""
        if not given:
            records = self.requires_grad and torch.is_grad_enabled()
            return self.record(input) if records else self.run(input)
        call = self._of(given)
        if self.requires_grad and torch.is_grad_enabled():
            found = (record_with_sink if self._sunk else record_scores)(input, *call, self)
        else:
            found = self.run(input, *call)
        return found[0] if self._sunk else found

    def _of(self, given: dict[str, object]) -> tuple:
        """What `run` takes of a call besides its input."""
        numbers = [given[name] for name in self.numbers]
        if self.spec.causal is not None:
            offset = 0 if given["causal"] is True else given["causal"]
            numbers.append(offset_within(offset, self._shape))
        scale = given["scale"] if "scale" in self.tensors else None
        return given.get("bias"), given.get("mask"), scale, given.get("sink"), numbers

    def _run(
        self,
        input: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        scale: Tensor | None,
        sink: Tensor | None,
        numbers: list,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if scale is not None:
            scale = scale.float()
        tensors = [t for t in (input, bias, mask, scale, sink) if t is not None]
        return self._launch(*tensors, *numbers)

    def _anywhere(self, input: Tensor, *call: Tensor | float) -> Tensor | tuple[Tensor, Tensor]:
        """What `run` returns, for tensors that are misaligned, or on another device than the current one."""
        given, numbers = call[: len(self._operands)], call[len(self._operands) :]
        *scored, sink = Operands(**dict(zip(self._operands, given, strict=True)))
        spec = self.spec_of([*numbers])
        if sink is not None:
            return kernels.forward_with_sink(input, *scored, sink, spec)
        return kernels.forward(input, *scored, spec)

    def spec_of(self, numbers: list) -> Spec:
        """The spec of a call with these numbers: scale, alpha and the offset, those that there are."""
        known, spec = self._latest
        if known != numbers:
            spec = self.spec.changed(**dict(zip(self._fields, numbers, strict=True)))
            self._latest = numbers, spec
        return spec

    def backward(self, grad: Tensor, output: Tensor) -> Tensor:
        """The gradient of the input, where that is the scores, by a launcher made once for each form of `grad`."""
        for matches, run in self.backwards:
            if matches(grad, output):
                return run(grad, output)
        if not batched(grad):
            run = self._backward_launcher(grad, output)
            if grad is not output:  # which no guard takes
                self.backwards = (*self.backwards, (guard(grad, output), run))[-MOST_OF_A_SHAPE:]
            return run(grad, output)
        return kernels.backward(grad, output, None, None, self.of_input)

    def _backward_launcher(self, grad: Tensor, output: Tensor) -> Callable:
        def anywhere(grad: Tensor, output: Tensor) -> Tensor:
            return kernels.backward(grad, output, None, None, self.of_input)

        fits = served(output, self.of_input.dtype, grad)
        if not fits or lie_apart(grad, output, self.spec.dims):
            return anywhere
        math, spec = f"{self.spec.math}_backward", self.spec
        result = torch.empty_like(output, dtype=self.of_input.dtype)
        try:
            return launcher(math, (grad, output), result, spec.dims, True, anywhere, spec.invariant)
        except NotPlanned:  # for tensors as they lie
            return anywhere


def recorded(form: Form) -> Callable[[Tensor], Tensor]:
    """`form.run` of scores that are the input itself, recorded by autograd: `Softmax` of a call whose form is known.

    Each form has an autograd function of its own: to take the form as an argument and keep it costs half a microsecond.
    """
    run = form.run

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            result = run(input)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, grad):
            (result,) = ctx.saved_tensors
            if torch.is_grad_enabled():  # a gradient of the gradient is wanted
                return differentiable(grad, result, None, None, form.of_input)
            return form.backward(grad, result)

    return recorder(Recorded)


class RecordedScores(torch.autograd.Function):
    """`Softmax` of a call whose form is known, of scores made of the input: (input, what else `run` takes, form)."""

    @staticmethod
    def forward(ctx, input, bias, mask, scale, sink, numbers, form):
        result = form.run(input, bias, mask, scale, sink, numbers)
        Softmax.setup_context(ctx, (input, bias, mask, scale, form.spec_of(numbers)), result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return *Softmax.backward(ctx, grad), None, None


class RecordedWithSink(torch.autograd.Function):
    """`SoftmaxWithSink`, likewise."""

    @staticmethod
    def forward(ctx, *inputs):
        *call, numbers, form = inputs
        results = form.run(*call, numbers)
        SoftmaxWithSink.setup_context(ctx, (*call, form.spec_of(numbers)), results)
        return results

    @staticmethod
    def backward(ctx, *grads):
        return *SoftmaxWithSink.backward(ctx, *grads), None


record_scores, record_with_sink = recorder(RecordedScores), recorder(RecordedWithSink)


def _alike(name: str, value: object) -> Callable[[object], bool]:
    """Whether another value of an argument that is no tensor makes a call of the same form."""
    if name in _NUMBERS:  # 1 is none
        return lambda other: type(other) in (float, int) and (other == 1) is (value == 1)
    if name == "causal" and type(value) is int:
        return lambda other: type(other) is int
    if name == "empty_rows":
        return lambda other: type(other) is str and other == value
    return lambda other: other is value


def form_of(
    input: Tensor, dim: object, dtype: object, given: dict[str, object], operands: Operands, spec: Spec
) -> Form | None:
    """A new form for an eager call; None where none can serve it."""
    told_apart = type(dim) in (int, tuple) and not any(
        type(value) not in (float, int)
        for name, value in given.items()
        if name in _NUMBERS and value is not operands.scale
    )
    fits = input.numel() and served(input, spec.dtype, operands.bias, operands.scale, operands.sink)
    if not (told_apart and fits and unseen(input, *operands)):
        return None
    try:
        return Form(input, dim, dtype, given, operands, spec)
    except NotPlanned:
        return None


def launcher(
    math: str,
    inputs: tuple[torch.Tensor, ...],
    result: torch.Tensor,
    dims: tuple[int, ...],
    online: bool,
    anywhere: Callable[..., torch.Tensor],
    invariant: bool = False,
) -> Callable[..., torch.Tensor]:
    """A function of inputs of this form that allocates a result like this one and launches.

    It is made for addresses that are multiples of 16 bytes and for the current device being the tensors' own, and
    hands everything else to `anywhere`. invariant: see `plan_call`. Raises NotPlanned.
    """
    if not result.numel():
        return anywhere
    call = launch.call_of(math, (*inputs, result), dims, online, aligned=True, invariant=invariant)
    results = ((tuple(result.shape), result.stride(), result.dtype),)
    return launching(call, Place(result), anywhere, results, [0] * len(inputs))
