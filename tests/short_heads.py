"""Calls on short rows of which an index chooses an element: losses with and without their gradients, log-probabilities
and the gradients of these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from checking import Guarded, random
from families import Case
from losses import exact

from cute_softmax.dispatch.heads import loss
from cute_softmax.plan import table_of
from cute_softmax.plan.short import ShortClass
from cute_softmax.plan.short_plan import ShortPlan
from cute_softmax.runtime import launch

Tensor = torch.Tensor
INF = math.inf
ROWS = 3, 31  # more than a lane has
LENGTHS = (1, 2, 3, 5, 8, 10, 12, 16, 33, 49, 50, 64, 77, 100, 127, 128)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLACES = ((bf16, 0), (fp32, 0), (bf16, 3), (fp16, 0), (fp32, 1), (bf16, 2), (fp16, 1))
# What a loss may be of, alone and in pairs.
OPTIONS = {
    "scale": {"scale": -0.7},
    "rates": {"scale": None},  # a tensor, of each row
    "softcap": {"softcap": 4.0},
    "squares": {"squares": 0.1},
    "smoothing": {"smoothing": 0.1},
    "class": {"ignore_index": 0},
    "number": {"alpha": 0.3},  # one for all rows
}


def movement_of(columns: int, dtype: torch.dtype, held: bool) -> str:
    """The one that serves many rows. held: whether they take more registers than a loss with its gradient."""
    return "row" if columns > table_of().short[-1].capacity and (held or dtype is fp32) else "short"


@dataclass
class LossCase:
    """The losses of contiguous rows, with `visit` beside them alpha times their gradients. place: elements past a
    boundary from which logits and gradients begin."""

    columns: int
    dtype: torch.dtype
    visit: bool
    options: dict = field(default_factory=dict)
    place: int = 0

    def __post_init__(self):
        count, options = math.prod(ROWS), dict(self.options)
        x = random((*ROWS, self.columns), self.dtype, self.columns, 3.0)
        if not {"softcap", "smoothing"} & {*options}:
            x[1, 3, : self.columns // 2] = -INF
        self.x = Guarded.of(x, offset=self.place)
        ignored = options.setdefault("ignore_index", -7)
        index = torch.arange(count, device=x.device).view(ROWS) * 7 % self.columns
        index[0, 0], index[2, 30] = ignored, self.columns - 1
        index[1, 3] = self.columns - 1  # not one of -inf
        self.target = index
        alpha = options.pop("alpha", None)
        of_rows = random((*ROWS, 1), torch.float32, 5)
        self.alpha = of_rows if alpha is None else torch.full((), alpha, device=x.device)
        if options.get("scale", 1.0) is None:
            options["scale"] = torch.linspace(-0.5, 1.5, count, device=x.device).view(*ROWS, 1)
        self.asked = loss.Loss("none", **options)
        self.results = [Guarded(ROWS, torch.float32)]
        self.results += [Guarded(x.shape, self.dtype, offset=self.place)] if self.visit else []

    @property
    def name(self) -> str:
        what = "visit" if self.visit else "losses"
        return f"{what} of {self.dtype} rows of {self.columns}, {self.options} at {self.place}"

    def work(self) -> tuple[launch.Work, tuple]:
        """The launch, and the prologue's numbers."""
        prologue, numbers = loss.asked_of_kernel(self.asked, "groups" if self.visit else "")
        alpha = (
            self.alpha * self.asked.scale if self.visit else None
        )  # the kernel has gradients in the scores
        results = [r.tensor for r in self.results]
        gradient = results[1] if self.visit else None
        operands = loss.operands_of(self.x.tensor, self.asked.rates, alpha, self.target, gradient, results[0])
        return launch.Work(
            "softmax" if self.visit else "logsumexp", operands, (2,), prologue=prologue
        ), numbers

    @property
    def movement(self) -> str:
        """The one that serves it where rows are many."""
        return movement_of(self.columns, self.dtype, bool(self.visit and self.asked.softcap))

    def plan(self) -> ShortPlan:
        """The plan of the first device, or of none."""
        return self.work()[0].plan(launch.device_facts(0))

    def kernel(self) -> ShortClass:
        """The Plan class that serves it."""
        return self.plan().kernel

    def launched(self) -> list[Tensor]:
        """The results of a launch; nothing else was written."""
        work, numbers = self.work()
        launch.run(work.math, work.tensors, work.dims, prologue=work.prologue, numbers=numbers)
        self.x.check(written=False)
        for result in self.results:
            result.check()
        return [r.tensor for r in self.results]

    def expected(self) -> list[Tensor]:
        """The results in float64."""
        asked, leaf = self.asked, self.x.tensor.double().reshape(-1, self.columns).requires_grad_()
        options = {
            "reduction": "none",
            "scale": asked.scale if asked.rates is None else asked.rates.view(-1),
            "ignore_index": asked.ignore_index,
            "label_smoothing": asked.smoothing,
        }
        target = self.target.view(-1)
        found, lse = exact(leaf, target, options | ({"softcap": asked.softcap} if asked.softcap else {}))
        found = found + asked.squares * torch.where(target == asked.ignore_index, 0.0, lse.square())
        upstream = self.alpha.double().expand(*ROWS, 1).reshape(-1)
        (slope,) = torch.autograd.grad(found, leaf, upstream)
        return [found.detach().view(ROWS), slope.view(self.x.tensor.shape)][: len(self.results)]

    def check(self, results: list[Tensor]):
        """Raise AssertionError unless the results are what is expected."""
        largest = 1.0 + self.alpha.abs().max().item()
        for i, (got, right) in enumerate(zip(results, self.expected(), strict=True)):
            got, eps = got.double(), torch.finfo(got.dtype).eps
            allowed = (eps if i else 0.0) * right.abs() + 2.0**-20 * (largest if i else 1 + right.abs())
            same = (got == right) | (got.isnan() & right.isnan())
            over = torch.where(same, 0.0, (got - right).abs() / allowed).nan_to_num(INF)
            assert over.max() <= 1, f"{self.name}: result {i} is {over.max().item():.3g} times the bound off"

    def mutants(self, results: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Wrong results, as some broken kernel would give them."""
        right = [r.clone() for r in results]
        yield "the losses of other rows", [right[0].roll(1, 1), *right[1:]]
        yield "a loss of an ignored row", [right[0].masked_fill(right[0] == 0, 1.0), *right[1:]]
        if self.visit:
            yield "no target", [right[0], right[1].clamp(min=0.0)]
            yield "another target", [right[0], right[1].roll(1, -1)]
            yield "other rows", [right[0], right[1].roll(1, 0)]


def loss_cases(columns: int, dtype: torch.dtype, place: int = 0) -> Iterator[LossCase]:
    """Without options, with each, and with every two."""
    names = [(), *((name,) for name in OPTIONS), *combinations(OPTIONS, 2)]
    for chosen in names:
        if {"scale", "rates"} <= {*chosen}:
            continue
        options = {key: value for name in chosen for key, value in OPTIONS[name].items()}
        for visit in (True, False):
            if visit or "number" not in chosen:
                yield LossCase(columns, dtype, visit, options, place)


def every_option(first: int = 0) -> list[LossCase]:
    """Those of `loss_cases` once, each of another length, dtype and place. first: which it begins with."""
    several = [list(loss_cases(n, *PLACES[(i + first) % len(PLACES)])) for i, n in enumerate(LENGTHS)]
    return [several[(i + first) % len(LENGTHS)][i] for i in range(len(several[0]))]


def cases(columns: int, dtype: torch.dtype, place: tuple[int, int] = (0, 0)) -> Iterator[Case]:
    """Log-probabilities at an index, and their gradients."""
    x = random((*ROWS, columns), dtype, 1, 3.0)
    plain = x.clone()
    plain[1, 3, : columns // 2] = -INF
    index = torch.arange(math.prod(ROWS), device=x.device).view(*ROWS, 1) * 5 % columns
    index[1, 3] = columns - 1
    rates, alpha = (random((*ROWS, 1), torch.float32, seed) for seed in (2, 3))
    for name in ("selective", "selective_entropy"):
        for fields in ({}, {"scale": -0.7}, {"scale": rates}):
            given = x if fields else plain
            yield Case(name, given, index=index, place=place, dtype=torch.float32, **fields)
    for fields in ({}, {"scale": -0.7}, {"scale": rates}):
        yield Case("softmax", x if fields else plain, index=index, alpha=alpha, place=place, **fields)
