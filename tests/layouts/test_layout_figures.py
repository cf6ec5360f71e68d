"""Figures: what each cell says, how it is set, and that a drawing is exactly its layouts."""

from __future__ import annotations

import colorsys
import itertools
import math
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import gallery
import pytest

from layouts import Layout, figures, operations, parse, style
from layouts.figures import grid, scene

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
ROW = parse("((32,4),8):((32,1),4)")


ENTRIES = {e.name: e.draw for e in gallery.ENTRIES}
LARGE = {
    "row_of_65536": lambda: figures.thread_value(Layout((1024, (8, 8)), (8, (1, 8192))), (1, 65536)),
    "tall": lambda: figures.layout_grid(Layout((1000, 3000), (3000, 1))),
    "cluster_of_16": lambda: figures.cluster_exchange(
        Layout.ordered((1, (8, 16), 2), (1, 0, 2)), element_bytes=8
    ),
    "buffer_of_16": lambda: figures.reduction_buffer(
        Layout.ordered((1, (8, 16), 2), (1, 0, 2)), element_bytes=8, cta=3
    ),
    "buffer_of_16_persistent": lambda: figures.reduction_buffer(
        Layout.ordered((1, (16, 16), 2), (1, 0, 2)), element_bytes=8
    ),
    "predicate_of_131072": lambda: figures.predicate_tensor(
        Layout((1, 1, 16), (16, 0, 1)), parse("(1024,8):(8,1)"), (1, 8192), 131000, vector=8
    ),
    "wgmma": lambda: figures.mma_fragments(
        (64, 64, 16),
        parse("((4,8,4),(2,2,2)):((128,1,16),(64,8,512))"),
        parse("(128,(64,16)):(0,(1,64))"),
        parse("((4,8,4),(2,2,8)):((128,1,16),(64,8,512))"),
    ),
    "rank_4": lambda: figures.layout_grid(Layout((2, 4, 3, 5))),
}
EVERY = {**ENTRIES, **LARGE}


@pytest.fixture(scope="module")
def drawn():
    return {name: draw() for name, draw in EVERY.items()}


@pytest.mark.parametrize("name", EVERY)
def test_every_figure_is_a_legible_page(drawn, name):
    figure = drawn[name]
    assert figure.width <= 1600 and figure.height <= 2600
    for item in figure.items:
        if isinstance(item, scene.Cell):
            for i, line in enumerate(item.lines):
                assert style.text_width(line, "small" if i else "cell") <= item.width + 0.5, (
                    line,
                    item.width,
                )
            assert (
                item.x >= 0 and item.x + item.width <= figure.width and item.y + item.height <= figure.height
            )
        elif isinstance(item, scene.Words):
            wide = style.text_width(item.text, item.voice)
            left = item.x - {"start": 0, "middle": wide / 2, "end": wide}[item.anchor]
            assert left >= 0 and left + wide <= figure.width + 1, item.text
            assert 8 <= item.y <= figure.height
    assert min(px for px, *_ in style.VOICES.values()) >= 8


@pytest.mark.parametrize("name", EVERY)
def test_no_two_cells_overlap(drawn, name):
    cells = sorted(drawn[name].cells, key=lambda c: c.y)
    open_cells: list[scene.Cell] = []
    for cell in cells:
        open_cells = [c for c in open_cells if c.y + c.height > cell.y + 0.01]
        for other in open_cells:
            apart = other.x + other.width <= cell.x + 0.01 or cell.x + cell.width <= other.x + 0.01
            assert apart, (other.lines, cell.lines)
        open_cells.append(cell)


@pytest.mark.parametrize("name", EVERY)
def test_svg_is_deterministic_text(drawn, name):
    first = drawn[name].svg()
    assert first == EVERY[name]().svg()
    root = ElementTree.fromstring(first)
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    said = "".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert len(said) > 50
    assert not re.search(r'\bid="', first)  # so that many figures fit on one page
    groups = [g for g in root.iter(f"{SVG}g")]
    assert len(groups) == len(drawn[name].cells)


def test_a_new_process_draws_the_same_bytes():
    code = "from layouts import *; from layouts.figures import *; import sys; "
    code += "sys.stdout.write(thread_value(parse('((32,4),8):((32,1),4)'), (4, 256)).svg())"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert again.stdout == figures.thread_value(ROW, (4, 256)).svg()


