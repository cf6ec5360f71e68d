"""What a caller says of rows that several ranks share, and whether they do: all that a call on other rows asks for.

Apart from what serves such calls, `dispatch/sharded`, as that takes as long to import as all else that softmax needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .placements import on_mesh

Tensor = torch.Tensor


class Shard(NamedTuple):
    """This rank's slice of the rows: the group, the index of its first element in the row, and the row's length; of a
    DTensor's, whether all are equally long."""

    group: dist.ProcessGroup | None = None
    start: int | None = None
    size: int | None = None
    alike: bool = False


def is_shared(input: Tensor, dims: tuple[int, ...], shard: Shard) -> bool:
    """Whether other ranks have parts of the rows. Raises ValueError for arguments of a slice without its group."""
    if shard.group is None and (shard.start is not None or shard.size is not None):
        raise ValueError("vocab_start and vocab_size say where a rank's slice lies: they need group")
    return shard.group is not None or bool(sharded_over(input, dims))


def sharded_over(input: Tensor, dims: tuple[int, ...]) -> list[int]:
    """The dimensions of a DTensor's mesh that reduced dimensions are sharded over."""
    if not on_mesh(input):
        return []
    return [i for i, p in enumerate(input.placements) if p.is_shard() and p.dim % input.dim() in dims]
