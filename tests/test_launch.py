"""How a call reaches a compiled function: the order of its tensors, and its numbers. No GPU."""

import math
import struct
from types import SimpleNamespace

import pytest
import simulated
import torch
from prologues import plan_of
from test_matmul_backward_plan import planned as gradient_plan

from cute_softmax import plan_softmax, softmax
from cute_softmax.plan import NO_PROLOGUE, Prologue
from cute_softmax.plan.choose import kernel_order
from cute_softmax.plan.describe import plan_matmul_shape, plan_shape
from cute_softmax.runtime import launch


def call_of(prologue: Prologue, name: str = "softmax") -> tuple[launch.Call, list]:
    """A Call whose function keeps its arguments, and what it kept."""
    kept = []
    made = plan_of(name, prologue, (2, 4, 100))
    order = kernel_order(name, prologue.of(name))
    return launch.Call(made, lambda *given: kept.append(given), order), kept


def test_group_inputs_are_given_before_the_results_and_go_behind_them():
    prologue = Prologue(scale="groups", bias=True, mask=True, alpha="groups")
    # x, bias, mask, scale, alpha, y -> x, bias, mask, y, scale, alpha
    assert kernel_order("softmax", prologue) == (0, 1, 2, 5, 3, 4)
    assert kernel_order("entropy", Prologue(scale="groups")) == (0, 1, 2, 3, 4)
    assert kernel_order("softmax_backward", Prologue(scale="groups")) == (0, 1, 3, 2)
    assert kernel_order("softmax", NO_PROLOGUE) == (0, 1)
    call, kept = call_of(prologue)
    call(7, *range(100, 106))
    (given,) = kept
    plan = call.plan
    assert given[: 1 + len(plan.arguments)] == (7, *plan.arguments)
    assert given[1 + len(plan.arguments) :: 1 + plan.kernel.kept_modes] == (100, 101, 102, 105, 103, 104)


def test_numbers_come_before_the_operands_as_bits():
    call, kept = call_of(Prologue(scale="number", causal=True, alpha="number"))
    call(7, 100, 101, numbers=(2, 0.5, -3))
    (given,) = kept
    first = 1 + len(call.plan.arguments)
    assert given[first : first + 3] == (0x40000000, 0x3F000000, -3)
    assert given[first + 3] == 100
    with pytest.raises(ValueError, match="argument"):
        call(7, 100, 101, numbers=(2.0,))


@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, -1e-3, 1e-45, math.inf, -math.inf, 3.4e38])
def test_float_bits(number):
    bits = launch.float_bits(number)
    assert 0 <= bits < 1 << 32 and struct.unpack("<f", struct.pack("<I", bits)) == struct.unpack(
        "<f", struct.pack("<f", number)
    )


def test_numbers_beyond_float32_are_infinite():
    assert launch.float_bits(1e39) == launch.float_bits(math.inf)
    assert launch.float_bits(-1e300) == launch.float_bits(-math.inf)
    assert launch.float_bits(math.nan) & 0x7FFFFFFF > 0x7F800000


def test_a_call_without_numbers_asks_for_none():
    plan = SimpleNamespace(arguments=(1,), operand_strides=((2,), (3,)), scratch=0, kernel=None)
    kept = []
    launch.Call(plan, lambda *given: kept.append(given))(7, 100, 101)
    assert kept == [(7, 1, 100, 2, 101, 3)]


def test_what_is_written_in_place_has_panels_that_do_not_overlap(monkeypatch):
    """A panel of shifted columns would write what its neighbour has still to read."""
    simulated.install(monkeypatch)
    x = torch.randn(300, 1001).to(torch.bfloat16)
    apart = launch.call_of("softmax", (x, torch.empty_like(x)), (0,)).plan
    assert apart.kernel.shifted and not apart.problem.in_place
    for inputs in ((x,), (x, torch.empty_like(x))):
        name = "softmax" if len(inputs) == 1 else "softmax_backward"
        made = launch.call_of(name, (*inputs, inputs[-1]), (0,)).plan
        assert made.problem.in_place and not made.kernel.shifted
    planned, call_of = [], launch.call_of
    monkeypatch.setattr(launch, "call_of", lambda *a, **k: planned.append(call_of(*a, **k)) or planned[-1])
    softmax(x, 0, out=x)
    assert [c.plan.problem.in_place for c in planned] == [True]


def plans():
    """Of every movement, with what changes how many arguments a kernel takes."""
    yield from (
        plan_of("softmax", p, (2, 40, 1000)) for p in (NO_PROLOGUE, Prologue(scale="number", causal=True))
    )
    yield plan_softmax(torch.empty(4, 5, 64)[:, :3])
    yield from (
        plan_shape(shape, dim=dim)
        for shape, dim in (((1000, 64), 0), ((4, 1 << 22), -1), ((6, 5, 8), (0, 2)))
    )
    yield from (plan_matmul_shape((2, 256, 512), 64, instruction=i) for i in ("wgmma", "mma"))
    shape, extra = (2, 64, 128), {"mask": "bool", "bias": "fp32"}
    extra = {name: simulated.dense(shape, dtype)[1] for name, dtype in extra.items()}
    for changed in ({}, extra, {"lse_grad": simulated.dense(shape[:2], "fp32")[1]}):
        yield from gradient_plan(shape[:1], *shape[1:], 64, **changed).launches


@pytest.mark.parametrize("made", [*plans()], ids=lambda made: f"{made.movement}-{made.kernel.name}")
def test_a_call_passes_what_the_class_says(made):
    """The kernel is compiled for the types of `signature`; a call gives so many numbers, 64-bit ones where they say."""
    template = launch.Call(made, None).template
    assert len(template) == len(made.kernel.signature)
    for number, letter in zip(template, made.kernel.signature, strict=True):
        assert isinstance(number, float) == (letter == "f")
        assert letter == "l" or abs(number) < 1 << 31
