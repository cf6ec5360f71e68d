"""Heads over a vocabulary for `sanitize.py`: numbers of rows and their gradients, by public calls on rows of every kind
of configuration, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from checking import DTYPES, random
from prologues import plan_of
from sanitizing import Job, sent, timed

import cute_softmax as c
from cute_softmax.plan import NO_PROLOGUE, Prologue
from cute_softmax.plan.base import ClassBase

LENGTHS = (5, 40, 1023, 4096, 20001, 50257, 151936)


def logs_of(x: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(all log-probabilities, those at the targets) in torch's operations."""
    every = torch.log_softmax(x * scale, -1)
    return every, every.gather(-1, target[:, None])[:, 0]


def entropy_of(every: torch.Tensor) -> torch.Tensor:
    return -(every.exp() * every).sum(-1)


def _selected(x, target):
    found, entropies = c.selective_log_softmax(x, target, scale=0.7, return_entropy=True)
    return found.float() + 0.5 * entropies.float()


def _selected_right(x, target):
    every, found = logs_of(x, target, 0.7)
    return found + 0.5 * entropy_of(every)


def _rates(x):
    return torch.linspace(-0.5, 1.5, len(x)).to(x)


def _rated_right(x, target):
    return torch.nn.functional.cross_entropy(x * _rates(x)[:, None], target)


def _squared_right(x, target):
    return -logs_of(x, target)[1].mean() + 0.1 * torch.logsumexp(x, -1).square().mean()


def _smoothed_right(x, target, softcap=5.0):
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1)


def _divergence_right(x, target):
    q, p = (torch.log_softmax(t * 0.7, -1) for t in (x, target))
    return (p.exp() * (p - q)).sum()


@dataclass(frozen=True)
class Head:
    """A call on (logits, targets), the same in torch's operations, and what it launches."""

    ours: Callable
    right: Callable
    launches: tuple[tuple[str, Prologue], ...]


HEADS = {
    "entropy": Head(
        lambda x, _: c.entropy(x),
        lambda x, _: entropy_of(torch.log_softmax(x, -1)),
        (("entropy", NO_PROLOGUE), ("softmax", Prologue(entropy=True, factor=True))),
    ),
    "selected and entropy": Head(
        _selected,
        _selected_right,
        (
            ("selective_entropy", Prologue(scale="number")),
            ("softmax", Prologue(scale="number", alpha="groups", target="found", entropy=True, factor=True)),
        ),
    ),
    "squares, recomputed": Head(
        partial(c.cross_entropy, lse_square_scale=0.1, one_visit=False),
        _squared_right,
        (
            ("logsumexp", Prologue(target="loss", squares=True)),
            ("softmax", Prologue(alpha="groups", target="loss", squares=True)),
        ),
    ),
    "selected beside logsumexps": Head(
        lambda x, i: sum(t.sum() for t in c.cross_entropy(x, i, return_lse=True)),
        lambda x, i: torch.nn.functional.cross_entropy(x, i) + torch.logsumexp(x, -1).sum(),
        (
            ("selective", NO_PROLOGUE),
            ("softmax", Prologue(alpha="groups", target="found", more=True, factor=True)),
        ),
    ),
    "a scale of each row, recomputed": Head(
        lambda x, i: c.cross_entropy(x, i, scale=_rates(x).float(), one_visit=False),
        _rated_right,
        (
            ("logsumexp", Prologue(scale="groups", target="loss")),
            ("softmax", Prologue(scale="groups", alpha="groups", target="loss")),
        ),
    ),
    "smoothing, recomputed": Head(
        partial(c.cross_entropy, label_smoothing=0.1, softcap=5.0, one_visit=False),
        _smoothed_right,
        (
            ("logsumexp", Prologue(softcap=True, target="loss", even=True)),
            ("softmax", Prologue(softcap=True, alpha="groups", target="loss", even=True)),
        ),
    ),
    "smoothing, beside logsumexps": Head(
        lambda x, i: c.cross_entropy(x, i, label_smoothing=0.1, softcap=5.0, return_lse=True)[0],
        _smoothed_right,
        (
            ("selective", Prologue(softcap=True, even=True)),
            (
                "softmax",
                Prologue(softcap=True, alpha="groups", target="found", more=True, even=True, factor=True),
            ),
        ),
    ),
    "smoothing in one visit": Head(
        partial(c.cross_entropy, label_smoothing=0.1),
        partial(_smoothed_right, softcap=None),
        (("softmax", Prologue(alpha="groups", target="loss", even=True)),),
    ),
    "a softcap in one visit": Head(
        partial(c.cross_entropy, label_smoothing=0.1, softcap=5.0),
        _smoothed_right,
        (("softmax", Prologue(softcap=True, alpha="groups", target="loss", even=True)),),
    ),
    "probabilities": Head(
        lambda x, _: c.cross_entropy(x, 0.25 * (x.detach() > 0).to(x.dtype)),
        lambda x, _: torch.nn.functional.cross_entropy(x, 0.25 * (x.detach() > 0).to(x.dtype)),
        (
            ("logsumexp", Prologue(against="weights")),
            ("softmax", Prologue(alpha="groups", against="weights")),
        ),
    ),
    "divergence": Head(
        lambda x, _: c.kl_div(x, x.detach().roll(1, -1), reduction="sum", scale=0.7),
        lambda x, _: _divergence_right(x, x.detach().roll(1, -1)),
        (
            ("logsumexp", Prologue(scale="number", against="loss")),
            ("softmax", Prologue(scale="number", alpha="groups", against="input")),
        ),
    ),
    "divergence of its target": Head(
        lambda x, _: c.kl_div(x.detach().roll(1, -1), x, reduction="sum", scale=0.7),
        lambda x, _: _divergence_right(x.detach().roll(1, -1), x),
        (("softmax", Prologue(scale="number", alpha="groups", against="target")),),
    ),
    "squares in one visit": Head(
        partial(c.cross_entropy, lse_square_scale=0.1),
        _squared_right,
        (("softmax", Prologue(alpha="groups", target="loss", squares=True)),),
    ),
}


