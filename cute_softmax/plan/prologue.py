"""What happens to a score before the softmax, and to its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prologue:
    """What happens to a score before the softmax, and to its result.

    Score = x * scale + bias, -inf where masked or beyond the diagonal. Result = alpha * softmax(score).
    """

    scale: str = ""
    bias: bool = False
    mask: bool = False
    causal: bool = False
    alpha: str = ""
    zero: bool = False
