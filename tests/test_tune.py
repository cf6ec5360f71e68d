"""The tuner: its candidates, its choice, and a whole run with a clock that is made up."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import classes
import pytest
import simulated
import torch
from fake_device import FakeEvent

from benchmarks import __main__ as cli
from benchmarks import timing, tune, tune_choose, tune_file, tune_jobs, tune_rules
from benchmarks.tune_choose import Measured
from cute_softmax import plan_softmax
from cute_softmax.plan import MATHS, NO_PROLOGUE, RowConfig, table_of
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.panel_configs import PanelConfig
from cute_softmax.plan.table import Table
from cute_softmax.plan.tables import path_of

TABLE = table_of("h200")
JOBS = {job.name: job for job in tune.jobs()}
SM90 = H200.architecture


# ---- rules


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(("inputs", "precise"), [(1, False), (1, True), (2, False), (2, True)])
def test_row_candidates_hold_the_row_and_little_more(inputs, precise, architecture):
    target = ARCHITECTURES[architecture]
    for vectors in (1, 7, 64, 125, 1000, 4097, 16385):
        found = list(tune_rules.row_candidates(vectors, inputs, precise, target))
        assert (found or vectors > 4096) and len(set(found)) == len(found)
        for c in found:
            assert c.capacity >= vectors and c.cluster_n <= target.cluster_limit
            least = tune_rules.FILLED if c.threads_per_row in tune_rules.BETWEEN else tune_rules.FULL
            assert vectors >= least * c.capacity or c.threads_per_row == 4
            assert c.threads % c.threads_per_row == 0
            assert c.rows_per_thread == 1 or c.threads_per_row < 32
            assert c.threads * (c.min_blocks or 1) <= 2048
    held = list(tune_rules.row_candidates(16385, inputs, precise, target))
    assert {c.staging[0] for c in held} >= ({"shared"} if target.cluster_limit > 1 else set())


def test_panel_candidates_have_room():
    for inputs in (1, 2):
        found = list(tune_rules.panel_candidates(inputs, SM90))
        assert len(found) == len(set(found))
        for c in found:
            assert c.min_blocks >= 1 and c.min_blocks * c.threads * c.steps * 16 * inputs < SM90.shared_memory
        # Threads that have columns for themselves keep a number for each element, in one size of these at least.
        for steps in (8, 12):
            assert any(c.alone and c.steps == steps and c.has_registers(8 * inputs, SM90) for c in found)
        for c in tune_rules.deep_candidates("wide", inputs, SM90):
            assert c.steps % c.buffers == 0


def test_neighbours_differ_by_a_step():
    near = set(tune_rules.neighbours(RowConfig(128, 4, cluster_n=2)))
    assert {(c.threads, c.steps, c.cluster_n, c.min_blocks) for c in near} == {
        (128, 3, 2, 0),
        (128, 5, 2, 0),
        (128, 4, 1, 0),
        (128, 4, 4, 0),
        (128, 4, 2, 1),
        (160, 3, 2, 0),
        (160, 4, 2, 0),
        (160, 5, 2, 0),
    }
    assert all(c.threads_per_row == c.threads for c in near)
    assert all(c.steps % c.buffers == 0 for c in tune_rules.neighbours(PanelConfig(256, 24, buffers=6)))
    assert {(c.ahead, c.registers) for c in tune_rules.neighbours(TABLE.ahead)} == {
        (3, 6),
        (5, 6),
        (4, 5),
        (4, 7),
    }


# ---- jobs


def test_every_list_of_a_table_has_a_job():
    data = json.loads(path_of("h200").read_text())
    wanted = {
        f"{f}-{m}"
        for f in ("many", "few")
        for m, found in data["row"][f].items()
        if not isinstance(found, str)
    }
    wanted |= {
        f"{f}-{key.replace(' ', '-')}"
        for f in ("held", "shifted", "deep", "streaming")
        for key in data["panel"][f]
    }
    assert set(JOBS) == wanted | {"ahead", "short"}


@pytest.mark.parametrize("name", JOBS)
def test_a_tables_own_configurations_are_candidates_that_plans_use(name):
    job = JOBS[name]
    for dtype in job.dtypes:
        lengths = job.lengths(dtype, 1.15)
        elements = job.of_panels or job.of_short
        assert lengths[0] * (1 if elements else 4) >= job.least
        assert lengths[-1] * (1 if elements else 2) <= job.most
        if job.of_rows:  # long ones begin at sectors of memory and between them
            assert {n * {"bf16": 2, "fp32": 4}[dtype] % 32 for n in lengths[-8:]} == {0, 16}
        tried = tune_jobs.candidates(job, TABLE, dtype, lengths, H200, quick=True)
        own = [config for config, incumbent in tried.items() if incumbent and config]
        fits = tune_jobs.fitting(job, own, dtype, lengths, TABLE, H200)
        used = [config for config in own if fits[config]]
        # Not all hold one of these lengths: some are there for other shapes.
        assert len(used) >= 0.7 * len(own)
        for config in used:
            for n, plan in fits[config].items():
                c = plan.kernel
                assert c.threads == config.threads, n
                if job.of_panels:  # as many as the length needs, or one more
                    needed = replace(c, steps=config.steps).filled(plan.share).steps
                    more = needed > 8 and needed % 2
                    assert c.steps in (needed, min(needed + more, config.steps)), n
                else:
                    assert job.of_short or c.steps == config.steps, n


def test_a_list_in_a_tables_place_and_those_that_share_it():
    new = (RowConfig(32, 1),)
    changed = tune_jobs.with_list(TABLE, ("many", "logsumexp"), new)
    assert (
        changed.many["amax"] is changed.many["entropy"] is new
        and changed.many["softmax"] is TABLE.many["softmax"]
    )
    assert changed.few is TABLE.few
    other = PanelConfig(64, 2)
    assert tune_jobs.with_list(TABLE, ("streaming", 2), (other,)).streaming == {**TABLE.streaming, 2: other}
    assert tune_jobs.with_list(TABLE, ("ahead", None), (other,)).ahead == other


def test_a_table_of_ones_own_may_lack_a_list_of_few_rows():
    """One that was written when the list was another's."""
    older = replace(
        TABLE, few={name: found for name, found in TABLE.few.items() if name != "softmax_widened"}
    )
    found = (tune_jobs.kernel_of(JOBS["many-softmax_widened"], "bf16", 4096, t, H200) for t in (older, TABLE))
    assert len({*found}) == 1


