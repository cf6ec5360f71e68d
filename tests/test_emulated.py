"""Compiled kernels, run on the CPU by their PTX (`ptx`): right beside float64, and nothing else is touched."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import checking
import classes
import emulated
import panels
import ptx
import pytest
import short_scores
import torch
from checking import Guarded, check_backward, check_softmax, equal_bits
from covering import check_covered, covering, pairs
from test_states import FUNCTIONS, Function, example

import cute_softmax as c
from cute_softmax.dispatch.heads import loss
from cute_softmax.plan import RowConfig, choose, panel_plan, table_of
from cute_softmax.plan.hardware import H200
from cute_softmax.runtime import launch

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
dtypes = pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    return emulated.install(monkeypatch, tmp_path)


@pytest.fixture
def small(monkeypatch):
    """A GPU for which a few rows are many."""
    device = replace(H200, multiprocessors=8)
    monkeypatch.setattr(launch, "device_facts", lambda index, shipped_only=False: device)


def made(shape, dtype, seed=0, scale=3.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor, terms: int = 1) -> bool:
    """To two steps of the dtype, or float32's of the largest one; terms: that float32 has summed."""
    largest = exact.nan_to_num(posinf=0.0, neginf=0.0).abs().amax().clamp(min=1.0)
    allowed = 2 * torch.finfo(found.dtype).eps * exact.abs() + 2.0**-21 * largest * terms**0.5
    same = (found == exact) | (found.isnan() & exact.isnan())
    return bool((same | ((found.double() - exact).abs() <= allowed)).all())


# -- Every function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [pytest.param(f, id=name) for name, f in FUNCTIONS.items()])
def test_every_function(f: Function, launches):
    assert f.close(f.ours(example()), f.torchs(example()), atol=4e-6) and launches


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, id=n)
        for n, f in FUNCTIONS.items()
        if f.records and not f.in_place and "matmul" not in n
    ],
)
def test_every_gradient(f: Function, launches):
    found = []
    for function in (f.ours, f.torchs):
        y = function(x := example().requires_grad_())
        (slope,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=torch.Generator().manual_seed(6)))
        found.append(slope)
    assert f.close(*found, atol=1e-5) and launches


