"""Functions of numbers of each row, in every state of torch: entropies, log-probabilities of chosen elements.

`Statistics` gives the numbers, and its gradient is composed of theirs; both are an autograd function and an operator
(`common/operators.py`). A head is what a function makes of the numbers, one of
`HEADS`. Calls that repeat: see `forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...runtime.invariance import in_force
from ..common.arguments import served
from ..common.forms import Forms
from ..common.formulas import INF, shape_of_rows, wide
from ..common.operators import Function, operator_of, ways_of
from ..common.spec import number
from ..common.state import Ways, batched, jvp_rule, transformed, watched
from .kernels import (
    Rows,
    at_chosen,
    found_at,
    gradient_in_one,
    gradient_of_rows,
    invariant_sum,
    log_probabilities,
    product,
    statistics,
    statistics_formula,
)

Tensor = torch.Tensor


class Statistics(Function):
    """(input, index or None, rows) -> (log-probabilities at the index, max, log, what `rows` asks for beside them),
    float32.

    What is not asked for is an empty tensor. To derivatives the maximum is a constant, so that log has those of the
    logsumexp. Keeps the input and the numbers of each row.
    """

    full = 2

    @staticmethod
    def forward(input, index, rows):
        if not on_kernel(input):
            top, log, *rest = statistics_formula(input, rows)
            found = None if index is None else found_at(input, index, rows, top, log)
        elif index is None or index.shape[-1] == 0:
            top, log, *rest = statistics(input, rows)
            found = None if index is None else log.new_empty(index.shape)
        else:
            found, top, log, *rest = statistics(input, rows, index[..., :1])
            if index.shape[-1] > 1:
                found = found_at(input, index, rows, top, log)
        nothing = log.new_empty(0)
        return nothing if found is None else found, top, log, rest[0] if rest else nothing.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, index, ctx.rows = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, index, *output)
        if transformed():
            ctx.save_for_forward(input, index, *output)

    @staticmethod
    def backward(ctx, grad, _, of_lse, of_beside):
        return gradient_of(*ctx.saved_tensors, grad, of_lse, of_beside, ctx.rows), None, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, *_):
        input, index, _, top, log, beside = saved
        rows, dims = ctx.rows, ctx.rows.dims
        s = rows.scores(input)
        t = tangent.to(log.dtype) * rows.slope(s)
        log_p = log_probabilities(s, top, log, rows)
        p = log_p.exp()
        of_lse = (p * t).sum(dims, keepdim=True)
        of_found = log.new_empty(0) if index is None else t.gather(-1, index) - of_lse
        if rows.beside == "entropy":
            of_beside = -(product(p, log_p + beside) * t).sum(dims, keepdim=True)
        else:
            of_beside = t.mean(dims, keepdim=True) - of_lse if rows.beside else torch.zeros_like(beside)
        return of_found, None, of_lse, of_beside


class Gradient(Function):
    """(input, index, found, max, log, what is beside them, upstream gradients of found, log and that, rows) -> the
    gradient of the input, in one new tensor of its size.

    The gradient of log is that of the logsumexp, beside what the log-probabilities pass on to it.
    """

    full = 9

    @staticmethod
    def forward(input, index, found, top, log, beside, grad, of_lse, of_beside, rows):
        call = input, index, found, top, log, beside, grad, of_lse, of_beside, rows
        grad, of_beside = _asked(index, grad, of_beside, rows)
        if grad is None and of_lse is None and of_beside is None:
            return torch.zeros_like(input)
        if not on_kernel(input) or batched(grad, of_lse, of_beside):
            return gradient_formula(*call)
        if rows.zero and of_beside is not None:  # of rows of nothing it is NaN
            beside = beside.masked_fill(log == -INF, 0.0)
        beyond = rows.softcap or rows.beside == "even"
        if beyond if grad is None else index.shape[-1] == 1:
            result = gradient_in_one(input, rows, grad, of_lse, of_beside, index, found, beside)
            if result is not None:
                return result
        if beyond:
            return gradient_formula(*call)
        total = _total(grad, of_lse, log.dtype, rows.invariant)
        result = gradient_of_rows(input, rows, top, log, beside, total, of_beside)
        if grad is None:
            return result
        values = at_chosen(index, found, grad.to(log.dtype), total)
        if of_beside is not None:
            values = values - of_beside * product(found.exp(), found + beside)
        return result.scatter_(-1, index, (values * rows.scale).to(result.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.rows = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, upstream):
        """By autograd of the formula. What the numbers of the rows change is in the gradient of the input."""
        input, index, *others = ctx.saved_tensors
        numbers, grads = others[:4], others[4:]
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in (input, *grads)]
            d = gradient_formula(leaves[0], index, *numbers, *leaves[1:], ctx.rows)
            used = [t for t in leaves if t is not None]
            found = iter(torch.autograd.grad(d, used, upstream, allow_unused=True))
        of_input, *of_grads = (None if t is None else next(found) for t in leaves)
        return of_input, *[None] * 5, *of_grads, None


def on_kernel(input: Tensor) -> bool:
    """Whether our kernels serve it; torch's operations do all else."""
    return served(input, torch.float32) and input.numel() > 0