def test_a_table_of_ones_own_may_lack_a_list_of_what_is_only_read():
    """Then that of one input serves; tuned by itself it takes nothing from this."""
    data = json.loads(path_of("h200").read_text())
    del data["panel"]["held"]["0"]
    older = tune_jobs.Table.of("older", data)
    assert older.held[0] is older.held[1] == TABLE.held[1]
    other = PanelConfig(64, 2)
    both = tune_jobs.with_list(older, ("held", 1), (other,))
    assert both.held[0] is both.held[1] == (other,)
    one = tune_jobs.with_list(older, ("held", 0), (other,))
    assert one.held[0] == (other,) and one.held[1] == TABLE.held[1]


@pytest.mark.parametrize("name", ["held-1", "shifted-2"])
def test_panels_may_be_left_to_the_next_list(name):
    job = JOBS[name]
    tried = tune_jobs.candidates(job, TABLE, "bf16", [8000], H200, quick=False)
    found = tune_jobs.fitting(job, list(tried), "bf16", [8000], TABLE, H200)
    streamed = found[None][8000].kernel  # or it is swept over, which an odd number of columns is
    assert tried[None] and (streamed.movement == "sweep" if job.odd else streamed.buffers > 1)
    assert any(config is not None and fits for config, fits in found.items())


# ---- choice


def measured(name, longest, us, incumbent=False):
    return Measured(name, longest, incumbent, {n: [t, t] for n, t in us.items()})


