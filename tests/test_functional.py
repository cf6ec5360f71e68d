"""The public functions on the CPU: arguments and their errors, ATen's share, gradients.

Where only a CUDA tensor comes to a check, `kernels` lets CPU tensors pass for one; the launch is recorded.
"""

import checking
import pytest
import torch
from checking import FLOATS, example

from cute_softmax import explain, plan_softmax, prepare, softmax, softmax_backward
from cute_softmax.api import softmax as functional
from cute_softmax.dispatch.common import arguments
from cute_softmax.dispatch.common.spec import Spec
from cute_softmax.dispatch.softmax import kernels as softmax_kernels
from cute_softmax.plan import NO_PROLOGUE
from cute_softmax.plan.hardware import H200
from cute_softmax.runtime import launch


@pytest.fixture
def kernels(monkeypatch):
    """CPU tensors count as CUDA ones, and launches are planned for an H200 and recorded instead."""
    launched = []

    def run(math, tensors, dims, online=True, prologue=NO_PROLOGUE, numbers=(), query=None, invariant=False):
        assert not prologue and not numbers and query is None and not invariant
        launched.append(launch.Work(math, tensors, dims, online).plan(H200))

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(arguments, "on_gpu", lambda tensor: True)
    return launched


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), [((4, 33), -1), ((4, 33), 0), ((2, 3, 5), 1), ((7,), 0), ((), 0)])
def test_cpu_goes_to_aten(shape, dim, dtype):
    x = example(shape, dtype)
    y = softmax(x, dim)
    assert y.dtype == dtype and torch.equal(y, torch.softmax(x, dim))
    assert torch.equal(softmax(x, dim, torch.float32), torch.softmax(x, dim, torch.float32))
    out = torch.empty_like(x)
    assert softmax(x, dim, out=out) is out and torch.equal(out, y)
    assert softmax(x, dim, out=x) is x and torch.equal(x, y)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (-1, 1), [0, 1, 2], (1,), (0, 1, 2, 3), (3, 1)], ids=str)
def test_several_dimensions(dims, dtype):
    x = example((2, 3, 4, 5), dtype)
    y = softmax(x, dims)
    exact = x.double().exp()
    exact = exact / exact.sum(tuple(dims), keepdim=True)
    assert y.shape == x.shape and y.dtype == dtype
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps
    assert torch.allclose(y.double().sum(tuple(dims)), torch.ones((), dtype=torch.float64), atol=2e-2)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 0, 4)])
def test_empty(shape):
    x = torch.empty(shape)
    for dim in range(len(shape)):
        assert softmax(x, dim).shape == x.shape
        assert softmax_backward(x, x, dim).shape == x.shape
    assert softmax(x, tuple(range(len(shape)))).shape == x.shape


