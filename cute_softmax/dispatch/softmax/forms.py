"""The forms of softmax and log_softmax: eager calls that repeat, and what autograd records of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan import NotPlanned
from ...runtime import launch, private
from ...runtime.invariance import inside
from ..common import forms
from ..common.arguments import DTYPES, served
from ..common.forms import Place, guard
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
        self.backwards: dict[tuple, Callable] = {}
        if not given:
            self.run = launcher(
                spec.math, (input,), spec.dtype, spec.dims, spec.online, self.anywhere, spec.invariant
            )
            return
        self._others = [(n, _alike(n, value)) for n, value in given.items() if n not in self.tensors]
        result = torch.empty_like(input, dtype=spec.dtype)
        self._shape, self._strides, self._place = tuple(result.shape), result.stride(), Place(result)
        *scored, sink = operands
        log = None if sink is None else numbers_of_rows(input, spec.dims)
        self._rows = log if log is None else (tuple(log.shape), log.stride())
        work = kernels.forward_work(input, *scored, spec, result, sink=sink, sink_log=log)
        self._call, names = work.call(aligned=True), work.prologue.numbers
        self.numbers = [name for name in names if name != "offset"]  # as arguments; `causal` means the offset
        self._fields = [{"scale": "factor", "alpha": "alpha", "offset": "causal"}[name] for name in names]
        self._latest = [], spec
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
            recorded = self.requires_grad and torch.is_grad_enabled()
            return record(input, self) if recorded else self.run(input)
        call = self._of(given)
        if self.requires_grad and torch.is_grad_enabled():
            found = (record_scores if self._rows is None else record_with_sink)(input, *call, self)
        else:
            found = self.run(input, *call)
        return found if self._rows is None else found[0]

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
        addresses = [t.data_ptr() for t in (input, bias, mask) if t is not None]
        of_sink = [] if sink is None else [sink.data_ptr()]
        if not self._place.suits(addresses + of_sink):
            spec = self.spec_of(numbers)
            if sink is not None:
                return kernels.forward_with_sink(input, bias, mask, scale, sink, spec)
            return kernels.forward(input, bias, mask, scale, spec)
        result = forms.empty_strided(self._shape, self._strides, self.spec.dtype)
        if scale is not None:
            scale = scale.float()  # alive until the launch
            addresses.append(scale.data_ptr())
        addresses += *of_sink, result.data_ptr()
        if sink is None:
            self._call(self._place.stream(), *addresses, numbers=numbers)
            return result
        log = forms.empty_strided(*self._rows, torch.float32)
        self._call(self._place.stream(), *addresses, log.data_ptr(), numbers=numbers)
        return result, log

    def anywhere(self, input: Tensor) -> Tensor:
        """The result for a tensor that is misaligned, or on another device than the current one."""
        return kernels.forward(input, None, None, None, self.spec)

    def spec_of(self, numbers: list) -> Spec:
        """The spec of a call with these numbers: scale, alpha and the offset, those that there are."""
        known, spec = self._latest
        if known != numbers:
            spec = self.spec.changed(**dict(zip(self._fields, numbers, strict=True)))
            self._latest = numbers, spec
        return spec

    def backward(self, grad: Tensor, output: Tensor) -> Tensor:
        """The gradient of the input, where that is the scores, by a launcher made once for each form of `grad`."""
        key = grad.stride(), grad.dtype, output.stride()
        run = self.backwards.get(key)
        if run is None:
            run = self.backwards[key] = self._backward_launcher(grad, output)
        return run(grad, output)

    def _backward_launcher(self, grad: Tensor, output: Tensor) -> Callable:
        def anywhere(grad: Tensor, output: Tensor) -> Tensor:
            return kernels.backward(grad, output, None, None, self.of_input)

        fits = served(output, self.of_input.dtype) and grad.dtype in DTYPES
        if not fits or lie_apart(grad, output, self.spec.dims):
            return anywhere
        math, spec = f"{self.spec.math}_backward", self.spec
        try:
            return launcher(
                math, (grad, output), self.of_input.dtype, spec.dims, True, anywhere, spec.invariant
            )
        except NotPlanned:  # for tensors as they lie
            return anywhere


class Recorded(torch.autograd.Function):
    """`Softmax` of a call whose form is known, of scores that are the input itself: (input, form)."""

    @staticmethod
    def forward(ctx, input, form):
        result = form.run(input)
        ctx.save_for_backward(result)
        ctx.form = form
        return result

    @staticmethod
    def backward(ctx, grad):
        form = ctx.form
        (result,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return differentiable(grad, result, None, None, form.of_input), None
        if batched(grad):
            return kernels.backward(grad, result, None, None, form.of_input), None
        return form.backward(grad, result), None


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


record, record_scores = recorder(Recorded), recorder(RecordedScores)
record_with_sink = recorder(RecordedWithSink)


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
    dtype: torch.dtype,
    dims: tuple[int, ...],
    online: bool,
    anywhere: Callable[..., torch.Tensor],
    invariant: bool = False,
) -> Callable[..., torch.Tensor]:
    """A function of inputs of this form that allocates the result and launches.

    It is made for addresses that are multiples of 16 bytes and for the current device being the tensors' own, and
    hands everything else to `anywhere`. invariant: see `plan_call`. Raises NotPlanned.
    """
    result = torch.empty_like(inputs[-1], dtype=dtype)
    if not result.numel():
        return anywhere
    here, shape, strides = Place(result), tuple(result.shape), result.stride()
    call = launch.call_of(math, (*inputs, result), dims, online, aligned=True, invariant=invariant)
    function, plan = call.function, call.plan

    short = plan.movement == "short"
    if not short and (plan.movement != "row" or plan.kernel.kept_modes > 1):

        def run_any(*inputs: torch.Tensor) -> torch.Tensor:
            addresses = [t.data_ptr() for t in inputs]
            if not here.suits(addresses):
                return anywhere(*inputs)
            y = forms.empty_strided(shape, strides, dtype)
            call(here.stream(), *addresses, y.data_ptr())
            return y

        return run_any

    # Written out for one input and for two, with what `here` asks: going through lists would cost half a microsecond.
    device, alone, empty = here.device, here.alone, forms.empty_strided
    stream, current_device = private.current_stream, private.current_device
    if short and len(inputs) == 1:
        rows, columns, warp_rows, ctas, evict_last = call.arguments

        def run_short(x: torch.Tensor) -> torch.Tensor:
            address = x.data_ptr()
            if address & 15 or not (alone or current_device() == device):
                return anywhere(x)
            y = empty(shape, strides, dtype)
            try:
                function(stream(device), rows, columns, warp_rows, ctas, evict_last, address, y.data_ptr())
            except Exception as error:
                raise launch.launch_error(plan, error) from error
            return y

        return run_short

    if short:
        rows, columns, warp_rows, ctas, evict_last = call.arguments

        def run_two_short(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a_address, b_address = a.data_ptr(), b.data_ptr()
            if (a_address | b_address) & 15 or not (alone or current_device() == device):
                return anywhere(a, b)
            y = empty(shape, strides, dtype)
            try:
                function(
                    stream(device),
                    rows,
                    columns,
                    warp_rows,
                    ctas,
                    evict_last,
                    a_address,
                    b_address,
                    y.data_ptr(),
                )
            except Exception as error:
                raise launch.launch_error(plan, error) from error
            return y

        return run_two_short

    rows, columns, ctas, evict_last = call.arguments
    if len(inputs) == 1:
        x_stride, y_stride = plan.row_strides

        def run(x: torch.Tensor) -> torch.Tensor:
            address = x.data_ptr()
            if address & 15 or not (alone or current_device() == device):
                return anywhere(x)
            y = empty(shape, strides, dtype)
            try:
                function(
                    stream(device), rows, columns, ctas, evict_last, address, x_stride, y.data_ptr(), y_stride
                )
            except Exception as error:
                raise launch.launch_error(plan, error) from error
            return y

        return run

    a_stride, b_stride, y_stride = plan.row_strides

    def run_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a_address, b_address = a.data_ptr(), b.data_ptr()
        if (a_address | b_address) & 15 or not (alone or current_device() == device):
            return anywhere(a, b)
        y = empty(shape, strides, dtype)
        try:
            function(
                stream(device),
                rows,
                columns,
                ctas,
                evict_last,
                a_address,
                a_stride,
                b_address,
                b_stride,
                y.data_ptr(),
                y_stride,
            )
        except Exception as error:
            raise launch.launch_error(plan, error) from error
        return y

    return run_two
