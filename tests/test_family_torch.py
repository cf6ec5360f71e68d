"""The family inside torch, on simulated launches: vmap, grad, jvp, compile, export, operators, modes, meta tensors."""

import pytest
import torch
from checking import example
from torch.autograd import forward_ad

from cute_softmax import (
    amax,
    entropy,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    selective_log_softmax,
    softmax,
    softmax_,
    softmax_backward,
    topk_softmax,
)
from cute_softmax import sum as sum_

INF = float("inf")


MASK = example((4, 6), seed=9) > -0.5
MASK[:, 0] = True
X, T = example((2, 4, 6)), example((2, 4, 6), seed=1)
BIAS, ROWS = example((4, 6), seed=2), example((2, 4, 1), seed=3).abs() + 0.5
INDEX = torch.randint(6, (2, 4), generator=torch.Generator().manual_seed(0))


def torchs_softmax(x, dim=-1, *, scale=1.0, bias=0.0, mask=None, causal=False, alpha=1.0, log=False):
    s = x * scale + bias
    if mask is not None:
        s = s.masked_fill(~mask, -INF)
    if causal is not False:
        s = s.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(causal), -INF)
    if log:
        y = torch.log_softmax(s, dim)
        return y.masked_fill(s == -INF, -1.0)  # -inf would make every sum infinite
    return alpha * torch.softmax(s, dim)


def finite(y):
    return y.masked_fill(y == -INF, -1.0)


def torchs_selective(x, index):
    return torch.log_softmax(x, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def torchs_entropy(x):
    y = torch.log_softmax(x, -1)
    return -(y * y.exp()).sum(-1)


# Ours and torch's functions of a matrix.
CASES = {
    "softmax": (softmax, torchs_softmax),
    "dim 0": (lambda x: softmax(x, 0), lambda x: torchs_softmax(x, 0)),
    "both dims": (lambda x: softmax(x, (-2, -1)), lambda x: torch.softmax(x.flatten(-2), -1).view(x.shape)),
    "scores": (
        lambda x: softmax(x, scale=0.5, bias=BIAS, mask=MASK, causal=1, alpha=2),
        lambda x: torchs_softmax(x, scale=0.5, bias=BIAS, mask=MASK, causal=1, alpha=2),
    ),
    "rows": (lambda x: softmax(x, scale=ROWS[0]), lambda x: torchs_softmax(x, scale=ROWS[0])),
    "log": (log_softmax, lambda x: torch.log_softmax(x, -1)),
    "log scores": (
        lambda x: finite(log_softmax(x, scale=0.5, bias=BIAS, mask=MASK, causal=1)),
        lambda x: torchs_softmax(x, scale=0.5, bias=BIAS, mask=MASK, causal=1, log=True),
    ),
    "selective": (
        lambda x: selective_log_softmax(x, INDEX[0].expand(x.shape[:-1])),
        lambda x: torchs_selective(x, INDEX[0].expand(x.shape[:-1])),
    ),
    "entropy": (entropy, torchs_entropy),
    "logsumexp": (lambda x: logsumexp(x, -1), lambda x: torch.logsumexp(x, -1)),
    "logsumexp of both dims": (
        lambda x: logsumexp(x, (0, 1), True),
        lambda x: torch.logsumexp(x, (0, 1), True),
    ),
    "topk_softmax": (lambda x: topk_softmax(x, 2)[0], lambda x: torch.softmax(x, -1).topk(2)[0]),
    "topk_softmax, renormalized": (
        lambda x: topk_softmax(x, 2, renormalize=True)[0],
        lambda x: torch.softmax(x.topk(2)[0], -1),
    ),
    "amax": (lambda x: amax(x, 0, True), lambda x: torch.amax(x, 0, True)),
    "sum": (lambda x: sum_(x, 0), lambda x: torch.sum(x, 0)),
    "backward": (lambda x: softmax_backward(x, x), lambda x: x * (x - (x * x).sum(-1, keepdim=True))),
    "log backward": (
        lambda x: log_softmax_backward(x, x),
        lambda x: x - x.exp() * x.sum(-1, keepdim=True),
    ),
}
TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(f)(X),
    "vmap last": lambda f: torch.func.vmap(f, in_dims=2, out_dims=-1)(X.permute(1, 2, 0)),
    "vmap twice": lambda f: torch.func.vmap(torch.func.vmap(f))(X[None]),
    "grad": lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())(X[0]),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum()))(X),
    "grad of vmap": lambda f: torch.func.grad(lambda x: (torch.func.vmap(f)(x) ** 2).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X[0],), (T[0],))[1],
    "vjp called later": lambda f: _later(f),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X[0]),
    "jacrev": lambda f: torch.func.jacrev(f)(X[0]),
    "hessian": lambda f: torch.func.hessian(lambda x: (f(x) ** 2).sum())(X[0]),
    "grad of grad": lambda f: torch.func.grad(
        lambda x: (torch.func.grad(lambda z: (f(z) ** 2).sum())(x) * T[0]).sum()
    )(X[0]),
    "forward over forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x: (f(x) ** 2).sum()))(X[0]),
    "forward mode": lambda f: _tangent(f),
    "double backward": lambda f: _second(f),
    "several gradients at once": lambda f: _batched(f),
}


