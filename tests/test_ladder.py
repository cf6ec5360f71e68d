"""The ladder without a GPU: sources, layouts, accesses, barriers, memory traffic, arguments."""

import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

import ptx
import pytest
import rungs
import torch
from checking import DTYPES, Guarded, check_softmax
from compiled import accesses

from benchmarks import traffic
from cute_softmax import ladder
from cute_softmax.__main__ import main
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.runtime.resources import registers_of
from layouts import Layout, access
from layouts.trace import CopyValue

FOLDER = Path(ladder.__file__).parent
NUMBERS = [step.number for step in ladder.RUNGS]
every_rung = pytest.mark.parametrize("rung", NUMBERS)
SHAPE = (512, 4096)


def compiled(rung: int, dtype: str, columns: int, architecture: str = "sm_90a", **how):
    """What `cute.compile` made of a rung."""
    return ladder.compile_form(ladder.form_of(rung, dtype, columns, architecture, **how), "--keep-ptx")


@every_rung
def test_each_file_is_a_short_and_whole_kernel(rung):
    path = FOLDER / f"{ladder.RUNGS[rung].module}.py"
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert text.count("@cute.kernel") == 1 and re.search(r"def softmax\(mX.*stream", text)
    assert not re.search(r"^from \.|^import cute_softmax|^from cute_softmax", text, re.M)
    assert f"Rung {rung}: " in text.splitlines()[0]
    assert re.search(rf"THREADS.*\b{ladder.RUNGS[rung].threads}\b|WARP, WARPS = 32, 4", text)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120a"])
