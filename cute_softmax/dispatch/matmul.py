"""softmax(S) @ V without the softmax matrix: the public function, its checks, its gradient and its operator."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..api.softmax import check_tensor, softmax, transformed
from ..plan.matmul import MatmulPlan, aligned, canonical_matmul, instruction_of, lines_of, plan_matmul
from ..plan.problem import Operand
from ..runtime import launch
from . import matmul_backward, ops, routes
from .matmul_stats import formula, modified
from .scores import EMPTY_ROWS, diagonal, number

HALVES = (torch.bfloat16, torch.float16)


class Request(NamedTuple):
    """A checked call: ``softmax(scale * scores + bias, -1) @ values``.

    causal: column j of row i counts if j <= i + causal, None: all do; zero: what a row without anything that counts
    gives, 0 instead of NaN. stats: the rows' log-sum-exps, if they are known.
    """

    scores: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    causal: int | None
    zero: bool
    stats: torch.Tensor | None = None

    @property
    def batch(self) -> torch.Size:
        """The batch dimensions of the result."""
        batch, others = self.scores.shape[:-2], self.values.shape[:-2]
        return batch if batch == others else torch.broadcast_shapes(batch, others)

    @property
    def on_kernel(self) -> bool:
        """Whether our kernels serve it; all else is composed."""
        return self.values.is_cuda and self.values.dtype in HALVES

    @property
    def recorded(self) -> bool:
        """Whether autograd records the call."""
        return routes.recorded(self.scores, self.values, self.bias)


def softmax_matmul(
    scores: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool | int = False,
    empty_rows: str = "nan",
    return_lse: bool = False,
    stats: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The product `softmax(scale * scores + bias, -1) @ values`, with scores read once and no softmax matrix written.

    CUDA tensors with values in bfloat16 or float16 run our kernels: powers are rounded to the dtype of the values, sums
    are float32. All others take two steps, a softmax and torch's product: CPU tensors, values in float32 or float64,
    and calls inside functorch's transforms.

    A NaN or +inf among a row's scores makes the row NaN. The same call gives the same bits every time. Differentiable
    with respect to scores, values and bias. On sm_90 values whose rows do not begin at multiples of 16 bytes are copied
    first, and so are such scores in float32; other GPUs read them as they lie, but form gradients by torch's
    operations.

    Args:
        scores: (..., M, N), of the dtype of the values or float32.
        values: (..., N, D). The batch dimensions of scores and values broadcast.
        scale: A number that the scores are multiplied by.
        mask: A boolean tensor that broadcasts to (..., M, N); where it is False a score counts as -inf.
        bias: A floating-point tensor that broadcasts to (..., M, N), added after the scale.
        causal: True: score j of row i counts if `j <= i`; an int: if `j <= i + causal`. Tiles beyond are not read.
        empty_rows: What a row is in which nothing counts: "nan" as in torch, or "zero".
        return_lse: Also return the logarithms of the rows' sums of exponentials.
        stats: These logarithms, if they are known: what `softmax_stats` gives for the same scale, mask, bias and
            causal, float32, broadcasting to (..., M). Powers are then formed in one step, without maxima, sums and
            rescaling; the rounding of the logarithms becomes a relative error of about 1e-7 times their size. They
            count as functions of the scores: gradients are those of the softmax, and none flows through them.

    Returns:
        The product, (..., M, D) in the dtype of the values; with `return_lse` a pair of it and the logarithms, (..., M)
        in float32 (float64 for tensors in float64).

    Raises:
        TypeError: For what is not a dense, real floating-point tensor, for dtypes that do not go together, a mask that
            is not boolean, a causal or a scale of another type.
        ValueError: For shapes or devices that do not fit, and another word for `empty_rows`.
        NotPlanned: For more than three batch dimensions that do not merge in memory.
    """
    _check(scores, values, mask, bias, scale, empty_rows)
    if not isinstance(causal, int):
        raise TypeError(f"causal must be False, True or an int offset, not {type(causal).__name__}")
    offset = None if causal is False else diagonal(causal)
    if stats is not None:
        stats = _checked_stats(stats, scores, values)
    request = Request(scores, values, mask, bias, float(scale), offset, empty_rows == "zero", stats)
    if torch.compiler.is_compiling():
        # The operator looks at the GPU when it runs.
        by_operator = (values.is_cuda and values.dtype in HALVES) or stats is not None
        result, lse = operator(*request) if by_operator else composed(request)
    elif transformed():
        # Whatever is made of the scores, the sums are functions of them.
        result, lse = composed(request._replace(stats=None), return_lse)
    elif not request.on_kernel and not (stats is not None and request.recorded):
        result, lse = composed(request, return_lse)
    elif routes.watched(scores, values, mask, bias, stats):
        result, lse = operator(*request)
    elif request.recorded:
        result, lse = _apply(*request)
    else:
        result, lse = forward(request, return_lse)
    lse = lse if stats is None else stats
    return (result, lse) if return_lse else result


