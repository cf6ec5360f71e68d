"""Columns in two passes: every math, dtypes, layouts and edges; large ones as calls plan them; guard bands intact."""

import math

import pytest
import sweeps
import torch
from building import build
from checking import DTYPES, check_backward, check_reduction, check_softmax, equal_bits, random

from cute_softmax import log_softmax, logsumexp, plan_softmax, softmax, softmax_backward
from cute_softmax.runtime import launch

INF = math.inf
dtypes = pytest.mark.parametrize("dtype", DTYPES)
CALLS = [one for dtype in DTYPES for one in sweeps.calls(dtype)]
# As calls plan them: odd columns, columns off cache lines, matrices behind each other.
LARGE = (((40001, 1001), 0), ((65027, 2056), 0), ((9, 30008, 331), 1), ((1_000_003, 131), 0))


@pytest.fixture
def forced(monkeypatch):
    sweeps.forced(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def built_ahead():
    """The classes of `test_every_call`, side by side."""
    if not torch.cuda.is_available():
        return
    with pytest.MonkeyPatch.context() as patch:
        sweeps.forced(patch)
        device = launch.device_facts(0)
        works = [one.work([b.tensor for b in one.guarded()]) for one in CALLS]
        build([work.plan(device).kernel for work in works])


@pytest.mark.parametrize(
    "one", CALLS, ids=lambda one: f"{one.math}-{one.dtype}-{'x'.join(map(str, one.shape))}"
)
def test_every_call(one, forced):
    def launched(work):
        assert work.plan(launch.device_facts(0), one.in_place).movement == "sweep"
        launch.run(*work)

    one.run(launched)


@dtypes
@pytest.mark.parametrize(("shape", "dim"), LARGE, ids=str)
def test_large(shape, dim, dtype):
    x, dy = (random(shape, DTYPES[dtype], seed=seed, scale=3.0) for seed in (5, 6))
    column = x.select(-1, 7)
    column[..., column.shape[-1] // 3 :] = -INF
    assert plan_softmax(x, dim).movement == "sweep"
    y = softmax(x, dim)
    dx = softmax_backward(dy, y, dim)
    check_softmax(y, x, dim)
    check_backward(dx, dy, y, dim)
    check_reduction("logsumexp", logsumexp(x, dim), x, dim)
    assert equal_bits(softmax(x, dim), y) and equal_bits(softmax_backward(dy, y, dim), dx), "other bits"
    z = x.clone()
    assert equal_bits(softmax(z, dim, out=z), y), "in place"


def test_in_a_graph_and_beside_others():
    """Launched from a graph, and on another stream while this one is busy."""
    x = random((40001, 1001), torch.bfloat16, scale=3.0)
    y = softmax(x, 0)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        softmax(x, 0, out=out)
    out.zero_()
    other, beside = torch.cuda.Stream(), []
    for _ in range(3):
        graph.replay()
        with torch.cuda.stream(other):
            beside.append(softmax(x, 0))
    torch.cuda.synchronize()
    assert equal_bits(out, y) and all(equal_bits(found, y) for found in beside)


@dtypes
@pytest.mark.parametrize("given", [("mask",), ("bias",), ("bias", "mask", "scale")], ids="-".join)
def test_large_scores(given, dtype):
    """Of one element for each row of memory, and the gradients of what is made of them."""
    x, dy = (random((65027, 1031), DTYPES[dtype], seed=seed, scale=3.0) for seed in (5, 6))
    kept, bias = (random((65027, 1), torch.float32, seed=seed) for seed in (7, 8))
    scores = {"mask": kept < 1.0, "bias": bias, "scale": -0.5}
    scores = {name: scores[name] for name in given}
    dy = dy.masked_fill(~scores.get("mask", torch.ones_like(kept, dtype=torch.bool)), 0.0)
    assert plan_softmax(x, 0, **scores).movement == "sweep"
    for function in (softmax, log_softmax):
        found, right = [], []
        for leaf, results in ((x.clone().requires_grad_(), found), (x.double().requires_grad_(), right)):
            if results is found:
                y = function(leaf, 0, **scores)
            else:
                s = leaf * scores.get("scale", 1.0) + scores.get("bias", 0.0)
                s = s.masked_fill(~scores["mask"], -INF) if "mask" in scores else s
                y = getattr(torch, function.__name__)(s, 0)
            results += [y.detach(), *torch.autograd.grad(y, leaf, dy.to(y.dtype))]
        for got, expected in zip(found, right, strict=True):
            near = torch.finfo(DTYPES[dtype]).eps * expected[expected.isfinite()].abs().max()
            assert torch.allclose(
                got.double(), expected, rtol=0.02 if dtype != "fp32" else 1e-5, atol=float(near)
            )
