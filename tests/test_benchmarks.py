"""The benchmarks' pure parts on any machine; their clocks and providers on a GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import cases, console, operations, providers, report, requirements, results, run, timing
from benchmarks.cases import PROVIDERS, SUITES, Case

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

HEADER = {
    "gpu": "NVIDIA H200",
    "driver": "580.0",
    "torch": "2.11.0",
    "cutlass_dsl": "4.8.1",
    "commit": "0123456789ab",
    "date": "2026-11-20T12:00:00Z",
    "command": "python -m benchmarks --suite rows-forward --save",
}

# GB/s of a made-up machine: ours is the best but for one shape, liger refuses the longest rows.
SPEED = {"cute_softmax": 4100.0, "copy": 4150.0, "torch": 1500.0, "torch.compile": 1800.0, "quack": 4000.0}


def made_up(suite: str = "rows-forward", **speed: float) -> results.Results:
    """Results of a device suite as a run would give them."""
    rows = []
    for case in SUITES[suite].cases:
        for name in SUITES[suite].providers:
            gbps = {**SPEED, "liger": 3900.0, "cudnn": 1000.0, **speed}[name]
            if name == "liger" and case.shape[-1] > 65536:
                error = "RuntimeError: Cannot launch Triton kernel"
                rows.append(results.make_row(suite, case, name, "events-cold", error=error))
                continue
            us = case.traffic / gbps / 1e3
            rows.append(results.make_row(suite, case, name, "events-cold", us=us, gbps=gbps, spread=0.004))
    results.add_ratios(rows)
    return results.Results(dict(HEADER), rows)


def made_up_times(suite: str, **us: float) -> results.Results:
    """Results of a host or process suite."""
    times = {"cute_softmax": 5.0, "torch": 5.1, "torch.compile": 25.1, "liger": 16.0, "quack": 10.2, **us}
    method = {"host": "host-clock", "process": "fresh-process"}[SUITES[suite].kind]
    rows = [
        results.make_row(suite, case, name, method, us=times[name], spread=0.01)
        for case in SUITES[suite].cases
        for name in SUITES[suite].providers
    ]
    results.add_ratios(rows)
    return results.Results(dict(HEADER), rows)


# ---- cases


def test_the_seed_shapes_are_all_there():
    shapes = {case.shape for case in SUITES["rows-forward"].cases}
    assert len(shapes) == 13
    assert {(32768, 1024), (32768, 6144), (8192, 8192), (4096, 8192), (4096, 131072)} <= shapes


def test_traffic_counts_every_input_and_output_once():
    assert Case("softmax", (4, 8), "bf16").traffic == 2 * 4 * 8 * 2
    assert Case("softmax_backward", (4, 8), "fp32").traffic == 3 * 4 * 8 * 4


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
def test_suites_are_made_of_known_parts(suite):
    assert suite.cases and len(set(suite.cases)) == len(suite.cases)
    assert set(suite.providers) <= set(PROVIDERS) and "cute_softmax" in suite.providers
    for case in suite.cases:
        assert case.op in operations.OPERATIONS and case.op in cases.STREAMS
        # Inputs, output and the check's copies fit a GPU of 40 GB.
        assert case.traffic < 20e9
    assert {r.suite for r in requirements.REQUIREMENTS} <= set(SUITES)


def test_another_dtype_is_another_suite_but_for_fixed_ones():
    forward = SUITES["rows-forward"].with_dtype("fp16")
    assert forward.name == "rows-forward-fp16" and {c.dtype for c in forward.cases} == {"fp16"}
    assert SUITES["rows-forward"].with_dtype("bf16") == SUITES["rows-forward"]
    fixed = SUITES["fp32-rows"].with_dtype("bf16")
    assert fixed.name == "fp32-rows" and {c.dtype for c in fixed.cases} == {"fp32"}
    assert report.suite_title("rows-forward-fp16") == SUITES["rows-forward"].title


def test_other_shapes_keep_the_modes_of_a_suite():
    suite = SUITES["overhead"].with_shapes([(2, 3), (4, 5)])
    assert len(suite.cases) == 6 and len({c.mode for c in suite.cases}) == 3


@pytest.mark.parametrize("text", ["", "4x", "0x4", "4xfour", "-1x2"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError):
        cases.parse_shape(text)


def test_shapes_parse():
    assert cases.parse_shape("4096x8192") == (4096, 8192)


# ---- results


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


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert results.commit() == "abc"


def test_errors_become_one_line_without_folders():
    text = results.describe(RuntimeError("\n\n/home/me/x/lib.so: cannot do 3/4 of it\nmore"))
    assert text == "RuntimeError: lib.so: cannot do 3/4 of it"
    assert len(results.describe(ValueError("a" * 999))) == 200
    assert results.describe(ModuleNotFoundError("No module named 'x'")).startswith("not installed")
    assert results.describe(AssertionError()) == "AssertionError"


# ---- checks against float64

SMALL = [
    Case("softmax", (8, 256)),
    Case("softmax", (8, 1023), "fp16"),
    Case("softmax", (6, 4096), "fp32"),
    Case("softmax", (64, 9), dim=(0,)),
    Case("softmax", (2, 3, 4), dim=(0, 2)),
    Case("softmax_backward", (8, 256)),
    Case("softmax_backward", (8, 1023), "fp16"),
    Case("softmax_backward", (6, 4096), "fp32"),
    Case("softmax_backward", (64, 9), dim=(0,)),
]


def exact(case: Case, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result in float64, rounded once."""
    wide = [t.double() for t in inputs]
    if case.op == "softmax":
        e = (wide[0] - wide[0].amax(case.dim, True)).exp()
        y = e / e.sum(case.dim, True)
    else:
        y = wide[1] * (wide[0] - (wide[0] * wide[1]).sum(case.dim, True))
    return y.to(inputs[0].dtype)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_right_results_pass_and_mutants_fail(case):
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    right = exact(case, inputs)
    assert operation.check(case, inputs, right) <= operations.TOLERANCE[case.dtype]
    one_nan = right.clone()
    one_nan.view(-1)[3] = float("nan")
    last = case.dim[-1]
    half = right.shape[last] // 2
    dropped = right.clone()
    dropped.narrow(last, half, right.shape[last] - half).zero_()
    mutants = {
        "zeros": torch.zeros_like(right),
        "uniform": torch.full_like(right, 1 / right.shape[last]),
        "shifted": right.roll(1, last),
        "dropped": dropped,
        "denominator": (right * 1.03).to(right.dtype),
        "nan": one_nan,
        "dtype": right.double(),
        "shape": right.flatten(),
    }
    for mutant in mutants.values():
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant)


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_checking_in_pieces_sees_every_row(op, monkeypatch):
    monkeypatch.setattr(operations, "_PIECE", 100)
    case = Case(op, (37, 33), "fp32")
    inputs = operations.OPERATIONS[op].inputs(case, CPU)
    right = exact(case, inputs)
    operations.OPERATIONS[op].check(case, inputs, right)
    for row in (0, 20, 36):
        wrong = right.clone()
        wrong[row, 32] *= 1.5
        with pytest.raises(operations.WrongResult):
            operations.OPERATIONS[op].check(case, inputs, wrong)


