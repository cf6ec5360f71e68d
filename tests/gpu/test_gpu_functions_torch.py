"""The softmax family inside torch on the device: transforms, compile, export, graphs, autocast."""

import threading

import pytest
import torch
from checking import DEVICE, equal_bits, random
from remembered import forget_forms
from torch.autograd import forward_ad

from cute_softmax import (
    amax,
    entropy,
    log_softmax,
    logsumexp,
    selective_log_softmax,
    softmax,
    softmax_,
    softmax_matmul,
)
from cute_softmax import sum as sum_
from cute_softmax.api import softmax as api
from cute_softmax.runtime import launch

INF = float("inf")
SHAPE = (4, 20, 264)


@pytest.fixture
def launched(monkeypatch):
    """The maths of launches."""
    seen, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda name, *a, **k: seen.append(name) or run(name, *a, **k))
    return seen


def scores(dtype=torch.float32):
    """(x, bias, mask, scale per row, index)."""
    mask = random(SHAPE[1:], torch.float32, seed=2) < 0.7
    mask[:, 0] = True
    rows = random((*SHAPE[:2], 1), torch.float32, seed=3).abs() + 0.5
    index = torch.arange(SHAPE[0] * SHAPE[1], device=DEVICE).view(SHAPE[:2]) % SHAPE[2]
    return random(SHAPE, dtype), random(SHAPE[1:], dtype, seed=1), mask, rows, index


def torchs_softmax(x, dim=-1, scale=1.0, bias=0.0, mask=None):
    s = x * scale + bias
    return torch.softmax(s if mask is None else s.masked_fill(~mask, -INF), dim)


def with_sink(function, s, sink, mask=None):
    s = s if mask is None else s.masked_fill(~mask, -INF)
    return function(torch.cat([s, sink], -1), -1)[..., :-1]


def cases() -> dict:
    """Ours and torch's function of a tensor whose last two dimensions are those of the scores."""
    _, bias, mask, rows, index = scores()
    options = {"scale": rows[0], "bias": bias, "mask": mask}
    return {
        "softmax": (softmax, lambda x: torch.softmax(x, -1)),
        "softmax dim": (lambda x: softmax(x, -2), lambda x: torch.softmax(x, -2)),
        "scores": (lambda x: softmax(x, **options), lambda x: torchs_softmax(x, **options)),
        "sink": (
            lambda x: softmax(x, sink=x[..., :1].sin(), **options),
            lambda x: with_sink(torch.softmax, x * rows[0] + bias, x[..., :1].sin(), mask),
        ),
        "log_softmax with a sink": (
            lambda x: log_softmax(x, sink=x[..., :1].sin()),
            lambda x: with_sink(torch.log_softmax, x, x[..., :1].sin()),
        ),
        "logsumexp with a sink": (
            lambda x: logsumexp(x, -1, sink=x[..., :1].sin()),
            lambda x: torch.logsumexp(torch.cat([x, x[..., :1].sin()], -1), -1),
        ),
        "log_softmax": (log_softmax, lambda x: torch.log_softmax(x, -1)),
        "logsumexp": (lambda x: logsumexp(x, -1), lambda x: torch.logsumexp(x, -1)),
        "amax": (lambda x: amax(x, -1), lambda x: torch.amax(x, -1)),
        "sum": (lambda x: sum_(x, -1), lambda x: torch.sum(x, -1)),
        "entropy": (entropy, lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)),
        "selective": (
            lambda x: selective_log_softmax(x, index[0].expand(x.shape[:-1])),
            lambda x: torch.log_softmax(x, -1).gather(-1, index[0].expand(x.shape[:-1])[..., None])[..., 0],
        ),
    }


NAMES = (
    "sink", "log_softmax with a sink", "logsumexp with a sink",
    "softmax", "softmax dim", "scores", "log_softmax", "logsumexp", "amax", "sum", "entropy", "selective",
)  # fmt: skip
names = pytest.mark.parametrize("name", NAMES)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=3e-5)


@names
def test_functorch_runs_the_kernels(name, launched):
    ours, torchs = cases()[name]
    x, t = random(SHAPE, torch.float32), random(SHAPE, torch.float32, seed=5)
    for transform in (
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(f, in_dims=2, out_dims=1)(x.permute(1, 2, 0)),
        lambda f: torch.func.grad(lambda a: (f(a) ** 2).sum())(x[0]),
        lambda f: torch.func.vmap(torch.func.grad(lambda a: (f(a) ** 2).sum()))(x),
        lambda f: torch.func.jvp(f, (x[0],), (t[0],))[1],
        lambda f: torch.func.vjp(f, x[0])[1](torch.ones_like(f(x[0])))[0],
        lambda f: torch.func.jvp(torch.func.grad(lambda a: (f(a) ** 2).sum()), (x[0],), (t[0],))[1],
        lambda f: torch.func.grad(lambda a: (torch.func.grad(lambda z: (f(z) ** 2).sum())(a) * t[0]).sum())(
            x[0]
        ),
    ):
        before = len(launched)
        assert close(transform(ours), transform(torchs))
        assert len(launched) > before, "no kernel ran"


