"""Every public function in every state of torch: the same results, by the way that the state asks for.

Launches are simulated on the CPU (`simulated`). What a state needs a GPU for (streams, several devices, graphs) is in
the GPU tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import simulated
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cute_softmax as c

SHAPE = (4, 6, 8)
MASK = torch.rand(8, generator=torch.Generator().manual_seed(1)) < 0.7
SINK = torch.randn(6, 1, generator=torch.Generator().manual_seed(8))
BIAS = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
INDEX = torch.randint(8, (4, 6), generator=torch.Generator().manual_seed(3))
SHARES = torch.softmax(torch.randn(24, 8, generator=torch.Generator().manual_seed(7)), -1)
CLASSES = torch.rand(8, generator=torch.Generator().manual_seed(6))
GRAD = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
VALUES = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(5))
HALVES = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5)).bfloat16()


@dataclass(frozen=True)
class Function:
    """ours(x) and the same by torch; op: the operator that must be seen, "" where torch's operations serve CPU tensors.

    records: whether gradients flow to x; in_place: whether x itself is changed; out: a call that writes to a tensor;
    error: how much worse than float32 results may be.
    """

    ours: Callable
    torchs: Callable
    op: str
    records: bool = True
    in_place: bool = False
    out: Callable | None = None
    error: float = 1.0

    def close(self, found, expected, atol=2e-6) -> bool:
        return torch.allclose(found, expected, atol=self.error * atol) and found.dtype == expected.dtype


def _scored(x):
    return torch.softmax((x * 2 + BIAS).masked_fill(~MASK, -torch.inf), -1)


def _with_sink(function, x, sink=SINK, dim=-1):
    """The function of x beside a column of sinks, without that."""
    sink = sink.expand([1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    return function(torch.cat([x, sink], dim), dim).narrow(dim, 0, x.shape[dim]).contiguous()


def _sum_with_sink(x, sink):
    return torch.logsumexp(torch.cat([x, sink.expand(4, 6, 1)], -1), -1)


def _entropy(x):
    return torch.special.entr(torch.softmax(x, -1)).sum(-1)


def _both(values, chosen):
    return values.sum(-1) + 2 * chosen


def _divergence(x, target):
    q, p = (torch.log_softmax(0.7 * t, -1) for t in (x, target))
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


FUNCTIONS = {
    "softmax": Function(c.softmax, lambda x: torch.softmax(x, -1), "softmax", out=c.softmax),
    "softmax dim 0": Function(lambda x: c.softmax(x, 0), lambda x: torch.softmax(x, 0), "softmax"),
    "softmax of scores": Function(
        lambda x: c.softmax(x, scale=2.0, bias=BIAS, mask=MASK),
        _scored,
        "softmax",
        out=lambda x, out: c.softmax(x, scale=2.0, bias=BIAS, mask=MASK, out=out),
    ),
    "softmax with a sink": Function(
        lambda x: c.softmax(x, sink=SINK),
        lambda x: _with_sink(torch.softmax, x),
        "softmax_with_sink",
        out=lambda x, out: c.softmax(x, sink=SINK, out=out),
    ),
    "softmax of a sink": Function(
        lambda x: c.softmax(GRAD, scale=2.0, bias=BIAS, mask=MASK, sink=x[:, :, :1]),
        lambda x: _with_sink(torch.softmax, (GRAD * 2 + BIAS).masked_fill(~MASK, -torch.inf), x[:, :, :1]),
        "softmax_with_sink",
    ),
    "softmax of scores and a sink, dim 0": Function(
        lambda x: c.softmax(x, 0, scale=2.0, bias=BIAS, mask=MASK, sink=x[0, 0].sin(), alpha=1.5),
        lambda x: (
            1.5 * _with_sink(torch.softmax, (x * 2 + BIAS).masked_fill(~MASK, -torch.inf), x[0, 0].sin(), 0)
        ),
        "softmax_with_sink",
    ),
    "softmax_ with a sink": Function(
        lambda x: c.softmax_(x, sink=SINK),
        lambda x: _with_sink(torch.softmax, x),
        "softmax_with_sink",
        in_place=True,
    ),
    "log_softmax with a sink": Function(
        lambda x: c.log_softmax(x, scale=0.5, sink=x[:, :, :1].sin()),
        lambda x: _with_sink(torch.log_softmax, 0.5 * x, x[:, :, :1].sin()),
        "softmax_with_sink",
    ),
    "softmax_": Function(c.softmax_, lambda x: torch.softmax(x, -1), "softmax", in_place=True),
    "log_softmax": Function(c.log_softmax, lambda x: torch.log_softmax(x, -1), "softmax", out=c.log_softmax),
    "softmax_backward": Function(
        lambda x: c.softmax_backward(GRAD, x),
        lambda x: x * (GRAD - (GRAD * x).sum(-1, keepdim=True)),
        "softmax_backward",
    ),
    "log_softmax_backward": Function(
        lambda x: c.log_softmax_backward(GRAD, x),
        lambda x: GRAD - x.exp() * GRAD.sum(-1, keepdim=True),
        "softmax_backward",
    ),
    "logsumexp": Function(
        lambda x: c.logsumexp(x, -1),
        lambda x: torch.logsumexp(x, -1),
        "logsumexp",
        out=lambda x, out: c.logsumexp(x, -1, out=out),
    ),
    "logsumexp with a sink": Function(
        lambda x: c.logsumexp(x, -1, sink=SINK),
        lambda x: _sum_with_sink(x, SINK),
        "logsumexp_with_sink",
        out=lambda x, out: c.logsumexp(x, -1, sink=SINK, out=out),
    ),
    "logsumexp with a sink of each row": Function(
        lambda x: c.logsumexp(x, -1, True, sink=x[:, :, :1].sin()),
        lambda x: _sum_with_sink(x, x[:, :, :1].sin()).unsqueeze(-1),
        "logsumexp_with_sink",
    ),
    "amax": Function(
        lambda x: c.amax(x, -1),
        lambda x: torch.amax(x, -1),
        "amax",
        out=lambda x, out: c.amax(x, -1, out=out),
    ),
    "sum": Function(
        lambda x: c.sum(x, -1), lambda x: torch.sum(x, -1), "sum", out=lambda x, out: c.sum(x, -1, out=out)
    ),
    "entropy": Function(c.entropy, _entropy, "statistics"),
    "selective_log_softmax": Function(
        lambda x: c.selective_log_softmax(x, INDEX),
        lambda x: torch.log_softmax(x, -1).gather(-1, INDEX[..., None]).squeeze(-1),
        "statistics",
    ),
    "cross_entropy": Function(
        lambda x: c.cross_entropy(x.mT, INDEX, CLASSES, reduction="none", lse_square_scale=0.1),
        lambda x: (
            torch.nn.functional.cross_entropy(x.mT, INDEX, CLASSES, reduction="none")
            + 0.1 * torch.logsumexp(x, -1).square()
        ),
        "statistics",
    ),
    "cross_entropy, smoothed and capped": Function(
        lambda x: c.cross_entropy(x.mT, INDEX, reduction="none", label_smoothing=0.1, softcap=2.0, scale=1.5),
        lambda x: torch.nn.functional.cross_entropy(
            2 * torch.tanh(x.mT * 0.75), INDEX, reduction="none", label_smoothing=0.1
        ),
        "statistics",
    ),
    "cross_entropy of probabilities": Function(
        lambda x: c.cross_entropy(x.flatten(0, 1), SHARES, reduction="none"),
        lambda x: torch.nn.functional.cross_entropy(x.flatten(0, 1), SHARES, reduction="none"),
        "kl_div",
    ),
    "kl_div": Function(
        lambda x: c.kl_div(x, GRAD, scale=0.7, reduction="none"), lambda x: _divergence(x, GRAD), "kl_div"
    ),
    "kl_div of the target": Function(
        lambda x: c.kl_div(GRAD, x, scale=0.7, reduction="none"), lambda x: _divergence(GRAD, x), "kl_div"
    ),
    "topk_softmax": Function(
        lambda x: c.topk_softmax(x, 3)[0], lambda x: torch.softmax(x, -1).topk(3).values, "topk_softmax"
    ),
    "topk_softmax, renormalized": Function(
        lambda x: c.topk_softmax(x, 3, renormalize=True)[0],
        lambda x: torch.softmax(x.topk(3).values, -1),
        "topk_softmax",
    ),
    "topk_log_softmax": Function(
        lambda x: c.topk_log_softmax(x, 3)[0],
        lambda x: torch.log_softmax(x, -1).topk(3).values,
        "topk_log_softmax",
    ),
    "topk_log_softmax, chosen": Function(
        lambda x: _both((found := c.topk_log_softmax(x, 2, INDEX, scale=0.5))[0], found[2]),
        lambda x: _both(
            (log_p := torch.log_softmax(x * 0.5, -1)).topk(2).values,
            log_p.gather(-1, INDEX[..., None]).squeeze(-1),
        ),
        "topk_log_softmax",
    ),
    "softmax_stats": Function(
        c.softmax_stats, lambda x: torch.logsumexp(x, -1).detach(), "softmax_stats", records=False
    ),
    "softmax_matmul": Function(
        lambda x: c.softmax_matmul(x, VALUES), lambda x: torch.softmax(x, -1) @ VALUES, ""
    ),
    "softmax_stats with a sink": Function(
        lambda x: c.softmax_stats(x, sink=SINK),
        lambda x: _sum_with_sink(x, SINK).detach(),
        "softmax_stats",
        records=False,
    ),
    "softmax_matmul with a sink": Function(
        lambda x: c.softmax_matmul(x, VALUES, sink=SINK),
        lambda x: _with_sink(torch.softmax, x) @ VALUES,
        "",
    ),
    "softmax_matmul of halves and a sink of each row": Function(
        lambda x: c.softmax_matmul(x, HALVES, sink=x[:, :, :1].sin(), return_lse=True)[0],
        lambda x: (_with_sink(torch.softmax, x, x[:, :, :1].sin()) @ HALVES.float()).bfloat16(),
        "softmax_matmul",
        error=5000,
    ),
    "softmax_matmul of halves": Function(
        lambda x: c.softmax_matmul(x, HALVES),
        lambda x: (torch.softmax(x, -1) @ HALVES.float()).bfloat16(),
        "softmax_matmul",
        error=5000,
    ),
}


def example() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def launches(monkeypatch, request):
    """What is launched; the function has been called before, so that what an eager call decides is known."""
    found = simulated.install(monkeypatch)
    if "f" in request.fixturenames:
        request.getfixturevalue("f").ours(example())
        found.clear()
    return found


every = pytest.mark.parametrize("f", [pytest.param(f, id=name) for name, f in FUNCTIONS.items()])
recording = pytest.mark.parametrize(
    "f", [pytest.param(f, id=name) for name, f in FUNCTIONS.items() if f.records and not f.in_place]
)


class Operators(TorchDispatchMode):
    """What operators a mode sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that sees every operator and computes with what it wraps."""

    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        plain = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, function(*plain[0], **plain[1]))


def operator_seen(f: Function, seen: list[str]) -> bool:
    return not f.op or f"cute_softmax.{f.op}.default" in seen


@every
@pytest.mark.parametrize("state", ["eager", "no_grad", "inference_mode", "parameter"])
def test_a_launch(f, state, launches):
    """Nothing but a kernel: twice, so that what the first call decided serves the second."""
    expected = f.torchs(example())
    for _ in range(2):
        launches.clear()
        x = example()
        if state == "parameter":
            x = torch.nn.Parameter(x, requires_grad=False)
        context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            state, torch.enable_grad
        )
        with context():
            found = f.ours(x)
        assert f.close(found, expected) and type(found) is (
            torch.nn.Parameter if f.in_place and state == "parameter" else torch.Tensor
        )
        assert (found is x) == f.in_place
        assert launches


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose negatives lie in memory: a part of a conjugate."""
    found = torch.complex(tensor, -tensor).conj().imag
    assert found.is_neg() and torch.equal(found, tensor)
    return found


