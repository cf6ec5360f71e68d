"""softmax_stats, and softmax(S) @ V with them, against float64; bounds as in test_gpu_matmul."""

import math

import pytest
import torch
from test_gpu_matmul import EPSILON, check, dtypes, instruction, oracle, tensors  # noqa: F401

from cute_softmax import softmax_matmul, softmax_stats


def check_known(s, v, **options):
    """A call with statistics of the same scores: these and the result."""
    about = {name: value for name, value in options.items() if name != "empty_rows"}
    known = softmax_stats(s, **about)
    assert known.dtype == torch.float32
    return check(s, v, stats=known, **options)


@dtypes
@pytest.mark.parametrize(
    ("batch", "rows", "columns", "depth"),
    [
        ((2,), 300, 1000, 128),
        ((2, 2), 130, 4096, 64),
        ((3,), 5, 20000, 128),
        ((2,), 513, 1, 40),
        ((2,), 100, 520, 512),
        ((2,), 70, 777, 65),
    ],
)
def test_shapes(dtype, batch, rows, columns, depth):
    check_known(*tensors(batch, rows, columns, depth, dtype))


@dtypes
@pytest.mark.parametrize("spread", [0.0, 8.0, 40.0])
def test_spreads(dtype, spread):
    s, v = tensors((2,), 200, 3000, 128, dtype, spread=spread)
    check_known(s, v)
    check_known(s + torch.linspace(-spread, spread, 3000, device="cuda").to(s.dtype), v)


@dtypes
def test_long_rows(dtype):
    """Probabilities so small that float16 would lose bits of them."""
    check_known(*tensors((1,), 70, 200000, 64, dtype))


@dtypes
def test_forms(dtype):
    s, v = tensors((2, 3), 200, 333, 128, dtype)
    mask = torch.rand(2, 3, 200, 333, device="cuda") > 0.9
    mask[0, 0, 5] = False
    bias = torch.randn(3, 200, 333, device="cuda")
    for scale in (0.125, -1.5, 0.0):
        check_known(s, v, scale=scale)
    check_known(s, v, causal=-3, scale=0.5)
    check_known(s, v, causal=-3, scale=0.5, empty_rows="zero")
    check_known(s, v, mask=mask)
    check_known(s, v, mask=mask, bias=bias, empty_rows="zero", causal=200)
    check_known(s.float(), v, scale=2.0, causal=True)
    check_known(s.float() * 100, v)
    few = s[..., :9, :].clone()
    check_known(few, v, scale=0.3, mask=mask[..., :9, :])
    check_known(s, v[:, :1])


def test_huge_scores():
    """Beyond what float32 holds of a log-sum-exp: its last bit decides how far off the result is."""
    s, v = tensors((2,), 200, 333, 128, "bf16", scores="fp32", spread=1e6)
    s = s.bfloat16().float()  # some rows have their largest score twice
    known = softmax_stats(s)
    right, lse, unit = oracle(s, v)
    assert ((known - lse).abs() <= 2.0**-23 * lse.abs()).all()
    off = torch.expm1(2.0**-23 * lse.abs()).unsqueeze(-1) + 2 * EPSILON["bf16"]
    assert ((softmax_matmul(s, v, stats=known).double() - right).abs() <= off * unit).all()


@dtypes
def test_values_of_rows(dtype):
    """-inf in any pattern, NaN, +inf."""
    s, v = tensors((1,), 300, 700, 128, dtype)
    s[0, 0] = -math.inf
    s[0, 1, 64:] = -math.inf
    s[0, 3, 5] = math.nan
    s[0, 4, 699] = math.inf
    s[0, 5] = -math.inf
    s[0, 5, 333] = 1.0
    check_known(s, v)
    check_known(s, v, empty_rows="zero")


def test_given_ones_are_used():
    """No sum of the kernel's own: statistics that are off by log(2) halve the result."""
    s, v = tensors((2,), 100, 500, 128, "bf16")
    known = softmax_stats(s)
    half = softmax_matmul(s, v, stats=known + math.log(2))
    right, _, unit = oracle(s, v)
    assert ((half.double() - right / 2).abs() <= 2 * EPSILON["bf16"] * unit).all()
    for stats in (known[0], known[:1]):  # broadcast
        out = softmax_matmul(s[:1], v[:1], stats=stats)
        assert torch.equal(out, softmax_matmul(s, v, stats=known)[:1])


@dtypes
def test_gradient(dtype):
    """That of the softmax, whether its sums are known or not."""
    s, v = tensors((2, 2), 70, 136, 64, dtype)
    grads = []
    grad = torch.randn(2, 2, 70, 64, device="cuda").to(s.dtype)
    for known in (True, False):
        a, b = s.clone().requires_grad_(), v.clone().requires_grad_()
        stats = softmax_stats(a, scale=0.5, causal=True) if known else None
        softmax_matmul(a, b, scale=0.5, causal=True, stats=stats).backward(grad)
        grads.append((a.grad.double(), b.grad.double()))
    for mine, theirs in zip(*grads, strict=True):
        assert (mine - theirs).norm() <= 4 * EPSILON[dtype] * theirs.norm()


def test_compiled():
    s, v = tensors((2,), 70, 136, 64, "bf16")

    def call(s, v):
        return softmax_matmul(s, v, scale=0.5, stats=softmax_stats(s, scale=0.5)) * 2

    assert torch.equal(torch.compile(call, fullgraph=True)(s, v), call(s, v))
    known = softmax_stats(s, scale=0.5)
    arguments = (s.requires_grad_(), v.requires_grad_(), None, None, 0.5, None, False, known)
    torch.library.opcheck(torch.ops.cute_softmax.softmax_matmul.default, arguments)
    torch.library.opcheck(torch.ops.cute_softmax.softmax_stats.default, (s.detach(), None, None, 0.5, None))
