"""`cute-softmax`: what it reads before torch is loaded, what it explains, and what it says of this machine."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import cute_softmax
from cute_softmax.__main__ import main
from cute_softmax.commands import checkout, info
from cute_softmax.commands.line import line
from cute_softmax.plan import plan_call
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.runtime import cache, compile, neighbours

ROOT = Path(__file__).resolve().parents[1]
# Seconds of the processor for a command line that loads neither torch nor cutlass: the interpreter starts in them, and
# in a new clone it compiles the modules.
QUICK = 0.5


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def said(capsys, *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert not (captured.err if status == 0 else captured.out)
    return captured.out + captured.err


def in_new_process(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["--version"], 0),
        (["--help"], 0),
        (["explain", "--help"], 0),
        (["completion", "bash"], 0),
        (["frobnicate"], 2),
        (["explain", "4096xN"], 2),
        (["explain", "8x8", "--op", "amax", "--mask", "8x8"], 2),
        (["demo", "4096"], 2),
        (["precompile", "--dtype", "fp64"], 2),
        (["bench", "--nonsense"], 2),
        (["bench", "map", "--nonsense"], 2),
        (["tune", "--minutes", "many"], 2),
    ],
)
def test_what_needs_no_kernel_loads_neither_torch_nor_cutlass(arguments, status):
    code = (
        "import sys, time\nfrom cute_softmax.__main__ import main\n"
        f"status = main({arguments!r})\n"
        "assert not {'torch', 'cutlass', 'drawsvg', 'rich'} & {*sys.modules}\n"
        f"assert time.process_time() < {QUICK}, time.process_time()\nsys.exit(status)"
    )
    done = in_new_process(code)
    assert done.returncode == status, done.stderr


def test_both_names_are_one_command():
    version = f"cute-softmax {cute_softmax.__version__}\n"
    module = subprocess.run(
        [sys.executable, "-m", "cute_softmax", "--version"], capture_output=True, text=True
    )
    assert module.stdout == version
    assert in_new_process(
        "import sys; sys.argv = ['cute-softmax', '--version']; from cute_softmax.__main__ import main; main()"
    ).stdout == version  # fmt: skip


def test_without_click_one_line_says_what_to_install():
    done = in_new_process(
        "import sys; sys.modules['click'] = None\nfrom cute_softmax.__main__ import main; sys.exit(main(['info']))"
    )
    assert done.returncode == 2
    assert done.stderr == "error: the command line needs click: pip install 'cute-softmax[cli]'\n"


@pytest.mark.parametrize(
    "library, arguments, extra",
    [("drawsvg", ["diagrams", "8x64"], "draw"), ("rich", ["demo", "8x64"], "cli")],
)
def test_without_a_library_one_line_says_what_to_install(library, arguments, extra, tmp_path):
    done = in_new_process(
        f"import os, sys; sys.modules[{library!r}] = None\nfrom cute_softmax.__main__ import main\n"
        f"os.chdir({str(tmp_path)!r}); sys.exit(main({arguments!r}))"
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert library in done.stderr and f"pip install 'cute-softmax[{extra}]'" in done.stderr


def test_every_command_has_words_that_fit_its_line():
    assert {*line.commands} == {
        "bench", "cache", "classes", "completion", "demo", "diagrams", "explain", "info", "ladder", "precompile", "tune"
    }  # fmt: skip
    assert all(command.get_short_help_str(limit=64)[-3:] != "..." for command in line.commands.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_the_shell_s_script(shell, capsys):
    script = said(capsys, "completion", shell)
    assert "_CUTE_SOFTMAX_COMPLETE" in script and "cute-softmax" in script


def test_completion_offers_what_there_is(monkeypatch):
    def offered(words: str) -> set[str]:
        environment = {
            "_CUTE_SOFTMAX_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        command = [sys.executable, "-m", "cute_softmax"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        return {row.partition(",")[2] for row in done.stdout.splitlines()}

    assert offered("cute-softmax in") == {"info"}
    assert offered("cute-softmax explain 8x8 --arch sm_10") == {"sm_100a", "sm_103a"}
    assert offered("cute-softmax precompile --dtype fp") == {"fp16", "fp32"}


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_explain_for_an_architecture(arch, capsys):
    assert f"softmax of 4096 rows of 8192, bf16, for {arch}\n" in said(
        capsys, "explain", "4096x8192", "--arch", arch
    )


@pytest.mark.parametrize(
    "words, lines",
    [
        ("4096x8192 --op log_softmax", ["log_softmax of 4096 rows of 8192, bf16"]),
        ("4096x8192 --op log_softmax --backward --dtype fp32", ["log_softmax_backward of 4096 rows of 8192, fp32"]),
        ("4096x8192 --op logsumexp", ["logsumexp of 4096 rows of 8192", "one result written per row"]),
        ("4096x8192 --op logsumexp --backward", ["softmax of 4096 rows", "results times one number per row"]),
        ("4096x8192 --op amax --dim 0", ["amax of 8192 groups of 4096"]),
        ("16x64x64 --op sum --dim 0,2", ["sum of 64 groups of 1024"]),
        ("4096x8192 --op entropy --scale 0.5", ["entropy of 4096 rows", "scores times a number"]),
        ("4096x8192 --op selective_log_softmax", ["selective of 4096 rows", "bf16 -> fp32"]),
        ("4096x8192 --op cross_entropy", ["logsumexp of 4096 rows", "the cross entropy of each row"]),
        ("4096x8192 --op cross_entropy --backward", ["one less at the target"]),
        ("4096x8192 --op entropy --backward", ["softmax of 4096 rows", "the gradient of the entropies added"]),
        ("4096x8192 --op kl_div", ["logsumexp of 4096 rows", "the divergence of another softmax from it"]),
        ("4096x8192 --op kl_div --backward", ["the gradient of a divergence in its input"]),
        ("4096x151936 --topk 8 --op log_softmax", ["the 8 largest of 4096 rows", "most8"]),
        ("4096x8192 --op cross_entropy --dim 0", ["composed: logsumexp", "entropy of 8192 groups of 4096"]),
        ("64x4096 --scale 0.5", ["scores times a number"]),
        ("64x4096 --scale 64x1 --bias 1x4096", ["scores times one number per row; a bias added"]),
        ("8x64x4096 --sink 8x1x1 --backward", ["an extra score per row in the sum"]),
        ("16x64x4096 --mask 16x1x4096 --empty-rows zero", ["masked; zeros in empty rows"]),
        ("16x128x128 --causal 0 --alpha 2", ["causal; results times a number", "before the diagonal read once"]),
        ("64x4096 --dim 0 --scale 0.5", ["softmax of 4096 groups of 64", "scores times a number"]),
        ("0x64 --op amax", ["amax of an empty tensor, (0, 64): nothing is launched"]),
        ("32x512x512 --matmul 64", ["softmax(S) @ V, S 32 x 512 x 512, D 64"]),
        ("32x512x512 --matmul 64 --scale 0.5 --causal 0", ["_causal_scaled"]),
        ("32x512x512 --matmul 64 --arch sm_80", ["for sm_80"]),
        ("4096x75968 --ranks 2", ["softmax of rows shared by 2 ranks: slices stay on chip", "_ranks_256x8"]),
        ("4096x75968 --ranks 2 --backward", ["4 bytes per row from each", "softmax_backward of 4096 rows"]),
        ("4096x75968 --ranks 2 --op log_softmax --backward --dtype fp32", [": one all-gather", "sum of 4096 rows"]),
        ("75968x64 --dim 0 --ranks 2 --op logsumexp", ["8 bytes per row from each", "of 64 rows of 75968"]),
        ("4096x75968 --ranks 3 --op entropy", ["shared by 3 ranks: one all-gather", "12 bytes per row from each"]),
        ("4096x75968 --ranks 2 --op selective_log_softmax", ["read before it, first", "selective of 4096 rows"]),
        ("4096x75968 --ranks 2 --op entropy --backward", ["needs no collective: one kernel"]),
        ("4096x75968 --ranks 2 --op cross_entropy", [": one all-gather", "12 bytes per row", "read before it, first"]),
        ("4096x75968 --ranks 2 --op cross_entropy --backward", ["stay on chip", "the cross entropy of each row"]),
        ("4096x75968 --ranks 2 --op cross_entropy --backward --dtype fp32", [": one all-gather", "before and after"]),
        ("4x3000000 --ranks 2", ["no kernel writes the states: they are composed (logsumexp"]),
        ("4096x75968 --ranks 1", ["shared by 1 ranks: one all-gather"]),
        ("4096x0 --ranks 2", ["nothing is launched for an empty slice"]),
    ],
)  # fmt: skip
def test_explain_of_each_kind_of_call(words, lines, capsys):
    text = said(capsys, "explain", *words.split())
    assert all(line in text for line in lines), text


@pytest.mark.parametrize(
    "op, backward",
    [
        (op, b)
        for op in ("entropy", "selective_log_softmax", "cross_entropy", "kl_div", "logsumexp")
        for b in (False, True)
    ],
)
def test_the_plan_of_a_head_is_the_one_that_its_call_gets(op, backward, launches, monkeypatch, capsys):
    """The class that `explain` names is among those that the function launches on such a tensor."""
    from cute_softmax.runtime import launch

    classes = []

    def planned(*arguments, **options):
        made = plan_call(*arguments, **options)
        classes.append(made.kernel.name)
        return made

    monkeypatch.setattr(launch, "plan_call", planned)
    x = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=bool(backward))
    index = torch.randint(1000, (64,))
    call = {
        "entropy": lambda: cute_softmax.entropy(x),
        "selective_log_softmax": lambda: cute_softmax.selective_log_softmax(x, index),
        "cross_entropy": lambda: cute_softmax.cross_entropy(x, index),
        "kl_div": lambda: cute_softmax.kl_div(x, x.detach()),
        "logsumexp": lambda: cute_softmax.logsumexp(x, -1),
    }[op]
    result = call()
    if backward:
        result.sum().backward()
    named = said(capsys, "explain", "64x1000", "--op", op, *(["--backward"] if backward else []))
    assert any(f"class {name}\n" in named for name in classes), (classes, named)


@pytest.mark.parametrize(
    "words, told",
    [
        ("8x8 --op amax --mask 8x8", "--op amax has no --mask"),
        ("8x8 --op entropy --empty-rows zero", "--op entropy has no --empty-rows"),
        ("8x8 --op entropy --scale 8x1", "--op entropy takes a number as --scale"),
        ("8x8 --op sum --backward", "the gradient of sum has no kernel of its own"),
        ("8x8 --matmul 8 --op entropy", "without --op entropy"),
        ("8x8 --topk 2 --op entropy", "--topk is over the last dimension"),
        ("8x8 --topk 2 --op log_softmax --backward", "that of selective_log_softmax"),
        ("8x8 --matmul 8 --mask 8x8", "without --mask"),
        ("8x8 --matmul 8 --scale 8x1", "a number as --scale"),
        ("8x8 --mask 7x8", "mask has shape (7, 8), which does not broadcast"),
        ("8x8 --dim 0 --causal 0", "causal needs queries in dimension -2"),
        ("8x8 --ranks 2 --op amax", "amax takes no group"),
        ("8x8 --ranks 2 --dim 0,1", "ranks share rows over one dimension"),
        ("8x8 --ranks 2 --mask 8x8", "and nothing else of scores"),
        ("8x8 --ranks 2 --scale 8x1", "a number as --scale"),
        ("8x8 --ranks 2 --matmul 8", "without --matmul"),
    ],
)
def test_what_does_not_go_together_is_one_line(words, told, capsys):
    text = said(capsys, "explain", *words.split(), status=2)
    assert text.startswith("error: ") and told in text and text.count("\n") == 1


def test_diagrams_of_other_operations(tmp_path, capsys):
    text = said(capsys, "diagrams", "64x1000", "--op", "entropy", "--arch", "sm_80", "-o", str(tmp_path))
    assert (
        "entropy of 64 rows of 1000" in text and "for sm_80" in text and (tmp_path / "explorer.html").exists()
    )


def test_diagrams_of_what_has_no_figures_is_one_line(tmp_path, capsys):
    words = ("diagrams", "64x1000", "--topk", "8", "--op", "log_softmax", "-o", str(tmp_path))
    text = said(capsys, *words, status=2)
    assert text.startswith("error: ") and "has no figures" in text and text.count("\n") == 1


# -- The benchmarks ----------------------------------------------------------------------------------------------------


def test_benchmarks_of_a_checkout_run(capsys):
    assert "rows-forward: softmax over rows" in said(capsys, "bench", "--list")
    assert "softmax" in said(capsys, "tune", "--list")


def test_benchmarks_outside_a_checkout_are_an_error(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="get a checkout"):
        checkout.benchmarks(["--list"], tmp_path)


# -- info --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    return tmp_path / "store"


def test_info_without_a_gpu(store, monkeypatch, capsys):
    monkeypatch.setattr(info, "DRIVER", store)  # absent
    text = said(capsys, "info")
    assert f"{cute_softmax.__version__} in {ROOT / 'cute_softmax'}" in text
    assert metadata.version("torch") in text and f"0 kernels, 0 bytes in {store}" in text
    assert "works for sm_90a" in text and "stored and loaded in" in text and "No fault found." in text


def test_what_a_version_switches_off(monkeypatch):
    """Torch's own operators in the CuTe DSL are registered for some versions of it alone, and by builds with CUDA."""
    taken = {"4.10.0", "4.8.0", "4.7.1"}
    monkeypatch.setattr(neighbours, "look_up", lambda name: taken)
    monkeypatch.setattr(neighbours.metadata, "version", lambda name: "4.8.1")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    said = "it takes cutlass-dsl 4.7.1, 4.8.0, 4.10.0, and this is 4.8.1"
    assert neighbours.switched_off().endswith(said)
    assert cute_softmax.explain((64, 1000)).splitlines()[-1].endswith(said)
    monkeypatch.setenv("TORCH_NATIVE_SKIP_VERSION_CHECK", "1")
    assert neighbours.switched_off() == ""
    monkeypatch.delenv("TORCH_NATIVE_SKIP_VERSION_CHECK")
    taken.add("4.8.1")
    assert neighbours.switched_off() == "" and "beside" not in cute_softmax.explain((64, 1000))
    monkeypatch.setattr(neighbours, "look_up", lambda name: None)
    assert neighbours.switched_off() == ""


