"""Public functions of the softmax family besides softmax itself: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from . import ops, routes, rules, scored, selective
from .arguments import FLOATS, check_tensor, checked_backward, float_dtype, given_dims
from .forms import Forms
from .scores import ScoreArguments, Spec, check_names, number, scores_of, with_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Forms of plain calls of log_softmax, as `functional` has those of softmax.
_forms = Forms()


@with_scores
def softmax_(
    input: torch.Tensor, dim: int | Sequence[int] = -1, **scores: Unpack[ScoreArguments]
) -> torch.Tensor:
    """`softmax` that overwrites its input, and returns it.

    Arguments as `softmax`. Autograd knows of it: gradients flow as through any other in-place operation, but a leaf
    that requires one is refused by torch, and so is (ValueError) a scale that does, as its gradient needs the input.
    """
    check_names("softmax_", scores)
    check_tensor("input", input, "softmax_")
    dims = given_dims(dim, input)
    if not input.dtype.is_floating_point:
        raise TypeError(f"input is {input.dtype}: softmax_ takes {', '.join(map(str, FLOATS))}")
    return routes.softmax_in_place(input, scores_of(input, dims, **scores), dims)


@with_scores
def log_softmax(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    **scores: Unpack[ScoreArguments],
) -> torch.Tensor:
    """``score - logsumexp(scores)`` over `dim`, as `torch.log_softmax`; of masked, scaled scores if asked.

    Arguments, devices and errors as `softmax`. What does not count is -inf and has a gradient of zero; with
    `empty_rows="zero"` (probabilities of zero) a row in which nothing counts is -inf throughout, with "nan" NaN.
    """
    eager = out is None and type(input) is torch.Tensor and not torch.compiler.is_compiling()
    if eager and not scores:
        form = _forms.latest
        if form is None or not (form.dim is dim and form.dtype is dtype and form.matches(input)):
            form = _forms.find(input, dim, dtype)
        if form is not None and forward_ad._current_level < 0:
            return _run(input, form)
    if eager and scores:
        form = scored.find(input, dim, dtype, True, True, scores)
        if form is not None and forward_ad._current_level < 0:
            return form(input, scores)
    check_names("log_softmax", scores)
    check_tensor("input", input, "log_softmax")
    dims = given_dims(dim, input)
    found = scores_of(input, dims, **scores)
    if eager and input.dtype.is_floating_point:
        result = float_dtype(input, dtype, "log_softmax")
        if scores:
            form = scored.made(input, dim, dtype, scores, found, found.spec(dims, result, True))
            if form is not None:
                return form(input, scores)
        elif type(dim) in (int, tuple) and rules.served(input, result) and routes.unseen(input):
            form = ops.Form(input, dims, result, True, log=True)
            form.dim, form.dtype = dim, dtype
            _forms.remember(input, form)
            return _run(input, form)
    return routes.softmax(input, found, dims, dtype, log=True, out=out)


def _run(input: torch.Tensor, form: ops.Form) -> torch.Tensor:
    if form.requires_grad and torch.is_grad_enabled():
        return ops.apply_softmax(input, form)
    return form.run(input)


def log_softmax_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of `log_softmax` with respect to its input: ``grad - exp(output) * sum(grad)``.

    Arguments and errors as `softmax_backward`.
    """
    dims, input_dtype = checked_backward("log_softmax_backward", grad, output, dim, input_dtype)
    return routes.gradient(grad, output, Spec(dims, output.dtype, log=True), input_dtype)


def entropy(logits: torch.Tensor, dim: int | Sequence[int] = -1) -> torch.Tensor:
    """The entropy ``-sum(p * log(p))`` of ``p = softmax(logits)`` over `dim`, in nats, without writing `p`.

    logits: as the input of `softmax`; the result has its dtype (float32 under autocast) and no reduced dimension.

    An element of -inf contributes 0. The logits are read once. Differentiable, twice as well. Errors as `softmax`.
    """
    check_tensor("logits", logits, "entropy")
    dims = given_dims(dim, logits)
    return selective.entropy(logits, dims, float_dtype(logits, None, "entropy"))


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float = 1.0,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log_softmax(logits * scale, -1).gather(-1, index)`` without the matrix of log-probabilities.

    logits: (..., N), as the input of `softmax`; the result has its dtype (float32 under autocast).
    index: integers from 0 to N - 1: (...) for one token of each row, or (..., K) for several.
    scale: a number, 1 / temperature.
    return_entropy: also return the entropy of each row, of shape (...), from the same pass over the logits.

    One read of the logits forward; backward reads them once more and writes their gradient, and nothing else of this
    size is allocated (the gradient of the entropy, where it is wanted, works through pieces of rows).

    Raises TypeError for an index that is no integer or a scale that is no number, and ValueError for an index that
    does not fit the logits; IndexError for one out of range on the CPU (on CUDA an error of the device).
    """
    check_tensor("logits", logits, "selective_log_softmax")
    dtype = float_dtype(logits, None, "selective_log_softmax")
    index = selective.checked_index(index, logits)
    scale = number("scale", scale)
    several = index.dim() == logits.dim()
    if not several:
        index = index.unsqueeze(-1)
    found, entropies = selective.log_softmax(logits, index, scale, return_entropy, dtype)
    found = found if several else found.squeeze(-1)
    return (found, entropies) if return_entropy else found
