"""The values of CuTe: ``Layout``, ``Swizzle`` and ``ComposedLayout``.

All are frozen, hashable and plain Python. A layout maps a coordinate to an offset; the unit is whatever
its user says (elements as a rule). Every mode may be nested, indices are column-major (leftmost fastest),
and an int stands for a whole mode's index, all as in CuTe. ``layouts.operations`` has the operations,
``layouts.notation`` reads what ``str`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from . import ints
from .ints import IntTuple

# Coordinates that are gone through one by one: twice as many as an SM has bytes of registers and shared memory, so that
# every tile of a CTA is among them. A million take up to 3 s and 400 MB.
MOST_COORDINATES = 1 << 20
OFFSET_BITS = 63  # of an offset at most: what a kernel's integers hold


def check_enumerable(what: object, size: int) -> None:
    """Raise ``ValueError`` where ``what`` has too many coordinates to go through them all."""
    if size > MOST_COORDINATES:
        raise ValueError(f"{what} has {size:,} coordinates: at most {MOST_COORDINATES:,} are enumerated")


@dataclass(frozen=True, slots=True)
class Layout:
    """``shape:stride``; without ``stride`` compact and column-major, as ``cute.make_layout`` makes it.

    Raises ``ValueError`` where a size is below 1, a stride is negative, or shape and stride differ in
    nesting (naming the first such place), ``TypeError`` where something is no int.
    """

    shape: IntTuple
    stride: IntTuple = None

    def __post_init__(self) -> None:
        if ints.are_modes(self.shape, self.stride):
            return  # as they stand; what follows takes five times as long, and names what is wrong
        shape = ints.canonical(self.shape, "shape")
        stride = ints.compact(shape) if self.stride is None else ints.canonical(self.stride, "stride")
        path = ints.mismatch(shape, stride)
        if path is not None:
            place = "".join(f"[{i}]" for i in path)
            raise ValueError(
                f"shape {ints.show(shape)} and stride {ints.show(stride)} differ in nesting at shape{place}"
            )
        if any(s < 1 for s in ints.leaves(shape)):
            raise ValueError(f"every size must be at least 1, got shape {ints.show(shape)}")
        if any(d < 0 for d in ints.leaves(stride)):
            raise ValueError(f"every stride must be at least 0, got stride {ints.show(stride)}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    @staticmethod
    def ordered(shape: IntTuple, order: IntTuple) -> Layout:
        """A compact layout whose modes are laid out by ascending ``order``, as
        ``cute.make_ordered_layout``.

        ``order`` has the nesting of ``shape`` or a coarser one; an int for a nested mode keeps that mode
        column-major inside. ``ordered((4, (8, 2), 2), (1, 0, 2))`` makes the middle mode fastest.
        """
        return _ordered(ints.canonical(shape, "shape"), ints.canonical(order, "order"))

    @property
    def size(self) -> int:
        """How many coordinates the layout has."""
        return ints.product(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((s - 1) * d for s, d in self.flat_modes())

    @property
    def rank(self) -> int:
        """How many modes stand at the top level; 1 for an int shape."""
        return len(ints.as_tuple(self.shape))

    @property
    def depth(self) -> int:
        """Levels of nesting: 0 for ``4:1``, 1 for ``(4,8):(1,4)``."""
        return ints.depth(self.shape)

    def flat_modes(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of every leaf, left to right; an empty tuple is a mode of one element."""
        return ints.modes(self.shape, self.stride)

    def __len__(self) -> int:
        return self.rank

    def __getitem__(self, mode: int) -> Layout:
        return Layout(ints.as_tuple(self.shape)[mode], ints.as_tuple(self.stride)[mode])

    def __iter__(self) -> Iterator[Layout]:
        return (self[i] for i in range(self.rank))

    def __call__(self, *coordinate: IntTuple) -> int:
        """The offset of a coordinate: ``layout(5)``, ``layout(1, 2)``, ``layout(((3, 1), 2))``.

        An int where the shape is nested is that mode's column-major index. As in CuTe nothing is clipped:
        an index past the end runs on in the last mode. ``ValueError`` where the coordinate has another
        nesting.
        """
        value = coordinate[0] if len(coordinate) == 1 else coordinate
        if isinstance(value, list):
            value = ints.canonical(value, "coordinate")
        return ints.inner_product(value, self.shape, self.stride)

    def coordinate(self, index: int) -> IntTuple:
        """The coordinate, in the shape's own nesting, of a column-major index."""
        return ints.index_to_coordinate(index, self.shape)

    def offsets(self) -> list[int]:
        """The offsets of all indices ``0 .. size - 1`` in order; ``ValueError`` for more than
        ``MOST_COORDINATES``."""
        check_enumerable(self, self.size)
        return [*_offsets(self.flat_modes())]

    def __str__(self) -> str:
        return f"{ints.show(self.shape)}:{ints.show(self.stride)}"

    def __repr__(self) -> str:
        return f"Layout({self.shape!r}, {self.stride!r})"


