"""What parts of rows add up to: statistics that merge, for logits that come chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch

from ..dispatch.common.arguments import check_tensor, float_dtype, given_dims
from ..dispatch.common.spec import number
from ..dispatch.heads.calls import serve
from ..dispatch.heads.kernels import Rows
from ..runtime.invariance import in_force


class Statistics(NamedTuple):
    """The state of rows, or of parts of rows, which merges like the states of the kernels' threads, warps and CTAs.

    Attributes:
        max: The largest element; -inf for a part without elements.
        sum: The sum of `exp(x - max)`; 0 for a part with only -inf.
        weighted: The sum of `exp(x - max) * (x - max)`; None if it was not asked for.
    """

    max: torch.Tensor
    sum: torch.Tensor
    weighted: torch.Tensor | None = None

    @property
    def logsumexp(self) -> torch.Tensor:
        """The logarithm of the sum of exponentials."""
        return self.max + self.sum.log()

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy of the softmax in nats. Raises ValueError where `weighted` was not asked for."""
        if self.weighted is None:
            raise ValueError("an entropy needs weighted sums: ask for them with weighted=True")
        return self.sum.log() - self.weighted / self.sum


def partial_statistics(
    logits: torch.Tensor,
    dim: int | Sequence[int] = -1,
    *,
    scale: float = 1.0,
    weighted: bool = False,
) -> Statistics:
    """Compute the statistics of parts of rows, in one read of the logits.

    This is for losses that compute logits one chunk of the vocabulary at a time, so that never more than a chunk is in
    memory: `merge_statistics` combines the chunks' statistics into those of whole rows. Differentiable; gradients treat
    the maximum as a constant, which affects no quantity that is independent of how rows were split. Within
    `batch_invariant` the bits depend on the part of the row alone. CPU tensors, and float64 tensors on any device, use
    torch's operations.

    Args:
        logits: A dense floating-point tensor of any shape and strides; a part without elements gives statistics that
            change nothing when merged.
        dim: The dimension or dimensions along which rows were split.
        scale: A number by which the logits are multiplied, 1 / temperature.
        weighted: Whether to compute weighted sums, too, which entropies need.

    Returns:
        Tensors without the reduced dimensions, in float32 (float64 for float64 logits).

    Raises:
        TypeError: For anything but a dense, real floating-point tensor, and a scale that is not a number.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension.
        NotPlanned: As in `softmax`.

    Examples:
        >>> import torch, cute_softmax
        >>> x = torch.randn(4, 1000)
        >>> parts = [cute_softmax.partial_statistics(chunk) for chunk in x.split(300, -1)]
        >>> whole = cute_softmax.merge_statistics(parts)
        >>> torch.allclose(whole.logsumexp, torch.logsumexp(x, -1))
        True
    """
    check_tensor("logits", logits, "partial_statistics")
    float_dtype(logits, None, "partial_statistics")
    dims, scale = given_dims(dim, logits), number("scale", scale)
    rows = logits if logits.dim() else logits.unsqueeze(0)
    asked = Rows(dims, scale, "entropy" if weighted else "", in_force(), zero=True)
    _, top, log, entropy = serve(rows, None, asked)
    top, log = top.squeeze(dims), log.squeeze(dims)
    total = log.exp()
    top = torch.where(log == -torch.inf, -torch.inf, top.detach())
    if not weighted:
        return Statistics(top, total)
    # Of a part that has nothing the logarithm is infinite, and the sum 0.
    mean = torch.where(log == -torch.inf, 0.0, log) - entropy.squeeze(dims)
    return Statistics(top, total, torch.where(log == -torch.inf, 0.0, mean) * total)


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of parts of rows into those of whole rows, as the kernels merge those of threads.

    Parts are added in the given order, so the same parts give the same bits. A part with only -inf changes nothing; NaN
    in a part makes its row NaN. Differentiable.

    Args:
        parts: Results of `partial_statistics`, all with tensors of one shape. The result has weighted sums only if all
            parts have.

    Returns:
        The statistics of whole rows, which may in turn be parts of longer rows.

    Raises:
        TypeError: For parts that are no statistics.
        ValueError: If there is no part, and for parts of different shapes.
    """
    parts = [*parts]
    if wrong := [type(part).__name__ for part in parts if not isinstance(part, Statistics)]:
        raise TypeError(f"parts has {', '.join(wrong)}: they are those of partial_statistics")
    if not parts:
        raise ValueError("parts is empty: there must be one to begin with")
    if len({tuple(part.max.shape) for part in parts}) > 1:
        raise ValueError(
            f"parts have shapes {[tuple(part.max.shape) for part in parts]}: they are of the same rows"
        )
    tops = torch.stack([part.max for part in parts]).detach()
    top = tops.amax(0)
    # The difference of equal infinities would be NaN.
    fallen = torch.where(tops == top, 0.0, tops - top)
    factors = fallen.exp()

    def in_order(numbers: torch.Tensor) -> torch.Tensor:
        return reduce(torch.add, numbers.unbind(0))

    sums = torch.stack([part.sum for part in parts])
    total = in_order(sums * factors)
    if any(part.weighted is None for part in parts):
        return Statistics(top, total)
    # What has fallen without end weighs nothing.
    fallen = torch.where(factors == 0, 0.0, fallen)
    weighted = torch.stack([part.weighted for part in parts])
    return Statistics(top, total, in_order((weighted + sums * fallen) * factors))
