"""softmax(S) @ V without the softmax matrix, in every state of torch: launches, its gradient and its operator."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ...plan.matmul import MatmulPlan, aligned, canonical_matmul, instruction_of, lines_of, plan_matmul
from ...plan.problem import Operand
from ...runtime import launch
from ..common import forms
from ..common.forms import Forms, Place, guard
from ..common.state import Ways, batched, recorder, unseen
from . import backward as matmul_backward
from .formulas import Request, composed, formula, gradients

known = Forms()


def forward(request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, log-sum-exps or None) by our kernel."""
    scores, values, return_lse = request.scores, request.values, return_lse and request.stats is None
    shape, device = (*request.batch, scores.shape[-2], values.shape[-1]), values.device
    result = torch.empty(shape, dtype=values.dtype, device=device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device) if return_lse else None
    if not math.prod(shape) or not scores.shape[-1]:
        result.fill_(0.0 if request.zero or shape[-1] == 0 else math.nan)
        return result, lse if lse is None else lse.fill_(-math.inf)
    readable = _readable(request)
    call = _call_of(readable, return_lse)
    tensors = [t for t in (*readable[:4], result, lse) if t is not None]
    if call.plan.kernel.split:
        tensors.append(torch.empty(call.plan.parts_bytes, dtype=torch.uint8, device=device))
    if readable.stats is not None:
        tensors.append(readable.stats)
    call.on_device(values.get_device(), *[t.data_ptr() for t in tensors])
    return result, lse


def _readable(request: Request) -> Request:
    """The request with operands of its whole batch, copies of those that kernels cannot read as they lie."""
    scores, values, mask, bias, *rest, stats = request
    batch = request.batch
    tma = _instruction(values) == "wgmma"
    scores, values = (
        t if t.shape[:-2] == batch else t.expand(*batch, *t.shape[-2:]) for t in (scores, values)
    )
    scores, values = _rows(scores, tma, lines=True), _rows(values, tma)
    if bias is not None and bias.dtype not in launch.DTYPE_NAMES:
        bias = bias.float()
    mask, bias = (t if t is None else t.expand(scores.shape) for t in (mask, bias))
    stats = None if stats is None else stats.to(torch.float32).contiguous()
    return Request(scores, values, mask, bias, *rest, stats)


def _lies_readable(request: Request) -> bool:
    """Whether kernels read all operands as they lie."""
    scores, values, _, bias, *_, stats = request
    tma, batch = _instruction(values) == "wgmma", request.batch
    return (
        _rows_read(scores.expand(*batch, *scores.shape[-2:]), tma, lines=True)
        and _rows_read(values.expand(*batch, *values.shape[-2:]), tma)
        and (bias is None or bias.dtype in launch.DTYPE_NAMES)
        and (stats is None or (stats.dtype is torch.float32 and stats.is_contiguous()))
    )


def _instruction(tensor: torch.Tensor) -> str:
    return instruction_of(launch.device_facts(tensor.get_device()).architecture)


def _call_of(request: Request, lse: bool) -> launch.Call:
    """The Call for a readable request."""
    scores, values, mask, bias, scale, causal, zero, stats = request
    return _call(
        values.get_device(),
        scores.shape,
        values.shape[-1],
        *map(_operand, (scores, values, mask, bias)),
        scale,
        causal,
        zero,
        lse,
        stats is not None,
        _instruction(values),
    )


def _rows_read(tensor: torch.Tensor, tma: bool, lines: bool = False) -> bool:
    """Whether kernels read a tensor as it lies: contiguous rows, for TMA of whole 16 bytes. lines: as scores are."""
    contiguous = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return (contiguous and not tma) or _lies_well(launch.operand(tensor), tensor.shape, lines)


def _rows(tensor: torch.Tensor, tma: bool, lines: bool = False) -> torch.Tensor:
    """The tensor, or a copy that kernels read."""
    if _rows_read(tensor, tma, lines):
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


