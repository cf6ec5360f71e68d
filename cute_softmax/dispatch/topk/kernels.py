"""The k largest elements of rows and their gradient by our kernels, and in torch's operations for all else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...plan.problem import Operand
from ...plan.topk import plan_topk, plan_topk_backward
from ...runtime import launch
from ..common.formulas import wide

Tensor = torch.Tensor
INDICES = {torch.int32: "int32", torch.int64: "int64"}


@dataclass(frozen=True)
class Choice:
    """What is asked of rows: the k largest along the last dimension, `dims`, with their probabilities, which are of
    `dtype`, and with `renormalize` those among the k; their indices are of `index_dtype`. invariant: whether the call
    is batch-invariant."""

    dims: tuple[int, ...]
    k: int
    renormalize: bool
    dtype: torch.dtype
    index_dtype: torch.dtype
    invariant: bool = False


@dataclass(frozen=True)
class Spread:
    """What is asked of k gradients of each row: the gradient of its `columns` elements along `dims`, of `dtype`.
    invariant: as of a `Choice`."""

    dims: tuple[int, ...]
    columns: int
    renormalize: bool
    dtype: torch.dtype
    invariant: bool = False


def choose(input: Tensor, choice: Choice, call: launch.Call | None = None) -> tuple[Tensor, Tensor]:
    """(probabilities, indices) of the k largest elements by our kernel.

    call: for tensors of this form, if it is known. Raises NotPlanned for longer rows than it takes.
    """
    shape = (*input.shape[:-1], choice.k)
    values = torch.empty(shape, dtype=choice.dtype, device=input.device)
    indices = torch.empty(shape, dtype=choice.index_dtype, device=input.device)
    if not values.numel():
        return values, indices
    rows = matrix(input)
    call = call or call_of(rows, choice)
    rows = as_planned(rows, call)
    call.on_device(input.get_device(), rows.data_ptr(), values.data_ptr(), indices.data_ptr())
    return values, indices


def call_of(rows: Tensor, choice: Choice) -> launch.Call:
    """The Call for a matrix as `matrix` gives it."""
    return _call(
        rows.get_device(),
        *rows.shape,
        choice.k,
        launch.operand(rows),
        None,
        launch.DTYPE_NAMES[choice.dtype],
        INDICES[choice.index_dtype],
        choice.renormalize,
        choice.invariant,
    )


def gradient(source: Tensor, indices: Tensor, grad: Tensor, spread: Spread) -> Tensor:
    """The gradient of the rows by our kernel; see `gradient_formula`."""
    shape = (*indices.shape[:-1], spread.columns)
    result = torch.empty(shape, dtype=spread.dtype, device=source.device)
    if not indices.shape[-1]:
        return result.zero_()
    rows, indices = matrix(source), indices.contiguous()
    grads = grad.reshape(-1, grad.shape[-1])
    call = _call(
        rows.get_device(),
        len(rows),
        spread.columns,
        indices.shape[-1],
        launch.operand(rows),
        launch.operand(grads),
        launch.DTYPE_NAMES[spread.dtype],
        INDICES[indices.dtype],
        spread.renormalize,
        spread.invariant,
    )
    rows = as_planned(rows, call)
    call.on_device(
        rows.get_device(), rows.data_ptr(), grads.data_ptr(), indices.data_ptr(), result.data_ptr()
    )
    return result


def matrix(tensor: Tensor) -> Tensor:
    """The rows of a tensor as a matrix with contiguous columns: a view where there is one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def as_planned(rows: Tensor, call: launch.Call) -> Tensor:
    """The rows, or a copy at whose multiples of a vector they begin where the plan asks for one."""
    return rows.clone(memory_format=torch.contiguous_format) if call.plan.laid_out else rows


@lru_cache(maxsize=4096)
def _call(
    device: int,
    rows: int,
    columns: int,
    k: int,
    source: Operand,
    grad: Operand | None,
    result: str,
    index: str,
    renormalize: bool,
    invariant: bool,
) -> launch.Call:
    """Forward without `grad`."""
    facts = launch.facts_for(device, invariant)
    options = {"index": index, "renormalize": renormalize, "invariant": invariant}
    if grad is None:
        made = plan_topk(rows, columns, k, source, result, facts, **options)
    else:
        made = plan_topk_backward(rows, columns, k, source, grad, result, facts, **options)
    return launch.Call(made, launch.function_of(made.kernel))


def ranked(rows: Tensor) -> Tensor:
    """The indices of each row's elements from the largest on: NaN before all numbers, of equal elements the first one
    first. To some of torch's sorts a NaN with a sign is the smallest and -0 less than 0, so both lose theirs."""
    unsigned = rows.masked_fill(rows == 0, 0.0).masked_fill(rows.isnan(), torch.nan)
    return torch.sort(unsigned, dim=-1, descending=True, stable=True).indices


def formula(input: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """`choose` in torch's operations."""
    x = input.to(wide(input.dtype, choice.dtype))
    order = ranked(x.detach())[..., : choice.k]
    few = choice.renormalize
    values = torch.softmax(x.gather(-1, order), -1) if few else torch.softmax(x, -1).gather(-1, order)
    return values.to(choice.dtype), order.to(choice.index_dtype)


def gradient_formula(source: Tensor, indices: Tensor, grad: Tensor, spread: Spread) -> Tensor:
    """The gradient of the rows in torch's operations, differentiable.

    source: the rows, or with `renormalize` the k probabilities.
    """
    dtype, index = wide(source.dtype, grad.dtype), indices.long()
    g, s = grad.to(dtype), source.to(dtype)
    p = s if spread.renormalize else torch.softmax(s, -1)
    zeros = g.new_zeros((*indices.shape[:-1], spread.columns))
    if spread.renormalize:
        d = torch.scatter(zeros, -1, index, p * (g - (p * g).sum(-1, keepdim=True)))
    else:
        g = torch.scatter(zeros, -1, index, g)
        d = p * (g - (p * g).sum(-1, keepdim=True))
    return d.to(spread.dtype)
