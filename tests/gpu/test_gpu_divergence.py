"""kl_div on a GPU: divergences and both gradients against float64, views, special values, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from building import build
from checking import DEVICE, DTYPES, FACTOR, TINY, Guarded, equal_bits, half_ulp, random
from remembered import forget_calls

from cute_softmax import batch_invariant, kl_div
from cute_softmax.plan import NotPlanned, Prologue, RowConfig, table_of
from cute_softmax.runtime import launch
from cute_softmax.runtime.launch import Work

SHAPES = ((1, 1), (3, 7), (64, 33), (37, 1023), (300, 4096), (8, 50257), (16, 151936), (2, 300001))
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def composed(input, target, dtype, scale=1.0, dim=-1):
    """The divergences of rows by torch's operations in a float type throughout."""
    q, p = (torch.log_softmax(t.to(dtype) * scale, dim) for t in (input, target))
    return torch.where(p.exp() == 0, 0.0, p.exp() * (p - q)).sum(dim)


def three(input, target, upstream, scale=1.0, dim=-1):
    """(ours, torch's in float32, the float64 ones): each (divergences, gradient of the input, of the target)."""
    for function, dtype in (
        (lambda *t: kl_div(*t, dim, scale=scale, reduction="none", dtype=torch.float32), None),
        (lambda *t: composed(*t, torch.float32, scale, dim), torch.float32),
        (lambda *t: composed(*t, torch.float64, scale, dim), torch.float64),
    ):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (input, target)]
        y = function(*leaves)
        yield [t.detach() for t in (y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype)))]


def check(input, target, scale=1.0, dim=-1):
    """Off by no more than torch in float32, and half a unit of a 16-bit gradient."""
    rows = input.movedim(dim, -1).shape[:-1]
    upstream = random(rows, torch.float32, seed=9)
    ours, torchs, right = three(input, target, upstream, scale, dim)
    for i, (found, near, exact) in enumerate(zip(ours, torchs, right, strict=True)):
        error, unit = (found.double() - exact).abs(), exact.abs().max() + TINY
        allowed = FACTOR * (near.double() - exact).abs().max() + 2.0**-20 * unit
        # Where divergences are small, they are what is left of logarithms.
        allowed = allowed + (2.0**-22 if i == 0 else 0)
        allowed = allowed + (half_ulp(exact, input.dtype) if i and input.dtype is not torch.float32 else 0)
        assert (error <= allowed).all(), (i, (error - allowed).max().item(), unit.item())
        for mutant in (torch.zeros_like(exact), exact.roll(1, -1), -exact):
            assert exact.shape[dim if i else -1] == 1 or not ((mutant - exact).abs() <= allowed).all()


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype):
    input, target = (random(shape, dtype, seed=seed, scale=3.0) for seed in (0, 1))
    for scale in (1.0, 0.4):
        if shape[-1] > 1:
            check(input, target, scale)
    near = (target.float() + 0.01 * random(shape, torch.float32, seed=2)).to(dtype)
    found = kl_div(near, target, reduction="none", dtype=torch.float32)
    right = composed(near, target, torch.float64)
    assert ((found.double() - right).abs() <= 2.0**-20 * (1 + right)).all()
    assert (kl_div(target, target.clone(), reduction="none") == 0).all()


@dtypes
@pytest.mark.parametrize("columns", [9, 127, 1000, 5001, 20000])
def test_views(columns, dtype):
    """Each input at an offset and with a pitch of its own; several kept dimensions; rows that are strided."""
    for offsets, pads in (((0, 1), (0, 3)), ((3, 0), (8, 0)), ((1, 5), (1, 2))):
        given = []
        for seed, (offset, pad) in enumerate(zip(offsets, pads, strict=True)):
            x = random((5, columns), dtype, seed=seed, scale=2.0)
            given.append(Guarded.of(x, offset=offset, strides=(columns + pad, 1)).tensor)
        check(*given)
    if columns <= 1000:
        x, y = (random((3, columns, 4), dtype, seed=seed) for seed in (3, 4))
        check(x, y, dim=1)
        check(x.mT, y.mT.contiguous())
        check(x.permute(2, 0, 1)[1:], y.permute(2, 0, 1)[:-1])


def test_two_dtypes():
    input, target = random((40, 4096), torch.bfloat16), random((40, 4096), torch.float32, seed=1)
    check(input.float(), target)
    given = [input.requires_grad_(), target.requires_grad_()]
    found = kl_div(*given, dtype=torch.float32)
    assert abs(found.double() - composed(*given, torch.float64).mean()) <= 1e-6
    grads = torch.autograd.grad(found, given)
    wide = [t.detach().double().requires_grad_() for t in given]
    for ours, right in zip(
        grads, torch.autograd.grad(composed(*wide, torch.float64).mean(), wide), strict=True
    ):
        assert ((ours.double() - right).abs() <= 2.0**-8 * right.abs() + 2.0**-20 * right.abs().max()).all()


