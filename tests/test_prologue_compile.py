"""Compiled kernels with a prologue: no spills, every access as wide as planned, on all architectures."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, product

import pytest
from classes import PAIRS_OF, SAME, all_classes
from compiled import compile_and_read
from prologues import plan_of
from test_compile import check_rows
from test_panel_compile import panel_class

from cute_softmax.plan import NO_PROLOGUE, NotPlanned, Plan, Prologue, RowClass
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.table import table_of
from cute_softmax.runtime.compile import build_math

PROLOGUES = (
    Prologue(scale="number"),
    Prologue(mask=True),
    Prologue(causal=True),
    Prologue(scale="groups", alpha="groups"),
    Prologue(scale="number", bias=True, zero=True),
    Prologue(scale="number", mask=True, causal=True, alpha="number"),
    Prologue(scale="groups", bias=True, mask=True, causal=True, zero=True),
)
PAIRS = (("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32"))
LENGTHS = (5, 100, 1000, 2048, 4096, 5001, 8192, 16384, 50257, 131072)
MATHS = ("softmax", "log_softmax", "logsumexp", "entropy", "softmax_backward", "log_softmax_backward")


def classes_of(architecture: str, every: int, first: int = 0) -> Iterator[RowClass]:
    """Every so many of the combinations, those that are planned; dtypes and broadcasts in turns."""
    combinations = [*product(MATHS, PROLOGUES, LENGTHS)][first::every]
    turns = zip(combinations, cycle(PAIRS), cycle((False, False, True)))
    for (math, prologue, columns), pair, shared in turns:
        prologue = supported(math, prologue)
        with suppress(NotPlanned):  # long rows, where there are no clusters
            made = plan_of(math, prologue, (2, 40, columns), pair, architecture, shared=shared)
            if isinstance(made, Plan):
                yield made.row_class


def supported(math: str, prologue: Prologue) -> Prologue:
    if math != "softmax" and prologue.alpha and math != "softmax_backward":
        prologue = replace(prologue, alpha="")
    return prologue.of(math)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """RowClass -> Compiled."""
    return lambda c: compile_and_read(c, tmp_path, monkeypatch)


@pytest.mark.long
def test_classes_of_sm_90a(compiled):
    found = dict.fromkeys(classes_of("sm_90a", 13))
    assert len(found) >= 24
    check_rows(found, compiled)


@pytest.mark.parametrize("turn", range(6))
def test_classes_of_other_architectures(turn, compiled):
    architecture = [a for a in ARCHITECTURES if a != "sm_90a"][turn]
    found = dict.fromkeys(classes_of(architecture, 53, turn))
    assert len(found) >= 5
    check_rows(found, compiled)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_what_stays_for_all_rows(architecture, compiled):
    one, found = {"bias": (0, 0, 1), "mask": (0, 0, 1)}, []
    for name, prologue, pair, columns in (
        ("softmax", Prologue(bias=True), ("bf16", "bf16"), 1 << 20),
        ("softmax", Prologue(mask=True, scale="groups", causal=True), ("bf16", "bf16"), 900_000),
        ("log_softmax", Prologue(bias=True, scale="number", zero=True), ("fp32", "fp32"), 1 << 19),
    ):
        found.append(plan_of(name, prologue, (4, 16, columns), pair, architecture, strides=one).kernel)
        assert "resident" in found[-1].staging
    check_rows(found, compiled)


LOSS = Prologue(alpha="groups", target="loss")


@pytest.mark.long
def test_losses(compiled):
    """Of rows that begin anywhere, of several rows a thread and of clusters; with all that a loss may have, and dtypes,
    in turns."""
    prologues = cycle(
        (
            LOSS,
            replace(LOSS, scale="number", even=True),
            replace(LOSS, squares=True, softcap=True),
            replace(LOSS, scale="number", softcap=True, even=True),
            replace(LOSS, scale="number"),
            replace(LOSS, even=True),
            replace(LOSS, squares=True),
        )
    )
    lengths = (5, 5, 40, 40, 700, 4096, 8192, 32768, 50257, 128256, 128256, 151936, 262144)
    found = [
        plan_of("softmax", prologue, (600, columns), pair).row_class
        for columns, prologue, pair in zip(lengths, prologues, cycle(SAME[::2]), strict=False)
    ]
    assert {c.rows_per_thread > 1 for c in found} == {True, False} and any(c.edges for c in found)
    check_rows(found, compiled)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a"])
def test_losses_elsewhere(architecture, compiled):
    check_rows([plan_of("softmax", LOSS, (600, 4096), PAIRS[0], architecture).row_class], compiled)


FOUND = Prologue(alpha="groups", target="found", factor=True)


def test_gradients_of_heads(compiled):
    """Of rows of every kind of configuration, with all that such a gradient may have in turns; and its forward."""
    even = replace(FOUND, more=True, even=True)
    prologues = (
        *(Prologue(entropy=True, factor=True), replace(FOUND, more=True), replace(even, softcap=True), even),
        *(
            replace(FOUND, scale="number", more=True, entropy=True),
            replace(even, scale="number", softcap=True),
        ),
    )
    forms = zip(cycle(SAME[::2]), (5, 700, 4096, 32768, 50257, 151936), prologues, strict=False)
    found = [plan_of("softmax", p, (600, n), pair).row_class for pair, n, p in forms]
    for math, n, p in (
        ("selective", 50257, Prologue(even=True)),
        ("selective_entropy", 151936, Prologue(softcap=True)),
        ("selective", 700, Prologue(softcap=True, even=True)),
    ):
        found.append(plan_of(math, p, (600, n), ("bf16", "fp32")).row_class)
    check_rows(found, compiled)


def test_divergences(compiled):
    """Two rows at once, of every kind of configuration: the divergence, and its gradients in either, in turns."""
    kinds = (("logsumexp", "loss", ""), ("softmax", "input", "groups"), ("softmax", "target", "groups"))
    found = []
    for i, columns in enumerate((5, 700, 4096, 50257, 151936)):
        (math, against, alpha), dtype = kinds[i % 3], ("bf16", "fp32")[i % 2]
        prologue = Prologue(scale="number" if columns % 2 else "", alpha=alpha, against=against)
        result = dtype if alpha else "fp32"
        found.append(plan_of(math, prologue, (131, columns), (dtype, result)).row_class)
    for columns, math, alpha in (
        (1000, "logsumexp", ""),
        (4096, "softmax", "groups"),
        (50257, "softmax", "groups"),
    ):
        prologue = Prologue(alpha=alpha, against="weights")
        found.append(plan_of(math, prologue, (300, columns), ("bf16", "bf16" if alpha else "fp32")).row_class)
    check_rows(found, compiled)


SINKS = (
    Prologue(sink=True),
    Prologue(scale="number", mask=True, causal=True, sink=True),
    Prologue(scale="groups", bias=True, zero=True, sink=True),
)


@pytest.mark.parametrize("math", [m for m in MATHS if m != "entropy"])
def test_sinks(math, compiled):
    """In rows of every kind of configuration, of each dtype in turns; and elsewhere."""
    found, turns = [], zip(cycle(SINKS), cycle(PAIRS), cycle(("fp32", "bf16", "fp16")))
    for columns, (prologue, pair, dtype) in zip(
        LENGTHS[::2] if "back" in math else LENGTHS, turns, strict=False
    ):
        asked = supported(math, prologue)
        others = {"sink": "fp32" if "back" in math else dtype}
        found.append(plan_of(math, asked, (2, 40, columns), pair, others=others).row_class)
    for architecture in ("sm_80", "sm_100a", "sm_120a"):
        found.append(plan_of(math, SINKS[0], (2, 40, 4096), PAIRS[0], architecture).row_class)
    assert all(c.prologue.sink for c in found)
    check_rows(found, compiled)


def test_each_part_shapes_the_code(compiled):
    base = compiled(plan_of("softmax", NO_PROLOGUE, (2, 40, 1000)).row_class).ptx
    found = {base}
    for prologue in (*PROLOGUES, Prologue(zero=True), Prologue(alpha="number"), SINKS[0]):
        found.add(compiled(plan_of("softmax", prologue, (2, 40, 1000)).row_class).ptx)
    assert len(found) == len(PROLOGUES) + 4


@pytest.mark.parametrize("kind", ["rows", "panels", "prologues"])
def test_build_math_has_the_operands_of_the_plan(kind):
    if kind == "rows":
        found = all_classes("sm_90a", SAME[:1])
    elif kind == "panels":
        found = (panel_class(table_of().held[1][0], math, ("bf16", "bf16")) for math in PAIRS_OF)
    else:
        found = classes_of("sm_90a", 11)
    for c in found:
        math, facts = build_math(c), c.facts
        for name in ("inputs", "outputs", "group_inputs", "group_outputs"):
            assert getattr(math, name) == getattr(facts, name), (c.math, c.name)
        assert len(math.padding) == len(facts.inputs) and len(math.reductions) == getattr(
            c, "stages", facts.stages
        )
