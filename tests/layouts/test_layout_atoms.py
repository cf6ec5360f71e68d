"""Atoms by name, and layouts of coordinates: as cutlass has them, and from the command line."""

from __future__ import annotations

import pytest

from layouts import LayoutSyntaxError, trace
from layouts.__main__ import main
from layouts.access import coverage
from layouts.atoms import ATOMS, WARPGROUP, Copy, Mma, atom
from layouts.coordinates import parse_coordinates

NAMES = (*ATOMS, *(name.replace("N", str(n), 1) for name in WARPGROUP for n in (8, 24, 256)))


def of_cutlass(name: str):
    """The op that cutlass has for an atom's name, made while tracing."""
    import cutlass
    from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

    types = {"F16": cutlass.Float16, "BF16": cutlass.BFloat16, "F32": cutlass.Float32}
    if "LDSM" in name:
        _, moved, _, order = name.split("_")
        matrices = int(moved.split("x")[1]) // (1 if order == "N" else 2)
        return warp.LdMatrix8x8x16bOp(order == "T", matrices)
    if "TF32" in name:
        return warp.MmaTF32Op((16, 8, 8))
    _, size, kinds, last = name.split("_")
    shape = tuple(map(int, size.split("x")))
    result = types[kinds[:3]]
    operand = types["BF16" if "BF16" in kinds else "F16"]
    if name.startswith("SM80"):
        return warp.MmaF16BF16Op(operand, result, shape)
    source = warpgroup.OperandSource.SMEM if last == "SS" else warpgroup.OperandSource.RMEM
    return warpgroup.MmaF16BF16Op(operand, result, shape, source, OperandMajorMode.K, OperandMajorMode.K)


def read(name: str):
    """An atom of cutlass as plain values, while tracing."""
    import cutlass
    import cutlass.cute as cute

    if "LDSM" in name:
        made = cute.make_copy_atom(of_cutlass(name), cutlass.Float16)
        return trace.read(made.layout_src_tv), trace.read(made.layout_dst_tv)
    return trace.read(cute.make_mma_atom(of_cutlass(name)))


def test_atoms_are_those_of_cutlass(monkeypatch):
    import cutlass.cute as cute

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    seen = {}

    @cute.jit
    def evaluate():
        seen.update({name: read(name) for name in NAMES})

    cute.compile(evaluate)
    assert set(seen) == set(NAMES)
    for name, theirs in seen.items():
        ours = atom(name)
        if isinstance(ours, Mma):
            assert ours.shape_mnk == theirs.shape_mnk
            for mine, other in ((ours.a, theirs.a), (ours.b, theirs.b), (ours.c, theirs.c)):
                assert mine.offsets() == other.offsets(), name
        else:
            source, destination = theirs
            assert ours.destination.offsets() == destination.offsets(), name
            # Of fewer than four matrices, those threads that name an address.
            threads = ours.source.shape[0]
            for t in range(threads):
                assert [ours.source(t, v) for v in range(8)] == [source(t, v) for v in range(8)], name


@pytest.mark.parametrize("name", ATOMS)
def test_every_element_of_an_atom_has_an_owner(name):
    found = atom(name)
    if isinstance(found, Copy):
        tiles = [(found.source, found.tiler), (found.destination, found.tiler)]
    else:
        m, n, k = found.shape_mnk
        tiles = [(found.a, (m, k)), (found.b, (n, k)), (found.c, (m, n))]
    assert all(coverage(tv, tiler).exact for tv, tiler in tiles)


