"""Cross entropy on a GPU: losses and gradients against float64, memory, ignored rows, and peers' own tests' cases."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from checking import DEVICE, DTYPES, FACTOR, ROUNDING, TINY, equal_bits, half_ulp, random
from losses import exact, given, pairs
from torch.nn import functional

from cute_softmax import accelerate, batch_invariant, cross_entropy, nn, selective_log_softmax

SHAPES = ((1, 1), (3, 7), (64, 33), (37, 1023), (8, 50257), (16, 151936), (4, 300001))
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "weights": {"weight": True},
    "z-loss": {"lse_square_scale": 0.01},
    "scale": {"scale": 0.3, "reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and weights": {"label_smoothing": 0.1, "weight": True},
    "smoothed rows": {"label_smoothing": 0.3, "reduction": "none", "scale": -0.7},
    "softcap": {"softcap": 5.0},
    "capped rows": {"softcap": 20.0, "scale": 2.0, "reduction": "none"},
    "all": {"softcap": 10.0, "scale": 1.5, "label_smoothing": 0.2, "lse_square_scale": 0.01},
    "a scale of each row": {"rates": True},
    "and all else": {"rates": True, "softcap": 10.0, "label_smoothing": 0.2, "lse_square_scale": 0.01},
}


def example(shape, dtype, seed=0):
    x = random(shape, dtype, seed=seed, scale=3.0)
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    target = torch.randint(shape[-1], shape[:-1], device=DEVICE, generator=generator)
    if len(target) > 2:
        target[1] = -100
    return x, target


def expected(
    x, target, weight, dtype, upstream=None, *, scale=1.0, softcap=None, lse_square_scale=0.0, **options
):
    """The loss and the gradient in a float type throughout, by torch's own functions."""
    leaf = x.to(dtype).requires_grad_()
    weight = None if weight is None else weight.to(dtype)
    scores = leaf * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    loss = functional.cross_entropy(scores, target, weight, **options)
    if lse_square_scale:
        squares = torch.where(target >= 0, torch.logsumexp(scores, -1).square(), 0)
        loss = loss + lse_square_scale * squares.sum() / (target >= 0).sum()
    (grad,) = torch.autograd.grad(
        loss, leaf, torch.ones_like(loss) if upstream is None else upstream.to(dtype)
    )
    return loss.detach(), grad


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("one_visit", [None, False], ids=["chosen", "recomputed"])
def test_against_float64(shape, dtype, options, one_visit):
    """Off by no more than torch in float32, half a unit of a 16-bit result more."""
    options = dict(OPTIONS[options])
    x, target = example(shape, dtype)
    weight = None
    if options.pop("weight", None):
        weight = random(shape[-1:], torch.float32, seed=5).abs()
    if options.pop("rates", None):
        options["scale"] = torch.linspace(1.5, -0.5, len(x), device=DEVICE).unsqueeze(-1)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, target, weight, dtype=torch.float32, one_visit=one_visit, **options)
    upstream = torch.ones_like(loss)
    (grad,) = torch.autograd.grad(loss, leaf, upstream)
    right, right_grad = expected(x, target, weight, torch.float64, upstream, **options)
    near, near_grad = expected(x, target, weight, torch.float32, upstream, **options)
    floor = 8 * ROUNDING * (1 + right.abs())
    assert ((loss.double() - right).abs() <= FACTOR * (near.double() - right).abs().max() + floor).all()
    error = (grad.double() - right_grad).abs()
    unit = right_grad.abs() + right_grad.abs().amax(-1, keepdim=True) / 16 + TINY
    allowed = FACTOR * ((near_grad.double() - right_grad).abs() / unit).max() * unit + 16 * ROUNDING * unit
    if shape[-1] == 1:  # 1 is taken from a probability of 1, which is rounded as the score is
        rate = torch.as_tensor(options.get("scale", 1.0)).abs()
        allowed = allowed + ROUNDING * rate * (1 + rate * x.abs())
    if dtype is not torch.float32:
        allowed = allowed + half_ulp(right_grad, dtype)
        smoothing = options.pop("label_smoothing", 0.0)
        if smoothing and weight is not None:  # it is the sum of two gradients, each of which is rounded
            part = (1 - smoothing) * expected(x, target, weight, torch.float64, upstream, **options)[1]
            allowed = allowed + half_ulp(part, dtype) + half_ulp(right_grad - part, dtype)
    assert (error <= allowed).all()
    for mutant in (torch.zeros_like(grad), grad.roll(1, -1), -grad):
        assert shape[-1] == 1 or not ((mutant.double() - right_grad).abs() <= allowed).all()


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["alike", "float32"])
def test_probabilities(shape, wide, dtype):
    """Of the logits' dtype or of float32, each at an offset of its own."""
    x = random((shape[0], shape[1] + 3), dtype, seed=1, scale=3.0)[:, 3:]
    target = torch.softmax(random((shape[0], shape[1] + 1), torch.float32, seed=2)[:, 1:], -1)
    target = target if wide else target.to(dtype)
    for options in ({"reduction": "none"}, {"scale": 0.4}):
        leaf = x.clone().requires_grad_()
        found = cross_entropy(leaf, target, dtype=torch.float32, **options)
        (grad,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
        right, right_grad = expected(x, target.double(), None, torch.float64, **options)
        near, near_grad = expected(x, target.float(), None, torch.float32, **options)
        allowed = FACTOR * (near.double() - right).abs().max() + 8 * ROUNDING * (1 + right.abs())
        assert ((found.double() - right).abs() <= allowed).all()
        unit = right_grad.abs().amax() + TINY
        allowed = FACTOR * (near_grad.double() - right_grad).abs().max() + 16 * ROUNDING * unit
        allowed = allowed + (0 if dtype is torch.float32 else half_ulp(right_grad, dtype))
        assert ((grad.double() - right_grad).abs() <= allowed).all()
        for mutant in (torch.zeros_like(right_grad), right_grad.roll(1, -1), -right_grad):
            assert shape[-1] == 1 or not ((mutant - right_grad).abs() <= allowed).all()


@pytest.mark.parametrize("one_visit", [None, False], ids=["chosen", "recomputed"])
@pytest.mark.parametrize("columns", [7, 1023, 50257])
def test_values_that_smoothing_meets(columns, one_visit):
    """-inf, +inf, NaN, logits far from 0: the loss is as torch has it, and so is the gradient where it is a number."""
    x = random((9, columns), torch.float32, seed=7)
    target = torch.arange(9, device=DEVICE) % columns
    x[0, columns // 2 + 1], x[1, 1], x[2, 0], x[3, -1] = -torch.inf, -torch.inf, torch.inf, torch.nan
    x[4], x[5], x[6], target[7] = -torch.inf, x[5] + 3e4, x[6] - 3e4, -100
    for options in ({"label_smoothing": 0.1}, {"label_smoothing": 0.1, "softcap": 30.0}):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        found = cross_entropy(leaf, target, reduction="none", **options, one_visit=False)
        scores = 30 * torch.tanh(wide / 30) if "softcap" in options else wide
        right = functional.cross_entropy(scores, target, reduction="none", label_smoothing=0.1)
        assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5, equal_nan=True)
        total = cross_entropy(leaf, target, reduction="sum", **options, one_visit=one_visit)
        assert torch.equal(total.isnan(), right.sum().isnan())
        (ours,), (exact,) = torch.autograd.grad(total, leaf), torch.autograd.grad(right.sum(), wide)
        numbers = exact.isfinite().all(-1)
        assert torch.allclose(ours[numbers].double(), exact[numbers], rtol=1e-4, atol=1e-6)
        assert ours[~numbers].isnan().any(-1).all()


@pytest.mark.parametrize("options", pairs())
def test_pairs_of_options(options):
    """In float32: the loss and the gradient, for an upstream that was not expected."""
    x = random((24, 1003), torch.float32, seed=4, scale=2.0)
    target, options = given(x, pairs()[options])
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    found, (right, lse) = cross_entropy(leaf, target, **options), exact(wide, target, options)
    if "return_lse" in options:
        found, right = found[0] + found[1].square().mean(), right + lse.square().mean()
    upstream = torch.linspace(1.0, 2.0, right.numel(), device=DEVICE).view(right.shape)
    (ours,) = torch.autograd.grad(found, leaf, upstream)
    (exactly,) = torch.autograd.grad(right, wide, upstream.double())
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5)
    bound = 1e-5 * exactly.abs().max()
    assert (ours.double() - exactly).abs().max() <= bound
    for mutant in (torch.zeros_like(ours), ours.roll(1, -1), 1.1 * ours):
        assert (mutant.double() - exactly).abs().max() > bound


