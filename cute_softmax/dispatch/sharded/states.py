"""The states of row slices: which part of a row a rank has, and how states are gathered and merged.

A state is the (maximum, logarithm of the sum) of a slice's scores, as threads, warps and CTAs merge theirs; beside it
may stand the entropy of the slice and the score of a chosen element, 8 to 16 bytes a row. Every rank gathers the states
of all and merges them in the order of the ranks, in float32, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slice:
    """A rank's part of every row.

    start: the index of its first element in the row; width: how many elements of the row it has (those behind them are
    padding).
    """

    group: dist.ProcessGroup
    start: int
    width: int

    def local(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """An index into whole rows as one into the slice, 0 where it lies elsewhere; and whether it lies here."""
        local = index - self.start
        here = (local >= 0) & (local < self.width)
        return torch.where(here, local, 0), here


def slice_of(columns: int, group: object, start: int | None, size: int | None) -> Slice:
    """The part of a rank with so many columns, some of which may lie behind the row's end.

    Raises TypeError for what is no ProcessGroup, ValueError for a rank outside it, and for a start or size below 0.
    """
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is no member of the group")
    for name, number in (("vocab_start", start), ("vocab_size", size)):
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} is {number!r}: it must be an int of 0 or more")
    start = rank * columns if start is None else start
    return Slice(group, start, columns if size is None else min(max(size - start, 0), columns))


def gathered(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Numbers of rows from all ranks: a tensor (ranks, ...) for each given; one collective."""
    mine = torch.stack(tuple(numbers))
    every = mine.new_empty((dist.get_world_size(group) * len(mine), *mine.shape[1:]))
    if mine.numel():
        # Its name from torch 2.13 on, where the other is deprecated.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(every, mine.contiguous(), group=group)
    return list(every.view(-1, *mine.shape).unbind(1))


def in_order(numbers: Tensor) -> Tensor:
    """The sum over ranks, in their order."""
    return reduce(torch.add, numbers.unbind(0))


def merged(tops: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum, logarithm of the sum less it) of whole rows from those of their slices, each (ranks, ...)."""
    top = tops.amax(0)
    # The difference of equal infinities would be NaN.
    apart = torch.where(tops == top, 0.0, tops - top)
    return top, in_order((apart + logs).exp()).log()


def share(top: Tensor, log: Tensor, whole_top: Tensor, whole_log: Tensor) -> Tensor:
    """The logarithm of a slice's part of its row's sum: -inf for a slice without a score above -inf, NaN in a row
    without one."""
    apart = torch.where(top == whole_top, 0.0, top - whole_top)
    empty = torch.where(whole_log == -torch.inf, torch.nan, -torch.inf)
    return torch.where(log == -torch.inf, empty, apart + log - whole_log)