# -- Movements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dtype", "backward", "config"),
    [
        (6004, fp32, False, RowConfig(96, 8, 96, cluster_n=2, staging=("shared", "shared"))),
        (7501, bf16, False, RowConfig(160, 3, 160, cluster_n=2, staging=("shared", "shared"), keep=False)),
        (6004, fp32, True, RowConfig(160, 5, 160, cluster_n=2, staging=("shared", "direct"), keep=False)),
        (3000, bf16, True, RowConfig(96, 4, 96, staging=("shared", "shared"), keep=False)),
    ],
)
def test_any_number_of_warps(n, dtype, backward, config, launches, monkeypatch):
    """Rows that fill their steps by threads that are no power of two; in shared memory some have no last vector."""
    math = "softmax_backward" if backward else "softmax"
    table = table_of("h200")
    table = replace(table, many=table.many | {math: (config,)}, few=table.few | {math: ()})
    device = replace(H200, table=table)
    monkeypatch.setattr(launch, "device_facts", lambda index, shipped_only=False: device)
    x, grad = made((2, n), dtype), made((2, n), dtype, 1)
    if backward:
        y = torch.softmax(x.double(), -1).to(dtype)
        check_backward(c.softmax_backward(grad, y), grad, y)
    else:
        check_softmax(c.softmax(x), x)
    (work,) = launches
    assert work.plan.kernel.threads_per_row == config.threads_per_row
    assert -(-work.plan.share // work.plan.kernel.vector) < config.threads * config.steps


@pytest.mark.long
@dtypes
@classes.however_few()
def test_short_rows_of_any_length(dtype, launches):
    """Rows in a vector and in several, whole and not; a GPU runs every length."""
    for n in (*range(1, 18), 24, 31, 32, 33, 47, 56, 57, 63, 64) if dtype == bf16 else (1, 3, 8, 11, 30):
        x = made((37, n), dtype, n)
        out = Guarded(x.shape, dtype, offset=n % 5, device="cpu")
        check_softmax(c.softmax(x, out=out.tensor), x)
        out.check()
    assert {work.plan.movement for work in launches} == {"short"}


# Each math with each length and each dtype, and each length with each dtype.
OTHER_MATHS = [
    (math, n, (bf16, fp16, fp32)[(i + j) % 3])
    for i, n in enumerate((3, 9, 12, 16, 29, 48))
    for j, math in enumerate(("log_softmax", "logsumexp", "softmax_backward"))
]


@pytest.mark.parametrize(("math", "n", "dtype"), OTHER_MATHS)
@classes.however_few()
def test_other_maths_of_short_rows(math, n, dtype, launches):
    x, grad = made((70, n), dtype, n), made((70, n), dtype, n + 1)
    if math == "softmax_backward":
        y = torch.softmax(x.double(), -1).to(dtype)
        check_backward(c.softmax_backward(grad, y), grad, y)
    else:
        assert close(getattr(c, math)(x, -1), getattr(torch, math)(x.double(), -1))
    assert {work.plan.movement for work in launches} == {"short"}


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "said"),
    [
        ((40, 65), 1, bf16, "row"),
        ((5, 1000), 1, fp32, "row"),
        ((300, 777), 1, fp16, "row"),
        ((2, 20001), 1, bf16, "cluster"),
        ((3, 33000), 1, fp32, "cluster"),
        ((1, 200064), 1, bf16, "cluster16"),
        ((1, 300000), 1, fp32, "cluster16"),
        ((12, 70), 0, bf16, "column"),
        ((9, 4, 33), (0, 2), fp32, "split"),
        ((120, 49), 0, bf16, "aligned"),
        ((500, 40), 0, bf16, "cluster"),
        ((3000, 64), 0, bf16, "cluster16"),
        ((4000, 4), 0, fp32, "x1_cluster"),
        ((1100, 24), 0, bf16, "x4_cluster"),
        ((90000, 10), 0, bf16, "exchange"),
        ((20000, 9), 0, bf16, "cluster16_rows8"),
        ((1, 1 << 21), 1, bf16, "exchange"),
    ],
)  # fmt: skip
def test_movements(shape, dim, dtype, said, launches):
    x = made(shape, dtype)
    y = c.softmax(x, dim)
    assert close(y, (x.double() - torch.logsumexp(x.double(), dim, keepdim=True)).exp())
    (work,) = launches
    assert said in f"{work.plan.movement}_{work.plan.kernel.name}"


@pytest.mark.parametrize("shape, dim", [((64, 12), 0), ((30, 2049), 1), ((40, 24), 1), ((600, 24), 0)])
def test_special_values(shape, dim, launches):
    """Rows of -inf are NaN, as of +inf and NaN; with `zero_masked` 0."""
    x = made(shape, fp32).movedim(dim, -1).contiguous().movedim(-1, dim)
    rows = x.movedim(dim, -1)
    rows[0], rows[1, 3], rows[2, 5], rows[3, :-1] = -INF, INF, float("nan"), -INF
    found, exact = c.softmax(x, dim), torch.softmax(x.double(), dim)
    assert close(found, exact) and found.isnan().any()
    assert close(c.logsumexp(x, dim), torch.logsumexp(x.double(), dim))


