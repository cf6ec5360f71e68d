"""A score of each row that no element has, in the sums of a softmax: against a column more in float64.

Launches are simulated on the CPU (`simulated`); float64 tensors go to torch's operations. What the kernels compute is
in `test_maths`, and every state of torch in `test_states`.
"""

import math
from types import SimpleNamespace

import arithmetic
import numpy as np
import pytest
import torch

from cute_softmax import (
    batch_invariant,
    explain,
    log_softmax,
    logsumexp,
    plan_softmax,
    softmax,
    softmax_,
    softmax_matmul,
    softmax_stats,
)
from cute_softmax.dispatch.matmul import forms
from cute_softmax.kernels.matmul import softmax as matmul_softmax
from cute_softmax.kernels.matmul.softmax import HEADROOM
from cute_softmax.plan import NotPlanned, Prologue, facts_of

INF = math.inf
SHAPE = (3, 4, 5, 33)  # batches, heads, queries, keys
FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
names = pytest.mark.parametrize("name", FUNCTIONS)
SINKS = {
    "a number": (),
    "a head": (4, 1, 1),
    "a query": (5, 1),
    "a row": (3, 4, 5, 1),
    "a batch": (3, 1, 1, 1),
}
SCORES = (
    {},
    {"scale": 0.5},
    {"mask": True, "scale": "rows"},
    {"bias": True, "causal": 3},
    {"mask": True, "bias": True},
)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scores_arguments(asked: dict, shape=SHAPE) -> dict:
    """The arguments of a call, with tensors for what is only named."""
    made = dict(asked)
    if asked.get("scale") == "rows":
        made["scale"] = random(*shape[:-1], 1, seed=1).abs() + 0.5
    if asked.get("bias"):
        made["bias"] = random(*shape[1:], seed=2)
    if asked.get("mask"):
        made["mask"] = random(*shape[-2:], seed=3) < 0.5
        made["mask"][1] = False  # nothing of a row
    return made


def expected(name: str, x, sink, dim=-1, **arguments):
    """By one column more, in float64."""
    s = x.double() * arguments.get("scale", 1.0) + arguments.get("bias", 0.0)
    counts = arguments.get("mask")
    if counts is not None:
        s = s.masked_fill(~counts, -INF)
    if "causal" in arguments:
        below = torch.ones(s.shape[-2:], dtype=torch.bool).tril(int(arguments["causal"]))
        s = s.masked_fill(~below, -INF)
    dims = [d % s.dim() for d in ((dim,) if isinstance(dim, int) else dim)]
    kept = [1 if d in dims else n for d, n in enumerate(s.shape)]
    last = [d for d in range(s.dim()) if d not in dims]
    flat = s.permute(*last, *dims).flatten(len(last))
    column = sink.double().expand(kept).permute(*last, *dims).flatten(len(last))
    whole = torch.cat([flat, column], -1)
    if name == "logsumexp":
        return torch.logsumexp(whole, -1)
    y = (torch.softmax if name == "softmax" else torch.log_softmax)(whole, -1)[..., :-1]
    order = [*last, *dims]
    y = y.unflatten(-1, [s.shape[d] for d in dims]).permute(*[order.index(d) for d in range(s.dim())])
    return y * arguments.get("alpha", 1.0)


def close(found, exact, error=2e-5) -> bool:
    found, exact = found.double(), exact.double()
    same = (found == exact) | (found.isnan() & exact.isnan())
    return found.shape == exact.shape and bool((same | ((found - exact).abs() <= error)).all())


