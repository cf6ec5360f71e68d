"""The largest of a softmax, as routers of experts choose: what it means, and the checks of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..dispatch.common.arguments import check_tensor, float_dtype, of_shape
from ..dispatch.common.spec import number
from ..dispatch.heads import largest
from ..dispatch.heads.calls import check_index
from ..dispatch.topk import forms
from ..dispatch.topk.kernels import INDICES, Choice, matrix
from ..plan.hardware import H200, Device
from ..plan.problem import contiguous
from ..plan.topk import TopkPlan, plan_topk, plan_topk_backward
from ..plan.topk_long import LongTopkPlan, plan_topk_long
from ..runtime import launch
from ..runtime.invariance import in_force


def topk_softmax(
    logits: torch.Tensor,
    k: int,
    *,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest probabilities of each row and their indices, as in a mixture-of-experts router:
    ``torch.softmax(logits, -1).topk(k)``.

    One launch reads the logits once; the gradient is one launch, too, and writes all of it. Logits are compared, not
    their rounded probabilities: the largest comes first, among equal logits the one with the lower index (-0 equals 0),
    and NaN of either sign before all numbers. A row with NaN or +inf has NaN probabilities, as in torch, and so does a
    row of only -inf. Within `batch_invariant` the bits depend on the row alone, as the number of lanes per row then
    does not depend on the number of rows. CPU tensors, and float64 tensors on any device, use torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor. On CUDA N is at most 1,024.
        k: How many elements to choose, at most N.
        renormalize: Divide the probabilities by their sum, which gives the softmax over the chosen elements alone.
        dtype: The dtype of the probabilities; that of the logits if None (float32 under autocast).
        index_dtype: torch.int64 or torch.int32.

    Returns:
        (probabilities, indices), both (..., k) and contiguous. Probabilities are twice differentiable.

    Raises:
        TypeError: For logits or a dtype that are not floating-point, a k that is not an int, and another index_dtype.
        ValueError: For logits without a dimension, and for a k that is negative or larger than N.
        NotPlanned: For rows on CUDA of more than 1,024 elements.

    Examples:
        >>> import torch, cute_softmax
        >>> weights, experts = cute_softmax.topk_softmax(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2, renormalize=True)
        >>> weights.tolist(), experts.tolist()
        ([[0.5, 0.5]], [[1, 3]])
    """
    options = k, renormalize, dtype, index_dtype
    form = forms.known.repeated(logits, options)
    if form is not None:
        return form(logits)
    check_tensor("logits", logits, "topk_softmax")
    result = float_dtype(logits, dtype, "topk_softmax")
    if not logits.is_floating_point():
        raise TypeError(f"logits has dtype {logits.dtype}: topk_softmax needs a floating-point tensor")
    return forms.first(logits, _choice(logits, k, renormalize, result, index_dtype), options)


def _choice(
    logits: torch.Tensor, k: object, renormalize: bool, dtype: torch.dtype, index_dtype: object
) -> Choice:
    _check_k(logits, k)
    if index_dtype not in INDICES:
        raise TypeError(f"index_dtype is {index_dtype}: it is {' or '.join(map(str, INDICES))}")
    return Choice((logits.dim() - 1,), k, bool(renormalize), dtype, index_dtype, in_force())


def _check_k(logits: torch.Tensor, k: object) -> None:
    if not logits.dim():
        raise ValueError("logits has no dimension: there must be one to choose from")
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"k must be an int, not {type(k).__name__}")
    if not 0 <= k <= logits.shape[-1]:
        raise ValueError(f"k is {k}: of {logits.shape[-1]} elements 0 to {logits.shape[-1]} can be chosen")


class TopkLogSoftmax(NamedTuple):
    """The k largest log-probabilities of each row.

    Attributes:
        values: (..., k), the largest first.
        indices: (..., k), their indices: int64.
    """

    values: torch.Tensor
    indices: torch.Tensor


class ChosenLogSoftmax(NamedTuple):
    """The k largest log-probabilities of each row, and that of one chosen element.

    Attributes:
        values: (..., k), the largest first.
        indices: (..., k), their indices: int64.
        chosen: (...), the log-probability of the chosen element.
        ranks: (...), how many logits of the row are strictly larger: int64.
    """

    values: torch.Tensor
    indices: torch.Tensor
    chosen: torch.Tensor
    ranks: torch.Tensor


