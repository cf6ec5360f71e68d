"""The checker itself: it passes what torch computes and fails every mutant, NaN or stray write."""

import math
from functools import partial

import checking
import pytest
import torch
from checking import (
    DTYPES,
    Guarded,
    check_backward,
    check_reduction,
    check_softmax,
    equal_bits,
    half_ulp,
    mutants,
    reduction64,
    reduction_mutants,
)

SHAPES = [(4, 2), (3, 7), (5, 127), (4, 1023), (2, 5000)]
TUPLES = [(0,), (1, 3), (0, 2), (-1, 0), (0, 1, 2), (0, 1, 2, 3)]
PLACES = [*((shape, (-1,)) for shape in SHAPES), *(((3, 4, 5, 6), dims) for dims in TUPLES)]
WRONG = r"elements are wrong; the worst is row \d+, column \d+"


def example(shape, dtype, seed=0):
    return checking.random(shape, DTYPES[dtype], seed=seed, scale=2.0, device="cpu")


def as_rows(tensor: torch.Tensor, dims) -> torch.Tensor:
    moved = tensor.movedim(dims, tuple(range(-len(dims), 0)))
    return moved.reshape(-1, math.prod(moved.shape[-len(dims) :]))


def from_rows(rows: torch.Tensor, shape, dims) -> torch.Tensor:
    last = tuple(range(-len(dims), 0))
    return rows.reshape(torch.empty(shape).movedim(dims, last).shape).movedim(last, dims)


def of_softmax(shape, dims, dtype):
    x = example(shape, dtype)
    rows = as_rows(x, dims)
    y = torch.softmax(rows.float(), -1).to(x.dtype)
    wrong = {name: from_rows(mutant, shape, dims) for name, mutant in mutants(y, rows)}
    for other in others(shape, dims):
        wrong[f"over {other}"] = from_rows(torch.softmax(as_rows(x, other).float(), -1), shape, other)
    return lambda result: check_softmax(result.to(x.dtype), x, dims), from_rows(y, shape, dims), wrong


def of_gradient(shape, dims, dtype):
    y = from_rows(torch.softmax(as_rows(example(shape, "fp32"), dims), -1), shape, dims).to(DTYPES[dtype])
    dy = example(shape, dtype, seed=1)
    wide, result = dy.double(), y.double()

    def gradient(over) -> torch.Tensor:
        return result * (wide - (wide * result).sum(over, keepdim=True))

    dot, right = (wide * result).sum(dims, keepdim=True), gradient(dims)
    wrong = {
        "zeros": torch.zeros_like(right),
        "no dot": result * wide,
        "off by one column": right.roll(1, dims[-1]),
        "reversed": right.flip(dims),
        "wrong sign": -right,
        "operands swapped": wide * (result - dot),
        "wrong scale": 1.02 * right,
        "last column not written": right.index_fill(dims[-1], torch.tensor([shape[dims[-1]] - 1]), 0),
        **{f"over {other}": gradient(other) for other in others(shape, dims)},
    }
    if len(shape) == 2 and shape[1] > 600:
        wrong["rows swapped"] = right.flip(0)
        part = dot - (wide * result)[:, 256:512].sum(-1, keepdim=True)
        wrong["a warp missing from the dot"] = result * (wide - part)
    return lambda dx: check_backward(dx.to(y.dtype), dy, y, dims), right, wrong


def of_reduction(name, shape, dims, dtype):
    x = example(shape, dtype, seed=2)
    right = reduction64(name, x, dims).to(x.dtype)
    torchs = getattr(torch, name)(x.float(), dims).to(x.dtype)
    assert check_reduction(name, torchs, x, dims) <= 1
    wrong = dict(reduction_mutants(name, right.flatten(), as_rows(x, dims)))
    return lambda result: check_reduction(name, result.to(x.dtype), x, dims), right, wrong


def others(shape, dims) -> list[tuple[int, ...]]:
    """Other dimensions of the same tensor."""
    return [d for d in TUPLES if len(shape) == 4 and {i % 4 for i in d} != {i % 4 for i in dims}]


