"""A stand-in for the device: the benchmarks run on the CPU, with a clock that ticks once an event."""

from __future__ import annotations

import pytest
import torch

from benchmarks import providers, run, timing


class FakeEvent:
    """An event of a clock that ticks once a record: every call takes 1 ms."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time - self.time


class FakeGraph:
    """A graph that calls again on every replay, as a captured one would."""

    def __init__(self, call, inputs) -> None:
        self.call, self.inputs = call, inputs
        self.outputs = [call(*tensors) for tensors in inputs]

    def replay(self) -> None:
        for tensors, output in zip(self.inputs, self.outputs, strict=True):
            output.copy_(self.call(*tensors))


def fake_capture(call, inputs) -> timing.Graph:
    graph = FakeGraph(call, inputs)
    return timing.Graph(graph, 20, graph.outputs)


class Quiet:
    """Progress that is only counted."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as the runner uses it, on the CPU; torch stands in for ours, and peers fail in their ways."""

    class Properties:
        L2_cache_size = 1 << 20

    class Refuses:
        def softmax(self, case):
            raise RuntimeError("takes no odd N")

        entry = softmax

    class Wrong:
        def softmax(self, case):
            return lambda x: torch.full_like(x, float("nan"))

        entry = softmax

    class BreaksLater(providers.Torch):
        def softmax(self, case):
            left = iter(range(4))

            def call(x):
                next(left)
                return torch.softmax(x, -1)

            return call

    for name, value in {
        "synchronize": lambda *_: None,
        "_sleep": lambda _: None,
        "Event": FakeEvent,
        "get_device_properties": lambda _: Properties,
        "get_device_name": lambda *_: "NVIDIA H200",
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(run, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing, "GRAPH_BELOW_US", float("inf"))  # these events count calls
    monkeypatch.setattr(timing, "capture", fake_capture)
    standing_in = {"cute_softmax": providers.Torch(), "liger": Wrong(), "quack": Refuses()}
    standing_in["cudnn"] = BreaksLater()
    for name, provider in standing_in.items():
        monkeypatch.setitem(providers.REGISTRY, name, provider)
