"""Entropies, and log-probabilities of chosen elements: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..dispatch.common.arguments import check_tensor, column_of, float_dtype, given_dims
from ..dispatch.common.formulas import wide
from ..dispatch.common.shards import Shard, is_shared
from ..dispatch.common.spec import integer, number
from ..dispatch.heads.calls import (
    ENTROPY,
    SELECTED,
    SELECTED_AND_ENTROPY,
    check_index,
    check_integers,
    softcap_of,
)
from ..dispatch.heads.forms import first
from ..dispatch.sharded.functions import check_rows, row_numbers
from .cross_entropy import cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CAPS = (type(None), float, int)
_NONE = -(1 << 63)  # an index to ignore that no row has


def entropy(
    logits: torch.Tensor,
    dim: int | Sequence[int] = -1,
    *,
    group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """The entropy over `dim` in nats, `-sum(p * log(p))` of `p = softmax(logits)`, without writing `p`.

    The logits are read once. Within `batch_invariant` the bits depend on the row alone. An element of -inf contributes
    0. Twice differentiable. CPU tensors, and float64 tensors on any device, use torch's operations.

    Args:
        logits: A dense floating-point tensor of any shape and strides.
        dim: The dimension or dimensions to reduce.
        group: A ProcessGroup over which rows are sharded, as in `logsumexp`.
        vocab_start: As in `logsumexp`.
        vocab_size: As in `logsumexp`.

    Returns:
        A tensor without the reduced dimensions, with the dtype of the logits (float32 under autocast).

    Raises:
        TypeError: For anything but a dense, real floating-point tensor.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension.
        NotPlanned: As in `softmax`.
    """
    if group is vocab_start is vocab_size is None:
        form = ENTROPY.known.repeated(logits, None, 1.0, dim)
        if form is not None:
            return form(logits)
    check_tensor("logits", logits, "entropy")
    dims, dtype = given_dims(dim, logits), float_dtype(logits, None, "entropy")
    shard = Shard(group, vocab_start, vocab_size)
    if is_shared(logits, dims, shard):
        return row_numbers(logits, None, dims, 1.0, "entropy", shard, dtype)[0]
    return first(ENTROPY, logits, None, dim, dims, 1.0, dtype)


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int | None = None,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of chosen elements, `log_softmax(logits * scale, -1).gather(-1, index)`.

    The matrix of log-probabilities is not written. Forward reads the logits once; backward reads them once more and
    writes their gradient, which includes the entropy's, and allocates nothing else of this size. Within
    `batch_invariant` the bits depend on the row alone and, without scale and entropy and in the dtype of the logits,
    equal those of `log_softmax`. CPU tensors, and float64 tensors on any device, use torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor.
        index: Integers from 0 to N - 1: (...) for one element per row, or (..., K) for several.
        scale: A number by which the logits are multiplied, 1 / temperature; or a tensor with one number per row, (...),
            which may have a gradient. The kernels read it for one element per row without the entropy; in other calls,
            and for its gradient, the scaled logits are first written, in float32.
        softcap: A positive number: scores are `softcap * tanh(logits * scale / softcap)`. None: no cap.
        return_entropy: Also return the entropy of each row, in nats, from the same read of the logits.
        ignore_index: An additional value that the index may have: the result there is 0, and no gradient flows.
        dtype: The dtype of the results; that of the logits if None (float32 under autocast). The kernel computes them
            in float32.
        group: A ProcessGroup over which rows are sharded, as in `logsumexp`: the logits are this rank's slice of the
            rows, and the index, of one element per row, refers to whole rows.
        vocab_start: As in `logsumexp`.
        vocab_size: As in `logsumexp`.

    Returns:
        The log-probabilities in the shape of `index`; with `return_entropy` a pair of them and the entropies, (...).
        See `topk_log_softmax` for ranks and the largest log-probabilities.

    Raises:
        TypeError: For logits or a dtype that are not floating-point, logits that are not dense, an index without an
            integer dtype, a scale that is neither a number nor a tensor, an ignore_index that is not a number.
        ValueError: For an index whose shape or device does not fit the logits, a softcap that is not positive.
        IndexError: For an index out of range on the CPU. On CUDA the kernel prints the index and its row on standard
            output and stops, which CUDA reports at the next synchronization. Like torch's device assertions, this ends
            the process's CUDA context. No memory beyond the row is read.
        NotPlanned: As in `softmax`.
    """
    if ignore_index is not None:
        keep = _counted(index, ignore_index)
        options = dict(softcap=softcap, return_entropy=return_entropy, dtype=dtype, group=group)
        options |= dict(scale=scale, vocab_start=vocab_start, vocab_size=vocab_size)
        found = selective_log_softmax(logits, torch.where(keep, index, 0), **options)
        if return_entropy:
            return torch.where(keep, found[0], 0.0), found[1]
        return torch.where(keep, found, 0.0)
    head = SELECTED_AND_ENTROPY if return_entropy else SELECTED
    if group is vocab_start is vocab_size is None and type(softcap) in _CAPS and softcap != 0:
        form = head.known.repeated(logits, index, scale, -1, softcap or 0.0, dtype)
        if form is not None:
            return form(logits, index, scale)
    check_tensor("logits", logits, "selective_log_softmax")
    result = float_dtype(logits, dtype, "selective_log_softmax")
    dims, shard = given_dims(-1, logits), Shard(group, vocab_start, vocab_size)
    cap = softcap_of(softcap)
    if is_shared(logits, dims, shard):
        if cap or isinstance(scale, torch.Tensor):
            what = "a softcap" if cap else "a scale for each row"
            raise ValueError(f"{what} of rows that ranks share: multiply and cap the logits first")
        check_rows(index, logits)
        asked = "found entropy" if return_entropy else "found"
        found = row_numbers(logits, index, dims, number("scale", scale), asked, shard, result)
        return found if return_entropy else found[0]
    check_index(index, logits)
    if isinstance(scale, torch.Tensor):
        return _scaled_by_rows(logits, index, column_of("scale", scale, logits), cap, return_entropy, result)
    scale = number("scale", scale, "a number or a torch.Tensor")
    return first(head, logits, index, -1, (logits.dim() - 1,), scale, result, cap, dtype)


def _scaled_by_rows(
    logits: torch.Tensor,
    index: torch.Tensor,
    scale: torch.Tensor,
    cap: float,
    return_entropy: bool,
    dtype: torch.dtype,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`selective_log_softmax` with a scale for each row, (..., 1). Of one element per row it is what a cross entropy
    loses."""
    one = index.dim() < logits.dim() or index.shape[-1] == 1
    if return_entropy or not one:
        scores = logits.to(wide(logits.dtype)) * scale
        options = dict(softcap=cap or None, return_entropy=return_entropy, dtype=dtype)
        return selective_log_softmax(scores, index, **options)
    input = logits.movedim(-1, 1) if logits.dim() > 2 else logits
    loss = cross_entropy(
        input,
        index.view(logits.shape[:-1]),
        reduction="none",
        scale=scale,
        softcap=cap or None,
        dtype=dtype,
        ignore_index=_NONE,
    )
    return 0.0 - loss.view(index.shape)  # 0, not -0, of a probability of 1


def _counted(index: object, ignore_index: object) -> torch.Tensor:
    """Where an index is not the one that is ignored. Raises TypeError for what is no index, or no int."""
    check_integers(index)
    return index.long() != integer("ignore_index", ignore_index)
