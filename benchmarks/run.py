"""Runs a suite: each provider on each case, isolated from the others, as rows of a results file."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import copies, providers, timing
from .cases import (
    COLD_STORE,
    FORWARD_BACKWARD,
    GRAD,
    IN_TURN,
    KEPT,
    NEW_COLUMNS,
    NO_GRAD,
    PEAKS,
    SHAPES_IN_TURN,
    WARM_STORE,
    Case,
    Suite,
    labels,
)
from .console import Progress
from .operations import DTYPES, OPERATIONS, WrongResult
from .results import ROOT, Row, add_ratios, describe, make_row


class DeviceLost(RuntimeError):
    """The CUDA context is gone (an illegal access, say): nothing more can be measured in this process.

    `rows` holds what the suite had measured before.
    """

    rows: Sequence[Row] = ()


class ProcessFailed(RuntimeError):
    """A fresh process ended with an error: its last line."""


@dataclass(frozen=True)
class Options:
    """How much to measure. The defaults are the method; `quick()` is for trying things out."""

    calls: int = 15
    warm: int = 3
    graphs: bool = True
    host_calls: int = 3000
    host_blocks: int = 15
    processes: int = 3

    @classmethod
    def quick(cls) -> Options:
        """Figures in a fraction of the time, without graphs; not for publication."""
        return cls(calls=5, warm=1, graphs=False, host_calls=600, host_blocks=3, processes=1)


def current_device() -> torch.device:
    """The device that everything runs on."""
    return torch.device("cuda", torch.cuda.current_device())


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _figures(case: Case, samples: Sequence[float], **extra: Any) -> dict[str, Any]:
    us = timing.median(samples)
    return {
        "us": _round(us),
        "gbps": _round(case.traffic / us / 1e3),
        "spread": round(timing.spread(samples), 4),
        "calls": len(samples),
        **extra,
    }


def _poison(case: Case, device: torch.device) -> None:
    """Fills with NaN, and frees, the block of memory that the next tensor of the output's size will be given."""
    torch.full(case.output_shape, float("nan"), dtype=DTYPES[case.result], device=device)


def _alive(error: BaseException) -> str:
    """The text of `error`, if the device outlived it."""
    text = describe(error)
    try:
        torch.cuda.synchronize()
    except Exception as lost:
        raise DeviceLost(f"after {text} ({describe(lost)})") from None
    return text