@names
def test_forward_mode_and_double_backward(name, launched):
    ours, torchs = cases()[name]
    x, t = random(SHAPE, torch.float32), random(SHAPE, torch.float32, seed=5)
    tangents, second = [], []
    for function in (ours, torchs):
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent)
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((function(leaf) ** 2).sum(), leaf, create_graph=True)
        second += torch.autograd.grad((first * t).sum(), leaf)
    assert close(*tangents) and close(*second) and launched


@names
def test_several_gradients_at_once(name):
    """Of an eager call, as `torch.autograd.functional.jacobian` asks for them when it is to vectorize."""
    found = []
    for function in cases()[name]:
        leaf = random(SHAPE, torch.float32).requires_grad_()
        y = function(leaf)
        upstream = random((3, *y.shape), torch.float32, seed=7)
        found += torch.autograd.grad(y, leaf, upstream, is_grads_batched=True)
    assert close(*found)


def test_several_gradients_of_a_product_at_once():
    s, v = random((2, 64, 64), torch.bfloat16).requires_grad_(), random((2, 64, 32), torch.bfloat16, seed=1)
    upstream = random((3, 2, 64, 32), torch.bfloat16, seed=7)
    (found,) = torch.autograd.grad(softmax_matmul(s, v), s, upstream, is_grads_batched=True)
    each = [torch.autograd.grad(softmax_matmul(s, v), s, g)[0] for g in upstream]
    assert torch.allclose(found, torch.stack(each), rtol=0.05, atol=0.05)


def test_gradcheck_in_float32(launched):
    """Numerical second derivatives, with steps and bounds that float32 allows."""
    x, bias, mask, rows, index = scores()
    x, bias, mask, rows = x[0, :2, :5], bias[:2, :5], mask[:2, :5], rows[0, :2]
    leaves = [t.clone().requires_grad_() for t in (x, bias, rows)]
    for function in (
        lambda x, b, s: softmax(x, bias=b, scale=s, mask=mask),
        lambda x, b, s: torch.where(mask, log_softmax(x, bias=b, scale=s, mask=mask), 0.0),
        lambda x, b, s: selective_log_softmax(x + b, index[0, :2] % 5) + entropy(x * s),
    ):
        options = {"eps": 1e-2, "atol": 5e-3, "rtol": 5e-2, "nondet_tol": 0.0, "fast_mode": False}
        torch.autograd.gradcheck(function, leaves, **options)
        torch.autograd.gradgradcheck(function, leaves, **options)
    assert launched


@names
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(name, dynamic):
    torch._dynamo.reset()
    ours, _ = cases()[name]
    backend = "inductor" if name == "scores" else "aot_eager"  # the latter takes a tenth of the time
    compiled = torch.compile(lambda x: ours(x * 2) + 0, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (3, 2):
        x = random((batch, *SHAPE[1:]), torch.float32).requires_grad_()
        y, eager = compiled(x), ours(x * 2)
        assert equal_bits(y.detach(), eager.detach())
        (found,), (expected,) = (torch.autograd.grad((t * t).sum(), x) for t in (y, eager))
        assert close(found, expected)


def test_compile_of_every_argument():
    torch._dynamo.reset()
    x, bias, mask, rows, _ = scores(torch.bfloat16)

    def function(x, bias, mask, rows, offset):
        y = softmax(x, scale=rows, bias=bias, mask=mask, causal=offset, empty_rows="zero")
        return y + softmax_(x * 1, scale=0.5) + softmax(x.detach(), alpha=2, out=torch.empty_like(x))

    for dynamic in (False, True):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for offset in (0, 100):
            leaves = [t.clone().requires_grad_() for t in (x, bias, rows)]
            y, eager = (f(leaves[0], leaves[1], mask, leaves[2], offset) for f in (compiled, function))
            assert torch.allclose(y, eager, atol=0.02)
            for a, b in zip(*(torch.autograd.grad((t * x).sum(), leaves) for t in (y, eager)), strict=True):
                assert torch.allclose(a, b, rtol=0.05, atol=0.02)


def test_opcheck():
    operators = torch.ops.cute_softmax
    for dtype in (torch.bfloat16, torch.float32):
        x, bias, mask, rows, index = scores(dtype)
        for leaf in (x, x.clone().requires_grad_(), x.mT.contiguous().mT):
            arguments = (leaf, [2], dtype, True, bias, mask, rows, False, 1.0, 9, 2.0, True)
            torch.library.opcheck(operators.softmax.default, arguments)
            torch.library.opcheck(operators.statistics.default, (leaf, index[..., None], [2], 0.5, "entropy"))
        y = softmax(x)
        backward = (x, y, [2], dtype, mask, rows, False, 1.0, None, 1.0, False)
        torch.library.opcheck(operators.softmax_backward.default, backward)
        found, top, log, e = operators.statistics(x, index[..., None], [2], 0.5, "entropy")
        arguments = (x, index[..., None], [2], 0.5, "entropy", found, top, log, e, found, None, None)
        torch.library.opcheck(operators.statistics_backward.default, arguments)


class Model(torch.nn.Module):
    def forward(self, x, mask, index):
        y = softmax(x, scale=0.5, mask=mask) + log_softmax(x).exp()
        return y, selective_log_softmax(x, index, return_entropy=True)


def test_export():
    x, _, mask, _, index = scores()
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "mask": None, "index": {0: batch}}
    program = torch.export.export(Model(), (x, mask, index), dynamic_shapes=shapes)
    for few in (2, 3):
        found, eager = (
            torch.utils._pytree.tree_leaves(m(x[:few], mask, index[:few]))
            for m in (program.module(), Model())
        )
        assert all(equal_bits(a, b) for a, b in zip(found, eager, strict=True))


