"""The canonical form against brute force: the very addresses that each group of a call touches."""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_softmax.plan.problem import (
    ITEM_SIZE,
    MOST_ELEMENTS,
    Mode,
    Operand,
    Problem,
    canonical,
    canonical_dims,
    contiguous,
)


def groups_of_call(shape, dims, operands) -> list[tuple]:
    """Each group as the sorted addresses, one tuple of all operands' per element."""
    kept = [d for d in range(len(shape)) if d not in dims]
    found = []
    for outer in product(*(range(shape[d]) for d in kept)):
        group = []
        for inner in product(*(range(shape[d]) for d in dims)):
            index = dict(zip((*kept, *dims), (*outer, *inner), strict=True))
            group.append(tuple(sum(i * o.strides[d] for d, i in index.items()) for o in operands))
        found.append(tuple(sorted(group)))
    return sorted(found)


def addresses(modes, operands: int) -> list[tuple]:
    """What the coordinates of some modes map to, per operand."""
    return [
        tuple(sum(i * m.strides[n] for i, m in zip(index, modes, strict=True)) for n in range(operands))
        for index in product(*(range(m.size) for m in modes))
    ]


def groups_of_problem(problem: Problem) -> list[tuple]:
    n = len(problem.dtypes)
    inner = addresses(problem.reduced, n)
    return sorted(
        tuple(sorted(tuple(a + b for a, b in zip(base, i, strict=True)) for i in inner))
        for base in addresses(problem.kept, n)
    )


