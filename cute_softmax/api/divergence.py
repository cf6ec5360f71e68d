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
    """The divergence of a model's distribution from another's, both given by their logits: of each row
    `KL(p || q) = sum(p * (log(p) - log(q)))` of `p = softmax(target * scale)` and `q = softmax(input * scale)`.

    No probability is written. Forward reads both logits once, and the gradient in each of them, where it is wanted,
    reads both once more. A probability p of 0 adds nothing; where q is 0 and p is not, the divergence is infinite. CPU
    tensors, and float64 ones on any device, are computed by torch's operations, and so are strided rows and those that
    do not fit on chip. Differentiable twice in both.

    Args:
        input: The logits of q, a student's: a dense floating-point tensor.
        target: The logits of p, a teacher's: likewise, of the same shape and on the same device.
        dim: The dimension or dimensions that are the rows'.
        reduction: "mean" over the rows (for one dimension of rows torch's "batchmean"), "sum", or "none".
        scale: A positive number that both are multiplied by, 1 / temperature.
        dtype: Of the result. None: the input's, or float32 under autocast.

    Returns:
        A scalar or, of reduction "none", a tensor without the reduced dimensions.

    Raises:
        TypeError: For what is not a dense, real floating-point tensor, and a scale that is no number.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or none, tensors of different shapes or devices, a scale that is not
            positive, and another reduction.

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
