"""softmax(S) @ V by our kernels: tensors to a plan and its launch."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ...plan.matmul import aligned, canonical_matmul, instruction_of, lines_of, plan_matmul
from ...plan.problem import ALIGNMENT, Operand
from ...runtime import launch
from ..common.spec import Spec
from .request import Request, Results, operand_of


def forward(request: Request, return_lse: bool, calls: list[launch.Call] | None = None) -> Results:
    """(the result, log-sum-exps or None) by our kernel.

    calls: where the Call is kept, if operands are read as they lie.
    """
    shape, device, writes_lse = request.shape(), request.values.device, return_lse and request.stats is None
    result = torch.empty(shape, dtype=request.values.dtype, device=device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device) if writes_lse else None
    if not result.numel() or not request.scores.shape[-1]:
        result.zero_()  # a product over nothing, as torch's
        if lse is not None and request.sink is not None:
            lse.copy_(request.sink.expand(*shape[:-1], 1).squeeze(-1))
        elif lse is not None:
            lse.fill_(-math.inf)
        return result, lse
    readable = _readable(request)
    call = _call_of(readable, writes_lse)
    if calls is not None and addresses_of(readable.tensors()) == addresses_of(request.read()):
        calls.append(call)
    *operands, stats = readable.tensors()
    parts = (
        torch.empty(call.plan.parts_bytes, dtype=torch.uint8, device=device)
        if call.plan.kernel.split
        else None
    )
    call.on_device(result.get_device(), *addresses_of((*operands, result, lse, parts, stats)))
    return result, lse


def addresses_of(tensors: tuple[torch.Tensor | None, ...]) -> list[int]:
    return [t.data_ptr() for t in tensors if t is not None]


def _readable(request: Request) -> Request:
    """The request with operands of its whole batch, copies of those that kernels cannot read as they lie."""
    (scores, values, mask, bias, sink, stats), spec = request.read(), request.spec
    batch, tma = request.batch(), _instruction(values) == "wgmma"
    scores, values = (
        t if t.shape[:-2] == batch else t.expand(*batch, *t.shape[-2:]) for t in (scores, values)
    )
    bias, sink = (
        t.float() if t is not None and t.dtype not in launch.DTYPE_NAMES else t for t in (bias, sink)
    )
    mask, bias, sink = (t if t is None else t.expand(scores.shape) for t in (mask, bias, sink))
    if stats is not None:
        stats = stats.to(torch.float32).expand(scores.shape[:-1]).contiguous()
    # Rows that are read line by line have a class of their own.
    scores, values = _rows(scores, tma, not spec.invariant), _rows(values, tma)
    return Request(scores, values, mask, bias, sink, stats, spec)


def _instruction(tensor: torch.Tensor) -> str:
    return instruction_of(launch.device_facts(tensor.get_device()).architecture)


def _rows(tensor: torch.Tensor, tma: bool, lines: bool = False) -> torch.Tensor:
    """The tensor, or a copy that kernels read: of contiguous rows, for TMA of whole 16 bytes. lines: as scores are."""
    contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if (contiguous and not tma) or _lies_well(launch.operand(tensor), tensor.shape, lines):
        return tensor
    # Broadcast dimensions are not multiplied.
    base = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride()[:-2])]
    unit = ALIGNMENT // tensor.element_size()
    pitch = math.ceil(tensor.shape[-1] / unit) * unit
    copy = torch.empty((*base.shape[:-1], pitch), dtype=tensor.dtype, device=tensor.device)
    return copy[..., : tensor.shape[-1]].copy_(base).expand(tensor.shape)


@lru_cache(maxsize=4096)
def _lies_well(operand: Operand, shape: torch.Size, lines: bool) -> bool:
    return aligned(operand, shape) or (lines and lines_of(operand, shape) is not None)


def _call_of(request: Request, lse: bool) -> launch.Call:
    """The Call for a readable request."""
    *operands, stats = request.tensors()
    return _call(
        request.values.get_device(),
        request.scores.shape,
        request.values.shape[-1],
        tuple(map(operand_of, operands)),
        request.spec,
        lse,
        stats is not None,
        _instruction(request.values),
    )


@lru_cache(maxsize=4096)
def _call(
    device: int,
    shape: torch.Size,
    depth: int,
    operands: tuple[Operand | None, ...],
    spec: Spec,
    lse: bool,
    stats: bool,
    instruction: str,
) -> launch.Call:
    """operands: scores, values, mask, bias and sink."""
    scores, values, mask, bias, sink = operands
    tma = instruction == "wgmma"
    made = plan_matmul(
        canonical_matmul(shape, depth, scores, values, values.dtype, mask, bias, sink, tma=tma),
        launch.facts_for(device, spec.invariant),
        scale=spec.factor,
        causal=spec.causal,
        zero=spec.zero,
        lse=lse,
        stats=stats,
        instruction=instruction,
        invariant=spec.invariant,
    )
    return launch.Call(made, launch.function_of(made.kernel))