def test_inputs_are_the_same_every_time_and_not_constant():
    case = Case("softmax_backward", (16, 64))
    one, two = (operations.OPERATIONS[case.op].inputs(case, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(t.float().std() > 0 for t in one)
    assert not torch.equal(one[0], one[1])


# ---- providers


@pytest.mark.parametrize("case", [c for c in SMALL if len(c.dim) == 1], ids=str)
def test_torch_as_provider_is_right(case):
    inputs = operations.OPERATIONS[case.op].inputs(case, CPU)
    output = providers.build("torch", case.op, case)(*inputs)
    operations.OPERATIONS[case.op].check(case, inputs, output)


def test_copy_reads_and_writes_what_an_operation_does():
    x = torch.randn(4, 5)
    out = providers.build("copy", "softmax", Case("softmax", (4, 5)))(x)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    both = providers.build("copy", "softmax_backward", Case("softmax_backward", (4, 5)))(x, x)
    assert torch.equal(both, x + x)


def test_every_provider_is_registered_and_refuses_what_it_has_not():
    assert tuple(providers.REGISTRY) == PROVIDERS
    with pytest.raises(providers.Refusal, match="has no entry"):
        providers.build("copy", "entry", Case("softmax", (4, 5)))
    with pytest.raises(providers.Refusal, match="one dimension"):
        providers.build("torch", "softmax", Case("softmax", (2, 3, 4), dim=(0, 2)))


def test_the_fastest_way_is_kept(monkeypatch):
    tried = []

    def slow(x):
        return x + 1

    def fails(x):
        raise RuntimeError("no")

    def clock(call, tensors):
        call(*tensors)
        tried.append(call)
        return 9.0 if call is slow else 1.0

    def fast(x):
        return x + 2

    monkeypatch.setattr(providers, "_event_us", clock)
    chosen = providers.Fastest({"slow": slow, "fails": fails, "fast": fast})
    assert chosen(1) == 3 and chosen.note == "fast"
    count = len(tried)
    assert chosen(2) == 4 and len(tried) == count
    with pytest.raises(RuntimeError, match="no"):
        providers.Fastest({"fails": fails})(1)


# ---- clocks


def test_providers_alternate_in_rotating_order_and_warm_rounds_do_not_count():
    order, rounds = [], []

    def measure(call):
        call()
        return lambda: float(len(order))

    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = timing.interleave(calls, measure, 2, 1, lambda: rounds.append("<"), lambda: rounds.append(">"))
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(us) for name, us in samples.us.items()} == {"a": 2, "b": 2, "c": 2}
    assert "".join(rounds) == "<><><>"


def test_a_call_that_raises_drops_out_alone():
    count = {"good": 0, "bad": 0}

    def good():
        count["good"] += 1

    def bad():
        count["bad"] += 1
        if count["bad"] == 3:
            raise ValueError("third time")

    def measure(call):
        call()
        return lambda: 1.0

    samples = timing.interleave({"good": good, "bad": bad}, measure, 5, 1)
    assert samples.us == {"good": [1.0] * 5}
    assert samples.errors == {"bad": "ValueError: third time"}
    assert count == {"good": 6, "bad": 3}


def test_median_and_spread():
    assert timing.median([3, 1, 2]) == 2
    assert timing.spread([5.0]) == 0.0
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def test_rotation_covers_the_l2_several_times():
    l2 = 60 << 20
    for megabytes in (4, 33, 134, 500):
        count = timing.rotation(megabytes << 20, l2)
        assert count >= 2
        assert count * (megabytes << 20) >= timing.ROTATE_L2 * l2
    assert timing.rotation(64 << 10, l2) == 1


def test_host_clock_measures_blocks():
    calls = {"a": lambda: None, "b": lambda: sum(range(2000))}
    synchronised = []
    samples = timing.host_clock(calls, 300, 3, lambda: synchronised.append(1))
    assert {name: len(us) for name, us in samples.us.items()} == {"a": 3, "b": 3}
    assert timing.median(samples.us["b"]) > timing.median(samples.us["a"])
    assert len(synchronised) == 2 * 4 * 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's sched_setaffinity")
def test_pinning_is_undone():
    before = os.sched_getaffinity(0)
    with timing.pinned_to_one_core() as core:
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


# ---- tables, plots, requirements


def test_table_shows_speed_ratio_best_peer_and_refusals():
    (table,) = report.tables(made_up())
    text = console.as_text(table)
    assert table.columns == ["shape", *PROVIDERS]
    first = text.splitlines()[3]
    assert first.startswith("32768 x 1024") and "4100 0.988" in first and "4000 0.964*" in first
    *_, last_row, _, footer, note = text.splitlines()
    assert last_row.startswith("4096 x 131072") and "refuses" in last_row
    assert "0.4% at most" in note
    assert "geometric mean" in footer and "0.988" in footer and "(12 of 13)" in footer
    (reason,) = report.refusals(made_up())
    assert reason.startswith("liger at 4096x131072: RuntimeError")


def test_markdown_table_has_a_cell_for_every_provider():
    (table,) = report.tables(made_up())
    lines = console.as_markdown(table).splitlines()
    assert len(lines) == 2 + 13 + 1 + 2
    assert all(line.count("|") == len(PROVIDERS) + 2 for line in lines[:-2])
    assert "**4000 0.964**" in lines[2] and "refuses" in lines[-4] and "Spread" in lines[-1]


def test_times_have_units_and_a_ratio_to_torch():
    (table,) = report.tables(made_up_times("overhead"))
    text = console.as_text(table)
    assert "no grad" in text and "5 µs 0.98" in text and "geometric" not in text
    times = [report.format_time(t) for t in (1.234, 999.0, 1500.0, 999e3, 2.5e6)]
    assert times == ["1.23 µs", "999 µs", "1.5 ms", "999 ms", "2.5 s"]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("RuntimeError: no", "refuses"),
        ("wrong result: NaN in 3 of 4 elements", "wrong"),
        ("ProcessFailed: benchmarks.operations.WrongResult: wrong result: NaN", "wrong"),
        ("not installed: No module named 'quack'", "absent"),
        ("ProcessFailed: ModuleNotFoundError: No module named 'quack'", "absent"),
    ],
)
def test_failures_have_their_word(error, word):
    assert report.failure_word(error) == word


