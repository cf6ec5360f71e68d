"""The rungs of the ladder: how near they must come to float64, and matrices with ugly rows."""

from __future__ import annotations

import checking
import torch

from cute_softmax.ladder import RUNGS, Form, form_of

DTYPES = checking.DTYPES
UGLY = (1, 2, 3, 7, 33, 127, 1000, 1023, 4096, 10240)
# A vocabulary, which no rung keeps on chip.
LONG = 50257
INF = float("inf")


def factor(rung: int, dtype: torch.dtype, columns: int) -> float:
    """Times the package's own bound: an exponential here is the multiplication by log2(e) and ex2.approx alone; and the
    naive form rounds twice to the result's type. What one thread sums alone it sums one element after the other: over a
    vocabulary that is off by up to 3e-5, where the bound leaves 1.5e-5 beside half a unit in the last place."""
    if dtype is torch.float32:
        return 2.5 if rung > 1 else 3.0
    if rung in (1, 2) and columns >= LONG:
        return 1.02
    return 1.0 if rung else 3.0


def ugly(rows: int, columns: int, dtype: torch.dtype, device: str | None = None) -> torch.Tensor:
    """Random numbers, with rows of -inf, of half -inf, with NaN and with +inf where there is room."""
    x = checking.random((rows, columns), dtype, seed=columns, scale=2.0, device=device)
    if rows > 4 and columns > 3:
        x[1] = -INF
        x[2, columns // 2] = float("nan")
        x[3, : columns // 2] = -INF
        x[4, 1] = INF
    return x


def long_forms(architecture: str) -> list[Form]:
    """The rungs that take `LONG`; in float32 those that sum it in many threads, as errors grow with what one adds."""
    return [
        form_of(step.number, dtype, LONG, architecture)
        for step in RUNGS
        if not step.keeps
        for dtype in ("bf16", "fp32")[: 2 if step.number > 2 else 1]
    ]


def forms(architecture: str, dtypes=DTYPES, columns=UGLY, base: int = 16) -> list[Form]:
    """Every rung on every length that it takes; the naive one in both directions."""
    found = []
    for step in RUNGS:
        for dtype in dtypes:
            for n in columns:
                found += [
                    form_of(step.number, dtype, n, architecture, base, rows)
                    for rows in ((True, False) if step.number == 0 else (True,))
                ]
    return found
