"""topk_softmax on a GPU: indices to the last one, probabilities and gradients against float64, guarded memory."""

from __future__ import annotations

import pytest
import torch
from checking import DEVICE, DTYPES, FACTOR, ROUNDING, TINY, half_ulp, random, ranked

from cute_softmax import NotPlanned, batch_invariant, topk_softmax
from cute_softmax.dispatch.topk import kernels

INF, NAN = float("inf"), float("nan")
# (rows, experts), k: of all capacities, few and many rows (whose lanes have more of a row), odd lengths, long lists.
CASES = [
    ((1, 8), 2),
    ((3, 1), 1),
    ((5, 7), 3),
    ((1000, 8), 8),
    ((70001, 8), 2),
    ((33, 16), 4),
    ((70001, 16), 6),
    ((129, 60), 4),
    ((70001, 60), 4),
    ((4097, 64), 8),
    ((70001, 64), 6),
    ((257, 128), 1),
    ((40001, 128), 8),
    ((64, 160), 6),
    ((1, 256), 8),
    ((40001, 256), 8),
    ((19, 384), 8),
    ((10001, 384), 8),
    ((10001, 1024), 8),
    ((33, 1024), 32),
    ((33, 1023), 40),
    ((9, 257), 257),
    ((9, 1024), 1024),
    ((70, 33), 9),
]
cases = pytest.mark.parametrize(
    ("shape", "k"), CASES, ids=lambda c: "x".join(map(str, c)) if isinstance(c, tuple) else str(c)
)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
renormalizing = pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])


def expected(x, k, renormalize, dtype=torch.float64):
    """(probabilities in a float type throughout, indices): of equal elements the first one first, NaN before all."""
    order = ranked(x)[..., :k]
    x = x.to(dtype)
    if renormalize:
        return torch.softmax(x.gather(-1, order), -1), order
    return torch.softmax(x, -1).gather(-1, order), order


def check_values(got, x, k, renormalize):
    """The bound of a softmax: torch's own error in float32, half a unit of a 16-bit result more."""
    right, _ = expected(x, k, renormalize)
    near, _ = expected(x, k, renormalize, torch.float32)
    unit = right + TINY
    floor = (4 + (x.double().amax(-1, keepdim=True) - x.double().amin(-1, keepdim=True))) * ROUNDING
    allowed = FACTOR * ((near.double() - right).abs() / unit).max() * unit + floor * unit
    if got.dtype is not torch.float32:
        allowed = allowed + half_ulp(right, got.dtype)

    def holds(found):
        return bool(((found.double() - right).abs() <= allowed).all())

    assert holds(got)
    assert got.shape[-1] == 1 or not holds(got.roll(1, -1)) or bool((right[..., :1] == right).all())
    assert not holds(torch.zeros_like(got)) and not holds(got * 1.05)


def distinct(shape, dtype, seed=0):
    """Random rows with ties, as 16 bits have them anyway."""
    x = random(shape, dtype, seed=seed, scale=2.0)
    return torch.where(x.abs() < 0.25, torch.zeros_like(x), x)


@cases
@dtypes
@renormalizing
def test_forward(shape, k, dtype, renormalize):
    x = distinct(shape, dtype)
    _, order = expected(x, k, renormalize)
    for index_dtype, result in ((torch.int64, dtype), (torch.int32, torch.float32)):
        values, indices = topk_softmax(x, k, renormalize=renormalize, dtype=result, index_dtype=index_dtype)
        assert indices.dtype == index_dtype and values.dtype == result
        assert torch.equal(indices.long(), order)
        check_values(values, x, k, renormalize)