def test_each_method_has_its_table():
    found = made_up("small-rows")
    extra = [{**row, "method": "graph-rotating"} for row in found.rows]
    both = report.tables(results.Results(found.header, found.rows + extra))
    assert len(both) == 2 and "events" in both[0].title and "graph" in both[1].title


def test_a_table_needs_no_rich(monkeypatch, capsys):
    monkeypatch.setattr(console, "rich", None)
    (table,) = report.tables(made_up())
    console.show(table)
    with console.progress("suite", 2) as progress:
        progress.step("first")
        progress.step("second")
    captured = capsys.readouterr()
    assert "32768 x 1024" in captured.out
    assert "suite [2/2]" in captured.err and "second" in captured.err


def test_rich_draws_on_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    (table,) = report.tables(made_up())
    console.show(table)
    with console.progress("suite", 1) as progress:
        progress.step("first")
    captured = capsys.readouterr()
    assert "4000 0.964*" in captured.out and "suite" in captured.err


@pytest.mark.parametrize("suite", ["rows-forward", "overhead", "first-call"])
def test_plots_are_the_same_bytes_every_time(tmp_path, suite):
    plot = pytest.importorskip("benchmarks.plot", reason="needs matplotlib")
    found = made_up(suite) if SUITES[suite].kind == "device" else made_up_times(suite)
    one, two = plot.save(found, tmp_path / "a"), plot.save(found, tmp_path / "b")
    assert [p.name for p in one] == [f"{suite}.png", f"{suite}.svg"]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    svg = one[1].read_text()
    assert "cute_softmax" in svg and "<dc:date>" not in svg
    assert one[0].read_bytes().startswith(b"\x89PNG")