def topk_log_softmax(
    logits: torch.Tensor,
    k: int,
    index: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> TopkLogSoftmax | ChosenLogSoftmax:
    """The k largest log-probabilities of each row and their indices, as samplers report them:
    ``torch.log_softmax(logits * scale, -1).topk(k)``, and with an index also the log-probability there and its rank.

    One read of the logits, for rows of any length, and one launch. Logits are compared: the largest comes first, among
    equal logits the one with the lower index (-0 equals 0), and NaN of either sign before all numbers. A row with NaN
    or +inf has NaN log-probabilities, as in torch. Gradients are those of `selective_log_softmax` at the indices.
    Within `batch_invariant` the bits depend on the row alone. CPU tensors, and float64 tensors on any device, use
    torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor.
        k: How many to report, at most N, and on CUDA at most 1,024. 0 with an index: only the chosen element.
        index: Integers from 0 to N - 1, (...): the chosen element of each row.
        scale: A positive number by which the logits are multiplied, 1 / temperature.
        dtype: The dtype of the log-probabilities; that of the logits if None (float32 under autocast). The kernel
            computes them in float32, which samplers usually want.

    Returns:
        A named tuple (values, indices), both (..., k) and contiguous, the indices int64. With an index (values,
        indices, chosen, ranks), the last two (...): the log-probability of the chosen element, and how many logits of
        the row are strictly larger, int64: 0 for the largest and all equal to it. Values and chosen are twice
        differentiable.

    Raises:
        TypeError: For logits or a dtype that are not floating-point, a k that is not an int, an index without an
            integer dtype and a scale that is not a number.
        ValueError: For logits without a dimension, a k that is negative or larger than N, an index whose shape or
            device does not fit, and a scale that is not positive and finite.
        IndexError: For an index out of range, as in `selective_log_softmax`.
        NotPlanned: For a k above 1,024 on CUDA.

    Examples:
        >>> import torch, cute_softmax
        >>> logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
        >>> found = cute_softmax.topk_log_softmax(logits, 2, torch.tensor([2]), dtype=torch.float32)
        >>> found.indices.tolist(), found.ranks.tolist()
        ([[1, 3]], [2])
    """
    options = k, scale, dtype
    form = largest.known.repeated(logits, index, options)
    if form is not None:
        return _named(form(logits, index), index is not None, form.result)
    check_tensor("logits", logits, "topk_log_softmax")
    result = float_dtype(logits, dtype, "topk_log_softmax")
    if not logits.is_floating_point():
        raise TypeError(f"logits has dtype {logits.dtype}: topk_log_softmax needs a floating-point tensor")
    _check_k(logits, k)
    factor = number("scale", scale)
    if not 0 < factor < math.inf:
        raise ValueError(f"scale is {scale}: it must be positive and finite")
    if index is not None:
        check_index(index, logits)
        if index.dim() != logits.dim() - 1:
            raise ValueError(
                f"index has shape {tuple(index.shape)}: it chooses one element of each row of logits of shape "
                f"{tuple(logits.shape)}"
            )
    spec = largest.Largest((logits.dim() - 1,), k, factor, in_force())
    return _named(largest.first(logits, index, spec, options, result), index is not None, result)


def _named(
    found: tuple[torch.Tensor, ...], with_chosen: bool, dtype: torch.dtype
) -> TopkLogSoftmax | ChosenLogSoftmax:
    """The results of `dispatch.heads.largest`, as far as they are the function's."""
    values, indices, chosen, ranks, *_ = found
    if not with_chosen:
        return TopkLogSoftmax(values.to(dtype), indices)
    return ChosenLogSoftmax(values.to(dtype), indices, chosen.squeeze(-1).to(dtype), ranks.squeeze(-1))


def plan_topk_log_softmax(
    input: torch.Tensor | Sequence[int],
    k: int,
    dtype: torch.dtype | None = None,
    *,
    index: bool = False,
    scale: float = 1.0,
    device: Device = H200,
) -> LongTopkPlan:
    """Return the plan of `topk_log_softmax` for a CUDA tensor, or for a contiguous tensor of a given shape on a given
    GPU.

    Its `explain()` tells in words how the call would run; nothing is compiled or launched. Within `batch_invariant` it
    is the plan of a batch-invariant call.

    Args:
        input: A tensor, of which the strides and, on CUDA, the address and GPU matter; or the shape of a contiguous
            one.
        k: As in `topk_log_softmax`.
        dtype: The dtype of the log-probabilities, that of the logits if None; for a shape also that of the logits
            (bfloat16 if None). Of a tensor that requires a gradient, and of other dtypes, the kernel stores float32.
        index: Whether one element per row is chosen.
        scale: As in `topk_log_softmax`.
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan.

    Raises:
        TypeError: For a dtype without kernels, and as in `topk_log_softmax`.
        ValueError: As in `topk_log_softmax`, for a k of 0 without an index, and for an empty tensor.
        NotPlanned: As in `topk_log_softmax`.
    """
    if not isinstance(input, torch.Tensor):
        input = of_shape(input, dtype or torch.bfloat16)
    if input.dtype not in launch.DTYPE_NAMES:
        raise TypeError(f"no kernels for {input.dtype}")
    _check_k(input, k)
    if not ((k or index) and input.numel()):
        raise ValueError(f"k is {k}, of a tensor of shape {tuple(input.shape)}: nothing is launched")
    if input.is_cuda:
        device = launch.device_facts(input.get_device())
    rows = matrix(input)
    return plan_topk_long(
        *rows.shape,
        k,
        launch.operand(rows),
        device,
        result=launch.DTYPE_NAMES[largest.stored(input, dtype or input.dtype)],
        index_stride=1 if index else None,
        scaled=number("scale", scale) != 1,
        invariant=in_force(),
    )


def plan_topk_softmax(
    input: torch.Tensor | Sequence[int],
    k: int,
    dtype: torch.dtype | None = None,
    *,
    renormalize: bool = False,
    index_dtype: torch.dtype = torch.int64,
    backward: bool = False,
    device: Device = H200,
) -> TopkPlan:
    """Return the plan of `topk_softmax` for a CUDA tensor, or for a contiguous tensor of a given shape on a given GPU.

    Its `explain()` tells in words how the call would run; nothing is compiled or launched. Within `batch_invariant` it
    is the plan of a batch-invariant call.

    Args:
        input: A tensor, of which the strides and, on CUDA, the address and GPU matter; or the shape of a contiguous
            one.
        k: As in `topk_softmax`, at least 1 here.
        dtype: The dtype of the probabilities; for a shape also that of the logits (bfloat16 if None).
        renormalize: As in `topk_softmax`.
        index_dtype: As in `topk_softmax`.
        backward: The plan of the gradient instead.
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan.

    Raises:
        TypeError: For dtypes without kernels, and as in `topk_softmax`.
        ValueError: As in `topk_softmax`, for a k of 0, and for an empty tensor.
        NotPlanned: As in `topk_softmax`.
    """
    if not isinstance(input, torch.Tensor):
        input = of_shape(input, dtype or torch.bfloat16)
    result = dtype or input.dtype
    if not {input.dtype, result} <= launch.DTYPE_NAMES.keys():
        raise TypeError(f"no kernels for {input.dtype} -> {result}")
    choice = _choice(input, k, renormalize, result, index_dtype)
    if not (k and input.numel()):
        raise ValueError(f"k is {k}, of a tensor of shape {tuple(input.shape)}: nothing is launched")
    if input.is_cuda:
        device = launch.device_facts(input.get_device())
    rows = matrix(input)
    options = {
        "index": INDICES[index_dtype],
        "renormalize": choice.renormalize,
        "invariant": choice.invariant,
    }
    values = launch.DTYPE_NAMES[result]
    if not backward:
        return plan_topk(*rows.shape, k, launch.operand(rows), values, device, **options)
    few = contiguous(values, (len(rows), k))
    source = few if renormalize else launch.operand(rows)
    return plan_topk_backward(*rows.shape, k, source, few, launch.DTYPE_NAMES[input.dtype], device, **options)
