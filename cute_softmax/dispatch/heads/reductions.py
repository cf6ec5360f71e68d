"""Reductions in every state of torch: their launches, operators and gradients.

Each is a row math without a full output: one read of the input, one element written per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch.autograd.graph import increment_version

from ...plan import NO_PROLOGUE, Prologue
from ...runtime import launch
from ...runtime.invariance import in_force
from ..common.arguments import FLOATS, check_out, check_tensor, negated, overlap, overlaps_itself, served
from ..common.formulas import formula
from ..common.operators import Function, operator_of, ways_of
from ..common.spec import Spec
from ..common.state import Ways, batched, jvp_rule, transformed, unseen
from ..softmax import kernels
from ..softmax.calls import serve as softmax
from .calls import times_softmax

_SINK = Prologue(sink=True)


def reduce(
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole of a reduction, after the checks of its arguments; dtype None is ATen's choice."""
    check_input(name, input)
    if out is not None:
        return into(out, name, input, dims, keepdim, dtype, partial(reduce, name, input))
    if not on_kernel(input, dtype):
        return _ATEN[name](input, dims, keepdim, dtype)
    return _WAYS[name].serve((input, Reduction(name, dims, keepdim, dtype, in_force())), (input,), (input,))


def on_kernel(input: torch.Tensor, dtype: torch.dtype | None, sink: torch.Tensor | None = None) -> bool:
    """Whether our kernels serve it."""
    return dtype is not None and served(input, dtype, sink) and input.numel() > 0


def check_input(name: str, input: torch.Tensor) -> None:
    """Raise TypeError for floating-point dtypes that are not taken."""
    if input.dtype.is_floating_point and input.dtype not in FLOATS:
        raise TypeError(f"input is {input.dtype}: {name} takes {', '.join(map(str, FLOATS))} and integers")


def into(
    out: torch.Tensor,
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    anyhow: Callable[..., torch.Tensor],
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result in a tensor of the caller's; by `anyhow` of (dims, keepdim, dtype), where no kernel may write it."""
    check_tensor("out", out, name)
    given = [t for t in (input, sink) if t is not None]
    if on_kernel(input, dtype, sink) and unseen(out, *given) and not negated(out):
        check_out(out, shape_of(input.shape, dims, keepdim), dtype, input.device, given)
        if any([overlap(t, out) for t in given]) or overlaps_itself(out):
            what = "input" if sink is None else "input, sink"
            raise ValueError(f"out overlaps {what} or itself in memory: the result would be undefined")
        launch.run(*work_of(input, name, dims, keepdim, out, in_force(), sink))
        increment_version(out)
        return out
    with torch.no_grad():
        found = anyhow(dims, keepdim, dtype)
    check_out(out, found.shape, found.dtype, input.device, given)
    return out.copy_(found)


def work_of(
    input: torch.Tensor,
    name: str,
    dims: tuple[int, ...],
    keepdim: bool,
    result: torch.Tensor,
    invariant: bool,
    sink: torch.Tensor | None = None,
) -> launch.Work:
    """The launch. To the kernel every element of a group has the group's one result, and its sink."""
    strides = group_strides(result.stride(), input.dim(), dims, keepdim)
    whole, sinks = result.as_strided(input.shape, strides), [] if sink is None else [sink.expand(input.shape)]
    prologue = NO_PROLOGUE if sink is None else _SINK
    return launch.Work(name, (input, *sinks, whole), dims, prologue=prologue, invariant=invariant)


@lru_cache(maxsize=4096)
def shape_of(shape: Sequence[int], dims: tuple[int, ...], keepdim: bool) -> tuple[int, ...]:
    """The shape of a result."""
    return tuple(1 if d in dims else n for d, n in enumerate(shape) if keepdim or d not in dims)


@lru_cache(maxsize=4096)
def group_strides(
    strides: tuple[int, ...], rank: int, dims: tuple[int, ...], keepdim: bool
) -> tuple[int, ...]:
    """The strides of a result in the dimensions of an input of this rank: 0 in the reduced ones."""
    kept = [d for d in range(rank) if keepdim or d not in dims]
    there = dict(zip(kept, strides, strict=True)) if rank else {}
    return tuple(0 if d in dims else there[d] for d in range(rank))


@dataclass(slots=True, eq=False)  # not frozen: made for each call, in a third of the time
class Reduction:
    """Everything about a reduction but its input: what of which dimensions, kept with size 1 or not, of which dtype;
    and whether the call is batch-invariant."""

    math: str
    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None
    invariant: bool = False

    def whole(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A result for an input of `rank` dimensions, with the reduced ones of size 1 again."""
        if rank and not self.keepdim:
            for d in self.dims:  # ascending
                tensor = tensor.unsqueeze(d)
        return tensor


def forward(input: torch.Tensor, r: Reduction, sink: torch.Tensor | None = None) -> torch.Tensor:
    """The reduction by our kernels into a new contiguous tensor; `input` is not empty. sink: of a logsumexp."""
    result = torch.empty(shape_of(input.shape, r.dims, r.keepdim), dtype=r.dtype, device=input.device)
    launch.run(*work_of(input, r.math, r.dims, r.keepdim, result, r.invariant, sink))
    return result


class Reduce(Function):
    """(input, reduction) -> its result."""

    @staticmethod
    def forward(input, reduction):
        r = reduction
        if not on_kernel(input, r.dtype):
            return _ATEN[r.math](input, r.dims, r.keepdim, r.dtype)
        return forward(input, r)

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
            call = input, whole.to(wide), r.dims, r.invariant
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


def _by_kernel(
    input: torch.Tensor, factors: torch.Tensor, dims: tuple[int, ...], invariant: bool
) -> torch.Tensor:
    """`factors * softmax(input)` of the input's dtype, with one factor for each group."""
    spec = Spec(dims, input.dtype, invariant=invariant)
    if batched(factors) or not served(input, input.dtype, factors):
        return (formula(input, None, None, None, spec.changed(dtype=factors.dtype)) * factors).to(input.dtype)
    return kernels.forward(input, None, None, None, spec, factors=factors)


def _differentiable(
    input: torch.Tensor, factors: torch.Tensor, dims: tuple[int, ...], invariant: bool
) -> torch.Tensor:
    """`_by_kernel` where a gradient of the gradient may be wanted."""
    spec = Spec(dims, factors.dtype, invariant=invariant)
    return (softmax(input, None, None, None, spec) * factors).to(input.dtype)


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
_WAYS = {
    name: ways_of(
        Reduce,
        forward,
        operator_of(
            name,
            "(Tensor input, SymInt[] dim, bool keepdim, ScalarType dtype, bool invariant=False) -> Tensor",
            Reduce,
            partial(Reduction, name),
            lambda input, r: input.new_empty(
                shape_of.__wrapped__(input.shape, r.dims, r.keepdim), dtype=r.dtype
            ),
        ),
    )
    for name in _ATEN
}
