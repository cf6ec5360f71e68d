"""Figures of Plans: that they show what the Plan does, and that the checks on a Plan find what is wrong.

What all movements have in common, and the row movement.
"""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import pytest
from drawings import EVERY, PANELS, ROOT, ROWS, SHARED, SHORT, SWEEPS, made, reached, strided

from cute_softmax import draw
from cute_softmax.__main__ import main
from cute_softmax.commands.line import line
from cute_softmax.draw import checks
from cute_softmax.plan import WARP, RowClass, describe
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import Layout
from layouts.html import explorer


@pytest.fixture(scope="module", params=EVERY)
def case(request):
    """A plan and its figures."""
    p = made(request.param)
    return p, draw.figures(p)


of_rows = pytest.mark.parametrize("case", [*ROWS, *SHARED], indirect=True, scope="module")


def uses(c) -> dict[str, bool]:
    """Which figures a plan of a class has."""
    if c.movement == "row":
        return {
            "tv": True,
            "tile": True,
            "smem": any(how != "direct" for how in c.staging),
            "edges": c.edges,
            "predicate": True,
            "shuffle": c.threads_per_row > 1,
            "reduction_buffer": c.exchanges,
            "cluster": c.cluster_n > 1 and not c.ring,
            "turns": c.ring > 0,
            "workspace": c.ring > 0,
        }
    if c.movement == "short":
        return {"tile": True, "rows": True}
    if c.movement == "sweep":
        return {"tile": True, "reduction_buffer": True}
    if c.movement in ("column", "split"):
        return {
            **dict.fromkeys(("tv", "predicate", "tile", "smem"), True),
            "shuffle": c.across < WARP and c.down > 1 and not c.aligned,
            "reduction_buffer": c.down > 1,
            "cluster": c.cluster_n > 1,
            "shift": c.shifted,
            "places": bool(c.ahead),
            "exchange": c.exchange,
        }
    pairs = c.movement == "matmul" and c.dtypes[0] == "fp32" and not c.lines
    common = {
        "tile": True,
        "ring": True,
        "lines": c.lines,
        "scores": not c.lines,
        "pairs": pairs,
        "ldmatrix": not c.lines and not pairs,
        "registers": True,
    }
    if c.movement == "matmul_backward":
        return common | dict.fromkeys(("grad", "first_product", "second_product"), True)
    exchange = c.vector == 8 and not c.split
    return common | {
        "values": True,
        "operand": c.instruction == "mma",
        "fragments": True,
        "exchange": exchange,
    }


def test_figures_and_page_of_a_plan(case):
    """The figures of what it uses, legible and small, and a page whose every step finds its cells."""
    p, found = case
    assert checks.check(p).problems == ()
    assert {*found} == {name for name, used in uses(p.kernel).items() if used} | {draw.FOLLOWED}
    for name, figure in found.items():
        text = figure.svg()
        ElementTree.fromstring(text)
        assert figure.width <= 1600, name
        assert len(text) < 300_000 or name == "thread", name
        nouns = "rows|groups|parts|lanes|rounds|warps|blocks|instructions|stages|boxes|wavefronts"
        assert not re.search(rf"\(s\)| 1 ({nouns})\b|PROBLEM", text), name
        assert not re.search(r"[`*]", f"{figure.title} {figure.description}"), name
    page = draw.page(p, found)
    assert explorer(**page)
    assert len(page["steps"]) >= 3 and page["title"] and page["subtitle"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans_of_every_architecture_have_no_problems(architecture):
    for shape, options in (*[*ROWS.values()][::2], *[*SHORT.values()][::3], *(PANELS | SWEEPS).values()):
        p = describe.plan_shape(shape, **{**options, "architecture": architecture})
        assert checks.check(p).problems == (), p.explain()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("online 50257", ("tile", "predicate", "shuffle")),
        ("columns", ("tile", "smem")),
        ("usual", ("ldmatrix", "fragments", "registers", "exchange")),
        ("backward", ("ldmatrix", "first_product", "registers", "second_product")),
    ],
)
def test_every_thread_can_be_followed(name, shown):
    """Of 128: of a CTA, or of a warpgroup."""
    p = made(name)
    for thread in (0, 31, 37, 127):
        found = draw.figures(p, thread)
        for figure in shown:
            assert any(thread in c.facts.threads for c in found[figure].cells), (thread, figure)
        lit = [c for c in found["thread"].cells if c.facts.space == "gX" and not c.dim]
        assert all(c.facts.threads == (thread,) for c in lit)
    for thread in (-1, 128):
        with pytest.raises(ValueError, match="thread must be 0 to 127"):
            draw.figures(p, thread)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("online 1000000", ("cluster of", "gX")),
        ("cluster", ("column", "gX")),
        ("usual", ("256 rows of S",)),
        ("backward", ("rows of V",)),
    ],
)
def test_notebooks_show_a_plan(name, words):
    importlib.import_module("cute_softmax.api")  # where people get plans from
    text = made(name)._repr_svg_()
    assert text.startswith("<?xml") and all(word in text for word in words)


