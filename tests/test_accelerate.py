"""`accelerate` on the CPU: registered for the CPU key, with simulated launches."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from checking import example
from remembered import forget_forms

from benchmarks import eager_model, step
from cute_softmax import accelerate, accelerated, restore
from cute_softmax.acceleration import operators, originals
from cute_softmax.runtime import launch

routing = sys.modules["cute_softmax.acceleration.switch"]
OVERLOADS = [
    f"aten::{o.name}{end}" for o in operators.OPERATORS for end in ("", ".out") if end == "" or o.has_out
]


def tables():
    """All that torch's dispatcher has for the operators."""
    return [torch._C._dispatch_dump(name) for name in OVERLOADS]


reachable = pytest.mark.skipif(
    not originals.REACHABLE,
    reason="this torch does not hand out kernels: outputs of the caller's stay with ATen",
)


@pytest.fixture(autouse=True)
def restored():
    before = tables()
    yield
    restore()
    assert tables() == before


def forget():
    operators._has_kernels.cache_clear()
    forget_forms()


@pytest.fixture
def kernels(monkeypatch, launches):
    """What is launched; CPU tensors count as CUDA ones, see `simulated`."""
    monkeypatch.setattr(routing, "KEY", "CPU")
    forget()
    yield launches
    forget()


def same(ours, torchs):
    assert (ours.shape, ours.dtype, ours.stride()) == (torchs.shape, torchs.dtype, torchs.stride())
    unit = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, torchs, rtol=2 * unit, atol=2 * unit)


FUNCTIONS = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "safe softmax": lambda x: torch._safe_softmax(x, -1),
    "softmax of columns": lambda x: torch.nn.functional.softmax(x, dim=0),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "logsumexp of all": lambda x: torch.logsumexp(x, tuple(range(x.dim())), True),
    "attention": lambda x: torch.nn.functional.softmax(x, -1, dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_are_torchs(kernels, name, dtype):
    function, (wide, cube) = FUNCTIONS[name], (example((6, 40), dtype), example((3, 4, 5), dtype))
    turned = wide.t(), cube.transpose(0, 1), wide[:1].expand(6, 40)
    for x in (wide, wide[:, 3:20], wide[1:2, 3:20], cube, cube[1], *turned):
        results = []
        for block in (False, True):
            leaf = x.detach().requires_grad_()
            if block:
                with accelerate() as acceleration:
                    y = function(leaf)
                    (dx,) = torch.autograd.grad(y, leaf, example(y.shape, y.dtype, 1))
                assert acceleration.report().served and not acceleration.report().handed_on
            else:
                y = function(leaf)
                (dx,) = torch.autograd.grad(y, leaf, example(y.shape, y.dtype, 1))
            results.append((y.detach(), dx))
        for ours, torchs in zip(results[1], results[0], strict=True):
            same(ours, torchs)
    assert kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_safe_softmax_of_nothing_is_zero(kernels, dtype):
    x = example((4, 9), dtype)
    x[1], x[2, 3:] = -torch.inf, -torch.inf
    plain, in_float32 = torch._safe_softmax(x, -1), torch._safe_softmax(x, -1, torch.float32)
    with accelerate() as acceleration:
        same(torch._safe_softmax(x, -1), plain)
        same(torch._safe_softmax(x, -1, torch.float32), in_float32)
        assert torch.softmax(x, -1)[1].isnan().all()
        cube = x[None, None].expand(1, 2, 4, 9)
        q, bias = torch.zeros(1, 2, 4, 8, dtype=dtype), cube.contiguous()
        v = example((1, 2, 9, 8), dtype)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = torch.nn.functional.scaled_dot_product_attention(q, torch.zeros_like(v), v, attn_mask=bias)
    assert not y[:, :, 1].any() and y.isfinite().all()
    assert acceleration.report().served == {"aten::_safe_softmax": 3, "aten::_softmax": 1}


def test_cross_entropy(kernels):
    x, target = example((8, 50)), torch.arange(8)
    for reduction in ("mean", "none"):
        leaf = x.clone().requires_grad_()
        plain = torch.nn.functional.cross_entropy(leaf, target, reduction=reduction)
        (dx,) = torch.autograd.grad(plain.sum(), leaf)
        with accelerate() as acceleration:
            loss = torch.nn.functional.cross_entropy(leaf, target, reduction=reduction)
            same(loss, plain)
            same(torch.autograd.grad(loss.sum(), leaf)[0], dx)
        assert [*acceleration.report().served] == ["aten::_log_softmax", "aten::_log_softmax_backward_data"]


def losses_of(function, **options):
    """The loss and the gradient of a call."""
    x = example((6, 40), seed=1).requires_grad_()
    loss = function(x, torch.randint(40, (6,), generator=torch.Generator().manual_seed(1)), **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 3, "weight": torch.linspace(0, 1, 40)},
    ],
    ids=", ".join,
)
def test_our_cross_entropy_in_the_place_of_torchs(kernels, options):
    """By torch's name and by its module, only where it is asked for, and no longer than that."""
    functional = torch.nn.functional
    original, expected = functional.cross_entropy, losses_of(functional.cross_entropy, **options)
    with accelerate() as outer:
        assert functional.cross_entropy is original
        with accelerate(cross_entropy=True) as inner:
            kernels.clear()
            for function in (
                functional.cross_entropy,
                lambda x, y, **o: torch.nn.CrossEntropyLoss(**o)(x, y),
            ):
                found = losses_of(function, **options)
                assert all(torch.allclose(f, e, atol=1e-6) for f, e in zip(found, expected, strict=True))
            share = [] if {"reduction", "weight"} & {*options} else ["share"]
            assert [launch.math for launch in kernels] == [*share, "softmax", "total", "rescale"] * 2
        assert functional.cross_entropy is original and functional.cross_entropy.__name__ == "cross_entropy"
    assert inner.report().served == {"torch.nn.functional.cross_entropy": 2} == outer.report().served


def test_what_is_not_ours_of_cross_entropies(kernels):
    """Goes on to torch's, with its errors, and is counted with a reason."""
    x, target = example((6, 40)), torch.zeros(6, dtype=torch.long)
    calls = {
        "torch.float64 on cpu": lambda f: f(x.double(), target),
        "class probabilities, or label smoothing with a weight": lambda f: f(
            x, target, torch.ones(40), label_smoothing=0.1
        ),
        "classes that do not lie in the last dimension": lambda f: f(
            x.view(6, 8, 5), target[:, None].expand(6, 5)
        ),
        "size_average or reduce, which torch has deprecated": lambda f: f(x, target, reduce=False),
        "arguments that torch refuses, or nothing to do": lambda f: f(x[:0], target[:0]),
        "a subclass of tensors": lambda f: f(torch.nn.Buffer(x).as_subclass(Plain), target),
    }
    torchs = torch.nn.functional.cross_entropy
    with accelerate(cross_entropy=True) as acceleration:
        for call in calls.values():
            ours = call(torch.nn.functional.cross_entropy)
            assert torch.allclose(ours, call(torchs), equal_nan=True)
        with pytest.raises(ValueError, match="Expected input batch_size"):
            torch.nn.functional.cross_entropy(x, target[:3])
        compiled = torch.compile(torch.nn.functional.cross_entropy, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x, target), torchs(x, target))
    reasons = {why for name, why in acceleration.report().handed_on if name.endswith("cross_entropy")}
    assert reasons == set(calls)


class Plain(torch.Tensor):
    """A subclass that does nothing."""


def test_restore_ends_losses_too(kernels):
    original = torch.nn.functional.cross_entropy
    accelerate(cross_entropy=True)
    accelerate()
    assert torch.nn.functional.cross_entropy is not original
    restore()
    assert torch.nn.functional.cross_entropy is original


@pytest.mark.parametrize("way", step.WAYS[1:])
def test_a_model_with_eager_attention(kernels, way):
    """Unmodified, forward and backward: every softmax of it is ours, and loss and gradients stay."""
    for dtype, unit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        given = eager_model.made(eager_model.SMALL, "cpu", dtype)
        loss, gradients = eager_model.step(*given)
        gradients = {name: g.clone() for name, g in gradients.items()}
        before = len(kernels)
        with step.ways_of(given[0])[way]():
            ours, of_ours = eager_model.step(*given)
            report = accelerated()
        assert abs(ours - loss) <= unit * loss
        for name, g in gradients.items():
            assert (of_ours[name] - g).norm() <= 10 * unit * g.norm(), name
        assert not report.handed_on
        attention = {
            "aten::_softmax": eager_model.SMALL.layers,
            "aten::_softmax_backward_data": eager_model.SMALL.layers,
        }
        loss_calls = {"aten::_log_softmax": 1, "aten::_log_softmax_backward_data": 1}
        words = (eager_model.SMALL.vocabulary,)
        rows = {n.dtypes[0] for n in kernels[before:] if getattr(n, "shape", ())[-1:] == words}
        if way == "accelerated":
            assert report.served == loss_calls | attention and rows == {torch.float32}
        else:
            assert report.served == attention and rows == {dtype}, "the logits as they are"


def test_expanded_gradients_and_transposed_inputs_are_laid_out_first(kernels):
    x = example((8, 64)).requires_grad_()
    with accelerate():
        torch.softmax(x, -1).sum().backward()
        torch.softmax(x.detach().t(), 0)
        torch.softmax(x.detach()[:, :50], -1)
    forward, backward, transposed, sliced = ([*n.strides[:-1]] for n in kernels)
    assert forward == [(64, 1)] and backward == [(64, 1), (64, 1)]
    assert transposed == [(8, 1)] and sliced == [(64, 1)], "rows of another stride are not copied"


def test_what_is_not_served_goes_on_and_is_counted(kernels):
    x = example((4, 33))
    calls = [
        (lambda: torch.softmax(x.double(), -1), "aten::_softmax", "dtype float64"),
        (lambda: torch._safe_softmax(x, -1, torch.float64), "aten::_safe_softmax", "dtype float64"),
        (lambda: torch.log_softmax(x.double(), -1), "aten::_log_softmax", "dtype float64"),
        (lambda: torch.logsumexp(x.to(torch.complex64), 0), "aten::logsumexp", "dtype complex64"),
        (lambda: torch.logsumexp(torch.arange(4), 0), "aten::logsumexp", "dtype int64"),
        (lambda: torch.logsumexp(torch.empty(3, 0), 1), "aten::logsumexp", "an empty tensor"),
        (lambda: torch._softmax(x, 0, True), "aten::_softmax", "half_to_float of float32"),
        (lambda: torch.softmax(x, 2), "aten::_softmax", "a dim out of range, repeated or empty"),
        (lambda: torch.logsumexp(x, (0, 0)), "aten::logsumexp", "a dim out of range, repeated or empty"),
        (lambda: torch._softmax_backward_data(x, x[:3], 0, x.dtype), "aten::_softmax_backward_data",
         "arguments that do not fit each other"),
        (lambda: torch._softmax_backward_data(x, x, 0, torch.float64), "aten::_softmax_backward_data",
         "a gradient of dtypes that ATen does not give"),
    ]  # fmt: skip

    def outcome(call):
        try:
            return call()
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error), str(error)

    for call, operator, why in calls:
        plain = outcome(call)
        with accelerate() as acceleration:
            found = outcome(call)
        if isinstance(plain, tuple):
            assert found == plain
        else:
            same(found, plain)
        assert acceleration.report().handed_on == ({(operator, why): 1} if operator else {})
    assert all("softmax" in n.math for n in kernels)


def test_an_original_that_calls_operators_counts_once(kernels):
    with accelerate() as acceleration:
        torch.logsumexp(torch.arange(12).view(3, 4), 0)  # ATen's calls logsumexp.out with floats
    assert acceleration.report() == routing.Report(
        active=False, ended=True, served={}, handed_on={("aten::logsumexp", "dtype int64"): 1}
    )


