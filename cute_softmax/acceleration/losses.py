"""torch's cross entropy by ours: its result, or the reason why it is not served."""

from __future__ import annotations

import torch

from ..api.cross_entropy import cross_entropy
from ..dispatch.common.arguments import served
from ..dispatch.common.state import TENSORS
from ..plan import NotPlanned

NAME = "torch.nn.functional.cross_entropy"


def serve(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | str:
    """A call of `torch.nn.functional.cross_entropy`, whose own errors are left to it."""
    tensors = [input, target, *([] if weight is None else [weight])]
    if not all(type(t) in TENSORS for t in tensors):
        return "a subclass of tensors"
    if not served(input, input.dtype):
        return f"{input.dtype} on {input.device.type}"
    if size_average is not None or reduce is not None:
        return "size_average or reduce, which torch has deprecated"
    if target.dtype.is_floating_point or (label_smoothing and weight is not None):
        return "class probabilities, or label smoothing with a weight"
    if input.dim() > 2:
        return "classes that do not lie in the last dimension"
    fits = input.dim() and target.shape == input.shape[:-1] and target.device == input.device
    known = reduction in ("mean", "sum", "none") and (weight is None or weight.shape == input.shape[-1:])
    known = known and 0 <= label_smoothing <= 1
    if not (fits and known and input.numel()) or target.dtype not in (torch.int64, torch.int32):
        return "arguments that torch refuses, or nothing to do"
    try:
        return cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    except NotPlanned as reason:
        return str(reason)
