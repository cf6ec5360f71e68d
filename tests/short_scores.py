"""Calls on the scores of short rows: everything that a bias, a mask, a factor or a sink may be broadcast along."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from checking import random
from families import Case

SHAPE = 3, 2, 15  # of rows: images, heads, positions
INF = math.inf


def cases(columns: int, dtype: torch.dtype, place: tuple[int, int] = (0, 0)) -> Iterator[Case]:
    """Each math with each of its inputs in each form; some rows and elements are -inf or have nothing left."""
    shape = (*SHAPE, columns)
    x = random(shape, dtype, 1, 3.0)

    def factors(*kept: int) -> torch.Tensor:
        return random((*kept, 1), torch.float32, sum(kept), 1.0)

    def allowed(*sizes: int) -> torch.Tensor:
        mask = random(sizes, torch.float32, sum(sizes) + 1) < 0.3
        mask[-1, -1, -1] = False
        return mask

    def bias(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return random(sizes, of, sum(sizes) + 2, 2.0)

    plain = x.clone()
    plain[1, :, 3] = -INF  # whole rows; no negative scale
    plain[0, 0, :, columns // 2] = -INF
    beside = [
        {"scale": -0.7},
        {"scale": factors(3, 2, 15)},
        {"scale": factors(1, 1, 15), "zero": True},
        {"mask": allowed(*shape)},
        {"mask": allowed(3, 1, 15, columns), "zero": True},
        {"mask": allowed(3, 1, 1, columns), "scale": -1.5},
        {"mask": allowed(3, 1, 15, 1), "scale": factors(1, 2, 1), "zero": True},
        {"mask": allowed(1, 1, 1, columns)},
        {"bias": bias(*shape), "scale": 0.3},
        {"bias": bias(2, 15, columns)},
        {"bias": bias(1, 1, 15, 1, of=torch.float32), "mask": allowed(3, 1, 15, columns), "zero": True},
        {"bias": bias(2, 1, columns, of=torch.float32), "scale": factors(3, 1, 1)},
        {"bias": bias(2, 15, 1)},
        {"bias": bias(3, 1, 1, 1), "scale": factors(3, 2, 15), "mask": allowed(3, 1, 15, 1)},
        {"offset": 0, "scale": 0.5, "zero": True},
        {"offset": columns - 15, "mask": allowed(3, 1, 1, columns), "zero": True},
    ]
    for name in ("softmax", "log_softmax", "logsumexp", "entropy"):
        wide = {"dtype": torch.float32} if name == "entropy" else {}
        for i, fields in enumerate(beside):
            if name in ("logsumexp", "entropy") and i % 3:
                continue
            fields = {**fields, "zero": fields.get("zero", False) and name != "logsumexp"}
            given = x if fields.get("scale") is not None else plain
            yield Case(name, given, place=place, **fields, **wide)
    yield Case("softmax", x, alpha=2.5, mask=allowed(*shape), place=place, dtype=torch.float32)
    yield Case("softmax", x, alpha=factors(3, 1, 15).abs() + 0.5, place=place)
    sinks = random((*SHAPE, 1), torch.float32, 5)
    for name in ("softmax", "log_softmax", "logsumexp"):
        yield Case(name, plain, sink=sinks, place=place)
        if name != "logsumexp":
            yield Case(name, x, sink=sinks, mask=allowed(*shape), scale=0.5, place=place)
            yield Case(name, x, sink=sinks, mask=allowed(3, 1, 15, 1), scale=0.5, place=place)
    dy = random(shape, dtype, 7)
    for name, fields in (
        ("softmax_backward", {"scale": 0.5}),
        ("softmax_backward", {"scale": factors(3, 2, 15), "alpha": 2.5}),
        ("softmax_backward", {"scale": factors(1, 2, 1), "offset": 1}),
        ("softmax_backward", {"alpha": factors(3, 2, 15).abs() + 0.5}),
        ("log_softmax_backward", {"scale": factors(3, 1, 15)}),
        ("log_softmax_backward", {"scale": -2.0, "offset": columns // 2}),
        ("softmax_backward", {"sink": -sinks.abs() - 0.1}),
    ):
        forward = Case(name.removesuffix("_backward"), x, offset=fields.get("offset"), zero=True)
        y = forward.expected(torch.float32)[0]
        if isinstance(alpha := fields.get("alpha"), (float, torch.Tensor)):
            y = y * alpha
        yield Case(name, dy, y=y.to(dtype), place=place, **fields)
