"""What each rank does in the tests of rows that ranks share, in processes of its own with gloo."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import tempfile
import traceback
from pathlib import Path

TIMEOUT = 120


def run(world: int, name: str, **arguments: object) -> None:
    """Run `name` of this module on so many ranks; raises AssertionError with the first rank's traceback that failed."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # from a process that has imported torch, and nothing begun
    context.set_forkserver_preload(
        ["ranks", "torch", "torch.distributed.tensor", "cute_softmax", "simulated"]
    )
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "store"))
        every = [
            context.Process(target=_rank, args=(rank, world, meeting, name, arguments, said), daemon=True)
            for rank in range(world)
        ]
        for process in every:
            process.start()
        failed = []
        for _ in every:
            try:
                rank, text = said.get(timeout=TIMEOUT)
            except queue.Empty:
                failed.append("a rank said nothing")
                break
            if text:
                failed.append(f"rank {rank}: {text}")
                break
        for process in every:
            if failed:
                process.kill()
            process.join(TIMEOUT)
    assert not failed, failed[0]


def _rank(rank: int, world: int, meeting: str, name: str, arguments: dict, said) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        globals()[name](rank, world, **arguments)
        dist.barrier()
        dist.destroy_process_group()
        said.put((rank, ""))
    except BaseException:
        said.put((rank, traceback.format_exc()))