def _asked(index, grad, of_beside, rows: Rows) -> tuple[Tensor | None, Tensor | None]:
    """Upstream gradients of what there is; those of an empty tensor that stands for nothing are none."""
    return grad if index is not None else None, of_beside if rows.beside else None


def _total(
    grad: Tensor | None, of_lse: Tensor | None, dtype: torch.dtype, invariant: bool = False
) -> Tensor | None:
    """The gradient of the logsumexp, with what the log-probabilities pass on to it."""
    if grad is None:
        return of_lse
    # torch adds in another order where there are more rows.
    total = -(invariant_sum if invariant else _last)(grad.to(dtype))
    return total if of_lse is None else total + of_lse


def _last(tensor: Tensor) -> Tensor:
    return tensor.sum(-1, keepdim=True)


def gradient_formula(
    input, index, found, top, log, beside, grad, of_lse, of_beside, rows: Rows
) -> Tensor | None:
    """`Gradient` in torch's operations, differentiable; None where nothing comes in."""
    grad, of_beside = _asked(index, grad, of_beside, rows)
    if grad is None and of_lse is None and of_beside is None:
        return None
    total = _total(grad, of_lse, log.dtype)
    top, log, *rest = statistics_formula(input, rows)
    s = rows.scores(input)
    log_p = log_probabilities(s, top, log, rows)
    p = log_p.exp()
    d = torch.zeros_like(p) if total is None else p * total
    if of_beside is not None and rows.beside == "entropy":
        d = d - of_beside * product(p, log_p + rest[0])
    elif of_beside is not None:
        d = d + of_beside * (1 / rows.length(input) - p)
    if grad is not None:
        d = torch.scatter_add(d, -1, index, grad.to(d.dtype))
    slope = rows.slope(s)
    return (d if type(slope) is float and slope == 1 else d * slope).to(input.dtype)


# -- Calls -------------------------------------------------------------------------------------------------------------


def _fake(input, index, rows):
    dtype = wide(input.dtype)
    numbers = input.new_empty(shape_of_rows(input.shape, rows.dims), dtype=dtype)
    nothing = input.new_empty(0, dtype=dtype)
    found = nothing if index is None else input.new_empty(index.shape, dtype=dtype)
    beside = torch.empty_like(numbers if rows.beside else nothing)
    return found, numbers, torch.empty_like(numbers), beside


_ROWS = "SymInt[] dim, float scale, str beside"
_STATISTICS = ways_of(
    Statistics,
    Statistics.forward,
    operator_of(
        "statistics",
        f"(Tensor input, Tensor? index, {_ROWS}, bool invariant=False, float softcap=0.0, bool zero=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        Statistics,
        Rows,
        _fake,
    ),
)
_GRADIENT = Ways(
    Gradient.forward,
    gradient_formula,
    gradient_formula,
    operator_of(
        "statistics_backward",
        f"(Tensor input, Tensor? index, {_ROWS}, Tensor found, Tensor top, Tensor log, Tensor numbers, Tensor? grad, "
        "Tensor? of_lse, Tensor? of_beside, bool invariant=False, float softcap=0.0, bool zero=False) -> Tensor",
        Gradient,
        Rows,
        lambda input, *_: torch.empty_like(input),
        like=0,
    ),
)


