"""Layout values against two oracles: what ``cute`` evaluates while tracing, and ``tensor-layouts``.

Both oracles must be importable: a missing one fails the run.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
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


def probes(layout: Layout) -> list[int]:
    rng = random.Random(layout.size)
    return sorted({0, layout.size - 1, *(rng.randrange(layout.size) for _ in range(4))})


@cache
def traced() -> dict[str, list]:
    """What cute says of every sample, from one trace."""
    said: dict[str, list] = {name: [] for name in ("text", "size", "cosize", "index", "coordinate", "unary")}

    @cute.jit
    def evaluate():
        for layout in samples():
            theirs = to_cute(layout)
            said["text"].append(str(theirs))
            said["size"].append(cute.size(theirs))
            said["cosize"].append(cute.cosize(theirs))
            said["index"].append([theirs(i) for i in probes(layout)])
            said["coordinate"].append([theirs(layout.coordinate(i)) for i in probes(layout)])
            said["unary"].append([attempt(f, theirs) for f in UNARY])

    evaluate()
    return said


UNARY = (cute.coalesce, cute.right_inverse, cute.left_inverse)


def test_values_against_cute():
    said = traced()
    assert len(said["text"]) == COUNT >= 2000
    for i, layout in enumerate(samples()):
        assert str(layout) == said["text"][i]
        assert layout.size == said["size"][i], layout
        assert layout.cosize == said["cosize"][i], layout
        assert [layout(k) for k in probes(layout)] == said["index"][i], layout
        assert [layout(layout.coordinate(k)) for k in probes(layout)] == said["coordinate"][i], layout
        assert parse(str(layout)) == layout


def test_offsets_are_the_calls():
    for layout in samples()[:400]:
        assert layout.offsets() == [layout(i) for i in range(layout.size)]


def test_unary_operations_against_cute():
    for layout, said in zip(samples(), traced()["unary"], strict=True):
        assert attempt(operations.coalesce, layout) == said[0], layout
        assert attempt(operations.right_inverse, layout) == said[1], layout


def test_left_inverse_against_cute():
    """Equal, or refused because modes overlap or interleave, where no layout is an inverse of all."""
    given = 0
    for layout, said in zip(samples(), traced()["unary"], strict=True):
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
TILED = (
    (operations.composition, cute.composition),
    (operations.logical_divide, cute.logical_divide),
    (operations.zipped_divide, cute.zipped_divide),
)


@cache
def traced_pairs() -> list[tuple[Layout, Layout, list[str | None]]]:
    rng = random.Random(21)
    pairs = [random_pair(rng) for _ in range(1200)]
    said: list[list[str | None]] = []

    @cute.jit
    def evaluate():
        for a, b in pairs:
            # cute ends the process with a floating-point exception where the divisor has no complement
            asked = PAIRED if attempt(operations.complement, b) else PAIRED[:1]
            said.append([attempt(theirs, to_cute(a), to_cute(b)) for _, theirs in asked])

    evaluate()
    return [(a, b, s) for (a, b), s in zip(pairs, said, strict=True)]


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
    said: list[list[str | None]] = []
    complements: list[str | None] = []

    @cute.jit
    def evaluate():
        for layout, tiler in cases:
            said.append([attempt(theirs, to_cute(layout), tiler) for _, theirs in TILED])
            complements.append(attempt(cute.complement, to_cute(operations.composition(layout, tiler)), 3072))

    evaluate()
    for (layout, tiler), answers, rest in zip(cases, said, complements, strict=True):
        assert [attempt(ours, layout, tiler) for ours, _ in TILED] == answers, (str(layout), tiler)
        assert attempt(operations.complement, operations.composition(layout, tiler), 3072) == rest


def test_products_and_thread_value_layouts_against_cute():
    rng = random.Random(23)
    cases = []
    for _ in range(400):
        orders = [(0, 1), (1, 0)]
        threads = Layout.ordered((rng.choice((1, 2, 4, 8)), rng.choice((4, 8, 32))), rng.choice(orders))
        values = Layout.ordered((rng.choice((1, 2, 3)), rng.choice((1, 4, 8))), rng.choice(orders))
        cases.append((threads, values))
    said = []

    @cute.jit
    def evaluate():
        for threads, values in cases:
            t, v = to_cute(threads), to_cute(values)
            tiler, tv = cute.make_layout_tv(t, v)
            products = (cute.logical_product(t, v), cute.blocked_product(v, t), cute.raked_product(t, v))
            said.append((*map(str, products), tiler, str(tv)))

    evaluate()
    for (threads, values), (logical, blocked, raked, tiler, tv) in zip(cases, said, strict=True):
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
    said = []

    @cute.jit
    def evaluate():
        for shape, order in cases:
            said.append(str(cute.make_ordered_layout(shape, order=order)))

    evaluate()
    for (shape, order), theirs in zip(cases, said, strict=True):
        assert str(Layout.ordered(shape, order)) == theirs, (shape, order)


def test_depth_and_modes_against_cute():
    said = []

    @cute.jit
    def evaluate():
        for layout in samples()[:300]:
            theirs = to_cute(layout)
            modes = [str(theirs[i]) for i in range(cute.rank(theirs))] if layout.depth else []
            said.append((cute.depth(theirs), cute.rank(theirs), modes))

    evaluate()
    for layout, (depth, rank, modes) in zip(samples(), said, strict=False):
        assert (layout.depth, layout.rank) == (depth, rank)
        assert [str(m) for m in layout] == (modes or [str(layout)])


def test_swizzles_against_cute():
    rng = random.Random(24)
    cases = []
    for _ in range(500):
        bits = rng.randint(1, 3)
        swizzle = Swizzle(bits, rng.randint(0, 5), rng.randint(bits, 5))
        cases.append(ComposedLayout(swizzle, rng.choice((0, 0, 8, 64)), random_layout(rng)))
    said = []

    @cute.jit
    def evaluate():
        for c in cases:
            outer = cute.make_swizzle(c.outer.bits, c.outer.base, c.outer.shift)
            theirs = cute.make_composed_layout(outer, c.offset, to_cute(c.inner))
            said.append((str(theirs), cute.size(theirs), [theirs(i) for i in probes(c)]))

    evaluate()
    for c, (text, size, values) in zip(cases, said, strict=True):
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
