"""logsumexp, amax and sum on the CPU: arguments, ATen's share, gradients, operators, and plans of their launches.

Where only a CUDA tensor comes to a kernel, `kernels` lets CPU tensors pass for one: each launch is planned for an
H200 and recorded, and torch computes what the kernel would write.
"""

import pytest
import simulated
import torch
from checking import FLOATS, example
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_softmax import amax, logsumexp, plan_reduction
from cute_softmax import sum as sum_
from cute_softmax.runtime import launch

FUNCTIONS = {"logsumexp": logsumexp, "amax": amax, "sum": sum_}
names = pytest.mark.parametrize("name", FUNCTIONS)
INF = float("inf")


@pytest.fixture
def kernels(monkeypatch):
    """The plans of launches; torch writes what a kernel would."""
    launched, launches = [], simulated.install(monkeypatch)

    def call(math, *form):
        found = launches.call(math, *form)
        if math in FUNCTIONS:
            launched.append(found.plan)
        return found

    monkeypatch.setattr(launch, "_call", call)
    return launched


@names
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 33), -1), ((4, 33), 0), ((2, 3, 5), (0, 2)), ((7,), 0), ((), 0), ((2, 3), [0, 1])]
)
def test_cpu_goes_to_aten(shape, dim, dtype, name):
    x = example(shape, dtype)
    for keepdim in (False, True):
        y, torchs = FUNCTIONS[name](x, dim, keepdim), getattr(torch, name)(x, dim, keepdim)
        assert y.dtype == torchs.dtype and y.stride() == torchs.stride() and torch.equal(y, torchs)


@names
def test_all_dimensions(name):
    x = example((3, 4))
    if name == "logsumexp":
        with pytest.raises(ValueError, match="dim is empty: name at least one dimension"):
            logsumexp(x, ())
        return
    torchs = getattr(torch, name)(x)
    assert torch.equal(FUNCTIONS[name](x), torchs) and torch.equal(FUNCTIONS[name](x, ()), torchs)
    assert FUNCTIONS[name](x, keepdim=True).shape == (1, 1)
    assert torch.equal(sum_(x, None), x.sum())


def test_integers_go_to_aten(kernels):
    x = torch.arange(12).view(3, 4)
    assert torch.equal(amax(x, 1), x.amax(1)) and torch.equal(sum_(x > 3, 1), (x > 3).sum(1))
    assert sum_(x).dtype == torch.int64 and torch.equal(logsumexp(x, 1), torch.logsumexp(x, 1))
    assert sum_(x, dtype=torch.float32).dtype == torch.float32
    assert sum_(x.float(), dtype=torch.int64).dtype == torch.int64
    assert sum_(x.float(), dtype=torch.float64).dtype == torch.float64
    assert not kernels


@names
def test_empty_tensors_go_to_aten(name, kernels):
    function = FUNCTIONS[name]
    assert function(torch.empty(0, 3), 1).shape == (0,)
    assert function(torch.empty(0, 3), 1, True).shape == (0, 1)
    if name == "amax":
        with pytest.raises(IndexError, match="to have non-zero size"):
            function(torch.empty(3, 0), 1)
    else:
        value = {"logsumexp": -INF, "sum": 0.0}[name]
        assert function(torch.empty(3, 0), 1).tolist() == [value] * 3
    assert not kernels


@names
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f, x: f([1.0], 0), TypeError, "input must be a torch.Tensor, not list"),
        (lambda f, x: f(x, 2), IndexError, "dim=2 is out of range: expected -2 to 1 for 2 dimension"),
        (lambda f, x: f(x, (0, -2)), ValueError, r"dim=\(0, -2\) names a dimension twice"),
        (lambda f, x: f(x, 1.0), TypeError, "dim must be an int or a sequence of ints, not 1.0"),
        (lambda f, x: f(x, True), TypeError, "dim must be an int or a sequence of ints, not True"),
        (lambda f, x: f(x, "1"), TypeError, "dim must be an int or a sequence of ints, not '1'"),
        (lambda f, x: f(x.to_sparse(), 1), TypeError, r"input has layout torch.sparse_coo: \w+ needs a dense"),
        (lambda f, x: f(x.cfloat(), 1), TypeError, r"input has dtype torch.complex64: \w+ is not defined"),
        (lambda f, x: f(x.to(torch.float8_e4m3fn), 1), TypeError, r"input is torch.float8_e4m3fn: \w+ takes"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message, name):
    with pytest.raises(error, match=message):
        call(FUNCTIONS[name], example((4, 6)))


