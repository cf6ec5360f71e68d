"""Forms of eager calls: each holds what its first call decided, and later calls of the form find it again.

An operator's way through the dispatcher costs more host time than the launch. An eager call that repeats looks its form
up, allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards

from ..plan import NotPlanned
from ..runtime import launch
from . import softmax_kernels
from .arguments import DTYPES, served
from .softmax import Forward, differentiable
from .softmax_kernels import lie_apart, offset_within, prologue_of
from .spec import Scores, Spec
from .state import TENSORS, batched, recorder, unseen

try:  # what code compiled by inductor allocates with: 0.6 us less than torch.empty_like
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:

    def _empty_strided_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


Tensor = torch.Tensor
_NUMBERS = ("scale", "alpha")
MOST_SHAPES = 4096  # a program with ever new ones starts over, at some 50 us each
# They differ in strides, dtypes, arguments, and in what of torch's state the dispatcher looks at (autograd, autocast).
MOST_OF_A_SHAPE = 8


class Forms(dict[torch.Size, tuple]):
    """The forms of one function by the shape of its input. Each has a method `fits(input, ...)`.

    latest: that of the last call found, to be looked at first: a model tends to repeat it.
    """

    latest = None

    def find(self, input: torch.Tensor, *call: object) -> object | None:
        """The form of a call, if it has been made before."""
        if type(input) not in TENSORS:
            return None
        for form in self.get(input.shape, ()):
            if form.fits(input, *call):
                self.latest = form
                return form
        return None

    def remember(self, input: torch.Tensor, form: object) -> None:
        """Add a new form."""
        if len(self) >= MOST_SHAPES:
            self.clear()
        # Anew: another thread may be looking through them.
        self[input.shape] = (*self.get(input.shape, ()), form)[-MOST_OF_A_SHAPE:]

    def clear(self) -> None:
        """Forget all forms."""
        super().clear()
        self.latest = None


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Whether as many others are like these (type, device, dtype, shape, strides, whether they require a gradient), and
    torch in the same state (autocast, functorch, dispatch modes); one call into C++ that keeps no tensor."""
    shapes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


