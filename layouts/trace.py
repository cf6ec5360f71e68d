"""From a CuTe DSL kernel while it is traced: ``cute`` layouts, tiled copies and MMA atoms as our values.

Inside ``@cute.jit`` or ``@cute.kernel`` (a CPU is enough)::

    tv = read(tiled_copy).tv
    observe("sA", sA)

``read`` gives the value at once; ``observe`` hands it to whoever traces the kernel within ``observing``,
and does nothing otherwise. cutlass is imported only when something is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from . import ints
from .algebra import AnyLayout, ComposedLayout, Layout, Swizzle
from .coordinates import CoordinateValue, is_coordinates, parse_coordinates
from .notation import parse


@dataclass(frozen=True, slots=True)
class CopyValue:
    """A tiled copy: its thread-value layouts into a tile of ``tiler`` (rows, columns), and its element's
    bits."""

    tv: Layout
    source: Layout
    destination: Layout
    tiler: tuple[int, ...]
    element_bits: int


@dataclass(frozen=True, slots=True)
class MmaValue:
    """An MMA atom: the thread-value layouts of its A (M, K), B (N, K) and C (M, N) fragments."""

    shape_mnk: tuple[int, int, int]
    a: Layout
    b: Layout
    c: Layout


Value = Layout | ComposedLayout | Swizzle | CopyValue | MmaValue | CoordinateValue


def read(value: Any) -> Value:
    """The plain value of a ``cute`` layout, swizzle, tensor (its layout), TiledCopy or MMA atom.

    Call it while tracing. Raises ``ValueError`` with a caret under the place where a layout is dynamic, and
    ``TypeError`` for anything else.
    """
    import cutlass.cute as cute

    if isinstance(value, cute.Tensor):
        value = value.layout
    if isinstance(value, cute.TiledCopy):
        source, destination = value.layout_src_tv_tiled, value.layout_dst_tv_tiled
        tiler = tuple(_extent(t) for t in value.tiler_mn)
        tv = _layout(value.layout_tv_tiled)
        return CopyValue(tv, _layout(source), _layout(destination), tiler, value.value_type.width)
    if isinstance(value, cute.MmaAtom):
        fragments = map(_layout, (value.tv_layout_A, value.tv_layout_B, value.tv_layout_C))
        return MmaValue(tuple(value.shape_mnk), *fragments)
    if isinstance(value, (cute.Layout, cute.ComposedLayout, cute.Swizzle)):
        text = str(value)
        return parse_coordinates(text) if is_coordinates(text) else parse(text)
    raise TypeError(
        f"cannot read a {type(value).__name__}: give a cute layout, tensor, TiledCopy or MMA atom"
    )


def _layout(value: Any) -> Layout:
    return parse(str(value))


def _extent(mode: Any) -> int:
    """The size of one mode of a tiler, which is an int or a contiguous layout."""
    if isinstance(mode, int):
        return mode
    layout = _layout(mode)
    if layout.offsets() != list(range(layout.size)):
        raise ValueError(f"the tiler's mode {layout} is not contiguous: its tile is no rectangle")
    return layout.size


_observed: ContextVar[dict[str, Value] | None] = ContextVar("observed layouts", default=None)


@contextmanager
def observing(into: dict[str, Value] | None = None) -> Iterator[dict[str, Value]]:
    """Collects, by name, what kernels traced inside the block ``observe``: in a new dictionary, or in the one given."""
    found: dict[str, Value] = {} if into is None else into
    token = _observed.set(found)
    try:
        yield found
    finally:
        _observed.reset(token)


def observe(name: str, value: Any) -> None:
    """Within ``observing``, keep ``read(value)`` under ``name``; otherwise nothing."""
    found = _observed.get()
    if found is not None:
        found[name] = read(value)


def differences(drawn: Mapping[str, AnyLayout], traced: Mapping[str, Value]) -> list[str]:
    """One line for each drawn layout that the kernel lacks or evaluates to other offsets; empty if
    faithful.

    A traced tiled copy stands for its thread-value layout. Layouts are compared offset by offset and in
    the sizes of their top-level modes, trailing ones of one index aside, so that ``(8,1):(1,0)`` and
    ``8:1`` are the same.
    """
    lines = []
    for name, ours in drawn.items():
        theirs = traced.get(name)
        if isinstance(theirs, CopyValue):
            theirs = theirs.tv
        if theirs is None:
            lines.append(f"{name}: drawn as {ours}, but the kernel has no such layout")
        elif not isinstance(theirs, (Layout, ComposedLayout)):
            lines.append(f"{name}: drawn as {ours}, but the kernel has {theirs}, which is no layout")
        elif _sizes(theirs) != _sizes(ours) or theirs.offsets() != ours.offsets():
            lines.append(f"{name}: drawn as {ours}, but the kernel has {theirs}")
    return lines


def _sizes(layout: AnyLayout) -> list[int]:
    """The sizes of the top-level modes, without trailing ones."""
    sizes = [ints.product(mode) for mode in ints.as_tuple(layout.shape)]
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes
