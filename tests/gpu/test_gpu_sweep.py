"""Columns in two passes: every math, dtypes, layouts and edges; large ones as calls plan them; guard bands intact."""

import math

import pytest
import sweeps
import torch
from building import build
from checking import DTYPES, check_backward, check_reduction, check_softmax, equal_bits, random

from cute_softmax import logsumexp, plan_softmax, softmax, softmax_backward
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
