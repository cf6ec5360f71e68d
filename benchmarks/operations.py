"""What an operation takes and what it must return: inputs on the device, and a check against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import gradients, information, losses, masked, routers, sampling, selective
from .cases import AND_CAUSAL, GROUP_BIAS, ITEM_BYTES, REDUCTIONS, SLICE, TRANSPOSED, WITH_ENTROPY, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Largest error allowed, relative to the magnitude of an element's terms: in 16 bits two roundings of half a
# unit each; in fp32 there is room for approximate exponentials (peers: 8e-7).
TOLERANCE = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 1e-5}
# Eager torch rounds the input before it computes a narrower result: of a normal number, that many times as much.
_ROUNDED_FIRST = 4
# Half the distance of two neighbours near zero: what rounding costs where the type runs out of exponent.
_FLOOR = {"bf16": 0.0, "fp16": 2.0**-25, "fp32": 0.0}

# A value of a reduction may be off by roundings to its type (half a unit in the last place, as a share of what is
# rounded); what its error has beyond them must be small against the magnitude of the terms, whatever the type.
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
_REDUCTION_TOLERANCE = 1e-5

# Elements checked at a time; float64 copies of them take 0.5 GiB each.
_PIECE = 1 << 26


class WrongResult(Exception):
    """A provider returned, but not what it should have."""


@dataclass(frozen=True)
class Operation:
    """`inputs(case, device)` makes the tensors of a call; `check(case, inputs, output)` returns the largest
    relative error against float64 (of a reduction: beyond roundings), or raises WrongResult."""

    inputs: Callable[[Case, torch.device], tuple[Tensor, ...]]
    check: Callable[[Case, tuple[Tensor, ...], Tensor], float]


def _normal(case: Case, device: torch.device, seed: int) -> Tensor:
    """Random normal numbers, lying in memory as the case's view says."""
    *outer, columns = case.shape
    stored = {
        SLICE: (*outer, max(2 * (columns - 1), columns + 1)),
        TRANSPOSED: (*outer[:-1], columns, *outer[-1:]),
    }
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = stored.get(case.view, case.shape)
    x = torch.randn(shape, device=device, dtype=DTYPES[case.dtype], generator=generator)
    if case.view == SLICE:
        return x[..., 1 : columns + 1]
    return x.mT if case.view == TRANSPOSED else x