def _peak(call: providers.Call, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """The most bytes that a second call holds beyond what there was before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*inputs)
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


@dataclass(frozen=True)
class _Ready:
    """A provider's call whose first result was right, what else its row says, and how long one takes."""

    call: providers.Call
    extra: dict[str, Any]
    us: float


class _DeviceRun:
    """Time on the GPU: rows of method "events-cold" and, where calls are short, of a CUDA graph."""

    method = "events-cold"

    def __init__(self, suite: Suite, names: Sequence[str], options: Options) -> None:
        self.suite, self.names, self.options = suite, names, options
        self.device = current_device()
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def case(self, case: Case) -> list[Row]:
        inputs, ready, errors = self._ready(case)
        samples, rows = self._event_rows(case, inputs, ready, errors)
        small = case.traffic < timing.GRAPH_BELOW_BYTES
        if self.options.graphs and small and case.op not in KEPT:
            # What takes longer, events time as well.
            working = {name: ready[name] for name in samples.us if ready[name].us < timing.GRAPH_BELOW_US}
            rows += self._graph_rows(case, self._ring(case, inputs), working, errors | samples.errors)
        return rows

    def _event_rows(
        self, case: Case, inputs: tuple[Tensor, ...], ready: dict[str, _Ready], errors: dict[str, str]
    ) -> tuple[timing.Samples, list[Row]]:
        """Rows of events, and what was measured."""
        bound = {name: lambda call=r.call: call(*inputs) for name, r in ready.items()}
        slow = [name for name, r in ready.items() if r.us > timing.SLOW_US]
        samples = timing.cold_events(bound, self.options.calls, self.options.warm, self.flush, slow)
        return samples, self._rows(case, self.method, samples.us, errors | samples.errors, ready)

    def _ring(self, case: Case, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Sets of inputs that together are larger than the L2, where they are not too many."""
        count = timing.rotation(case.traffic, self.l2_bytes)
        # Made anew, not cloned: a clone of a slice would be contiguous.
        return [inputs, *(OPERATIONS[case.op].inputs(case, self.device) for _ in range(count - 1))]

    def build(self, name: str, case: Case) -> providers.Call:
        """What a provider calls."""
        return providers.build(name, case.op, case)

    def _ready(self, case: Case) -> tuple[tuple[Tensor, ...], dict[str, _Ready], dict[str, str]]:
        """The inputs, the providers whose first result is right, and why the others are not."""
        inputs = OPERATIONS[case.op].inputs(case, self.device)
        ready: dict[str, _Ready] = {}
        errors: dict[str, str] = {}
        for name in self.names:
            try:
                ready[name] = self._prepare(name, case, inputs)
            except Exception as error:
                errors[name] = _alive(error)
        return inputs, ready, errors

    def _prepare(self, name: str, case: Case, inputs: tuple[Tensor, ...]) -> _Ready:
        """Builds a provider's call and checks its first result."""
        start = time.perf_counter()
        call = self.build(name, case)
        _poison(case, self.device)
        output = call(*inputs)
        torch.cuda.synchronize()
        peak = _peak(call, inputs) if case.op in PEAKS else {}
        extra: dict[str, Any] = {"setup_s": round(time.perf_counter() - start, 3), **peak}
        if name != "copy":
            extra["max_error"] = _round(OPERATIONS[case.op].check(case, inputs, output))
        if note := getattr(call, "note", ""):
            extra["note"] = note
        return _Ready(call, extra, timing.event_us(lambda: call(*inputs)))

    def _graph_rows(
        self, case: Case, ring: list[tuple[Tensor, ...]], ready: dict[str, _Ready], errors: dict[str, str]
    ) -> list[Row]:
        """Rows of graphs that take turns through the sets of inputs in `ring`."""
        method = "graph-rotating" if len(ring) > 1 else "graph-warm"
        graphs: dict[str, timing.Graph] = {}
        errors = dict(errors)
        for name, prepared in ready.items():
            try:
                graphs[name] = timing.capture(prepared.call, ring)
                self._check_graph(name, case, graphs[name], ring[-1])
            except Exception as error:
                graphs.pop(name, None)
                errors[name] = _alive(error)
        samples = timing.graph_replays(graphs, self.options.calls, self.options.warm)
        return self._rows(case, method, samples.us, errors | samples.errors, ready)

    def _check_graph(self, name: str, case: Case, graph: timing.Graph, inputs: tuple[Tensor, ...]) -> None:
        """Replays once over poisoned outputs: a graph that captured nothing must not be timed."""
        for output in graph.outputs:
            output.fill_(float("nan"))
        graph.graph.replay()
        torch.cuda.synchronize()
        if name != "copy":
            OPERATIONS[case.op].check(case, inputs, graph.outputs[-1])

    def _rows(
        self,
        case: Case,
        method: str,
        samples: dict[str, list[float]],
        errors: dict[str, str],
        ready: dict[str, _Ready],
    ) -> list[Row]:
        rows = []
        for name in self.names:
            if name in errors:
                rows.append(make_row(self.suite.name, case, name, method, error=errors[name]))
            elif name in samples:
                figures = _figures(case, samples[name], **ready[name].extra)
                rows.append(make_row(self.suite.name, case, name, method, **figures))
        return rows


class _GraphRun(_DeviceRun):
    """Time in a replayed graph of calls on the same tensors, which is how decoding calls: the L2 is warm."""

    method = "graph-warm"

    def case(self, case: Case) -> list[Row]:
        inputs, ready, errors = self._ready(case)
        return self._graph_rows(case, [inputs], ready, errors)


class _MapRun(_DeviceRun):
    """One figure a cell: events where a call takes long enough for them, else a graph over rotating buffers. The
    yardstick is a copy that moves as many bytes, whatever the operation; a product's is the product alone."""

    def build(self, name: str, case: Case) -> providers.Call:
        if name == "copy" and case.op != "softmax_matmul":
            return copies.CopyOfAsManyBytes(case.traffic)
        return super().build(name, case)

    def case(self, case: Case) -> list[Row]:
        inputs, ready, errors = self._ready(case)
        if case.traffic < timing.GRAPH_BELOW_BYTES:
            return self._graph_rows(case, self._ring(case, inputs), ready, errors)
        return self._event_rows(case, inputs, ready, errors)[1]


def _host_call(name: str, case: Case, inputs: tuple[Tensor, ...], dy: Tensor) -> Callable[[], object]:
    """One eager call as users write it; checked once."""
    if case.op != "softmax":
        call = providers.build(name, case.op, case)
        OPERATIONS[case.op].check(case, inputs, call(*inputs))
        return lambda: call(*inputs)
    (x,) = inputs
    function = providers.build(name, "entry", case)
    x = x.clone().requires_grad_(case.mode in (GRAD, FORWARD_BACKWARD))
    y = function(x)
    OPERATIONS["softmax"].check(case, (x.detach(),), y.detach())
    if case.mode == NO_GRAD:
        return lambda: function(x)
    if case.mode == IN_TURN:
        longer = [
            replace(case, shape=(*case.shape[:-1], case.shape[-1] + 8 * i)) for i in range(SHAPES_IN_TURN)
        ]
        tensors = itertools.cycle([OPERATIONS["softmax"].inputs(c, x.device)[0] for c in longer])
        return lambda: function(next(tensors))
    if not y.requires_grad:
        raise WrongResult("wrong result: no gradient")
    (dx,) = torch.autograd.grad(y, x, dy)
    OPERATIONS["softmax_backward"].check(case, (dy, y.detach()), dx)
    if case.mode == GRAD:
        return lambda: function(x)
    return lambda: torch.autograd.grad(function(x), x, dy)


class _HostRun:
    """Time of the calling thread, pinned to one core; nothing is synchronised inside a block."""

    method = "host-clock"

    def __init__(self, suite: Suite, names: Sequence[str], options: Options) -> None:
        self.suite, self.names, self.options = suite, names, options
        self.device = current_device()

    def case(self, case: Case) -> list[Row]:
        inputs = OPERATIONS[case.op].inputs(case, self.device)
        dy, _ = OPERATIONS["softmax_backward"].inputs(case, self.device)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, str] = {}
        for name in self.names:
            try:
                calls[name] = _host_call(name, case, inputs, dy)
            except Exception as error:
                errors[name] = _alive(error)
        with timing.pinned_to_one_core():
            samples = timing.host_clock(
                calls, self.options.host_calls, self.options.host_blocks, torch.cuda.synchronize
            )
        errors |= samples.errors
        return [
            make_row(self.suite.name, case, name, self.method, error=errors[name])
            if name in errors
            else make_row(
                self.suite.name, case, name, self.method,
                us=_round(timing.median(samples.us[name])), spread=round(timing.spread(samples.us[name]), 4),
            )
            for name in self.names
        ]  # fmt: skip


def _private_store(folder: str) -> dict[str, str]:
    """An environment in which every provider keeps its compiled code below `folder`, and Python that of its modules, as
    where they are installed: without it the first call of a process took 350 ms instead of 190 (H200, 2026-11-29)."""
    places = (
        "CUTE_SOFTMAX_CACHE_DIR",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    )
    paths = {place: os.path.join(folder, place.lower()) for place in places}
    for path in paths.values():
        os.mkdir(path, 0o700)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **paths, "PYTHONPATH": python_path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _first_call(name: str, case: Case, new_columns: int, environment: dict[str, str]) -> dict[str, float]:
    """Runs `benchmarks.first_call` in a fresh process; its figures, or ProcessFailed with its last line."""
    shape = "x".join(map(str, case.shape))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", name, shape, case.dtype, str(new_columns)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProcessFailed(lines[-1] if lines else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


class _ProcessRun:
    """First calls of fresh processes: one with an empty store of compiled code, then some with a warm one.

    All cases (modes) of a provider come out of the same processes.
    """

    method = "fresh-process"

    def __init__(self, suite: Suite, names: Sequence[str], options: Options) -> None:
        self.suite, self.names, self.options = suite, names, options
        self._taken: dict[Case, dict[str, dict[str, list[float]] | str]] = {}

    def case(self, case: Case) -> list[Row]:
        key = Case(case.op, case.shape, case.dtype, case.dim)
        if key not in self._taken:
            self._taken[key] = {name: self._take(name, case) for name in self.names}
        taken = self._taken[key]
        rows = []
        for name in self.names:
            samples = taken[name]
            if isinstance(samples, str):
                rows.append(make_row(self.suite.name, case, name, self.method, error=samples))
            else:
                us = samples[case.mode]
                figures = {"us": _round(timing.median(us)), "spread": round(timing.spread(us), 4)}
                rows.append(make_row(self.suite.name, case, name, self.method, **figures))
        return rows

    def _take(self, name: str, case: Case) -> dict[str, list[float]] | str:
        columns = case.shape[-1]
        try:
            with tempfile.TemporaryDirectory() as folder:
                environment = _private_store(folder)
                cold = _first_call(name, case, columns, environment)
                # Every process takes a length that none before it has compiled.
                warm = [
                    _first_call(name, case, columns - 16 * (i + 1), environment)
                    for i in range(self.options.processes)
                ]
        except Exception as error:
            return describe(error)
        return {
            COLD_STORE: [cold["first_us"]],
            WARM_STORE: [w["first_us"] for w in warm],
            NEW_COLUMNS: [w["new_us"] for w in warm],
        }


_KINDS = {
    "device": _DeviceRun, "graph": _GraphRun, "map": _MapRun, "host": _HostRun, "process": _ProcessRun,
}  # fmt: skip


def run_suite(
    suite: Suite,
    names: Sequence[str],
    options: Options,
    progress: Progress,
    late: Callable[[], bool] = lambda: False,
) -> list[Row]:
    """The rows of a suite, for those of the named providers that take part in it; as far as it gets until `late`."""
    taking_part = [name for name in suite.providers if name in names]
    runner = _KINDS[suite.kind](suite, taking_part, options)
    rows: list[Row] = []
    try:
        for case, label in zip(suite.cases, labels(suite.cases), strict=True):
            if late():
                break
            progress.step(label)
            try:
                rows += runner.case(case)
                torch.cuda.empty_cache()
            except DeviceLost:
                raise
            except Exception as error:  # not one provider's fault: too little memory for the inputs, say
                text = _alive(error)
                rows += [make_row(suite.name, case, name, runner.method, error=text) for name in taking_part]
    except DeviceLost as lost:
        lost.rows = rows
        raise
    finally:
        add_ratios(rows)
    return rows
