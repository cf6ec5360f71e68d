"""Reductions in every state of torch: their launches, operators and gradients.

Each is a row math without a full output: one read of the input, one element written per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...runtime import launch
from ..common.arguments import FLOATS, check_out, check_tensor, overlap, overlaps_itself, served
from ..common.formulas import formula
from ..common.spec import Spec
from ..common.state import batched, jvp_rule, of_function, transformed, unseen, watched
from ..softmax import kernels
from ..softmax.calls import Forward, by_operator
from . import statistics


def reduce(
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole of a reduction, after the checks of its arguments; dtype None is ATen's choice."""
    if input.dtype.is_floating_point and input.dtype not in FLOATS:
        raise TypeError(f"input is {input.dtype}: {name} takes {', '.join(map(str, FLOATS))} and integers")
    if out is not None:
        return _into(out, name, input, dims, keepdim, dtype)
    if not _served(input, dtype):
        return _REDUCTIONS[name].aten(input, dims, keepdim, dtype)
    return _WAYS.serve((input, name, dims, keepdim, dtype), (input,), (input,))


def _served(input: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and served(input, dtype) and input.numel() > 0


def _into(
    out: torch.Tensor,
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    check_tensor("out", out, name)
    if _served(input, dtype) and unseen(input, out):
        shape, _ = result_of(tuple(input.shape), dims, keepdim)
        check_out(out, shape, dtype, input.device, (input,))
        if overlap(input, out) or overlaps_itself(out):
            raise ValueError("out overlaps input or itself in memory: the result would be undefined")
        _launch(name, input, dims, out if keepdim or not input.dim() else _whole(out, dims))
        return out
    with torch.no_grad():
        found = reduce(name, input, dims, keepdim, dtype)
    check_out(out, found.shape, found.dtype, input.device, (input,))
    return out.copy_(found)


def forward(
    input: torch.Tensor, name: str, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The reduction by our kernels into a new contiguous tensor; `input` is not empty."""
    shape, _ = result_of(input.shape, dims, keepdim)
    result = torch.empty(shape, dtype=dtype, device=input.device)
    launch.run(*work_of(input, name, dims, result))
    return result


def work_of(input: torch.Tensor, name: str, dims: tuple[int, ...], result: torch.Tensor) -> launch.Work:
    """The launch into a contiguous result. To the kernel every element of a group has the group's one result."""
    _, strides = result_of(input.shape, dims, True)
    return launch.Work(name, (input, result.as_strided(input.shape, strides)), dims)


def _launch(name: str, input: torch.Tensor, dims: tuple[int, ...], whole: torch.Tensor) -> None:
    """Into a tensor with the reduced dimensions of size 1."""
    launch.run(name, (input, whole.expand(input.shape)), dims)


def _whole(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A result with the reduced dimensions, which are ascending, of size 1 again."""
    for d in dims:
        tensor = tensor.unsqueeze(d)
    return tensor


@lru_cache(maxsize=4096)
def result_of(
    shape: Sequence[int], dims: tuple[int, ...], keepdim: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a contiguous result, and its strides in the input's dimensions: 0 in the reduced ones."""
    kept, stride, strides = [], 1, []
    for d, size in reversed(list(enumerate(shape))):
        strides.append(0 if d in dims else stride)
        if d not in dims:
            kept.append(size)
            stride *= size
        elif keepdim:
            kept.append(1)
    return tuple(kept[::-1]), tuple(strides[::-1])


class Reduce(torch.autograd.Function):
    """A reduction of an eager call, for autograd, functorch's transforms and forward-mode AD."""

    @staticmethod
    def forward(input: torch.Tensor, name: str, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype):
        if _served(input, dtype):
            return forward(input, name, dims, keepdim, dtype)
        return _REDUCTIONS[name].aten(input, dims, keepdim, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, name, *rest = inputs
        _save(ctx, (input, *rest), output, name)
        if transformed():
            ctx.save_for_forward(input, output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        return _gradient(ctx, grad), None, None, None, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, *_):
        input, output = saved
        if ctx.name == "sum":
            return Reduce.apply(tangent, "sum", ctx.dims, ctx.keepdim, output.dtype)
        wide = torch.promote_types(ctx.dtype, torch.float32)
        whole = output if ctx.keepdim or not ctx.shape else _whole(output, ctx.dims)
        if ctx.name == "logsumexp":
            weights = (input.to(wide) - whole.to(wide)).exp()
        else:
            weights = (input == whole).to(wide)
            weights = weights / weights.sum(ctx.dims, keepdim=True)
        return (weights * tangent).sum(ctx.dims, keepdim=ctx.keepdim).to(output.dtype)

    @staticmethod
    def vmap(info, in_dims, input, name, dims, keepdim, dtype):
        input = input.movedim(in_dims[0], 0)
        if input.dim() == 1:  # a number each
            return Reduce.apply(input.unsqueeze(-1), name, (1,), False, dtype), 0
        return Reduce.apply(input, name, tuple(d + 1 for d in dims), keepdim, dtype), 0


def _save(ctx, inputs: tuple, output: torch.Tensor, name: str) -> None:
    input, dims, keepdim, _ = inputs
    ctx.name, ctx.dims, ctx.keepdim, ctx.shape, ctx.dtype = (
        name,
        tuple(dims),
        keepdim,
        input.shape,
        input.dtype,
    )
    ctx.save_for_backward(*(() if name == "sum" else (input, output)))


def _gradient(ctx, grad: torch.Tensor) -> torch.Tensor:
    """The gradient: of logsumexp by one kernel, else composed of torch operations; both differentiate again."""
    whole = grad if ctx.keepdim or not ctx.shape else _whole(grad, ctx.dims)
    if ctx.name == "sum":
        return whole.to(ctx.dtype).expand(ctx.shape)
    input, output = ctx.saved_tensors
    # The operations between are worth float32; the result is rounded once.
    wide = torch.promote_types(ctx.dtype, torch.float32)
    if ctx.name == "logsumexp":
        return _times_softmax(input, whole.to(wide), ctx.dims)
    output = output if ctx.keepdim or not ctx.shape else _whole(output, ctx.dims)
    largest = (input == output).to(wide)
    return (whole.to(wide) * largest / largest.sum(ctx.dims, keepdim=True)).to(ctx.dtype)


def _times_softmax(input: torch.Tensor, factors: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """`factors * softmax(input)` of the input's dtype, with one factor for each group."""
    spec = Spec(dims, input.dtype)
    if batched(factors) or not served(input, input.dtype):
        spec = spec.changed(dtype=factors.dtype)
        return (formula(input, None, None, None, spec) * factors).to(input.dtype)
    seen = watched(input, factors)
    if torch.compiler.is_compiling() or (seen and not torch.is_grad_enabled()):
        return statistics.times_softmax(input, factors, dims)
    if torch.is_grad_enabled():  # a gradient of the gradient may be wanted
        spec = spec.changed(dtype=torch.float32)
        softmax = by_operator if seen else Forward.apply
        return (softmax(input, None, None, None, spec) * factors).to(input.dtype)
    return kernels.forward(input, None, None, None, spec, factors=factors)


@dataclass(frozen=True)
class _Reduction:
    """aten(input, dims, keepdim, dtype): by torch; operator: the same, as what torch.compile and modes see."""

    aten: Callable[..., torch.Tensor]
    operator: Callable[..., torch.Tensor]


def _reduction(name: str, aten: Callable[..., torch.Tensor]) -> _Reduction:
    """A reduction with its torch.library operator."""

    @torch.library.custom_op(f"cute_softmax::{name}", mutates_args=())
    def operator(input: torch.Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
        if _served(input, dtype):
            return forward(input, name, tuple(dim), keepdim, dtype)
        return aten(input, tuple(dim), keepdim, dtype).contiguous()

    @operator.register_fake
    def _(input, dim, keepdim, dtype):
        shape = [1 if d in dim else n for d, n in enumerate(input.shape) if keepdim or d not in dim]
        return input.new_empty(shape, dtype=dtype)

    operator.register_autograd(
        lambda ctx, grad: (_gradient(ctx, grad), None, None, None),
        setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output, name),
    )
    return _Reduction(aten, operator)


def _aten_logsumexp(
    input: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    if dtype is None or not input.dtype.is_floating_point:
        return torch.logsumexp(input, dims, keepdim)
    return torch.logsumexp(input.to(torch.promote_types(input.dtype, dtype)), dims, keepdim).to(dtype)


def _aten_amax(
    input: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    return torch.amax(input, dims, keepdim)


def _aten_sum(
    input: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    return torch.sum(input, dims, keepdim, dtype=dtype)


_REDUCTIONS = {
    "logsumexp": _reduction("logsumexp", _aten_logsumexp),
    "amax": _reduction("amax", _aten_amax),
    "sum": _reduction("sum", _aten_sum),
}


def _by_operator(input, name, dims, keepdim, dtype) -> torch.Tensor:
    return _REDUCTIONS[name].operator(input, list(dims), keepdim, dtype)


_WAYS = of_function(Reduce, forward, _by_operator)
NAMES = tuple(_REDUCTIONS)
