"""Calls on rows that several ranks share: a group with this rank's slice, or a DTensor that says so itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ...runtime.invariance import block_size, in_force
from ..common.formulas import wide
from ..common.state import transformed
from ..heads.calls import check_integers
from .calls import Numbers, Softmax, Sum
from .states import Slice, slice_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


class Shard(NamedTuple):
    """What a caller says of the slice: the group, the index of its first element in the row, and the row's length."""

    group: dist.ProcessGroup | None = None
    start: int | None = None
    size: int | None = None


def is_shared(input: Tensor, dims: tuple[int, ...], shard: Shard) -> bool:
    """Whether other ranks have parts of the rows. Raises ValueError for arguments of a slice without its group."""
    if shard.group is None and (shard.start is not None or shard.size is not None):
        raise ValueError("vocab_start and vocab_size say where a rank's slice lies: they need group")
    return shard.group is not None or bool(_sharded_over(input, dims))


def _sharded_over(input: Tensor, dims: tuple[int, ...]) -> list[int]:
    """The dimensions of a DTensor's mesh that reduced dimensions are sharded over."""
    if type(input) in (torch.Tensor, torch.nn.Parameter) or not dist.is_available():
        return []
    from torch.distributed.tensor import DTensor

    if not isinstance(input, DTensor):
        return []
    return [i for i, p in enumerate(input.placements) if p.is_shard() and p.dim % input.dim() in dims]


def row_numbers(
    input: Tensor, index: Tensor | None, dims: tuple[int, ...], scale: float, entropies: bool, shard: Shard
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(log-probabilities at the index, logsumexps, entropies) of whole rows, alike on all ranks of the group."""
    _check(input, dims)
    (dim,) = dims
    if shard.group is None:
        return _of_dtensor(
            input, index, dim, lambda x, i, s: row_numbers(x, i, dims, scale, entropies, s), True
        )
    rows, part = _rows(input, dim, shard)
    column = None if index is None else index.long().unsqueeze(-1)
    found = Numbers.apply(rows, column, scale, entropies, part)
    return tuple(None if t is None else t.squeeze(-1) for t in found)


def uniform(input: Tensor, index: Tensor, scale: float, shard: Shard) -> tuple[Tensor, Tensor]:
    """(log-probabilities at the index, their mean over the row), for targets of which a share is uniform."""
    if shard.group is None:
        raise NotImplementedError(
            "label_smoothing of a DTensor whose rows are sharded: give group and local tensors"
        )
    _check(input, (input.dim() - 1,))
    if in_force():
        raise NotImplementedError("label_smoothing of rows that ranks share is not batch-invariant")
    rows, part = _rows(input, input.dim() - 1, shard)
    logs = Softmax.apply(rows, scale, True, wide(rows.dtype), part)
    local, here = part.local(index.long().unsqueeze(-1))
    found = logs.gather(-1, local) if rows.shape[-1] else logs.new_zeros(local.shape)
    columns = input.shape[-1] * dist.get_world_size(shard.group) if shard.size is None else shard.size
    if shard.size is None and shard.start not in (None, input.shape[-1] * dist.get_rank(shard.group)):
        raise ValueError("label_smoothing over slices of unequal length needs vocab_size")
    return tuple(
        Sum.apply(t, part) for t in (torch.where(here, found, 0).squeeze(-1), logs.sum(-1) / columns)
    )


def softmax(
    input: Tensor, dims: tuple[int, ...], dtype: torch.dtype, scale: float, log: bool, shard: Shard
) -> Tensor:
    """This rank's slice of the softmax of whole rows, or of its logarithm; padding behind the rows' end becomes 0, of
    the logarithm -inf."""
    _check(input, dims)
    (dim,) = dims
    if shard.group is None:
        return _of_dtensor(input, None, dim, lambda x, _, s: softmax(x, dims, dtype, scale, log, s), False)
    rows, part = _rows(input, dim, shard)
    result = Softmax.apply(rows, scale, log, dtype, part)
    padding = input.shape[dim] - part.width
    if padding:
        result = torch.nn.functional.pad(result, (0, padding), value=-torch.inf if log else 0.0)
    return result.movedim(-1, dim)


def check_rows(index: object, input: Tensor) -> None:
    """Raise TypeError or ValueError for an index that has not one element for each row that ranks share."""
    check_integers(index)
    if tuple(index.shape) != tuple(input.shape[:-1]) or index.device != input.device:
        raise ValueError(
            f"index has shape {tuple(index.shape)} on {index.device}: of rows that ranks share it has one element "
            f"each, {tuple(input.shape[:-1])} on {input.device}"
        )


def _check(input: Tensor, dims: tuple[int, ...]) -> None:
    if len(dims) != 1:
        raise ValueError(f"dim is {dims}: ranks share rows over one dimension")
    if not input.dim():
        raise ValueError("input has no dimension that ranks could share")
    if torch.compiler.is_compiling() or transformed():
        raise NotImplementedError("rows that ranks share are not traced by torch.compile or functorch")


def _rows(input: Tensor, dim: int, shard: Shard) -> tuple[Tensor, Slice]:
    """The slice's elements, the row's dimension last and padding left out."""
    block = None
    if in_force():
        block = block_size()
        if block is None:
            raise ValueError(
                "batch-invariant calls on rows that ranks share need batch_invariant(block_size=...)"
            )
    part = slice_of(input.shape[dim], shard.group, shard.start, shard.size, block)
    return input.movedim(dim, -1)[..., : part.width], part


def _of_dtensor(input: DTensor, index: Tensor | None, dim: int, call: Callable, numbers: bool):
    """A call on the local tensors of a DTensor, its results as DTensors: numbers of rows are replicated where the row
    was sharded, matrices lie as the input does."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Sharded

    over, mesh = _sharded_over(input, (dim,)), input.device_mesh
    if len(over) > 1:
        raise NotImplementedError("rows that are sharded over several dimensions of a mesh")
    if any(p.is_partial() for p in input.placements):
        raise ValueError(f"input has placements {input.placements}: partial sums must be reduced first")
    placements = list(input.placements)
    shape = list(input.shape)
    size = shape[dim]
    if numbers:
        for i, p in enumerate(placements):
            if i in over:
                placements[i] = Replicate()
            elif p.is_shard():
                placements[i] = Sharded(p.dim % input.dim() - (p.dim % input.dim() > dim))
        del shape[dim]
    if isinstance(index, DTensor):
        index = index.redistribute(mesh, placements).to_local()
    stride = torch.empty(shape, device="meta").stride()
    chunk = -(-size // mesh.size(over[0]))  # as torch.chunk cuts it
    start = min(size, chunk * mesh.get_local_rank(over[0]))
    found = call(input.to_local(), index, Shard(mesh.get_group(over[0]), start, size))

    def whole(local: Tensor | None) -> Tensor | None:
        if local is None:
            return None
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return tuple(map(whole, found)) if isinstance(found, tuple) else whole(found)
