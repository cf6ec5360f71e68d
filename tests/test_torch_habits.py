"""What torch's own functions take and ours, too: other names, Python's dtypes, an output of any shape, no dimension."""

import warnings

import pytest
import torch
from checking import example
from torch.nn import functional

import cute_softmax
from cute_softmax import (
    amax,
    explain,
    gumbel_softmax,
    log_softmax,
    logsumexp,
    nn,
    prepare,
    softmax,
    softmax_,
    softmax_backward,
    softmin,
)

TORCHS = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "sum": torch.sum,
}
names = pytest.mark.parametrize("name", TORCHS)


def close(ours, torchs):
    assert (ours.shape, ours.dtype) == (torchs.shape, torchs.dtype)
    torch.testing.assert_close(ours, torchs, rtol=2e-6, atol=1e-6)


@names
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axis_is_dim(launched, name, axis):
    ours, x = getattr(cute_softmax, name), example((4, 6))
    for _ in range(2):  # a call that repeats, too
        close(ours(x, axis=axis), TORCHS[name](x, axis=axis))
    assert torch.equal(ours(x, axis=axis), ours(x, axis))


@names
def test_axis_beside_dim_is_refused(name):
    with pytest.raises(TypeError, match=rf"{name}\(\) got dim=0 and axis=1, which are one argument"):
        getattr(cute_softmax, name)(example((4, 6)), 0, axis=1)


def test_axis_of_our_own_functions(launched):
    x = example((4, 6))
    close(softmin(x, axis=0), functional.softmin(x, 0))
    close(softmax(x, axis=(0, 1), scale=2.0), torch.softmax(2 * x.flatten(), 0).view(4, 6))
    close(softmax_(x.clone(), axis=0), torch.softmax(x, 0))


def test_axis_and_no_dimension_when_compiled(launched):
    @torch.compile(backend="eager", fullgraph=True)
    def both(x):
        found = softmax(x, axis=0) + log_softmax(x, axis=0) + logsumexp(x, axis=0) + amax(x, axis=0)
        return found, nn.Softmax()(x)

    x = example((4, 6))
    found, rows = both(x)
    close(found, torch.softmax(x, 0) + torch.log_softmax(x, 0) + torch.logsumexp(x, 0) + torch.amax(x, 0))
    close(rows, torch.softmax(x, 1))


def test_logsumexp_needs_a_dimension():
    with pytest.raises(TypeError, match=r"logsumexp\(\) missing 1 required argument: 'dim'"):
        logsumexp(example((4, 6)))


@pytest.mark.parametrize("dtype, whole", [(float, torch.float64), (torch.float32, torch.float32)])
def test_python_s_float_is_a_dtype(launched, dtype, whole):
    x, integers = example((4, 6)), torch.arange(12).view(3, 4)
    for function in (softmax, log_softmax):
        torchs = TORCHS[function.__name__]
        for t in (x, integers):
            close(function(t, 1, dtype), torchs(t, 1, whole))
        close(function(x, 1, dtype, scale=2.0), torchs(2 * x.to(whole), 1))
    close(cute_softmax.sum(x, 0, dtype=dtype), torch.sum(x, 0, dtype=whole))
    close(softmin(integers, 1, dtype), functional.softmin(integers, 1, dtype=whole))
    y = torch.softmax(x, 1)
    assert softmax_backward(x, y, 1, dtype).dtype is whole


def test_other_types_of_python():
    x = example((4, 6))
    assert cute_softmax.sum(x.round(), 0, dtype=int).dtype is torch.int64
    with pytest.raises(TypeError, match=r"dtype is torch\.int64: softmax takes"):
        softmax(x, dtype=int)
    assert explain(x, dtype=float).startswith(
        "softmax of a torch.float32 tensor on cpu goes to torch.softmax"
    )


def test_prepared_for_float_is_refused_by_name(launches):
    with pytest.raises(ValueError, match=r"the result torch\.float64: only non-empty CUDA tensors"):
        prepare(example((4, 6)), dtype=float)


