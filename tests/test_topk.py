"""topk_softmax on the CPU: results, gradients, launches, plans, and the selection that its kernel makes."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from checking import FLOATS, example

from cute_softmax import NotPlanned, batch_invariant, plan_topk_softmax, topk_softmax
from cute_softmax.dispatch.topk.kernels import Choice, formula
from cute_softmax.kernels.topk.select import (
    alike,
    bitonic,
    comparators,
    doubtful,
    lane_of,
    largest,
    merged,
    ordered,
    places,
    rough_key,
    settled,
    sort,
)
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.topk import TopkClass, plan_topk, plan_topk_backward

INF, NAN = float("inf"), float("nan")
renormalizing = pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])


def exact(logits, k, renormalize):
    """(probabilities in float64, differentiable; indices), of equal elements the first one first."""
    x = logits.double()
    rows = x.detach().reshape(-1, x.shape[-1]).tolist()
    order = torch.tensor([sorted(range(len(row)), key=lambda i, row=row: -row[i])[:k] for row in rows])
    order = order.view(*logits.shape[:-1], k)
    if renormalize:
        return torch.softmax(x.gather(-1, order), -1), order
    return torch.softmax(x, -1).gather(-1, order), order


@renormalizing
@pytest.mark.parametrize("shape", [(4, 9), (2, 3, 64), (1,), (5, 1000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_results(shape, dtype, renormalize, launched):
    logits = example(shape, dtype)
    for k, index_dtype in ((1, torch.int64), (min(3, shape[-1]), torch.int32), (shape[-1], torch.int64)):
        right, order = exact(logits, k, renormalize)
        values, indices = topk_softmax(logits, k, renormalize=renormalize, index_dtype=index_dtype)
        assert values.dtype == dtype and indices.dtype == index_dtype and values.shape == indices.shape
        assert torch.equal(indices.long(), order)
        assert torch.allclose(values.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-7)
        in_float32 = topk_softmax(logits, k, renormalize=renormalize, dtype=torch.float32)[0]
        assert in_float32.dtype is torch.float32
        assert torch.allclose(in_float32.double(), right, rtol=1e-6, atol=0)
    if launched is not None and dtype != torch.float64:
        assert {n.math for n in launched} == {"topk_softmax"} and len(launched) == 6


@renormalizing
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients(dtype, renormalize, launched):
    for upstream in (example((4, 3), dtype, seed=1), torch.ones((), dtype=dtype).expand(4, 3)):
        logits = example((4, 9), dtype).requires_grad_()
        values, indices = topk_softmax(logits, 3, renormalize=renormalize)
        assert values.requires_grad and not indices.requires_grad
        (found,) = torch.autograd.grad(values, logits, upstream)
        leaf = logits.detach().double().requires_grad_()
        (right,) = torch.autograd.grad(exact(leaf, 3, renormalize)[0], leaf, upstream.double())
        assert found.dtype == dtype and found.shape == logits.shape
        error = (found.double() - right).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * upstream.abs().max()
    if launched is not None and dtype != torch.float64:
        assert [n.math for n in launched] == ["topk_softmax", "topk_softmax_backward"] * 2


def test_what_is_kept_for_the_gradient(launches):
    """The logits, or the k probabilities where they say all."""
    logits = example((4, 9), torch.float32).requires_grad_()
    for renormalize, kept in ((False, {logits.shape, (4, 3)}), (True, {(4, 3)})):
        seen = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(tuple(t.shape)) or t, lambda t: t):  # noqa: B023
            topk_softmax(logits, 3, renormalize=renormalize)
        assert seen == {tuple(s) for s in kept}


@renormalizing
def test_gradients_twice(renormalize):
    x = example((2, 6), torch.float64).requires_grad_()

    def values(x):
        return topk_softmax(x, 3, renormalize=renormalize)[0]

    assert torch.autograd.gradcheck(values, x) and torch.autograd.gradgradcheck(values, x)


@renormalizing
def test_ties_and_what_is_no_number(renormalize):
    logits = torch.tensor(
        [
            [1.0, 1.0, 1.0, 1.0],
            [0.0, -0.0, 0.0, -1.0],
            [-INF, 2.0, -INF, -INF],
            [-INF, -INF, -INF, -INF],
            [1.0, NAN, 2.0, NAN],
            [1.0, INF, 2.0, 0.0],
        ]
    )
    values, indices = topk_softmax(logits, 3, renormalize=renormalize)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2], [1, 0, 2], [0, 1, 2], [1, 3, 2], [1, 2, 0]]
    assert values[3:].isnan().all() and not values[:3].isnan().any()
    assert values[2].tolist() == [1.0, 0.0, 0.0]


@renormalizing
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rule_does_not_depend_on_how_torch_sorts(dtype, renormalize, monkeypatch):
    """Torch's operations where a sort goes by bits, as some do on a GPU: NaN with a sign last, and -0 after 0."""

    def by_bits(tensor, dim, descending, stable):
        bits = tensor.view({4: torch.int32, 8: torch.int64}[dtype.itemsize])
        bits = torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
        return sort(bits, dim=dim, descending=descending, stable=stable)

    sort = torch.sort
    logits = torch.tensor(
        [[1.0, NAN, 2.0, NAN, 0.0, 3.0, INF, -INF], [-0.0, 0.0, -0.0, 1, 0, -1, -2, 0]], dtype=dtype
    )
    logits.view({4: torch.int32, 8: torch.int64}[dtype.itemsize])[0, 1] = -1
    right = [[1, 3, 6, 5, 2, 0, 4, 7], [3, 0, 1, 2, 4, 7, 5, 6]]
    assert logits[0, 1].isnan() and by_bits(logits, -1, True, True).indices.tolist() != right
    monkeypatch.setattr(torch, "sort", by_bits)
    values, indices = formula(logits, Choice((1,), 8, renormalize, dtype, torch.int64))
    assert indices.tolist() == right
    assert values[0].isnan().all() and torch.allclose(values[1], torch.softmax(logits[1], 0)[right[1]])


