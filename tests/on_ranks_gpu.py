"""What each rank does in the tests of shared rows that need GPUs: streams, graphs, memory; see `on_ranks`."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from on_ranks import near

import cute_softmax as c


def several(rank: int, world: int, works: list[tuple[Callable, dict]]) -> None:
    """One after another, all of them, whatever fails; raises AssertionError with what did on this rank."""
    failed = []
    for work, given in works:
        try:
            work(rank, world, **given)
        except Exception:
            failed.append(f"{work.__name__} {given}: {traceback.format_exc()}")
        told: list = [None] * world
        dist.all_gather_object(told, len(failed))
        if len(set(told)) > 1:  # ranks that stand apart would wait for each other
            break
    assert not failed, "\n".join(failed)


def rows_of(rank: int, world: int, seed: int = 1, rows: int = 64, columns: int = 20_000):
    """(this rank's slice in bfloat16, the whole rows in float64)."""
    whole = 3 * torch.randn(rows, columns * world, generator=torch.Generator().manual_seed(seed))
    whole = whole.to(torch.bfloat16)
    return whole[:, rank * columns : (rank + 1) * columns].cuda(), whole.double()


def streams(rank: int, world: int) -> None:
    """Calls on streams of their own, behind work that takes long, two groups at once."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    made, found = [rows_of(rank, world, seed) for seed in (1, 2)], []
    beside = [torch.cuda.Stream() for _ in groups]
    for (x, _), group, stream in zip(made, groups, beside, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = x * 1
            found.append((c.logsumexp(late, -1, group=group), c.softmax(late, group=group)))
    torch.cuda.synchronize()
    part = slice(rank * 20_000, (rank + 1) * 20_000)
    for (lse, y), (_, whole) in zip(found, made, strict=True):
        assert near(lse, torch.logsumexp(whole, -1), 2e-2)
        assert near(y, torch.softmax(whole, -1)[:, part], 1e-2)


def graphs(rank: int, world: int) -> None:
    """Captured, and replayed with other numbers: both directions of a loss, a softmax in two pieces."""
    from cute_softmax.dispatch.sharded import ways

    x, whole = rows_of(rank, world)
    target = torch.arange(64, device="cuda") * 601
    held, group = x.clone().requires_grad_(), dist.group.WORLD

    def step():
        loss = c.cross_entropy(held, target, group=group)
        (d,) = torch.autograd.grad(loss, held)
        return loss, d, c.softmax(held.detach(), group=group), c.entropy(held.detach(), group=group)

    part = slice(rank * 20_000, (rank + 1) * 20_000)
    for bound in (1 << 60, 0):
        ways.PIECES_FROM = bound
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, d, y, entropy = step()
        for seed in (3, 4):
            other, whole = rows_of(rank, world, seed)
            held.data.copy_(other)
            graph.replay()
            torch.cuda.synchronize()
            leaf = whole.clone().requires_grad_()
            exact = torch.nn.functional.cross_entropy(leaf, target.cpu())
            assert near(loss, exact.detach(), 1e-2), (loss, exact)
            (slope,) = torch.autograd.grad(exact, leaf)
            assert near(d, slope[:, part], 1e-3)
            p = torch.softmax(whole, -1)
            assert near(y, p[:, part], 1e-2) and near(entropy, torch.special.entr(p).sum(-1), 2e-2)


def memory(rank: int, world: int) -> None:
    """Beside results there are numbers of rows alone."""
    x, _ = rows_of(rank, world, rows=2048)
    size = x.numel() * x.element_size()
    target, group = torch.zeros(2048, dtype=torch.int64, device="cuda"), dist.group.WORLD
    leaf = x.detach().requires_grad_()
    for function, results in (
        (lambda: c.logsumexp(x, -1, group=group), 0),
        (lambda: c.softmax(x, group=group), 1),
        (lambda: c.log_softmax(x, group=group), 1),
        (lambda: torch.autograd.grad(c.cross_entropy(leaf, target, group=group), leaf), 1),
    ):
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        assert torch.cuda.max_memory_allocated() - before <= results * size + (1 << 20), results
