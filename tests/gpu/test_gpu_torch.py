"""Inside torch on the device: compile, operators, graphs, streams, autocast, devices, threads."""

import threading
from dataclasses import replace

import classes
import pytest
import torch
from checking import DTYPES, Guarded, check_backward, check_softmax, equal_bits, random
from remembered import fresh_forms

from cute_softmax import explain, plan_softmax, softmax, softmax_backward
from cute_softmax.runtime import launch
from cute_softmax.runtime.cache import Store

dtypes = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [(7, 33), (17, 1000), (5, 50257)]


@pytest.fixture
def builds(monkeypatch):
    """Classes that are compiled while the test runs."""
    seen = []
    build = launch._build
    monkeypatch.setattr(launch, "_build", lambda row_class: seen.append(row_class) or build(row_class))
    return seen


def forget(monkeypatch, root=None):
    """As in a new process, with the store in the folder `root` if one is given."""
    if root is not None:
        monkeypatch.setattr(launch, "_store", Store(root))
    monkeypatch.setattr(launch, "_functions", {})
    fresh_forms(monkeypatch)
    launch._call.cache_clear()


def test_a_new_shape_in_a_class_compiles_nothing(monkeypatch, tmp_path, builds, arch):
    forget(monkeypatch, tmp_path / "store")
    (class_,) = [i for i in classes.intervals("softmax", arch, ("bf16",) * 2) if i.first <= 5000 <= i.last]
    first, last = -(-class_.first // 8) * 8, class_.last
    softmax(random((4, 5000), torch.bfloat16))
    assert builds == [class_.row_class], "an empty store builds one class for one call"
    for rows, columns in ((1, 5000), (1000, first), (33, last), (70000, (first + last) // 16 * 8)):
        softmax(random((rows, columns), torch.bfloat16))
    assert len(builds) == 1, [b.name for b in builds]
    for columns in (4999, 5001, last - 1):  # with edges: one more class
        softmax(random((4, columns), torch.bfloat16))
    assert len(builds) == 2, [b.name for b in builds]
    softmax(random((4, 5000), torch.float16))
    assert len(builds) == 3
    forget(monkeypatch, tmp_path / "store")
    softmax(random((3, last), torch.bfloat16))
    assert len(builds) == 3, "the store was not used"


@dtypes
def test_only_the_result_is_saved(dtype):
    x = random((4096, 1000), DTYPES[dtype]).requires_grad_()
    softmax(x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = softmax(x)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
    torch.cuda.synchronize()
    # What is asked for: a block that is taken from the cache may be larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    z = softmax(x)
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    assert after - before <= z.numel() * z.element_size() + 4096
    with torch.no_grad():
        assert not softmax(x).requires_grad


@dtypes
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_compile_fullgraph(dtype, dynamic):
    torch._dynamo.reset()

    def forward(x):
        return softmax(x * 2, -1) + 0

    compiled = torch.compile(forward, fullgraph=True, dynamic=dynamic)
    for shape in (*SHAPES, (3, 20, 1000)):
        x = random(shape, DTYPES[dtype]).requires_grad_()
        dy = random(shape, DTYPES[dtype], seed=1)
        y = compiled(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        eager = softmax(x * 2, -1)
        assert equal_bits(y.detach(), eager.detach())
        (expected,) = torch.autograd.grad(eager, x, dy)
        assert equal_bits(dx, expected)


@dtypes
def test_compile_of_views_dtypes_and_out(dtype):
    torch._dynamo.reset()
    wide = random((9, 1010), DTYPES[dtype])
    cases = [
        (lambda x: softmax(x[:, 1:1001], -1), wide),
        (lambda x: softmax(x.t(), 0), wide),
        (lambda x: softmax(x, -1, torch.float32), wide),
        (lambda x: softmax(x.view(3, 3, 1010), (1, 2)), wide),
        (lambda x: softmax(x, -1, out=torch.empty_like(x)), wide),
        (lambda x: softmax_backward(x, x), wide),
    ]
    for function, x in cases:
        compiled = torch.compile(function, fullgraph=True)(x)
        eager = function(x)
        assert compiled.stride() == eager.stride() and equal_bits(compiled, eager)


@dtypes
def test_opcheck(dtype):
    for shape, dims in (((4, 33), [1]), ((3, 5, 64), [2]), ((2, 3, 40), [1, 2])):
        x = random(shape, DTYPES[dtype])
        for result in {DTYPES[dtype], torch.float32}:
            for leaf in (x, x.clone().requires_grad_()):
                torch.library.opcheck(torch.ops.cute_softmax.softmax.default, (leaf, dims, result, True))
        y = torch.softmax(x, -1)
        torch.library.opcheck(
            torch.ops.cute_softmax.softmax_backward.default, (x, y, [len(shape) - 1], y.dtype)
        )
    x = random((5, 64), DTYPES[dtype])
    for view, dim in ((x.t(), 0), (x[:, 1:50], 1), (x.expand(3, 5, 64), 2)):
        torch.library.opcheck(torch.ops.cute_softmax.softmax.default, (view, [dim], x.dtype, True))


@dtypes
@pytest.mark.parametrize("shape", [*SHAPES, (9, 262144), (60, 500000)])
def test_cuda_graph(shape, dtype):
    x, dy = (random(shape, DTYPES[dtype], seed=s) for s in range(2))
    out = Guarded(shape, x.dtype)
    softmax_backward(dy, softmax(x, out=out.tensor))  # the first call loads a kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
        dx = softmax_backward(dy, y)
        softmax(x, out=out.tensor)
    for seed in (5, 6):
        x.copy_(random(shape, x.dtype, seed=seed, scale=3.0))
        graph.replay()
        torch.cuda.synchronize()
        check_softmax(y, x)
        check_backward(dx, dy, y)
        out.check()
        assert equal_bits(y, out.tensor)


def test_first_call_inside_a_capture(monkeypatch):
    """A process whose first call of a class is captured: loading a module must not break the capture."""
    x = random((6, 776), torch.float16)
    forget(monkeypatch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    x.copy_(random(x.shape, x.dtype, seed=3))
    graph.replay()
    torch.cuda.synchronize()
    check_softmax(y, x)


def test_graph_of_autograd():
    x = random((64, 1000), torch.bfloat16).requires_grad_()
    dy = random((64, 1000), torch.bfloat16, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(softmax(x), x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    with torch.no_grad():
        x.copy_(random(x.shape, x.dtype, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    check_softmax(y.detach(), x.detach())
    check_backward(dx, dy, y.detach())


@pytest.mark.parametrize("shape", [(100, 1000), (40, 100000), (30, 500000)])
def test_side_streams(shape):
    """Work runs on the caller's stream: after a long producer there, before a consumer there."""
    stream = torch.cuda.Stream()
    source = random(shape, torch.bfloat16, seed=1)
    x = torch.zeros_like(source)
    expected = softmax(source)
    softmax(x)
    busy = random((4096, 4096), torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(stream):
            x.zero_()
            for _ in range(20):
                busy = (busy @ busy).clamp_(-1, 1)
            x.copy_(source)
            y = softmax(x)
            dx = softmax_backward(x, y)
            copy, x[:] = y.clone(), 7
        stream.synchronize()
        assert equal_bits(copy, expected), "the kernel did not wait for its stream"
        check_backward(dx, source, expected)


def test_two_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [random((200, n), torch.bfloat16, seed=n) for n in (1000, 20000, 100000, 400000)]
    expected = [softmax(x) for x in inputs]
    torch.cuda.synchronize()
    results = [[] for _ in inputs]
    for _ in range(5):
        for stream, x, found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(softmax(x))
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        assert all(equal_bits(y, right) for y in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    x = random((9, 1000), dtype)
    softmax(x)
    for enabled in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=enabled):
            for tensor in (x, x.float(), x.double()):
                y, torchs = softmax(tensor), torch.softmax(tensor, -1)
                assert y.dtype == torchs.dtype
                check_softmax(y, tensor)
            assert softmax(x, dtype=dtype).dtype == torch.softmax(x, -1, dtype=dtype).dtype
            leaf = x.clone().requires_grad_()
            dy = random((9, 1000), torch.float32)
            y = softmax(leaf)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            assert dx.dtype == dtype
            check_backward(dx, dy, y.detach())
            compiled = torch.compile(lambda t: softmax(t), fullgraph=True)(x)
            assert compiled.dtype == torch.float32
    with torch.autocast("cuda", enabled=False):
        assert softmax(x).dtype == dtype
    assert softmax(x).dtype == dtype


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: no other one than the current")
    for shape in ((17, 1000), (9, 100000)):
        x = random(shape, torch.bfloat16, device="cuda:1").requires_grad_()
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                y = softmax(x)
                (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
                assert y.device == dx.device == x.device and torch.cuda.current_device() == current
                torch.cuda.synchronize(1)
                check_softmax(y.detach(), x.detach())
        with pytest.raises(ValueError, match="out is on cuda:0, input on cuda:1"):
            softmax(x.detach(), out=torch.empty(shape, dtype=x.dtype, device="cuda:0"))


def test_many_threads(monkeypatch):
    """First calls and repeated ones, all at once, each thread with its own stream."""
    forget(monkeypatch)
    inputs = [random((40, n), torch.bfloat16, seed=n) for n in (100, 333, 1000, 5000, 20000, 70000)]
    torch.cuda.synchronize()
    failures, start = [], threading.Barrier(12)

    def work(seed: int):
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    x = inputs[(i + seed) % len(inputs)]
                    y = softmax(x)
                    if i % 10 == seed % 10:
                        check_softmax(y, x)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_subclasses_and_modes():
    """Dispatch modes and functorch see the operator, not a raw launch; a Parameter is a tensor like others."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names = []
    x = random((4, 64), torch.bfloat16)
    softmax(x)
    with Recorder():
        softmax(x)
    assert "cute_softmax.softmax.default" in names
    weight = torch.nn.Parameter(x.clone())
    y = softmax(weight)
    y.backward(torch.ones_like(y).contiguous())
    check_backward(weight.grad, torch.ones_like(y), y.detach())
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.vmap):
        expected = transform(lambda t: (torch.softmax(t, -1) * x[0]).sum())(x)
        found = transform(lambda t: (softmax(t, -1) * x[0]).sum())(x)
        assert torch.allclose(found, expected, rtol=0.05, atol=0.05)


def test_explain_tells_what_runs():
    x = random((40, 1009), torch.bfloat16)
    for tensor in (x, x[:, 1:1001], x[1:], x.t()):
        dim = tensor.stride().index(1)
        softmax(tensor, dim)
        ran = launch.call_of("softmax", (tensor, torch.empty_like(tensor)), (dim,)).plan
        assert plan_softmax(tensor, dim).row_class == ran.row_class
        assert f"class {ran.row_class.name}\n" in explain(tensor, dim)
    assert "ATen" in explain(x.double()) and "ATen" in explain(x.cpu())
    for dtype in ("fp32", torch.float32):
        assert "bf16 -> fp32" in explain(x, dtype=dtype)


def test_launch_errors_name_the_class():
    """What CUDA refuses (here: a grid of 0 CTAs) is a RuntimeError, and the next call works."""
    x = random((4, 72), torch.bfloat16)
    y = softmax(x)
    call = launch.call_of("softmax", (x, y), (1,))
    bad = launch.Call(replace(call.plan, ctas=0), call.function)
    assert bad.arguments != call.arguments
    with pytest.raises(RuntimeError, match=rf"launching softmax \({call.plan.row_class.name}\) failed"):
        bad(torch.cuda.current_stream().cuda_stream, x.data_ptr(), y.data_ptr())
    check_softmax(softmax(x), x)
