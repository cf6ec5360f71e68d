"""The kernels of the largest elements, emulated: rows whose largest ones are hard to tell apart from the others."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import emulated
import pytest
import torch
from compiled import compile_anew

from cute_softmax import batch_invariant, topk_log_softmax, topk_softmax
from cute_softmax.kernels.topk import forward, held, long
from cute_softmax.plan import topk_long

INF, NAN = float("inf"), float("nan")
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launches(monkeypatch, tmp_path):
    return emulated.install(monkeypatch, tmp_path)


@pytest.fixture
def alone(monkeypatch):
    """A CTA takes a row, however few they are."""
    monkeypatch.setattr(topk_long, "HELD_K", -1)
    monkeypatch.setattr(topk_long, "SHARES", 1)


def one_of(cluster: int, made, room, rows: int, vectors: int, device):
    """The class of rows that clusters of a size hold, however many rows there are."""
    threads = next(t for t in topk_long.HELD_SIZES if topk_long.HELD_VECTORS[-1] * t * cluster >= vectors)
    each = -(-topk_long._share(vectors, cluster) // threads)
    held = next(n for n in topk_long.HELD_VECTORS if n >= each)
    return made(replace(room, threads=threads), split=False, cluster_n=cluster, held=held)


def hard(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Ties in one tile and over all, more of them than there is room for, rows that rise or fall, and no numbers."""
    generator = torch.Generator().manual_seed(columns)
    noise = torch.randn(columns, generator=generator) * 3
    few = torch.rand(columns, generator=generator) < 0.002
    steps = (torch.arange(columns) // 4000).float()
    rows = [
        noise,
        torch.zeros(columns),
        torch.full((columns,), -INF),
        torch.where(few, noise, -INF),
        torch.where(few, NAN, torch.where(noise > 0, 0.0, -0.0)),
        torch.where(noise > 8, INF, noise),
        noise.sort().values,
        steps,
        -steps,
        torch.cat((torch.zeros(columns - 5), torch.ones(5))),
        noise.round(),
    ]
    return torch.stack(rows).to(dtype)


def check(x: torch.Tensor, k: int):
    index = torch.arange(len(x)) * 997 % x.shape[-1]
    got = topk_log_softmax(x, k, index, dtype=fp32)
    unsigned = x.masked_fill(x == 0, 0.0).masked_fill(x.isnan(), NAN)
    order = torch.sort(unsigned, dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(got.indices, order), (got.indices != order).any(-1).nonzero()
    assert torch.equal(got.ranks, (x > x.gather(-1, index[:, None])).sum(-1))
    right = torch.log_softmax(x.double(), -1)
    for found, at in ((got.values, order), (got.chosen[:, None], index[:, None])):
        assert torch.allclose(found.double(), right.gather(-1, at), rtol=1e-5, atol=2e-5, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "k", "dtype", "shares", "rows"),
    [
        (600, 8, bf16, 1, slice(None)),
        (7001, 8, bf16, 1, slice(None)),
        (6001, 33, fp32, 1, slice(0, None, 2)),
        (5000, 300, fp16, 1, slice(1, None, 2)),
        (20003, 40, bf16, topk_long.SHARES, slice(0, None, 3)),
        (30001, 1000, bf16, 1, slice(0, None, 5)),
    ],
)
def test_hard_rows(columns, k, dtype, shares, rows, launches, monkeypatch):
    monkeypatch.setattr(topk_long, "HELD_K", -1)
    monkeypatch.setattr(topk_long, "SHARES", shares)
    check(hard(columns, dtype)[rows], k)
    assert all((work.plan.shares == 1) == (shares == 1) for work in launches)


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "k", "dtype", "cluster", "rows"),
    [
        (9001, 8, bf16, 2, slice(None)),
        (17001, 40, fp16, 3, slice(0, None, 2)),
        (20003, 100, fp32, 8, slice(1, None, 3)),
        (70001, 8, bf16, 15, slice(0, None, 5)),
        (17001, 128, bf16, 2, slice(0, None, 4)),
        (262144, 40, fp32, 16, slice(0, None, 8)),
    ],
)
def test_hard_rows_that_clusters_hold(columns, k, dtype, cluster, rows, launches, monkeypatch):
    monkeypatch.setattr(topk_long, "_held", partial(one_of, cluster))
    check(hard(columns, dtype)[rows], k)
    assert all(work.plan.kernel.cluster_n == cluster and not work.plan.scratch for work in launches)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "in clusters"])
