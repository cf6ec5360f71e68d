"""Forward softmax on the device: every length, dtype and row count, in guarded buffers."""

import classes
import pytest
import torch
from checking import DEVICE, DTYPES, Guarded, check_softmax, equal_bits, random

from cute_softmax import softmax

LENGTHS = (
    1, 2, 3, 7, 8, 33, 64, 127, 128, 255, 512, 1000, 1023, 1024, 2047, 4096, 5000, 8192, 16384, 20000, 32768,
    50257, 65536, 100000, 128256, 151936, 200064, 262144, 300001, 1000000,
)  # fmt: skip
pairs = pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)


def row_counts(columns: int) -> tuple[int, ...]:
    return (0, 1, 2, 3, 17, 1000) if columns <= 10000 else (0, 1, 3, 17) if columns <= 200000 else (1, 9)


def check_guarded(x: torch.Tensor, dtype: torch.dtype):
    """Softmax into a guarded buffer and into a new tensor: right, the same bits, nothing else touched."""
    source, out = Guarded.of(x), Guarded(x.shape, dtype)
    assert softmax(source.tensor, out=out.tensor) is out.tensor
    out.check()
    source.check(written=False)
    assert equal_bits(source.tensor, x), "the input was changed"
    check_softmax(out.tensor, x)
    fresh = softmax(x, dtype=dtype)
    assert fresh.dtype == dtype and fresh.shape == x.shape
    assert equal_bits(fresh, out.tensor), "the result depends on where it is written"
    assert equal_bits(fresh, softmax(x, dtype=dtype)), "a second call gave other bits"


@pairs
@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths(columns, pair):
    source, result = (DTYPES[d] for d in pair)
    for rows in row_counts(columns):
        x = random((rows, columns), source, seed=columns + rows, scale=3.0)
        check_guarded(x, result)


@pairs
@pytest.mark.parametrize("online", [True, False], ids=["online", "two_pass"])
def test_ends_of_every_class(pair, online, arch):
    """The shortest and the longest row of each class, and the first row that no class holds."""
    source, result = (DTYPES[d] for d in pair)
    for interval in classes.taken("softmax", arch, pair, online=online):
        for columns in {interval.first, interval.last}:
            x = random((5, columns), source, seed=columns)
            out = Guarded(x.shape, result)
            softmax(x, out=out.tensor, online=online)
            out.check()
            check_softmax(out.tensor, x)
    x = random((2, interval.last + 1), source)
    check_softmax(softmax(x, dtype=result, online=online), x)


@pairs
def test_online_and_two_pass_agree(pair, arch):
    source, result = (DTYPES[d] for d in pair)
    for interval in classes.taken("softmax", arch, pair):
        columns = max(1, interval.last - 3)
        x = random((7, columns), source, seed=columns, scale=4.0)
        results = [softmax(x, dtype=result, online=online) for online in (True, False)]
        for y in results:
            check_softmax(y, x)
        a, b = (y.double() for y in results)
        # Two roundings of nearly the same number differ by one unit in the last place at most; in float32 what
        # rounding x - max costs, half a unit of it, counts twice, beside what exponentials and sums cost.
        step = torch.finfo(result).eps
        if result is torch.float32:
            step = step * (16 + (x.amax(-1, keepdim=True) - x).double())
        assert ((a - b).abs() <= step * torch.maximum(a, b) + torch.finfo(result).tiny).all(), columns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [65535, 65536, 131073])
def test_more_rows_than_a_grid_dimension(rows, dtype):
    for columns in (3, 64, 1000):
        x = random((rows, columns), DTYPES[dtype], seed=rows)
        check_guarded(x, x.dtype)


@pytest.mark.parametrize("shape", [(4_000_003, 7), (3_000_000, 64), (1_000_001, 129)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_millions_of_rows(shape, dtype):
    x = random(shape, DTYPES[dtype], seed=1)
    out = Guarded(shape, x.dtype)
    softmax(x, out=out.tensor)
    out.check()
    check_softmax(out.tensor, x)


@pairs
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3), (3, 4, 0)])
def test_empty(shape, pair):
    source, result = (DTYPES[d] for d in pair)
    x = torch.empty(shape, dtype=source, device=DEVICE)
    for dim in range(len(shape)):
        y = softmax(x, dim, dtype=result)
        assert y.shape == x.shape and y.dtype == result
        assert softmax(x, dim, out=y) is y


@pairs
def test_scalars(pair):
    source, result = (DTYPES[d] for d in pair)
    for value in (0.0, -3.5, float("-inf"), float("inf"), float("nan")):
        x = torch.full((), value, dtype=source, device=DEVICE)
        for dim in (0, -1):
            y = softmax(x, dim, dtype=result)
            assert y.shape == () and y.dtype == result
            check_softmax(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_add_up_to_one(dtype):
    for columns in (1, 7, 255, 4096, 50257, 300001):
        x = random((33, columns), DTYPES[dtype], seed=columns)
        y = softmax(x, dtype=torch.float32)
        assert (y.double().sum(-1) - 1).abs().max() < 4e-7
        constant = torch.full_like(x, 0.7)
        y = softmax(constant)
        check_softmax(y, constant)
        assert (y == y[0, 0]).all(), columns


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_every_run(dtype):
    """Whatever else runs: small rows, rows of many warps, clusters and persistent clusters."""
    for shape in ((1000, 33), (300, 1000), (200, 20000), (64, 100000), (40, 262144), (40, 500000)):
        x = random(shape, DTYPES[dtype], seed=3, scale=5.0)
        first = softmax(x)
        noise = random((1 << 22,), torch.float32)
        for _ in range(10):
            noise = noise * 1.0001
            assert equal_bits(softmax(x), first), shape
