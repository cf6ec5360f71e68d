"""Softmax, its gradient and the reductions over any dimensions of any strided tensor; guard bands intact."""

import math
from itertools import product

import calls
import pytest
import torch
from building import build
from checking import DTYPES, check_backward, check_softmax, equal_bits, random

from cute_softmax import plan_softmax, softmax, softmax_backward
from cute_softmax.plan import WARP, plan_call
from cute_softmax.plan.problem import Operand
from cute_softmax.runtime import launch

INF = float("inf")
LENGTHS = (1, 2, 3, 7, 33, 127, 128, 129, 1023, 1025, 2048, 4097, 9000, 33000)
WIDTHS = (1, 3, 8, 40, 64, 130)
# Columns that CTAs take in chunks, and so many that each takes panel after panel; the longest are swept over.
LONG, WIDE = (8193, 12_000, 16_384, 16_385, 24_576), 2600
GIVEN = {"softmax": 2, "softmax_backward": 3}  # full operands
dtypes = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [
    ((2, 3, 4), (0, 2)),  # three groups of eight
    ((5, 64), 0),
    ((7, 33, 40), 1),
    ((7, 33, 40), -2),
    ((7, 33, 40), (0, 1)),
    ((7, 33, 40), (0, 2)),
    ((7, 33, 40), (-1, 0)),
    ((7, 33, 40), (0, 1, 2)),
    ((3, 5, 16, 24), (1, 3)),
    ((3, 5, 16, 24), (0, 2)),
    ((3, 5, 16, 24), (0, 1, 3)),
    ((3, 5, 16, 24), [2, 0]),
    ((2, 3, 4, 5, 6, 8), (1, 3, 5)),
    ((2, 3, 4, 5, 6, 8), (0, 2, 4)),
    ((200, 300), (0, 1)),
    ((40, 50, 60), (0, 2)),
    ((1, 1000, 1), 1),
    ((1000, 1), 0),
    ((4, 1, 130), 1),
]


@pytest.fixture(scope="module", autouse=True)
def built_ahead():
    """The classes of `test_first_dimension` and `test_long_columns`, side by side."""
    if not torch.cuda.is_available():
        return
    shapes = [*product(LENGTHS, WIDTHS), *((length, WIDE) for length in LONG)]
    wanted = [columns(name, shape, d).kernel for name in GIVEN for shape in shapes for d in DTYPES]
    build(wanted)


def columns(name: str, shape: tuple[int, int], dtype: str):
    """The plan for the first dimension of contiguous tensors."""
    of = Operand(dtype, (shape[1], 1))
    return plan_call(name, shape, (0,), [of] * GIVEN[name], launch.device_facts(0))


def layouts(shape, dtype: torch.dtype):
    """(name, view of this shape): permuted, sliced, stepped, expanded, at odd places."""
    rank = len(shape)

    def made(sizes, seed):
        return random(sizes, dtype, seed=seed, scale=2.0)

    yield "contiguous", made(shape, 1)
    turned = [*range(1, rank), 0]
    yield "permuted", made([shape[d] for d in turned], 2).permute([turned.index(d) for d in range(rank)])
    yield "reversed", made(shape[::-1], 3).permute([*range(rank)][::-1])
    yield "sliced", made([n + 3 for n in shape], 4)[tuple(slice(1, n + 1) for n in shape)]
    yield "stepped", made([2 * n for n in shape], 5)[(slice(None, None, 2),) * rank]
    yield "last stepped", made([*shape[:-1], 3 * shape[-1]], 6)[..., ::3]
    yield "odd offset", made((math.prod(shape) + 1,), 7)[1:].view(shape)
    yield "expanded", made((1, *shape[1:]), 8).expand(shape)
    yield "expanded at last", made((*shape[:-1], 1), 9).expand(shape)
    if rank == 4:
        yield "channels last", made(shape, 10).to(memory_format=torch.channels_last)


@dtypes
@pytest.mark.parametrize("length", LENGTHS)
def test_first_dimension(length, dtype):
    for width in WIDTHS:
        x = random((length, width), DTYPES[dtype], seed=length + width, scale=3.0)
        y = calls.forward(x, 0)
        assert equal_bits(softmax(x, 0), y) and equal_bits(softmax(x, 0), y), "a second call gave other bits"
        dy = random(x.shape, x.dtype, seed=width)
        dx = calls.backward(dy, y, 0)
        assert equal_bits(softmax_backward(dy, y, 0), dx)


