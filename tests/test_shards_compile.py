"""The kernels of rows that ranks share, compiled: registers, stack, the width of accesses, every architecture."""

from __future__ import annotations

from itertools import product

import pytest
from compiled import accesses, compile_and_read

from cute_softmax.plan import NotPlanned, Prologue, facts_of, plan_call
from cute_softmax.plan.hardware import ARCHITECTURES, H200, Device
from cute_softmax.plan.problem import Operand
from cute_softmax.plan.shards import (
    MERGE_THREADS,
    MIN_BLOCKS,
    OF_SLICES,
    STEPS,
    THREADS,
    plan_merge,
    plan_slice,
)

NUMBERS = (0,) * 6
PRINTF = 24  # bytes of stack for the words before a trap
LOSS = ("shared", "smoothed", "squares", "scaled"), ("loss", "lse"), "fp32", (0, 1)


def sliced(math: str, dtypes: tuple[str, ...], columns: int, device: Device = H200, pitch: int = 0):
    operands = tuple(Operand(dtype, (pitch or columns, 1)) for dtype in dtypes)
    how = LOSS if math == "gradient" else ((), (), "", ())
    return plan_slice(math, (4096, columns), operands, *how, NUMBERS, device)


@pytest.mark.parametrize("columns", [75968, 75967])
@pytest.mark.parametrize("math", OF_SLICES)
def test_slices_spill_nothing(math, columns, tmp_path, monkeypatch):
    for source, result in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")):
        inputs = (result, result) if "back" in math else (source,)
        to = source if "back" in math or math == "gradient" else result
        plan = sliced(math, (*inputs, to), columns)
        c, found = plan.kernel, compile_and_read(plan.kernel, tmp_path, monkeypatch)
        assert (found.stack, found.local) == (0, 0), c.name
        registers = -(-found.registers // 8) * 8
        assert registers * THREADS * MIN_BLOCKS <= ARCHITECTURES["sm_90a"].registers
        # Whole vectors, however rows begin; a gradient's chosen element apart.
        seen = accesses(found.ptx)
        assert c.steps == STEPS or (c.inputs == 2 and result != source)
        assert seen["ld 16"] >= c.steps * len(inputs) and seen["st 16"] >= c.steps
        assert c.edges is bool(columns % 8)


@pytest.mark.parametrize(
    ("beside", "results"),
    [
        ((), ("lse",)),
        (("weighted",), ("entropy",)),
        (("weighted", "chosen"), ("found", "entropy")),
        (("chosen", "even"), ("loss", "lse")),
    ],
)
def test_merges_spill_nothing(beside, results, tmp_path, monkeypatch):
    c = plan_merge("state", "bf16", beside, results, (4096, 2), H200).kernel
    found = compile_and_read(c, tmp_path, monkeypatch)
    assert found.local == 0 and found.stack <= PRINTF * ("chosen" in beside)
    assert found.threads == (MERGE_THREADS, 1, 1)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "sm_90a"])
def test_every_architecture(name, tmp_path, monkeypatch):
    device = Device(ARCHITECTURES[name], multiprocessors=132, l2=50 << 20)
    for c in (
        plan_merge("state", "fp32", ("chosen",), ("found",), (4096, 2), device).kernel,
        sliced("gradient", ("bf16", "bf16"), 75968, device).kernel,
    ):
        assert f".target {name}" in compile_and_read(c, tmp_path, monkeypatch).ptx


STATES = (
    ("logsumexp", Prologue(state="alone")),
    ("entropy", Prologue(state="alone")),
    ("selective", Prologue(state="chosen")),
    ("selective", Prologue(state="chosen", even=True)),
    ("selective_entropy", Prologue(state="chosen", scale="number")),
    ("softmax_backward", Prologue(state="alone")),
)


