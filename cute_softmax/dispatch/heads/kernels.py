"""Numbers of rows from one read: maximum, sum, entropy, log-probability of a chosen element; and their gradients.

Forward: the row maths "selective" and "entropy" give numbers of each row: the maximum, the logarithm of the sum, and
the log-probability of one chosen element; those of others are gathered. Backward is one kernel: the softmax times a
factor, with one less at the element, from its own float32 log-probability; and for an entropy times its own logarithm,
too. Where several elements of a row are chosen, they are written once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...plan import NotPlanned, Prologue
from ...runtime import launch
from ..common.formulas import empty_rows, over, shape_of_rows, wide
from ..common.spec import Spec
from ..softmax import kernels

Tensor = torch.Tensor
# Elements of a piece of the logits that torch's operations work on in float32 for the gradient of an entropy where no
# kernel has it (strided or very long rows): with the logits and the gradient they fit in the L2 of an H200.
PIECE = 1 << 22


@dataclass(frozen=True)
class Rows:
    """What is asked of rows: over which dimensions, of which scores (a multiple of the input, and of that, with a
    softcap, ``softcap * tanh(score / softcap)``), and which number beside the maximum and the logarithm of the sum:
    "entropy", "even", the mean of all log-probabilities, or "" for none; and whether the call is batch-invariant.

    zero: whether scores that are all -inf have probability 0 in gradients, not NaN: they may be part of a row."""

    dims: tuple[int, ...]
    scale: float = 1.0
    beside: str = ""
    invariant: bool = False
    softcap: float = 0.0
    zero: bool = False

    def math(self, index: bool) -> str:
        """The row math that gives the numbers; index: of a chosen element, too."""
        if not index:
            return "entropy"
        return "selective_entropy" if self.beside == "entropy" else "selective"

    def scores(self, input: Tensor) -> Tensor:
        """The scores in torch's operations, in float32 or wider."""
        s = input.to(wide(input.dtype))
        s = s if self.scale == 1 else s * self.scale
        return self.softcap * torch.tanh(s / self.softcap) if self.softcap else s

    def slope(self, scores: Tensor) -> Tensor | float:
        """The derivatives of scores by the input."""
        return self.scale * (1 - (scores / self.softcap).square()) if self.softcap else self.scale

    def length(self, input: Tensor) -> int:
        """Elements of a row."""
        return math.prod(input.shape[d] for d in self.dims)


def scaled(
    scale: float | Tensor, softcap: float = 0.0, **parts: object
) -> tuple[Prologue, tuple[float, ...]]:
    """The prologue of the scores of `Rows`, and its numbers: those that change something. A tensor is a scale of each
    row."""
    if isinstance(scale, Tensor):
        prologue, numbers = scaled(1.0, softcap, **parts)
        return replace(prologue, scale="groups"), numbers
    prologue = Prologue(scale="number" if scale != 1 else "", softcap=softcap != 0, **parts)
    return prologue, (*[scale] * (scale != 1), *[softcap] * (softcap != 0))


def statistics(input: Tensor, rows: Rows, index: Tensor | None = None) -> tuple[Tensor, ...]:
    """([found], max, log, and what is asked for beside them) of the rows' scores: float32, the reduced dimensions of
    size 1.

    log: the logsumexp less the maximum. index: of one element of each row (with size 1 in the last dimension, which is
    then the reduced one), of which `found` is the log-probability.
    """
    shape = shape_of_rows(input.shape, rows.dims)
    math_name, even = rows.math(index is not None), rows.beside == "even"
    # Without an index there is a math for all: its entropy is left out below.
    count = 3 if index is None else 3 + bool(rows.beside)
    results = tuple(torch.empty(shape, dtype=torch.float32, device=input.device) for _ in range(count))
    groups = [t.expand(input.shape) for t in (*([] if index is None else [index]), *results)]
    prologue, numbers = scaled(rows.scale, rows.softcap, even=even and index is not None)
    how = {"invariant": rows.invariant}
    try:
        launch.run(math_name, (input, *groups), rows.dims, prologue=prologue, numbers=numbers, **how)
    except NotPlanned:
        if index is not None:  # of rows that are not contiguous, or longer than a cluster's
            top, log, *rest = statistics(input, rows)
            return found_at(input, index, rows, top, log), top, log, *rest
        if not prologue:
            raise
        launch.run(math_name, (rows.scores(input), *groups), rows.dims, **how)
    if index is not None or rows.beside == "entropy":
        return results
    top, log, _ = results
    return (top, log, mean_of(rows.scores(input) - top, log, rows.dims)) if even else (top, log)