# -- Results -----------------------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("asked", SCORES, ids=lambda asked: "_".join(asked) or "plain")
def test_results_and_gradients(name, kind, asked, launches):
    """One launch each way; with all that scores are made of. A row in which nothing counts but the sink is zeros."""
    arguments = scores_arguments(asked)
    x, sink = random(*SHAPE, seed=4), random(*SINKS[kind], seed=5)
    upstream = random(*SHAPE, seed=6)
    upstream = upstream.masked_fill(expected("softmax", x, sink, **arguments) == 0, 0.0).float()
    found, exact = [], []
    for function, into in ((FUNCTIONS[name], found), (lambda *a, **k: expected(name, *a, **k), exact)):
        leaves = [t.clone().requires_grad_() for t in (x, sink)]
        y = (
            function(leaves[0], sink=leaves[1], **arguments)
            if function is FUNCTIONS[name]
            else function(*leaves, **arguments)
        )
        # Of an element that does not count -inf times 0 would be no number.
        shown = y if name == "softmax" else torch.where(y == -INF, 0.0, y)
        into += [y.detach(), *torch.autograd.grad((shown * upstream).sum(), leaves)]
    assert all(close(a, b) for a, b in zip(found, exact, strict=True))
    if "mask" in arguments:
        assert (found[0][..., 1, :] == (0 if name == "softmax" else -INF)).all()
    assert [work.math for work in launches] == [name, f"{name}_backward"]
    assert all(work.prologue.sink for work in launches)


@names
@pytest.mark.parametrize("dim", [0, 1, 2, (1, 2), (0, 2), (0, 1, 2)])
def test_any_dimension(name, dim, launches):
    x = random(6, 7, 9, seed=1)
    kept = [1 if d in ((dim,) if isinstance(dim, int) else dim) else n for d, n in enumerate(x.shape)]
    leaf, sink = x.clone().requires_grad_(), random(*kept, seed=2).requires_grad_()
    y = FUNCTIONS[name](leaf, dim, sink=sink)
    exact = expected(name, leaf, sink, dim)
    assert close(y, exact) and launches
    upstream = random(6, 7, 9, seed=3)
    for a, b in zip(
        *(torch.autograd.grad((r * upstream).sum(), (leaf, sink)) for r in (y, exact)), strict=True
    ):
        assert close(a, b)
    assert close(logsumexp(x, dim, sink=sink), expected("logsumexp", x, sink, dim))


@names
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 33, 127, 1023])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lengths_and_dtypes(name, columns, dtype, launches):
    """The sink has a dtype of its own, and lies anywhere; so does its gradient."""
    wide = random(6, columns + 3, seed=1, dtype=dtype)
    x, memory = wide[:, 3:], random(13, seed=2, dtype=torch.bfloat16 if dtype is torch.float32 else dtype)
    sink = memory[1::2].unsqueeze(1)
    exact = expected(name, x, sink)
    error = 4e-3 * (1 + exact.abs().max())
    assert close(FUNCTIONS[name](x, sink=sink), exact, error)
    leaf = sink.clone().requires_grad_()
    y = FUNCTIONS[name](x, sink=leaf)
    assert y.dtype is dtype and close(y, exact, error)
    (of_sink,) = torch.autograd.grad(y.float().sum(), leaf)
    assert of_sink.dtype is leaf.dtype and of_sink.shape == leaf.shape
    assert close(FUNCTIONS[name](x, dtype=torch.float32, sink=sink), exact, 1e-5 * (1 + exact.abs().max()))


@names
def test_a_sink_of_nothing_is_none(name, launches):
    x, leaf = random(5, 9, seed=1), torch.full((5, 1), -INF).requires_grad_()
    x[1] = -INF
    y = FUNCTIONS[name](x, sink=leaf)
    assert close(y, expected(name, x, leaf.detach())) and y[1].isnan().all()
    (of_sink,) = torch.autograd.grad(y[0].sum() + y[2].sum(), leaf)
    assert (of_sink == 0).all()
    zeros = FUNCTIONS[name](x, sink=leaf, empty_rows="zero")
    assert (zeros[1] == (0 if name == "softmax" else -INF)).all()
    assert close(logsumexp(x, -1, sink=leaf), torch.logsumexp(x.double(), -1))


@names
def test_what_is_no_number(name, launches):
    """A sink that is none makes the rows that share it NaN, and an element its own row."""
    x, sink = random(4, 6, seed=1), random(4, 1, seed=2)
    sink[2], x[0, 3] = math.nan, math.nan
    y = FUNCTIONS[name](x, sink=sink)
    assert y[[0, 2]].isnan().all() and not y[[1, 3]].isnan().any()
    sink[3] = INF
    assert close(logsumexp(x, -1, sink=sink), expected("logsumexp", x, sink))


