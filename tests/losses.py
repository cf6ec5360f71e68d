"""Options of `cross_entropy`, alone and in pairs, and what they mean in float64."""

from __future__ import annotations

from itertools import combinations

import torch
from torch.nn import functional

Tensor = torch.Tensor
# Of a call; "rates", "weight" and "probabilities" stand for tensors that fit its rows.
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": True},
    "ignored class": {"ignore_index": 3},
    "scale": {"scale": -0.7},
    "rates": {"rates": True},
    "softcap": {"softcap": 4.0},
    "z-loss": {"lse_square_scale": 0.1},
    "lse": {"return_lse": True},
    "grad_scale": {"grad_scale": 4.0},
    "in place": {"inplace_backward": True},
    "recomputed": {"one_visit": False},
    "probabilities": {"probabilities": True},
}
# What is not computed in one visit, and cannot be in place.
VISITLESS = {"rows", "lse", "recomputed", "probabilities"}


def pairs() -> dict[str, dict]:
    """Every two options that can be given together."""
    found = {}
    for a, b in combinations([*OPTIONS][1:], 2):
        one, other = OPTIONS[a], OPTIONS[b]
        same = one.keys() & other.keys() or {a, b} == {"scale", "rates"}
        if not same and not ("in place" in (a, b) and VISITLESS & {a, b}):
            found[f"{a}, {b}"] = one | other
    return found


def given(x: Tensor, options: dict) -> tuple[Tensor, dict]:
    """(the target, the arguments of a call) on rows (M, N); some rows do not count."""
    rows, columns = x.shape
    generator = torch.Generator().manual_seed(11)
    options, probabilities = dict(options), options.get("probabilities")
    target = torch.randint(columns, (rows,), generator=generator)
    target[1] = options.get("ignore_index", -100)
    if options.pop("probabilities", None):
        target = torch.softmax(torch.randn(rows, columns, generator=generator), -1)
    if options.pop("rates", None):
        options["scale"] = torch.linspace(-0.5, 1.5, rows).to(x.device)
    if options.get("weight"):
        options["weight"] = torch.rand(columns, generator=generator).add(0.1).to(x.device)
    assert bool(probabilities) == target.is_floating_point()
    return target.to(x.device), options


def exact(x: Tensor, target: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """(the loss, the logsumexps of the rows) by torch's operations, in the dtype of x."""
    scale, cap = options.get("scale", 1.0), options.get("softcap")
    scores = x * (scale.to(x.dtype).unsqueeze(-1) if isinstance(scale, Tensor) else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
    weight = options.get("weight")
    of_indices = not target.is_floating_point()
    loss = functional.cross_entropy(
        scores,
        target if of_indices else target.to(x.dtype),
        None if weight is None else weight.to(x.dtype),
        reduction=reduction,
        label_smoothing=options.get("label_smoothing", 0.0),
        **{"ignore_index": ignored} if of_indices else {},
    )
    lse = torch.logsumexp(scores, -1)
    counts = target != ignored if of_indices else torch.ones_like(lse, dtype=torch.bool)
    squares = options.get("lse_square_scale", 0.0) * torch.where(counts, lse.square(), 0.0)
    if reduction != "none":
        squares = squares.sum() / (counts.sum() if reduction == "mean" else 1)
    return loss + squares, lse
