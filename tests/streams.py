"""Calls on rows that come tile after tile, of any length and number: `forced` lets all that can be so planned be so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from checking import Guarded, random
from families import Case
from remembered import forget_calls

import cute_softmax
from cute_softmax.plan import Prologue, stream
from cute_softmax.runtime import launch

INF = math.inf


def forced(monkeypatch) -> None:
    """Rows of any length and number are the stream movement's."""
    configs = {n: config._replace(from_bytes=0, rows_of_an_sm=0) for n, config in stream.CONFIGS.items()}
    monkeypatch.setattr(stream, "CONFIGS", configs)
    forget_calls()


def cases(columns: int, dtype: torch.dtype, place: tuple[int, int] = (0, 0)) -> Iterator[Case]:
    """Each math, with what may stand before it; -inf in a row, in a thread's part, in the first tile, and alone."""
    x = random((3, 5, columns), dtype, 1, 3.0)
    x[0, 1], x[0, 2, columns // 2 :], x[1, 0, : columns // 2] = -INF, -INF, -INF
    x[1, 3, :: 1 + columns // 7], x[2, 1, columns // 3] = -INF, INF
    x[2, 2, -1], x[2, 3, 0], x[2, 4] = math.nan, 90.0, x[2, 4] - 3e4
    index = torch.arange(15, device=x.device).view(3, 5, 1) * 977 % columns
    index[0, 4], index[1, 4] = columns - 1, 0
    finite = random((3, 5, columns), dtype, 2, 3.0)
    factors = random((3, 1, 1), torch.float32, 3)
    wide = {"dtype": torch.float32, "place": place}
    for name, chosen in (
        ("logsumexp", None),
        ("entropy", None),
        ("selective", index),
        ("selective_entropy", index),
    ):
        # An element that is chosen where all is -inf has no logarithm.
        yield Case(name, x, index=chosen, **wide)
        yield Case(name, finite, index=chosen, scale=-0.7, **wide)
    yield Case("logsumexp", finite, scale=factors, **wide)
    yield Case("logsumexp", finite, sink=random((3, 5, 1), torch.float32, 5), **wide)


@dataclass(frozen=True)
class Pair:
    """Rows against others: by `against` the divergence of two softmaxes ("loss") or a cross entropy ("weights")."""

    against: str
    x: torch.Tensor
    target: torch.Tensor
    scale: float = 1.0

    @property
    def prologue(self) -> Prologue:
        return Prologue(scale="" if self.scale == 1 else "number", against=self.against)

    def kernel(self):
        """The Plan class that serves it."""
        found = torch.empty((len(self.x), 1), dtype=torch.float32, device=self.x.device)
        tensors = self.x, self.target, found.expand(self.x.shape)
        work = launch.Work("logsumexp", tensors, (1,), prologue=self.prologue)
        return work.plan(launch.device_facts(max(self.x.get_device(), 0))).kernel

    def launched(self) -> torch.Tensor:
        function = cute_softmax.kl_div if self.against == "loss" else cute_softmax.cross_entropy
        return function(self.x, self.target, reduction="none", scale=self.scale, dtype=torch.float32)

    def expected(self) -> torch.Tensor:
        """In float64."""
        q = torch.log_softmax(self.x.double() * self.scale, -1)
        if self.against == "weights":
            return -(self.target.double() * q).sum(-1)
        p = torch.log_softmax(self.target.double() * self.scale, -1)
        return torch.where(p.exp() == 0, 0.0, p.exp() * (p - q)).sum(-1)

    def check(self, found: torch.Tensor) -> None:
        """Raise AssertionError unless it is right, and of equal rows exactly 0."""
        right = self.expected()
        assert torch.allclose(found.double(), right, rtol=2e-6, atol=2e-6, equal_nan=True), (found, right)
        assert self.against != "loss" or found[EQUAL] == 0


EQUAL = 7  # the row of a divergence whose inputs are the same


def pairs(columns: int, dtypes: tuple[torch.dtype, torch.dtype], place: tuple[int, int]) -> Iterator[Pair]:
    """Both, with what is left out on either side, NaN, maxima that move from tile to tile, and rows that are the same.
    place: where the input's rows lie, see `Case`; the target's begin twice as far from a boundary."""
    x, target = (random((10, columns), torch.float32, seed, 3.0) for seed in (6, 7))
    weights = random((10, columns), torch.float32, 8).abs()
    rising = torch.linspace(-50, 50, columns, device=x.device)
    x[8], target[8], x[9] = x[8] + rising, target[8] + rising, x[9] - rising
    finite = x.clone()
    target[0, columns // 2 :] = x[0, columns // 2 + 1 :] = -INF
    x[1, -1] = target[2] = -INF
    x[3, 0], target[4, 1], x[5], x[6, 2] = math.nan, INF, x[5] + 1e4, INF
    x[9, : columns // 2] = target[9, : columns // 2] = -INF
    finite[0, 0], finite[1, 1], finite[2], finite[3, -1] = -INF, INF, finite[2] - 3e4, math.nan
    weights[0, 0] = 0.0
    # Equal as they are stored.
    x, finite = x.to(dtypes[0]), finite.to(dtypes[0])
    target[EQUAL] = x[EQUAL].to(dtypes[1]).float()
    x[EQUAL] = target[EQUAL].to(dtypes[0])
    offset, pad = place
    lines = columns + pad, 1
    for scale in (1.0, 0.4):
        for against, first, second in (("loss", x, target), ("weights", finite, weights)):
            yield Pair(
                against,
                Guarded.of(first, strides=lines, offset=offset).tensor,
                Guarded.of(second.to(dtypes[1]), strides=lines, offset=2 * offset).tensor,
                scale,
            )