@st.composite
def layouts(draw, shape):
    """Strides of a dense permuted tensor, or a slice, or an expanded one, of this shape."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= shape[d] + draw(st.sampled_from([0, 0, 0, 1, 3]))
    for d in range(len(shape)):
        if draw(st.integers(0, 9)) == 0:
            strides[d] = 0
    return tuple(strides)


@st.composite
def calls(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=6).filter(lambda s: math.prod(s) <= 300))
    dims = tuple(sorted(draw(st.sets(st.integers(0, max(len(shape), 1) - 1)))))
    base = draw(layouts(shape))
    operands = [
        Operand(
            draw(st.sampled_from(["bf16", "fp16", "fp32"])),
            base if draw(st.booleans()) else draw(layouts(shape)),
            draw(st.integers(0, 7)) * 4,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return tuple(shape), dims, operands


@pytest.mark.long
@settings(max_examples=1200)
@given(calls())
def test_every_group_touches_the_same_addresses(call):
    shape, dims, operands = call
    problem = canonical(shape, dims, operands)
    dims = tuple(d for d in dims if d < len(shape))
    assert groups_of_problem(problem) == groups_of_call(shape, dims, operands)
    assert problem.groups * problem.length == math.prod(shape)
    assert problem.length == math.prod(shape[d] for d in dims)
    assert problem.bytes == sum(
        math.prod(n for d, n in enumerate(shape) if o.strides[d]) * ITEM_SIZE[o.dtype] for o in operands
    )
    assert problem.offsets == tuple(o.address % 16 // ITEM_SIZE[o.dtype] for o in operands)


@settings(max_examples=400)
@given(calls())
def test_canonical_form_is_canonical(call):
    """No mode of size 1, no two that could be one, and the same form however the dimensions are ordered."""
    shape, dims, operands = call
    problem = canonical(shape, dims, operands)
    for modes in (problem.kept, problem.reduced):
        assert all(m.size > 1 for m in modes)
        for slow, fast in pairwise(modes):
            assert slow.strides != tuple(s * fast.size for s in fast.strides)
    rank = len(shape)
    turned = [
        Operand(o.dtype, tuple(o.strides[(d + 1) % rank] for d in range(rank)), o.address) for o in operands
    ]
    if rank:
        moved = tuple(sorted((d - 1) % rank for d in dims))
        again = canonical(tuple(shape[(d + 1) % rank] for d in range(rank)), moved, turned)
        assert again == problem


@pytest.mark.parametrize("size", [0, 1, 5])
def test_empty_tensors_have_no_elements(size):
    problem = canonical((3, 0, size), (2,), [Operand("bf16", (0, size, 1))])
    assert problem.groups == 0 and problem.bytes == 0


@pytest.mark.parametrize(
    ("shape", "dims", "strides", "kept", "reduced"),
    [
        ((4, 8), (1,), (8, 1), [(4, 8)], [(8, 1)]),
        ((8, 4), (0,), (1, 8), [(4, 8)], [(8, 1)]),  # a transposed view is the same
        ((4, 8), (0,), (8, 1), [(8, 1)], [(4, 8)]),
        ((2, 3, 4, 5), (2, 3), (60, 20, 5, 1), [(6, 20)], [(20, 1)]),
        ((2, 3, 4, 5), (0, 2), (60, 20, 5, 1), [(3, 20), (5, 1)], [(2, 60), (4, 5)]),
        ((2, 3, 4), (0, 1, 2), (12, 4, 1), [], [(24, 1)]),
        ((7, 1, 9), (1,), (9, 9, 1), [(63, 1)], []),
        ((4, 8), (1,), (10, 1), [(4, 10)], [(8, 1)]),  # padded rows
        ((2, 4, 8), (2,), (80, 10, 1), [(2, 80), (4, 10)], [(8, 1)]),  # a slice that does not merge
        ((3, 4, 8), (2,), (0, 8, 1), [(4, 8), (3, 0)], [(8, 1)]),  # expanded
        ((), (0,), (), [], []),
        ((2, 6, 5, 7), (1,), (210, 1, 42, 6), [(70, 6)], [(6, 1)]),  # channels last
    ],
)
def test_known_forms(shape, dims, strides, kept, reduced):
    problem = canonical(shape, dims, [Operand("bf16", strides)])
    assert [(m.size, m.strides[0]) for m in problem.kept] == kept
    assert [(m.size, m.strides[0]) for m in problem.reduced] == reduced


def test_modes_merge_only_where_all_operands_agree():
    dense, padded = Operand("bf16", (32, 8, 1)), Operand("bf16", (40, 8, 1))
    assert canonical((2, 4, 8), (2,), [dense, dense]).kept == (Mode(8, (8, 8)),)
    assert len(canonical((2, 4, 8), (2,), [dense, padded]).kept) == 2
    assert canonical((2, 4, 8), (2,), [dense, Operand("bf16", (64, 16, 1))]).kept == (Mode(8, (8, 16)),)


@pytest.mark.parametrize(
    ("dim", "rank", "expected"),
    [
        (-1, 3, (2,)),
        (0, 3, (0,)),
        ((2, 0), 3, (0, 2)),
        ((-1, -3), 3, (0, 2)),
        ([1], 2, (1,)),
        (0, 0, (0,)),
        (-1, 0, (0,)),
        (range(3), 3, (0, 1, 2)),
    ],
)
def test_dims(dim, rank, expected):
    assert canonical_dims(dim, rank) == expected


@pytest.mark.parametrize(("dim", "rank"), [(3, 3), (-4, 3), (1, 0), (-2, 0), ((0, 5), 2)])
def test_dims_out_of_range(dim, rank):
    with pytest.raises(IndexError, match=r"dim=-?\d is out of range: expected -\d to \d for \d dimension"):
        canonical_dims(dim, rank)


@pytest.mark.parametrize("dim", [(0, 0), (1, -1), (0, 1, -2)])
def test_dims_repeated(dim):
    with pytest.raises(ValueError, match="names a dimension twice"):
        canonical_dims(dim, 2)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5), (3, 1, 5), (0, 4, 2), (3, 0), (2, 0, 0, 3)])
def test_contiguous_is_what_torch_makes(shape):
    assert contiguous("bf16", shape) == Operand("bf16", torch.empty(shape).stride())


def test_contiguous_over_reduced_dimensions_has_one_element_there():
    assert contiguous("fp32", (3, 4, 5, 6), (1, 3)).strides == (5, 0, 1, 0)
    assert contiguous("fp32", (3, 4), (0, 1)).strides == (0, 0)


def test_contiguous_refuses_what_no_tensor_is():
    assert contiguous("fp32", (MOST_ELEMENTS, 1)).strides == (1, 1)
    assert MOST_ELEMENTS * max(ITEM_SIZE.values()) < 1 << 63
    for shape, words in (
        ((MOST_ELEMENTS + 1,), f"at most {MOST_ELEMENTS}"),
        ((4, -1), "sizes must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            contiguous("bf16", shape)
    for dtype in ("int64", "bool", "fp64"):
        with pytest.raises(
            TypeError, match=f"no kernels for dtype '{dtype}': there are some for bf16, fp16, fp32"
        ):
            contiguous(dtype, (4, 8))