@pytest.mark.parametrize(
    "tensor",
    [
        example((8, 12), torch.float32)[:, 1:],
        example((9, 8), torch.float32).mT,
        example((4, 3, 8), torch.float32).transpose(0, 1),
        example((1, 8), torch.float32).expand(5, 8),
        example((6, 8), torch.float32)[::2],
        example((65,), torch.float32)[1:].view(8, 8),
    ],
    ids=["slice", "transposed", "outer", "expanded", "steps", "offset"],
)
def test_views(tensor, launches):
    for _ in range(2):  # so that what the first call decided serves the second
        leaf = tensor.detach().requires_grad_()
        values, indices = topk_softmax(leaf, 2)
        right, order = exact(tensor.contiguous(), 2, False)
        assert torch.equal(indices, order) and torch.allclose(values.double(), right, rtol=1e-6)
        (found,) = torch.autograd.grad(values[..., 0].sum(), leaf)
        other = tensor.detach().contiguous().requires_grad_()
        (expected,) = torch.autograd.grad(topk_softmax(other, 2)[0][..., 0].sum(), other)
        assert torch.allclose(found, expected, atol=1e-7)


def test_a_form_serves_only_its_own_calls(launches):
    logits = example((4, 9), torch.float32)
    for k, renormalize, dtype, index in (
        (1, False, None, torch.int64),
        (True + 1, False, None, torch.int64),
        (1, True, None, torch.int64),
        (1, False, torch.bfloat16, torch.int64),
        (1, False, None, torch.int32),
        (1, False, None, torch.int64),
    ):
        values, indices = topk_softmax(logits, k, renormalize=renormalize, dtype=dtype, index_dtype=index)
        assert values.shape == (4, k) and values.dtype == (dtype or torch.float32) and indices.dtype == index
        assert (values == 1).all() == renormalize
    with pytest.raises(TypeError, match="k must be an int, not bool"):
        topk_softmax(logits, True)
    moved = torch.empty(4 * 9 + 1)[1:].view(4, 9).copy_(logits)  # its address is no multiple of 16
    assert torch.equal(topk_softmax(moved, 1)[0], topk_softmax(logits, 1)[0])


