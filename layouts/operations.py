"""Operations on layouts, with CuTe's results: coalesce, compose, complement, invert, divide, multiply.

The definitions follow the CUTLASS documentation ("CuTe layout algebra"). Each function returns a new
layout. A tiler is an int (a contiguous tile), a Layout, or a tuple with one of these per mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import ints
from .algebra import Layout

Tiler = int | Layout | tuple["Tiler", ...]


def make_layout(modes: Sequence[Layout]) -> Layout:
    """The layout whose modes are the given layouts."""
    return Layout(tuple(m.shape for m in modes), tuple(m.stride for m in modes))


def _from_leaves(modes: Sequence[tuple[int, int]]) -> Layout:
    """A flat layout of (size, stride) pairs; one pair gives an int layout, none gives ``1:0``."""
    if not modes:
        return Layout(1, 0)
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(s for s, _ in modes), tuple(d for _, d in modes))


def _merged(layout: Layout) -> list[tuple[int, int]]:
    """(size, stride) of the fewest modes with the same offsets for all indices."""
    modes: list[tuple[int, int]] = []
    for size, stride in layout.flat_modes():
        if size == 1:
            continue
        if modes and modes[-1][0] * modes[-1][1] == stride:
            modes[-1] = (modes[-1][0] * size, modes[-1][1])
        else:
            modes.append((size, stride))
    return modes


def coalesce(layout: Layout) -> Layout:
    """The layout with the fewest modes that gives the same offset for every index."""
    return _from_leaves(_merged(layout))


def composition(a: Layout, b: Tiler) -> Layout:
    """The layout ``c -> a(b(c))`` with the shape of ``b``; a tuple of tilers applies mode by mode.

    Raises ``ValueError`` where no layout says that: a size or stride of ``b`` that does not divide the
    modes of ``a`` that it crosses.
    """
    if isinstance(b, tuple):
        _check_modes(a, b)
        return make_layout([composition(a[i], t) for i, t in enumerate(b)] + list(a)[len(b) :])
    if isinstance(b, int):
        b = Layout(b)
    if isinstance(b.shape, tuple):
        return make_layout([composition(a, mode) for mode in b])
    return _composed_leaf(a, b.shape, b.stride)


def _composed_leaf(a: Layout, size: int, stride: int) -> Layout:
    if stride == 0:
        return Layout(size, 0)
    modes = _merged(a)
    *_, last = a.flat_modes()
    if last[0] == 1:  # an index past the end runs on in the last mode
        modes.append(last)
    result, rest_size, rest_stride = [], size, stride
    for mode_size, mode_stride in modes[:-1]:
        if mode_size % rest_stride and rest_stride % mode_size and (rest_size - 1) * rest_stride >= mode_size:
            raise ValueError(f"{a} o {size}:{stride} is no layout: {rest_stride} does not divide {mode_size}")
        here = min(max(1, -(-mode_size // rest_stride)), rest_size)
        if rest_size % here:
            raise ValueError(f"{a} o {size}:{stride} is no layout: {here} does not divide {rest_size}")
        if here != 1:
            result.append((here, rest_stride * mode_stride))
        rest_size //= here
        rest_stride = -(-rest_stride // mode_size)
    if rest_size != 1 or not result:
        result.append((rest_size, rest_stride * modes[-1][1]))
    return _from_leaves(result)


def complement(layout: Layout, size: int = 1) -> Layout:
    """The layout of what ``layout`` leaves out: together they reach every offset up to ``size`` and beyond
    once.

    Raises ``ValueError`` where ``layout`` reaches an offset twice or interleaves, so that nothing fits.
    """
    modes, reached = [], 1
    for stride, extent in sorted((d, s) for s, d in layout.flat_modes() if d != 0 and s != 1):
        if stride % reached:
            raise ValueError(f"{layout} has no complement: stride {stride} is no multiple of {reached}")
        modes.append((stride // reached, reached))
        reached = stride * extent
    modes.append((-(-size // reached), reached))
    return coalesce(_from_leaves(modes))


def _by_stride(layout: Layout) -> list[tuple[int, int, int]]:
    """(stride, size, index at which it starts) of the coalesced modes that move, by ascending stride."""
    found, start = [], 1
    for size, stride in _merged(layout):
        if stride:
            found.append((stride, size, start))
        start *= size
    return sorted(found, key=lambda mode: mode[0])


def right_inverse(layout: Layout) -> Layout:
    """The longest layout ``r`` with ``layout(r(i)) == i`` for all its indices."""
    modes, reached = [], 1
    for stride, size, start in _by_stride(layout):
        if stride == reached:
            modes.append((size, start))
            reached *= size
        elif stride > reached:
            break
    return coalesce(_from_leaves(modes))


def left_inverse(layout: Layout) -> Layout:
    """The layout ``l`` with ``layout(l(layout(i))) == layout(i)``: of each offset an index that has it.

    Raises ``ValueError`` where modes of ``layout`` overlap, so that no layout says that.
    """
    modes, reached, last_start, last_size = [], 1, 0, 1
    for stride, size, start in _by_stride(layout):
        if stride < reached * last_size or stride % reached:
            raise ValueError(f"{layout} has no left inverse: its stride {stride} meets an offset again")
        modes.append((stride // reached, last_start))
        reached, last_start, last_size = stride, start, size
    modes.append((last_size, last_start))
    return coalesce(_from_leaves(modes))


def logical_divide(layout: Layout, tiler: Tiler) -> Layout:
    """``layout`` cut into (the tile, the tiles), mode by mode for a tuple of tilers."""
    if isinstance(tiler, tuple):
        _check_modes(layout, tiler)
        return make_layout(
            [logical_divide(layout[i], t) for i, t in enumerate(tiler)] + list(layout)[len(tiler) :]
        )
    tile = Layout(tiler) if isinstance(tiler, int) else tiler
    return composition(layout, make_layout([tile, complement(tile, layout.size)]))


def zipped_divide(layout: Layout, tiler: Tiler) -> Layout:
    """``logical_divide`` with all tile modes gathered first and all rest modes second."""
    if not isinstance(tiler, tuple):
        return logical_divide(layout, tiler)
    _check_modes(layout, tiler)
    parts = [zipped_divide(layout[i], t) for i, t in enumerate(tiler)]
    rest = [p[1] for p in parts] + list(layout)[len(tiler) :]
    return make_layout([make_layout([p[0] for p in parts]), make_layout(rest)])


def logical_product(block: Layout, tiler: Layout) -> Layout:
    """(``block``, copies of it): the second mode places one copy per coordinate of ``tiler``."""
    copies = composition(complement(block, block.size * tiler.cosize), tiler)
    return make_layout([block, copies])


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """``logical_product`` mode by mode, copies beside each other: mode i is (block[i], tiler[i])."""
    return _paired(block, tiler, block_first=True)


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """``logical_product`` mode by mode, copies interleaved: mode i is (tiler[i], block[i])."""
    return _paired(block, tiler, block_first=False)


def _paired(block: Layout, tiler: Layout, block_first: bool) -> Layout:
    rank = max(block.rank, tiler.rank)
    block, tiler = (make_layout(list(x) + [Layout(1, 0)] * (rank - x.rank)) for x in (block, tiler))
    product = logical_product(block, tiler)
    pairs = zip(product[0], product[1], strict=True)
    return make_layout([make_layout(p if block_first else p[::-1]) for p in pairs])


def thread_value_layout(threads: Layout, values: Layout) -> tuple[tuple[int, ...], Layout]:
    """(tiler, thread-value layout) of a thread grid times a value grid, as ``cute.make_layout_tv``.

    ``threads`` maps a position in the grid of threads to a thread, ``values`` a position in a thread's own
    block to a value. The layout maps (thread, value) to the column-major index in a tile of size ``tiler``.
    """
    tile = raked_product(threads, values)
    tiler = tuple(ints.product(mode.shape) for mode in tile)
    return tiler, composition(right_inverse(tile), Layout((threads.size, values.size)))


def _check_modes(layout: Layout, tiler: tuple[Tiler, ...]) -> None:
    if len(tiler) > layout.rank:
        raise ValueError(f"the tiler has {len(tiler)} modes and {layout} only {layout.rank}")


def with_steps(tv: Layout, tiler: tuple[int, int], steps: int) -> Layout:
    """``tv`` repeated over ``steps`` tiles side by side, the step as the slowest part of the value.

    ``tv`` maps (thread, value) into a tile of ``tiler`` (rows, columns); the result maps into one of
    (rows, columns * steps): how a thread strides over a row that is wider than its CTA's tile.
    """
    threads, values = tv
    columns = Layout(steps, tiler[0] * tiler[1])
    return make_layout([threads, make_layout([values, columns])])
