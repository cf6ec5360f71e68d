"""Log-probabilities of chosen tokens and entropies in the fused form of TRL, written anew from its description.

TRL has a Triton kernel `selective_log_softmax_and_entropy` (huggingface/trl#7253, #7266): forward reads the logits
once, backward once more, and both gradients come out of one kernel. This is that form, not TRL's code: a program a row
that walks over blocks of it with a running maximum; float32 results; kept are the logsumexp and the entropy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def _forward(logits, tokens, logs, entropies, lses, stride, columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    top, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(at + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        p = tl.exp(x - new)
        correction = tl.exp(top - new)
        total = total * correction + tl.sum(p, 0)
        weighted = weighted * correction + tl.sum(tl.where(p > 0, p * x, 0.0), 0)
        top = new
    lse = top + tl.log(total)
    token = tl.load(tokens + row)
    tl.store(logs + row, tl.load(at + token).to(tl.float32) - lse)
    tl.store(entropies + row, lse - weighted / total)
    tl.store(lses + row, lse)


@triton.jit
def _backward(
    logits,
    tokens,
    entropies,
    lses,
    of_log,
    of_entropy,
    gradient,
    stride,
    columns: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lse, token = tl.load(lses + row), tl.load(tokens + row)
    entropy, g, h = tl.load(entropies + row), tl.load(of_log + row), tl.load(of_entropy + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        log = x - lse
        p = tl.exp(log)
        d = tl.where(column == token, g, 0.0) - g * p - h * tl.where(p > 0, p * (log + entropy), 0.0)
        tl.store(gradient + row * columns + column, d.to(gradient.dtype.element_ty), mask=column < columns)


class SelectiveAndEntropy(torch.autograd.Function):
    """(logits (rows, columns), tokens (rows)) -> their log-probabilities and the rows' entropies, float32."""

    @staticmethod
    def forward(ctx, logits, tokens):
        rows, columns = logits.shape
        logs, entropies, lses = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
        _forward[rows,](
            logits, tokens, logs, entropies, lses, logits.stride(0), columns, BLOCK=BLOCK, num_warps=WARPS
        )
        ctx.save_for_backward(logits, tokens, entropies, lses)
        return logs, entropies

    @staticmethod
    def backward(ctx, of_log, of_entropy):
        logits, tokens, entropies, lses = ctx.saved_tensors
        rows, columns = logits.shape
        gradient = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
        given = (t.float().contiguous() for t in (of_log, of_entropy))
        _backward[rows,](
            logits,
            tokens,
            entropies,
            lses,
            *given,
            gradient,
            logits.stride(0),
            columns,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        return gradient, None


def selective_log_softmax_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with gradients; of a matrix whose rows are contiguous."""
    return SelectiveAndEntropy.apply(logits, tokens)
