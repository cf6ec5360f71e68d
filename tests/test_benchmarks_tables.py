"""Tables and plots of the benchmarks' results."""

from __future__ import annotations

import pytest
from made_up import made_up, made_up_times

from benchmarks import console, report, results
from benchmarks.cases import PROVIDERS, Case
from benchmarks.suites import SUITES


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


def test_calls_that_move_next_to_nothing_are_shown_as_time():
    found = made_up("rows-forward")
    (table,) = report.tables(found)
    assert "GB/s" in table.title
    for row in found.rows[:3]:
        row["gbps"] = row["gbps"] / 1e4
    (table,) = report.tables(found)
    assert "GB/s" not in table.title and "µs" in console.as_text(table)


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
    assert "fill: #ffffff" in svg.partition("axes_1")[0]  # a ground of its own, on dark pages too
    assert one[0].read_bytes().startswith(b"\x89PNG")
    together = plot.save(tmp_path / "c", found, found)
    assert [p.name for p in together] == [p.name for p in one]
    title = " ".join(SUITES[suite].title.split()[:4])  # a long one takes two lines
    assert (svg.count(title), together[1].read_text().count(title)) == (1, 2)