@names
@pytest.mark.parametrize("shape", [(0,), (2, 2), (7,), (4, 6, 2), ()])
def test_an_output_of_another_shape_is_resized_as_torch_does(launched, name, shape):
    x, results = example((4, 6)), []
    for function in (TORCHS[name], getattr(cute_softmax, name)):
        out = torch.empty(shape)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert function(x, 1, out=out) is out
        ours = [str(w.message) for w in told if "was resized" in str(w.message)]
        results.append((out, [text[:100] for text in ours]))
    (torchs, torchs_words), (out, words) = results
    close(out, torchs)
    assert out.stride() == torchs.stride() and words == torchs_words and bool(words) == (0 not in shape)


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_without_a_dimension_torch_s_old_rule_and_warning(launched, name, shape):
    x = example(shape)
    words = "Implicit dimension choice for .*softm.* has been deprecated"
    with pytest.warns(UserWarning, match=words):
        expected = getattr(functional, name)(x)
    for _ in range(2):
        with pytest.warns(UserWarning, match=words) as told:
            close(getattr(cute_softmax, name)(x, None), expected)
    if name != "softmin":
        assert told[0].filename == __file__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1)])
def test_softmin(launched, dtype, dim):
    x = example((5, 33), dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    flat = -exact.flatten() if dim == (0, 1) else -exact
    expected = torch.softmax(flat, 0 if dim == (0, 1) else dim).view(5, 33)
    y, dy = softmin(x, dim), example((5, 33), dtype, 1)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=4 * unit, atol=unit / 8)
    (dx,) = torch.autograd.grad(y, x, dy)
    (exact_dx,) = torch.autograd.grad(expected, exact, dy.double())
    torch.testing.assert_close(dx.double(), exact_dx, rtol=8 * unit, atol=4 * unit)
    if launched is not None and dim == -1 and dtype is not torch.float64:
        assert {n.math for n in launched} == {"softmax", "softmax_backward"}
        assert launched[0].prologue.scale == "number" and launched[0].numbers == (-1.0,)


def test_softmin_of_infinities(launched):
    inf = torch.inf
    x = torch.tensor([[0.0, inf, 1.0], [0.0, -inf, 1.0], [inf, inf, inf], [0.0, torch.nan, 1.0]])
    torch.testing.assert_close(softmin(x), functional.softmin(x, -1), equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("tau", [1.0, 0.5, 2])
def test_gumbel_softmax_draws_what_torch_draws(launched, tau, hard, dim):
    logits = example((4, 50)).requires_grad_()
    torch.manual_seed(1)
    expected = functional.gumbel_softmax(logits, tau, hard, dim=dim)
    torch.manual_seed(1)
    y = gumbel_softmax(logits, tau, hard, dim=dim)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    dy = example((4, 50), seed=1)
    ours, torchs = (torch.autograd.grad(t, logits, dy)[0] for t in (y, expected))
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    if launched is not None and dim != 0:
        assert launched[0].prologue.bias and launched[0].prologue.scale == ("number" if tau != 1 else "")


def test_gumbel_softmax_follows_its_distribution(launched):
    """The largest element of a sample is each class as often as its probability says: within five deviations."""
    logits, count = torch.tensor([0.0, 1.0, 2.0, -1.0]), 20000
    torch.manual_seed(0)
    chosen = gumbel_softmax(logits.expand(count, 4), hard=True).argmax(-1)
    shares, expected = torch.bincount(chosen, minlength=4) / count, torch.softmax(logits, 0)
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"tau": 0}, ValueError, "tau is 0.0: it must be positive"),
        ({"tau": float("nan")}, ValueError, "tau is nan"),
        ({"tau": "1"}, TypeError, "tau must be a number, not str"),
        ({"hard": True, "dim": (0, 1)}, ValueError, "one-hot rows lie along one dimension"),
        ({"dim": 2}, IndexError, "dim=2 is out of range"),
    ],
)
def test_wrong_arguments_of_gumbel_softmax(given, error, words):
    with pytest.raises(error, match=words):
        gumbel_softmax(example((4, 6)), **given)


def test_gumbel_softmax_of_integers_is_refused():
    with pytest.raises(TypeError, match=r"logits is torch\.int64: gumbel_softmax takes"):
        gumbel_softmax(torch.arange(4))