@dtypes
@pytest.mark.parametrize(
    "shape", [(301, 3), (1009, 9), (70, 304, 17), (200, 2048, 9), (40007, 31), (1000003, 15)], ids=str
)
def test_few_columns(shape, dtype):
    """An odd number, so that several rows lie side by side in a panel; also in place, and with -inf and NaN."""
    dim = len(shape) - 2
    x = random(shape, DTYPES[dtype], seed=3, scale=3.0)
    assert plan_softmax(x, dim).kernel.rows_abreast > 1
    x.select(dim, shape[dim] - 1)[..., 1] = -math.inf
    y = softmax(x, dim)
    check_softmax(y, x, dim)
    assert equal_bits(softmax(x, dim), y), "a second call gave other bits"
    dy = random(shape, x.dtype, seed=4)
    check_backward(softmax_backward(dy, y, dim), dy, y, dim)
    over = x.clone()
    assert equal_bits(softmax(over, dim, out=over), y)
    x.select(dim, 5)[..., 0] = math.nan
    assert softmax(x, dim)[..., 0].isnan().all() and equal_bits(softmax(x, dim)[..., 1:], y[..., 1:])


@dtypes
@pytest.mark.parametrize(
    "shape",
    [
        (64, 40),
        (3320, 24),
        (5000, 12),
        (50257, 6),
        (100352, 4),
        (8, 1280, 16),
        (2048, 384),
        (8192, 192),
        (8192, 256),
    ],
    ids=str,
)
def test_few_columns_in_clusters(shape, dtype):
    """Panels of a part of a sector, and of 16 columns; also with -inf and NaN, and results that are float32."""
    dim = len(shape) - 2
    x = random(shape, DTYPES[dtype], seed=5, scale=3.0)
    c = plan_softmax(x, dim).kernel
    assert c.columns <= 16 and (c.cluster_n > 1 or shape[dim] < 100)
    x.select(dim, shape[dim] - 1)[..., 1] = -math.inf
    y = softmax(x, dim)
    check_softmax(y, x, dim)
    assert equal_bits(softmax(x, dim), y), "a second call gave other bits"
    check_softmax(softmax(x, dim, dtype=torch.float32), x, dim)
    dy = random(shape, x.dtype, seed=6)
    check_backward(softmax_backward(dy, y, dim), dy, y, dim)
    x.select(dim, 5)[..., 0] = math.nan
    assert softmax(x, dim)[..., 0].isnan().all() and equal_bits(softmax(x, dim)[..., 1:], y[..., 1:])


@dtypes
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_dimensions_and_layouts(shape, dims, dtype):
    for name, x in layouts(shape, DTYPES[dtype]):
        y = softmax(x, dims)
        assert y.stride() == torch.empty_like(x).stride(), f"{name}: the format is not empty_like's"
        check_softmax(y, x, dims)
        assert equal_bits(softmax(x, dims), y), f"{name}: a second call gave other bits"
        wide = softmax(x, dims, dtype=torch.float32)
        check_softmax(wide, x, dims)
        dy = random(shape, x.dtype, seed=11)
        for grad in (dy, dy.transpose(0, -1).contiguous().transpose(0, -1), dy[..., :1].expand(shape)):
            dx = softmax_backward(grad, y, dims)
            assert dx.stride() == torch.empty_like(y).stride()
            check_backward(dx, grad, y, dims)


@dtypes
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_guarded(shape, dims, dtype):
    """Results of other strides than the input's, with room between and at odd places."""
    x = random(shape, DTYPES[dtype], seed=5)
    padded, reach = [], 1
    for n in reversed(shape):
        padded.append(reach + 2)
        reach = (reach + 2) * n
    reverse, reach = [], 1
    for n in shape:
        reverse.append(reach)
        reach *= n
    places = [{}, {"offset": 3}, {"strides": padded[::-1], "offset": 1}, {"strides": reverse, "offset": 8}]
    for source in places:
        for result in places:
            y = calls.forward(x, dims, source=source, result=result)
    dy = random(shape, x.dtype, seed=6)
    for i in range(4):
        calls.backward(dy, y, dims, places=[places[i], places[i - 1], places[i - 2]])


@dtypes
@pytest.mark.parametrize(("shape", "dims"), SHAPES[:11], ids=str)
def test_in_place(shape, dims, dtype):
    for _, x in layouts(shape, DTYPES[dtype]):
        if 0 in x.stride():
            continue
        both = x.clone(memory_format=torch.preserve_format)
        softmax(both, dims, out=both)
        check_softmax(both, x, dims)


@dtypes
@pytest.mark.parametrize("name", calls.REDUCTIONS)
def test_reductions(name, dtype):
    for shape, dims in SHAPES:
        for _, x in layouts(shape, DTYPES[dtype]):
            calls.reduction(name, x, dims, {"strides": x.stride()} if 0 not in x.stride() else None)
    for length in LENGTHS:
        for width in (1, 8, 130):
            x = random((length, width), DTYPES[dtype], seed=length)
            calls.reduction(name, x, 0, {"offset": 1} if width == 8 else None)