def every(x, bias, mask, rows, index) -> list[torch.Tensor]:
    """Results and gradients of everything."""
    leaves = [t.clone().requires_grad_() for t in (x, bias, rows)]
    y = softmax(leaves[0], scale=leaves[2], bias=leaves[1], mask=mask)
    z = log_softmax(leaves[0], scale=0.5, causal=100)
    found, e = selective_log_softmax(leaves[0], index, return_entropy=True)
    several = selective_log_softmax(leaves[0], index[..., None].expand(*index.shape, 3) % 7)
    total = logsumexp(leaves[0], -1) + found + e + several.sum(-1)
    loss = (y * x).sum() + z.where(z.isfinite(), 0).sum() + total.sum()
    results = [y, z, found, e, several, softmax_(x * 1, mask=mask, empty_rows="zero")]
    return [t.detach() for t in results] + list(torch.autograd.grad(loss, leaves))


def test_graphs_and_streams():
    given = scores(torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        every(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = every(*given)
    given[0].copy_(random(SHAPE, torch.bfloat16, seed=11))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, every(*given), strict=True):
        assert equal_bits(a, b)


@pytest.mark.parametrize("log", [False, True])
def test_later_calls_of_a_form(log, monkeypatch):
    """With other numbers, other contents and other addresses, aligned or not: what calls without forms give."""
    function = log_softmax if log else softmax
    x, _, _, rows, _ = scores(torch.bfloat16)
    calls = []
    for step in range(3):
        y, other = (random(SHAPE, torch.bfloat16, seed=20 + 2 * step + i) for i in range(2))
        for misaligned in (False, True):
            if misaligned:
                y = torch.empty(y.numel() + 1, dtype=y.dtype, device=DEVICE)[1:].view(SHAPE).copy_(y)
            keep = (other[0] > 0.1 * step) | (torch.arange(SHAPE[2], device=DEVICE) == step)
            for given in (
                {"scale": 0.5 + step},
                {"scale": rows + step},
                {"scale": (rows + step).half(), "mask": keep},
                {"causal": step - 1, "bias": other},
                {"mask": keep[0], "bias": other[0], "scale": -step / 4, "empty_rows": "zero"},
            ):
                for leaf in (y, y.clone().requires_grad_()):
                    calls.append((leaf, given))

    def results() -> list[torch.Tensor]:
        found = []
        for leaf, given in calls:
            found.append(function(leaf, **given))
            if leaf.requires_grad:
                found += torch.autograd.grad(found[-1], leaf, x)
        return [t.detach() for t in found]

    forget_forms()
    later = results()
    assert any(api._of_scores.values())
    forget_forms()
    monkeypatch.setattr(api, "form_of", lambda *call: None)
    for a, b in zip(later, results(), strict=True):
        assert equal_bits(a, b)


def test_deterministic_mode():
    """Nothing refuses it, and the same call gives the same bits."""
    given = scores(torch.bfloat16)
    expected = every(*given)
    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(every(*given), expected, strict=True):
            assert torch.allclose(a, b, rtol=0.02, atol=0.02, equal_nan=True)
        for a, b in zip(every(*given), every(*given), strict=True):
            assert equal_bits(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast():
    """To float32, as torch does with its softmax and log_softmax; in place a tensor keeps its dtype."""
    x, bias, mask, _, index = scores(torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.log_softmax(x, -1).dtype == torch.float32
        for y in (softmax(x, mask=mask), log_softmax(x), log_softmax(x, bias=bias), entropy(x)):
            assert y.dtype == torch.float32
        assert selective_log_softmax(x, index).dtype == torch.float32
        assert softmax(x, scale=2.0, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert softmax_(x.clone(), scale=2.0).dtype == torch.bfloat16
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(log_softmax(leaf, scale=0.5).sum(), leaf)
        assert dx.dtype == torch.bfloat16


def test_threads():
    """First and later calls from many threads, each on a stream of its own; on all devices there are."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    given = {d: [t.to(d) for t in scores(torch.bfloat16)] for d in devices}
    expected = [t.cpu() for t in every(*given[devices[0]])]
    torch.cuda.synchronize()
    failures, start = [], threading.Barrier(8)

    def work(i: int):
        try:
            device = devices[i % len(devices)]
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(5):
                    for a, b in zip(every(*given[device]), expected, strict=True):
                        assert torch.allclose(a.cpu(), b, rtol=0.02, atol=0.02, equal_nan=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
