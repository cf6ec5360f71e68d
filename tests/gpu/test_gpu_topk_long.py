"""topk_log_softmax on a GPU: indices and ranks to the last one, log-probabilities and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from checking import DEVICE, DTYPES, FACTOR, ROUNDING, half_ulp, random, ranked

from cute_softmax import NotPlanned, batch_invariant, selective_log_softmax, topk_log_softmax
from cute_softmax.dispatch.heads import largest
from cute_softmax.plan.topk_long import SHARES

INF, NAN = float("inf"), float("nan")
# (rows, columns), k: of both numbers of places, rows of a CTA and shared ones, odd lengths, all of a row.
CASES = [
    ((1, 1), 1),
    ((3, 7), 3),
    ((1000, 33), 33),
    ((5, 1000), 8),
    ((2, 1023), 1023),
    ((1, 8192), 1),
    ((700, 8193), 20),
    ((3, 16384), 128),
    ((500, 32768), 8),
    ((500, 32768), 128),
    ((64, 50257), 40),
    ((450, 50257), 1024),
    ((1, 151936), 8),
    ((33, 151936), 128),
    ((400, 151936), 20),
    ((2, 262144), 1000),
    ((1, 3000001), 32),
]
cases = pytest.mark.parametrize(
    ("shape", "k"), CASES, ids=lambda c: "x".join(map(str, c)) if isinstance(c, tuple) else str(c)
)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def chosen_of(x, seed=5):
    """An index for each row."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(x.shape[-1], x.shape[:-1], generator=generator, device=DEVICE)


def check(got, x, k, index, scale=1.0):
    """Everything that one call gives."""
    order = ranked(x)[..., :k]
    column = index.unsqueeze(-1)
    assert torch.equal(got.indices, order)
    assert torch.equal(got.ranks, (x > x.gather(-1, column)).sum(-1))
    check_numbers(got.values, x, order, scale)
    check_numbers(got.chosen.unsqueeze(-1), x, column, scale)


def check_numbers(got, x, order, scale):
    """The bound of a log_softmax: torch's own error in float32, half a unit of a 16-bit result more."""
    right = torch.log_softmax(x.double() * scale, -1).gather(-1, order)
    near = torch.log_softmax(x.float() * scale, -1).gather(-1, order).double()
    allowed = FACTOR * (near - right).abs().amax() + 8 * ROUNDING * (1 + right.abs())
    if got.dtype is not torch.float32:
        allowed = allowed + half_ulp(right, got.dtype)

    def holds(found):
        return bool(((found.double() - right).abs() <= allowed).all())

    assert holds(got)
    assert not holds(got + 0.01 * (1 + got.abs())) and (x.shape[-1] == 1 or not holds(torch.zeros_like(got)))


@cases
@dtypes
def test_forward(shape, k, dtype):
    for seed, make in enumerate((lambda x: x, lambda x: x.round(), lambda x: -x.abs())):
        x = make(random(shape, dtype, seed=seed, scale=2.0))
        index = chosen_of(x, seed)
        scale = (1.0, 0.7, 3.0)[seed]
        check(topk_log_softmax(x, k, index, scale=scale, dtype=torch.float32), x, k, index, scale)
        values, indices = topk_log_softmax(x, k, scale=scale)
        assert values.dtype == dtype and torch.equal(indices, ranked(x)[..., :k])
        alone = topk_log_softmax(x, 0, index, scale=scale)
        assert alone.values.shape[-1] == 0 and torch.equal(
            alone.ranks, (x > x.gather(-1, index[:, None])).sum(-1)
        )


