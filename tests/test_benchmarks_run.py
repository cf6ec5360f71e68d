"""The benchmarks' clocks and whole runs: with a stand-in for the device on any machine, and on a GPU."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_device import FakeEvent, Quiet, fake_capture

from benchmarks import __main__ as cli
from benchmarks import cases, operations, providers, results, run, timing
from benchmarks.cases import PROVIDERS, Case
from benchmarks.suites import SUITES

CPU = torch.device("cpu")
HEADER = dict.fromkeys(results.HEADER_KEYS, "")

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


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


def test_a_slow_call_has_fewer_turns_the_last_ones():
    order = []

    def measure(call):
        call()
        return lambda: 1.0

    calls = {name: lambda name=name: order.append(name) for name in ("quick", "slow")}
    samples = timing.interleave(calls, measure, 4, 2, turns={"slow": 2})
    assert {name: len(us) for name, us in samples.us.items()} == {"quick": 4, "slow": 2}
    assert order == ["quick"] * 4 + ["quick", "slow"] + ["slow", "quick"]


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


# ---- a whole run with a stand-in for the device


NAMES = ("cute_softmax", "copy", "torch", "liger", "quack", "cudnn")


def test_a_device_run_isolates_every_provider(fake_device):
    suite = SUITES["small-rows"].with_shapes([(32, 64), (16, 33)])
    progress = Quiet()
    rows = run.run_suite(suite, NAMES, run.Options(), progress)
    assert progress.steps == ["32 x 64", "16 x 33"]
    results.validate({"header": HEADER, "rows": rows})
    grouped = results.cells(rows)
    assert [(key.case.shape, key.method) for key in grouped] == [
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


def test_a_call_above_the_limit_is_measured_three_times(fake_device, monkeypatch):
    class Slow(providers.Torch):
        def softmax(self, case):
            def call(x):
                FakeEvent.now += 60.0
                return torch.softmax(x, -1)

            return call

    monkeypatch.setitem(providers.REGISTRY, "quack", Slow())
    suite = SUITES["small-rows"].with_shapes([(32, 64)])
    rows = run.run_suite(suite, ("copy", "quack"), run.Options(graphs=False), Quiet())
    assert {r["provider"]: r["calls"] for r in rows} == {"copy": 15, "quack": 3}
    assert rows[1]["us"] == 61_000.0 > timing.SLOW_US
    rows = run.run_suite(suite, ("copy", "quack"), run.Options(calls=2, graphs=False), Quiet())
    assert {r["calls"] for r in rows} == {2}


def test_a_graph_suite_has_warm_graphs_alone(fake_device):
    suite = SUITES["few-rows"].with_shapes([(2, 64)])
    rows = run.run_suite(suite, NAMES, run.Options.quick(), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    assert {r["method"] for r in rows} == {"graph-warm"} and tuple(r["provider"] for r in rows) == NAMES
    by_name = {r["provider"]: r for r in rows}
    assert by_name["torch"]["us"] == 50.0 and by_name["torch"]["vs_copy"] == 1.0
    assert "error" in by_name["quack"] and "error" in by_name["liger"]


@pytest.mark.parametrize(
    "suite", ["columns-backward", "any-dims", "reductions", "scores", "fp32-any", "views"]
)
def test_every_kind_of_case_runs(fake_device, suite):
    ranks = {2: (16, 33), 4: (2, 9, 4, 8)}
    suite = SUITES[suite].with_dtype("bf16")
    suite = suite.with_shapes([ranks[len(suite.cases[0].shape)]])
    taken = [case for case in suite.cases if max(case.dim) < len(case.shape)]
    rows = run.run_suite(replace(suite, cases=tuple(taken)), ("copy", "torch"), run.Options(calls=3), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    for row in rows:
        several = len(row["dim"]) > 1 and row["provider"] == "torch"
        assert ("takes one dimension" in row["error"]) if several else row["us"] > 0, row
    assert {tuple(r["dim"]) for r in rows} == {case.dim for case in taken}


def test_the_buffers_of_a_graph_lie_as_the_view_does(fake_device, monkeypatch):
    rings = []

    def capture(call, ring):
        rings.append(ring)
        return fake_capture(call, ring)

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "ROTATE_L2", 0.01)
    run.run_suite(SUITES["views"].with_shapes([(32, 65)]), ("torch",), run.Options(calls=2), Quiet())
    assert all(len({t.stride() for (t,) in ring}) == 1 < len(ring) for ring in rings)
    assert rings[0][1][0].stride() == (128, 1)


def test_too_little_memory_is_one_providers_refusal(fake_device, monkeypatch):
    class Large:
        def softmax(self, case):
            def call(x):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

            return call

    monkeypatch.setitem(providers.REGISTRY, "torch", Large())
    suite = SUITES["split-rows"].with_shapes([(4, 64)])
    copied, refused = run.run_suite(suite, ("copy", "torch"), run.Options.quick(), Quiet())
    assert copied["us"] > 0 and "out of memory" in refused["error"]


def test_gradients_alone_have_no_graph_but_their_memory(fake_device, monkeypatch):
    monkeypatch.setattr(run, "_peak", lambda call, inputs: {"peak_bytes": 7})
    suite = SUITES["matmul-backward"].with_shapes([(2, 16, 24)])
    rows = run.run_suite(suite, ("copy", "torch"), run.Options(calls=2), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    assert {r["method"] for r in rows} == {"events-cold"} and {r["peak_bytes"] for r in rows} == {7}
    assert {r["provider"] for r in rows if r["us"] > 0} == {"copy", "torch"}


def test_graphs_rotate_where_the_buffers_are_few(fake_device, monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_L2", 0.01)
    suite = SUITES["small-rows"].with_shapes([(32, 64)])
    rows = run.run_suite(suite, ("copy", "torch"), run.Options(calls=3), Quiet())
    assert {r["method"] for r in rows} == {"events-cold", "graph-rotating"}
    rows = run.run_suite(suite, ("copy", "torch"), run.Options.quick(), Quiet())
    assert {r["method"] for r in rows} == {"events-cold"}
    monkeypatch.setattr(timing, "GRAPH_BELOW_US", 0)  # calls that events time as well
    rows = run.run_suite(suite, ("copy", "torch"), run.Options(calls=3), Quiet())
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
    assert [key.case.mode for key in by_mode] == [
        cases.NO_GRAD,
        cases.GRAD,
        cases.FORWARD_BACKWARD,
        cases.IN_TURN,
    ]
    for cell in by_mode.values():
        # Those that have no part in the suite have no row; those that fail have one with their reason.
        assert tuple(cell) == ("cute_softmax", "torch", "liger", "quack")
        assert cell["torch"]["us"] > 0 and cell["torch"]["vs_torch"] == 1.0
        assert "error" in cell["liger"] and "error" in cell["quack"]


def test_a_host_run_of_other_operations(fake_device):
    suite = SUITES["overhead-scores"].with_shapes([(2, 8, 16)])
    rows = run.run_suite(suite, ("cute_softmax", "torch"), run.Options(host_calls=6, host_blocks=3), Quiet())
    results.validate({"header": HEADER, "rows": rows})
    assert [(r["op"], r["provider"]) for r in rows[-6:]] == [
        (op, provider)
        for op in ("selective_log_softmax", "selective_gradient", "softmax_matmul")
        for provider in ("cute_softmax", "torch")
    ]
    assert len(rows) == 18 and all(r["us"] > 0 and r["vs_torch"] > 0 for r in rows)


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


def test_fresh_processes_keep_bytecode(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in run._private_store(str(tmp_path))


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


def test_nothing_is_measured_that_cannot_be_saved(fake_device, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "run_suite", lambda *_: pytest.fail("measured in vain"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main(["--suite", "small-rows", "--save", str(tmp_path / "file")])
    assert stop.value.code == 2 and "--save: " in capsys.readouterr().err


def test_the_lead_of_a_call_that_waits_for_the_gpu_does_not_grow(monkeypatch):
    """The host's time of such a call holds the lead before it: by the last time each lead would be longer."""
    now, leads = [0.0], []

    def sleep(cycles: int) -> None:
        leads.append(cycles)

    def waits() -> None:
        now[0] += 1e-3 + leads[-1] / timing._CYCLES_A_SECOND

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 1.0)
    monkeypatch.setattr(timing.torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    samples = timing.cold_events({"waits": waits}, 8, 2, torch.zeros(1))
    assert samples.us["waits"] == [1e3] * 8 and not samples.errors
    first = 1e-3 + timing._LEAD_CYCLES / timing._CYCLES_A_SECOND
    assert max(leads) <= timing.HOST_LEAD * first * timing._CYCLES_A_SECOND


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
@pytest.mark.parametrize(
    "case",
    [
        *(Case(op, (512, 1024)) for op in operations.OPERATIONS),
        *(Case(op, (512, 1024), dim=(0,)) for op in ("softmax", "softmax_backward")),
        Case("softmax", (8, 512, 1024), dim=(1,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PROVIDERS)
def test_providers_give_right_results_on_the_gpu(name, case):
    suite = cases.Suite("small", "small", (case,), PROVIDERS)
    rows = run.run_suite(suite, (name,), run.Options(calls=3, warm=1), Quiet())
    for row in rows:
        if row.get("error", "").startswith(("not installed", "Refusal")):
            pytest.skip(f"{name}: {row['error']}")
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
