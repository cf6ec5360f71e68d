"""What an operation takes and what it must return: inputs on the device, and a check against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Largest error allowed, relative to the magnitude of an element's terms: in 16 bits two roundings of half a
# unit each; in fp32 there is room for approximate exponentials (peers: 8e-7).
TOLERANCE = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 1e-5}
# Half the distance of two neighbours near zero: what rounding costs where the type runs out of exponent.
_FLOOR = {"bf16": 0.0, "fp16": 2.0**-25, "fp32": 0.0}

# Elements checked at a time; float64 copies of them take 0.5 GiB each.
_PIECE = 1 << 26


class WrongResult(Exception):
    """A provider returned, but not what it should have."""


@dataclass(frozen=True)
class Operation:
    """`inputs(case, device)` makes the tensors of a call; `check(case, inputs, output)` returns the largest
    relative error against float64, or raises WrongResult."""

    inputs: Callable[[Case, torch.device], tuple[Tensor, ...]]
    check: Callable[[Case, tuple[Tensor, ...], Tensor], float]


def _normal(case: Case, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(case.shape, device=device, dtype=DTYPES[case.dtype], generator=generator)


def _pieces(tensors: tuple[Tensor, ...], dims: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Cuts all tensors alike along their longest dimension that is not reduced."""
    shape = tensors[0].shape
    reduced = {d % len(shape) for d in dims}
    kept = [d for d in range(len(shape)) if d not in reduced]
    if not kept:
        yield tensors
        return
    axis = max(kept, key=lambda d: shape[d])
    step = max(1, _PIECE * shape[axis] // max(1, tensors[0].numel()))
    for start in range(0, shape[axis], step):
        yield tuple(t.narrow(axis, start, min(step, shape[axis] - start)) for t in tensors)


def _same_form(case: Case, output: Tensor) -> None:
    if not isinstance(output, Tensor):
        raise WrongResult(f"wrong result: returned {type(output).__name__}, not a tensor")
    if tuple(output.shape) != case.shape or output.dtype != DTYPES[case.dtype]:
        raise WrongResult(f"wrong result: returned {tuple(output.shape)} {output.dtype}")


def _largest_error(got: Tensor, want: Tensor, scale: Tensor, dtype: str) -> float:
    error = ((got - want).abs() - _FLOOR[dtype]).clamp_min(0) / scale.clamp_min(1e-300)
    return error.max().item()


def _judge(case: Case, worst: float, output: Tensor) -> float:
    if worst != worst:
        count = int(torch.isnan(output).sum().item())
        raise WrongResult(f"wrong result: NaN in {count:,} of {output.numel():,} elements")
    if worst > TOLERANCE[case.dtype]:
        raise WrongResult(f"wrong result: relative error {worst:.2g} (at most {TOLERANCE[case.dtype]:.2g})")
    return worst


def _worst(errors: Iterator[float]) -> float:
    worst = 0.0
    for error in errors:
        if error != error:
            return error
        worst = max(worst, error)
    return worst


def _softmax64(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    exp = (x.double() - x.amax(dims, keepdim=True).double()).exp_()
    return exp.div_(exp.sum(dims, keepdim=True))


def _check_softmax(case: Case, inputs: tuple[Tensor, ...], y: Tensor) -> float:
    _same_form(case, y)

    def errors() -> Iterator[float]:
        for x_piece, y_piece in _pieces((inputs[0], y), case.dim):
            want = _softmax64(x_piece, case.dim)
            yield _largest_error(y_piece.double(), want, want, case.dtype)

    return _judge(case, _worst(errors()), y)


def _backward_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    x = _normal(case, device, seed=1)
    for (piece,) in _pieces((x,), case.dim):
        piece.copy_(_softmax64(piece, case.dim))
    return _normal(case, device, seed=2), x


def _check_softmax_backward(case: Case, inputs: tuple[Tensor, ...], dx: Tensor) -> float:
    """The error of dx = y (dy - sum(dy y)) relative to y (|dy| + sum |dy y|): what its terms amount to."""
    _same_form(case, dx)

    def errors() -> Iterator[float]:
        for dy_piece, y_piece, dx_piece in _pieces((*inputs, dx), case.dim):
            dy, y = dy_piece.double(), y_piece.double()
            product = dy * y
            want = y * (dy - product.sum(case.dim, keepdim=True))
            scale = y * (dy.abs() + product.abs().sum(case.dim, keepdim=True))
            yield _largest_error(dx_piece.double(), want, scale, case.dtype)

    return _judge(case, _worst(errors()), dx)


OPERATIONS: dict[str, Operation] = {
    "softmax": Operation(lambda case, device: (_normal(case, device, seed=1),), _check_softmax),
    "softmax_backward": Operation(_backward_inputs, _check_softmax_backward),
}