def test_info_tells_each_fault_with_a_hint(store, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no\ncompiler")

    driver = store.parent / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 1\n")
    monkeypatch.setattr(info, "DRIVER", driver)
    monkeypatch.setattr(compile, "compile_class", broken)
    monkeypatch.setattr(info, "required", lambda: {"torch": ">=1,<2", "no-such-package": ">=1,<2"})
    store.write_text("a file")
    text = said_with_faults(capsys)
    for words in (
        "no-such-package     missing\n", "-> pip install 'no-such-package>=1,<2'",
        "it must be >=1,<2", "a folder of your own", "failed for sm_90a: RuntimeError: no compiler\n",
        "5 faults found.",
    ):  # fmt: skip
        assert words in text, text
    if torch.version.cuda is None:
        assert "this torch is built without CUDA" in text


def said_with_faults(capsys) -> str:
    assert main(["info"]) == 1
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "version, bounds, right",
    [
        ("2.13.0+cpu", ">=2.8,<3", True),
        ("2.7.1", ">=2.8,<3", False),
        ("3.0", ">=2.8,<3", False),
        ("0.1.15.post2", ">=0.1.15.post2,<0.2", True),
        ("0.1.15", ">=0.1.15.post2,<0.2", False),
        ("4.8.1", "", True),
    ],
)
def test_bounds_of_versions(version, bounds, right):
    assert info.within(version, bounds) is right


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_info_with_a_gpu(store):
    done = subprocess.run(
        [sys.executable, "-m", "cute_softmax", "info"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout
    assert torch.cuda.get_device_name() in done.stdout
    assert all(f"{name} agrees with float64" in done.stdout for name in ("bf16", "fp16", "fp32"))