def verdicts(found: results.Results) -> list[requirements.Verdict]:
    return list(requirements.judge(found))


def test_good_results_meet_their_requirements():
    good = [made_up("rows-forward"), made_up("rows-backward"), made_up("fp32-rows"), made_up("odd-rows")]
    for found in [*good, made_up_times("overhead"), made_up_times("first-call")]:
        assert verdicts(found) and all(v.met for v in verdicts(found)), [str(v) for v in verdicts(found)]


def test_results_that_fall_short_fail_and_say_where():
    slow = made_up(cute_softmax=4000.0, quack=4080.0)
    mean, behind = verdicts(slow)
    assert not mean.met and mean.value == pytest.approx(4000 / 4150, abs=1e-4)
    assert not behind.met and behind.value == pytest.approx(0.02)
    assert str(behind).startswith("FAIL") and "must <= +1.5%" in str(behind)
    assert str(verdicts(made_up(cute_softmax=4160.0))[0]).endswith("aim >= 1.000 (reached)")
    late = made_up_times("overhead", cute_softmax=7.0)
    assert [v.met for v in verdicts(late)] == [False, True, True]
    assert not all(v.met for v in verdicts(made_up_times("first-call", cute_softmax=2e6)))


def test_one_slow_cell_is_enough_to_fail():
    found = made_up("fp32-rows")
    row = next(r for r in found.rows if r["provider"] == "cute_softmax" and r["shape"] == [8192, 16384])
    row["vs_copy"] = 0.9
    (verdict,) = verdicts(found)
    assert not verdict.met and "8192 x 16384" in str(verdict)


