"""The configurations of short rows that the table has, run on the CPU by their PTX: filled, and with edges.

With CUTE_SOFTMAX_TEST_CLASSES=all every one of them, after a change of the table; else a sample.
"""

from __future__ import annotations

from collections.abc import Callable

import classes
import emulated
import pytest
import torch
from checking import example
from torch import Tensor

import cute_softmax as c
from cute_softmax.plan import table_of

TARGET = torch.tensor([0, 11, 58, 7, 33])
UPSTREAM = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0])


def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen elements, and the gradient."""
    leaf = x.detach().requires_grad_()
    if x.dtype is torch.float64:
        found = torch.log_softmax(leaf, -1).gather(-1, TARGET[:, None])[:, 0]
    else:
        found = c.selective_log_softmax(leaf, TARGET, dtype=torch.float32)
    return found, torch.autograd.grad(found, leaf, UPSTREAM.to(found.dtype))[0]


def loss(x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss whose gradient is computed in the same visit."""
    leaf = x.detach().requires_grad_()
    found = (torch.nn.functional if x.dtype is torch.float64 else c).cross_entropy(leaf, TARGET)
    return found, torch.autograd.grad(found, leaf)[0]


def of(name: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A function of both libraries, along the last dimension."""
    return lambda x: (getattr(torch if x.dtype is torch.float64 else c, name)(x, -1),)


FUNCTIONS = {
    "softmax": of("softmax"),
    "log_softmax": of("log_softmax"),
    "logsumexp": of("logsumexp"),
    "selective": chosen,
    "loss": loss,
}


def cases() -> list[tuple[str, torch.dtype, int]]:
    """(list of the table, dtype, columns): as many as each configuration holds, and fewer from off a boundary on."""
    found = []
    for name in FUNCTIONS:
        for dtype, vector in ((torch.bfloat16, 8), (torch.float32, 4)):
            held = {
                config.capacity
                for config in table_of().many[name]
                if config.precise in (None, dtype is torch.float32) and config.cluster_n == 1
            }
            found += [
                (name, dtype, n)
                for capacity in sorted(held)
                if 16 <= capacity <= 512
                for n in (capacity * vector, capacity * vector - vector - 1)
            ]
    return found


@pytest.mark.parametrize(("name", "dtype", "columns"), classes.sample(cases(), 5), ids=str)
def test_short_rows(name, dtype, columns, monkeypatch, tmp_path):
    launches = emulated.install(monkeypatch, tmp_path)
    x = example((5, columns), dtype) * 3
    for found, right in zip(FUNCTIONS[name](x), FUNCTIONS[name](x.double()), strict=True):
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), right, rtol=2 * eps, atol=2.0**-10 * eps + 2.0**-20)
    assert "row" in {work.plan.movement for work in launches}