@pytest.mark.parametrize(
    "name, words",
    [
        ("SM80_16x8x32_F32F16F16F32_TN", "no atom"),
        ("SM90_64x12x16_F32F16F16_SS", "multiple of 8 from 8 to 256"),
        ("SM90_64x264x16_F32F16F16_SS", "multiple of 8 from 8 to 256"),
        ("SM90_64x8x16_F16BF16BF16_SS", "no atom"),
        ("SM90_64x8x16_F32F16BF16_SS", "no atom"),
    ],
)
def test_unknown_atoms_are_named(name, words, capsys):
    assert main(["show", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and name in said and words in said and said.count("\n") == 1


def test_atoms_on_the_command_line(tmp_path, capsys):
    assert main(["atoms"]) == 0
    assert capsys.readouterr().out.split() == [*ATOMS, *WARPGROUP]
    assert main(["show", "SM75_U16x8_LDSM_T", "-o", str(tmp_path / "copy.svg")]) == 0
    text = (tmp_path / "copy.svg").read_text()
    assert "registers: ((4,8),(2,4)):((16,1),(8,64))" in text and "SM75_U16x8_LDSM_T" in text
    assert main(["show", "SM80_16x8x16_F32BF16BF16F32_TN", "-o", str(tmp_path / "mma.svg")]) == 0
    assert "MMA atom SM80_16x8x16_F32BF16BF16F32_TN" in (tmp_path / "mma.svg").read_text()
    capsys.readouterr()
    assert main(["explain", "SM80_16x8x8_F32F16F16F32_TN"]) == 0
    assert "B ((4,8),2):((16,1),8)" in capsys.readouterr().out
    assert main(["show", "SM80_16x8x8_F32F16F16F32_TN", "--tile", "16,8"]) == 2


@pytest.mark.parametrize(
    "text, places",
    [
        ("(8,64):(1@0,1@1)", {(3, 5): (3, 5)}),
        ("(_8,_64):(_1@0,_1@1)", {(7, 63): (7, 63)}),
        ("(0,32) o (8,64):(1@0,1@1)", {(3, 5): (3, 37)}),
        ("((2,4),(2,2)):((1@0,1@1),(2@0,4@1))", {((1, 2), (0, 1)): (1, 6)}),
        ("(4,3):(0,2@1)", {(3, 2): (0, 4)}),
    ],
)
def test_coordinates_are_read(text, places):
    value = parse_coordinates(text)
    for place, coordinate in places.items():
        assert value(*place) == coordinate
    assert parse_coordinates(str(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "(8,64):(1@0,1@1",
        "(8,64):(1@0@1,1@1)",
        "(0,0,0) o (8,64):(1@0,1@1) o",
        "S<3,4,3> o 0 o (8,8):(1@0,1@1)",
    ],
)
def test_malformed_coordinates_are_refused(text, capsys):
    with pytest.raises(LayoutSyntaxError):
        parse_coordinates(text)
    assert main(["show", text]) == 2 and capsys.readouterr().err.startswith("error: ")


def test_coordinates_on_the_command_line(tmp_path, capsys):
    assert main(["show", "(0,32) o (2,3):(1@0,1@1)", "-o", str(tmp_path / "f.svg")]) == 0
    text = (tmp_path / "f.svg").read_text()
    assert all(f">({r},{c})<" in text for r in (0, 1) for c in (32, 33, 34))
    capsys.readouterr()
    assert main(["explain", "(8,64):(1@0,1@1)"]) == 0
    assert "512 places, each of which stands for a coordinate of 2 axes" in capsys.readouterr().out
    assert main(["show", "(4096,4096):(1@0,1@1)"]) == 2
    assert "has 16,777,216 coordinates: at most 1,048,576 are enumerated" in capsys.readouterr().err


def test_explorer_of_layouts_and_atoms(tmp_path, capsys):
    page = tmp_path / "page.html"
    names = ["(4,8):(8,1)", "S<2,3,3> o 0 o (8,32):(32,1)", "SM80_16x8x8_F32F16F16F32_TN"]
    assert main(["explorer", *names, "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    assert "3 layouts" in text and text.count('class="x-figure"') == 3


@pytest.mark.parametrize("arguments", [["explain", "(4096,8192)"], ["show", "S<3,3,3> o 0 o (4096,8192)"],
                                       ["show", "(32,8):(8,1)", "--tile", "4096,8192"]])  # fmt: skip
def test_what_is_too_large_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
