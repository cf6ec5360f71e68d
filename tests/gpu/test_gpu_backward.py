"""The backward kernel on the device: lengths, dtypes, values, bits, and gradients through autograd."""

import math

import classes
import pytest
import torch
from checking import DTYPES, Guarded, check_backward, equal_bits, random

from cute_softmax import softmax, softmax_backward
from cute_softmax.runtime import launch

LENGTHS = (
    1, 2, 3, 7, 8, 33, 64, 127, 128, 255, 512, 1000, 1023, 1024, 2047, 4096, 5000, 8192, 16384, 20000, 32768,
    50257, 65536, 100000, 128256, 151936, 200064, 262144, 300001, 1000000,
)  # fmt: skip
TRIPLES = [(*classes.operands("softmax_backward", p),) for p in classes.PAIRS]
TRIPLES += [
    ("fp32", "bf16", "bf16"),
    ("bf16", "fp32", "fp32"),
    ("fp16", "fp16", "fp32"),
    ("fp32", "fp16", "fp16"),
]
triples = pytest.mark.parametrize("triple", TRIPLES, ids="-".join)


def example(shape, triple, seed=0, scale=2.0):
    """(dy, y) with y from a softmax of its own dtype."""
    dy_dtype, y_dtype, _ = (DTYPES[d] for d in triple)
    x = random(shape, torch.float32, seed=seed, scale=scale)
    return random(shape, dy_dtype, seed=seed + 1), torch.softmax(x, -1).to(y_dtype)


def guarded_backward(dy, y, dtype, **placement) -> torch.Tensor:
    """The kernel on guarded operands; the public function allocates its own result."""
    grad, output, result = Guarded.of(dy), Guarded.of(y), Guarded(y.shape, dtype, **placement)
    launch.run("softmax_backward", (grad.tensor, output.tensor, result.tensor), (y.dim() - 1,))
    result.check()
    grad.check(written=False)
    output.check(written=False)
    assert equal_bits(grad.tensor, dy) and equal_bits(output.tensor, y)
    return result.tensor


@triples
@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths(columns, triple):
    dtype = DTYPES[triple[2]]
    for rows in (0, 1, 2, 3, 17, 1000) if columns <= 10000 else (0, 1, 9):
        dy, y = example((rows, columns), triple, seed=columns + rows)
        dx = softmax_backward(dy, y, input_dtype=dtype)
        assert dx.dtype == dtype
        check_backward(dx, dy, y)
        assert equal_bits(dx, softmax_backward(dy, y, input_dtype=dtype)), "a second call gave other bits"
        if rows:
            assert equal_bits(dx, guarded_backward(dy, y, dtype))


@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
def test_ends_of_every_class(pair, arch):
    triple = classes.operands("softmax_backward", pair)
    for interval in classes.taken("softmax_backward", arch, triple):
        for columns in {interval.first, interval.last}:
            dy, y = example((5, columns), triple, seed=columns)
            check_backward(guarded_backward(dy, y, DTYPES[triple[2]]), dy, y)
    dy, y = example((2, interval.last + 1), triple)
    check_backward(guarded_backward(dy, y, DTYPES[triple[2]]), dy, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 9, 64, 1000, 1023, 20000, 50257])
def test_results_at_every_alignment(columns, dtype):
    triple = (dtype,) * 3
    dy, y = example((5, columns), triple, seed=columns)
    for offset in range(9):
        for pad in (0, 1, 3):
            place = {"offset": offset, "strides": (columns + pad, 1)}
            check_backward(guarded_backward(dy, y, DTYPES[dtype], **place), dy, y)


