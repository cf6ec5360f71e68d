"""The public reductions, logsumexp, amax and sum: what they mean, their operators and gradients.

Each is a row math without a full output: one read of the input, one element written per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..api.explain import operand_of
from ..plan import PanelPlan, Plan, plan
from ..plan.hardware import H200, Device
from ..plan.problem import Operand, canonical
from ..runtime import launch
from . import ops, routes, rules, selective
from .arguments import FLOATS, autocasts, check_out, check_tensor, given_dims, overlap, overlaps_itself
from .scores import Spec, formula


def logsumexp(
    input: torch.Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logarithm of the sum of exponentials over `dim`, `log(sum(exp(x)))` without overflow, as `torch.logsumexp`.

    CUDA tensors of bfloat16, float16 and float32 are read once, by our kernels, with float32 arithmetic inside. CPU
    tensors, float64 ones on any device, integers and empty tensors go to ATen.

    A row of nothing but -inf gives -inf, one with +inf gives +inf, one with NaN gives NaN, as in torch. The gradient is
    one more read of the input, and NaN throughout a row of +inf or of nothing but -inf. Differentiable twice as well.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce.
        keepdim: Keep them with size 1.
        out: A tensor of the result's shape and dtype to write to. For calls without autograd.

    Returns:
        A tensor of the input's dtype (float32 under autocast; of integers, torch's default dtype), or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or none, and for an `out` that does not fit.
        NotPlanned: Where more than five kept, or five reduced, dimensions do not merge in memory, and for 2^31 elements
            in a row.
    """
    check_tensor("input", input, "logsumexp")
    return _reduce("logsumexp", input, given_dims(dim, input), keepdim, _autocast(input, input.dtype), out)


def amax(
    input: torch.Tensor,
    dim: int | Sequence[int] = (),
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest element over `dim`, as `torch.amax`; NaN if one is NaN.

    CUDA tensors of bfloat16, float16 and float32 run our kernels. CPU tensors, float64 ones on any device, integers and
    empty tensors go to ATen. The gradient is shared evenly by elements that are equally large.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if empty.
        keepdim: Keep them with size 1.
        out: A tensor of the result's shape and dtype to write to. For calls without autograd.

    Returns:
        A tensor of the input's dtype, or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken.
        IndexError: For a dimension out of range and, as from torch, for the maximum of no element.
        ValueError: For a repeated dimension, and for an `out` that does not fit.
        NotPlanned: As for `logsumexp`.
    """
    check_tensor("input", input, "amax")
    return _reduce("amax", input, _dims_or_all(dim, input), keepdim, input.dtype, out)


def sum(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over `dim`, as `torch.sum`; added in float32, pairwise within a thread and between threads.

    CUDA tensors of bfloat16, float16 and float32 run our kernels. CPU tensors, float64 ones on any device, integers and
    empty tensors go to ATen.

    Args:
        input: A dense real tensor of any shape and strides.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        keepdim: Keep them with size 1.
        dtype: Of the result. None: the input's (float32 under autocast; of integers, int64).
        out: A tensor of the result's shape and dtype to write to. For calls without autograd.

    Returns:
        A tensor of that dtype, or `out`.

    Raises:
        TypeError: For what is not a dense real tensor, or has a floating-point dtype that is not taken.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension, and for an `out` that does not fit.
        NotPlanned: As for `logsumexp`.
    """
    check_tensor("input", input, "sum")
    dims = _dims_or_all(dim, input)
    if dtype is None and input.dtype.is_floating_point:
        dtype = _autocast(input, input.dtype)
    return _reduce("sum", input, dims, keepdim, dtype, out)


def plan_reduction(
    name: str,
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    device: Device = H200,
) -> Plan | PanelPlan:
    """The plan of a reduction for a CUDA tensor, or for a contiguous tensor of some shape on a described GPU.

    Its `explain()` says in words how the call would run.

    Args:
        name: "logsumexp", "amax" or "sum".
        input: A tensor, whose strides count and, on CUDA, its address and GPU; or the shape of a contiguous one.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        dtype: Of the result, a torch dtype or "bf16", "fp16" or "fp32"; for a shape also of the input (bfloat16 if
            None).
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan: a `Plan` where whole contiguous rows are held on chip by a CTA or a cluster, else a `PanelPlan`.

    Raises:
        TypeError: For dtypes that have no kernels.
        IndexError: For a dimension out of range.
        ValueError: For another name, and for a repeated dimension.
        NotPlanned: As for `logsumexp`.
    """
    if name not in _REDUCTIONS:
        raise ValueError(f"name is {name!r}: the reductions are {', '.join(_REDUCTIONS)}")
    shape, first, result, device = operand_of(input, dtype, device)
    dims = _dims_or_all(dim, torch.empty(shape, device="meta"))
    _, strides = _result(shape, dims, True)
    return plan(name, canonical(shape, dims, [first, Operand(result, strides)]), device)


def _dims_or_all(dim: object, input: torch.Tensor) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(max(input.dim(), 1)))
    return given_dims(dim, input)


