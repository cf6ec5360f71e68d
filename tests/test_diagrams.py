"""Figures of Plans: that they show what the Plan does, and that the checks on a Plan find what is wrong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cute_softmax import draw
from cute_softmax.__main__ import main, parser
from cute_softmax.draw import checks
from cute_softmax.plan import WARP, RowClass, describe, plan
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical
from layouts import Layout
from layouts.html import explorer

COLUMNS = (1, 2, 3, 7, 33, 48, 127, 1000, 1023, 4096, 8192, 50257, 65536, 151936, 1000000)
WAYS = {
    "online": {},
    "two_pass": {"online": False},
    "backward": {"math": "softmax_backward"},
    "fp32": {"dtype": "fp32"},
    "logsumexp": {"math": "logsumexp"},
    "sum": {"math": "sum", "dtype": "fp32"},
}


@pytest.fixture(scope="module")
def every():
    """(way, columns) -> (Plan, figures), for 100 rows."""
    found = {}
    for way, options in WAYS.items():
        for columns in COLUMNS:
            made = describe.plan_of(100, columns, **options)
            if made.movement == "row":
                found[way, columns] = made, draw.figures(made)
            else:  # longer than the row movement takes: see test_diagrams_panel
                assert columns > 100_000
    return found


def cells(figure, *, note: str = "") -> list:
    """The facts of a figure's cells, the legend and the equation aside."""
    return [c.facts for c in figure.cells if c.facts.coordinate and note in c.facts.note]


def test_a_plan_has_the_figures_of_what_it_uses(every):
    for made, found in every.values():
        c = made.row_class
        assert ("smem" in found) == any(how != "direct" for how in c.staging)
        assert ("edges" in found) == c.edges
        assert ("reduction_buffer" in found) == c.exchanges
        assert ("cluster" in found) == (c.cluster_n > 1)
        assert {"tv", "tile", "predicate", "thread"} <= set(found)
        assert set(draw.drawn(c)) <= {*found, "tv"}


@pytest.mark.parametrize("columns", [1, 3, 1023, 8192, 50257, 1000000])
def test_every_way_has_its_page(every, columns):
    for way in WAYS:
        if (way, columns) in every:
            made, found = every[way, columns]
            page = draw.page(made, found)
            assert explorer(**page)  # every step of the walk finds cells
            stores = [s for s in page["steps"] if s.figure == "cluster"]
            assert ("cluster" in found) == bool(stores)
            for step, (_, stage) in zip(stores, draw.View(made).exchanges, strict=bool(stores)):
                roles = Counter(c.facts.role for c in found["cluster"].cells if step.where(c.facts))
                n = made.row_class.cluster_n
                assert roles == {"sender": n, "receiver": n, f"barrier {stage}": n}


def test_figures_are_legible_and_small(every):
    for (way, columns), (_, found) in every.items():
        for name, figure in found.items():
            text = figure.svg()
            ElementTree.fromstring(text)
            assert figure.width <= 1600, (way, columns, name)
            assert len(text) < 300_000 or name == "thread", (way, columns, name)
            assert "(s)" not in text and " 1 rows" not in text and "PROBLEM" not in text


def test_cells_of_the_tile_are_those_of_the_layout(every):
    for made, found in every.values():
        c = made.row_class
        tv = checks.tile_tv(c)
        seen = [f for f in cells(found["tile"]) if f.space]
        assert seen
        for facts in seen:
            (thread,) = facts.threads
            value = int(re.match(r"\d+", facts.value)[0])
            row, column = map(int, re.match(r"\((\d+), (\d+)", facts.coordinate).groups())
            assert tv(thread, value) == row + column * c.tiler[0]


def test_predicate_is_true_exactly_inside_the_row(every):
    for made, found in every.values():
        facts = [f for f in cells(found["predicate"]) if f.value.startswith("predicate")]
        body = checks.pieces(made, 0).body
        for f in facts:
            row, first, last = map(int, re.match(r"\((\d+), (\d+)\.\.(\d+)", f.coordinate).groups())
            assert last - first + 1 == made.row_class.vector
            assert (f.note == "loaded") == (last < body and row < made.rows)
        assert any(f.note == "loaded" for f in facts) == (body > 0)


