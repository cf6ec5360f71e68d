"""Masked and scaled softmax as an operation: its modes, inputs, check, and the callables of the providers.

`y = softmax(x * SCALE)` with what the mode masks at -inf. Modes name what a mask is broadcast over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import BATCH_MASK, CAUSAL, MASK, ROW_MASK, SCALED, SHARED_MASK, Case

SCALE = 0.125
KEPT = 0.8  # the share of True in a mask

Call = Callable[..., Tensor]


def mask_of(case: Case, device: torch.device) -> Tensor | None:
    """The mask of a case, True = keep, expanded to its shape by strides of 0; None for a scale alone."""
    *outer, queries, columns = case.shape
    if case.mode == SCALED:
        return None
    if case.mode == CAUSAL:
        return torch.ones(queries, columns, dtype=torch.bool, device=device).tril().expand(case.shape)
    held = {
        MASK: case.shape,
        ROW_MASK: (columns,),
        SHARED_MASK: (queries, columns),
        BATCH_MASK: (*outer[:1], *[1] * (len(outer) - 1), queries, columns),
    }[case.mode]
    generator = torch.Generator(device=device).manual_seed(3)
    mask = torch.rand(held, device=device, generator=generator) < KEPT
    mask[..., 0] = True  # no row is empty
    return mask.expand(case.shape)


def scores(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """As torch's users write them."""
    scaled = x * SCALE
    return scaled if mask is None else scaled.masked_fill(mask.logical_not(), -torch.inf)


def ours(case: Case) -> Call:
    """As our users write it."""
    from cute_softmax import softmax

    if case.mode == CAUSAL:
        return lambda x, mask: softmax(x, scale=SCALE, causal=True)
    return lambda x, mask=None: softmax(x, scale=SCALE, mask=mask)


def copied(case: Case) -> Call:
    """The same bytes: what a causal mask hides is not read."""
    if case.mode == SCALED:
        return lambda x: torch.empty_like(x).copy_(x)
    if case.mode == CAUSAL:
        return lambda x, mask: torch.tril(x)
    return lambda x, mask: torch.where(mask, x, x)
