"""Scores (scale, bias, mask, causal, alpha), log_softmax and softmax_ on the CPU: meaning, launches, gradients, errors.

Where only a CUDA tensor comes to a kernel, `launches` simulates it: see `simulated`.
"""

import inspect

import checking
import pytest
import torch
from checking import FLOATS, example

from cute_softmax import (
    amax,
    explain,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    plan_softmax,
    softmax,
    softmax_,
)
from cute_softmax.dispatch.common.spec import DEFAULTS
from cute_softmax.dispatch.softmax import forms

INF = float("inf")
FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
names = pytest.mark.parametrize("name", FUNCTIONS)


def keeps(*shape, seed=9):
    return checking.random(shape, torch.float32, seed=seed, device="cpu") > -0.3


# Keyword arguments for an input of (2, 3, 4, 6), each with the scores that they mean.
X = example((2, 3, 4, 6))
ROWS = example((3, 4, 1), seed=1).abs() + 0.5
BIAS = example((3, 1, 6), seed=2)
FULL = example((2, 3, 4, 6), torch.bfloat16, seed=3)
MASK = keeps(2, 1, 4, 6)
BELOW = torch.ones(4, 6, dtype=torch.bool)
CASES = {
    "scale": ({"scale": 0.25}, lambda x: x * 0.25),
    "negative scale": ({"scale": -3}, lambda x: x * -3),
    "scale per row": ({"scale": ROWS}, lambda x: x * ROWS),
    "one scale": ({"scale": torch.tensor(0.3)}, lambda x: x * torch.tensor(0.3).double()),
    "bias": ({"bias": BIAS}, lambda x: x + BIAS),
    "full bias": ({"bias": FULL}, lambda x: x + FULL),
    "mask": ({"mask": MASK}, lambda x: x.masked_fill(~MASK, -INF)),
    "mask of columns": ({"mask": MASK[0, 0, 0]}, lambda x: x.masked_fill(~MASK[0, 0, 0], -INF)),
    "causal": ({"causal": True}, lambda x: x.masked_fill(~BELOW.tril(), -INF)),
    "offset 0": ({"causal": 0}, lambda x: x.masked_fill(~BELOW.tril(), -INF)),
    "offset": ({"causal": 2}, lambda x: x.masked_fill(~BELOW.tril(2), -INF)),
    "far offset": ({"causal": 99}, lambda x: x),
    "farther offset": ({"causal": 10**30}, lambda x: x),
    "all": (
        {"scale": ROWS, "bias": BIAS, "mask": MASK, "causal": 2},
        lambda x: (x * ROWS + BIAS).masked_fill(~(MASK & BELOW.tril(2)), -INF),
    ),
}
cases = pytest.mark.parametrize("case", CASES)


@names
@cases
@pytest.mark.parametrize("dtype", FLOATS)
def test_results(case, name, dtype, launched):
    arguments, scores = CASES[case]
    x = X.to(dtype)
    exact = getattr(torch, name)(scores(x.double()), -1)
    y = FUNCTIONS[name](x, **arguments)
    assert y.dtype == dtype and y.shape == x.shape and y.stride() == x.stride()
    bound = torch.finfo(dtype).eps * (1 if name == "softmax" else 8) + 2**-22 * (dtype != torch.float64)
    equal = torch.where(exact.isinf() | exact.isnan(), exact, y.double())
    assert torch.allclose(equal, exact, rtol=0, atol=bound, equal_nan=True)
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    out = torch.empty_like(x)
    assert FUNCTIONS[name](x, out=out, **arguments) is out
    assert torch.equal(out.nan_to_num(), y.nan_to_num())
    wide = FUNCTIONS[name](x, dtype=torch.float32, **arguments)
    assert wide.dtype == torch.float32
    if name == "softmax":
        half = softmax(x, alpha=0.5, **arguments)
        assert torch.allclose(half, y / 2, rtol=2**-7, atol=2**-24, equal_nan=True)
        assert torch.equal(softmax_(x.clone(), **arguments).nan_to_num(), y.nan_to_num())
    if launched is not None and dtype != torch.float64:
        assert {n.math for n in launched} == {name}
        assert all(n.prologue for n in launched)


