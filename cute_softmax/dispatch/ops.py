"""Eager calls of one form, autograd, and the torch.library operators with schemas and fakes.

An operator's way through the dispatcher costs more host time than the launch. So eager calls take a `Form`, made
once for each combination of shape, strides and dtypes, and whatever must see an operator (torch.compile, export,
dispatch modes) sees the ones that are defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch.autograd import forward_ad

from ..runtime import launch
from .forms import guard
from .scores import Spec, backward_formula, over

try:  # what code compiled by inductor allocates with: 0.6 us less than torch.empty_like
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:

    def _empty_strided_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


_BATCHED = torch._C._dispatch_key_parse("Batched")


def on_kernel(tensor: torch.Tensor, result_dtype: torch.dtype) -> bool:
    """Whether our kernels serve it; all else goes to ATen."""
    return tensor.is_cuda and tensor.dtype in launch.DTYPE_NAMES and result_dtype in launch.DTYPE_NAMES


def transformed() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) or forward-mode AD is under way.

    Their rules are those of the autograd functions in `rules` and `reductions`; a kernel launched behind their back
    would give a wrong derivative (zero) without a word.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """Its `apply`, less the test for functorch, which eager calls have made before."""
    return super(torch.autograd.Function, function).apply


def batched(*tensors: torch.Tensor | None) -> bool:
    """Whether one of these stands for several, as upstream gradients with `is_grads_batched` of torch.autograd.grad: an
    older vmap than functorch's, for torch's operations alone."""
    return any(t is not None and torch._C._dispatch_keys(t).has(_BATCHED) for t in tensors)


def jvp_rule(jvp: Callable) -> Callable:
    """``jvp(ctx, saved tensors, *tangents)`` as a rule that outer forward-mode transforms differentiate, too.

    Torch calls rules with forward mode turned off for all levels. Turned on again, this level's own tangents must go.
    """

    @wraps(jvp)
    def rule(ctx, *tangents):
        saved, interpreter = ctx.saved_tensors, torch._C._functorch.peek_interpreter_stack()
        if interpreter is None:
            return jvp(ctx, saved, *tangents)
        level, unwrap = interpreter.level(), torch._C._functorch._unwrap_for_grad
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(ctx, [None if t is None else unwrap(t, level) for t in saved], *tangents)

    return rule


class Form:
    """All calls of softmax, or of log_softmax, on tensors of one device, shape, strides and dtypes: decided once.

    matches(input): whether a tensor is of this form, see `forms.guard`.
    run(input): the result for a tensor of this form.
    """

    __slots__ = ("backwards", "dim", "dims", "dtype", "input_dtype", "log", "matches", "math", "online")
    __slots__ += ("requires_grad", "result_dtype", "run")

    def __init__(
        self,
        input: torch.Tensor,
        dims: tuple[int, ...],
        result_dtype: torch.dtype,
        online: bool,
        log: bool = False,
    ):
        self.matches = guard(input)
        self.requires_grad = input.requires_grad
        self.input_dtype, self.result_dtype = input.dtype, result_dtype
        self.dims, self.online, self.log = dims, online, log
        self.math = "log_softmax" if log else "softmax"
        self.dim = self.dtype = None  # as the caller gave them, see `functional`
        self.backwards: dict[tuple, Callable] = {}
        self.run = _launcher(self.math, (input,), result_dtype, dims, online, self.forward_anywhere)

    def fits(self, input: torch.Tensor, dim: object, dtype: torch.dtype | None, online: bool = True) -> bool:
        """Whether a call is of this form. `is`, because 1, 1.0 and True are equal."""
        return self.dim is dim and self.dtype is dtype and self.online is online and self.matches(input)

    def forward_anywhere(self, input: torch.Tensor) -> torch.Tensor:
        """The result for a tensor that is misaligned, or on another device than the current one."""
        return forward(input, self.dims, self.result_dtype, self.online, self.log)

    def backward(self, grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The gradient of the input, by a launcher made once for each form of `grad`."""
        key = grad.stride(), grad.dtype, output.stride()
        run = self.backwards.get(key)
        if run is None:
            run = self.backwards[key] = self._backward_launcher(grad, output)
        return run(grad, output)

    def _backward_launcher(self, grad: torch.Tensor, output: torch.Tensor) -> Callable:
        def anywhere(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            return backward(grad, output, self.dims, self.input_dtype, self.log)

        if not (on_kernel(output, self.input_dtype) and grad.dtype in launch.DTYPE_NAMES):
            return anywhere
        if _lie_apart(grad, output, self.dims):
            return anywhere
        return _launcher(f"{self.math}_backward", (grad, output), self.input_dtype, self.dims, True, anywhere)


def _lie_apart(grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Whether a gradient is better laid out like the result first.

    Autograd hands over expanded and transposed gradients, too (that of `sum` has strides of 0). Element by element
    they would be read, and all else with them, at a fraction of the memory's speed.
    """
    if grad.stride() == output.stride():
        return False
    apart = [
        d
        for d, (n, a, b) in enumerate(zip(grad.shape, grad.stride(), output.stride(), strict=True))
        if n > 1 and a != b
    ]
    # Rows of other strides are read as fast.
    nearest = min((output.stride(d) for d in range(output.dim()) if output.shape[d] > 1), default=1)
    return any(d in dims or output.stride(d) == nearest for d in apart)


def _launcher(
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


def aten_softmax(input: torch.Tensor, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """ATen's softmax over any dimensions."""
    return over(torch.softmax, input, dims, dtype)


def aten_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dims: Sequence[int],
    input_dtype: torch.dtype,
    log: bool = False,
) -> torch.Tensor:
    """The gradient in ATen operations: differentiable, and for what our kernels do not serve."""
    return backward_formula(grad, output, None, Spec(tuple(dims), output.dtype, log=log), input_dtype)


def forward(
    input: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype, online: bool, log: bool = False
) -> torch.Tensor:
    """Softmax or log_softmax by our kernels into a new tensor of the input's memory format; any address and device."""
    result = torch.empty_like(input, dtype=dtype)
    if input.numel():
        launch.run("log_softmax" if log else "softmax", (input, result), dims, online)
    return result


def backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dims: tuple[int, ...],
    input_dtype: torch.dtype,
    log: bool = False,
) -> torch.Tensor:
    """The gradient of softmax or log_softmax, not itself differentiable; any tensors."""
    if not (on_kernel(output, input_dtype) and grad.dtype in launch.DTYPE_NAMES):
        return aten_backward(grad, output, dims, input_dtype, log)
    result = torch.empty_like(output, dtype=input_dtype)
    if output.numel():
        if _lie_apart(grad, output, dims):
            grad = torch.empty_like(output, dtype=grad.dtype).copy_(grad)
        launch.run("log_softmax_backward" if log else "softmax_backward", (grad, output, result), dims)
    return result


