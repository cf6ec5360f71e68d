"""Public functions of the softmax family besides softmax itself: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from ..dispatch import ops, routes, rules, scored, selective
from ..dispatch.arguments import FLOATS, check_tensor, checked_backward, float_dtype, given_dims
from ..dispatch.forms import Forms
from ..dispatch.scores import ScoreArguments, Spec, check_names, number, scores_of, with_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Forms of plain calls of log_softmax, as `functional` has those of softmax.
_forms = Forms()


@with_scores
def softmax_(
    input: torch.Tensor, dim: int | Sequence[int] = -1, **scores: Unpack[ScoreArguments]
) -> torch.Tensor:
    """Overwrite the input with its `softmax`, and return it.

    Autograd knows of it: gradients flow as through any other in-place operation. Torch refuses a leaf that requires
    one. What goes to ATen, and what NaN and -inf give, is as for `softmax`.

    Args:
        input: A dense floating-point tensor of any shape and strides.
        dim: The dimension or dimensions to reduce.
        scale: What the input is multiplied by: a number, or a tensor of one number per row, without a gradient.
        bias: A floating-point tensor that broadcasts to the input, added after the scale.
        mask: A boolean tensor that broadcasts to the input, True where an element counts.
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        alpha: A number that the result is multiplied by.
        empty_rows: What a row is in which nothing counts: "nan" or "zero".

    Returns:
        The input itself.

    Raises:
        TypeError: As for `softmax`, and for integers.
        IndexError: For a dimension out of range.
        ValueError: As for `softmax`, and for a scale that requires a gradient, which needs the input that is
            overwritten.
        NotPlanned: As for `softmax`.
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
    """The logarithm of the softmax over `dim`, `x - logsumexp(x)`, as `torch.log_softmax`.

    As for `softmax`, `x` is the input or scores made of it, and the same tensors run our kernels or go to ATen (those
    of the CPU, and float64 ones on any device). What a mask or the diagonal excludes is -inf and has a gradient of
    zero. With `empty_rows="zero"` (probabilities of zero) a row in which nothing counts is -inf throughout, with "nan"
    NaN. A NaN or +inf makes its row NaN. Differentiable as `softmax` is.

    Args:
        input: A dense real tensor of any shape and strides; integers need `dtype`.
        dim: The dimension or dimensions to reduce.
        dtype: Of the result. None: the input's, or float32 under autocast.
        out: A tensor of the input's shape to write to; may be the input itself. For calls without autograd.
        scale: What the input is multiplied by: a number, or a tensor of one number per row.
        bias: A floating-point tensor that broadcasts to the input, added after the scale.
        mask: A boolean tensor that broadcasts to the input, True where an element counts.
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        empty_rows: What a row is in which nothing counts: "nan" or "zero", see above.

    Returns:
        A tensor of the input's shape and memory format, or `out`.

    Raises:
        TypeError: As for `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As for `softmax`.
        NotPlanned: As for `softmax`.
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
    """The gradient of `log_softmax` with respect to its input: `grad - exp(output) * sum(grad)`.

    CUDA tensors of bfloat16, float16 and float32 run our kernels; CPU tensors, and float64 ones on any device, go to
    ATen. Differentiable.

    Args:
        grad: The gradient of the result, of its shape and on its device.
        output: The result of `log_softmax`, with a scale of 1.
        dim: The dimension or dimensions that were reduced.
        input_dtype: The dtype of the returned gradient. None: that of `output`.

    Returns:
        The gradient of the input, a tensor of the shape of `output`.

    Raises:
        TypeError: For what is not a dense real tensor of a floating-point dtype that is taken.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or none, and where `grad` and `output` differ in shape or device.
        NotPlanned: As for `softmax`.
    """
    dims, input_dtype = checked_backward("log_softmax_backward", grad, output, dim, input_dtype)
    return routes.gradient(grad, output, Spec(dims, output.dtype, log=True), input_dtype)


def entropy(logits: torch.Tensor, dim: int | Sequence[int] = -1) -> torch.Tensor:
    """The entropy over `dim` in nats, `-sum(p * log(p))` of `p = softmax(logits)`, without writing `p`.

    The logits are read once. An element of -inf contributes 0. Differentiable, twice as well. CPU tensors, and float64
    ones on any device, are computed by torch's operations.

    Args:
        logits: A dense floating-point tensor of any shape and strides.
        dim: The dimension or dimensions to reduce.

    Returns:
        A tensor without the reduced dimensions, of the dtype of the logits (float32 under autocast).

    Raises:
        TypeError: For what is not a dense, real floating-point tensor.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or none.
        NotPlanned: As for `softmax`.
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
    """The log-probabilities of chosen elements, `log_softmax(logits * scale, -1).gather(-1, index)`.

    The matrix of log-probabilities is not written. One read of the logits forward; backward reads them once more and
    writes their gradient, and nothing else of this size is allocated. (The gradient of the entropy, where it is wanted,
    works through pieces of rows.) CPU tensors, and float64 ones on any device, are computed by torch's operations.

    Args:
        logits: (..., N), a dense floating-point tensor.
        index: Integers from 0 to N - 1: (...) for one element of each row, or (..., K) for several.
        scale: A number that the logits are multiplied by, 1 / temperature.
        return_entropy: Also return the entropy of each row, in nats, from the same read of the logits.

    Returns:
        The log-probabilities in the shape of `index` and the dtype of the logits (float32 under autocast); with
        `return_entropy` a pair of them and the entropies, (...).

    Raises:
        TypeError: For logits that are not a dense, real floating-point tensor, an index that has no integer dtype and a
            scale that is no number.
        ValueError: For an index whose shape or device does not fit the logits.
        IndexError: For an index out of range on the CPU. On CUDA the kernel names the index and its row on standard
            output and stops, which CUDA reports at the next synchronization: as torch's assertions there, it ends the
            process's context. No memory beyond the row is read.
        NotPlanned: As for `softmax`.
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
