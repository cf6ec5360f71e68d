"""The scores of short rows: every form of what is beside them, against float64; nothing else written."""

from itertools import product

import classes
import pytest
import short_scores
import torch
from building import build
from checking import DTYPES, equal_bits, random
from families import Case, check_mutants, mutants

import cute_softmax

dtypes = pytest.mark.parametrize("dtype", DTYPES)
LENGTHS = (1, 2, 3, 5, 8, 12, 16, 33, 49, 64)


def cases_of(columns: int, dtype: str) -> list[Case]:
    """All in float32, half of them in each 16-bit dtype."""
    place = (3, 0) if columns in (2, 12, 33) else (0, 0)
    cases = list(short_scores.cases(columns, DTYPES[dtype], place))
    return cases if dtype == "fp32" else cases[dtype == "bf16" :: 2]


@pytest.fixture(scope="module", autouse=True)
def built_ahead():
    """The classes of `test_every_form`, side by side; rows are few here."""
    with classes.however_few():
        if torch.cuda.is_available():
            build(case.kernel() for n, dtype in product(LENGTHS, DTYPES) for case in cases_of(n, dtype))
        yield


@dtypes
@pytest.mark.parametrize("columns", LENGTHS)
def test_every_form(columns, dtype):
    for case in cases_of(columns, dtype):
        assert case.movement == "short", case.prologue.name
        case.check(case.launched())


@pytest.mark.parametrize("columns", [5, 49])
def test_mutants(columns):
    for case in short_scores.cases(columns, torch.float32):
        name = f"{case.math} {case.prologue.name}"
        check_mutants(case.check, mutants(case), case.expected(torch.float64), name)


@dtypes
@pytest.mark.parametrize("columns", [8, 49, 64])
def test_many_rows(columns, dtype):
    """Windows of an image: more rows than a stretch, a bias a head, a mask a window; bits that are each row's own."""
    x = random((40, 6, 49, columns), DTYPES[dtype], 1, 3.0)
    bias, mask = (
        random((6, 49, columns), DTYPES[dtype], 2),
        random((40, 1, 49, columns), DTYPES[dtype], 3) < 1,
    )
    mask[..., 0] = True
    y = cute_softmax.softmax(x, bias=bias, mask=mask, scale=0.5)
    exact = torch.softmax((x.double() * 0.5 + bias.double()).masked_fill(~mask, -torch.inf), -1)
    step = torch.finfo(y.dtype).eps * exact + 2**-18 * exact + torch.finfo(y.dtype).smallest_normal * 2**-8
    assert ((y.double() - exact).abs() <= step).all()
    for k in (1, 7):
        assert equal_bits(cute_softmax.softmax(x[:k], bias=bias, mask=mask[:k], scale=0.5), y[:k])
    assert equal_bits(cute_softmax.softmax_(x.clone(), bias=bias, mask=mask, scale=0.5), y)


@dtypes
def test_nothing_beyond_the_diagonal_counts(dtype):
    """Gradients of what a causal mask has left out may be anything."""
    x = random((2, 3, 20, 20), DTYPES[dtype], 1)
    y, dy = cute_softmax.softmax(x, causal=True), random(x.shape, DTYPES[dtype], 2)
    beyond = torch.ones(20, 20, dtype=torch.bool, device=x.device).triu(1)
    found = []
    for value in (0.0, float("nan"), float("inf")):
        given = dy.masked_fill(beyond, value)
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(cute_softmax.softmax(leaf, causal=True), leaf, given)
    assert equal_bits(found[0], found[1]) and equal_bits(found[0], found[2])
    assert (found[0][..., beyond] == 0).all() and y.isfinite().all()


def test_plans_of_calls():
    x = random((64, 4, 49, 49), torch.bfloat16, 1)
    bias, mask = random((4, 49, 49), torch.bfloat16, 2), random((64, 1, 49, 49), torch.float32, 3) < 1
    made = cute_softmax.plan_softmax(x, bias=bias, mask=mask)
    assert made.movement == "short" and made.kernel.laid == ("dense", "apart", "apart")
    whole = mask.expand(x.shape).contiguous()
    assert cute_softmax.plan_softmax(x, mask=whole).kernel.laid == ("dense", "dense")
