"""Very many launches of the same calls beside other work: whether any gives other bits than the first one.

Each call is captured in a CUDA graph, many times over, with the comparison of its results behind it; the graphs are
replayed on one stream, and other work on another. Nothing goes to the host before the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

import cute_softmax

# Calls of a graph, as far as their results together take no more bytes than that.
MOST_CALLS, MOST_BYTES = 64, 64 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIDE = 4096  # rows and columns of what else the GPU has to do


class Repeated(NamedTuple):
    """A call on a matrix. call: its results, made of the matrix and of (an index of each row, values of a product)."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    shape: tuple[int, int]
    dtype: str = "bf16"

    @property
    def label(self) -> str:
        """What it is, in words."""
        return f"{self.name}, {self.shape[0]} x {self.shape[1]}, {self.dtype}"


def _gradient(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (cute_softmax.softmax_backward(x, x),)


def _columns(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (cute_softmax.softmax(x, 0),)


def _lse(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (cute_softmax.logsumexp(x, -1),)


def _sum(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (cute_softmax.sum(x, -1),)


def _softmax(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (cute_softmax.softmax(x),)


def _chosen(x: Tensor, index: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return cute_softmax.selective_log_softmax(x, index, return_entropy=True)


def _largest(x: Tensor, index: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return tuple(cute_softmax.topk_log_softmax(x, 20, index))


def _product(x: Tensor, _: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return cute_softmax.softmax_matmul(x, values, return_lse=True)


# Threads, warps, CTAs of a cluster and CTAs of the whole GPU that meet, and those that store where others read.
CALLS = (
    Repeated("softmax", _softmax, (2048, 33)),
    Repeated("softmax", _softmax, (64, 1001)),
    Repeated("softmax", _softmax, (64, 9000), "fp32"),
    Repeated("softmax", _softmax, (3, 50257)),
    Repeated("softmax", _softmax, (8, 151936)),
    Repeated("softmax", _softmax, (2, 1048577)),
    Repeated("softmax_backward", _gradient, (8, 50257)),
    Repeated("softmax over columns", _columns, (4097, 64)),
    Repeated("logsumexp", _lse, (8, 151936), "fp32"),
    Repeated("logsumexp", _lse, (8, 1048576)),
    Repeated("sum", _sum, (2, 1048577), "fp32"),
    Repeated("selective_log_softmax", _chosen, (16, 32000)),
    Repeated("topk_log_softmax", _largest, (4, 151936)),
    Repeated("softmax_matmul", _product, (256, 4096)),
)


class Counted(NamedTuple):
    """How many calls were compared, in how many of these by label a bit differed, and the seconds that took."""

    launches: int
    differing: dict[str, int]
    seconds: float


class _Captured:
    """A call many times over: `replay` runs and compares all of them."""

    def __init__(self, one: Repeated, inputs: Sequence[Tensor], invariant: bool):
        self.label = f"{one.label}, batch-invariant" if invariant else one.label
        self._one, self._inputs, self._invariant = one, inputs, invariant
        self._first = [bits(t).clone() for t in self._call()]
        size = sum(t.numel() * t.element_size() for t in self._first)
        self.calls = max(8, min(MOST_CALLS, MOST_BYTES // size))
        self.differing = torch.zeros((), dtype=torch.int64, device=inputs[0].device)
        self._compare()  # what is allocated and compiled on first use is, before the capture
        self.replay = captured(self._compare)

    def _call(self) -> tuple[Tensor, ...]:
        with cute_softmax.batch_invariant() if self._invariant else nullcontext():
            return self._one.call(*self._inputs)

    def _compare(self) -> None:
        """Counts the calls of which some result has other bits than the first one's."""
        found = [self._call() for _ in range(self.calls)]
        wrong = [
            (bits(torch.stack(results)) != first).flatten(1).any(1)
            for results, first in zip(zip(*found, strict=True), self._first, strict=True)
        ]
        self.differing += torch.stack(wrong).any(0).sum()
        for results in found:  # else what a launch leaves out would still be there from the one before
            for result in results:
                result.fill_(-1)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, of which NaNs are equal."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """A function that does the work again on the current stream, by a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _side(device: torch.device) -> Callable[[], None]:
    """Other work of some hundred microseconds: a product, copies, and kernels of ours that take the whole GPU."""
    a, b = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))

    def work() -> None:
        c = a @ b
        cute_softmax.logsumexp(c.view(16, -1), -1)
        cute_softmax.softmax(c.view(-1, 131072))
        torch.softmax(c, 0)
        a.clone()

    work()
    return captured(work)


def repeat(
    calls: Sequence[Repeated], inputs: Callable[..., tuple], launches: int, device: torch.device
) -> Counted:
    """Replays the calls, within `batch_invariant` and outside, until there were so many, beside other work.

    inputs: makes the matrix of a call, the index and the values.
    """
    graphs = [_Captured(one, inputs(one, device), invariant) for one in calls for invariant in (False, True)]
    side, stream = _side(device), torch.cuda.Stream()
    each = sum(graph.calls for graph in graphs)
    rounds = math.ceil(launches / each)

    def one_round() -> None:
        for graph in graphs:
            graph.replay()

    # So many replays of the other work as take one round's time.
    beside = max(1, round(seconds_of(one_round) / seconds_of(side)))
    begun, before = time.monotonic(), None
    for graph in graphs:
        graph.differing.zero_()
    torch.cuda.synchronize()
    for _ in range(rounds):
        with torch.cuda.stream(stream):
            for _ in range(beside):
                side()
        one_round()
        event = torch.cuda.Event()
        event.record()
        if before is not None:  # the host stays a round ahead, and no more
            before.synchronize()
        before = event
    torch.cuda.synchronize()
    found = {graph.label: int(graph.differing) for graph in graphs}
    return Counted(rounds * each, {k: n for k, n in found.items() if n}, time.monotonic() - begun)


def seconds_of(work: Callable[[], None]) -> float:
    """Of the second of two runs, waited for."""
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.monotonic()
        work()
        torch.cuda.synchronize()
    return time.monotonic() - begun
