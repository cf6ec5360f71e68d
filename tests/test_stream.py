"""Rows that are read tile after tile: which they are, what their kernels compile to, and results of emulated ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import checking
import emulated
import pytest
import streams
import torch
from classes import REDUCTIONS, operands
from compiled import check_all, check_compiled, compile_and_read
from rows import check, row_plan, times_owned
from traced import trace, wrong

import cute_softmax as c
from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.plan import MATHS, Prologue, stream
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.stream import StreamClass, stream_class

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


def test_classes(tmp_path, monkeypatch):
    """All fit the registers that they are to have, and have the layouts that are drawn of them."""

    def read(k):
        found = compile_and_read(k, tmp_path, monkeypatch)
        messages = MESSAGE * ("index" in k.facts.group_inputs)
        check_compiled(k, found, messages)

    found = [*every_class("sm_90a"), *with_prologues(), *[*every_class("sm_80")][::5]]
    assert len({*found}) > 30
    check_all(found, read)


def test_layouts_are_those_that_are_drawn():
    for k in every_class("sm_90a"):
        assert not wrong(k, trace(k))


def test_what_has_no_class():
    h200 = ARCHITECTURES["sm_90a"]
    refused = {
        name
        for name, online in MATHS
        if online and stream_class(name, h200, ("bf16",) * 4, edges=False) is None
    }
    assert refused == {"softmax", "softmax_backward", "log_softmax", "log_softmax_backward"}
    for prologue in (Prologue(mask=True), Prologue(causal=True), Prologue(against="loss")):
        assert stream_class("logsumexp", h200, ("bf16",) * 4, edges=False, prologue=prologue) is None


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
def test_emulated(columns, dtype, place, monkeypatch, tmp_path):
    launches = emulated.install(monkeypatch, tmp_path)
    streams.forced(monkeypatch)
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    for case in streams.cases(columns, dtype, place):
        case.check(case.launched())
    assert {work.plan.movement for work in launches} == {"stream"}


@pytest.mark.parametrize("wait", ["cp.async.wait_group", "bar.sync"])
def test_a_missing_wait_is_seen(wait, monkeypatch, tmp_path):
    launches = emulated.install(monkeypatch, tmp_path)
    streams.forced(monkeypatch)
    launches.seed = 5
    x = torch.randn(3, 20000, generator=torch.Generator().manual_seed(1))
    right = torch.logsumexp(x.double(), -1)
    assert torch.allclose(c.logsumexp(x, -1).double(), right, rtol=1e-6)
    kernel = launches[0].plan.kernel
    program, shared = launches.programs[kernel]
    code = [replace(i, name="fence") if i.name.startswith(wait) else i for i in program.code]
    assert code != program.code
    launches.programs[kernel] = replace(program, code=code), shared
    assert not torch.allclose(c.logsumexp(x, -1).double(), right, rtol=1e-6)


@pytest.mark.parametrize("function", [c.amax, c.sum], ids=["amax", "sum"])
def test_other_reductions(function, monkeypatch, tmp_path):
    launches = emulated.install(monkeypatch, tmp_path)
    streams.forced(monkeypatch)
    x = torch.randn(3, 9001, generator=torch.Generator().manual_seed(1))
    right = getattr(torch, function.__name__)(x.double(), -1)
    assert torch.allclose(function(x, -1).double(), right, rtol=1e-5, atol=1e-4)
    assert launches[0].plan.movement == "stream"
