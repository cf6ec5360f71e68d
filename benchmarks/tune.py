"""Measures configurations on this machine's GPU and writes the table that plans use.

python -m benchmarks tune [JOB...] [--quick]     the jobs (all), into the user's own table of this GPU

A job is one list of a table (see `cute_softmax.plan.table`). Its candidates come from rules (`tune_rules.py`) and from
the table as it is, are compiled on all cores, compared with the plan of today, timed at every length that they fit, in
two passes, and chosen so that as few as possible hold every length at nearly the best time (`tune_choose.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from cute_softmax.plan import PanelPlan, Plan, RowConfig, Table, table_of
from cute_softmax.plan.hardware import Device
from cute_softmax.runtime import launch
from cute_softmax.runtime.precompile import precompile
from cute_softmax.runtime.tables import own_table

from . import console, timing
from .parsers import of_tune
from .tune_choose import Measured, best_times, chain, holders, single, together, with_others
from .tune_file import said, save
from .tune_jobs import (
    Config,
    Job,
    candidates,
    fitting,
    incumbents,
    jobs,
    kernel_of,
    plain,
    planned,
    with_list,
    work_of,
)

CALLS, PASSES = 3, 2
STEP, PANEL_STEP, QUICK_STEP = 1.25, 1.12, 1.6  # from one length to the next
# The longest length that a configuration holds, over the shortest that it is timed at, of rows and of panels, whose
# steps are filled, so that those of fewer serve what is shorter; of rows that the table has, and of short ones, whose
# first configuration holds all that are shorter.
REACH, PANEL_REACH, KNOWN_REACH = 2, 1.3, 16
# Classes of a list, for one dtype: of rows with few of them and narrow vectors 48. Panels of 48 would take 1.04 of the
# time, up to 1.4 (docs/experiments.md, "Filled panels").
MOST = {"many": 24, "few": 4, "held": 64, "shifted": 64, "deep": 2, "short": 12}


def step_of(job: Job, quick: bool) -> float:
    """From one length to the next."""
    return QUICK_STEP if quick else PANEL_STEP if job.of_panels else STEP


def reach_of(job: Job, known: bool) -> float:
    """The longest length that a configuration holds, over the shortest that it is timed at; known: to the table."""
    if job.of_panels:
        return PANEL_REACH
    return KNOWN_REACH if known or job.of_short else REACH


def load_or_skip(kernel: object) -> None:
    """Compiles a class into the store; what cannot be compiled is no candidate and says nothing here."""
    with suppress(Exception):
        launch.function_of(kernel)


class Bench:
    """Times the plans of one length on tensors of its own."""

    def __init__(self, job: Job, dtype: str, length: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(1)

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if dtype == torch.int64:
                return torch.zeros(shape, dtype=dtype, device=device)
            return torch.randn(shape, dtype=dtype, device=device, generator=generator)

        self.work = work_of(job, dtype, length, make)
        self.addresses = [t.data_ptr() for t in self.work.tensors]
        facts = job.facts
        # Of an expanded result the one number that it holds for each row.
        results = self.work.tensors[len(facts.inputs) + len(facts.group_inputs) :]
        self.results = [t.narrow(job.dim, 0, 1) if t.stride(job.dim) == 0 else t for t in results]
        self.firsts = [t.narrow(job.dim, 0, 1) for t in results]
        self.few = job.few
        self.flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device=device)

    def call(self, plan: Plan | PanelPlan) -> Callable[[], None]:
        """A launch of a plan."""
        bound = launch.call_for(self.work, plan)
        index = self.work.tensors[0].get_device()
        return lambda: bound.on_device(index, *self.addresses, numbers=self.work.numbers)

    def right(
        self, plans: dict[Config, Plan | PanelPlan], reference: Plan | PanelPlan
    ) -> dict[Config, Callable]:
        """The calls of those plans whose results are what the plan of today gives."""
        self.call(reference)()
        wanted = [t.clone() for t in self.results]
        # Of a gradient's differences, some cancel in one order of additions more than in another.
        sizes = [t.float().abs().mean().item() for t in wanted]
        found = {}
        for config, plan in plans.items():
            with suppress(Exception):
                call = self.call(plan)
                for t in self.firsts:
                    t.fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                for got, want, size in zip(self.results, wanted, sizes, strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3 * size)
                found[config] = call
        return found

    def times(self, calls: dict[Config, Callable]) -> dict[Config, float]:
        """The median time of each: with a cold L2, of few rows in a graph."""
        if self.few:
            graphs = {config: timing.capture(self._returning(call), [()]) for config, call in calls.items()}
            samples = timing.graph_replays(graphs, CALLS, 1)
        else:
            samples = timing.cold_events(calls, CALLS, 1, self.flush)
        return {config: timing.median(us) for config, us in samples.us.items()}

    def _returning(self, call: Callable[[], None]) -> Callable[[], Tensor]:
        """The call as graphs are captured of it."""

        def run() -> Tensor:
            call()
            return self.results[0]

        return run


def measure(
    job: Job, dtype: str, table: Table, device: Device, quick: bool, progress: console.Progress
) -> list[Measured]:
    """All candidates of a job in one dtype, with their times; without one those that are wrong here."""
    lengths = job.lengths(dtype, step_of(job, quick))
    tried = candidates(job, table, dtype, lengths, device, quick)
    plans = fitting(job, list(tried), dtype, lengths, table, device)
    taken = {n: kernel_of(job, dtype, n, table, device) for n in lengths}
    found = {
        config: Measured(
            config,
            max(fits),
            incumbent=tried[config],
            taken={n for n in fits if tried[config] and fits[n].kernel == taken[n]},
            classes={n: plan.kernel for n, plan in fits.items()} if job.of_panels else {},
        )
        for config, fits in plans.items()
        if fits
    }
    # Far below its capacity a configuration is out of the question (millions of clusters for rows of a few elements),
    # unless it is what the table has there; what the table has may take over from a neighbour that is wrong.
    served = {
        config: [n for n in fits if reach_of(job, tried[config]) * n > max(fits) or n in found[config].taken]
        for config, fits in plans.items()
        if fits
    }
    kernels = {plans[config][n].kernel for config, some in served.items() for n in some}
    for _ in precompile(sorted(kernels, key=lambda k: k.name), load_or_skip):
        pass
    for n in lengths:
        progress.step(f"{job.name} {dtype} {n}")
        here = {config: plans[config][n] for config, some in served.items() if n in some}
        if not here:
            continue
        alike: dict[Plan | PanelPlan, list[Config]] = {}  # by the plan to which they are filled
        for config, plan in here.items():
            alike.setdefault(plan, []).append(config)
        bench = Bench(job, dtype, n, torch.device("cuda", torch.cuda.current_device()))
        first = {configs[0]: plan for plan, configs in alike.items()}
        calls = bench.right(first, bench.work.plan(replace(device, table=table)))
        for _ in range(PASSES):
            for config, us in bench.times(calls).items():
                for same in alike[first[config]]:
                    found[same].us.setdefault(n, []).append(us)
        if calls and (few := job.with_few(dtype, n)):
            bench = Bench(few, dtype, n, bench.results[0].device)
            plans_of_few = {config: planned(few, config, dtype, n, table, device) for config in calls}
            for config, us in bench.times({c: bench.call(p) for c, p in plans_of_few.items()}).items():
                for same in alike[first[config]]:
                    found[same].few[n] = us
        del bench, calls
        torch.cuda.empty_cache()
    return list(found.values())


def told(
    picked: list[Measured], measured: list[Measured], best: dict[int, float], dtype: str
) -> list[dict[str, Any]]:
    """The figures behind a list: by length what holds it, its least time, that over what the best would count, and the
    least time of what the table had there."""
    before = {n: min(m.us[n]) for m in measured for n in m.taken if n in m.us}
    return [
        {
            "config": ", ".join(f"{name} {value}" for name, value in said(m.config).items()),
            "dtype": dtype,
            "length": n,
            "us": round(min(m.us[n]), 3),
            "over_best": round(m.time(n) / best[n], 4),
            "before_us": round(before[n], 3) if n in before else None,
            **({"few_us": round(m.few[n], 3)} if n in m.few else {}),
        }
        for n, m in holders(picked, best).items()
        if n in m.us
    ]


def bounded(measured: list[Measured], job: Job) -> list[Measured]:
    """What holds any length, of the deep lists, once for every length that it could be held to."""
    if job.place[0] != "deep":
        return measured
    made = []
    for m in measured:
        made.append(m)
        for n in m.us:
            us = {k: v for k, v in m.us.items() if k <= n}
            made.append(Measured(replace(m.config, longest=n), n, m.incumbent, us))
    return made


def merged(chosen: dict[bool, list[RowConfig]]) -> tuple[RowConfig, ...]:
    """The lists of both precisions as one, in the order of each; what both have at the same place is there once."""
    if len(chosen) == 1:
        return tuple(*chosen.values())
    fast, precise = chosen[False], chosen[True]
    found: list[RowConfig] = []
    for same, a, b, c, d in SequenceMatcher(None, fast, precise, autojunk=False).get_opcodes():
        if same == "equal":
            found += fast[a:b]
            continue
        entries = [replace(config, precise=False) for config in fast[a:b]]
        entries += [replace(config, precise=True) for config in precise[c:d]]
        found += sorted(entries, key=lambda config: config.capacity)
    return tuple(found)


def tune(
    job: Job, table: Table, device: Device, quick: bool, progress: console.Progress
) -> tuple[Table, list[dict[str, Any]]]:
    """The table with the job's list chosen anew, and the figures behind it."""
    found = {dtype: measure(job, dtype, table, device, quick, progress) for dtype in job.dtypes}
    # Rows have configurations for each precision, all else the same ones for all dtypes.
    groups = [[dtype] for dtype in found] if job.of_rows else [list(found)]
    chosen: dict[bool, list[Config]] = {}
    figures: list[dict[str, Any]] = []
    for dtypes in groups:
        measured = together([found[dtype] for dtype in dtypes])
        best = best_times(measured, job.lengths(dtypes[0], step_of(job, quick)))
        if job.alone:
            picked = [single(measured, list(best))]
        else:
            picked = chain(bounded(measured, job), list(best), MOST[job.place[0]])
        picked = [m for m in picked if m.config is not None]
        precise = job.precise(dtypes[0])
        chosen[precise] = [m.config for m in picked]
        if job.of_rows or job.of_panels:
            # What was tried and has no time is wrong, or cannot be compiled.
            wrong = {m.config for dtype in dtypes for m in found[dtype] if not m.us}
            known = [c for c in map(plain, incumbents(table, job, precise)) if c not in wrong]
            chosen[precise] = with_others(picked, measured, known, job.holds(dtypes[0]))
        for dtype in dtypes:
            of = {m.config: m for m in found[dtype]}
            own = [of.get(m.config, m) for m in picked]
            figures += told(own, found[dtype], best_times(found[dtype], list(best)), dtype)
    configs = merged(chosen) if job.of_rows else chosen[precise]
    return with_list(table, job.place, configs), figures


def main(argv: Sequence[str]) -> int:
    """Tunes what is asked for; each job's list is written as soon as it is chosen."""
    made = of_tune()
    given = made.parse_args(argv)
    known = {job.name: job for job in jobs()}
    if given.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in given.jobs if name not in known]:
        made.error(f"no job {', '.join(unknown)}; there are {', '.join(known)}")
    if not torch.cuda.is_available():
        print("tuning needs an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * given.minutes
    index = torch.cuda.current_device()
    gpu, device = torch.cuda.get_device_name(index), launch.device_facts(index)
    path = given.out or own_table(gpu)
    begun = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table = Table.of(path.stem, begun) if begun else table_of(device.table)
    figures = begun.get("figures", {})
    timing.settle()
    for job_name in given.jobs or known:
        if time.monotonic() > end:
            print(f"{job_name}: no time left")
            continue
        job = known[job_name]
        with console.progress(job_name, 2 * len(job.lengths("bf16", step_of(job, given.quick)))) as progress:
            table, figures[job_name] = tune(job, table, device, given.quick, progress)
        print(f"{job_name}: {path.name}, {save(path, table, gpu, figures)}", flush=True)
    return 0