@pytest.mark.parametrize("sink", [-1e4, -200.0, 200.0, 1e4])
def test_far_from_the_scores(sink, launches):
    x = random(3, 8, seed=1)
    for name, function in FUNCTIONS.items():
        assert close(function(x, sink=torch.full((1,), sink)), expected(name, x, torch.tensor(sink)), 1e-3)
    assert close(
        logsumexp(x, -1, sink=torch.tensor(sink)), expected("logsumexp", x, torch.tensor(sink)), 1e-3
    )


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_tensors(shape, launches):
    x, sink = torch.zeros(shape), torch.full((shape[0], 1), 2.0).requires_grad_()
    for function in FUNCTIONS.values():
        leaf = x.clone().requires_grad_()
        y = function(leaf, sink=sink)
        assert y.shape == shape
        dx, of_sink = torch.autograd.grad(y.sum(), (leaf, sink))
        assert dx.shape == shape and (of_sink == 0).all()
    lse = logsumexp(x, -1, sink=sink)
    assert lse.shape == shape[:1] and (lse == 2).all()
    assert not launches


def test_a_row_of_one_element(launches):
    x, sink = torch.tensor(0.5), torch.tensor(1.5)
    assert close(softmax(x, 0, sink=sink), torch.sigmoid(torch.tensor(-1.0)))
    assert close(softmax(x.double(), 0, sink=sink), torch.sigmoid(torch.tensor(-1.0)))
    assert close(logsumexp(x, 0, sink=sink), torch.logaddexp(x, sink))
    many = torch.func.vmap(lambda a: softmax(a, 0, sink=sink))(torch.tensor([0.5, 1.5]))
    assert close(many, torch.sigmoid(torch.tensor([-1.0, 0.0])))


def test_a_learned_number_a_head(launches):
    """As attention with sinks has it: a column of the heads' numbers, which is dropped behind the softmax."""
    scores, sinks = random(*SHAPE, seed=1), random(4, seed=2).requires_grad_()
    keep = torch.ones(5, 33, dtype=torch.bool).tril(28)
    column = sinks.view(1, -1, 1, 1).expand(3, 4, 5, 1)
    whole = torch.cat([(scores * 0.125).masked_fill(~keep, -INF), column], -1)
    theirs = torch.softmax(whole, -1)[..., :-1]
    ours = softmax(scores, scale=0.125, causal=28, sink=sinks.view(-1, 1, 1))
    upstream = random(*SHAPE, seed=3)
    assert close(ours, theirs)
    assert close(*(torch.autograd.grad((y * upstream).sum(), sinks)[0] for y in (ours, theirs)))


# -- Gradients ---------------------------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("asked", SCORES, ids=lambda asked: "_".join(asked) or "plain")
def test_gradcheck(name, asked):
    """In float64, twice, and in forward mode."""
    shape = (2, 3, 4)
    x = random(*shape, seed=1, dtype=torch.float64).requires_grad_()
    sink = random(3, 1, seed=2, dtype=torch.float64).requires_grad_()
    arguments = scores_arguments(asked, shape)
    for key in ("bias", "scale"):
        if isinstance(arguments.get(key), torch.Tensor):
            arguments[key] = arguments[key].double()

    def function(x, sink):
        y = FUNCTIONS[name](x, sink=sink, **arguments)
        return torch.where(y == -INF, 0.0, y)

    torch.autograd.gradcheck(function, (x, sink), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (x, sink))


def test_gradcheck_of_sums():
    x = random(2, 3, 4, seed=1, dtype=torch.float64).requires_grad_()
    sink = random(3, 1, seed=2, dtype=torch.float64).requires_grad_()
    values = random(2, 4, 2, seed=3, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda x, s: logsumexp(x, -1, sink=s), (x, sink), check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda x, s: logsumexp(x, -1, sink=s), (x, sink))
    product = lambda x, v, s: softmax_matmul(x, v, sink=s, causal=1, return_lse=True)  # noqa: E731
    torch.autograd.gradcheck(product, (x, values, sink))
    torch.autograd.gradgradcheck(product, (x, values, sink))


