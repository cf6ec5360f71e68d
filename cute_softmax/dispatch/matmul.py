"""softmax(S) @ V without the softmax matrix, in every state of torch: launches, its gradient and its operator."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ..plan.matmul import MatmulPlan, aligned, canonical_matmul, instruction_of, lines_of, plan_matmul
from ..plan.problem import Operand
from ..runtime import launch
from . import matmul_backward
from .matmul_formulas import Request, composed, formula, gradients
from .state import Ways, batched, recorder, unseen


def forward(request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, log-sum-exps or None) by our kernel."""
    scores, values, mask, bias, scale, causal, zero, stats = request
    batch, return_lse = request.batch, return_lse and stats is None
    (rows, columns), depth, device = scores.shape[-2:], values.shape[-1], values.device
    result = torch.empty((*batch, rows, depth), dtype=values.dtype, device=device)
    lse = torch.empty((*batch, rows), dtype=torch.float32, device=device) if return_lse else None
    if not rows or not columns or not depth or not math.prod(batch):
        result.fill_(0.0 if zero or depth == 0 else math.nan)
        return result, lse if lse is None else lse.fill_(-math.inf)
    index = values.get_device()
    instruction = instruction_of(launch.device_facts(index).architecture)
    tma = instruction == "wgmma"
    inputs = [t if t.shape[:-2] == batch else t.expand(*batch, *t.shape[-2:]) for t in (scores, values)]
    inputs = [_readable(inputs[0], tma, lines=True), _readable(inputs[1], tma)]
    if bias is not None and bias.dtype not in launch.DTYPE_NAMES:
        bias = bias.float()
    extras = [t if t is None else t.expand(*batch, rows, columns) for t in (mask, bias)]
    call = _call(
        index,
        inputs[0].shape,
        depth,
        *map(_operand, (*inputs, *extras)),
        scale,
        causal,
        zero,
        return_lse,
        stats is not None,
        instruction,
    )
    tensors = [*inputs, *(t for t in extras if t is not None), result]
    if return_lse:
        tensors.append(lse)
    if call.plan.kernel.split:
        tensors.append(torch.empty(call.plan.parts_bytes, dtype=torch.uint8, device=device))
    if stats is not None:
        tensors.append(stats.to(torch.float32).contiguous())
    call.on_device(index, *[t.data_ptr() for t in tensors])
    return result, lse


def _readable(tensor: torch.Tensor, tma: bool, lines: bool = False) -> torch.Tensor:
    """The tensor, or a copy that can be read: of contiguous rows, for TMA of whole 16 bytes. lines: as it is read for
    scores."""
    if not tma and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        return tensor
    if _lies_well(launch.operand(tensor), tensor.shape, lines):
        return tensor
    # Broadcast dimensions are not multiplied.
    base = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride()[:-2])]
    unit = 16 // tensor.element_size()
    pitch = math.ceil(tensor.shape[-1] / unit) * unit
    copy = torch.empty((*base.shape[:-1], pitch), dtype=tensor.dtype, device=tensor.device)
    return copy[..., : tensor.shape[-1]].copy_(base).expand(tensor.shape)


@lru_cache(maxsize=4096)
def _lies_well(operand: Operand, shape: torch.Size, lines: bool) -> bool:
    return aligned(operand, shape) or (lines and lines_of(operand, shape) is not None)


def _operand(tensor: torch.Tensor | None) -> Operand | None:
    if tensor is None:
        return None
    if tensor.dtype is torch.bool:
        return Operand("bool", tensor.stride())
    return launch.operand(tensor)


@lru_cache(maxsize=4096)
def _call(
    device: int,
    shape: torch.Size,
    depth: int,
    scores: Operand,
    values: Operand,
    mask: Operand | None,
    bias: Operand | None,
    scale: float,
    causal: int | None,
    zero: bool,
    lse: bool,
    stats: bool,
    instruction: str,
) -> launch.Call:
    tma = instruction == "wgmma"
    problem = canonical_matmul(shape, depth, scores, values, values.dtype, mask, bias, tma=tma)
    made: MatmulPlan = plan_matmul(
        problem,
        launch.device_facts(device),
        scale=scale,
        causal=causal,
        zero=zero,
        lse=lse,
        stats=stats,
        instruction=instruction,
    )
    return launch.Call(made, launch.function_of(made.kernel))


