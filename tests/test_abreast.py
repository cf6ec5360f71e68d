"""Rows of few columns that lie side by side in panels: kernels run on the CPU by their PTX, beside float64."""

from __future__ import annotations

import emulated
import pytest
import torch
from checking import Guarded, check_backward, check_softmax

import cute_softmax as c
from cute_softmax.plan.hardware import H200

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launches(monkeypatch, tmp_path):
    return emulated.install(monkeypatch, tmp_path)


def guarded(shape, dtype, seed: int) -> torch.Tensor:
    """Elements amid others that are NaN."""
    held = Guarded(shape, dtype, device="cpu")
    held.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3)
    return held.tensor


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "rows", "kind"),
    [
        ((301, 9), 0, fp16, 8, "cluster"),
        ((1000, 3), 0, fp32, 4, "cluster"),
        ((2001, 5), 0, bf16, 8, "cluster"),
        ((70, 304, 17), 1, bf16, 8, "held"),
        ((3, 20, 300, 31), 2, fp32, 4, "held"),
        ((40007, 33), 0, bf16, 8, "parts"),
        ((40001, 19), 0, fp32, 4, "parts"),
    ],
)
def test_softmax_and_its_gradient(shape, dim, dtype, rows, kind, launches):
    """The last row of a panel ends anywhere; nothing is touched outside the tensors."""
    x, out = guarded(shape, dtype, 0), Guarded(shape, dtype, device="cpu")
    y = c.softmax(x, dim, out=out.tensor)
    check_softmax(y, x, dim)
    out.check()
    grad, given = guarded(shape, dtype, 1), guarded(shape, dtype, 2).copy_(y)
    check_backward(c.softmax_backward(grad, given, dim), grad, given, dim)
    kernels = [work.plan.kernel for work in launches]
    assert [k.rows_abreast for k in kernels] == [rows, rows]
    assert kernels[0].exchange == (kind == "parts") and (kernels[0].cluster_n > 1) == (kind == "cluster")


@pytest.mark.parametrize(
    ("shape", "dim", "dtype"),
    [((3, 301, 9), 1, bf16), ((255, 9), 0, bf16), ((300, 10), 0, bf16), ((900, 33), 0, fp32)],
)
def test_others_have_one_row(shape, dim, dtype):
    """Tensors that begin off vectors, few rows, even numbers of columns, and more bytes than a cache line has."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    assert c.plan_softmax(x, dim, device=H200).kernel.rows_abreast == 1


@pytest.mark.parametrize(("dtype", "result"), [(bf16, fp32), (fp32, bf16)])
def test_results_of_another_dtype(dtype, result, launches):
    """Vectors are those of the wider one."""
    x, out = guarded((1003, 7), dtype, 5), Guarded((1003, 7), result, device="cpu")
    check_softmax(c.softmax(x, 0, dtype=result, out=out.tensor), x, 0)
    out.check()
    assert launches[0].plan.kernel.rows_abreast == launches[0].plan.kernel.vector == 4


def test_in_place_and_log_softmax(launches):
    x = guarded((517, 7), bf16, 3)
    exact = torch.log_softmax(x.double(), 0)
    c.log_softmax(x, 0, out=x)
    assert (x.double() - exact).abs().max() < 0.07 and launches[0].plan.kernel.rows_abreast == 8


@pytest.mark.parametrize("rows", [range(0, 517), range(0, 517, 2), range(516, 517)])
def test_nothing_of_a_group(rows, launches):
    """-inf and NaN in some rows, the last one among them."""
    x = guarded((517, 7), fp32, 4)
    x[list(rows), 2] = -float("inf")
    x[rows[-1], 5] = float("nan")
    y = c.softmax(x, 0)
    exact = torch.softmax(x.double(), 0)
    assert torch.equal(y.isnan(), exact.isnan()) and torch.allclose(
        y.double(), exact, atol=1e-6, equal_nan=True
    )