def leaves(arguments: dict, x: torch.Tensor, dtype=torch.float64) -> tuple[dict, list]:
    """The arguments with every float tensor a leaf, and the leaves, that of the input first."""
    made = {"input": x.to(dtype)} | arguments
    made = {
        key: (
            value.detach().to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        )
        for key, value in made.items()
    }
    found = [
        value.requires_grad_()
        for value in made.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    return made, found


@names
@cases
@pytest.mark.parametrize("alpha", [1.0, -2.5])
def test_formulas_differentiate(case, name, alpha):
    """First and second derivatives, numerically, in float64, of everything that has a gradient."""
    if name == "log_softmax" and alpha != 1:
        return
    options = {"empty_rows": "zero"} | ({"alpha": alpha} if alpha != 1 else {})
    made, found = leaves(CASES[case][0], X[:1, :2])
    made = {
        k: v[..., :2, :, :] if isinstance(v, torch.Tensor) and v.dim() > 2 else v for k, v in made.items()
    }
    made = {k: v[:1] if isinstance(v, torch.Tensor) and v.dim() > 3 else v for k, v in made.items()}

    def function(*_):
        y = FUNCTIONS[name](**made, **options)
        return torch.where(y == -INF, 0.0, y)

    torch.autograd.gradcheck(function, found, fast_mode=True)
    torch.autograd.gradgradcheck(function, found, fast_mode=True)


def gradients(function, made, found, dy, **options):
    y = function(**made, **options)
    y = torch.where(y.isfinite(), y, 0.0)
    return torch.autograd.grad(y, found, dy, allow_unused=True)


@names
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("empty", ["nan", "zero"])
def test_gradients_by_kernels(case, name, dtype, empty, launches):
    """As those of the formulas in float64 on the same numbers; never NaN where something is masked."""
    arguments = CASES[case][0]
    dy = example(X.shape, torch.float32, seed=5)
    rounded = {
        k: v.to(dtype).double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    exact = gradients(FUNCTIONS[name], *leaves(rounded, X.to(dtype).double()), dy.double(), empty_rows=empty)
    launches.clear()
    found = gradients(FUNCTIONS[name], *leaves(arguments, X, dtype), dy.to(dtype), empty_rows=empty)
    maths = {n.math for n in launches}
    assert maths == {name, f"{name}_backward"}
    for got, right in zip(found, exact, strict=True):
        assert got.dtype == dtype and got.isfinite().all()
        bound = 24 * torch.finfo(dtype).eps * right.abs().max()
        assert (got.double() - right).abs().max() <= bound, case


@names
def test_masked_rows(name, launches):
    """NaN or zeros; their gradients are zero either way."""
    function = FUNCTIONS[name]
    mask = torch.tensor([[True] * 6, [False] * 6, [True, False] * 3])
    for x in (example((3, 6)), example((3, 6), torch.float64)):
        leaf = x.clone().requires_grad_()
        y = function(leaf, mask=mask)
        assert y[1].isnan().all() and y[[0, 2]].isnan().sum() == 0
        (dx,) = torch.autograd.grad(y[[0, 2]][:, [0, 2]].sum() + y[1].nan_to_num().sum(), leaf)
        assert (dx[1] == 0).all() and (dx[2, 1::2] == 0).all() and dx[[0, 2]].abs().sum() > 0
        y = function(leaf, mask=mask, empty_rows="zero")
        assert (y[1] == (0 if name == "softmax" else -INF)).all()
        (dx,) = torch.autograd.grad(torch.where(y == -INF, 0.0, y).sum() * 2, leaf)
        assert (dx[1] == 0).all() and dx.isfinite().all()
        x[0] = -INF
        y = function(x, empty_rows="zero")
        assert (y[0] == (0 if name == "softmax" else -INF)).all() and y[1:].isfinite().all()
        y = function(x[:, :3], causal=-2, empty_rows="zero")
        assert (y[:2] == (0 if name == "softmax" else -INF)).all() and y[2, 0] == (name == "softmax")


def test_what_is_masked_does_not_matter(launched):
    """Infinities and NaN of padding change nothing, nor do gradients of them, not even that of the scale."""
    x, mask = example((3, 6)), torch.ones(3, 6, dtype=torch.bool)
    mask[:, 4:] = False
    results = []
    for junk in (0.0, INF, -INF, float("nan")):
        x[:, 4:] = junk
        leaf, scale = x.clone().requires_grad_(), torch.full((3, 1), 0.5, requires_grad=True)
        y = softmax(leaf, scale=scale, mask=mask)
        results.append((y, *torch.autograd.grad((y * example((3, 6), seed=1)).sum(), (leaf, scale))))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_what_is_launched(launches):
    x = example((2, 3, 4, 6), torch.bfloat16)
    softmax(x, scale=2, alpha=3, causal=1)
    softmax(x, scale=ROWS, mask=MASK, bias=BIAS.bfloat16(), empty_rows="zero")
    first, second = launches
    assert first.numbers == (2.0, 3.0, 1) and (first.prologue.scale, first.prologue.alpha) == (
        "number",
        "number",
    )
    assert second.numbers == () and second.prologue.scale == "groups" and second.prologue.zero
    assert second.dtypes == (torch.bfloat16, torch.bfloat16, torch.bool, torch.float32, torch.bfloat16)
    assert second.strides[1:4] == ((0, 6, 0, 1), (24, 0, 6, 1), (0, 4, 1, 0)), (
        "broadcast by strides, not copied"
    )
    softmax(x, causal=10**6)
    softmax(x, causal=-(10**6), empty_rows="zero")
    assert [n.numbers for n in launches[2:]] == [(6,), (-4,)]
    del launches[:]
    for dim in (0, (1, 3), -1):
        softmax(x, dim, scale=2.0)
        log_softmax(x, dim)
    assert [n.dims for n in launches] == [(0,)] * 2 + [(1, 3)] * 2 + [(3,)] * 2
    softmax(x[:0], scale=2.0)
    assert len(launches) == 6, "nothing to launch for an empty tensor"
    softmax(x, scale=torch.ones((), dtype=torch.float64))
    softmax(x, bias=BIAS.double())
    assert len(launches) == 6, "a float64 operand is ATen's"


def test_plain_scores_are_plain_calls(launches):
    """Arguments that change nothing, however they are written."""
    x = example((4, 6))
    y = softmax(x)
    for arguments in (
        {"scale": 1},
        {"scale": 1.0 + 0},
        {"alpha": 1},
        {"causal": False},
        {"empty_rows": "na" + "n"[:1]},
    ):
        assert torch.equal(softmax(x, **arguments), y)
    assert not any(n.prologue for n in launches)


@names
def test_one_kernel_forward_and_one_backward(name, launches):
    """What is kept for the backward: the result, and the mask; with a tensor scale that and the input."""
    x = X.clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = FUNCTIONS[name](x, scale=0.5, mask=MASK, empty_rows="zero")
    assert kept == [y.data_ptr(), MASK.data_ptr()]
    torch.autograd.grad(y, x, torch.ones_like(y))
    assert [n.math for n in launches] == [name, f"{name}_backward"] and launches[1].numbers == (0.5,)
    y = FUNCTIONS[name](x, scale=ROWS)
    assert y.grad_fn.saved_tensors[-1] is None, "a scale without a gradient needs no input"


def test_alpha_of_a_gradient(launches):
    x = X.clone().requires_grad_()
    for alpha, inverse in ((4.0, 0.25), (0.0, 0.0)):
        del launches[:]
        (dx,) = torch.autograd.grad(softmax(x, alpha=alpha), x, example(X.shape, seed=4))
        assert launches[1].numbers == (inverse,)
        exact = torch.autograd.grad(alpha * torch.softmax(x, -1), x, example(X.shape, seed=4))[0]
        assert torch.allclose(dx, exact, atol=1e-6)


def test_gradients_of_one_form_by_other_numbers(launches):
    x = X.clone().requires_grad_()
    for scale, alpha, offset in ((0.5, 2.0, 1), (0.5, 2.0, 1), (3.0, 2.0, 1), (0.5, -1.0, 2), (0.5, 2.0, 1)):
        scores = (x * scale).masked_fill(~BELOW.tril(offset), -INF)
        ys = softmax(x, scale=scale, alpha=alpha, causal=offset), alpha * torch.softmax(scores, -1)
        ours, torchs = (torch.autograd.grad(y, x, example(X.shape, seed=4))[0] for y in ys)
        assert torch.allclose(ours, torchs, atol=1e-5)
        assert launches[-1].numbers == (scale, 1 / alpha, offset)


def test_in_place(launched):
    x = example((4, 6))
    kept = x.clone()
    assert softmax_(x, scale=2.0) is x and torch.allclose(x, torch.softmax(kept * 2, -1))
    assert torch.allclose(softmax_(kept.clone(), 0), torch.softmax(kept, 0))
    leaf, bias = kept.clone().requires_grad_(), example((6,), seed=1).requires_grad_()
    version = (start := leaf * 1)._version
    y = softmax_(start, bias=bias)
    assert y is start and start._version > version
    dy = example((4, 6), seed=2)
    found = torch.autograd.grad(y, (leaf, bias), dy)
    exact = torch.autograd.grad(torch.softmax(leaf + bias, -1), (leaf, bias), dy)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, exact, strict=True))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        softmax_(leaf)
    with pytest.raises(ValueError, match="softmax_ overwrites the input, which the gradient of scale needs"):
        softmax_(leaf * 1, scale=torch.ones(4, 1, requires_grad=True))
    with pytest.raises(TypeError, match=r"input is torch\.int64: softmax_ takes"):
        softmax_(torch.arange(3))
    with torch.no_grad():
        softmax_(leaf)
    for row in (torch.zeros(1, 6), leaf[:1] * 1):
        with (
            pytest.raises(ValueError, match="several of its elements share one place")
            if launched is not None
            else pytest.raises(RuntimeError)
        ):
            softmax_(row.expand(4, 6))
    if launched is not None:
        with pytest.raises(ValueError, match="out overlaps bias"):
            softmax_(start := leaf * 1, bias=start.detach()[:1])


