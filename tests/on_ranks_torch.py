"""What each rank does in the tests of shared rows: torch's states, DTensors, groups, errors; see `on_ranks`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from on_ranks import both, near
from ranks import installed, place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_softmax as c
from cute_softmax.dispatch.common import placements as of_operators


def compiled(rank: int, world: int, kernels: bool) -> None:
    """Every function with `group` under torch.compile, without a break, with its gradient."""
    installed(kernels)
    group, width = dist.group.WORLD, 6
    whole = torch.randn(4, width * world, generator=torch.Generator().manual_seed(2)).to(place())
    target = torch.randint(width * world, (4,), generator=torch.Generator().manual_seed(4)).to(place())
    weight = torch.arange(1.0, 1 + width * world, device=place())
    here = slice(rank * width, (rank + 1) * width)
    for name, function in {
        "logsumexp": lambda x: c.logsumexp(x, -1, group=group),
        "entropy": lambda x: c.entropy(x, group=group),
        "selective": lambda x: torch.stack(
            c.selective_log_softmax(x, target, return_entropy=True, group=group)
        ),
        "softmax": lambda x: c.softmax(x, group=group, scale=0.5),
        "log_softmax": lambda x: c.log_softmax(x.T, 0, group=group),
        "cross_entropy": lambda x: c.cross_entropy(x, target, group=group, label_smoothing=0.1),
        "weighted": lambda x: c.cross_entropy(x, target, weight, group=group),
        "padded": lambda x: c.softmax(x, group=group, vocab_size=width * world - 2),
    }.items():
        found = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            x = whole[:, here].clone().requires_grad_()
            y = call(x)
            of = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
            found.append((y, torch.autograd.grad(y, x, of)[0]))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True)), name


def exported(rank: int, world: int) -> None:
    """A program that has a call with a group: exported, it gives what the call does."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return c.logsumexp(x, -1, group=dist.group.WORLD)

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    program = torch.export.export(Model(), (x,))
    assert "cute_softmax.sharded_numbers" in str(program.graph)
    assert torch.equal(program.module()(x), Model()(x))


