"""Softmax and log_softmax of scores: by our kernels or torch's formulas, with every rule of differentiation.

Eager calls, functorch's transforms and forward-mode AD go through the autograd functions `Forward` and `Gradient`;
whatever must see an operator (torch.compile, export, dispatch modes, subclasses) through the torch.library
operators. Both end in `forward` and `backward`, which launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..plan import NotPlanned, Prologue
from ..runtime import launch
from . import ops
from .scores import Spec, backward_formula, compose, empty_rows, finished, formula, kept, summed_to, wide

Tensor = torch.Tensor
INF = float("inf")
DTYPES = launch.DTYPE_NAMES


def served(input: Tensor, dtype: torch.dtype, *others: Tensor | None) -> bool:
    """Whether our kernels serve a call; `others`: float operands that may be None."""
    return ops.on_kernel(input, dtype) and all(t is None or t.dtype in DTYPES for t in others)


# Made once: a dataclass takes longer to make than to find.
_prologue = lru_cache(Prologue)


def prologue_of(bias: object, mask: object, scale: object, spec: Spec, alpha: str | None = None) -> Prologue:
    """The prologue of a forward; alpha: "groups" for a factor on each row."""
    return _prologue(
        scale="groups" if scale is not None else "number" if spec.scale != 1 else "",
        bias=bias is not None,
        mask=mask is not None,
        causal=spec.causal is not None,
        alpha="number" if alpha is None and spec.alpha != 1 else alpha or "",
        zero=spec.zero,
    )


def gradient_prologue(mask: object, scale: object, spec: Spec) -> Prologue:
    """The prologue of a backward. Of a mask it has no operand: the logarithm is -inf there."""
    return _prologue(
        scale="groups" if scale is not None else "number" if spec.scale != 1 else "",
        mask=spec.log and mask is not None,
        causal=spec.causal is not None,
        alpha="number" if spec.alpha != 1 else "",
    )


def numbers_of(prologue: Prologue, spec: Spec, alpha: float, shape: torch.Size) -> tuple[float | int, ...]:
    """What the prologue takes at run time."""
    numbers: list[float | int] = []
    if prologue.scale == "number":
        numbers.append(spec.scale)
    if prologue.alpha == "number":
        numbers.append(alpha)
    if prologue.causal:
        numbers.append(offset_within(spec.causal, shape))
    return tuple(numbers)


def offset_within(offset: int, shape: Sequence[int]) -> int:
    """What an offset of the diagonal means to a matrix: beyond it no more than at its edge."""
    return max(-shape[-2], min(offset, shape[-1]))


def forward(
    input: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    out: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The result, by a kernel, into `out` or a new tensor of the input's memory format.

    factors: of each row (size 1 in the reduced dimensions), instead of `spec.alpha`.
    """
    result = torch.empty_like(input, dtype=spec.dtype) if out is None else out
    if not input.numel():
        return result
    prologue = prologue_of(bias, mask, scale, spec, None if factors is None else "groups")
    groups = [t.float() for t in (scale, factors) if t is not None]
    operands = [t.expand(input.shape) for t in (*(t for t in (bias, mask) if t is not None), *groups)]
    numbers = numbers_of(prologue, spec, spec.alpha, input.shape)
    query = None if spec.causal is None else input.dim() - 2
    try:
        launch.run(
            spec.math, (input, *operands, result), spec.dims, spec.online or spec.log, prologue=prologue,
            numbers=numbers,
            query=query,
        )  # fmt: skip
    except NotPlanned:
        if not prologue:
            raise
        _composed(input, bias, mask, scale, spec, result, factors)
    return result


