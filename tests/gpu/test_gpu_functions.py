"""Public functions on scores: numbers, masked rows, gradients, memory, in place; against float64 and torch's own."""

import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from building import build
from checking import DEVICE, DTYPES, FACTOR, TINY, Guarded, check_softmax, equal_bits, half_ulp, random
from families import Case

from cute_softmax import (
    entropy,
    log_softmax,
    logsumexp,
    plan_softmax,
    selective_log_softmax,
    softmax,
    softmax_,
)

INF = math.inf
ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
names = pytest.mark.parametrize("name", FUNCTIONS)
SHAPE = (2, 3, 37, 1000)


def arguments_of(shape, dtype: torch.dtype) -> dict[str, dict]:
    """Keyword arguments of a call on scores of such a shape."""
    rows = random((*shape[1:-1], 1), torch.float32, seed=1).abs() + 0.25
    bias = random((shape[0], 1, *shape[-2:]), dtype, seed=2)
    mask = random((shape[0], 1, 1, shape[-1]), torch.float32, seed=3) < 0.5
    full = random(shape, torch.float32, seed=4) < 0.5
    full[0, :, 3] = False
    return {
        "scale": {"scale": 0.125},
        "cold": {"scale": 1000.0},
        "scale per row": {"scale": rows},
        "bias": {"bias": bias},
        "masked columns": {"mask": mask},
        "mask": {"mask": full, "scale": -0.5},
        "causal": {"causal": True},
        "offset": {"causal": shape[-1] - shape[-2], "scale": rows},
        "empty rows": {"causal": -5},
        "all": {"scale": rows, "bias": bias, "mask": full, "causal": 500},
    }


@pytest.fixture(scope="module", autouse=True)
def kernels(built):
    """Most kernels of these tests, built together; what is left is built when it is met."""
    if os.environ.get("CUTE_SOFTMAX_TEST_BUILD") == "0" or not torch.cuda.is_available():
        return
    wanted = []
    for dtype in DTYPES.values():
        x = torch.empty(SHAPE, dtype=dtype, device=DEVICE)
        for arguments in arguments_of(SHAPE, dtype).values():
            for log, empty, wide in product((False, True), ("nan", "zero"), (None, torch.float32)):
                options = arguments | {"log": log, "empty_rows": empty}
                wanted.append(plan_softmax(x, dtype=wide, **options).kernel)
                if not wide:
                    wanted.append(plan_softmax(x, backward=True, **options).kernel)
                    if not isinstance(arguments.get("scale"), torch.Tensor):
                        wanted.append(plan_softmax(x, backward=True, **(options | {"scale": 1.0})).kernel)
    build(wanted)


def case_of(name: str, x: torch.Tensor, arguments: dict, **rest) -> Case:
    changed = dict(arguments)
    causal = changed.pop("causal", None)
    return Case(name, x, offset=0 if causal is True else causal, **changed, **rest)


@names
@dtypes
def test_scores(name, dtype):
    x = random(SHAPE, DTYPES[dtype], seed=9)
    for arguments in arguments_of(SHAPE, x.dtype).values():
        for zero in (False, True):
            options = arguments | {"empty_rows": "zero" if zero else "nan"}
            y = FUNCTIONS[name](x, **options)
            assert y.dtype == x.dtype and y.stride() == x.stride()
            case_of(name, x, arguments, zero=zero).check([y])
        out = Guarded(x.shape, x.dtype)
        assert FUNCTIONS[name](x, out=out.tensor, **options) is out.tensor
        out.check()
        assert equal_bits(out.tensor, y) and equal_bits(FUNCTIONS[name](x, **options), y)
        wide = FUNCTIONS[name](x, dtype=torch.float32, **options)
        case_of(name, x, arguments, zero=True, dtype=torch.float32).check([wide])
    if name == "softmax":
        case_of(name, x, {"scale": 2.0, "alpha": -2.5}).check([softmax(x, scale=2.0, alpha=-2.5)])


