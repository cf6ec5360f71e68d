"""The ways in: notation, command line, notebooks and traced kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
import other_kernels
import pytest

from layouts import ComposedLayout, Layout, LayoutSyntaxError, Swizzle, parse, trace
from layouts.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
ROW = "((32,4),8):((32,1),4)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", Layout(5)),
        ("(4,8)", Layout((4, 8))),
        (" ( 4 , 8 ) : ( 8 , 1 ) ", Layout((4, 8), (8, 1))),
        ("(_4,(_2,_8)):(_8,(_1,_0))", Layout((4, (2, 8)), (8, (1, 0)))),
        ("(4,):(1,)", Layout((4,), (1,))),
        ("S<3,4,3>", Swizzle(3, 4, 3)),
        ("Sw<3,4,3> o _0 o (_8,_64):(_64,_1)", ComposedLayout(Swizzle(3, 4, 3), 0, Layout((8, 64), (64, 1)))),
        (
            "Sw<3,4,3> o smem_ptr[16b](unset) o (_8,_64):(_64,_1)",
            ComposedLayout(Swizzle(3, 4, 3), 0, Layout((8, 64), (64, 1))),
        ),
        ("Sw<2,4,3> o smem_ptr[32b](0x7f1200) o 8:1", ComposedLayout(Swizzle(2, 4, 3), 0, Layout(8))),
        ("Sw<3,4,3> o (8,64):(64,1)", ComposedLayout(Swizzle(3, 4, 3), 0, Layout((8, 64), (64, 1)))),
        ("(8,4):(4,1) ∘ 3 ∘ (2,4):(1,2)", ComposedLayout(Layout((8, 4), (4, 1)), 3, Layout((2, 4)))),
    ],
)
def test_notation_is_read(text, value):
    assert parse(text) == value
    assert parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("((32,4),8):((32,1),4,2)", 21, "the shape has 2 modes here and the stride 3"),
        ("((32,4),8):((32,1,3),4)", 18, "the shape has 2 modes here and the stride 3"),
        ("((32,4),8):((32),4)", 12, "the shape has 2 modes here and the stride 1"),
        ("((32,4),8):(32,4)", 12, "the shape has a tuple here and the stride an int"),
        ("(32,8):((1,2),4)", 8, "the shape has an int here and the stride a tuple"),
        ("((32,4),8:((32,1),4)", 9, r"expected '\)'"),
        ("(4,?):(1,4)", 3, "a dynamic value"),
        ("(4,-2)", 3, "negative"),
        ("(4,0)", 3, "at least 1"),
        ("(4,8):(1@0,1@1)", 8, "basis"),
        ("(4,8):(1,4))", 11, "unexpected text"),
        ("(4,8):", 6, "the text ends here"),
        ("", 0, "the text ends here"),
        ("S<3,4,2>", 0, "shift"),
        ("S<3,4,3 o 0 o 4", 8, "expected '>'"),
        ("S<3,4,3> o :", 11, "expected the offset"),
        ("S<3,4,3> o 0 (4,8)", 13, "expected 'o'"),
    ],
)
def test_malformed_text_shows_a_caret_under_the_place(text, position, words):
    with pytest.raises(LayoutSyntaxError, match=words) as caught:
        parse(text)
    assert caught.value.position == position
    *_, shown, caret = str(caught.value).split("\n")
    assert shown == f"  {text}" and caret.index("^") == position + 2


@pytest.mark.parametrize(
    ("shape", "stride", "words"),
    [
        ((4, (2, 3)), (1, (2, 3, 4)), r"differ in nesting at shape\[1\]\[2\]"),
        ((4, 8), (1, (2, 3)), r"differ in nesting at shape\[1\]"),
        ((4, 0), None, "at least 1"),
        ((4, 8), (1, -4), "at least 0"),
    ],
)
def test_values_that_do_not_fit_are_refused(shape, stride, words):
    with pytest.raises(ValueError, match=words):
        Layout(shape, stride)


def test_only_integers_make_a_layout():
    with pytest.raises(TypeError, match=r"shape\[1\]\[0\] must be an int"):
        Layout((4, (2.5, 3)))
    with pytest.raises(TypeError, match="must be an int"):
        Layout((True, 3))
    with pytest.raises(ValueError, match=r"coordinate\[0\]"):
        Layout(((2, 3), 4))(((1, 2, 3), 0))


def test_layouts_are_values():
    assert {Layout([4, [2, 3]]): 1}[Layout((4, (2, 3)))] == 1
    assert eval(repr(Layout((4, 8), (8, 1)))) == Layout((4, 8), (8, 1))
    with pytest.raises(AttributeError):
        Layout(4).shape = 5


def test_notebooks_show_a_drawing():
    for value in (Layout((4, 8)), parse("S<2,0,2> o 0 o (4,4)")):
        assert value._repr_svg_().startswith("<?xml")


def test_show_writes_svg_and_png(tmp_path, capsys):
    target = tmp_path / "f.svg"
    assert main(["show", ROW, "--tile", "4,256", "-o", str(target), "--png", "--thread", "5"]) == 0
    assert target.read_text().startswith("<?xml") and 'class="c dim"' in target.read_text()
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.split() == [str(target), str(target.with_suffix(".png"))]
    assert main(["show", "S<3,3,3> o 0 o (8,64):(64,1)", "--title", "Banks"]) == 0
    assert "<title>Banks</title>" in capsys.readouterr().out


def test_check_reports_and_returns_its_verdict(capsys):
    arguments = ["--tile", "4,256", "--element-bytes", "2", "--vector", "8"]
    assert main(["check", ROW, *arguments]) == 0
    assert "all 1,024 elements exactly once" in capsys.readouterr().out
    assert main(["check", "((32,2),8):((32,1),4)", *arguments]) == 1
    assert "512 of 1,024 elements missed" in capsys.readouterr().out
    assert main(["check", ROW, *arguments, "--memory", "(4,256):(1001,1)"]) == 2
    assert "not aligned to the 16-byte access" in capsys.readouterr().err


def test_explain_says_what_a_layout_does(capsys):
    assert main(["explain", ROW, "--tile", "4,256"]) == 0
    said = capsys.readouterr().out
    assert "128 threads x 8 values over a 4 x 256 tile" in said and "exactly one thread" in said
    assert main(["explain", "(4,8):(0,1)"]) == 0
    assert "4 that share one offset (broadcast)" in capsys.readouterr().out
    assert main(["explain", "S<3,3,3>"]) == 0
    assert "bits 3..5 of an offset are exclusive-ored with its bits 6..8" in capsys.readouterr().out


BANKS = "S<3,3,3> o 0 o (8,64):(64,1)"
HUGE = "(1000000,1000000):(1,1000000)"
CHECK = ["check", ROW, "--tile", "4,256", "--element-bytes", "2", "--vector", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "(4,8:1"], "^"),
        (["show", ROW, "--tile", "4,512"], "first (row 0, column 256)"),
        (["show", "S<3,3,3>"], "S<3,3,3> alone has no shape"),
        (["show", "(4,8)", "--png"], "--png needs -o"),
        (["show", "(4,8)", "-o", "/nowhere/f.svg"], "No such file"),
        (["show", "(4,8)", "-o", "f.jpg"], "a figure is written as .svg or .png, got 'f.jpg'"),
        (["show", "(4,8)", "-o", "f"], "as .svg or .png, got 'f'"),
        (["show", "(4,8)", "--element-bytes", "-3"], "element_bytes must be at least 0, got -3"),
        (["show", ROW, "--tile", "4,256", "--element-bytes", "-3"], "element_bytes must be at least 0"),
        (["show", "(4,8)", "--access-bytes", "16"], "--access-bytes is of the cells of a swizzled layout"),
        (["show", BANKS, "--tile", "4,128", "--access-bytes", "16"], "--access-bytes is of the cells"),
        (["show", BANKS, "--access-bytes", "0"], "access_bytes must be at least 1, got 0"),
        (["show", BANKS, "--access-bytes", "7"], "access_bytes must be a multiple of element_bytes"),
        (["show", BANKS, "--access-bytes", "12"], "no whole number of runs of 12 bytes"),
        (["show", BANKS, "--element-bytes", "0"], "element_bytes must be at least 1, got 0"),
        (["show", "(4,8)", "--thread", "3"], "--thread 3: no cell that is drawn"),
        (["show", ROW, "--tile", "4,256", "--thread", "128"], "--thread 128: no cell that is drawn"),
        (
            ["show", "S<3,3,3> o 0 o (100000,100000):(100000,1)"],
            "10,000,000,000 coordinates: at most 1,048,576",
        ),
        (["show", HUGE, "--tile", "1000000,1000000"], "1,000,000,000,000 coordinates: at most 1,048,576"),
        (["explain", HUGE], f"{HUGE} has 1,000,000,000,000 coordinates: at most 1,048,576 are enumerated"),
        (["explain", "9999999999999999999999:1"], "at most 1,048,576 are enumerated"),
        (["explain", ROW, "--tile", "4,99999999"], "the 4 x 99999999 tile has 399,999,996 coordinates"),
        (["explain", "S<3,3,3>", "--tile", "4,4"], "S<3,3,3> alone has no shape"),
        (["explain", "S<9,99999999999,9>"], "a swizzle takes up to 63 bits of an offset"),
        ([*CHECK[:-1], "0"], "vector must be at least 1, got 0"),
        ([*CHECK[:-1], "-8"], "vector must be at least 1, got -8"),
        ([*CHECK, "--element-bytes", "0"], "element_bytes must be at least 1, got 0"),
        ([*CHECK, "--element-bytes", "-2"], "element_bytes must be at least 1, got -2"),
        ([*CHECK, "--element-bytes", "3"], "width must be one of"),
        ([*CHECK, "--base", "-16"], "base must be at least 0, got -16"),
        ([*CHECK, "--tile", "1000000,1000000"], "1,000,000,000,000 coordinates: at most 1,048,576"),
        ([*CHECK, "--memory", "(4,8):(8,1)"], "memory (4,8):(8,1) has 4 x 8 elements, the tile 4 x 256"),
        ([*CHECK, "--memory", "1024"], "memory 1024:1 has 1024 elements, the tile 4 x 256"),
        ([*CHECK, "--memory", "S<3,3,3>"], "S<3,3,3> alone has no shape"),
        ([*CHECK, "--memory", ""], "the text ends here"),
        (["check", "S<3,3,3>", *CHECK[2:]], "S<3,3,3> alone has no shape"),
        (["check", HUGE, *CHECK[2:]], f"{HUGE} has 1,000,000,000,000 coordinates"),
    ],
)
def test_bad_input_is_status_2_and_says_why(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.startswith("error: ") and said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [HUGE, "((2,100000000),4):((1,8),2)", "(4,4,1000000000)"])
def test_a_plain_grid_is_drawn_however_large_it_is(text, capsys):
    assert main(["show", text]) == 0
    assert len(capsys.readouterr().out) < 300_000


@pytest.mark.parametrize("text", ["4,x", "4,0", "0", "-4,256", "1,2,3"])
def test_a_tile_must_be_numbers(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["show", ROW, f"--tile={text}"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and f"a tile is rows,columns (4,256), got {text!r}" in said
    assert said.startswith("error: ") and said.count("\n") == 1


def test_module_runs_without_torch_and_cutlass():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['cutlass'] = None; "
        "from layouts.__main__ import main; import layouts.html, layouts.walk, layouts.access, "
        "layouts.trace; "
        "sys.exit(main(['explain', '(4,8)']))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_importing_layouts_loads_no_drawing_library():
    code = "import sys, layouts; sys.exit('drawsvg' in sys.modules or 'cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_two_other_kernels_are_read_while_they_are_traced(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    found = other_kernels.traced()
    turn, product = found["transpose"], found["tile_product"]
    assert turn["copy"].tv == parse("((32,8),4):((32,4),1)")
    assert (turn["copy"].tiler, turn["copy"].element_bits) == ((32, 32), 32)
    assert turn["sA"] == parse("S<5,0,5> o 0 o (32,32):(32,1)")
    assert product["mma"].shape_mnk == (16, 8, 16)
    assert product["mma"].c == parse("((4,8),(2,2)):((32,1),(16,8))")


def test_reading_tells_what_it_cannot_read():
    said = []

    @cute.jit
    def evaluate(tensor: cute.Tensor):
        with trace.observing() as seen:
            trace.observe("fixed", cute.make_layout((4, 8)))
        said.append(seen)
        trace.observe("unheard", cute.make_layout(3))
        coordinates = cute.make_identity_tensor((4, 8))
        said.append(trace.read(cute.zipped_divide(coordinates, (2, 4))))
        for value in (tensor, 7):
            try:
                trace.read(value)
            except (ValueError, TypeError) as error:
                said.append(str(error))

    dynamic = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(), 8))
    cute.compile(evaluate, dynamic)
    assert said[0] == {"fixed": Layout((4, 8))}
    axes = Layout(((2, 4), (2, 2)), ((1, 0), (2, 0))), Layout(((2, 4), (2, 2)), ((0, 1), (0, 4)))
    assert said[1] == trace.CoordinateValue(axes)
    assert said[1].shape == ((2, 4), (2, 2)) and said[1]((1, 2), (0, 1)) == (1, 6)
    assert "dynamic value" in said[2] and "^" in said[2]
    assert "cannot read a int" in said[3]


def test_differences_between_drawn_and_traced():
    copy = trace.CopyValue(parse(ROW), parse(ROW), parse(ROW), (4, 256), 16)
    drawn = {"tv": parse(ROW), "smem": Layout((8, 4)), "gone": Layout(3)}
    lines = trace.differences(drawn, {"tv": copy, "smem": Layout((8, 4), (4, 1))})
    assert len(lines) == 2
    assert "smem: drawn as (8,4):(1,8), but the kernel has (8,4):(4,1)" in lines[0]
    assert "gone" in lines[1]
    assert trace.differences({"a": Layout((8, 1))}, {"a": Layout(8)}) == []
