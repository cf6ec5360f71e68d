"""Calls that repeat: which form is looked at first, what they launch, and what autograd records of them. No GPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import cute_softmax as c
from cute_softmax import log_softmax, softmax, softmax_matmul
from cute_softmax.api import softmax as api
from cute_softmax.dispatch.common import forms
from cute_softmax.dispatch.common.forms import MOST_OF_A_SHAPE, Forms, Place, launching
from cute_softmax.dispatch.common.state import recorder
from cute_softmax.dispatch.matmul import forms as products
from cute_softmax.runtime import launch, private


def rows(count: int, columns: int, **options) -> torch.Tensor:
    return torch.randn(count, columns).to(torch.bfloat16).requires_grad_(**options)


def plain(count: int, columns: int) -> torch.Tensor:
    return rows(count, columns, requires_grad=False)


@pytest.fixture
def searches(monkeypatch, launches):
    """The inputs that were looked for among all forms."""
    found, find = [], Forms.find

    def counted(self, input, *call):
        found.append(input)
        return find(self, input, *call)

    monkeypatch.setattr(Forms, "find", counted)
    return found


def test_calls_that_repeat_in_their_order_are_expected(searches, launches):
    inputs = [plain(2, 8 * n) for n in range(1, 6)]
    for _ in range(2):  # the first time they are made, and the second time the first follows the last
        for x in inputs:
            softmax(x)
    searches.clear()
    for x in [*inputs, *inputs]:
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    assert not searches
    softmax(inputs[3])  # not in its turn
    softmax(inputs[0])
    assert [x.shape for x in searches] == [inputs[3].shape, inputs[0].shape]
    searches.clear()
    for i in (3, 0, 3, 0):
        softmax(inputs[i])
    assert len(searches) == 1  # the fourth follows the first, which was not known yet
    assert len(launches) == 26


def test_products_in_turn_are_expected(searches):
    calls = [(plain(4, n)[None], plain(n, 16)[None]) for n in (8, 16, 24)]
    for _ in range(2):
        for s, v in calls:
            softmax_matmul(s, v)
    searches.clear()
    for s, v in calls:
        softmax_matmul(s, v)
    assert not searches and len(products.known) == 3


X, INDEX = torch.randn(4, 6), torch.tensor([0, 3, 5, 1])
HALVES = torch.randn(2, 16, 16).half()
REPEATED = {
    "entropy": (lambda **more: c.entropy(X, **more), {"vocab_start": 1}, {"vocab_size": 6}),
    "selective_log_softmax": (
        lambda softcap=2.0, **more: c.selective_log_softmax(X, INDEX, softcap=softcap, **more),
        *({"vocab_size": 6}, {"softcap": torch.tensor(2.0)}, {"softcap": torch.ones(2)}),
    ),
    "cross_entropy": (
        lambda **more: c.cross_entropy(X, INDEX, **more),
        *({"scale": torch.ones(3)}, {"scale": True}, {"label_smoothing": torch.tensor(0.0)}),
    ),
    "kl_div": (lambda **more: c.kl_div(X, X, **more), {"scale": torch.ones(2)}),
    "topk_softmax": (lambda k=2: c.topk_softmax(X, k), {"k": torch.ones(2)}),
    "topk_log_softmax": (lambda k=2: c.topk_log_softmax(X, k), {"k": torch.ones(2)}),
    "softmax_matmul": (lambda **more: c.softmax_matmul(HALVES, HALVES, **more), {"scale": torch.ones(2)}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_a_first_call_refuses_later_ones_refuse(name, launches):
    call, *wrong = REPEATED[name]
    for _ in range(2):
        call()
    for arguments in wrong:
        with pytest.raises((TypeError, ValueError), match="|".join(arguments)):
            call(**arguments)


def test_forms_that_are_forgotten_keep_none_alive(launches):
    """A form expects what came after it: a program with ever new strides of one shape must not keep all it ever had."""
    softmax(plain(2, 8))  # whose follower is the first of the others
    made = []
    for pitch in range(64, 64 + 4 * MOST_OF_A_SHAPE):
        softmax(plain(3, pitch)[:, :32])
        made.append(weakref.ref(api._softmaxes.latest))
    gc.collect()
    alive = [form for form in made if form() is not None]
    assert len(api._softmaxes[torch.Size((3, 32))]) == MOST_OF_A_SHAPE
    assert len(alive) <= MOST_OF_A_SHAPE + 1


def test_forms_that_recorded_are_collected(launches):
    x = rows(3, 16)
    softmax(x).sum().backward()
    form = weakref.ref(api._softmaxes.latest)
    api._softmaxes.clear()
    gc.collect()
    assert form() is None


# -- Launchers ---------------------------------------------------------------------------------------------------------


def fake_call(order=None, numbers=(), scratch=0, laid_out=()):
    """A Call of three operands, with the strides 10, 20 and 30, and what its function was given."""
    kernel = SimpleNamespace(math="softmax", name="fake", prologue=SimpleNamespace(numbers=numbers))
    plan = SimpleNamespace(
        arguments=(1, 2),
        operand_strides=((10,), (20,), (30,)),
        laid_out=laid_out,
        scratch=scratch,
        kernel=kernel,
    )
    given = []
    return launch.Call(plan, lambda *arguments: given.append(arguments), order), given


@pytest.fixture
def cpu(monkeypatch, launches):
    """CPU tensors count as those of device -1, whose stream is 7."""
    return Place(torch.empty(1))


def made(call, place, results, offsets, *more):
    misses = []
    run = launching(call, place, lambda *given: misses.append(given), results, offsets, *more)
    return run, misses


def test_a_launcher_allocates_and_puts_addresses_in_their_places(cpu):
    call, given = fake_call(order=(0, 2, 1))
    run, misses = made(call, cpu, [((2, 3), (3, 1), torch.float32)], [0, 0])
    a, b = torch.empty(8), torch.empty(8)
    y = run(a, b)
    assert y.shape == (2, 3) and y.dtype is torch.float32 and not misses
    assert given == [(7, 1, 2, a.data_ptr(), 10, y.data_ptr(), 20, b.data_ptr(), 30)]


def test_a_launcher_allocates_with_tuples(cpu, monkeypatch):
    """As torch's allocator of CUDA tensors asks for, which takes no torch.Size."""
    asked = []
    monkeypatch.setattr(
        forms, "empty_strided", lambda *asks: asked.append(asks) or torch.empty_strided(*asks[:2])
    )
    call, _ = fake_call()
    run, _ = made(call, cpu, [(torch.Size((2, 3)), [3, 1], torch.float32)], [0, 0])
    run(torch.empty(8), torch.empty(8))
    assert asked == [((2, 3), (3, 1), torch.float32)] and {type(t) for t in asked[0][:2]} == {tuple}