def test_integers_need_a_dtype():
    x = torch.arange(12).view(3, 4)
    assert torch.equal(softmax(x, dtype=torch.float32), torch.softmax(x, -1, torch.float32))
    for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool):
        with pytest.raises(
            TypeError, match=r"input has dtype torch\.\w+: softmax needs a floating-point tensor"
        ):
            softmax(x.to(dtype))
    with pytest.raises(TypeError, match=r"dtype is torch\.int32: softmax takes torch\.bfloat16"):
        softmax(x, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: softmax([1.0, 2.0]), TypeError, "input must be a torch.Tensor, not list"),
        (lambda x: softmax(x.numpy()), TypeError, "input must be a torch.Tensor, not ndarray"),
        (lambda x: softmax(x, 2), IndexError, "dim=2 is out of range: expected -2 to 1 for 2 dimension"),
        (lambda x: softmax(x, -3), IndexError, "dim=-3 is out of range: expected -2 to 1"),
        (lambda x: softmax(x, (0, 2)), IndexError, "dim=2 is out of range"),
        (lambda x: softmax(x, (0, 0)), ValueError, r"dim=\(0, 0\) names a dimension twice"),
        (lambda x: softmax(x, (1, -1)), ValueError, r"dim=\(1, -1\) names a dimension twice"),
        (lambda x: softmax(x, 1.0), TypeError, "dim must be an int or a sequence of ints, not 1.0"),
        (lambda x: softmax(x, True), TypeError, "dim must be an int or a sequence of ints, not True"),
        (lambda x: softmax_backward(x, x, None), TypeError, "dim must be an int or a sequence of ints, not None"),
        (lambda x: softmax(x, "1"), TypeError, "dim must be an int or a sequence of ints, not '1'"),
        (lambda x: softmax(x, (0, 1.0)), TypeError, r"dim must be an int or a sequence of ints, not \(0, 1.0\)"),
        (lambda x: softmax(x, (0, True)), TypeError, "dim must be an int or a sequence of ints"),
        (lambda x: softmax(x[0, 0], 1), IndexError, "dim=1 is out of range: expected -1 to 0"),
        (lambda x: softmax(x.to_sparse()), TypeError, "input has layout torch.sparse_coo: softmax needs a dense"),
        (lambda x: softmax(x.to_sparse_csr()), TypeError, "input has layout torch.sparse_csr"),
        (lambda x: softmax(x.cfloat()), TypeError, "input has dtype torch.complex64: softmax is not defined"),
        (lambda x: softmax(x.to(torch.float8_e4m3fn)), TypeError, "input is torch.float8_e4m3fn: softmax takes"),
        (lambda x: softmax(x, -1, x > 0), TypeError, "dtype must be a torch.dtype, not a tensor"),
        (lambda x: softmax(x, dtype=torch.cfloat), TypeError, "dtype is torch.complex64: softmax takes"),
        (lambda x: softmax(x, out=[1]), TypeError, "out must be a torch.Tensor, not list"),
        (lambda x: softmax(x, out=x.to_sparse()), TypeError, "out has layout torch.sparse_coo"),
        (lambda x: softmax(x, out=x.to("meta")), ValueError, "out is on meta, input on cpu"),
        (lambda x: softmax(x.to("meta"), out=x), ValueError, "out is on cpu, input on meta"),
        (lambda x: softmax(x, out=x.int()), ValueError, "out has dtype torch.int32, the result has torch.float32"),
        (
            lambda x: softmax(x, dtype=torch.float16, out=torch.empty_like(x)),
            ValueError,
            "out has dtype torch.float32, the result has torch.float16",
        ),
        (
            lambda x: softmax(x.requires_grad_(), out=torch.empty(4, 6)),
            ValueError,
            "out= does not support autograd: neither input nor out may require a gradient",
        ),
        (
            lambda x: softmax(x, out=torch.empty(4, 6, requires_grad=True)),
            ValueError,
            "out= does not support autograd",
        ),
        (lambda x: softmax_backward(x[:, :3], x), ValueError, r"grad has shape \(4, 3\), output has \(4, 6\)"),
        (lambda x: softmax_backward(x.to("meta"), x), ValueError, "grad is on meta, output on cpu"),
        (lambda x: softmax_backward(1.0, x), TypeError, "grad must be a torch.Tensor, not float"),
        (lambda x: softmax_backward(x, 1.0), TypeError, "output must be a torch.Tensor, not float"),
        (lambda x: softmax_backward(x.int(), x), TypeError, "grad is torch.int32: softmax_backward takes"),
        (lambda x: softmax_backward(x, x.int()), TypeError, "output is torch.int32: softmax_backward takes"),
        (lambda x: softmax_backward(x, x, -1, torch.int8), TypeError, "input_dtype is torch.int8"),
        (lambda x: softmax_backward(x, x, 2), IndexError, "dim=2 is out of range"),
        (lambda x: softmax_backward(x.cfloat(), x), TypeError, "grad has dtype torch.complex64"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(example((4, 6)))


def test_out_without_autograd():
    """Under no_grad a tensor that requires a gradient may go to `out`."""
    x = example((4, 6)).requires_grad_()
    out = torch.empty(4, 6)
    with torch.no_grad():
        softmax(x, out=out)
    assert torch.equal(out, torch.softmax(x.detach(), -1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.view(-1)[2:26].view(4, 6), "out overlaps input in memory without being the same tensor"),
        (lambda x: x.as_strided((4, 6), (1, 4)), "out overlaps input in memory without being the same tensor"),
        (lambda x: torch.empty(1, 6).expand(4, 6), "several of its elements share one place in memory"),
        (lambda x: torch.empty(40).as_strided((4, 6), (5, 1)), "several of its elements share one place in memory"),
        (lambda x: torch.empty(40).as_strided((4, 6), (0, 1)), r"out has strides \(0, 1\): several of its elements"),
    ],
)  # fmt: skip
def test_out_that_a_kernel_cannot_write(kernels, make, message):
    buffer = example((5, 6))
    with pytest.raises(ValueError, match=message):
        softmax(buffer[:4], out=make(buffer))
    assert not kernels


def test_out_that_a_kernel_can_write(kernels):
    x = example((4, 6))
    for out in (x, torch.empty(4, 6), torch.empty(4, 9)[:, 2:8], torch.empty(4, 6, dtype=torch.bfloat16)):
        assert softmax(x, out=out) is out
    assert [p.movement for p in kernels] == ["short", "short", "row", "short"]
    assert kernels[2].row_strides == (6, 9)
    assert kernels[-1].kernel.dtypes == ("fp32", "bf16")
    halves = torch.empty(8, 6)
    softmax(halves[:4], out=halves[4:])
    assert softmax(torch.empty(0, 6), out=torch.empty(0, 6)).shape == (0, 6)
    assert len(kernels) == 5, "nothing to launch for an empty tensor"


