"""What each rank does in the tests of rows that ranks share: values, gradients, bits.

On the CPU with gloo, or on a GPU each with NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import cuts, installed, place
from torch.nn import functional

import cute_softmax as c

Tensor = torch.Tensor


def same_on_all(found: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    mine = found.detach().contiguous().view(-1).view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(other, mine) for other in every)


def near(found: Tensor, exact: Tensor, close: float) -> bool:
    return torch.allclose(found.double().cpu(), exact, rtol=close, atol=close, equal_nan=True)


def both(x: Tensor, of: Tensor, call: Callable) -> tuple[Tensor, Tensor]:
    """(result, gradient in x for `of`) of a call."""
    x = x.requires_grad_()
    y = call(x)
    return y.detach(), torch.autograd.grad(y, x, of.to(y))[0]


def entropies(y: Tensor) -> Tensor:
    return c.entropy(y)  # of whole rows, on the CPU in float64; torch's own has no gradient beside -inf


def chosen(y: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(y, -1).gather(-1, target[:, None])[:, 0]


def cases(
    target: Tensor, columns: int, weight: Tensor
) -> Iterator[tuple[str, Callable, Callable, str, bool]]:
    """(name, a function of a slice and its place, the same of whole rows, whether it has "numbers" or "slices", whether
    rows may have -inf)."""
    near_to = target.to(place())
    yield "logsumexp", lambda x, s: c.logsumexp(x, -1, **s), lambda y: torch.logsumexp(y, -1), "numbers", True
    yield "entropy", lambda x, s: c.entropy(x, **s), entropies, "numbers", True
    for scale in (1.0, 0.5):
        yield (
            f"selective {scale}",
            lambda x, s, scale=scale: c.selective_log_softmax(x, near_to, scale=scale, **s),
            lambda y, scale=scale: chosen(y * scale, target),
            "numbers",
            True,
        )
        yield (
            f"selective and entropy {scale}",
            lambda x, s, scale=scale: torch.stack(
                c.selective_log_softmax(x, near_to, scale=scale, return_entropy=True, **s)
            ),
            lambda y, scale=scale: torch.stack([chosen(y * scale, target), entropies(y * scale)]),
            "numbers",
            True,
        )
        yield (
            f"softmax {scale}",
            lambda x, s, scale=scale: c.softmax(x, scale=scale, **s),
            lambda y, scale=scale: torch.softmax(y * scale, -1),
            "slices",
            True,
        )
    yield (
        "log_softmax",
        lambda x, s: c.log_softmax(x, **s),
        lambda y: torch.log_softmax(y, -1),
        "slices",
        False,
    )
    ignored = torch.where(torch.arange(len(target)) == 0, -100, target)
    near_ignored = ignored.to(place())
    for options in (
        {},
        {"weight": weight},
        {"reduction": "none"},
        {"reduction": "sum"},
        {"label_smoothing": 0.2},
        {"label_smoothing": 0.2, "reduction": "none"},
    ):
        for squares in (0.0, 0.1):
            given = {k: v.to(place(), torch.float32) if k == "weight" else v for k, v in options.items()}

            def loss(y, options=options, squares=squares):
                found = functional.cross_entropy(y, ignored, **options)
                added = torch.where(ignored >= 0, squares * torch.logsumexp(y, -1).square(), 0)
                how = options.get("reduction", "mean")
                counts = (ignored >= 0).sum()
                return found + (added if how == "none" else added.sum() / (counts if how == "mean" else 1))

            yield (
                f"cross_entropy {[*options]} {squares}",
                lambda x, s, given=given, squares=squares: c.cross_entropy(
                    x, near_ignored, lse_square_scale=squares, **given, **s
                ),
                loss,
                "numbers",
                "label_smoothing" not in options,
            )


def functions(
    rank: int,
    world: int,
    cut: str,
    kernels: bool,
    columns: int = 48,
    dtype: torch.dtype | None = None,
    refuse: bool = False,
) -> None:
    """Every function with `group`, values and gradients, against the whole rows in float64; refuse: what only rows that
    fit on chip have."""
    launches = installed(kernels)
    if refuse:
        launches.refuse = True
    dtype = dtype or (torch.float32 if kernels else torch.float64)
    close = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    generator = torch.Generator().manual_seed(3)
    ends = cuts(cut, columns, world)
    here = slice(ends[rank], ends[rank + 1])
    finite = (3 * torch.randn(5, columns, generator=generator, dtype=torch.float64)).to(dtype).double()
    target = torch.randint(columns, (5,), generator=generator)
    target[1] = columns - 1 - target[1] // 2
    upstream = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    matrix = torch.randn(5, columns, generator=generator, dtype=torch.float64)
    upstream, matrix = (t.to(dtype).double() for t in (upstream, matrix))
    weight = torch.rand(columns, generator=generator).double()
    shard = {"group": dist.group.WORLD, "vocab_start": here.start, "vocab_size": columns}
    for name, ours, theirs, results, infinite in cases(target, columns, weight):
        whole = finite.clone()
        if infinite:
            whole[1, : columns // 2] = -math.inf  # of nothing but -inf on some ranks
        sliced = whole[:, here].to(place(), dtype)
        expected = theirs(whole)
        of = matrix if results == "slices" else upstream if expected.dim() == 2 else upstream[0]
        of = of if expected.dim() else of[0]
        y, d = both(sliced, of[:, here] if results == "slices" else of, lambda x, f=ours: f(x, shard))
        expected, e = both(whole, of, theirs)
        expected = expected[:, here] if results == "slices" else expected
        assert y.dtype is dtype and near(y, expected, close), (name, y, expected)
        if results == "numbers":
            assert same_on_all(y), name
        assert near(d, e[:, here], 10 * close), (name, d, e[:, here])
    if launches is not None and not refuse and here.stop - here.start > 0:
        assert {work.math for work in launches} >= {
            "selective",
            "state",
            "gradient",
            "softmax_backward",
            "sum",
        }


def invariant(rank: int, world: int, cut: str, kernels: bool, columns: int = 61, block: int = 4) -> None:
    """Every function with `group` within `batch_invariant`: the bits of one rank that has all."""
    launched = installed(kernels)
    generator = torch.Generator().manual_seed(3)
    ends = [n * block for n in cuts("equal" if cut == "turned" else cut, -(-columns // block), world)]
    turn = world - 1 - rank if cut == "turned" else rank
    here = slice(min(ends[turn], columns), min(ends[turn + 1], columns))
    whole = 3 * torch.randn(5, columns, generator=generator)
    whole[1, : columns // 2] = -math.inf
    target = torch.randint(columns, (5,), generator=generator)
    target[1] = columns - 1 - target[1] // 2
    upstream, matrix = torch.randn(5, generator=generator), torch.randn(5, columns, generator=generator)
    whole, target, upstream, matrix = (t.to(place()) for t in (whole, target, upstream, matrix))
    alone = [dist.new_group([r]) for r in range(world)][rank]

    def once(function, part, group, results) -> tuple[Tensor, Tensor]:
        shard = {"group": group, "vocab_start": part.start, "vocab_size": columns}
        x = whole[:, part].clone().requires_grad_()
        with c.batch_invariant(block_size=block):
            y = function(x, shard)
        grad = matrix[:, part] if results == "slices" else upstream
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

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
        y, d = once(function, here, dist.group.WORLD, results)
        expected, e = once(function, slice(0, columns), alone, results)
        expected = expected[:, here] if results == "slices" else expected
        for found, other in ((y, expected), (d, e[:, here])):
            same = torch.equal(found.view(torch.int32), other.contiguous().view(torch.int32))
            assert same, (name, (found - other).abs().max())
    # Of a merge and of what a slice becomes there is one order.
    ordered = [work for work in launched or () if hasattr(work, "invariant")]
    assert launched is None or (ordered and all(work.invariant for work in ordered))


def invariant_cuts(rank: int, world: int) -> None:
    """Slices that do not begin at multiples of a block, and calls without a block size, raise on every rank."""
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


def padded(rank: int, world: int, kernels: bool = False) -> None:
    """Slices of equal length, the last with a tail behind the row's end, whatever lies there."""
    installed(kernels)
    columns, width, dtype = 10 * world - 3, 10, torch.float32 if kernels else torch.float64
    whole = torch.randn(4, columns, generator=torch.Generator().manual_seed(1)).double()
    held = torch.full((4, width * world), math.nan, dtype=torch.float64)
    held[:, :columns] = whole
    x = held[:, rank * width : (rank + 1) * width].to(place(), dtype).requires_grad_()
    shard = {"group": dist.group.WORLD, "vocab_size": columns}
    valid = slice(rank * width, min((rank + 1) * width, columns))
    count = valid.stop - valid.start
    for ours, theirs, tail in (
        (c.softmax, torch.softmax, 0.0),
        (c.log_softmax, torch.log_softmax, -math.inf),
    ):
        y = whole.clone().requires_grad_()
        found, exact = ours(x, **shard), theirs(y, -1)
        assert near(found[:, :count], exact[:, valid], 1e-5)
        assert (found[:, count:] == tail).all()
        dy = torch.linspace(-1, 1, 4 * width * world, dtype=torch.float64).view(4, -1)
        mine = dy[:, rank * width : (rank + 1) * width].to(x)
        (d,) = torch.autograd.grad(found, x, mine)
        (e,) = torch.autograd.grad(exact, y, dy[:, :columns])
        assert near(d[:, :count], e[:, valid], 1e-5) and (d[:, count:] == 0).all()
    target = torch.arange(4) * (columns - 1) // 3  # the first and the last element among them
    for name, ours, theirs, results, _ in cases(target, columns, torch.rand(columns).double()):
        if results == "slices" or "weight" in name:
            continue
        y = whole.clone().requires_grad_()
        found, exact = ours(x, shard), theirs(y)
        assert near(found, exact, 1e-5), name
        of = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64).view(exact.shape)
        (d,) = torch.autograd.grad(found, x, of.to(found))
        (e,) = torch.autograd.grad(exact, y, of)
        assert near(d[:, :count], e[:, valid], 1e-5) and (d[:, count:] == 0).all(), name


