"""`accelerate` on the device: torch's operators by our kernels, and a model that knows nothing of it."""

import threading
import time

import checking
import pytest
import torch
from checking import DTYPES, check_backward, check_softmax, equal_bits, random

from benchmarks import eager_model, step
from cute_softmax import accelerate, accelerated, restore
from cute_softmax.acceleration import operators, originals

dtypes = pytest.mark.parametrize("dtype", DTYPES)
OVERLOADS = [
    f"aten::{o.name}{end}" for o in operators.OPERATORS for end in ("", ".out") if end == "" or o.has_out
]


def tables():
    return [torch._C._dispatch_dump(name) for name in OVERLOADS]


@pytest.fixture(autouse=True)
def restored():
    before = tables()
    yield
    restore()
    assert tables() == before


def views(dtype):
    """(tensor, dim): rows and columns, short and long, with gaps, transposed, expanded; of bfloat16 the most."""
    wide, cube = random((40, 1010), dtype), random((3, 40, 96), dtype, seed=1)
    few = [
        (wide, -1),
        (wide, 0),
        (wide[:, 1:1001], 1),
        (cube.transpose(0, 1), -1),
        (random((), dtype), 0),
    ]
    if dtype is not torch.bfloat16:
        return few
    return [
        *few,
        (wide[1:, ::2], 1),
        (wide.t(), 0),
        (wide.t(), 1),
        (cube, 1),
        (cube.permute(2, 0, 1), 0),
        (wide[:1].expand(40, 1010), 1),
        (random((5, 50257), dtype), 1),
        (random((2, 300000), dtype), 1),
        (random((300, 4096), dtype), 0),
        (random((9,), dtype), 0),
    ]


@dtypes
def test_results_are_torchs(dtype):
    dtype = DTYPES[dtype]
    for x, dim in views(dtype):
        dy = random(x.shape, dtype, seed=3)
        plain = torch.softmax(x, dim)
        plain_log = torch.log_softmax(x, dim)
        plain_lse = torch.logsumexp(x, dim)
        leaf = x.detach().requires_grad_()
        with accelerate() as acceleration:
            y = torch.softmax(leaf, dim)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            log = torch.log_softmax(leaf, dim)
            (dlog,) = torch.autograd.grad(log, leaf, dy)
            lse = torch.logsumexp(x, dim)
            out = torch.softmax(x, dim, out=torch.empty_like(plain))
        report = acceleration.report()
        assert not report.handed_on and len(report.served) == 6, str(report)
        for ours, torchs in ((y, plain), (dx, plain), (log, plain_log), (dlog, plain_log), (lse, plain_lse)):
            assert (ours.dtype, ours.shape, ours.stride()) == (torchs.dtype, torchs.shape, torchs.stride())
        check_softmax(y.detach(), x, dim)
        assert equal_bits(out, y.detach())
        if x.dim():
            check_backward(dx, dy, y.detach(), dim)
            checking.check_reduction("logsumexp", lse, x, dim)
        unit = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(log.detach(), plain_log, rtol=unit, atol=unit)
        (expected,) = torch.autograd.grad(torch.log_softmax(leaf.double(), dim), leaf, dy.double())
        torch.testing.assert_close(dlog, expected, rtol=unit, atol=unit * dy.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_to_float(dtype):
    for x, dim in views(dtype):
        leaf = x.detach().requires_grad_()
        dy = random(x.shape, torch.float32, seed=3)
        with accelerate() as acceleration:
            y = torch.nn.functional.softmax(leaf, dim, dtype=torch.float32)
            (dx,) = torch.autograd.grad(y, leaf, dy)
        assert not acceleration.report().handed_on
        assert (y.dtype, dx.dtype) == (torch.float32, dtype)
        check_softmax(y.detach(), x, dim)
        if x.dim():
            check_backward(dx, dy, y.detach(), dim)


@pytest.mark.skipif(
    not originals.REACHABLE, reason="this torch does not hand out kernels: it stays with ATen"
)
@dtypes
def test_masked_softmax(dtype):
    scores = random((4, 6, 130, 130), DTYPES[dtype])
    keys, future = (
        torch.zeros(4, 130, dtype=torch.bool, device=scores.device),
        torch.ones(130, 130, dtype=torch.bool),
    )
    keys[0, 100:] = keys[2, 3] = True
    same, future = random(scores.shape, torch.float32, 1) > 0.5, future.triu(1).to(scores.device)
    for mask, kind in ((keys, 1), (future, 0), (same, 2)):
        whole = mask[:, None, None] if kind == 1 else mask
        with accelerate() as acceleration:
            y = torch._masked_softmax(scores, mask, 3, kind)
        assert acceleration.report().served == {"aten::_masked_softmax": 1}
        exact = torch.softmax(scores.double().masked_fill(whole, -torch.inf), -1)
        plain = torch.softmax(scores.masked_fill(whole, -torch.inf), -1)
        bound = (plain.double() - exact).abs().max() + torch.finfo(scores.dtype).eps / 2 * exact.max()
        assert (y.double() - exact).abs().max() <= bound and not y[whole.expand_as(y)].any()


@dtypes
def test_safe_softmax(dtype):
    x = random((64, 1000), DTYPES[dtype])
    x[3], x[5, ::2] = -torch.inf, -torch.inf
    keep = torch.arange(64, device=x.device) != 3
    with accelerate() as acceleration:
        results = torch._safe_softmax(x, -1), torch._safe_softmax(x.t(), 0).t()
    for y in results:
        assert not y[3].any()
        check_softmax(y[keep], x[keep])
    report = acceleration.report()
    assert report.served["aten::_safe_softmax"] + sum(report.handed_on.values()) == 2


@dtypes
@pytest.mark.parametrize("columns", [1, 2, 1000, 50257])
def test_where_one_element_counts_its_logarithm_is_zero(dtype, columns):
    """However large it is: exactly, as in torch."""
    for size in (20.3, 1000.7, 60000.0):
        x = torch.full((3, columns), -size, dtype=DTYPES[dtype], device="cuda")
        x[:, -1] = size
        with accelerate():
            for given, dim in ((x, -1), (x.t().contiguous(), 0)):
                assert not torch.log_softmax(given, dim).select(dim, -1).any()
                assert equal_bits(torch.logsumexp(given, dim), given.select(dim, -1).contiguous())


def test_what_goes_on():
    x = random((40, 100), torch.float32)
    with accelerate() as acceleration:
        y = torch.softmax(x.double(), -1)
        torch.logsumexp(x.to(torch.complex64), 0)
        with pytest.raises(IndexError):
            torch.softmax(x, 2)
        torch.softmax(x.cpu(), -1)
    assert equal_bits(y, torch.softmax(x.double(), -1))
    assert acceleration.report().handed_on == {
        ("aten::_softmax", "a dim out of range, repeated or empty"): 1,
        ("aten::_softmax", "dtype float64"): 1,
        ("aten::logsumexp", "dtype complex64"): 1,
    }


def test_torch_is_as_before():
    x = random((300, 5000), torch.bfloat16)
    before = torch.softmax(x, -1)
    accelerate()
    accelerate()
    torch.softmax(x, -1)
    assert accelerated().served == {"aten::_softmax": 1}
    restore()
    assert equal_bits(torch.softmax(x, -1), before) and accelerated().served == {"aten::_softmax": 1}


def test_graphs_autocast_compile_and_transforms():
    x = random((64, 1000), torch.bfloat16)
    with accelerate() as acceleration:
        torch.softmax(x, -1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = torch.softmax(x, -1)
        x.copy_(random(x.shape, x.dtype, seed=5))
        graph.replay()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            in_float32 = torch.softmax(x, -1)
        rows = torch.func.vmap(lambda t: torch.softmax(t, 0))(x)
        tangent = torch.func.jvp(lambda t: torch.softmax(t.float(), -1), (x,), (torch.ones_like(x),))[1]
        report = acceleration.report()
        compiled = torch.compile(lambda t: torch.softmax(t, -1))(x)
        assert acceleration.report() == report, "inductor has kernels of its own"
    assert report.served == {"aten::_softmax": 5} and not report.handed_on
    torch.cuda.synchronize()
    assert in_float32.dtype == torch.float32 and tangent.abs().max() < 1e-6
    for y in (captured, in_float32, rows, compiled):
        check_softmax(y, x)


def test_threads():
    inputs = [random((40, n), torch.bfloat16, seed=n) for n in (100, 1000, 20000)]
    with accelerate():
        expected = [torch.softmax(x, -1) for x in inputs]
    torch.cuda.synchronize()
    failures, start = [], threading.Barrier(6)

    def work():
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    with accelerate():
                        y = torch.softmax(inputs[i % 3], -1)
                    if i % 20 < 3:
                        assert equal_bits(y, expected[i % 3])
        except BaseException as error:
            failures.append(error)

    with accelerate() as whole:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert whole.report().served == {"aten::_softmax": 360}


def seconds(call, times: int) -> float:
    """Of a call, the median of five runs."""
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - start) / times)
    return sorted(runs)[2]


