"""Layouts whose results are coordinates: identity tensors and their partitions, with CuTe's basis strides.

CUTLASS prints one as ``(8,64):(1@0,1@1)``, or as ``(0,32) o (8,64):(1@0,1@1)`` where it begins elsewhere than at the
origin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import ints
from .algebra import Layout
from .notation import LayoutSyntaxError, parse

_BASIS = re.compile(r"_?(\d+)@(\d+)(?!@)")
_ORIGIN = re.compile(r"\s*\(([\s\d,_]+)\)\s*[o∘]\s*(?=\()")


@dataclass(frozen=True, slots=True)
class CoordinateValue:
    """A tensor of coordinates, such as a partition of an identity tensor: per axis the layout that gives its
    index, relative to the tensor's first coordinate, `origin` (all zeros where it is empty)."""

    axes: tuple[Layout, ...]
    origin: tuple[int, ...] = ()

    @property
    def shape(self) -> ints.IntTuple:
        """The shape, which all axes share."""
        return self.axes[0].shape

    @property
    def size(self) -> int:
        """How many places there are."""
        return ints.product(self.shape)

    def __call__(self, *coordinate: ints.IntTuple) -> tuple[int, ...]:
        """The coordinate at a position, written as for ``Layout``."""
        first = self.origin or (0,) * len(self.axes)
        return tuple(o + axis(*coordinate) for o, axis in zip(first, self.axes, strict=True))

    def __str__(self) -> str:
        flat = zip(*(ints.leaves(axis.stride) for axis in self.axes), strict=True)
        strides = []
        for leaf in flat:
            named = [f"{d}@{i}" for i, d in enumerate(leaf) if d]
            strides.append("+".join(named) or "0")
        stride = _shown(self.shape, iter(strides))
        begin = f"{ints.show(self.origin)} o " if any(self.origin) else ""
        return f"{begin}{ints.show(self.shape)}:{stride}"


def _shown(shape: ints.IntTuple, leaves) -> str:
    if isinstance(shape, tuple):
        return f"({','.join(_shown(s, leaves) for s in shape)})"
    return next(leaves)


def is_coordinates(text: str) -> bool:
    """Whether a text has basis strides."""
    return "@" in text


def parse_coordinates(text: str) -> CoordinateValue:
    """The value of a layout with basis strides. Raises ``LayoutSyntaxError`` for what is none: axes nested in axes
    (``1@0@1``), too."""
    origin, match = (), _ORIGIN.match(text)
    if match:
        origin = tuple(int(part.strip().lstrip("_")) for part in match[1].split(",") if part.strip())
        text = text[match.end() :]
    axes = 1 + max((int(axis) for _, axis in _BASIS.findall(text)), default=0)
    axes = max(axes, len(origin))
    if origin and len(origin) != axes:
        raise LayoutSyntaxError(f"an origin of {len(origin)} axes for strides of {axes}", text, 0)

    def along(axis: int) -> Layout:
        found = parse(_BASIS.sub(lambda m: m[1] if int(m[2]) == axis else "0", text))
        if not isinstance(found, Layout):
            raise LayoutSyntaxError("basis strides are of a plain layout", text, 0)
        return found

    return CoordinateValue(tuple(map(along, range(axes))), origin)
