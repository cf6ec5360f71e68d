"""Rows that are read tile after tile: which they are, what their kernels compile to, and results of emulated ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import checking
import emulated
import pytest
import streams
import torch
from classes import REDUCTIONS, operands, sample
from compiled import check_all, check_compiled, compile_and_read
from prologues import plan_of
from rows import check, row_plan, times_owned
from traced import trace, wrong

import cute_softmax as c
from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.plan import MATHS, Prologue, stream
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.stream import StreamClass, stream_class
from cute_softmax.runtime.launch import run

MESSAGE = 32  # bytes of stack for the arguments of the message about an index out of range


@pytest.mark.parametrize(
    ("math", "rows", "columns", "streamed"),
    [
        ("logsumexp", 4096, 151936, True),
        ("selective_entropy", 4096, 151936, True),
        ("sum", 1 << 20, 1 << 20, True),
        ("logsumexp", 4096, 4096, False),
        ("logsumexp", 64, 151936, False),
        ("softmax", 4096, 151936, False),
    ],
)
def test_which_rows(math, rows, columns, streamed):
    made = row_plan(math, ("bf16", "bf16"), rows, columns, "sm_90a")
    assert isinstance(made.row_class, StreamClass) is streamed
    assert ("tile after tile" in made.explain()) is streamed


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "streamed"),
    [
        ("bf16", 4096, 151936, True),
        ("bf16", 132, 151936, True),
        ("bf16", 131, 151936, False),
        ("bf16", 8192, 12288, True),
        ("bf16", 8192, 12280, False),
        ("fp32", 8192, 6144, True),
    ],
)
@pytest.mark.parametrize("against", ["loss", "weights", "input"])
def test_which_rows_of_two_inputs(against, dtype, rows, columns, streamed):
    """As many bytes as both have; none of gradients."""
    math, alpha = ("softmax", "groups") if against == "input" else ("logsumexp", "")
    made = plan_of(math, Prologue(alpha=alpha, against=against), (rows, columns), (dtype, "fp32"))
    streamed = streamed and against != "input"
    assert isinstance(made.row_class, StreamClass) is streamed
    words = "of both inputs, then a weighted sum" if against == "loss" else "that of the weights"
    assert not streamed or ("tile after tile" in made.explain() and words in made.explain())


def test_inputs_that_are_broadcast_stay_rows():
    asked = Prologue(bias=True, mask=True)
    assert plan_of("logsumexp", asked, (4096, 65536), ("bf16", "fp32")).movement == "row"


def test_batch_invariant_rows_are_those_of_few():
    from cute_softmax.runtime.launch import Work

    x = torch.empty(4096, 1, 151936, device="meta", dtype=torch.bfloat16)
    work = Work("logsumexp", (x, x[..., :1].expand_as(x)), (2,))
    device = c.hardware.H200
    assert work.plan(device).movement == "stream"
    assert replace_invariant(work).plan(device).movement == "row"


def replace_invariant(work):
    return work._replace(invariant=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_element_has_one_thread(dtype, monkeypatch):
    streams.forced(monkeypatch)
    for columns, offset, pad in product((64, 1000, 4099, 8192, 20001), (0, 3), (0, 1)):
        made = row_plan("logsumexp", (dtype, dtype), 9, columns, "sm_90a", offsets=(offset,), pads=(pad,))
        assert made.movement == "stream"
        check(made)
        for row in range(9 if columns < 5000 else 2):
            assert (times_owned(made, row) == 1).all(), (columns, offset, pad, row)
        assert checks.check(made).problems == ()


def test_figures():
    made = row_plan("entropy", ("bf16", "fp32"), 4096, 100_001, "sm_90a")
    found = draw.figures(made)
    assert {*found} == {"tv", "tile", "smem", "edges", "shuffle", "reduction_buffer", draw.FOLLOWED}
    assert "on its way to the other half" in found["smem"].description
    assert "in 13 tiles" in found["tile"].description and len(draw.page(made, found)["steps"]) >= 3


def test_figures_of_two_inputs():
    made = plan_of("logsumexp", Prologue(against="loss"), (4096, 100_002), ("bf16", "fp32"))
    found = draw.figures(made)
    assert "One buffer each: sX, sTARGET" in found["smem"].description
    assert "the sum of weighted differences of logarithms" in found["reduction_buffer"].description
    assert "in 25 tiles" in found["tile"].description and checks.check(made).problems == ()


def every_class(architecture: str):
    for math, pair, edges in product(REDUCTIONS, (("bf16", "fp32"), ("fp32", "fp32")), (False, True)):
        yield stream_class(math, ARCHITECTURES[architecture], operands(math, pair), edges=edges)


def with_prologues():
    loss = Prologue(target="loss")
    for i, (math, prologue) in enumerate(
        (
            ("logsumexp", loss),
            ("logsumexp", replace(loss, scale="number", squares=True)),
            ("logsumexp", replace(loss, softcap=True, even=True)),
            ("selective", Prologue(even=True)),
            ("selective_entropy", Prologue(scale="number")),
            ("entropy", Prologue(softcap=True)),
            ("logsumexp", Prologue(scale="groups", sink=True)),
        )
    ):
        count = len(stream.facts_of(math, True, prologue).operands)
        dtypes = ("bf16" if i % 2 else "fp32", *["fp32"] * (count - 1))
        names = stream.facts_of(math, True, prologue).operands
        dtypes = tuple("int64" if name == "index" else d for name, d in zip(names, dtypes, strict=True))
        yield stream_class(
            math, ARCHITECTURES["sm_90a"], dtypes, edges=bool(i % 3), kept_modes=1 + i % 2, prologue=prologue
        )


def of_two_inputs(architecture: str = "sm_90a"):
    """Of each pair of dtypes, at boundaries and beside them; and the sums of slices."""
    kinds = [
        ("logsumexp", Prologue(against="loss")),
        ("logsumexp", Prologue(against="weights")),
        ("logsumexp", Prologue(scale="number", against="loss")),
        ("softmax_backward", Prologue(state="alone")),
    ]
    for i, ((math, prologue), pair) in enumerate(
        product(kinds, (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")))
    ):
        vector = 4 if "fp32" in pair else 8
        access = (vector, (1, 2, vector)[i % 3]) if i % 2 else None
        yield stream_class(
            math,
            ARCHITECTURES[architecture],
            (*pair, "fp32"),
            edges=bool(i % 2),
            access=access,
            prologue=prologue,
        )


def test_classes(tmp_path, monkeypatch):
    """All fit the registers that they are to have, and have the layouts that are drawn of them."""

    def read(k):
        found = compile_and_read(k, tmp_path, monkeypatch)
        messages = MESSAGE * ("index" in k.facts.group_inputs)
        check_compiled(k, found, messages)

    found = [*every_class("sm_90a"), *with_prologues(), *[*every_class("sm_80")][::5], *of_two_inputs()]
    assert len({*found}) > 45
    check_all(found, read)


def test_layouts_are_those_that_are_drawn():
    for k in (*every_class("sm_90a"), *of_two_inputs()):
        assert not wrong(k, trace(k))


def test_what_has_no_class():
    h200 = ARCHITECTURES["sm_90a"]
    refused = {
        name
        for name, online in MATHS
        if online and stream_class(name, h200, ("bf16",) * 4, edges=False) is None
    }
    assert refused == {"softmax", "softmax_backward", "log_softmax", "log_softmax_backward"}
    for prologue in (Prologue(mask=True), Prologue(causal=True), Prologue(bias=True)):
        assert stream_class("logsumexp", h200, ("bf16",) * 4, edges=False, prologue=prologue) is None
    gradient = Prologue(alpha="groups", against="input")
    assert stream_class("softmax", h200, ("bf16",) * 4, edges=False, prologue=gradient) is None


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """What is launched, interpreted on the CPU: rows of any length and number stream."""
    found = emulated.install(monkeypatch, tmp_path)
    streams.forced(monkeypatch)
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "dtype", "place"),
    [
        (8192, torch.bfloat16, (0, 0)),
        (20001, torch.bfloat16, (3, 2)),
        (4099, torch.float32, (1, 1)),
        (9000, torch.float16, (0, 0)),
        (72, torch.bfloat16, (0, 0)),
    ],
)
def test_emulated(columns, dtype, place, launches):
    for case in streams.cases(columns, dtype, place):
        case.check(case.launched())
    assert {work.plan.movement for work in launches} == {"stream"}


TWO = [
    ((torch.bfloat16, torch.bfloat16), (0, 0)),
    ((torch.bfloat16, torch.bfloat16), (4, 4)),
    ((torch.float32, torch.float32), (1, 1)),
    ((torch.bfloat16, torch.float32), (3, 2)),
    ((torch.float32, torch.float16), (0, 0)),
]


@pytest.mark.parametrize(("columns", "two"), sample([*product((72, 4099, 8192, 20001), TWO)], 2), ids=str)
def test_two_inputs(columns, two, launches):
    dtypes, place = two
    for pair in streams.pairs(columns, dtypes, place):
        pair.check(pair.launched())
    assert {work.plan.movement for work in launches} == {"stream"}


def test_sums_of_slices(launches):
    dy, y = (torch.randn(3, 9001, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = torch.empty(3, 1)
    work = ("softmax_backward", (dy, y, found.expand(3, 9001)), (1,))
    run(*work, prologue=Prologue(state="alone"))
    assert torch.allclose(found[:, 0].double(), (dy.double() * y.double()).sum(-1), rtol=1e-5, atol=1e-4)
    assert launches[0].plan.movement == "stream"


@pytest.mark.parametrize("wait", ["cp.async.wait_group", "bar.sync"])
def test_a_missing_wait_is_seen(wait, launches):
    launches.seed = 5
    x = torch.randn(3, 20000, generator=torch.Generator().manual_seed(1))
    right = torch.logsumexp(x.double(), -1)
    assert torch.allclose(c.logsumexp(x, -1).double(), right, rtol=1e-6)
    with launches.mutated(wait):
        assert not torch.allclose(c.logsumexp(x, -1).double(), right, rtol=1e-6)


@pytest.mark.parametrize("function", [c.amax, c.sum], ids=["amax", "sum"])
def test_other_reductions(function, launches):
    x = torch.randn(3, 9001, generator=torch.Generator().manual_seed(1))
    right = getattr(torch, function.__name__)(x.double(), -1)
    assert torch.allclose(function(x, -1).double(), right, rtol=1e-5, atol=1e-4)
    assert launches[0].plan.movement == "stream"
