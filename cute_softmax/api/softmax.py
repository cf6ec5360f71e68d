"""softmax and log_softmax: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..dispatch.common.arguments import (
    DTYPES,
    FLOATS,
    check_tensor,
    checked_backward,
    dim_named,
    float_dtype,
    given_dims,
    implicit_dim,
    out_dtype,
    served,
    torch_dtype,
)
from ..dispatch.common.forms import Forms
from ..dispatch.common.shards import Shard, is_shared
from ..dispatch.common.spec import (
    DEFAULTS,
    ScoreArguments,
    ShardArguments,
    Spec,
    check_names,
    differs,
    number,
    scores_of,
    with_scores,
)
from ..dispatch.softmax import calls
from ..dispatch.softmax.forms import Form, form_of
from ..plan import PanelPlan, Plan, ShortPlan, SweepPlan
from ..runtime import launch
from ..runtime.invariance import in_force, inside
from ..runtime.private import forward_ad

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Prepared",
    "log_softmax",
    "log_softmax_backward",
    "prepare",
    "softmax",
    "softmax_",
    "softmax_backward",
]

# The forms of eager calls whose scores are the input itself, and of the others.
_softmaxes, _log_softmaxes = Forms(), Forms()
_of_scores = {"softmax": Forms(), "log_softmax": Forms()}


@with_scores
def softmax(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    online: bool = True,
    **scores: Unpack[ScoreArguments],
) -> torch.Tensor:
    """The softmax over `dim`, `exp(x - max(x)) / sum(exp(x - max(x)))`, like `torch.softmax`.

    A *row* is the set of elements that are reduced together: those whose indices differ only in `dim`. With the
    arguments from `scale` on, `x` is not the input but the scores `input * scale + bias`, and -inf where `mask` or
    `causal` excludes an element. Scores are computed inside the kernel and never stored.

    CUDA tensors of bfloat16, float16 and float32 use our kernels, which compute in float32. CPU tensors go to ATen, and
    so do calls on any device in which the input, the result, the bias, the sink or a tensor scale is float64.

    A NaN or +inf makes its row NaN, and a row of only -inf is NaN, as in torch. The same call gives the same bits every
    time; within `batch_invariant` they depend on the row alone.

    Twice differentiable, in forward mode and under `torch.func`, too. Forward saves only its result for the backward
    pass, and the mask and the scale if given; also the input for the gradient of a tensor scale, and one number per row
    for that of a sink. Gradients flow to the input, to the bias and the sink (summed to their shapes) and to a tensor
    scale; those of masked elements are zero.

    Args:
        input: A dense real tensor of any shape and strides; integers need `dtype`. It is not changed.
        dim: The dimension or dimensions to reduce. None: torch's old rule, with its warning (0 for tensors of 0, 1 or 3
            dimensions, otherwise 1).
        dtype: The dtype of the result. None: the input's, or float32 under autocast.
        out: A tensor to write to; may be the input itself. A tensor of another shape is resized, with a warning unless
            it is empty. Without `dtype` its dtype is that of the result. For calls without autograd.
        online: How the threads of a row cooperate: True for one exchange of (maximum, sum) pairs, False for the maximum
            first and then the sum.
        scale: Multiplies the input (1 / temperature): a number, or a floating-point tensor that broadcasts to the input
            and has size 1 in the reduced dimensions, that is one number per row.
        bias: A floating-point tensor that broadcasts to the input, added after the scale.
        mask: A boolean tensor that broadcasts to the input, True where an element counts. Other elements have
            probability 0, whatever their values.
        causal: True: element j of row i (its index in dimension -2) counts if `j <= i`; an int: if `j <= i + causal`.
            For `dim=-1` only. The rest is not read.
        alpha: A number by which the result is multiplied.
        empty_rows: The result of rows in which no element counts, or whose scores are all -inf: "nan" as in torch, or
            "zero".
        sink: A floating-point tensor that broadcasts to the input and has size 1 in the reduced dimensions: an extra
            score for each row, or for all rows that share it (such as those of a head), that counts in the sum but has
            no result. Neither scale nor mask applies to it. A row in which no element counts is all 0; a sink of -inf
            has no effect and a gradient of 0.
        group: A torch.distributed.ProcessGroup over which rows are sharded: the input is this rank's slice of them
            along `dim`, and so is the result. For a single dimension, and of the score arguments only with a number as
            `scale`. A DTensor that is sharded over `dim` needs no group. Two numbers per row are gathered forward, one
            backward.
        vocab_start: The index in the row of this rank's first element; None: slices have equal lengths.
        vocab_size: The length of the row, if the last slices have padding after its end.
        axis: Another name for `dim`, as in torch.

    Returns:
        A tensor of the input's shape and memory format, or `out`.

    Raises:
        TypeError: For anything but a dense real tensor of a supported dtype, and for a mask that is not boolean.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, for an `out` of another dtype or device, for a scale,
            bias, mask, causal or empty_rows that does not fit the input, and on a GPU without kernels.
        NotPlanned: If more than five kept, or five reduced, dimensions do not merge in memory, and for 2^31 elements in
            a row.

    Examples:
        >>> import torch
        >>> from cute_softmax import softmax
        >>> softmax(torch.tensor([[0.0, 0.0, 9.0]]), mask=torch.tensor([True, True, False]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    if not (scores or out is not None or is_dynamo_compiling()):
        # The common eager call decides nothing: it finds its form (`Forms.repeated`, written out: two calls less),
        # allocates and launches.
        form = _softmaxes.latest.follower
        if form is None or not (
            form.dim is dim
            and form.dtype is dtype
            and form.online is online
            and form.invariant is inside()
            and form.matches(input)
        ):
            form = _softmaxes.find(input, dim, dtype, online, scores)
        if form is not None and forward_ad._current_level < 0:
            _softmaxes.latest = form
            if form.requires_grad and is_grad_enabled():
                return form.record(input)
            return form.run(input)
    return _decide("softmax", _softmaxes, input, dim, dtype, out, online, scores)


def _decide(
    name: str,
    plain: Forms,
    input: torch.Tensor,
    dim: int | Sequence[int],
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    online: bool,
    given: ScoreArguments,
) -> torch.Tensor:
    """The softmax or its logarithm of a call that is the first of its form, or has none: every check, any device."""
    eager = out is None and not torch.compiler.is_compiling()
    if "axis" in given:
        given = dict(given)
        dim = dim_named(name, dim, given.pop("axis"), -1)
    forms = _of_scores[name] if given else plain
    if eager and given and "group" not in given:
        form = forms.repeated(input, dim, dtype, online, given)
        if form is not None:
            return form(input, given)
    given = dict(given)
    shard = Shard(*(given.pop(key, None) for key in ShardArguments.__annotations__))
    check_names(name, given)
    check_tensor("input", input, name)
    if dim is None:
        dim = implicit_dim(name, input, stacklevel=4)  # the caller of softmax
    dims, result = given_dims(dim, input), float_dtype(input, dtype, name)
    if is_shared(input, dims, shard):
        return _of_shared_rows(name, input, dims, result, out, given, shard)
    if out is not None:
        result = out_dtype(out, input, dtype, result)
    operands, spec = scores_of(input, dims, result, name == "log_softmax", online, **given)
    if not input.dtype.is_floating_point:
        input = input.to(result)
    elif eager:
        form = form_of(input, dim, dtype, given, operands, spec)
        if form is not None:
            forms.remember(input, form)
            return form(input, given)
    if out is not None:
        return calls.into(out, input, operands, spec)
    *scored, sink = operands
    return calls.serve(input, *scored, spec, sink)


def _of_shared_rows(
    name: str,
    input: torch.Tensor,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.Tensor | None,
    given: ScoreArguments,
    shard: Shard,
) -> torch.Tensor:
    """The rank's slice of a call on rows that ranks share; of scores there is a number as scale."""
    others = [key for key, value in given.items() if key != "scale" and differs(value, DEFAULTS[key])]
    if out is not None or others:
        raise ValueError(f"{', '.join(others) or 'out'} of rows that ranks share: {name} takes a scale there")
    scale = number("scale", given.get("scale", 1.0))
    from ..dispatch.sharded.functions import softmax as of_shared_rows  # see `dispatch.common.shards`

    return of_shared_rows(input, dims, dtype, scale, name == "log_softmax", shard)


@with_scores
def log_softmax(
    input: torch.Tensor,
    dim: int | Sequence[int] | None = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    **scores: Unpack[ScoreArguments],
) -> torch.Tensor:
    """The logarithm of the softmax over `dim`, `x - logsumexp(x)`, like `torch.log_softmax`.

    As in `softmax`, `x` is the input or the scores computed from it, and the same tensors use our kernels or go to ATen
    (CPU tensors, and float64 tensors on any device). Elements excluded by `mask` or `causal` are -inf and have a zero
    gradient. A row in which no element counts is all -inf with `empty_rows="zero"` (probabilities of zero), and NaN
    with "nan". A NaN or +inf makes its row NaN. The bits depend on the same things as those of `softmax`; within
    `batch_invariant` they are those of `selective_log_softmax` in the input's dtype. Differentiable like `softmax`.

    Args:
        input: A dense real tensor of any shape and strides; integers need `dtype`.
        dim: The dimension or dimensions to reduce; None as in `softmax`.
        dtype: The dtype of the result. None: the input's, or float32 under autocast.
        out: A tensor to write to, as in `softmax`; may be the input itself. For calls without autograd.
        scale: Multiplies the input: a number, or a tensor with one number per row.
        bias: A floating-point tensor that broadcasts to the input, added after the scale.
        mask: A boolean tensor that broadcasts to the input, True where an element counts.
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        empty_rows: The result of rows in which no element counts: "nan" or "zero", see above.
        sink: An extra score per row, as in `softmax`; a row in which no element counts is all -inf.
        group: A ProcessGroup over which rows are sharded, as in `softmax`.
        vocab_start: As in `softmax`.
        vocab_size: As in `softmax`.
        axis: Another name for `dim`, as in torch.

    Returns:
        A tensor of the input's shape and memory format, or `out`.

    Raises:
        TypeError: As in `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As in `softmax`.
        NotPlanned: As in `softmax`.
    """
    if not (scores or out is not None or is_dynamo_compiling()):
        form = _log_softmaxes.latest.follower
        if form is None or not (
            form.dim is dim and form.dtype is dtype and form.invariant is inside() and form.matches(input)
        ):
            form = _log_softmaxes.find(input, dim, dtype, True, scores)
        if form is not None and forward_ad._current_level < 0:
            _log_softmaxes.latest = form
            if form.requires_grad and is_grad_enabled():
                return form.record(input)
            return form.run(input)
    return _decide("log_softmax", _log_softmaxes, input, dim, dtype, out, True, scores)


@with_scores
def softmax_(
    input: torch.Tensor, dim: int | Sequence[int] = -1, **scores: Unpack[ScoreArguments]
) -> torch.Tensor:
    """Overwrite the input with its `softmax`, and return it.

    Autograd treats it like any other in-place operation; torch refuses a leaf that requires a gradient. Calls that go
    to ATen, NaN, -inf, and what the bits depend on are as in `softmax`; within `batch_invariant` the bits are its, too.

    Args:
        input: A dense floating-point tensor of any shape and strides.
        dim: The dimension or dimensions to reduce.
        scale: Multiplies the input: a number, or a tensor with one number per row, without a gradient.
        bias: A floating-point tensor that broadcasts to the input, added after the scale.
        mask: A boolean tensor that broadcasts to the input, True where an element counts.
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        alpha: A number by which the result is multiplied.
        empty_rows: The result of rows in which no element counts: "nan" or "zero".
        sink: An extra score per row, as in `softmax`.
        axis: Another name for `dim`.

    Returns:
        The input itself.

    Raises:
        TypeError: As in `softmax`, and for integers.
        IndexError: For a dimension out of range.
        ValueError: As in `softmax`, and for a scale that requires a gradient, which would need the overwritten input.
        NotPlanned: As in `softmax`.
    """
    dim = dim_named("softmax_", dim, scores.pop("axis", None), -1)
    check_names("softmax_", scores)
    check_tensor("input", input, "softmax_")
    dims = given_dims(dim, input)
    if not input.dtype.is_floating_point:
        raise TypeError(f"input is {input.dtype}: softmax_ takes {', '.join(map(str, FLOATS))}")
    return calls.in_place(input, *scores_of(input, dims, float_dtype(input, input.dtype), **scores))


def softmax_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of `softmax` with respect to its input: `output * (grad - sum(grad * output))`.

    CUDA tensors of bfloat16, float16 and float32 use our kernels; CPU tensors, and float64 tensors on any device, go to
    ATen. Within `batch_invariant` the bits of a row depend on that row of both tensors alone. Differentiable.

    Args:
        grad: The gradient of the result, with its shape and on its device.
        output: The result of `softmax`, with a scale and an alpha of 1.
        dim: The dimension or dimensions that were reduced.
        input_dtype: The dtype of the returned gradient. None: that of `output`.

    Returns:
        The gradient of the input, a tensor of the shape of `output`.

    Raises:
        TypeError: For anything but a dense real tensor of a supported floating-point dtype.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, and if `grad` and `output` differ in shape or device.
        NotPlanned: As in `softmax`.
    """
    dims, input_dtype = checked_backward("softmax_backward", grad, output, dim, input_dtype)
    return calls.gradient(grad, output, Spec(dims, input_dtype, invariant=in_force()))


def log_softmax_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of `log_softmax` with respect to its input: `grad - exp(output) * sum(grad)`.

    CUDA tensors of bfloat16, float16 and float32 use our kernels; CPU tensors, and float64 tensors on any device, go to
    ATen. Within `batch_invariant` the bits of a row depend on that row of both tensors alone. Differentiable.

    Args:
        grad: The gradient of the result, with its shape and on its device.
        output: The result of `log_softmax`, with a scale of 1.
        dim: The dimension or dimensions that were reduced.
        input_dtype: The dtype of the returned gradient. None: that of `output`.

    Returns:
        The gradient of the input, a tensor of the shape of `output`.

    Raises:
        TypeError: For anything but a dense real tensor of a supported floating-point dtype.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, and if `grad` and `output` differ in shape or device.
        NotPlanned: As in `softmax`.
    """
    dims, input_dtype = checked_backward("log_softmax_backward", grad, output, dim, input_dtype)
    return calls.gradient(grad, output, Spec(dims, input_dtype, log=True, invariant=in_force()))


class Prepared:
    """`softmax` for tensors of one form, with every decision made: the result of `prepare`.

    Attributes:
        plan: How every call runs.
    """

    __slots__ = ("_run", "plan")

    def __init__(
        self, plan: Plan | ShortPlan | PanelPlan | SweepPlan, run: Callable[[torch.Tensor], torch.Tensor]
    ):
        self.plan = plan
        self._run = run

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream into a new tensor.

        Args:
            input: A tensor of the prepared shape, strides, dtype and device, which are not checked.

        Returns:
            Its softmax.
        """
        return self._run(input)


def prepare(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    online: bool = True,
) -> Prepared:
    """Plan, compile and load `softmax` for tensors like `input` now, so that a loop only allocates and launches.

    Call `step = prepare(x)` once, and then `y = step(x)` for each tensor of this form. No gradient is recorded. Within
    `batch_invariant` the plan is a batch-invariant one, and so is every later call of `step`, wherever that is.

    Args:
        input: A non-empty CUDA tensor of bfloat16, float16 or float32. The returned function takes tensors of this
            shape, strides, dtype and device, and does not check them.
        dim: The dimension or dimensions to reduce.
        dtype: The dtype of the result; the input's if None.
        online: As in `softmax`.

    Returns:
        A function of one tensor.

    Raises:
        TypeError: For anything but a dense real tensor.
        IndexError: For a dimension out of range.
        ValueError: For a repeated dimension or no dimension, and for tensors that go to ATen: empty tensors, and those
            with other devices or dtypes.
        NotPlanned: As in `softmax`.
    """
    check_tensor("input", input)
    dims, result_dtype = given_dims(dim, input), torch_dtype(dtype) or input.dtype
    if not served(input, result_dtype) or not input.numel():
        raise ValueError(
            f"input is a {input.dtype} tensor on {input.device} with {input.numel()} elements, the result "
            f"{result_dtype}: only non-empty CUDA tensors of {', '.join(map(str, DTYPES))} are prepared"
        )
    form = Form(input, dim, dtype, {}, *scores_of(input, dims, result_dtype, online=online))
    result = torch.empty_like(input, dtype=result_dtype)
    call = launch.call_of("softmax", (input, result), dims, online, aligned=True, invariant=form.invariant)
    return Prepared(call.plan, form.run)
