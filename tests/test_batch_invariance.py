"""The mode: which calls, forms and gradients have it, on which thread, and what torch.compile makes of it.

Launches are simulated on the CPU (`simulated`); which plans they get is the matter of `test_batch_invariance_plan.py`,
and what a GPU makes of those that of `gpu/test_gpu_batch_invariance.py`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import simulated
import torch
from test_states import FUNCTIONS, every, example, launches, recording

import cute_softmax as c
from benchmarks import providers
from benchmarks.cases import INVARIANT, Case
from cute_softmax.plan import NotPlanned
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.in_rows import rows_strides
from cute_softmax.runtime import invariance, launch

_ = launches  # a fixture


def elsewhere(work, *arguments):
    """`work` on a thread of its own, as autograd's are: what it returned or raised."""
    found = []

    def run():
        try:
            found.append((work(*arguments), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, error),) = found
    if error is not None:
        raise error
    return result


@every
def test_launches_have_the_mode_of_their_call(f, launches):
    """Form or no form: what one call decided never serves another mode."""
    for _ in range(2):
        for inside in (False, True, True, False):
            launches.clear()
            if inside:
                with c.batch_invariant():
                    found = f.ours(example())
            else:
                found = f.ours(example())
            assert f.close(found, f.torchs(example()))
            assert {work.invariant for work in launches} == {inside}


@recording
@pytest.mark.parametrize("repeated", [False, True])
def test_gradients_have_the_mode_of_their_forward_pass(f, repeated, launches):
    for inside in (False, True):
        for _ in range(1 + repeated):
            x = example().requires_grad_()
            if inside:
                with c.batch_invariant():
                    y = f.ours(x)
            else:
                y = f.ours(x)
        launches.clear()
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))

        def gradient(x=x, y=y, upstream=upstream):
            return torch.autograd.grad(y, x, upstream)[0]

        if inside:
            found = elsewhere(gradient)
        else:
            with c.batch_invariant():
                found = gradient()
        y = example().requires_grad_()
        (expected,) = torch.autograd.grad(f.torchs(y), y, upstream)
        assert f.close(found, expected, atol=1e-5)
        assert {work.invariant for work in launches} <= {inside}


def test_gradients_are_launched(launches):
    """So that the test before looks at something: of these functions the gradient is a kernel's."""
    names = "softmax", "log_softmax", "logsumexp", "entropy", "selective_log_softmax", "cross_entropy"
    for name in (*names, "topk_softmax", "topk_softmax, renormalized"):
        x = example().requires_grad_()
        with c.batch_invariant():
            y = FUNCTIONS[name].ours(x)
        launches.clear()
        elsewhere(torch.autograd.grad, y, x, torch.ones_like(y))
        assert launches and all(work.invariant for work in launches), name


def test_several_elements_of_a_row(launches):
    """The gradients that come in at the chosen elements of a row are added up by a kernel."""
    x, index = example().requires_grad_(), torch.randint(8, (4, 6, 3))
    with c.batch_invariant():
        found = c.selective_log_softmax(x, index)
    launches.clear()
    (d,) = torch.autograd.grad(found, x, torch.ones_like(found))
    y = example().requires_grad_()
    (e,) = torch.autograd.grad(torch.log_softmax(y, -1).gather(-1, index), y, torch.ones_like(found))
    assert torch.allclose(d, e, atol=1e-5)
    assert {work.math for work in launches} >= {"sum", "softmax"}


def test_blocks_belong_to_their_thread():
    seen = []
    with c.batch_invariant(block_size=64):
        elsewhere(lambda: seen.append((invariance.in_force(), invariance.block_size())))
        seen.append((invariance.in_force(), invariance.block_size()))
        with c.batch_invariant():
            seen.append((invariance.in_force(), invariance.block_size()))
    seen.append((invariance.in_force(), invariance.block_size()))
    assert seen == [(False, None), (True, 64), (True, 64), (False, None)]


def test_blocks_belong_to_their_task():
    seen = {}

    async def within(entered, left):
        with c.batch_invariant():
            entered.set()
            await left.wait()
            seen["within"] = invariance.in_force()

    async def beside(entered, left):
        await entered.wait()
        seen["beside"] = invariance.in_force(), invariance.anywhere()
        left.set()

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        await asyncio.gather(within(entered, left), beside(entered, left))

    asyncio.run(both())
    assert seen == {"beside": (False, True), "within": True}
    assert not invariance.anywhere()


def test_an_error_ends_the_block():
    with pytest.raises(KeyError), c.batch_invariant():
        raise KeyError
    assert not invariance.in_force() and not invariance.anywhere()