@reachable
def test_out(kernels):
    x, wide = example((5, 40)), torch.zeros(5, 80)
    expected = torch.softmax(x, -1)
    with accelerate() as acceleration:
        for out in (torch.empty(5, 40), wide[:, ::2], torch.empty(40, 5).t()):
            assert torch.softmax(x, -1, out=out) is out and torch.allclose(out, expected)
        assert not wide[:, 1::2].any()
        assert torch.equal(torch.logsumexp(x, 0, out=torch.empty(40)), torch.logsumexp(x, 0))
        in_place = x.clone()
        assert torch.softmax(in_place, -1, out=in_place) is in_place and torch.allclose(in_place, expected)
        served = acceleration.report().served
        memory = torch.zeros(6, 40)
        memory[:5] = x
        torch.softmax(memory[:5], -1, out=memory[1:])
        torch.softmax(x, -1, out=torch.empty(0))
    assert served == {"aten::_softmax.out": 4, "aten::logsumexp": 1, "aten::logsumexp.out": 1}
    whys = "out overlaps an input", "out of another shape or dtype"
    assert acceleration.report().handed_on == {("aten::_softmax.out", why): 1 for why in whys}


def test_plans_and_devices_that_there_are_not(kernels, monkeypatch):
    x = example((4, 6)).t()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_call", lambda *form: "too many dimensions")
        with accelerate() as acceleration:
            assert torch.softmax(x, 0).shape == x.shape
        assert acceleration.report().handed_on == {("aten::_softmax", "no plan"): 1}
    forget()

    def unknown(index):
        raise ValueError("no kernels for compute capability 7.5")

    monkeypatch.setattr(launch, "device_facts", unknown)
    with accelerate() as acceleration:
        torch.softmax(x, 0)
    assert acceleration.report().handed_on == {("aten::_softmax", "no kernels for this GPU"): 1}


def test_no_tensor_is_kept(kernels):
    tensors = [example((4, 6)), example((6, 4)).t(), example((3, 4, 5))]
    with accelerate():
        for x in tensors:
            leaf = x.requires_grad_()
            torch.autograd.grad(torch.softmax(leaf, 0), leaf, torch.ones_like(leaf))
            torch.logsumexp(leaf, 0)
    found = [weakref.ref(x) for x in tensors]
    del tensors, x, leaf
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_failures_of_a_launch_are_not_hidden(kernels, monkeypatch):
    def broken(*arguments):
        raise ValueError("CUDA says no")

    monkeypatch.setattr(kernels, "launched", broken, raising=False)
    with accelerate(), pytest.raises(RuntimeError, match=r"launching softmax \(.*\) failed: CUDA says no"):
        torch.softmax(example((3, 4)), 0)


def test_transforms_and_second_derivatives(kernels):
    x, v = example((4, 9)), example((4, 9), seed=1)

    def value(t):
        return (torch.softmax(t, -1) * v[0]).sum()

    jobs = [
        lambda: torch.func.vmap(lambda t: torch.softmax(t, 0))(x),
        lambda: torch.func.vmap(lambda t: torch.logsumexp(t, 0), in_dims=1)(x),
        lambda: torch.func.grad(value)(x),
        lambda: torch.func.jvp(lambda t: torch.softmax(t, -1), (x,), (v,))[1],
        lambda: torch.func.jacrev(lambda t: torch.softmax(t, -1))(x),
        lambda: torch.func.hessian(value)(x[:2]),
    ]
    for job in jobs:
        plain = job()
        with accelerate() as acceleration:
            torch.testing.assert_close(job(), plain)
        assert acceleration.report().served
    with accelerate():
        leaf = x.double().requires_grad_()
        assert torch.autograd.gradgradcheck(lambda t: torch.softmax(t, -1), leaf)


def test_state():
    """Blocks nest, calls repeat, `restore` ends all, whatever is open."""
    plain = tables()
    names = {*plain}

    def active():
        assert accelerated().active == (tables() != plain)
        return accelerated().active

    with accelerate() as outer:
        assert active() and outer.report().active
        with accelerate(), outer:
            assert active()
        assert active()
    assert not active() and not outer.report().active
    accelerate()
    accelerate()
    with accelerate():
        pass
    assert active(), "a block ends only what it began"
    restore()
    assert not active()
    restore()
    with accelerate():
        restore()
        assert not active()
        with accelerate():
            assert active()
        assert not active()
    assert not active()
    with pytest.raises(KeyError), accelerate():
        raise KeyError
    assert not active() and {*tables()} == names