@lru_cache(maxsize=4)  # figures and comparisons ask for those of one layout again and again
def _offsets(modes: tuple[tuple[int, int], ...]) -> list[int]:
    """See `Layout.offsets`."""
    values = [0]
    for size, stride in modes:
        values = [v + i * stride for i in range(size) for v in values]
    return values


@lru_cache(maxsize=4096)
def _ordered(shape: IntTuple, order: IntTuple) -> Layout:
    """See `Layout.ordered`."""
    blocks: list[tuple[int, int, IntTuple]] = []

    def collect(s: IntTuple, o: IntTuple) -> None:
        if not isinstance(o, tuple):
            blocks.append((o, len(blocks), s))
        elif not isinstance(s, tuple) or len(s) != len(o):
            raise ValueError(f"order {ints.show(order)} does not fit the shape {ints.show(shape)}")
        else:
            for pair in zip(s, o, strict=True):
                collect(*pair)

    collect(shape, order)
    strides: dict[int, IntTuple] = {}
    step = 1
    for _, position, block in sorted(blocks, key=lambda b: b[:2]):
        strides[position] = ints.compact(block, step)
        step *= ints.product(block)
    flat = (d for i in range(len(blocks)) for d in ints.leaves(strides[i]))
    return Layout(shape, ints.unflatten(flat, shape))


@dataclass(frozen=True, slots=True)
class Swizzle:
    """``S<bits,base,shift>``: exclusive-or of an offset's bits [base, base+bits) with those ``shift``
    higher.

    An involution on offsets that permutes inside aligned blocks of 2^(bits+base+shift), so that columns of
    a tile in shared memory fall into different banks. ``ValueError`` unless 0 <= bits <= shift and base >=
    0, and for more bits in all than an offset has.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise ValueError(f"a swizzle needs 0 <= bits <= shift and base >= 0, got {self}")
        if self.bits + self.base + self.shift > OFFSET_BITS:
            raise ValueError(f"a swizzle takes up to {OFFSET_BITS} bits of an offset, got {self}")

    def __call__(self, offset: int) -> int:
        """The swizzled offset."""
        source = offset & (((1 << self.bits) - 1) << (self.base + self.shift))
        return offset ^ (source >> self.shift)

    @property
    def period(self) -> int:
        """The pattern repeats after so many offsets."""
        return 1 << (self.bits + self.base + self.shift)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True, slots=True)
class ComposedLayout:
    """``outer o offset o inner``: the offset in ``inner``, plus ``offset``, then through ``outer``.

    ``outer`` is a Swizzle (shared memory) or a Layout; ``offset`` is in the units of ``inner``'s offsets.
    """

    outer: Swizzle | Layout
    offset: int
    inner: Layout

    @property
    def shape(self) -> IntTuple:
        """The shape of ``inner``: the domain."""
        return self.inner.shape

    @property
    def size(self) -> int:
        """How many coordinates the layout has."""
        return self.inner.size

    @property
    def rank(self) -> int:
        """How many modes stand at the top level."""
        return self.inner.rank

    @property
    def cosize(self) -> int:
        """One more than the largest offset that occurs."""
        return 1 + max(self.offsets())

    def __call__(self, *coordinate: IntTuple) -> int:
        """The offset of a coordinate, written as for ``Layout``."""
        return self.outer(self.offset + self.inner(*coordinate))

    def coordinate(self, index: int) -> IntTuple:
        """The coordinate, in the shape's own nesting, of a column-major index."""
        return self.inner.coordinate(index)

    def offsets(self) -> list[int]:
        """The offsets of all indices ``0 .. size - 1`` in order, as ``Layout.offsets``."""
        return [*_composed_offsets(self)]

    def __str__(self) -> str:
        return f"{self.outer} o {self.offset} o {self.inner}"


@lru_cache(maxsize=4)
def _composed_offsets(layout: ComposedLayout) -> list[int]:
    """See `ComposedLayout.offsets`."""
    return [layout.outer(layout.offset + v) for v in layout.inner.offsets()]


AnyLayout = Layout | ComposedLayout