COMMANDS = {
    "100x103 --dtype fp32 --png --thread 5": ("100 rows of 103, fp32", "tv tv.png edges thread.png"),
    "64x4096 --backward --arch sm_80": ("softmax_backward of 64 rows of 4096, bf16, for sm_80", "tv tile"),
    "64x4096 --two-pass": ("two_pass", "tv tile"),
    "33x40 --dim 0": ("movement   column", "tv reduction_buffer"),
    "4x5x64 --dim 0,2": ("5 groups of 256", "tv"),
    "4x512x512 --matmul 64 --thread 70": ("softmax(S) @ V", "tile fragments"),
    "4x512x512 --matmul 64 --backward": ("softmax_matmul_backward", "second_product"),
}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_command_line_writes_figures(command, tmp_path, capsys):
    assert main(["diagrams", *command.split(), "-o", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    words, names = COMMANDS[command]
    assert words in said
    written = {path.name for path in tmp_path.iterdir()}
    assert {name if "." in name else f"{name}.svg" for name in [*names.split(), "explorer.html"]} <= written
    assert {line for line in said.splitlines() if line.startswith(str(tmp_path))} == {
        str(tmp_path / name) for name in written
    }
    if "--thread" in command:
        thread = command.split()[-1]
        assert f"Thread {thread} of" in (tmp_path / "thread.svg").read_text()


@pytest.mark.parametrize("document", ["docs/layouts/plans.md"])
def test_commands_of_the_page_of_plans(document):
    page = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"^python -m cute_softmax (diagrams .*)$", page, re.M)
    assert len(commands) >= 7
    for command in commands:
        name, *arguments = command.split()
        shape = line.commands[name].make_context(name, arguments).params["shape"]
        assert (
            f"{' x '.join(f'{n:,}' for n in shape)}" in page or f"{shape[0]:,} rows of {shape[1]:,}" in page
        )


# The row movement.


def cells(figure, *, note: str = "") -> list:
    """The facts of a figure's cells, the legend and the equation aside."""
    return [c.facts for c in figure.cells if c.facts.coordinate and note in c.facts.note]


@of_rows
def test_cells_of_the_tile_are_those_of_the_layout(case):
    p, found = case
    c = p.row_class
    tv = checks.tile_tv(c)
    seen = [f for f in cells(found["tile"]) if f.space]
    assert seen
    for facts in seen:
        (thread,) = facts.threads
        value = int(re.match(r"\d+", facts.value)[0])
        row, column = map(int, re.match(r"\((\d+), (\d+)", facts.coordinate).groups())
        assert tv(thread, value) == row + column * c.tiler[0]


@of_rows
def test_predicate_is_true_exactly_inside_the_row(case):
    p, found = case
    facts = [f for f in cells(found["predicate"]) if f.value.startswith("predicate")]
    body = checks.pieces(p, 0).body
    for f in facts:
        row, first, last = map(int, re.match(r"\((\d+), (\d+)\.\.(\d+)", f.coordinate).groups())
        assert last - first + 1 == p.row_class.vector
        assert (f.note == "loaded") == (last < body and row < p.rows)
    assert any(f.note == "loaded" for f in facts) == (body > 0)


EDGES = [name for name in ROWS if made(name).kernel.edges]
CLUSTERS = [name for name in ROWS if made(name).kernel.cluster_n > 1]


@pytest.mark.parametrize("case", EDGES, indirect=True)
def test_scalars_of_the_edges_follow_the_kernels_rule(case):
    """Slot s = lane + e * T of a row: the head's element s, or the element s - (V - 1) after the body."""
    p, found = case
    c = p.row_class
    scalars = cells(found["edges"], note="one scalar")
    assert scalars
    for facts in scalars:
        row, column = map(int, re.match(r"\((\d+), (\d+)", facts.coordinate).groups())
        cut = checks.pieces(p, row)
        slot = column if column < cut.head else column - cut.head - cut.body + c.vector - 1
        lane, turn = slot % c.threads_per_row, slot // c.threads_per_row
        assert f"slot {slot}, turn {turn} of thread {lane}" in facts.note
        assert turn < c.edge_scalars


@pytest.mark.parametrize("case", CLUSTERS, indirect=True)
def test_cluster_figure_names_targets_and_bytes(case):
    p, found = case
    c, drawn = p.row_class, [x.facts for x in found["cluster"].cells]
    stores = [f for f in drawn if f.note.startswith("st.async")]
    assert [f.threads[0] % WARP for f in stores] == list(range(c.cluster_n))
    received = c.threads // WARP * c.cluster_n * c.facts.state_bytes
    barriers = [f.note for f in drawn if f.space.startswith("mbarrier")]
    assert len(barriers) == c.cluster_n * c.reduction_buffer.shape[2]
    assert all(f"expects {received} bytes" in note for note in barriers)
    steps = [s for s in draw.page(p, found)["steps"] if s.figure == "cluster"]
    for step, (_, stage) in zip(steps, draw.View(p).exchanges, strict=True):
        roles = Counter(f.role for f in drawn if step.where(f))
        assert roles == dict.fromkeys(("sender", "receiver", f"barrier {stage}"), c.cluster_n)


def lying(math: str, rows: int, columns: int, offsets, pitches):
    """The plan of rows whose operands begin and lie at given elements."""
    return strided(math, (rows, columns), (1,), [(pitch, 1) for pitch in pitches], offsets)


@pytest.mark.parametrize(
    "rows",
    [
        ("softmax", 40, 100, (0, 0), (104, 100)),
        ("softmax", 40, 100, (3, 3), (101, 101)),
        ("softmax", 40, 1003, (1, 4), (1003, 1024)),
        ("softmax", 3, 50257, (5, 0), (50257, 50257)),
        ("softmax_backward", 40, 333, (1, 2, 3), (333, 340, 347)),
        ("softmax_backward", 5, 40001, (0, 4, 0), (40001, 40001, 40001)),
    ],
    ids=lambda c: f"{c[0]}-{c[2]}",
)
def test_requests_and_scalars_reach_every_element_once(rows):
    """Counted element by element over the whole grid, without the interval arithmetic of the checks."""
    p = lying(*rows)
    c = p.row_class
    assert checks.check(p).problems == ()
    for operand, dtype in enumerate(c.dtypes):
        requests = (
            lanes
            for tile in range(p.tiles)
            for cta in range(c.cluster_n)
            for lanes in checks.requests(p, operand, tile, cta)
        )
        found = reached(requests, ITEM_SIZE[dtype], c.accesses[operand])
        offset, stride = p.problem.offsets[operand], p.row_strides[operand]
        for row in range(p.rows):
            cut = checks.pieces(p, row)
            start = offset + row * stride
            found.update(range(start, start + cut.head))
            found.update(range(start + p.columns - cut.tail, start + p.columns))
        wanted = {offset + r * stride + i for r in range(p.rows) for i in range(p.columns)}
        assert set(found) == wanted and set(found.values()) == {1}


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


def mutated(plan, kind: type):
    c = plan.row_class
    return replace(plan, row_class=kind(**{**c.fields, "prologue": c.prologue}))


def test_a_wrong_plan_is_found():
    short, uneven = describe.plan_of(100, 200), describe.plan_of(800, 64000)
    assert "elements have no thread" in checks.check(mutated(short, SwappedThreads)).problems[0]
    assert "elements have no thread" in checks.check(mutated(short, SharedValues)).problems[0]
    assert "not whole vectors" in checks.check(mutated(uneven, Unequal)).problems[0]
    longer = replace(short, columns=short.row_class.tiler[1] + 8)
    assert "its tile has" in checks.check(longer).problems[0]
    odd = lying("softmax", 40, 1003, (1, 4), (1003, 1024))
    wide = replace(odd, row_class=replace(odd.row_class, access=(8,)))
    assert re.search(r"x: lane \d+: address \d+ is not aligned", checks.check(wide).problems[0])
    blind = replace(odd, row_class=replace(odd.row_class, edges=False))
    assert any("taken up to" in p or "aligned" in p for p in checks.check(blind).problems)


def test_narrow_loads_cost_requests():
    even = lying("softmax", 40, 1024, (0, 0), (1024, 1024))
    odd = lying("softmax", 40, 1024, (1, 0), (1024, 1024))
    assert odd.row_class.access == (1,)
    first, second = (checks.check(p).traffic[0] for p in (even, odd))
    assert second.requests == 8 * first.requests and first.width == 16 and second.width == 2
    assert first.sectors == first.ideal and second.sectors > second.ideal
