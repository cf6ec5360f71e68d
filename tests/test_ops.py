"""The torch.library operators on the CPU: schema, fakes, autograd, torch.compile, functorch."""

import checking
import pytest
import torch
from checking import FLOATS, example
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_softmax import softmax, softmax_backward
from cute_softmax.dispatch.common.arguments import served
from cute_softmax.dispatch.common.formulas import backward_formula, over
from cute_softmax.dispatch.common.spec import Spec
from cute_softmax.dispatch.softmax.kernels import backward
from cute_softmax.operators import REGISTERED_BY  # noqa: F401  the operators of all functions

OPS = torch.ops.cute_softmax


def views(dtype):
    """(tensor, dims) in several memory formats."""
    x = example((4, 6), dtype)
    cube = example((2, 3, 4), dtype)
    return [
        (x, [1]),
        (x, [0]),
        (x.t(), [0]),
        (x.t(), [1]),
        (example((4, 9), dtype)[:, 1:7], [1]),
        (x[:1].expand(4, 6), [1]),
        (cube, [0, 2]),
        (cube.permute(2, 0, 1), [1]),
        (example((2, 3, 4, 5), dtype).to(memory_format=torch.channels_last), [1]),
        (x[0, 0], [0]),
        (torch.empty(0, 3, dtype=dtype), [1]),
    ]


@pytest.mark.parametrize("case", range(11))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_softmax(case, dtype):
    x, dims = views(dtype)[case]
    for result in (dtype, torch.float32):
        torch.library.opcheck(torch.ops.cute_softmax.softmax.default, (x, dims, result, True))
        leaf = x.detach().requires_grad_()
        torch.library.opcheck(torch.ops.cute_softmax.softmax.default, (leaf, dims, result, True))


@pytest.mark.parametrize("case", range(11))
def test_opcheck_softmax_backward(case):
    x, dims = views(torch.float32)[case]
    y, dy = over(torch.softmax, x, dims, x.dtype), example(x.shape, seed=1)
    torch.library.opcheck(torch.ops.cute_softmax.softmax_backward.default, (dy, y, dims, x.dtype))
    leaves = [t.detach().requires_grad_() for t in (dy, y)]
    torch.library.opcheck(torch.ops.cute_softmax.softmax_backward.default, (*leaves, dims, x.dtype))


@pytest.mark.parametrize("device", ["cuda", "meta", "cpu"])
@pytest.mark.parametrize("case", range(11))
def test_fakes_have_the_strides_of_the_result(case, device):
    """A new dense tensor keeps its input's format, as `empty_like` does."""
    x, dims = views(torch.bfloat16)[case]
    with FakeTensorMode():
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        expected = torch.empty_like(fake, dtype=torch.float32)
        for y in (
            torch.ops.cute_softmax.softmax(fake, dims, torch.float32, True),
            torch.ops.cute_softmax.softmax_backward(fake, fake, dims, torch.float32),
        ):
            assert (y.shape, y.dtype, y.device) == (expected.shape, torch.float32, expected.device)
            assert y.stride() == expected.stride()


