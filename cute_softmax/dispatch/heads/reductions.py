"""Reductions in every state of torch: their launches, operators and gradients.

Each is a row math without a full output: one read of the input, one element written per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from ...runtime import launch
from ..common.arguments import FLOATS, check_out, check_tensor, overlap, overlaps_itself, served
from ..common.formulas import formula
from ..common.operators import Function, operator_of, ways_of
from ..common.spec import Spec
from ..common.state import Ways, batched, jvp_rule, transformed, unseen
from ..softmax import kernels
from ..softmax.calls import serve as softmax
from .calls import times_softmax


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
        return _ATEN[name](input, dims, keepdim, dtype)
    return _WAYS[name].serve((input, Reduction(name, dims, keepdim, dtype)), (input,), (input,))


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


@dataclass(slots=True, eq=False)  # not frozen: made for each call, in a third of the time
class Reduction:
    """Everything about a reduction but its input: what of which dimensions, kept with size 1 or not, of which dtype."""

    math: str
    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None

    def whole(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A result for an input of `rank` dimensions, with the reduced ones of size 1 again."""
        return tensor if self.keepdim or not rank else _whole(tensor, self.dims)


class Reduce(Function):
    """(input, reduction) -> its result."""

    @staticmethod
    def forward(input, reduction):
        r = reduction
        if _served(input, r.dtype):
            return forward(input, r.math, r.dims, r.keepdim, r.dtype)
        return _ATEN[r.math](input, r.dims, r.keepdim, r.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, ctx.reduction = inputs
        ctx.shape, ctx.dtype = input.shape, input.dtype
        ctx.save_for_backward(*(() if ctx.reduction.math == "sum" else (input, output)))
        if transformed():
            ctx.save_for_forward(input, output)

    @staticmethod
    def backward(ctx, grad):
        """Of logsumexp by one kernel, else composed of torch operations; both differentiate again."""
        r = ctx.reduction
        whole = r.whole(grad, len(ctx.shape))
        if r.math == "sum":
            return whole.to(ctx.dtype).expand(ctx.shape), None
        input, output = ctx.saved_tensors
        # The operations between are worth float32; the result is rounded once.
        wide = torch.promote_types(ctx.dtype, torch.float32)
        if r.math == "logsumexp":
            call = input, whole.to(wide), r.dims
            return _TIMES_SOFTMAX.serve(call, call[:2], call[:2]), None
        largest = (input == r.whole(output, len(ctx.shape))).to(wide)
        d = whole.to(wide) * largest / largest.sum(r.dims, keepdim=True)
        return d.to(ctx.dtype), None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, _):
        input, output = saved
        r = ctx.reduction
        if r.math == "sum":
            return Reduce.apply(tangent, replace(r, dtype=output.dtype))
        wide = torch.promote_types(ctx.dtype, torch.float32)
        whole = r.whole(output, len(ctx.shape))
        if r.math == "logsumexp":
            weights = (input.to(wide) - whole.to(wide)).exp()
        else:
            weights = (input == whole).to(wide)
            weights = weights / weights.sum(r.dims, keepdim=True)
        return (weights * tangent).sum(r.dims, keepdim=r.keepdim).to(output.dtype)


def _by_kernel(input: torch.Tensor, factors: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """`factors * softmax(input)` of the input's dtype, with one factor for each group."""
    spec = Spec(dims, input.dtype)
    if batched(factors) or not served(input, input.dtype):
        return (formula(input, None, None, None, spec.changed(dtype=factors.dtype)) * factors).to(input.dtype)
    return kernels.forward(input, None, None, None, spec, factors=factors)


def _differentiable(input: torch.Tensor, factors: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """`_by_kernel` where a gradient of the gradient may be wanted."""
    return (softmax(input, None, None, None, Spec(dims, factors.dtype)) * factors).to(input.dtype)


_TIMES_SOFTMAX = Ways(_by_kernel, _differentiable, _differentiable, times_softmax)


def _aten_logsumexp(
    input: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    if dtype is None or not input.dtype.is_floating_point:
        return torch.logsumexp(input, dims, keepdim)
    return torch.logsumexp(input.to(torch.promote_types(input.dtype, dtype)), dims, keepdim).to(dtype)


_ATEN = {  # (input, dims, keepdim, dtype or None)
    "logsumexp": _aten_logsumexp,
    "amax": lambda input, dims, keepdim, dtype: torch.amax(input, dims, keepdim),
    "sum": lambda input, dims, keepdim, dtype: torch.sum(input, dims, keepdim, dtype=dtype),
}
NAMES = tuple(_ATEN)
_WAYS = {
    name: ways_of(
        Reduce,
        operator_of(
            name,
            "(Tensor input, SymInt[] dims, bool keepdim, ScalarType dtype) -> Tensor",
            Reduce,
            partial(Reduction, name),
            lambda input, r: input.new_empty(
                [1 if d in r.dims else n for d, n in enumerate(input.shape) if r.keepdim or d not in r.dims],
                dtype=r.dtype,
            ),
        ),
    )
    for name in NAMES
}
