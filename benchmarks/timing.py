"""Clocks: how long calls take on the device (CUDA events, CUDA graphs) and on the host.

Every clock interleaves the providers call by call, so that drift of the machine meets all of them alike.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .results import describe

FLUSH_BYTES = 256 << 20
# Below this traffic (50 us at 4 TB/s) an event pair also times the queue: a graph is measured as well.
GRAPH_BELOW_BYTES = 200_000_000
GRAPH_CALLS = 20
# Of a call that takes longer than this, a graph would tell nothing more.
GRAPH_BELOW_US = 1000.0
# Buffers of a rotating graph together hold this many times the L2; more buffers than the limit are not made.
ROTATE_L2 = 4
ROTATE_LIMIT = 64
# A call of more than 50 ms is measured 3 times: its spread is small, and 18 calls of it would hold up the others.
SLOW_US = 50e3
SLOW_CALLS = 3
# The GPU waits this many cycles (0.2 ms at 2 GHz) at the head of a round, so that the host is ahead of it.
_LEAD_CYCLES = 400_000
_CYCLES_A_SECOND = 2e9
HOST_LEAD = 1.5  # and before a call for so many times the shortest that the host took for it

Read = Callable[[], float]


@dataclass
class Samples:
    """Microseconds by provider, and why a provider dropped out."""

    us: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def median(values: Sequence[float]) -> float:
    """The middle of the values."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a share of the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / statistics.median(values)


def settle() -> None:
    """Collects garbage, and leaves what is alive out of later collections: with all of torch they take 0.3 s each."""
    gc.collect()
    gc.freeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects garbage now, and none until the block ends."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interleave(
    calls: Mapping[str, Callable[[], object]],
    measure: Callable[[Callable[[], object]], Read],
    rounds: int,
    warm: int,
    before_round: Callable[[], None] = lambda: None,
    after_round: Callable[[], None] = lambda: None,
    turns: Mapping[str, int] | None = None,
) -> Samples:
    """Measures every call once a round, for `warm` rounds that do not count and `rounds` that do.

    `measure(call)` runs the call and returns a function that reads its time once `after_round` has waited for
    it. The order rotates from round to round. A call that raises drops out, with its error. A call named in `turns`
    takes part in no more than so many rounds, the last ones, and must have been warmed up.
    """
    first = {name: warm + rounds - count for name, count in (turns or {}).items()}
    samples = Samples(us={name: [] for name in calls})
    names = list(calls)
    with no_garbage_collection():
        for i in range(warm + rounds):
            reads: dict[str, Read] = {}
            before_round()
            for j in range(len(names)):
                name = names[(i + j) % len(names)]
                if name in samples.errors or i < first.get(name, 0):
                    continue
                try:
                    reads[name] = measure(calls[name])
                except Exception as error:
                    samples.errors[name] = describe(error)
            after_round()
            if i >= warm:
                for name, read in reads.items():
                    samples.us[name].append(read())
    for name in samples.errors:
        del samples.us[name]
    return samples


def _lead() -> None:
    torch.cuda._sleep(_LEAD_CYCLES)


def _events(call: Callable[[], object]) -> Read:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3


def event_us(call: Callable[[], object]) -> float:
    """Microseconds of a single call, waited for."""
    read = _events(call)
    torch.cuda.synchronize()
    return read()


def cold_events(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warm: int,
    flush: Tensor,
    slow: Collection[str] = (),
) -> Samples:
    """Method "events-cold": an event pair around each call, after `flush` (256 MiB) was zeroed.

    Before a call the GPU waits for longer than the host needs for it: what is measured is the GPU's time, however many
    operations the call is made of. That is the shortest time of the host so far: one of a call that waits for the GPU
    holds this lead as well, and the last time would let it grow from call to call. Calls named in `slow` are measured
    `SLOW_CALLS` times.
    """
    host: dict[Callable[[], object], float] = {}

    def measure(call: Callable[[], object]) -> Read:
        flush.zero_()
        seconds = host.get(call)
        if seconds:
            torch.cuda._sleep(int(HOST_LEAD * seconds * _CYCLES_A_SECOND))
        begun = time.perf_counter()
        read = _events(call)
        host[call] = min(time.perf_counter() - begun, seconds or math.inf)
        return read

    turns = dict.fromkeys(slow, min(rounds, SLOW_CALLS))
    return interleave(calls, measure, rounds, warm, _lead, torch.cuda.synchronize, turns)


def rotation(call_bytes: int, l2_bytes: int) -> int:
    """Sets of buffers a graph must rotate through to keep the L2 cold; 1 when that would take too many."""
    count = -(-ROTATE_L2 * l2_bytes // max(1, call_bytes))
    return max(2, count) if count <= ROTATE_LIMIT else 1


@dataclass
class Graph:
    """A captured CUDA graph of `calls` calls, and the buffers it reads and writes."""

    graph: torch.cuda.CUDAGraph
    calls: int
    outputs: list[Tensor]


def capture(call: Callable[..., Tensor], inputs: Sequence[tuple[Tensor, ...]]) -> Graph:
    """Captures at least 20 calls, whole turns through `inputs`; each set of inputs has its own output."""
    count = -(-GRAPH_CALLS // len(inputs)) * len(inputs)
    outputs: list[Tensor | None] = [None] * len(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            outputs[i % len(inputs)] = call(*inputs[i % len(inputs)])
    return Graph(graph, count, outputs)


def graph_replays(graphs: Mapping[str, Graph], rounds: int, warm: int) -> Samples:
    """Methods "graph-rotating" and "graph-warm": an event pair around a replay, divided by its calls."""
    samples = interleave(
        {name: g.graph.replay for name, g in graphs.items()},
        _events, rounds, warm, _lead, torch.cuda.synchronize,
    )  # fmt: skip
    samples.us = {name: [t / graphs[name].calls for t in us] for name, us in samples.us.items()}
    return samples


@contextmanager
def pinned_to_one_core() -> Iterator[int | None]:
    """Binds every thread of this process to one core (yielded; None where the system cannot)."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    saved: dict[int, set[int]] = {}
    core = max(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        try:
            saved[int(task.name)] = os.sched_getaffinity(int(task.name))
            os.sched_setaffinity(int(task.name), {core})
        except OSError:  # the thread has ended meanwhile
            continue
    everywhere = set().union(*saved.values())
    try:
        yield core
    finally:
        for task in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), saved.get(int(task.name), everywhere))
            except OSError:
                continue


def host_clock(
    calls: Mapping[str, Callable[[], object]],
    count: int,
    blocks: int,
    synchronize: Callable[[], None],
) -> Samples:
    """Method "host-clock": blocks of calls without synchronising inside, interleaved by provider.

    `count` calls a provider in all; one sample is the mean of a block, and one block more warms up.
    """
    each = max(1, count // blocks)

    def measure(call: Callable[[], object]) -> Read:
        synchronize()
        start = time.perf_counter_ns()
        for _ in itertools.repeat(None, each):
            call()
        us = (time.perf_counter_ns() - start) / each / 1e3
        synchronize()
        return lambda: us

    return interleave(calls, measure, blocks, 1)