def _tangent(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X[0], T[0]))).tangent


def _later(f):
    """The transform has ended by then; what it kept is left over."""
    y, gradient = torch.func.vjp(f, X[0])
    return gradient(torch.ones_like(y))[0]


def _second(f):
    leaf = X[0].clone().requires_grad_()
    (first,) = torch.autograd.grad((f(leaf) ** 2).sum(), leaf, create_graph=True)
    return torch.autograd.grad((first * T[0]).sum(), leaf)[0]


def _batched(f):
    """As `torch.autograd.functional.jacobian` asks for gradients when it is to vectorize."""
    leaf = X[0].clone().requires_grad_()
    y = f(leaf)
    return torch.autograd.grad(y, leaf, example((3, *y.shape), seed=7), is_grads_batched=True)[0]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_functorch_runs_the_kernels(case, transform, launches):
    ours, torchs = CASES[case]
    expected, found = TRANSFORMS[transform](torchs), TRANSFORMS[transform](ours)
    assert torch.allclose(found, expected, rtol=1e-4, atol=2e-5)
    assert launches


def test_vmap_over_operands(launches):
    """Any of the tensors may be batched, the others broadcast; scalars, too."""
    bias, mask, rows = example((2, 6), seed=5), example((2, 4, 6), seed=6) > -0.5, ROWS
    mask[..., 0] = True
    ours = lambda x, b, m, s: softmax(x, bias=b, mask=m, scale=s)  # noqa: E731
    torchs = lambda x, b, m, s: torchs_softmax(x, bias=b, mask=m, scale=s)  # noqa: E731
    for dims in (
        (0, 0, 0, 0),
        (0, None, None, None),
        (None, 0, None, None),
        (None, None, 0, None),
        (None, None, None, 0),
    ):
        arguments = [t if d == 0 else t[0] for t, d in zip((X, bias, mask, rows), dims, strict=True)]
        found, expected = (torch.func.vmap(f, in_dims=dims)(*arguments) for f in (ours, torchs))
        assert torch.allclose(found, expected, atol=1e-6)
    numbers = example((5,))
    for function in (lambda t: logsumexp(t, 0), lambda t: amax(t, 0, True), lambda t: sum_(t, 0)):
        assert torch.allclose(torch.func.vmap(function)(numbers), numbers)
    assert torch.equal(torch.func.vmap(lambda t: softmax(t, 0))(numbers), torch.ones(5))
    assert torch.equal(
        torch.func.vmap(lambda t: softmax(t, 0, scale=2.0, mask=t > 9, empty_rows="zero"))(numbers),
        torch.zeros(5),
    )
    found = torch.func.vmap(selective_log_softmax, in_dims=(None, 1))(X, INDEX.unsqueeze(1).expand(2, 3, 4))
    assert torch.allclose(found, torchs_selective(X, INDEX).expand(3, 2, 4), atol=1e-6)
    assert len(launches) == 11


def test_gradients_of_every_operand_under_functorch(launches):
    def gradients(function):
        def loss(x, b, s):
            return (function(x, bias=b, scale=s, mask=MASK) * T).sum()


@pytest.mark.parametrize(
    ("case", "dynamic"),
    [(case, i % 2 == 0) for i, case in enumerate(case for case in CASES if case != "rows")],
)
def test_compile_fullgraph(case, dynamic, launched):
    torch._dynamo.reset()
    ours, torchs = CASES[case]
    compiled = torch.compile(lambda x: ours(x * 2), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (1, 2, 3) if dynamic else (1, 2):  # static shapes are compiled anew
        x = example((rows, 4, 6)).requires_grad_()
        y, expected = compiled(x), torchs(x * 2)
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
        (found,), (right,) = (torch.autograd.grad((t * t).sum(), x) for t in (y, expected))
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-4)
    if launched is not None:
        assert len(launched) >= 2 + dynamic


def test_compile_of_every_argument(launches):
    torch._dynamo.reset()

    def function(x, bias, mask, rows, offset):
        y = softmax(x, scale=rows, bias=bias, mask=mask, causal=offset, empty_rows="zero")
        return y + softmax_(x * 1, causal=True) + softmax(x.detach(), scale=0.5, out=torch.empty_like(x))


class Model(torch.nn.Module):
    def forward(self, x, mask, index):
        y = softmax(x, scale=0.5, mask=mask) + log_softmax(x).exp()
        return y, selective_log_softmax(x, index, return_entropy=True)


def test_export(launches):
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "mask": None, "index": {0: batch}}
    program = torch.export.export(Model(), (X, MASK, INDEX), dynamic_shapes=shapes)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"cute_softmax.softmax.default", "cute_softmax.statistics.default"} <= called
    for found, eager in zip(
        torch.utils._pytree.tree_leaves(program.module()(X[[0, 1, 1]], MASK, INDEX[[0, 1, 1]])),
        torch.utils._pytree.tree_leaves(Model()(X[[0, 1, 1]], MASK, INDEX[[0, 1, 1]])),
        strict=True,
    ):
        assert torch.equal(found, eager)