def states_of_torch(rank: int, world: int) -> None:
    """functorch's transforms and second derivatives raise, fake tensors have the results' shapes and dtypes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    group = dist.group.WORLD
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises(NotImplementedError, match="not transformed by functorch"):
            transform(lambda x: c.logsumexp(x, -1, group=group).sum())(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="not transformed"):
        c.softmax(torch.autograd.forward_ad.make_dual(x, x), group=group)
    for function in (c.softmax, c.entropy):
        leaf = x.clone().requires_grad_()
        y = function(leaf, group=group)
        (d,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="not differentiable again"):
            torch.autograd.grad(d.sum(), leaf)
    target = torch.zeros(3, dtype=torch.long)
    with FakeTensorMode() as mode:
        fake, at = mode.from_tensor(x), mode.from_tensor(target)
        assert c.softmax(fake, dtype=torch.float64, group=group).dtype is torch.float64
        found = c.selective_log_softmax(fake, at, return_entropy=True, group=group)
        assert [tuple(t.shape) for t in found] == [(3,), (3,)]
        loss, lse = c.cross_entropy(fake, at, return_lse=True, group=group)
        assert loss.shape == () and lse.shape == (3,)


def dtensors(rank: int, world: int, compile: bool = False) -> None:
    """DTensors that are sharded over the reduced dimension, beside others, or several times, on meshes of one to three
    dimensions."""
    dtype = torch.float64 if place() == "cpu" else torch.float32
    whole = torch.randn(4, 6, 13, generator=torch.Generator().manual_seed(2)).to(place(), dtype)
    target = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(4)).to(place())
    target[1, 2] = -100
    flat = init_device_mesh(place(), (world,))
    meshes = [(flat, [Shard(2)], [Replicate()], -1)]
    if world % 2 == 0:
        square = init_device_mesh(place(), (2, world // 2))
        meshes += [
            (square, [Shard(0), Shard(2)], [Shard(0), Replicate()], -1),
            (square, [Shard(2), Shard(2)], [Replicate(), Replicate()], -1),
            (square, [Shard(2), Shard(1)], [Shard(1), Replicate()][::-1], -1),
            (square, [Shard(2), Shard(1)], [Shard(1), Replicate()], 1),
        ]
    if world == 8:
        cube = init_device_mesh(place(), (2, 2, 2))
        meshes = [
            (cube, [Shard(0), Shard(2), Shard(1)], [Shard(0), Replicate(), Shard(1)], -1),
            (cube, [Shard(2), Replicate(), Shard(2)], [Replicate()] * 3, -1),
        ]

    def call(function, x):
        return (torch.compile(function, fullgraph=True, backend="aot_eager") if compile else function)(x)

    for mesh, placements, of_numbers, dim in meshes[:: 2 if compile else 1]:
        torch.compiler.reset()
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        y = whole.clone().requires_grad_()
        for ours, theirs in (
            (lambda x, d=dim: c.logsumexp(x, d), lambda y, d=dim: torch.logsumexp(y, d)),
            (
                lambda x, d=dim: c.entropy(x, d),
                lambda y, d=dim: torch.special.entr(torch.softmax(y, d)).sum(d),
            ),
            (lambda x, d=dim: c.softmax(x, d), lambda y, d=dim: torch.softmax(y, d)),
            (lambda x, d=dim: c.log_softmax(x, d, scale=0.5), lambda y, d=dim: torch.log_softmax(0.5 * y, d)),
        ):
            found, exact = call(ours, x), theirs(y)
            matrix = found.dim() == 3
            assert isinstance(found, DTensor), type(found)
            assert list(found.placements) == (placements if matrix else of_numbers)
            assert torch.allclose(found.full_tensor(), exact, atol=1e-6)
            of = torch.linspace(-1, 1, exact.numel(), dtype=dtype, device=place()).view(exact.shape)
            (d,) = torch.autograd.grad(found, x, distribute_tensor(of, mesh, found.placements))
            assert torch.allclose(d.full_tensor(), torch.autograd.grad(exact, y, of)[0], atol=1e-6)
        if dim == 1:
            continue
        kept = torch.where(target < 0, 0, target)
        t = distribute_tensor(kept, mesh, of_numbers)
        pair = call(lambda x, t=t: c.selective_log_softmax(x, t, return_entropy=True), x)
        logs = torch.log_softmax(y, -1)
        exact = logs.gather(-1, kept[..., None]).squeeze(-1), -(logs.exp() * logs).sum(-1)
        assert all(torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in zip(pair, exact, strict=True))
        (d,) = torch.autograd.grad(pair[0].sum() + pair[1].sum() / 2, x)
        (e,) = torch.autograd.grad(exact[0].sum() + exact[1].sum() / 2, y)
        assert torch.allclose(d.full_tensor(), e, atol=1e-6)
        losses(x.detach(), y.detach(), target, mesh, of_numbers, call, few=compile)


def losses(
    x: DTensor, y: torch.Tensor, target: torch.Tensor, mesh, of_numbers: list, call: Callable, few: bool
) -> None:
    """Cross entropies of a DTensor (N, d, C), whose classes torch has in dimension 1, with smoothing too, beside those
    of the whole rows."""
    classes_first = [Shard(p.dim % 2 + 1) if p.is_shard() and p.dim else p for p in x.placements]
    whole = y.movedim(-1, 1).contiguous().requires_grad_()
    rows = distribute_tensor(whole.detach(), mesh, classes_first).requires_grad_()
    at = distribute_tensor(target, mesh, of_numbers)
    every = [("mean", 0.0), ("none", 0.2)] if few else product(("mean", "sum", "none"), (0.0, 0.2))
    for reduction, smoothing in every:
        how = {"label_smoothing": smoothing, "reduction": reduction}
        found = call(lambda x, how=how: c.cross_entropy(x, at, **how), rows)
        exact = torch.nn.functional.cross_entropy(whole, target, **how)
        assert torch.allclose(found.full_tensor(), exact, atol=1e-6)
        (d,) = torch.autograd.grad(found.sum(), rows)
        assert torch.allclose(d.full_tensor(), torch.autograd.grad(exact.sum(), whole)[0], atol=1e-6)


def dtensors_that_are_not_taken(rank: int, world: int) -> None:
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (world,))
    half = DTensor.from_local(torch.ones(2, 4), init_device_mesh("cpu", (1, world)), [Partial(), Shard(1)])
    with pytest.raises(ValueError, match="partial sums must be reduced first"):
        c.softmax(half)
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(1)])
    target = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="a weight for a DTensor"):
        c.cross_entropy(x, target, torch.ones(4 * world))
    rows = DTensor.from_local(x.to_local(), init_device_mesh("cpu", (1, world)), [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="with all rows on each"):
        c.cross_entropy(rows.requires_grad_(), target, one_visit=True)


def everywhere(rank: int, world: int, compile: bool = False, alone: bool = False) -> None:
    """All functions of DTensors that are replicated or sharded over other dimensions than the reduced one, on meshes of
    one and two dimensions: values, gradients, and where they lie. alone: without torch's private names."""
    launches = installed(True)
    if alone:
        pytest.MonkeyPatch().setattr(of_operators, "look_up", lambda _: None)
    meshes = {(world,): [[Shard(1)]] if compile else [[Shard(0)], [Shard(1)], [Replicate()]]}
    if world == 4:
        meshes = {(2, 2): [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(1), Shard(1)]]}
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(4, 6, 6, generator=generator)
    given = {
        "mask": torch.rand(4, 6, 6, generator=generator) > 0.3,
        "flat mask": torch.rand(6, 6, generator=generator) > 0.2,
        "sink": torch.randn(6, 1, generator=generator),
        "other": torch.randn(4, 6, 6, generator=generator),
        "index": torch.arange(24).view(4, 6) % 6,
        "values": torch.randn(4, 6, 5, generator=generator),
        "one for all": torch.randn(6, 5, generator=generator),
    }
    for shape, every in meshes.items():
        mesh = init_device_mesh("cpu", shape)
        for placements in every:
            for name, (function, operands) in OF_ROWS.items():
                if compile and name not in COMPILED:
                    continue
                if compile:
                    torch.compiler.reset()
                of_call = [whole, *[given[n] for n in operands]]
                ours = [distribute_tensor(t, mesh, lying_like(whole, t, placements)) for t in of_call]
                theirs = [t.clone() for t in of_call]
                leaves = [(a.requires_grad_(), b.requires_grad_()) for a, b in zip(ours, theirs, strict=True)
                          if b.is_floating_point()]  # fmt: skip
                call = torch.compile(function, fullgraph=True, backend="aot_eager") if compile else function
                found, exact = call(*ours), function(*theirs)
                assert isinstance(found, DTensor), name
                where, close = (name, placements, found.placements), 3e-2 if "product" in name else 1e-5
                assert torch.allclose(found.full_tensor(), exact, atol=close), where
                # The position of a row counts beside a diagonal: rows are gathered then.
                rows = Replicate() if "causal" in name else Shard(1)
                if found.dim():  # replicas may each compute a part instead
                    lie = zip(found.placements, placements, strict=True)
                    assert all(p == (rows if q == Shard(1) else q) or q.is_replicate() for p, q in lie), where
                if not exact.requires_grad:
                    continue
                of = torch.linspace(-1, 1, exact.numel()).view(exact.shape)
                to = [Replicate() if p.is_partial() else p for p in found.placements]
                of_all = distribute_tensor(of, mesh, to)
                ds = torch.autograd.grad(found, [a for a, _ in leaves], of_all, allow_unused=True)
                es = torch.autograd.grad(exact, [b for _, b in leaves], of, allow_unused=True)
                for d, e in zip(ds, es, strict=True):
                    assert (d is None) is (e is None), where
                    assert d is None or torch.allclose(d.full_tensor(), e, atol=close), where
    found = {work.math for work in launches}
    assert found >= {"topk_softmax", "softmax_matmul_backward", "sum", "selective"}, found


