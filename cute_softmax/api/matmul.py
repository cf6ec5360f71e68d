"""softmax(S) @ V, and row statistics for several such products: what they mean, and the checks of their arguments."""

from __future__ import annotations

import torch

from ..dispatch.common.arguments import check_tensor
from ..dispatch.common.spec import Spec, number, scores_of
from ..dispatch.matmul import forms
from ..dispatch.matmul.request import Request
from ..dispatch.matmul.stats import statistics


def softmax_matmul(
    scores: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool | int = False,
    empty_rows: str = "nan",
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    stats: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The product `softmax(scale * scores + bias, -1) @ values`, which reads the scores once and writes no softmax
    matrix.

    CUDA tensors with values in bfloat16 or float16 use our kernels: exponentials are rounded to the dtype of the
    values, and sums are float32. All others take two steps, a softmax and torch's product: CPU tensors, values in
    float32 or float64, and calls inside functorch's transforms.

    A NaN or +inf among a row's scores makes the row NaN. The same call gives the same bits every time; within
    `batch_invariant` they depend on the row of scores and the values alone. Differentiable with respect to scores,
    values, bias and sink. On sm_90 values whose rows do not begin at multiples of 16 bytes are copied first, and so are
    such scores in float32; other GPUs read them in place, but compute gradients with torch's operations.

    Args:
        scores: (..., M, N), in the dtype of the values or float32.
        values: (..., N, D). The batch dimensions of scores and values broadcast.
        scale: A number by which the scores are multiplied.
        mask: A boolean tensor that broadcasts to (..., M, N); where it is False the score is -inf.
        bias: A floating-point tensor that broadcasts to (..., M, N), added after the scale.
        causal: True: score j of row i counts if `j <= i`; an int: if `j <= i + causal`. Tiles beyond are not read.
        empty_rows: The result of rows in which no element counts: "nan" as in torch, or "zero".
        sink: A floating-point tensor that broadcasts to (..., M, 1): an extra score for each row, or for all rows that
            share it (such as those of a head), that counts in the sum and has no values. Neither scale nor mask applies
            to it. A row in which no element counts is 0; a sink of -inf has no effect.
        return_lse: Also return the logarithms of the rows' sums of exponentials, including the sinks.
        stats: These logarithms, if they are known: the result of `softmax_stats` for the same scale, mask, bias, causal
            and sink, in float32 and broadcasting to (..., M). Exponentials are then computed in one step, without
            maxima, sums and rescaling; the rounding of the logarithms becomes a relative error of about 1e-7 times
            their size. They are treated as functions of the scores: gradients are those of the softmax, and none flows
            through them.

    Returns:
        The product, (..., M, D) in the dtype of the values; with `return_lse` a pair of it and the logarithms, (..., M)
        in float32 (float64 for tensors in float64).

    Raises:
        TypeError: For anything but a dense, real floating-point tensor, for dtypes that do not match, a mask that is
            not boolean, a causal or a scale of another type.
        ValueError: For shapes or devices that do not match, and another value of `empty_rows`.
        NotPlanned: For more than three batch dimensions that do not merge in memory.
    """
    # Types first: 1 and True are equal, and tensors have an equality of their own.
    options = type(scale), type(causal), scale, causal, empty_rows, return_lse
    tensors = scores, values, mask, bias, sink, stats
    form = forms.known.repeated(*tensors, options)
    if form is not None:
        return _returned(*form(tensors, return_lse), stats, return_lse)
    full = _full(scores, values)
    spec = _scores(full, scale=scale, mask=mask, bias=bias, causal=causal, empty_rows=empty_rows, sink=sink)
    if stats is not None:
        _check_stats(stats, full)
    return _returned(*forms.first(Request(*tensors, spec), return_lse, options), stats, return_lse)


def _returned(
    result: torch.Tensor, lse: torch.Tensor | None, stats: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if not return_lse:
        return result
    return result, lse if stats is None else stats.detach().expand(result.shape[:-1])


def softmax_stats(
    scores: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool | int = False,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the logarithms of the rows' sums of exponentials, which `softmax_matmul` takes as `stats`.

    Computed once, in one read of the scores, they can be used in several products with these scores. No gradient flows
    through them (the gradient of `softmax_matmul` is complete nevertheless); for a differentiable function see
    `logsumexp`. Within `batch_invariant` the bits depend on the row of scores alone. CPU tensors, and float64 tensors
    on any device, use torch's operations.

    Args:
        scores: (..., N), a dense floating-point tensor.
        scale: A number by which the scores are multiplied.
        mask: A boolean tensor, True where a score counts. It may have dimensions that the scores lack or in which they
            have size 1.
        bias: A floating-point tensor that is added after the scale; the same rule applies to its dimensions.
        causal: True: score j of row i counts if `j <= i`; an int: if `j <= i + causal`.
        sink: An extra score per row, as in `softmax_matmul`.

    Returns:
        The logarithms, (...) in float32, or float64 for scores in float64; -inf for a row in which no score counts.

    Raises:
        TypeError: For anything but a dense, real floating-point tensor, a scale that is not a number and a mask that is
            not boolean.
        ValueError: For scores without a dimension, and for a mask, bias, sink or causal that does not fit them.
        NotPlanned: As in `softmax`.
    """
    check_tensor("scores", scores, "softmax_stats")
    if not scores.is_floating_point():
        raise TypeError(f"scores has dtype {scores.dtype}: softmax_stats takes floating-point tensors")
    if scores.dim() == 0:
        raise ValueError("scores have no dimension: softmax_stats needs rows of scores")
    given = [t for t in (mask, bias) if isinstance(t, torch.Tensor)]
    try:
        shape = torch.broadcast_shapes(scores.shape, *(t.shape for t in given))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(
            f"mask or bias {shapes} does not broadcast to scores {tuple(scores.shape)}"
        ) from None
    if shape[-1] != scores.shape[-1]:
        raise ValueError(f"mask or bias has {shape[-1]} columns, scores {scores.shape[-1]}")
    scores = scores.detach().expand(shape)
    bias, sink = (t.detach() if isinstance(t, torch.Tensor) else t for t in (bias, sink))
    spec = _scores(scores, scale=scale, mask=mask, bias=bias, causal=causal, sink=sink)
    return statistics(scores, mask, bias, spec, sink)


def _scores(full: torch.Tensor, *, scale: float, **given: object) -> Spec:
    """The checked spec of the softmax of scores with all of their dimensions; of scales only numbers are taken."""
    return scores_of(full, (full.dim() - 1,), full.dtype, scale=number("scale", scale), **given)[1]


def _full(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The scores with the batch dimensions of the result. Raises TypeError and ValueError for what does not fit."""
    for name, tensor in (("scores", scores), ("values", values)):
        check_tensor(name, tensor, "softmax_matmul")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: softmax_matmul takes floating-point tensors")
        if tensor.device != scores.device:
            raise ValueError(f"{name} is on {tensor.device}, scores on {scores.device}")
    if scores.dim() < 2 or values.dim() < 2:
        raise ValueError(
            f"scores {tuple(scores.shape)} and values {tuple(values.shape)} need at least two dimensions"
        )
    if scores.shape[-1] != values.shape[-2]:
        raise ValueError(
            f"scores {tuple(scores.shape)} have {scores.shape[-1]} columns, values {tuple(values.shape)} "
            f"{values.shape[-2]} rows"
        )
    if scores.dtype not in (values.dtype, torch.float32):
        raise TypeError(
            f"scores are {scores.dtype}, values {values.dtype}: scores have the dtype of values or float32"
        )
    batch = scores.shape[:-2]
    try:
        if batch != values.shape[:-2]:  # torch's check costs as much as the launch
            batch = torch.broadcast_shapes(batch, values.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"the batch dimensions of scores {tuple(scores.shape)} and values {tuple(values.shape)} do not broadcast"
        ) from None
    return scores.expand(*batch, *scores.shape[-2:])


def _check_stats(stats: object, full: torch.Tensor) -> None:
    """Raise TypeError and ValueError for known log-sum-exps that do not fit the scores."""
    check_tensor("stats", stats, "softmax_matmul")
    if stats.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"stats are {stats.dtype}: they must be float32, as softmax_stats gives them")
    if stats.device != full.device:
        raise ValueError(f"stats are on {stats.device}, scores on {full.device}")
    try:
        stats.expand(full.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"stats {tuple(stats.shape)} do not broadcast to the rows {tuple(full.shape[:-1])}"
        ) from None