def test_a_registration_that_fails_leaves_torch_as_it_was(monkeypatch):
    plain, done = tables(), []
    impl = torch.library.Library.impl

    def failing(self, name, *arguments, **options):
        done.append(name)
        if len(done) == 2:
            raise RuntimeError("no more")
        return impl(self, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "impl", failing)
        with pytest.raises(RuntimeError, match="no more"):
            accelerate()
    assert tables() == plain and not accelerated().active
    with accelerate():
        assert accelerated().active
    assert tables() == plain and not accelerated().active


def test_threads(kernels):
    """Blocks that overlap in many threads: all calls are served and counted, and the last one restores."""
    x, failures, start = example((4, 16)), [], threading.Barrier(8)
    expected, plain = torch.softmax(x, -1), tables()

    def work():
        try:
            start.wait()
            with accelerate():
                for _ in range(50):
                    with accelerate():
                        assert torch.allclose(torch.softmax(x, -1), expected)
        except BaseException as error:
            failures.append(error)

    with accelerate() as whole:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert whole.report().served == {"aten::_softmax": 400}
    assert tables() == plain


def test_report(kernels):
    x = example((4, 16))
    with accelerate():
        torch.softmax(x, -1)
        with accelerate() as inner:
            torch.softmax(x.double(), -1)
            torch.softmax(x, -1)
        assert inner.report().served == {"aten::_softmax": 1}
        assert accelerated().served == {"aten::_softmax": 2}
    assert str(accelerated()).splitlines() == [
        "cute_softmax.accelerate was active: 2 calls served, 1 handed on",
        "  aten::_softmax: 2 served",
        "  aten::_softmax: 1 handed on: dtype float64",
    ]
    with accelerate():
        assert not accelerated().served, "a new acceleration counts anew"


def test_old_torch(kernels, monkeypatch):
    """Without `torch.library.get_kernel`, originals are reached through their overloads with an output."""
    monkeypatch.setattr(originals, "REACHABLE", False)
    x = example((4, 6), torch.float64).requires_grad_()
    jobs = [
        lambda: torch.softmax(x, -1),
        lambda: torch.log_softmax(x, 0),
        lambda: torch.logsumexp(x, (0, 1)),
        lambda: torch.logsumexp(x, 0, True),
        lambda: torch._safe_softmax(x, -1),
        lambda: torch.logsumexp(torch.arange(4), 0),
        lambda: torch.autograd.grad(torch.softmax(x, -1), x, x)[0],
        lambda: torch.autograd.grad(torch.log_softmax(x, -1), x, x)[0],
        lambda: torch.softmax(x.detach(), -1, out=torch.empty(0, dtype=x.dtype)),
    ]
    for job in jobs:
        plain = job()
        with accelerate() as acceleration:
            same(job(), plain)
        assert not acceleration.report().served
    assert not kernels
    with accelerate():
        same(torch.softmax(x.float(), -1), torch.softmax(x, -1).float())
    assert kernels