def test_a_refusal_or_a_missing_row_is_no_success():
    found = made_up()
    longest = Case("softmax", (4096, 131072))
    no_row = results.make_row("rows-forward", longest, "cute_softmax", "events-cold", error="no")
    refused = [
        no_row if r["provider"] == "cute_softmax" and r["shape"] == [4096, 131072] else r for r in found.rows
    ]
    missing = [r for r in found.rows if r["shape"] != [4096, 8192]]
    for rows in (refused, missing):
        judged = verdicts(results.Results(HEADER, rows))
        assert judged and not any(v.met for v in judged) and "no figure" in str(judged[0])


# ---- the command line


def test_list_names_all_suites(capsys):
    assert cli.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUITES)


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
    ],
)
def test_wrong_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


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


# ---- a whole run with a stand-in for the device


class FakeEvent:
    """An event of a clock that ticks once a record: every call takes 1 ms."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time - self.time


class FakeGraph:
    """A graph that calls again on every replay, as a captured one would."""

    def __init__(self, call, inputs) -> None:
        self.call, self.inputs = call, inputs
        self.outputs = [call(*tensors) for tensors in inputs]

    def replay(self) -> None:
        for tensors, output in zip(self.inputs, self.outputs, strict=True):
            output.copy_(self.call(*tensors))


def fake_capture(call, inputs) -> timing.Graph:
    graph = FakeGraph(call, inputs)
    return timing.Graph(graph, 20, graph.outputs)


class Quiet:
    """Progress that is only counted."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)


@pytest.fixture
def fake_device(monkeypatch):
    """CUDA as the runner uses it, on the CPU; torch stands in for ours, and peers fail in their ways."""

    class Properties:
        L2_cache_size = 1 << 20

    class Refuses:
        def softmax(self, case):
            raise RuntimeError("takes no odd N")

        entry = softmax

    class Wrong:
        def softmax(self, case):
            return lambda x: torch.full_like(x, float("nan"))

        entry = softmax

    class BreaksLater(providers.Torch):
        def softmax(self, case):
            left = iter(range(4))

            def call(x):
                next(left)
                return torch.softmax(x, -1)

            return call

    for name, value in {
        "synchronize": lambda *_: None,
        "_sleep": lambda _: None,
        "Event": FakeEvent,
        "get_device_properties": lambda _: Properties,
        "get_device_name": lambda *_: "NVIDIA H200",
        "is_available": lambda: True,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(run, "current_device", lambda: CPU)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing, "capture", fake_capture)
    standing_in = {"cute_softmax": providers.Torch(), "liger": Wrong(), "quack": Refuses()}
    standing_in["cudnn"] = BreaksLater()
    for name, provider in standing_in.items():
        monkeypatch.setitem(providers.REGISTRY, name, provider)


NAMES = ("cute_softmax", "copy", "torch", "liger", "quack", "cudnn")