def test_scalars_of_the_edges_follow_the_kernels_rule(every):
    """Slot s = lane + e * T of a row: the head's element s, or the element s - (V - 1) after the body."""
    for made, found in every.values():
        c = made.row_class
        if not c.edges:
            continue
        for facts in cells(found["edges"], note="one scalar"):
            row, column = map(int, re.match(r"\((\d+), (\d+)", facts.coordinate).groups())
            cut = checks.pieces(made, row)
            slot = column if column < cut.head else column - cut.head - cut.body + c.vector - 1
            lane, turn = slot % c.threads_per_row, slot // c.threads_per_row
            assert f"slot {slot}, turn {turn} of thread {lane}" in facts.note
            assert turn < c.edge_scalars


def test_cluster_figure_names_targets_and_bytes(every):
    for made, found in every.values():
        c = made.row_class
        if c.cluster_n == 1:
            continue
        stores = [f for f in (x.facts for x in found["cluster"].cells) if f.note.startswith("st.async")]
        assert [f.threads[0] % WARP for f in stores] == list(range(c.cluster_n))
        received = c.threads // WARP * c.cluster_n * c.facts.state_bytes
        barriers = [x.facts.note for x in found["cluster"].cells if x.facts.space.startswith("mbarrier")]
        assert len(barriers) == c.cluster_n * c.reduction_buffer.shape[2]
        assert all(f"expects {received} bytes" in note for note in barriers)


def test_every_thread_can_be_followed():
    made = describe.plan_of(100, 50257)
    for thread in (0, 31, 37, made.row_class.threads - 1):
        figure = draw.figures(made, thread)["thread"]
        owned = [c for c in figure.cells if c.facts.space.startswith("g") and not c.dim]
        assert owned and all(c.facts.threads == (thread,) for c in owned)
    with pytest.raises(ValueError, match="thread must be 0 to"):
        draw.figures(made, made.row_class.threads)


def strided(name: str, rows: int, columns: int, offsets, strides, dtype="bf16"):
    """A plan of rows whose operands begin and lie at given elements."""
    operands = [Operand(dtype, (s, 1), o * ITEM_SIZE[dtype]) for o, s in zip(offsets, strides, strict=True)]
    return plan(name, canonical((rows, columns), (1,), operands), H200)


STRIDED = [
    ("softmax", 40, 100, (0, 0), (104, 100)),
    ("softmax", 40, 100, (3, 3), (101, 101)),
    ("softmax", 40, 1003, (1, 4), (1003, 1024)),
    ("softmax", 3, 50257, (5, 0), (50257, 50257)),
    ("softmax_backward", 40, 333, (1, 2, 3), (333, 340, 347)),
    ("softmax_backward", 5, 40001, (0, 4, 0), (40001, 40001, 40001)),
]


