"""The map: its cells, a run that stops and goes on, what is judged, and its heat maps."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import copies, map_cells, map_judge, map_run, plot, results, resume
from benchmarks.cases import ITEM_BYTES, Case
from benchmarks.map_cells import MANY, ODD, SLICES, Line, N, Slice
from cute_softmax.plan.hardware import H200

HEADER = dict.fromkeys(results.HEADER_KEYS, "") | {"gpu": "NVIDIA H200", "commit": "abc"}
SMALL = Line("softmax", "bf16", (4, N), (8, 16, 24, 33))


def made_up(chosen: Slice, ratio=lambda case: 0.99, peer=1.0) -> results.Results:
    """Results of a slice where our ratio to the copy is `ratio(case)` and all peers have the copy's time by `peer`."""
    rows = []
    for case in chosen.suite.cases:
        for name in chosen.providers:
            us = 100 / (ratio(case) if name == "cute_softmax" else 1 if name == "copy" else peer)
            rows.append(
                results.make_row(chosen.name, case, name, "events-cold", us=us, gbps=1.0, spread=0.005)
            )
    results.add_ratios(rows)
    return results.Results(HEADER, rows)


def slice_of(*lines: Line, providers: tuple[str, ...] = ("cute_softmax", "copy")) -> Slice:
    return Slice("map-test", "a test", lines, providers)


def test_lengths_leave_no_gap():
    fine, coarse = map_cells.lengths(map_cells.FINE), map_cells.lengths(map_cells.COARSE)
    assert {*map_cells.VOCABULARIES} <= {*fine} & {*coarse}
    assert fine[0] == coarse[0] == 1 and fine[-1] == 1 << 28
    for i in range(29):
        assert {1 << i, (1 << i) + 8} <= {*fine, (1 << 28) + 8}
    for found, step in ((fine, 1.2), (coarse, 1.5)):
        # A grid that is rounded to whole vectors: the steps are at most 1 + 1/8 wider.
        assert all(b <= a * step * 1.125 or b <= a + 4 for a, b in itertools.pairwise(found))
    primes = map_cells.primes()
    assert [n.bit_length() for n in primes] == [2, *range(2, 29)] and all(n % 2 for n in primes[1:])
    assert {*primes} <= {*fine} & {*map_cells.beside_peers()}


def test_the_map_is_large_enough_and_no_larger():
    cells = [case for chosen in SLICES.values() for case in chosen.suite.cases]
    assert 4000 < len(cells) <= 8000
    assert all(case.elements * ITEM_BYTES[case.result] <= map_cells.MOST_BYTES for case in cells)
    names = [
        line.name
        for chosen in SLICES.values()
        for line in chosen.lines
        if not chosen.name.startswith("map-peers")
    ]
    assert len(set(names)) == len(names)
    for chosen in SLICES.values():
        assert chosen.suite.kind == "map" and len(set(chosen.suite.cases)) == len(chosen.suite.cases)


def test_lines_fill_the_memory_and_lie_as_they_say():
    for sizes, length, shape, dim, alignment in (
        ((MANY, N), 1024, (131072, 1024), -1, 8),
        ((MANY, N), 1023, (131200, 1023), -1, 1),
        ((64, N), 1028, (64, 1028), -1, 4),
        ((N, MANY), 1000, (1000, 134208), 0, 8),
        ((N, ODD), 1000, (1000, 134207), 0, 1),
        ((MANY, N, 55, 55), 64, (688, 64, 55, 55), 1, 1),
        ((MANY, N, 56, 56), 64, (656, 64, 56, 56), 1, 8),
        ((MANY, N), 1 << 28, (1, 1 << 28), -1, 8),
    ):
        line = Line("softmax", "bf16", sizes, (length,))
        case = line.cells[length]
        assert (case.shape, case.dim, line.alignment(length)) == (shape, (dim,), alignment)
        if {MANY, ODD} & {*sizes} and length < 1 << 20:
            assert 0.9 < case.elements * 2 / map_cells.FILL_BYTES <= 1


def test_every_line_needs_classes_that_plans_have():
    cases = [
        line.cells[n] for chosen in SLICES.values() for line in chosen.lines for n in list(line.cells)[::15]
    ]
    made = list(resume.classes_of(cases, H200))
    assert len(made) >= len(cases) > 300
    assert {c.movement for c in made} == {"short", "row", "column", "split", "sweep", "matmul"}


