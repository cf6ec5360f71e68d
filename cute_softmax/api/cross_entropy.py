"""Cross entropy over a vocabulary: what it means, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..dispatch.common.arguments import check_tensor, column_of, float_dtype, overlaps_itself
from ..dispatch.common.formulas import wide
from ..dispatch.common.shards import Shard, is_shared
from ..dispatch.common.spec import integer, number
from ..dispatch.common.state import recorded, unseen
from ..dispatch.heads import loss as visits
from ..dispatch.heads.calls import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_AND_LSE,
    SMOOTHED,
    Head,
    check_index,
    on_kernel,
    softcap_of,
)
from ..dispatch.heads.divergence import Pair
from ..dispatch.heads.divergence import serve as divergence_of
from ..dispatch.heads.forms import first
from ..dispatch.heads.kernels import Rows
from ..dispatch.sharded.functions import Losses, check_rows, row_numbers
from ..dispatch.sharded.functions import loss as shared_loss
from ..dispatch.sharded.placements import has_all_rows, placed_like
from ..plan import NotPlanned
from ..runtime.invariance import in_force
from .reductions import logsumexp
from .softmax import log_softmax

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

REDUCTIONS = ("none", "mean", "sum")
Tensor = torch.Tensor


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
    one_visit: bool | None = None,
    grad_scale: float | torch.Tensor = 1.0,
    inplace_backward: bool = False,
    group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy between logits and targets, like `torch.nn.functional.cross_entropy`.

    With class indices no matrix of log-probabilities is written, and there are two methods:

    - *one visit*: the forward pass reads the logits and writes their gradient while a row is on chip, one read and one
      write for both directions. This is used for a mean or a sum over bfloat16 or float32 logits whose gradient is
      recorded, in rows that fit on chip, without `return_lse`. The gradient is written for an upstream gradient of
      `grad_scale`; for any other, the backward pass rescales it on the device. Only one backward pass is possible; a
      second one, or a gradient of the gradient, raises RuntimeError.
    - *recompute*: forward reads the logits once, and backward reads them again, for any upstream gradient; only float32
      numbers per row are saved. This is used for all other calls.

    Class probabilities are read alongside the logits, once forward and once backward. With a weight, smoothing, a
    softcap or a scale that is not positive they take a float32 matrix of log-probabilities, from `log_softmax`, and
    torch's operations on it. Label smoothing of class indices with a weight takes two losses, at the target and against
    the weights, with two reads in each direction and a gradient each; with a softcap or a scale that is not positive it
    is computed like class probabilities. CPU tensors, and float64 tensors on any device, use torch's operations.

    A scale for each row is read by the same kernels. With class probabilities, smoothing and a weight, or `return_lse`,
    for its own gradient, and in compiled or transformed code, the scaled logits are first written, in float32.

    Within `batch_invariant` the bits of a row's loss (reduction "none"), and of its gradient, depend on the row and its
    target alone. Means and sums depend on all rows.

    Args:
        input: (C), (N, C) or (N, C, d1, ...): a dense floating-point tensor of logits, C classes.
        target: Class indices from 0 to C - 1 in the input's shape without C; or class probabilities, a floating-point
            tensor of the input's shape.
        weight: (C), a factor on the loss of each class.
        ignore_index: A class index whose rows have loss 0 and do not count in the mean; it may lie outside the classes.
        reduction: "mean" over the rows that count, by their weights; "sum"; or "none".
        label_smoothing: From 0 to 1, the share of a uniform distribution in the targets.
        scale: A number by which the logits are multiplied, 1 / temperature; or a tensor with one number per row, of the
            shape of class indices, which may have a gradient.
        softcap: A positive number: scores are `softcap * tanh(input * scale / softcap)`. None: no cap.
        lse_square_scale: A factor on the square of each row's logsumexp, which is added to the row's loss (z-loss); its
            mean is taken over the rows that count.
        return_lse: Also return the logsumexp of each row of the scaled logits.
        dtype: The dtype of the loss. None: the input's, or float32 under autocast.
        one_visit: The method: True for one visit, False to recompute, None to choose. If no gradient is recorded,
            neither method writes one. For rows shared by ranks, one visit is possible if slices stay on chip; None
            chooses it for those of bfloat16.
        grad_scale: The upstream gradient that the loss will have, if it is known, such as a loss scale, or one over the
            number of accumulated steps; a number, or a one-element tensor on the input's device. It does not change
            results.
        inplace_backward: In one visit, write the gradient over the logits, whose values are lost.
        group: A ProcessGroup over which rows are sharded, as in `logsumexp`: the input has this rank's slice of the
            classes; targets are class indices into whole rows, and weights are those of all classes. Not with a
            softcap, nor with label smoothing and a weight together.
        vocab_start: As in `logsumexp`.
        vocab_size: As in `logsumexp`; label smoothing over slices of unequal length needs it.

    Returns:
        The loss, a scalar or, for reduction "none", one number per row; with `return_lse` a pair of the loss and the
        logsumexps of the rows, in float32.

    Raises:
        TypeError: For an input that is not a dense, real floating-point tensor, a target that has neither integers nor
            floating-point numbers, and arguments that are not numbers.
        ValueError: For shapes or devices that do not fit, another reduction, a label_smoothing outside 0 to 1, a
            softcap that is not positive; `one_visit` or `inplace_backward` for a call that is not possible in one
            visit.
        IndexError: For a target out of range on the CPU. On CUDA as in `selective_log_softmax`.
        NotPlanned: As in `softmax`.

    Examples:
        >>> import torch
        >>> from cute_softmax import cross_entropy
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
        tensor(1.3863)
    """
    arguments = None
    if weight is None and group is None and type(grad_scale) is float and not isinstance(scale, Tensor):
        arguments = (
            ignore_index, reduction, label_smoothing, scale, softcap, lse_square_scale, return_lse, dtype, one_visit,
            grad_scale, inplace_backward, vocab_start, vocab_size,
        )  # fmt: skip
        form = visits.known.repeated(input, target, arguments)
        if form is not None:
            return _launched(input, target, None, form.asked, form)
    check_tensor("input", input, "cross_entropy")
    result = float_dtype(input, dtype, "cross_entropy")
    check_tensor("target", target, "cross_entropy")
    ignore_index = integer("ignore_index", ignore_index)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}: it is one of {', '.join(map(repr, REDUCTIONS))}")
    smoothing = number("label_smoothing", label_smoothing)
    cap = softcap_of(softcap)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must lie in 0 to 1")
    rows, shard = _rows(input), Shard(group, vocab_start, vocab_size)
    shared = is_shared(rows, (rows.dim() - 1,), shard)
    if shared and target.dtype.is_floating_point:
        raise ValueError("rows that ranks share have class indices as targets, not probabilities")
    if shared and (cap or isinstance(scale, Tensor)):
        what = "a softcap" if cap else "a scale for each row"
        raise ValueError(f"{what} of rows that ranks share: multiply and cap the logits first")
    if not shared:
        _check_weight(weight, rows)
    if isinstance(scale, Tensor):
        scale = column_of("scale", scale, rows)
    else:
        scale = number("scale", scale, "a number or a torch.Tensor")
    if target.dtype.is_floating_point:
        _check_probabilities(target, input)
        if recorded(input) and (inplace_backward or one_visit):
            raise ValueError("this call is not served in one visit: class probabilities")
        rows, scale = _multiplied(rows, scale)
        losses = _of_probabilities(rows, target, weight, smoothing, scale, cap)
        asked = visits.Loss(
            reduction,
            ignore_index,
            scale,
            number("lse_square_scale", lse_square_scale),
            dtype=result,
            softcap=cap,
        )
        return _finished(rows, losses, None, None, asked, return_lse)
    _check_target(target, rows)
    if not isinstance(grad_scale, Tensor):
        grad_scale = number("grad_scale", grad_scale)
    elif grad_scale.numel() != 1 or grad_scale.device != rows.device:
        raise ValueError("grad_scale is a number, or a tensor of one on the input's device")
    asked = visits.Loss(
        reduction, ignore_index, scale, number("lse_square_scale", lse_square_scale),
        grad_scale, inplace_backward, result, in_force(), cap, smoothing,
    )  # fmt: skip
    reasons = _reasons(rows, target, weight, return_lse or shared, asked)
    of_visits = reasons | _reasons_against_a_visit(rows, asked)
    refused = _first(of_visits)
    if not refused and one_visit is not False and (one_visit or rows.dtype in visits.ONE_VISIT):
        try:
            return _in_kernels(rows, target, weight, asked, arguments, None)
        except NotPlanned as reason:
            refused = str(reason)
    if recorded(input) and (inplace_backward or (one_visit and not shared)):
        raise ValueError(f"this call is not served in one visit: {refused or 'one_visit is False'}")
    if shared:
        visit = one_visit if recorded(input) else False
        asks = Losses(reduction, ignore_index, smoothing, scale, asked.squares, return_lse, result, visit)
        found = _of_shared_rows(rows, target, weight, asks, shard)
        return found if return_lse else found[0]
    again = partial(_composed, target=target, weight=weight, asked=asked, return_lse=return_lse)
    if not _first(reasons):
        try:
            return _in_kernels(rows, target, weight, asked, arguments, again)
        except NotPlanned:
            pass
    return again(rows)


