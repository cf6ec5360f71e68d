"""Columns in two passes: which they are, how they are cut, what their kernels compile to, and emulated results."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import checking
import emulated
import pytest
import sweeps
from classes import operands, sample
from compiled import accesses, check_all, compile_and_read
from sweeps import BESIDE, SCORED, SHAPES, SWEPT, Columns
from traced import wrong

import cute_softmax as c
from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.kernels import sweep
from cute_softmax.plan import MATHS, WARP, Prologue, SweepPlan
from cute_softmax.plan import sweep as sweep_plans
from cute_softmax.plan.describe import plan_shape
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import Operand, canonical, contiguous
from cute_softmax.plan.sweep import MERGERS, THREADS, TURNS, SweepClass, plan_sweep
from cute_softmax.runtime.launch import run

STACK = 80  # bytes at most: 8 lines, and what is beside them, are a few registers too many


def swept(
    name: str, shape: tuple[int, ...], dtype: str, device: c.hardware.Device = H200
) -> SweepPlan | None:
    """The plan of contiguous tensors, over the dimension before the last, wherever it would be used."""
    facts, dims = MATHS[name, True], (len(shape) - 2,)
    tensors = [contiguous(dtype, shape)] * facts.full
    tensors += [contiguous(dtype, shape, dims)] * len(facts.group_outputs)
    return plan_sweep(name, canonical(shape, dims, tensors), device)


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "name", "expected"),
    [
        ((128256, 1039), 0, "bf16", "softmax", True),  # rows begin off vectors
        ((7480, 8961), 0, "bf16", "softmax", True),
        ((7480, 895), 0, "bf16", "softmax", False),  # small
        ((4984, 26927), 0, "bf16", "softmax", False),  # held
        ((128256, 1040), 0, "bf16", "softmax", True),  # off cache lines
        ((16832, 7944), 0, "bf16", "softmax", False),
        ((128256, 1024), 0, "bf16", "softmax", False),  # on cache lines: in chunks
        ((128256, 1024), 0, "bf16", "logsumexp", True),
        ((8, 30000, 1001), 1, "fp32", "softmax_backward", True),
        ((8, 30001, 1001), 1, "fp32", "softmax_backward", False),  # matrices begin off vectors
        ((4096, 151936), 1, "bf16", "softmax", False),
        ((1 << 20, 40), 0, "bf16", "logsumexp", False),  # rows of memory of few bytes
    ],
)
def test_which_columns(shape, dim, dtype, name, expected):
    made = plan_shape(shape, dtype, dim=dim, math=name)
    assert (made.movement == "sweep") is expected
    assert ("movement   sweep" in made.explain()) is expected


def test_what_is_not_planned():
    """Scores other than numbers that multiply, batch-invariant calls, rows with gaps, and columns that lie apart."""
    for scale in (1.0, 2.0):
        assert c.plan_softmax((128256, 1039), 0, scale=scale).movement == "sweep"
    for scores in ({"causal": True}, {"scale": "groups"}, {"sink": True}, {"softcap": True}):
        assert not Prologue(alpha="number", **scores).sweeps
    with c.batch_invariant():
        assert c.plan_softmax((128256, 1039), 0).movement != "sweep"

    def planned(strides, shape=(30000, 1001), offset=0):
        problem = canonical(shape, (0,), [Operand("bf16", strides, offset)] * 2)
        return plan_sweep("softmax", problem, H200)

    assert planned((1001, 1)).abreast % 8 == 0
    assert planned((1008, 1)) is None and planned((1001, 1), offset=2) is None
    assert planned((1, 30000)) is None and planned((2002, 2)) is None
    apart = planned((1008, 1), (30000, 1000))
    assert apart.abreast == 1 and apart.operand_strides == ((0, 1008),) * 2
    assert (
        plan_sweep("softmax", canonical((9, 9, 9, 9), (1,), [contiguous("bf16", (9,) * 4)] * 2), H200) is None
    )


def random_plans(seed: int, count: int) -> list[SweepPlan]:
    """Of shapes and GPUs of all sizes."""
    chosen, found = random.Random(seed), []
    while len(found) < count:
        shape = chosen.choice((1, 1, 2, 5)), chosen.randint(1, 3000), chosen.randint(8, 9000)
        name, dtype = chosen.choice(SWEPT), chosen.choice(("bf16", "fp32"))
        device = replace(H200, multiprocessors=chosen.choice((1, 3, 132)))
        made = swept(name, shape, dtype, device)
        found += [made] if made else []
    return found


def launch_of(p: SweepPlan) -> sweep.Launch:
    """What the kernels know, in plain numbers."""
    _, *numbers = p.arguments
    return sweep.Launch(*numbers[:-1], of_parts=0, of_columns=0, numbers={}, mX=[])


@pytest.mark.parametrize("p", random_plans(1, 60), ids=lambda p: f"{p.outer}x{p.length}x{p.columns}")
def test_each_element_is_one_threads(p):
    """By the kernels' own arithmetic: each vector of each line once in either pass, the rest with the last of them, a
    state of its own for each part of a panel, and no element behind the last."""
    k, launch = p.kernel, launch_of(p)
    assert p.lines * p.width + p.rest == p.length * p.columns and p.width % k.vector == 0
    assert p.rest < p.width and p.lines <= p.parts * p.share
    first, states = Counter(), Counter()
    rests = []
    for cta in range(p.grids[0]):
        item = sweep.item_of(launch, cta, k.columns, 0)
        first.update((item.matrix, item.column, line) for line in range(item.first, item.end))
        states[sweep.state_at(launch, item)] += 1
        rests += [(item.matrix, item.column)] * item.last
    panels = [(a, column) for a in range(p.outer) for column in range(0, p.width, k.columns)]
    assert first == Counter((*panel, line) for panel in panels for line in range(p.lines))
    assert sorted(rests) == panels
    # Panels of a part are one line of states, so that a column's lie `columns` apart.
    places = {(a * p.parts + part) * p.width + column for a, column in panels for part in range(p.parts)}
    assert states == Counter(places) and max(places) + 1 <= p.outer * p.parts * p.width
    assert p.found >= p.outer * p.parts * p.width * k.state_bytes
    if not k.facts.outputs:
        return
    again, rests, ctas = Counter(), [], p.grids[2] // TURNS
    for cta in range(p.grids[2]):
        item = sweep.item_of(launch, cta % ctas, k.columns, 0)
        turn = sweep.turn_of(launch, item, cta // ctas, k.steps)
        again.update((turn.matrix, turn.column, line) for line in range(turn.first, turn.end))
        rests += [(turn.matrix, turn.column)] * turn.last
    assert again == first and sorted(rests) == panels


def test_the_first_pass_is_even():
    """Of large tensors no SM has much more to do than another, and lines begin with cache lines where they can."""
    uneven = []
    for n in range(7000, 300_000, 3301):
        for columns in {(1 << 27) // n | 1, (1 << 27) // n // 8 * 8}:
            p = swept("softmax", (n, columns), "bf16")
            places = H200.multiprocessors * p.kernel.min_blocks
            taken = math.ceil(p.ctas / places) * p.share * p.kernel.columns * places / (n * columns)
            assert p.scratch < 0.07 * p.problem.bytes
            uneven.append(taken)
    assert max(uneven) < 1.2 and sum(uneven) / len(uneven) < 1.07


def test_layouts_and_checks():
    for shape in SHAPES:
        for name in ("softmax", "softmax_backward", "logsumexp"):
            p = swept(name, shape, "bf16")
            assert not checks.check(p).problems, p.explain()
            assert {"tile", "reduction_buffer"} <= set(draw.figures(p))
            assert f"  parts      {p.parts} of {p.share} line" in p.explain()
    scored = plan_sweep(
        "softmax",
        canonical(
            (70, 11), (0,), [Operand("bf16", (11, 1)), Operand("bool", (3, 0)), Operand("bf16", (11, 1))]
        ),
        H200,
        Prologue(mask=True),
    )
    lines = min(scored.kernel.steps, scored.lines)
    reached = {at for lanes in checks.sweep.requests(scored, 1) for at in lanes if at is not None}
    assert not checks.check(scored).problems
    assert reached == {3 * row for row in range(lines * scored.abreast)}
    # Of the rows in which vectors end nothing is loaded where each lies in one row.
    for columns, loads in ((8, 1), (11, 2)):
        operands = [Operand("bf16", (columns, 1)), Operand("bool", (1, 0)), Operand("bf16", (columns, 1))]
        plan = plan_sweep("softmax", canonical((70, columns), (0,), operands), H200, Prologue(mask=True))
        warps = math.ceil(plan.width / (plan.kernel.vector * WARP))
        lines = min(plan.kernel.steps, plan.lines)
        assert len([*checks.sweep.requests(plan, 1)]) == loads * lines * warps
    notes = draw.figures(scored)["tile"].description
    assert "gMASK: one element for each row of memory" in notes and "gY: the same threads" in notes
    wide = plan_shape((128256, 1039), dim=0)
    for changed in ({"parts": 2}, {"share": 249}, {"operand_strides": ((0, 531967),) * 2}):
        assert checks.check(replace(wide, **changed)).problems


def listed(architecture: str) -> list[SweepClass]:
    """A class of each math and dtypes; of some with a bias and a mask."""
    found, device = [], replace(H200, architecture=ARCHITECTURES[architecture])
    for i, name in enumerate(SWEPT):
        facts = MATHS[name, True]
        for j, pair in enumerate((("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))):
            if pair[0] != pair[1] and not facts.outputs:
                continue
            dtypes, inputs = operands(name, pair), len(facts.inputs)
            full = [Operand(d, (1001, 1)) for d in dtypes[: facts.full]]
            numbers = [Operand(d, (0, 1)) for d in dtypes[facts.full :]]
            for beside in ((), BESIDE[(i + j) % 3]) if name in SCORED else ((),):
                rows = [Operand({"bias": "bf16", "mask": "bool"}[n], (1, 0)) for n in beside]
                tensors = [*full[:inputs], *rows, *full[inputs:], *numbers]
                prologue = Prologue(**dict.fromkeys(beside, True))
                problem = canonical((30000, 1001), (0,), tensors)
                found.append(plan_sweep(name, problem, device, prologue).kernel)
    return found


def test_compiled(tmp_path, monkeypatch):
    """Layouts as drawn, hardly a spill, and accesses of 16 bytes."""

    def check(k: SweepClass):
        found = compile_and_read(k, tmp_path, monkeypatch)
        assert found.local == 0 and found.stack <= STACK, f"{found.stack} bytes of stack"
        assert found.threads == (MERGERS, 1, 1) and found.min_blocks == k.min_blocks
        assert -(-found.registers // 8) * 8 * THREADS * k.min_blocks <= H200.architecture.registers
        assert found.shared == k.shared_memory and not wrong(k, found.layouts), wrong(k, found.layouts)
        assert "ld.global" in found.ptx and found.ptx.count(".entry") == 2 + bool(k.facts.outputs)
        alike = len({k.dtypes[i] for i in k.facts.main}) == 1
        vectors = k.steps * (len(k.facts.inputs) - len(k.facts.beside))
        assert not alike or accesses(found.ptx)["ld 16"] >= vectors, accesses(found.ptx)

    check_all(listed("sm_90a"), check)


@pytest.mark.parametrize(
    ("first", "architecture"), [each for each in enumerate(ARCHITECTURES) if each[1] != "sm_90a"]
)
def test_other_architectures(first, architecture, tmp_path, monkeypatch):
    """Of each some, other ones than of the others."""
    for k in sample(listed(architecture), 8, first):
        found = compile_and_read(k, tmp_path, monkeypatch)
        assert f".target {architecture}" in found.ptx and not wrong(k, found.layouts)


# -- Emulated ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    found = emulated.install(monkeypatch, tmp_path)
    sweeps.forced(monkeypatch)
    return found


EMULATED = [one for k, dtype in enumerate(("bf16", "fp32", "fp16")) for one in [*sweeps.calls(dtype)][k::5]]


@pytest.mark.parametrize(
    "one", EMULATED, ids=lambda one: f"{one.math}-{one.dtype}-{'x'.join(map(str, one.shape))}"
)
def test_emulated(one: Columns, launches):
    one.run(lambda work: run(*work))
    assert launches[0].plan.movement == "sweep"


@pytest.mark.parametrize("name", ["softmax", "softmax_backward", "logsumexp"])
def test_many_lines_of_a_thread(name, launches, monkeypatch):
    """Of which it takes several times as many as it loads at once, in each turn."""
    monkeypatch.setattr(sweep_plans, "_cut", lambda c, length, outer, columns, unit, dense, device: (unit, 1))
    Columns(name, (1, 859, 11), "bf16").run(lambda work: run(*work))
    (work,) = launches
    assert work.plan.share >= 3 * TURNS * work.plan.kernel.steps and work.plan.rest