def _cut(tensors: tuple[Tensor, ...], axes: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    """Cuts all tensors alike along the longest of the axes, into pieces of `_PIECE` elements where that will do."""
    shape = tensors[0].shape
    if not axes:
        yield tensors
        return
    axis = max(axes, key=lambda d: shape[d])
    step = max(1, _PIECE * shape[axis] // max(1, tensors[0].numel()))
    for start in range(0, shape[axis], step):
        yield tuple(t.narrow(axis, start, min(step, shape[axis] - start)) for t in tensors)


def _pieces(dims: tuple[int, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Whole rows: cut along a dimension that is not reduced."""
    rank = tensors[0].dim()
    reduced = {d % rank for d in dims}
    return _cut(tensors, [d for d in range(rank) if d not in reduced])


def _chunks(dims: tuple[int, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of rows, cut along a reduced dimension: a single row may be longer than a piece."""
    rank = tensors[0].dim()
    return _cut(tensors, [d % rank for d in dims])


def _same_form(case: Case, output: Tensor) -> None:
    if not isinstance(output, Tensor):
        raise WrongResult(f"wrong result: returned {type(output).__name__}, not a tensor")
    if tuple(output.shape) != case.output_shape or output.dtype != DTYPES[case.result]:
        raise WrongResult(f"wrong result: returned {tuple(output.shape)} {output.dtype}")


def _largest_error(got: Tensor, want: Tensor, scale: Tensor, dtype: str) -> float:
    error = ((got - want).abs() - _FLOOR[dtype]).clamp_min(0) / scale.clamp_min(1e-300)
    return error.max().item()


def _judge(worst: float, output: Tensor, tolerance: float) -> float:
    if worst != worst:
        count = int(torch.isnan(output).sum().item())
        raise WrongResult(f"wrong result: NaN in {count:,} of {output.numel():,} elements")
    if worst > tolerance:
        raise WrongResult(f"wrong result: relative error {worst:.2g} (at most {tolerance:.2g})")
    return worst


def _tolerance(case: Case) -> float:
    narrower = ITEM_BYTES[case.result] < ITEM_BYTES[case.dtype]
    return TOLERANCE[case.result] * (_ROUNDED_FIRST if narrower else 1)


def _worst(errors: Iterator[float]) -> float:
    worst = 0.0
    for error in errors:
        if error != error:
            return error
        worst = max(worst, error)
    return worst


def _maximum_and_sum(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The maximum of each row and the sum of exp(x - maximum), in float64."""
    maximum = x.amax(dims, keepdim=True).double()
    return maximum, sum((c.double() - maximum).exp_().sum(dims, keepdim=True) for (c,) in _chunks(dims, x))


def _check_softmax(case: Case, inputs: tuple[Tensor, ...], y: Tensor) -> float:
    _same_form(case, y)

    def errors() -> Iterator[float]:
        for x_piece, y_piece in _pieces(case.dim, inputs[0], y):
            maximum, total = _maximum_and_sum(x_piece, case.dim)
            for x_chunk, y_chunk in _chunks(case.dim, x_piece, y_piece):
                want = (x_chunk.double() - maximum).exp_().div_(total)
                yield _largest_error(y_chunk.double(), want, want, case.result)

    return _judge(_worst(errors()), y, _tolerance(case))


def _check_masked_softmax(case: Case, inputs: tuple[Tensor, ...], y: Tensor) -> float:
    """Where a mask is False the result is 0, to the bit."""
    _same_form(case, y)
    x, *masks = inputs

    def errors() -> Iterator[float]:
        for x_piece, y_piece, *mask_piece in _pieces(case.dim, x, y, *masks):
            want = torch.softmax(masked.scores(case)(x_piece.double(), *mask_piece), case.dim[0])
            yield _largest_error(y_piece.double(), want, want, case.dtype)

    # Eager torch rounds the sum of a score and its bias: of one below 8 half a unit is 2 ** -6.
    return _judge(_worst(errors()), y, TOLERANCE[case.dtype] * (3 if case.mode == GROUP_BIAS else 1))


def _masked_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    beside = masked.beside(case, device)
    return (_normal(case, device, seed=1), *([] if beside is None else [beside]))


def _sampling_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    found = sampling.temperatures(case, device)
    return (_normal(case, device, seed=1), *([] if found is None else [found]))


def _check_sampling(case: Case, inputs: tuple[Tensor, ...], y: Tensor) -> float:
    _same_form(case, y)
    expected = sampling.called(case, sampling.expected)

    def errors() -> Iterator[float]:
        logits, *others = inputs
        for x, got, *columns in _pieces(case.dim, logits, y, *(t.unsqueeze(-1) for t in others)):
            want = expected(x, *(t.squeeze(-1) for t in columns))
            yield _largest_error(got.double(), want, want, case.result)

    return _judge(_worst(errors()), y, TOLERANCE[case.result])


def _check_log_softmax(case: Case, inputs: tuple[Tensor, ...], y: Tensor) -> float:
    """The error relative to ``1 + |y|``: of a logarithm it is absolute."""
    _same_form(case, y)

    def errors() -> Iterator[float]:
        for x_piece, y_piece in _pieces(case.dim, inputs[0], y):
            maximum, total = _maximum_and_sum(x_piece, case.dim)
            for x_chunk, y_chunk in _chunks(case.dim, x_piece, y_piece):
                want = x_chunk.double() - maximum - total.log()
                yield _largest_error(y_chunk.double(), want, 1 + want.abs(), case.result)

    return _judge(_worst(errors()), y, _tolerance(case))


def _log_backward_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    dy, y = _backward_inputs(case, device)
    for (piece,) in _pieces(case.dim, y):
        piece.log_()
    return dy, y


def _check_log_softmax_backward(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error of dx = dy - exp(y) sum(dy) relative to |dy| + exp(y) sum |dy|."""
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        for dy_piece, y_piece, dx_piece in _pieces(case.dim, *inputs, dx):
            dy, p = dy_piece.double(), y_piece.double().exp_()
            want = dy - p * dy.sum(case.dim, keepdim=True)
            scale = dy.abs() + p * dy.abs().sum(case.dim, keepdim=True)
            yield _largest_error(dx_piece.double(), want, scale, case.dtype)

    return _judge(_worst(errors()), dx, TOLERANCE[case.dtype])


def _backward_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    x = _normal(case, device, seed=1)
    for (piece,) in _pieces(case.dim, x):
        maximum, total = _maximum_and_sum(piece, case.dim)
        for (chunk,) in _chunks(case.dim, piece):
            chunk.copy_((chunk.double() - maximum).exp_().div_(total))
    return _normal(case, device, seed=2), x


def _check_softmax_backward(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error of dx = y (dy - sum(dy y)) relative to y (|dy| + sum |dy y|): what its terms amount to."""
    _same_form(case, dx)

    def products(dy: Tensor, y: Tensor) -> Iterator[Tensor]:
        return (a.double() * b.double() for a, b in _chunks(case.dim, dy, y))

    def errors() -> Iterator[float]:
        for dy_piece, y_piece, dx_piece in _pieces(case.dim, *inputs, dx):
            total = sum(p.sum(case.dim, keepdim=True) for p in products(dy_piece, y_piece))
            magnitude = sum(p.abs_().sum(case.dim, keepdim=True) for p in products(dy_piece, y_piece))
            for dy_chunk, y_chunk, dx_chunk in _chunks(case.dim, dy_piece, y_piece, dx_piece):
                dy, y = dy_chunk.double(), y_chunk.double()
                want, scale = y * (dy - total), y * (dy.abs() + magnitude)
                yield _largest_error(dx_chunk.double(), want, scale, case.dtype)

    return _judge(_worst(errors()), dx, TOLERANCE[case.dtype])


def _selective_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    logits = _normal(case, device, seed=1)
    upstream = _normal(Case(case.op, (*case.shape[:-1], 1), case.dtype), device, seed=2)
    return logits, selective.tokens_of(case, device), upstream.squeeze(-1)


def _check_selective(case: Case, inputs: tuple[Tensor, ...], found: Tensor) -> float:
    """The error relative to ``1 + |result|``, as of log_softmax; torch's entropy is a sum of rounded products."""
    _same_form(case, found)
    rounded = 8 if case.mode == WITH_ENTROPY else 1

    def errors() -> Iterator[float]:
        whole = (found.unsqueeze(-1), *(t.unsqueeze(-1) for t in inputs[1:]))
        for logits, got, tokens, _ in _pieces(case.dim, inputs[0], *whole):
            want = selective.expected(logits, tokens.squeeze(-1), case.mode)
            yield _largest_error(got.squeeze(-1).double(), want, rounded * (1 + want.abs()), case.dtype)

    return _judge(_worst(errors()), found, TOLERANCE[case.dtype])


def _check_selective_gradient(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error relative to that of the largest term: what comes in at the token, its share everywhere. The
    log-probability that torch keeps in 16 bits is off by half a unit of up to 16, and the share by as much.
    """
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        whole = (t.unsqueeze(-1) for t in inputs[1:])
        for logits, got, tokens, upstream in _pieces(case.dim, inputs[0], dx, *whole):
            chosen = tokens.squeeze(-1), upstream.squeeze(-1)
            want, scale = selective.expected_gradient(logits, *chosen, case.mode)
            yield _largest_error(got.double(), want, 16 * scale, case.dtype)

    return _judge(_worst(errors()), dx, TOLERANCE[case.dtype])


def _information_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    logits, target = (_normal(case, device, seed=seed) for seed in (1, 3))
    upstream = _normal(replace(case, shape=(*case.shape[:-1], 1)), device, seed=2)
    return logits, target if case.op.startswith("kl_div") else logits, upstream.squeeze(-1)


def _check_information(case: Case, inputs: tuple[Tensor, ...], found: Tensor) -> float:
    """The error relative to ``1 + |result|``; torch rounds each logarithm of a sum to 16 bits."""
    _same_form(case, found)

    def errors() -> Iterator[float]:
        kept = found if case.op == "topk_log_softmax" else found.unsqueeze(-1)
        for logits, target, got in _pieces(case.dim, *inputs[:2], kept):
            want = information.expected(case, logits, target).view(got.shape)
            yield _largest_error(got.double(), want, 4 * (1 + want.abs()), case.dtype)

    return _judge(_worst(errors()), found, TOLERANCE[case.dtype])


def _check_information_gradient(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error relative to what its terms amount to in a row at the most; as of `_check_selective_gradient`."""
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        logits, target, upstream = inputs
        for x, t, got, grad in _pieces(case.dim, logits, target, dx, upstream.unsqueeze(-1)):
            want, scale = information.expected_gradient(case, x, t, grad.squeeze(-1))
            yield _largest_error(got.double(), want, 16 * scale, case.dtype)

    return _judge(_worst(errors()), dx, TOLERANCE[case.dtype])


def _loss_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    return _normal(case, device, seed=1), selective.tokens_of(case, device)


def _check_loss(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error as of `_check_selective_gradient`."""
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        for logits, got, tokens in _pieces(case.dim, inputs[0], dx, inputs[1].unsqueeze(-1)):
            want = losses.expected(logits, tokens.squeeze(-1), len(inputs[0]), case.mode)
            terms = want.abs() + losses.evenly(case.mode) / want.shape[-1] / len(inputs[0])
            yield _largest_error(got.double(), want, 16 * terms, case.dtype)

    return _judge(_worst(errors()), dx, TOLERANCE[case.dtype])


def _router_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    upstream = _normal(replace(case, shape=(*case.shape[:-1], case.k)), device, seed=2)
    return routers.logits_of(case, DTYPES[case.dtype], device), upstream


def _check_router(case: Case, inputs: tuple[Tensor, ...], values: Tensor) -> float:
    _same_form(case, values)

    def errors() -> Iterator[float]:
        for logits, got in _pieces(case.dim, inputs[0], values):
            want, _ = routers.expected(case, logits)
            yield _largest_error(got.double(), want, want, case.dtype)

    return _judge(_worst(errors()), values, TOLERANCE[case.dtype])


def _check_router_gradient(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error relative to what its terms amount to; of probabilities that were rounded before twice as much."""
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        for logits, upstream, got in _pieces(case.dim, *inputs, dx):
            want, scale = routers.expected_gradient(case, logits, upstream)
            yield _largest_error(got.double(), want, scale, case.dtype)

    return _judge(_worst(errors()), dx, 2 * TOLERANCE[case.dtype])


class _Reduced(NamedTuple):
    """A reduction in float64, the magnitude of its terms, and the sum of what may be rounded on the way."""

    value: Tensor
    magnitude: Tensor
    rounded: Tensor


def _logsumexp64(x: Tensor, dims: tuple[int, ...]) -> _Reduced:
    maximum, total = _maximum_and_sum(x, dims)
    log = total.log()
    value = maximum + log
    # Eager torch rounds the differences, exponentials and their sum (2 of a logarithm), the logarithm and the value.
    return _Reduced(value, maximum.abs() + log, 2 + log + value.abs())


def _amax64(x: Tensor, dims: tuple[int, ...]) -> _Reduced:
    maximum = x.amax(dims, keepdim=True).double()
    return _Reduced(maximum, maximum.abs(), torch.zeros_like(maximum))


def _sum64(x: Tensor, dims: tuple[int, ...]) -> _Reduced:
    total = sum(c.double().sum(dims, keepdim=True) for (c,) in _chunks(dims, x))
    magnitude = sum(c.double().abs_().sum(dims, keepdim=True) for (c,) in _chunks(dims, x))
    return _Reduced(total, magnitude, total.abs())


_REDUCE64 = {"logsumexp": _logsumexp64, "amax": _amax64, "sum": _sum64}


def _check_reduction(case: Case, inputs: tuple[Tensor, ...], output: Tensor) -> float:
    _same_form(case, output)
    (x,) = inputs
    reduced = {d % x.dim() for d in case.dim}
    kept = output.reshape([1 if d in reduced else n for d, n in enumerate(x.shape)])

    def errors() -> Iterator[float]:
        for x_piece, got in _pieces(case.dim, x, kept):
            want = _REDUCE64[case.op](x_piece, case.dim)
            error = (got.double() - want.value).abs() - _ROUNDING[case.dtype] * want.rounded
            yield (error.clamp_min(0) / want.magnitude.clamp_min(1e-300)).max().item()

    return _judge(_worst(errors()), output, _REDUCTION_TOLERANCE)


def _product_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    *batch, _, columns = case.shape
    generator = torch.Generator(device=device).manual_seed(2)
    shape = (*batch, columns, case.depth)
    return _normal(case, device, seed=1), torch.randn(
        shape, device=device, dtype=DTYPES[case.dtype], generator=generator
    )


def _check_product(case: Case, inputs: tuple[Tensor, ...], output: Tensor) -> float:
    """The error relative to what the row's powers and the values' magnitudes add up to."""
    _same_form(case, output)
    scores, values = inputs

    def errors() -> Iterator[float]:
        for s, v, got in zip(scores, values, output, strict=True):
            x = s.double()
            if case.mode.endswith(AND_CAUSAL):
                x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf)
            powers = torch.softmax(x, -1)
            want, scale = powers @ v.double(), powers @ v.double().abs()
            yield _largest_error(got.double(), want, scale, case.dtype)

    return _judge(_worst(errors()), output, 2 * TOLERANCE[case.dtype])


def _gradient_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    grad = _normal(replace(case, shape=(*case.shape[:-1], case.depth)), device, seed=3)
    return (*_product_inputs(case, device), grad)


def _check_gradients(case: Case, inputs: tuple[Tensor, ...], output: gradients.Gradients) -> float:
    """The error relative to what the magnitudes of an element's terms add up to."""
    _same_form(case, output[0])
    if output[1].shape != inputs[1].shape or output[1].dtype != inputs[1].dtype:
        raise WrongResult(f"wrong result: returned {tuple(output[1].shape)} {output[1].dtype}")
    errors: list[list[float]] = [[], []]
    for scores, values, grad, *got in zip(*inputs, *output, strict=True):
        wanted = gradients.expected(case, scores, values, grad)
        for found, one, want, scale in zip(errors, got, *wanted, strict=True):
            found.append(_largest_error(one.double(), want, scale, case.dtype))
    tolerance = 2 * TOLERANCE[case.dtype]
    return max(_judge(_worst(iter(e)), o, tolerance) for e, o in zip(errors, output, strict=True))


def _one_input(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    return (_normal(case, device, seed=1),)


OPERATIONS: dict[str, Operation] = {
    "softmax": Operation(_one_input, _check_softmax),
    "softmax_backward": Operation(_backward_inputs, _check_softmax_backward),
    "log_softmax": Operation(_one_input, _check_log_softmax),
    "log_softmax_backward": Operation(_log_backward_inputs, _check_log_softmax_backward),
    "selective_log_softmax": Operation(_selective_inputs, _check_selective),
    "cross_entropy": Operation(_loss_inputs, _check_loss),
    "topk_softmax": Operation(_router_inputs, _check_router),
    "topk_gradient": Operation(_router_inputs, _check_router_gradient),
    "selective_gradient": Operation(_selective_inputs, _check_selective_gradient),
    **dict.fromkeys(
        ("entropy", "kl_div", "topk_log_softmax"), Operation(_information_inputs, _check_information)
    ),
    **dict.fromkeys(
        ("entropy_gradient", "kl_div_gradient"), Operation(_information_inputs, _check_information_gradient)
    ),
    "sampling": Operation(_sampling_inputs, _check_sampling),
    "masked_softmax": Operation(_masked_inputs, _check_masked_softmax),
    "softmax_matmul": Operation(_product_inputs, _check_product),
    "softmax_matmul_backward": Operation(_gradient_inputs, _check_gradients),
    **dict.fromkeys(REDUCTIONS, Operation(_one_input, _check_reduction)),
}
