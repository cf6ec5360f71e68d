"""topk_log_softmax on the CPU: results, gradients, arguments, launches and plans."""

from contextlib import nullcontext

import pytest
import simulated
import torch
from checking import FLOATS, example

from cute_softmax import (
    NotPlanned,
    batch_invariant,
    plan_topk_log_softmax,
    selective_log_softmax,
    topk_log_softmax,
)
from cute_softmax.dispatch.heads import largest
from cute_softmax.plan import topk_long
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.topk_long import (
    BINS,
    HELD_GROUPS,
    HELD_K,
    HELD_THREADS,
    MOST,
    ROOMS,
    SHARES,
    plan_topk_long,
)

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "simulated"])
def launched(request, monkeypatch):
    """What is launched where CPU tensors count as CUDA ones; None where torch's operations compute."""
    return simulated.install(monkeypatch) if request.param == "simulated" else None


@pytest.mark.parametrize("shape", [(4, 9), (2, 3, 64), (1,), (5, 1000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_results(shape, dtype, launched):
    logits, n = example(shape, dtype), shape[-1]
    index = torch.arange(logits[..., 0].numel()).view(shape[:-1]) * 7 % n
    for k, scale in ((min(3, n), 1.0), (n, 0.7), (0, 1.3)):
        x = logits.double()
        right = torch.log_softmax(x * scale, -1)
        order = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]
        chosen = right.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        ranks = (x > x.gather(-1, index.unsqueeze(-1))).sum(-1)
        got = topk_log_softmax(logits, k, index.int(), scale=scale, dtype=torch.float32)
        assert torch.equal(got.indices, order) and torch.equal(got.ranks, ranks)
        assert got.values.dtype is got.chosen.dtype is torch.float32
        for found, value in ((got.values, right.gather(-1, order)), (got.chosen, chosen)):
            assert found.shape == value.shape and torch.allclose(found.double(), value, rtol=2e-6, atol=2e-6)
        values, indices = topk_log_softmax(logits, k, scale=scale)
        assert values.dtype == dtype and torch.equal(indices, order)
        assert torch.allclose(
            values.double(), right.gather(-1, order), rtol=torch.finfo(dtype).eps, atol=2e-6
        )
    if launched is not None and dtype != torch.float64:
        assert {n.math for n in launched} == {"topk_log_softmax"} and len(launched) == 6


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_those_of_log_probabilities_at_the_indices(dtype, launched):
    """Where the chosen element is among the largest both add up."""
    logits, index = example((4, 9), dtype).requires_grad_(), torch.tensor([0, 3, 8, 8])
    got = topk_log_softmax(logits, 3, index, scale=0.7)
    assert not got.indices.requires_grad and not got.ranks.requires_grad
    upstream = example((4, 3), dtype, seed=1), example((4,), dtype, seed=2)
    for used in ((0,), (1,), (0, 1)):
        results = [(got.values, got.chosen)[i] for i in used]
        grads = [upstream[i] for i in used]
        (found,) = torch.autograd.grad(results, logits, grads, retain_graph=True)
        leaf = logits.detach().double().requires_grad_()
        log_p = torch.log_softmax(leaf * 0.7, -1)
        exact = (log_p.gather(-1, got.indices), log_p.gather(-1, index[:, None]).squeeze(-1))
        (right,) = torch.autograd.grad([exact[i] for i in used], leaf, [g.double() for g in grads])
        eps = torch.finfo(dtype).eps
        assert found.dtype == dtype and torch.allclose(found.double(), right, rtol=2 * eps, atol=4 * eps)
        assert not torch.allclose(found.double(), torch.zeros_like(right), atol=4 * eps)


@pytest.mark.parametrize("chosen", [False, True])
def test_calls_that_repeat(chosen, monkeypatch):
    """They are served as the first one is, and gradients, scales, modes and dtypes tell them apart."""
    launches = simulated.install(monkeypatch)
    index = torch.tensor([3, 0, 39, 7]) if chosen else None
    x, y = example((4, 40), torch.float32), example((4, 40), torch.float32, seed=1)
    for options in ({}, {"scale": 0.5}, {"dtype": torch.bfloat16}):
        for leaf in (x, y, x.clone().requires_grad_()):
            for _ in range(2):
                got = topk_log_softmax(leaf, 5, index, **options)
                right = torch.log_softmax(leaf.detach().double() * options.get("scale", 1.0), -1)
                assert torch.equal(got.indices, leaf.detach().topk(5).indices)
                eps = 2.0**-8 if "dtype" in options else 1e-6
                assert torch.allclose(got.values.double(), right.gather(-1, got.indices), rtol=eps, atol=eps)
                assert got.values.dtype is options.get("dtype", torch.float32)
                assert got.values.requires_grad == leaf.requires_grad
    forms = sum(largest.known.values(), ())
    assert len(forms) == 6  # with a gradient and without
    with batch_invariant():
        topk_log_softmax(x, 5, index)
    assert launches[-1].invariant and not launches[-2].invariant
    assert len(sum(largest.known.values(), ())) == 7


def test_second_derivatives():
    x, index = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 4])

    def both(x):
        got = topk_log_softmax(x, 2, index, scale=0.5)
        return got.values, got.chosen

    assert torch.autograd.gradcheck(both, x) and torch.autograd.gradgradcheck(both, x)