def _composed(
    rows: Tensor, *, target: Tensor, weight: Tensor | None, asked: visits.Loss, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss with class indices of functions of rows, which are differentiable twice and in every state of torch."""
    rows, scale = _multiplied(rows, asked.scale)
    asked = replace(asked, scale=scale)
    target = target.long()  # in narrower dtypes the number to ignore may be another one
    counts = target != asked.ignore_index
    index = torch.where(counts, target, 0)
    check_index(index, rows)
    total = None if weight is None else torch.where(counts, weight.to(wide(rows.dtype))[index], 0)
    cap, smoothing = asked.softcap, asked.smoothing
    head = CROSS_ENTROPY_AND_LSE if asked.squares or return_lse else CROSS_ENTROPY
    loss, even, lse = _of_indices(head, rows, index, weight, smoothing, scale, cap)
    loss = loss if total is None else loss * total
    loss = loss if even is None else loss * (1 - smoothing) + even * smoothing
    return _finished(rows, (torch.where(counts, loss, 0), lse), counts, total, asked, return_lse)


def _multiplied(rows: Tensor, scale: float | Tensor) -> tuple[Tensor, float]:
    """Rows whose scale is a number: those with one for each, (..., 1), are multiplied by it, in float32 or wider."""
    return (rows.to(wide(rows.dtype)) * scale, 1.0) if isinstance(scale, Tensor) else (rows, scale)


def _finished(
    rows: Tensor,
    losses: tuple[Tensor, Tensor | None],
    counts: Tensor | None,
    total: Tensor | None,
    asked: visits.Loss,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """What the function returns. losses: those of the rows, and their logsumexps if these are known."""
    (loss, lse), squares = losses, None
    if asked.squares or return_lse:
        lse = _logsumexp(rows, asked.scale, asked.softcap) if lse is None else lse
    if asked.squares:
        squares = asked.squares * lse.square()
        squares = squares if counts is None else torch.where(counts, squares, 0)
    loss = _reduced(loss, squares, counts, total, asked.reduction).to(asked.dtype)
    return (loss, lse) if return_lse else loss


def _reasons(
    rows: Tensor, target: Tensor, weight: Tensor | None, more: bool, asked: visits.Loss
) -> dict[str, bool]:
    """Why a call with class indices is not one of kernels that give losses."""
    grad_scale, rates = asked.grad_scale if isinstance(asked.grad_scale, Tensor) else None, asked.rates
    return {
        "torch traces or transforms it": not unseen(rows, target, weight, grad_scale, rates),
        f"{rows.dtype} on {rows.device.type}": not on_kernel(rows),
        "label smoothing with a weight": bool(asked.smoothing) and weight is not None,
        "return_lse, or rows that ranks share": more,
        "lse_square_scale with a weight": bool(asked.squares) and weight is not None,
        "a gradient of the weight": weight is not None and recorded(weight),
        "a gradient of the scale": rates is not None and recorded(rates),
    }


def _reasons_against_a_visit(rows: Tensor, asked: visits.Loss) -> dict[str, bool]:
    """Why a call is not served in one visit, besides."""
    return {
        "no gradient of the input is recorded": not recorded(rows),
        "a loss for each row": asked.reduction == "none",
        "logits that share memory among themselves": asked.inplace and overlaps_itself(rows),
    }


def _first(reasons: dict[str, bool]) -> str:
    """The first reason that holds; empty where none does."""
    return next((reason for reason, found in reasons.items() if found), "")


def _in_kernels(
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    asked: visits.Loss,
    arguments: tuple | None,
    again: Callable | None,
) -> Tensor:
    """The loss, whose gradient is written by now, or with `again` (see `visits.Recomputed`) recomputed. On CUDA a
    target out of range is the kernel's to find.

    arguments: what tells such calls apart, where they are to be known again.
    """
    weights, index = None, target.long()
    check_index(index, rows, asked.ignore_index)
    if weight is not None:
        counts = index != asked.ignore_index
        weights = torch.where(counts, weight.float()[torch.where(counts, index, 0)], 0)
    form = None
    if arguments is not None and rows.dim() <= 2 and target.dtype is torch.int64:
        form = visits.Form(rows, target, asked, arguments, again is None)
        visits.known.remember(rows, form)
    return _launched(rows, index, weights, asked, form, again)


def _launched(
    rows: Tensor,
    index: Tensor,
    weights: Tensor | None,
    asked: visits.Loss,
    form: visits.Form | None,
    again: Callable | None = None,
) -> Tensor:
    """The loss by kernels, recorded by autograd where it records."""
    if again is None and (form is None or form.visits):
        return visits.in_one_visit(rows, index, weights, asked, form)
    again = again or partial(_composed, target=index, weight=None, asked=asked, return_lse=False)
    return visits.recomputed(rows, index, weights, asked, form, again)


def _rows(input: Tensor) -> Tensor:
    """The logits with the classes in the last dimension."""
    if not input.dim():
        raise ValueError("input has no dimension of classes")
    return input.movedim(1, -1) if input.dim() > 2 else input


def _check_weight(weight: Tensor | None, rows: Tensor) -> None:
    if weight is None:
        return
    check_tensor("weight", weight, "cross_entropy")
    if tuple(weight.shape) != rows.shape[-1:] or weight.device != rows.device:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} on {weight.device}: it must have one factor for each of the "
            f"{rows.shape[-1]} classes, on {rows.device}"
        )


def _check_target(target: Tensor, rows: Tensor) -> None:
    if target.dtype is torch.bool:
        raise TypeError(f"target is {target.dtype}: it has class indices or probabilities")
    if tuple(target.shape) != tuple(rows.shape[:-1]):
        raise ValueError(
            f"target has shape {tuple(target.shape)}: class indices have that of the rows, {tuple(rows.shape[:-1])}"
        )


def _check_probabilities(target: Tensor, input: Tensor) -> None:
    if target.shape != input.shape or target.device != input.device:
        raise ValueError(
            f"target has shape {tuple(target.shape)} on {target.device}: class probabilities have that of the input, "
            f"{tuple(input.shape)} on {input.device}"
        )


def _logsumexp(rows: Tensor, scale: float, cap: float) -> Tensor:
    return logsumexp(Rows((rows.dim() - 1,), scale, softcap=cap).scores(rows), -1)


def _log_softmax(rows: Tensor, scale: float, cap: float) -> Tensor:
    """The log-probabilities of all classes, in float32 or wider."""
    if not cap:
        return log_softmax(rows, -1, wide(rows.dtype), scale=scale)
    return log_softmax(Rows((rows.dim() - 1,), scale, softcap=cap).scores(rows), -1)


def _of_shared_rows(
    rows: Tensor, target: Tensor, weight: Tensor | None, asks: Losses, shard: Shard
) -> tuple[Tensor, Tensor | None]:
    """(the loss as it is asked for, the logsumexps if they are) of rows that ranks share, with class indices."""
    check_rows(target, rows)
    if weight is None and (shard.group is not None or has_all_rows(rows, rows.dim() - 1)):
        return shared_loss(rows, target, asks, shard)
    if asks.visit:
        raise ValueError(
            "one_visit of rows that ranks share: without a weight, and with all rows on each of them"
        )
    if shard.group is None and weight is not None:
        raise ValueError("a weight for a DTensor whose rows are sharded: give group and local tensors")
    target = target.long()
    counts = target != asks.ignore
    if weight is None:  # of a DTensor whose rows are sharded as well
        loss, lse = shared_loss(rows, target, asks._replace(reduction="none", dtype=wide(rows.dtype)), shard)
        return _reduced(loss, None, placed_like(loss, counts), None, asks.reduction).to(asks.dtype), lse
    if asks.smoothing:
        raise ValueError("label_smoothing with a weight, of rows that ranks share: one of the two")
    dims = (rows.dim() - 1,)
    index, type_ = torch.where(counts, target, 0), wide(rows.dtype)
    found, lse = row_numbers(rows, index, dims, asks.scale, "found lse", shard, type_)
    total = torch.where(counts, weight.to(type_)[index], 0)
    squares = torch.where(counts, asks.squares * lse.square(), 0) if asks.squares else None
    loss = torch.where(counts, -found * total, 0)
    return _reduced(loss, squares, counts, total, asks.reduction).to(asks.dtype), lse


def _of_indices(
    head: Head, rows: Tensor, index: Tensor, weight: Tensor | None, smoothing: float, scale: float, cap: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the loss of each row at its index, against all classes evenly if that has a share, and its logsumexp where the
    head gives it); the even loss is weighted."""
    weighted = weight is not None and smoothing > 0
    kernels = not cap and 0 < scale < float("inf") and (rows.shape[-1] == 1 or rows.stride(-1) == 1)
    if not weighted or kernels:
        head = SMOOTHED if smoothing and not weighted else head
        form = head.known.repeated(rows, index, scale, -1, cap)
        if form is None:
            loss = first(head, rows, index, -1, (rows.dim() - 1,), scale, wide(rows.dtype), cap)
        else:
            loss = form(rows, index, scale)
        if head is SMOOTHED:
            return loss
        even = _against_weights(rows, weight.expand(rows.shape), scale) / rows.shape[-1] if weighted else None
        return (loss[0], even, loss[1]) if head is CROSS_ENTROPY_AND_LSE else (loss, even, None)
    logs = _log_softmax(rows, scale, cap)
    even = -(logs * weight.to(logs.dtype)).mean(-1)
    return -logs.gather(-1, index.long().unsqueeze(-1)).squeeze(-1), even, None


def _against_weights(rows: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The sum of each row's negative log-probabilities, each times its weight."""
    return divergence_of(rows, weights, Pair((rows.dim() - 1,), scale, in_force(), weights=True)).squeeze(-1)


def _of_probabilities(
    rows: Tensor,
    target: Tensor,
    weight: Tensor | None,
    smoothing: float,
    scale: float,
    cap: float,
) -> tuple[Tensor, None]:
    """(the loss of each row against a distribution, None): all rows count, each as one."""
    wanted = _rows(target)
    dense = wanted.shape[-1] == 1 or rows.stride(-1) == 1 == wanted.stride(-1)
    if weight is None and not smoothing and not cap and 0 < scale < float("inf") and dense:
        return _against_weights(rows, wanted, scale), None
    logs = _log_softmax(rows, scale, cap)
    wanted = wanted.to(logs.dtype)
    if smoothing:
        wanted = wanted * (1 - smoothing) + smoothing / rows.shape[-1]
    if weight is not None:
        wanted = wanted * weight.to(logs.dtype)
    return -(wanted * logs).sum(-1), None


def _reduced(
    loss: Tensor, squares: Tensor | None, counts: Tensor | None, total: Tensor | None, reduction: str
) -> Tensor:
    """The losses of rows and what is added to them as asked; total: the weights of rows, which count as 1 without."""
    if reduction == "none":
        return loss if squares is None else loss + squares
    if reduction == "sum":
        return loss.sum() if squares is None else loss.sum() + squares.sum()
    rows = loss.numel() if counts is None else counts.sum()
    mean = loss.sum() / (rows if total is None else total.sum())
    return mean if squares is None else mean + squares.sum() / rows