def test_a_launcher_of_several_results_hides_the_last(cpu):
    call, given = fake_call()
    dense = (4,), (1,), torch.float32
    run, _ = made(call, cpu, [dense, dense, dense], [0], ["a0", "b0 + 4", "b1"], 1)
    a = torch.empty(4)
    found = run(a)
    assert [t.shape for t in found] == [(4,), (4,)]
    (arguments,) = given
    assert arguments[3::2] == (a.data_ptr(), found[0].data_ptr() + 4, found[1].data_ptr())


@pytest.mark.parametrize("offset, begins", [(0, 0), (4, 1), (12, 3)])
def test_a_launcher_takes_tensors_that_begin_as_the_first_did(cpu, offset, begins):
    call, given = fake_call()
    run, misses = made(call, cpu, [((4,), (1,), torch.float32)], [offset, None])
    base = torch.empty(16)
    for i in range(4):
        run(base[i:], base[1:])
        assert len(given) == (i >= begins) and len(misses) == i + (i < begins)
    assert all(found[1].data_ptr() == base[1:].data_ptr() for found in misses)


def test_a_launcher_leaves_plans_that_copy_to_the_general_way(cpu):
    call, given = fake_call(laid_out=(0,))
    run, misses = made(call, cpu, [((4,), (1,), torch.float32)], [0, 0])
    run(torch.empty(4), torch.empty(4))
    assert not given and len(misses) == 1


def test_a_launcher_leaves_other_devices_alone(cpu, monkeypatch):
    call, given = fake_call()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for current, launched in ((-1, True), (0, False)):
        monkeypatch.setattr(private, "current_device", lambda current=current: current)
        run, misses = made(call, Place(torch.empty(1)), [((4,), (1,), torch.float32)], [0, 0])
        given.clear()
        run(torch.empty(4), torch.empty(4))
        assert (len(given) == 1) is launched and bool(misses) is not launched