@every_rung
def test_every_rung_compiles_without_spills(rung, architecture):
    for dtype, columns in (("bf16", 1001), ("fp32", 1000)):
        form = ladder.form_of(rung, dtype, columns, architecture)
        registers, stack = registers_of(partial(ladder.compile_form, form))
        assert stack == 0, (dtype, columns)
        assert registers * ladder.RUNGS[rung].threads <= ARCHITECTURES[architecture].registers


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("columns", [1, 31, 256, 1001])
@every_rung
def test_results(rung, columns, dtype):
    """The compiled rung, run by its PTX: beside float64, and nothing behind its result is touched."""
    for rows in (True, False)[: 1 + (rung == 0)]:
        x = rungs.ugly(5, columns, DTYPES[dtype], "cpu")
        x = x if rows else x.t().contiguous()
        out = Guarded(x.shape, x.dtype, device="cpu")
        function = compiled(rung, dtype, columns, rows=rows)
        program = ptx.parse(function.__ptx__)
        a_block = {0: 128, 1: 128, 2: 128, 3: 4}.get(rung, 1)
        memory = ptx.Memory([(t.data_ptr(), t.numel() * t.itemsize) for t in (x, out.tensor)])
        # Of the sizes the number of groups is known at the launch alone, and with it the stride between elements.
        tensors = [t.data_ptr() | 5 << 64 | 5 << 96 for t in (x, out.tensor)]
        ptx.Grid(program, memory, (-(-5 // a_block), 1), (1, 1), 49 << 10).run(tensors)
        out.check()
        check_softmax(out.tensor, x, -1 if rows else 0, factor=rungs.factor(rung, x.dtype, x.shape[-1]))


def test_a_long_row_compiles_as_a_short_one_does():
    for form in rungs.long_forms("sm_90a"):
        registers, stack = registers_of(partial(ladder.compile_form, form))
        assert stack == 0 and registers <= 64, form


def test_the_naive_form_compiles_for_columns():
    ptx = compiled(0, "fp32", 1000, rows=False).__ptx__
    assert {kind for kind in accesses(ptx)} == {"ld 4", "st 4"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_widths_of_accesses(dtype):
    size = {"bf16": 2, "fp32": 4}[dtype]
    for step in ladder.RUNGS:
        for columns, width in ((4096, 16), (1001, size), (1002, 2 * size)):
            width = width if step.vectors else size
            found = accesses(compiled(step.number, dtype, columns).__ptx__)
            assert {kind for kind in found if kind[:2] in ("ld", "st")} == {f"ld {width}", f"st {width}"}
    # Tensors that begin off a boundary: narrower, never refused.
    found = accesses(compiled(7, dtype, 4096, base=size).__ptx__)
    assert set(found) == {f"ld {size}", f"st {size}"}


def test_the_compiler_writes_into_a_folder_of_this_process():
    """Rungs are all called `softmax`: a worker beside this one would read what another one compiled."""
    before = set(Path.cwd().glob("*.ptx"))
    compiled(0, "fp32", 64)
    assert set(Path.cwd().glob("*.ptx")) == before
    assert any(Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.ptx"))


def test_barriers():
    """Nine of a tree of eight levels; one where warps use shuffles; none where no block shares a row."""
    counts = {
        n: Counter(re.findall(r"bar\.sync|shfl\.sync\.bfly", compiled(n, "fp32", 1024).__ptx__))
        for n in NUMBERS
    }
    assert [counts[n]["bar.sync"] for n in NUMBERS] == [0, 0, 0, 0, 9, 9, 9, 1]
    assert [counts[n]["shfl.sync.bfly"] for n in NUMBERS] == [0, 0, 0, 10, 0, 0, 0, 16]


@pytest.mark.parametrize("columns", [64, 1000])
@every_rung
def test_layouts_cover_the_tile(rung, columns):
    """Every element of a tile has one thread; a tile is what a block takes in one step."""
    found = traffic.traced(rung, "fp32", columns)
    if "copy" in found:
        assert isinstance(found["copy"], CopyValue) and found["copy"].tiler == (1, 256 * 4)
        tv, tiler = found["copy"].tv, found["copy"].tiler
    else:
        tv, threads = found["tv"], ladder.RUNGS[rung].threads
        assert tv[0].size == threads
        rows = {0: 128, 1: 128, 2: 128, 3: 4}.get(rung, 1)
        tiler = rows, tv.size // rows
        assert columns <= tiler[1] < columns + max(threads // rows, 1)
    assert access.coverage(tv, tiler).exact


def test_rungs_share_the_layouts_that_the_tutorial_draws_once():
    found = {rung: traffic.traced(rung, "bf16", 3000) for rung in NUMBERS}
    assert found[0]["tv"] == found[1]["tv"] == found[2]["tv"] == Layout((128, 3000), (1, 128))
    assert found[3]["tv"] == Layout(((32, 4), 94), ((4, 1), 128))
    assert found[4]["tv"] == found[5]["tv"] == Layout((256, 12), (1, 256))
    assert found[6]["copy"] == found[7]["copy"] and found[6]["copy"].tv == Layout((256, 8), (8, 1))


def test_named_layouts():
    """What the tutorial names: tXcX of shape ((V, M), 1, K), the reduction buffer in order (1, 0, 2)."""
    assert traffic.traced(6, "bf16", 5000)["tXcX"].shape == ((8, 1), 1, 3)
    assert traffic.traced(6, "fp32", 5000)["tXcX"].shape == ((4, 1), 1, 5)
    assert traffic.traced(7, "bf16", 5000)["sR"] == Layout.ordered((1, (8, 1), 2), (1, 0, 2))


@pytest.mark.long
def test_predicted_traffic():
    """Of a warp's 32 lanes: a sector each in rows of their own, two or four sectors side by side, 16 in vectors."""
    elements = SHAPE[0] * SHAPE[1]
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        for step in ladder.RUNGS:
            found = traffic.predict(step.number, dtype, SHAPE)
            vector = 16 // size if step.vectors else 1
            requests = elements // 32 // vector
            sectors = 32 if step.number < 3 else size * vector
            assert found == {
                "load_requests": step.reads * requests,
                "load_sectors": step.reads * requests * sectors,
                "store_requests": step.writes * requests,
                "store_sectors": step.writes * requests * sectors,
            }, (dtype, step)
    with pytest.raises(ValueError, match="no whole number of tiles"):
        traffic.predict(1, "bf16", (100, 4096))


def test_trips_are_those_of_the_code():
    """Loads and stores of an element in the PTX of one step, loops that are unrolled by four and more apart."""
    for step in ladder.RUNGS[5:]:
        found = accesses(compiled(step.number, "fp32", 256 * 4).__ptx__)
        steps = 1 if step.vectors else 4
        assert sorted(found.values()) == [step.reads * steps, step.writes * steps]


def test_arguments():
    x = torch.zeros(4, 8)
    with pytest.raises(TypeError, match="cpu: the ladder takes"):
        ladder.softmax(x, 1)
    for number in (-1, 8, "3"):
        with pytest.raises(ValueError, match="there are rungs 0 to 7"):
            ladder.rung_of(number)
    with pytest.raises(ValueError, match="only rung 0 columns"):
        ladder.form_of(3, "bf16", 10, "sm_90a", rows=False)
    for rung in (5, 6, 7):
        assert ladder.form_of(rung, "fp32", 12288, "sm_90a").columns == 12288
        with pytest.raises(ValueError, match=r"49,156 bytes: rung \d keeps 49,152"):
            ladder.form_of(rung, "fp32", 12289, "sm_90a")


def test_forms_are_few_but_for_lengths():
    assert ladder.form_of(7, "bf16", 4096, "sm_90a").alignment == 16
    assert ladder.form_of(7, "bf16", 4095, "sm_90a").alignment == 2
    assert ladder.form_of(7, "bf16", 4096, "sm_90a", base=8).alignment == 8
    assert ladder.form_of(5, "bf16", 4096, "sm_90a").alignment == 2


def test_command(capsys):
    assert main(["ladder", "3", "100x1000", "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "Rung 3, one warp per row: cute_softmax/ladder/rung3_warp.py" in said
    assert torch.cuda.is_available() or "registers a thread" in said
    assert main(["ladder", "0", "100x1000", "--dim", "0"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["8", "4x8"], "there are rungs 0 to 7"),
        (["3", "4x8", "--dim", "0"], "only rung 0 columns"),
        (["3", "4x8", "--dim", "5"], "dim is 5: a matrix has dimensions 0 and 1"),
        (["three", "4x8"], "'three' is not a valid integer"),
        (["7", "4x100000"], "keeps 49,152"),
        (["7", "4x8x2"], "MxN"),
    ],
)
def test_wrong_commands_end_with_one_line(arguments, words, capsys):
    assert main(["ladder", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


def test_what_the_gpu_tests_compile():
    found = rungs.forms("sm_90a")
    assert len(set(found)) == len(found) == (len(NUMBERS) + 1) * 3 * len(rungs.UGLY)
    assert [(f.rung, f.dtype) for f in rungs.long_forms("sm_90a")] == [
        (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (3, "fp32"), (4, "bf16"), (4, "fp32")
    ]  # fmt: skip