def test_nothing(launches):
    for shape, k in (((0, 8), 2), ((3, 8), 0), ((3, 0), 0)):
        logits = torch.randn(shape, requires_grad=True)
        values, indices = topk_softmax(logits, k)
        assert values.shape == indices.shape == (shape[0], k)
        values.sum().backward()
        assert logits.grad.shape == shape and not logits.grad.any()
    assert not launches


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (TypeError, "logits must be a torch.Tensor", lambda: topk_softmax([1.0], 1)),
        (TypeError, "needs a floating-point tensor", lambda: topk_softmax(torch.ones(3).long(), 1)),
        (TypeError, "k must be an int, not float", lambda: topk_softmax(torch.ones(3), 1.0)),
        (TypeError, "index_dtype is torch.int16", lambda: topk_softmax(torch.ones(3), 1, index_dtype=torch.int16)),
        (TypeError, "dtype is torch.int32", lambda: topk_softmax(torch.ones(3), 1, dtype=torch.int32)),
        (ValueError, "k is 4: of 3 elements 0 to 3", lambda: topk_softmax(torch.ones(3), 4)),
        (ValueError, "k is -1", lambda: topk_softmax(torch.ones(3), -1)),
        (ValueError, "no dimension", lambda: topk_softmax(torch.ones(()), 1)),
        (ValueError, "nothing is launched", lambda: plan_topk_softmax((4, 8), 0)),
        (TypeError, "no kernels for torch.float64", lambda: plan_topk_softmax((4, 8), 1, torch.float64)),
    ],
)  # fmt: skip
def test_errors(error, said, call):
    with pytest.raises(error, match=said):
        call()


def test_longer_rows_are_refused_on_the_gpu(launches):
    with pytest.raises(NotPlanned, match=r"rows of 1025 elements.* at most 1024"):
        topk_softmax(torch.randn(4, 1025), 2)
    assert topk_softmax(torch.randn(4, 1025, dtype=torch.float64), 2)[0].shape == (4, 2)


# -- Plans -------------------------------------------------------------------------------------------------------------


def classes_of(rows=(1, 100, 1 << 20)):
    for columns, count, dtype in itertools.product(
        (1, 2, 7, 8, 9, 60, 64, 128, 160, 256, 384, 1000, 1024), rows, ("bf16", "fp32")
    ):
        for k in sorted({1, 2, 6, 8, 9, 33, columns} & {*range(1, columns + 1)}):
            yield columns, k, plan_topk(count, columns, k, Operand(dtype, (columns, 1)), dtype, H200)


def test_plans_hold_what_is_asked():
    for columns, k, plan in classes_of():
        c = plan.kernel
        assert c.capacity >= columns and c.capacity == c.tiler[1] and k <= c.kept
        assert c.length <= c.elements <= 64 and c.threads_per_row * c.rows == c.threads
        assert plan.ctas * c.rows >= plan.rows > (plan.ctas - 1) * c.rows
        assert columns % c.vector == 0 and len(plan.arguments) + 4 == len(c.signature)
        # Each element of the tile has one place.
        assert sorted(c.tv.offsets()) == list(range(c.rows * c.capacity))


def test_lists_are_of_few_lengths():
    """So that another k compiles another class only where it must."""
    found = {
        (c.dtypes[0], c.threads_per_row, c.length) for _, k, p in classes_of() for c in [p.kernel] if k <= 8
    }
    assert {length for dtype, _, length in found if dtype == "fp32"} == {4, 8}
    assert {length for dtype, _, length in found if dtype != "fp32"} == {2, 8}
    usual = {
        p.kernel
        for columns, k, p in classes_of()
        if k <= 8 and columns % 8 == 0 and p.kernel.dtypes[0] == "bf16"
    }
    assert len(usual) <= 48


