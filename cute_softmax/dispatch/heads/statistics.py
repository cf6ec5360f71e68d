"""Numbers of rows from one read: maximum, sum, entropy, log-probability of a chosen element; and their gradients.

Forward: the row maths "selective" and "entropy" give numbers of each row: the maximum, the logarithm of the sum, and
the log-probability of one chosen element; those of others are gathered. Backward of one element of each row is one
kernel: the softmax times a factor, with one less at the element, from its own float32 log-probability. For more of
them, with G the sum of a row's upstream gradients, ``-G * scale * softmax(logits * scale)`` is, and they are written
once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...plan import NotPlanned, Prologue
from ...runtime import launch
from ..common.arguments import served
from ..common.formulas import over, wide
from ..common.spec import Spec
from ..common.state import batched, jvp_rule, of_function, transformed
from ..softmax import kernels

Tensor = torch.Tensor
# Elements of a piece of the logits that torch's operations work on in float32 for the gradient of an entropy: with the
# logits and the gradient they fit in the L2 of an H200.
PIECE = 1 << 22


# -- Numbers of each row -----------------------------------------------------------------------------------------------


def scaled(scale: float, **parts: object) -> tuple[Prologue, tuple[float, ...]]:
    """The prologue of scores that are the input times a number, and its numbers: neither where that is 1."""
    return Prologue(scale="number" if scale != 1 else "", **parts), (scale,) if scale != 1 else ()


def statistics(
    input: Tensor, dims: tuple[int, ...], scale: float, index: Tensor | None = None, entropies: bool = True
) -> tuple[Tensor, ...]:
    """([found], max, log, [entropy]) of the rows of ``input * scale``: float32, the reduced dimensions of size 1.

    log: the logsumexp less the maximum. index: of one element of each row (with size 1 in the last dimension, which is
    then the reduced one), of which `found` is the log-probability.
    """
    shape = [1 if d in dims else n for d, n in enumerate(input.shape)]
    count = 2 + (index is not None) + entropies
    results = tuple(torch.empty(shape, dtype=torch.float32, device=input.device) for _ in range(count))
    groups = [t.expand(input.shape) for t in (*([] if index is None else [index]), *results)]
    prologue, numbers = scaled(scale)
    math = "entropy" if index is None else "selective_entropy" if entropies else "selective"
    try:
        launch.run(math, (input, *groups), dims, prologue=prologue, numbers=numbers)
    except NotPlanned:
        if index is not None:  # of rows that are not contiguous, or longer than a cluster's
            top, log, *rest = statistics(input, dims, scale)
            return found_at(input, index, scale, top, log), top, log, *rest[:entropies]
        if scale == 1:
            raise
        launch.run(math, (input.float() * scale, *groups), dims)
    return results


def statistics_formula(input: Tensor, dims: Sequence[int], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(max, log, entropy) in torch's operations; the maximum is a constant to autograd."""
    s = input.to(wide(input.dtype))
    s = s if scale == 1 else s * scale
    dims = tuple(dims)
    top = s.detach().amax(dims, keepdim=True) if s.numel() else s.sum(dims, keepdim=True)
    top = top.nan_to_num(0.0, 0.0, 0.0)
    s = s - top
    log = torch.logsumexp(s, dims, keepdim=True)
    p = over(torch.softmax, s, dims)
    return top, log, _product(p, log - s).sum(dims, keepdim=True)


def found_at(input: Tensor, index: Tensor, scale: float, top: Tensor, log: Tensor) -> Tensor:
    """The log-probabilities at the index. The scores are subtracted first: near the largest that rounds nothing."""
    scores = input.gather(-1, index).to(log.dtype)
    return (scores if scale == 1 else scores * scale) - top - log


def _product(p: Tensor, other: Tensor) -> Tensor:
    """p * other; 0 where p is, even if other is infinite there."""
    return p * torch.where(p == 0, 0.0, other)