def test_a_chain_holds_every_length_with_few_configurations():
    lengths = [1, 2, 3, 4]
    small = measured("small", 2, {1: 1.0, 2: 1.0})
    large = measured("large", 4, {1: 2.0, 2: 2.0, 3: 1.0, 4: 1.0})
    middle = measured("middle", 3, {1: 1.5, 2: 1.5, 3: 1.001})
    found = tune_choose.chain([large, middle, small], lengths, 3)
    assert [m.config for m in found] == ["small", "large"]  # the middle one saves less than it costs
    assert [m.config for m in tune_choose.chain([large, middle, small], lengths, 1)] == ["large"]
    with pytest.raises(ValueError, match="at most 1 classes, of 2 configurations, holds all 4 lengths"):
        tune_choose.chain([small, measured("far", 4, {3: 1.0, 4: 1.0})], lengths, 1)
    # Where a configuration is another class at each length, each of them counts, and costs.
    small.classes, large.classes = {1: "a", 2: "b"}, {1: "c", 2: "c", 3: "c", 4: "c"}
    assert [m.config for m in tune_choose.chain([large, middle, small], lengths, 3)] == ["small", "large"]
    assert [m.config for m in tune_choose.chain([large, small], lengths, 2)] == ["large"]
    holders = tune_choose.holders(found, [1, 2, 3, 4, 5])
    assert {n: m.config for n, m in holders.items()} == {1: "small", 2: "small", 3: "large", 4: "large"}


def test_an_incumbent_stays_unless_beaten_by_two_per_cent_twice():
    old = measured("old", 1, {1: 1.0}, incumbent=True)
    for times, wins in (([0.97, 0.97], "new"), ([0.985, 0.985], "old"), ([0.9, 0.99], "old")):
        new = Measured("new", 1, us={1: times})
        assert tune_choose.chain([old, new], [1], 1)[0].config == wins
        assert tune_choose.single([old, new], [1]).config == wins


def test_few_rows_count_a_quarter():
    """What is 5% faster for many rows, and takes half as long again where they are few, is not chosen; 15% are worth
    it."""
    wide = Measured("wide", 1, us={1: [1.0, 1.0]}, few={1: 1.0})
    for us, wins in ((0.95, "wide"), (0.85, "deep")):
        deep = Measured("deep", 1, us={1: [us, us]}, few={1: 1.5})
        assert tune_choose.chain([wide, deep], [1], 1)[0].config == wins
        both = tune_choose.together([[wide, deep], [wide, deep]])
        assert tune_choose.chain(both, [1], 1)[0].config == wins


@pytest.mark.parametrize("seed", range(30))
def test_no_chain_is_better(seed):
    """Against all chains there are."""
    draw = random.Random(seed)
    lengths = list(range(1, 7))
    pool = []
    for i in range(6):
        longest = draw.randint(1, 6)
        first = draw.randint(1, longest)
        pool.append(measured(i, longest, {n: draw.uniform(1, 3) for n in range(first, longest + 1)}))
    pool.append(measured("all", 6, dict.fromkeys(lengths, 3.5)))
    best = tune_choose.best_times(pool, lengths)

    def cost(chosen):
        held = tune_choose.holders(chosen, lengths)
        times = [held[n].time(n) if n in held else None for n in lengths]
        if None in times:
            return math.inf
        return len(chosen) * tune_choose.PENALTY + sum(
            math.log(t / best[n]) for t, n in zip(times, lengths, strict=True)
        )

    every = (
        c for k in (1, 2, 3) for c in itertools.combinations(pool, k) if len({m.longest for m in c}) == k
    )
    assert cost(tune_choose.chain(pool, lengths, 3)) == pytest.approx(min(map(cost, every)))


def test_of_several_dtypes_the_mean_counts():
    bf16 = [
        measured("a", 8, {4: 1.0, 8: 2.0}, True),
        measured("b", 8, {8: 1.0}),
        measured("only here", 8, {8: 1}),
    ]
    fp32 = [measured("a", 8, {4: 4.0, 8: 2.0, 16: 1.0}, True), measured("b", 8, {8: 9.0})]
    a, b = tune_choose.together([bf16, fp32])
    assert (a.config, a.us, a.incumbent) == ("a", {4: [2.0, 2.0], 8: [2.0, 2.0]}, True)
    assert (b.config, b.us) == ("b", {8: [3.0, 3.0]})
    assert tune_choose.chain([a, b], [8], 2)[0].config == "a"