def test_a_device_run_isolates_every_provider(fake_device):
    suite = SUITES["small-rows"].with_shapes([(32, 64), (16, 33)])
    progress = Quiet()
    rows = run.run_suite(suite, NAMES, run.Options(), progress)
    assert progress.steps == ["32 x 64", "16 x 33"]
    results.validate({"header": HEADER, "rows": rows})
    grouped = results.cells(rows)
    assert [(key[1], key[5]) for key in grouped] == [
        ((32, 64), "events-cold"),
        ((32, 64), "graph-warm"),
        ((16, 33), "events-cold"),
        ((16, 33), "graph-warm"),
    ]
    for cell in grouped.values():
        assert tuple(cell) == NAMES
        assert "takes no odd N" in cell["quack"]["error"]
        assert cell["liger"]["error"].startswith("wrong result: NaN in")
        assert cell["cudnn"]["error"].startswith("StopIteration")
        assert cell["copy"]["vs_copy"] == 1.0
        for name in ("cute_softmax", "copy", "torch"):
            # The fake clock: an event record is 1 ms; a graph holds 20 calls.
            us = 1000.0 if cell[name]["method"] == "events-cold" else 50.0
            assert cell[name]["us"] == us and cell[name]["spread"] == 0.0
    first = next(iter(grouped.values()))
    assert 0 < first["torch"]["max_error"] <= operations.TOLERANCE["bf16"]
    assert first["torch"]["gbps"] == pytest.approx(2 * 32 * 64 * 2 / 1e6, rel=1e-4)