@pytest.mark.parametrize(
    ("columns", "strides", "address", "vector"),
    [(64, (64, 1), 0, 8), (60, (60, 1), 0, 4), (64, (66, 1), 0, 2), (63, (64, 1), 0, 1), (64, (64, 1), 8, 4)],
)
def test_vectors_are_as_wide_as_all_rows_allow(columns, strides, address, vector):
    made = plan_topk(4, columns, 2, Operand("bf16", strides, address), "bf16", H200)
    assert made.kernel.vector == vector


def test_more_rows_than_32_bits_count():
    with pytest.raises(NotPlanned, match="rows: at most"):
        plan_topk(1 << 31, 8, 2, Operand("bf16", (8, 1)), "bf16", H200)


def operands_of(columns, dtype):
    """(rows, operand): of one and many rows, without gaps and with, at any address."""
    for rows, pitch, address in itertools.product(
        (1, 2, 100, 1 << 20), (columns, columns + 1, columns + 8, 0), (0, 1, 2, 8)
    ):
        yield rows, Operand(dtype, (pitch, 1), address)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_invariant_plans_have_one_class(dtype):
    """Its layout is the order in which a row is added up. Outside the mode there are several."""
    for columns, k in ((1, 1), (7, 2), (8, 8), (60, 8), (64, 2), (64, 9), (256, 8), (1000, 33), (1024, 8)):
        found = {mode: set() for mode in (False, True)}
        gradients = {mode: set() for mode in (False, True)}
        for (rows, operand), mode in itertools.product(operands_of(columns, dtype), found):
            plan = plan_topk(rows, columns, k, operand, dtype, H200, invariant=mode)
            found[mode].add(plan.kernel)
            plans = [plan]
            for renormalize in (False, True):
                source = contiguous(dtype, (rows, k)) if renormalize else operand
                few = Operand(dtype, (0, 0))
                options = {"renormalize": renormalize, "invariant": mode}
                plans.append(plan_topk_backward(rows, columns, k, source, few, dtype, H200, **options))
                gradients[mode].add(plans[-1].kernel)
            for plan in plans:
                assert plan.invariant == mode and plan.laid_out in (((), (0,)) if mode else ((),))
                if plan.laid_out:
                    assert plan.operand_strides[0] == (columns,)
            whole = plan_topk(rows, columns, k, Operand(dtype, (columns, 1)), dtype, H200, invariant=mode)
            assert not whole.laid_out
        assert len(found[True]) == 1 and len(gradients[True]) == 2  # renormalized and not
        odd = columns % 2 == 1
        assert odd or (len(found[False]) > 1 and len(gradients[False]) > 2)
    plans = [
        plan_topk(rows, 256, 8, contiguous("bf16", (rows, 256)), "bf16", H200, invariant=mode).kernel
        for rows, mode in ((1, False), (1, True), (1 << 20, False))
    ]
    assert plans[0] != plans[1] == plans[2]


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "an odd offset": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "an odd pitch": lambda x: torch.cat((x, x[:, :1]), 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@renormalizing
def test_any_layout_within_batch_invariant(layout, renormalize, launches):
    logits, upstream = example((5, 64), torch.float32), example((5, 4), torch.float32, seed=1)
    for inside in (True, False, True, True):  # what one call decided serves those of its mode alone
        launches.clear()
        leaf = LAYOUTS[layout](logits).requires_grad_()
        with batch_invariant() if inside else nullcontext():
            values, indices = topk_softmax(leaf, 4, renormalize=renormalize)
        (found,) = torch.autograd.grad(values, leaf, upstream)
        other = logits.double().requires_grad_()
        right, order = exact(other, 4, renormalize)
        (expected,) = torch.autograd.grad(right, other, upstream.double())
        assert torch.equal(indices, order) and torch.allclose(values.double(), right, atol=1e-6)
        assert torch.allclose(found.double(), expected, atol=1e-6)
        assert [n.math for n in launches] == ["topk_softmax", "topk_softmax_backward"]
        assert {n.invariant for n in launches} == {inside}


@renormalizing
def test_the_mode_goes_where_calls_go(renormalize, launches):
    """Into operators, in compiled code and its gradient, and under vmap."""
    torch._dynamo.reset()

    def values(x):
        return topk_softmax(x, 3, renormalize=renormalize)[0]

    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    for inside in (False, True, False):
        launches.clear()
        x = example((4, 6, 9), torch.float32).requires_grad_()
        with batch_invariant() if inside else nullcontext():
            found = compiled(x)
            batched = torch.func.vmap(values)(x)
            gradients = torch.func.vmap(torch.func.grad(lambda row: values(row).prod()))(x)
        found.prod(-1).sum().backward()
        assert torch.allclose(found, batched) and torch.allclose(gradients.sum(), x.grad.sum(), atol=1e-6)
        assert [n.math for n in launches].count("topk_softmax") >= 3
        assert {n.math for n in launches} == {"topk_softmax", "topk_softmax_backward"}
        assert {n.invariant for n in launches} == {inside}


def test_words_within_batch_invariant():
    for backward in (False, True):
        x = torch.empty(10, 65, dtype=torch.bfloat16, device="meta")[:, 1:]
        with batch_invariant():
            told = plan_topk_softmax(x, 8, backward=backward).explain()
            assert "batch-invariant: they depend on the row and its length; 1 operand copied" in told
        assert "batch-invariant" not in plan_topk_softmax(x, 8, backward=backward).explain()


@renormalizing
def test_words(renormalize):
    told = plan_topk_softmax((4096, 160), 8, renormalize=renormalize).explain()
    assert "8 of 4096 rows of 160" in told and ("renormalized" in told) == renormalize
    assert "ties       to the lowest index" in told
    told = plan_topk_softmax((4096, 160), 8, renormalize=renormalize, backward=True).explain()
    assert "gradient" in told and ("the row, once" in told) != renormalize


# -- Selection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_network_sorts(count):
    """By the zero-one principle: what sorts all rows of zeros and ones sorts all."""
    for bits in itertools.product((0, 1), repeat=count):
        keys = list(bits)
        sort(keys, comparators(count), lambda a, b: (max(a, b), min(a, b)))
        assert keys == sorted(bits, reverse=True)


def test_the_longest_network_sorts():
    number = random.Random(0)
    for _ in range(500):
        keys = [number.randrange(40) for _ in range(32)]
        right = sorted(keys, reverse=True)
        sort(keys, comparators(32), lambda a, b: (max(a, b), min(a, b)))
        assert keys == right
    assert len(list(comparators(32))) == 191 and len(list(bitonic(32))) == 80


def keys_of(row: np.ndarray, halves: str, last: int = 1023, rough: bool = False) -> np.ndarray:
    """The keys of a row, as `Keys` makes them: of 16-bit elements ("bf16", "fp16") and rough ones in 32 bits, else in
    64. What an addition of 0 does on a GPU is done here: -0 becomes 0, and any NaN the positive one."""
    tensor, code = torch.from_numpy(row) + 0.0, last - np.arange(len(row))
    if halves:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[halves]
        bits = torch.where(tensor.isnan(), 0x7FFF, tensor.to(dtype).view(torch.int16)).numpy()
        return ordered(bits.astype(np.int64) << 16, 0x7FFF0000) + code
    bits = torch.where(tensor.isnan(), 0x7FFFFFFF, tensor.view(torch.int32)).numpy().astype(np.int64)
    return rough_key(bits, code, last) if rough else (ordered(bits, 0x7FFFFFFF) << 32) + code


@pytest.mark.parametrize("halves", ["bf16", "fp16", ""], ids=["bf16", "fp16", "fp32"])
def test_keys_compare_as_elements_do(halves):
    row = np.array(
        [NAN, INF, 2.0**15, 1.5, 1.0, 1.0, 6e-8, 0.0, -0.0, -6e-8, -1.0, -1.5, -(2.0**15), -INF], np.float32
    )
    keys = keys_of(row, halves)
    assert (np.diff(keys) < 0).all()
    assert ((1023 - (keys & 1023)) == np.arange(len(row))).all()
    bits = (keys & ~0xFFFF if halves else keys >> 32).astype(np.int32)
    back = ordered(bits, 0x7FFF0000 if halves else 0x7FFFFFFF)
    back = (back >> 16).astype(np.int16) if halves else back
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "": torch.float32}[halves]
    found = torch.from_numpy(back).view(dtype).float()
    assert torch.equal(found[1:], torch.from_numpy(row).to(dtype).float()[1:]) and found[0].isnan()


