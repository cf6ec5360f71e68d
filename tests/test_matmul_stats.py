"""softmax_stats and what softmax_matmul does with them, without a GPU."""

import math

import pytest
import torch

from cute_softmax import softmax_matmul, softmax_stats
from cute_softmax.dispatch.matmul.calls import operator


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_statistics():
    s, bias = torch.randn(2, 5, 7), torch.randn(3, 1, 1, 7)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    known = softmax_stats(s, scale=0.5, mask=mask, bias=bias)
    x = (s * 0.5 + bias).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(known, torch.logsumexp(x, -1))
    assert known.shape == (3, 2, 5) and known[..., 2].isneginf().all()
    below = torch.ones(5, 7).tril(1) > 0
    torch.testing.assert_close(
        softmax_stats(s.bfloat16(), causal=1),
        torch.logsumexp(s.bfloat16().float().masked_fill(~below, -math.inf), -1),
    )
    assert not softmax_stats(s.requires_grad_()).requires_grad


def test_products():
    s, v = torch.randn(2, 5, 7), torch.randn(7, 3)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    options = dict(scale=0.5, mask=mask, causal=2)
    known = softmax_stats(s, **options)
    for rows in ("nan", "zero"):
        out, lse = softmax_matmul(s, v, stats=known, empty_rows=rows, return_lse=True, **options)
        torch.testing.assert_close(out, softmax_matmul(s, v, empty_rows=rows, **options), equal_nan=True)
        assert torch.equal(lse, known)
    half = softmax_matmul(s, v, stats=known + math.log(2), **options)
    torch.testing.assert_close(half, softmax_matmul(s, v, **options) / 2, equal_nan=True)


def test_gradients():
    """Those of the softmax: statistics are functions of the scores."""
    s, v, bias = random(2, 5, 7), random(7, 3), random(5, 1)

    def product(s, v, bias):
        options = dict(scale=0.7, causal=1, bias=bias)
        return softmax_matmul(s, v, stats=softmax_stats(s, **options), **options)

    assert torch.autograd.gradcheck(product, (s, v, bias))
    assert torch.autograd.gradgradcheck(product, (s, v, bias))
    by_transform = torch.func.grad(lambda s: product(s, v, bias).square().sum())(s.detach())
    product(s, v, bias).square().sum().backward()
    torch.testing.assert_close(by_transform, s.grad)


def test_operators():
    s, v = torch.randn(2, 5, 7), torch.randn(7, 3)
    known = softmax_stats(s)
    result, lse = operator(s, v, None, None, 1.0, None, False, known)
    assert lse.numel() == 0
    torch.testing.assert_close(result, torch.softmax(s, -1) @ v)
    both = lambda s, v: softmax_matmul(s, v, stats=softmax_stats(s))  # noqa: E731
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(s, v), result)


@pytest.mark.parametrize(
    ("error", "match", "stats"),
    [
        (TypeError, "stats must be", [1.0]),
        (TypeError, "stats are torch.bfloat16", torch.zeros(2, dtype=torch.bfloat16)),
        (ValueError, "do not broadcast", torch.zeros(3)),
        (ValueError, "stats are on meta", torch.zeros(2, device="meta")),
    ],
)
def test_errors(error, match, stats):
    with pytest.raises(error, match=match):
        softmax_matmul(torch.zeros(2, 3), torch.zeros(3, 4), stats=stats)


@pytest.mark.parametrize(
    ("error", "match", "scores", "options"),
    [
        (TypeError, "scores must be", [1.0], {}),
        (TypeError, "scores has dtype", torch.zeros(2, 3, dtype=torch.int32), {}),
        (ValueError, "no dimension", torch.tensor(1.0), {}),
        (TypeError, "scale", torch.zeros(2, 3), {"scale": torch.ones(1)}),
        (ValueError, "does not broadcast", torch.zeros(2, 3), {"bias": torch.zeros(4)}),
        (ValueError, "columns", torch.zeros(2, 1), {"bias": torch.zeros(4)}),
        (TypeError, "causal", torch.zeros(2, 3), {"causal": 0.5}),
    ],
)
def test_errors_of_statistics(error, match, scores, options):
    with pytest.raises(error, match=match):
        softmax_stats(scores, **options)