def differentiable_backward(
    grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...], input_dtype: torch.dtype
) -> torch.Tensor:
    """Our kernel, or ATen operations where a gradient of the gradient may be wanted."""
    if torch.compiler.is_compiling():
        return softmax_backward(grad, output, list(dims), input_dtype)
    if torch.is_grad_enabled() and (grad.requires_grad or output.requires_grad):
        return aten_backward(grad, output, dims, input_dtype)
    return backward(grad, output, dims, input_dtype)


class Softmax(torch.autograd.Function):
    """Softmax or log_softmax and its gradient for autograd; keeps nothing but the result."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, form: Form) -> torch.Tensor:
        result = form.run(input)
        ctx.save_for_backward(result)
        ctx.form = form
        return result

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        (result,) = ctx.saved_tensors
        if torch.is_grad_enabled() or batched(grad):  # a gradient of the gradient is wanted, or several
            form = ctx.form
            return aten_backward(grad, result, form.dims, form.input_dtype, form.log), None
        return ctx.form.backward(grad, result), None


apply_softmax = apply_of(Softmax)


@torch.library.custom_op("cute_softmax::softmax", mutates_args=())
def softmax(input: torch.Tensor, dim: Sequence[int], dtype: torch.dtype, online: bool) -> torch.Tensor:
    if on_kernel(input, dtype):
        return forward(input, tuple(dim), dtype, online)
    # A new tensor in the strides that the fake promises, whatever ATen's came out as.
    return torch.empty_like(input, dtype=dtype).copy_(aten_softmax(input, dim, dtype))


@torch.library.custom_op("cute_softmax::softmax_backward", mutates_args=())
def softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: Sequence[int], input_dtype: torch.dtype
) -> torch.Tensor:
    return backward(grad, output, tuple(dim), input_dtype)


@softmax.register_fake
def _(input, dim, dtype, online):
    return torch.empty_like(input, dtype=dtype)


@softmax_backward.register_fake
def _(grad, output, dim, input_dtype):
    return torch.empty_like(output, dtype=input_dtype)


def _save(ctx, inputs, output):
    input, dim, _, _ = inputs
    ctx.save_for_backward(output)
    ctx.dim, ctx.input_dtype = dim, input.dtype


def _gradient(ctx, grad):
    (output,) = ctx.saved_tensors
    return softmax_backward(grad, output, ctx.dim, ctx.input_dtype), None, None, None


def _save_backward(ctx, inputs, output):
    grad, result, dim, _ = inputs
    ctx.save_for_backward(grad, result)
    ctx.dim = tuple(dim)


def _second_gradient(ctx, upstream):
    """Of ``dx = y (g - sum(g y))``: with respect to g it is the same map again, which is symmetric."""
    grad, output = ctx.saved_tensors
    wide, g, y = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (upstream, grad, output))
    dot = (wide * y).sum(ctx.dim, keepdim=True)
    to_output = wide * (g - (g * y).sum(ctx.dim, keepdim=True)) - g * dot
    return (y * (wide - dot)).to(grad.dtype), to_output.to(output.dtype), None, None


softmax.register_autograd(_gradient, setup_context=_save)
softmax_backward.register_autograd(_second_gradient, setup_context=_save_backward)