def test_any_dimension_is_launched(kernels):
    for dim, movement in ((0, "column"), (1, "short"), ((0, 1), "row")):
        softmax(example((4, 6)), dim, out=torch.empty(4, 6))
        assert kernels[-1].movement == movement
    softmax(example((2, 3, 4)), (0, 2), out=torch.empty(2, 3, 4))
    assert (kernels[-1].length, kernels[-1].problem.groups) == (8, 3)
    with pytest.raises(
        ValueError, match=r"6 dimensions that do not merge, .*at most 5 are planned"
    ) as caught:
        x = example((3,) * 7)
        softmax(x[:2, :2, :2, :2, :2, :2], out=torch.empty(*[2] * 6, 3))
    assert isinstance(caught.value, NotImplementedError)


def test_kept_dimensions_that_do_not_merge(kernels):
    x = example((4, 5, 6))
    softmax(x[:, :3], out=torch.empty(4, 3, 6))
    assert kernels[-1].operand_strides == ((30, 6), (18, 6)) and kernels[-1].kept == (4, 3)
    softmax_kernels.backward(x[:, :3], x[:, 2:], None, None, Spec((2,), x.dtype))
    assert kernels[-1].operand_strides == ((30, 6), (30, 6), (18, 6))


def recorded(plan):
    """What a call of this plan passes to the compiled function."""
    passed = []
    launch.Call(plan, lambda *given: passed.append(given))(7, *range(1000, 1000 + len(plan.operand_strides)))
    return passed[0]


def test_calls_pass_arguments_then_addresses_with_strides():
    plain = plan_softmax((8, 72))
    assert recorded(plain) == (7, 8, 72, plain.ctas, 0, 1000, 72, 1001, 72)
    short = plan_softmax((8, 7))
    assert recorded(short) == (7, 8, 7, short.warp_rows, short.ctas, 0, 1000, 1001)
    sliced = plan_softmax(example((4, 5, 64))[:, :3])
    assert recorded(sliced) == (7, 12, 64, sliced.ctas, 0, 3, 1000, 320, 64, 1001, 192, 64)


