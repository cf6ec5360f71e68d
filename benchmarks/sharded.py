"""Measures rows shared by ranks on the GPUs of one machine, one process per GPU.

python -m benchmarks sharded [--save [DIR]] [--minutes M] [--shapes MxN ...]
torchrun --nproc-per-node=N -m benchmarks sharded ...

Both ranks' GPUs begin a call together, behind a collective and queued work; what counts is the later of them. Every
result is checked against float64. Providers: our functions with `group`; "local", the same functions of the slice
alone; "all-gather", of as many bytes; "copy", of the slice; DTensor, loss_parallel, and Megatron's three all-reduces.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from . import results, timing
from .cases import Case, parse_shape
from .parsers import of_sharded
from .sharded_calls import OPS, Slices, all_gather, kernels_of, share_of
from .sharded_judge import ON_CHIP, PIECES, SUITE, judge

Tensor = torch.Tensor
BY_WAYS = ("softmax", "log_softmax", "softmax_backward", "cross_entropy")  # which can be served in several
SHAPES = ((4096, 151936), (8192, 128256), (64, 128256))
RANKS = (2, 4, 8, 16, 32, 64)  # that the model of costs speaks of
GATHERED = tuple(1 << n for n in range(8, 25, 2))  # bytes a rank
CALLS, WARM, SLOW_CALLS = 15, 3, 3
SLOW_US = 3000.0  # of a provider that is measured so few times
LEAST_LEAD = 300e-6  # seconds that the GPUs wait at least, so that the host is ahead
CYCLES_A_SECOND = 2e9
SMALL = 50 << 20  # bytes of a slice below which a graph is measured as well
ROTATED, GRAPH_CALLS = 8, 16


@dataclass
class Ranks:
    """This process among the others."""

    rank: int
    count: int
    end: float

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def together(self, numbers: Sequence[float]) -> list[float]:
        """The larger of each number over the ranks."""
        given = torch.tensor([*numbers], dtype=torch.float64, device=self.device)
        dist.all_reduce(given, dist.ReduceOp.MAX)
        return given.tolist()

    def over(self) -> bool:
        """Whether time is up, for all alike."""
        return bool(self.together([float(time.monotonic() > self.end)])[0])


def measured(
    calls: dict[str, Callable[[], object]], ranks: Ranks, warm: int = WARM
) -> dict[str, list[float]]:
    """Microseconds of each call, interleaved: events around it, behind queued work and a collective of all ranks."""
    flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device=ranks.device)
    meeting = torch.zeros(1, device=ranks.device)
    lead, events = dict.fromkeys(calls, 0.0), {name: [] for name in calls}
    slow: set[str] = set()
    names = list(calls)
    with timing.no_garbage_collection():
        for i in range(warm + CALLS):
            host = []
            for j in range(len(names)):
                name = names[(i + j) % len(names)]
                if name in slow and i >= warm + SLOW_CALLS:
                    host.append(0.0)
                    continue
                flush.zero_()
                torch.cuda._sleep(int(max(1.5 * lead[name], LEAST_LEAD) * CYCLES_A_SECOND))
                dist.all_reduce(meeting)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                begun = time.perf_counter()
                calls[name]()
                host.append(time.perf_counter() - begun)
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
            order = [names[(i + j) % len(names)] for j in range(len(names))]
            if i < warm:
                lead |= dict(zip(order, ranks.together(host), strict=True))
            if i == warm - 1:
                last = ranks.together(
                    [events[name][-1][0].elapsed_time(events[name][-1][1]) for name in names]
                )
                slow = {name for name, ms in zip(names, last, strict=True) if ms * 1e3 > SLOW_US}
    found = {}
    for name in names:
        us = [1e3 * start.elapsed_time(end) for start, end in events[name][warm:]]
        found[name] = ranks.together(us)
    return found


def in_graphs(calls: dict[str, Callable[[int], object]], ranks: Ranks) -> dict[str, list[float]]:
    """Microseconds a call of graphs of `GRAPH_CALLS` over `ROTATED` inputs; calls take which."""
    graphs, kept = {}, []
    for name, call in calls.items():
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for i in range(2):
                call(i)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # The thread that watches over collectives asks CUDA, too.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept += [call(i % ROTATED) for i in range(GRAPH_CALLS)]
        graphs[name] = graph.replay
    return {name: [t / GRAPH_CALLS for t in us] for name, us in measured(graphs, ranks).items()}


class Run:
    """The rows of a run, on every rank alike."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.rows = ranks, []

    def add(
        self, op: str, shape, provider: str, us: Sequence[float], traffic: int = 0, **extra: object
    ) -> None:
        middle = timing.median(us)
        case = Case(op, tuple(shape), mode=str(extra.pop("mode", "")))
        gbps = traffic / middle / 1e3 if traffic else None
        figures = {"us": float(f"{middle:.5g}"), "gbps": gbps and float(f"{gbps:.5g}"), "vs_copy": None}
        figures |= {"spread": round(timing.spread(us), 4), "calls": len(us)}
        method = str(extra.pop("method", "events-cold"))
        self.rows.append(results.make_row(SUITE, case, provider, method, **figures, **extra))

    def agreed(self, attempt: Callable[[], str]) -> str:
        """What is wrong with a call on any rank; empty if it is right on all."""
        try:
            wrong = attempt()
        except Exception as error:
            wrong = results.describe(error)
        said: list[str] = [""] * self.ranks.count
        dist.all_gather_object(said, wrong)
        return next(filter(None, said), "")

    def refuse(self, op: str, shape, provider: str, error: str, mode: str = "") -> None:
        case = Case(op, tuple(shape), mode=mode)
        self.rows.append(results.make_row(SUITE, case, provider, "events-cold", error=error))

    def op(self, name: str, slices: Slices) -> None:
        """Every provider of an operation: checked, its memory, its time."""
        op, shape, ready, peaks = OPS[name], slices.shape, {}, {}
        for provider, make in op.providers.items():

            def once(provider=provider, make=make) -> str:
                ready[provider] = call = make(slices)
                wrong = slices.check(name, call()) if provider not in op.unchecked else ""
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                torch.cuda.synchronize()
                peaks[provider] = torch.cuda.max_memory_allocated() - before
                return wrong

            if wrong := self.agreed(once):
                self.refuse(name, shape, provider, wrong)
                ready.pop(provider, None)
        mode = op.mode
        for provider, us in measured(ready, self.ranks).items():
            traffic = op.streams * slices.bytes if provider != "all-gather" else 0
            self.add(name, shape, provider, us, traffic, mode=mode, peak_bytes=peaks[provider])
        if slices.bytes < SMALL and op.graphed:
            chosen = {p: op.graphed[p](slices) for p in op.graphed if p in ready}
            for provider, us in in_graphs(chosen, self.ranks).items():
                self.add(name, shape, provider, us, 0, mode=mode, method="graph-rotating")

    def gathers(self) -> None:
        """All-gathers of the sizes that the model is fitted to."""
        calls = {}
        for size in GATHERED:
            mine = torch.zeros(size // 4, device=self.ranks.device)
            every = torch.empty((self.ranks.count, size // 4), device=self.ranks.device)
            calls[str(size)] = lambda mine=mine, every=every: all_gather(every.flatten(), mine)
        for size, us in measured(calls, self.ranks).items():
            self.add("all_gather", (self.ranks.count, int(size)), "all-gather", us)

    def by_ranks(self, rows: int, columns: int) -> None:
        """What one rank of many computes: its slice's share of the functions, and the merge of so many states."""
        from cute_softmax.dispatch.sharded import kernels
        from cute_softmax.dispatch.sharded.states import Shared

        calls: dict[str, Callable[[], object]] = {}
        for count in RANKS:
            slices = Slices((rows, share_of(columns, count)), self.ranks, among=1)
            every = torch.rand((count, 2, 1, rows), device=self.ranks.device) + 0.5
            asked = Shared("", 0, columns, results="lse", dtype=torch.bfloat16)
            calls[f"logsumexp {count}"] = OPS["logsumexp"].providers["local"](slices)
            calls[f"softmax {count}"] = OPS["softmax"].providers["local"](slices)
            calls[f"merge {count}"] = lambda every=every, asked=asked: kernels.merged(every, None, asked)
        for what, us in measured(calls, self.ranks).items():
            op, count = what.split()
            self.add(op, (rows, columns), "local", us, mode=f"{count} ranks")

    def ways(self, name: str, slices: Slices) -> None:
        """An operation by each of its ways: two reads around one all-gather, or around two of half the rows each, and
        slices that stay on chip."""
        from cute_softmax.dispatch.sharded import calls
        from cute_softmax.dispatch.sharded.ways import Way

        usual, call = calls.way_of, OPS[name].providers["cute_softmax"](slices)

        def by(way: Way) -> Callable[[], object]:
            def run() -> object:
                calls.way_of = lambda facts: way
                try:
                    return call()
                finally:
                    calls.way_of = usual

            return run

        # A cross entropy gathers once.
        pieces = PIECES[:1] if name == "cross_entropy" else PIECES
        every = {mode: Way(True, 1 + i) for i, mode in enumerate(pieces)} | {ON_CHIP: Way(True, on_chip=True)}
        ready = {}
        for mode, way in every.items():
            wrong = self.agreed(lambda way=way: slices.check(name, by(way)()))
            if wrong:
                self.refuse(name, slices.shape, "cute_softmax", wrong, mode)
            else:
                ready[mode] = by(way)
        for mode, us in measured(ready, self.ranks).items():
            self.add(name, slices.shape, "cute_softmax", us, OPS[name].streams * slices.bytes, mode=mode)


def work(ranks: Ranks, shapes: Sequence[tuple[int, int]]) -> list[results.Row]:
    """All that is measured, as far as time allows."""
    run = Run(ranks)
    for shape in shapes:
        slices = Slices(shape, ranks)
        for name in OPS:
            if ranks.over():
                return run.rows
            run.op(name, slices)
        for name in BY_WAYS if slices.bytes >= SMALL else ():
            if not ranks.over():
                run.ways(name, slices)
        del slices
        torch.cuda.empty_cache()
    if not ranks.over():
        run.gathers()
    if not ranks.over():
        run.by_ranks(*shapes[0])
    return run.rows


def _process(rank: int, count: int, meeting: str, argv: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    _ranked(argv, f"file://{meeting}")


def _ranked(argv: list[str], meeting: str = "env://") -> None:
    given = of_sharded().parse_args(argv)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    how = {"device_id": torch.device("cuda", torch.cuda.current_device())}
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=count, **how)
    try:
        end = time.monotonic() + 60 * given.minutes
        rows = work(Ranks(rank, count, end), [parse_shape(text) for text in given.shapes] or SHAPES)
        if rank == 0 and rows:
            results.add_ratios(rows)
            found = results.Results(results.make_header(["sharded", *argv]) | {"gpus": count}, rows)
            _show(found)
            if given.save:
                print(f"saved {results.save(found, given.save)}")
    finally:
        dist.destroy_process_group()


def _show(found: results.Results) -> None:
    """A line for each figure, and what is required of them."""
    for row in found.rows:
        where = " x ".join(map(str, row["shape"]))
        figure = row.get("error") or f"{row['us']:10.1f} us"
        memory = f"  {row['peak_bytes'] / 1e6:9.1f} MB" if row.get("peak_bytes") else ""
        what = f"{row['op']:22} {where:16} {row.get('mode', ''):18} {row['method']:15} {row['provider']:14}"
        print(f"{what} {figure}{memory}")
    for verdict in judge(found):
        print(verdict)
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Runs on all GPUs of this machine, or as the rank that torchrun has made of this process."""
    given = of_sharded().parse_args(argv)
    if "RANK" in os.environ:
        _ranked([*argv])
        return 0
    count = torch.cuda.device_count()
    if count < 2:
        here = "there is one" if count else "there is none here"
        print(f"rows that ranks share need an NVIDIA GPU for each of two ranks; {here}", file=sys.stderr)
        return 2
    from cute_softmax.runtime.precompile import precompile

    shapes = [parse_shape(text) for text in given.shapes] or SHAPES
    for _ in precompile(kernels_of(shapes, count, RANKS)):  # all cores once, before every rank needs them
        pass
    from torch.multiprocessing import start_processes

    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        start_processes(_process, (count, meeting, [*argv]), nprocs=count, start_method="spawn")
    return 0