@pytest.mark.parametrize(
    ("n", "dtype", "said", "function"),
    [
        (20_001, bf16, "cluster4", "softmax"),
        (120_000, fp32, "cluster16_shared", "softmax"),
        (120_000, fp32, "cluster16_shared", "log_softmax"),
        pytest.param(1_000_000, bf16, "persistent", "softmax", marks=pytest.mark.long),
        pytest.param(1_200_000, bf16, "exchange_streaming", "log_softmax", marks=pytest.mark.long),
    ],
)
def test_beyond_the_diagonal(n, dtype, said, function, launches, small):
    """Rows of several CTAs: most have nothing before the diagonal. What does not count may be NaN nevertheless."""
    x, ours, torchs = made((5, n), dtype), getattr(c, function), getattr(torch, function)
    x[1, 0], x[4, :2] = float("nan"), -INF
    plan = launch.call_of("softmax", (x, x), (1,)).plan
    share = getattr(plan.kernel, "chunk", plan.share)
    # The diagonal reaches the first element of a CTA's share, or of a chunk of it, in the third row.
    for offset, options in ((3 * share - 2, {}), (-1, {}), (-1, {"empty_rows": "zero"})):
        counts = torch.ones(5, n, dtype=torch.bool).tril(offset)
        exact = torchs(x.double().masked_fill(~counts, -INF), -1)
        if options:
            empty = (x == -INF).logical_or(~counts).all(-1, True)
            exact = exact.masked_fill(empty, 0.0 if function == "softmax" else -INF)
        found = ours(x, -1, causal=offset, **options)
        assert close(found, exact) and found[1].isnan().all() and not found[2].isnan().any()
    assert all(said in work.plan.kernel.name for work in launches)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shared", [0, 1])
def test_scores_of_expanded_elements(shared, dim, launches):
    """What lies beside them has strides of its own."""
    x = made((50, 6), fp32).narrow(shared, 0, 1).expand(50, 6)
    beside = {"bias": made((6, 50), fp32, 1).T, "mask": (made((6, 50), fp32, 2) < 2).T}
    for name, tensor in beside.items():
        scores = x.double() + tensor if name == "bias" else x.double().masked_fill(~tensor, -INF)
        assert close(c.log_softmax(x, dim, **{name: tensor}), torch.log_softmax(scores, dim))
    assert launches


@pytest.fixture
def rows_in(monkeypatch):
    """Rows are planned in a movement of `panels.SMALL`; CTAs wait so many nanoseconds for each other."""
    planned = choose.plan_panel

    def install(movement: str, patience: int = panel_plan.PATIENCE):
        def forced(*asked, **how):
            plan = dict(panels.movements(planned(*asked, **how)))[movement]
            return replace(plan, patience=patience)

        monkeypatch.setattr(choose, "plan_panel", forced)

    monkeypatch.setattr(choose, "_plan_rows", lambda *asked: None)
    monkeypatch.setattr(choose, "plan_short", lambda *asked: None)
    return install


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize("beside", [("mask",), ("bias",), ("bias", "mask")], ids="_".join)
def test_what_is_beside_all_rows_is_resident(beside, dtype, in_turn, rows_in, launches):
    """Where CTAs run one after the other the last finishes the others' parts of rows, with what is beside those."""
    launches.in_turn = in_turn
    rows_in("a row ahead", 0 if in_turn else panel_plan.PATIENCE)
    n = 2000 if dtype == fp32 else 4000
    x, tensors = made((5, n), dtype), {"bias": made(n, dtype, 1), "mask": made(n, fp32, 2) < 1}
    x[1, ::2], tensors["mask"][7:1234] = INF if beside == ("mask",) else 3.0, False
    x[1].masked_fill_(tensors["mask"], 1.0)
    given = {name: tensors[name] for name in beside}
    scores = x.double() + (given["bias"].double() if "bias" in given else 0)
    scores = scores.masked_fill(~given["mask"], -INF) if "mask" in given else scores
    assert close(c.softmax(x, -1, **given), torch.softmax(scores, -1))
    assert close(c.log_softmax(x, -1, causal=900, **given), torch.log_softmax(causal(scores, 900), -1))
    for work in launches:
        kernel = work.plan.kernel
        assert kernel.ahead and kernel.residents == kernel.facts.beside
        assert [kernel.bits(i) for i in kernel.residents] == [name == "mask" for name in beside]