def state_of(math: str, prologue: Prologue, shape=(64, 75968), strides=None):
    facts = facts_of(math, True, prologue)
    order = (*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs)
    dtypes = {"index": "int64", **dict.fromkeys(facts.inputs, "bf16")}
    operands = [
        Operand(dtypes.get(n, "fp32"), (strides or (shape[1], 1)) if n in facts.inputs else (1, 0))
        for n in order
    ]
    return plan_call(math, shape, (1,), operands, H200, prologue=prologue)


@pytest.mark.parametrize(("math", "prologue"), STATES, ids=lambda given: getattr(given, "name", given))
def test_states_have_the_configuration_of_what_they_are_of(math, prologue, tmp_path, monkeypatch):
    """And no spills beyond a few bytes; strided rows are refused, and composed by the caller."""
    plan, plain = state_of(math, prologue), Prologue(even=prologue.even, scale=prologue.scale)
    facts = facts_of(math, True, plain)
    if not facts.outputs:
        alike = state_of(math, plain).kernel
        same = ("threads", "steps", "cluster_n", "vector", "staging", "threads_per_row")
        assert [getattr(plan.kernel, n) for n in same] == [getattr(alike, n) for n in same]
    found = compile_and_read(plan.kernel, tmp_path, monkeypatch)
    assert (found.stack, found.local) == (0, 0) and not plan.kernel.keep
    with pytest.raises(NotPlanned):
        state_of(math, prologue, strides=(1, 64))
    with pytest.raises(NotPlanned):
        state_of(math, prologue, shape=(2, 1 << 24))


def test_what_has_no_state():
    for math, prologue in product(("softmax", "log_softmax", "sum"), (Prologue(state="alone"),)):
        with pytest.raises(NotPlanned, match="state"):
            prologue.of(math)
    with pytest.raises(ValueError, match="state is 'whole'"):
        Prologue(state="whole")


def test_segments_cover_rows():
    """Every vector of a row is one CTA's, whatever rows begin with; cache lines are not cut."""
    for columns, start, dtype in product(
        (1, 7, 8, 100, 4096, 4097, 75968, 1 << 20), (0, 1, 5), ("bf16", "fp32")
    ):
        x = Operand(dtype, (columns + 8, 1), start * (2 if dtype == "bf16" else 4))
        plan = plan_slice("softmax", (3, columns), (x, x), (), (), "", (), NUMBERS, H200)
        c = plan.kernel
        needed = -(-(columns + (c.vector - 1) * c.edges) // c.vector)
        assert plan.share <= c.threads * c.steps and plan.share % 8 == 0
        assert (plan.segments - 1) * plan.share < needed <= plan.segments * plan.share
        assert plan.ctas == 3 * plan.segments
    with pytest.raises(NotPlanned, match="side by side"):
        plan_slice("softmax", (3, 8), (Operand("bf16", (1, 3)),) * 2, (), (), "", (), NUMBERS, H200)
    with pytest.raises(NotPlanned, match="at most"):
        plan_slice("softmax", (1 << 31, 8), (Operand("bf16", (8, 1)),) * 2, (), (), "", (), NUMBERS, H200)


def test_vectors_are_as_wide_as_operands_allow():
    """As far apart as they lie, they are narrower; wider results have as many elements."""
    for operands, vector in (
        ((Operand("bf16", (80, 1)), Operand("bf16", (80, 1))), 8),
        ((Operand("bf16", (80, 1), 2), Operand("bf16", (80, 1))), 1),
        ((Operand("bf16", (80, 1), 2), Operand("bf16", (80, 1), 2)), 8),
        ((Operand("bf16", (80, 1)), Operand("fp32", (80, 1))), 8),
        ((Operand("bf16", (80, 1), 8), Operand("fp32", (80, 1))), 8),
        ((Operand("bf16", (84, 1)), Operand("bf16", (80, 1))), 4),
        ((Operand("bf16", (80, 1)), Operand("fp32", (82, 1))), 2),
    ):
        made = plan_slice("softmax", (3, 80), operands, (), (), "", (), NUMBERS, H200)
        assert made.kernel.vector == vector, operands
