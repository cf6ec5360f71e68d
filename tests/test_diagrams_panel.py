"""Figures and checks of the column and split movements, and that they show what the kernel does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import panels
import pytest
from traced import trace, wrong

from cute_softmax import draw
from cute_softmax.commands import diagrams
from cute_softmax.draw import checks
from cute_softmax.kernels.panel import work
from cute_softmax.plan import PanelPlan, describe, plan
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical
from layouts import Layout
from layouts.html import explorer
from layouts.trace import differences

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS = {
    "columns": ((33, 40), {"dim": 0}),
    "odd": ((1000, 7), {"dim": 0, "math": "softmax_backward"}),
    "few": ((3, 100_000), {"dim": 0}),
    "middle": ((3, 100, 24), {"dim": 1, "dtype": "fp32"}),
    "cluster": ((1024, 4096), {"dim": 0}),
    "two trips": ((4000, 16384), {"dim": 0}),
    "two modes": ((64, 50, 1000), {"dim": (0, 2)}),
    "outer modes": ((5, 30, 7, 64), {"dim": (0, 2)}),
    "split": ((20000, 1000), {"dim": 0, "architecture": "sm_80"}),
    "long": ((2, 4000000), {"math": "logsumexp"}),
    "long odd": ((1, 5000001), {"dtype": "fp32"}),
    "ahead": ((8, 3000000), {}),
    "sum": ((3000000, 24), {"dim": 0, "math": "sum"}),
    "shifted": ((300, 131), {"dim": 0}),
    "shifted modes": ((3, 200, 77), {"dim": 1, "math": "softmax_backward"}),
    "shifted, alone": ((7, 5001), {"dim": 0, "dtype": "fp32"}),
    "shifted, streamed": ((20000, 2049), {"dim": 0}),
}


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


def made(name: str) -> PanelPlan:
    shape, options = PROBLEMS[name]
    return describe.plan_shape(shape, **options)


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


@pytest.fixture(scope="module", params=PROBLEMS)
def case(request):
    p = made(request.param)
    assert isinstance(p, PanelPlan)
    return p, draw.figures(p)


def test_a_plan_has_the_figures_of_what_it_uses(case):
    p, found = case
    c = p.kernel
    assert {"tv", "tile", "smem", "predicate", "thread"} <= set(found)
    assert ("reduction_buffer" in found) == (c.down > 1) and ("shuffle" in found) == (c.across < 32)
    assert ("cluster" in found) == (c.cluster_n > 1) and ("exchange" in found) == c.exchange
    assert ("places" in found) == bool(c.ahead) and ("shift" in found) == c.shifted


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
    page = draw.page(p)
    assert explorer(**page)  # every step of the walk finds cells
    found = [f for f in page["figures"]["cluster"].cells if f.facts.role]
    steps = [s for s in page["steps"] if s.figure == "cluster"]
    lit = [[cell.facts for cell in found if step.where(cell.facts)] for step in steps]
    if p.kernel.trips == 1:
        (taking_part,) = lit
        assert Counter(f.role for f in taking_part) == {"sender": 1, "receiver": 16, "barrier": 16}
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
    assert explorer(**page)
    exchanging = {"shuffle", "reduction_buffer", "cluster", "exchange"}
    assert exchanging & set(page["figures"]) == names == exchanging & {s.figure for s in page["steps"]}


def test_figures_are_legible_and_small(case):
    for name, figure in case[1].items():
        text = figure.svg()
        ElementTree.fromstring(text)
        assert figure.width <= 1600, name
        assert len(text) < 300_000 or name == "thread", name
        assert not re.search(r"\(s\)| 1 (rows|groups|parts|lanes|rounds)\b|PROBLEM", text), name


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
        inside = element < len(p.bounds(0, 0)) and group < p.abreast
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


@pytest.mark.parametrize("name", ["columns", "odd", "few", "middle", "two modes", "outer modes"])
def test_requests_reach_every_element_once(name):
    """Counted element by element over the whole grid."""
    p = made(name)
    c = p.kernel
    assert checks.check(p).problems == ()
    for operand in range(c.facts.full):
        size = ITEM_SIZE[c.dtypes[operand]]
        reached = Counter()
        for tile in range(p.tiles):
            for part in range(p.parts):
                for rank in range(c.cluster_n):
                    for lanes in checks.panel.requests(p, operand, tile=tile, part=part, rank=rank):
                        reached.update(a // size + v for a in lanes if a is not None for v in range(c.vector))
        assert sorted(reached) == list(range(p.groups * p.length)) and set(reached.values()) == {1}


@pytest.mark.parametrize("name", ["shifted", "shifted modes", "shifted, alone"])
def test_shifted_requests_reach_every_element(name):
    """Inputs in blocks of which each is wanted; results in whole blocks, once, but for the ends of memory's rows."""
    p = made(name)
    c = p.kernel
    assert checks.check(p).problems == ()
    size = [ITEM_SIZE[d] for d in c.dtypes]
    everything = set(range(p.groups * p.length))
    for operand in range(c.facts.full):
        reached = Counter()
        for tile in range(p.tiles):
            for part in range(p.parts):
                for rank in range(c.cluster_n):
                    for lanes in checks.panel.requests(p, operand, tile=tile, part=part, rank=rank):
                        for a in lanes:
                            if a is not None:
                                assert a % (c.vector * size[operand]) == 0
                                reached.update(a // size[operand] + v for v in range(c.vector))
        if operand < len(c.facts.inputs):
            assert everything <= set(reached) and max(reached) < p.groups * p.length + c.vector
        else:
            ends = {e for e in everything - set(reached) if min(e % p.abreast, -e % p.abreast) >= c.vector}
            assert not ends and set(reached) <= everything and set(reached.values()) == {1}


def test_lines_are_drawn_where_they_begin():
    """Each element that is drawn as some vector's lies in the block above it, and where memory has it."""
    p = made("shifted")
    c, figure = p.kernel, draw.figures(p)["shift"]
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans_have_no_problems(architecture):
    for shape, options in PROBLEMS.values():
        p = describe.plan_shape(shape, **{**options, "architecture": architecture})
        assert checks.check(p).problems == (), p.explain()


def strided(shape, dims, strides, offsets=(0, 0)) -> PanelPlan:
    operands = [Operand("bf16", s, 2 * o) for s, o in zip(strides, offsets, strict=True)]
    return plan("softmax", canonical(shape, dims, operands), H200)


def test_width_decides_sectors():
    wide = strided((1024, 4096), (0,), [(4096, 1)] * 2)
    (x, y) = checks.check(wide).traffic
    assert x.width == 16 and x.sectors == x.ideal and y.sectors == y.ideal
    apart = strided((1024, 4096), (0,), [(8192, 2), (4096, 1)])
    (x, _) = checks.check(apart).traffic
    assert x.width == 2 and x.sectors > x.ideal


def test_a_wrong_plan_is_found():
    p = made("cluster")
    c = p.kernel
    assert any("taken up to" in t for t in checks.check(replace(p, length=p.length + 1)).problems)
    assert any("its tile has" in t for t in checks.check(replace(p, share=c.tile + 1)).problems)
    assert any("taken up to" in t for t in checks.check(replace(p, share=p.share - 1)).problems)
    odd = strided((64, 45), (0,), [(45, 1)] * 2)
    assert odd.kernel.vector == 1
    wide = replace(odd, kernel=replace(odd.kernel, vector=8, across=1))
    assert any("aligned" in t for t in checks.check(wide).problems)
    assert any("straddle" in t for t in checks.check(wide).problems)


def test_every_thread_can_be_followed():
    p = made("columns")
    for thread in (0, 37, p.kernel.threads - 1):
        figure = draw.figures(p, thread)["thread"]
        owned = [c for c in figure.cells if c.facts.space == "gX" and not c.dim]
        assert all(c.facts.threads == (thread,) for c in owned)
    with pytest.raises(ValueError, match="thread must be 0 to"):
        draw.figures(p, p.kernel.threads)


def test_notebooks_show_a_panel():
    assert "column" in (text := made("cluster")._repr_svg_()) and "gX" in text


def test_command_line(tmp_path, capsys):
    assert diagrams.main(["33x40", "--dim", "0", "-o", str(tmp_path)]) == 0
    assert "movement   column" in capsys.readouterr().out
    assert {"tv.svg", "reduction_buffer.svg", "explorer.html"} <= {f.name for f in tmp_path.iterdir()}
    assert diagrams.main(["4x5x64", "--dim", "0", "2", "-o", str(tmp_path)]) == 0
    assert "5 groups of 256" in capsys.readouterr().out
    assert diagrams.main(["4x1000", "--dim", "0", "-o", str(tmp_path / "alone")]) == 0  # nothing is exchanged
    assert {"tv.svg", "explorer.html"} <= {f.name for f in (tmp_path / "alone").iterdir()}


# What is drawn is what the kernel has: `test_faithful` for panels. Run as a script for an architecture.


def every_class(architecture: str) -> dict:
    """The classes of all problems, and of columns and rows in two modes of every length that configurations end at (of
    every fifth one on other architectures than sm_90a); as keys."""
    problems = [*PROBLEMS.values()]
    for math in ("softmax", "softmax_backward"):
        for exponential in range(2, 18, 1 if architecture == "sm_90a" else 5):
            problems.append(((1 << exponential, 16384), {"dim": 0, "math": math}))
            problems.append(((4, 1 << (exponential - 2), 64, 32), {"dim": (1, 3), "math": math}))
            if exponential % 3 == 1:
                problems.append(((1 << exponential, 16385), {"dim": 0, "math": math}))
    plans = (describe.plan_shape(shape, **{**o, "architecture": architecture}) for shape, o in problems)
    return dict.fromkeys(p.kernel for p in plans if isinstance(p, PanelPlan))


def trace_all(architecture: str) -> dict:
    """What is wrong with the classes of all problems, traced; and whether a swapped layout would be seen."""
    found = {"classes": [], "wrong": [], "missed": []}
    for c in every_class(architecture):
        ours, theirs = draw.drawn(c), trace(c)
        found["classes"].append(c.name)
        found["wrong"] += [f"{c.name}: {line}" for line in wrong(c, theirs)]
        for name, layout in ours.items():
            turned = Layout(layout.shape[::-1], layout.stride[::-1])
            if turned.shape != layout.shape and not differences({name: turned}, theirs):
                found["missed"].append(f"{c.name}: {name}")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_classes_are_drawn_as_their_kernels_are(architecture):
    environment = dict(os.environ, CUTE_DSL_ARCH=architecture, CUTE_DSL_DRYRUN="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, __file__, architecture]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["missed"] == []
    movements = " ".join(found["classes"])
    assert all(word in movements for word in ("column", "row", "exchange", "modes"))
    assert ("cluster" in movements) == (ARCHITECTURES[architecture].cluster_limit > 1)


@pytest.mark.parametrize("name", PROBLEMS)
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


if __name__ == "__main__":
    print(json.dumps(trace_all(sys.argv[1])))
