"""Probabilities at a temperature, by FlashInfer's name: results, gradients, what is refused."""

import math

import pytest
import torch
from checking import FLOATS, example

from cute_softmax import sampling

NAN = float("nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [None, 1e-3, 0.7, 1, 1e3, math.inf])
def test_numbers(temperature, dtype, launched):
    x = example((4, 9), dtype)
    found = sampling.softmax(x, temperature)
    right = torch.softmax(x.double() / (temperature or 1.0), -1)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-30)
    assert launched is None or dtype is torch.float64 or [n.math for n in launched] == ["softmax"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_for_each_row(dtype, launched):
    x, t = example((2, 3, 9), dtype), torch.tensor([[0.5, 1.0, 2.0], [1e-3, 1e3, 1.0]])
    right = torch.softmax(x.double() / t.double().unsqueeze(-1), -1)
    for given in (t, t.unsqueeze(-1), t.double()):
        assert torch.allclose(sampling.softmax(x, given).double(), right, rtol=1e-5, atol=1e-30)
    one = sampling.softmax(x, torch.tensor(0.5))
    assert torch.allclose(one, sampling.softmax(x, 0.5), rtol=1e-6)
    assert launched is None or dtype is torch.float64 or {n.math for n in launched} == {"softmax"}


def test_gradients(launched):
    x, t = example((4, 9), torch.float32).requires_grad_(), torch.rand(4).add(0.5).requires_grad_()
    for ours, right in (
        (sampling.softmax(x, t), torch.softmax(x / t.unsqueeze(-1), -1)),
        (sampling.softmax(x, t, greedy_at_zero=True), torch.softmax(x / t.unsqueeze(-1), -1)),
    ):
        found, wanted = (
            torch.autograd.grad((y * y[..., :1]).sum(), (x, t), retain_graph=True) for y in (ours, right)
        )
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_zero_is_the_largest_alone(launched):
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, NAN, 5.0], [-math.inf, -math.inf, -1.0]])
    best = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert sampling.softmax(x, 0, greedy_at_zero=True).tolist() == best
    assert sampling.softmax(x, torch.zeros(3), greedy_at_zero=True).tolist() == best
    mixed = sampling.softmax(x[[0, 0, 2]], torch.tensor([0.0, 1.0, 0.0]), greedy_at_zero=True)
    assert mixed[[0, 2]].tolist() == [best[0], best[2]]
    assert torch.allclose(mixed[1], torch.softmax(x[0], -1))
    assert sampling.softmax(x, torch.tensor([0.0, 1.0, 1.0]))[0].isnan().all()


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (TypeError, "logits must be a torch.Tensor", lambda x: sampling.softmax([1.0])),
        (TypeError, "needs floats, and a row", lambda x: sampling.softmax(x.long())),
        (TypeError, "needs floats, and a row", lambda x: sampling.softmax(x[0, 0])),
        (TypeError, "temperature must be a number", lambda x: sampling.softmax(x, "1")),
        (TypeError, "temperature is torch.bool", lambda x: sampling.softmax(x, torch.ones(2).bool())),
        (ValueError, "temperature is -1", lambda x: sampling.softmax(x, -1)),
        (ValueError, "temperature is nan", lambda x: sampling.softmax(x, NAN)),
        (ValueError, "temperature is 0: with greedy_at_zero=True", lambda x: sampling.softmax(x, 0.0)),
        (ValueError, "one number for each row", lambda x: sampling.softmax(x, torch.ones(3))),
    ],
)
def test_errors(error, said, call):
    with pytest.raises(error, match=said):
        call(torch.ones(2, 3))
    for hint in (None, False, True):  # FlashInfer's callers pass it
        assert torch.equal(sampling.softmax(torch.ones(2, 3), 1.0, hint), torch.full((2, 3), 1 / 3))