def test_large_tile_is_fast_and_small():
    tv = parse("((32,4),(8,4)):((32,1),(4,1024))")
    seconds = []
    for _ in range(3):  # others may share the core
        start = time.process_time()
        text = figures.thread_value(tv, (4, 1024), element_bytes=2).svg()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
    assert len(text) < 300_000


def tile_cells(figure) -> list[scene.Cell]:
    return [c for c in figure.cells if c.facts.coordinate and c.facts.threads]


@pytest.mark.parametrize(
    ("text", "tiler"),
    [
        ("((32,4),8):((32,1),4)", (4, 256)),
        ("((32,4),(8,4)):((32,1),(4,1024))", (4, 1024)),
        ("((4,8),(2,2)):((32,1),(16,8))", (16, 8)),
        ("((8,4),4):((4,0),1)", (4, 8)),
        ("((16,8),4):((1,64),16)", (16, 32)),
    ],
)
def test_thread_value_cells_say_who_owns_what(text, tiler):
    """Each drawn element against the layout evaluated pair by pair."""
    tv = parse(text)
    owners: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for t, v in itertools.product(range(tv[0].size), range(tv[1].size)):
        index = tv(t, v)
        owners.setdefault((index % tiler[0], index // tiler[0]), set()).add((t, v))
    seen = 0
    for cell in tile_cells(figures.thread_value(tv, tiler)):
        row, first, last = map(
            int, re.fullmatch(r"\((\d+), (\d+)(?:\.\.(\d+))?\)", cell.facts.coordinate).groups("-1")
        )
        for column in range(first, max(first, last) + 1):
            assert {t for t, _ in owners[row, column]} == set(cell.facts.threads)
            values = {v for _, v in owners[row, column]}
            assert values <= set(expand(cell.facts.value))
            seen += 1
        shown = cell.lines[0].removeprefix("T")
        assert int(re.match(r"\d+", shown)[0]) == min(cell.facts.threads)
    assert seen == tiler[0] * tiler[1]


def test_thread_value_in_shared_memory_names_banks():
    memory = parse("S<3,3,3> o 0 o (8,64):(64,1)")
    tv = parse("((8,8),8):((64,1),8)")
    figure = figures.thread_value(tv, (8, 64), memory=memory, space="sX", element_bytes=2, shared=True)
    for cell in tile_cells(figure):
        row, column, _ = map(int, re.findall(r"\d+", cell.facts.coordinate))
        assert cell.facts.start == memory(row, column)
        first = cell.facts.byte // 4 % 32
        assert cell.facts.bank == f"{first}..{first + 3}"


def test_neighbours_that_memory_parts_do_not_fold():
    columns = Layout((4, 256), (1, 4))
    cells = tile_cells(figures.thread_value(ROW, (4, 256), memory=columns, space="gX"))
    assert all(c.facts.stop == c.facts.start + 1 for c in cells if c.facts.start is not None)


def test_steps_repeat_a_tile_side_by_side():
    wide = operations.with_steps(ROW, (4, 256), 4)
    assert str(wide) == "((32,4),(8,4)):((32,1),(4,1024))"
    assert len(tile_cells(figures.thread_value(wide, (4, 1024)))) == 512


def expand(text: str) -> list[int]:
    runs = [r.split("..") for r in text.split(", ")]
    return [n for r in runs for n in range(int(r[0]), int(r[-1]) + 1)]


def test_elision_counts_every_column():
    for count, limit, keep in ((1000, 30, ()), (1000, 30, (500,)), (64, 20, (3, 60)), (31, 30, (30,))):
        runs = grid.windows(count, limit, keep)
        drawn = [i for r in runs for i in r]
        assert drawn == sorted(set(drawn)) and drawn[0] == 0 and drawn[-1] == count - 1
        assert len(drawn) <= limit + 4
    figure = figures.layout_grid(Layout((2, 3000), (3000, 1)))
    shown = len([c for c in figure.cells if c.facts.start is not None]) // 2
    more = [w.text for w in figure.items if isinstance(w, scene.Words) and "more" in w.text]
    assert [int(t.split()[1].replace(",", "")) for t in more] == [3000 - shown]


@pytest.mark.parametrize("n", [8, 200, 256, 1000, 1016, 1024])
def test_predicate_is_true_up_to_the_end(n):
    figure = figures.predicate_tensor(Layout((1, 1, 4), (4, 0, 1)), ROW, (4, 256), n, vector=8)
    cells = [c for c in figure.cells if c.facts.coordinate]
    assert cells
    for cell in cells:
        column = int(re.search(r", (\d+)\.\.", cell.facts.coordinate)[1])
        assert (cell.paint == "true") == (column < n)
        assert cell.lines[1].startswith("true" if column < n else "false")
    edges = [s for s in figure.items if isinstance(s, scene.Stroke) and s.kind == "edge"]
    assert len(edges) == (1 if n < 1024 else 0)


def test_predicate_of_a_later_cta_counts_from_its_first_column():
    figure = figures.predicate_tensor(
        Layout((1, 1, 1), (1, 0, 1)), ROW, (4, 256), 520, vector=8, column_start=512
    )
    cells = [c for c in figure.cells if c.facts.coordinate]
    assert sum(c.paint == "true" for c in cells) == 4  # one vector in each of four rows
    assert cells[0].facts.coordinate == "(0, 512..519)"
    # Vectors begin where the tile does, wherever in the row that is.
    moved = figures.predicate_tensor(
        Layout((1, 1, 1), (1, 0, 1)), ROW, (4, 256), 523, vector=8, column_start=515
    )
    assert [c.paint for c in moved.cells] == [c.paint for c in figure.cells]


def test_predicate_ghosts_are_the_rows_that_store_nothing():
    figure = figures.predicate_tensor(
        Layout((2, 3, 4), (4, 0, 1)), parse("((8,4),8):((32,1),4)"), (4, 64), 200, vector=4
    )
    stored = [c for c in figure.cells if c.facts.value.startswith("bit")]
    assert len(stored) == 2 * 24 and sum(c.paint == "ghost" for c in stored) == 2 * 16


def test_predicate_among_the_values_of_the_layout():
    """Steps may also be part of the thread-value layout's own values."""
    whole = parse("((32,4),(8,4)):((32,1),(4,1024))")
    parts = figures.predicate_tensor(Layout((1, 1, 4), (4, 0, 1)), ROW, (4, 256), 1000, vector=8)
    inside = figures.predicate_tensor(Layout((1, 1, 4), (4, 0, 1)), whole, (4, 1024), 1000, vector=8)
    facts = [[c.facts for c in f.cells if c.facts.coordinate] for f in (parts, inside)]
    assert facts[0] == facts[1]


def test_row_pieces_cover_the_row_once():
    for n, misalignment in itertools.product((1, 5, 8, 13, 100, 1003), range(8)):
        figure = figures.row_pieces(n, vector=8, starts=[misalignment], threads=4, element_bytes=2)
        pieces = sorted((c.facts.start, c.facts.stop) for c in figure.cells if c.facts.start is not None)
        assert pieces[0][0] == misalignment and pieces[-1][1] == misalignment + n
        if n < 80:  # all drawn
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        for cell in figure.cells:
            if cell.facts.note.startswith("one vector"):
                assert cell.facts.byte % 16 == 0


def test_reduction_buffer_addresses_and_readers():
    buffer = Layout.ordered((2, (4, 2), 2), (1, 0, 2))
    figure = figures.reduction_buffer(buffer, element_bytes=8, cta=1)
    cells = [c for c in figure.cells if c.facts.coordinate]
    assert sorted(c.facts.byte for c in cells) == list(range(0, 8 * 32, 8))
    for cell in cells:
        row, peer, stage = map(int, re.findall(r"\d+", cell.facts.coordinate))
        assert cell.facts.start == buffer((row, peer, stage)) == peer + 8 * row + 16 * stage
        bank = cell.facts.byte // 4 % 32
        assert cell.facts.bank == f"{bank}..{bank + 1}"
        assert cell.lines[2] == f"W{4 * row + peer % 4} CTA{peer // 4}"
        readers = {w * 32 + peer for w in range(4 * row, 4 * row + 4)}
        assert readers <= set(cell.facts.threads)


def test_cluster_counts_its_bytes_and_targets():
    buffer = Layout.ordered((2, (2, 4), 1), (1, 0, 2))
    figure = figures.cluster_exchange(buffer, element_bytes=8, cta=2, warp=3)
    stores = [c.facts for c in figure.cells if c.facts.note.startswith("st.async")]
    assert [f.threads for f in stores] == [(96,), (97,), (98,), (99,)]
    assert {f.start for f in stores} == {buffer((1, (1, 2), 0))}
    bars = [c for c in figure.cells if c.paint == "barrier" and c.facts.note]
    assert len(bars) == 4 and all(c.lines[1] == f"{4 * 4 * 8} bytes" for c in bars)
    arrows = [s for s in figure.items if isinstance(s, scene.Stroke) and s.arrow]
    assert len(arrows) == 4


def test_warp_shuffle_ends_with_one_value_a_group():
    for width in (1, 2, 8, 32):
        cells = [c for c in figures.warp_shuffle(width).cells if c.facts.threads]
        last = cells[-32:]
        assert {c.facts.value for c in last} == {"of 1 lane" if width == 1 else f"of {width} lanes"}
    with pytest.raises(ValueError, match="power of two"):
        figures.warp_shuffle(12)


def test_swizzle_figure_shows_the_banks_of_both():
    layout = parse("S<3,3,3> o 0 o (8,64):(64,1)")
    cells = [c.facts for c in figures.swizzle_banks(layout, 2).cells if c.facts.coordinate]
    assert len(cells) == 128
    for facts in cells[64:]:
        row, column = map(int, re.findall(r"\d+", facts.coordinate))
        assert facts.start == layout(row, column) and facts.byte == 2 * facts.start
    first_column = [f.bank for f in cells[64:] if f.coordinate.endswith(",0)")]
    assert len(set(first_column)) == 8
    assert {f.bank for f in cells[:64] if f.coordinate.endswith(",0)")} == {"0..3"}


def test_following_dims_all_but_one_thread():
    page = [figures.thread_value(ROW, (4, 256)), figures.warp_shuffle()]
    figure = figures.follow_thread(page, 29)
    lit = [c for c in figure.cells if not c.dim and c.facts != scene.Facts()]
    assert lit and all(29 in c.facts.threads for c in lit)
    assert any(c.dim for c in figure.cells)
    with pytest.raises(ValueError, match="thread 4000 touches nothing"):
        figures.follow_thread(page, 4000)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (
            lambda: figures.thread_value(ROW, (4, 512)),
            r"does not fill the 4 x 512 tile: 1024 .* first \(row 0, column 256\)",
        ),
        (lambda: figures.thread_value(ROW, (4, 128)), r"thread 16 value 0 .* past the 512 elements"),
        (lambda: figures.thread_value(parse("(4,8):(8,1)"), (4, 9)), "does not fill"),
        (
            lambda: figures.predicate_tensor(Layout((1, 1, 1)), ROW, (4, 256), 201, vector=8),
            "n = 201 is no multiple",
        ),
        (
            lambda: figures.predicate_tensor(Layout(1, 1), ROW, (4, 256), 520, vector=8, column_start=515),
            "n = 520 is no multiple of the vector of 8 elements from column 515 on",
        ),
        (lambda: figures.predicate_tensor(Layout((1, 1)), ROW, (4, 256), 200, vector=8), "three modes"),
        (
            lambda: figures.predicate_tensor(Layout((3, 1, 1)), ROW, (4, 256), 200, vector=8),
            "counts 3 x 1 x 1 vectors",
        ),
        (lambda: figures.reduction_buffer(Layout((2, 4, 2)), element_bytes=4), "rows, .warps_per_row"),
        (
            lambda: figures.reduction_buffer(Layout((2, (4, 1), 2)), element_bytes=2),
            "element_bytes must be 4, 8",
        ),
        (lambda: figures.cluster_exchange(Layout((2, (4, 1), 2)), element_bytes=4), "cluster of one"),
        (
            lambda: figures.cluster_exchange(Layout((2, (4, 2), 2)), element_bytes=4, warp=8),
            "warp must be 0 to 7",
        ),
        (
            lambda: figures.row_pieces(9, vector=8, starts=[-1], threads=4, element_bytes=2),
            "starts of at least 0",
        ),
        (
            lambda: figures.row_pieces(9, vector=8, starts=[0], threads=4, element_bytes=2, share=12),
            "multiple of the vector",
        ),
        (lambda: figures.swizzle_banks(parse("S<1,0,1> o 0 o (2,2,2)"), 2), "draws two modes"),
    ],
)
def test_bad_input_names_its_place(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def linear(colour: str) -> list[float]:
    parts = [c / 255 for c in bytes.fromhex(colour[1:])]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


PAINTS = ["plain", "true", "false", "ghost", "scalar", "barrier", *(f"t{i}" for i in range(8))]
PAINTS += [f"b{i}" for i in range(32)]


@pytest.mark.parametrize("paint", PAINTS)
def test_text_is_readable_on_every_paint_in_light_and_dark(paint):
    light, dark = style.fills(paint)
    assert contrast(light, style.INK_LIGHT) >= 4.5
    assert contrast(dark, style.INK_DARK) >= 4.5


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as it is seen.
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deutan": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9690)),
    "tritan": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
XYZ = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # over D65 white


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as it is seen."""

    def apply(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    seen = [min(1.0, max(0.0, v)) for v in apply(SIGHT[sight], linear(colour))]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in apply(XYZ, seen))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [style.THREADS_LIGHT, style.THREADS_DARK], ids=["light", "dark"])
def test_neighbouring_threads_differ_to_every_sight(palette, sight):
    """A difference of 10 in CIE76 is plain to see side by side (2.3 is the least that is noticed)."""
    for i in range(8):
        assert math.dist(lab(palette[i], sight), lab(palette[(i + 1) % 8], sight)) >= 10, (i, sight)


def test_palette_has_the_hues_that_cute_users_know():
    known = ("#afafff", "#afffaf", "#ffffaf", "#ffafaf", "#d2d2ff", "#d2ffd2", "#ffffd2", "#ffd2d2")
    for ours, theirs in zip(style.THREADS_LIGHT, known, strict=True):
        hues = [colorsys.rgb_to_hsv(*linear(c))[0] for c in (ours, theirs)]
        assert abs(hues[0] - hues[1]) < 0.04
    assert [style.thread_paint(t) for t in (0, 7, 8)] == ["t0", "t7", "t0"]


def test_bank_colours_order_by_lightness_alone():
    """Without hue, as with any colour blindness, eight groups of banks still differ and ascend."""
    for which in (0, 1):
        levels = [luminance(style.fills(style.bank_paint(g, 8))[which]) for g in range(8)]
        assert all(b > a + 0.005 for a, b in itertools.pairwise(levels)), levels


@pytest.mark.long
def test_committed_gallery_is_what_the_code_draws():
    run = subprocess.run(
        [sys.executable, str(ROOT / "docs/layouts/gallery.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "outer, inner",
    [("(8,8):(8,1)", "(4,4):(2,8)"), ("((2,4),8):((1,16),2)", "(8,2):(2,16)"), ("20:2", "(5,4):(4,1)")],
)
def test_a_composition_is_drawn_beside_its_operands(outer, inner):
    a, b = parse(outer), parse(inner)
    figure = figures.composed(a, b)
    cells = [c for c in figure.cells if c.facts != scene.Facts()]
    of_a, of_b, of_both = cells[: a.size], cells[a.size : a.size + b.size], cells[a.size + b.size :]
    by_offset = {c.facts.start: c for c in of_a}
    assert len(of_both) == b.size
    for of_inner, found in zip(of_b, of_both, strict=True):
        at = eval(of_inner.facts.coordinate)
        assert found.facts.start == a(b(at)) and found.facts.coordinate == of_inner.facts.coordinate
        assert found.paint == of_inner.paint == by_offset[a(b(at))].paint != "plain"
    assert sum(c.paint != "plain" for c in of_a) == len({b(i) for i in range(b.size)})


def test_a_composition_of_three_modes_is_refused():
    with pytest.raises(ValueError, match="two modes, got the shape"):
        figures.composed(parse("(2,2,2):(1,2,4)"), parse("2:1"))


@pytest.mark.parametrize(("columns", "within"), [(1, False), (8, True)])
def test_words_of_what_is_left_out_do_not_cross_a_frame(columns, within):
    """They stand within a frame that has room for them, else beside it."""
    shown = grid.Grid(200, columns, lambda r, c: ("blue", ("T0",), ()), (40, 24), thick_rows=(32,))
    canvas = grid.draw(shown, *grid.arrange(shown))
    (frame, *_) = [s for s in canvas.items if isinstance(s, scene.Stroke) and s.points[0] == s.points[-1]]
    left, right = frame.points[0][0], frame.points[1][0]
    words = [w for w in canvas.items if isinstance(w, scene.Words) and "more rows" in w.text]
    assert words
    for w in words:
        wide = scene.text_width(w.text, w.voice)
        first = w.x - (wide / 2 if w.anchor == "middle" else 0)
        assert (left < first and first + wide < right) if within else first > right