KINDS = {
    "softmax": of_softmax,
    "gradient": of_gradient,
    **{name: partial(of_reduction, name) for name in ("logsumexp", "amax", "sum")},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dims"), PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_right_results_pass_and_mutants_fail(kind, shape, dims, dtype):
    check, right, wrong = KINDS[kind](shape, dims, dtype)
    assert check(right) <= 1
    if math.prod(shape) == math.prod(shape[d] for d in dims):
        wrong.pop("rows swapped", None)  # there is but one
    for name, mutant in wrong.items():
        with pytest.raises(AssertionError, match=WRONG):
            check(mutant)
            print(name)
    least = {"softmax": 11 if shape[-1] > 600 else 7, "gradient": 8}
    assert len(wrong) >= least.get(kind, 2)


@pytest.mark.parametrize("name", ["logsumexp", "amax", "sum"])
def test_infinities_of_reductions(name):
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf, -inf], [inf, 0.0], [nan, inf], [inf, -inf], [1e38, 3e38], [0.0, 0.0]])
    right = getattr(torch, name)(x, -1)
    assert check_reduction(name, right, x) == 0 or name != "amax"
    for row, value in ((0, nan), (1, 0.0), (2, 1.0), (5, 1.0)):
        wrong = right.clone()
        wrong[row] = value
        with pytest.raises(AssertionError, match="elements are wrong"):
            check_reduction(name, wrong, x)
    half = torch.full((1, 100), 6e4, dtype=torch.float16)
    check_reduction("sum", torch.tensor([inf], dtype=torch.float16), half)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_ulp_is_half_the_step_to_the_next_number(dtype):
    info = torch.finfo(DTYPES[dtype])
    for value in (1.0, 1.99, 0.75, 3e-5, info.tiny, info.tiny / 4, info.max):
        here = torch.tensor(value, dtype=DTYPES[dtype])
        integer = {2: torch.int16, 4: torch.int32}[here.element_size()]
        below = (here.view(integer) - 1).view(here.dtype).double()
        step = here.double() - below
        if math.frexp(here.item())[0] == 0.5 and here.item() > info.tiny:
            step *= 2  # below a power of two numbers are twice as dense
        assert half_ulp(here.double(), here.dtype) == step / 2
    assert half_ulp(torch.zeros(1, dtype=torch.float64), DTYPES[dtype]) == info.tiny * info.eps / 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_too_many_fails(dtype):
    """The bound for 16 bits is the rounding of the result: one more unit is too much."""
    x = example((3, 40), dtype)
    y = torch.softmax(x.double(), -1).to(x.dtype)
    integer = {2: torch.int16, 4: torch.int32}[y.element_size()]
    for steps in (1, -1) if dtype != "fp32" else (64, -64):
        moved = y.clone()
        moved[1, 5] = (moved[1, 5].view(integer) + steps).view(y.dtype)
        with pytest.raises(AssertionError, match="1 of 120 elements are wrong; the worst is row 1, column 5"):
            check_softmax(moved, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_has_to_be_where_the_oracle_has_it(dtype):
    x = example((4, 50), dtype)
    x[1, 3], x[2] = math.nan, -math.inf
    x[3, :49] = -math.inf
    y = torch.softmax(x.float(), -1).to(x.dtype)
    check_softmax(y, x)
    for row, value in ((0, math.nan), (1, 0.0), (2, 0.02)):
        wrong = y.clone()
        wrong[row, 7] = value
        with pytest.raises(
            AssertionError, match=rf"\(NaN\): 1 of 200 elements are wrong; the worst is row {row}"
        ):
            check_softmax(wrong, x)


def test_large_tensors_are_compared_in_parts(monkeypatch):
    x = example((40, 50), "bf16")
    y = torch.softmax(x.float(), -1).to(x.dtype)
    whole = check_softmax(y, x)
    monkeypatch.setattr(checking, "CHUNK", 130)
    assert check_softmax(y, x) == whole
    y[33, 2] += 1
    with pytest.raises(AssertionError, match="the worst is row 33, column 2"):
        check_softmax(y, x)


def test_several_dimensions_and_none():
    x = example((2, 3, 4, 5), "fp32")
    y = torch.softmax(x.movedim(1, -1).flatten(-2), -1).unflatten(-1, (5, 3)).movedim(-1, 1)
    check_softmax(y.contiguous(), x, (1, 3))
    with pytest.raises(AssertionError):
        check_softmax(y.contiguous(), x, 3)
    check_softmax(torch.tensor(1.0), torch.tensor(3.0))
    check_softmax(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match="shape"):
        check_softmax(torch.ones(3), torch.ones(4))


def test_guards_of_expanded_tensors():
    values = example((4, 1, 6), "bf16").expand(4, 5, 6)
    guarded = Guarded.of(values, strides=(8, 0, 1), offset=1)
    guarded.check()
    assert guarded.tensor.stride() == (8, 0, 1) and equal_bits(guarded.tensor, values)
    guarded.bits[guarded.placement[2] + 6] += 1
    with pytest.raises(AssertionError, match="1 elements outside"):
        guarded.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [{}, {"offset": 3}, {"offset": 1, "strides": (9, 1)}, {"strides": (1, 4)}])
def test_guards(place, dtype):
    values = example((4, 6), dtype)
    guarded = Guarded.of(values, **place)
    guarded.check()
    assert equal_bits(guarded.tensor, values)
    assert guarded.tensor.data_ptr() % 16 == place.get("offset", 0) * values.element_size() % 16
    first = guarded.placement[2]
    stray = [0, first - 1, guarded.bits.numel() - 1]
    if place.get("strides") == (9, 1):
        stray.append(first + 6)
    for at in stray:
        guarded = Guarded.of(values, **place)
        guarded.bits[at] += 1
        with pytest.raises(AssertionError, match=f"1 elements outside .* the first at {at - first} elements"):
            guarded.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_elements_are_found_and_poison_is_a_nan(dtype):
    guarded = Guarded((4, 6), DTYPES[dtype], device="cpu")
    assert guarded.tensor.isnan().all()
    guarded.check(written=False)
    guarded.tensor[:2] = math.nan  # a NaN that somebody wrote is no poison
    guarded.tensor[2:, :5] = 1
    with pytest.raises(AssertionError, match=r"2 of 24 elements were not written, the first at \(2, 5\)"):
        guarded.check()
    Guarded((0, 6), DTYPES[dtype], device="cpu").check()
    Guarded((), DTYPES[dtype], device="cpu").check(written=False)


def test_equal_bits():
    a = torch.tensor([1.0, math.nan, -0.0])
    assert equal_bits(a, a.clone())
    assert not equal_bits(a, torch.tensor([1.0, math.nan, 0.0]))
    assert not equal_bits(a, a.half()) and not equal_bits(a, a[:2])