def test_results_in_the_dtype_of_the_logits(shared, launches, monkeypatch):
    """Rounded as torch does; float32 where autograd records, whose gradients need it."""
    if not shared:
        monkeypatch.setattr(topk_long, "HELD_K", -1)
    x, index = hard(9001, bf16)[[0, 3, 5, 6]], torch.arange(4)
    right = topk_log_softmax(x, 8, index, dtype=fp32)
    for logits, stored in ((x, "bf16"), (x.clone().requires_grad_(), "fp32")):
        got = topk_log_softmax(logits, 8, index)
        assert launches[-1].plan.kernel.dtypes == ("bf16", stored)
        assert bool(launches[-1].plan.kernel.held) is shared
        for a, b in zip(got, right, strict=True):
            assert a.dtype == (bf16 if b.is_floating_point() else torch.int64)
            assert torch.equal(a.nan_to_num(7.0), b.to(a.dtype).nan_to_num(7.0))


def test_a_wrong_bound_of_a_cluster_is_seen(launches, monkeypatch):
    monkeypatch.setattr(emulated, "compile_and_read", compile_anew)
    bound = held.bound_of
    monkeypatch.setattr(held, "bound_of", lambda *call: bound(*call) + 1)
    with pytest.raises(AssertionError):
        check(hard(20001, bf16)[[0, 1, 7]], 8)
    assert launches[0].plan.kernel.held


def test_ctas_that_do_not_wait_for_each_other_are_seen(launches):
    """Before they look at what the others have told them, and before the first one selects: in some order of the
    warps the result is another."""
    x = hard(20001, bf16)[[0, 7]]
    launches.seed = 1
    check(x, 8)
    over = ("mov.pred", "", ("P1", "1"))  # a loop of waiting ends when the wait says so
    with launches.mutated("mbarrier.try_wait", *over), pytest.raises(AssertionError):
        for launches.seed in range(8):
            check(x, 8)


@pytest.mark.parametrize("room", topk_long.ROOMS, ids=lambda room: f"{room.k}-{room.threads}")
def test_every_room(room, launches, alone, monkeypatch):
    """However many rows there are: of several tiles, with a better bound between them."""
    monkeypatch.setattr(topk_long, "rooms_of", lambda k: [room])
    check(hard(room.threads * 100 + 5, fp32)[[0, 1, 6, 9, 10]], min(room.k, 300))
    assert launches[0].plan.kernel.room == room and launches[0].plan.tiles > 5


def test_all_that_is_noted_runs_out_of_room(launches, alone):
    """A row that rises notes all of every tile."""
    x = torch.arange(60000).float()[None]
    check(x, 20)
    check(x.flip(-1), 20)


def test_scalars_behind_the_last_vector_do_not_win_over_their_equals(launches, alone):
    """Nor where the equal ones before them are found again when places have run out."""
    x = torch.zeros(2, 9001)
    x[:, -5:] = 1.0
    check(x, 1)
    check(x, 3)


@pytest.mark.parametrize("mutant", ["equal ones are left out", "the bound is one too high"])
def test_a_wrong_bound_is_seen(mutant, launches, alone, monkeypatch):
    monkeypatch.setattr(emulated, "compile_and_read", compile_anew)
    if mutant == "equal ones are left out":
        note = long.note
        monkeypatch.setattr(long, "note", lambda *call: note(*call[:4], call[4] + 0.5, *call[5:]))
    else:
        bound = long.bound_of_groups
        monkeypatch.setattr(long, "bound_of_groups", lambda *call: bound(*call) + 1)
    with pytest.raises(AssertionError):
        check(hard(20001, bf16)[[0, 1, 7]], 8)