def classes_of(head: Head, dtype: str, shape: tuple[int, int]) -> tuple[ClassBase, ...]:
    """The classes that a call on contiguous logits launches."""
    made = [
        plan_of(math, prologue, shape, (dtype, dtype if math == "softmax" else "fp32"))
        for math, prologue in head.launches
    ]
    return tuple(plan.kernel for plan in made)


def check(head: Head, dtype: str, shape: tuple[int, int], offset: int) -> float:
    """Both directions of a call, of rows that begin at an offset; the seconds that they took.

    Raises AssertionError on a wrong result.
    """
    pitch = shape[1] + 2 * offset
    x = random((shape[0] * pitch,), DTYPES[dtype], 1, 2.0).as_strided(shape, (pitch, 1), offset)
    target = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(2))
    leaf, found = sent(x).requires_grad_(), []

    def both():
        y = head.ours(leaf, target.cuda())
        found.extend((y, torch.autograd.grad(y, leaf, torch.ones_like(y))[0]))

    seconds = timed(both)
    wide = x.double().requires_grad_()
    y = head.right(wide, target)
    right = y, torch.autograd.grad(y, wide, torch.ones_like(y))[0]
    for ours, exact in zip(found, right, strict=True):
        error = (ours.detach().cpu().double() - exact.detach()).abs()
        bound = 1e-4 if dtype == "fp32" else 2.0**-7
        assert (error <= bound * (exact.abs() + exact.abs().max() / 16)).all(), f"off by {error.max()}"
    return seconds


def jobs(dtypes: list[str]) -> Iterator[Job]:
    """Each head on rows of every length, aligned and beside boundaries in turns."""
    names = [name for name in dtypes if name in ("bf16", "fp32")]
    for i, ((name, head), columns) in enumerate(product(HEADS.items(), LENGTHS)):
        dtype, shape = names[i % len(names)] if names else None, (9 if columns < 100 else 3, columns)
        if dtype is not None:
            what = f"{name} {dtype}, {shape[0]} x {shape[1]}" + " beside a boundary" * (i % 3 == 0)
            run = partial(check, head, dtype, shape, int(i % 3 == 0))
            yield Job(classes_of(head, dtype, shape), shape[0] * shape[1], what, run)