@dtypes
def test_mixed_dtypes(dtype):
    for result in DTYPES:
        for shape, dims in SHAPES[:8]:
            x = random(shape, DTYPES[dtype], seed=3)
            y = calls.forward(x, dims, dtype=DTYPES[result])
            calls.backward(random(shape, y.dtype, seed=4), y, dims, dtype=x.dtype)


@dtypes
@pytest.mark.parametrize(("length", "width"), [(128, 64), (1025, 40), (9000, 64), (70_000, 8), (70_000, 1)])
def test_infinities_and_nan(length, width, dtype):
    """A warp's rows, a CTA's rows and whole columns of -inf; +inf and NaN stay in their column."""
    clean = random((length, width + 7), DTYPES[dtype], seed=1)[:, :width]
    clean = clean.contiguous()
    made = calls.planned("softmax", (clean, clean), (0,))
    c = made.kernel
    per_warp = max(WARP // c.across, 1) * c.unit
    step, at = c.down * c.unit, torch.arange(length, device=clean.device)
    patterns = {
        "a warp": (at % made.share) % step < per_warp,
        "another warp": (at % made.share) % step >= step - per_warp,
        "a CTA": at < made.share,
        "the last CTA": at >= (made.parts * c.cluster_n - 1) * made.share,
        "all but one": at != length - 1,
        "all": at >= 0,
        "tiles": at % (2 * c.tile) < c.tile,
    }
    wanted = softmax(clean, 0)
    for pattern in patterns.values():
        x = clean.clone()
        columns = [0, width // 2, width - 1]
        for column in columns:
            x[pattern, column] = -INF
        y = softmax(x, 0)
        check_softmax(y, x, 0)
        others = [i for i in range(width) if i not in columns]
        assert equal_bits(y[:, others], wanted[:, others]), "a column changed another"
    for value in (INF, math.nan):
        for row in {0, 1, length // 2, length - 1, made.share % length}:
            x = clean.clone()
            x[row, width // 2] = value
            y = softmax(x, 0)
            check_softmax(y, x, 0)
            assert y[:, width // 2].isnan().all()
            others = [i for i in range(width) if i != width // 2]
            assert equal_bits(y[:, others], wanted[:, others]), "a column changed another"


@dtypes
@pytest.mark.parametrize(("shape", "dims"), SHAPES[:14], ids=str)
def test_gradients_of_other_layouts(shape, dims, dtype):
    x = random(shape, DTYPES[dtype], seed=3).requires_grad_()
    dy = random(shape, x.dtype, seed=4)
    rank = len(shape)
    turned = dy.permute([*range(rank)][::-1]).contiguous().permute([*range(rank)][::-1])
    for _ in range(2):  # the second call takes the short way
        for grad in (dy, turned, dy[:1].expand(shape), dy.repeat_interleave(2, -1)[..., ::2]):
            y = softmax(x, dims)
            (dx,) = torch.autograd.grad(y, x, grad)
            check_backward(dx, grad, y.detach(), dims)
    loss = softmax(x, dims).float().pow(2).sum()
    (dx,) = torch.autograd.grad(loss, x)
    assert dx.shape == x.shape and dx.isfinite().all()


@dtypes
@pytest.mark.parametrize("length", LONG)
def test_long_columns(length, dtype):
    for name in GIVEN:
        made = columns(name, (length, WIDE), dtype)
        if made.movement != "sweep" and made.kernel.streaming:
            assert made.tiles * made.parts > made.ctas, "each CTA has one panel only"
    x, dy = (random((length, WIDE), DTYPES[dtype], seed=seed, scale=3.0) for seed in (5, 6))
    x[length // 3 :, 7] = -INF
    y = softmax(x, 0)
    dx = softmax_backward(dy, y, 0)
    check_softmax(y, x, 0)
    check_backward(dx, dy, y, 0)
    assert equal_bits(softmax(x, 0), y) and equal_bits(softmax_backward(dy, y, 0), dx), "other bits"


def test_empty_and_few():
    for shape in ((0, 5), (5, 0), (2, 0, 3), (0,)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for dim in range(len(shape)):
            y = softmax(x, dim)
            assert y.shape == x.shape and y.dtype == x.dtype
    x = random((3, 1, 5), torch.bfloat16)
    assert (softmax(x, 1) == 1).all() and (softmax(x[:, :, ::2], 1) == 1).all()


def test_many_panels():
    for shape, dims in (
        ((2, 3_000_001), 0),
        ((70_000, 3, 40), 1),
        ((70_000, 3, 5), (1, 2)),
        ((3, 70_000), 0),
    ):
        x = random(shape, torch.bfloat16)[..., 1:]
        check_softmax(softmax(x, dims), x, dims)