def test_ties_and_what_is_no_number(launched):
    rows = torch.tensor([[0.0, -0.0, 1.0, 1.0], [-INF, -INF, -INF, 2.0], [-INF, -INF, -INF, -INF]])
    got = topk_log_softmax(rows, 3, torch.tensor([1, 0, 3]))
    assert got.indices.tolist() == [[2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert got.ranks.tolist() == [2, 1, 0]
    right = torch.log_softmax(rows, -1).gather(-1, got.indices)
    assert torch.allclose(got.values, right, equal_nan=True)
    if launched is None:
        odd = torch.tensor([[1.0, NAN, INF, -NAN]])
        values, indices = topk_log_softmax(odd, 4)
        assert indices.tolist() == [[1, 3, 2, 0]] and values.isnan().all()


def test_strides_and_emptiness(launched):
    x = example((6, 40), torch.float32)
    for logits in (x[:, 1:], x[::2], x.T, x.T[:, ::2]):
        index = torch.arange(len(logits)) % logits.shape[1]
        got, right = topk_log_softmax(logits, 2, index), topk_log_softmax(logits.contiguous(), 2, index)
        assert all(map(torch.equal, got, right))
        assert torch.allclose(got.chosen, selective_log_softmax(logits, index))
        apart = torch.stack([index, -index], 1)
        for other in (apart[:, 0], apart.int()[:, 0]):  # of narrow ones a copy is read
            for _ in range(2):
                assert all(map(torch.equal, topk_log_softmax(logits, 2, other), got))
    values, indices = topk_log_softmax(x[:0], 3)
    assert values.shape == indices.shape == (0, 3)
    values, indices = topk_log_softmax(x, 0)
    assert values.shape == indices.shape == (6, 0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (dict(k=11), ValueError, "k is 11"),
        (dict(k=-1), ValueError, "k is -1"),
        (dict(k=2.0), TypeError, "k must be an int"),
        (dict(k=True), TypeError, "k must be an int"),
        (dict(scale=0.0), ValueError, "scale is 0.0"),
        (dict(scale=-1.0), ValueError, "scale is -1.0"),
        (dict(scale=INF), ValueError, "scale is inf"),
        (dict(scale=NAN), ValueError, "scale is nan"),
        (dict(scale="1"), TypeError, "scale must be a number"),
        (dict(index=torch.zeros(4)), TypeError, "integer dtype"),
        (dict(index=torch.zeros(3, dtype=torch.int64)), ValueError, "index has shape"),
        (dict(index=torch.zeros(4, 1, dtype=torch.int64)), ValueError, "one element of each row"),
        (dict(index=torch.full((4,), 10)), IndexError, "from 10 to 10"),
        (dict(dtype=torch.int32), TypeError, "dtype is torch.int32"),
        (dict(logits=torch.ones(4, 10, dtype=torch.int64), dtype=torch.float32), TypeError, "floating-point"),
        (dict(logits=torch.ones(())), ValueError, "no dimension"),
    ],
)
def test_arguments(call, error, words):
    with pytest.raises(error, match=words):
        topk_log_softmax(**(dict(logits=torch.randn(4, 10), k=2) | call))


def test_what_is_launched_within_batch_invariant(monkeypatch):
    """Vectors begin where rows do; of others a copy is read."""
    launches = simulated.install(monkeypatch)
    room = example((4, 1001), torch.bfloat16)
    for x, vector in ((room[:, :1000], 8), (room[:, 1:], 8), (room, 1)):
        for context in (nullcontext, batch_invariant):
            with context():
                got = topk_log_softmax(x, 5)
            assert torch.equal(got.values, topk_log_softmax(x.contiguous(), 5).values)
            first = launches[0].kernel
            assert first.vector == (8 if context is nullcontext else vector)
            assert first.edges == (context is nullcontext)
            launches.clear()


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_plans(name):
    """Shares cover a row and their candidates fit; places hold what the k are for."""
    for rows in (1, 3, 64, 132, 1000, 70000):
        for columns in (1, 7, 1000, 32768, 50257, 151936, 262144, 3000000):
            for k in (0, 1, 8, 32, 33, 128, 256, 257, MOST):
                if k > columns:
                    continue
                made = plan_topk_long(
                    rows, columns, k, contiguous(name, (rows, columns)), H200, index_stride=1
                )
                c = made.kernel
                each = made.vectors * c.vector
                assert (
                    made.shares * each >= columns // c.vector * c.vector > (made.shares - 1) * each - c.vector
                )
                assert (made.tiles - 1) * c.tile < each <= made.tiles * c.tile
                if c.held:  # by CTAs all of which run at once, with a part of it for each warp
                    assert made.shares == c.cluster_n and made.vectors <= c.held * c.threads
                    assert made.ctas == rows and rows * c.cluster_n * c.threads <= HELD_THREADS * 132
                    assert columns // c.vector >= c.cluster_n * c.threads and k <= c.most <= HELD_K
                    assert k <= HELD_GROUPS * k <= max(c.maxima.cosize, 1) or c.lanes == 1 or not k
                    assert not c.split and (not k or c.maxima.cosize >= max(32, k))
                    assert c.most <= 32 or c.maxima.cosize % 32 == 0 or not k
                else:
                    assert (
                        1 <= made.shares <= SHARES and made.shares * k <= max(c.places, 1) * (k > 0)
                    ) or not k
                    assert c.split == (made.shares > 1) and made.ctas == rows * made.shares
                fit = [r for r in ROOMS if 0 < k <= r.k and (r.threads == c.threads or c.held)]
                room = fit[0] if fit else None
                assert c.most == (room.k if room else 0)
                if 8 < k <= 128 and not c.held:  # the more rows, the smaller the CTAs
                    assert c.threads == (256 if rows <= 132 else 128)
                if room:  # groups are no fewer than k, so that a k-th of them is there
                    assert k <= room.groups * c.threads and k + room.places // 4 <= room.places
                    assert c.noted * c.room.unit >= c.tile // c.vector + c.room.spare
                    assert c.steps % c.room.unit == 0 and 16 * c.room.unit * c.noted > 4 * BINS
                assert c.edges == bool(columns % c.vector) and bool(made.scratch) == c.split
                assert c.shared_memory <= H200.architecture.shared_memory
                assert len(c.signature) == len(made.arguments) + c.split + sum(
                    1 + len(s) for s in made.operand_strides
                )
                assert f"{columns}, {name} -> fp32" in made.explain()
                if rows >= 396:
                    assert made.shares == 1
    with pytest.raises(NotPlanned, match="at most 1024"):
        plan_topk_long(4, 5000, 1025, contiguous("bf16", (4, 5000)), H200)
    with pytest.raises(NotPlanned, match="32 bits"):
        plan_topk_long(1 << 31, 8, 1, Operand("bf16", (8, 1)), H200)


def test_the_plan_that_is_asked_for_is_the_one_of_the_call(monkeypatch):
    """With an index, a scale and strides, within `batch_invariant` too; of a shape that of a contiguous tensor."""
    launches = simulated.install(monkeypatch)
    room = example((4, 1001), torch.bfloat16)
    index = torch.arange(4)
    for x, k, chosen, scale, context in (
        (room, 5, False, 1.0, nullcontext),
        (room[:, :1000], 40, True, 0.5, nullcontext),
        (room[:, :1000], 5, True, 1.0, batch_invariant),
        (room[:, 1:], 0, True, 1.0, batch_invariant),
    ):
        with context():
            topk_log_softmax(x, k, index if chosen else None, scale=scale)
            asked = plan_topk_log_softmax(x, k, index=chosen, scale=scale)
        assert [made.kernel for made in launches] == [asked.kernel]
        launches.clear()
    of_shape = plan_topk_log_softmax((4, 1001), 5)
    assert of_shape == plan_topk_log_softmax(room, 5) and of_shape._repr_svg_() is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (((4, 10), 11), ValueError, "0 to 10 can be chosen"),
        (((4, 10), 0), ValueError, "nothing is launched"),
        (((0, 10), 2), ValueError, "nothing is launched"),
        (((4, 10), 2, torch.float64), TypeError, "no kernels for torch.float64"),
        (((4, 5000), 1025), NotPlanned, "at most 1024"),
    ],
)
def test_plans_of_what_is_not_launched(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_topk_log_softmax(*arguments)


def test_rows_that_are_too_many_to_be_held_cost_no_classes(monkeypatch):
    """A new length is planned in tens of microseconds: clusters in which they do not fit are not built to find out."""
    made = []
    build = topk_long.LongTopkClass
    monkeypatch.setattr(topk_long, "LongTopkClass", lambda **fields: made.append(fields) or build(**fields))
    for rows in (1000, 48):
        plan_topk_long(rows, 262144, 8, contiguous("bf16", (rows, 262144)), H200)
    assert len(made) <= 2 + len(topk_long.HELD_SIZES)
    made.clear()
    plan_topk_long(32, 151936, 8, contiguous("bf16", (32, 151936)), H200)
    assert any(fields.get("held") for fields in made)