@names
@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_launches(kernels, name, dtype):
    function, torchs = FUNCTIONS[name], getattr(torch, name)
    cases = [
        ((4, 6), 1, 1), ((4, 6), (0, 1), 1), ((6,), 0, 1), ((), 0, 1), ((2, 3, 4), (1, 2), 1), ((2, 1, 4), 1, 1),
    ]  # fmt: skip
    for shape, dim, _ in cases:
        x = example(shape, dtype)
        for keepdim in (False, True):
            y, expected = function(x, dim, keepdim), torchs(x.double(), dim, keepdim).to(dtype)
            assert y.dtype == dtype and y.stride() == expected.stride() and torch.equal(y, expected)
    assert len(kernels) == 2 * len(cases) and {p.kernel.math for p in kernels} == {name}


@names
def test_launches_on_views(kernels, name):
    """Transposed, sliced, permuted: the result is contiguous, as torch's, whatever the input is."""
    function, torchs = FUNCTIONS[name], getattr(torch, name)
    x = example((4, 5, 6, 7))
    for view, dim, modes in (
        (x.permute(2, 0, 3, 1), 2, 2),
        (x[:, :3], -1, 2),
        (x[1:, 1:4, :4, 1:], -1, 5),
        (x.permute(2, 1, 0, 3), -1, 5),
        (x.permute(3, 0, 1, 2), 0, 1),  # as it lies, which is densely
        (x.permute(3, 0, 1, 2), (0, 3), 1),
        (x[:1].expand(4, 5, 6, 7), 3, 2),
    ):
        for keepdim in (False, True):
            y, expected = function(view, dim, keepdim), torchs(view, dim, keepdim)
            assert y.stride() == expected.stride() and torch.allclose(y, expected)
            assert getattr(kernels[-1].kernel, "kept_modes", 0) == modes
    for view, dim in ((x, 0), (x, (1, 3)), (x[:, :, ::2], (0, 2)), (x.permute(2, 0, 3, 1), (0, 1)), (x, -2)):
        for keepdim in (False, True):
            y, expected = function(view, dim, keepdim), torchs(view, dim, keepdim)
            assert y.stride() == expected.stride() and torch.allclose(y, expected)
            assert kernels[-1].movement in ("column", "split") and kernels[-1].kernel.math == name


def test_dtype_of_a_sum(kernels):
    x = example((4, 6), torch.bfloat16)
    y = sum_(x, 1, dtype=torch.float32)
    assert y.dtype == torch.float32 and torch.equal(y, x.float().sum(1))
    assert kernels[-1].kernel.dtypes == ("bf16", "fp32")
    with pytest.raises(TypeError):
        sum_(x, 1, False, torch.float32)  # as in torch, by name only


@names
def test_gradients_are_torchs(kernels, name):
    """Through a launch (`kernels`) and through ATen; ties, keepdim, several dimensions."""
    x = example((3, 4, 5))
    x[0, 0, 1] = x[0, 0, 3] = 9.0
    x[1, 2] = -INF
    for dim, keepdim in ((2, False), (2, True), ((1, 2), False), ((0, 1, 2), True)):
        gradients = []
        for function in (FUNCTIONS[name], getattr(torch, name)):
            leaf = x.clone().requires_grad_()
            y = function(leaf, dim, keepdim)
            gradients += torch.autograd.grad(y, leaf, example(y.shape, seed=1))
        assert torch.allclose(*gradients, equal_nan=True)
    assert len(kernels) == 4
    half = x.bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(FUNCTIONS[name](half, 2).sum(), half)
    assert gradient.dtype == torch.bfloat16


