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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_compile_fullgraph_forward_and_backward(dtype, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: softmax(x * 2, -1), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for shape in ((4, 33), (5, 40), (2, 3, 8)):
        x = example(shape, dtype).requires_grad_()
        dy = example(shape, dtype, seed=1)
        y, eager = compiled(x), torch.softmax(x * 2, -1)
        assert torch.equal(y, eager)
        (dx,) = torch.autograd.grad(y, x, dy)
        (expected,) = torch.autograd.grad(eager, x, dy)
        assert dx.dtype == dtype
        assert (dx - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


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
    with pytest.raises(Exception, match="dim=2 is out of range"):
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
