"""Rows at a temperature on a GPU: they sum to 1, argmax at 0, and statistics of chunks merge to those of rows."""

from __future__ import annotations

import pytest
import torch
from checking import DEVICE, DTYPES, FACTOR, ROUNDING, TINY, random

from cute_softmax import merge_statistics, partial_statistics, sampling, softmax

TEMPERATURES = (1e-3, 0.03, 0.1, 0.3, 1.0, 10.0, 1e3)
# Several rows a warp, a warp a row, a block, a cluster, and odd ends.
SHAPES = ((40000, 8), (20000, 256), (4096, 4096), (600, 32768), (64, 151936), (37, 50257))
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
ULP = 2.0**-23  # the last place of 1 in float32


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rows_sum_to_one(shape, dtype, temperature):
    """Within two units in the last place, of a number as of a tensor; and each element is right."""
    x = random(shape, dtype, scale=3.0)
    for given in (temperature, torch.full(shape[:1], temperature, device=DEVICE)):
        y = sampling.softmax(x, given)
        assert y.dtype is torch.float32
        assert ((y.double().sum(-1) - 1).abs() <= 2 * ULP).all()
    # 1 / temperature is a float32; its rounding is no error of the softmax.
    scores = x.double() * torch.tensor(1 / temperature, dtype=torch.float32).double().item()
    right, near = torch.softmax(scores, -1), torch.softmax(scores.float(), -1)
    # Half a unit of the product and of the difference in the exponent, and one of a tensor's reciprocal.
    spread = (scores - scores.amax(-1, keepdim=True)).abs().clamp_max(200)
    allowed = (FACTOR * ((near.double() - right).abs() / (right + TINY)).max() + 16 * ROUNDING) * right
    allowed += right * ROUNDING * (3 * scores.abs().amax(-1, keepdim=True) + spread) + TINY
    error = (y.double() - right).abs()
    assert (error <= allowed).all()
    assert not ((y.double() * 1.01 - right).abs() <= allowed).all()


@dtypes
def test_zero_is_the_largest_alone(dtype):
    x = random((50, 4097), dtype)
    x[:, 7] = x[:, 3000] = 9.0
    best = torch.zeros(50, 4097, device=DEVICE)
    best[:, 7] = 1
    assert torch.equal(sampling.softmax(x, 0, greedy_at_zero=True), best)
    t = torch.rand(50, device=DEVICE) + 0.5
    t[::3] = 0
    found = sampling.softmax(x, t, greedy_at_zero=True)
    assert torch.equal(found[::3], best[::3])
    others = t != 0
    scale = 1 / torch.where(others, t, 1.0)[:, None]
    assert torch.equal(found[others], softmax(x, scale=scale, dtype=torch.float32)[others])
    assert sampling.softmax(x, t)[::3].isnan().all()


@dtypes
@pytest.mark.parametrize("cut", [1000, 4096, 151936])
def test_statistics_merge(dtype, cut):
    """As exact as those of whole rows, wherever they are cut; a part of -inf changes nothing."""
    x = random((8, 151936), dtype, scale=3.0)
    x[:, :5000] = -torch.inf
    found = merge_statistics(
        [partial_statistics(part, scale=0.7, weighted=True) for part in x.split(cut, -1)]
    )
    wide = x.double() * 0.7
    log_p = torch.log_softmax(wide, -1)
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)
    assert ((found.logsumexp.double() - torch.logsumexp(wide, -1)).abs() < 4e-6).all()
    assert ((found.entropy.double() - entropy).abs() < 2e-5).all()
    assert torch.allclose(found.max.double(), wide.amax(-1), rtol=1e-6)