def test_graphs_rotate_where_the_buffers_are_few(fake_device, monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_L2", 0.01)
    suite = SUITES["small-rows"].with_shapes([(32, 64)])
    rows = run.run_suite(suite, ("copy", "torch"), run.Options(calls=3), Quiet())
    assert {r["method"] for r in rows} == {"events-cold", "graph-rotating"}
    rows = run.run_suite(suite, ("copy", "torch"), run.Options.quick(), Quiet())
    assert {r["method"] for r in rows} == {"events-cold"}


def test_a_graph_that_does_nothing_is_wrong(fake_device, monkeypatch):
    def capture(call, inputs):
        graph = fake_capture(call, inputs)
        graph.graph.replay = lambda: None
        return graph

    monkeypatch.setattr(timing, "capture", capture)
    suite = SUITES["small-rows"].with_shapes([(32, 64)])
    rows = run.run_suite(suite, ("torch",), run.Options(calls=3), Quiet())
    assert "us" in rows[0] and rows[1]["error"].startswith("wrong result: NaN")


def test_a_case_that_cannot_be_made_is_a_row_of_errors(fake_device, monkeypatch):
    def inputs(case, device):
        raise MemoryError("too large")

    monkeypatch.setitem(operations.OPERATIONS, "softmax", operations.Operation(inputs, None))
    suite = SUITES["small-rows"]
    rows = run.run_suite(suite, ("copy", "torch"), run.Options(), Quiet())
    assert len(rows) == 2 * len(suite.cases)
    assert all(row["error"] == "MemoryError: too large" for row in rows)


def test_a_lost_device_ends_the_suite_but_keeps_its_rows(fake_device, monkeypatch):
    class Kills(providers.Torch):
        def softmax(self, case):
            if case.shape == (16, 33):
                monkeypatch.setattr(torch.cuda, "synchronize", dead)
                dead()
            return super().softmax(case)

    def dead(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(providers.REGISTRY, "quack", Kills())
    suite = SUITES["small-rows"].with_shapes([(32, 64), (16, 33), (8, 8)])
    with pytest.raises(run.DeviceLost, match="illegal memory access") as lost:
        run.run_suite(suite, ("copy", "quack"), run.Options.quick(), Quiet())
    assert [row["shape"] for row in lost.value.rows] == [[32, 64]] * 2
    assert lost.value.rows[1]["vs_copy"] == 1.0


def test_a_host_run_has_every_mode(fake_device):
    suite = SUITES["overhead"].with_shapes([(4, 8)])
    rows = run.run_suite(suite, NAMES, run.Options(host_calls=6, host_blocks=3), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    by_mode = results.cells(rows)
    assert [key[4] for key in by_mode] == [cases.NO_GRAD, cases.GRAD, cases.FORWARD_BACKWARD]
    for cell in by_mode.values():
        # Those that have no part in the suite have no row; those that fail have one with their reason.
        assert tuple(cell) == ("cute_softmax", "torch", "liger", "quack")
        assert cell["torch"]["us"] > 0 and cell["torch"]["vs_torch"] == 1.0
        assert "error" in cell["liger"] and "error" in cell["quack"]


def test_a_process_run_reads_what_its_processes_print(fake_device, monkeypatch):
    taken = []

    def first_call(name, case, new_columns, environment):
        taken.append((name, new_columns, environment["XDG_CACHE_HOME"]))
        if name == "quack":
            raise run.ProcessFailed("RuntimeError: no")
        return {"first_us": 1e6 / len(taken), "second_us": 9.0, "new_us": 200.0}

    monkeypatch.setattr(run, "_first_call", first_call)
    rows = run.run_suite(SUITES["first-call"], ("torch", "quack"), run.Options(), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    assert {r["mode"]: r["us"] for r in rows if r["provider"] == "torch"} == {
        cases.COLD_STORE: 1e6,
        cases.WARM_STORE: pytest.approx(1e6 / 3, rel=1e-4),
        cases.NEW_COLUMNS: 200.0,
    }
    assert all("RuntimeError: no" in r["error"] for r in rows if r["provider"] == "quack")
    columns = [n for name, n, _ in taken if name == "torch"]
    assert columns == [4096, 4080, 4064, 4048]
    assert len({store for name, _, store in taken if name == "torch"}) == 1
    assert len({store for *_, store in taken}) == 2


def test_a_fresh_process_that_fails_gives_its_last_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(run.ProcessFailed, match=r"\w"):
        run._first_call("torch", Case("softmax", (4, 64)), 32, run._private_store(str(tmp_path)))


def test_the_command_runs_saves_and_shows(fake_device, tmp_path, capsys):
    argv = ["--suite", "small-rows", "--shapes", "32x64", "--calls", "3", "--save", str(tmp_path)]
    assert cli.main([*argv, "--providers", "copy,torch", "quack"]) == 0
    captured = capsys.readouterr()
    assert "32 x 64" in captured.out and "refuses" in captured.out
    found = results.load(tmp_path / "h200" / "small-rows.json")
    assert found.header["gpu"] == "NVIDIA H200" and str(tmp_path) not in found.header["command"]
    assert {r["provider"] for r in found.rows} == {"copy", "torch", "quack"}


# ---- on a GPU


@gpu
@needs_gpu
def test_events_and_graphs_agree_on_a_long_copy():
    x = torch.randn(64 << 20, device="cuda")
    flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor).copy_(tensor)

    cold = timing.cold_events({"copy": lambda: copy(x)}, 15, 3, flush)
    rings = timing.graph_replays({"copy": timing.capture(copy, [(x,), (x.clone(),)])}, 5, 2)
    one, other = timing.median(cold.us["copy"]), timing.median(rings.us["copy"])
    assert math.isclose(one, other, rel_tol=0.1)


@gpu
@needs_gpu
@pytest.mark.parametrize("op", list(operations.OPERATIONS))
@pytest.mark.parametrize("name", PROVIDERS)
def test_providers_give_right_results_on_the_gpu(name, op):
    suite = cases.Suite("small", "small", (Case(op, (512, 1024)),), PROVIDERS)
    rows = run.run_suite(suite, (name,), run.Options(calls=3, warm=1), Quiet())
    for row in rows:
        if row.get("error", "").startswith("not installed"):
            pytest.skip(f"{name} is not installed")
        assert row.get("us", 0) > 0, row


@gpu
@needs_gpu
def test_a_fresh_process_measures_its_first_call(tmp_path):
    times = run._first_call("torch", Case("softmax", (64, 256)), 128, run._private_store(str(tmp_path)))
    assert times["first_us"] > 0 and times["new_us"] > 0


@gpu
@needs_gpu
def test_host_time_of_torch_is_a_few_microseconds():
    suite = SUITES["overhead"]
    rows = run.run_suite(suite, ("torch",), run.Options.quick(), Quiet())
    assert all(0.5 < row["us"] < 500 for row in rows)