@names
@dtypes
def test_other_dimensions_and_longer_rows(name, dtype):
    """The same numbers, by kernels of their own."""
    x = random((40, 60, 24), DTYPES[dtype], seed=2)
    mask, bias = random((60, 24), torch.float32, seed=3) < 0.6, random((40, 1, 24), x.dtype, seed=4)
    options = {"scale": 0.5, "mask": mask, "bias": bias, "empty_rows": "zero"}
    leaf = x.clone().requires_grad_()
    y = FUNCTIONS[name](leaf, 1, **options)
    moved = case_of(name, x.mT, {"scale": 0.5, "mask": mask.mT, "bias": bias.mT}, zero=True)
    moved.check([y.detach().mT])
    dy = random(x.shape, x.dtype, seed=5)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert dx.dtype == x.dtype and dx.isfinite().all() and (dx.masked_select(~mask) == 0).all()
    backward = Case(f"{name}_backward", dy.mT, y=y.detach().mT, scale=0.5, mask=mask.mT)
    if name == "softmax":
        backward.check([dx.mT])
    very = FUNCTIONS[name](random((2, 600_000), x.dtype), scale=0.5)
    case_of(name, random((2, 600_000), x.dtype), {"scale": 0.5}).check([very])


def reference(name, x, *, scale=1.0, bias=None, mask=None, causal=None, empty_rows="nan"):
    """As torch's users write it, in the dtype of the tensors."""
    s = x * scale
    s = s if bias is None else s + bias
    keep = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    keep = keep if mask is None else keep & mask
    keep = keep if causal is None else keep & torch.ones_like(keep).tril(0 if causal is True else causal)
    s = s.masked_fill(~keep, -INF)
    empty = ~keep.any(-1, keepdim=True)
    y = getattr(torch, name)(s.masked_fill(empty, 0), -1)
    return y.masked_fill(empty if name == "softmax" else ~keep, 0)


def gradients(function, tensors: dict, dy, dtype, **options):
    leaves = {
        k: t.detach().to(dtype).clone().requires_grad_()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
        for k, t in tensors.items()
    }
    y = function(**leaves, **options)
    wanted = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    y = torch.where(y.isfinite(), y, 0.0)
    return [g.double() for g in torch.autograd.grad(y, wanted, dy.to(y.dtype))]


