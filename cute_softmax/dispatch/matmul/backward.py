"""The gradients of softmax_matmul by our kernels: tensors to a plan, its two launches, and what remains to add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ...plan.matmul_backward import MatmulBackwardPlan, NotPlanned, begins_at, plan_matmul_backward
from ...plan.problem import ALIGNMENT, Operand
from ...runtime import launch
from ..common.placements import meet
from .formulas import Gradients, gradients
from .placements import tell_products
from .request import Request, Upstream, operand_of, request_of


def backward(request: Request, upstream: Upstream, bias_grad: bool = False) -> Gradients:
    """The gradients of a request with respect to scores, values, bias and sink.

    bias_grad: whether that of the bias is wanted.

    A score that does not count has a gradient of zero. Rows of NaN make dV NaN as far as they are looked at: not where
    the diagonal cuts off whole tiles. Where a log-sum-exp is no longer exact to the scores' own rounding (beyond 1e5)
    neither are these gradients.
    Raises NotPlanned for what the kernels do not take.
    """
    (scores, values, mask, bias, sink, _, spec), (output, lse, grad, lse_grad) = request, upstream
    batch, depth = request.batch(), values.shape[-1]
    full = (*batch, *scores.shape[-2:])
    if not math.prod(full) * depth:
        _, _, _, dsink = gradients(request, upstream) if sink is not None else (None,) * 4
        empty = torch.zeros_like(bias) if bias_grad else None
        return torch.zeros_like(scores), torch.zeros_like(values), empty, dsink
    wide = _ranked(values, len(full))
    shared = [n == 1 < size for n, size in zip(wide.shape, batch, strict=False)]
    dscores = torch.empty(full, dtype=scores.dtype, device=scores.device)
    unit = ALIGNMENT // values.element_size()
    padded = math.ceil(depth / unit) * unit
    if depth % 2 or not begins_at(launch.operand(wide), wide.stride()[:-1], 2 * wide.element_size()):
        wide, grad, output = (_padded(t, padded) for t in (wide, grad, output))
        depth = padded
    elif not begins_at(launch.operand(grad), grad.stride()[:-1], ALIGNMENT):
        grad = _padded(grad, padded)[..., :depth]
    lse = lse.to(torch.float32).expand(full[:-1])
    if bias is not None and bias.dtype not in launch.DTYPE_NAMES:
        bias = bias.float()
    inputs = {"scores": scores.expand(full), "grad": grad, "values": wide}
    outputs = {"dscores": dscores, "dvalues": torch.empty_like(wide, memory_format=torch.contiguous_format)}
    extra = {n: t.expand(full) for n, t in (("mask", mask), ("bias", bias)) if t is not None}
    if lse_grad is not None:
        extra["lse_grad"] = lse_grad
    if sink is not None:
        # As the log-sum-exps lie, lest there be more batch modes.
        extra["sink"] = sink.float().expand(*full[:-1], 1).squeeze(-1).contiguous()
        extra["sink_grad"] = torch.empty_like(extra["sink"])
    tensors = {**inputs, **outputs, "output": output, "lse": lse, **extra}
    numbers = spec.causal, spec.factor, 1.0 if bias_grad else spec.factor, spec.zero, spec.invariant
    try:
        made = _bound(*form_of(full, shared, depth, tensors, *numbers))
    except NotPlanned:
        # Batches do not merge: all is gathered, and only neighbours share a V; others have a dV each at first.
        last = max((i for i, s in enumerate(shared) if s), default=0)
        shared = [s and all(shared[i : last + 1]) for i, s in enumerate(shared)]
        sizes = [n if s else size for n, s, size in zip(wide.shape, shared, batch, strict=False)]
        tensors = {name: t if name == "values" else t.contiguous() for name, t in tensors.items()}
        tensors["values"] = wide.contiguous().expand(*sizes, *wide.shape[-2:])
        tensors["dvalues"] = dscores.new_empty(tensors["values"].shape, dtype=values.dtype)
        made = _bound(*form_of(full, shared, depth, tensors, *numbers))
    run(made, tensors)
    dvalues = tensors["dvalues"].sum_to_size(wide.shape)[..., : values.shape[-1]].reshape(values.shape)
    dbias = None
    if bias_grad:
        dbias = dscores.sum_to_size(bias.shape).to(request.bias.dtype)
        # Of a bias with all of the scores' dimensions this is the gradient, too.
        same = dbias.data_ptr() == dscores.data_ptr()
        dscores = dscores * spec.factor if same else dscores.mul_(spec.factor)
    dsink = None
    if sink is not None:
        dsink = tensors["sink_grad"].unsqueeze(-1).sum_to_size(sink.shape).to(sink.dtype)
    return dscores.sum_to_size(scores.shape), dvalues.contiguous(), dbias, dsink


def anyhow(request: Request, upstream: Upstream, bias_grad: bool) -> Gradients:
    """`backward`, or torch's operations where it has no plan."""
    try:
        return backward(request, upstream, bias_grad)
    except NotPlanned:
        dscores, dvalues, dbias, dsink = gradients(request, upstream)
        return dscores, dvalues, dbias if bias_grad else None, dsink


FIELDS = (
    "scores", "values", "output", "lse", "grad", "scale", "causal", "zero", "mask", "bias", "bias_grad", "lse_grad",
    "invariant", "sink",
)  # fmt: skip


