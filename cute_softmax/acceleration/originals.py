"""ATen's own kernels, callable while others are registered in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..runtime.private import look_up

_has_kernel = look_up("_C._dispatch_has_computed_kernel_for_dispatch_key")
_Keys, _Key = look_up("_C.DispatchKeySet"), look_up("_C.DispatchKey")
# Whether torch hands out the kernels themselves (from 2.9 on). Where not, they are reached through the overload that
# writes to a given tensor, which then keeps its own kernel.
REACHABLE = hasattr(torch.library, "get_kernel") and None not in (_Keys, _Key)


def original(overload: str, key: str) -> Callable[..., torch.Tensor] | None:
    """What runs now for `aten::<overload>` on a key of torch's dispatcher, and goes on to run; None if nothing does, or
    nothing that can be reached."""
    there = hasattr(torch.ops.aten, overload.partition(".")[0])
    if not there or (_has_kernel is not None and not _has_kernel(f"aten::{overload}", key)):
        return None
    if not REACHABLE:
        return _AROUND.get(overload)
    kernel = torch.library.get_kernel(f"aten::{overload}", key)
    return partial(kernel.call_boxed, _Keys(getattr(_Key, key)))


def _forward(operator: str) -> Callable[..., torch.Tensor]:
    def around(input: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = input.new_empty(0, dtype=torch.float32 if half_to_float else input.dtype)
        return getattr(torch.ops.aten, operator).out(input, dim, half_to_float, out=out)

    return around


def _like_gradient(grad: torch.Tensor, input_dtype: torch.dtype) -> torch.Tensor:
    """An empty gradient, of the input's dtype where that has 16 bits and else of its own, as ATen has it."""
    return grad.new_empty(0, dtype=input_dtype if input_dtype.itemsize == 2 else grad.dtype)


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype):
    out = _like_gradient(grad, input_dtype)
    return torch.ops.aten._softmax_backward_data.out(grad, output, dim, input_dtype, grad_input=out)


def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype):
    out = _like_gradient(grad, input_dtype)
    return torch.ops.aten._log_softmax_backward_data.out(grad, output, dim, input_dtype, out=out)


def _logsumexp(input: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    inexact = input.dtype.is_floating_point or input.dtype.is_complex
    out = input.new_empty(0, dtype=input.dtype if inexact else torch.get_default_dtype())
    return torch.ops.aten.logsumexp.out(input, dim, keepdim, out=out)


def _safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    empty = input.eq(-torch.inf).all(dim, keepdim=True)
    return torch.softmax(input, dim, dtype).masked_fill(empty, 0)


_AROUND = {
    "_softmax": _forward("_softmax"),
    "_log_softmax": _forward("_log_softmax"),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "logsumexp": _logsumexp,
    "_safe_softmax": _safe_softmax,
}
