"""softmax(S) @ V without the softmax matrix, in every state of torch: launches, its gradient and its operator."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ...plan.matmul import aligned, canonical_matmul, instruction_of, lines_of, plan_matmul
from ...plan.problem import ALIGNMENT, Operand
from ...runtime import launch
from ..common import forms
from ..common.forms import Forms, Place, guard
from ..common.spec import Spec
from ..common.state import Ways, batched, recorder, unseen
from . import backward as matmul_backward
from .formulas import composed, gradients, log_sums
from .request import Request, Upstream, operand_of, request_of

known = Forms()
Results = tuple[torch.Tensor, torch.Tensor | None]


def forward(request: Request, return_lse: bool, calls: dict[bool, launch.Call] | None = None) -> Results:
    """(the result, log-sum-exps or None) by our kernel.

    calls: of a form, where the Call is kept by whether it writes log-sum-exps, if operands are read as they lie.
    """
    shape, device, writes_lse = request.shape, request.values.device, return_lse and request.stats is None
    result = torch.empty(shape, dtype=request.values.dtype, device=device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device) if writes_lse else None
    if not result.numel() or not request.scores.shape[-1]:
        result.fill_(0.0 if request.spec.zero or shape[-1] == 0 else math.nan)
        return result, lse if lse is None else lse.fill_(-math.inf)
    readable = _readable(request)
    call = _call_of(readable, writes_lse)
    if calls is not None and _addresses(readable.tensors) == _addresses(request.tensors):
        calls[writes_lse] = call
    *operands, stats = readable.tensors
    parts = (
        torch.empty(call.plan.parts_bytes, dtype=torch.uint8, device=device)
        if call.plan.kernel.split
        else None
    )
    call.on_device(result.get_device(), *_addresses((*operands, result, lse, parts, stats)))
    return result, lse


def _addresses(tensors: tuple[torch.Tensor | None, ...]) -> list[int]:
    return [t.data_ptr() for t in tensors if t is not None]


def _readable(request: Request) -> Request:
    """The request with operands of its whole batch, copies of those that kernels cannot read as they lie."""
    scores, values, mask, bias, stats, spec = request
    batch, tma = request.batch, _instruction(values) == "wgmma"
    scores, values = (
        t if t.shape[:-2] == batch else t.expand(*batch, *t.shape[-2:]) for t in (scores, values)
    )
    if bias is not None and bias.dtype not in launch.DTYPE_NAMES:
        bias = bias.float()
    mask, bias = (t if t is None else t.expand(scores.shape) for t in (mask, bias))
    if stats is not None:
        stats = stats.to(torch.float32).expand(scores.shape[:-1]).contiguous()
    return Request(_rows(scores, tma, lines=True), _rows(values, tma), mask, bias, stats, spec)


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
    *operands, stats = request.tensors
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
    """operands: scores, values, mask and bias."""
    scores, values, mask, bias = operands
    tma = instruction == "wgmma"
    made = plan_matmul(
        canonical_matmul(shape, depth, scores, values, values.dtype, mask, bias, tma=tma),
        launch.device_facts(device),
        scale=spec.factor,
        causal=spec.causal,
        zero=spec.zero,
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
    return both(request_of(scores, values, mask, bias, scale, causal, zero, stats))


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
def _(*fields):
    request = request_of(*fields)
    values, stats, shape = request.values, request.stats, request.shape
    wide = torch.promote_types(request.scores.dtype, torch.float32)
    lse = values.new_empty(shape[:-1], dtype=wide) if stats is None else stats.new_empty(0)
    return values.new_empty(shape), lse


def _save(ctx, request: Request, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # a result that is not used has no gradient to be read
    result, lse = output
    *tensors, stats, ctx.spec = request
    ctx.save_for_backward(*tensors, result, lse if stats is None else stats)
    ctx.known = stats is not None


def _gradients(ctx, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple:
    """The gradients of scores, values, mask and bias."""
    *tensors, result, lse = ctx.saved_tensors
    request = Request(*tensors, None, ctx.spec)
    grad = torch.zeros_like(result) if grad is None else grad
    if ctx.known and torch.is_grad_enabled():  # to gradients of gradients it is a function of the scores
        lse = log_sums(request.scores, request.mask, request.bias, request.spec)
    upstream = Upstream(result, lse, grad, None if ctx.known else grad_lse)
    # Gradients of gradients need torch's operations.
    if request.on_kernel and not torch.is_grad_enabled():
        direct = unseen(grad, upstream.lse_grad) and not batched(grad, upstream.lse_grad)
        way = matmul_backward.anyhow if direct else matmul_backward.by_operator
        wants_bias = request.bias is not None and ctx.needs_input_grad[3]
        to_scores, to_values, to_bias = way(request, upstream, wants_bias)
    else:
        to_scores, to_values, to_bias = gradients(request, upstream)
    return to_scores, to_values, None, to_bias


operator.register_autograd(
    lambda ctx, *grads: (*_gradients(ctx, *grads), *[None] * 4),
    setup_context=lambda ctx, inputs, output: _save(ctx, request_of(*inputs), output),
)


class Form:
    """All eager calls on tensors of one device, shapes, strides, dtypes and offsets from 16 bytes whose other arguments
    are equal: decided once.

    options: the arguments that are no tensors, as the caller gave them.
    """

    __slots__ = ("_absent", "_calls", "_matches", "_offsets", "_options", "_place", "_records", "_shape")
    __slots__ += ("_spec", "_strides", "_types")

    def __init__(self, request: Request, options: tuple):
        self._absent = [t is None for t in request[2:5]]
        self._matches = guard(*[t for t in request.tensors if t is not None])
        self._options, self._types = options, [*map(type, options)]
        self._place, self._spec = Place(request.values), request.spec
        leaves = request.scores, request.values, request.bias
        self._records = any(t is not None and t.requires_grad for t in leaves)
        self._shape = request.shape
        self._strides = torch.empty(self._shape, device="meta").stride()
        self._offsets = [address & 15 for address in _addresses(request.tensors)]
        self._calls: dict[bool, launch.Call] = {}  # by whether log-sum-exps are written

    def fits(self, *call: object) -> bool:
        """Whether a call is of this form: the tensors of a request, and the options."""
        given, options = [t for t in call[:5] if t is not None], call[5]
        return (
            options == self._options
            and [t is None for t in call[2:5]] == self._absent
            and [*map(type, options)] == self._types  # 1 and True are equal
            and self._matches(*given)
        )

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], return_lse: bool) -> Results:
        """(the result, log-sum-exps or None) of a call of this form, recorded by autograd where it records."""
        request = Request(*tensors, self._spec)
        if request.stats is not None:
            request = request.constant
        if self._records and torch.is_grad_enabled():
            return _record(*request, self)
        return self.run(request, return_lse)

    def run(self, request: Request, return_lse: bool) -> Results:
        """`forward` for tensors of this form."""
        writes_lse = return_lse and request.stats is None
        call, lse = self._calls.get(writes_lse), None
        addresses = [t.data_ptr() for t in request[:5] if t is not None]
        if [address & 15 for address in addresses] != self._offsets or not self._place.current():
            return forward(request, return_lse)
        if call is None:
            return forward(request, return_lse, self._calls)
        known = [] if request.stats is None else [addresses.pop()]
        result = forms.empty_strided(self._shape, self._strides, request.values.dtype)
        addresses.append(result.data_ptr())
        if writes_lse:
            lse = torch.empty(self._shape[:-1], dtype=torch.float32, device=result.device)
            addresses.append(lse.data_ptr())
        if call.plan.kernel.split:
            parts = forms.empty_strided((call.plan.parts_bytes,), (1,), torch.uint8)
            addresses.append(parts.data_ptr())
        call(self._place.stream(), *addresses, *known)
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
        return *_gradients(ctx, grad, grad_lse), None, None, None


# -- Calls -------------------------------------------------------------------------------------------------------------


def _transformed(request: Request, return_lse: bool) -> Results:
    # Whatever is made of the scores, the sums are functions of them.
    return composed(request._replace(stats=None), return_lse)


_record = recorder(Product)
_WAYS = Ways(
    direct=forward,
    recorded=lambda request, _: _record(*request, None),
    transformed=_transformed,
    operator=lambda request, _: operator(*request.fields),
)


def product(request: Request, return_lse: bool, options: tuple) -> Results:
    """(the result, its log-sum-exps or None), on any device and in any state of torch.

    options: see `Form`.
    """
    if request.on_kernel and unseen(*request.tensors):
        form = Form(request, options)
        known.remember(request.scores, form)
        return form(request.tensors, return_lse)
    request = request.constant
    # To autograd and to transforms known sums are functions of the scores.
    whole = request.stats is not None and (request.recorded or not unseen())
    if not (request.on_kernel or whole):
        return composed(request, return_lse)
    leaves = request.scores, request.values, request.bias
    return _WAYS.serve((request, return_lse), request.tensors, leaves)