@pytest.mark.parametrize(
    ("op", "dtype", "length", "least"),
    [
        ("softmax", "bf16", 24, 0.95),
        ("softmax", "bf16", 7, 0.85),
        ("softmax", "bf16", 1, 0.95),
        ("softmax", "bf16", 151936, 0.95),
        ("softmax", "bf16", 1 << 20, 0.85),
        ("softmax_backward", "bf16", 1 << 19, 0.85),
        ("softmax", "bf16", 1 << 28, 0.85 * 2 / (3 - (132 * 227 * 1024 + (60 << 20)) / (1 << 29))),
        ("logsumexp", "fp32", 1 << 28, 0.85),
        ("selective_log_softmax", "bf16", 151936, 0.95 * 303872 / (303872 + 12)),
        ("cross_entropy", "bf16", 151936, 0.95 * 607744 / (607744 + 12)),
        ("cross_entropy", "bf16", 2, 0.95 * 8 / 20),
    ],
)
def test_floors(op, dtype, length, least):
    line = Line(op, dtype, (MANY, N), (length,))
    assert map_judge.floor(line, length) == pytest.approx(least)
    assert map_judge.floor(replace(line, sizes=(4, N)), length) is None


def test_floors_of_columns():
    assert map_judge.floor(Line("softmax", "bf16", (N, MANY), (20000,)), 20000) == 0.65
    assert map_judge.floor(Line("softmax", "bf16", (N, ODD), (20000,)), 20000) == 0.55
    assert map_judge.floor(Line("softmax", "bf16", (N, MANY), (100,)), 100) is None


def verdict(monkeypatch, chosen: Slice, listed=(), **how) -> map_judge.MapVerdict:
    monkeypatch.setitem(SLICES, chosen.name, chosen)
    monkeypatch.setattr(map_judge, "bounds", lambda: {"h200": dict.fromkeys(listed, "bytes")})
    return map_judge.judge(made_up(chosen, **how))


def test_a_cliff_is_below_a_neighbour_of_its_alignment(monkeypatch):
    def ratio(case):
        return {16: 0.85, 33: 0.5}.get(case.shape[-1], 0.99)

    found = verdict(monkeypatch, slice_of(SMALL), ratio=ratio)
    # 33 has no neighbour that begins where its rows do.
    assert [(f.kind, f.length) for f in found.found] == [("cliff", 16)] and not found.met
    assert "1 cliffs" in str(found) and "softmax bf16 4 x N, 16: 0.859 of its neighbour's 0.990" in str(found)
    many = slice_of(replace(SMALL, lengths=tuple(range(8, 8 * 60, 8))))
    found = verdict(monkeypatch, many, ["cliff, softmax bf16 4 x N, 16"], ratio=ratio)
    assert found.met and found.listed == 1
    found = verdict(monkeypatch, slice_of(SMALL), ["cliff, softmax bf16 4 x N, 16"], ratio=ratio)
    assert not found.met  # one of four cells is more than may be on the list


def test_behind_a_peer_by_more_than_noise(monkeypatch):
    chosen = slice_of(SMALL, providers=("cute_softmax", "copy", "torch"))
    assert verdict(monkeypatch, chosen, peer=1.01).met
    found = verdict(monkeypatch, chosen, peer=1.02)
    assert [f.kind for f in found.found] == ["peer"] * 4 and "of torch's speed" in str(found)


def test_below_the_floor(monkeypatch):
    chosen = slice_of(Line("softmax", "bf16", (MANY, N), (1024, 2048)))
    assert verdict(monkeypatch, chosen, ratio=lambda case: 0.95).met
    assert [f.kind for f in verdict(monkeypatch, chosen, ratio=lambda case: 0.94).found] == ["floor", "floor"]


def test_cells_without_a_figure_are_missing(monkeypatch):
    monkeypatch.setitem(SLICES, "map-test", slice_of(SMALL))
    found = made_up(SLICES["map-test"])
    found.rows[:] = [row for row in found.rows if row["shape"][-1] != 16]
    assert (judged := map_judge.judge(found)).missing == 1 and not judged.met


def test_the_list_of_bounds_names_cells_and_reasons():
    lines = {line.name: line for chosen in SLICES.values() for line in chosen.lines}
    for gpu, listed in map_judge.bounds().items():
        assert (results.FOLDER / gpu).is_dir()
        for cell, why in listed.items():
            kind, name, length = cell.split(", ")
            assert kind in ("cliff", "peer", "floor") and int(length) in lines[name].cells and why