def _checked_stats(stats: object, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Known log-sum-exps, as constants. Raises TypeError and ValueError for what does not fit."""
    check_tensor("stats", stats, "softmax_matmul")
    if stats.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"stats are {stats.dtype}: they must be float32, as softmax_stats gives them")
    if stats.device != scores.device:
        raise ValueError(f"stats are on {stats.device}, scores on {scores.device}")
    rows = (*torch.broadcast_shapes(scores.shape[:-2], values.shape[:-2]), scores.shape[-2])
    try:
        return stats.detach().expand(rows)
    except RuntimeError:
        raise ValueError(f"stats {tuple(stats.shape)} do not broadcast to the rows {rows}") from None


def _check(
    scores: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    empty_rows: str,
) -> None:
    """Raise for what does not fit."""
    given = {"scores": scores, "values": values, "mask": mask, "bias": bias}
    given = {name: t for name, t in given.items() if t is not None or name in ("scores", "values")}
    for name, tensor in given.items():
        check_tensor(name, tensor, "softmax_matmul")
        if name != "mask" and not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: softmax_matmul takes floating-point tensors")
        if tensor.device != scores.device:
            raise ValueError(f"{name} is on {tensor.device}, scores on {scores.device}")
    if mask is not None and mask.dtype is not torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}: it must be bool, True where a score counts")
    if scores.dim() < 2 or values.dim() < 2:
        raise ValueError(
            f"scores {tuple(scores.shape)} and values {tuple(values.shape)} need at least two dimensions"
        )
    if scores.shape[-1] != values.shape[-2]:
        raise ValueError(
            f"scores {tuple(scores.shape)} have {scores.shape[-1]} columns, values {tuple(values.shape)} "
            f"{values.shape[-2]} rows"
        )
    if scores.dtype not in (values.dtype, torch.float32):
        raise TypeError(
            f"scores are {scores.dtype}, values {values.dtype}: scores have the dtype of values or float32"
        )
    batch = scores.shape[:-2]
    try:
        if batch != values.shape[:-2]:  # torch's check costs as much as the launch
            batch = torch.broadcast_shapes(batch, values.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"the batch dimensions of scores {tuple(scores.shape)} and values {tuple(values.shape)} do not broadcast"
        ) from None
    for name in ("mask", "bias"):
        if name in given:
            try:
                given[name].expand(*batch, *scores.shape[-2:])
            except RuntimeError:
                raise ValueError(
                    f"{name} {tuple(given[name].shape)} does not broadcast to {(*batch, *scores.shape[-2:])}"
                ) from None
    number("scale", scale)
    if empty_rows not in EMPTY_ROWS:
        raise ValueError(
            f"empty_rows is {empty_rows!r}: it must be one of {', '.join(map(repr, EMPTY_ROWS))}"
        )


def composed(request: Request, wants_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the result, log-sum-exps or None) in two steps: the softmax, and a product by torch."""
    scores, values, mask, bias, scale, causal, zero, stats = request
    if stats is not None:
        powers = torch.exp(modified(scores, mask, bias, scale, causal) - stats.unsqueeze(-1))
        if zero:
            powers = powers.masked_fill(stats.isneginf().unsqueeze(-1), 0.0)
        return powers.to(values.dtype) @ values, None
    shapes = [t.shape for t in (scores, mask, bias) if t is not None]
    powers = softmax(
        scores.expand(torch.broadcast_shapes(*shapes)),
        scale=scale,
        mask=mask,
        bias=bias,
        causal=False if causal is None else causal,
        empty_rows="zero" if zero else "nan",
    )
    lse = formula(scores, mask, bias, scale, causal) if wants_lse else None
    return powers.to(values.dtype) @ values, lse


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


def gradients(
    request: Request,
    result: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of scores, values and bias, in torch operations: the softmax is formed again."""
    scores, values, mask, bias, scale, causal, *_ = request
    x = modified(scores, mask, bias, scale, causal)
    # Rows without a score that counts: exp(-inf - -inf) is not what they added.
    powers = torch.exp(x - lse.nan_to_num(nan=math.nan, neginf=0.0).unsqueeze(-1))
    delta = (grad.to(powers.dtype) * result).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    inner = powers * (grad @ values.mT - delta)
    if mask is not None or causal is not None:
        inner = inner.masked_fill(x == -math.inf, 0.0)
    to_values = (powers.to(grad.dtype).mT @ grad).sum_to_size(values.shape)
    to_scores = (inner * scale).sum_to_size(scores.shape).to(scores.dtype)
    return to_scores, to_values, None if bias is None else inner.sum_to_size(bias.shape).to(bias.dtype)


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
        direct = routes.unseen(grad, grad_lse) and not ops.batched(grad, grad_lse)
        return _gradient(ctx, grad, grad_lse, matmul_backward.anyhow if direct else matmul_backward.operator)


_apply = ops.apply_of(Product)
