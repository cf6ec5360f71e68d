"""Calls on rows that come tile after tile, of any length and number: `forced` lets all that can be so planned be so."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from checking import random
from families import Case
from remembered import forget_calls

from cute_softmax.plan import stream

INF = math.inf


def forced(monkeypatch) -> None:
    """Rows of any length and number are the stream movement's."""
    monkeypatch.setattr(stream, "FROM_BYTES", 0)
    monkeypatch.setattr(stream, "ROWS_OF_AN_SM", 0)
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
