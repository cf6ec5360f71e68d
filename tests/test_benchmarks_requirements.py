"""What results of the benchmarks must reach."""

from __future__ import annotations

import pytest
from made_up import HEADER, SPEED, made_up, made_up_times

from benchmarks import requirements, results
from benchmarks.cases import INVARIANT, RECOMPUTED, WITH_ENTROPY, Case
from benchmarks.suites import SUITES


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
    assert [v.met for v in verdicts(late)] == [False, True, True, False]
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


@pytest.mark.parametrize(
    ("suite", "counted"),
    [
        ("cross-entropy", {"", RECOMPUTED}),
        ("selective", {"", WITH_ENTROPY}),
        ("routers", None),
        ("routers-fp32", None),
    ],
)
def test_heads_have_bounds(suite, counted):
    """In copies of the logits, which half the speed of one misses; routers beside the best peer."""
    modes = {r.mode for r in requirements.REQUIREMENTS if r.suite == suite}
    assert modes == (counted or {case.mode for case in SUITES[suite].cases})
    bounds = {"vs_copy", "behind_peer"}
    good = [v for v in verdicts(made_up(suite)) if v.requirement.metric in bounds]
    slow = [
        v for v in verdicts(made_up(suite, cute_softmax=SPEED["copy"] / 2)) if v.requirement.metric in bounds
    ]
    assert good and all(v.met for v in good) and not any(v.met for v in slow)