def without_a_size(rank: int, world: int, kernels: bool = False) -> None:
    """Slices of unequal length that say where they begin; nobody says where rows end."""
    installed(kernels)
    columns, dtype = 41, torch.float32 if kernels else torch.float64
    ends = cuts("unequal", columns, world)
    here = slice(ends[rank], ends[rank + 1])
    whole = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).double()
    target = torch.arange(5) * 10
    shard = {"group": dist.group.WORLD, "vocab_start": here.start}
    for name, ours, theirs, results, _ in cases(target, columns, torch.ones(columns).double()):
        if "smoothing" in name:
            continue  # which needs the size
        x = whole[:, here].to(place(), dtype).requires_grad_()
        y = whole.clone().requires_grad_()
        found, exact = ours(x, shard), theirs(y)
        of = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64).view(exact.shape)
        (e,) = torch.autograd.grad(exact, y, of)
        if results == "slices":
            exact, of = exact[:, here], of[:, here]
        (d,) = torch.autograd.grad(found, x, of.to(found))
        assert near(found, exact, 2e-5) and near(d, e[:, here], 1e-4), name


def shapes(rank: int, world: int, kernels: bool) -> None:
    """Rows of several dimensions, whatever their strides are, any of them shared; none at all; one."""
    installed(kernels)
    dtype, group = torch.float32 if kernels else torch.float64, dist.group.WORLD
    whole = torch.randn(3, 2, 5 * world, 4, generator=torch.Generator().manual_seed(5)).double()
    here = slice(5 * rank, 5 * rank + 5)
    for name, turned in (
        ("as they lie", lambda t: t.movedim(2, -1)),
        ("side by side", lambda t: t.movedim(2, -1).contiguous()),
        ("with gaps", lambda t: t.movedim(2, -1).contiguous()[:, :, ::2]),
        ("one row", lambda t: t[0, 0, :, 0].contiguous()),
        ("no row", lambda t: t[:0].movedim(2, -1)),
    ):
        x = turned(whole[:, :, here].to(place(), dtype)).requires_grad_()
        y = turned(whole).requires_grad_()
        for ours, theirs in (
            (lambda x: c.softmax(x, group=group), lambda y: torch.softmax(y, -1)),
            (lambda x: c.log_softmax(x, -1, group=group), lambda y: torch.log_softmax(y, -1)),
            (lambda x: c.logsumexp(x, -1, True, group=group), lambda y: torch.logsumexp(y, -1, True)),
        ):
            found, exact = ours(x), theirs(y)
            of = torch.linspace(-1, 1, exact.numel(), dtype=torch.float64).view(exact.shape)
            part = slice(None) if exact.shape[-1] == 1 else here
            (d,) = torch.autograd.grad(found, x, of[..., part].to(found))
            (e,) = torch.autograd.grad(exact, y, of)
            assert near(found, exact[..., part], 1e-5) and near(d, e[..., here], 1e-5), name
    x = whole[:, :, here].to(place(), dtype)
    assert near(c.softmax(x, 2, group=group), torch.softmax(whole, 2)[:, :, here], 1e-5)


