"""Layout values against two oracles: what ``cute`` evaluates while tracing, and ``tensor-layouts``.

Both oracles must be importable: a missing one fails the run.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from functools import cache

import cutlass.cute as cute
import pytest
import tensor_layouts as peer

from layouts import ComposedLayout, Layout, Swizzle, ints, operations, parse

COUNT = 2500  # random layouts; each is evaluated by cute in one shared trace


def random_shape(rng: random.Random, depth: int = 0) -> ints.IntTuple:
    if depth == 3 or rng.random() < (0.15, 0.6, 0.8)[depth]:
        return rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 16))
    return tuple(random_shape(rng, depth + 1) for _ in range(rng.randint(1, 3)))


def random_layout(rng: random.Random) -> Layout:
    """Of at most 4096 coordinates; compact in some order, strided at will, or with stride 0."""
    shape = random_shape(rng)
    while ints.product(shape) > 4096:
        shape = random_shape(rng)
    kind = rng.random()
    if kind < 0.25:
        return Layout(shape)
    flat = list(ints.leaves(shape))
    if kind < 0.6:
        order = list(range(len(flat)))
        rng.shuffle(order)
        return Layout.ordered(shape, ints.unflatten(iter(order), shape))
    strides = [rng.choice((0, 1, 2, 3, 4, 5, 8, 16, 24, 32, 64)) for _ in flat]
    return Layout(shape, ints.unflatten(iter(strides), shape))


@cache
def samples() -> list[Layout]:
    rng = random.Random(20)
    return [random_layout(rng) for _ in range(COUNT)]


def to_cute(layout: Layout):
    return cute.make_layout(layout.shape, stride=layout.stride)


def attempt(function: Callable, *arguments) -> str | None:
    """``str`` of the result, or None where cute or we refuse the arguments."""
    try:
        return str(function(*arguments))
    except Exception as error:
        if isinstance(error, ValueError) or "MLIR" in type(error).__name__:
            return None
        raise


def asked(ask: Callable, cases: Iterable) -> list:
    """What ``ask`` says of each case while cute traces."""
    said = []

    @cute.jit
    def evaluate():
        for case in cases:
            said.append(ask(case))

    evaluate()
    return said


def probes(layout: Layout) -> list[int]:
    rng = random.Random(layout.size)
    return sorted({0, layout.size - 1, *(rng.randrange(layout.size) for _ in range(4))})


UNARY = (cute.coalesce, cute.right_inverse, cute.left_inverse)


@cache
def unary() -> list[list[str | None]]:
    """What cute's operations make of every sample, from one trace."""
    return asked(lambda layout: [attempt(f, to_cute(layout)) for f in UNARY], samples())


def test_values_against_cute():
    def ask(layout: Layout):
        theirs = to_cute(layout)
        modes = [str(theirs[i]) for i in range(cute.rank(theirs))] if layout.depth else [str(theirs)]
        values = [theirs(k) for i in probes(layout) for k in (i, layout.coordinate(i))]
        return str(theirs), cute.size(theirs), cute.cosize(theirs), cute.depth(theirs), modes, values

    assert len(samples()) == COUNT >= 2000
    for layout, said in zip(samples(), asked(ask, samples()), strict=True):
        values = [layout(k) for i in probes(layout) for k in (i, layout.coordinate(i))]
        modes = [str(mode) for mode in layout]
        assert (str(layout), layout.size, layout.cosize, layout.depth, modes, values) == said
        assert layout.rank == len(modes) and parse(str(layout)) == layout


def test_offsets_are_the_calls():
    for layout in samples()[:400]:
        assert layout.offsets() == [layout(i) for i in range(layout.size)]


def test_unary_operations_against_cute():
    for layout, said in zip(samples(), unary(), strict=True):
        assert attempt(operations.coalesce, layout) == said[0], layout
        assert attempt(operations.right_inverse, layout) == said[1], layout


