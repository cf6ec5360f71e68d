"""The benchmarks' plain data and what is made of it: cases, results, tables, plots, requirements, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import cases, console, operations, report, requirements, results
from benchmarks.cases import INVARIANT, LADDER, PROVIDERS, SUITES, Case

ROOT = Path(__file__).resolve().parent.parent
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
    """Results of a device or graph suite as a run would give them."""
    rows = []
    method = {"device": "events-cold", "graph": "graph-warm"}[SUITES[suite].kind]
    for case in SUITES[suite].with_dtype("bf16").cases:
        for name in SUITES[suite].providers:
            gbps = {**SPEED, "liger": 3900.0, "cudnn": 1000.0, **speed}[name]
            if name == "liger" and case.shape[-1] > 65536:
                error = "RuntimeError: Cannot launch Triton kernel"
                rows.append(results.make_row(suite, case, name, method, error=error))
                continue
            us = case.traffic / gbps / 1e3
            rows.append(results.make_row(suite, case, name, method, us=us, gbps=gbps, spread=0.004))
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


def test_traffic_of_masks():
    scores = 2 * 3 * 4 * 8 * 2 * 2
    for mode, more in (
        (cases.SCALED, 0), (cases.MASK, 2 * 3 * 4 * 8), (cases.ROW_MASK, 8), (cases.SHARED_MASK, 32),
        (cases.BATCH_MASK, 64),
    ):  # fmt: skip
        assert Case("masked_softmax", (2, 3, 4, 8), mode=mode).traffic == scores + more, mode
    # Of 4 x 8 scores 1 + 2 + 3 + 4 are read, and all written.
    assert Case("masked_softmax", (2, 3, 4, 8), mode=cases.CAUSAL).traffic == 6 * (32 + 10) * 2


def test_traffic_of_a_product_and_its_gradients():
    mode = f"{cases.DEPTH}3"
    assert Case("softmax_matmul", (2, 4, 8), mode=mode).traffic == 2 * (4 * 8 + (4 + 8) * 3) * 2
    # Scores, values and what comes in are read, gradients of scores and values written.
    case = Case("softmax_matmul_backward", (2, 4, 8), "fp32", mode=mode)
    assert case.traffic == 2 * (2 * 4 * 8 + (4 + 2 * 8) * 3) * 4 and case.output_shape == (2, 4, 8)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
def test_suites_are_made_of_known_parts(suite):
    assert suite.cases and len(set(suite.cases)) == len(suite.cases)
    assert set(suite.providers) <= {*PROVIDERS, *LADDER} and "cute_softmax" in suite.providers
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
    results_of = {
        dtype: {c.result for c in SUITES["vocabularies"].with_dtype(dtype).cases}
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert results_of == {"bf16": {"bf16", "fp32"}, "fp16": {"fp16", "fp32"}, "fp32": {"fp32", "bf16"}}
    assert report.suite_title("rows-forward-fp16") == SUITES["rows-forward"].title
    assert report.suite_title("matmul-backward") == SUITES["matmul-backward"].title
    assert report.suite_title("matmul-fp16") == SUITES["matmul"].title


def test_other_shapes_keep_the_modes_of_a_suite():
    suite = SUITES["overhead"].with_shapes([(2, 3), (4, 5)])
    assert len(suite.cases) == 6 and len({c.mode for c in suite.cases}) == 3


@pytest.mark.parametrize("text", ["", "4x", "0x4", "4xfour", "-1x2"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError):
        cases.parse_shape(text)


def test_shapes_parse():
    assert cases.parse_shape("4096x8192") == (4096, 8192)


def test_a_reduction_reads_its_input_and_returns_the_kept_dimensions():
    case = Case("logsumexp", (4, 8, 2), dim=(0, -1))
    assert case.traffic == 4 * 8 * 2 * 2 and case.output_shape == (8,)
    assert Case("softmax", (4, 8, 2), dim=(0, -1)).output_shape == (4, 8, 2)


def test_labels_tell_the_cases_apart():
    assert Case("softmax", (4, 8)).label == "4 x 8"
    assert Case("softmax", (4, 8), dim=(0,), view=cases.TRANSPOSED).label == "4 x 8, transposed, dim 0"
    assert Case("softmax", (4, 8, 2), dim=(1, 2), mode="grad").label == "4 x 8 x 2, dim 1, 2, grad"
    for suite in SUITES.values():
        assert len(set(cases.labels(suite.cases))) == len(suite.cases)
    assert cases.labels(SUITES["reductions"].cases)[1] == "32768 x 50304, amax"


@pytest.mark.parametrize(
    ("suite", "wanted"),
    [
        ("columns-forward", {((128, 1048576), (0,)), ((1024, 262144), (0,)), ((4096, 65536), (0,))}),
        ("columns-tall", {((65536, 4096), (0,)), ((262144, 1024), (0,)), ((1048576, 64), (0,))}),
        (
            "any-dims",
            {
                ((32, 512, 56, 56), (1,)),
                ((8, 1000, 128, 128), (1,)),
                ((64, 128, 32, 256), (1, 3)),
                ((8, 16, 2048, 2048), (-2,)),
            },
        ),
        (
            "split-rows",
            {
                ((512, 1048576), (-1,)),
                ((64, 3000001), (-1,)),
                ((64, 16777216), (-1,)),
                ((4, 268435456), (-1,)),
            },
        ),
        (
            "views",
            {((16384, 4097), (-1,)), ((16384, 8192), (0,)), ((16384, 8192), (1,)), ((8192, 50257), (-1,))},
        ),
    ],
)
def test_suites_over_any_dimension(suite, wanted):
    assert {(case.shape, case.dim) for case in SUITES[suite].cases} == wanted


def test_the_backward_takes_every_shape_of_the_forward():
    both = [case.shape for name in ("columns-forward", "columns-tall") for case in SUITES[name].cases]
    assert [case.shape for case in SUITES["columns-backward"].cases] == both


def test_other_shapes_keep_dims_and_views():
    suite = SUITES["views"].with_shapes([(64, 33)])
    assert {(c.dim, c.view) for c in suite.cases} == {(c.dim, c.view) for c in SUITES["views"].cases}


# ---- results


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


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert results.commit() == "abc"


def test_errors_become_one_line_without_folders():
    text = results.describe(RuntimeError("\n\n/home/me/x/lib.so: cannot do 3/4 of it\nmore"))
    assert text == "RuntimeError: lib.so: cannot do 3/4 of it"
    assert len(results.describe(ValueError("a" * 999))) == 200
    assert results.describe(ModuleNotFoundError("No module named 'x'")).startswith("not installed")
    assert results.describe(AssertionError()) == "AssertionError"


# ---- tables, plots, requirements


def test_table_shows_speed_ratio_winner_and_refusals():
    (table,) = report.tables(made_up())
    text = console.as_text(table)
    assert table.columns == ["shape", *PROVIDERS]
    first = text.splitlines()[3]
    assert first.startswith("32768 x 1024") and "4100 0.988*" in first and first.count("*") == 1
    *_, last_row, _, footer, note = text.splitlines()
    assert last_row.startswith("4096 x 131072") and "refuses" in last_row
    assert (
        note.startswith("The fastest of each row is marked, the copy apart. Spread")
        and "0.4% at most" in note
    )
    assert "geometric mean" in footer and "0.988" in footer and "(12 of 13)" in footer
    (reason,) = report.refusals(made_up())
    assert reason.startswith("liger at 4096x131072: RuntimeError")


@pytest.mark.parametrize(
    "speed, marked",
    [
        ({}, ["cute_softmax"]),
        ({"quack": 4101.0}, ["cute_softmax", "quack"]),  # 0.988 both
        ({"quack": 4110.0, "liger": 4110.0}, ["liger", "quack"]),
        ({"copy": 4000.0, "torch": 4105.0}, ["torch"]),
    ],
)
def test_a_rows_winner_is_marked(speed, marked):
    (table,) = report.tables(made_up(**speed))
    found = {row: [table.columns[j] for i, j in sorted(table.strong) if i == row] for row in range(12)}
    assert all(names == marked for names in found.values())


def test_a_winner_on_the_host_is_that_of_the_ratio_to_torch():
    (table,) = report.tables(made_up_times("overhead", torch=5.005))
    assert {table.columns[j] for _, j in table.strong} == {"cute_softmax", "torch"}
    (table,) = report.tables(made_up_times("overhead", torch=4.9))
    assert {table.columns[j] for _, j in table.strong} == {"torch"}


def test_nothing_is_marked_where_no_peer_took_part():
    found = made_up()
    alone = [row for row in found.rows if row["provider"] in ("cute_softmax", "copy")]
    refused = [{**row, "error": "RuntimeError: no"} for row in found.rows if row["provider"] == "torch"]
    for row in refused:
        del row["us"]
    (table,) = report.tables(results.Results(found.header, alone + refused))
    assert not table.strong and table.note.startswith("Spread") and "*" not in console.as_text(table)


def test_markdown_table_has_a_cell_for_every_provider():
    (table,) = report.tables(made_up())
    lines = console.as_markdown(table).splitlines()
    assert len(lines) == 2 + 13 + 1 + 2
    assert all(line.count("|") == len(PROVIDERS) + 2 for line in lines[:-2])
    assert "**4100 0.988**" in lines[2] and "refuses" in lines[-4] and "Spread" in lines[-1]


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
    assert "4100 0.988*" in captured.out and "suite" in captured.err


def test_tables_and_refusals_show_dim_view_and_operation():
    (table,) = report.tables(made_up("any-dims"))
    assert "64 x 128 x 32 x 256, dim 1, 3" in console.as_text(table)
    (table,) = report.tables(made_up("fp32-any"))
    assert "fp32" in table.title and "1024 x 131072, dim 0, softmax_backward" in console.as_text(table)
    found = made_up("views")
    refused = {"suite": "views", "provider": "quack", "error": "no"}
    found.rows.append(found.rows[7] | refused)
    assert report.refusals(found) == ["quack at 16384x8192 transposed dim 0: no"]


def test_a_warm_graph_is_shown_as_time():
    (table,) = report.tables(made_up("few-rows"))
    text = console.as_text(table)
    assert "time and ratio to copy" in table.title and "0.125 µs 0.988" in text and "geometric" in text


def test_lines_join_only_what_is_ordered():
    plot = pytest.importorskip("benchmarks.plot", reason="needs matplotlib")

    def runs(*cases):
        return plot._runs([results.Key(case, "events-cold") for case in cases])

    def case(*shape, **options):
        return Case("softmax", shape, **options)

    assert runs(case(4, 8), case(4, 16), case(8, 16), case(16, 32), case(16, 64)) == [[0, 1, 2], [3, 4]]
    assert runs(case(4, 8), case(4, 16, dim=(0,)), case(4, 32), case(4, 32, mode="causal")) == [
        [0],
        [1],
        [2],
        [3],
    ]
    assert runs(case(4, 8), case(4, 8, 8)) == [[0], [1]]


@pytest.mark.parametrize(
    "suite", ["rows-forward", "overhead", "first-call", "any-dims", "few-rows", "reductions", "views"]
)
def test_plots_are_the_same_bytes_every_time(tmp_path, suite):
    plot = pytest.importorskip("benchmarks.plot", reason="needs matplotlib")
    found = made_up(suite) if SUITES[suite].kind in ("device", "graph") else made_up_times(suite)
    one, two = plot.save(tmp_path / "a", found), plot.save(tmp_path / "b", found)
    assert [p.name for p in one] == [f"{suite}.png", f"{suite}.svg"]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    svg = one[1].read_text()
    assert "cute_softmax" in svg and "<dc:date>" not in svg
    assert one[0].read_bytes().startswith(b"\x89PNG")
    together = plot.save(tmp_path / "c", found, found)
    assert [p.name for p in together] == [p.name for p in one]
    title = " ".join(SUITES[suite].title.split()[:4])  # a long one takes two lines
    assert (svg.count(title), together[1].read_text().count(title)) == (1, 2)


def verdicts(found: results.Results) -> list[requirements.Verdict]:
    return list(requirements.judge(found))


def test_good_results_meet_their_requirements():
    good = [made_up("rows-forward"), made_up("rows-backward"), made_up("fp32-rows"), made_up("odd-rows")]
    for found in [*good, made_up_times("overhead"), made_up_times("first-call")]:
        assert verdicts(found) and all(v.met for v in verdicts(found)), [str(v) for v in verdicts(found)]


ANY_DIM = [
    "columns-forward",
    "columns-tall",
    "columns-backward",
    "any-dims",
    "split-rows",
    "fp32-any",
    "views",
]


@pytest.mark.parametrize("suite", [*ANY_DIM, "few-rows"])
def test_every_case_of_the_suites_over_any_dimension_is_required(suite):
    required = {case for r in requirements.REQUIREMENTS if r.suite == suite for case in r.cases}
    assert required == set(SUITES[suite].with_dtype("bf16").cases)
    assert all(v.met for v in verdicts(made_up(suite)))


@pytest.mark.parametrize("suite", ANY_DIM)
def test_half_the_speed_of_a_copy_is_too_slow(suite):
    assert not any(v.met for v in verdicts(made_up(suite, cute_softmax=SPEED["copy"] / 2)))


def test_a_row_beyond_the_chip_has_its_own_bound():
    fits, odd, beyond = verdicts(made_up("split-rows", cute_softmax=SPEED["copy"] * 0.65))
    assert not fits.met and not odd.met and beyond.met and "4 x 268435456" in str(beyond)


def test_few_rows_must_beat_the_best_peer_and_aim_at_a_time():
    behind, *aims = verdicts(made_up("few-rows", cute_softmax=3990.0))
    assert not behind.met and "must <= +0.0%" in str(behind)
    assert len(aims) == 5 and all(v.met for v in aims)  # an aim is not enforced
    assert str(aims[-1]).endswith("at 64 x 1048576; aim <= 70 µs (reached)")
    alone = made_up("few-rows")
    alone.rows = [row for row in alone.rows if row["provider"] in ("cute_softmax", "copy")]
    assert not verdicts(alone)[0].met


@pytest.mark.parametrize(
    ("factor", "met"), [(1.0, (True, True)), (1.3, (True, False)), (1.6, (False, False))]
)
def test_what_batch_invariance_may_cost(factor, met):
    found = made_up("batch-invariant")
    for row in found.rows:
        if row.get("mode") == INVARIANT:
            row["us"] *= factor
    few, many, odd = verdicts(found)
    assert (few.met, many.met) == met and odd.met  # of odd lengths there is an aim


@pytest.mark.parametrize(("us", "met"), [(3.0, True), (3.3, True), (3.4, False)])
def test_logsumexp_takes_no_longer_than_softmax(us, met):
    found = made_up("reductions")
    for case, time in ((Case("logsumexp", (1, 151936)), us), (Case("softmax", (1, 151936)), 3.3)):
        row = results.make_row(
            "reductions", case, "cute_softmax", "graph-warm", us=time, gbps=1.0, spread=0.0
        )
        found.rows.append(row)
    bandwidth, time = verdicts(found)
    assert bandwidth.met and "(logsumexp)" in str(bandwidth)
    assert time.met == met and "1 x 151936" in str(time)
    assert not verdicts(made_up("reductions"))[1].met  # without the graphs


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
