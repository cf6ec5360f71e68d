"""The public functions: what they mean, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from . import launch, ops, routes, rules, scored
from .arguments import (
    check_memory,
    check_out,
    check_tensor,
    checked_backward,
    float_dtype,
    given_dims,
    out_dtype,
)
from .forms import Forms
from .ops import transformed
from .plan import PanelPlan, Plan
from .plans import explain, plan_softmax
from .scores import ScoreArguments, Spec, check_names, scores_of, with_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Prepared", "explain", "plan_softmax", "prepare", "softmax", "softmax_backward"]

# Of eager calls on plain scores.
_forms = Forms()


@with_scores
def softmax(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    online: bool = True,
    **scores: Unpack[ScoreArguments],
) -> torch.Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over `dim`, as `torch.softmax`; of masked, scaled scores if asked.

    input: a tensor of any shape, bfloat16, float16 or float32, on a CUDA device. Arithmetic is float32 inside.
    dim: the dimension or dimensions to reduce.
    dtype: of the result; the input's if None. Integer inputs need it.
    out: a tensor of the input's shape to write to; may be the input itself.
    online: one exchange of (max, sum) pairs between the threads of a row; False takes the maximum first, then the
        sum.
    scale: what scores are multiplied by (1 / temperature): a number, or a tensor that broadcasts to the input and has
        size 1 in the reduced dimensions, so one number per row.
    bias: a tensor of floats that broadcasts to the input, added after the scale.
    mask: a boolean tensor that broadcasts to the input, True where an element counts. Others have probability 0.
    causal: True: element j of row i (the dimension before the last) counts if ``j <= i``; an int: if
        ``j <= i + causal``. For `dim=-1` only.
    alpha: a factor on the result.
    empty_rows: what a row is in which nothing counts, or whose scores are all -inf: "nan" as in torch, or "zero".

    A NaN or +inf makes its row NaN, and so does a row of nothing but -inf, as in torch. The same call gives the same
    bits every time. Forward saves only its result for the backward, and mask and scale where they are given. Gradients
    go to the input, the bias (summed to its shape) and a tensor scale; masked elements have zero. CPU and float64
    tensors go to ATen.

    Raises TypeError for what is not a real, dense tensor, and for a mask that is not boolean; IndexError for a
    dimension out of range; ValueError for a repeated dimension, for an `out` that does not fit, and for scale, bias,
    mask, causal or empty_rows that do not; `plan.NotPlanned` (a NotImplementedError and a ValueError) for
    more than five dimensions that do not merge, and for 2^31 elements in a group.
    """
    if scores or torch.compiler.is_compiling():
        return _scored(input, dim, dtype, out, online, scores)
    if out is None and type(input) is torch.Tensor:
        # The common eager call decides nothing: it finds its form (`fits`, written out: a call less), allocates and
        # launches.
        form = _forms.latest
        if form is None or not (
            form.dim is dim and form.dtype is dtype and form.online is online and form.matches(input)
        ):
            form = _forms.find(input, dim, dtype, online)
        if form is not None and forward_ad._current_level < 0:
            if form.requires_grad and torch.is_grad_enabled():
                return ops.apply_softmax(input, form)
            return form.run(input)
    return _softmax(input, dim, dtype, out, online)


def _scored(
    input: torch.Tensor,
    dim: int | Sequence[int],
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    online: bool,
    scores: ScoreArguments,
) -> torch.Tensor:
    """`softmax` of scores that may be other than the input."""
    eager = out is None and type(input) is torch.Tensor and not torch.compiler.is_compiling()
    if eager:
        form = scored.find(input, dim, dtype, online, False, scores)
        if form is not None and forward_ad._current_level < 0:
            return form(input, scores)
    check_names("softmax", scores)
    check_tensor("input", input)
    dims = given_dims(dim, input)
    found = scores_of(input, dims, **scores)
    if eager and input.dtype.is_floating_point:
        spec = found.spec(dims, float_dtype(input, dtype), False, online)
        form = scored.made(input, dim, dtype, scores, found, spec)
        if form is not None:
            return form(input, scores)
    if found.plain:
        return _softmax(input, dim, dtype, out, online)
    return routes.softmax(input, found, dims, dtype, out=out, online=online)


