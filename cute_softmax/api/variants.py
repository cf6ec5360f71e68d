"""Functions that are the softmax of other scores: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch.common.arguments import FLOATS, check_tensor, dim_named
from ..dispatch.common.spec import number
from .softmax import softmax


def softmin(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    axis: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """The softmax of the negated input, like `torch.nn.functional.softmin`: small elements have large probabilities.

    It is `softmax` with a scale of -1: no negated input is written, and dtypes, devices and gradients are as described
    there, as is what the bits depend on. -inf makes its row NaN, and a row of only +inf is NaN.

    Args:
        input: A dense real tensor of any shape and strides; integers need `dtype`.
        dim: The dimension or dimensions to reduce; None as in `softmax`.
        dtype: The dtype of the result. None: the input's, or float32 under autocast.
        out: A tensor to write to, as in `softmax`.
        axis: Another name for `dim`, as in torch.

    Returns:
        A tensor of the input's shape and memory format, or `out`.

    Raises:
        TypeError: As in `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As in `softmax`.
        NotPlanned: As in `softmax`.

    Examples:
        >>> import torch
        >>> from cute_softmax import softmin
        >>> softmin(torch.tensor([0.0, 0.0, torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    return softmax(input, dim_named("softmin", dim, axis, -1), dtype, out=out, scale=-1.0)


def gumbel_softmax(
    logits: torch.Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int | Sequence[int] = -1,
) -> torch.Tensor:
    """A sample of the Gumbel-softmax distribution, `softmax((logits + g) / tau)`, like
    `torch.nn.functional.gumbel_softmax`.

    The noise g, minus the logarithm of exponential random numbers in the dtype of the logits, is drawn like torch's:
    the same seed gives the same noise. It is added and scaled in float32 inside the softmax, whose bits, within
    `batch_invariant`, depend on the row and its noise alone; but the noise of a row depends on its position, as torch's
    does. Differentiable.

    Args:
        logits: A dense floating-point tensor of any shape and strides, of unnormalised log-probabilities.
        tau: The temperature, positive.
        hard: Return one-hot rows with the gradient of the sample (straight-through). For one dimension only.
        eps: Has no effect, as in torch.
        dim: The dimension or dimensions to reduce.

    Returns:
        A tensor of the shape and dtype of the logits, whose rows sum to 1.

    Raises:
        TypeError: For logits that are not a dense floating-point tensor, and a tau that is not a number.
        IndexError: For a dimension out of range.
        ValueError: For a tau that is not positive, and for `hard` over several dimensions.
        NotPlanned: As in `softmax`.
    """
    check_tensor("logits", logits, "gumbel_softmax")
    if logits.dtype not in FLOATS:
        raise TypeError(f"logits is {logits.dtype}: gumbel_softmax takes {', '.join(map(str, FLOATS))}")
    tau = number("tau", tau)
    if not tau > 0:
        raise ValueError(f"tau is {tau}: it must be positive")
    if hard and not isinstance(dim, int):
        raise ValueError(f"hard over dim={dim!r}: one-hot rows lie along one dimension")
    noise = torch.empty_like(logits, memory_format=torch.legacy_contiguous_format).exponential_().log().neg_()
    soft = softmax(logits, dim, logits.dtype, scale=1 / tau, bias=noise.div_(tau))
    if not hard:
        return soft
    index = soft.argmax(dim, keepdim=True)
    return torch.zeros_like(soft).scatter_(dim, index, 1.0) - soft.detach() + soft
