"""The states of row slices: which part of a row a rank has, and how states are gathered and merged.

A state is the (maximum, logarithm of the sum) of a slice's scores, as threads, warps and CTAs merge theirs; beside it
may stand the entropy of the slice and the score of a chosen element, 8 to 16 bytes a row. Every rank gathers the states
of all and merges them in the order of the ranks, in float32, so that all have the same bits.

In batch-invariant calls a row is cut into blocks of a given size first, from its beginning on, and each has a state of
its own. A block is one rank's, and the states are merged in the order of the blocks: how many ranks there are, and
which has what, decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slice:
    """A rank's part of every row.

    start: the index of its first element in the row; width: how many elements of the row it has (those behind them are
    padding). block: elements of the blocks that rows are reduced by, on whose multiples slices begin; None where a
    slice is one block. blocks: of a whole row.
    """

    group: dist.ProcessGroup
    start: int
    width: int
    block: int | None = None
    blocks: int = 0

    def local(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """An index into whole rows as one into the slice, 0 where it lies elsewhere; and whether it lies here."""
        local = index - self.start
        here = (local >= 0) & (local < self.width)
        return torch.where(here, local, 0), here


def slice_of(
    columns: int, group: object, start: int | None, size: int | None, block: int | None = None
) -> Slice:
    """The part of a rank with so many columns, some of which may lie behind the row's end; block: see `Slice`.

    Raises TypeError for what is no ProcessGroup, ValueError for a rank outside it, for a start or size below 0, and for
    slices that are not cut at multiples of a block.
    """
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is no member of the group")
    for name, number in (("vocab_start", start), ("vocab_size", size)):
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} is {number!r}: it must be an int of 0 or more")
    given, start = start, rank * columns if start is None else start
    width = columns if size is None else min(max(size - start, 0), columns)
    if block is None:
        return Slice(group, start, width)
    ranks = dist.get_world_size(group)
    if given is not None and size is None:
        raise ValueError("vocab_start without vocab_size: batch-invariant calls must know where rows end")
    whole = ranks * columns if size is None else size
    # Of equally long slices all ranks know at once what is wrong with any.
    cut = columns if given is None and ranks > 1 and columns < whole else start if width else 0
    last = start + width == whole
    if cut % block or (given is not None and width % block and not last):
        raise ValueError(
            f"this rank's slice is [{start}, {start + width}) of rows of {whole}: batch-invariant calls with a "
            f"block_size of {block} need slices that begin and end at multiples of it"
        )
    return Slice(group, start, width, block, -(-whole // block))


def gathered(numbers: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Numbers of rows from all ranks: a tensor (ranks, ...) for each given; one collective."""
    mine = torch.stack(tuple(numbers))
    every = mine.new_empty((dist.get_world_size(group) * len(mine), *mine.shape[1:]))
    if mine.numel():
        # Its name from torch 2.13 on, where the other is deprecated.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(every, mine.contiguous(), group=group)
    return list(every.view(-1, *mine.shape).unbind(1))


def by_blocks(input: Tensor, part: Slice, numbers_of: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """What `numbers_of` gives for a slice's blocks, rows of their own: each (..., the slice's blocks).

    numbers_of: of a tensor (..., elements), numbers of its rows, (..., 1).
    """
    whole = part.width // part.block * part.block
    found = []
    if whole:
        found.append(numbers_of(input[..., :whole].unflatten(-1, (-1, part.block))))
    if part.width - whole or not whole:
        found.append(numbers_of(input[..., None, whole : part.width]))
    return [torch.cat(t, -2).squeeze(-1) for t in zip(*found, strict=True)]


def placed(mine: Tensor, part: Slice, nothing: float) -> Tensor:
    """Numbers of a slice's blocks, (..., its blocks), among those of whole rows, (..., blocks)."""
    found = mine.new_full((*mine.shape[:-1], part.blocks), nothing)
    if part.width:
        first = part.start // part.block
        found[..., first : first + mine.shape[-1]] = mine
    return found


def of_all_blocks(numbers: Sequence[Tensor], part: Slice, nothing: Sequence[float]) -> list[Tensor]:
    """Numbers of the slices' blocks, from all ranks: for each given a tensor (blocks, ..., 1), in the order of the row.

    nothing: for each what a rank has where a block is another's: -inf, or 0.
    """
    mine = [placed(t, part, no) for t, no in zip(numbers, nothing, strict=True)]
    every = gathered(mine, part.group)
    # Of a block all ranks but one have nothing: the largest, or the sum, is the number itself.
    found = [t.amax(0) if no else in_order(t) for t, no in zip(every, nothing, strict=True)]
    return [t.movedim(-1, 0).unsqueeze(-1) for t in found]


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