@pytest.mark.parametrize("last", [7, 255, 1023])
def test_rough_keys_are_right_where_they_are_not_alike(last):
    row = np.array([NAN, INF, 3.0, 1.5, 1.0, 0.0, -1.0, -INF], np.float32)
    keys = keys_of(row, "", last, rough=True)
    assert (np.diff(keys) < 0).all() and ((last - (keys & last)) == np.arange(8)).all()
    assert (keys > -(1 << 31)).all() and (keys < 1 << 31).all()
    near = np.nextafter(np.float32(1.5), np.float32(2)).repeat(2)
    near[0] = 1.5  # the larger one has the higher index
    a, b = keys_of(near, "", last, rough=True)
    assert a > b and alike(a, b, last) and not alike(keys[2], keys[3], last)


def chosen(row: np.ndarray, k: int, c: TopkClass, halves: str, rough: bool = False) -> tuple[list[int], int]:
    """(the indices that a kernel of this class chooses of a row; from which on rough keys may be wrong, k for none): by
    its own arithmetic, on arrays of all lanes' numbers."""
    padded = np.concatenate([row, np.full(c.capacity - len(row), -INF, np.float32)])
    last, lowest = c.capacity - 1, -(1 << 63)
    keys = keys_of(padded, halves, last, rough)
    lane = np.arange(c.threads_per_row)
    columns = [
        np.array([c.tv(int(t), value) // c.rows for t in lane], np.int64) for value in range(c.elements)
    ]
    pick = lambda a, b: (np.maximum(a, b), np.minimum(a, b))  # noqa: E731
    lists = largest((keys[own] for own in columns), c.elements, c.length, pick)
    if c.takes:
        found, used_up = taken(np.stack(lists), k, c, last, lowest)
        return settled_in(padded, found, np.full_like(lane, lowest), used_up, k, c, last, rough)
    found, out = merged(c, lists, lane, lambda key, bits: key[lane ^ bits], pick)
    beyond = np.full_like(lane, max((int(key.max()) for key in out), default=lowest))
    return settled_in(padded, found, beyond, lists[-1], k, c, last, rough)


def taken(lists: np.ndarray, k: int, c: TopkClass, last: int, lowest: int) -> tuple[list, bool]:
    """(what lanes' sorted lists (place, lane) give of which the largest first one is taken k times, and once more; the
    lanes whose lists are used up)."""
    found, at = [], np.zeros(c.threads_per_row, int)
    padded = np.concatenate([lists, np.full((1, lists.shape[1]), lowest)])
    for _ in range(k + 1):  # one more, which is not chosen
        firsts = padded[at, np.arange(len(at))]
        found.append(int(firsts.max()))
        at[firsts.argmax()] += 1
    mine = np.array([*found, *[lowest] * (c.threads_per_row - len(found))])
    return [mine], at == c.length


def settled_in(
    padded: np.ndarray,
    found: list,
    beyond: np.ndarray,
    end: np.ndarray,
    k: int,
    c: TopkClass,
    last: int,
    rough: bool,
) -> tuple[list[int], int]:
    """`chosen` of what lanes have found."""
    lane, of_lane = np.arange(c.threads_per_row), lambda key, i: key[i % c.threads_per_row]
    where = np.stack(places(c, lane))
    indices, start = [last - (key & last) for key in found], k
    if rough:
        elements = [np.maximum(padded[i % len(padded)], -3e38) for i in indices]  # as numbers, for `select`
        unsure, near = doubtful(c, found, beyond, lane, k, of_lane)
        _, indices = settled(c, elements, indices, near, lane, of_lane)
        start = int(where[np.stack(unsure)].min(initial=k))
        incomplete = np.zeros(1)
        if c.length < c.elements:
            least = found[-1][lane_of(c, (1 << len(c.place_bits)) - 1)] if not c.takes else 0
            incomplete = end if c.takes else (end & ~last) >= (least & ~last)
        if incomplete.any():
            start = 0
    order = dict(zip(where.ravel().tolist(), np.stack(indices).ravel().tolist(), strict=True))
    assert c.takes or sorted(set(order) - {c.kept}) == list(range(c.kept))
    return [order[i] for i in range(k)], start


def rows_of(columns: int, c: TopkClass) -> list[np.ndarray]:
    """Rows with many ties, without, with all that is large in one lane, and of nothing."""
    generator = np.random.default_rng(columns)
    own = sorted({c.tv(0, value) // c.rows for value in range(c.elements)})
    steep = np.where(np.isin(np.arange(columns), own), 100.0, 0.0) + generator.integers(0, 4, columns)
    found = generator.integers(-2, 3, columns), generator.normal(size=columns), steep, np.full(columns, -INF)
    return [row.astype(np.float32) for row in found]


@pytest.mark.long
@pytest.mark.parametrize("halves", ["bf16", ""], ids=["bf16", "fp32"])
def test_selection(halves):
    for columns, k, plan in classes_of(rows=(1, 1 << 20)):
        c = plan.kernel
        if c.dtypes[0] != (halves or "fp32"):
            continue
        for row in rows_of(columns, c):
            if halves:
                row = torch.from_numpy(row).bfloat16().float().numpy()
            right = np.argsort(-row, kind="stable")[:k].tolist()
            # With lists that are long enough, which those of rows that wait need not be.
            assert chosen(row, k, replace(c, queued=False), halves)[0] == right
            if c.rough:
                found, start = chosen(row, k, c, halves, rough=True)
                assert found[:start] == right[:start]


def test_rough_keys_doubt_rarely_and_rightly():
    generator, doubts, wrong = np.random.default_rng(1), 0, 0
    c = plan_topk(1 << 20, 256, 8, Operand("fp32", (256, 1)), "fp32", H200).kernel
    assert c.rough and c.length < c.elements

    def best(row: np.ndarray) -> list[int]:
        return np.argsort(-row, kind="stable")[:8].tolist()

    for _ in range(300):
        row = generator.normal(size=256).astype(np.float32)
        found, start = chosen(row, 8, c, "", rough=True)
        doubts += start < 8
        assert found[:start] == best(row)[:start]
        # Numbers that differ in their last bits only: rough keys alone would be wrong.
        row = (row.view(np.int32) & 31 | np.float32(2.0).view(np.int32)).view(np.float32)
        found, start = chosen(row, 8, c, "", rough=True)
        wrong += found != best(row)
        assert start == 0
    assert doubts < 15 and wrong > 250
    # Two neighbours that differ in their last bits only are put in order, the last one and the next are in doubt; of
    # three all are, from the first one on.
    for count, first in itertools.product((2, 3), range(8)):
        row = np.arange(256, dtype=np.float32)[::-1].copy()
        row[:first] = 2.0**21 + 2.0**18 * np.arange(first, 0, -1)
        row[first : first + count] = (
            np.float32(2.0**20).view(np.int32) + np.arange(count, dtype=np.int32)
        ).view(np.float32)
        found, start = chosen(row, 8, c, "", rough=True)
        assert start == (first if count == 3 or first == 7 else 8), (count, first)
        assert found[:start] == best(row)[:start]
    # The ninth of a lane that had all eight is not in its list.
    own = [c.tv(0, value) // c.rows for value in range(c.elements)]
    row = np.zeros(256, np.float32)
    row[own[:9]] = np.arange(9, 0, -1)
    assert chosen(row, 8, c, "", rough=True)[1] == 0