@pytest.mark.parametrize(
    "write",
    [
        softmax_,
        lambda x: softmax_(x, sink=torch.zeros(1)),
        lambda x: softmax(example((4, 6)), out=x),
        lambda x: log_softmax(example((4, 6)), scale=2.0, out=x),
        lambda x: logsumexp(example((4, 6, 2)), -1, out=x),
        lambda x: amax(example((4, 6, 2)), -1, out=x),
    ],
)
def test_autograd_sees_what_is_written_over(write, launched):
    kept = (leaf := example((4, 6)).requires_grad_()) * 1
    y = kept.sin()
    with torch.no_grad():
        write(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), leaf)


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_softmax_backward(dtype, launched):
    for dim in (-1, 0, (0, 1)):
        y = log_softmax(example((4, 33), dtype), dim)
        dy = example((4, 33), dtype, seed=1)
        dx = log_softmax_backward(dy, y, dim)
        exact = dy.double() - y.double().exp() * dy.double().sum(dim, keepdim=True)
        assert dx.dtype == dtype
        assert (dx.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert log_softmax_backward(dy, y, input_dtype=torch.float32).dtype == torch.float32
    x = example((3, 5)).requires_grad_()
    first = log_softmax_backward(x, log_softmax(x))
    (second,) = torch.autograd.grad(first.sum(), x)
    leaf = x.detach().double().requires_grad_()
    y = torch.log_softmax(leaf, -1)
    (exact,) = torch.autograd.grad((leaf - y.exp() * leaf.sum(-1, keepdim=True)).sum(), leaf)
    assert torch.allclose(second.double(), exact, atol=1e-5)


def test_integers_and_dtypes():
    x = torch.arange(12).view(3, 4)
    assert torch.equal(log_softmax(x, dtype=torch.float32), torch.log_softmax(x, -1, torch.float32))
    assert softmax(x, dtype=torch.float32, scale=0.5).dtype == torch.float32
    with pytest.raises(TypeError, match=r"input has dtype torch\.int64: log_softmax needs"):
        log_softmax(x)
    with pytest.raises(TypeError, match=r"dtype is torch\.int32: softmax takes"):
        softmax(x, dtype=torch.int32, scale=2)


def test_ranks(launches):
    assert softmax(torch.tensor(3.0), scale=2.0) == 1 and log_softmax(torch.tensor(3.0)) == 0
    assert softmax(torch.tensor(3.0), mask=torch.tensor(False), empty_rows="zero") == 0
    assert softmax(example((5,)), mask=keeps(5)).shape == (5,)
    x = torch.tensor(3.0, requires_grad=True)
    assert torch.autograd.grad(softmax(x, scale=torch.tensor(2.0)), x)[0] == 0


@names
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale": "2"}, TypeError, "scale must be a number or a torch.Tensor, not str"),
        ({"scale": True}, TypeError, "scale must be a number or a torch.Tensor, not bool"),
        ({"scale": None}, TypeError, "scale must be a number or a torch.Tensor, not NoneType"),
        ({"scale": torch.ones(4, 6)}, ValueError, r"scale has shape \(4, 6\): it varies along the reduced"),
        ({"scale": torch.ones(6)}, ValueError, r"scale has shape \(6,\): it varies along"),
        ({"scale": torch.ones(3, 1)}, ValueError, r"scale has shape \(3, 1\), which does not broadcast to"),
        ({"scale": torch.ones(4, 1).int()}, TypeError, "scale is torch.int32: it must have a floating-point dtype"),
        ({"scale": torch.ones(4, 1, device="meta")}, ValueError, "scale is on meta, input on cpu"),
        ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor, not float"),
        ({"bias": torch.ones(5)}, ValueError, r"bias has shape \(5,\), which does not broadcast to the input's"),
        ({"bias": torch.ones(1, 4, 6)}, ValueError, r"bias has shape \(1, 4, 6\), which does not broadcast"),
        ({"bias": torch.ones(6).bool()}, TypeError, "bias is torch.bool: it must have a floating-point dtype"),
        ({"bias": torch.ones(6, device="meta")}, ValueError, "bias is on meta, input on cpu"),
        ({"bias": torch.ones(4, 6).to_sparse()}, TypeError, "bias has layout torch.sparse_coo: it must be a dense"),
        ({"mask": [True]}, TypeError, "mask must be a torch.Tensor, not list"),
        ({"mask": torch.ones(6)}, TypeError, "mask is torch.float32: a mask is torch.bool, True where"),
        ({"mask": torch.ones(6).int()}, TypeError, "mask is torch.int32: a mask is torch.bool"),
        ({"mask": torch.ones(4, 5).bool()}, ValueError, r"mask has shape \(4, 5\), which does not broadcast"),
        ({"mask": torch.ones(6, device="meta").bool()}, ValueError, "mask is on meta, input on cpu"),
        ({"causal": 1.5}, TypeError, "causal must be False, True or an int offset, not float"),
        ({"causal": None}, TypeError, "causal must be False, True or an int offset, not NoneType"),
        ({"causal": True, "dim": 0}, ValueError, "causal needs queries in dimension -2 and .* over 0 of an"),
        ({"causal": True, "dim": (0, 1)}, ValueError, "causal needs queries in dimension -2 .*, not over 0, 1 of an"),
        ({"empty_rows": "one"}, ValueError, "empty_rows is 'one': it is \"nan\" or \"zero\""),
        ({"empty_rows": None}, ValueError, "empty_rows is None: it is"),
        ({"mask": torch.ones(6).bool(), "dim": 2}, IndexError, "dim=2 is out of range"),
        ({"scale": 2, "out": torch.empty(4, 6).int()}, ValueError, "out has dtype torch.int32, the result has"),
        ({"scale": 2, "out": torch.empty(4, 6, device="meta")}, ValueError, "out is on meta, input on cpu"),
        ({"scale": 2, "out": [1]}, TypeError, "out must be a torch.Tensor, not list"),
        ({"bias": torch.ones(6, requires_grad=True), "out": torch.empty(4, 6)}, ValueError, "out= does not support"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, error, message, name):
    with pytest.raises(error, match=message):
        FUNCTIONS[name](example((4, 6)), **arguments)
    if "out" not in arguments and "dim" not in arguments:
        with pytest.raises(error, match=message):
            softmax_(example((4, 6)), **arguments)


def test_wrong_arguments_of_one_function():
    x = example((4, 6))
    with pytest.raises(TypeError, match=r"log_softmax\(\) got an unexpected keyword argument 'alpha'"):
        log_softmax(x, alpha=2)
    with pytest.raises(TypeError, match="alpha must be a number, not Tensor"):
        softmax(x, alpha=torch.ones(4, 1))
    with pytest.raises(ValueError, match="causal needs queries"):
        softmax(x[0], causal=True)
    with pytest.raises(TypeError, match=r"input has dtype torch\.complex64: log_softmax is not"):
        log_softmax(x.cfloat())
    with pytest.raises(TypeError, match=r"grad is torch\.int32: log_softmax_backward takes"):
        log_softmax_backward(x.int(), x)
    with pytest.raises(ValueError, match=r"grad has shape \(3, 6\), output has \(4, 6\)"):
        log_softmax_backward(x[:3], x)


def test_out_that_is_read(launches):
    x, bias = example((4, 6)), example((4, 6))
    with pytest.raises(ValueError, match="out overlaps bias, mask, scale or sink in memory"):
        softmax(x, bias=bias, out=bias)
    with pytest.raises(ValueError, match="out overlaps input in memory without being the same tensor"):
        log_softmax(x[:3], out=x[1:])
    assert not launches


def test_plans_and_explanations(launches):
    """The plan of a call is that of its launch; what is not planned is told."""
    x = X.bfloat16()
    for arguments, _ in CASES.values():
        for log in (False, True):
            options = {k: v for k, v in arguments.items() if k != "alpha"}
            made = plan_softmax(x, log=log, **options)
            assert made.kernel.math == ("log_softmax" if log else "softmax") and made.kernel.prologue
            assert plan_softmax(x.shape, dtype="bf16", log=log, **options).kernel == made.kernel
            assert "movement" in explain(x, log=log, **options)
            for empty in ("nan", "zero"):
                made = plan_softmax(x, backward=True, log=log, empty_rows=empty, **options)
                leaf = x.clone().requires_grad_()
                FUNCTIONS["log_softmax" if log else "softmax"](leaf, empty_rows=empty, **options).backward(x)
                assert made.kernel.prologue == launches[-1].prologue, "the plan is that of the launch"
    told = explain(x, mask=MASK, causal=True, alpha=2)
    assert "masked" in told and "causal" in told and "a number" in told
    across = explain(x, 1, scale=2.0, mask=MASK.mT.contiguous().mT)
    assert "movement   column" in across and "masked" in across and "copied     a bias or a mask" in across
    assert "copied" not in explain(x, 1, scale=2.0, mask=MASK) and "prologue" not in explain(x, 1)
    assert "ATen" in explain(x, bias=BIAS.double()) and "log_softmax" in explain(x.double(), log=True)
    with pytest.raises(TypeError, match=r"plan_softmax\(\) got an unexpected keyword argument 'masks'"):
        plan_softmax(x, masks=MASK)
    with pytest.raises(TypeError, match=r"softmax\(\) got an unexpected keyword argument 'masks'"):
        softmax(x, masks=MASK)


def test_signatures_show_the_arguments_of_scores():
    for function in (softmax, softmax_, plan_softmax):
        shown = inspect.signature(function).parameters
        assert {"scale", "bias", "mask", "causal", "alpha", "empty_rows"} <= set(
            shown
        ) and "scores" not in shown
        for name, value in DEFAULTS.items():
            assert shown[name].default == value and "torch" in shown["bias"].annotation


def test_a_plain_log_softmax_is_planned_once(launches, monkeypatch):
    """Its form is found again, with and without a gradient; any other call gets its own."""
    made = []
    monkeypatch.setattr(forms, "Form", lambda *a, form=forms.Form: made.append(a[-1].log) or form(*a))
    x = example((4, 6))
    for _ in range(3):
        assert torch.allclose(log_softmax(x), torch.log_softmax(x, -1), atol=1e-6)
    assert made == [True]
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        (dx,) = torch.autograd.grad(log_softmax(leaf)[:, 0].sum(), leaf)
        exact = torch.autograd.grad(torch.log_softmax(leaf, -1)[:, 0].sum(), leaf)[0]
        assert torch.allclose(dx, exact, atol=1e-6)
    assert made == [True] * 2
    log_softmax(x, 0), log_softmax(x, -1, torch.bfloat16), log_softmax(x.bfloat16()), log_softmax(x, 0)
    assert made == [True] * 5
