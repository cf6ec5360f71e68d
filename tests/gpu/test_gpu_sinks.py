"""Scores of rows that no element has: calls of every movement against a column more in float64, and their gradients.

Rows and panels of each class, with poison around what is written, are cases of `test_gpu_family` and
`test_gpu_panel_scores`; products are in `test_gpu_matmul` and `test_gpu_matmul_backward`.
"""

import math
from dataclasses import replace

import pytest
import scored_panels
import torch
from checking import DTYPES, equal_bits, random
from sanitize_family import sinks_of

from cute_softmax import log_softmax, logsumexp, plan_softmax, softmax, softmax_
from cute_softmax.runtime import launch

FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
# (shape, dim, shape of the sink), by the movement that serves it.
CALLS = {
    "a short row": ((30000, 15), 1, (30000, 1)),
    "a head": ((4, 16, 128, 1024), 3, (16, 1, 1)),
    "a cluster": ((40, 151936), 1, ()),
    "edges": ((65, 50257), 1, (65, 1)),
    "columns": ((700, 4096), 0, (4096,)),
    "odd columns": ((333, 4099), 0, (1, 4099)),
    "columns in parts": ((200000, 72), 0, (72,)),
    "a long row": ((3, (1 << 20) + 9), 1, (3, 1)),
    "rows ahead": ((24, 1 << 21), 1, (24, 1)),
    "two dimensions": ((40, 50, 70), (0, 2), (50, 1)),
}
calls = pytest.mark.parametrize("call", CALLS)
names = pytest.mark.parametrize("name", FUNCTIONS)


def tensors(call: str, dtype: torch.dtype) -> tuple:
    """(elements, dim, sinks about as large as the sums, in float32)."""
    shape, dim, own = CALLS[call]
    dims = (dim,) if isinstance(dim, int) else dim
    length = math.prod(shape[d] for d in dims)
    return random(shape, dtype, 1), dim, random(own, torch.float32, 2) + math.log(length)


def exact(name: str, x, dim, sink):
    """By the logsumexp of both, in float64."""
    x, sink = x.double(), sink.double()
    lse = torch.logaddexp(torch.logsumexp(x, dim, keepdim=True), sink)
    return (x - lse).exp() if name == "softmax" else x - lse


def close(found, right, factor: float = 4.0) -> bool:
    eps = torch.finfo(found.dtype).eps
    gap, allowed = (found.double() - right).abs(), factor * (eps + 2e-7) * right.abs().max()
    return found.shape == right.shape and bool((gap <= allowed).all())


@calls
@names
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_results_and_gradients(call, name, dtype):
    x, dim, sink = tensors(call, DTYPES[dtype])
    leaves = x.requires_grad_(), sink.requires_grad_()
    y = FUNCTIONS[name](x, dim, sink=sink)
    right = exact(name, x.detach(), dim, sink.detach())
    assert close(y, right)
    grad = random(x.shape, x.dtype, 3)
    of_input, of_sink = torch.autograd.grad(y, leaves, grad)
    p, g = (right if name == "softmax" else right.exp()), grad.double()
    total = (g * p if name == "softmax" else g).sum(dim, keepdim=True)
    share = (
        sink.double() - torch.logaddexp(torch.logsumexp(x.double(), dim, keepdim=True), sink.double())
    ).exp()
    d = p * (g - total) if name == "softmax" else g - p * total
    assert close(of_input, d, 16.0)
    terms = (g * p).abs() if name == "softmax" else g.abs()
    bound = (share * terms.sum(dim, keepdim=True)).sum_to_size(sink.shape)
    wrong = (of_sink.double() - (-share * total).sum_to_size(sink.shape)).abs()
    # A result in 16 bits is what the kernel reads again.
    assert (wrong <= (torch.finfo(x.dtype).eps + 1e-5) * bound).all()
    again = torch.autograd.grad(FUNCTIONS[name](x, dim, sink=sink), leaves, grad)
    assert all(equal_bits(a, b) for a, b in zip((of_input, of_sink), again, strict=True))


