"""A call in canonical form: which index space is kept, which is reduced, and how each tensor maps it to memory.

Dimensions are permuted into a kept and a reduced group and neighbours coalesced, so that `dim=-1`, `dim=0`,
`dim=(0, 2)`, a slice or a transposed view become a few cases. The layout is the mapping: nothing is copied.
Pure Python; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ITEM_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "bool": 1, "int32": 4, "int64": 8}  # bytes
FLOATS = ("bf16", "fp16", "fp32")  # of what is reduced; the others are of masks and indices
MOST_ELEMENTS = (1 << 60) - 1  # of a tensor: their bytes are counted in 64 bits
ALIGNMENT = 16  # bytes: the widest access; what an address is worth knowing modulo


class Operand(NamedTuple):
    """One tensor of a call: its dtype, the stride of each dimension (elements), and its address modulo 16 (bytes).

    The address is a multiple of the item size.
    """

    dtype: str
    strides: tuple[int, ...]
    address: int = 0

    @property
    def offset(self) -> int:
        """The address modulo 16 bytes, in elements."""
        return self.address % ALIGNMENT // ITEM_SIZE[self.dtype]


def check_float(dtype: str) -> None:
    """Raise TypeError for a dtype that no kernel reduces."""
    if dtype not in FLOATS:
        raise TypeError(f"no kernels for dtype {dtype!r}: there are some for {', '.join(FLOATS)}")


def contiguous(dtype: str, shape: Sequence[int], reduced: Sequence[int] = ()) -> Operand:
    """A contiguous tensor of a shape, with one element in each of the reduced dimensions, where its stride is 0.

    Raises TypeError for a dtype that is not in `FLOATS`, ValueError for a negative size and for more than
    `MOST_ELEMENTS` elements.
    """
    check_float(dtype)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {tuple(shape)}: sizes must be at least 0")
    count = math.prod(max(size, 1) for size in shape)
    if count > MOST_ELEMENTS:
        raise ValueError(
            f"shape {tuple(shape)} has {count} elements: at most {MOST_ELEMENTS}, whose bytes 64 bits count"
        )
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        if d not in reduced:
            strides[d], step = step, step * max(shape[d], 1)
    return Operand(dtype, tuple(strides))


@dataclass(frozen=True)
class Mode:
    """A dimension of the canonical form: its size, and per operand its stride in elements."""

    size: int
    strides: tuple[int, ...]

    def continues(self, slower: Mode) -> bool:
        """Whether a slower mode and this one are one in every operand."""
        return all(s == f * self.size for s, f in zip(slower.strides, self.strides, strict=True))


@dataclass(frozen=True)
class Problem:
    """kept and reduced modes, the slowest first; per operand dtype and offset (elements past a 16-byte boundary).

    query: whether the last kept mode is the dimension whose index is a row's position, for causal masks.
    in_place: whether the result lies where an input does, so that no element may be written that others still read.
    """

    kept: tuple[Mode, ...]
    reduced: tuple[Mode, ...]
    dtypes: tuple[str, ...]
    offsets: tuple[int, ...]
    query: bool = False
    in_place: bool = False

    @property
    def groups(self) -> int:
        """How many groups are reduced, each by itself."""
        return math.prod(m.size for m in self.kept)

    @property
    def length(self) -> int:
        """Elements of a group."""
        return math.prod(m.size for m in self.reduced)

    @property
    def bytes(self) -> int:
        """Bytes of all operands together, each element counted once, however often it is broadcast (stride 0)."""
        return sum(
            ITEM_SIZE[d] * math.prod(m.size for m in (*self.kept, *self.reduced) if m.strides[i])
            for i, d in enumerate(self.dtypes)
        )


def canonical_dims(dim: int | Iterable[int], rank: int) -> tuple[int, ...]:
    """The dimensions of a call as a sorted tuple of non-negative ints.

    Raises IndexError for a dimension out of range and ValueError for a repeated one, as torch does, and ValueError
    for none at all. A tensor of rank 0 counts as one of rank 1.
    """
    rank = max(rank, 1)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims:
        raise ValueError("dim is empty: name at least one dimension to reduce")
    for d in dims:
        if not -rank <= d < rank:
            raise IndexError(
                f"dim={d} is out of range: expected {-rank} to {rank - 1} for {rank} dimension(s)"
            )
    dims = tuple(d % rank for d in dims)
    if len(set(dims)) != len(dims):
        raise ValueError(f"dim={dim} names a dimension twice")
    return tuple(sorted(dims))


def canonical(
    shape: Sequence[int],
    dims: Sequence[int],
    operands: Sequence[Operand],
    query: int | None = None,
    in_place: bool = False,
) -> Problem:
    """The canonical form of reducing `dims` (from `canonical_dims`) of tensors of this shape.

    query: a kept dimension that stays by itself and becomes the last kept mode, whatever its size: its index is a
    row's position. in_place: see `Problem`.
    """
    modes = [Mode(size, tuple(o.strides[d] for o in operands)) for d, size in enumerate(shape)]
    kept = _coalesce(m for d, m in enumerate(modes) if d not in dims and d != query)
    return Problem(
        kept=kept if query is None else (*kept, modes[query]),
        reduced=_coalesce(m for d, m in enumerate(modes) if d in dims),
        dtypes=tuple(o.dtype for o in operands),
        offsets=tuple(o.offset for o in operands),
        query=query is not None,
        in_place=in_place,
    )


def _coalesce(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Order the modes by stride, and merge them.

    Which index comes first does not matter to a reduction, nor to which group is which, as long as all operands
    agree: so a transposed or channels-last tensor becomes the contiguous one that it is in memory.
    """
    return merged(sorted((m for m in modes if m.size != 1), key=lambda m: m.strides[::-1], reverse=True))


def merged(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Drop modes of size 1, and merge neighbours where the slower, which comes first, continues the faster in every
    operand."""
    found: list[Mode] = []
    for mode in modes:
        if mode.size == 1:
            continue
        if found and mode.continues(found[-1]):
            found[-1] = Mode(found[-1].size * mode.size, mode.strides)
        else:
            found.append(mode)
    return tuple(found)