@cases
@dtypes
@renormalizing
def test_backward(shape, k, dtype, renormalize):
    x, upstream = distinct(shape, dtype), random((*shape[:-1], k), dtype, seed=1)
    leaf = x.clone().requires_grad_()
    values, indices = topk_softmax(leaf, k, renormalize=renormalize)
    (found,) = torch.autograd.grad(values, leaf, upstream)

    def exact(wide, source):
        g = upstream.to(wide)
        if renormalize:
            y = values.detach().to(wide)  # as torch: the gradient is that of the rounded probabilities
            d = y * (g - (y * g).sum(-1, keepdim=True))
            size = y * (g.abs() + (y * g).abs().sum(-1, keepdim=True))
        else:
            y = torch.softmax(source.to(wide), -1)
            g = torch.zeros_like(y).scatter_(-1, indices, g)
            d = y * (g - (y * g).sum(-1, keepdim=True))
            size = y * (g.abs() + (y * g).abs().sum(-1, keepdim=True))
        if renormalize:
            zeros = torch.zeros(shape, dtype=wide, device=DEVICE)
            d, size = (torch.scatter(zeros, -1, indices, t) for t in (d, size))
        return d, size

    right, size = exact(torch.float64, x)
    near, _ = exact(torch.float32, x)
    unit = size + TINY
    allowed = (FACTOR * ((near.double() - right).abs() / unit).max() + 16 * ROUNDING) * unit
    if dtype is not torch.float32:
        allowed = allowed + half_ulp(right, dtype)

    def holds(gradient):
        return bool(((gradient.double() - right).abs() <= allowed).all())

    assert found.dtype == dtype and found.shape == leaf.shape and holds(found)
    if shape[-1] > 1 and not (renormalize and k == 1):
        assert not holds(torch.zeros_like(found)) and not holds(-found) and not holds(found.roll(1, -1))


@dtypes
@renormalizing
def test_ties_and_what_is_no_number(dtype, renormalize):
    """By the rule, and where there is no tie as torch.topk has it; NaN of either sign."""
    rows = [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0, -0.0, 0.0, -1.0, 0.0, -0.0, 1.0, -2.0],
        [-INF, 2.0, -INF, -INF, -INF, -INF, -INF, -INF],
        [-INF] * 8,
        [1.0, NAN, 2.0, NAN, 0.0, 3.0, INF, -INF],
        [1.0, INF, 2.0, 0.0, INF, -1.0, -2.0, -INF],
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    ]
    for repeat in (1, 4, 32, 128):  # to rows of several lanes, and vectors of each
        x = torch.tensor(rows, device=DEVICE).to(dtype).repeat(1, repeat)
        x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[4, 3] = -1  # NaN with a sign
        for count in (1, 20000):
            many = x.repeat(count, 1)
            values, indices = topk_softmax(many, 8, renormalize=renormalize)
            right, order = expected(x, 8, renormalize)
            assert torch.equal(indices[:7], order) and torch.equal(indices, order.repeat(count, 1))
            near = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-7, "equal_nan": True}
            assert torch.allclose(values.double(), right.repeat(count, 1), **near)
            assert right[3:6].isnan().all() and not right[:3].isnan().any()


