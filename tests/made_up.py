"""Results of a made-up machine, as runs of the benchmarks would give them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import results
from benchmarks.cases import SPECIALISTS
from benchmarks.suites import SUITES

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
            gbps = {**SPEED, "liger": 3900.0, "cudnn": 1000.0, **dict.fromkeys(SPECIALISTS, 2000.0), **speed}[
                name
            ]
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