def several_consumers(rank: int, world: int, kernels: bool = False) -> None:
    """One log_softmax, two losses of it: the gradients add up, and dimension 0 may be the one that is shared."""
    installed(kernels)
    dtype = torch.float32 if kernels else torch.float64
    whole = torch.randn(6 * world, 4, generator=torch.Generator().manual_seed(2)).double()
    rows = slice(6 * rank, 6 * rank + 6)
    weights = torch.randn(6 * world, 4, generator=torch.Generator().manual_seed(3)).double()
    x, y = whole[rows].to(place(), dtype).requires_grad_(), whole.clone().requires_grad_()
    ours, theirs = c.log_softmax(x, 0, group=dist.group.WORLD), torch.log_softmax(y, 0)
    (d,) = torch.autograd.grad((ours * weights[rows].to(x)).sum() + (ours.exp() * ours).sum(), x)
    (e,) = torch.autograd.grad((theirs * weights).sum() + (theirs.exp() * theirs).sum(), y)
    assert near(d, e[rows], 1e-5)


def bad_numbers(rank: int, world: int, kernels: bool = False) -> None:
    """NaN on one rank is NaN on all, and rows of nothing but -inf are torch's."""
    installed(kernels)
    group = dist.group.WORLD
    x = torch.zeros(4, 4, dtype=torch.float32 if kernels else torch.float64)
    if rank == world - 1:
        x[0, 2], x[3, 1] = math.nan, math.inf
    x[1] = -math.inf
    x = x.to(place())
    index = torch.zeros(4, dtype=torch.long, device=x.device)  # in the first rank's slice
    some, entropy = (t.cpu() for t in c.selective_log_softmax(x, index, return_entropy=True, group=group))
    losses = c.cross_entropy(x, index, reduction="none", label_smoothing=0.1, group=group).cpu()
    alone, logs = c.entropy(x, group=group).cpu(), c.log_softmax(x, group=group).cpu()
    for found in (some, entropy, losses, alone, logs):  # rows with a NaN, of -inf alone, with +inf
        assert found[[0, 1, 3]].isnan().all() and found[2].isfinite().all(), found
    lse = c.logsumexp(x, -1, group=group).cpu()
    assert lse[0].isnan() and lse[1] == -math.inf and lse[3] == math.inf
    assert near(lse[2], torch.tensor(4.0 * world).double().log(), 1e-6)
    y = c.softmax(x, group=group).cpu()
    assert y[:2].isnan().all() and near(y[2], torch.full((4,), 0.25 / world).double(), 1e-6)
    target = torch.full((4,), -100, device=x.device)
    loss = c.cross_entropy(x, target, group=group)
    assert loss.isnan()  # a mean of nothing
    assert (c.cross_entropy(x, target, group=group, reduction="none") == 0).all()