def cuts(kind: str, columns: int, world: int) -> list[int]:
    """Where slices begin, and the end of the last: equally long, unequally, or some of nothing."""
    if kind == "equal":
        return [columns // world * i for i in range(world + 1)]
    if kind == "empty":  # all of it on the last but one rank
        return [0] * max(world - 1, 1) + [columns] * (world - max(world - 1, 1) + 1)
    return [columns * i * i // world**2 for i in range(world + 1)]


def installed(kernels: bool):
    """Kernels' launches simulated, or torch's operations as CPU tensors have them."""
    import pytest
    import simulated

    return simulated.install(pytest.MonkeyPatch()) if kernels else None


def functions(rank: int, world: int, cut: str, kernels: bool, columns: int = 48) -> None:
    """Every function with `group`, values and gradients, against the whole rows in float64."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    import cute_softmax as c

    installed(kernels)
    dtype, close = (torch.float32, 2e-5) if kernels else (torch.float64, 1e-10)
    generator = torch.Generator().manual_seed(3)
    ends = cuts(cut, columns, world)
    here = slice(ends[rank], ends[rank + 1])
    whole = 3 * torch.randn(5, columns, generator=generator, dtype=torch.float64)
    whole[1, : columns // 2] = -math.inf  # of nothing but -inf on some ranks
    whole = whole.to(dtype).double()
    target = torch.randint(columns // 2, columns, (5,), generator=generator)
    upstream = torch.randn(5, generator=generator, dtype=torch.float64)
    matrix = torch.randn(5, columns, generator=generator, dtype=torch.float64)
    group = dist.group.WORLD
    shard = {"group": group, "vocab_start": here.start}

    def check(name, ours, theirs, grads, results) -> None:
        """ours(slice) and theirs(whole), their gradients for `grads`, each as (ours, theirs)."""
        x, y = whole[:, here].to(dtype).requires_grad_(), whole.clone().requires_grad_()
        found, expected = ours(x), theirs(y)
        cut_to = expected[:, here] if results == "slices" else expected
        assert found.dtype is dtype, name
        assert torch.allclose(found.double(), cut_to, rtol=close, atol=close), (name, found, cut_to)
        if results == "numbers":
            every = [torch.empty_like(found) for _ in range(world)]
            dist.all_gather(every, found.detach().contiguous())
            assert all(torch.equal(e, found) for e in every), name  # the same bits
        (d,) = torch.autograd.grad(found, x, grads[0].to(dtype))
        (e,) = torch.autograd.grad(expected, y, grads[1])
        assert torch.allclose(d.double(), e[:, here], rtol=10 * close, atol=10 * close), (name, d, e[:, here])

    p_log_p = c.entropy  # of whole rows; torch's own has no gradient beside -inf

    numbers, slices = (upstream, upstream), (matrix[:, here], matrix)
    check(
        "logsumexp",
        lambda x: c.logsumexp(x, -1, **shard),
        lambda y: torch.logsumexp(y, -1),
        numbers,
        "numbers",
    )
    check("entropy", lambda x: c.entropy(x, **shard), p_log_p, numbers, "numbers")
    for scale in (1.0, 0.5):
        check(
            "selective",
            lambda x, s=scale: c.selective_log_softmax(x, target, scale=s, **shard),
            lambda y, s=scale: torch.log_softmax(y * s, -1).gather(-1, target[:, None])[:, 0],
            numbers,
            "numbers",
        )
        check(
            "selective and entropy",
            lambda x, s=scale: torch.stack(
                c.selective_log_softmax(x, target, scale=s, return_entropy=True, **shard)
            ).sum(0),
            lambda y, s=scale: (
                torch.log_softmax(y * s, -1).gather(-1, target[:, None])[:, 0] + p_log_p(y * s)
            ),
            numbers,
            "numbers",
        )
        check(
            "softmax",
            lambda x, s=scale: c.softmax(x, scale=s, **shard),
            lambda y, s=scale: torch.softmax(y * s, -1),
            slices,
            "slices",
        )
    finite = torch.where(whole.isinf(), 0.0, matrix)
    check(
        "log_softmax",
        lambda x: c.log_softmax(x, **shard),
        lambda y: torch.log_softmax(y, -1),
        (finite[:, here], finite),
        "slices",
    )
    weight = torch.rand(columns, generator=generator, dtype=torch.float64)
    target[0] = -100
    for options in ({}, {"weight": weight}, {"reduction": "none"}, {"reduction": "sum"}):
        given = {k: v.to(dtype) if k == "weight" else v for k, v in options.items()}
        g = upstream if options.get("reduction") == "none" else upstream[0]
        check(
            f"cross_entropy {options}",
            lambda x, given=given: c.cross_entropy(x, target, lse_square_scale=0.1, **given, **shard),
            lambda y, options=options: (
                functional.cross_entropy(y, target, **options)
                + 0.1 * squares(y, target, options.get("reduction", "mean"))
            ),
            (g, g),
            "numbers",
        )
    if not whole.isinf().any() or True:
        finite_rows = torch.where(whole.isinf(), -2.0, whole)
        whole.copy_(finite_rows)
        check(
            "label smoothing",
            lambda x: c.cross_entropy(x, target, label_smoothing=0.2, vocab_size=columns, **shard),
            lambda y: functional.cross_entropy(y, target, label_smoothing=0.2),
            (upstream[0], upstream[0]),
            "numbers",
        )


def invariant(rank: int, world: int, cut: str, kernels: bool, columns: int = 61, block: int = 4) -> None:
    """Every function with `group` within `batch_invariant`: the bits of one rank that has all."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    launched = installed(kernels)
    generator = torch.Generator().manual_seed(3)
    ends = [n * block for n in cuts("equal" if cut == "turned" else cut, -(-columns // block), world)]
    place = world - 1 - rank if cut == "turned" else rank
    here = slice(min(ends[place], columns), min(ends[place + 1], columns))
    whole = 3 * torch.randn(5, columns, generator=generator)
    whole[1, : columns // 2] = -math.inf
    target = torch.randint(columns // 2, columns, (5,), generator=generator)
    upstream, matrix = torch.randn(5, generator=generator), torch.randn(5, columns, generator=generator)
    alone = [dist.new_group([r]) for r in range(world)][rank]

    def both(function, results):
        """(result, gradient) of this rank's slice of the rows, and of the whole rows."""
        for part, group in ((here, dist.group.WORLD), (slice(0, columns), alone)):
            x = whole[:, part].clone().requires_grad_()
            shard = {"group": group, "vocab_start": part.start, "vocab_size": columns}
            with c.batch_invariant(block_size=block):
                y = function(x, shard)
            grad = matrix[:, part] if results == "slices" else upstream
            yield y.detach(), torch.autograd.grad(y, x, grad)[0]

    for name, function, results in (
        ("logsumexp", lambda x, s: c.logsumexp(x, -1, **s), "numbers"),
        ("entropy", lambda x, s: c.entropy(x, **s), "numbers"),
        ("selective", lambda x, s: c.selective_log_softmax(x, target, scale=0.5, **s), "numbers"),
        (
            "selective and entropy",
            lambda x, s: torch.stack(c.selective_log_softmax(x, target, return_entropy=True, **s)).sum(0),
            "numbers",
        ),
        ("cross_entropy", lambda x, s: c.cross_entropy(x, target, reduction="none", **s), "numbers"),
        ("softmax", lambda x, s: c.softmax(x, **s), "slices"),
        ("log_softmax", lambda x, s: c.log_softmax(x, scale=0.5, **s), "slices"),
    ):
        (y, d), (expected, e) = both(function, results)
        expected = expected[:, here] if results == "slices" else expected
        for found, other in ((y, expected), (d, e[:, here])):
            same = torch.equal(found.view(torch.int32), other.contiguous().view(torch.int32))
            assert same, (name, (found - other).abs().max())
    # Of a merge and of what a slice becomes there is one order.
    ordered = [work for work in launched or () if hasattr(work, "invariant")]
    assert launched is None or (ordered and all(work.invariant for work in ordered))


def invariant_cuts(rank: int, world: int) -> None:
    """Slices that do not begin at multiples of a block, and calls without a block size, raise on every rank."""
    import pytest
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    group = dist.group.WORLD
    x = torch.zeros(3, 10)
    for size, shard, words in (
        (None, {}, "need batch_invariant"),
        (4, {}, "begin and end at multiples"),
        (5, {"vocab_start": 10 * rank + 1, "vocab_size": 10 * world + 1}, "begin and end at multiples"),
        (5, {"vocab_start": 10 * rank}, "without vocab_size"),
        (3, {"vocab_start": 0, "vocab_size": 100}, "begin and end at multiples"),
    ):
        with pytest.raises(ValueError, match=words), c.batch_invariant(block_size=size):
            c.logsumexp(x, -1, group=group, **shard)
    target = torch.zeros(3, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="label_smoothing"), c.batch_invariant(block_size=5):
        c.cross_entropy(x, target, label_smoothing=0.1, vocab_size=10 * world, group=group)
    with c.batch_invariant(block_size=5):
        found = c.logsumexp(x, -1, group=group)
    assert torch.allclose(found, torch.tensor(10.0 * world).log())


def squares(y, target, reduction):
    import torch

    found = torch.where(target >= 0, torch.logsumexp(y, -1).square(), 0)
    if reduction == "none":
        return found
    return found.sum() if reduction == "sum" else found.sum() / (target >= 0).sum()


def padded(rank: int, world: int) -> None:
    """Slices of equal length, the last with a tail behind the row's end, whatever lies there."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    columns, width = 10 * world - 3, 10
    whole = torch.randn(4, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    held = torch.full((4, width * world), math.nan, dtype=torch.float64)
    held[:, :columns] = whole
    x = held[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    shard = {"group": dist.group.WORLD, "vocab_size": columns}
    valid = slice(rank * width, min((rank + 1) * width, columns))
    count = valid.stop - valid.start
    for ours, theirs, tail in (
        (c.softmax, torch.softmax, 0.0),
        (c.log_softmax, torch.log_softmax, -math.inf),
    ):
        found = ours(x, **shard)
        assert torch.allclose(found[:, :count], theirs(whole, -1)[:, valid])
        assert (found[:, count:] == tail).all()
    lse = c.logsumexp(x, -1, **shard)
    assert torch.allclose(lse, torch.logsumexp(whole, -1))
    (d,) = torch.autograd.grad(lse.sum(), x)
    assert torch.allclose(d[:, :count], torch.softmax(whole, -1)[:, valid]) and (d[:, count:] == 0).all()


def several_consumers(rank: int, world: int) -> None:
    """One log_softmax, two losses of it: the gradients add up, and dimension 0 may be the one that is shared."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    whole = torch.randn(6 * world, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = slice(6 * rank, 6 * rank + 6)
    weights = torch.randn(6 * world, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, y = whole[rows].clone().requires_grad_(), whole.clone().requires_grad_()
    ours, theirs = c.log_softmax(x, 0, group=dist.group.WORLD), torch.log_softmax(y, 0)
    (d,) = torch.autograd.grad((ours * weights[rows]).sum() + (ours.exp() * ours).sum(), x)
    (e,) = torch.autograd.grad((theirs * weights).sum() + (theirs.exp() * theirs).sum(), y)
    assert torch.allclose(d, e[rows])


def bad_numbers(rank: int, world: int) -> None:
    """NaN on one rank is NaN on all, and rows of nothing but -inf are torch's."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    group = dist.group.WORLD
    x = torch.zeros(3, 4, dtype=torch.float64)
    if rank == world - 1:
        x[0, 2] = math.nan
    x[1] = -math.inf
    lse = c.logsumexp(x, -1, group=group)
    assert (
        lse[0].isnan()
        and lse[1] == -math.inf
        and torch.allclose(lse[2], torch.tensor(4.0 * world).double().log())
    )
    y = c.softmax(x, group=group)
    assert y[:2].isnan().all() and torch.allclose(y[2], torch.tensor(0.25 / world, dtype=torch.float64))


def dtensors(rank: int, world: int) -> None:
    """DTensors that are sharded over the reduced dimension, beside another one on a mesh of two dimensions."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    import cute_softmax as c

    whole = torch.randn(4, 6, 13, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(4))
    flat = init_device_mesh("cpu", (world,))
    meshes = [(flat, [Shard(2)], [Replicate()])]
    if world % 2 == 0:
        square = init_device_mesh("cpu", (2, world // 2))
        meshes.append((square, [Shard(0), Shard(2)], [Shard(0), Replicate()]))
    for mesh, placements, of_numbers in meshes:
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        y = whole.clone().requires_grad_()
        for ours, theirs in (
            (c.logsumexp(x, -1), torch.logsumexp(y, -1)),
            (c.entropy(x), torch.special.entr(torch.softmax(y, -1)).sum(-1)),
        ):
            assert isinstance(ours, DTensor) and list(ours.placements) == of_numbers
            assert torch.allclose(ours.full_tensor(), theirs)
        y_ours, y_theirs = c.softmax(x, -1), torch.softmax(y, -1)
        assert list(y_ours.placements) == placements and torch.allclose(y_ours.full_tensor(), y_theirs)
        (d,) = torch.autograd.grad(c.logsumexp(x, -1).sum(), x)
        assert torch.allclose(d.full_tensor(), torch.softmax(whole, -1))
        ours = c.selective_log_softmax(x, distribute_tensor(target, mesh, of_numbers))
        assert torch.allclose(
            ours.full_tensor(), torch.log_softmax(whole, -1).gather(-1, target[..., None]).squeeze(-1)
        )


def two_groups(rank: int, world: int) -> None:
    """Pairs of ranks, each with rows of its own, at the same time."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    groups = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    whole = torch.randn(world // 2, 3, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine, part = whole[rank // 2], rank % 2
    found = c.logsumexp(mine[:, 4 * part : 4 * part + 4], -1, group=groups[rank // 2])
    assert torch.allclose(found, torch.logsumexp(mine, -1))


def wrong_arguments(rank: int, world: int) -> None:
    """Every rank raises before it meets the others."""
    import pytest
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    x, group = torch.zeros(3, 4), dist.group.WORLD
    index = torch.zeros(3, dtype=torch.long)
    for call, error, words in (
        (lambda: c.softmax(x, vocab_start=0), ValueError, "they need group"),
        (lambda: c.softmax(x, group=3), TypeError, "group must be a torch.distributed.ProcessGroup, not int"),
        (lambda: c.softmax(x, (0, 1), group=group), ValueError, "over one dimension"),
        (lambda: c.softmax(x, mask=x > 0, group=group), ValueError, "mask of rows that ranks share"),
        (lambda: c.softmax(x, out=x, group=group), ValueError, "out of rows that ranks share"),
        (lambda: c.softmax(x, scale=torch.ones(3, 1), group=group), TypeError, "scale"),
        (lambda: c.logsumexp(x, -1, group=group, vocab_start=-1), ValueError, "vocab_start is -1"),
        (lambda: c.logsumexp(x, -1, out=x[0], group=group), ValueError, "out of rows"),
        (lambda: c.selective_log_softmax(x, index[:2], group=group), ValueError, "one element each"),
        (lambda: c.selective_log_softmax(x, index.float(), group=group), TypeError, "integer dtype"),
        (lambda: c.cross_entropy(x, x, group=group), ValueError, "class indices"),
        (
            lambda: c.cross_entropy(x, index, torch.ones(8), label_smoothing=0.1, group=group),
            ValueError,
            "one of the two",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


def compiled(rank: int, world: int, kernels: bool) -> None:
    """Every function with `group` under torch.compile, without a break, with its gradient; and exported."""
    import torch
    import torch.distributed as dist

    import cute_softmax as c

    installed(kernels)
    group, width = dist.group.WORLD, 6
    whole = torch.randn(4, width * world, generator=torch.Generator().manual_seed(2))
    target = torch.randint(width * world, (4,), generator=torch.Generator().manual_seed(4))
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
        "weighted": lambda x: c.cross_entropy(x, target, torch.arange(1.0, 1 + width * world), group=group),
        "padded": lambda x: c.softmax(x, group=group, vocab_size=width * world - 2),
    }.items():
        found = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            x = whole[:, here].clone().requires_grad_()
            y = call(x)
            (d,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view(y.shape))
            found.append((y, d))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True)), name