OPERATORS = {
    "plain": lambda x: (x, [1], x.dtype, True, None, None, None, False, 1.0, None, 1.0, False),
    "first dim": lambda x: (x, [0], torch.float32, True, None, None, None, True, 2.0, None, 1.0, False),
    "all": lambda x: (x, [1], x.dtype, True, BIAS.to(x.dtype), MASK, ROWS[0], False, 1.0, 1, 2.0, True),
    "log": lambda x: (x, [1], torch.float32, False, BIAS.to(x.dtype), MASK, None, True, 0.5, 2, 1.0, True),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_opcheck(case, launched):
    operators = torch.ops.cute_softmax
    for dtype in (torch.float32, torch.bfloat16):
        base = X[0].to(dtype)
        views = [base.t().contiguous().t(), torch.cat([base, base], 1)[:, ::2]]
        for x in (base.clone().requires_grad_(), *(views if dtype == torch.float32 else views[1:])):
            arguments = OPERATORS[case](x)
            torch.library.opcheck(operators.softmax.default, arguments)
            y = operators.softmax(*arguments).detach()
            grad = example(y.shape, y.dtype, seed=1).masked_fill(y == -INF, 0)
            _, dim, _, _, _, mask, scale, *numbers = arguments
            for leaf in (grad, grad.clone().requires_grad_()):
                torch.library.opcheck(
                    operators.softmax_backward.default, (leaf, y, dim, dtype, mask, scale, *numbers)
                )


def test_opcheck_of_statistics(launched):
    operators, index = torch.ops.cute_softmax, INDEX.unsqueeze(-1)
    for dtype in (torch.float32, torch.bfloat16):
        for x in (X.to(dtype), X.to(dtype).clone().requires_grad_()):
            for index, dims, asked in (
                (INDEX.unsqueeze(-1), [2], "entropy"),
                (INDEX.unsqueeze(-1), [2], ""),
                (None, [0, 2], "entropy"),
            ):
                torch.library.opcheck(operators.statistics.default, (x, index, dims, 0.5, asked))
        found, top, log, e = operators.statistics(X.to(dtype), INDEX.unsqueeze(-1), [2], 0.5, "entropy")
        torch.library.opcheck(
            operators.statistics_backward.default,
            (X.to(dtype), index, [2], 0.5, "entropy", found, top, log, e, found, None, e),
        )


def test_operators_under_vmap(launches):
    """Where the operators themselves are transformed, as in compiled code."""
    operators = torch.ops.cute_softmax
    for case, make in OPERATORS.items():
        found = torch.func.vmap(lambda x: operators.softmax(*make(x)))(X)  # noqa: B023
        assert torch.allclose(found[1], operators.softmax(*make(X[1])), atol=1e-6, equal_nan=True), case
        _, dim, _, _, _, mask, scale, *numbers = make(X)
        backward = lambda g, y: operators.softmax_backward(g, y, dim, g.dtype, mask, scale, *numbers)  # noqa: B023, E731
        assert torch.allclose(torch.func.vmap(backward)(T, X)[1], backward(T[1], X[1]), atol=1e-5), case
    function = lambda x: operators.statistics(x, INDEX[0].unsqueeze(-1), [1], 1.0, "entropy")[0]  # noqa: E731
    assert torch.equal(torch.func.vmap(function)(X)[1], function(X[1]))


def test_compiled_vmap(launches):
    torch._dynamo.reset()
    function = lambda x: torch.func.vmap(lambda r: softmax(r, scale=0.5, mask=MASK))(x)  # noqa: E731
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(X)
    assert torch.allclose(found, torchs_softmax(X, scale=0.5, mask=MASK), atol=1e-6)


def test_autograd_in_modes(launches):
    """The operators' own autograd, first and second derivatives."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    results = []
    for mode in (Passing(), torch.enable_grad()):
        leaves = [t.clone().requires_grad_() for t in (X, BIAS, ROWS)]
        with mode:
            y = softmax(leaves[0], bias=leaves[1], scale=leaves[2], mask=MASK)
            y = y + selective_log_softmax(leaves[0], INDEX).unsqueeze(-1)
            first = torch.autograd.grad((y * T).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum((f * f).sum() for f in first), leaves)
        results.append((*first, *second))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_forward_derivatives_by_two_backward_passes(launches):
    """A gradient that is zero still has derivatives: with respect to what comes in, of every operand."""
    for operand in ("scale", "input"):
        given = {"input": X, "bias": BIAS, "scale": ROWS}
        found, expected = (
            torch.autograd.functional.jvp(
                lambda t: function(**(given | {operand: t}), mask=MASK),  # noqa: B023
                given[operand],
                {"scale": torch.ones_like(ROWS), "input": T}[operand],
            )[1]
            for function in (softmax, lambda input, **k: torchs_softmax(input, **k))
        )
        assert found.abs().max() > 1e-3 and torch.allclose(found, expected, atol=1e-5), operand