@pytest.mark.parametrize("k", [1, 8, 33, 128, 300])
@pytest.mark.parametrize("columns", [600, 8192, 8200, 40001, 151936])
@dtypes
def test_hard_rows(columns, k, dtype):
    """More ties than places for candidates, rows that rise or fall, and what is no number."""
    generator = torch.Generator(DEVICE).manual_seed(columns + k)
    noise = torch.randn(columns, generator=generator, device=DEVICE)
    few = torch.rand(columns, generator=generator, device=DEVICE) < 0.001
    rows = [
        torch.zeros(columns),
        torch.full((columns,), -3.25),
        torch.full((columns,), -INF),
        torch.full((columns,), INF),
        torch.full((columns,), NAN),
        torch.where(few, noise, -INF),
        torch.where(few, INF, noise),
        torch.where(few, NAN, noise),
        torch.where(few, -NAN, torch.where(noise > 0, 0.0, -0.0)),
        noise.sort().values,
        noise.sort(descending=True).values,
        torch.arange(columns) // 4000,
        -(torch.arange(columns) // 4000).float(),
        torch.cat((noise[: columns - 1] * 0 - 1, torch.ones(1, device=DEVICE) * -1)),
        torch.cat((torch.zeros(columns - 5, device=DEVICE), torch.ones(5, device=DEVICE))),
        noise.round(),
    ]
    x = torch.stack([row.to(DEVICE, torch.float32) for row in rows]).to(dtype)
    many = x.repeat(40, 1)  # a CTA a row, where few rows are shared
    for logits in (x, many):
        index = chosen_of(logits)
        got = topk_log_softmax(logits, k, index, dtype=torch.float32)
        assert torch.equal(got.indices, ranked(logits)[:, :k])
        assert torch.equal(got.ranks, (logits > logits.gather(-1, index[:, None])).sum(-1))
        right = torch.log_softmax(logits.double(), -1)
        for found, at in ((got.values, got.indices), (got.chosen[:, None], index[:, None])):
            wanted = right.gather(-1, at)
            assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=2e-5, equal_nan=True)


@cases
@dtypes
def test_backward(shape, k, dtype):
    x = random(shape, dtype, scale=2.0)
    index = chosen_of(x)
    leaf = x.clone().requires_grad_()
    got = topk_log_softmax(leaf, k, index, scale=0.7)
    upstream = random((*shape[:-1], k), dtype, seed=1), random(shape[:-1], dtype, seed=2)
    (found,) = torch.autograd.grad((got.values, got.chosen), leaf, upstream)
    at, g = torch.cat((got.indices, index[:, None]), -1), torch.cat((upstream[0], upstream[1][:, None]), -1)

    def exact(wide):
        p, g_wide = torch.softmax(x.to(wide) * 0.7, -1), g.to(wide)
        d = torch.scatter_add(-g_wide.sum(-1, keepdim=True) * p, -1, at, g_wide) * 0.7
        size = torch.scatter_add(g_wide.abs().sum(-1, keepdim=True) * p, -1, at, g_wide.abs())
        return d, size

    (right, size), (near, _) = exact(torch.float64), exact(torch.float32)
    allowed = FACTOR * (near.double() - right).abs().max() + 64 * ROUNDING * (size + right.abs())
    if dtype is not torch.float32:
        # What several tokens add up to is rounded, and so is the softmax below.
        allowed = allowed + 2 * half_ulp(right, dtype)

    def holds(gradient):
        return bool(((gradient.double() - right).abs() <= allowed).all())

    assert found.dtype == dtype and holds(found)
    if shape[-1] > 8:
        assert not holds(torch.zeros_like(found)) and not holds(-found) and not holds(found.roll(1, -1))


@pytest.mark.parametrize("columns", [4097, 33000])
@dtypes
def test_strides_and_offsets(columns, dtype):
    whole = random((24, columns + 9), dtype, scale=2.0)
    for x in (whole[:, 1 : columns + 1], whole[::3, 5 : columns + 3], whole.mT.contiguous().mT[:, :columns]):
        index = chosen_of(x)
        check(topk_log_softmax(x, 9, index, dtype=torch.float32), x, 9, index)


