"""The jobs of rows that ranks share for `sanitize.py`: what the ranks do one after another on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from checking import DTYPES, Guarded, random
from sanitizing import Job, received, sent, timed

from cute_softmax.dispatch.sharded import kernels
from cute_softmax.dispatch.sharded.states import Shared
from cute_softmax.plan import Prologue, facts_of, plan_call
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.problem import Operand
from cute_softmax.plan.shards import plan_merge, plan_slice

TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-16}
# Where slices begin, and the end of the last: whole vectors, and none.
CUTS = (0, 1000, 1000, 2600), (0, 333, 1001)
ROWS = 5
LOSS = {"reduction": "sum", "ignore": -100}
# What is asked of rows, and of which scores.
ASKED = (
    {"results": "lse"},
    {"results": "found entropy", "scale": 0.5},
    {"results": "loss lse", "smoothing": 0.1, "squares": 0.01, **LOSS},
)


def check_numbers(cut: tuple[int, ...], dtype: torch.dtype, asked: dict) -> float:
    """The states of all slices, their merge, and the gradient of the first result."""
    x = random((ROWS, cut[-1]), dtype, 1, 2.0)
    target = torch.arange(ROWS) * 331 % cut[-1]
    parts = [Shared("", a, b - a, cut[-1], dtype=torch.float32, **asked) for a, b in pairwise(cut)]
    index = target.to("cuda") if "chosen" in parts[0].beside else None
    cuts = [x[:, p.start : p.start + p.width].contiguous().to("cuda") for p in parts]
    gradients = [Guarded((ROWS, p.width), dtype) for p in parts]
    copies, results = [sent(g.tensor) for g in gradients], []
    upstream = {parts[0].names[0]: torch.ones(ROWS).to("cuda")}

    def launch() -> None:
        every = torch.stack([kernels.states(s, index, p) for s, p in zip(cuts, parts, strict=True)])
        whole, found = kernels.merged(every, index, parts[0])
        results.append(found)
        for s, to, part in zip(cuts, copies, parts, strict=True):
            kernels.finished("gradient", [s], to, whole, part, index, upstream)

    seconds = timed(launch)
    leaf = x.double().requires_grad_()
    log_p = torch.log_softmax(leaf * parts[0].scale, -1)
    chosen = log_p.gather(-1, target[:, None])[:, 0]
    lse = torch.logsumexp(leaf * parts[0].scale, -1)
    loss = -(1 - parts[0].smoothing) * chosen - parts[0].smoothing * log_p.mean(-1)
    right = {
        "lse": lse,
        "found": chosen,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "loss": loss + parts[0].squares * lse.square(),
    }
    for name, got in results[0].items():
        assert torch.allclose(got.cpu().double(), right[name], rtol=1e-5, atol=1e-5), f"{name} is wrong"
    (slope,) = torch.autograd.grad(right[parts[0].names[0]].sum(), leaf)
    got = torch.cat([received(g, to) for g, to in zip(gradients, copies, strict=True)], -1)
    tolerance = TOLERANCE[dtype]
    assert torch.allclose(got.double(), slope, rtol=tolerance, atol=tolerance), "the gradient is wrong"
    return seconds


def check_slices(cut: tuple[int, ...], dtype: torch.dtype, log: bool) -> float:
    """A softmax or its logarithm, and its gradient."""
    x, dy = random((ROWS, cut[-1]), dtype, 1, 2.0), random((ROWS, cut[-1]), dtype, 2)
    parts = [Shared("", a, b - a, cut[-1], dtype=dtype, log=log) for a, b in pairwise(cut)]
    cuts, ups = ([t[:, p.start : p.start + p.width].contiguous().to("cuda") for p in parts] for t in (x, dy))
    made = [[Guarded((ROWS, p.width), dtype) for p in parts] for _ in range(2)]
    results, gradients = ([sent(g.tensor) for g in of] for of in made)
    name = "log_softmax" if log else "softmax"

    def launch() -> None:
        every = torch.stack([kernels.states(s, None, p) for s, p in zip(cuts, parts, strict=True)])
        whole, _ = kernels.merged(every, None, parts[0])
        for s, y, part in zip(cuts, results, parts, strict=True):
            kernels.finished(name, [s], y, whole, part)
        sums = [kernels.sums(d, y, p) for d, y, p in zip(ups, results, parts, strict=True)]
        total = kernels.total(torch.stack(sums)).unsqueeze(0)
        for d, y, to, part in zip(ups, results, gradients, parts, strict=True):
            kernels.finished(f"{name}_backward", [d, y], to, total, part)

    seconds = timed(launch)
    leaf = x.double().requires_grad_()
    right = (torch.log_softmax if log else torch.softmax)(leaf, -1)
    (slope,) = torch.autograd.grad(right, leaf, dy.double())
    tolerance = 4 * TOLERANCE[dtype]
    for of, copies, exact in zip(made, (results, gradients), (right.detach(), slope), strict=True):
        got = torch.cat([received(g, to) for g, to in zip(of, copies, strict=True)], -1)
        assert torch.allclose(got.double(), exact, rtol=tolerance, atol=tolerance), "the numbers are wrong"
    return seconds


def jobs(device: Device, dtypes: list[str]) -> Iterator[Job]:
    """What is asked of rows, and slices of a softmax, by each dtype and cut."""
    for name in dtypes:
        if DTYPES[name] not in TOLERANCE:
            continue
        for cut in CUTS:
            edges = " off vector boundaries" * bool(cut[1] % 8)
            for asked in ASKED:
                found = [*_numbers(device, name, cut, asked)]
                what = f"shared rows {name}{edges}: {asked['results']}"
                yield Job(
                    tuple(found), ROWS * cut[-1], what, partial(check_numbers, cut, DTYPES[name], asked)
                )
            for log in (False, True):
                found = [*_slices(device, name, cut, log)]
                what = f"shared rows {name}{edges}: {'log_' * log}softmax"
                yield Job(tuple(found), ROWS * cut[-1], what, partial(check_slices, cut, DTYPES[name], log))


def _widths(cut: tuple[int, ...]) -> list[int]:
    return sorted({b - a for a, b in pairwise(cut) if b > a})


def _numbers(device: Device, name: str, cut: tuple[int, ...], asked: dict) -> Iterator[object]:
    part = Shared("", 0, cut[1], cut[-1], dtype=torch.float32, **asked)
    chosen, names = "chosen" in part.beside, part.names
    math_name = {(False, True): "selective", (True, True): "selective_entropy"}
    math_name = math_name.get(("weighted" in part.beside, chosen), "logsumexp")
    scaled = part.scale != 1
    prologue = Prologue(scale="number" * scaled, even=part.even, state="chosen" if chosen else "alone")
    flags = {"scaled": scaled, "smoothed": part.smoothing != 0, "squares": part.squares != 0}
    for columns in _widths(cut):
        yield _state(device, math_name, prologue, name, columns)
        x = Operand(name, (columns, 1))
        how = tuple(flag for flag, on in flags.items() if on), names[:1], "fp32", (1,), (0,) * 6
        yield plan_slice("gradient", (ROWS, columns), (x, x), *how, device).kernel
    numbers = (ROWS, 3, 1, 0, 0, 0, 1 if part.squares else 0)
    yield plan_merge("state", "fp32", part.beside, names, numbers, device).kernel


def _slices(device: Device, name: str, cut: tuple[int, ...], log: bool) -> Iterator[object]:
    function = "log_softmax" if log else "softmax"
    alone = Prologue(state="alone")
    for columns in _widths(cut):
        yield _state(device, "logsumexp", alone, name, columns)
        yield _state(device, *(("sum", Prologue()) if log else ("softmax_backward", alone)), name, columns)
        x = Operand(name, (columns, 1))
        for math_name, operands in ((function, (x, x)), (f"{function}_backward", (x, x, x))):
            made = plan_slice(math_name, (ROWS, columns), operands, (), (), "", (), (0,) * 6, device)
            yield made.kernel
    yield plan_merge("state", "fp32", (), (), (ROWS, 3, 1, -1, 0, 0, 0), device).kernel
    yield plan_merge("sum", "fp32", (), (), (ROWS, 3, 1), device).kernel


def _state(device: Device, math_name: str, prologue: Prologue, name: str, columns: int) -> object:
    """The class of a slice's states."""
    facts = facts_of(math_name, True, prologue)
    order = (*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs)
    operands = [
        Operand(name, (columns, 1))
        if operand in facts.inputs
        else Operand("int64" if operand == "index" else "fp32", (1, 0))
        for operand in order
    ]
    return plan_call(math_name, (ROWS, columns), (1,), operands, device, prologue=prologue).kernel
