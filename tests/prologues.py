"""Plans with a prologue, of described tensors."""

from __future__ import annotations

import math

import classes

from cute_softmax.plan import PanelPlan, Plan, Prologue, facts_of, plan
from cute_softmax.plan.hardware import ARCHITECTURES, Device
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical

SINKS = ("sink", "sink_log", "sink_grad")
DEVICES = {name: Device(a, multiprocessors=132, l2=50 << 20) for name, a in ARCHITECTURES.items()}


def operands_of(
    name: str,
    prologue: Prologue,
    shape: tuple[int, ...],
    pair: tuple[str, str] = ("bf16", "bf16"),
    *,
    shared: bool = False,
    strides: dict[str, tuple[int, ...]] | None = None,
    offsets: dict[str, int] | None = None,
    others: dict[str, str] | None = None,
) -> list[Operand]:
    """Contiguous operands of a call over the last dimension, in the order of a plan; the input and the result have the
    dtypes of `pair`, a bias that of the input, and group inputs are float32, but upstream gradients that come alone.

    shared: a bias and a mask are broadcast over the first dimension. strides, offsets (elements), others (dtypes): of
    single operands.
    """
    source, result = pair
    facts = facts_of(name, True, prologue.of(name))
    dense = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    group = (*(math.prod(shape[d + 1 : -1]) for d in range(len(shape) - 1)), 0)
    gradient = name.endswith("_backward")
    found = []
    for operand in facts.operands:
        at = group if operand in (*facts.group_inputs, *facts.group_outputs) else dense
        if operand in ("bias", "mask") and shared:
            at = (0, *dense[1:])
        dtype = source if operand in ("x", "bias", "dx", "target") else result
        numbers = dict.fromkeys(
            ("scale", "alpha", "found", "loss", "lse", "more", "down", "entropy", "even", *SINKS), "fp32"
        )
        if prologue.factor:
            numbers |= dict.fromkeys(
                ("down", *["alpha"] * bool(prologue.target and not prologue.more)), result
            )
        dtype = {"mask": "bool", "index": "int64", **numbers, **(others or {})}.get(operand, dtype)
        assert not gradient or operand not in ("x", "bias", "mask")
        at = (strides or {}).get(operand, at)
        found.append(Operand(dtype, at, (offsets or {}).get(operand, 0) * ITEM_SIZE[dtype]))
    return found


def plan_of(
    name: str,
    prologue: Prologue,
    shape: tuple[int, ...],
    pair: tuple[str, str] = ("bf16", "bf16"),
    architecture: str = "sm_90a",
    **operands,
) -> Plan | PanelPlan:
    """The plan of a call over the last dimension; the one before is a causal mask's query dimension."""
    prologue = prologue.of(name)
    query = len(shape) - 2 if prologue.causal else None
    problem = canonical(shape, (len(shape) - 1,), operands_of(name, prologue, shape, pair, **operands), query)
    with classes.by_rows():
        return plan(name, problem, DEVICES[architecture], prologue=prologue)