def lying_like(whole: torch.Tensor, other: torch.Tensor, placements: list) -> list:
    """Where an operand lies: sharded as the full tensor, if it has that dimension."""
    first = other.dim() == whole.dim() or other.shape == whole.shape[:-1]
    return [p if p.is_shard() and first else Replicate() for p in placements]


# Of a tensor (4, 6, 6), and other operands by name. What has rules of its own stands first: DTensor knows them by the
# first function that a process calls.
OF_ROWS = {
    "sum": (lambda x: c.sum(x, -1), []),
    "product": (lambda x, v: c.softmax_matmul(x.bfloat16(), v.bfloat16()).float(), ["values"]),
    "product with one V": (
        lambda x, v: c.softmax_matmul(x, v.bfloat16(), scale=0.5).float(),
        ["one for all"],
    ),
    "causal product": (lambda x, v: c.softmax_matmul(x, v.bfloat16(), causal=True).float(), ["values"]),
    "product with a sink": (
        lambda x, v, s: c.softmax_matmul(x, v.bfloat16(), sink=s, return_lse=True)[1],
        ["values", "sink"],
    ),
    "softmax_stats": (lambda x: c.softmax_stats(x), []),
    "amax": (lambda x: c.amax(x, -1), []),
    "topk_softmax": (lambda x: c.topk_softmax(x, 3)[0], []),
    "topk_log_softmax": (lambda x, i: c.topk_log_softmax(x, 2, i)[0], ["index"]),
    "kl_div": (lambda x, o: c.kl_div(x, o, reduction="none"), ["other"]),
    "partial_statistics": (lambda x: c.partial_statistics(x).max, []),
    "softmax": (lambda x: c.softmax(x, scale=0.5), []),
    "softmax with a mask": (lambda x, m: c.softmax(x, mask=m, empty_rows="zero"), ["mask"]),
    "softmax with a mask of fewer dimensions": (
        lambda x, m: c.softmax(x, mask=m, empty_rows="zero"),
        ["flat mask"],
    ),
    "softmax with a bias": (lambda x, o: c.softmax(x, bias=o), ["other"]),
    "softmax with a sink": (lambda x, s: c.softmax(x, sink=s), ["sink"]),
    "logsumexp with a sink": (lambda x, s: c.logsumexp(x, -1, sink=s), ["sink"]),
    "causal softmax": (lambda x: c.softmax(x, causal=True), []),
    "log_softmax": (lambda x: c.log_softmax(x, 2), []),
    "softmin": (lambda x: c.softmin(x), []),
    "softmax_": (lambda x: c.softmax_(x.clone()), []),
    "logsumexp": (lambda x: c.logsumexp(x, -1), []),
    "entropy": (lambda x: c.entropy(x), []),
    "selective_log_softmax": (lambda x, i: c.selective_log_softmax(x, i), ["index"]),
    "with entropies": (lambda x, i: c.selective_log_softmax(x, i, return_entropy=True)[1], ["index"]),
    "cross_entropy": (lambda x, i: c.cross_entropy(x.mT, i, reduction="none"), ["index"]),
    "mean cross_entropy": (
        lambda x, i: c.cross_entropy(x.mT, i, label_smoothing=0.1, one_visit=False),
        ["index"],
    ),
    "nn.Softmax": (lambda x: c.nn.Softmax(-1)(x), []),
}
COMPILED = (
    "product with one V", "sum", "topk_softmax", "softmax with a mask of fewer dimensions", "causal softmax",
    "selective_log_softmax", "mean cross_entropy",
)  # fmt: skip