@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 5), -1), ((3, 5), 0), ((2, 3, 4), (0, 2)), ((), 0), ((1, 6), 1)]
)
def test_gradients(shape, dim):
    """First and second derivatives, numerically, in float64."""
    x = example(shape, torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda t: softmax(t, dim), x)
    torch.autograd.gradgradcheck(lambda t: softmax(t, dim), x)
    y = torch.softmax(example(shape, torch.float64), -1).requires_grad_()
    dy = example(shape, torch.float64, seed=1).requires_grad_()
    torch.autograd.gradcheck(lambda g, t: softmax_backward(g, t, dim), (dy, y))
    torch.autograd.gradgradcheck(lambda g, t: softmax_backward(g, t, dim), (dy, y))


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_is_the_formula(dtype):
    y, dy = torch.softmax(example((4, 33), dtype), -1), example((4, 33), dtype, seed=1)
    dx = softmax_backward(dy, y)
    assert dx.dtype == dtype
    exact = checking.softmax_backward64(dy, y)
    assert (dx.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert softmax_backward(dy, y, input_dtype=torch.float32).dtype == torch.float32
    leaf = example((4, 33), dtype).requires_grad_()
    (through,) = torch.autograd.grad(softmax(leaf), leaf, dy)
    (atens,) = torch.autograd.grad(torch.softmax(leaf, -1), leaf, dy)
    assert torch.equal(through, atens)


def test_autocast_on_the_cpu_is_atens():
    x = example((4, 6), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softmax(x).dtype == torch.softmax(x, -1).dtype


def test_plan_of_a_shape():
    made = plan_softmax((4096, 8192))
    assert made.row_class.dtypes == ("bf16", "bf16") and (made.rows, made.columns) == (4096, 8192)
    assert plan_softmax((4096, 8192), dtype=torch.float32).row_class.dtypes == ("fp32", "fp32")
    assert plan_softmax((4096, 8192), dtype="fp16").row_class.dtypes == ("fp16", "fp16")
    assert plan_softmax((64, 64, 32), (1, 2)).columns == 2048
    assert plan_softmax((4096, 8192), backward=True).row_class.math == "softmax_backward"
    assert not plan_softmax((4096, 8192), online=False).row_class.online
    with pytest.raises(IndexError, match="dim=2 is out of range"):
        plan_softmax((4, 8), 2)
    for dtype in (torch.float64, torch.int8, "fp64"):
        with pytest.raises(TypeError, match="no kernels for"):
            plan_softmax((4, 8), dtype=dtype)
    for shape, words in (((4, 1 << 60), "has 4611686018427387904 elements"), ((4, -8), "at least 0")):
        with pytest.raises(ValueError, match=words):
            plan_softmax(shape)
    assert plan_softmax((4, 0)).columns == plan_softmax((0, 8)).rows == 0
    assert plan_softmax((4, 8), 0).movement == "column"
    assert plan_softmax((64, 128, 32), (0, 2), backward=True).kernel.math == "softmax_backward"
    # The gradient of a softmax is the same however that was computed.
    assert plan_softmax((4, 8), backward=True, online=False) == plan_softmax((4, 8), backward=True)


def test_plan_of_a_tensor_is_that_of_the_call(kernels):
    """The result of a call is a new tensor of `empty_like`'s strides, which are not a slice's."""
    wide = example((40, 1009), torch.bfloat16)
    for x, dim in ((wide, -1), (wide[:, :1000], -1), (wide[1:], -1), (wide.t(), 0), (wide[0], 0)):
        softmax_kernels.forward(x, None, None, None, Spec((dim % x.dim(),), x.dtype))
        assert plan_softmax(x, dim).row_strides == kernels[-1].row_strides
        assert plan_softmax(x, dim).row_class.edges == kernels[-1].row_class.edges


def test_explain():
    assert "softmax of 4096 rows of 8192, bf16, for sm_90a" in explain((4096, 8192), dtype="bf16")
    assert "bf16" in explain((4096, 8192))
    text = explain(example((4, 8), torch.float64))
    assert "goes to torch.softmax (ATen)" in text and "torch.float64 tensor on cpu" in text
    assert "goes to torch.softmax (ATen)" in explain(example((4, 8)))
    assert "entropy of a torch.float32 tensor on cpu goes to torch's" in explain(
        example((4, 8)), op="entropy"
    )
    assert explain((4, 8), log=True) == explain((4, 8), op="log_softmax")
    with pytest.raises(ValueError, match="op is 'argmax': it must be one of softmax, log_softmax"):
        explain((4, 8), op="argmax")
    with pytest.raises(ValueError, match="the gradient of amax has no kernel"):
        explain((4, 8), op="amax", backward=True)
    for option in ("causal", "log", "mask"):
        with pytest.raises(TypeError, match=f"entropy takes no {option}"):
            explain((4, 8), op="entropy", **{option: True})


def test_explain_of_ranks():
    assert "nothing is launched" in explain((4, 0), group=2)
    for wrong, error in ((0, ValueError), (-5, ValueError), (1.5, TypeError), ("a", TypeError)):
        with pytest.raises(error, match="group"):
            explain((4, 8), group=wrong)
    with pytest.raises(TypeError, match="scale must be a number"):
        explain((4, 8), group=2, scale=torch.ones(4, 1))


def test_names_of_dtypes_explain_what_the_dtypes_do(kernels):
    x = example((4, 8), torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert explain(x, dtype=name) == explain(x, dtype=dtype)
        assert "movement" in explain(x, dtype=name)


def test_no_dimension_is_refused_everywhere(kernels):
    """torch reads an empty tuple as all dimensions in some functions and as none in others."""
    for call in (
        softmax,
        lambda x, dim: plan_softmax(x.shape, dim),
        lambda x, dim: softmax_backward(x, x, dim),
    ):
        with pytest.raises(ValueError, match="dim is empty: name at least one dimension"):
            call(example((2, 3)), ())
        for wrong in (True, {0}, torch.tensor(0)):
            with pytest.raises(TypeError, match="dim must be an int or a sequence of ints"):
                call(example((2, 3)), wrong)


def test_public_names():
    import cute_softmax

    names = set(cute_softmax.__all__) - {"integrations", "nn", "sampling"}
    assert all(callable(getattr(cute_softmax, name)) for name in names)
    assert issubclass(cute_softmax.nn.Softmax, torch.nn.Softmax)
    assert functional.softmax is softmax


def test_rows_that_do_not_merge(launches):
    """Their form takes the general launch, that of plain rows is written out."""
    for x in (example((4, 5, 64))[:, :3], example((4, 5, 65))[:, :3, 1:]):
        for _ in range(2):
            assert torch.allclose(softmax(x), torch.softmax(x, -1), atol=1e-6)
    assert len(launches) == 4


def test_a_prepared_call(launches):
    prepared = prepare(example((3, 8)), 0, torch.bfloat16)
    for seed in range(2):
        x = example((3, 8), seed=seed)
        assert torch.allclose(prepared(x), torch.softmax(x, 0).bfloat16(), atol=2**-8)
    assert prepared.plan.movement == "column" and len(launches) == 2