@pytest.mark.parametrize("columns", [7, 1023, 50257, 151936])
def test_what_is_left_out(columns):
    """-inf in the target adds nothing; in the input alone it is infinitely wrong; NaN and +inf are NaN."""
    x, t = (random((8, columns), torch.float32, seed=seed) for seed in (0, 1))
    t[0, columns // 2 :] = x[0, columns // 2 + 1 :] = -torch.inf
    x[1, -1], t[2], x[3, 0], t[4, 1], x[5] = -torch.inf, -torch.inf, torch.nan, torch.inf, x[5] + 1e4
    x[6, 2] = torch.inf
    given = [a.requires_grad_() for a in (x, t)]
    found = kl_div(*given, reduction="none")
    right = composed(x.detach(), t.detach(), torch.float64)
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[1] == torch.inf and found[[2, 3, 4, 6]].isnan().all()
    for d in torch.autograd.grad(found[0] + found[5] + found[7], given):
        assert d[[0, 5, 7]].isfinite().all() and (d[0, columns // 2 + 1 :] == 0).all()


OF_TWO = "softmax_backward"  # whose configurations rows of two inputs take


def of_equal_rows(
    config: RowConfig, dtype: torch.dtype, odd: bool, scaled: bool
) -> Iterator[tuple[Work, torch.Tensor]]:
    """The divergence of rows that just fit into a configuration from themselves, and its gradients: what is launched,
    and the tensor that it fills. odd: rows of an element less, that begin off a vector boundary."""
    columns = config.capacity * 16 // dtype.itemsize - odd
    x, alpha = random((5, columns), dtype, seed=6, scale=4.0), torch.full((5, 1), 1.5, device=DEVICE)
    given, groups = (x, x.clone()), [t.expand(5, columns) for t in (alpha, torch.zeros_like(alpha))]
    asked, numbers = Prologue(scale="number" if scaled else ""), [0.7] * scaled
    loss = torch.full_like(alpha, torch.nan)
    prologue = replace(asked, against="loss")
    tensors = (*given, loss.expand(5, columns))
    yield Work("logsumexp", tensors, (1,), prologue=prologue, numbers=numbers), loss
    for against, count in (("input", 1), ("target", 2)):
        gradient = torch.full_like(x, torch.nan)
        prologue = replace(asked, against=against, alpha="groups")
        tensors = (*given, *groups[:count], gradient)
        yield Work("softmax", tensors, (1,), prologue=prologue, numbers=numbers), gradient


def planned(work: Work, device: object) -> object | None:
    """The class of a launch; None where a configuration is for results of other dtypes, for other GPUs, or for rows so
    short that they have smaller vectors."""
    try:
        return work.plan(device).kernel
    except NotPlanned:
        return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_rows_of_every_configuration(dtype, monkeypatch):
    """Nothing is left, however rows come to threads: of divergences, and of gradients."""
    own, table = launch.device_facts(0), table_of()
    configs = [*dict.fromkeys((*table.few[OF_TWO], *table.many[OF_TWO]))]
    devices = [
        replace(
            own, table=replace(table, many=table.many | {OF_TWO: (config,)}, few=table.few | {OF_TWO: ()})
        )
        for config in configs
    ]
    how = [
        {"odd": (i + dtype.itemsize // 2) % 2 == 0, "scaled": i // 2 % 2 == 0} for i in range(len(configs))
    ]
    of_all = [[*of_equal_rows(c, dtype, **h)] for c, h in zip(configs, how, strict=True)]
    classes = [[planned(work, d) for work, _ in works] for works, d in zip(of_all, devices, strict=True)]
    build(c for found in classes for c in found if c)
    for config, device, works, found in zip(configs, devices, of_all, classes, strict=True):
        monkeypatch.setattr(launch, "device_facts", lambda *_, device=device: device)
        forget_calls()
        for (work, result), c in zip(works, found, strict=True):
            if c is not None:
                assert (c.threads_per_row, c.steps, c.cluster_n) == (
                    *(config.threads_per_row, config.steps),
                    config.cluster_n,
                )
                launch.run(work.math, work.tensors, work.dims, prologue=work.prologue, numbers=work.numbers)
                assert (result == 0).all(), (c.name, result.abs().max().item())
    forget_calls()
    assert sum(c is not None for found in classes for c in found) > 2 * len(configs)


@pytest.mark.parametrize("columns", [700, 4096, 50257, 262144])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_equal_rows_of_two_dtypes(columns, narrow):
    x = random((5, columns), narrow, seed=7, scale=4.0)
    for pair in ((x, x.float()), (x.float(), x)):
        given = [t.clone().requires_grad_() for t in pair]
        found = kl_div(*given, reduction="none", dtype=torch.float32)
        assert (found == 0).all()
        assert all((d == 0).all() for d in torch.autograd.grad(found.sum(), given))


def test_memory_and_bits():
    """Forward nothing of the logits' size, backward the gradient; the same bits, and in other company, too."""
    x, t = (random((256, 50304), torch.bfloat16, seed=seed) for seed in (0, 1))
    leaf, peaks = x.clone().requires_grad_(), []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = kl_div(leaf, t)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        (d,) = torch.autograd.grad(loss, leaf)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before - x.nbytes)
    assert max(peaks) <= 1 << 20  # what the allocator does not split off a block
    assert equal_bits(torch.autograd.grad(kl_div(leaf, t), leaf)[0], d)
    with batch_invariant():
        whole = kl_div(x, t, reduction="none", dtype=torch.float32)
        assert equal_bits(kl_div(x[3:5], t[3:5], reduction="none", dtype=torch.float32), whole[3:5])


def test_in_a_graph_and_compiled():
    x, t = (random((64, 4096), torch.bfloat16, seed=seed) for seed in (0, 1))
    expected = kl_div(x, t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kl_div(x, t)
    found.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert torch.equal(torch.compile(kl_div, fullgraph=True)(x, t), expected)
    assert x.device.type == torch.device(DEVICE).type
