"""Plans of softmax_matmul's backward: every step of every tile is walked once, and what goes which way."""

import math
from dataclasses import replace
from itertools import product

import pytest

from cute_softmax.kernels.matmul.backward_walk import Call, part_of, walk_of
from cute_softmax.plan import NotPlanned
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.matmul_backward import matmul_backward_class, plan_matmul_backward, splits_of
from cute_softmax.plan.problem import Operand, contiguous


def planned(batch, rows, columns, depth, *, owners=None, dtype="bf16", wide="", causal=None, **changed):
    """The plan of contiguous tensors; owners: the batch of values, 1 where they are shared; changed: operands."""
    owners = batch if owners is None else owners
    shared = [n == 1 < size for n, size in zip(owners, batch, strict=True)]
    one = contiguous(dtype, (*owners, columns, depth))
    spread = tuple(0 if s else n for s, n in zip(shared, one.strides, strict=False)) + one.strides[-2:]
    operands = {
        "scores": contiguous(wide or dtype, (*batch, rows, columns)),
        "grad": contiguous(dtype, (*batch, rows, depth)),
        "values": Operand(dtype, spread),
        "dscores": contiguous(wide or dtype, (*batch, rows, columns)),
        "dvalues": Operand(dtype, spread),
        "output": contiguous(dtype, (*batch, rows, depth)),
        "lse": contiguous("fp32", (*batch, rows)),
    }
    return plan_matmul_backward(
        (*batch, rows, columns), shared, depth, operands | changed, H200, causal=causal
    )


def walked(plan):
    """Every (batch, column block, head, row block) that the kernel computes, and every one that it zeroes, by its own
    arithmetic."""
    numbers = plan.rows, plan.columns, plan.depth, plan.heads, *plan.batch, plan.splits, plan.offset
    call = Call(*numbers, 1.0, 1.0, *[()] * 6)
    for cta in range(plan.ctas):
        walk = walk_of(plan.kernel, call, cta, plan.ctas)
        for tile in range(cta, walk.tiles, plan.ctas):
            work = walk.work(tile)
            top, head, m, first, end = map(int, (work.top, work.head, work.m, work.first, work.end))
            for _ in range(first, end):
                yield "computed", work.batch, work.n, head, m
                head, m = walk.next(head, m, top)
            for block in range(*part_of(top * plan.heads, work.split, plan.splits)):
                yield "zeroed", work.batch, work.n, block // top, block % top


@pytest.mark.parametrize(
    ("batch", "owners", "rows", "columns", "causal"),
    [
        ((32,), None, 4096, 4096, None),
        ((2, 3), (2, 1), 1000, 1000, None),
        ((1,), None, 4096, 128, None),
        ((1,), None, 16384, 60, 0),
        ((2,), None, 300, 520, 0),
        ((2,), None, 300, 520, 137),
        ((2,), None, 700, 520, -100),
        ((3, 4), (3, 1), 512, 512, 5),
        ((2,), None, 100, 300, -1000),
        ((2,), None, 1, 1, 0),
    ],
)
def test_every_step_is_taken_once(batch, owners, rows, columns, causal):
    plan = planned(batch, rows, columns, 64, owners=owners, causal=causal)
    steps = list(walked(plan))
    places = [place for _, *place in steps]
    assert len(places) == len({tuple(p) for p in places})
    blocks = math.ceil(columns / plan.kernel.columns)
    assert len(places) == math.prod(batch) * blocks * plan.blocks
    for kind, _, n, _, m in steps:
        counts = causal is None or n * plan.kernel.columns <= (m + 1) * plan.kernel.rows - 1 + causal
        assert counts == (kind == "computed") or (kind == "computed" and not counts and m == plan.blocks - 1)


