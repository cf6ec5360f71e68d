"""Short rows that lie one behind another: every length and dtype in guarded buffers, ends of stretches, special values,
and bits that depend on the row alone."""

import math

import classes
import pytest
import torch
from checking import (
    DEVICE,
    DTYPES,
    Guarded,
    check_backward,
    check_reduction,
    check_softmax,
    equal_bits,
    random,
)

import cute_softmax
from cute_softmax.plan import table_of
from cute_softmax.runtime import launch

INF = math.inf
LIMIT = table_of().short[-1].capacity
LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    12,
    14,
    15,
    16,
    17,
    19,
    24,
    30,
    31,
    32,
    33,
    40,
    47,
    48,
    49,
    56,
    57,
    60,
    63,
    64,
)
ROWS = (1, 2, 31, 33, 65, 1000, 4099)  # less than a stretch, one and a row, many
dtypes = pytest.mark.parametrize("dtype", DTYPES)
pairs = pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)


@pytest.fixture(autouse=True)
def however_few():
    with classes.however_few():
        yield


def movement_of(math_name: str, *tensors: torch.Tensor) -> str:
    return launch.call_of(math_name, tensors, (1,)).plan.movement


@pairs
@pytest.mark.parametrize("rows", ROWS)
def test_forward(rows, pair):
    """Right, nothing else touched, and the same bits wherever the tensors begin."""
    source, result = (DTYPES[d] for d in pair)
    for columns in LENGTHS:
        x = random((rows, columns), source, seed=columns + rows, scale=3.0)
        found = []
        for begin, end in ((0, 0), (1, 1), (2, 4), (3, 0), (0, 5)):
            given, out = Guarded.of(x, offset=begin), Guarded(x.shape, result, offset=end)
            assert movement_of("softmax", given.tensor, out.tensor) == "short"
            cute_softmax.softmax(given.tensor, out=out.tensor)
            out.check()
            given.check(written=False)
            check_softmax(out.tensor, x)
            found.append(out.tensor.clone())
        assert all(equal_bits(y, found[0]) for y in found)


@dtypes
def test_every_length(dtype):
    for columns in range(1, LIMIT + 1):
        x = random((515, columns), DTYPES[dtype], seed=columns, scale=3.0)
        check_softmax(cute_softmax.softmax(x), x)


@dtypes
@pytest.mark.parametrize("rows", ROWS)
def test_logarithms(rows, dtype):
    for columns in LENGTHS:
        x = random((rows, columns), DTYPES[dtype], seed=columns + rows, scale=3.0)
        out = Guarded(x.shape, x.dtype)
        cute_softmax.log_softmax(x, out=out.tensor)
        out.check()
        exact = torch.log_softmax(x.double(), -1)
        step = torch.finfo(x.dtype).eps * exact.abs() + 2**-22 * (1 + x.double().abs().amax(-1, keepdim=True))
        assert ((out.tensor.double() - exact).abs() <= step).all(), columns


@pairs
@pytest.mark.parametrize("rows", ROWS)
def test_backward(rows, pair):
    source, result = (DTYPES[d] for d in pair)
    for columns in LENGTHS:
        y = torch.softmax(random((rows, columns), torch.float32, seed=columns, scale=2.0), -1).to(result)
        dy = random((rows, columns), result, seed=rows)
        for offset in (0, 3):
            given, out = Guarded.of(dy, offset=offset), Guarded(y.shape, source, offset=offset)
            launch.run("softmax_backward", (given.tensor, y, out.tensor), (1,))
            out.check()
            check_backward(out.tensor, dy, y)


@dtypes
def test_backward_of_logarithms(dtype):
    for columns in LENGTHS:
        x = random((517, columns), DTYPES[dtype], seed=columns, scale=2.0).requires_grad_()
        y = cute_softmax.log_softmax(x)
        dy = random(y.shape, y.dtype, seed=1)
        (dx,) = torch.autograd.grad(y, x, dy)
        dy, p = dy.double(), y.detach().double().exp()
        unit = dy.abs() + p * dy.abs().sum(-1, keepdim=True)
        exact = dy - p * dy.sum(-1, keepdim=True)
        assert ((dx.double() - exact).abs() <= (torch.finfo(dx.dtype).eps + 2**-20) * unit).all(), columns