def _composed(input, bias, mask, scale, spec: Spec, result: Tensor, factors: Tensor | None) -> None:
    """What no prologue is planned for: scores and results as a float32 tensor, the plain kernel between them."""
    changed = bias is not None or mask is not None or scale is not None
    if changed or spec.scale != 1 or spec.causal is not None:
        values = source = compose(input, bias, mask, scale, spec)
    else:
        source, values = input, torch.empty_like(input, dtype=torch.float32)
    empty = empty_rows(source, spec.dims) if spec.zero else None
    launch.run(spec.math, (source, values), spec.dims, spec.online or spec.log)
    if empty is not None:
        values.masked_fill_(empty, -INF if spec.log else 0.0)
    if factors is not None or spec.alpha != 1:
        values.mul_(spec.alpha if factors is None else factors)
    result.copy_(values)


def backward(
    grad: Tensor,
    output: Tensor,
    mask: Tensor | None,
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the input, of dtype `dtype`; not itself differentiable."""
    if ops.batched(grad, output) or not (served(output, dtype, scale) and grad.dtype in DTYPES):
        d = backward_formula(grad, output, mask, spec, wide(dtype) if scale is not None else dtype)
        return d if scale is None else (d * scale).to(dtype)
    result = torch.empty_like(output, dtype=dtype)
    if not output.numel():
        return result
    if ops._lie_apart(grad, output, spec.dims):
        grad = torch.empty_like(output, dtype=grad.dtype).copy_(grad)
    factors = scale
    if mask is not None and not spec.zero:
        # Rows of NaN in which nothing counts have a gradient of zero. (Where they are zero, so is this by itself.)
        some = rows_left(mask, spec, output)
        factor = spec.scale if scale is None else scale.float()
        factors = some if scale is None and factor == 1 else some * factor
    prologue = gradient_prologue(mask, factors, spec)
    operands = [] if factors is None else [factors.float().expand(output.shape)]
    numbers = numbers_of(prologue, spec, spec.inverse_alpha, output.shape)
    query = None if spec.causal is None else output.dim() - 2
    math = f"{spec.math}_backward"
    try:
        launch.run(
            math,
            (grad, output, *operands, result),
            spec.dims,
            prologue=prologue,
            numbers=numbers,
            query=query,
        )
    except NotPlanned:
        if not prologue:
            raise
        d = backward_formula(grad, output, mask, spec, wide(dtype))
        result.copy_(d if scale is None else d * scale)
    return result


def rows_left(mask: Tensor, spec: Spec, output: Tensor) -> Tensor:
    """Where something of a row counts, with the reduced dimensions of size 1; no more of it than the mask has."""
    keep = kept(output.shape, mask, spec.causal, output.device)
    keep = keep.view((1,) * (output.dim() - keep.dim()) + keep.shape)
    for d in spec.dims if output.dim() else ():
        keep = keep.any(d, keepdim=True)
    return keep


# -- Derivatives, shared by the autograd functions and the operators ---------------------------------------------------


def input_gradients(gradient, grad: Tensor, saved: tuple, shapes: tuple, needs: tuple, spec: Spec) -> tuple:
    """Gradients of (input, bias, scale), None where not needed.

    gradient(grad, output, mask, scale or None, spec, dtype): of the scores times the scale. saved: (output, mask,
    scale, input or None); shapes: of (bias, scale) or None, dtypes beside them.
    """
    output, mask, scale, input = saved
    (input_dtype, bias_shape, bias_dtype) = shapes
    to_input, to_bias, to_scale = needs
    if not (to_bias or to_scale):
        return gradient(grad, output, mask, scale, spec, input_dtype), None, None
    d = gradient(grad, output, mask, None, spec.changed(scale=1.0), input_dtype)
    of_input = of_bias = of_scale = None
    if to_input:
        of_input = d if scale is None and spec.scale == 1 else (d * (spec.scale if scale is None else scale))
        of_input = of_input.to(input_dtype)
    if to_bias:
        of_bias = summed_to(d, bias_shape).to(bias_dtype)
    if to_scale:
        w = wide(d.dtype, scale.dtype)
        # An x that is infinite or NaN has no share, being masked or of probability 0 (or else d is NaN itself).
        x = input.to(w)
        product = d.to(w) * torch.where(x.isfinite(), x, 0.0)
        of_scale = summed_to(product, scale.shape).to(scale.dtype)
    return of_input, of_bias, of_scale


def second_gradients(gradient, upstream: Tensor, grad: Tensor, output: Tensor, mask, spec: Spec) -> tuple:
    """Of `backward`'s result with respect to (grad, output): torch's operations, and once more the kernel."""
    w = wide(upstream.dtype, grad.dtype, output.dtype)
    u, g, y = finished(upstream.to(w), mask, spec), grad.to(w), output.to(w)
    if spec.log:
        p = y.exp()
        if mask is not None or spec.causal is not None:
            u, g = (torch.where(y == -INF, 0.0, t) for t in (u, g))
        along = u - (u * p).sum(spec.dims, keepdim=True)
        if mask is not None or spec.causal is not None:
            along = torch.where(y == -INF, 0.0, along)
        return along.to(grad.dtype), (-u * p * g.sum(spec.dims, keepdim=True)).to(output.dtype)
    inverse = spec.inverse_alpha
    to_output = u * (g - inverse * (g * y).sum(spec.dims, keepdim=True))
    to_output = to_output - inverse * g * (u * y).sum(spec.dims, keepdim=True)
    # The map from grad is symmetric.
    return gradient(upstream, output, mask, None, spec, grad.dtype), to_output.to(output.dtype)


class Forward(torch.autograd.Function):
    """(input, bias, mask, scale, spec) -> result; keeps the result, the mask, and what a tensor scale needs."""

    @staticmethod
    def forward(input, bias, mask, scale, spec):
        if served(input, spec.dtype, bias, scale):
            return forward(input, bias, mask, scale, spec)
        return formula(input, bias, mask, scale, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, bias, mask, scale, spec = inputs
        of_scale = scale is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(output, mask, scale, input if of_scale else None)
        if ops.transformed():
            ctx.save_for_forward(output, mask, scale, input)
        ctx.spec = spec
        ctx.shapes = (input.dtype, None, None) if bias is None else (input.dtype, bias.shape, bias.dtype)

    @staticmethod
    def backward(ctx, grad):
        needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3))
        gradient = differentiable if torch.is_grad_enabled() else backward
        d = input_gradients(gradient, grad, ctx.saved_tensors, ctx.shapes, needs, ctx.spec)
        return d[0], d[1], None, d[2], None

    @staticmethod
    @ops.jvp_rule
    def jvp(ctx, saved, input_tangent, bias_tangent, _, scale_tangent, *__):
        output, mask, scale, input = saved
        spec = ctx.spec
        dtypes = [t.dtype for t in (input_tangent, bias_tangent, scale_tangent) if t is not None]
        t = torch.zeros_like(output, dtype=wide(*dtypes))
        if input_tangent is not None:
            t = t + input_tangent * (spec.scale if scale is None else scale)
        if scale_tangent is not None:
            t = t + scale_tangent * input
        if bias_tangent is not None:
            t = t + bias_tangent
        keep = kept(output.shape, mask, spec.causal, output.device)
        if keep is not None:
            t = torch.where(keep, t, 0.0)
        spec = spec.changed(scale=1.0)
        if spec.log:
            y = output.to(t.dtype)
            t = t - (t * y.exp()).sum(spec.dims, keepdim=True)
            return (t if keep is None else torch.where(y == -INF, 0.0, t)).to(output.dtype)
        return Gradient.apply(t.to(output.dtype), output, mask, spec, output.dtype)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return over_batch(Forward.apply, info, in_dims, arguments, 1)


class Gradient(torch.autograd.Function):
    """(grad, output, mask, spec, dtype) -> the gradient of the input, differentiable again."""

    @staticmethod
    def forward(grad, output, mask, spec, dtype):
        return backward(grad, output, mask, None, spec, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, result, mask, ctx.spec, ctx.dtype = inputs
        ctx.save_for_backward(grad, result, mask)
        if ops.transformed():
            ctx.save_for_forward(grad, result, mask)

    @staticmethod
    def backward(ctx, upstream):
        grad, output, mask = ctx.saved_tensors
        gradient = differentiable if torch.is_grad_enabled() else backward
        return *second_gradients(gradient, upstream, grad, output, mask, ctx.spec), None, None, None

    @staticmethod
    @ops.jvp_rule
    def jvp(ctx, saved, grad_tangent, output_tangent, *_):
        grad, output, mask = saved
        spec = ctx.spec
        w = wide(grad.dtype, output.dtype)
        g, y, d = grad.to(w), output.to(w), torch.zeros_like(output, dtype=w)
        if output_tangent is not None:
            t = output_tangent.to(w)
            if spec.log:
                if mask is not None or spec.causal is not None:
                    g = torch.where(y == -INF, 0.0, g)
                d = -t * y.exp() * g.sum(spec.dims, keepdim=True)
            else:
                inverse = spec.inverse_alpha
                d = t * (g - inverse * (g * y).sum(spec.dims, keepdim=True))
                d = d - inverse * y * (g * t).sum(spec.dims, keepdim=True)
            d = finished(d, mask, spec)
        if grad_tangent is not None:
            d = d + Gradient.apply(grad_tangent, output, mask, spec, w)
        return d.to(ctx.dtype)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return over_batch(Gradient.apply, info, in_dims, arguments, 2)


def differentiable(
    grad: Tensor, output: Tensor, mask: Tensor | None, scale: Tensor | None, spec: Spec, dtype: torch.dtype
) -> Tensor:
    """`backward` where a gradient of the gradient may be wanted."""
    if scale is None:
        return Gradient.apply(grad, output, mask, spec, dtype)
    return (Gradient.apply(grad, output, mask, spec, wide(dtype)) * scale).to(dtype)


def over_batch(function, info, in_dims: tuple, arguments: tuple, full: int) -> tuple[Tensor, int]:
    """A vmap rule: `function` of arguments with the batch in front, and where its result has it.

    The first `full` tensors have all dimensions; the others broadcast to them. Dimensions of a spec count from the
    front, so they move by one.
    """
    rank = arguments[0].dim() - (in_dims[0] is not None)
    made = []
    for i, (a, d) in enumerate(zip(arguments, in_dims, strict=True)):
        if isinstance(a, Spec):
            a = a.changed(dims=tuple(d + 1 for d in a.dims))
        elif isinstance(a, Tensor):
            if d is not None:
                a = a.movedim(d, 0)
                a = a[(slice(None), *[None] * (rank + 1 - a.dim()))]
            elif i < full:
                a = a.expand(info.batch_size, *a.shape)
            if rank == 0:  # a row of one element
                a = a.unsqueeze(-1)
        made.append(a)
    result = function(*made)
    return (result.squeeze(-1) if rank == 0 else result), 0


# -- Operators ---------------------------------------------------------------------------------------------------------

_NUMBERS = "bool log, float factor, SymInt? causal, float alpha, bool zero"


def spec_of(dim, dtype, log, factor, causal, alpha, zero, online=True) -> Spec:
    return Spec(tuple(dim), dtype, log, factor, causal, alpha, zero, online)


@torch.library.custom_op(
    "cute_softmax::scores_softmax",
    mutates_args=(),
    schema="(Tensor input, Tensor? bias, Tensor? mask, Tensor? scale, SymInt[] dim, ScalarType dtype, "
    f"{_NUMBERS}, bool online) -> Tensor",
)
def scores_softmax(input, bias, mask, scale, dim, dtype, *numbers):
    spec = spec_of(dim, dtype, *numbers)
    if served(input, dtype, bias, scale):
        return forward(input, bias, mask, scale, spec)
    # A new tensor in the strides that the fake promises, whatever ATen's came out as.
    return torch.empty_like(input, dtype=dtype).copy_(formula(input, bias, mask, scale, spec))


@torch.library.custom_op(
    "cute_softmax::scores_softmax_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor output, Tensor? mask, Tensor? scale, SymInt[] dim, ScalarType dtype, "
    f"{_NUMBERS}) -> Tensor",
)
def scores_softmax_backward(grad, output, mask, scale, dim, dtype, *numbers):
    spec = spec_of(dim, output.dtype, *numbers)
    result = backward(grad, output, mask, scale, spec, dtype)
    expected = torch.empty_like(output, dtype=dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)


@scores_softmax.register_fake
def _(input, bias, mask, scale, dim, dtype, *numbers):
    return torch.empty_like(input, dtype=dtype)


@scores_softmax_backward.register_fake
def _(grad, output, mask, scale, dim, dtype, *numbers):
    return torch.empty_like(output, dtype=dtype)


def operator_gradient(grad, output, mask, scale, spec: Spec, dtype) -> Tensor:
    return scores_softmax_backward(
        grad, output, mask, scale, list(spec.dims), dtype, spec.log, spec.scale, spec.causal, spec.alpha,
        spec.zero,
    )  # fmt: skip


def _save(ctx, inputs, output):
    input, bias, mask, scale, dim, dtype, *numbers = inputs
    of_scale = scale is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(output, mask, scale, input if of_scale else None)
    ctx.spec = spec_of(dim, dtype, *numbers)
    ctx.shapes = (input.dtype, None, None) if bias is None else (input.dtype, bias.shape, bias.dtype)


def _gradients(ctx, grad):
    needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3))
    d = input_gradients(operator_gradient, grad, ctx.saved_tensors, ctx.shapes, needs, ctx.spec)
    return d[0], d[1], None, d[2], *[None] * 8


def _save_backward(ctx, inputs, output):
    grad, result, mask, scale, dim, _, *numbers = inputs
    ctx.save_for_backward(grad, result, mask, scale)
    ctx.spec = spec_of(dim, result.dtype, *numbers)


def _second_gradients(ctx, upstream):
    grad, output, mask, scale = ctx.saved_tensors
    to_scale = None
    if scale is not None:
        w = wide(upstream.dtype, scale.dtype)
        if ctx.needs_input_grad[3]:
            plain = operator_gradient(grad, output, mask, None, ctx.spec, w)
            to_scale = summed_to(upstream.to(w) * plain, scale.shape).to(scale.dtype)
        upstream = upstream.to(w) * scale
    d = second_gradients(operator_gradient, upstream, grad, output, mask, ctx.spec)
    return *d, None, to_scale, *[None] * 7


scores_softmax.register_autograd(_gradients, setup_context=_save)
scores_softmax_backward.register_autograd(_second_gradients, setup_context=_save_backward)


@scores_softmax.register_vmap
def _(info, in_dims, *arguments):
    return _operator_over_batch(scores_softmax, info, in_dims, arguments, 1)


@scores_softmax_backward.register_vmap
def _(info, in_dims, *arguments):
    return _operator_over_batch(scores_softmax_backward, info, in_dims, arguments, 2)


def _operator_over_batch(operator, info, in_dims, arguments, full):
    """The vmap rule of an operator whose fifth argument is `dim`."""

    def function(*tensors):
        return operator(*tensors, [d + 1 for d in arguments[4]], *arguments[5:])

    return over_batch(function, info, in_dims[:4], arguments[:4], full)


def operator(
    input: Tensor, bias: Tensor | None, mask: Tensor | None, scale: Tensor | None, spec: Spec
) -> Tensor:
    """The operator's result for a spec."""
    return scores_softmax(
        input, bias, mask, scale, list(spec.dims), spec.dtype, spec.log, spec.scale, spec.causal, spec.alpha,
        spec.zero, spec.online,
    )  # fmt: skip