@pytest.mark.parametrize(
    ("movement", "dtype"),
    [
        ("one CTA", bf16),
        ("streaming", bf16),
        ("cluster", fp32),
        ("exchange", bf16),
        ("exchange, three chunks held", fp32),
        ("a row ahead", bf16),
        ("a row ahead, fewer at a time than exchange", fp32),
    ],
)
def test_the_vector_of_the_diagonal(movement, dtype, rows_in, launches):
    """What is behind it in there, and in all later ones, counts for nothing, be it NaN."""
    rows_in(movement)
    n, offset = (2000, 517) if dtype == fp32 else (4000, 1029)
    x, mask = made((5, n), dtype), made(n, fp32, 2) < 1
    counts = torch.ones(5, n, dtype=torch.bool).tril(offset)
    x[~counts] = float("nan")
    # A mask that stays for all rows needs CTAs that have the same part of each.
    for given in ({},) if "ahead, fewer" in movement else ({}, {"mask": mask}):
        exact = x.double().masked_fill(~(counts & given.get("mask", mask | True)), -INF)
        assert close(c.log_softmax(x, -1, causal=offset, **given), torch.log_softmax(exact, -1))
    y = c.softmax(x, -1, causal=offset)
    exact = torch.softmax(x.double().masked_fill(~counts, -INF), -1)
    assert close(y, exact)
    if "ahead" not in movement:
        x.requires_grad_()
        (dx,) = torch.autograd.grad(
            c.softmax(x, -1, causal=offset), x, made((5, n), dtype, 3).where(counts, INF)
        )
        dy = made((5, n), fp32, 3).to(dtype).double().where(counts, 0)
        assert close(dx, y.double() * (dy - (dy * y.double()).sum(-1, True))) and len(launches) == 5
    assert all(work.plan.kernel.hides for work in launches)


def causal(scores: torch.Tensor, offset: int) -> torch.Tensor:
    """-inf beyond the diagonal."""
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(offset), -INF)


def test_views_and_results_in_place(launches):
    storage = made((30, 400), bf16)
    before = storage.clone()
    c.softmax(storage[::2, 3:260], out=storage[::2, 3:260])
    check_softmax(storage[::2, 3:260], before[::2, 3:260])
    assert torch.equal(storage[1::2], before[1::2]) and torch.equal(storage[:, 260:], before[:, 260:])
    x = made((7, 33, 130), fp16).transpose(0, 2)
    assert close(c.softmax(x, 1), torch.softmax(x.double(), 1))


@pytest.mark.parametrize(("shape", "dim", "dtype"), [((64, 801), 0, bf16), ((5, 30, 301), 1, fp32)])
def test_columns_in_place_one_cta_after_the_other(shape, dim, dtype, launches):
    """Panels that load what others have stored, which the Plan avoids in place, would be wrong."""
    launches.in_turn = True
    x = made(shape, dtype)
    for out_of_place in (False, True):
        both = x.clone()
        out = torch.empty_like(x) if out_of_place else both
        call = launch.call_of("softmax", (both, out), (dim,))
        assert call.plan.kernel.shifted is out_of_place
        call(0, both.data_ptr(), both.data_ptr())
        assert close(both, torch.softmax(x.double(), dim)) is not out_of_place


@pytest.mark.long
@classes.however_few()
def test_random_calls(launches):
    """Of any shape, with what may stand before the softmax."""
    draw = random.Random(2024)
    for seed in range(24):
        shape = tuple(
            draw.choice((1, 2, 3, 12, 31, 64, 100, 129, 300, 1000)) for _ in range(draw.randint(2, 3))
        )
        if torch.Size(shape).numel() > 40000:
            continue
        dtype, dim = draw.choice((bf16, fp16, fp32)), draw.randrange(len(shape))
        x = made(shape, dtype, seed)
        options = {"scale": 0.5} if draw.random() < 0.5 else {}
        exact = x.double() * options.get("scale", 1.0)
        if draw.random() < 0.5:
            options["bias"] = made(shape[-1:], dtype, seed + 1)
            exact = exact + options["bias"].double()
        if draw.random() < 0.5:
            options["mask"] = made(shape, fp32, seed + 2) > -2
            exact = exact.masked_fill(~options["mask"], -INF)
        assert close(c.softmax(x, dim, **options), torch.softmax(exact, dim)), (
            shape,
            dim,
            dtype,
            options.keys(),
        )
    assert {work.plan.movement for work in launches} == {"short", "row", "column"}


