"""kl_div on the CPU: torch's meaning in float64, what is launched for it, memory, and wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from checking import FLOATS, example

from cute_softmax import kl_div
from cute_softmax.dispatch.heads import divergence

INF = math.inf


def exact(input, target, dim=-1, scale=1.0):
    """The divergences of rows in float64, differentiable."""
    dims = dim if isinstance(dim, tuple) else (dim,)
    q, p = (t.double() * scale for t in (input, target))
    q, p = (t - torch.logsumexp(t, dims, keepdim=True) for t in (q, p))
    return torch.where(p.exp() == 0, 0.0, p.exp() * (p - q)).sum(dims)


def pair(shape, dtype=torch.float32):
    return example(shape, dtype), example(shape, dtype, seed=1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 9), -1), ((2, 3, 16), 2), ((9,), 0), ((4, 5), 0), ((2, 3, 4), (1, 2))], ids=str
)
def test_results_and_gradients(shape, dim, refuse, dtype, launched):
    """By a kernel each, of rows; by torch's operations where there is none. To those that want them alone."""
    if launched is not None:
        launched.refuse = refuse
    for scale in (1.0, 0.4):
        given = [t.requires_grad_() for t in pair(shape, dtype)]
        wide = [t.detach().double().requires_grad_() for t in given]
        found, right = kl_div(*given, dim, scale=scale, reduction="none"), exact(*wide, dim, scale)
        eps = torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == right.shape
        assert torch.allclose(found.double(), right, rtol=eps, atol=1e-6)
        upstream = example(found.shape, torch.float64, seed=2)
        ours = torch.autograd.grad(found, given, upstream.to(dtype))
        for d, expected in zip(
            ours, torch.autograd.grad(right, wide, upstream.to(dtype).double()), strict=True
        ):
            assert d.dtype == dtype and (d.double() - expected).abs().max() <= 4 * eps * (
                1 + expected.abs().max()
            )
    contiguous = dim in (-1, 2, 0, (1, 2)) and (shape, dim) != ((4, 5), 0)
    if launched is not None and dtype != torch.float64 and not refuse and contiguous:
        names = [("logsumexp", "loss"), ("softmax", "input"), ("softmax", "target")]
        assert [(n.math, n.prologue.against) for n in launched] == names * 2
        launched.clear()
        given[1].requires_grad_(False)
        kl_div(*given, dim).backward()
        assert [n.prologue.against for n in launched] == ["loss", "input"]


def test_as_torchs():
    input, target = (t.double() for t in pair((4, 9)))
    q, p = (torch.log_softmax(t, -1) for t in (input, target))
    for ours, torchs in (("none", "none"), ("sum", "sum"), ("mean", "batchmean")):
        expected = torch.nn.functional.kl_div(q, p, reduction=torchs, log_target=True)
        expected = expected.sum(-1) if ours == "none" else expected
        assert torch.allclose(kl_div(input, target, reduction=ours), expected, rtol=1e-12)


def test_gradients_of_gradients():
    given = [t.double().requires_grad_() for t in pair((3, 5))]
    function = lambda x, t: kl_div(x, t, scale=0.7, reduction="none")  # noqa: E731
    assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)


def test_what_is_left_out(launched):
    """By the target: it adds nothing, and its gradient is 0. By the input alone: infinitely wrong."""
    input, target = pair((3, 8))
    target[0, 3:] = input[0, 5:] = -INF
    input[1, 2] = target[2] = -INF
    given = [t.requires_grad_() for t in (input, target)]
    found = kl_div(*given, reduction="none")
    assert found.isfinite().tolist() == [True, False, False] and found[1] == INF and found[2].isnan()
    assert torch.allclose(found[0].double(), exact(input[:1], target[:1])[0], atol=1e-6)
    for d in torch.autograd.grad(found[0], given):
        assert (d[0, 5:] == 0).all() and (d[0, :3] != 0).all()


def test_nothing_of_the_logits_size_is_kept(launches):
    given = [t.requires_grad_() for t in pair((6, 40))]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = kl_div(*given)
    inputs = {t.data_ptr() for t in given}
    assert all(t.numel() <= 6 for t in kept if t.data_ptr() not in inputs)
    loss.backward()
    assert [n.prologue.against for n in launches] == ["loss", "input", "target"]
    assert all(set(n.strides[2]) == {0, 1} for n in launches)


def test_calls_that_repeat(launches):
    """They are served as the first one is; what is different makes a form of its own."""
    for options in ({}, {"scale": 0.5}, {"reduction": "none"}, {"dtype": torch.bfloat16}):
        for seed in range(3):
            input, target = (example((6, 40), torch.float32, seed=n) for n in (2 * seed, 2 * seed + 1))
            given = [input.requires_grad_(), target.requires_grad_(seed == 2)]
            launches.clear()
            found = kl_div(*given, **options)
            right = exact(*(t.detach().double() for t in given), -1, options.get("scale", 1.0))
            right = right if "reduction" in options else right.mean()
            eps = 2.0**-7 if "dtype" in options else 1e-6
            assert torch.allclose(found.double(), right, rtol=eps, atol=eps)
            assert found.dtype is options.get("dtype", torch.float32)
            found.sum().backward()
            assert [n.prologue.against for n in launches] == ["loss", "input", *["target"] * (seed == 2)]
            with torch.no_grad():
                assert torch.equal(kl_div(*given, **options), found)
    assert len(sum(divergence.known.values(), ())) == 8
    with pytest.raises(TypeError, match="scale"):
        kl_div(*given, scale=True)
    dims = [0]
    for dim in (1, 0):  # which its caller changes
        assert torch.equal(kl_div(*given, dims, reduction="none"), kl_div(*given, 1 - dim, reduction="none"))
        dims[0] = dim


def test_two_dtypes(launches):
    """A bfloat16 student of a float32 teacher: each gradient in its own."""
    input, target = pair((4, 16))
    given = [input.bfloat16().requires_grad_(), target.requires_grad_()]
    found = kl_div(*given, dtype=torch.float32)
    right = exact(given[0], given[1]).mean()
    assert found.dtype is torch.float32 and torch.allclose(found.double(), right, atol=1e-6)
    assert [d.dtype for d in torch.autograd.grad(found, given)] == [torch.bfloat16, torch.float32]
    assert len(launches) == 3


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kl_div([1.0], X), TypeError, "input must be a torch.Tensor"),
        (lambda: kl_div(X, [1.0]), TypeError, "target must be a torch.Tensor"),
        (lambda: kl_div(X, X.long()), TypeError, "int64"),
        (lambda: kl_div(X, X[:2]), ValueError, r"target has shape \(2, 4\) on cpu: it must have the input's"),
        (lambda: kl_div(X, X.to("meta")), ValueError, "on meta"),
        (lambda: kl_div(X, X, 2), IndexError, "dim=2 is out of range"),
        (lambda: kl_div(X, X, reduction="batchmean"), ValueError, "reduction is 'batchmean'"),
        (lambda: kl_div(X, X, scale="2"), TypeError, "scale"),
        (lambda: kl_div(X, X, scale=-1.0), ValueError, "scale is -1.0: it must be positive"),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