def test_a_decorated_function():
    @c.batch_invariant()
    def inside():
        return invariance.in_force()

    assert inside() and inside() and not invariance.in_force()


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-8, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_wrong_block_sizes(size, error):
    with pytest.raises(error, match="block_size"), c.batch_invariant(block_size=size):
        pass
    assert not invariance.anywhere()


PROGRAM = """
import threading
from cute_softmax.runtime import invariance
seen = []
thread = threading.Thread(target=lambda: seen.append(invariance.in_force()))
thread.start()
thread.join()
print(invariance.in_force(), *seen, invariance.anywhere(), invariance.block_size())
"""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "False False False None"),
        ("0", "False False False None"),
        ("1", "True True True None"),
        ("4096", "True True True 4096"),
    ],
)
def test_environment(value, said):
    environment = os.environ | {invariance.ENVIRONMENT: value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == said.split()


def test_wrong_environment(monkeypatch):
    for value in ("yes", "-1", "1.5", "٣"):
        monkeypatch.setenv(invariance.ENVIRONMENT, value)
        with pytest.raises(ValueError, match=invariance.ENVIRONMENT):
            invariance.from_environment()


def test_shipped_tables_only(monkeypatch):
    """A table of the user's own is not looked at in the mode."""
    launch.device_facts.cache_clear()
    facts = type("", (), {"major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 60 << 20})
    facts.name = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setenv("CUTE_SOFTMAX_TABLE", "/somewhere/own.json")
    try:
        assert launch.facts_for(0, False).table == "/somewhere/own.json"
        assert launch.facts_for(0, True).table == "h200"
    finally:
        launch.device_facts.cache_clear()


# -- Tensors that do not lie in rows -----------------------------------------------------------------------------------

LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "an odd offset": lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],
    "an odd pitch": lambda x: torch.cat((x, x[..., :3]), -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [-1, 0, (0, 2)])
def test_any_layout(layout, dim, launches):
    x = LAYOUTS[layout](example())
    dims = dim if isinstance(dim, tuple) else (dim,)
    order = [d for d in range(3) if d not in {d % 3 for d in dims}] + [d % 3 for d in dims]
    flat = example().permute(order).flatten(3 - len(dims))
    back = torch.softmax(flat, -1).unflatten(-1, [example().shape[d] for d in dims])
    expected = back.permute([order.index(d) for d in range(3)])
    for _ in range(2):
        with c.batch_invariant():
            found = c.softmax(x, dim)
            inside = LAYOUTS[layout](torch.zeros_like(x))
            written = c.softmax(x, dim, out=inside)
            sums = c.logsumexp(x, dim)
        assert torch.allclose(found, expected, atol=2e-6)
        assert written is inside and torch.equal(written, found)
        assert torch.allclose(sums, torch.logsumexp(example(), dim), atol=2e-6)
        assert all(work.invariant for work in launches)


def test_in_place(launches):
    for make in LAYOUTS.values():
        x = make(example())
        with c.batch_invariant():
            found = c.softmax_(x)
        assert found is x and torch.allclose(x, torch.softmax(example(), -1), atol=2e-6)


def test_broadcast_operands_stay_broadcast(launches):
    x = example().mT  # (4, 8, 6), strided along its rows
    bias = torch.randn(1, 8, 1).expand(4, 8, 6)
    broadcast = x[:1].expand(4, 8, 6)
    rows = launch.laid_out(broadcast, rows_strides(broadcast.shape, (2,), broadcast.stride()))
    assert rows.stride() == (0, 6, 1) and torch.equal(rows, x[:1].expand(4, 8, 6))
    with c.batch_invariant():
        found = c.softmax(x, bias=bias, scale=2.0)
    assert torch.allclose(found, torch.softmax(x * 2 + bias, -1), atol=2e-6)


def test_nothing_is_composed_for_strided_scores(launches):
    """Scores over another dimension than the last: laid out, they have the kernel that rows have."""
    with c.batch_invariant():
        c.softmax(example().mT, scale=2.0, mask=example().mT > -1)
        c.softmax(example(), 0, scale=2.0)
    assert len(launches) == 2 and all(work.prologue.scale == "number" for work in launches)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_strided_rows_have_the_kernels_of_rows(reduction, launches):
    """Other kernels compute the same gradients, but for their last bits."""
    target = torch.tensor([3, -100, 0, 5])
    found = []
    for x in (example()[:, 0], example()[:, 0].mT.contiguous().mT):
        x.requires_grad_()
        for _ in range(2):
            with c.batch_invariant():
                loss = c.cross_entropy(x, target, reduction=reduction)
            loss.sum().backward()
        found.append([(work.math, work.prologue) for work in launches if hasattr(work, "prologue")])
        launches.clear()
    assert found[0] == found[1] and len(found[0]) >= 2


def test_prepare(launches):
    with c.batch_invariant():
        step = c.prepare(example())
        assert step.plan.invariant
        with pytest.raises(NotPlanned, match="do not lie as the plan takes them"):
            c.prepare(example(), 0)
    launches.clear()
    step(example())  # outside: what was prepared stays as it is
    assert [work.invariant for work in launches] == [True]


def test_explain():
    with c.batch_invariant():
        assert "batch-invariant: they depend on the row and its length" in c.explain((8, 1000))
        assert "2 operands copied to contiguous rows" in c.explain((8, 1000), 0)
        assert c.plan_softmax((8, 1000), backward=True).invariant
        assert c.plan_reduction("logsumexp", (8, 1000)).invariant
        assert "batch-invariant" in c.explain((8, 1000), op="cross_entropy", backward=True)
        with pytest.raises(ValueError, match="block_size"):
            c.explain((8, 1000), group=2)
    assert "batch-invariant" not in c.explain((8, 1000))
    assert "stay on chip" in c.explain((4096, 32768), group=2)
    with c.batch_invariant(block_size=4096):
        assert "ranks: one all-gather" in c.explain((4096, 32768), group=2)
        with pytest.raises(ValueError, match="multiples of it"):
            c.explain((8, 5000), group=2)


# -- torch.compile and accelerate --------------------------------------------------------------------------------------


def test_compiled_code_has_the_mode_of_any_thread(launches):
    torch._dynamo.reset()

    def f(x):
        return c.log_softmax(c.softmax(x), scale=2.0), c.logsumexp(x, -1), c.selective_log_softmax(x, INDEX)

    INDEX = torch.zeros(4, 6, dtype=torch.long)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for inside in (False, True, False, True):
        launches.clear()
        x = example().requires_grad_()
        if inside:
            with c.batch_invariant():
                y, lse, found = compiled(x)
        else:
            y, lse, found = compiled(x)
        elsewhere((y.sum() + lse.sum() + found.sum()).backward)
        assert len(launches) >= 6 and {work.invariant for work in launches} == {inside}
    launches.clear()
    with c.batch_invariant():
        elsewhere(compiled, example())
    assert {work.invariant for work in launches} == {True}


def test_products_compiled(launches):
    torch._dynamo.reset()
    values = torch.randn(4, 8, 6).bfloat16()
    compiled = torch.compile(lambda x: c.softmax_matmul(x, values), fullgraph=True, backend="aot_eager")
    for inside in (False, True):
        launches.clear()
        x = example().bfloat16().requires_grad_()
        if inside:
            with c.batch_invariant():
                y = compiled(x)
        else:
            y = compiled(x)
        elsewhere(y.sum().backward)
        assert {work.math for work in launches} == {"softmax_matmul", "softmax_matmul_backward"}
        assert {work.invariant for work in launches} == {inside}


def test_exported_code_has_the_mode_of_its_tracing(launches):
    class Module(torch.nn.Module):
        def forward(self, x):
            return c.softmax(x)

    with c.batch_invariant():
        inside = torch.export.export(Module(), (example(),))
    outside = torch.export.export(Module(), (example(),))
    for program, mode in ((inside, True), (outside, False)):
        launches.clear()
        program.module()(example())
        assert [work.invariant for work in launches] == [mode]


def test_accelerated_operators(launches):
    """Their gradients come from threads that are in no block: one state for all."""
    from cute_softmax.acceleration import operators

    served = {operator.name: operator for operator in operators.OPERATORS}
    x = example()
    for inside in (False, True):
        launches.clear()
        if inside:
            with c.batch_invariant():
                y = served["_softmax"].serve(x, -1, False)
                elsewhere(served["_softmax_backward_data"].serve, x, y, -1, torch.float32)
                served["_log_softmax"].serve(x, 0, False)
        else:
            y = served["_softmax"].serve(x, -1, False)
        assert torch.allclose(y, torch.softmax(x, -1), atol=2e-6)
        assert len(launches) == (3 if inside else 1)
        assert {work.invariant for work in launches} == {inside}


def test_the_plan_of_a_launch_is_invariant(monkeypatch):
    """The simulated launches say what they were asked for; here what was planned."""
    simulated.install(monkeypatch)
    x = torch.randn(4, 12000)
    with c.batch_invariant():
        work = launch.Work("softmax", (x, x), (1,), invariant=True)
    assert work.plan(H200).invariant and not launch.Work("softmax", (x, x), (1,)).plan(H200).invariant
    assert work.plan(H200).kernel != launch.Work("softmax", (x, x), (1,)).plan(H200).kernel


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_benchmarks_within_the_mode(op, launches):
    for mode in ("", INVARIANT):
        launches.clear()
        getattr(providers.CuteSoftmax(), op)(Case(op, (4, 9000), mode=mode))(torch.randn(4, 9000))
        assert [work.invariant for work in launches] == [mode == INVARIANT]