def test_few_blocks_of_columns_are_split():
    assert planned((32,), 4096, 4096, 128).splits == 1
    few = planned((1,), 16384, 256, 64)
    assert few.splits > 1 and few.kernel.dtypes == ("bf16", "bf16", "fp32")
    assert planned((1,), 64, 128, 64).splits == 1  # nothing to split
    for blocks, steps in product((1, 2, 7, 31, 66, 130, 133, 200, 1000), (1, 8, 64, 1024)):
        splits = splits_of(blocks, steps, 132)
        assert 1 <= splits <= max(1, steps // 8)


def test_rows_that_tma_cannot_read_come_line_by_line():
    assert not planned((2,), 64, 128, 64).kernel.lines
    assert planned((2,), 64, 127, 64).kernel.lines and planned((2,), 64, 127, 64).kernel.sent
    assert planned((2,), 64, 128, 64, wide="fp32").kernel.lines
    odd = contiguous("bf16", (2, 64, 128))._replace(address=2)
    for name in ("scores", "dscores"):
        c = planned((2,), 64, 128, 64, **{name: odd}).kernel
        assert c.lines and not c.sent
    apart = contiguous("bf16", (2, 64, 128))._replace(strides=(64 * 136, 136, 1))
    assert not planned((2,), 64, 127, 64, scores=apart).kernel.sent


def test_batch_dimensions():
    """Heads that share values are one mode; two more may lie apart."""
    assert planned((2, 3, 4), 64, 128, 64, owners=(2, 3, 1)).heads == 4
    assert planned((2, 3, 4), 64, 128, 64, owners=(2, 3, 1)).batch == (6, 1)
    turned = Operand("bf16", (64, 2 * 64, 6 * 64, 1))  # (2, 3, rows, columns) of (rows, 3, 2, columns)
    plan = planned((2, 3), 64, 128, 64, grad=turned)
    assert plan.batch == (2, 3) or plan.batch == (3, 2)
    with pytest.raises(NotPlanned, match="do not merge"):
        planned((2, 3, 4), 64, 128, 64, owners=(1, 3, 1))


@pytest.mark.parametrize(
    ("changed", "depth", "match"),
    [
        ({"grad": contiguous("bf16", (2, 64, 64))._replace(address=2)}, 64, "grad"),
        ({"values": Operand("bf16", (65 * 128, 65, 1))}, 64, "values"),
        ({}, 2048, "up to"),
    ],
)
def test_what_is_not_planned(changed, depth, match):
    with pytest.raises(NotPlanned, match=match):
        planned((2,), 64, 128, depth, **changed)


def test_other_architectures_are_not_planned():
    operands = {}
    with pytest.raises(NotPlanned, match="sm_90a"):
        plan_matmul_backward((2, 2), (), 64, operands, replace(H200, architecture=ARCHITECTURES["sm_80"]))


@pytest.mark.parametrize("depth", [1, 8, 64, 100, 128, 130, 200, 256, 257, 384, 500, 512])
@pytest.mark.parametrize("scores", ["bf16", "fp32"])
def test_classes_fit_shared_memory(depth, scores):
    for lines, causal in product((scores == "fp32", True), (False, True)):
        c = matmul_backward_class(
            ARCHITECTURES["sm_90a"], (scores, "bf16", "bf16"), depth, lines=lines, causal=causal
        )
        assert c.stages >= 3 and c.shared_memory <= ARCHITECTURES["sm_90a"].shared_memory
        assert c.depth >= depth and c.share_depth % 64 == 0 and c.share_depth <= 256
        # Of lines a lane loads one at most, and some warps are left for what the diagonal cuts off.
        assert c.producers <= 4 - causal and (not c.lines or c.rows // c.producers <= 32)
        assert (c.fillers, c.releases) == (
            (32 * c.producers, 128 * c.consumers) if lines else (1, c.consumers)
        )


def test_numbers_of_rows():
    plan = planned((2, 3), 100, 128, 64)
    assert plan.delta_numbers == 6 * 2 * 128  # two blocks of 64 rows a head, two numbers a row
    assert plan.delta.vector == 8 and plan.delta.vectors == 2


def test_explain_says_what_happens():
    text = planned((2, 3), 4096, 128, 304, owners=(2, 1)).explain()
    for part in ("2 x 3 scores", "shared memory; S and dS as tiles", "2 a slab", "float32 parts"):
        assert part in text
    assert "line by line" in planned((1,), 64, 63, 64).explain()