def collectives(rank: int, world: int, kernels: bool = False) -> None:
    """One all-gather of 8 to 20 bytes a row forward; backward none, but 4 bytes a row for what comes out as slices."""
    installed(kernels)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent, rows = getattr(dist, name), [], 5

    def counting(every, mine, **how):
        sent.append(mine.numel() * mine.element_size() // rows)
        return gather(every, mine, **how)

    pytest.MonkeyPatch().setattr(dist, name, counting)
    whole = torch.randn(rows, 8 * world, generator=torch.Generator().manual_seed(1))
    target = (torch.arange(rows) % (8 * world)).to(place())
    shard = {"group": dist.group.WORLD, "vocab_start": 8 * rank, "vocab_size": 8 * world}
    bytes_of = {"logsumexp": 8, "softmax": 8, "log_softmax": 8, "selective and entropy": 16, "smoothed": 20}
    for case, function, _, results, _ in cases(target.cpu(), 8 * world, torch.ones(8 * world)):
        if "weight" in case:
            continue
        sent.clear()
        x = whole[:, 8 * rank : 8 * rank + 8].to(place()).requires_grad_()
        y = function(x, shard)
        kind = "smoothed" if "smoothing" in case else case.rstrip(" .0125")
        assert sent == [bytes_of.get(kind, 12)], (case, sent)
        torch.autograd.grad(y, x, torch.ones_like(y))
        assert sent[1:] == [4] * (results == "slices"), (case, sent)


def in_pieces(rank: int, world: int) -> None:
    """The rows of a softmax in two pieces, each with a collective of its own: the same bits."""
    from cute_softmax.dispatch.sharded import ways

    launches = installed(True)
    whole = torch.randn(5, 8 * world, generator=torch.Generator().manual_seed(1)).to(place())
    dy = torch.randn(5, 8 * world, generator=torch.Generator().manual_seed(2)).to(place())
    here, found = slice(8 * rank, 8 * rank + 8), []
    for bound in (1 << 60, 0):
        ways.PIECES_FROM = bound
        for function in (c.softmax, c.log_softmax):
            x = whole[:, here].clone().requires_grad_()
            y = function(x, group=dist.group.WORLD)
            found.append((y.detach(), torch.autograd.grad(y, x, dy[:, here])[0]))
    for one, two in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    if launches is not None:
        assert sum(work.math == "state" for work in launches) == 2 + 4