def test_left_inverse_against_cute():
    """Equal, or refused because modes overlap or interleave, where no layout is an inverse of all."""
    given = 0
    for layout, said in zip(samples(), unary(), strict=True):
        ours = attempt(operations.left_inverse, layout)
        if ours is None:
            moving = sorted((d, s) for s, d in layout.flat_modes() if d and s > 1)
            interleaved = any(b % a for (a, _), (b, _) in itertools.pairwise(moving))
            once = math.prod(s for _, s in moving)
            assert interleaved or len(set(layout.offsets())) < once, layout
        else:
            given += 1
            assert ours == said[2], layout
    assert given > COUNT // 2


def random_pair(rng: random.Random) -> tuple[Layout, Layout]:
    """(a, b) with every offset of ``b`` an index of ``a``; half of the time ``b`` surely divides ``a``."""
    a, b = random_layout(rng), random_layout(rng)
    while a.size == 1 or b.cosize > a.size:
        a, b = random_layout(rng), random_layout(rng)
    if rng.random() < 0.5:
        return a, b
    size = rng.choice([d for d in range(1, a.size + 1) if a.size % d == 0])
    step = rng.choice([d for d in range(1, a.size // size + 1) if (a.size // size) % d == 0])
    return a, Layout(size, step)


def by_mode(rng: random.Random) -> tuple[Layout, tuple[int, ...]]:
    sizes = [rng.choice((2, 4, 6, 8, 12, 16)) for _ in range(rng.randint(1, 3))]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    tiler = tuple(rng.choice([d for d in range(1, s + 1) if s % d == 0]) for s in sizes)
    return Layout.ordered(tuple(sizes), tuple(order)), tiler


PAIRED = (
    (operations.composition, cute.composition),
    (operations.logical_divide, cute.logical_divide),
)
TILED = (*PAIRED, (operations.zipped_divide, cute.zipped_divide))


@cache
def traced_pairs() -> list[tuple[Layout, Layout, list[str | None]]]:
    rng = random.Random(21)
    pairs = [random_pair(rng) for _ in range(1200)]

    def ask(pair: tuple[Layout, Layout]) -> list[str | None]:
        # cute ends the process with a floating-point exception where the divisor has no complement
        known = PAIRED if attempt(operations.complement, pair[1]) else PAIRED[:1]
        return [attempt(theirs, *map(to_cute, pair)) for _, theirs in known]

    return [(a, b, said) for (a, b), said in zip(pairs, asked(ask, pairs), strict=True)]


@pytest.mark.parametrize("which", range(len(PAIRED)), ids=[f.__name__ for f, _ in PAIRED])
def test_paired_operations_against_cute(which):
    """Equal offsets and shape, or refused on both sides, or refused where cute's answer is wrong."""
    agreed = 0
    for a, b, said in traced_pairs():
        if which >= len(said):
            continue
        ours, theirs = attempt(PAIRED[which][0], a, b), said[which]
        if ours is not None and theirs is not None:
            agreed += 1
            assert ours == theirs, (str(a), str(b))
        elif theirs is not None and which == 0:
            assert parse(theirs).offsets() != [a(v) for v in b.offsets()], (str(a), str(b), theirs)
        elif ours is not None and which == 0:
            assert parse(ours).offsets() == [a(v) for v in b.offsets()], (str(a), str(b), ours)
    assert agreed > 300


def test_tiled_operations_against_cute():
    rng = random.Random(22)
    cases = [by_mode(rng) for _ in range(600)]

    def ask(case: tuple[Layout, tuple[int, ...]]):
        layout, tiler = case
        rest = attempt(cute.complement, to_cute(operations.composition(layout, tiler)), 3072)
        return [attempt(theirs, to_cute(layout), tiler) for _, theirs in TILED], rest

    for (layout, tiler), (answers, rest) in zip(cases, asked(ask, cases), strict=True):
        assert [attempt(ours, layout, tiler) for ours, _ in TILED] == answers, (str(layout), tiler)
        assert attempt(operations.complement, operations.composition(layout, tiler), 3072) == rest


def test_products_and_thread_value_layouts_against_cute():
    rng, orders = random.Random(23), [(0, 1), (1, 0)]
    cases = []
    for _ in range(400):
        threads = Layout.ordered((rng.choice((1, 2, 4, 8)), rng.choice((4, 8, 32))), rng.choice(orders))
        values = Layout.ordered((rng.choice((1, 2, 3)), rng.choice((1, 4, 8))), rng.choice(orders))
        cases.append((threads, values))

    def ask(case: tuple[Layout, Layout]):
        t, v = map(to_cute, case)
        tiler, tv = cute.make_layout_tv(t, v)
        products = (cute.logical_product(t, v), cute.blocked_product(v, t), cute.raked_product(t, v))
        return (*map(str, products), tiler, str(tv))

    for (threads, values), said in zip(cases, asked(ask, cases), strict=True):
        logical, blocked, raked, tiler, tv = said
        assert str(operations.logical_product(threads, values)) == logical
        for product, theirs in (
            (operations.blocked_product(values, threads), parse(blocked)),
            (operations.raked_product(threads, values), parse(raked)),
        ):
            assert [mode.size for mode in product] == [mode.size for mode in theirs]
            assert product.offsets() == theirs.offsets()
        ours = operations.thread_value_layout(threads, values)
        assert (ours[0], str(ours[1])) == (tiler, tv)


def random_order(rng: random.Random, shape: ints.IntTuple, free: list[int]) -> ints.IntTuple:
    """An order of ``shape``'s nesting, or of a coarser one where an int stands for a nested mode."""
    if isinstance(shape, tuple) and rng.random() < 0.7:
        return tuple(random_order(rng, s, free) for s in shape)
    return free.pop()


def test_ordered_layouts_against_cute():
    rng = random.Random(25)
    cases = []
    for layout in samples()[:600]:
        shape = ints.as_tuple(layout.shape)
        free = rng.sample(range(64), 32)
        cases.append((shape, tuple(random_order(rng, s, free) for s in shape)))
    said = asked(lambda case: str(cute.make_ordered_layout(case[0], order=case[1])), cases)
    for (shape, order), theirs in zip(cases, said, strict=True):
        assert str(Layout.ordered(shape, order)) == theirs, (shape, order)


def test_swizzles_against_cute():
    rng = random.Random(24)
    cases = []
    for _ in range(500):
        bits = rng.randint(1, 3)
        swizzle = Swizzle(bits, rng.randint(0, 5), rng.randint(bits, 5))
        cases.append(ComposedLayout(swizzle, rng.choice((0, 0, 8, 64)), random_layout(rng)))

    def ask(c: ComposedLayout):
        outer = cute.make_swizzle(c.outer.bits, c.outer.base, c.outer.shift)
        theirs = cute.make_composed_layout(outer, c.offset, to_cute(c.inner))
        return str(theirs), cute.size(theirs), [theirs(i) for i in probes(c)]

    for c, (text, size, values) in zip(cases, asked(ask, cases), strict=True):
        assert (str(c), c.size, [c(i) for i in probes(c)]) == (text, size, values)
        assert c.offsets() == [c(i) for i in range(c.size)]
        assert parse(text) == c


def to_peer(layout: Layout) -> peer.Layout:
    return peer.Layout(layout.shape, layout.stride)


def test_values_against_tensor_layouts():
    for layout in samples():
        theirs = to_peer(layout)
        assert (layout.size, layout.cosize) == (peer.size(theirs), peer.cosize(theirs)), layout
        assert [layout(i) for i in probes(layout)] == [theirs(i) for i in probes(layout)], layout
        assert operations.coalesce(layout).offsets()[-1] == peer.coalesce(theirs)(layout.size - 1), layout


def test_compositions_against_tensor_layouts():
    agreed = 0
    for a, b, _ in traced_pairs():
        ours = attempt(operations.composition, a, b)
        try:
            theirs = peer.compose(to_peer(a), to_peer(b))
        except ValueError:
            continue
        if ours is not None:
            agreed += 1
            assert [parse(ours)(i) for i in probes(b)] == [theirs(i) for i in probes(b)], (str(a), str(b))
    assert agreed > 300


def test_swizzles_against_tensor_layouts():
    for bits in range(4):
        for base in range(5):
            for shift in range(max(bits, 1), 5):
                ours, theirs = Swizzle(bits, base, shift), peer.Swizzle(bits, base, shift)
                assert [ours(i) for i in range(0, 4096, 7)] == [theirs(i) for i in range(0, 4096, 7)]