def test_what_is_there_for_other_shapes_stays_behind_what_holds_as_much():
    short, long = measured("short", 8, {8: 1.0}), measured("long", 64, {64: 1.0})
    beaten, other = measured("beaten", 64, {64: 2.0}, True), measured("other", 6, {4: 2.0}, True)
    longer = measured("longer", 96, {96: 2.0}, True)
    beaten.taken, longer.taken = {64}, {96}
    known = ["beaten", "other", "longer", "not measured", "short"]
    found = tune_choose.with_others([short, long], [short, long, beaten, other, longer], known)
    assert found == ["short", "other", "long", "longer", "not measured"]


def test_rows_between_two_lengths_keep_their_place():
    """By 128 threads: 9 and 12 steps hold no more of what was measured than 8; 7 steps would take 512 from these."""

    def config(steps):
        return RowConfig(128, steps)

    picked = [measured(config(8), 1024, {512: 1.0, 1024: 1.0}), measured(config(16), 2048, {2048: 1.0})]
    beaten = Measured(config(15), 1024, True, {1024: [3.0]}, {1024})
    known = [config(n) for n in (9, 7, 12, 15, 17)]
    found = tune_choose.with_others(picked, [*picked, beaten], known, lambda c: c.capacity)
    assert [c.steps for c in found] == [8, 7, 9, 12, 16, 17]


def test_short_candidates_are_classes():
    found = list(tune_rules.short_candidates())
    assert len(set(found)) == len(found) < 1000
    assert {c.capacity for c in found} == {*tune_rules.SHORT}
    job = JOBS["short"]
    longest = [c for c in found if c.capacity == 96]
    for dtype in job.dtypes:
        fits = tune_jobs.fitting(job, longest, dtype, [50, 80, 96], TABLE, H200)
        assert all(set(plans) == {50, 80, 96} for plans in fits.values())
        assert all(p.movement == "short" for plans in fits.values() for p in plans.values())


def test_of_the_deep_one_holds_shorter_columns():
    made = [
        measured(PanelConfig(256, 24, buffers=6), 100, {50: 1.0, 100: 3.0}),
        measured(PanelConfig(512, 24, buffers=6), 100, {50: 2.0, 100: 1.0}),
    ]
    found = tune_choose.chain(tune.bounded(made, JOBS["deep-column-1"]), [50, 100], 2)
    assert [(m.config.threads, m.config.longest) for m in found] == [(256, 50), (512, 1 << 31)]


def test_both_precisions_share_what_both_have():
    short, long, wide = RowConfig(32, 1), RowConfig(64, 4), RowConfig(128, 4)
    lists = {
        False: [short, long],
        True: [short, wide],
    }
    assert [(c.threads_per_row, c.precise) for c in tune.merged(lists)] == [
        (32, None),
        (64, False),
        (128, True),
    ]
    assert {c.precise for c in tune.merged({False: lists[False]})} == {None}


# ---- files


def test_a_file_says_what_the_table_has():
    """To the letter: the shipped table is what its own configurations would be written as."""
    text = path_of("h200").read_text()
    figures = json.loads(text)["figures"]
    assert tune_file.text_of(tune_file.data_of(TABLE, "NVIDIA H200", figures)) + "\n" == text
    # Panels were tuned as a whole: each configuration that holds a measured length says how fast.
    assert set(figures) >= {"held-1", "held-2", "shifted-1", "shifted-2"}


# ---- a run


