"""Calls on rows that several ranks share: a group with this rank's slice, or a DTensor that says so itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime.invariance import block_size, in_force
from ..common.shards import Shard
from ..heads.calls import check_integers
from . import calls
from .placements import of_dtensor
from .states import Shared, slice_of

Tensor = torch.Tensor


def row_numbers(
    input: Tensor,
    index: Tensor | None,
    dims: tuple[int, ...],
    scale: float,
    results: str,
    shard: Shard,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Numbers of whole rows in a dtype, alike on all ranks of the group. results: some of "found" (log-probabilities at
    the index), "lse" (logsumexps), "entropy" and "even" (mean log-probabilities), in this order."""
    dim = shared_dim(input, dims)
    if shard.group is None:
        return of_dtensor(
            input, index, dim, lambda x, i, *at: row_numbers(x, i, dims, scale, results, Shard(*at), dtype)
        )
    rows, part = _rows(input, dim, shard)
    asked = part.asks(scale=scale, results=results, dtype=dtype)
    if "even" in asked.names:
        _check_even(asked)
    at = None if index is None else index.long()
    found = dict(zip(calls.RESULTS, calls.numbers(rows, at, asked), strict=True))
    return tuple(found[name] for name in asked.names)


class Losses(NamedTuple):
    """What a cross entropy asks for, as `cross_entropy` has it; lse: whether the logsumexps, too; visit: whether the
    gradient is to be written with the loss, None where that pays."""

    reduction: str
    ignore: int
    smoothing: float
    scale: float
    squares: float
    lse: bool
    dtype: torch.dtype
    visit: bool | None


def loss(input: Tensor, target: Tensor, asks: Losses, shard: Shard) -> tuple[Tensor, Tensor | None]:
    """(the cross entropy with class indices, or those of rows; the logsumexps in float32 if they are asked for)."""
    dim = shared_dim(input, (input.dim() - 1,))
    if shard.group is None:
        return of_dtensor(input, target, dim, lambda x, i, *at: loss(x, i, asks, Shard(*at)))
    rows, part = _rows(input, dim, shard)
    asked = part.asks(
        scale=asks.scale, results="loss lse" if asks.lse else "loss", dtype=asks.dtype, reduction=asks.reduction,
        ignore=asks.ignore, smoothing=asks.smoothing, squares=asks.squares,
    )  # fmt: skip
    if asked.even:
        _check_even(asked)
    found, lse = calls.loss(rows, target.long(), asked, asks.visit)
    return found, lse if asks.lse else None


def softmax(
    input: Tensor, dims: tuple[int, ...], dtype: torch.dtype, scale: float, log: bool, shard: Shard
) -> Tensor:
    """This rank's slice of the softmax of whole rows, or of its logarithm; padding behind the rows' end becomes 0, of
    the logarithm -inf."""
    dim = shared_dim(input, dims)
    if shard.group is None:
        return of_dtensor(
            input, None, dim, lambda x, _, *at: softmax(x, dims, dtype, scale, log, Shard(*at)), rows=False
        )
    rows, part = _rows(input, dim, shard)
    return calls.softmax(rows, part.asks(scale=scale, dtype=dtype, log=log)).movedim(-1, dim)


def check_rows(index: object, input: Tensor) -> None:
    """Raise TypeError or ValueError for an index that has not one element for each row that ranks share."""
    check_integers(index)
    if tuple(index.shape) != tuple(input.shape[:-1]) or index.device != input.device:
        raise ValueError(
            f"index has shape {tuple(index.shape)} on {index.device}: of rows that ranks share it has one element "
            f"each, {tuple(input.shape[:-1])} on {input.device}"
        )


def shared_dim(input: Tensor, dims: tuple[int, ...]) -> int:
    """The dimension that ranks share."""
    if len(dims) != 1:
        raise ValueError(f"dim is {dims}: ranks share rows over one dimension")
    if not input.dim():
        raise ValueError("input has no dimension that ranks could share")
    return dims[0]


def _check_even(asked: Shared) -> None:
    """Raise where no mean over the row can be had."""
    if not asked.size:
        raise ValueError("label_smoothing over slices of unequal length needs vocab_size")
    if asked.block:
        raise NotImplementedError("label_smoothing of rows that ranks share is not batch-invariant")


def block_asked() -> int:
    """Elements of the blocks that batch-invariant calls reduce rows by, 0 outside of that mode. Raises ValueError where
    the mode does not say."""
    block = block_size() if in_force() else 0
    if block is None:
        raise ValueError(
            "batch-invariant calls on rows that ranks share need batch_invariant(block_size=...)"
        )
    return block


def _rows(input: Tensor, dim: int, shard: Shard) -> tuple[Tensor, Shared]:
    """The slice, the row's dimension last, and which part of the rows it is."""
    # A bit of torch's that negates a tensor must not send this rank another way than the others.
    rows = input.movedim(dim, -1).resolve_neg()
    return rows, slice_of(input.shape[dim], *shard, block_asked() or None)
