"""Prepared calls: the same results as `softmax`, for every movement, without a decision at the call."""

import pytest
import torch
from checking import DTYPES, check_softmax, equal_bits, random

import cute_softmax
from cute_softmax import prepare, softmax
from cute_softmax.runtime import launch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, dim", [((33, 1000), -1), ((1000, 264), 0), ((3, 40, 5, 16), (1, 3)), ((20000, 136), 0)]
)
def test_prepared(shape, dim, dtype, monkeypatch):
    x = random(shape, DTYPES[dtype])
    prepared = prepare(x, dim)
    assert prepared.plan.explain() == cute_softmax.plan_softmax(x, dim).explain()
    expected = softmax(x, dim)

    def decide(*_, **__):
        raise AssertionError("a prepared call decides nothing")

    monkeypatch.setattr(launch, "plan_call", decide)
    for seed in (0, 1):
        x = random(shape, DTYPES[dtype], seed=seed)
        y = prepared(x)
        check_softmax(y, x, dim)
        if seed == 0:
            assert equal_bits(y, expected)


def test_other_result_dtype_and_graph():
    x = random((512, 512), torch.bfloat16)
    prepared = prepare(x, 0, torch.float32)
    prepared(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = prepared(x)
    x.copy_(random((512, 512), torch.bfloat16, seed=3))
    graph.replay()
    assert y.dtype is torch.float32
    check_softmax(y, x, 0)
