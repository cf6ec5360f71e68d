"""DTensors whose rows are sharded: a call on their local tensors, and where its results lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...runtime.private import constant_when_traced
from ..common.shards import sharded_over
from .states import name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


def has_all_rows(input: DTensor, dim: int) -> bool:
    """Whether each rank has a part of every row of a DTensor: no other dimension is sharded."""
    over = sharded_over(input, (dim,))
    return all(i in over or p.is_replicate() for i, p in enumerate(input.placements))


def of_dtensor(input: DTensor, index: Tensor | None, dim: int, call: Callable, rows: bool = True):
    """A call on the local tensors of a DTensor, its results as DTensors: numbers of rows are replicated where the row
    was sharded, and so is a number of all rows, if the DTensor `has_all_rows`; matrices (not `rows`) lie as the input
    does.

    call: takes the local tensors, the name of the group of ranks that share a row, the slice's start, the row's length
        and whether all slices are equally long.
    Raises ValueError for placements that are no plain shards or replicas.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, placements, shape = input.device_mesh, list(input.placements), list(input.shape)
    if any(p.is_partial() for p in placements):
        raise ValueError(f"input has placements {input.placements}: partial sums must be reduced first")
    if any(p.is_shard() and type(p) is not Shard for p in placements):
        raise ValueError(
            f"input has placements {input.placements}: rows in strided shards, redistribute them first"
        )
    over, size = tuple(sharded_over(input, (dim,))), shape[dim]
    group, start = _group_name(mesh, over), _start(size, mesh, over)
    if rows:
        for i, p in enumerate(placements):
            if i in over:
                placements[i] = Replicate()
            elif p.is_shard() and p.dim > dim:
                # A constant to torch.compile, to which the placement's own number may be none.
                placements[i] = next(Shard(d) for d in range(dim, len(shape)) if d + 1 == p.dim)
        del shape[dim]
    if isinstance(index, DTensor):
        index = index.redistribute(mesh, placements).to_local()

    def whole(local: Tensor | None) -> Tensor | None:
        if local is None:
            return None
        size = torch.Size(shape if local.dim() else ())
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)

    alike = size % math.prod([mesh.size(i) for i in over]) == 0
    found = call(input.to_local(), index, group, start, size, alike)
    return tuple(map(whole, found)) if isinstance(found, tuple) else whole(found)


def placed_like(whole: DTensor, local: Tensor) -> DTensor:
    """A tensor as a DTensor that lies as another one; what is no DTensor is this rank's part."""
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements
    if isinstance(local, DTensor):
        return local.redistribute(mesh, placements)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _start(size: int, mesh: DeviceMesh, over: tuple[int, ...]) -> int:
    """Where this rank's slice of a dimension begins that is sharded over these dimensions of a mesh, one in another."""
    start, left = 0, size
    for i in over:
        ranks, rank = mesh.size(i), mesh.get_local_rank(i)
        each = -(-left // ranks)
        first = min(each * rank, left)
        start, left = start + first, min(each, left - first)
    return start


# Of (the mesh's ranks, its dimensions over which rows are sharded): the group of those that share this rank's rows.
_groups: dict[tuple, dist.ProcessGroup] = {}


@constant_when_traced
def _group_name(mesh: DeviceMesh, over: tuple[int, ...]) -> str:
    """The name of the group of ranks that share a row. Of several dimensions of a mesh it is made, once, by these."""
    if len(over) == 1:
        return name_of(mesh.get_group(over[0]))
    ranks = mesh.mesh
    mine = (ranks == dist.get_rank()).nonzero()[0].tolist()
    together = ranks[tuple(slice(None) if i in over else at for i, at in enumerate(mine))].flatten().tolist()
    key = (tuple(together), dist.group.WORLD.group_name)
    if key not in _groups:
        _groups[key] = dist.new_group(together, use_local_synchronization=True)
    return name_of(_groups[key])