class Form:
    """All eager calls of softmax or log_softmax on tensors of one device, shapes, strides and dtypes: decided once.

    given: the keyword arguments of the first call; found, spec: what they mean. Of other calls the numbers scale and
    alpha, and an offset of the diagonal, may differ.

    matches(input, *tensors): whether tensors are of this form, see `guard`.
    run(input, *call): the result for tensors of this form; `call` is nothing where scores are the input itself, else
        bias, mask, scale and the prologue's numbers.
    Raises NotPlanned where no kernel serves the calls.
    """

    __slots__ = ("_call", "_others", "_place", "backwards", "dim", "dtype", "input_dtype", "matches", "names")
    __slots__ += ("numbers", "online", "requires_grad", "run", "spec", "tensors")

    def __init__(
        self, input: Tensor, dim: object, dtype: object, given: dict[str, object], found: Scores, spec: Spec
    ):
        self.dim, self.dtype, self.online, self.spec = dim, dtype, spec.online, spec
        self.input_dtype = input.dtype
        self.names = given.keys() | ()
        self.tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        self.matches = guard(input, *(given[name] for name in self.tensors))
        self.requires_grad = any(t is not None and t.requires_grad for t in (input, found.bias, found.scale))
        self.backwards: dict[tuple, Callable] = {}
        if not given:
            self.run = launcher(spec.math, (input,), spec.dtype, spec.dims, spec.online, self.anywhere)
            return
        self._others = [(n, _alike(n, value)) for n, value in given.items() if n not in self.tensors]
        prologue = prologue_of(*found.operands, spec)
        self.numbers = [name for name in prologue.numbers if name != "offset"]  # of its own name
        result = torch.empty_like(input, dtype=spec.dtype)
        self._place = (
            tuple(result.shape),
            result.stride(),
            result.get_device(),
            torch.cuda.device_count() == 1,
        )
        operands = [found.bias, found.mask, None if found.scale is None else found.scale.float()]
        self._call = launch.call_of(
            spec.math,
            (input, *(t.expand(input.shape) for t in operands if t is not None), result),
            spec.dims,
            spec.online or spec.log,
            aligned=True,
            prologue=prologue,
            query=None if spec.causal is None else input.dim() - 2,
        )
        self.run = self._run

    def fits(self, input: Tensor, dim: object, dtype: object, online: bool, given: dict[str, object]) -> bool:
        """Whether a call is of this form. `is`, because 1, 1.0 and True are equal."""
        if not (
            self.dim is dim
            and self.dtype is dtype
            and self.online is online
            and given.keys() == self.names
            and self.matches(input, *[given[name] for name in self.tensors])
        ):
            return False
        return not given or all([alike(given[name]) for name, alike in self._others])

    def __call__(self, input: Tensor, given: dict[str, object]) -> Tensor:
        """The result of a call of this form, recorded by autograd where it records."""
        call = self._of(given) if given else ()
        if self.requires_grad and torch.is_grad_enabled():
            return record(input, *call, self)
        return self.run(input, *call)

    def _of(self, given: dict[str, object]) -> tuple:
        """What `run` takes of a call besides its input."""
        numbers = [given[name] for name in self.numbers]
        if self.spec.causal is not None:
            offset = 0 if given["causal"] is True else given["causal"]
            numbers.append(offset_within(offset, self._place[0]))
        scale = given["scale"] if "scale" in self.tensors else None
        return given.get("bias"), given.get("mask"), scale, numbers

    def _run(
        self, input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, numbers: list
    ) -> Tensor:
        addresses = [t.data_ptr() for t in (input, bias, mask) if t is not None]
        aligned = not any([address & 15 for address in addresses])
        shape, strides, device, alone = self._place
        if not (aligned and (alone or torch._C._cuda_getDevice() == device)):
            return softmax_kernels.forward(input, bias, mask, scale, self.spec_of(numbers))
        result = _empty_strided_cuda(shape, strides, self.spec.dtype)
        if scale is not None:
            scale = scale.float()  # alive until the launch
            addresses.append(scale.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._call(stream, *addresses, result.data_ptr(), numbers=numbers)
        return result

    def anywhere(self, input: Tensor) -> Tensor:
        """The result for a tensor that is misaligned, or on another device than the current one."""
        return softmax_kernels.forward(input, None, None, None, self.spec)

    def spec_of(self, numbers: list) -> Spec:
        """That of a call with these numbers: scale, alpha and the offset, those that there are."""
        names = self.numbers if self.spec.causal is None else [*self.numbers, "causal"]
        return self.spec.changed(**dict(zip(names, numbers, strict=True))) if names else self.spec

    def backward(self, grad: Tensor, output: Tensor) -> Tensor:
        """The gradient of the input, where that is the scores, by a launcher made once for each form of `grad`."""
        key = grad.stride(), grad.dtype, output.stride()
        run = self.backwards.get(key)
        if run is None:
            run = self.backwards[key] = self._backward_launcher(grad, output)
        return run(grad, output)

    def _backward_launcher(self, grad: Tensor, output: Tensor) -> Callable:
        def anywhere(grad: Tensor, output: Tensor) -> Tensor:
            return softmax_kernels.backward(grad, output, None, None, self.spec, self.input_dtype)

        fits = served(output, self.input_dtype) and grad.dtype in DTYPES
        if not fits or lie_apart(grad, output, self.spec.dims):
            return anywhere
        math = f"{self.spec.math}_backward"
        return launcher(math, (grad, output), self.input_dtype, self.spec.dims, True, anywhere)


class Recorded(torch.autograd.Function):
    """`Forward` of a call whose form is known: (input, what else `run` takes, form)."""

    @staticmethod
    def forward(ctx, input, *rest):
        *call, form = rest
        result = form.run(input, *call)
        if call:
            *operands, numbers = call
            Forward.setup_context(ctx, (input, *operands, form.spec_of(numbers)), result)
        else:
            ctx.save_for_backward(result)
        ctx.form = form if not call else None
        return result

    @staticmethod
    def backward(ctx, grad):
        form = ctx.form
        if form is None:
            return *Forward.backward(ctx, grad), None
        (result,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return differentiable(grad, result, None, None, form.spec, form.input_dtype), None
        if batched(grad):
            return softmax_kernels.backward(grad, result, None, None, form.spec, form.input_dtype), None
        return form.backward(grad, result), None


record = recorder(Recorded)


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
    input: Tensor, dim: object, dtype: object, given: dict[str, object], found: Scores, spec: Spec
) -> Form | None:
    """A new form for an eager call; None where none can serve it."""
    told_apart = type(dim) in (int, tuple) and not any(
        type(value) not in (float, int)
        for name, value in given.items()
        if name in _NUMBERS and value is not found.scale
    )
    fits = input.numel() and served(input, spec.dtype, found.bias, found.scale)
    if not (told_apart and fits and unseen(input, *found.operands)):
        return None
    try:
        return Form(input, dim, dtype, given, found, spec)
    except NotPlanned:
        return None


def launcher(
    math: str,
    inputs: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    dims: tuple[int, ...],
    online: bool,
    anywhere: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """A function of inputs of this form that allocates the result and launches.

    It is made for addresses that are multiples of 16 bytes and for the current device being the tensors' own, and
    hands everything else to `anywhere`.
    """
    result = torch.empty_like(inputs[-1], dtype=dtype)
    if not result.numel():
        return anywhere
    device, shape, strides = result.get_device(), tuple(result.shape), result.stride()
    call = launch.call_of(math, (*inputs, result), dims, online, aligned=True)
    function, plan = call.function, call.plan
    stream, empty = torch._C._cuda_getCurrentRawStream, _empty_strided_cuda
    current_device, alone = torch._C._cuda_getDevice, torch.cuda.device_count() == 1

    if plan.movement != "row" or plan.kernel.kept_modes > 1:

        def run_any(*inputs: torch.Tensor) -> torch.Tensor:
            addresses = [t.data_ptr() for t in inputs]
            if any(a & 15 for a in addresses) or not (alone or current_device() == device):
                return anywhere(*inputs)
            y = empty(shape, strides, dtype)
            call(stream(device), *addresses, y.data_ptr())
            return y

        return run_any

    # Written out for one input and for two: going through a list of operands would cost half a microsecond.
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
