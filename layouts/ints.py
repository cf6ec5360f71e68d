"""Nested tuples of integers, the shapes, strides and coordinates of CuTe.

A value is an int or a tuple of such values. A tuple's *leaves* are its integers from left to right, and its
*profile* is the nesting alone. Everything here is pure Python and knows no layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

IntTuple = int | tuple["IntTuple", ...]


def canonical(value: object, what: str = "value") -> IntTuple:
    """``value`` with lists as tuples; ``TypeError`` naming the place where it is neither int nor tuple."""
    if isinstance(value, (tuple, list)):
        return tuple(canonical(v, f"{what}[{i}]") for i, v in enumerate(value))
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an int or a nested tuple of ints, got {value!r}")
    return value.__index__()


def at_least(least: int, **named: int) -> None:
    """Raise ``ValueError`` naming the first argument that is smaller than ``least``."""
    for name, value in named.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def leaves(value: IntTuple) -> Iterator[int]:
    """The integers of ``value``, left to right."""
    if isinstance(value, tuple):
        for v in value:
            yield from leaves(v)
    else:
        yield value


def product(value: IntTuple) -> int:
    """The product of all leaves: the size of a shape."""
    return _product(value) if isinstance(value, tuple) else value


# Sizes and modes of the few shapes that are asked for many thousand times, in the loops of figures and tests.
@lru_cache(maxsize=1024)
def _product(value: tuple[IntTuple, ...]) -> int:
    return prod(leaves(value))


@lru_cache(maxsize=1024)
def modes(shape: IntTuple, stride: IntTuple) -> tuple[tuple[int, int], ...]:
    """(size, stride) of every leaf; an empty tuple is a mode of one element."""
    if not isinstance(shape, tuple):
        return ((shape, stride),)
    return tuple(mode for s, d in zip(shape, stride, strict=True) for mode in modes(s, d)) or ((1, 0),)


def are_modes(shape: object, stride: object) -> bool:
    """Whether these are shape and stride of a layout: ints, of at least 1 and 0, in tuples of one nesting."""
    if type(shape) is int:
        return type(stride) is int and shape >= 1 and stride >= 0
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        return False
    return all(map(are_modes, shape, stride))


def depth(value: IntTuple) -> int:
    """Levels of nesting: 0 for an int, 1 for a flat tuple."""
    return 1 + max((depth(v) for v in value), default=0) if isinstance(value, tuple) else 0


def as_tuple(value: IntTuple) -> tuple[IntTuple, ...]:
    """``value`` itself if it is a tuple, else the tuple of it alone."""
    return value if isinstance(value, tuple) else (value,)


def show(value: IntTuple) -> str:
    """``value`` in CuTe's notation: ``((32,4),8)``; a tuple of one is ``(4)``."""
    return f"({','.join(map(show, value))})" if isinstance(value, tuple) else str(value)


def mismatch(a: IntTuple, b: IntTuple, path: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """The path of the first place where the profiles of ``a`` and ``b`` differ, or None where they
    agree."""
    if isinstance(a, tuple) != isinstance(b, tuple):
        return path
    if not isinstance(a, tuple):
        return None
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        found = mismatch(x, y, (*path, i))
        if found is not None:
            return found
    return None if len(a) == len(b) else (*path, min(len(a), len(b)))


def unflatten(values: Iterator[int], profile: IntTuple) -> IntTuple:
    """The next integers of ``values`` in the nesting of ``profile``."""
    return tuple(unflatten(values, p) for p in profile) if isinstance(profile, tuple) else next(values)


def compact(shape: IntTuple, start: int = 1) -> IntTuple:
    """Column-major strides of ``shape`` from ``start`` on: the leftmost leaf is fastest.

    A leaf of size 1 gets stride 0, as CuTe gives a static mode of size 1.
    """
    strides, step = [], start
    for s in leaves(shape):
        strides.append(0 if s == 1 else step)
        step *= s
    return unflatten(iter(strides), shape)


def index_to_coordinate(index: int, shape: IntTuple) -> IntTuple:
    """The coordinate that has the column-major ``index`` in ``shape``, in the nesting of ``shape``.

    Like CuTe, an index past the end runs on in the last mode.
    """
    if not isinstance(shape, tuple):
        return index
    if not shape:
        return ()
    coordinate = []
    for mode in shape[:-1]:
        index, within = divmod(index, product(mode))
        coordinate.append(index_to_coordinate(within, mode))
    return (*coordinate, index_to_coordinate(index, shape[-1]))


def inner_product(
    coordinate: IntTuple, shape: IntTuple, stride: IntTuple, place: tuple[int, ...] = ()
) -> int:
    """The offset of ``coordinate``: an int within a mode is that mode's column-major index.

    Raises ``ValueError`` naming the place where the coordinate has another nesting than the shape.
    """
    if not isinstance(coordinate, tuple):
        if not isinstance(shape, tuple):
            return coordinate * stride
        *others, (_, last) = modes(shape, stride)
        offset = 0
        for size, step in others:
            coordinate, within = divmod(coordinate, size)
            offset += within * step
        return offset + coordinate * last
    if not isinstance(shape, tuple) or len(coordinate) != len(shape):
        told = "coordinate" + "".join(f"[{i}]" for i in place)
        raise ValueError(f"{told} {show(coordinate)} does not fit the shape {show(shape)} there")
    offset = 0
    for i, (c, s, d) in enumerate(zip(coordinate, shape, stride, strict=True)):
        nested = isinstance(c, tuple) or isinstance(s, tuple)
        offset += inner_product(c, s, d, (*place, i)) if nested else c * d
    return offset
