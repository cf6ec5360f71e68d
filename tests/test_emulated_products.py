"""Compiled products and their gradients, run on the CPU by their PTX: with tensor maps, wgmma and clusters, and by
mma.sync; right beside float64, and nothing else is touched."""

import math

import checking
import emulated
import pytest
import torch
from random_products import DEEPEST, KINDS, check, draw, fp32, run, same

import cute_softmax as c

SMALL = range(2000, 20000)  # scores of a case
# All but those with most columns of V, which take longest to compile.
CHOSEN = [k for k, kind in enumerate(KINDS) if kind.depths != DEEPEST]


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    return emulated.install(monkeypatch, tmp_path)


def small(kind: int):
    """The first small case of a kind."""
    seed = kind
    while True:
        call, told = draw(seed, "cpu")
        shared = torch.broadcast_shapes(call.scores.shape[:-2], call.values.shape[:-2])
        if math.prod((*shared, *call.scores.shape[-2:])) in SMALL:
            return call, told
        seed += len(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("kind", CHOSEN, ids=str)
def test_random_calls(kind, launches):
    """Warps run in any order."""
    call, told = small(kind)
    launches.seed = kind
    found = run(call)
    check(call, found)
    assert [work.math for work in launches] == ["softmax_matmul", "softmax_matmul_backward"], told
    launches.seed = None
    assert same(found, run(call))


@pytest.mark.long
@pytest.mark.parametrize("kind", range(0, len(KINDS), 3), ids=str)
def test_random_calls_without_wgmma(kind, launches):
    launches.instruction, launches.seed = "mma", kind
    call, _ = small(kind)
    options = {
        "scale": call.scale,
        "causal": False if call.causal is None else call.causal,
        "mask": call.mask,
    }
    options |= {"bias": call.bias, "empty_rows": "zero" if call.zero else "nan", "return_lse": True}
    call.check_result(*c.softmax_matmul(call.scores, call.values, **options))


def plain(instruction: str, launches):
    """A call of clusters, and of parts that are merged; with a sink."""
    launches.instruction = instruction
    x, v = checking.random((20, 2000), torch.bfloat16, 1, 2.0), checking.random((2000, 64), torch.bfloat16, 2)
    sink = checking.random((20, 1), fp32, 3, 2.0)
    both = torch.cat([x.double(), sink.double()], -1)
    right = torch.softmax(both, -1)[..., :-1] @ v.double()
    found, lse = c.softmax_matmul(x, v, sink=sink, return_lse=True)
    assert torch.allclose(found.double(), right, rtol=2.0**-7, atol=2.0**-8)
    assert torch.allclose(lse.double(), torch.logsumexp(both, -1), rtol=1e-6)
    return launches[-1].plan.kernel


@pytest.mark.parametrize("instruction", ["wgmma", "mma"])
def test_columns_in_parts(instruction, launches):
    kernel = plain(instruction, launches)
    assert kernel.cluster > 1 if instruction == "wgmma" else kernel.split


@pytest.mark.parametrize(
    ("instruction", "name", "other"),
    [
        ("mma", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
        ("mma", "cp.async.wait_group", "fence"),
        ("wgmma", "wgmma.wait_group.sync.aligned", "fence"),
        ("wgmma", "ex2.approx.ftz.f32", "abs.f32"),
    ],
)
def test_a_wrong_product_is_seen(instruction, name, other, launches):
    plain(instruction, launches)
    with launches.mutated(name, other, "matmul"), pytest.raises((AssertionError, RuntimeError)):
        plain(instruction, launches)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "stmatrix.sync.aligned.m8n8.x4.shared.b16"),
        ("cp.async.bulk.wait_group.read", "fence"),
        ("wgmma.wait_group.sync.aligned", "fence"),
    ],
)
def test_a_wrong_gradient_is_seen(name, other, launches):
    call, _ = small(0)
    check(call, run(call))
    with launches.mutated(name, other, "matmul_backward"), pytest.raises((AssertionError, RuntimeError)):
        check(call, run(call))