@pytest.mark.parametrize("columns", [60, 256, 1024])
@renormalizing
def test_what_differs_in_the_last_bits(columns, renormalize):
    """float32: rows in which all is doubt, one of which a warp has a doubt, and with all that is large in a lane, also
    where nothing has last bits."""
    x = random((20000, columns), torch.float32)
    bits = x.view(torch.int32)
    close = ((bits & 31) | 0x40000000).view(torch.float32)
    doubtful = torch.where((torch.arange(20000, device=DEVICE) % 1000 == 7)[:, None], close, x)
    steep = x.clone()
    steep[:, ::64] += 50
    steep[:, 1::64] += 50
    for rows in (close, -close, doubtful, steep, steep.bfloat16().float(), steep[:100], torch.zeros_like(x)):
        for k in (1, 2, 8, 9):
            values, indices = topk_softmax(rows, k, renormalize=renormalize)
            right, order = expected(rows, k, renormalize)
            assert torch.equal(indices, order)
            assert torch.allclose(values.double(), right, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("columns", [8, 60, 256, 1000])
@dtypes
@renormalizing
def test_no_byte_beyond(columns, dtype, renormalize):
    """Nothing is written around the results, and all of them is; nothing is read beyond the rows."""
    rows, k, guard = 37, 5, 64
    held = torch.full((guard + rows * columns + guard,), NAN, dtype=dtype, device=DEVICE)
    x = held[guard : guard + rows * columns].view(rows, columns)
    x.copy_(distinct((rows, columns), dtype))
    values, indices = topk_softmax(x, k, renormalize=renormalize)
    _, order = expected(x, k, renormalize)
    assert torch.equal(indices, order) and not values.isnan().any()
    choice = kernels.Choice((1,), k, renormalize, dtype, torch.int64)
    poisoned = [
        torch.full((2 * guard + rows * k,), p, dtype=d, device=DEVICE)
        for p, d in ((NAN, dtype), (-7, torch.int64))
    ]
    call = kernels.call_of(x, choice)
    call.on_device(x.get_device(), x.data_ptr(), *(t.data_ptr() + guard * t.element_size() for t in poisoned))
    found, at = (t[guard:-guard].view(rows, k) for t in poisoned)
    assert torch.equal(found, values) and torch.equal(at, indices)
    assert poisoned[0][:guard].isnan().all() and poisoned[0][-guard:].isnan().all()
    assert (poisoned[1][:guard] == -7).all() and (poisoned[1][-guard:] == -7).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda: distinct((40, 65), torch.bfloat16)[:, 1:],
        lambda: distinct((64, 40), torch.bfloat16).mT,
        lambda: distinct((4, 6, 64), torch.float32).transpose(0, 1),
        lambda: distinct((1, 64), torch.bfloat16).expand(50, 64),
        lambda: distinct((80, 64), torch.bfloat16)[::2],
        lambda: distinct((641,), torch.bfloat16)[1:].view(10, 64),
    ],
    ids=["slice", "transposed", "outer", "expanded", "steps", "offset"],
)
@renormalizing
def test_views(view, renormalize):
    x = view()
    for _ in range(2):
        values, indices = topk_softmax(x, 6, renormalize=renormalize)
        assert torch.equal(indices, expected(x, 6, renormalize)[1])
        assert torch.equal(values, topk_softmax(x.contiguous(), 6, renormalize=renormalize)[0])
        leaf = x.detach().requires_grad_()
        other = x.detach().contiguous().requires_grad_()
        for t in (leaf, other):  # an upstream gradient that is expanded
            topk_softmax(t, 6, renormalize=renormalize)[0][..., :1].sum().backward()
        assert torch.equal(leaf.grad, other.grad)


@renormalizing
def test_compiled_captured_and_the_same_every_time(renormalize):
    x = distinct((513, 128), torch.bfloat16)
    values, indices = topk_softmax(x, 8, renormalize=renormalize)
    for _ in range(3):
        again = topk_softmax(x, 8, renormalize=renormalize)
        assert torch.equal(again[0], values) and torch.equal(again[1], indices)

    def loss(x):
        weights, experts = topk_softmax(x, 8, renormalize=renormalize)
        return (weights.float() * experts).sum()

    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss(leaf).backward()
    torch.compile(loss, fullgraph=True)(other).backward()
    assert torch.equal(leaf.grad, other.grad)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        captured = topk_softmax(x, 8, renormalize=renormalize)
    x.copy_(distinct((513, 128), torch.bfloat16, seed=3))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[1], expected(x, 8, renormalize)[1])
    assert not torch.equal(captured[1], indices)


@pytest.mark.parametrize("columns", [8, 63, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@renormalizing
def test_batch_invariant(columns, dtype, renormalize):
    """The bits of a row, whatever number of rows it comes with, at which address and in which strides."""
    whole, upstream = distinct((20000, columns), dtype), random((20000, 16), dtype, seed=1)

    def run(x, k, g):
        leaf = x.detach().requires_grad_()
        with batch_invariant():
            values, indices = topk_softmax(leaf, k, renormalize=renormalize)
        return values, indices, *torch.autograd.grad(values, leaf, g)

    for k in (2, 8, 9)[: 2 if columns == 8 else 3]:
        expected = run(whole, k, upstream[:, :k])
        for first, count in ((0, 1), (19999, 1), (7, 3), (100, 64), (5000, 9000)):
            rows = slice(first, first + count)
            x, g = whole[rows], upstream[rows, :k]
            room = torch.zeros(count * columns + 1, dtype=dtype, device=DEVICE)
            elsewhere = room[1:].view(count, columns).copy_(x)
            gaps = torch.cat((x, x[:, :1]), 1)[:, :columns]
            for layout in (x, x.clone(), elsewhere, gaps, x.mT.contiguous().mT):
                for found, right in zip(run(layout, k, g), expected, strict=True):
                    assert torch.equal(found, right[rows]), (k, first, count, layout.stride())


def test_longer_rows_are_refused():
    with pytest.raises(NotPlanned, match="at most 1024"):
        topk_softmax(torch.randn(4, 1025, device=DEVICE), 2)