@pytest.mark.parametrize("case", STRIDED, ids=lambda c: f"{c[0]}-{c[2]}")
def test_requests_and_scalars_reach_every_element_once(case):
    """Counted element by element over the whole grid, without the interval arithmetic of `row_coverage`."""
    made = strided(*case)
    c = made.row_class
    assert checks.check(made).problems == ()
    for operand in range(len(c.dtypes)):
        size = ITEM_SIZE[c.dtypes[operand]]
        width = (*c.access, *[c.vector] * len(c.facts.outputs))[operand]
        reached = Counter()
        for tile in range(made.tiles):
            for cta in range(c.cluster_n):
                for lanes in checks.requests(made, operand, tile, cta):
                    reached.update(a // size + i for a in lanes if a is not None for i in range(width))
        offset, stride = made.problem.offsets[operand], made.row_strides[operand]
        for row in range(made.rows):
            cut = checks.pieces(made, row)
            start = offset + row * stride
            reached.update(range(start, start + cut.head))
            reached.update(range(start + made.columns - cut.tail, start + made.columns))
        wanted = {offset + r * stride + i for r in range(made.rows) for i in range(made.columns)}
        assert set(reached) == wanted and set(reached.values()) == {1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans_have_no_problems(architecture):
    for options in WAYS.values():
        for columns in COLUMNS[:: 1 if architecture == "sm_90a" else 2]:
            made = describe.plan_of(20, columns, architecture=architecture, **options)
            assert checks.check(made).problems == (), made.explain()


class SwappedThreads(RowClass):
    """Threads and rows of the TV layout have each other's stride."""

    @property
    def tv(self) -> Layout:
        (threads, values), (thread_stride, value_stride) = super().tv.shape, super().tv.stride
        return Layout((threads, values), (thread_stride[::-1], value_stride))


class SharedValues(RowClass):
    """Neighbouring threads begin one element apart, not one vector."""

    @property
    def tv(self) -> Layout:
        (thread, down), value = super().tv.stride
        return Layout(super().tv.shape, ((thread // self.vector, down), value))


class Unequal(RowClass):
    """Shares that are no whole cache lines."""

    line = 12


def mutated(made, kind: type):
    c = made.row_class
    return replace(made, row_class=kind(**{**c.fields, "prologue": c.prologue}))


def test_a_wrong_plan_is_found():
    short, uneven = describe.plan_of(100, 200), describe.plan_of(800, 64000)
    assert "elements have no thread" in checks.check(mutated(short, SwappedThreads)).problems[0]
    assert "elements have no thread" in checks.check(mutated(short, SharedValues)).problems[0]
    assert "not whole vectors" in checks.check(mutated(uneven, Unequal)).problems[0]
    longer = replace(short, columns=short.row_class.tiler[1] + 8)
    assert "its tile has" in checks.check(longer).problems[0]
    odd = strided("softmax", 40, 1003, (1, 4), (1003, 1024))
    wide = replace(odd, row_class=replace(odd.row_class, access=(8,)))
    assert re.search(r"x: lane \d+: address \d+ is not aligned", checks.check(wide).problems[0])
    blind = replace(odd, row_class=replace(odd.row_class, edges=False))
    assert any("taken up to" in p or "aligned" in p for p in checks.check(blind).problems)


def test_narrow_loads_cost_requests():
    even = strided("softmax", 40, 1024, (0, 0), (1024, 1024))
    odd = strided("softmax", 40, 1024, (1, 0), (1024, 1024))
    assert odd.row_class.access == (1,)
    first, second = checks.traffic_of(even, 0), checks.traffic_of(odd, 0)
    assert second.requests == 8 * first.requests and first.width == 16 and second.width == 2
    assert first.sectors == first.ideal and second.sectors > second.ideal


def test_notebooks_show_a_plan():
    text = describe.plan_of(4096, 65536)._repr_svg_()
    assert text.lstrip().startswith("<?xml") or text.lstrip().startswith("<svg")
    assert "cluster of" in text and "gX" in text


def test_command_line_writes_figures(tmp_path, capsys):
    assert (
        main(["diagrams", "100x1003", "--dtype", "fp32", "--png", "--thread", "5", "-o", str(tmp_path)]) == 0
    )
    said = capsys.readouterr().out.splitlines()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tv.svg", "tv.png", "edges.svg", "predicate.svg", "thread.png", "explorer.html"} <= names
    assert [line for line in said if line.startswith(str(tmp_path))] == sorted(
        (str(p) for p in tmp_path.iterdir()), key=said.index
    )
    assert "100 rows of 1003, fp32" in said[0]
    assert "Thread 5 of" in (tmp_path / "thread.svg").read_text()


def test_command_line_options_reach_the_plan(tmp_path, capsys):
    assert main(["diagrams", "64x4096", "--backward", "--arch", "sm_80", "-o", str(tmp_path)]) == 0
    assert "softmax_backward" in (said := capsys.readouterr().out) and "for sm_80" in said
    assert main(["diagrams", "64x4096", "--two-pass", "-o", str(tmp_path)]) == 0
    assert "two_pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["100x1000", "--thread", "100000"], "thread must be"),
        (["1x3000000000"], "counted in 32 bits"),
        (["8x8", "--dim", "2"], "dim"),
    ],
)
def test_command_line_names_what_is_wrong(arguments, words, tmp_path, capsys):
    assert main(["diagrams", *arguments, "-o", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_commands_of_the_page_of_plans():
    page = (Path(__file__).resolve().parents[1] / "docs/layouts/plans.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m cute_softmax diagrams (.*)$", page, re.M)
    assert len(commands) >= 7
    for command in commands:
        options = parser().parse_args(["diagrams", *command.split()])
        assert f"{' x '.join(f'{n:,}' for n in options.shape)}" in page or (
            f"{options.shape[0]:,} rows of {options.shape[1]:,}" in page
        )