@pytest.mark.parametrize("shape", [(4_000_003, 7), (3_000_000, 64), (131073, 1000)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_many_rows(shape, dtype):
    dy, y = example(shape, (dtype,) * 3)
    check_backward(guarded_backward(dy, y, DTYPES[dtype]), dy, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, arch):
    """NaN and infinities make their row what it is in float64; zeros and one-hot rows are exact."""
    for interval in classes.taken("softmax_backward", arch, (dtype,) * 3):
        columns = max(interval.first, interval.last - 21)
        dy, y = example((12, columns), (dtype,) * 3, seed=columns)
        dy[0, columns // 2] = math.nan
        y[1, columns - 1] = math.nan
        dy[2, 0] = math.inf
        dy[3] = 0
        y[4] = 0
        y[5] = 0
        y[5, columns // 3] = 1
        dy[6] = 1
        dy[7] *= 1000
        y[8, : columns // 2] = 0
        y[9] = 1 / columns
        dy[10] = -dy[10].abs()
        dx = softmax_backward(dy, y)
        check_backward(dx, dy, y)
        assert (dx[3] == 0).all() and (dx[4] == 0).all() and (dx[5] == 0).all()
        assert dx[:2].isnan().all() and not dx[3:].isnan().any()


@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
@pytest.mark.parametrize("shape", [(3, 7), (17, 1000), (5, 50257), (3, 262144)])
def test_gradients_through_autograd(shape, pair):
    source, result = (DTYPES[d] for d in pair)
    x = random(shape, source, seed=5, scale=2.0).requires_grad_()
    dy = random(shape, result, seed=6)
    for _ in range(2):  # the second call takes the short way
        y = softmax(x, dtype=result)
        assert y.requires_grad and y.dtype == result
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.dtype == source
        check_backward(dx, dy, y.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_against_float64_from_the_input(dtype):
    """End to end: no further from float64 autograd than torch's own forward and backward."""
    for columns in (33, 1000, 20000, 100000):
        x = random((20, columns), DTYPES[dtype], seed=columns, scale=2.0)
        dy = random((20, columns), DTYPES[dtype], seed=columns + 1)
        gradients = []
        for function, source in ((softmax, x), (torch.softmax, x), (torch.softmax, x.double())):
            leaf = source.detach().clone().requires_grad_()
            gradients.append(torch.autograd.grad(function(leaf, -1), leaf, dy.to(source.dtype))[0].double())
        ours, torchs, exact = gradients
        largest = exact.abs().amax(-1, keepdim=True)
        ours, torchs = (((g - exact).abs() / largest).max().item() for g in (ours, torchs))
        assert ours <= 1.5 * torchs + 2**-22, (columns, ours, torchs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_layout(dtype):
    """What autograd hands over: expanded (from a sum), transposed (from a matrix product), sliced."""
    x = random((24, 100), DTYPES[dtype], seed=8).requires_grad_()
    weights = random((24, 100), DTYPES[dtype], seed=9)

    def gradient(make) -> torch.Tensor:
        y = softmax(x)
        (dx,) = torch.autograd.grad(make(y), x)
        return dx, y.detach()

    dx, y = gradient(lambda y: y.sum())
    check_backward(dx, torch.ones_like(y), y)
    dx, y = gradient(lambda y: y.sum(0).dot(weights[0]))
    check_backward(dx, weights[:1].expand_as(y), y)
    dx, y = gradient(lambda y: (y.t().contiguous().t() * weights).sum())
    check_backward(dx, weights, y)
    dx, y = gradient(lambda y: (y.t() * weights.t().contiguous()).sum())
    check_backward(dx, weights, y)
    dx, y = gradient(lambda y: (y[:, 1:] * weights[:, 1:]).sum())
    masked = weights.clone()
    masked[:, 0] = 0
    check_backward(dx, masked, y)
    y = softmax(x.detach())
    wide = torch.cat([weights, weights], 1)
    check_backward(softmax_backward(wide[:, 3:103], y), wide[:, 3:103], y)
    check_backward(softmax_backward(weights.t().contiguous().t(), y), weights, y)


def test_gradient_of_the_gradient():
    """Against float64 autograd, twice differentiated."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        x, dy, v = (random((8, 50), dtype, seed=s) for s in range(3))
        second = []
        for function, cast in ((softmax, dtype), (torch.softmax, torch.float64)):
            leaves = [t.to(cast).requires_grad_() for t in (x, dy)]
            (dx,) = torch.autograd.grad(function(leaves[0], -1), leaves[0], leaves[1], create_graph=True)
            second.append(torch.autograd.grad(dx, leaves, v.to(cast)))
        for ours, exact in zip(*second, strict=True):
            assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_wrong_arguments():
    y = random((4, 64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"grad has shape \(4, 63\), output has \(4, 64\)"):
        softmax_backward(y[:, :63], y)
    with pytest.raises(TypeError, match=r"grad is torch.int32"):
        softmax_backward(y.int(), y)
    with pytest.raises(IndexError, match="dim=2 is out of range"):
        softmax_backward(y, y, 2)