@pytest.mark.timed
@pytest.mark.parametrize("way", step.WAYS[1:])
def test_a_model_with_eager_attention(capsys, way):
    """Every softmax of an unmodified model is ours; its loss stays, and a step takes less time."""
    config = eager_model.Config()
    given = eager_model.made(config, "cuda", torch.bfloat16)
    loss, gradients = eager_model.step(*given)
    gradients = {name: g.clone() for name, g in gradients.items()}
    block = step.ways_of(given[0])[way]
    with block():
        ours, of_ours = eager_model.step(*given)
        report = accelerated()
    of_loss = {"aten::_log_softmax": 1, "aten::_log_softmax_backward_data": 1} if way == "accelerated" else {}
    assert report.handed_on == {} and report.served == of_loss | {
        "aten::_softmax": config.layers,
        "aten::_softmax_backward_data": config.layers,
    }
    assert abs(ours - loss) <= 1e-4 * loss
    for name, g in gradients.items():
        assert (of_ours[name].double() - g.double()).norm() <= 2e-2 * g.double().norm(), name
    plain = seconds(lambda: eager_model.step(*given), 3)
    with block():
        fast = seconds(lambda: eager_model.step(*given), 3)
    with capsys.disabled():
        print(f"\n{config}\nloss {loss:.6f}, {way} {ours:.6f}\n{report}")
        print(f"a step: {plain * 1e3:.2f} ms, {way} {fast * 1e3:.2f} ms, gain {plain / fast:.3f}")
    assert fast < plain


@pytest.mark.timed
def test_host_time(capsys):
    """What a call through torch's dispatcher costs the host."""
    x = random((64, 64), torch.bfloat16)
    plain = seconds(lambda: torch.softmax(x, -1), 2000)
    with accelerate():
        ours = seconds(lambda: torch.softmax(x, -1), 2000)
    with capsys.disabled():
        print(f"\ntorch.softmax of 64 x 64: {plain * 1e6:.2f} us a call, accelerated {ours * 1e6:.2f} us")
    assert ours < plain + 50e-6
