"""Rows that ranks share and keep on chip, all ranks' kernels at once, beside float64; the plans of these launches."""

from __future__ import annotations

import math
from dataclasses import replace

import on_chip
import pytest
import torch
from on_chip import Workspaces

from cute_softmax.plan import NotPlanned, Prologue, ranks
from cute_softmax.plan.choose import plan_call
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import contiguous
from cute_softmax.plan.ranks import ring_class, sharers, sms_of
from cute_softmax.runtime.clusters import clusters_at_once

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bounds on errors: of a 16-bit result its rounding, of float32 a few roundings on the way.
CLOSE = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 3e-6}


def slices(whole: torch.Tensor, ranks: int, dtype: torch.dtype, offset: int = 0) -> list[torch.Tensor]:
    """The ranks' parts of rows, each in memory of its own, which begins `offset` elements behind a vector boundary."""
    found = []
    for part in whole.to(dtype).tensor_split(ranks, 1):
        held = torch.full((part.numel() + 64,), math.nan, dtype=dtype)[offset : offset + part.numel()]
        found.append(held.view_as(part).copy_(part))
    return found


def like(parts: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Results for slices, of NaN so far."""
    return [torch.full_like(part, math.nan, dtype=dtype) for part in parts]


def rows(count: int, columns: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(
        count, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.fixture
def launch(tmp_path, monkeypatch):
    def launched(*asked, **options):
        return on_chip.launch(tmp_path, monkeypatch, *asked, **options)

    return launched


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: str, least: float = 0.0) -> None:
    """least: what errors are measured against where the expected number is smaller."""
    found, bound = found.double(), expected.abs().clamp_min(least)
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (found - expected).abs() / bound)
    assert not (error.isnan() | (error > CLOSE[dtype])).any(), error.max()


CASES = [
    # ranks, rows, columns of a slice, dtype, elements off a boundary, clusters, order of warps
    (1, 3, 1000, "bf16", 0, 2, None),
    (2, 9, 20000, "bf16", 0, 2, None),
    (2, 5, 9000, "bf16", 0, 2, 1),
    (3, 2, 45001, "bf16", 3, 1, None),
    (2, 3, 90000, "fp16", 0, 1, None),
    (2, 5, 30000, "fp32", 0, 2, None),
    (2, 3, 21333, "fp32", 1, 1, None),
    (4, 22, 777, "bf16", 1, 2, None),
    (8, 30, 160, "fp32", 0, 2, None),
    (2, 9, 3000, "fp16", 0, 2, 5),
    # Enough turns for each place of the ring to hold several rows, whose last vectors do not exist.
    (1, 26, 10000, "bf16", 0, 1, None),
]


@pytest.mark.parametrize("ranks, count, columns, dtype, offset, clusters, seed", CASES)
def test_softmax(launch, ranks, count, columns, dtype, offset, clusters, seed):
    """Two launches after each other, with rows and slices of -inf, NaN on one rank, and +inf."""
    workspaces = Workspaces(ranks)
    for turn in range(2):
        whole = rows(count, columns * ranks, turn)
        whole[0, :columns] = -math.inf  # of nothing on one rank
        whole[1] = -math.inf if turn else whole[1]
        whole[-1, -1] = (math.nan, math.inf)[turn]
        xs = slices(whole, ranks, DTYPES[dtype], offset)
        ys = like(xs)
        tensors = [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]
        given = Prologue()
        launch(workspaces, "softmax", tensors, [{}] * ranks, given, clusters=clusters, seed=seed)
        expected = torch.softmax(torch.cat(xs, 1).double(), 1)
        assert_close(torch.cat(ys, 1), expected, dtype, 1e-30 if dtype != "fp16" else 6e-5)
    assert not workspaces.alarms.any()
    assert all(words.tolist() == [2] * ranks for words in workspaces.come)


@pytest.mark.parametrize("places", [3, 4, 5])
@pytest.mark.parametrize("seed", [None, 3])
def test_places_of_a_ring(launch, monkeypatch, places, seed):
    """With three a tile is finished one turn after it was reduced, with four two."""
    monkeypatch.setattr(ranks, "MOST", places)
    workspaces = Workspaces(2)
    xs = slices(rows(21, 2 * 2000), 2, torch.bfloat16)
    ys = like(xs)
    plan = launch(
        workspaces,
        "softmax",
        [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)],
        [{}] * 2,
        Prologue(),
        clusters=1,
        seed=seed,
    )
    assert (plan.kernel.ring, plan.kernel.lag) == (places, places - 2)
    assert_close(torch.cat(ys, 1), torch.softmax(torch.cat(xs, 1).double(), 1), "bf16", 1e-30)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_wider_results(launch, dtype):
    workspaces = Workspaces(2)
    xs = slices(rows(4, 24000), 2, DTYPES[dtype])
    ys = like(xs, torch.float32)
    launch(
        workspaces,
        "softmax",
        [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)],
        [{"scale": 0.7}] * 2,
        Prologue(scale="number"),
    )
    expected = torch.softmax(torch.cat(xs, 1).double() * 0.7, 1)
    assert_close(torch.cat(ys, 1), expected, "fp32", 1e-30)


@pytest.mark.parametrize("dtype, columns", [("bf16", 20000), ("fp32", 5001)])
def test_log_softmax_and_both_gradients(launch, dtype, columns):
    workspaces = Workspaces(2)
    xs = slices(rows(5, 2 * columns), 2, DTYPES[dtype])
    ys, dys = like(xs), slices(rows(5, 2 * columns, 1, 1.0), 2, DTYPES[dtype])
    given = Prologue()
    launch(
        workspaces, "log_softmax", [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)], [{}] * 2, given
    )
    x, dy = (torch.cat(parts, 1).double() for parts in (xs, dys))
    assert_close(torch.cat(ys, 1), torch.log_softmax(x, 1), dtype, 1.0)
    for name in ("log_softmax", "softmax"):
        kept = [torch.softmax(x, 1), torch.log_softmax(x, 1)][name == "log_softmax"]
        kept = slices(kept, 2, DTYPES[dtype])
        dxs = like(xs)
        tensors = [{"dy": a, "y": b, "dx": c} for a, b, c in zip(dys, kept, dxs, strict=True)]
        launch(workspaces, f"{name}_backward", tensors, [{}] * 2, given)
        y = torch.cat(kept, 1).double()
        if name == "softmax":
            expected = y * (dy - (dy * y).sum(1, keepdim=True))
        else:
            expected = dy - y.exp() * dy.sum(1, keepdim=True)
        assert_close(torch.cat(dxs, 1), expected, dtype, 0.05 * expected.abs().max().item())


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_losses_with_their_gradients(launch, squares, scale):
    """Targets on every rank, ignored ones, and in the padding behind a row's end."""
    workspaces, columns, count, ignored = Workspaces(2), 20000, 7, 12345 if squares else -100
    whole = rows(count, 2 * columns)
    xs = slices(whole, 2, torch.bfloat16)
    target = torch.tensor([3, columns - 1, columns, 2 * columns - 1, ignored, 12345, 31000])
    alpha = torch.linspace(0.5, 2.0, count)
    given = Prologue(scale="number" if scale != 1 else "", alpha="groups", target="loss", squares=squares)
    dxs, losses = like(xs), [torch.full((count,), math.nan) for _ in xs]
    tensors = [
        {"x": x, "alpha": alpha * scale, "index": target, "y": dx, "loss": loss}
        for x, dx, loss in zip(xs, dxs, losses, strict=True)
    ]
    numbers = [
        {"scale": scale, "ignore": ignored, "squares": 0.1, "start": rank * columns, "size": 2 * columns}
        for rank in range(2)
    ]
    launch(workspaces, "softmax", tensors, numbers, given)
    x = torch.cat(xs, 1).double().requires_grad_()
    lse = torch.logsumexp(x * scale, 1)
    counted = target != ignored
    found = (x * scale).gather(1, target.clamp_min(0)[:, None])[:, 0]
    loss = torch.where(counted, lse - found + (0.1 * lse**2 if squares else 0.0), 0.0)
    (loss * alpha.double()).sum().backward()
    for mine in losses:  # the same bits on both
        assert torch.equal(mine, losses[0])
        assert_close(mine, loss.detach(), "fp32", 1.0)
    assert_close(torch.cat(dxs, 1), x.grad, "bf16", 1e-6)


def test_a_target_beyond_the_row_stops_the_kernel(launch):
    from ptx import Trap

    x = slices(rows(2, 2000), 2, torch.bfloat16)
    tensors = [
        {
            "x": part, "alpha": torch.ones(2), "index": torch.tensor([1, 2000]), "y": torch.empty_like(part),
            "loss": torch.empty(2),
        }
        for part in x
    ]  # fmt: skip
    numbers = [{"ignore": -100, "start": rank * 1000, "size": 2000} for rank in range(2)]
    with pytest.raises(Trap):
        launch(Workspaces(2), "softmax", tensors, numbers, Prologue(alpha="groups", target="loss"))


def test_a_rank_that_does_not_come(launch):
    """The others give up: NaN, and the host is told."""
    workspaces = Workspaces(2)
    xs = slices(rows(6, 2000), 2, torch.bfloat16)
    ys = like(xs)
    launch(
        workspaces,
        "softmax",
        [
            {"x": x, "y": torch.zeros_like(y)} if rank else {"x": x, "y": y}
            for rank, (x, y) in enumerate(zip(xs, ys, strict=False))
        ],
        [{}] * 2,
        Prologue(),
        patience=3000,
        absent=(1,),
    )
    assert ys[0].isnan().all()
    assert workspaces.alarms.tolist() == [1, 0]
    assert [words.tolist() for words in workspaces.come] == [[1, 0], [1, 0]]


def test_slices_that_fit_and_those_that_do_not():
    for name in ("sm_90a", "sm_100a"):
        architecture = ARCHITECTURES[name]
        for dtype in ("bf16", "fp32"):
            for columns in (1, 7, 128, 1000, 4096, 5121, 20481, 64128, 75968, 100001, 131072):
                shared = Prologue(ranks=sharers("softmax", architecture, (dtype, dtype), columns))
                c = ring_class(
                    "softmax", architecture, (dtype, dtype), columns,
                    edges=columns % 8 > 0, access=(16 // (2 if dtype == "bf16" else 4),), prologue=shared,
                )  # fmt: skip
                share = math.ceil(math.ceil(columns / c.cluster_n) / c.line) * c.line
                assert c.tiler[1] >= (columns if c.cluster_n == 1 else share)
                assert c.shared_memory <= architecture.shared_memory
                assert c.lag + 2 <= c.ring
    with pytest.raises(NotPlanned, match="do not fit on chip"):
        sharers("softmax", ARCHITECTURES["sm_90a"], ("fp32", "fp32"), 10**6)


def test_as_many_clusters_as_run_at_once():
    """A cluster more would begin when the others have ended."""
    for eights, sms in ((15, 120), (16, 124), (12, 96), (None, 116)):
        device = replace(H200, eights=eights)
        prologue = Prologue(ranks=sharers("softmax", device.architecture, ("bf16", "bf16"), 75968, 4096))
        operands = [contiguous("bf16", (4096, 75968))] * 2
        plan = plan_call("softmax", (4096, 75968), (1,), operands, device, prologue=prologue)
        assert plan.kernel.cluster_n == 8
        assert (sms_of(device), plan.ctas) == (sms, sms // 8)


def test_without_a_driver_nobody_knows_how_many_clusters_run():
    if not torch.cuda.is_available():
        assert clusters_at_once(0, 1 << 16) is None
