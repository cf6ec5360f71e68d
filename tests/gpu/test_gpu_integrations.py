"""The examples, and what other libraries call, on a GPU."""

import pytest
import reinforce
import sample
import torch
import train
from checking import DTYPES, random

from cute_softmax import integrations


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        (train, ["--steps", "20", "--width", "64"]),
        (sample, ["--tokens", "10", "--top-k", "5", "--top-p", "0.9"]),
        (sample, ["--tokens", "10", "--temperature", "0", "0.7"]),
        (reinforce, ["--steps", "10"]),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else " ".join(value),
)
def test_examples_run(example, arguments):
    assert example.main(arguments) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [7, 1023, 50257])
def test_log_probabilities_as_trl_asks_for_them(words, dtype):
    x = random((2, 5, words), DTYPES[dtype], scale=2.0).requires_grad_()
    index = torch.arange(10, device="cuda").view(2, 5) % words
    mask = torch.ones(2, 5, device="cuda")
    mask[0, 3:] = 0
    index[0, 3:] = -100
    logp, entropies = integrations.selective_log_softmax_and_entropy(x, index, True, 0.7, mask)
    alone = integrations.selective_log_softmax(x, index, 0.7, mask)
    every = torch.log_softmax(x.double() / 0.7, -1)
    right = every.gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(mask == 0, 0)
    right_entropies = -(every.exp() * every).sum(-1).masked_fill(mask == 0, 0)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
    assert all(torch.allclose(found.double(), right, **tolerance) for found in (logp, alone))
    assert torch.allclose(entropies.double(), right_entropies, **tolerance)
    (ours,), (theirs,) = (
        torch.autograd.grad(a.sum() + 0.1 * b.sum(), x)
        for a, b in ((logp, entropies), (right, right_entropies))
    )
    assert torch.allclose(ours, theirs, **tolerance) and not ours[0, 3:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [None, 37, torch.tensor(37)], ids=["mean", "number", "tensor"])
def test_the_loss_of_a_causal_model(items, dtype):
    x = random((4, 11, 50257), DTYPES[dtype], scale=2.0).requires_grad_()
    labels = torch.randint(50257, (4, 11), device="cuda")
    labels[1, 4:] = -100
    found = integrations.causal_lm_loss(x, labels, 50257, num_items_in_batch=items)
    rows, targets = x.double()[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    right = torch.nn.functional.cross_entropy(rows, targets, reduction="mean" if items is None else "sum")
    right = right if items is None else right / int(items)
    assert found.dtype is torch.float32 and torch.allclose(found.double(), right, rtol=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(loss, x) for loss in (found, right))
    atol = 1e-7 if dtype == "fp32" else 1e-4
    assert torch.allclose(ours, theirs, rtol=1e-4 if dtype == "fp32" else 1e-2, atol=atol) and ours.any()
    assert not ours[:, -1].any() and not ours[1, 3:].any()
