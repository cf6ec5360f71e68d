"""The benchmarks' results: rows, files, errors; and the command line that reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from made_up import ROOT, SPEED, made_up, made_up_times

from benchmarks import __main__ as cli
from benchmarks import report, results
from benchmarks.suites import SUITES


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
def test_a_row_names_its_case(suite):
    for case in suite.cases:
        row = json.loads(json.dumps(results.make_row(suite.name, case, "copy", "some-clock", error="no")))
        assert results.key_of(row) == results.Key(case, "some-clock")
        assert row["dim"] == list(case.dim) and ("view" in row) == bool(case.view)


def test_ratio_to_copy_is_of_the_same_cell():
    found = made_up()
    for row in found.rows:
        if "error" not in row:
            assert row["vs_copy"] == pytest.approx(row["gbps"] / SPEED["copy"], abs=1e-4)


def test_no_ratio_without_a_copy_and_times_compare_with_torch():
    rows = [r for r in made_up().rows if r["provider"] != "copy"]
    for row in rows:
        row["vs_copy"] = None if "error" not in row else row.get("vs_copy")
    results.add_ratios(rows)
    assert all(row.get("vs_copy") is None for row in rows)
    times = made_up_times("overhead").rows
    assert {r["provider"]: r["vs_torch"] for r in times}["quack"] == pytest.approx(10.2 / 5.1)


def test_a_file_survives_saving_and_has_the_agreed_form(tmp_path):
    found = made_up()
    path = results.save(found, tmp_path)
    assert path == tmp_path / "h200" / "rows-forward.json"
    data = json.loads(path.read_text())
    assert set(data) == {"header", "rows"}
    assert set(results.HEADER_KEYS) <= set(data["header"])
    for row in data["rows"]:
        assert {"suite", "op", "shape", "dim", "dtype", "provider"} <= set(row)
        assert ("error" in row) != ({"us", "gbps", "vs_copy", "spread"} <= set(row))
        assert isinstance(row["shape"], list) and isinstance(row["dim"], list)
    assert results.load(path) == found
    assert not list(path.parent.glob("*.tmp"))
    other = made_up(cute_softmax=4000.0)
    assert results.load(results.save(other, tmp_path)) == other


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.pop("header"), "header"),
        (lambda d: d["header"].pop("driver"), "driver"),
        (lambda d: d["rows"].clear(), "no rows"),
        (lambda d: d["rows"][3].pop("gbps"), "row 3 lacks"),
        (lambda d: d["rows"][0].update(error="no"), "both"),
        (lambda d: d["rows"][5].update(suite="other"), "row 5 belongs"),
        (lambda d: d["header"].update(gpu=7), "gpu must be a text, got 7"),
        (lambda d: d["rows"].insert(4, "row"), "row 4 must be an object, got 'row'"),
        (
            lambda d: d["rows"][1].update(shape=[4, "x"]),
            r"row 1: shape must be a list of ints, got \[4, 'x'\]",
        ),
        (lambda d: d["rows"][1].update(op=None), "row 1: op must be a text, got None"),
        (lambda d: d["rows"][2].update(us="fast"), "row 2: us must be a positive number, got 'fast'"),
        (lambda d: d["rows"][2].update(us=0), "row 2: us must be a positive number, got 0"),
        (lambda d: d["rows"][2].update(vs_copy=-1.0), "row 2: vs_copy must be a positive number or null"),
        (lambda d: d["rows"][2].update(spread=None), "row 2: spread must be a number, got None"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, message):
    path = results.save(made_up(), tmp_path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        results.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no results file: "),
        ("table", "is no results file: "),
        ("[1]", 'is no results file: a results file is an object of "header" and "rows"'),
        ("{}", 'an object of "header" and "rows"'),
        ('{"header": 1, "rows": [1]}', "header must be an object, and rows a list"),
        (b"\xff\xfe", "is no results file: "),
        (None, "No such file"),
        (".", "Is a directory"),
    ],
)
@pytest.mark.parametrize("command", ["check", "plot", "table"])
def test_what_is_no_results_file_is_one_line(command, text, message, tmp_path, capsys):
    path = tmp_path / "file.json"
    if text == ".":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main([command, str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.out == ""
    assert message in said.err and str(path) in said.err


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("Tesla T4", "tesla-t4")],
)
def test_gpu_folder(name, folder):
    assert results.gpu_folder(name) == folder


def test_the_command_names_no_folder():
    wanted = "python -m benchmarks --suite a --save --quick"
    assert results.command_line(["--suite", "a", "--save", "/some/where", "--quick"]) == wanted
    assert results.command_line(["--suite", "a", "--save=/some/where", "--quick"]) == wanted
    assert results.command_line(["--suite", "a", "--save", "--quick"]) == wanted
    for minutes in (["--minutes", "2"], ["--minutes=2"]):
        assert results.command_line(["--suite", "a", *minutes, "--save", "x", "--quick"]) == wanted


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert results.commit() == "abc"


def test_errors_become_one_line_without_folders():
    text = results.describe(RuntimeError("\n\n/home/me/x/lib.so: cannot do 3/4 of it\nmore"))
    assert text == "RuntimeError: lib.so: cannot do 3/4 of it"
    assert len(results.describe(ValueError("a" * 999))) == 200
    assert results.describe(ModuleNotFoundError("No module named 'x'")).startswith("not installed")
    assert results.describe(AssertionError()) == "AssertionError"


# ---- the command line


def test_list_names_all_suites(capsys):
    assert cli.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUITES) and "; and " in out
    assert all(len(line) < 600 for line in out.splitlines())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--suite is needed"),
        (["--suite", "nonsense"], "nonsense"),
        (["--suite", "overhead", "--providers", "numpy"], "numpy"),
        (["--suite", "overhead", "--shapes", "4xa"], "--shapes"),
        (["--suite", "overhead", "--shapes", "4x4", "--save"], "another folder"),
        (["--suite", "overhead", "--plot"], "--save"),
        (["--suite", "overhead", "--calls", "0"], "--calls"),
        (["--suite", "overhead", "--dtype", "int8"], "int8"),
        (["--suite", ","], "suite: name at least one of rows-forward, "),
        (["--suite", "overhead", "--providers", ""], "provider: name at least one of cute_softmax, "),
        (["--suite", "overhead", "--shapes", ","], "--shapes: name at least one"),
        (["--suite", "overhead", "--shapes", "4x0"], "--shapes: shape '4x0': sizes must be at least 1"),
        (["--suite", "any-dims", "--shapes", "4x8"], "--shapes: 4x8 has no dimension "),
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said
    assert said.startswith("error: ") and said.count("\n") == 1


def test_without_a_gpu_a_run_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--suite", "overhead"]) == 2
    assert "NVIDIA GPU" in capsys.readouterr().err


def test_table_plot_and_check_read_files(tmp_path, capsys):
    good = results.save(made_up(), tmp_path)
    assert cli.main(["table", str(good)]) == 0
    assert cli.main(["table", str(good), "--markdown"]) == 0
    assert "| 32768 x 1024 |" in capsys.readouterr().out
    assert cli.main(["check", str(good)]) == 0
    bad = results.save(made_up("odd-rows", cute_softmax=100.0), tmp_path)
    assert cli.main(["check", str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "pass  rows-forward" in out and "FAIL  odd-rows" in out
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(good), "--out", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "rows-forward.svg").exists()


def test_committed_results_are_readable():
    for path in results.FOLDER.glob("*/*.json"):
        found = results.load(path)
        assert path.stem == found.suite and path.parent.name == results.gpu_folder(found.header["gpu"])
        assert report.tables(found)


def test_a_run_needs_neither_rich_nor_matplotlib():
    code = (
        "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None\n"
        "import benchmarks.__main__ as m, benchmarks.run, benchmarks.requirements\n"
        "sys.exit(m.main(['--list']) or m.main(['plot', 'x.json']) != 2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
