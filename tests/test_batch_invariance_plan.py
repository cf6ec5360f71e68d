"""Which order a plan adds a row up in, over everything that the planner looks at. No GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import orders
import pytest

from cute_softmax.plan import MATHS, NO_PROLOGUE, NotPlanned, Plan, Prologue, facts_of
from cute_softmax.plan.choose import plan_call
from cute_softmax.plan.hardware import ARCHITECTURES, H200, Device
from cute_softmax.plan.matmul import canonical_matmul, plan_matmul
from cute_softmax.plan.order import order_of, recurrence_of
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.short_plan import ShortPlan

# All that plans of few rows tell apart: how many CTAs each row can have, of 115; and many.
ROWS = (*range(1, 117), 4096, 65536)
FEW = (1, 3, 8, 64)
LENGTHS = (1, 2, 3, 7, 33, 127, 1000, 1023, 4096, 9000, 32000, 50257, 131073, 151936, 262144, 524289, 1 << 20)
LONGER = ((1 << 20) + 1, 1 << 21, (1 << 24) + 8)
DTYPES = ("bf16", "fp32")


def operands_of(math_name, shape, dims, dtype, full=None, prologue=NO_PROLOGUE, offset=0):
    """The operands of a call; full: the strides of its full tensors; offset: of those, in elements."""
    facts = facts_of(math_name, True, prologue)

    def one(name, written=False):
        kind = {"mask": "bool", "index": "int64"}.get(name, dtype)
        if name in facts.group_inputs or name in facts.group_outputs:
            return Operand(kind if name == "index" else "fp32", contiguous("fp32", shape, dims).strides)
        size = {"bf16": 2, "fp32": 4, "bool": 1}[kind]
        return Operand(kind, full or contiguous("fp32", shape).strides, offset * size % 16)

    return [one(n) for n in (*facts.inputs, *facts.group_inputs)] + [
        one(n) for n in (*facts.outputs, *facts.group_outputs)
    ]


def planned(math_name, shape, dims=(1,), dtype="bf16", device=H200, invariant=True, **how):
    """The plan of a call, or why there is none."""
    prologue, query = how.get("prologue", NO_PROLOGUE), how.pop("query", None)
    in_place, online = how.pop("in_place", False), how.pop("online", True)
    operands = operands_of(math_name, shape, dims, dtype, **how)
    return plan_call(
        math_name,
        shape,
        dims,
        operands,
        device,
        online=online,
        prologue=prologue,
        query=query,
        in_place=in_place,
        invariant=invariant,
    )


def one_order(plans):
    """The order of all of these plans. Plans that there are not must not be there for one of them either."""
    found = set()
    for make in plans:
        try:
            found.add(order_of(make()))
        except NotPlanned as reason:
            found.add(type(reason))
    assert len(found) == 1, found
    return found.pop()


def everywhere(math_name, columns, dtype, device=H200, **how):
    """Every way to lay out rows of so many elements, as functions that plan them."""
    for rows in ROWS:
        yield lambda m=rows: planned(math_name, (m, columns), dtype=dtype, device=device, **how)
    pitches = (columns, columns + 1, columns + 3, columns + 8, 0)
    for rows, pitch, offset in itertools.product(FEW, pitches, range(8)):
        outputs = MATHS[math_name, True].outputs
        if pitch or not outputs:
            full = (pitch, 1)
            yield lambda m=rows, f=full, o=offset: planned(
                math_name, (m, columns), dtype=dtype, device=device, full=f, offset=o, **how
            )
    for rows, full in itertools.product(FEW, ((1, 64), (2 * columns, 2), (1, 65))):  # transposed, with gaps
        yield lambda m=rows, f=full: planned(
            math_name, (m, columns), dtype=dtype, device=device, full=f, **how
        )
    yield lambda: planned(math_name, (8, columns), dtype=dtype, device=device, in_place=True, **how)
    shape = (3, 5, columns, 2)  # of four dimensions, the third reduced
    yield lambda: planned(math_name, shape, (2,), dtype, device, **how)
    yield lambda: planned(
        math_name, shape, (2,), dtype, device, full=(16 * columns, columns, 1, 7 * columns), **how
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("math_name", sorted({name for name, _ in MATHS}))
def test_one_order_for_all_rows_of_a_length(math_name, dtype):
    for columns in LENGTHS:
        one_order(everywhere(math_name, columns, dtype))


@pytest.mark.parametrize("math_name", ["softmax", "softmax_backward", "logsumexp"])
def test_one_order_for_rows_that_ctas_share(math_name):
    for columns in LONGER:
        order = one_order(everywhere(math_name, columns, "bf16"))
        assert order.parts > 1


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_one_order_on_every_gpu(architecture):
    device = Device(ARCHITECTURES[architecture], multiprocessors=84, l2=40 << 20)
    for math_name, columns in itertools.product(
        ("softmax", "log_softmax", "sum"), (1000, 9000, 50257, 1 << 18)
    ):
        one_order(everywhere(math_name, columns, "bf16", device))


PROLOGUES = [
    Prologue(scale="number"),
    Prologue(scale="groups", alpha="number"),
    Prologue(bias=True),
    Prologue(mask=True, zero=True),
    Prologue(scale="number", bias=True, mask=True, causal=True),
]


@pytest.mark.parametrize("prologue", PROLOGUES, ids=lambda p: p.name)
def test_one_order_with_scores(prologue):
    query = 1 if prologue.causal else None
    for columns in (33, 1000, 9000, 32000, 50257):
        shapes = [(2, rows, columns) for rows in ROWS[::7]]
        one_order(
            lambda s=s, o=o: planned("softmax", s, (2,), prologue=prologue, query=query, offset=o)
            for s, o in itertools.product(shapes, (0, 1, 4))
        )


def test_whether_a_bias_is_broadcast_decides_nothing():
    shape, prologue = (64, 9000), Prologue(bias=True, mask=True)
    x, bias, mask, y = operands_of("softmax", shape, (1,), "bf16", prologue=prologue)
    strides = {"full": (9000, 1), "row": (0, 1), "column": (1, 0), "one": (0, 0)}

    def made(b, m):
        operands = [x, bias._replace(strides=strides[b]), mask._replace(strides=strides[m]), y]
        return plan_call("softmax", shape, (1,), operands, H200, prologue=prologue, invariant=True)

    one_order([lambda b=b, m=m: made(b, m) for b, m in itertools.product(strides, strides)])


def test_what_is_copied():
    """Inputs whose rows begin anywhere are not, results are; what has gaps in a row is, and what is transposed."""
    shape = (8, 1000)

    def copied(x, y):
        return plan_call(
            "softmax", shape, (1,), [Operand("bf16", *x), Operand("bf16", *y)], H200, invariant=True
        ).laid_out

    rows, odd, apart, turned = ((1000, 1),), ((1001, 1),), ((2000, 2),), ((1, 8),)
    assert copied(rows, rows) == copied(odd, rows) == copied(((1000, 1), 2), rows) == ()
    assert copied(rows, odd) == copied(rows, ((1000, 1), 2)) == (1,)
    assert copied(apart, rows) == copied(turned, rows) == (0,)
    assert copied(turned, turned) == (0, 1)


def test_logarithms_of_one_sum():
    """log_softmax, logsumexp, the log-probabilities of chosen elements and cross entropies add a row up alike."""
    loss = Prologue(target="loss")
    forms = [(name, NO_PROLOGUE) for name in ("log_softmax", "logsumexp", "selective")]
    forms += [("logsumexp", p) for p in (loss, replace(loss, squares=True))]
    for columns, dtype in itertools.product(LENGTHS, DTYPES):
        made = []
        for name, prologue in forms:
            try:
                plan = planned(name, (64, columns), dtype=dtype, prologue=prologue)
            except NotPlanned:
                continue
            if isinstance(plan, Plan):
                assert plan.row_class.logs or name == "log_softmax"
                o = order_of(plan)
                made.append((o.recurrence, o.vector, o.head, o.steps, o.threads, o.ctas, o.share))
        assert len(set(made)) <= 1


# -- The order's own test: additions one by one ------------------------------------------------------------------------


def plans_outside(math_name, columns, dtype="bf16"):
    """Every plan that there is for rows of a length outside the mode, and the row of each that is looked at."""
    for rows in ROWS:
        yield planned(math_name, (rows, columns), dtype=dtype, invariant=False), 0
    for pitch, offset, row in itertools.product((columns, columns + 1, columns + 8), range(8), (0, 1, 5)):
        how = dict(full=(pitch, 1), offset=offset)
        yield planned(math_name, (6, columns), dtype=dtype, invariant=False, **how), row


def values_of(columns, count=1):
    """Rows of small spread: no element outweighs the roundings of the others."""
    return np.random.default_rng(columns).normal(0, 0.5, (count, columns)).astype(np.float32)


@pytest.mark.parametrize("columns", [7, 33, 1000, 1001, 9000, 9001])
@pytest.mark.parametrize("math_name", ["sum", "softmax", "log_softmax"])
def test_equal_orders_give_equal_bits(math_name, columns):
    some, bits, seen = values_of(columns, 4), {}, {}
    for plan, row in plans_outside(math_name, columns):
        order = order_of(plan)
        if order.head is None:  # the row's own head belongs to its order
            reference = plan.row_class.facts.reference
            start = plan.problem.offsets[reference] + plan.row_start(reference, row)
            order = order._replace(head=min(-start % plan.row_class.vector, columns))
        key = plan.kernel, order.head
        if key not in seen:
            if math_name == "sum":
                seen[key] = tuple(orders.row_sum(plan, row, values) for values in some)
            else:
                recurrence = 0 if isinstance(plan, ShortPlan) else recurrence_of(plan.kernel)
                seen[key] = tuple(orders.row_state(plan, row, values, recurrence) for values in some)
                for values, (top, total) in zip(some.astype(float), seen[key], strict=True):
                    assert top == values.max()
                    assert math.isclose(total, np.exp(values - top).sum(), rel_tol=1e-5)
        bits.setdefault(order, set()).add(seen[key])
    assert all(len(found) == 1 for found in bits.values())
    # The bits do depend on it: else nothing was shown. (Of 7 every order here adds up neighbours.)
    assert columns == 7 or len(set.union(*bits.values())) > 1


@pytest.mark.parametrize("math_name", sorted({name for name, _ in MATHS}))
def test_one_order_without_the_mode(math_name):
    """Rows of whole vectors that begin on one, longer than short ones, too short for configurations of few rows."""
    for columns in (136, 1000, 4096, 8192):
        plans = [lambda m=rows, n=columns: planned(math_name, (m, n), invariant=False) for rows in ROWS]
        assert one_order(plans).head == 0


@pytest.mark.parametrize("columns", [33, 1001, 9000, 9001])
def test_invariant_plans_give_equal_bits(columns):
    (values,), found = values_of(columns), set()
    for make in everywhere("softmax", columns, "bf16"):
        plan = make()
        found.add(orders.row_state(plan, min(plan.rows, 3) - 1, values, recurrence_of(plan.row_class)))
        if len(found) > 1:
            break
    assert len(found) == 1


# -- Products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [None, 0])
@pytest.mark.parametrize(("columns", "depth"), [(128, 64), (4096, 128), (131072, 128), (1000, 512)])
def test_products_of_any_number_of_rows(columns, depth, causal):
    found = set()
    for batch, rows in itertools.product((1, 3, 32), (1, 16, 64, 100, 500, 4096)):
        shape = (batch, rows, columns)
        s, v = contiguous("bf16", shape), contiguous("bf16", (batch, columns, depth))
        made = plan_matmul(canonical_matmul(shape, depth, s, v, "bf16"), H200, causal=causal, invariant=True)
        found.add(made.kernel)
        assert made.parts == 1 and not made.kernel.split and not made.kernel.paired
    assert len(found) == 1
