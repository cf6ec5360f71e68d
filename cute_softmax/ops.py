"""torch.library operators with schemas and fakes, and autograd.

Eager calls use `Softmax` (an autograd.Function) or `forward` directly: an operator's way through the dispatcher
costs more than the launch. Whatever must see an operator (torch.compile, export, dispatch modes) sees the ones
defined here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import launch


def on_kernel(tensor: torch.Tensor, result_dtype: torch.dtype) -> bool:
    """Whether our kernels serve it; all else goes to ATen."""
    return tensor.is_cuda and tensor.dtype in launch.DTYPE_NAMES and result_dtype in launch.DTYPE_NAMES


def aten_softmax(input: torch.Tensor, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """ATen's softmax over any dimensions."""
    if len(dims) == 1:
        return torch.softmax(input, dims[0], dtype)
    last = [-i - 1 for i in range(len(dims))][::-1]
    moved = input.movedim(tuple(dims), last)
    flat = torch.softmax(moved.flatten(-len(dims)), -1, dtype)
    return flat.unflatten(-1, moved.shape[-len(dims) :]).movedim(last, tuple(dims))


def forward(input: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype, online: bool) -> torch.Tensor:
    """Softmax by our kernels into a new tensor of the input's memory format."""
    result = torch.empty_like(input, dtype=dtype)
    if input.numel():
        launch.run("softmax", (input, result), dims, online)
    return result


def backward(
    grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...], input_dtype: torch.dtype
) -> torch.Tensor:
    """The backward of softmax, not itself differentiable."""
    if not (on_kernel(output, input_dtype) and grad.dtype in launch.DTYPE_NAMES):
        return aten_backward(grad, output, dims, input_dtype)
    result = torch.empty_like(output, dtype=input_dtype)
    if output.numel():
        launch.run("softmax_backward", (grad, output, result), dims)
    return result


def aten_backward(
    grad: torch.Tensor, output: torch.Tensor, dims: Sequence[int], input_dtype: torch.dtype
) -> torch.Tensor:
    """The formula in ATen operations: differentiable, and for what our kernels do not serve."""
    wide = torch.promote_types(torch.promote_types(grad.dtype, output.dtype), torch.float32)
    grad, output = grad.to(wide), output.to(wide)
    return (output * (grad - (grad * output).sum(tuple(dims), keepdim=True))).to(input_dtype)


def differentiable_backward(
    grad: torch.Tensor, output: torch.Tensor, dims: tuple[int, ...], input_dtype: torch.dtype
) -> torch.Tensor:
    """Our kernel, or ATen operations where a gradient of the gradient is wanted."""
    if torch.compiler.is_compiling():
        return softmax_backward(grad, output, list(dims), input_dtype)
    if torch.is_grad_enabled() and (grad.requires_grad or output.requires_grad):
        return aten_backward(grad, output, dims, input_dtype)
    return backward(grad, output, dims, input_dtype)


class Softmax(torch.autograd.Function):
    """Softmax and its gradient; keeps nothing but the result."""

    @staticmethod
    def forward(ctx, input, dims, dtype, online):
        result = forward(input, dims, dtype, online)
        ctx.save_for_backward(result)
        ctx.dims, ctx.input_dtype = dims, input.dtype
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return differentiable_backward(grad, result, ctx.dims, ctx.input_dtype), None, None, None


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
    """Of dx = y (g - s) with s = sum(g y): with respect to g it is softmax_backward again, as dx is symmetric in it."""
    grad, output = ctx.saved_tensors
    wide, g, y = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (upstream, grad, output))
    dot = (wide * y).sum(ctx.dim, keepdim=True)
    to_output = wide * (g - (g * y).sum(ctx.dim, keepdim=True)) - g * dot
    return (y * (wide - dot)).to(grad.dtype), to_output.to(output.dtype), None, None


softmax.register_autograd(_gradient, setup_context=_save)
softmax_backward.register_autograd(_second_gradient, setup_context=_save_backward)
