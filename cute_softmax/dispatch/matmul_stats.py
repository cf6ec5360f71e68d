"""Row statistics for several products with the same scores: the public function and its operator."""

from __future__ import annotations

import torch

from ..api.softmax import check_tensor, transformed
from ..plan import NotPlanned
from ..runtime import launch
from . import routes, rules
from .scores import Spec, compose, number, scores_of, wide


def softmax_stats(
    scores: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool | int = False,
) -> torch.Tensor:
    """The logarithms of the rows' sums of exponentials, which `softmax_matmul` takes as `stats`.

    Found once, they serve several products with the same scores. One read of the scores. No gradient flows through them
    (that of `softmax_matmul` is whole all the same); a differentiable function is `logsumexp`. CPU tensors, and float64
    ones on any device, are computed by torch's operations.

    Args:
        scores: (..., N), a dense floating-point tensor.
        scale: A number that the scores are multiplied by.
        mask: A boolean tensor, True where a score counts. It may have dimensions that the scores lack or have with size
            1.
        bias: A floating-point tensor that is added after the scale; its dimensions as those of the mask.
        causal: True: score j of row i counts if `j <= i`; an int: if `j <= i + causal`.

    Returns:
        The logarithms, (...) in float32, or float64 for scores in float64; -inf for a row without a score that counts.

    Raises:
        TypeError: For what is not a dense, real floating-point tensor, a scale that is no number and a mask that is not
            boolean.
        ValueError: For scores without a dimension, and for a mask, bias or causal that does not fit them.
        NotPlanned: As for `softmax`.
    """
    check_tensor("scores", scores, "softmax_stats")
    if not scores.is_floating_point():
        raise TypeError(f"scores has dtype {scores.dtype}: softmax_stats takes floating-point tensors")
    if scores.dim() == 0:
        raise ValueError("scores have no dimension: softmax_stats needs rows of scores")
    given = [t for t in (mask, bias) if isinstance(t, torch.Tensor)]
    try:
        shape = torch.broadcast_shapes(scores.shape, *(t.shape for t in given))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(
            f"mask or bias {shapes} does not broadcast to scores {tuple(scores.shape)}"
        ) from None
    if shape[-1] != scores.shape[-1]:
        raise ValueError(f"mask or bias has {shape[-1]} columns, scores {scores.shape[-1]}")
    scores = scores.detach().expand(shape)
    bias = bias.detach() if isinstance(bias, torch.Tensor) else bias
    scale = number("scale", scale)
    found = scores_of(scores, (scores.dim() - 1,), scale=scale, mask=mask, bias=bias, causal=causal)
    arguments = scores, mask, bias, scale, found.causal
    if torch.compiler.is_compiling() or routes.watched(scores, mask, bias):
        return operator(*arguments)
    if transformed() or not rules.served(scores, torch.float32, bias):
        return formula(*arguments)
    return forward(*arguments)


def modified(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    """scale * scores + bias, -inf where it does not count, in float32 or more."""
    spec = Spec((scores.dim() - 1,), scores.dtype, scale=scale, causal=causal)
    return compose(scores, bias, mask, None, spec)


def formula(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    """In torch's operations."""
    return torch.logsumexp(modified(scores, mask, bias, scale, causal), -1)


def forward(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    """By our kernel, in float32."""
    result = torch.full(scores.shape[:-1], -float("inf"), dtype=torch.float32, device=scores.device)
    if not scores.numel():
        return result
    dims = (scores.dim() - 1,)
    spec = Spec(dims, torch.float32, scale=scale, causal=causal)
    prologue = rules.prologue_of(bias, mask, None, spec)
    operands = [t.expand(scores.shape) for t in (bias, mask) if t is not None]
    whole = result.unsqueeze(-1).expand(scores.shape)
    numbers = rules.numbers_of(prologue, spec, 1.0, scores.shape)
    query = None if causal is None else scores.dim() - 2
    try:
        launch.run(
            "logsumexp", (scores, *operands, whole), dims, prologue=prologue, numbers=numbers, query=query
        )
    except NotPlanned:
        if not prologue:
            raise
        launch.run("logsumexp", (compose(scores, bias, mask, None, spec), whole), dims)
    return result


@torch.library.custom_op("cute_softmax::softmax_stats", mutates_args=())
def operator(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
) -> torch.Tensor:
    function = forward if rules.served(scores, torch.float32, bias) else formula
    return function(scores, mask, bias, scale, causal)


@operator.register_fake
def _(scores, mask, bias, scale, causal):
    dtypes = [t.dtype for t in (scores, bias) if t is not None]
    return scores.new_empty(scores.shape[:-1], dtype=wide(*dtypes))