@names
def test_gradients_of_gradients(name, launches):
    """By torch's operations on what the kernels gave: also of the gradient of the sink alone."""
    for wanted in ((0, 1), (0,), (1,)):
        found = []
        for function in (FUNCTIONS[name], None):
            leaves = [random(4, 9, seed=1).requires_grad_(), random(4, 1, seed=2).requires_grad_()]
            y = function(leaves[0], sink=leaves[1]) if function else expected(name, *leaves)
            first = torch.autograd.grad(
                (y * random(4, 9, seed=3)).sum(), [leaves[i] for i in wanted], create_graph=True
            )
            total = sum(d.square().sum() for d in first)
            found.append(torch.autograd.grad(total, leaves))
        assert all(close(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_in_place(which, view, launches):
    """Its gradients and their gradients, whichever are wanted; of a view, too."""
    found = []
    for ours in (True, False):
        leaves = [random(4, 9, seed=1), random(4, 1, seed=2)]
        for i in which:
            leaves[i].requires_grad_()
        x = (leaves[0] * 1.0)[:, 1:8] if view else leaves[0] * 1.0
        y = softmax_(x, sink=leaves[1]) if ours else expected("softmax", x, leaves[1])
        assert not ours or y is x
        wanted = [leaves[i] for i in which]
        first = torch.autograd.grad((y * random(*y.shape, seed=3)).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(d.square().sum() for d in first), wanted)
        found.append([y.detach(), *first, *second])
    assert all(close(a, b) for a, b in zip(*found, strict=True))
    assert launches[0].math == "softmax"


def test_bias_scale_and_sink_have_gradients_together(launches):
    x, bias, scale, sink = (
        random(4, 9, seed=1), random(9, seed=2), random(4, 1, seed=3).abs() + 0.5, random(4, 1, seed=4),
    )  # fmt: skip
    found = []
    for function in (softmax, lambda x, **given: expected("softmax", x, given.pop("sink"), **given)):
        leaves = [t.clone().requires_grad_() for t in (x, bias, scale, sink)]
        y = function(leaves[0], bias=leaves[1], scale=leaves[2], sink=leaves[3], alpha=1.5)
        found.append(torch.autograd.grad((y * random(4, 9, seed=5)).sum(), leaves))
    assert all(close(a, b) for a, b in zip(*found, strict=True))
    assert [work.math for work in launches] == ["softmax", "softmax_backward"]


def test_several_gradients_at_once(launches):
    """With an older vmap, whose upstream gradients only torch's operations take."""
    x, sink = random(4, 9, seed=1).requires_grad_(), random(4, 1, seed=2).requires_grad_()
    upstream = random(3, 4, 9, seed=3)
    for name, function in FUNCTIONS.items():
        many = torch.autograd.grad(function(x, sink=sink), (x, sink), upstream, is_grads_batched=True)
        exact = torch.autograd.grad(
            expected(name, x, sink), (x, sink), upstream.double(), is_grads_batched=True
        )
        assert all(close(a, b) for a, b in zip(many, exact, strict=True))


# -- Products ----------------------------------------------------------------------------------------------------------


def product(scores, values, sink, **arguments):
    return expected("softmax", scores, sink, **arguments) @ values.double()


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("asked", [{}, {"scale": 0.5, "causal": 2}, {"mask": True, "bias": True}])
def test_products(kind, asked, launches):
    """One launch forward, and the sink's gradient from those of the backward."""
    arguments = scores_arguments(asked)
    scores, values, sink = random(*SHAPE, seed=1), random(3, 4, 33, 8, seed=2), random(*SINKS[kind], seed=3)
    halves, found = values.bfloat16(), []
    for ours in (True, False):
        leaves = [
            t.clone().requires_grad_() for t in (scores, halves if ours else values.bfloat16().double(), sink)
        ]
        if ours:
            y, lse = softmax_matmul(leaves[0], leaves[1], sink=leaves[2], return_lse=True, **arguments)
        else:
            y = product(*leaves, **arguments)
            lse = expected("logsumexp", leaves[0], leaves[2], **arguments)
        loss = (y.double() * random(*SHAPE[:-1], 8, seed=4).bfloat16()).sum() + (
            lse * random(*SHAPE[:-1], seed=5)
        ).sum()
        found.append([y.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(close(a, b, 0.05 * (1 + b.abs().max())) for a, b in zip(*found, strict=True))
    assert close(found[0][1], found[1][1])
    assert [work.math for work in launches] == ["softmax_matmul", "softmax_matmul_backward"]
    if "mask" in arguments:
        assert (found[0][0][..., 1, :] == 0).all()


def test_products_of_known_sums(launches):
    """The sink is in them: the kernel needs no other, and its gradient is whole."""
    scores, values, sink = random(2, 6, 9, seed=1), random(2, 9, 8, seed=2).bfloat16(), random(6, 1, seed=3)
    stats = softmax_stats(scores, sink=sink)
    assert close(stats, expected("logsumexp", scores, sink))
    found = []
    for known in (stats, None):
        leaf = sink.clone().requires_grad_()
        y = softmax_matmul(scores, values, sink=leaf, stats=known)
        found.append([y.detach(), *torch.autograd.grad(y.float().sum(), leaf)])
    assert all(close(a, b, 1e-2) for a, b in zip(*found, strict=True))
    assert softmax_stats(scores.double(), sink=sink.double()).dtype is torch.float64


def test_products_without_columns(launched):
    """Zeros, as torch's products over nothing, with a sink and without."""
    scores, values = torch.zeros(2, 3, 0), torch.zeros(2, 0, 4, dtype=torch.bfloat16)
    sink = torch.tensor([[1.0], [-INF], [2.0]])
    y, lse = softmax_matmul(scores, values, sink=sink, return_lse=True)
    assert (y == 0).all() and torch.equal(lse, sink[:, 0].expand(2, 3))
    y, lse = softmax_matmul(scores, values, return_lse=True)
    assert (y == 0).all() and (lse == -INF).all()


# -- Calls -------------------------------------------------------------------------------------------------------------


def test_forms_and_out(launches):
    """Calls that repeat, with other sinks; a result in a tensor of the caller's."""
    x = random(8, 16, seed=1)
    for seed in range(3):
        sink = random(8, 1, seed=seed)
        assert close(softmax(x, sink=sink), expected("softmax", x, sink))
        out = torch.empty_like(x)
        assert softmax(x, sink=sink, out=out) is out and close(out, expected("softmax", x, sink))
        lse = torch.empty(8)
        assert logsumexp(x, -1, sink=sink, out=lse) is lse and close(lse, expected("logsumexp", x, sink))
    with pytest.raises(ValueError, match="out overlaps"):
        softmax(x, sink=x[:, :1], out=x)


def test_batch_invariant_calls(launches):
    """The logarithm of a sum is that which log_softmax subtracts: they have one plan but for what is written."""
    x, sink = random(6, 999, seed=1).bfloat16(), random(6, 1, seed=2)
    with batch_invariant():
        y, lse = log_softmax(x, dtype=torch.float32, sink=sink), logsumexp(x, -1, sink=sink)
        assert close(y, expected("log_softmax", x, sink)) and close(lse, expected("logsumexp", x, sink), 4e-2)
        plans = [plan_softmax(x, log=True, sink=sink), plan_softmax(x, sink=sink)]
    assert all(work.invariant for work in launches) and all(made.invariant for made in plans)


@pytest.mark.parametrize(
    ("sink", "error", "told"),
    [
        (1.0, TypeError, "sink must be a torch.Tensor"),
        (torch.zeros(4, 9), ValueError, "sink has shape .* it varies along the reduced"),
        (torch.zeros(3, 1), ValueError, "does not broadcast"),
        (torch.zeros(4, 1, dtype=torch.int64), TypeError, "sink is torch.int64"),
        (torch.zeros(4, 1, device="meta"), ValueError, "sink is on meta"),
    ],
)
def test_errors(sink, error, told):
    x = torch.zeros(4, 9)
    values = torch.zeros(9, 2)
    for function in (
        lambda: softmax(x, sink=sink),
        lambda: log_softmax(x, sink=sink),
        lambda: logsumexp(x, -1, sink=sink),
        lambda: softmax_matmul(x, values, sink=sink),
        lambda: softmax_stats(x, sink=sink),
    ):
        with pytest.raises(error, match=told):
            function()


def test_explain_and_plans():
    sink = torch.zeros(16, 1, 1)
    assert "an extra score per row in the sum" in explain((4, 16, 128, 4096), sink=sink)
    for backward in (False, True):
        made = plan_softmax((4, 16, 128, 4096), sink=sink, backward=backward)
        assert made.movement == "row" and made.kernel.prologue.sink
    assert plan_softmax((4096, 300), 0, sink=torch.zeros(300)).movement == "column"
    assert plan_softmax((4, 1 << 21), sink=sink[0, 0]).movement == "split"
    facts = facts_of("softmax", True, Prologue(sink=True))
    assert facts.group_inputs == ("sink",) and facts.group_outputs == ("sink_log",)
    assert facts_of("log_softmax_backward", True, Prologue(sink=True)).group_outputs == ("sink_grad",)
    assert facts_of("logsumexp", True, Prologue(sink=True)).group_outputs == ("lse",)
    with pytest.raises(NotPlanned, match="entropy with sink"):
        Prologue(sink=True).of("entropy")
    with pytest.raises(ValueError, match="a sink beside"):
        Prologue(sink=True, target="loss")


def test_products_with_known_sums_repeat(launches, monkeypatch):
    """By the form of the first call, though the kernel reads no sink."""
    scores, values, sink = random(2, 6, 16, seed=1), random(2, 16, 8, seed=2).bfloat16(), random(6, 1, seed=3)
    stats, found = softmax_stats(scores, sink=sink), []
    for _ in range(3):
        found.append(softmax_matmul(scores, values, sink=sink, stats=stats))
        monkeypatch.setattr(forms, "forward", lambda *call: pytest.fail("planned again"))
    assert all(torch.equal(found[0], y) for y in found)


def accumulated(scores, values, ref, factor):
    """(the sum of exponentials relative to a reference times 2 ** HEADROOM, and that with values)."""
    with np.errstate(all="ignore"):
        base = 0.0 if ref == -INF else ref * factor
        p = np.exp(scores.astype(np.float64) * factor - base) * 2.0**HEADROOM
    return p.sum(), (p * values).sum()


@pytest.mark.parametrize("sink", [-INF, -300.0, -3.0, 4.0, 60.0, 500.0, 1e30])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_how_a_product_ends(sink, zero, factor, monkeypatch):
    """The numbers of a row of softmax(S) @ V on plain floats: what it is multiplied by, and its log-sum-exp."""
    arithmetic.install(monkeypatch)
    for name, value in (("cute", arithmetic.CUTE), ("Float32", arithmetic.Number)):
        monkeypatch.setattr(matmul_softmax, name, value)
    spec = SimpleNamespace(dtypes=("bf16",), wide=False, scaled=factor != 1, stats=False, zero=zero)
    made, rng = matmul_softmax.Softmax(spec), np.random.default_rng(1)
    values = rng.normal(size=40)
    for scores in (rng.normal(size=40) * 3, rng.normal(size=40) + 700, np.full(40, -INF)):
        scores = scores.astype(np.float32)
        ref = scores.max() - (2.0 if np.isfinite(scores.max()) else 0.0)  # which lies a little too low
        total, result = accumulated(scores, values, ref, factor)
        numbers = [arithmetic.Number(n) for n in (total, ref, factor, sink)]
        with np.errstate(all="ignore"):
            found = np.float64(made.inverse(*numbers).value) * result
            lse = made.log_sum(numbers[1], numbers[0], *numbers[2:]).value
        whole = torch.tensor([*(scores.astype(np.float64) * factor), sink], dtype=torch.float64)
        right = float((torch.softmax(whole, -1)[:-1] * torch.tensor(values)).sum())
        right = 0.0 if zero and whole.max() == -INF else right
        assert arithmetic.close(found, right, 1e-4) and arithmetic.close(
            lse, float(torch.logsumexp(whole, -1)), 1e-6
        )