VISITED = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", VISITED.values(), ids=VISITED)
@pytest.mark.parametrize("columns", [5, 1024, 50257, 151936])
@pytest.mark.parametrize("pitch", ["dense", "padded", "shifted"])
def test_one_visit_of_views(dtype, columns, pitch):
    """With another upstream than was expected, and over the logits: no element beside them is touched."""
    rows, extra = 40, {"dense": 0, "padded": 8, "shifted": 3}[pitch]
    whole = random((rows, columns + 2 * extra), dtype, seed=2, scale=3.0)
    x = whole[:, extra : columns + extra]
    target = torch.randint(columns, (rows,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    target[::7] = -100
    _, right = expected(x, target, None, torch.float64)
    for grad_scale, upstream, inplace in (
        (1.0, 1.0, False),
        (1.0, 0.5, False),
        (4.0, 4.0, True),
        (4.0, 0.5, True),
    ):
        given = whole.clone()
        leaf = given[:, extra : columns + extra].detach().requires_grad_()
        loss = cross_entropy(leaf, target, grad_scale=grad_scale, inplace_backward=inplace, one_visit=True)
        (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(upstream, dtype=dtype, device=DEVICE))
        assert (grad.data_ptr() == leaf.data_ptr()) == inplace
        error = (grad.double() / upstream - right).abs()
        unit = right.abs() + right.abs().amax(-1, keepdim=True) / 16 + TINY
        # Where a target is certain, its gradient is as small as the rounding of the logsumexp.
        near = 32 * ROUNDING / (target >= 0).sum()
        assert (error <= (32 * ROUNDING + (2.0**-7 if dtype is torch.bfloat16 else 0)) * unit + near).all()
        beside = torch.ones(whole.shape[1], dtype=torch.bool, device=DEVICE)
        beside[extra : columns + extra] = not inplace
        assert torch.equal(given[:, beside], whole[:, beside])


@pytest.mark.parametrize("columns", [7, 1001, 4096, 50257])
def test_batch_invariance_of_what_is_added(columns):
    """Of smoothing, a cap, an entropy: a row's bits are those of the row alone, wherever it stands."""
    x = random((40, columns), torch.bfloat16, seed=8, scale=2.0)
    target = torch.arange(40, device=DEVICE) % columns
    for function in (
        lambda x, t: cross_entropy(x, t, reduction="none", label_smoothing=0.1, softcap=5.0),
        lambda x, t: sum(selective_log_softmax(x, t, return_entropy=True)),
    ):
        found = []
        for rows in (slice(None), slice(7, 10), slice(8, 9)):
            leaf = x[rows].clone().requires_grad_()
            with batch_invariant():
                y = function(leaf, target[rows].clone())
            found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
        for whole, three, one in zip(*found, strict=True):
            assert equal_bits(whole[7:10].detach(), three.detach()) and equal_bits(
                whole[8:9].detach(), one.detach()
            )


def test_an_index_out_of_range_is_named():
    """In a process of its own: the kernel stops, and says which function and row."""
    program = (
        "import torch; from cute_softmax import cross_entropy; "
        "x = torch.zeros(4, 4096, device='cuda', requires_grad=True); "
        "cross_entropy(x, torch.tensor([1, 2, 4096, -100], device='cuda')); torch.cuda.synchronize()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = found.stdout + found.stderr
    assert found.returncode
    assert "cute_softmax.cross_entropy: index 4096 in row 2 is out of range: a row has 4096" in said


@dtypes
def test_no_matrix_but_the_gradient(dtype):
    x, target = example((64, 50304), dtype)
    leaf = x.requires_grad_()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cross_entropy(leaf, target).backward()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before
        assert held <= x.nbytes + (1 << 16)
        leaf.grad = None


@pytest.mark.parametrize("dtype", VISITED.values(), ids=VISITED)
@pytest.mark.parametrize("how", ["in place", "without a gradient", "forward, recomputed"])
def test_nothing_of_the_logits_size(dtype, how):
    """In place no gradient is allocated; without one, and before a recomputed one, none is written."""
    x, target = example((64, 50304), dtype)
    given = x.requires_grad_(how != "without a gradient")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if how == "in place":
            (grad,) = torch.autograd.grad(cross_entropy(given, target, inplace_backward=True), given)
            assert grad.data_ptr() == x.data_ptr()
        else:
            cross_entropy(given, target, one_visit=False if how == "forward, recomputed" else None)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 1 << 16


@pytest.mark.parametrize("upstream", [1.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"one_visit": False}, {"grad_scale": 4.0}, {"rates": True}], ids=str)
def test_nobody_waits_for_the_device(options, upstream):
    x, target = example((64, 4096), torch.bfloat16)
    options = dict(options)
    if options.pop("rates", None):
        options["scale"] = torch.ones(64, device=DEVICE)
    leaf, given = x.requires_grad_(), torch.tensor(upstream, dtype=x.dtype, device=DEVICE)
    cross_entropy(leaf, target, **options).backward(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cross_entropy(leaf, target, **options).backward(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dtypes
def test_rows_of_images_and_of_one(dtype):
    """Classes in dimension 1, and no batch at all."""
    x = random((3, 11, 5, 7), dtype, seed=1)
    target = torch.randint(11, (3, 5, 7), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    found = cross_entropy(x, target, dtype=torch.float32)
    assert torch.allclose(found, functional.cross_entropy(x.float(), target), rtol=1e-5)
    one = cross_entropy(x[0, :, 0, 0], target[0, 0, 0], dtype=torch.float32)
    assert torch.allclose(one, functional.cross_entropy(x[0, :, 0, 0].float(), target[0, 0, 0]), rtol=1e-5)


def test_in_a_graph():
    x, target = example((32, 4096), torch.bfloat16)
    expected = cross_entropy(x, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cross_entropy(x, target)
    found.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_under_torchs_name():
    """Torch's module in a program that accelerates: the same loss, in less memory."""
    x, target = example((64, 50304), torch.bfloat16)
    mean, right = expected(x, target, None, torch.float64)
    with accelerate(cross_entropy=True) as acceleration:
        leaf = x.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = torch.nn.CrossEntropyLoss()(leaf, target)
        loss.backward()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= x.nbytes + (1 << 16)
    assert acceleration.report().served == {"torch.nn.functional.cross_entropy": 1}
    assert loss.dtype is torch.bfloat16 and abs(loss.double() - mean) <= 2.0**-8 * mean
    assert torch.allclose(leaf.grad.double(), right, rtol=2.0**-7, atol=1e-9)


def test_a_step_of_training():
    """A module in the place of torch's: the same losses as far as float32 goes."""
    torch.manual_seed(0)
    losses = []
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.0), torch.nn.CrossEntropyLoss()):
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 1000, device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(128, 64, device=DEVICE)
        target = torch.randint(1000, (128,), device=DEVICE)
        for _ in range(10):
            optimizer.zero_grad()
            found = loss(model(x), target)
            found.backward()
            optimizer.step()
        losses.append(found.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("rows", [1, 1000, 70001])
def test_the_mean_of_many_rows(rows):
    """One CTA counts them and adds them up."""
    x, target = example((rows, 33), torch.bfloat16)
    target[rows // 2 :: 3] = -100
    found = cross_entropy(x.clone().requires_grad_(), target, dtype=torch.float32)
    assert torch.allclose(
        found.double(), expected(x, target, None, torch.float64)[0], rtol=1e-6, equal_nan=True
    )