def gradient_formula(
    input: Tensor, dims: Sequence[int], scale: float, of_lse: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """The gradient of the input from those of the logsumexp and the entropy (either may be None), in float32.

    Torch's operations alone; differentiable.
    """
    top, log, entropies = statistics_formula(input, dims, scale)
    s = input.to(log.dtype)
    log_p = (s if scale == 1 else s * scale) - top - log
    p = log_p.exp()
    d = 0.0 if of_lse is None else p * of_lse
    if of_entropy is not None:
        d = d - of_entropy * _product(p, log_p + entropies)
    return d if scale == 1 else d * scale


def gradient(
    input: Tensor,
    dims: tuple[int, ...],
    scale: float,
    top: Tensor,
    log: Tensor,
    entropies: Tensor,
    of_lse: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """`gradient_formula` into one new tensor of the input's dtype and format; not itself differentiable."""
    result = torch.empty_like(input)
    if not input.numel():
        return result
    if of_entropy is None:
        spec = Spec(dims, input.dtype, scale=scale)
        return kernels.forward(input, None, None, None, spec, result, factors=of_lse.float() * scale)
    # scale * p * (of_lse - of_entropy * (log p + entropy)), with log p = x * scale - top - log.
    # In float16 p would run out of exponent where its product with a logarithm does not: lifted meanwhile.
    lift = 2.0**15 if input.dtype is torch.float16 else 1.0
    kernels.forward(input, None, None, None, Spec(dims, input.dtype, scale=scale, alpha=lift), result)
    most = torch.finfo(torch.float32).max
    factor = of_entropy.float() * (-scale / lift)
    added = (scale / lift) * of_lse if of_lse is not None else torch.zeros_like(factor)

    def finish(p: Tensor, x: Tensor, *rows: Tensor) -> None:
        top, rest, f, a = rows
        term = torch.sub(x * scale, top) if scale != 1 else torch.sub(x, top)
        p.mul_(term.sub_(rest).mul_(f).add_(a).nan_to_num_(0.0, most, -most))  # infinite only where p is 0

    last = [-i - 1 for i in range(len(dims))][::-1]
    tensors = result, input, top, log - entropies, factor, added
    _in_pieces(finish, [t.movedim(dims, last) for t in tensors], input.dim() - len(dims))
    return result


def gradient_at_target(
    input: Tensor, dims: tuple[int, ...], scale: float, index: Tensor, found: Tensor, grad: Tensor
) -> Tensor | None:
    """The gradient of the log-probabilities of one element of each row, ``-grad * scale * (softmax - 1 there)``, by one
    kernel; None where there is none."""
    result = torch.empty_like(input)
    prologue, numbers = scaled(scale, alpha="groups", target=True)
    groups = [t.expand(input.shape) for t in (grad * -scale, index, found)]
    try:
        launch.run("softmax", (input, *groups, result), dims, prologue=prologue, numbers=numbers)
    except NotPlanned:
        return None
    return result


def _in_pieces(function, tensors: list[Tensor | None], kept: int) -> None:
    """`function` on pieces of the first `kept` dimensions: float32 copies of it all would be several times its size."""
    shape = tensors[0].shape
    if not kept or tensors[0].numel() <= PIECE:
        function(*tensors)
    elif shape[0] == 1:
        _in_pieces(function, [None if t is None else t[0] for t in tensors], kept - 1)
    else:
        step = max(1, PIECE * shape[0] // tensors[0].numel())
        for i in range(0, shape[0], step):
            _in_pieces(function, [None if t is None else t[i : i + step] for t in tensors], kept)


# -- Chosen elements ---------------------------------------------------------------------------------------------------


def at_chosen(index: Tensor, found: Tensor, grad: Tensor, of_lse: Tensor) -> Tensor:
    """The gradient of the scores at the index: the sum of what came in there, and p times that of the logsumexp.

    For one element of a row ``grad * (1 - p)``, without cancellation.
    """
    if index.shape[-1] == 1:
        return -grad * torch.expm1(found) + (of_lse + grad) * found.exp()
    order = index.sort(-1)[0]
    first = torch.searchsorted(order, index.contiguous())  # equal for equal elements
    sums = torch.zeros_like(grad).scatter_add_(-1, first, grad).gather(-1, first)
    return sums + of_lse * found.exp()


class Statistics(torch.autograd.Function):
    """(input, index or None, dims, scale, entropies) -> (log-probabilities at the index, max, log, entropy), float32.

    What is not asked for is an empty tensor. To derivatives the maximum is a constant, so that log has those of the
    logsumexp. Keeps the input and the numbers of each row.
    """

    @staticmethod
    def forward(input, index, dims, scale, entropies):
        return found_of(input, index, dims, scale, entropies)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, index, *ctx.numbers = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, index, *output)
        if transformed():
            ctx.save_for_forward(input, index, *output)

    @staticmethod
    def backward(ctx, grad, _, of_lse, of_entropy):
        input, index, *rows = ctx.saved_tensors
        by_formula = torch.is_grad_enabled() or batched(grad, of_lse, of_entropy)
        function = formula_backward if by_formula else backward
        return function(input, index, *ctx.numbers, *rows, grad, of_lse, of_entropy), None, None, None, None

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, *_):
        input, index, _, top, log, entropies = saved
        dims, scale, asked = ctx.numbers
        s, t = input.to(log.dtype) * scale, tangent.to(log.dtype) * scale
        log_p = s - top - log
        p = log_p.exp()
        of_lse = (p * t).sum(dims, keepdim=True)
        of_found = log.new_empty(0) if index is None else t.gather(-1, index) - of_lse
        if not asked:
            return of_found, None, of_lse, torch.zeros_like(entropies)
        return of_found, None, of_lse, -(_product(p, log_p + entropies) * t).sum(dims, keepdim=True)

    @staticmethod
    def vmap(info, in_dims, input, index, dims, scale, entropies):
        return _over_batch(Statistics.apply, info, in_dims, input, index, dims, scale, entropies)


def _over_batch(function, info, in_dims, input, index, dims, scale, entropies):
    """A vmap rule: the batch in front."""
    size = info.batch_size
    input, index = (
        t if t is None else t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((input, index), in_dims[:2], strict=True)
    )
    found = function(input, index, [d + 1 for d in dims], scale, entropies)
    # An empty tensor has no batch.
    return found, (None if index is None else 0, 0, 0, 0 if entropies else None)


def found_of(
    input: Tensor, index: Tensor | None, dims: Sequence[int], scale: float, entropies: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `Statistics` gives."""
    dims = tuple(dims)
    if not on_kernel(input):
        top, log, *rest = statistics_formula(input, dims, scale)
        found = None if index is None else found_at(input, index, scale, top, log)
    elif index is None or index.shape[-1] == 0:
        top, log, *rest = statistics(input, dims, scale)
        found = None if index is None else log.new_empty(index.shape)
    else:
        found, top, log, *rest = statistics(input, dims, scale, index[..., :1], entropies)
        if index.shape[-1] > 1:
            found = found_at(input, index, scale, top, log)
    return log.new_empty(0) if found is None else found, top, log, rest[0] if entropies else log.new_empty(0)


def on_kernel(input: Tensor) -> bool:
    """Whether our kernels serve it; torch's operations do all else."""
    return served(input, torch.float32) and input.numel() > 0


def _total(grad: Tensor | None, of_lse: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The gradient of the logsumexp, with what the log-probabilities pass on to it."""
    if grad is None:
        return of_lse
    total = -grad.to(dtype).sum(-1, keepdim=True)
    return total if of_lse is None else total + of_lse


def backward(
    input: Tensor,
    index: Tensor | None,
    dims: Sequence[int],
    scale: float,
    asked: bool,
    found: Tensor,
    top: Tensor,
    log: Tensor,
    entropies: Tensor,
    grad: Tensor | None,
    of_lse: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor | None:
    """The gradient of the logits in one new tensor of their size; not itself differentiable.

    of_lse: the gradient of the logsumexp, beside what the log-probabilities pass on to it.
    """
    grad, of_entropy = grad if index is not None else None, of_entropy if asked else None
    if grad is None and of_lse is None and of_entropy is None:
        return None
    if not on_kernel(input):
        return formula_backward(
            input, index, dims, scale, asked, found, top, log, entropies, grad, of_lse, of_entropy
        )
    dims = tuple(dims)
    if of_lse is None and of_entropy is None and index.shape[-1] == 1:
        result = gradient_at_target(input, dims, scale, index, found, grad.to(log.dtype))
        if result is not None:
            return result
    total = _total(grad, of_lse, log.dtype)
    result = gradient(input, dims, scale, top, log, entropies, total, of_entropy)
    if grad is None:
        return result
    values = at_chosen(index, found, grad.to(log.dtype), total)
    if of_entropy is not None:
        values = values - of_entropy * _product(found.exp(), found + entropies)
    return result.scatter_(-1, index, (values * scale).to(result.dtype))


def formula_backward(
    input, index, dims, scale, asked, found, top, log, entropies, grad, of_lse, of_entropy
) -> Tensor | None:
    """`backward` in torch's operations, differentiable."""
    grad, of_entropy = grad if index is not None else None, of_entropy if asked else None
    if grad is None and of_lse is None and of_entropy is None:
        return None
    total = _total(grad, of_lse, log.dtype)
    d = gradient_formula(input, tuple(dims), scale, total, of_entropy)
    if grad is not None:
        d = torch.scatter_add(d, -1, index, (grad * scale).to(d.dtype))
    return d.to(input.dtype)


# -- Operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "cute_softmax::statistics",
    mutates_args=(),
    schema="(Tensor input, Tensor? index, SymInt[] dim, float scale, bool entropies) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def operator(input, index, dim, scale, entropies):
    return tuple(t.contiguous() for t in found_of(input, index, tuple(dim), scale, entropies))


@operator.register_fake
def _(input, index, dim, scale, entropies):
    dtype = wide(input.dtype)
    rows = input.new_empty([1 if d in dim else n for d, n in enumerate(input.shape)], dtype=dtype)
    found = input.new_empty(0 if index is None else index.shape, dtype=dtype)
    entropy = torch.empty_like(rows) if entropies else input.new_empty(0, dtype=dtype)
    return found, rows, torch.empty_like(rows), entropy


@torch.library.custom_op(
    "cute_softmax::statistics_backward",
    mutates_args=(),
    schema="(Tensor input, Tensor? index, SymInt[] dim, float scale, bool entropies, Tensor found, Tensor top, "
    "Tensor log, Tensor entropy, Tensor? grad, Tensor? of_lse, Tensor? of_entropy) -> Tensor",
)
def operator_backward(input, index, dim, scale, entropies, *rows):
    d = backward(input, index, tuple(dim), scale, entropies, *rows)
    expected = torch.empty_like(input)
    if d is None:
        return expected.zero_()
    return d if d.stride() == expected.stride() else expected.copy_(d)


@operator_backward.register_fake
def _(input, *rest):
    return torch.empty_like(input)


def _save(ctx, inputs, output):
    input, index, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, index, *output)


def _gradients(ctx, grad, _, *others):
    input, index, *rows = ctx.saved_tensors
    grads = grad, *others
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return formula_backward(input, index, *ctx.numbers, *rows, *grads), None, None, None, None
    return operator_backward(input, index, *ctx.numbers, *rows, *grads), None, None, None, None


def _save_backward(ctx, inputs, output):
    input, index, dim, scale, asked, *rest = inputs
    ctx.numbers = tuple(dim), scale, asked
    ctx.save_for_backward(input, index, *rest)


def _second_gradients(ctx, upstream):
    """The gradients of a gradient, by autograd of the formula. What the numbers of the rows change is in the gradient
    of the input."""
    input, index, *rows = ctx.saved_tensors
    rows, grads = rows[:4], rows[4:]
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in (input, *grads)]
        d = formula_backward(leaves[0], index, *ctx.numbers, *rows, *leaves[1:])
        used = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(d, used, upstream, allow_unused=True))
    of_input, *of_grads = (None if t is None else next(found) for t in leaves)
    return of_input, *[None] * 8, *of_grads


