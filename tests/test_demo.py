"""The demo and the command line, as they run without a GPU (and, marked gpu, with one)."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from classes import however_few

from cute_softmax.__main__ import main
from cute_softmax.api import softmax
from cute_softmax.commands import demo
from cute_softmax.commands.classes import NAMES
from cute_softmax.plan import NotPlanned, plan, row_class
from cute_softmax.plan.catalogue import classes, longest_row, of_few_rows, operand_dtypes
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import Operand, canonical
from cute_softmax.runtime import cache, precompile, record
from cute_softmax.runtime.resources import cuobjdump, resources

SM90 = ARCHITECTURES["sm_90a"]


def out_of(capsys, *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_demo_without_a_gpu(no_gpu, tmp_path, capsys):
    said = out_of(capsys, "demo", "64x1000", "--dtype", "bf16", "--out", str(tmp_path / "out"))
    assert said.splitlines()[0].startswith("No GPU here: ")
    assert "Right: no larger than torch's." in said
    for math in ("softmax", "softmax_backward"):
        assert f"{math} of 64 rows of 1000, bf16, for sm_90a" in said
        registers, spilled, shared = re.search(
            rf"^ +{math} +\S+ +(\d+) +(\d+) B +(\d+) B", said, re.M
        ).groups()
        assert 16 <= int(registers) <= 255 and spilled == "0" and int(shared) < 228 << 10
    assert "GB/s" not in said and "µs" not in said
    for folder in (tmp_path / "out" / "softmax", tmp_path / "out" / "softmax_backward"):
        (line,) = (line for line in said.splitlines() if line.startswith(f"{folder}: "))
        named = line.removeprefix(f"{folder}: ").split(", ")
        assert sorted(named) == sorted(p.name for p in folder.iterdir())
        assert {"tv.svg", "predicate.svg", "explorer.html"} <= set(named)


def test_demo_of_columns(no_gpu, tmp_path, capsys):
    said = out_of(capsys, "demo", "300x64", "--dim", "0", "--out", str(tmp_path))
    assert "Right: no larger than torch's." in said and "movement   column" in said
    assert (tmp_path / "softmax" / "explorer.html").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_check_tells_right_from_wrong(dtype, capsys):
    x, dy = (torch.randn(8, 333, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2))
    y = torch.softmax(x, -1)
    dx = softmax.softmax_backward(dy, y)
    assert demo.check(x, dy, y, dx)
    nan = y.clone()
    nan[3, 5] = float("nan")
    for mutant in (torch.zeros_like(y), torch.full_like(y, 1 / 333), y.roll(1, -1), nan, y * 1.02):
        assert not demo.check(x, dy, mutant, dx)
    for mutant in (torch.zeros_like(dx), dx.roll(1, 0), -dx, dx + dx.abs().amax(-1, keepdim=True) / 50):
        assert not demo.check(x, dy, y, mutant)
    assert capsys.readouterr().out.count("WRONG") == 9


def test_a_wrong_result_fails_the_demo(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "softmax", torch.log_softmax)
    assert (
        "WRONG" in capsys.readouterr().out if main(["demo", "8x64", "--out", str(tmp_path)]) == 1 else False
    )


def test_times_become_speeds_and_ratios(monkeypatch, capsys):
    """The table of a GPU's times, from times that are given."""

    def medians(calls):
        results = [call() for call in calls]
        assert all(r.shape == x.shape for r in results)
        assert torch.allclose(results[0], results[1], atol=1e-6)
        return [100.0, 250.0, 95.0]

    monkeypatch.setattr(demo, "medians", medians)
    x, dy = torch.randn(2, 1000, 1000)
    demo.time_all(x, dy, torch.softmax(x, -1))
    said = capsys.readouterr().out
    assert re.search(r"forward +80 GB/s, 100.0 µs +32 GB/s, 250.0 µs +84 GB/s, 95.0 µs +2.50 +0.950", said)
    assert re.search(r"backward +120 GB/s, 100.0 µs +48 GB/s, 250.0 µs +126 GB/s, 95.0 µs +2.50 +0.950", said)
    assert "50 µs" not in said
    monkeypatch.setattr(demo, "medians", lambda calls: [10.0, 20.0, 9.0])
    demo.time_all(x, dy, x)
    assert "Below about 50 µs" in capsys.readouterr().out


