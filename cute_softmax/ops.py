"""Eager calls of one form, autograd, and the torch.library operators with schemas and fakes.

An operator's way through the dispatcher costs more host time than the launch. So eager calls take a `Form`, made
once for each combination of shape, strides and dtypes, and whatever must see an operator (torch.compile, export,
dispatch modes) sees the ones that are defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import launch

try:  # what code compiled by inductor allocates with: 0.6 us less than torch.empty_like
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:

    def _empty_strided_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def on_kernel(tensor: torch.Tensor, result_dtype: torch.dtype) -> bool:
    """Whether our kernels serve it; all else goes to ATen."""
    return tensor.is_cuda and tensor.dtype in launch.DTYPE_NAMES and result_dtype in launch.DTYPE_NAMES


class Form:
    """All calls of softmax with tensors of one device, shape, strides and dtypes, with 16-byte aligned addresses.

    `run` and `backward` allocate a result and launch. `run` does so on the current device, which must be the
    tensors' own (see `is_current`).
    """

    __slots__ = ("backwards", "device", "dims", "dtype", "input_dtype", "online", "run")

    def __init__(self, input: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...], online: bool):
        self.device = input.get_device()
        self.dims, self.online = dims, online
        self.dtype, self.input_dtype = dtype, input.dtype
        self.run = _launcher("softmax", (input,), dtype, dims, online)
        self.backwards: dict[tuple, Callable] = {}

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Softmax of a tensor of this form at any address, on any current device."""
        if input.data_ptr() & 15 or not self.is_current():
            return forward(input, self.dims, self.dtype, self.online)
        return self.run(input)

    def is_current(self) -> bool:
        return self.device == torch._C._cuda_getDevice()

    def backward(self, grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The gradient of the input, by a launcher made once for each form of `grad`."""
        if grad.data_ptr() & 15 or output.data_ptr() & 15 or not self.is_current():
            return backward(grad, output, self.dims, self.input_dtype)
        key = grad.stride(), grad.dtype, output.stride()
        run = self.backwards.get(key)
        if run is None:
            run = _launcher("softmax_backward", (grad, output), self.input_dtype, self.dims, True)
            self.backwards[key] = run
        return run(grad, output)


def _launcher(
    math: str, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, dims: tuple[int, ...], online: bool
) -> Callable[..., torch.Tensor]:
    """A function of 16-byte aligned inputs of this form that allocates the result and launches on the current
    device: all else is decided here."""
    result = torch.empty_like(inputs[-1], dtype=dtype)
    if not result.numel():
        return lambda *inputs: torch.empty_like(inputs[-1], dtype=dtype)
    device, shape, strides = result.get_device(), tuple(result.shape), result.stride()
    call = launch.call_of(math, (*inputs, result), dims, online, aligned=True)
    function, sizes, plan = call.function, call.arguments, call.plan
    stream, empty = torch._C._cuda_getCurrentRawStream, _empty_strided_cuda
    *_, result_stride = plan.row_strides

    # Written out per number of inputs: a loop over operands would cost a microsecond.
    if len(inputs) == 1:
        (first_stride, _) = plan.row_strides

        def run(first: torch.Tensor) -> torch.Tensor:
            result = empty(shape, strides, dtype)
            try:
                function(
                    stream(device), *sizes, first.data_ptr(), first_stride, result.data_ptr(), result_stride
                )
            except Exception as error:
                raise launch.launch_error(plan, error) from error
            return result

        return run
    (first_stride, second_stride, _) = plan.row_strides

    def run_two(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        result = empty(shape, strides, dtype)
        try:
            function(
                stream(device),
                *sizes,
                first.data_ptr(),
                first_stride,
                second.data_ptr(),
                second_stride,
                result.data_ptr(),
                result_stride,
            )
        except Exception as error:
            raise launch.launch_error(plan, error) from error
        return result

    return run_two


def aten_softmax(input: torch.Tensor, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """ATen's softmax over any dimensions."""
    if len(dims) == 1:
        return torch.softmax(input, dims[0], dtype)
    last = [-i - 1 for i in range(len(dims))][::-1]
    moved = input.movedim(tuple(dims), last)
    flat = torch.softmax(moved.flatten(-len(dims)), -1, dtype)
    return flat.unflatten(-1, moved.shape[-len(dims) :]).movedim(last, tuple(dims))


def aten_backward(
    grad: torch.Tensor, output: torch.Tensor, dims: Sequence[int], input_dtype: torch.dtype
) -> torch.Tensor:
    """The gradient in ATen operations: differentiable, and for what our kernels do not serve."""
    wide = torch.promote_types(torch.promote_types(grad.dtype, output.dtype), torch.float32)
    grad, output = grad.to(wide), output.to(wide)
    return (output * (grad - (grad * output).sum(tuple(dims), keepdim=True))).to(input_dtype)


def forward(input: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype, online: bool) -> torch.Tensor:
    """Softmax by our kernels into a new tensor of the input's memory format; any address and current device."""
    result = torch.empty_like(input, dtype=dtype)
    if input.numel():
        launch.run("softmax", (input, result), dims, online)
    return result


def backward(
    grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...], input_dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of softmax, not itself differentiable; any tensors."""
    if not (on_kernel(output, input_dtype) and grad.dtype in launch.DTYPE_NAMES):
        return aten_backward(grad, output, dims, input_dtype)
    result = torch.empty_like(output, dtype=input_dtype)
    if output.numel():
        launch.run("softmax_backward", (grad, output, result), dims)
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
    """Softmax and its gradient for autograd; keeps nothing but the result."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, form: Form) -> torch.Tensor:
        result = form(input)
        ctx.save_for_backward(result)
        ctx.form = form
        return result

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        (result,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return aten_backward(grad, result, ctx.form.dims, ctx.form.input_dtype), None
        return ctx.form.backward(grad, result), None


# `Softmax.apply` less its test for functorch, which `functional` has made before.
apply_softmax = super(torch.autograd.Function, Softmax).apply


@torch.library.custom_op("cute_softmax::softmax", mutates_args=())
def softmax(input: torch.Tensor, dim: Sequence[int], dtype: torch.dtype, online: bool) -> torch.Tensor:
    if on_kernel(input, dtype):
        return forward(input, tuple(dim), dtype, online)
    return aten_softmax(input, dim, dtype).clone()


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
