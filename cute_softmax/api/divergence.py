"""The Kullback-Leibler divergence of two softmaxes: what it means, and the checks of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..dispatch.common.arguments import check_tensor, float_dtype, given_dims
from ..dispatch.common.spec import number
from ..dispatch.heads import divergence as divergences
from ..dispatch.heads.divergence import Pair, first
from ..runtime.invariance import in_force

REDUCTIONS = ("none", "mean", "sum")


def kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    dim: int | Sequence[int] = -1,
    *,
    reduction: str = "mean",
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The divergence of one distribution from another, both given by their logits: for each row `KL(p || q) = sum(p *
    (log(p) - log(q)))` with `p = softmax(target * scale)` and `q = softmax(input * scale)`.

    No probability is written. Forward reads both sets of logits once; each gradient, if needed, reads both once more. A
    probability p of 0 adds nothing; where q is 0 and p is not, the divergence is infinite. CPU tensors, float64 tensors
    on any device, strided rows and rows that do not fit on chip use torch's operations. Within `batch_invariant` the
    bits of a row's divergence, and of its gradients, depend on the two rows alone if these fit in a cluster. Twice
    differentiable with respect to both.

    Args:
        input: The logits of q, a student's: a dense floating-point tensor.
        target: The logits of p, a teacher's: likewise, with the same shape and on the same device.
        dim: The dimension or dimensions to reduce.
        reduction: "mean" over the rows (torch's "batchmean" if there is one other dimension), "sum", or "none".
        scale: A positive number by which both are multiplied, 1 / temperature.
        dtype: The dtype of the result. None: the input's, or float32 under autocast.

    Returns:
        A scalar or, for reduction "none", a tensor without the reduced dimensions.

    Raises:
        TypeError: For anything but a dense, real floating-point tensor, and a scale that is not a number.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, tensors of different shapes or devices, a scale that is
            not positive, and another reduction.

    Examples:
        >>> import torch
        >>> from cute_softmax import kl_div
        >>> kl_div(torch.zeros(2, 4), torch.zeros(2, 4))
        tensor(0.)
    """
    # A list would be another one when its caller changes it.
    options = tuple(dim) if type(dim) is list else dim, reduction, scale, dtype
    form = divergences.known.repeated(input, target, options)
    if form is not None:
        return _reduced(form(input, target).squeeze(form.pair.dims), reduction, form.result)
    check_tensor("input", input, "kl_div")
    check_tensor("target", target, "kl_div")
    result = float_dtype(input, dtype, "kl_div")
    float_dtype(target, None, "kl_div")
    if input.shape != target.shape or input.device != target.device:
        raise ValueError(
            f"target has shape {tuple(target.shape)} on {target.device}: it must have the input's, "
            f"{tuple(input.shape)} on {input.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}: it is one of {', '.join(map(repr, REDUCTIONS))}")
    factor = number("scale", scale)
    if not 0 < factor < math.inf:
        raise ValueError(f"scale is {scale}: it must be positive and finite")
    dims = given_dims(dim, input)
    if not input.dim():
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    rows = first(input, target, Pair(dims, factor, in_force()), options, result).squeeze(dims)
    return _reduced(rows, reduction, result)


def _reduced(rows: torch.Tensor, reduction: str, dtype: torch.dtype) -> torch.Tensor:
    return (rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()).to(dtype)