@torch.library.custom_op("cute_softmax::softmax_matmul", mutates_args=())
def operator(
    scores: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
    zero: bool,
    stats: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result, log-sum-exps: an empty tensor where they are known)."""
    return both(Request(scores, values, mask, bias, scale, causal, zero, stats))


def both(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `operator`."""
    if request.on_kernel:
        result, lse = forward(request, True)
    else:
        result, lse = composed(request)
        result = result.contiguous()
        lse = lse if lse is None else lse.to(torch.promote_types(lse.dtype, torch.float32)).contiguous()
    return result, request.stats.new_empty(0) if lse is None else lse


@operator.register_fake
def _(scores, values, mask, bias, scale, causal, zero, stats=None):
    batch = torch.broadcast_shapes(scores.shape[:-2], values.shape[:-2])
    rows, depth = scores.shape[-2], values.shape[-1]
    wide = torch.promote_types(scores.dtype, torch.float32)
    result = values.new_empty((*batch, rows, depth))
    return result, values.new_empty((*batch, rows), dtype=wide) if stats is None else stats.new_empty(0)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # a result that is not used has no gradient to be read
    *tensors, scale, causal, zero, stats = inputs
    result, lse = output
    ctx.save_for_backward(*tensors, result, lse if stats is None else stats)
    ctx.numbers, ctx.known = (scale, causal, zero), stats is not None


def _gradient(ctx, grad, grad_lse, by_kernel=matmul_backward.operator):
    scores, values, mask, bias, result, lse = ctx.saved_tensors
    request = Request(scores, values, mask, bias, *ctx.numbers)
    grad = torch.zeros_like(result) if grad is None else grad
    if ctx.known and torch.is_grad_enabled():  # to gradients of gradients it is a function of the scores
        lse = formula(scores, mask, bias, *ctx.numbers[:2])
    grad_lse = None if ctx.known else grad_lse
    # Gradients of gradients need torch's operations.
    if request.on_kernel and not torch.is_grad_enabled():
        wants_bias = bias is not None and ctx.needs_input_grad[3]
        to_scores, to_values, to_bias = by_kernel(
            scores, values, result, lse, grad, *ctx.numbers, mask, bias, wants_bias, grad_lse
        )
        to_bias = to_bias if wants_bias else None
    else:
        to_scores, to_values, to_bias = gradients(request, result, lse, grad, grad_lse)
    return to_scores, to_values, None, to_bias, None, None, None, None


operator.register_autograd(_gradient, setup_context=_save)


class Product(torch.autograd.Function):
    """`operator` of an eager call: what goes through the dispatcher costs more host time than the launches."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = both(Request(*inputs))
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx, grad, grad_lse):
        direct = unseen(grad, grad_lse) and not batched(grad, grad_lse)
        return _gradient(ctx, grad, grad_lse, matmul_backward.anyhow if direct else matmul_backward.operator)


# -- Calls -------------------------------------------------------------------------------------------------------------


def _transformed(request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Whatever is made of the scores, the sums are functions of them.
    return composed(request._replace(stats=None), return_lse)


_record = recorder(Product)
_WAYS = Ways(
    direct=forward,
    recorded=lambda request, _: _record(*request),
    transformed=_transformed,
    operator=lambda request, _: operator(*request),
)


def product(request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, its log-sum-exps or None), on any device and in any state of torch."""
    # To autograd and to transforms known sums are functions of the scores.
    whole = request.stats is not None and (request.recorded or not unseen())
    if not (request.on_kernel or whole):
        return composed(request, return_lse)
    scores, values, mask, bias, *_, stats = request
    return _WAYS.serve((request, return_lse), (scores, values, mask, bias, stats), (scores, values, bias))
