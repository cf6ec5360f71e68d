"""Within `batch_invariant`, of kernels that run on the CPU by their PTX: gradients, losses, sinks and what is largest.

Rows of one tensor are computed alone, in another order, and where they begin elsewhere.
"""

from __future__ import annotations

import emulated
import pytest
import torch
from checking import equal_bits

import cute_softmax as c


@pytest.fixture
def launches(monkeypatch, tmp_path):
    return emulated.install(monkeypatch, tmp_path)


def with_gradient(function):
    """The upstream gradient of a row follows from the row, too."""

    def both(x):
        x = x.detach().requires_grad_()
        y = function(x)
        (d,) = torch.autograd.grad(y, x, x.detach().amax(-1).cos() if y.dim() < x.dim() else x.detach())
        return y.detach(), d

    return both


def chosen(x):
    return x.argmin(-1)


def sink(x):
    return x.amax(-1, keepdim=True) / 2


FUNCTIONS = {
    "softmax": with_gradient(c.softmax),
    "softmax in float32": lambda x: (c.softmax(x, dtype=torch.float32),),
    "softmax of scores": with_gradient(lambda x: c.softmax(x, scale=0.3, mask=x > -2)),
    "softmax with a sink": lambda x: (c.softmax(x, sink=sink(x)),),
    "log_softmax": with_gradient(c.log_softmax),
    "logsumexp": with_gradient(lambda x: c.logsumexp(x, -1)),
    "entropy": with_gradient(c.entropy),
    "selective_log_softmax": with_gradient(lambda x: c.selective_log_softmax(x, chosen(x))),
    "with entropies": lambda x: c.selective_log_softmax(x, chosen(x), return_entropy=True),
    "cross_entropy": with_gradient(lambda x: c.cross_entropy(x, chosen(x), reduction="none")),
    "kl_div": with_gradient(lambda x: c.kl_div(x, x.detach().flip(-1), reduction="none")),
    "topk_softmax": with_gradient(lambda x: c.topk_softmax(x[:, :67].contiguous(), 5)[0].sum(-1)),
    "topk_log_softmax": lambda x: tuple(c.topk_log_softmax(x, 5, chosen(x))),
}


@pytest.mark.parametrize(
    ("columns", "dtype"), [(67, torch.float32), (67, torch.bfloat16), (1002, torch.bfloat16)]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bits_do_not_depend_on_company(function, columns, dtype, launches):
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)).mul(3).to(dtype)

    def run(x):
        with c.batch_invariant():
            return FUNCTIONS[function](x)

    def alike(found, expected):
        return all(equal_bits(a, b.contiguous()) for a, b in zip(found, expected, strict=True))

    whole = run(x)
    assert alike(run(x[:2]), [t[:2] for t in whole])
    assert alike(run(x[4:5].clone()), [t[4:5] for t in whole])
    assert alike(run(x.flip(0)), [t.flip(0) for t in whole])
    moved = torch.empty(x.numel() + 3, dtype=dtype)[3:].view(x.shape).copy_(x)
    apart = torch.empty(9, columns + 5, dtype=dtype)[:, 2:-3].copy_(x)
    turned = x.mT.contiguous().mT
    for view in (moved, apart, turned):
        assert alike(run(view), whole), view.stride()
    assert launches


def ulp(x):
    """The distance to the next float32 number."""
    return (torch.nextafter(x.abs(), torch.full_like(x, torch.inf)) - x.abs()).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [67, 1002, 9001, 20000])
def test_logarithms_agree(columns, dtype, launches):
    """Of one sum: bit by bit in the logits' dtype, and with `x - logsumexp` to an ulp of the logsumexp beside the
    rounding of the difference."""
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).mul(3).to(dtype)
    index = x.argmin(-1)
    with c.batch_invariant():
        logs, wide = c.log_softmax(x), c.log_softmax(x, dtype=torch.float32)
        found, wide_found = (c.selective_log_softmax(x, index, dtype=d) for d in (dtype, torch.float32))
        losses = c.cross_entropy(x, index, reduction="none", dtype=torch.float32)
        _, lse = c.cross_entropy(x, index, reduction="none", return_lse=True)
        assert equal_bits(lse.to(dtype), c.logsumexp(x, -1))
    at = index[:, None]
    assert equal_bits(found, logs.gather(-1, at)[:, 0].contiguous()) and equal_bits(wide_found, -losses)
    for logs in (wide, wide_found[:, None]):
        scores = x if logs is wide else x.gather(-1, at)
        error = (scores.double() - lse.double()[:, None] - logs.double()).abs()
        assert (error <= ulp(lse)[:, None] + ulp(logs) / 2).all()


def test_bits_depend_on_company_without_the_mode(launches):
    """So that the test before could fail: rows of an odd length begin on a vector now and then."""
    x = torch.randn(1, 1001, generator=torch.Generator().manual_seed(1)).expand(9, 1001).contiguous()
    y = c.softmax(x)
    assert not equal_bits(y, y[:1].expand(9, 1001).contiguous())