@pytest.mark.parametrize("case", range(10))
@pytest.mark.parametrize("of", ["input", "target"])
def test_fakes_of_gradients_of_divergences(case, of):
    x, dims = views(torch.float32)[case]
    others = example(x.shape), *[example(x.sum(dims, keepdim=True).shape, seed=seed) for seed in (1, 2)]
    arguments = x, *others, dims, 0.5, of
    found = OPS.kl_div_backward(*arguments)
    with FakeTensorMode() as mode:
        fake = OPS.kl_div_backward(
            *[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        )
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


def test_compile_of_other_forms():
    torch._dynamo.reset()
    x = example((4, 3, 8))
    for function in (
        lambda t: softmax(t, (0, 2)),
        lambda t: softmax(t, 1, torch.float64),
        lambda t: softmax(t.transpose(0, 1), -1, online=False),
        lambda t: softmax_backward(t, t),
        lambda t: softmax(t[:, :, 1:], -1),
        lambda t: softmax(t, out=torch.empty_like(t)),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
        eager = function(x)
        assert torch.equal(compiled, eager) and compiled.stride() == eager.stride()


def test_errors_in_compiled_code_are_the_same():
    torch._dynamo.reset()
    said = "IndexError" if torch.__version__.startswith("2.8.") else "dim=2 is out of range"
    with pytest.raises(Exception, match=said):
        torch.compile(lambda t: softmax(t, 2), fullgraph=True, backend="aot_eager")(example((4, 6)))


def test_operator_gradients():
    """The operators' own autograd, that of compiled code: numerically, twice."""
    for shape, dims in (((3, 5), [1]), ((2, 3, 2), [0, 2])):
        x = example(shape, torch.float64).requires_grad_()
        forward = lambda t, dims=dims: torch.ops.cute_softmax.softmax(t, dims, torch.float64, True)  # noqa: E731
        torch.autograd.gradcheck(forward, x)
        torch.autograd.gradgradcheck(forward, x)
        y = torch.softmax(example(shape, torch.float64), -1).requires_grad_()
        dy = example(shape, torch.float64, seed=1).requires_grad_()
        backward = lambda g, t, dims=dims: torch.ops.cute_softmax.softmax_backward(g, t, dims, g.dtype)  # noqa: E731
        torch.autograd.gradcheck(backward, (dy, y))
        torch.autograd.gradgradcheck(backward, (dy, y))


def sinks_of(x, dims):
    return example([1 if d in dims else n for d, n in enumerate(x.shape)], x.dtype, seed=2)


@pytest.mark.parametrize("case", [0, 3, 6, 8, 9, 10])
def test_opcheck_with_a_sink(case):
    """Both results of each, and what memory they have."""
    x, dims = views(torch.float32)[case]
    given, dy = (x, sinks_of(x, dims)), example(x.shape, seed=1)
    for t, sink in (given, [t.detach().clone().requires_grad_() for t in given]):
        torch.library.opcheck(OPS.softmax_with_sink.default, (t, dims, t.dtype), {"sink": sink})
        torch.library.opcheck(OPS.logsumexp_with_sink.default, (t, sink, dims, True, t.dtype))
        found = OPS.softmax_with_sink(t, dims, t.dtype, sink=sink)
        y, log = (f.detach().requires_grad_(t.requires_grad) for f in found)
        torch.library.opcheck(
            OPS.softmax_with_sink_backward.default, (dy, y, dims, t.dtype), {"sink_log": log}
        )
        torch.library.opcheck(OPS.logsumexp_with_sink_backward.default, (t, log, sink, dims, t.dtype))


@pytest.mark.parametrize(("shape", "dims"), [((3, 5), [1]), ((2, 3, 2), [0, 2])])
@pytest.mark.parametrize("log", [False, True])
def test_operator_gradients_with_a_sink(shape, dims, log):
    """Numerically, twice: also of those of the gradients."""
    x = example(shape, torch.float64).requires_grad_()
    sink, dy = sinks_of(x, dims).requires_grad_(), example(shape, torch.float64, seed=1).requires_grad_()

    def forward(x, sink):
        return OPS.softmax_with_sink(x, dims, x.dtype, sink=sink, log=log)

    def backward(dy, y, own):
        return OPS.softmax_with_sink_backward(dy, y, dims, y.dtype, own, log=log)

    def total(x, sink):
        return OPS.logsumexp_with_sink(x, sink, dims, False, x.dtype)

    results = [t.detach().requires_grad_() for t in forward(x, sink)]
    for function, tensors in ((forward, (x, sink)), (backward, (dy, *results)), (total, (x, sink))):
        torch.autograd.gradcheck(function, tensors)
        torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_of_any_layout(dtype):
    """Gradients that autograd hands over: expanded, transposed, sliced."""
    x = example((5, 8), dtype).requires_grad_()
    y = softmax(x)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert dx.abs().max() <= 4 * torch.finfo(dtype).eps
    for dy in (
        example((8, 5), dtype).t(),
        example((5, 9), dtype)[:, 1:],
        example((1, 8), dtype).expand(5, 8),
    ):
        got = softmax_backward(dy, y.detach())
        exact = checking.softmax_backward64(dy, y.detach())
        assert (got.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_what_no_kernel_takes_goes_to_aten():
    x = example((4, 6))
    assert not served(x, torch.float32)
    y = torch.softmax(x, -1)
    spec = Spec((1,), x.dtype)
    ours = backward(x, y, None, None, spec)
    assert torch.equal(ours, backward_formula(x, y, None, None, spec))