operator.register_autograd(_gradients, setup_context=_save)
operator_backward.register_autograd(_second_gradients, setup_context=_save_backward)


@operator.register_vmap
def _(info, in_dims, *arguments):
    return _over_batch(operator, info, in_dims, *arguments)


# -- Calls -------------------------------------------------------------------------------------------------------------


def _by_operator(input, index, dims, scale, entropies) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return operator(input, index, list(dims), scale, entropies)


_WAYS = of_function(Statistics, found_of, _by_operator)


def serve(
    input: Tensor, index: Tensor | None, dims: tuple[int, ...], scale: float, entropies: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`found_of`, on any device and in any state of torch."""
    arguments = input, index, dims, scale, entropies
    if not on_kernel(input):
        return found_of(*arguments)
    return _WAYS.serve(arguments, (input, index), (input,))


def times_softmax(input: Tensor, factors: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The gradient of a logsumexp as an operator: factors (of size 1 in `dims`) times the softmax of the input."""
    nothing = factors.new_empty(0)
    return operator_backward(
        input, None, list(dims), 1.0, False, nothing, nothing, factors, nothing, None, factors, None
    )


def entropy(input: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not input.dim():
        input = input.unsqueeze(0)
    return serve(input, None, dims, 1.0, True)[3].squeeze(dims).to(dtype)