CASES = [
    ((4, 6), [1], False), ((4, 6), [0], True), ((2, 3, 4), [0, 2], False), ((2, 3, 4), [0, 1, 2], True),
    ((), [0], False), ((3, 1), [1], False),
]  # fmt: skip


@names
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators(case, name):
    shape, dims, keepdim = case
    operator = getattr(torch.ops.cute_softmax, name)
    for x in (example(shape, torch.float64), example(shape, torch.float64).requires_grad_()):
        torch.library.opcheck(operator.default, (x, dims, keepdim, x.dtype))
    torch.autograd.gradcheck(lambda t: operator(t, dims, keepdim, t.dtype), x)
    torch.autograd.gradgradcheck(lambda t: operator(t, dims, keepdim, t.dtype), x)
    if shape:
        views = example(shape, torch.bfloat16).expand(2, *shape)
        torch.library.opcheck(operator.default, (views, [d + 1 for d in dims], keepdim, views.dtype))
    with FakeTensorMode():
        fake = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        y, torchs = operator(fake, dims, keepdim, fake.dtype), getattr(torch, name)(fake, dims, keepdim)
        assert (y.shape, y.stride(), y.dtype, y.device) == (
            torchs.shape, torchs.stride(), torchs.dtype, torchs.device,
        )  # fmt: skip


@names
def test_out(kernels, name):
    function = FUNCTIONS[name]
    x = example((3, 4, 5))
    for dim, keepdim in ((1, False), (1, True), ((0, 2), False), ((0, 1, 2), False)):
        expected = function(x, dim, keepdim)
        for out in (torch.empty_like(expected), torch.empty(*expected.shape, 2)[..., 1]):
            assert function(x, dim, keepdim, out=out) is out and torch.equal(out, expected)
    count = len(kernels)
    assert torch.equal(function(x.double(), 1, out=torch.empty(3, 5).double()), function(x.double(), 1))
    assert len(kernels) == count, "float64 goes to ATen"
    for out, message in (
        (torch.empty(3, 5, dtype=torch.float64), "out has dtype torch.float64, the result has torch.float32"),
        (torch.empty(3, 5, device="meta"), "out is on meta, input on cpu"),
        (torch.empty(3, 1).expand(3, 5), "out overlaps input or itself"),
        (x[:, 0], "out overlaps input or itself"),
        (torch.empty(3, 5, requires_grad=True), "out= does not support autograd"),
    ):
        with pytest.raises(ValueError, match=message):
            function(x, 1, out=out)


def test_gradient_of_a_logsumexp_is_one_kernel(monkeypatch):
    launches = simulated.install(monkeypatch)
    x = example((3, 4, 5), torch.bfloat16).requires_grad_()
    for dim, keepdim in ((2, False), (1, True), ((0, 2), False)):
        y = logsumexp(x, dim, keepdim)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y) * 2)
        assert [n.math for n in launches] == ["logsumexp", "softmax"]
        assert launches[1].prologue.alpha == "groups" and dx.dtype == torch.bfloat16
        exact = torch.autograd.grad(
            torch.logsumexp(leaf := x.detach().double().requires_grad_(), dim).sum(), leaf
        )[0]
        assert (dx - 2 * exact).abs().max() <= 2**-8
        launches.clear()


@names
def test_plan_of_a_reduction(name, kernels):
    made = plan_reduction(name, (4096, 8192))
    assert made.row_class.math == name and made.row_class.dtypes == ("bf16", "bf16")
    assert f"{name} of 4096 rows of 8192, bf16" in made.explain()
    assert plan_reduction(name, (8, 16, 32), ()).columns == 4096
    x = example((4, 5, 60), torch.bfloat16)[:, :3, 1:]
    FUNCTIONS[name](x, 2)
    assert plan_reduction(name, x, 2).operand_strides == kernels[-1].operand_strides
    with pytest.raises(ValueError, match="the reductions are logsumexp, amax, sum"):
        plan_reduction("softmax", (4, 8))
    with pytest.raises(TypeError, match=r"no kernels for torch.float64 -> torch.float64"):
        plan_reduction(name, x.double())