def test_the_yardstick_moves_as_many_bytes(fake_device):
    for op, mode in (("softmax", ""), ("softmax", "to fp32"), ("logsumexp", ""), ("softmax_backward", "")):
        case = Case(op, (16, 64), mode=mode)
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        copied = copies.CopyOfAsManyBytes(case.traffic)(x, x)
        assert 2 * copied.nbytes == case.traffic


@pytest.fixture
def small_map(fake_device, monkeypatch, tmp_path):
    """A map of one slice on the CPU; yields a run of its command that returns (status, lengths measured)."""
    monkeypatch.setitem(SLICES, "map-test", slice_of(SMALL))
    monkeypatch.setattr(resume, "classes_of", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("cute_softmax.runtime.launch.device_facts", lambda _: H200)
    monkeypatch.setenv("BENCH_COMMIT", "first")
    path = tmp_path / "h200" / "map-test.json"

    def run(*arguments):
        status = cli.main(["map", "map-test", "--save", str(tmp_path), *arguments])
        rows = results.load(path).rows if path.exists() else []
        return status, [row["shape"][-1] for row in rows if row["provider"] == "copy"]

    return run


def test_a_run_stops_in_time_and_goes_on(small_map, monkeypatch, capsys):
    clock = iter(range(100))
    for module in (map_run, resume):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert small_map("--minutes", "0.05") == (1, [8, 16])  # a look at the clock takes a second
    assert "map-test: 2 of 4 cells" in capsys.readouterr().out
    assert small_map() == (0, [8, 16, 24, 33])
    assert next(clock) < 30
    measured = []
    monkeypatch.setattr(resume, "measure", lambda *a: measured.append(a) or [])
    assert small_map() == (0, [8, 16, 24, 33]) and not measured
    monkeypatch.setenv("BENCH_COMMIT", "second")
    assert small_map()[0] == 1 and measured  # what another commit measured does not count


def test_a_suite_goes_on_too(fake_device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(cli.SUITES, "small", replace(slice_of(SMALL).suite, name="small", kind="device"))
    monkeypatch.setattr(resume, "classes_of", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("cute_softmax.runtime.launch.device_facts", lambda _: H200)
    monkeypatch.setenv("BENCH_COMMIT", "first")
    clock = iter(range(100))
    for module in (cli, resume):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    command = ["--suite", "small", "--providers", "copy", "--quick", "--save", str(tmp_path)]
    path = tmp_path / "h200" / "small.json"
    assert cli.main([*command, "--minutes", "0.05"]) == 1
    assert "2 of 4 cases are left" in capsys.readouterr().err
    first = results.load(path).rows
    assert cli.main([*command, "--minutes", "9"]) == 0
    assert results.load(path).rows[:2] == first and len(results.load(path).rows) == 4
    assert "small [2/2]" in capsys.readouterr().err
    assert cli.main(command) == 0 and "small [4/4]" in capsys.readouterr().err  # anew


def test_one_figure_a_cell(small_map, tmp_path):
    small_map()
    rows = results.load(tmp_path / "h200" / "map-test.json").rows
    assert {row["method"] for row in rows} == {"graph-warm"} and len(rows) == 8
    assert all(row["vs_copy"] for row in rows) and json.dumps(rows)


def test_wrong_arguments(capsys, monkeypatch):
    for arguments, words in ((["map-none"], "no slice map-none"), (["--calls", "0"], "at least 1")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["map", *arguments])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    assert cli.main(["map", "--list"]) == 0 and "map-columns: " in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["map"]) == 2


def test_check_and_plot_know_the_map(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SLICES, "map-test", slice_of(SMALL))
    path = results.save(made_up(SLICES["map-test"]), tmp_path)
    assert cli.main(["check", str(path)]) == 0 and "pass  map-test" in capsys.readouterr().out
    assert cli.main(["plot", str(path)]) == 0
    drawn = path.with_suffix(".svg").read_bytes()
    assert b"softmax bf16 4 x N" in drawn
    plot.save(tmp_path / "again", results.load(path))
    assert (tmp_path / "again" / "map-test.svg").read_bytes() == drawn
    found = results.load(path)
    other = results.Results(found.header, [dict(row, suite="rows-forward") for row in found.rows])
    with pytest.raises(ValueError, match="no plot together"):
        plot.save(tmp_path, found, other)
    assert math.isclose(map_judge.ratios(SMALL, map_judge.measured(found))[8], 0.99)