def test_neither_import_nor_acceleration_loads_a_compiler():
    """torch._dynamo alone takes a second."""
    code = (
        "import sys, torch, cute_softmax as c\n"
        "for name in c.__all__: getattr(c, name)\n"
        "with c.accelerate(): torch.softmax(torch.ones(2, 3), -1)\n"
        "c.cross_entropy(torch.ones(2, 3, requires_grad=True), torch.ones(2, dtype=torch.long)).backward()\n"
        "sys.exit(', '.join({'cutlass', 'torch._dynamo'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_reports_say_when_they_are_of():
    code = (
        "import torch, cute_softmax as c\n"
        "first = lambda report: print(str(report).split(':')[0])\n"
        "first(c.accelerated())\n"
        "with c.accelerate() as one: first(one.report())\n"
        "first(one.report()); first(c.accelerated())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = [line.removeprefix("cute_softmax.accelerate ") for line in done.stdout.splitlines()]
    assert said == ["is not active", "is active", "was active", "was active"], done.stderr


def masks():
    """(scores, mask, its type in ATen): True does not count."""
    scores, keys = example((2, 3, 8, 8)), torch.zeros(2, 8, dtype=torch.bool)
    keys[0, 5:] = keys[1, :2] = True
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    same = example((2, 3, 8, 8), seed=2) > 0.5
    same[0, 0, 0] = True  # a row in which nothing counts
    return {
        "keys": (scores, keys, 1),
        "queries and keys": (scores, future, 0),
        "scores": (scores, same, 2),
        "of queries, whole": (scores, same, 0),
        "matrix": (scores[0, 0], same[0, 1], 2),
        "a transposed mask": (scores[0, 0], same[0, 1].t(), 2),
    }


@reachable
@pytest.mark.parametrize("name", masks())
def test_masked_softmax_is_atens(kernels, name):
    scores, mask, kind = masks()[name]
    plain = torch._masked_softmax(scores, mask.contiguous(), scores.dim() - 1, kind)
    with accelerate() as acceleration:
        leaf = scores.detach().requires_grad_()
        y = torch._masked_softmax(leaf, mask, scores.dim() - 1, kind)
        again = torch._masked_softmax(scores + 1, ~mask, scores.dim() - 1, kind)
    assert acceleration.report().served == {"aten::_masked_softmax": 2} and len(kernels) == 2
    torch.testing.assert_close(y, plain, rtol=1e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(
        again,
        torch._masked_softmax(scores, ~mask.contiguous(), scores.dim() - 1, kind),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )
    assert y.is_contiguous() and y.requires_grad


@reachable
def test_masked_softmax_that_is_not_ours(kernels):
    scores, mask, _ = masks()["scores"]
    jobs = [
        (lambda: torch._masked_softmax(scores.double(), mask, 3, 2), "dtype float64"),
        (lambda: torch._masked_softmax(scores.mT, mask, 3, 2), "scores with strides of their own"),
        (lambda: torch._masked_softmax(scores, mask[0], 3, 2), "a mask that ATen refuses"),
        (lambda: torch._masked_softmax(scores, mask.float(), 3, 2), "a mask that ATen refuses"),
        (lambda: torch._masked_softmax(scores, mask, 3, 7), "a mask that ATen refuses"),
    ]
    for job, why in jobs:
        try:
            plain = job()
        except RuntimeError as error:
            plain = str(error)
        with accelerate() as acceleration:
            if isinstance(plain, str):
                with pytest.raises(RuntimeError) as raised:
                    job()
                assert str(raised.value) == plain
            else:
                torch.testing.assert_close(job(), plain, equal_nan=True)
        assert acceleration.report().handed_on == {("aten::_masked_softmax", why): 1}
    assert not kernels
    plain = torch._masked_softmax(scores, mask, 1, 2)
    with accelerate():  # over any dimension
        torch.testing.assert_close(torch._masked_softmax(scores, mask, 1, 2), plain, equal_nan=True)
    assert len(kernels) == 1


@reachable
def test_a_transformer_s_layer_runs_its_masked_softmax_here(kernels):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, padding = example((2, 8, 16)), torch.zeros(2, 8, dtype=torch.bool)
    padding[0, 5:] = True
    with torch.inference_mode():
        plain = layer(x, src_key_padding_mask=padding)
        with accelerate() as acceleration:
            y = layer(x, src_key_padding_mask=padding)
    assert "aten::_masked_softmax" in acceleration.report().served
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)


def test_logsumexp_over_more_dimensions_than_torch_takes(kernels):
    x = example((2, 3)).view([1] * 63 + [2, 3])
    with pytest.raises(RuntimeError) as plain:
        torch.logsumexp(x, -1)
    with accelerate() as acceleration, pytest.raises(RuntimeError) as ours:
        torch.logsumexp(x, -1)
    assert str(ours.value) == str(plain.value) and not kernels
    assert not acceleration.report().served


def test_a_tally_is_not_changed_by_those_who_read_it():
    tally = routing._Tally()
    assert [tally.read(), tally.read()] == [0, 0]
    threads = [threading.Thread(target=lambda: [tally.add() for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tally.read(), tally.read()] == [4000, 4000]
    tally.add()
    assert tally.read() == 4001