def log_probabilities(scores: Tensor, top: Tensor, log: Tensor, rows: Rows) -> Tensor:
    """The logarithms of the softmax of scores, as gradients have them."""
    log_p = scores - top - log
    return log_p.masked_fill(log == -math.inf, -math.inf) if rows.zero else log_p


def statistics_formula(input: Tensor, rows: Rows) -> tuple[Tensor, ...]:
    """(max, log, and what is asked for beside them) in torch's operations; the maximum is a constant to autograd."""
    s, dims = rows.scores(input), rows.dims
    nothing = empty_rows(s, dims) if rows.zero else None
    s = s if nothing is None else s.masked_fill(nothing, 0.0)
    top = s.detach().amax(dims, keepdim=True) if s.numel() else s.sum(dims, keepdim=True)
    top = top.nan_to_num(0.0, 0.0, 0.0)
    s = s - top
    log = torch.logsumexp(s, dims, keepdim=True)
    log = log if nothing is None else log.masked_fill(nothing, -math.inf)
    if rows.beside == "entropy":
        p = over(torch.softmax, s, dims)
        return top, log, product(p, log - s).sum(dims, keepdim=True)
    return (top, log, mean_of(s, log, dims)) if rows.beside else (top, log)


def mean_of(differences: Tensor, log: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The mean of all log-probabilities, from the scores less their maximum."""
    return differences.mean(dims, keepdim=True) - log


def found_at(input: Tensor, index: Tensor, rows: Rows, top: Tensor, log: Tensor) -> Tensor:
    """The log-probabilities at the index. The maximum is subtracted first: near it that rounds nothing."""
    return rows.scores(input.gather(-1, index)) - top - log


def product(p: Tensor, other: Tensor) -> Tensor:
    """p * other; 0 where p is, even if other is infinite there."""
    return p * torch.where(p == 0, 0.0, other)


def gradient_of_rows(
    input: Tensor,
    rows: Rows,
    top: Tensor,
    log: Tensor,
    entropies: Tensor,
    of_lse: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """The gradient of the input from those of the logsumexp and the entropy (either may be None) of scores without a
    softcap, in one new tensor of its dtype and format."""
    if not input.numel():
        return torch.empty_like(input)
    dims, scale, invariant = rows.dims, rows.scale, rows.invariant
    if of_entropy is None:
        spec = Spec(dims, input.dtype, factor=scale, invariant=invariant, zero=rows.zero)
        return kernels.forward(input, None, None, None, spec, factors=of_lse.float() * scale)
    rows = replace(rows, beside="entropy")
    result = gradient_in_one(input, rows, None, of_lse, of_entropy, None, None, entropies)
    if result is not None:
        return result
    result = torch.empty_like(input)
    # scale * p * (of_lse - of_entropy * (log p + entropy)), with log p = x * scale - top - log.
    # In float16 p would run out of exponent where its product with a logarithm does not: lifted meanwhile.
    lift = 2.0**15 if input.dtype is torch.float16 else 1.0
    spec = Spec(dims, input.dtype, factor=scale, alpha=lift, invariant=invariant, zero=rows.zero)
    kernels.forward(input, None, None, None, spec, result)
    most = torch.finfo(torch.float32).max
    factor = of_entropy.float() * (-scale / lift)
    added = (scale / lift) * of_lse if of_lse is not None else torch.zeros_like(factor)

    def finish(p: Tensor, x: Tensor, *rows: Tensor) -> None:
        top, rest, f, a = rows
        term = torch.sub(x * scale, top) if scale != 1 else torch.sub(x, top)
        p.mul_(term.sub_(rest).mul_(f).add_(a).nan_to_num_(0.0, most, -most))  # infinite only where p is 0

    last = [-i - 1 for i in range(len(dims))][::-1]
    tensors = result, input, top, log - entropies, factor, added
    in_pieces(finish, [t.movedim(dims, last) for t in tensors], input.dim() - len(dims))
    return result


class Parts(NamedTuple):
    """What a gradient of rows is made of: a multiple of the softmax, less one at a target, with a number added there; a
    multiple of the softmax's own part in the entropy; a number added to all elements."""

    softmax: bool
    target: bool
    more: bool
    entropy: bool
    even: bool

    @property
    def prologue(self) -> dict[str, object]:
        """That of a softmax with this gradient as its result."""
        return dict(
            alpha="groups" if self.softmax else "",
            target="found" if self.target else "",
            more=self.more,
            entropy=self.entropy,
            even=self.even,
            factor=True,
        )


def factors_of(
    rows: Rows,
    length: int,
    grad: Tensor | None,
    of_lse: Tensor | None,
    of_beside: Tensor | None,
    index: Tensor | None,
    found: Tensor | None,
    beside: Tensor | None,
) -> tuple[Parts, list[Tensor], float]:
    """(the parts of a gradient, their tensors of one number a row, contiguous; the factor on what comes from above).

    grad: that of the log-probabilities `found` at an index; of_lse: of the logsumexp; of_beside: of the number that
    `rows` has beside it. What has no gradient is None, and what belongs to it is not looked at. length: of a row.
    What comes from above alone stays as it is, of its dtype: the kernel converts it, and turns all signs around.
    """
    target, share = grad is not None, None
    entropy = of_beside is not None and rows.beside == "entropy"
    if of_beside is not None and not entropy:  # the mean of all scores, less the logsumexp
        share = of_beside.float() / -length
        of_lse = -of_beside if of_lse is None else of_lse - of_beside
    lse = of_lse is not None
    # The softmax is in the logsumexp, which is in the log-probabilities. At the target, total * p + grad is
    # total * (p - 1) + of_lse.
    less = -of_lse.float() if lse else None
    total = less if grad is None else grad if less is None else grad.float() + less
    groups = [] if total is None else [total]
    groups += [index, found] if target else []
    groups += [less if share is None else less + share] if target and lse else []
    groups += [of_beside, beside] if entropy else []
    groups += [] if share is None else [share]
    parts = Parts(target or lse, target, target and lse, entropy, share is not None)
    return parts, [_as_kernels_read(t) for t in groups], -rows.scale


def _as_kernels_read(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous().resolve_neg()
    return tensor if tensor.dtype in launch.DTYPE_NAMES or tensor.dtype is torch.int64 else tensor.float()


def gradient_in_one(input: Tensor, rows: Rows, *of_rows: Tensor | None) -> Tensor | None:
    """The gradient of the input by one kernel, in one new tensor of its dtype and format; None where there is none.

    of_rows: the tensors that `factors_of` takes, of size 1 in the reduced dimensions.
    """
    parts, groups, factor = factors_of(rows, rows.length(input), *of_rows)
    prologue, numbers = scaled(rows.scale, rows.softcap, zero=rows.zero, **parts.prologue)
    result = torch.empty_like(input)
    operands = input, *[t.expand(input.shape) for t in groups], result
    try:
        launch.run(
            "softmax",
            operands,
            rows.dims,
            prologue=prologue,
            numbers=(*numbers, factor),
            invariant=rows.invariant,
        )
    except NotPlanned:
        return None
    return result


def invariant_sum(tensor: Tensor) -> Tensor:
    """The sum over the last dimension, kept with size 1, by our kernel: of a float32 tensor that is not empty."""
    result = torch.empty((*tensor.shape[:-1], 1), dtype=torch.float32, device=tensor.device)
    dims = (tensor.dim() - 1,)
    launch.run("sum", (tensor, result.expand(tensor.shape)), dims, invariant=True)
    return result


def in_pieces(function, tensors: list[Tensor], kept: int) -> None:
    """`function` on pieces of the first `kept` dimensions: float32 copies of it all would be several times its size."""
    shape = tensors[0].shape
    if not kept or tensors[0].numel() <= PIECE:
        function(*tensors)
    elif shape[0] == 1:
        in_pieces(function, [t[0] for t in tensors], kept - 1)
    else:
        step = max(1, PIECE * shape[0] // tensors[0].numel())
        for i in range(0, shape[0], step):
            in_pieces(function, [t[i : i + step] for t in tensors], kept)


def at_chosen(index: Tensor, found: Tensor, grad: Tensor, of_lse: Tensor) -> Tensor:
    """The gradient of the scores at the index: the sum of what came in there, and p times that of the logsumexp.

    For one element of a row ``grad * (1 - p)``, without cancellation.
    """
    if index.shape[-1] == 1:
        return -grad * torch.expm1(found) + (of_lse + grad) * found.exp()
    index = index.contiguous()
    first = torch.searchsorted(index.sort(-1)[0], index)  # equal for equal elements
    sums = torch.zeros_like(grad).scatter_add_(-1, first, grad).gather(-1, first)
    return sums + of_lse * found.exp()