def _softmax(
    input: torch.Tensor,
    dim: int | Sequence[int],
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    online: bool,
) -> torch.Tensor:
    """The whole of `softmax`: every check, any device."""
    check_tensor("input", input)
    dims = given_dims(dim, input)
    asked = dtype
    result_dtype = float_dtype(input, dtype)
    source = input
    if not input.dtype.is_floating_point:
        input = input.to(dtype)
    if out is not None:
        return _softmax_out(input, dims, out_dtype(out, source, dtype, result_dtype), out, online)
    if not ops.on_kernel(input, result_dtype):
        return ops.aten_softmax(input, dims, result_dtype)
    if torch.compiler.is_compiling():
        return ops.softmax(input, list(dims), result_dtype, online)
    if transformed():
        return rules.Forward.apply(input, None, None, None, Spec(dims, result_dtype, online=online))
    if type(input) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0:
        return ops.softmax(input, list(dims), result_dtype, online)
    form = ops.Form(input, dims, result_dtype, online)
    if type(dim) in (int, tuple) and source is input:
        form.dim, form.dtype = dim, asked
        _forms.remember(input, form)
    if input.requires_grad and torch.is_grad_enabled():
        return ops.apply_softmax(input, form)
    return form.run(input)


def _softmax_out(
    input: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor, online: bool
) -> torch.Tensor:
    check_out(out, input.shape, dtype, input.device, (input,))
    if torch.compiler.is_compiling():
        return out.copy_(ops.softmax(input, list(dims), out.dtype, online))
    if not ops.on_kernel(input, out.dtype):
        return out.copy_(ops.aten_softmax(input, dims, out.dtype))
    check_memory(out, input)
    if input.numel():
        launch.run("softmax", (input, out), dims, online)
    return out


def softmax_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of `softmax` with respect to its input: ``output * (grad - sum(grad * output))``.

    grad: the gradient of the result, `output`: the result; of one shape and device.
    input_dtype: the dtype of the returned gradient; output's if None.

    Raises as `softmax`, and ValueError where grad and output do not fit each other.
    """
    dims, input_dtype = checked_backward("softmax_backward", grad, output, dim, input_dtype)
    if not torch.compiler.is_compiling() and transformed():
        return rules.Gradient.apply(grad, output, None, Spec(dims, output.dtype), input_dtype)
    return ops.differentiable_backward(grad, output, dims, input_dtype)


class Prepared:
    """`softmax` of tensors of one form, with every decision made; see `prepare`.

    plan: its Plan. Calling it with a tensor of this form launches into a new tensor and returns that.
    """

    __slots__ = ("_run", "plan")

    def __init__(self, plan: Plan | PanelPlan, run: Callable[[torch.Tensor], torch.Tensor]):
        self.plan, self._run = plan, run

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._run(input)


def prepare(
    input: torch.Tensor,
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    *,
    online: bool = True,
) -> Prepared:
    """`softmax` for tensors like `input`, planned, compiled and loaded now: a loop then only allocates and launches.

    input: a non-empty CUDA tensor, bfloat16, float16 or float32; its shape, strides, dtype and device are what the
    returned function takes, without a check. Other arguments as `softmax`. No gradient is recorded.

    >>> step = prepare(x)
    >>> y = step(x)

    Raises as `softmax`, and ValueError for tensors that go to ATen.
    """
    check_tensor("input", input)
    dims, result_dtype = given_dims(dim, input), dtype or input.dtype
    if not ops.on_kernel(input, result_dtype) or not input.numel():
        raise ValueError(
            f"input is a {input.dtype} tensor on {input.device} with {input.numel()} elements, the result "
            f"{result_dtype}: only non-empty CUDA tensors of {', '.join(map(str, launch.DTYPE_NAMES))} are prepared"
        )
    form = ops.Form(input, dims, result_dtype, online)
    result = torch.empty_like(input, dtype=result_dtype)
    return Prepared(launch.call_of("softmax", (input, result), dims, online, aligned=True).plan, form.run)