def test_a_launcher_gives_numbers_and_scratch_memory(cpu, monkeypatch):
    call, given = fake_call(numbers=("scale", "offset"), scratch=64)
    scratch = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(launch.Call, "allocated", lambda self: scratch)
    run, misses = made(call, cpu, [((4,), (1,), torch.float32)], [0, 0])
    a, b = torch.empty(4), torch.empty(4)
    y = run(a, b, 0.5, -3)
    addresses = a.data_ptr(), 10, b.data_ptr(), 20, y.data_ptr(), 30
    assert given == [(7, 1, 2, scratch.data_ptr(), 0x3F000000, -3, *addresses)]
    run(torch.empty(8)[1:], b, 0.5, -3)
    assert misses[0][2:] == (0.5, -3)
    given.clear()
    call(7, *addresses[::2], numbers=(0.5, -3))
    assert given == [(7, 1, 2, scratch.data_ptr(), 0x3F000000, -3, *addresses)]


def test_a_launch_that_fails_names_its_class(cpu):
    call, _ = fake_call()

    def refused(*_):
        raise RuntimeError("out of something")

    call.function = refused
    run, _ = made(call, cpu, [((4,), (1,), torch.float32)], [0, 0])
    for launched in (lambda: run(torch.empty(4), torch.empty(4)), lambda: call(7, 0, 16, 32)):
        with pytest.raises(RuntimeError, match=r"launching softmax \(fake\) failed: out of something"):
            launched()


# -- Gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_gradients_have_a_launcher_for_each_form(launches, function):
    x = rows(4, 16)
    reference = {softmax: torch.softmax, log_softmax: torch.log_softmax}[function]
    known = {softmax: api._softmaxes, log_softmax: api._log_softmaxes}[function]
    dense, row = plain(4, 16), plain(1, 16)
    for grad in (dense, row.expand(4, 16), plain(16, 4).mT, dense.float(), dense, row.expand(4, 16)):
        (found,) = torch.autograd.grad(function(x), x, grad.to(torch.bfloat16))
        (wanted,) = torch.autograd.grad(reference(x.float(), -1), x, grad.float())
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert len(known.latest.backwards) == 3  # dense ones, broadcast ones, and columns
    for pitch in range(17, 17 + 2 * MOST_OF_A_SHAPE):
        torch.autograd.grad(function(x), x, plain(4, pitch)[:, :16])
    assert len(known.latest.backwards) == MOST_OF_A_SHAPE


def test_a_gradient_that_is_the_result_is_served(launches):
    x = plain(4, 16)
    softmax(x.requires_grad_())
    form, y = api._softmaxes.latest, torch.softmax(plain(4, 16), -1)
    for _ in range(3):
        found = form.backward(y, y)
        torch.testing.assert_close(found, (y * (y - (y * y).sum(-1, True))), rtol=0.02, atol=0.02)
    assert not form.backwards


def test_batched_gradients_find_no_launcher_of_theirs(launches):
    x, grads = rows(3, 8), torch.randn(5, 3, 8).to(torch.bfloat16)
    (found,) = torch.autograd.grad(softmax(x), x, grads, is_grads_batched=True)
    (wanted,) = torch.autograd.grad(torch.softmax(x, -1), x, grads, is_grads_batched=True)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert not api._softmaxes.latest.backwards


@pytest.mark.parametrize("node", [True, False], ids=["its node calls backward", "a torch without such nodes"])
def test_a_recorder_records(node):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, factor):
            ctx.save_for_backward(input)
            ctx.factor = factor
            return input * factor

        @staticmethod
        def backward(ctx, grad):
            (input,) = ctx.saved_tensors
            assert input.shape == grad.shape
            return grad * ctx.factor, None

    if not node:
        made, Twice._backward_cls = Twice._backward_cls, None
    record = recorder(Twice)
    if not node:
        Twice._backward_cls = made
    assert (Twice._backward_cls.apply is Twice.backward) is node
    x = torch.randn(3, requires_grad=True)
    y = record(x, 2.0)
    assert y.grad_fn.name() == "TwiceBackward"
    hooked = []
    y.grad_fn.register_hook(lambda inputs, outputs: hooked.append(len(inputs)))
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.full((3,), 2.0)) and hooked == [1]
    with torch.no_grad():
        assert not record(x, 2.0).requires_grad


def test_saved_results_are_guarded(launches):
    """Hooks for saved tensors are called, and a result that was changed in place is found."""
    x = rows(3, 8)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        y = softmax(x)
    assert packed == [x.shape]
    y.sum().backward()
    y = softmax(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_saved_result_that_comes_back_otherwise_is_served(launches):
    """Whatever hooks make of it: other strides, another dtype."""
    x, grad = rows(4, 8), plain(4, 8)
    (wanted,) = torch.autograd.grad(torch.softmax(x, -1), x, grad)
    for unpack in (lambda t: t.t().contiguous().t(), lambda t: t.float(), lambda t: t.double()):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = softmax(x)
        (found,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