@pytest.mark.parametrize("function", [c.logsumexp, c.amax, c.sum, c.entropy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", [None, 1])
def test_numbers_of_rows_in_parts(function, seed, launches):
    """Lanes that have waited for a part's state meet those that had none to wait for."""
    launches.seed = seed
    x = made((129, 3, 129), fp32).permute(1, 0, 2)
    exact = {"entropy": lambda x, d: torch.special.entr((x - torch.logsumexp(x, d, True)).exp()).sum(d)}
    right = exact.get(function.__name__, getattr(torch, function.__name__, None))(x.double(), (1, 2))
    assert close(function(x, (1, 2)), right, 129) and launches[0].plan.parts > 1


@pytest.mark.parametrize(
    ("shape", "dim", "seed"),
    [
        ((9, 57), 1, 1),
        ((4, 3000), 1, 2),
        ((1, 40000), 1, 3),
        ((100, 40), 0, 4),
        ((700, 40), 0, 5),
        ((20000, 10), 0, 6),
        ((20000, 9), 0, 7),
    ],
)
def test_bits_do_not_depend_on_which_warps_run_first(shape, dim, seed, launches):
    x = made(shape, bf16)
    y, s = c.softmax(x, dim), c.logsumexp(x, dim)
    launches.seed = seed
    assert equal_bits(c.softmax(x, dim), y) and equal_bits(c.logsumexp(x, dim), s)


@pytest.mark.parametrize("columns", [700, 8200])
def test_two_exchanges_of_a_cluster(columns, launches):
    x, target = made((3, columns), bf16), made((3, columns), bf16, 1)
    q, p = (torch.log_softmax(t.double(), -1) for t in (x, target))
    assert close(c.kl_div(x, target, reduction="none"), (p.exp() * (p - q)).sum(-1), columns)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize(
    ("shape", "pad", "offset", "residue"),
    [
        ((70, 331), 0, 0, 0x7F),
        ((700, 77), 2, 3, 0x7F),
        ((2, 90, 131), 0, 5, 0x7F),
        ((9000, 65), 0, 1, 0),  # parts wait for numbers that are not 0
        ((1500, 259), 6, 0, 0x7F),
    ],
)
def test_aligned_blocks(shape, pad, offset, residue, dtype, launches):
    """Wherever rows of memory begin: results and numbers of groups, and nothing beside them is written."""
    launches.residue = residue
    dim, pitch = len(shape) - 2, shape[-1] + pad
    strides = (shape[-2] * pitch, pitch, 1)[-len(shape) :]
    x = Guarded(shape, dtype, strides=strides, offset=offset, device="cpu").tensor.copy_(made(shape, dtype))
    scale = torch.rand([1 if d == dim else n for d, n in enumerate(shape)])
    for options in ({}, {"scale": scale}):
        out = Guarded(shape, dtype, strides=strides, offset=offset, device="cpu")
        exact = torch.softmax(x.double() * options.get("scale", 1.0), dim)
        assert close(c.softmax(x, dim, out=out.tensor, **options), exact)
        out.check()
    assert close(c.logsumexp(x, dim), torch.logsumexp(x.double(), dim))
    assert {work.plan.kernel.aligned for work in launches} == {True}


@pytest.mark.parametrize("columns", [9, 65])
def test_parts_that_are_given_up(columns, launches, monkeypatch):
    """Without patience CTAs finish for each other what they did not wait for."""
    monkeypatch.setattr(panel_plan.PanelPlan, "patience", 0)
    x = made((20000, columns), bf16)
    assert close(c.softmax(x, 0), torch.softmax(x.double(), 0))


@pytest.mark.long
def test_parts_before_a_diagonal_that_are_given_up(launches, small, monkeypatch):
    """Others store what lies beyond it, too, be it NaN or 0."""
    monkeypatch.setattr(panel_plan.PanelPlan, "patience", 0)
    x = made((3, 1_200_003), bf16)
    x[1, 0] = float("nan")
    exact = x.double().masked_fill(~torch.ones(x.shape, dtype=torch.bool).tril(50_000), -INF)
    assert close(c.softmax(x, -1, causal=50_000), torch.softmax(exact, -1))
    (work,) = launches
    assert work.plan.parts > 1 and work.plan.kernel.hides and work.plan.kernel.streaming


@pytest.mark.parametrize(
    ("columns", "k", "dtype"), [(64, 8, fp32), (128, 4, bf16), (1000, 20, fp16), (1023, 1, bf16)]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts(columns, k, dtype, renormalize, launches):
    x = made((5, columns), dtype).requires_grad_()
    found, indices = c.topk_softmax(x, k, renormalize=renormalize)
    exact = torch.softmax(x.double(), -1).gather(-1, indices)
    exact = exact / exact.sum(-1, keepdim=True) if renormalize else exact
    assert torch.equal(x.gather(-1, indices), x.topk(k).values) and close(found, exact)
    upstream = made(found.shape, dtype, 3)
    (slope,) = torch.autograd.grad(found, x, upstream)
    (right,) = torch.autograd.grad(exact, x, upstream.double())
    assert (slope.double() - right).abs().max() <= 4 * torch.finfo(dtype).eps * upstream.abs().max()


@pytest.mark.parametrize(("columns", "k", "dtype"), [(5000, 8, bf16), (3001, 50, fp32), (90001, 5, bf16)])
def test_the_most_likely_tokens(columns, k, dtype, launches):
    x, index = made((3, columns), dtype), torch.tensor([0, 17, columns - 1])
    values, indices, chosen, ranks = c.topk_log_softmax(x, k, index)
    exact = torch.log_softmax(x.double(), -1)
    assert torch.equal(x.gather(-1, indices), x.topk(k).values) and close(values, exact.gather(-1, indices))
    assert close(chosen, exact.gather(-1, index[:, None])[:, 0])
    assert torch.equal(ranks, (x > x.gather(-1, index[:, None])).sum(-1))


@pytest.mark.parametrize("ignored", [-100, 52])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_and_its_gradient_in_one_visit(reduction, ignored, launches):
    x, target = made((21, 300), fp32).requires_grad_(), torch.arange(21) * 13
    target[4] = ignored

    def both(function, x):
        loss = function(x, target, reduction=reduction, ignore_index=ignored)
        (slope,) = torch.autograd.grad(loss, x, torch.tensor(2.5, dtype=x.dtype))
        return loss, slope

    exact = both(torch.nn.functional.cross_entropy, x.detach().double().requires_grad_())
    assert all(map(close, both(c.cross_entropy, x), exact))
    assert {work.plan.kernel.movement for work in launches} == {"row", "mean", "rescale"}


def test_many_losses_in_slices(launches):
    target, numbers = torch.arange(20_001) % 7, made((20_001,), fp32)
    counts = (target != 3).sum()
    share = loss.shares(target, 3, 0.5)
    assert torch.equal(share, torch.stack([0.5 / counts, 1 / counts]))
    mean, again = loss.mean(numbers, target, 3, fp32)
    assert close(mean, numbers.double().sum() / counts, 20_001) and again == share[1]
    assert close(loss.total(numbers, share[1], fp32), numbers.double().sum() / counts, 20_001)
    assert close(loss.total(numbers, None, bf16), numbers.double().sum())
    assert [work.plan.ctas for work in launches] == [3, 1] * 4


@pytest.mark.parametrize(
    ("reduction", "options", "dtype", "columns"),
    [
        ("mean", {}, fp16, 300),
        ("mean", {"ignore_index": 52}, fp32, 300),
        ("sum", {"scale": -0.5, "softcap": 4.0}, bf16, 9001),
        ("none", {"label_smoothing": 0.1, "lse_square_scale": 0.01, "ignore_index": 52}, fp32, 1003),
    ],
)
def test_a_loss_that_is_recomputed(reduction, options, dtype, columns, launches):
    ignored = options.get("ignore_index", -100)
    x, target = made((21, columns), dtype).requires_grad_(), torch.arange(21) * 13
    target[4] = ignored
    loss = c.cross_entropy(x, target, reduction=reduction, one_visit=False, dtype=fp32, **options)
    upstream = made(loss.shape, fp32, 2, 1.0)
    (slope,) = torch.autograd.grad(loss, x, upstream)
    wide = x.detach().double().requires_grad_()
    scores = wide * options.get("scale", 1.0)
    scores = 4 * torch.tanh(scores / 4) if "softcap" in options else scores
    exact = torch.nn.functional.cross_entropy(
        scores, target, None, None, ignored, reduction=reduction,
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    squares = torch.where(target == ignored, 0.0, torch.logsumexp(scores, -1).square())
    exact = exact + options.get("lse_square_scale", 0.0) * (squares if reduction == "none" else squares.sum())
    (right,) = torch.autograd.grad(exact, wide, upstream.double())
    assert close(loss, exact, columns) and close(slope, right)
    mean = ["mean"] * (reduction != "none")
    assert [work.plan.kernel.movement for work in launches] == ["row", *mean, "row"]


@pytest.mark.parametrize("function", [c.softmax, c.log_softmax, c.logsumexp], ids=lambda f: f.__name__)
@pytest.mark.parametrize("columns", [31, 1003, 9000, 40000])
def test_bits_do_not_depend_on_company(columns, function, launches):
    """In batch-invariant mode: of other rows, of where a row stands, and of where its tensor begins."""
    x = made((40000 // columns + 2, columns), bf16)
    with c.batch_invariant():
        all_rows = function(x, -1)
        for k in (1, 2):
            assert equal_bits(function(x[:k], -1), all_rows[:k])
        for begin in (1, 6):
            moved = torch.empty(x.numel() + begin, dtype=x.dtype)[begin:].view(x.shape).copy_(x)
            assert equal_bits(function(moved, -1), all_rows)
        apart = torch.empty(len(x), columns + 5, dtype=x.dtype)[:, 2:-3].copy_(x)
        assert equal_bits(function(apart, -1), all_rows)
        assert equal_bits(function(x.flip(0), -1), all_rows.flip(0))
    assert all(work.plan.invariant for work in launches if hasattr(work.plan, "invariant"))


def test_chosen_log_probabilities_have_log_softmaxs_bits(launches):
    x, index = made((5, 3001), fp32), torch.tensor([0, 3000, 7, 1500, 2999])
    with c.batch_invariant():
        found = c.log_softmax(x).gather(1, index[:, None]).squeeze(1)
        assert equal_bits(c.selective_log_softmax(x, index), found)


@pytest.mark.parametrize("columns", [1, 300])
def test_indices_of_a_slice_of_rows(columns, launches):
    """They begin where no 16 bytes do."""
    x, index = made((5, columns), fp32), torch.arange(5) * 7 % columns
    for first in (1, 2):
        rows, of_rows = x[first:], index[first:]
        exact = torch.log_softmax(rows.double(), -1).gather(1, of_rows[:, None]).squeeze(1)
        assert close(c.selective_log_softmax(rows, of_rows), exact)
        assert close(c.cross_entropy(rows, of_rows, reduction="none"), -exact)
    assert launches


# -- The interpreter ---------------------------------------------------------------------------------------------------

KERNEL = """
.visible .entry k(
    .param .u64 k_param_0
)
.reqntid 64, 1, 1
{
    .reg .pred %p<3>;
    ld.param.b64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    BODY
    ret;
}
"""


def run(body: str, tensor: torch.Tensor) -> torch.Tensor:
    program = ptx.parse(KERNEL.replace("BODY", body))
    memory = ptx.Memory([(tensor.data_ptr(), tensor.numel() * tensor.itemsize)])
    ptx.Grid(program, memory, (1, 1), (1, 1), 256).run([tensor.data_ptr()], most=10_000)
    return tensor


STORE = "mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r2;"


def test_lanes_that_part_meet_again():
    body = (
        "setp.lt.u32 %p1, %r1, 7; @%p1 bra $low; mov.b32 %r2, 5; bra $both; $low: mov.b32 %r2, %r1; $both: "
        "shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;" + STORE
    )
    found = run(body, torch.zeros(64, dtype=torch.int32))
    expected = torch.where((t := torch.arange(64)) < 7, t, 5)[t ^ 1]
    assert torch.equal(found, expected.int())


def test_the_smaller_of_two_numbers_and_no_less_than_0():
    body = "sub.s32 %r3, %r1, 20; min.relu.s32 %r2, %r3, 9;"
    found = run(body + STORE, torch.zeros(64, dtype=torch.int32))
    assert torch.equal(found, (torch.arange(64) - 20).clamp(0, 9).int())


def test_threads_of_a_cta_meet_in_shared_memory():
    body = "shl.b32 %r3, %r1, 2; st.shared.b32 [%r3], %r1; bar.sync 0; sub.s32 %r4, 252, %r3; ld.shared.b32 %r2, [%r4];"
    assert torch.equal(run(body + STORE, torch.zeros(64, dtype=torch.int32)), torch.arange(64).flip(0).int())


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (STORE.replace("4;", "8;", 1), IndexError, "an array of|not given"),
        ("add.s64 %rd3, %rd1, 2; ld.global.b32 %r2, [%rd3];", ValueError, "no multiple"),
        ("st.shared.b32 [256], %r1;", IndexError, "shared memory"),
        ("setp.lt.u32 %p1, %r1, 3; @%p1 bar.sync 0;", RuntimeError, "without end"),
        ("$again: bra $again;", RuntimeError, "does not end"),
        ("trap;", ptx.Trap, "thread 0"),
    ],
)
def test_what_a_sanitizer_finds(body, error, words):
    body = body.replace("%r2;", "%r1;")
    with pytest.raises(error, match=words):
        run(body, torch.zeros(64, dtype=torch.int32))


@pytest.mark.parametrize(
    ("shape", "missing"),
    [
        ((9, 3000), "bar.sync"),
        ((1, 40000), "mbarrier.try_wait"),
        ((20, 57), "cp.async.wait_group"),
    ],
)
@classes.however_few()
def test_a_missing_wait_is_seen(shape, missing, launches):
    """Without it the result is another in some order of the warps."""
    x = made(shape, bf16)
    launches.seed = 0
    check_softmax(c.softmax(x), x)
    over = ("mov.pred", "", ("P1", "1"))  # a loop of waiting ends when the wait says so
    with launches.mutated(missing, *over if missing[0] == "m" else ()), pytest.raises(AssertionError):
        for launches.seed in range(8):
            check_softmax(c.softmax(x), x)


def test_a_wrong_kernel_is_seen(launches):
    """The same kernel with a sum that is none, or with a lane's partner mistaken."""
    x = made((9, 300), fp32)
    check_softmax(c.softmax(x), x)
    for name, other in (("add.f32", "max.f32"), ("shfl.sync.bfly.b32", "shfl.sync.idx.b32")):
        with launches.mutated(name, other), pytest.raises(AssertionError):
            check_softmax(c.softmax(x), x)


def scores() -> list[tuple[int, short_scores.Case]]:
    """All cases of some lengths."""
    lengths = ((3, bf16), (8, fp16), (12, fp32), (49, bf16))
    return [(columns, case) for columns, dtype in lengths for case in short_scores.cases(columns, dtype)]


def has(found: tuple[int, short_scores.Case]) -> set:
    """Any two of its length, its math and which inputs there are; and of each input how it is broadcast."""
    columns, case = found
    given = {f.name: getattr(case, f.name) for f in fields(case) if f.name not in ("x", "y", "place")}
    kinds = {name: type(value) for name, value in given.items()}
    broadcasts = {
        (name, *(n > 1 for n in v.shape)) for name, v in given.items() if isinstance(v, torch.Tensor)
    }
    return pairs([("columns", columns), ("math", case.math), *kinds.items()]) | broadcasts


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
@classes.however_few()
def test_scores_of_short_rows(turn, launches, monkeypatch):
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    found = scores()
    chosen = covering(found, has, lambda case: 40 + case[0])
    check_covered(found, chosen, has)
    for _, case in chosen[turn::3]:
        case.check(case.launched())
    assert {work.plan.movement for work in launches} == {"short"}
