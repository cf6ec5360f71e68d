"""The jobs of losses in one visit, of the kernels around them and of routers for `sanitize.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from checking import DTYPES, Guarded, random
from sanitize_family import Form, kind, kinds
from sanitizing import Job, received, sent, timed

from cute_softmax.dispatch.heads import largest, loss
from cute_softmax.dispatch.topk import kernels as routers
from cute_softmax.plan import Prologue, topk_long
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.mean import plan_mean, plan_share, plan_total
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.rescale import plan_rescale
from cute_softmax.plan.topk import plan_topk, plan_topk_backward

LOSS = Prologue(alpha="groups", target="loss")
LOSSES = LOSS, replace(LOSS, scale="number", squares=True), replace(LOSS, scale="groups")
IGNORED = -7
ROUTERS = (
    (5, 1, 1),
    (133, 7, 3),
    (70, 64, 8),
    (133, 60, 4),
    (70, 256, 8),
    (19, 1024, 8),
    (19, 1020, 32),
    (19, 1023, 40),
    (3, 1024, 1024),
)
# (rows, columns, from row to row, k), whether elements are chosen: a CTA a row, shares of one, clusters, edges, an
# overflow.
LARGEST = (
    ((3, 5000, 5000, 8), True),
    ((2, 33001, 33003, 8), False),
    ((400, 1001, 1003, 40), True),
    ((2, 33000, 33000, 20), True),
    ((397, 2000, 2000, 1), False),
    ((1, 20000, 20000, 0), True),
    ((3, 9000, 9001, 300), True),
    ((2, 9000, 9001, 700), False),
    ((500, 1001, 1003, 20), True),
    ((3, 9000, 9001, 100), False),
    ((2, 16500, 16501, 100), True),
    ((2, 33000, 33000, 8), False),
)
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}


def check_loss(form: Form) -> float:
    """A visit over the logits, with an ignored row and one whose target is the last element."""
    (*rows, columns), dtype = form.shape, DTYPES[form.dtype]
    offset, pad = form.place
    pitch = columns + pad
    x = Guarded.of(
        random(form.shape, dtype, 1, 2.0), strides=(form.shape[1] * pitch, pitch, 1), offset=offset
    )
    target = torch.arange(prod(rows)).reshape(rows) * 7 % columns
    target[0, 0], target[-1, -1] = IGNORED, columns - 1
    scale, squares = (0.5, 0.1) if form.prologue.squares else (1.0, 0.0)
    rates = torch.linspace(-0.5, 2.0, prod(rows)).view(*rows, 1) if form.prologue.scale == "groups" else None
    asked = loss.Loss("sum", IGNORED, scale if rates is None else rates.to("cuda"), squares, inplace=True)
    leaf = x.tensor.double().requires_grad_()
    scores, counts = leaf * (scale if rates is None else rates.double()), target != IGNORED
    lse = scores.logsumexp(-1)
    found = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    right = torch.where(counts, lse - found + squares * lse.square(), 0.0)
    (slope,) = torch.autograd.grad(right.sum(), leaf)

    source, results = sent(x.tensor), []
    alpha, index = torch.full((), scale).to("cuda"), target.to("cuda")
    seconds = timed(lambda: results.extend(loss.visit(source, index, alpha, asked)))
    assert torch.allclose(results[0].cpu().double(), right, rtol=1e-5, atol=1e-5), "the losses are wrong"
    tolerance = TOLERANCE[dtype]
    assert torch.allclose(received(x, source).double(), slope, rtol=tolerance, atol=tolerance), (
        "the gradient is wrong"
    )
    return seconds


def check_rescale(shape: tuple[int, int], pitch: int, dtype: torch.dtype, factor: float) -> float:
    values = random(shape, dtype, 1)
    x = Guarded.of(values, strides=(pitch, 1))
    source, number = sent(x.tensor), torch.tensor(factor).to("cuda")
    seconds = timed(lambda: loss.rescale(source, number))
    assert torch.equal(received(x, source), (values.float() * factor).to(dtype)), "the product is wrong"
    return seconds


def check_mean(count: int, dtype: torch.dtype) -> float:
    """A share, a total with it and without, and a mean."""
    target = torch.arange(count) % 5
    numbers = random((count,), torch.float32, 1)
    index, losses, results = target.to("cuda"), numbers.to("cuda"), []

    def launch():
        results.append(loss.shares(index, 3, 0.25))
        results.append(loss.total(losses, results[0][1:], dtype))
        results.append(loss.total(losses, None, torch.float32))
        results.extend(loss.mean(losses, index, 3, dtype))

    seconds = timed(launch)
    share = 1 / (target != 3).sum().double()
    whole = numbers.double().sum()
    right = torch.stack([share * 0.25, share]), whole * share, whole, whole * share, share
    for got, wanted in zip(results, right, strict=True):
        assert torch.allclose(got.cpu().double(), wanted, rtol=TOLERANCE.get(got.dtype, 1e-3), atol=1e-4)
    return seconds


def check_router(rows: int, columns: int, k: int, dtype: torch.dtype, renormalize: bool, many: bool) -> float:
    """many: by the kernel of many rows, as in batch-invariant calls."""
    x = random((rows, columns), dtype, 1)
    source, grads = x.to("cuda"), random((rows, k), dtype, 2)
    upstream, results = grads.to("cuda"), []
    choice = routers.Choice((1,), k, renormalize, dtype, torch.int64, many)
    spread = routers.Spread((1,), columns, renormalize, dtype, many)

    def launch():
        results.extend(routers.choose(source, choice))
        of = results[0] if renormalize else source
        results.append(routers.gradient(of, results[1], upstream, spread))

    seconds = timed(launch)
    order = torch.sort(x.double(), dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(results[1].cpu(), order), "the indices are wrong"
    leaf = x.double().requires_grad_()
    p = torch.softmax(leaf, -1).gather(-1, order)
    p = p / p.sum(-1, keepdim=True) if renormalize else p
    (slope,) = torch.autograd.grad(p, leaf, grads.double())
    for got, right in ((results[0], p.detach()), (results[2], slope)):
        assert torch.allclose(got.cpu().double(), right, rtol=2.0**-5, atol=2.0**-6), "the numbers are wrong"
    return seconds


@contextmanager
def without_clusters(wanted: bool) -> Iterator[None]:
    """Within, few rows are as on GPUs without clusters, if wanted."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(topk_long, "HELD_K", -1)
        largest._call.cache_clear()
        yield
    largest._call.cache_clear()