# -- Short rows --------------------------------------------------------------------------------------------------------


def alike(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`hard` rows, some of which many elements differ in their last bits alone, so that rough keys do not tell them
    apart, and two whose largest are all a warp's first lane's, one of them without last bits."""
    generator = torch.Generator().manual_seed(columns)
    last = torch.randint(0, 64, (columns,), generator=generator, dtype=torch.int32)
    near = (last + 0x40000000).view(torch.float32)
    noise = torch.randn(columns, generator=generator)
    few = torch.where(torch.rand(columns, generator=generator) < 0.1, near, noise / 4)
    pairs = (torch.arange(columns) // 2).float() * (1 + 2.0**-23 * (torch.arange(columns) % 2))
    steps = 1.5 + torch.arange(columns).flip(0).to(dtype) * torch.finfo(dtype).eps
    of_lane = noise + 50.0 * (torch.arange(columns) % 128 < 4)
    rows = [
        near,
        -near,
        few,
        few * 2.0**-140,
        noise.bfloat16().float(),
        pairs,
        pairs.flip(-1),
        noise,
        of_lane,
        of_lane.bfloat16().float(),
    ]
    return torch.cat([torch.stack([row.to(dtype) for row in [*rows, steps, -steps]]), hard(columns, dtype)])


def check_short(x: torch.Tensor, k: int, renormalize: bool):
    values, indices = topk_softmax(x, k, renormalize=renormalize, dtype=fp32)
    unsigned = x.masked_fill(x == 0, 0.0).masked_fill(x.isnan(), NAN).double()
    order = torch.sort(unsigned, dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(indices, order), (indices != order).any(-1).nonzero().flatten()
    chosen = unsigned.gather(-1, order)
    right = torch.softmax(chosen, -1) if renormalize else torch.softmax(unsigned, -1).gather(-1, order)
    assert torch.allclose(values.double(), right, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize(
    ("columns", "k", "dtype"),
    [
        (8, 2, fp32),
        (60, 8, bf16),
        (100, 5, fp16),
        (128, 1, fp32),
        (200, 8, fp32),
        (256, 2, fp32),
        (256, 32, fp32),
        (512, 8, fp32),
        (512, 32, bf16),
        (512, 33, fp32),
        (520, 31, fp32),
        (1000, 3, fp32),
        (1000, 128, bf16),
        (1024, 8, bf16),
        (1024, 8, fp32),
        (1024, 32, fp32),
    ],
)
def test_hard_short_rows(columns, k, dtype, many, launches):
    with batch_invariant() if many else nullcontext():
        check_short(alike(columns, dtype), k, renormalize=k % 2 == 0)
    assert [work.plan.invariant for work in launches] == [many]


@pytest.mark.parametrize(
    "mutant", ["never in doubt", "those taken stay", "neighbours stay", "lists are long"]
)
def test_a_wrong_choice_is_seen(mutant, launches, monkeypatch):
    monkeypatch.setattr(emulated, "compile_and_read", compile_anew)
    doubtful, columns = forward.doubtful, 256

    def doubted(c, *rest):
        unsure, near = doubtful(c, *rest)
        return [u & (u ^ u) for u in unsure], near

    if mutant == "never in doubt":
        monkeypatch.setattr(forward, "doubtful", doubted)
    elif mutant == "those taken stay":
        monkeypatch.setattr(forward, "TAKEN", forward.Int32(0x7F000000))
    elif mutant == "lists are long":
        take = forward.TopkKernel.take
        monkeypatch.setattr(
            forward.TopkKernel, "take", lambda *call: (take(*call)[0], forward.Boolean(False))
        )
        columns = 1024
    else:
        monkeypatch.setattr(forward, "settled", lambda c, elements, indices, *rest: (elements, indices))
    with pytest.raises(AssertionError), batch_invariant():
        check_short(alike(columns, fp32), 8, renormalize=True)