@pytest.fixture
def made_up_gpu(fake_device, monkeypatch, tmp_path):
    """A GPU whose kernels take the more time the fewer threads they have; rows are wrong by 256 threads."""

    right = {}  # by work, which lives as long as this does

    def results_of(work):
        if id(work) not in right:
            inputs = list(work.tensors[: len(MATHS[work.math, True].inputs)])
            right[id(work)] = work, simulated.simulated(work.math, inputs, work.dims, NO_PROLOGUE, [], None)
        return right[id(work)][1]

    class Call:
        def __init__(self, work, plan):
            self.work, self.plan, self.launched = work, plan, False

        def on_device(self, index, *addresses, numbers=()):
            FakeEvent.now += 100 / self.plan.kernel.threads
            if self.launched:  # again, for its time alone
                return
            self.launched = True
            c, values = self.plan.kernel, results_of(self.work)
            wrong = c.movement == "row" and c.threads == 256
            for result, value in zip(self.work.tensors[-len(values) :], values, strict=True):
                if 0 in result.stride():  # one number a row
                    result, value = result[:, :1], value[:, :1]
                result.copy_(value * (2 if wrong else 1))

    class Properties:
        L2_cache_size, major, minor, multi_processor_count, name = H200.l2, 9, 0, 132, "NVIDIA H200"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(tune, "precompile", lambda kernels, load: iter(kernels))
    monkeypatch.setattr(tune.launch, "call_for", Call)
    monkeypatch.setattr(tune.launch, "device_facts", lambda _: H200)
    monkeypatch.setattr(tune_jobs, "FILL_BYTES", 1 << 14)
    monkeypatch.setattr(tune_jobs, "PANEL_FILL_BYTES", 1 << 14)
    monkeypatch.setattr(tune_jobs, "VOCABULARIES", ())
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # no time is measured that it would be in
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    bounds = {"many-softmax": (16, 1 << 14), "few-logsumexp": (1 << 14, 1 << 16), "held-1": (16, 1 << 11)}
    bounds["short"] = (1, 32)
    short = [replace(JOBS[name], least=least, most=most) for name, (least, most) in bounds.items()]
    monkeypatch.setattr(tune, "jobs", lambda: short)
    return tmp_path


def test_a_run_writes_a_table_that_plans_are_made_of(made_up_gpu, capsys):
    assert cli.main(["tune", "many-softmax", "--quick", "--out", str(made_up_gpu / "mine.json")]) == 0
    data = json.loads((made_up_gpu / "mine.json").read_text())
    mine = Table.of("mine", data)
    assert f"many-softmax: mine.json, {mine.digest}" in capsys.readouterr().out
    assert mine.held == TABLE.held and mine.few == TABLE.few
    figures = data["figures"]["many-softmax"]
    assert {f["dtype"] for f in figures} == {"bf16", "fp32"} and all(
        f["us"] > 0 and f["over_best"] >= 1 for f in figures
    )
    lengths = {f["length"] for f in figures if f["dtype"] == "bf16"}
    assert any(n % 8 for n in lengths), "rows that begin off a boundary"
    assert all(("few_us" in f) == (f["length"] * (2 if f["dtype"] == "bf16" else 4) <= 8192) for f in figures)
    for n in lengths:
        plan = plan_softmax((4096, n), device=replace(H200, table=str(made_up_gpu / "mine.json")))
        assert plan.kernel.threads != 256  # wrong results are no candidates
    # Of rows of 16 KB at most; longer ones were not measured.
    assert all(c.threads != 256 for c in mine.many["softmax"] if 8 < c.capacity <= 1024)
    known = {tune_jobs.plain(c) for c in TABLE.many["softmax"]}
    assert all(c.threads != 256 or tune_jobs.plain(c) in known for c in mine.many["softmax"])
    # A second run goes on from the first one's table and finds nothing better in it.
    assert cli.main(["tune", "many-softmax", "--quick", "--out", str(made_up_gpu / "mine.json")]) == 0
    again = Table.of("mine", json.loads((made_up_gpu / "mine.json").read_text()))
    assert len(again.many["softmax"]) <= len(mine.many["softmax"]) + 2


@classes.however_few()
def test_short_rows_are_tuned(made_up_gpu):
    assert cli.main(["tune", "short", "--quick", "--out", str(made_up_gpu / "mine.json")]) == 0
    mine = Table.of("mine", json.loads((made_up_gpu / "mine.json").read_text()))
    assert mine.short != TABLE.short and max(c.capacity for c in mine.short) >= 32
    assert {c.threads for c in mine.short} == {256}


def test_the_users_own_table(made_up_gpu, monkeypatch):
    from cute_softmax.runtime import tables

    assert cli.main(["tune", "held-1", "few-logsumexp", "--quick"]) == 0
    own = tables.own_table("NVIDIA H200")
    assert tables.table_for("NVIDIA H200") == str(own) and set(json.loads(own.read_text())["figures"]) == {
        "held-1",
        "few-logsumexp",
    }


def test_wrong_arguments(capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", "many-nothing"])
    assert stopped.value.code == 2 and "no job many-nothing" in capsys.readouterr().err
    assert cli.main(["tune", "--list"]) == 0 and "held-1" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
