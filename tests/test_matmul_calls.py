"""softmax_matmul as GPUs see it, without one: what is launched on which operands, the forms of calls that repeat."""

import gc
import math
import weakref

import pytest
import simulated
import torch

from cute_softmax import softmax_matmul, softmax_stats
from cute_softmax.dispatch.matmul import backward, forms

BF16 = torch.bfloat16
OPTIONS = [
    {},
    {"scale": -0.5},
    {"causal": True},
    {"causal": -2, "empty_rows": "zero", "scale": 2},
    {"mask": True},
    {"bias": True, "scale": 0.3},
    {"mask": True, "bias": True, "causal": 3, "empty_rows": "zero"},
]
SHAPES = [  # of scores, and of values
    ((2, 16, 24), (2, 24, 8)),
    ((2, 3, 5, 8), (1, 8, 16)),
    ((4, 7), (7, 5)),  # rows that begin anywhere
    ((3, 1, 40), (40, 3)),
]


@pytest.fixture
def launches(monkeypatch):
    return simulated.install(monkeypatch)


def example(shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given(options, shape, seed=0):
    """The options with their tensors."""
    tensors = {
        "mask": example(shape[-2:], torch.float32, seed + 3) < 1,
        "bias": example(shape[-1:], BF16, seed + 4),
    }
    return {name: tensors.get(name, value) for name, value in options.items()}


def exact(scores, values, scale=1.0, mask=None, bias=None, causal=False, empty_rows="nan"):
    """(the product, the log-sum-exps) in float64."""
    x = scores.double() * scale
    x = x if bias is None else x + bias.double()
    x = x if mask is None else x.masked_fill(~mask, -math.inf)
    if causal is not False:
        x = x.masked_fill(
            ~torch.ones(x.shape[-2:], dtype=torch.bool).tril(int(causal) * (causal is not True)), -math.inf
        )
    p = torch.softmax(x, -1)
    if empty_rows == "zero":
        p = torch.where((x == -math.inf).all(-1, keepdim=True), 0.0, p)
    return p @ values.double(), torch.logsumexp(x, -1)


def count():
    return sum(len(same) for same in forms.known.values())


def same(found, right, error=2**-7):
    return torch.allclose(found.double(), right, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_results(options, shapes, dtype, launches):
    """Of three calls, the later ones by what the first decided."""
    for seed in range(3):
        scores, values = example(shapes[0], dtype, seed), example(shapes[1], BF16, seed + 1)
        options = given(options, shapes[0], seed)
        right, sums = exact(scores, values, **options)
        launches.clear()
        found = softmax_matmul(scores, values, **options)
        assert same(found, right) and found.dtype == BF16 and found.is_contiguous()
        both = softmax_matmul(scores, values, **options, return_lse=True)
        assert torch.equal(both[0].nan_to_num(), found.nan_to_num()) and both[1].dtype == torch.float32
        assert torch.allclose(both[1].double(), sums, atol=1e-5)
        assert [(n.math, n.lse) for n in launches] == [("softmax_matmul", lse) for lse in (False, True)]
    assert count() == 2
    as_they_lie = shapes[0][-1] % 8 == 0 and shapes[1][-1] % 8 == 0
    found = [bool(form._launchers) for alike in forms.known.values() for form in alike]
    assert found == [as_they_lie] * 2, "a Call is kept where nothing is copied"


@pytest.mark.parametrize("shapes", SHAPES[:3], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(options, shapes, launches):
    for seed in range(2):
        scores, values = (example(s, BF16, seed + i).requires_grad_() for i, s in enumerate(shapes))
        options = given(options, shapes[0], seed)
        leaves = [scores, values]
        if "bias" in options:
            options["bias"] = options["bias"].requires_grad_()
            leaves.append(options["bias"])
        right, sums = exact(*leaves[:2], **options)
        launches.clear()
        found, lse = softmax_matmul(scores, values, **options, return_lse=True)
        upstream, of_lse = example(right.shape, BF16, 7), example(sums.shape, torch.float32, 8)
        counts = sums.isfinite()  # a row without anything has no gradient
        of_lse = of_lse * counts
        upstream = upstream * counts.unsqueeze(-1)
        ours = torch.autograd.grad((found, lse), leaves, (upstream, of_lse))
        wide = [upstream.double(), of_lse.double()]
        theirs = torch.autograd.grad((right.nan_to_num(), sums.nan_to_num()), leaves, wide)
        for mine, other in zip(ours, theirs, strict=True):
            if options.get("empty_rows") == "zero" or sums.isfinite().all():
                assert mine.shape == other.shape and mine.dtype == BF16
                assert same(mine, other.double(), 0.06)
        assert [n.math for n in launches] == ["softmax_matmul", "softmax_matmul_backward"]


def test_calls_that_share_a_form(launches):
    scores, values = example((2, 16, 24)), example((2, 24, 8), seed=1)
    mask = torch.rand(16, 24) < 0.5

    def made(*tensors, **options):
        before = count()
        softmax_matmul(*tensors, **options)
        return count() > before

    assert made(scores, values) and not made(-scores, values + 1) and not made(scores, values)
    assert (
        made(scores, values, scale=2.0)
        and not made(scores, values, scale=2.0)
        and made(scores, values, scale=3.0)
    )
    assert (
        made(scores, values, causal=True)
        and made(scores, values, causal=1)
        and not made(scores, values, causal=1)
    )
    assert made(scores, values, mask=mask) and not made(scores, values, mask=~mask)
    assert made(scores.requires_grad_(), values) and not made(scores, values)
    with torch.no_grad():
        assert not softmax_matmul(scores, values).requires_grad
    assert softmax_matmul(scores, values).requires_grad
    other = example((3, 16, 24)).requires_grad_()
    with torch.no_grad():
        softmax_matmul(other, example((3, 24, 8)))
    assert softmax_matmul(other, example((3, 24, 8))).requires_grad, "first seen without gradients"
    for wrong in ({"mask": 5}, {"scale": "2"}, {"causal": 1.0}, {"bias": mask}, {"empty_rows": "none"}):
        with pytest.raises((TypeError, ValueError)):
            softmax_matmul(scores, values, **wrong)


def test_places_within_16_bytes(launches):
    """The form holds where operands begin as they did; elsewhere rows are copied."""
    values = example((24, 8), seed=1)
    for offset in (0, 0, 1, 8):
        scores = (
            torch.empty(16 * 24 + offset, dtype=BF16)[offset:]
            .view(16, 24)
            .copy_(example((16, 24), seed=offset))
        )
        launches.clear()
        assert same(softmax_matmul(scores, values), exact(scores, values)[0]) and len(launches) == 1
    assert count() == 1


def test_known_sums(launches):
    scores, values = example((2, 16, 24)), example((2, 24, 8), seed=1)
    sums = softmax_stats(scores)
    for _ in range(2):
        launches.clear()
        found, same_sums = softmax_matmul(scores, values, stats=sums, return_lse=True)
        assert same(found, exact(scores, values)[0]) and torch.equal(same_sums, sums)
        assert [(n.math, n.stats, n.lse) for n in launches] == [("softmax_matmul", True, False)]
    scores.requires_grad_()
    for _ in range(2):
        found = softmax_matmul(scores, values, stats=sums)
        (d,) = torch.autograd.grad(found.sum(), scores)
        (want,) = torch.autograd.grad(exact(scores, values)[0].sum(), scores)
        assert same(d, want.double(), 0.05)


def test_splits_are_added_up(launches):
    """A walk over many rows is cut into parts, whose dV are summed."""
    scores, values = example((2048, 16)).requires_grad_(), example((16, 8), seed=1).requires_grad_()
    found = softmax_matmul(scores, values)
    ours = torch.autograd.grad(found, (scores, values), found.detach())
    right = exact(scores, values)[0]
    theirs = torch.autograd.grad(right, (scores, values), found.detach().double())
    assert all(same(a, b.double(), 0.05) for a, b in zip(ours, theirs, strict=True))
    shape, tensors = scores.shape, {"scores": scores, "grad": found, "values": values, "dscores": scores}
    tensors |= {"dvalues": values, "output": found, "lse": torch.empty(2048)}
    form = backward.form_of(shape, [], 8, tensors, None, 1.0, 1.0, False)
    assert backward.planned(*form).splits > 1


def test_a_form_keeps_no_tensor(launches):
    tensors = [example((2, 16, 24)), example((2, 24, 8), seed=1), torch.rand(16, 24) < 0.5, example((24,))]
    scores, values, mask, bias = tensors
    for _ in range(2):
        softmax_matmul(scores, values, mask=mask, bias=bias)
    known = [weakref.ref(t) for t in tensors]
    assert count() == 1
    del tensors, scores, values, mask, bias
    gc.collect()
    assert [ref() for ref in known] == [None] * 4