@names
@dtypes
def test_gradients(name, dtype):
    """Of the input, a bias and a scale: no further from float64 than torch's own operations in that dtype."""
    x, dy = (random(SHAPE, DTYPES[dtype], seed=s) for s in (9, 10))
    for what, arguments in arguments_of(SHAPE, x.dtype).items():
        tensors = {"input": x} | {
            k: v.to(x.dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in arguments.items()
        }
        theirs = {("x" if k == "input" else k): v for k, v in tensors.items()}
        exact = gradients(lambda **k: reference(name, **k), theirs, dy, torch.float64)
        torchs = gradients(lambda **k: reference(name, **k), theirs, dy, x.dtype)
        for empty in ("nan", "zero"):
            ours = gradients(FUNCTIONS[name], tensors, dy, x.dtype, empty_rows=empty)
            for got, own, right in zip(ours, torchs, exact, strict=True):
                assert not got.isnan().any(), (what, empty)
                error, bound = ((g - right).abs().max() for g in (got, own))
                slack = torch.finfo(x.dtype).eps * right.abs().max()
                assert error <= FACTOR * bound + slack, (what, empty, error.item(), bound.item())


@names
@dtypes
def test_masked_rows(name, dtype):
    """NaN or zeros; the gradient of what is masked is zero, whatever lies there."""
    x = random((5, 300), DTYPES[dtype])
    mask = random((5, 300), torch.float32, seed=1) < 0.3
    mask[2] = False
    results = []
    for junk in (0.0, INF, -INF, math.nan):
        leaf, scale = x.clone(), torch.full((5, 1), 0.5, device=x.device, requires_grad=True)
        leaf[~mask] = junk
        leaf.requires_grad_()
        for empty in ("nan", "zero"):
            y = FUNCTIONS[name](leaf, mask=mask, scale=scale, empty_rows=empty)
            nothing = {"nan": math.nan, "zero": 0.0 if name == "softmax" else -INF}[empty]
            assert torch.equal(y[2].nan_to_num(7.0), torch.full_like(y[2], nothing).nan_to_num(7.0))
            weights = torch.tensor([1.0, 2, 0, 4, 5], device=x.device).to(y.dtype)
            loss = torch.where(y.isfinite(), y, 0.0).sum(1) @ weights
            found = torch.autograd.grad(loss, (leaf, scale))
            assert (found[0].masked_select(~mask) == 0).all() and not any(g.isnan().any() for g in found)
            results.append(found)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@dtypes
def test_every_temperature(dtype):
    """Rows still sum to 1 within the rounding of their elements: both passes round the scores alike."""
    x = random((40, 4096), DTYPES[dtype])
    for scale in (1000.0, 1e-3, torch.full((40, 1), 1000.0, device=x.device)):
        for options in ({}, {"causal": 4056}, {"mask": x > -1}, {"bias": x}):
            y = softmax(x, scale=scale, dtype=torch.float32, **options)
            assert (y.double().sum(-1) - 1).abs().max() <= 2e-6


@dtypes
def test_zeros_and_subnormals(dtype):
    tiny = torch.finfo(DTYPES[dtype]).tiny
    x = (
        torch.tensor([0.0, -0.0, tiny / 4, -tiny / 4, tiny] * 20, device=DEVICE)
        .to(DTYPES[dtype])
        .expand(3, 100)
    )
    case_of("softmax", x, {"scale": 0.5}).check([softmax(x, scale=0.5)])
    assert torch.equal(softmax(x, scale=0.0), torch.full_like(x, 0.01))
    y = log_softmax(torch.zeros(2, 1, device=DEVICE, dtype=x.dtype), scale=3.0)
    assert (y == 0).all() and selective_log_softmax(x, x[:, 0].long()).isfinite().all()


@dtypes
def test_in_place(dtype):
    x = random((50, 1003), DTYPES[dtype])
    for options in ({}, {"scale": 2.0}, {"mask": x > 0}, {"bias": x[:1].clone(), "alpha": 2.0}):
        guarded = Guarded.of(x, strides=(1010, 1))
        assert softmax_(guarded.tensor, **options) is guarded.tensor
        guarded.check(written=False)
        apart = Guarded(x.shape, x.dtype, strides=(1010, 1))
        softmax(Guarded.of(x, strides=(1010, 1)).tensor, out=apart.tensor, **options)
        assert equal_bits(guarded.tensor, apart.tensor)
    leaf = x.clone().requires_grad_()
    y = softmax_(leaf * 1, causal=3)
    dy = random(x.shape, x.dtype, seed=1)
    found = torch.autograd.grad(y, leaf, dy)[0]
    assert equal_bits(found, torch.autograd.grad(softmax(leaf, causal=3), leaf, dy)[0])
    # Columns that begin anywhere are shifted, but not in place: another class, whose sums have another order.
    column = x.clone()
    assert softmax_(column, 0) is column
    check_softmax(column, x, 0)


@dtypes
@pytest.mark.parametrize("shape", [(17, 50257), (3, 5, 1000), (4, 151936)])
def test_selective_log_softmax(shape, dtype):
    logits = random(shape, DTYPES[dtype], seed=3, scale=3.0)
    logits[0, ..., 7] = 30.0  # a probability near 1
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    several = torch.randint(shape[-1], (*shape[:-1], 5), generator=generator, device=DEVICE)
    several[0, ..., 0], several[..., 3] = 7, several[..., 2]
    for scale in (1.0, 0.7):
        for index in (several[..., 0], several):
            dy = random(index.shape, logits.dtype, seed=5)
            results = {}
            for what, source in (("ours", logits), ("torch", logits), ("exact", logits.double())):
                leaf = source.detach().clone().requires_grad_()
                if what == "ours":
                    y, e = selective_log_softmax(leaf, index, scale=scale, return_entropy=True)
                else:
                    every = torch.log_softmax(leaf * scale, -1)
                    y = every.gather(-1, index.reshape(*shape[:-1], -1)).reshape(index.shape)
                    e = -(every.exp() * every).sum(-1)
                (dx,) = torch.autograd.grad(y, leaf, dy.to(y.dtype), retain_graph=True)
                (de,) = torch.autograd.grad(e.sum(), leaf, retain_graph=True)
                # Both at once.
                (db,) = torch.autograd.grad((y, e), leaf, (dy.to(y.dtype), torch.full_like(e, -0.5)))
                results[what] = [t.detach().double() for t in (y, e, dx, de, db)]
            for got, own, right in zip(*results.values(), strict=True):
                allowed = FACTOR * (own - right).abs().max() + half_ulp(right, logits.dtype) + TINY
                error = (got - right).abs() - allowed - 2**-20 * right.abs().max()
                assert error.max() <= 0, (scale, index.shape, error.max().item(), right.abs().max().item())
            at = several[..., :1] if index.dim() < logits.dim() else several
            got, right = (results[k][2].gather(-1, at) for k in ("ours", "exact"))
            fine = 2 * half_ulp(right, logits.dtype) + 2**-20 * dy.double().abs().amax()
            assert ((got - right).abs() <= fine).all(), "the chosen elements are as fine as their own value"
            got, right = results["ours"][0], results["exact"][0]
            assert ((got - right).abs() <= half_ulp(right, logits.dtype) + 2**-21 * (1 + right.abs())).all()
    y = selective_log_softmax(logits, several)
    assert y.is_contiguous() and equal_bits(y, selective_log_softmax(logits, several.int()))


def peak_of(function) -> int:
    """Bytes that a call allocates at most, beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("wrong", [-1, 1000, 2**32 + 1, -(2**40)])
@pytest.mark.parametrize("entropy", [False, True])
def test_an_index_out_of_range_is_named(wrong, entropy):
    """By the kernel, which then stops: in a process of its own, as that ends the context, as torch's assertions do."""
    code = f"""
import torch, cute_softmax
logits = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
index = torch.zeros(300, device="cuda", dtype=torch.int64)
index[217] = {wrong}
try:
    cute_softmax.selective_log_softmax(logits, index, return_entropy={entropy})
    torch.cuda.synchronize()
except Exception as error:
    print("raised", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    said = done.stdout + done.stderr
    assert f"cute_softmax.selective_log_softmax: index {wrong} in row 217 is out of range" in said, said
    assert "raised CUDA error" in said and "illegal" not in said, said


def test_memory_of_selective_log_softmax():
    """Forward nothing of the matrix's size; backward the gradient and nothing else."""
    logits = random((512, 151936), torch.bfloat16).requires_grad_()
    matrix = logits.numel() * logits.element_size()
    index = torch.randint(151936, (512,), device=DEVICE)
    selective_log_softmax(logits, index).sum().backward()
    logits.grad = None
    assert peak_of(lambda: selective_log_softmax(logits, index, return_entropy=True)) <= 0.01 * matrix
    y = selective_log_softmax(logits, index)
    assert peak_of(lambda: torch.autograd.grad(y.sum(), logits)) <= 1.01 * matrix
    _, e = selective_log_softmax(logits, index, return_entropy=True)
    assert peak_of(lambda: torch.autograd.grad(e.sum(), logits)) <= 1.01 * matrix
    y = logsumexp(logits, -1)
    assert peak_of(lambda: torch.autograd.grad(y.sum(), logits)) <= 1.01 * matrix
    y = softmax(logits, scale=0.5)
    assert peak_of(lambda: torch.autograd.grad(y, logits, y)) <= 1.01 * matrix


@dtypes
def test_entropy(dtype):
    x = random((4, 60, 1000), DTYPES[dtype], scale=2.0)
    x[0, 0, 5:], x[1, 1] = -INF, 3.0
    for dim in (-1, 1, (1, 2)):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        y = entropy(leaf, dim)
        every = wide - torch.logsumexp(wide, dim, keepdim=True)
        right = -(every.exp() * every.masked_fill(every == -INF, 0)).sum(dim)
        assert y.dtype == x.dtype and y.shape == right.shape
        assert ((y.double() - right).abs() <= half_ulp(right, x.dtype) + 2**-20 * (1 + right)).all()
        (got,), (exact,) = torch.autograd.grad(y.sum(), leaf), torch.autograd.grad(right.sum(), wide)
        assert (
            (got.double() - exact).abs() <= 4 * half_ulp(exact, x.dtype) + 2**-20 * exact.abs().max()
        ).all()