@torch.library.custom_op("cute_softmax::softmax_matmul_backward", mutates_args=())
def operator(
    scores: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    scale: float,
    causal: int | None,
    zero: bool,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_grad: bool,
    lse_grad: torch.Tensor | None,
    invariant: bool = False,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`anyhow`; empty tensors are the gradients of a bias without `bias_grad`, and of no sink."""
    request = request_of(scores, values, mask, bias, scale, causal, zero, invariant=invariant, sink=sink)
    found = anyhow(request, Upstream(output, lse, grad, lse_grad), bias_grad)
    return tuple([scores.new_empty(0) if t is None else t for t in found])


def _fake(
    scores,
    values,
    output,
    lse,
    grad,
    scale,
    causal,
    zero,
    mask,
    bias,
    bias_grad,
    lse_grad,
    invariant=False,
    sink=None,
):
    dbias = bias.new_empty(bias.shape) if bias_grad else scores.new_empty(0)
    dsink = scores.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return scores.new_empty(scores.shape), values.new_empty(values.shape), dbias, dsink


def _gradients_of(given: dict) -> tuple[str, ...]:
    return (
        "scores",
        "values",
        "bias" if given["bias_grad"] else "",
        "" if given.get("sink") is None else "sink",
    )


operator.register_fake(_fake)
tell_products("softmax_matmul_backward", FIELDS, _fake, _gradients_of)


def by_operator(request: Request, upstream: Upstream, bias_grad: bool) -> Gradients:
    """`anyhow`, by the operator."""
    meet(*request.tensors(), *upstream)
    scores, values, mask, bias, *numbers, _, invariant, sink = request.fields()
    *given, lse_grad = upstream
    found = operator(scores, values, *given, *numbers, mask, bias, bias_grad, lse_grad, invariant, sink)
    return *found[:2], found[2] if bias_grad else None, None if sink is None else found[3]


class Bound(NamedTuple):
    """A plan and its two launches, see `MatmulBackwardPlan.launches`."""

    plan: MatmulBackwardPlan
    first: launch.Call
    second: launch.Call


def run(made: Bound, tensors: dict[str, torch.Tensor]) -> None:
    """Both launches, on the current stream of the tensors' device; dvalues is the sum of the splits' parts."""
    plan, dvalues = made.plan, tensors["dvalues"]
    index, device = dvalues.get_device(), dvalues.device
    numbers = torch.empty(plan.delta_numbers, dtype=torch.float32, device=device)
    parts = dvalues
    if plan.splits > 1:
        parts = torch.empty((plan.splits, *dvalues.shape), dtype=torch.float32, device=device)
    tensors = tensors | {"numbers": numbers, "dvalues": parts}
    for call in (made.first, made.second):
        call.on_device(index, *[tensors[name].data_ptr() for name in call.plan.operands])
    if plan.splits > 1:
        add_up(parts, dvalues)


def add_up(parts: torch.Tensor, total: torch.Tensor) -> None:
    """Add float32 parts along the first dimension and round once. (`torch.sum` to a narrower dtype rounds each part
    before it adds, which made the error of dV 1.9 times that of a single product.)"""
    total.copy_(torch.sum(parts, 0))


def _ranked(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """A copy whose rows have so many columns, zeros behind the tensor's own."""
    copy = tensor.new_zeros((*tensor.shape[:-1], columns))
    copy[..., : tensor.shape[-1]] = tensor
    return copy


def form_of(
    shape: Sequence[int],
    shared: list[bool],
    depth: int,
    tensors: dict[str, torch.Tensor],
    *numbers: float | bool | None,
) -> tuple:
    """The arguments of `planned` for tensors and for causal, scale, factor, zero and invariant."""

    def operand(name: str, tensor: torch.Tensor) -> Operand:
        made = operand_of(tensor)
        if name in ("values", "dvalues"):
            strides = (0 if s else n for s, n in zip(shared, tensor.stride(), strict=False))
            made = made._replace(strides=(*strides, *tensor.stride()[-2:]))
        return made

    operands = tuple((name, operand(name, tensor)) for name, tensor in tensors.items())
    return tensors["scores"].get_device(), tuple(shape), tuple(shared), depth, operands, *numbers


def planned(
    index: int,
    shape: tuple[int, ...],
    shared: tuple[bool, ...],
    depth: int,
    operands: tuple[tuple[str, Operand], ...],
    causal: int | None,
    scale: float,
    factor: float,
    zero: bool,
    invariant: bool = False,
) -> MatmulBackwardPlan:
    """The plan for CUDA device `index`, else as `plan_matmul_backward`."""
    return plan_matmul_backward(
        shape,
        shared,
        depth,
        dict(operands),
        launch.facts_for(index, invariant),
        causal=causal,
        scale=scale,
        factor=factor,
        zero=zero,
        invariant=invariant,
    )


def bound(plan: MatmulBackwardPlan) -> Bound:
    """The plan with its compiled functions."""
    return Bound(plan, *(launch.Call(one, launch.function_of(one.kernel)) for one in plan.launches))


@lru_cache(maxsize=4096)
def _bound(*form: object) -> Bound:
    return bound(planned(*form))