@calls
def test_logsumexp(call):
    x, dim, sink = tensors(call, torch.bfloat16)
    leaves = x.requires_grad_(), sink.requires_grad_()
    found = logsumexp(x, dim, keepdim=True, sink=sink)
    right = torch.logaddexp(torch.logsumexp(x.detach().double(), dim, keepdim=True), sink.detach().double())
    assert close(found, right)
    grad = random(found.shape, found.dtype, 3)
    of_input, of_sink = torch.autograd.grad(found, leaves, grad)
    assert close(of_input, grad.double() * (x.detach().double() - right).exp(), 8.0)
    terms = grad.double() * (sink.detach().double() - right).exp()
    assert (of_sink.double() - terms.sum_to_size(sink.shape)).abs().max() <= 1e-5 * terms.abs().sum_to_size(
        sink.shape
    ).max()


@names
def test_movements_are_met(name):
    found = set()
    for call in CALLS:
        x, dim, sink = tensors(call, torch.bfloat16)
        made = plan_softmax(x, dim, log=name == "log_softmax", sink=sink)
        found |= {made.movement} | ({"ahead"} if getattr(made.kernel, "ahead", 0) else set())
    assert found == {"short", "row", "column", "split", "ahead"}


@names
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_special_values(name, dim, kind):
    """A row with nothing else is zeros, -inf no sink; NaN and +inf make a row NaN; its dtype is its own."""
    x, sink = random((64, 4096), torch.bfloat16, 1), random((64, 1), torch.float32, 2).to(kind)
    x[0], x[1], x[5, 7] = -math.inf, -math.inf, math.nan
    sink[1], sink[2], sink[3] = -math.inf, math.nan, math.inf
    y = FUNCTIONS[name](x if dim else x.mT.contiguous(), dim, sink=sink if dim else sink.mT)
    y = y if dim else y.mT
    assert (y[0] == (0 if name == "softmax" else -math.inf)).all()
    assert y[[1, 2, 3, 5]].isnan().all() and not y[6:].isnan().any() and not y[4].isnan().any()


def test_in_place_and_out():
    x, sink = random((64, 5000), torch.bfloat16, 1), random((64, 1), torch.float32, 2) + 8
    y = softmax(x, sink=sink)
    out = torch.full_like(x, math.nan)
    assert equal_bits(softmax(x, sink=sink, out=out), y)
    leaf = sink.clone().requires_grad_()
    again = softmax_(x.clone(), sink=leaf)
    assert equal_bits(again.detach(), y)
    grad = random(x.shape, x.dtype, 3)
    of_sink = torch.autograd.grad(again, leaf, grad)[0]
    other = sink.clone().requires_grad_()
    assert equal_bits(of_sink, torch.autograd.grad(softmax(x, sink=other), other, grad)[0])


@pytest.mark.parametrize("math_name", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
def test_parts_that_are_given_up(math_name):
    """Whoever finishes a part writes what a group has one of, too: the same bits."""
    device, met = launch.device_facts(torch.cuda.current_device()), 0
    for form in scored_panels.forms((math_name,)):
        if not form.prologue.sink:
            continue
        case = scored_panels.case_of(form)
        tensors, outputs = case.placed()
        made = scored_panels.planned(form, case, tensors, device)
        if made is None or not made.kernel.exchange:
            continue
        met, found = met + 1, []
        for patience in (made.patience, 0, 300):
            call = launch.call_for(
                scored_panels.work_of(form, case, tensors), replace(made, patience=patience)
            )
            call.on_device(case.x.get_device(), *(t.data_ptr() for t in tensors), numbers=case.numbers)
            found.append([o.tensor.clone() for o in outputs])
        case.check(case.shown(found[0]))
        assert all(equal_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert met


def test_graphs():
    """Captured, with sinks that change between replays."""
    x, sink = random((64, 4096), torch.bfloat16, 1), random((64, 1), torch.float32, 2)
    softmax(x, sink=sink)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x, sink=sink)
    sink.copy_(sinks_of("softmax", (64, 4096)))
    graph.replay()
    assert equal_bits(y, softmax(x, sink=sink))
