"""Probabilities to sample from, with FlashInfer's name and arguments."""

from __future__ import annotations

import math

import torch

from .api.softmax import softmax as _softmax
from .dispatch.common.arguments import check_tensor, column_of
from .dispatch.common.spec import number

__all__ = ["softmax"]


def softmax(
    logits: torch.Tensor,
    temperature: float | torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    greedy_at_zero: bool = False,
) -> torch.Tensor:
    """The probabilities of tokens at a temperature, `softmax(logits / temperature, -1)` in float32, like
    `flashinfer.sampling.softmax`.

    One read of the logits and one write of the probabilities. Rows sum to 1 within 2 units in the last place of 1 at
    every temperature from 0.001 to 1,000: the temperature is a factor in the exponentials' own products, which are
    rounded alike for all elements of a row. Within `batch_invariant` the bits depend on the row and its temperature
    alone. Differentiable, also with respect to the temperature.

    Args:
        logits: (..., N), a dense floating-point tensor.
        temperature: A number, or a tensor with one number per row: (...), or (..., 1). None is 1.
        enable_pdl: FlashInfer's hint that a kernel may be launched before the previous one has ended. Taken, and
            without effect: from sm_90 on kernels of few CTAs always are, and wait for its end.
        greedy_at_zero: A temperature of 0 selects the largest logit (the first of equal ones; NaN is larger than any):
            its probability is 1, all others are 0. If the temperature is a tensor, this takes one more read of the
            logits, and one more read and two more writes of the probabilities. Without it the number 0 is refused, and
            a 0 in a tensor gives a row of NaN, without synchronising with the device.

    Returns:
        A tensor of the shape of the logits, in float32 (float64 for float64 logits).

    Raises:
        TypeError: For logits that are not a dense, real floating-point tensor, and a temperature that is not a number.
        ValueError: For a number below 0, NaN, or 0 without `greedy_at_zero`; for a tensor of another shape or device.
        NotPlanned: As in `softmax`.

    Examples:
        >>> import torch
        >>> from cute_softmax import sampling
        >>> logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
        >>> sampling.softmax(logits, torch.tensor([1.0, 0.0]), greedy_at_zero=True)[1].tolist()
        [0.0, 1.0, 0.0]
    """
    check_tensor("logits", logits, "sampling.softmax")
    if not (logits.is_floating_point() and logits.dim()):
        raise TypeError(
            f"logits has dtype {logits.dtype} and {logits.dim()} dimensions: it needs floats, and a row of them"
        )
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    if temperature is None:
        return _softmax(logits, -1, dtype)
    if isinstance(temperature, torch.Tensor):
        return _of_rows(logits, column_of("temperature", temperature, logits), dtype, greedy_at_zero)
    temperature = number("temperature", temperature, "a number or a torch.Tensor")
    if math.isnan(temperature) or temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be at least 0")
    if temperature:
        return _softmax(logits, -1, dtype, scale=1 / temperature)
    if not greedy_at_zero:
        raise ValueError("temperature is 0: with greedy_at_zero=True that is the largest logit alone")
    best = logits.argmax(-1, keepdim=True)
    return torch.zeros_like(logits, dtype=dtype).scatter(-1, best, 1.0)


def _of_rows(
    logits: torch.Tensor, column: torch.Tensor, dtype: torch.dtype, greedy_at_zero: bool
) -> torch.Tensor:
    if not greedy_at_zero:
        return _softmax(logits, -1, dtype, scale=1 / column)
    zero = column == 0
    probabilities = _softmax(logits, -1, dtype, scale=1 / torch.where(zero, 1.0, column))
    best = logits.argmax(-1, keepdim=True)
    return probabilities.masked_fill(zero, 0.0).scatter_add(-1, best, zero.to(dtype))