def two_groups(rank: int, world: int) -> None:
    """Pairs of ranks, each with rows of its own, at the same time; and beside them the sum of all, as gradients that
    are reduced are under way while a loss is computed."""
    groups = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    across = [dist.new_group(list(range(i, world, 2))) for i in range(2)]
    whole = torch.randn(world // 2, 3, 8, generator=torch.Generator().manual_seed(5)).double().to(place())
    mine, part = whole[rank // 2], rank % 2
    beside = torch.full((1 << 16,), float(rank), device=place())
    under_way = dist.all_reduce(beside, group=across[part], async_op=True)
    x = mine[:, 4 * part : 4 * part + 4].clone()
    y, d = both(x, torch.ones(3), lambda x: c.logsumexp(x, -1, group=groups[rank // 2]))
    z = c.softmax(x.detach(), group=groups[rank // 2])
    under_way.wait()
    assert (beside == sum(range(part, world, 2))).all()
    assert near(y, torch.logsumexp(mine, -1).cpu(), 1e-10)
    exact = torch.softmax(mine, -1)[:, 4 * part : 4 * part + 4].cpu()
    assert near(d, exact, 1e-10) and near(z, exact, 1e-10)


def a_rank_that_raises(rank: int, world: int) -> None:
    """The others wait for the group's own time, and say what has happened."""
    group = dist.new_group(list(range(world)), timeout=datetime.timedelta(seconds=2))
    x = torch.zeros(3, 4)
    if rank == 0:
        with pytest.raises(TypeError, match="scale"):
            c.softmax(x, scale="1", group=group)
        time.sleep(4)  # it lives on
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="has not got the other ranks' states"):
        c.softmax(x, group=group)
    assert 1 < time.monotonic() - began < 60


def gone(rank: int, world: int) -> None:
    """A gradient behind the end of its group names it."""
    group = dist.new_group([rank], use_local_synchronization=True)
    x = torch.zeros(3, 4, requires_grad=True)
    y = c.softmax(x, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="is gone"):
        y.square().sum().backward()


def wrong_arguments(rank: int, world: int) -> None:
    """Every rank raises before it meets the others."""
    x, group = torch.zeros(3, 4), dist.group.WORLD
    index, leaf = torch.zeros(3, dtype=torch.long), torch.zeros(3, 4, requires_grad=True)
    apart = {"group": group, "vocab_start": 4 * rank}
    for call, error, words in (
        (lambda: c.softmax(x, vocab_start=0), ValueError, "they need group"),
        (lambda: c.softmax(x, group=3), TypeError, "group must be a torch.distributed.ProcessGroup, not int"),
        (lambda: c.softmax(x, (0, 1), group=group), ValueError, "over one dimension"),
        (lambda: c.softmax(x, mask=x > 0, group=group), ValueError, "mask of rows that ranks share"),
        (lambda: c.softmax(x, causal=0, group=group), ValueError, "causal of rows that ranks share"),
        (lambda: c.softmax(x, out=x, group=group), ValueError, "out of rows that ranks share"),
        (lambda: c.softmax(x, scale=torch.ones(3, 1), group=group), TypeError, "scale"),
        (lambda: c.logsumexp(x, -1, group=group, vocab_start=-1), ValueError, "vocab_start is -1"),
        (lambda: c.logsumexp(x, -1, out=x[0], group=group), ValueError, "out of rows"),
        (lambda: c.selective_log_softmax(x, index[:2], group=group), ValueError, "one element each"),
        (lambda: c.selective_log_softmax(x, index.float(), group=group), TypeError, "integer dtype"),
        (lambda: c.cross_entropy(x, x, group=group), ValueError, "class indices"),
        (lambda: c.cross_entropy(leaf, index, group=group, one_visit=True), ValueError, "not served"),
        (
            lambda: c.cross_entropy(leaf, index, x[0], group=group, one_visit=True),
            ValueError,
            "without a weight",
        ),
        (
            lambda: c.cross_entropy(leaf, index, group=group, inplace_backward=True),
            ValueError,
            "in one visit",
        ),
        (lambda: c.cross_entropy(x, index, label_smoothing=0.1, **apart), ValueError, "needs vocab_size"),
        (
            lambda: c.cross_entropy(x, index, torch.ones(8), label_smoothing=0.1, group=group),
            ValueError,
            "one of the two",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    for wrong in (-1, 4 * world):  # which all ranks see when they have met
        with pytest.raises(IndexError, match=f"{wrong}: it must lie in 0 to"):
            c.selective_log_softmax(x, index + wrong, group=group)
        with pytest.raises(IndexError, match=f"{wrong}: it must lie in 0 to"):
            c.cross_entropy(x, index + wrong, group=group)
    c.softmax(x, alpha=1.0, causal=False, group=group)  # at their defaults, whoever says so


def benchmark(rank: int, world: int) -> None:
    """The suite of shared rows with a clock that stands still: every provider that there is gives what is right."""
    from benchmarks import sharded, sharded_calls

    patch = pytest.MonkeyPatch()
    patch.setattr(sharded.Ranks, "device", torch.device("cpu"))
    patch.setattr(sharded, "SMALL", 0)
    patch.setattr(sharded, "RANKS", (2, 4))
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        patch.setattr(torch.cuda, name, lambda *_: 0)

    def measured(calls, ranks):
        for call in calls.values():
            call()
        return {name: [1.0, 2.0, 3.0] for name in calls}

    patch.setattr(sharded, "measured", measured)
    installed(True)
    rows = sharded.work(sharded.Ranks(rank, world, float("inf")), [(40, 96)])
    refused = [row for row in rows if "error" in row]
    assert all(row["mode"] == "on chip" for row in refused), (
        refused
    )  # there are no GPUs that reach each other
    there = {(row["op"], row["provider"]) for row in rows}
    assert there >= {(op, p) for op, made in sharded_calls.OPS.items() for p in made.providers}
    assert {("all_gather", "all-gather"), ("merge", "local")} <= there
