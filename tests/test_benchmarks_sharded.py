"""The suite of shared rows: its calls on two ranks of the CPU, what is required, and what more ranks would cost."""

from __future__ import annotations

import on_ranks_torch
import pytest
import ranks
from made_up import HEADER

from benchmarks import requirements, results
from benchmarks.cases import Case
from benchmarks.sharded_judge import BOTH, WAYS, Cost, fitted, model


def row(op, shape, provider, us, mode="", method="events-cold"):
    figures = {"us": us, "gbps": None, "vs_copy": None, "spread": 0.0}
    return results.make_row("sharded", Case(op, shape, mode=mode), provider, method, **figures)


def test_every_call_is_right_on_two_ranks():
    ranks.run(2, on_ranks_torch.benchmark)


SHAPE = (4096, 151936)


@pytest.mark.parametrize(
    ("op", "mode", "most"),
    [("logsumexp", "", 145.0), ("softmax", "", 190.0), ("cross_entropy", BOTH, 365.0)],
)
def test_what_is_required(op, mode, most):
    others = [
        row(op, SHAPE, p, us, mode) for p, us in (("local", 100.0), ("all-gather", 35.0), ("copy", 206.25))
    ]
    for us, met in ((most, True), (most + 1, False)):
        found = results.Results(HEADER, [row(op, SHAPE, "cute_softmax", us, mode), *others])
        (verdict,) = requirements.judge(found)
        assert verdict.met is met, str(verdict)
    few = [
        row(op, SHAPE, p, 1.0, mode, "graph-rotating")
        for p in ("cute_softmax", "local", "all-gather", "copy")
    ]
    (verdict,) = requirements.judge(results.Results(HEADER, [row(op, SHAPE, "all-gather", 9.0, mode), *few]))
    assert verdict.met and "graph" in str(verdict)
    (verdict,) = requirements.judge(results.Results(HEADER, others))
    assert not verdict.met and "no figure" in str(verdict)


def test_ways_of_a_softmax():
    """By a collective the best of its two ways counts; on chip has a bound of its own."""
    others = [
        row("softmax", SHAPE, p, us)
        for p, us in (("local", 100.0), ("all-gather", 35.0), ("cute_softmax", 10.0))
    ]
    ways = [
        row("softmax", SHAPE, "cute_softmax", us, way)
        for way, us in zip(WAYS, (250.0, 190.0, 126.0), strict=True)
    ]
    collective, chip = requirements.judge(results.Results(HEADER, [*others, *ways]))
    assert collective.met and collective.value == 190.0
    assert not chip.met and chip.bound == 125.0


def test_ways_of_a_loss():
    """On chip it is compared with a local one in both directions."""
    both = "forward + backward"
    others = [
        row("cross_entropy", SHAPE, p, us, both)
        for p, us in (("local", 100.0), ("all-gather", 35.0), ("copy", 100.0), ("cute_softmax", 120.0))
    ]
    ways = [
        row("cross_entropy", SHAPE, "cute_softmax", us, way)
        for way, us in ((WAYS[0], 200.0), (WAYS[-1], 120.0))
    ]
    collective, chip = requirements.judge(results.Results(HEADER, [*others, *ways]))
    assert collective.value == 200.0 and collective.bound == 195.0 and not collective.met
    assert chip.met and chip.bound == 125.0


def test_more_ranks():
    """The cost that made the times comes back; more ranks have less to read, and a longer collective."""
    cost = Cost(30.0, 20_000.0)
    rows = [
        row("all_gather", (2, size), "all-gather", cost.us(2, size)) for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    again = fitted(rows)
    assert again.first == pytest.approx(30.0) and again.rate == pytest.approx(20_000.0)
    assert cost.us(1, 1 << 20) == 0
    assert cost.us(8, 4) == pytest.approx(30 + 6 * 0.6, abs=0.1)
    assert cost.us(16, 4) == pytest.approx(30 + 13 * 0.6 + 2.7, abs=0.1)
    for n in (2, 8, 64):
        mode = f"{n} ranks"
        rows += [
            row(op, SHAPE, "local", us, mode) for op, us in (("logsumexp", 400 / n), ("softmax", 700 / n))
        ]
        rows.append(row("merge", SHAPE, "local", 3.0, mode))
    lines = model(results.Results(HEADER, rows))
    assert [line.ranks for line in lines] == [2, 8, 64]
    first, *_, last = lines
    assert first.whole_logsumexp == pytest.approx(200 + 3 + first.gather) and last.gather > first.gather
    assert last.whole_softmax == pytest.approx(400 / 64 + 700 / 64 + 3 + last.gather)
    for missing in (rows[:1], rows[:3]):
        with pytest.raises(ValueError, match="measured"):
            model(results.Results(HEADER, missing))