def check_largest(rows: int, columns: int, pitch: int, k: int, dtype: torch.dtype, chosen: bool) -> float:
    """Rows of few values, whose ties overflow the places for candidates, and others."""
    x = random((rows, pitch), dtype, 1, 2.0)[:, :columns]
    x[0] = x[0].round()
    x[-1, : columns // 2] = 1.5
    index = (torch.arange(rows) * 7 % columns).unsqueeze(-1) if chosen else None
    source, results = x.to("cuda"), []
    if pitch != columns:  # the copy has no gaps
        source = torch.zeros((rows, pitch), dtype=dtype, device="cuda")[:, :columns].copy_(source)
    at = None if index is None else index.to("cuda")
    seconds = timed(lambda: results.extend(largest.find(source, at, largest.Largest((1,), k))))
    order = torch.sort(x.double(), dim=-1, descending=True, stable=True).indices[:, :k]
    log_p = torch.log_softmax(x.double(), -1)
    assert torch.equal(results[1].cpu(), order), "the indices are wrong"
    wanted = [(results[0], log_p.gather(-1, order))]
    if chosen:
        wanted.append((results[2], log_p.gather(-1, index)))
        assert torch.equal(results[3].cpu(), (x > x.gather(-1, index)).sum(-1, keepdim=True)), "ranks"
    for got, right in wanted:
        assert torch.allclose(got.cpu().double(), right, rtol=1e-5, atol=1e-5), "the numbers are wrong"
    return seconds


def jobs(device: Device, dtypes: list[str]) -> Iterator[Job]:
    """Losses on each kind of configuration, and each class of the kernels around them and of routers."""
    dtypes = [name for name in dtypes if DTYPES[name] in TOLERANCE]
    for i, prologue in enumerate(LOSSES):
        found: dict[tuple, list[Form]] = {}
        for name, ragged in product(dtypes, (False, True)):
            for form in kinds("softmax", prologue, name, ragged):
                found.setdefault(kind(form.made.row_class), []).append(form)
        for n, forms in enumerate(found.values()):
            form = forms[(i + n) % len(forms)]
            what = f"loss {form.made.kernel.name} {form.dtype}, {' x '.join(map(str, form.shape))}"
            yield Job((form.made.kernel,), prod(form.shape), what, partial(check_loss, form))
    for name, (rows, columns, pitch) in product(
        dtypes, ((1, 70001, 70001), (5, 1000, 1008), (5, 1001, 1003))
    ):
        operands = Operand(name, (pitch, 1)), Operand("fp32", ())
        made = plan_rescale((rows, columns), operands, device).kernel
        run = partial(check_rescale, (rows, columns), pitch, DTYPES[name], 0.5)
        yield Job((made,), rows * columns, f"rescale {name} {rows} x {columns}", run)
    for name, count in product(dtypes, (1, 1023, 9001, 20_001)):  # of the last in slices
        made = [
            *plan_share(count, 0, 0, device),
            *plan_mean(count, 0, name, device),
            *plan_total(count, name, True, device),
            *plan_total(count, "fp32", False, device),
        ]
        run = partial(check_mean, count, DTYPES[name])
        yield Job(tuple(plan.kernel for plan in made), count, f"mean {name} of {count}", run)
    for name, (rows, columns, k), renormalize, many in product(dtypes, ROUTERS, (False, True), (False, True)):
        source, grads = contiguous(name, (rows, columns)), contiguous(name, (rows, k))
        asked = {"renormalize": renormalize, "invariant": many}
        forward = plan_topk(rows, columns, k, source, name, device, **asked)
        of = contiguous(name, (rows, k)) if renormalize else source
        backward = plan_topk_backward(rows, columns, k, of, grads, name, device, **asked)
        run = partial(check_router, rows, columns, k, DTYPES[name], renormalize, many)
        what = f"router {name} {k} of {columns}{' renormalized' * renormalize}{' of many rows' * many}"
        yield Job((forward.kernel, backward.kernel), rows * columns, what, run)
    for name, ((rows, columns, pitch, k), chosen), apart in product(dtypes, LARGEST, (False, True)):
        stride, operand = 1 if chosen else None, Operand(name, (pitch, 1))
        with without_clusters(apart):
            made = topk_long.plan_topk_long(rows, columns, k, operand, device, index_stride=stride)
        what = f"the largest {name} {k} of {rows} x {columns}{' and a chosen one' * chosen}"
        if not apart or made.kernel.split:

            def run(apart=apart, call=(rows, columns, pitch, k, DTYPES[name], chosen)):
                with without_clusters(apart):
                    return check_largest(*call)

            yield Job((made.kernel,), rows * columns, f"{what}{' in clusters' * bool(made.kernel.held)}", run)
