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
    """The k largest probabilities of each row and where they are, as a router chooses experts:
    ``torch.softmax(logits, -1).topk(k)``.

    One launch that reads the logits once; the gradient is one, too, and writes all of it. The logits are compared, not
    their rounded probabilities: the largest comes first, of equal ones that of the lower index (-0 equals 0), and NaN,
    whatever its sign, before all numbers. A row with NaN or +inf has NaN for probabilities, as in torch, and so does a
    row of -inf alone. Within `batch_invariant` the bits are those of the row alone: few rows have as few lanes each as
    many have. CPU tensors, and float64 ones on any device, are computed by torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor. On CUDA N is at most 1,024.
        k: How many to choose, at most N.
        renormalize: Divide the probabilities by their sum: the softmax over the chosen alone.
        dtype: Of the probabilities: that of the logits if None (float32 under autocast).
        index_dtype: torch.int64 or torch.int32.

    Returns:
        (probabilities, indices), both (..., k) and contiguous. Gradients flow to the first; twice as well.

    Raises:
        TypeError: For logits or a dtype that are not of floats, a k that is no int, and another index_dtype.
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
        values: (..., k), from the largest on.
        indices: (..., k), where they are: int64.
    """

    values: torch.Tensor
    indices: torch.Tensor


class ChosenLogSoftmax(NamedTuple):
    """The k largest log-probabilities of each row, and that of one chosen element.

    Attributes:
        values: (..., k), from the largest on.
        indices: (..., k), where they are: int64.
        chosen: (...), the log-probability of the chosen element.
        ranks: (...), how many logits of the row are strictly larger than it: int64.
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
    """The k largest log-probabilities of each row and where they are, as a sampler reports them beside its token's own:
    ``torch.log_softmax(logits * scale, -1).topk(k)``, and with an index the log-probability there and its rank.

    One read of the logits, of rows of any length, and one launch. The logits are compared: the largest comes first, of
    equal ones that of the lower index (-0 equals 0), and NaN, whatever its sign, before all numbers. A row with NaN or
    +inf has NaN for log-probabilities, as in torch. To gradients the results are those of `selective_log_softmax` at
    the indices. Within `batch_invariant` the bits are those of the row alone. CPU tensors, and float64 ones on any
    device, are computed by torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor.
        k: How many to report, at most N, and on CUDA at most 1,024. 0 with an index: of that alone.
        index: Integers from 0 to N - 1, (...): the chosen element of each row.
        scale: A positive number that the logits are multiplied by, 1 / temperature.
        dtype: Of the log-probabilities: that of the logits if None (float32 under autocast). The kernel's own are
            float32, which samplers want.

    Returns:
        A named tuple (values, indices), both (..., k) and contiguous, the indices int64; with an index (values,
        indices, chosen, ranks), the last two (...): its log-probability, and how many logits of the row are strictly
        larger, int64: 0 for the largest and all that equal it. Gradients flow to values and chosen; twice as well.

    Raises:
        TypeError: For logits or a dtype that are not of floats, a k that is no int, an index that has no integer dtype
            and a scale that is no number.
        ValueError: For logits without a dimension, a k that is negative or larger than N, an index whose shape or
            device does not fit, and a scale that is not positive and finite.
        IndexError: For an index out of range, as for `selective_log_softmax`.
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
    dtype: torch.dtype = torch.bfloat16,
    *,
    index: bool = False,
    scale: float = 1.0,
    device: Device = H200,
) -> LongTopkPlan:
    """The plan of `topk_log_softmax` for a CUDA tensor, or for a contiguous tensor of some shape on a described GPU.

    Its `explain()` says in words how the call would run; nothing is compiled or launched. Within `batch_invariant` the
    plan is that of a call there.

    Args:
        input: A tensor, whose strides count and, on CUDA, its address and GPU; or the shape of a contiguous one.
        k: As in `topk_log_softmax`.
        dtype: Of the logits, where a shape is given.
        index: Whether an element of each row is chosen.
        scale: As in `topk_log_softmax`.
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan.

    Raises:
        TypeError: For a dtype that has no kernels, and as for `topk_log_softmax`.
        ValueError: As for `topk_log_softmax`, for a k of 0 without an index, and for a tensor with nothing in it.
        NotPlanned: As for `topk_log_softmax`.
    """
    if not isinstance(input, torch.Tensor):
        input = of_shape(input, dtype)
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
    """The plan of `topk_softmax` for a CUDA tensor, or for a contiguous tensor of some shape on a described GPU.

    Its `explain()` says in words how the call would run; nothing is compiled or launched. Within `batch_invariant` the
    plan is that of a call there.

    Args:
        input: A tensor, whose strides count and, on CUDA, its address and GPU; or the shape of a contiguous one.
        k: As in `topk_softmax`, at least 1 here.
        dtype: Of the probabilities; for a shape also of the logits (bfloat16 if None).
        renormalize: As in `topk_softmax`.
        index_dtype: As in `topk_softmax`.
        backward: The plan of the gradient instead.
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan.

    Raises:
        TypeError: For dtypes that have no kernels, and as for `topk_softmax`.
        ValueError: As for `topk_softmax`, for a k of 0, and for a tensor with nothing in it.
        NotPlanned: As for `topk_softmax`.
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
