"""The largest of a softmax, as routers of experts choose: what it means, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch.common.arguments import check_tensor, float_dtype
from ..dispatch.common.forms import repeated
from ..dispatch.topk import forms
from ..dispatch.topk.kernels import INDICES, Choice, matrix
from ..plan.hardware import H200, Device
from ..plan.problem import contiguous
from ..plan.topk import TopkPlan, plan_topk, plan_topk_backward
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
    form = repeated(forms.known, logits, options)
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
    if not logits.dim():
        raise ValueError("logits has no dimension: there must be one to choose from")
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"k must be an int, not {type(k).__name__}")
    if not 0 <= k <= logits.shape[-1]:
        raise ValueError(f"k is {k}: of {logits.shape[-1]} elements 0 to {logits.shape[-1]} can be chosen")
    if index_dtype not in INDICES:
        raise TypeError(f"index_dtype is {index_dtype}: it is {' or '.join(map(str, INDICES))}")
    return Choice((logits.dim() - 1,), k, bool(renormalize), dtype, index_dtype, in_force())


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
        input = torch.empty(tuple(input), dtype=dtype or torch.bfloat16, device="meta")
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
