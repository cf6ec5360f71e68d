"""Masked and scaled softmax as an operation: its modes, inputs, check, and the callables of the providers.

`y = softmax(x * SCALE)` with what the mode masks at -inf. Modes name what a mask is broadcast over. Of one group, which
all others share, the mask or the bias is alone: without a scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cases import BATCH_MASK, CAUSAL, GROUP_BIAS, GROUP_MASK, MASK, ROW_MASK, SCALED, SHARED_MASK, Case

SCALE = 0.125
KEPT = 0.8  # the share of True in a mask

Call = Callable[..., Tensor]


def held(case: Case) -> tuple[int, ...] | None:
    """The shape of a case's mask or bias before it is broadcast; None where there is none."""
    *outer, queries, columns = case.shape
    if case.mode in (SCALED, CAUSAL):
        return None
    reduced = [d % len(case.shape) for d in case.dim]
    group = tuple(n if d in reduced else 1 for d, n in enumerate(case.shape))
    return {
        MASK: case.shape,
        ROW_MASK: (columns,),
        SHARED_MASK: (queries, columns),
        BATCH_MASK: (*outer[:1], *[1] * (len(outer) - 1), queries, columns),
        GROUP_MASK: group,
        GROUP_BIAS: group,
    }[case.mode]


def beside(case: Case, device: torch.device) -> Tensor | None:
    """The mask of a case, True = keep, or its bias, expanded to its shape by strides of 0; None for a scale alone."""
    queries, columns = case.shape[-2:]
    if case.mode == SCALED:
        return None
    if case.mode == CAUSAL:
        return torch.ones(queries, columns, dtype=torch.bool, device=device).tril().expand(case.shape)
    generator = torch.Generator(device=device).manual_seed(3)
    if case.mode == GROUP_BIAS:
        return torch.randn(held(case), device=device, generator=generator).bfloat16().expand(case.shape)
    mask = torch.rand(held(case), device=device, generator=generator) < KEPT
    mask.select(case.dim[0], 0).fill_(True)  # no group is empty
    return mask.expand(case.shape)


def scores(case: Case) -> Call:
    """As torch's users write them."""

    def scaled(x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if case.mode == GROUP_MASK else x * SCALE
        return x if mask is None else x.masked_fill(mask.logical_not(), -torch.inf)

    return torch.add if case.mode == GROUP_BIAS else scaled


def ours(case: Case) -> Call:
    """As our users write it."""
    from cute_softmax import softmax

    (dim,) = case.dim
    if case.mode == GROUP_BIAS:
        return lambda x, bias: softmax(x, dim, bias=bias)
    if case.mode == GROUP_MASK:
        return lambda x, mask: softmax(x, dim, mask=mask)
    if case.mode == CAUSAL:
        return lambda x, mask: softmax(x, dim, scale=SCALE, causal=True)
    return lambda x, mask=None: softmax(x, dim, scale=SCALE, mask=mask)


def copied(case: Case) -> Call:
    """The same bytes: what a causal mask hides is not read."""
    if case.mode == SCALED:
        return lambda x: torch.empty_like(x).copy_(x)
    if case.mode == CAUSAL:
        return lambda x, mask: torch.tril(x)
    if case.mode == GROUP_BIAS:
        return torch.add
    return lambda x, mask: torch.where(mask, x, x)