def test_explain(no_gpu, capsys):
    assert "softmax of 4096 rows of 8192, bf16, for sm_90a" in out_of(capsys, "explain", "4096x8192")
    backward = out_of(capsys, "explain", "4096x8192", "--backward", "--dtype", "fp32")
    assert backward.startswith("softmax_backward of 4096 rows of 8192, fp32")
    assert "32 rows of 200" in out_of(capsys, "explain", "32x10x20", "--dim", "1,2")
    assert "20 groups of 320" in out_of(capsys, "explain", "32x10x20", "--dim", "0,1")
    assert "exchange states in global memory" in out_of(capsys, "explain", "1x10000000")
    assert "movement   column" in out_of(capsys, "explain", "4096x8192", "--dim", "0")
    assert "20 groups of 320" in out_of(capsys, "explain", "32x20x10", "--dim", "0,2")


@pytest.mark.parametrize("shape", ["0x8", "8x0", "0x8x4", "0"])
@pytest.mark.parametrize("more", [[], ["--backward"], ["--dim", "0"]])
def test_explain_says_in_one_line_that_an_empty_tensor_launches_nothing(shape, more, no_gpu, capsys):
    said = out_of(capsys, "explain", shape, *more)
    assert said.startswith("softmax of an empty tensor, (") and said.endswith(": nothing is launched\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            [command, "64x64", "--dtype", dtype],
            f"Invalid value for '--dtype': '{dtype}' is not one of 'bf16', 'fp16',",
        )
        for command in ("explain", "demo", "diagrams")
        for dtype in ("int64", "bool", "fp64")
    ]
    + [
        (["explain"], "error: Missing argument 'SHAPE'. See 'cute-softmax explain --help'."),
        (["explain", "4096xN"], "a shape is written 4096x8192, not '4096xN'"),
        (["explain", "64x64", "--dtpye", "fp32"], "No such option '--dtpye'"),
        (["frobnicate"], "error: No such command 'frobnicate'. See 'cute-softmax --help'."),
        (["completion"], "Choose from: bash, zsh, fish. See"),
        (["explain", "4096x8192", "--dim", "5"], "dim=5 is out of range"),
        (["explain", "4096x8192", "--dim", "0,0"], "names a dimension twice"),
        (["explain", "1x3000000000"], "3000000000 elements in a group: at most"),
        (["explain", "3000000000x8", "--dim", "1", "--dim", "0"], "24000000000 elements in a group: at most"),
        (["explain", "8x3000000000", "--dim", "0"], "3000000000 groups: at most"),
        (["explain", "99999999999x4096"], "99999999999 CTAs: at most"),
        (
            ["explain", "4x999999999999999999"],
            "shape (4, 999999999999999999) has 3999999999999999996 elements",
        ),
        (["explain", "999999999999999999x4", "--backward"], "has 3999999999999999996 elements: at most"),
        (["explain", "9999999999x9999999999", "--dim", "0"], "elements: at most"),
        (["explain", "0x9999999999999999999"], "elements: at most"),
        (["explain", "4x999999999999999999", "--topk", "1"], "elements: at most"),
        (["explain", "4x8", "--bias", "99999999999999999999x8"], "elements: at most"),
        (["explain", "4x8", "--mask", "999999999999999999x8"], "elements: at most"),
        (["explain", "9999999999x64", "--matmul", "128"], "9999999999 rows: at most"),
        (["explain", "4096x64", "--matmul", "9999999999"], "9999999999 columns of V: at most"),
        (["explain", "3000000000x64", "--matmul", "64", "--backward"], "3000000000 rows: at most"),
        (["explain", "4096x64", "--matmul", "0"], "0 columns of values: all must be at least 1"),
        (["explain", "64", "--matmul", "64"], "scores have at least two dimensions"),
        (["explain", "64x64", "--matmul", "64", "--dim", "0"], "without --dim"),
        (["explain", "64x64", "--matmul", "64", "--dtype", "fp32"], "values in fp32 take two steps"),
        (["demo", "4096"], "the demo takes MxN of at least 1x1, not 4096"),
        (["demo", "0x8"], "not 0x8"),
        (["demo", "64x64", "--dim", "7"], "dim=7 is out of range"),
        (["demo", "1000000x1000000"], "the demo of 1000000x1000000 takes 32,000.0 GB of memory"),
        (["diagrams", "8x3000000000"], "counted in 32 bits"),
        (["diagrams", "3000000000x64", "--matmul", "128"], "3000000000 rows: at most"),
        (["diagrams", "0x8"], "0x8 is empty: nothing is launched, nothing is drawn"),
        (["diagrams", "64x64", "--two-pass", "--backward"], "--two-pass is a way of the softmax alone"),
        (["diagrams", "64x64", "--two-pass", "--matmul", "64"], "--two-pass is a way of the softmax alone"),
        (["diagrams", "64x64", "--dim", "0", "--matmul", "64"], "without --dim"),
        (["diagrams", "64x64", "--thread", "-1"], "thread must be 0 to "),
        (["diagrams", "64x64", "--dim", "3"], "dim=3 is out of range"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, words, no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = out_of(capsys, *arguments, status=2)
    assert said.startswith("error: ") and words in said and said.count("\n") == 1


@pytest.mark.parametrize("folder", ["relative", __file__])
def test_what_cannot_be_kept_is_not_compiled(folder, no_gpu, monkeypatch, capsys):
    monkeypatch.setenv(cache.ENVIRONMENT, folder)
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", lambda *_: pytest.fail("compiled in vain"))
    said = out_of(capsys, "precompile", status=2)
    assert said.startswith("error: ") and folder in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["explain", "4096xN"], "a shape is written 4096x8192, not '4096xN'"),
        (["explain", "4096x-1"], "not '4096x-1'"),
        (["explain", "8x8", "--dim", "x"], "dimensions are written -1 or 0,2, not 'x'"),
        (["explain", "8x8", "--matmul", "x"], "Invalid value for '--matmul': 'x' is not a valid integer"),
        (["demo", "-1x8"], "No such option '-1'"),
        (["diagrams", "100x"], "a shape is written 4096x8192, not '100x'"),
        (["classes", "--arch", "sm_70"], "Invalid value for '--arch': 'sm_70' is not one of"),
        (["cache", "empty"], "'empty' is not one of 'path', 'list', 'clear'"),
        (['frob'], "No such command 'frob'"),
        *(
            ([command, *shape, "--dtype", dtype], f"Invalid value for '--dtype': '{dtype}' is not one of")
            for command, *shape in (
                ["explain", "8x8"], ["demo", "8x8"], ["diagrams", "8x8"], ["classes"], ["precompile"]
            )
            for dtype in ("int64", "bool", "float64")
        ),
    ],
)  # fmt: skip
def test_malformed_arguments_are_refused(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("math", NAMES)
@however_few()
def test_classes_follow_each_other_without_a_gap(arch, dtype, math):
    dtypes, architecture = operand_dtypes(math, dtype), ARCHITECTURES[arch]
    listed = list(classes(math, architecture, dtypes))
    assert len({c.name for c in listed}) == len(set(listed)) == len(listed)
    ragged = [replace(c, edges=True) for c in listed if c.movement == "row" and c.vector > 1]
    assert list(classes(math, architecture, dtypes, edges=True)) == ragged
    lengths = [0, *map(longest_row, listed)]
    assert lengths == sorted(set(lengths))
    for c, before, last in zip(listed, lengths, lengths[1:], strict=False):
        for columns in (before + 1, last):
            facts = listed[0].facts
            operands = [Operand(dtype, (columns, 1))] * facts.full
            operands += [Operand(d, (1, 0)) for d in dtypes[facts.full :]]
            problem = canonical((500, columns), (1,), operands)  # of fewer there are others, and of more
            got = plan(math, problem, replace(H200, architecture=architecture)).kernel
            assert got == (c if c.movement == "short" else replace(c, edges=columns % c.vector > 0))
    with pytest.raises(NotPlanned):
        row_class(math, architecture, dtypes, lengths[-1] + 1, edges=False, access=listed[-1].access)


def test_a_handful_of_classes_serves_a_million_columns():
    listed = list(classes("softmax", SM90, operand_dtypes("softmax", "bf16")))
    assert len(listed) <= 48 and longest_row(listed[-1]) >= 1_000_000


def test_classes_command_lists_them_all(no_gpu, capsys):
    said = out_of(capsys, "classes", "--arch", "sm_80", "--dtype", "fp32")
    for math in NAMES:
        for c in classes(math, ARCHITECTURES["sm_80"], operand_dtypes(math, "fp32")):
            assert re.search(rf"^{math} +{c.name} +{longest_row(c):,} ", said, re.M)
    assert "\nsm_80, fp32." in said
    said = out_of(capsys, "classes")
    assert "\nsm_90a, bf16." in said
    few = of_few_rows("softmax", SM90, operand_dtypes("softmax", "bf16"))
    assert len(few) == 12 and all(f"softmax           {c.name} " in said for c in few)


@pytest.mark.parametrize("dtype", ["int64", "bool", "fp64"])
def test_other_dtypes_have_no_kernels(dtype, tmp_path):
    with pytest.raises(TypeError, match=f"no kernels for dtype '{dtype}'"):
        operand_dtypes("softmax", dtype)
    with pytest.raises(TypeError, match=f"no kernels for dtype '{dtype}'"):
        demo.run((8, 8), dtype, tmp_path)


def test_resources_are_those_of_the_kernel():
    (small, *_, large) = classes("softmax", SM90, operand_dtypes("softmax", "bf16"))
    few, many = resources(small), resources(large)
    assert 16 <= few.registers < many.registers <= 128  # 512 threads share 65,536 registers
    assert few.stack == many.stack == 0
    assert (few.shared_memory, many.shared_memory) == (small.shared_memory, large.shared_memory)


def test_missing_cuobjdump_is_named(monkeypatch):
    cuobjdump.cache_clear()
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-cuobjdump"):
        cuobjdump()
    cuobjdump.cache_clear()


@pytest.mark.long
def test_precompiled_classes_are_in_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    wanted = list(classes("softmax", SM90, operand_dtypes("softmax", "bf16")))[:3]
    assert list(precompile.precompile(wanted)) == wanted
    assert len(cache.Store().entries()) == 3
    assert list(precompile.precompile([])) == []


def test_precompile_command(tmp_path, monkeypatch, no_gpu, capsys):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    asked = []
    monkeypatch.setattr(precompile, "precompile", lambda wanted: asked.extend(wanted) or iter(wanted))
    said = out_of(capsys, "precompile", "--dtype", "fp16,fp32", "--arch", "sm_89")
    assert said == f"{len(asked)} kernels for sm_89 in {tmp_path / 'store'}\n"
    assert {c.dtypes[0] for c in asked} == {"fp16", "fp32"} and {c.architecture for c in asked} == {"sm_89"}
    assert {c.math for c in asked} == set(NAMES) and {c.edges for c in asked if c.movement == "row"} == {
        False,
        True,
    }
    assert {c.movement for c in asked} == {"row", "short", "stream"}


def test_precompile_what_a_program_used(tmp_path, monkeypatch, capsys):
    path = tmp_path / "used"
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    monkeypatch.setenv(record.ENVIRONMENT, str(path))
    used = list(classes("softmax", SM90, operand_dtypes("softmax", "fp16")))[:3]
    for c in (*used, used[0]):
        record.note(c)
    monkeypatch.setattr(precompile, "precompile", lambda wanted: iter(wanted))
    said = out_of(capsys, "precompile", "--recorded", str(path))
    assert said == f"3 kernels for sm_90a in {tmp_path / 'store'}\n"
    out_of(capsys, "precompile", "--recorded", str(tmp_path / "none"), status=2)
    path.write_text(path.read_text() + "[]\n")
    out_of(capsys, "precompile", "--recorded", str(path), status=2)


def test_cache_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    assert out_of(capsys, "cache", "path") == f"{tmp_path / 'store'}\n"
    assert " 0 kernels " in out_of(capsys, "cache")
    assert out_of(capsys, "cache", "clear").startswith("0 kernels removed")


def test_diagrams_command(tmp_path, capsys):
    said = out_of(capsys, "diagrams", "64x1000", "-o", str(tmp_path))
    assert str(tmp_path / "tv.svg") in said and (tmp_path / "explorer.html").exists()


def test_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "cute_softmax", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("demo", "explain", "diagrams", "classes", "precompile", "cache"):
        assert re.search(rf"^ +{command}\b", done.stdout, re.M)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_demo_with_a_gpu(tmp_path, capsys):
    said = out_of(capsys, "demo", "4096x8192", "--out", str(tmp_path))
    assert said.splitlines()[0].startswith(torch.cuda.get_device_name())
    assert "Right: no larger than torch's." in said
    for label in ("forward", "backward"):
        assert re.search(rf"^ +{label} +\d+ GB/s, [\d.]+ µs +\d+ GB/s", said, re.M)
    assert list(tmp_path.glob("**/*.svg"))