@every
def test_what_a_bit_of_torchs_negates(f, launches):
    x = example()
    for _ in range(2):
        assert f.close(f.ours(negated(x)), f.torchs(x))
        if f.out is not None:
            expected = f.torchs(x)
            assert f.close(f.out(negated(x), out=negated(expected)), expected)


@recording
def test_upstreams_that_a_bit_of_torchs_negates(f, launches):
    x = example().requires_grad_()
    y, z = f.ours(x), f.torchs(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    ours, theirs = torch.autograd.grad(y, x, negated(upstream)), torch.autograd.grad(z, x, upstream)
    assert f.close(ours[0], theirs[0], atol=1e-5)


@recording
@pytest.mark.parametrize("state", ["tensor", "parameter"])
def test_gradients(f, state, launches):
    for _ in range(2):
        x = torch.nn.Parameter(example()) if state == "parameter" else example().requires_grad_()
        y = f.ours(x)
        assert y.requires_grad
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
        for ours, torchs in zip(
            *(_both_gradients(function, x, upstream) for function in (f.ours, f.torchs)), strict=True
        ):
            assert f.close(ours, torchs, atol=1e-5)


def _both_gradients(function, x, upstream):
    """The gradient, and that of its square."""
    (d,) = torch.autograd.grad(function(x), x, upstream, create_graph=True)
    yield d.detach()
    if d.requires_grad:
        yield torch.autograd.grad(d.square().sum(), x)[0]


def test_gradients_in_place(launches):
    x = example().requires_grad_()
    y = c.softmax_(x.clone())
    (ours,) = torch.autograd.grad(y, x, GRAD)
    (torchs,) = torch.autograd.grad(torch.softmax(x, -1), x, GRAD)
    assert torch.allclose(ours, torchs, atol=1e-6)


@every
def test_a_dispatch_mode_sees_the_operator(f, launches):
    expected = f.torchs(example())
    with Operators() as mode:
        found = f.ours(example())
    assert f.close(found, expected) and operator_seen(f, mode.seen)


@every
def test_a_subclass_sees_the_operator(f, launches):
    Wrapped.seen.clear()
    found = f.ours(Wrapped(example()))
    assert f.close(found.inner, f.torchs(example())) and operator_seen(f, Wrapped.seen)


@every
def test_fake_tensors(f, launches):
    real = f.torchs(example())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = f.ours(mode.from_tensor(example()))
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    assert not launches


@every
def test_vmap(f, launches):
    if f.in_place:
        found = torch.func.vmap(lambda x: f.ours(x.clone()))(example().unsqueeze(0))
    else:
        found = torch.func.vmap(f.ours)(example().unsqueeze(0))
    assert f.close(found, f.torchs(example()).unsqueeze(0))


@recording
def test_forward_mode(f, launches):
    tangent = GRAD.flip(0)
    for ours, torchs in zip(
        *(torch.func.jvp(function, (example(),), (tangent,)) for function in (f.ours, f.torchs)), strict=True
    ):
        assert f.close(ours, torchs, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(example(), tangent)
        found = torch.autograd.forward_ad.unpack_dual(f.ours(dual)).tangent
    assert f.close(found, torch.func.jvp(f.torchs, (example(),), (tangent,))[1], atol=1e-5)


@recording
def test_functional_gradients(f, launches):
    weights = torch.randn(f.torchs(example()).shape, generator=torch.Generator().manual_seed(7))
    ours, torchs = (
        torch.func.grad(lambda x, function=function: (function(x) * weights).sum())(example())
        for function in (f.ours, f.torchs)
    )
    assert f.close(ours, torchs, atol=1e-5)


@every
def test_compiled(f, launches):
    torch._dynamo.reset()
    found = torch.compile(f.ours, fullgraph=True, backend="aot_eager")(example())
    assert f.close(found, f.torchs(example()))


@recording
def test_compiled_gradients(f, launches):
    torch._dynamo.reset()
    x = example().requires_grad_()
    y = torch.compile(f.ours, fullgraph=True, backend="aot_eager")(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    ours, torchs = (torch.autograd.grad(r, x, upstream)[0] for r in (y, f.torchs(x)))
    assert f.close(ours, torchs, atol=1e-5)


@every
def test_exported(f, launches):
    class Model(torch.nn.Module):
        def forward(self, x):
            return f.ours(x.clone() if f.in_place else x)

    program = torch.export.export(Model(), (example(),))
    names = [str(node.target) for node in program.graph.nodes]
    assert operator_seen(f, names) and f.close(program.module()(example()), f.torchs(example()))


@pytest.mark.parametrize("f", [pytest.param(f, id=name) for name, f in FUNCTIONS.items() if f.out])
@pytest.mark.parametrize("state", ["eager", "mode", "subclass", "vmap", "compiled", "fake"])
def test_out(f, state, launches):
    """Into a tensor of the caller's; where a kernel may not write there, the operator's result is copied."""
    expected = f.torchs(example())
    out = torch.full_like(expected, torch.nan)
    if state == "eager":
        assert f.out(example(), out=out) is out and launches
    elif state == "mode":
        with Operators() as mode:
            f.out(example(), out=out)
        assert operator_seen(f, mode.seen)
    elif state == "subclass":
        wrapped = Wrapped(out)
        assert f.out(Wrapped(example()), out=wrapped) is wrapped
    elif state == "vmap":
        torch.func.vmap(lambda x, y: f.out(x, out=y))(example().unsqueeze(0), out.unsqueeze(0))
    elif state == "compiled":
        torch._dynamo.reset()
        torch.compile(lambda x, y: f.out(x, out=y), fullgraph=True, backend="aot_eager")(example(), out)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(out)
            assert f.out(mode.from_tensor(example()), out=fake) is fake
        assert not launches
        return
    assert f.close(out, expected)


@every
def test_autocast(f, launches, monkeypatch):
    """16-bit tensors give float32, but where a result goes into a tensor, is a gradient or one of the elements."""
    name = next(name for name, g in FUNCTIONS.items() if g is f)
    kept = {"softmax_", "softmax_backward", "log_softmax_backward", "amax", "softmax_matmul of halves"}
    kept |= {"softmax_ with a sink", "softmax_matmul of halves and a sink of each row"}
    if name in ("softmax_matmul", "softmax_matmul with a sink"):
        pytest.skip("without a GPU it takes two steps, whose product is torch's")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    found = f.ours(example().bfloat16())
    assert found.dtype is (torch.bfloat16 if name in kept else torch.float32)