class Form:
    """All eager calls on tensors of one device, shapes, strides, dtypes and offsets from 16 bytes whose other arguments
    are equal: decided once. Kernels read all operands as they lie.

    options: the arguments that are no tensors, as the caller gave them.
    """

    __slots__ = ("_absent", "_calls", "_matches", "_numbers", "_offsets", "_options", "_place", "_records")
    __slots__ += ("_shape", "_strides")

    def __init__(self, request: Request, options: tuple):
        given = request.mask, request.bias, request.stats
        self._absent = [t is None for t in given]
        self._matches = guard(request.scores, request.values, *[t for t in given if t is not None])
        self._options, self._place, self._numbers = options, Place(request.values), request[4:7]
        leaves = request.scores, request.values, request.bias
        self._records = any(t is not None and t.requires_grad for t in leaves)
        self._shape = (*request.batch, request.scores.shape[-2], request.values.shape[-1])
        self._strides = torch.empty(self._shape, device="meta").stride()
        self._offsets = [t.data_ptr() & 15 for t in request[:4] if t is not None]
        self._calls: dict[bool, launch.Call] = {}  # by whether log-sum-exps are written

    def fits(
        self,
        scores: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        stats: torch.Tensor | None,
        options: tuple,
    ) -> bool:
        """Whether a call is of this form."""
        given = mask, bias, stats
        return (
            [t is None for t in given] == self._absent
            and options == self._options
            and [*map(type, options)] == [*map(type, self._options)]  # 1 and True are equal
            and self._matches(scores, values, *[t for t in given if t is not None])
        )

    def __call__(
        self,
        scores: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        stats: torch.Tensor | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the result, log-sum-exps or None) of a call of this form, recorded by autograd where it records."""
        request = Request(
            scores, values, mask, bias, *self._numbers, None if stats is None else stats.detach()
        )
        if self._records and torch.is_grad_enabled():
            return _record(*request, self)
        return self.run(request, return_lse)

    def run(self, request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` for tensors of this form."""
        addresses = [t.data_ptr() for t in request[:4] if t is not None]
        if [address & 15 for address in addresses] != self._offsets or not self._place.current():
            return forward(request, return_lse)
        stats, lse = request.stats, None
        writes_lse = return_lse and stats is None
        call = self._calls.get(writes_lse)
        if call is None:
            call = self._calls[writes_lse] = _call_of(_readable(request), writes_lse)
        result = forms.empty_strided(self._shape, self._strides, request.values.dtype)
        addresses.append(result.data_ptr())
        if writes_lse:
            lse = torch.empty(self._shape[:-1], dtype=torch.float32, device=result.device)
            addresses.append(lse.data_ptr())
        if call.plan.kernel.split:
            parts = forms.empty_strided((call.plan.parts_bytes,), (1,), torch.uint8)
            addresses.append(parts.data_ptr())
        if stats is not None:
            addresses.append(stats.data_ptr())
        call(self._place.stream(), *addresses)
        return result, lse


class Product(torch.autograd.Function):
    """`operator` of an eager call, by its form if it has one: the dispatcher costs more host time than the launches."""

    @staticmethod
    def forward(ctx, *inputs):
        *fields, form = inputs
        request = Request(*fields)
        outputs = both(request) if form is None else form.run(request, True)
        _save(ctx, request, outputs)
        return outputs

    @staticmethod
    def backward(ctx, grad, grad_lse):
        direct = unseen(grad, grad_lse) and not batched(grad, grad_lse)
        way = matmul_backward.anyhow if direct else matmul_backward.operator
        return *_gradient(ctx, grad, grad_lse, way), None


# -- Calls -------------------------------------------------------------------------------------------------------------


def _transformed(request: Request, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Whatever is made of the scores, the sums are functions of them.
    return composed(request._replace(stats=None), return_lse)


_record = recorder(Product)
_WAYS = Ways(
    direct=forward,
    recorded=lambda request, _: _record(*request, None),
    transformed=_transformed,
    operator=lambda request, _: operator(*request),
)


def product(request: Request, return_lse: bool, options: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, its log-sum-exps or None), on any device and in any state of torch.

    options: see `Form`.
    """
    scores, values, mask, bias, *_, stats = request
    tensors = scores, values, mask, bias, stats
    if _has_form(request):
        form = Form(request, options)
        known.remember(scores, form)
        return form(*tensors, return_lse)
    # To autograd and to transforms known sums are functions of the scores.
    whole = stats is not None and (request.recorded or not unseen())
    if not (request.on_kernel or whole):
        return composed(request, return_lse)
    return _WAYS.serve((request, return_lse), tensors, (scores, values, bias))


def _has_form(request: Request) -> bool:
    """Whether an eager call is served in the same way when it comes again: with nothing to copy, and not empty."""
    sizes = math.prod(request.batch), request.scores.numel(), request.values.numel()
    tensors = request.scores, request.values, request.mask, request.bias, request.stats
    return request.on_kernel and unseen(*tensors) and all(sizes) and _lies_readable(request)