@dtypes
def test_results_are_written_and_nothing_else(dtype):
    """Guards around what the kernel writes, poisoned before."""
    for rows, columns, k in ((7, 20000, 33), (600, 3001, 8)):
        x = random((rows, columns), dtype)
        room = {}

        def guarded(shape, dtype, device, room=room):
            count = torch.Size(shape).numel()
            memory = torch.full((count + 64,), -7, dtype=dtype, device=device)
            room[len(room)] = memory
            return memory[32 : 32 + count].view(shape)

        empty, largest.torch.empty = largest.torch.empty, guarded
        try:
            got = largest.find(x, chosen_of(x)[:, None], largest.Largest((1,), k))
        finally:
            largest.torch.empty = empty
        assert len(room) == 6
        for memory in room.values():
            assert (memory[:32] == -7).all() and (memory[-32:] == -7).all()
        assert torch.equal(got[1], ranked(x)[:, :k]) and not (got[3] == -7).any()


@pytest.mark.parametrize("rows", [3, 64, 600])
@dtypes
def test_results_in_the_dtype_of_the_logits(rows, dtype):
    """Rounded as torch does."""
    x = random((rows, 33000), dtype, scale=2.0)
    right = topk_log_softmax(x, 9, chosen_of(x), dtype=torch.float32)
    for a, b in zip(topk_log_softmax(x, 9, chosen_of(x)), right, strict=True):
        assert torch.equal(a, b.to(a.dtype)) and a.dtype == (dtype if b.is_floating_point() else torch.int64)


@pytest.mark.parametrize("columns", [1001, 32768, 50257])
@dtypes
def test_batch_invariant(columns, dtype):
    """The bits of a row, whatever number of rows it comes with, at which address and in which strides."""
    whole = random((1000, columns), dtype, scale=2.0)
    index = chosen_of(whole)
    with batch_invariant():
        right = topk_log_softmax(whole, 20, index, scale=0.7, dtype=torch.float32)
        for first, count in ((0, 1), (999, 1), (7, 3), (100, 600)):
            rows = slice(first, first + count)
            x = whole[rows]
            elsewhere = torch.zeros(count * columns + 1, dtype=dtype, device=DEVICE)[1:]
            elsewhere = elsewhere.view(count, columns).copy_(x)
            for layout in (x, x.clone(), elsewhere, x.mT.contiguous().mT):
                got = topk_log_softmax(layout, 20, index[rows], scale=0.7, dtype=torch.float32)
                assert all(torch.equal(a, b[rows]) for a, b in zip(got, right, strict=True))


def test_compiled_captured_and_the_same_every_time():
    for rows in (5, 600):
        x = random((rows, 50257), torch.bfloat16, scale=2.0)
        index = chosen_of(x)
        got = topk_log_softmax(x, 20, index)
        for _ in range(5):  # whatever the order in which candidates come
            assert all(map(torch.equal, topk_log_softmax(x, 20, index), got))

        def loss(x, index=index):
            found = topk_log_softmax(x, 20, index)
            # Numbers that bfloat16 holds: a compiler need not round them where autograd does.
            return (found.values.float() * (found.indices % 128)).sum() + found.chosen.float().sum()

        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss(leaf).backward()
        torch.compile(loss, fullgraph=True)(other).backward()
        assert torch.equal(leaf.grad, other.grad)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            captured = topk_log_softmax(x, 20, index)
        x.copy_(random((rows, 50257), torch.bfloat16, seed=3))
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured.indices, ranked(x)[:, :20])


def test_the_chosen_one_is_that_of_selective_log_softmax():
    x = random((64, 32768), torch.bfloat16, scale=3.0)
    index = chosen_of(x)
    got = topk_log_softmax(x, 0, index, dtype=torch.float32).chosen
    assert torch.allclose(got, selective_log_softmax(x.float(), index), rtol=1e-6, atol=4e-6)


def test_what_is_refused():
    assert SHARES <= 32
    with pytest.raises(NotPlanned, match="at most 1024"):
        topk_log_softmax(torch.randn(4, 2000, device=DEVICE), 1025)
    with pytest.raises(ValueError, match="index is on cpu"):
        topk_log_softmax(torch.randn(4, 2000, device=DEVICE), 1, torch.zeros(4, dtype=torch.int64))
