"""What each rank does in the tests of rows that stay on chip while ranks exchange their states; see `on_ranks`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cute_softmax as c
from cute_softmax.dispatch.sharded import on_chip

Tensor = torch.Tensor
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# (leading shape, columns of a slice, dtype, result dtype, scale, columns behind the row's end on the last rank)
CASES = [
    ((64,), 75968, bf16, bf16, 1.0, 0),
    ((500,), 4096, bf16, bf16, 0.5, 1000),
    ((3, 7), 20001, fp16, fp16, -2.0, 0),
    ((130,), 50257, fp32, fp32, 1.0, 5),
    ((260,), 3, fp32, fp32, 1.0, 2),
    ((33,), 60000, fp32, fp32, 1.0, 0),
    ((1,), 64128, bf16, fp32, 1.0, 7),
    ((20000,), 260, bf16, bf16, 1.0, 0),
    ((5000,), 1000, fp32, fp16, 3.0, 1),
]
CLOSE = {bf16: 2.0**-7, fp16: 2.0**-9, fp32: 1e-5}


@contextmanager
def counted() -> Iterator[list[str]]:
    """The maths of launches that exchange on chip, as they are made."""
    run, found = on_chip.Exchange.run, []

    def counting(exchange, math, *asked):
        found.append(math)
        run(exchange, math, *asked)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on_chip.Exchange, "run", counting)
        yield found


def rows_of(rank: int, world: int, shape: tuple, columns: int, dtype: torch.dtype, seed: int = 0):
    """(this rank's slice, the whole rows in float64), on its GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    whole = 3 * torch.randn(*shape, columns * world, generator=generator, device="cuda", dtype=fp32)
    whole = whole.to(dtype)
    return whole[..., rank * columns : (rank + 1) * columns].contiguous(), whole.double()


def close(found: Tensor, exact: Tensor, dtype: torch.dtype, least: float) -> bool:
    """Whether numbers of a dtype are near others, of which those below `least` in size may be off by as much."""
    error = (found.double() - exact).abs() / exact.abs().clamp_min(least)
    same = (found == exact) | (found.isnan() & exact.isnan())
    return bool((same | (error < CLOSE[dtype])).all())


def values(rank: int, world: int) -> None:
    """Softmaxes, their logarithms and the gradients of both, with rows and slices of -inf, NaN on one rank; twice."""
    group, failed = dist.group.WORLD, []  # told at the end: a rank that stops leaves the other waiting
    for number, (shape, columns, dtype, result, scale, less) in enumerate(CASES):
        x, whole = rows_of(rank, world, shape, columns, dtype, number)
        size, part = columns * world - less, slice(rank * columns, (rank + 1) * columns)
        first = whole.view(-1, columns * world)[0]
        if columns > 100 and scale > 0:
            first[: columns + columns // 2] = -math.inf
            x.view(-1, columns)[0] = first[part]
        given = {"group": group, "vocab_size": size} if less else {"group": group}
        for log, function in ((False, c.softmax), (True, c.log_softmax)):
            if log and scale < 0:
                continue
            leaf = x.clone().requires_grad_()
            with counted() as launched:
                y = function(leaf, -1, result, scale=scale, **given)
                again = function(x, -1, result, scale=scale, **given)
                dy, of_whole = rows_of(rank, world, shape, columns, result, 100 + number)
                (dx,) = torch.autograd.grad(y, leaf, dy)
            name = "log_softmax" if log else "softmax"
            if launched != [name, name, f"{name}_backward"] or not torch.equal(y, again):
                failed.append((number, launched))
            logs = torch.log_softmax(whole[..., :size] * scale, -1)
            exact = logs if log else logs.exp()
            end = max(min(columns, size - rank * columns), 0)
            mine = slice(part.start, part.start + end)
            g = of_whole[..., :size]
            # It is computed from results as they are rounded.
            kept = y.detach()[..., :end].double()
            if log:
                down = g[..., mine] - kept.exp() * g.sum(-1, keepdim=True)
            else:
                dist.all_reduce(total := (g[..., mine] * kept).sum(-1, keepdim=True))
                down = kept * (g[..., mine] - total)
            right = close(y[..., :end], exact[..., mine], result, 1.0 if log else 1e-3)
            if not (right and (y[..., end:] == (-math.inf if log else 0)).all()):
                failed.append((number, name))
            down = down * scale
            bound = 0.1 * down[~down.isnan()].abs().max().item()
            if not close(dx[..., :end], down, dtype, bound) or dx[..., end:].any():
                failed.append((number, name, "gradient"))
    assert not failed, failed


LOSSES = [
    # rows, columns of a slice, dtype, reduction, scale, lse_square_scale, columns behind the row's end on the last rank
    (200, 75968, bf16, "mean", 1.0, 0.0, 0),
    (500, 4096, bf16, "sum", 0.5, 0.01, 1000),
    (130, 50257, fp32, "mean", -1.5, 0.0, 5),
    (3000, 260, fp32, "mean", 1.0, 0.001, 0),
]


def losses(rank: int, world: int) -> None:
    """A cross entropy whose gradient is written with it, for upstream gradients of 1 and others, with targets on every
    rank and ignored ones; what is not served so, beside it."""
    group, mesh = dist.group.WORLD, init_device_mesh("cuda", (world,))
    for number, (count, columns, dtype, reduction, scale, squares, less) in enumerate(LOSSES):
        x, whole = rows_of(rank, world, (count,), columns, dtype, number)
        size, part = columns * world - less, slice(rank * columns, (rank + 1) * columns)
        whole = whole[:, :size].requires_grad_()
        target = torch.randint(
            0, size, (count,), device="cuda", generator=torch.Generator("cuda").manual_seed(7)
        )
        target[::5] = -100
        given = {"group": group, "reduction": reduction, "scale": scale, "lse_square_scale": squares}
        given |= {"vocab_size": size} if less else {}
        exact = torch.nn.functional.cross_entropy(whole * scale, target, reduction=reduction)
        lse = torch.where(target >= 0, torch.logsumexp(whole * scale, 1) ** 2, 0)
        exact = exact + squares * lse.sum() / (1 if reduction == "sum" else (target >= 0).sum())
        (wanted,) = torch.autograd.grad(exact, whole)
        mine = wanted[:, part]
        for upstream in (1.0, 0.25):
            leaf = x.clone().requires_grad_()
            with counted() as launched:
                loss = c.cross_entropy(leaf, target, **given, one_visit=True)
                loss.backward(torch.tensor(upstream, device="cuda", dtype=loss.dtype))
            assert launched == ["softmax"], (number, launched)
            assert loss.dtype is dtype and close(loss, exact, dtype, 1e-3), (number, loss, exact)
            found = leaf.grad[:, : mine.shape[1]]
            assert close(found, mine * upstream, dtype, 0.02 * mine.abs().max().item() * upstream), number
            assert not leaf.grad[:, mine.shape[1] :].any()
        if not less:
            of_mesh = DTensor.from_local(x, mesh, [Shard(1)]).requires_grad_()
            with counted() as launched:
                alike = c.cross_entropy(of_mesh, target, **given | {"group": None}, one_visit=True)
                (alike * 0.25).backward()
            assert launched == ["softmax"] and torch.equal(alike.to_local(), loss), number
            assert torch.equal(of_mesh.grad.to_local(), leaf.grad), number
        every = [torch.empty_like(loss) for _ in range(world)]
        dist.all_gather(every, loss.detach())
        assert all(torch.equal(other, every[0]) for other in every)  # the same bits
        with pytest.raises(RuntimeError, match="one_visit=False"):
            loss.backward()
        with counted() as launched:
            # No gradient is recorded: none is written.
            again = c.cross_entropy(x, target, **given, one_visit=True)
            each = c.cross_entropy(leaf, target, **given | {"reduction": "none"})
            smooth = c.cross_entropy(leaf, target, **given | {"vocab_size": size}, label_smoothing=0.1)
            _, sums = c.cross_entropy(leaf, target, **given, return_lse=True)
            kept = c.cross_entropy(leaf, target, **given, one_visit=False)
            with pytest.raises(ValueError, match="not served in one visit"):
                c.cross_entropy(leaf, target, **given | {"reduction": "none"}, one_visit=True)
            twice = [torch.autograd.grad(kept, leaf, retain_graph=True)[0] for _ in range(2)]
        assert launched == [] and close(again, exact, dtype, 1e-3)
        assert each.shape == sums.shape == (count,) and smooth.isfinite()
        assert close(kept, exact, dtype, 1e-3)
        assert torch.equal(*twice)
        with counted() as launched:
            c.cross_entropy(leaf, target, **given).backward()
        assert launched == ["softmax"] * (dtype is bf16)  # where it pays
        assert close(twice[0][:, : mine.shape[1]], mine, dtype, 0.02 * mine.abs().max().item())


def nan_and_infinity(rank: int, world: int) -> None:
    """On one rank they reach the whole row; a row of -inf alone is NaN, as in torch."""
    x, whole = rows_of(rank, world, (8,), 5000, bf16)
    for row, number in enumerate((math.nan, math.inf, -math.inf)):
        whole[row, -1] = number
        if number < 0:
            whole[row] = number
    x.copy_(whole[:, rank * 5000 : (rank + 1) * 5000])
    y = c.softmax(x, group=dist.group.WORLD)
    assert close(y, torch.softmax(whole, -1)[:, rank * 5000 : (rank + 1) * 5000], bf16, 1e-3)
    assert y[:3].isnan().all() and not y[3:].isnan().any()


def places(rank: int, world: int) -> None:
    """Rows that lie apart, off vector boundaries, transposed, in a view; another reduced dimension."""
    group, columns = dist.group.WORLD, 6000
    held, whole = rows_of(rank, world, (40,), columns, bf16)
    apart = torch.empty(40, columns + 77, dtype=bf16, device="cuda")[:, 5 : 5 + columns].copy_(held)
    exact = torch.softmax(whole, -1)[:, rank * columns : (rank + 1) * columns]
    with counted() as launched:
        for given in (apart, held.t().contiguous().t(), held.view(5, 8, columns).transpose(0, 1)):
            y = c.softmax(given, group=group)
            expected = exact.view(5, 8, columns).transpose(0, 1) if given.dim() == 3 else exact
            assert close(y, expected, bf16, 1e-3)
        assert close(c.softmax(held.t(), 0, group=group).t(), exact, bf16, 1e-3)
    assert len(launched) == 4


def elsewhere(rank: int, world: int) -> None:
    """Where ranks cannot know that all slices are alike, and where they need not, nothing is exchanged on chip."""
    x, whole = rows_of(rank, world, (16,), 2000, fp32)
    mine = slice(rank * 2000, (rank + 1) * 2000)
    with counted() as launched:
        y = c.softmax(x, group=dist.group.WORLD, vocab_start=mine.start)
        lse = c.logsumexp(x, -1, group=dist.group.WORLD)
        with c.batch_invariant(block_size=500):
            same = c.softmax(x, group=dist.group.WORLD)
    assert launched == []
    exact = torch.softmax(whole, -1)[:, mine]
    assert close(y, exact, fp32, 1e-3) and close(same, exact, fp32, 1e-3)
    assert close(lse, torch.logsumexp(whole, -1), fp32, 1.0)


def graphs(rank: int, world: int) -> None:
    """Replayed often, by ranks that run apart: each launch has an epoch of its own."""
    x, _ = rows_of(rank, world, (300,), 9000, bf16)
    c.softmax(x, group=dist.group.WORLD)  # the workspace is there before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = c.softmax(x, group=dist.group.WORLD)
        z = c.softmax(y * 1000, group=dist.group.WORLD)
    for turn in range(30):
        other, whole = rows_of(rank, world, (300,), 9000, bf16, turn)
        x.copy_(other)
        if (turn + rank) % 3 == 0:
            torch.cuda._sleep(3_000_000 * (1 + turn % 4))
        graph.replay()
        mine = slice(rank * 9000, (rank + 1) * 9000)
        exact = torch.softmax(whole, -1)
        assert close(y, exact[:, mine], bf16, 1e-3), turn
        again = torch.softmax(exact.to(bf16).mul(1000).double(), -1)[:, mine]
        assert close(z, again, bf16, 0.5), turn


def beside(rank: int, world: int) -> None:
    """Two groups on streams of their own, and collectives of a third beside them which one rank needs before it comes
    to its part of the rows, as sharded parameters are gathered."""
    groups = [dist.new_group(list(range(world))) for _ in range(3)]
    for group in groups:  # the first call of a group waits for all ranks on the host
        c.softmax(torch.ones(8, 5000, dtype=bf16, device="cuda"), group=group)
        dist.barrier(group)
    streams = [torch.cuda.Stream() for _ in groups]
    weights = torch.ones(1 << 24, device="cuda")
    every = torch.empty(world << 24, device="cuda")
    made = [rows_of(rank, world, (2000,), 12000, bf16, seed) for seed in (1, 2)]
    exact = [torch.softmax(whole, -1)[:, rank * 12000 : (rank + 1) * 12000] for _, whole in made]
    torch.cuda.synchronize()
    for turn in range(10):
        found = []
        if rank == turn % world:  # its rows wait for what the other rank gathers behind its own
            with torch.cuda.stream(streams[2]):
                torch.cuda._sleep(2_000_000)
                dist.all_gather_into_tensor(every, weights, group=groups[2])
            streams[0].wait_stream(streams[2])
        for (x, _), group, stream in zip(made, groups, streams, strict=False):
            with torch.cuda.stream(stream):
                found.append(c.softmax(x, group=group))
        if rank != turn % world:
            with torch.cuda.stream(streams[2]):
                dist.all_gather_into_tensor(every, weights, group=groups[2])
        torch.cuda.synchronize()
        assert all(close(y, e, bf16, 1e-3) for y, e in zip(found, exact, strict=True)), turn


def a_rank_that_does_not_come(rank: int, world: int) -> None:
    """The other gives up after the workspace's patience: NaN, and the next call raises."""
    group = dist.new_group(list(range(world)))
    x, _ = rows_of(rank, world, (100,), 4000, bf16)
    c.softmax(x, group=group)
    exchange = on_chip.exchange_of(
        "softmax", [bf16, bf16], (100, 4000), _asked(group), torch.cuda.current_device()
    )
    exchange.workspace.numbers["patience"] = 10**8
    if rank == 0:
        y = c.softmax(x, group=group)
        torch.cuda.synchronize()
        assert y.isnan().all()
        with pytest.raises(RuntimeError, match="waited for a peer"):
            c.softmax(x, group=group)


def _asked(group: dist.ProcessGroup):
    from cute_softmax.dispatch.sharded.states import slice_of

    return slice_of(4000, group, None, None)


ALL: list[Callable] = [
    values,
    losses,
    nan_and_infinity,
    places,
    elsewhere,
    graphs,
    beside,
    a_rank_that_does_not_come,
]
