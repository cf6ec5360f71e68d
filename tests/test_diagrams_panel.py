"""Figures and checks of the column and split movements, and that they show what the kernel does."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import panels
import pytest
from compiled import layouts_of
from drawings import PANELS, made, reached, strided, taking_part
from traced import wrong

from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.kernels.panel import work
from cute_softmax.plan import PanelPlan, describe
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import Layout
from layouts.trace import differences

DIRECTIONS = ("softmax", "softmax_backward", "logsumexp")  # forward, backward, a reduction
# A problem of each kind of exchange, and the figures that show it; for clusters of 16 see `clusters_of_16`.
EXCHANGES = {
    "none": ((4, 16384), 0, set()),
    "warps and a cluster": ((100, 16388), 0, {"reduction_buffer", "cluster"}),
    "lanes": ((64, 16384), 0, {"shuffle", "reduction_buffer"}),
    "cluster": ((1024, 16384), 0, {"shuffle", "reduction_buffer", "cluster"}),
    "columns in parts": ((500000, 64), 0, {"shuffle", "reduction_buffer", "exchange"}),
    "rows in parts": ((2, 4000000), -1, {"shuffle", "reduction_buffer", "exchange"}),
    "rows with edges": ((3, 5000001), -1, {"shuffle", "reduction_buffer", "exchange"}),
}


def clusters_of_16() -> dict[str, PanelPlan]:
    """A plan of each class with such clusters that columns of any length have, shifted or not."""
    lengths = [1000 * 11**i // 10**i for i in range(30)]
    plans = (
        describe.plan_shape((length, columns), dim=0, math=math)
        for math in DIRECTIONS
        for columns in (16384, 16385)
        for length in lengths
    )
    return {f"{p.kernel.math} {p.kernel.name}": p for p in plans if p.kernel.cluster_n == 16}


CLUSTERS_OF_16 = clusters_of_16()


@pytest.fixture(scope="module", params=PANELS)
def case(request):
    """A plan and its figures."""
    p = made(request.param)
    return p, draw.figures(p)


def test_a_row_ahead_has_each_chunk_in_one_place_and_finishes_it_once():
    p = describe.plan_shape((64, 1 << 24))
    c, cells = p.kernel, draw.figures(p)["places"].cells
    steps = p.chunks + c.wait
    drawn = [cell for cell in cells if cell.facts.coordinate]
    assert len(drawn) == steps * (p.chunks + c.ahead + c.wait)
    lying = [(cell.facts.coordinate.split(", ")[1], cell.lines[0]) for cell in drawn if cell.lines[0]]
    assert len(lying) == len(set(lying)), "a chunk lies in two places"
    for what, row in (("absorbed", "b"), ("finished", "a")):
        assert {cell.lines[0] for cell in drawn if cell.lines[1] == what} == {
            f"{row}{n}" for n in range(p.chunks)
        }
    finished = {n: n if n >= c.wait else p.chunks + n for n in range(p.chunks)}
    for step in range(steps):
        here = {name for at, name in lying if at == f"step {step})"}
        assert {f"a{n}" for n, then in finished.items() if step <= then} <= here, "not finished, and gone"
        assert {f"b{n}" for n in range(min(step, p.chunks))} <= here, "absorbed, and gone"


def test_every_slot_of_two_trips_has_its_sender_and_its_reader():
    """Of CTA 0: each CTA sends it what it has of each of its columns, and each CTA the columns that it merged."""
    p = made("two trips")
    c = p.kernel
    assert c.trips == 2 and c.peers.size == 2 * c.columns
    each = c.columns // c.cluster_n
    drawn = [cell.facts for cell in draw.figures(p)["cluster"].cells if "peers" in cell.facts.space]
    room = c.columns * c.whole_bytes  # of the first trip
    first, second = ([f for f in drawn if (f.byte < room) == trip] for trip in (True, False))
    assert sorted(f.start for f in first) == [*range(c.columns)]
    for f in first:
        column, cta = f.start // c.cluster_n, f.start % c.cluster_n
        assert f.threads == (f.start,) and f.note.startswith(f"from thread {column} of CTA {cta},")
    for f in second:
        column = f.start
        assert f.byte == room + column * c.whole_bytes
        sender = column % each * c.cluster_n
        assert f.threads == (column,) and f"thread {sender} of CTA {column // each}," in f.note
    assert second


@pytest.mark.parametrize("name", CLUSTERS_OF_16)
def test_every_cluster_of_16_has_its_page(name):
    p = CLUSTERS_OF_16[name]
    lit = [cells for step, cells in taking_part(draw.page(p)) if step.figure == "cluster"]
    lit = [[facts for facts in cells if facts.role] for cells in lit]
    if p.kernel.trips == 1:
        (cells,) = lit
        assert Counter(f.role for f in cells) == {"sender": 1, "receiver": 16, "barrier": 16}
        return
    first, second = lit
    assert {f.start for f in first} <= set(range(16)) and {f.role for f in first} == {"first trip"}
    assert [(f.start, f.role) for f in second] == [(0, "second trip")]


def test_clusters_of_16_are_of_all_kinds():
    kernels = [p.kernel for p in CLUSTERS_OF_16.values()]
    assert {(c.math, c.trips) for c in kernels} == {(m, t) for m in DIRECTIONS for t in (1, 2)}
    assert {c.shifted for c in kernels} == {True, False}


@pytest.mark.parametrize("math", DIRECTIONS)
@pytest.mark.parametrize("kind", EXCHANGES)
def test_every_exchange_has_its_page(kind, math):
    shape, dim, names = EXCHANGES[kind]
    page = draw.page(describe.plan_shape(shape, dim=dim, math=math))
    shown = {step.figure for step, _ in taking_part(page)}
    exchanging = {"shuffle", "reduction_buffer", "cluster", "exchange"}
    assert exchanging & set(page["figures"]) == names == exchanging & shown


def test_cells_of_the_tile_are_where_the_thread_loads(case):
    """Against the requests of the checks, which count threads and steps as the kernel does."""
    p, found = case
    c = p.kernel
    tv = c.tiled(c.steps)
    loaded = set()
    one = ITEM_SIZE[c.dtypes[0]]
    block = range(0, c.vector * one if c.shifted else one, one)  # a block holds elements of several vectors
    for lanes in checks.panel.requests(p, 0):
        loaded |= {a + byte for a in lanes if a is not None for byte in block}
    seen = 0
    for cell in found["tile"].cells:
        f = cell.facts
        if not f.space or f.start is None:
            continue
        (thread,) = f.threads
        value = int(re.match(r"\d+", f.value)[0])
        row, column = map(int, re.match(r"\((\d+), (\d+)", f.coordinate).groups())
        element, group = (column, row) if c.orientation == "row" else (row, column)
        assert tv(thread, value) == element + group * c.tile
        group -= group // (c.lanes * c.slots) * c.overlap
        inside = element < len(p.bounds(0, 0)) and group < len(p.panel(0))
        assert f.byte in loaded or not inside
        seen += inside
    assert seen


def test_predicate_ends_with_the_data(case):
    p, found = case
    c = p.kernel
    view = draw.panel.View(p)
    end = p.bounds(*view.last, view.start).stop
    head, body = p.pieces(view.start)
    assert end == head + body and p.length - c.vector < end <= p.length and c.edges >= (body < p.length)
    facts = [
        x.facts for x in found["predicate"].cells if x.facts.note in ("loaded",) or "skipped" in x.facts.note
    ]
    first = draw.panel.View(p).final.start
    for f in facts:
        row, column, last = map(int, re.match(r"\((\d+), (\d+)\.\.(\d+)", f.coordinate).groups())
        if c.orientation == "row":
            exists = last < p.length
        else:
            at = column - view.start % p.abreast  # of the panel's vectors, in lines that overlap
            group = column - at // (c.lanes * c.slots) * c.overlap
            exists = first + row < p.length and group < p.abreast
        assert (f.note == "loaded") == exists
    assert any(f.note == "loaded" for f in facts)


def all_requests(p: PanelPlan, operand: int):
    """Those of the whole grid."""
    for tile in range(p.tiles):
        for part in range(p.parts):
            for rank in range(p.kernel.cluster_n):
                yield from checks.panel.requests(p, operand, tile=tile, part=part, rank=rank)


@pytest.mark.parametrize("name", ["columns", "odd", "few", "middle", "two modes", "outer modes"])
def test_requests_reach_every_element_once(name):
    p = made(name)
    c = p.kernel
    for operand in range(c.facts.full):
        found = reached(all_requests(p, operand), ITEM_SIZE[c.dtypes[operand]], c.vector)
        assert sorted(found) == list(range(p.groups * p.length)) and set(found.values()) == {1}


@pytest.mark.parametrize("name", ["shifted", "shifted modes", "shifted, alone"])
def test_shifted_requests_reach_every_element(name):
    """Inputs in blocks of which each is wanted; results in whole blocks, once, but for the ends of memory's rows."""
    p = made(name)
    c = p.kernel
    everything = set(range(p.groups * p.length))
    for operand in range(c.facts.full):
        item, requests = ITEM_SIZE[c.dtypes[operand]], list(all_requests(p, operand))
        assert all(a % (c.vector * item) == 0 for lanes in requests for a in lanes if a is not None)
        found = reached(requests, item, c.vector)
        if operand < len(c.facts.inputs):
            assert everything <= set(found) and max(found) < p.groups * p.length + c.vector
        else:
            ends = {e for e in everything - set(found) if min(e % p.abreast, -e % p.abreast) >= c.vector}
            assert not ends and set(found) <= everything and set(found.values()) == {1}