@dtypes
@pytest.mark.parametrize("name", ["logsumexp", "amax", "sum"])
@pytest.mark.parametrize("rows", ROWS)
def test_reductions(rows, name, dtype):
    """Numbers of rows side by side and with gaps: the same bits."""
    for columns in LENGTHS:
        x, found = random((rows, columns), DTYPES[dtype], seed=columns + rows, scale=3.0), []
        for stride, offset in ((1, 0), (3, 1), (1, 1)):
            out = Guarded((rows,), x.dtype, strides=(stride,), offset=offset)
            launch.run(name, (x, out.tensor.as_strided(x.shape, (stride, 0))), (1,))
            out.check()
            check_reduction(name, out.tensor, x)
            found.append(out.tensor.clone())
        assert all(equal_bits(y, found[0]) for y in found)


@dtypes
def test_entropy(dtype):
    for columns in LENGTHS:
        x = random((517, columns), DTYPES[dtype], seed=columns, scale=2.0)
        logs = torch.log_softmax(x.double(), -1)
        exact = -(logs.exp() * logs).sum(-1)
        found = cute_softmax.entropy(x).double()
        assert (
            (found - exact).abs() <= 2**-7 * (1 + exact) if dtype != "fp32" else (found - exact).abs() <= 1e-5
        ).all()


@dtypes
def test_special_values(dtype):
    """-inf, +inf and NaN in one element of one row: that row alone has them, whichever element it is."""
    for columns in LENGTHS:
        base = random((2 * columns + 3, columns), DTYPES[dtype], seed=columns, scale=2.0)
        for value in (-INF, INF, math.nan, torch.finfo(DTYPES[dtype]).max, torch.finfo(DTYPES[dtype]).min):
            x = base.clone()
            x[torch.arange(columns) * 2 + 1, torch.arange(columns)] = value
            x[0] = -INF  # of which nothing is left
            check_softmax(cute_softmax.softmax(x), x)
            got, exact = cute_softmax.logsumexp(x, -1), torch.logsumexp(x.double(), -1).to(x.dtype)
            assert torch.allclose(got.double(), exact.double(), rtol=2**-6, equal_nan=True)
        x = torch.full_like(base, -INF)
        x[torch.arange(columns), torch.arange(columns)] = 1.0  # all but one
        y = cute_softmax.softmax(x)
        assert (
            equal_bits(y[:columns].float(), torch.eye(columns, device=DEVICE)) and y[columns:].isnan().all()
        )


@dtypes
def test_bits_depend_on_the_row_alone(dtype):
    """Whatever the number of rows, the row's place among them, and other rows."""
    for columns in LENGTHS:
        x = random((4099, columns), DTYPES[dtype], seed=columns, scale=3.0)
        for function in (
            cute_softmax.softmax,
            cute_softmax.log_softmax,
            lambda t: cute_softmax.logsumexp(t, -1),
        ):
            whole = function(x)
            for first, count in ((0, 1), (1, 1), (64, 33), (4098, 1), (17, 3000)):
                assert equal_bits(function(x[first : first + count].clone()), whole[first : first + count])


@dtypes
def test_in_place(dtype):
    for columns in LENGTHS:
        x = random((1027, columns), DTYPES[dtype], seed=columns, scale=3.0)
        y = cute_softmax.softmax(x)
        assert equal_bits(cute_softmax.softmax_(x.clone()), y)


@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    rows, columns = (1 << 31) // 7 + 1000, 7
    x = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    y = cute_softmax.softmax(x)
    for first in (0, rows // 2, rows - 1000):
        check_softmax(y[first : first + 1000], x[first : first + 1000])
