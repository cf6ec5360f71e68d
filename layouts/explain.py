"""A layout in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from . import ints, operations
from .access import coverage
from .algebra import AnyLayout, ComposedLayout, Layout, Swizzle


def explain(value: AnyLayout | Swizzle, tiler: Sequence[int] = ()) -> str:
    """What a layout is and does, in a few lines; with ``tiler`` (rows, columns) as a thread-value
    layout.

    Raises ``ValueError`` for a layout of more than ``MOST_COORDINATES``, and for a swizzle with a ``tiler``.
    """
    if isinstance(value, Swizzle):
        if tiler:
            raise ValueError(f"{value} alone has no shape: it gives no thread a value")
        return "\n".join(_swizzle(value))
    lines = [f"{value}", f"  {value.size:,} coordinates, offsets 0 to {value.cosize - 1:,}"]
    if isinstance(value, ComposedLayout):
        lines.append(f"  a coordinate goes through {value.inner}, plus {value.offset}, then {value.outer}")
        if isinstance(value.outer, Swizzle):
            lines += _swizzle(value.outer)
        lines += _modes(value.inner)
    else:
        lines += _modes(value)
        lines.append(f"  the fewest modes with the same offsets: {operations.coalesce(value)}")
    lines += _injective(value)
    if tiler:
        lines += _thread_value(value, tiler)
    return "\n".join(lines)


def _swizzle(swizzle: Swizzle) -> list[str]:
    low, high = swizzle.base, swizzle.base + swizzle.shift
    return [
        f"  {swizzle}: bits {low}..{low + swizzle.bits - 1} of an offset are exclusive-ored with its bits "
        f"{high}..{high + swizzle.bits - 1}",
        f"  runs of {1 << swizzle.base} stay together; the pattern repeats every {swizzle.period} offsets",
    ]


def _modes(layout: Layout) -> list[str]:
    out = []
    for i, mode in enumerate(layout):
        size = ints.product(mode.shape)
        parts = [_leaf(s, d) for s, d in mode.flat_modes()]
        out.append(f"  mode {i}, {mode}: {size:,} coordinates; " + ", then ".join(parts))
    return out


def _leaf(size: int, stride: int) -> str:
    if size == 1:
        return "1 coordinate"
    if stride == 0:
        return f"{size} that share one offset (broadcast)"
    return f"{size} side by side" if stride == 1 else f"{size} every {stride}"


def _injective(value: AnyLayout) -> list[str]:
    counts = Counter(value.offsets())
    shared = max(counts.values())
    holes = value.cosize - len(counts)
    told = "each offset once" if shared == 1 else f"an offset up to {shared} times"
    gaps = "without holes" if holes == 0 else f"with {holes:,} holes"
    return [f"  reaches {told}, {gaps}"]


def _thread_value(value: AnyLayout, tiler: Sequence[int]) -> list[str]:
    rows, columns = (1, *tiler) if len(tiler) == 1 else tuple(tiler)
    found = coverage(value, (rows, columns))
    threads = ints.product(ints.as_tuple(value.shape)[0])
    out = [
        f"  as a thread-value layout: {threads:,} threads x {value.size // threads:,} values over a "
        f"{rows} x {columns} tile"
    ]
    if found.exact:
        out.append("  every element of the tile belongs to exactly one thread")
    else:
        out.append(
            f"  {len(found.missing):,} elements without a thread, {len(found.repeated):,} with several"
        )
    return out