def serve(input: Tensor, index: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Statistics` on any device and in any state of torch."""
    if not on_kernel(input):
        return Statistics.forward(input, index, rows)
    return _STATISTICS.serve((input, index, rows), (input, index), (input,))


def gradient_of(*call) -> Tensor | None:
    """`Gradient` in any state of torch."""
    return _GRADIENT.serve(call, call[:-1], call[:-1])


def times_softmax(input: Tensor, factors: Tensor, dims: tuple[int, ...], invariant: bool = False) -> Tensor:
    """The gradient of a logsumexp: factors (of size 1 in `dims`) times the softmax of the input."""
    nothing = factors.new_empty(0)
    return gradient_of(
        input, None, nothing, nothing, factors, nothing, None, factors, None, Rows(dims, invariant=invariant)
    )


# -- Heads -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Head:
    """What a function makes of the numbers of each row.

    beside: the number that it asks for beside the maximum and the logarithm of the sum, see `Rows`.
    results(found, numbers): what the function returns; `found` is the log-probability of the chosen element, numbers
        the maximum, the logarithm of the sum and that number.
    upstream(*gradients): those of its results as those of (found, logsumexp, number), None for what has none.
    known: the forms of its eager calls.
    only_found: whether what it returns is `found` itself.
    """

    beside: str
    results: Callable[..., Tensor | tuple[Tensor, ...]]
    upstream: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    known: Forms = field(default_factory=Forms)
    only_found: bool = False

    def rows(self, dims: tuple[int, ...], scale: float, softcap: float = 0.0) -> Rows:
        """What it asks of rows."""
        return Rows(dims, scale, self.beside, in_force(), softcap)


def _less(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else -grad


ENTROPY = Head("entropy", lambda _, numbers: numbers[2], lambda entropy: (None, None, entropy))
SELECTED = Head("", lambda found, _: found, lambda grad: (grad, None, None), only_found=True)
# In float32, whatever the logits: they are reduced further.
CROSS_ENTROPY = Head("", lambda found, _: -found, lambda grad: (-grad, None, None))
CROSS_ENTROPY_AND_LSE = Head(
    "",
    lambda found, numbers: (-found, numbers[0] + numbers[1]),
    lambda grad, of_lse: (_less(grad), of_lse, None),
)
# Against the target, against all classes evenly, and the logsumexp.
SMOOTHED = Head(
    "even",
    lambda found, numbers: (-found, -numbers[2], numbers[0] + numbers[1]),
    lambda grad, of_even, of_lse: (_less(grad), of_lse, _less(of_even)),
)
SELECTED_AND_ENTROPY = Head(
    "entropy",
    lambda found, numbers: (found, numbers[2]),
    lambda grad, entropy: (grad, None, entropy),
)
HEADS = ENTROPY, SELECTED, SELECTED_AND_ENTROPY, CROSS_ENTROPY, CROSS_ENTROPY_AND_LSE, SMOOTHED


def serve_head(
    head: Head,
    input: Tensor,
    index: Tensor | None,
    dims: tuple[int, ...],
    scale: float,
    dtype: torch.dtype,
    softcap: float = 0.0,
) -> Tensor | tuple[Tensor, ...]:
    """The results of a head, of `dtype`, on any device and in any state of torch."""
    if not input.dim():
        input = input.unsqueeze(0)
    column = index
    if index is not None:
        index = index.long()
        column = index if index.dim() == input.dim() else index.unsqueeze(-1)
    found, *numbers = serve(input, column, head.rows(dims, scale, softcap))
    found = found if index is None else found.view(index.shape)
    return converted(head.results(found, [t if t.shape == (0,) else t.squeeze(dims) for t in numbers]), dtype)


def converted(results: Tensor | tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | tuple[Tensor, ...]:
    """Results in the dtype of a call."""
    if type(results) is tuple:
        return tuple([t.to(dtype) for t in results])
    return results.to(dtype)


def softcap_of(value: object) -> float:
    """A softcap as `Rows` have it: 0 for None. Raises TypeError or ValueError for what is none."""
    if value is None:
        return 0.0
    cap = number("softcap", value)
    if not 0 < cap < float("inf"):
        raise ValueError(f"softcap is {value}: it must be positive and finite")
    return cap


def check_integers(index: object) -> None:
    """Raise TypeError for an index that is no tensor of integers."""
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be a torch.Tensor, not {type(index).__name__}")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool:
        raise TypeError(f"index is {index.dtype}: it must have an integer dtype")


def check_index(index: object, logits: Tensor, ignored: int | None = None) -> None:
    """Raise TypeError or ValueError for an index that does not fit, IndexError for one out of range on the CPU.

    ignored: the number that may be out of range.
    """
    check_integers(index)
    if index.device != logits.device:
        raise ValueError(f"index is on {index.device}, logits on {logits.device}")
    rows = tuple(logits.shape[:-1])
    if not logits.dim() or tuple(index.shape[: len(rows)]) != rows or index.dim() > logits.dim():
        raise ValueError(
            f"index has shape {tuple(index.shape)}, logits {tuple(logits.shape)}: index must have the shape {rows} of "
            "the rows, or one more dimension"
        )
    seen = index.device.type == "cpu" and index.numel() and not torch.compiler.is_compiling()
    if seen and not transformed() and not watched(index):
        kept = index if ignored is None else torch.where(index == ignored, 0, index)
        low, high = (int(t) for t in kept.aminmax())
        if low < 0 or high >= logits.shape[-1]:
            raise IndexError(
                f"index has elements from {low} to {high}: they must lie in 0 to {logits.shape[-1] - 1}"
            )