def test_lines_are_drawn_where_they_begin():
    """Each element that is drawn as some vector's lies in the block above it, and where memory has it."""
    p = strided("softmax", (300, 131), (0,), [(131, 1)] * 2, offsets=(0, 1))
    c, figure = p.kernel, draw.figures(p)["shift"]
    assert not c.aligned
    cells = {}
    for cell in figure.cells:
        if found := re.match(r"\(element (\d+), column (-?\d+)\)", cell.facts.coordinate or ""):
            kind = "vector" if "vector" in (cell.facts.note or "") else "block"
            cells[(kind, *map(int, found.groups()))] = cell.facts
    drawn = [(line, group, f) for (kind, line, group), f in cells.items() if kind == "vector"]
    assert drawn
    for line, group, facts in drawn:
        assert facts.threads == (group // c.slots,)
        assert cells["block", line, group].byte == (p.element(0, line) + group) * ITEM_SIZE[c.dtypes[0]]


@pytest.mark.parametrize("name", ["shifted", "shifted modes", "shifted numbers"])
def test_blocks_that_threads_keep_are_drawn_where_they_lie(name):
    """In each row a thread's block begins at a boundary, and has the groups that memory has there."""
    p = made(name)
    c, item = p.kernel, ITEM_SIZE[p.kernel.dtypes[0]]
    assert c.aligned
    groups: dict[int, list[int]] = {}
    for cell in draw.figures(p)["shift"].cells:
        facts = cell.facts
        if facts.byte is None:
            continue
        element, group = map(int, re.match(r"\(element (\d+), column (-?\d+)\)", facts.coordinate).groups())
        (thread,) = facts.threads
        assert thread // c.across == element and facts.byte == (p.element(0, element) + group) * item
        assert facts.byte // item // c.vector == (p.element(0, element) // c.vector) + thread % c.across
        groups.setdefault(element, []).append(group)
    assert len(groups) > 1 and all(min(g) == 0 for g in groups.values())


def test_width_decides_sectors():
    wide = strided("softmax", (1024, 4096), (0,), [(4096, 1)] * 2)
    (x, y) = checks.check(wide).traffic
    assert x.width == 16 and x.sectors == x.ideal and y.sectors == y.ideal
    apart = strided("softmax", (1024, 4096), (0,), [(8192, 2), (4096, 1)])
    (x, _) = checks.check(apart).traffic
    assert x.width == 2 and x.sectors > x.ideal


def test_a_wrong_plan_is_found():
    p = made("cluster")
    c = p.kernel
    assert any("taken up to" in t for t in checks.check(replace(p, length=p.length + 1)).problems)
    assert any("its tile has" in t for t in checks.check(replace(p, share=c.tile + 1)).problems)
    assert any("taken up to" in t for t in checks.check(replace(p, share=p.share - 1)).problems)
    odd = strided("softmax", (64, 45), (0,), [(45, 1)] * 2)
    assert odd.kernel.vector == 1
    wide = replace(odd, kernel=replace(odd.kernel, vector=8, across=1))
    assert any("aligned" in t for t in checks.check(wide).problems)
    assert any("straddle" in t for t in checks.check(wide).problems)


# What is drawn is what the kernel has: `test_faithful` for panels.


def every_class(architecture: str) -> dict:
    """The classes of all problems, and of columns and rows in two modes of every length that configurations end at (of
    every fifth one on other architectures than sm_90a); as keys."""
    problems = [*PANELS.values()]
    for math in ("softmax", "softmax_backward"):
        for exponential in range(2, 18, 1 if architecture == "sm_90a" else 5):
            problems.append(((1 << exponential, 16384), {"dim": 0, "math": math}))
            problems.append(((4, 1 << (exponential - 2), 64, 32), {"dim": (1, 3), "math": math}))
            if exponential % 3 == 1:
                problems.append(((1 << exponential, 16385), {"dim": 0, "math": math}))
    plans = (describe.plan_shape(shape, **{**o, "architecture": architecture}) for shape, o in problems)
    return dict.fromkeys(p.kernel for p in plans if isinstance(p, PanelPlan))


def trace_all(architecture: str, folder: Path) -> dict:
    """What is wrong with the classes of all problems, traced; and whether a swapped layout would be seen."""
    found = {"classes": [], "wrong": [], "missed": []}
    for c in every_class(architecture):
        ours, theirs = draw.drawn(c), layouts_of(c, folder)
        found["classes"].append(c.name)
        found["wrong"] += [f"{c.name}: {line}" for line in wrong(c, theirs)]
        for name, layout in ours.items():
            turned = Layout(layout.shape[::-1], layout.stride[::-1])
            if turned.shape != layout.shape and not differences({name: turned}, theirs):
                found["missed"].append(f"{c.name}: {name}")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classes_are_drawn_as_their_kernels_are(architecture, tmp_path):
    found = trace_all(architecture, tmp_path)
    assert found["wrong"] == [] and found["missed"] == []
    movements = " ".join(found["classes"])
    assert all(word in movements for word in ("column", "row", "exchange", "modes"))
    assert ("cluster" in movements) == (ARCHITECTURES[architecture].cluster_limit > 1)


@pytest.mark.parametrize("name", PANELS)
def test_threads_stand_where_the_kernel_puts_them(name):
    """The kernel's own address arithmetic, on plain numbers, beside the thread-value layout."""
    p = made(name)
    c, memory = p.kernel, draw.panel.View(p).memory(0)
    for thread in (0, 1, 31, 32, c.threads - 1):
        launch = panels.launch_of(p, thread)
        for k, address in enumerate(work.places(launch, 0, work.item_of(launch, 0).starts[0], 0)):
            group, element = divmod(c.tiled(c.steps)(thread, k * c.vector), c.tile)
            at = (group, element) if c.orientation == "row" else (element, group)
            assert address == memory(at) * ITEM_SIZE[c.dtypes[0]]