def _autocast(input: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The result's dtype: float32 where autocast would convert the input to it."""
    return torch.float32 if autocasts(input) else dtype


def _reduce(
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
    if torch.compiler.is_compiling():
        return _REDUCTIONS[name].operator(input, list(dims), keepdim, dtype)
    if ops.transformed():
        return _Reduce.apply(input, name, dims, keepdim, dtype)
    if routes.watched(input):
        return _REDUCTIONS[name].operator(input, list(dims), keepdim, dtype)
    if routes.recorded(input):
        return _apply(input, name, dims, keepdim, dtype)
    return _forward(name, input, dims, keepdim, dtype)


def _served(input: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and ops.on_kernel(input, dtype) and input.numel() > 0


def _into(
    out: torch.Tensor,
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    check_tensor("out", out, name)
    direct = _served(input, dtype) and not (
        torch.compiler.is_compiling() or ops.transformed() or routes.watched(input, out)
    )
    if direct:
        shape, _ = _result(tuple(input.shape), dims, keepdim)
        check_out(out, shape, dtype, input.device, (input,))
        if overlap(input, out) or overlaps_itself(out):
            raise ValueError("out overlaps input or itself in memory: the result would be undefined")
        _launch(name, input, dims, out if keepdim or not input.dim() else _whole(out, dims))
        return out
    with torch.no_grad():
        found = _reduce(name, input, dims, keepdim, dtype)
    check_out(out, found.shape, found.dtype, input.device, (input,))
    return out.copy_(found)


def _forward(
    name: str, input: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """By our kernels into a new contiguous tensor; `input` is not empty."""
    shape, strides = _result(input.shape, dims, keepdim)
    result = torch.empty(shape, dtype=dtype, device=input.device)
    # As the kernel addresses it: every element of a group has the group's one result.
    launch.run(name, (input, result.as_strided(input.shape, strides)), dims)
    return result


def _launch(name: str, input: torch.Tensor, dims: tuple[int, ...], whole: torch.Tensor) -> None:
    """Into a tensor with the reduced dimensions of size 1."""
    launch.run(name, (input, whole.expand(input.shape)), dims)


def _whole(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """With the reduced dimensions, which are ascending, of size 1 again."""
    for d in dims:
        tensor = tensor.unsqueeze(d)
    return tensor


@lru_cache(maxsize=4096)
def _result(
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


class _Reduce(torch.autograd.Function):
    """A reduction of an eager call, for autograd, functorch's transforms and forward-mode AD."""

    @staticmethod
    def forward(input: torch.Tensor, name: str, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype):
        if _served(input, dtype):
            return _forward(name, input, dims, keepdim, dtype)
        return _REDUCTIONS[name].aten(input, dims, keepdim, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, name, *rest = inputs
        _save(ctx, (input, *rest), output, name)
        if ops.transformed():
            ctx.save_for_forward(input, output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        return _gradient(ctx, grad), None, None, None, None

    @staticmethod
    @ops.jvp_rule
    def jvp(ctx, saved, tangent, *_):
        input, output = saved
        if ctx.name == "sum":
            return _Reduce.apply(tangent, "sum", ctx.dims, ctx.keepdim, output.dtype)
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
            return _Reduce.apply(input.unsqueeze(-1), name, (1,), False, dtype), 0
        return _Reduce.apply(input, name, tuple(d + 1 for d in dims), keepdim, dtype), 0


_apply = ops.apply_of(_Reduce)


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
    """Of logsumexp by one kernel, else composed of torch operations; both differentiate again."""
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
    if ops.batched(factors) or not rules.served(input, input.dtype):
        spec = spec.changed(dtype=factors.dtype)
        return (formula(input, None, None, None, spec) * factors).to(input.dtype)
    watched = routes.watched(input, factors)
    if torch.compiler.is_compiling() or (watched and not torch.is_grad_enabled()):
        return selective.times_softmax(input, factors, dims)
    if torch.is_grad_enabled():  # a gradient of the gradient may be wanted
        spec = spec.changed(dtype=torch.float32)
        softmax = rules.operator if watched else rules.Forward.apply
        return (softmax(input, None, None, None, spec) * factors).to(input.dtype)
    return rules.forward(input, None, None, None, spec, factors=factors)


@dataclass(frozen=True)
class _Reduction:
    """aten(input, dims, keepdim, dtype): by torch; operator: the same, as what torch.compile and modes see."""

    aten: Callable[..., torch.Tensor]
    operator: Callable[..., torch.Tensor]


def _reduction(name: str, aten: Callable[..., torch.Tensor]) -> _Reduction:
    """A reduction with its torch.library operator."""

    @torch.library.custom_op(f"cute_softmax::{name}", mutates_args=())
    def operator(input: torch.Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
        if ops.on_kernel(input, dtype) and input.numel():
            return _forward(name, input, tuple(dim), keepdim, dtype)
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
