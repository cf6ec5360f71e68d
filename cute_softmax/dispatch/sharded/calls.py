"""Functions of rows that several ranks share, and their gradients: an autograd function and an operator each.

Numbers of rows come out alike on every rank, and so must what flows back into them: each rank then has the gradient of
its slice without a further collective. A softmax comes out as slices; its gradient takes one sum over the ranks, of 4
bytes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from ..common.arguments import served
from ..common.formulas import wide
from ..common.operators import Function, operator_of, ways_of
from ..common.state import Ways, recorded, tells, transformed, unseen
from ..heads import loss as of_losses
from . import formulas, kernels, on_chip
from .states import Shared, exchanged
from .ways import VISITS_PAY, Facts, Way, way_of

Tensor = torch.Tensor
TRANSFORMED = "rows that ranks share are not transformed by functorch (vmap, grad, jvp) or forward-mode AD"
AGAIN = "gradients of functions of rows that ranks share are not differentiable again"


RESULTS = ("found", "lse", "entropy", "even")


class _Shared(Function):
    """A function with a collective in it: ranks would have to agree on what a transform makes of it."""

    @classmethod
    def over_batch(cls, function, info, in_dims, arguments):
        raise NotImplementedError(TRANSFORMED)


class _Once(_Shared):
    """A gradient, which has none of its own."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(AGAIN)


def way(function: str, input: Tensor, asked: Shared) -> Way:
    """The way of a call on a slice, the reduced dimension its last."""
    ranks, columns = asked.ranks, input.shape[-1]
    shortest = max(min(asked.size - (ranks - 1) * columns, columns), 0) if asked.alike else 0
    kernels_take = served(input, asked.dtype if "softmax" in function else torch.float32)
    rows = input.shape[:-1].numel()
    on = input.dtype, input.device
    return way_of(
        Facts(function, ranks, rows, asked.size // ranks, shortest, *on, asked.block > 0, kernels_take)
    )


def _exchange(
    math: str, how: Way, tensors: tuple[Tensor, ...], dtype: torch.dtype, asked: Shared
) -> on_chip.Exchange | None:
    """How slices stay on chip while states are exchanged, if that is the way and can be. tensors: what is read, each as
    long as the slices are."""
    if not how.on_chip:
        return None
    dtypes = [t.dtype for t in tensors] + [dtype]
    shape = tensors[0].shape[:-1].numel(), tensors[0].shape[-1]
    return on_chip.exchange_of(math, dtypes, shape, asked, tensors[0].get_device())


def _merged(input: Tensor, index: Tensor | None, asked: Shared, way: Way) -> tuple[Tensor, dict[str, Tensor]]:
    """(numbers of whole rows that are kept, (numbers, rows); results by name, (rows)); one collective."""
    found = []
    cut = input[..., : asked.width]

    def send(_: None) -> Tensor:
        return (
            kernels.states(cut, index, asked) if way.kernels else formulas.exchanged_states(cut, index, asked)
        )

    def receive(_: None, every: Tensor) -> None:
        at = None if index is None else index.reshape(-1)
        merged = kernels.merged if way.kernels else formulas.merged
        found.append(merged(every, at, asked))

    if input.shape[:-1].numel():
        exchanged([None], send, receive, asked.group)
        return found[0]
    made = {"dtype": wide(input.dtype), "device": input.device}
    return torch.empty((asked.whole, 0), **made), {name: torch.empty(0, **made) for name in asked.names}


def _gradient(
    input: Tensor,
    index: Tensor | None,
    whole: Tensor,
    upstream: Mapping[str, Tensor | None],
    share: Tensor | None,
    asked: Shared,
    way: Way,
) -> Tensor:
    """The gradient of a slice from those of numbers of its rows; no collective."""
    d = torch.empty_like(input)
    given = {name: g for name, g in upstream.items() if g is not None}
    if not given:
        return d.zero_()
    cut, to = input[..., : asked.width], d[..., : asked.width]
    if way.kernels:
        # Of what is asked of all rows alike autograd hands out one number, expanded.
        flat = {name: _flat(g) for name, g in given.items()}
        at = None if index is None else index.reshape(-1)
        kernels.finished("gradient", [cut], to, whole, asked, at, flat, share)
    else:
        of_rows = whole.view(len(whole), *input.shape[:-1])
        formulas.finished("gradient", [cut], to, of_rows, asked, index, given, share)
    d[..., asked.width :].zero_()
    return d


def _flat(of_rows: Tensor) -> Tensor:
    """Numbers of rows one behind another; one of all rows stays one."""
    if of_rows.dim() and not any(of_rows.stride()) and of_rows.numel():
        return of_rows.as_strided((), ())
    return of_rows.reshape(-1) if of_rows.dim() else of_rows


class Numbers(_Shared):
    """(slice's elements, index into whole rows (...) or None, asked) -> (log-probability at the index, logsumexp,
    entropy, mean log-probability, what is kept of whole rows); what is not asked for is an empty tensor."""

    @staticmethod
    def forward(input, index, asked):
        whole, found = _merged(input, index, asked, way("numbers", input, asked))
        rows = input.shape[:-1]
        nothing = whole.new_empty(0, dtype=asked.dtype)
        results = [
            found[name].to(asked.dtype).view(rows) if name in found else nothing.clone() for name in RESULTS
        ]
        return *results, whole

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, index, ctx.asked = inputs
        ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, index, output[-1])

    @staticmethod
    def backward(ctx, *grads):
        input, index, whole = ctx.saved_tensors
        given = (g if name in ctx.asked.names else None for name, g in zip(RESULTS, grads, strict=False))
        return gradient_of(input, index, whole, None, *given, None, ctx.asked), None, None


class Gradient(_Once):
    """(input, index, what is kept of whole rows, share, upstream gradients of `RESULTS` and of a loss, asked) -> the
    gradient of the slice."""

    @staticmethod
    def forward(input, index, whole, share, found, lse, entropy, even, loss, asked):
        upstream = dict(found=found, lse=lse, entropy=entropy, even=even, loss=loss)
        return _gradient(input, index, whole, upstream, share, asked, way("numbers", input, asked))


class Loss(_Shared):
    """(slice's elements, targets (...), asked) -> (the loss, or those of rows; the logsumexps of rows; what is kept of
    whole rows; what a mean divides by, as a factor)."""

    @staticmethod
    def forward(input, target, asked):
        how = way("loss", input, asked)
        whole, found = _merged(input, target, asked, how)
        losses, rows = found["loss"], input.shape[:-1]
        nothing, share = whole.new_empty(0), whole.new_empty(0)
        lse = found["lse"].view(rows) if "lse" in found else nothing
        if asked.reduction == "none":
            return losses.view(rows).to(asked.dtype), lse, whole, share
        fused = how.kernels and losses.numel() > 0
        if asked.reduction == "mean":
            if fused:
                share = of_losses.shares(target.reshape(-1), asked.ignore, 1.0)[1:]
            else:
                share = (target != asked.ignore).sum().to(whole.dtype).reciprocal().view(1)
        if fused:
            loss = of_losses.total(losses, share if share.numel() else None, asked.dtype)
        else:
            loss = (losses.sum() * share[0] if share.numel() else losses.sum()).to(asked.dtype)
        return loss, lse, whole, share

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, target, ctx.asked = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, *output[2:])

    @staticmethod
    def backward(ctx, of_loss, of_lse, *_):
        input, target, whole, share = ctx.saved_tensors
        asked = ctx.asked
        if of_loss is not None and asked.reduction != "none":
            of_loss = of_loss.expand(input.shape[:-1])
        factor = share if share.numel() else None
        of_lse = of_lse if "lse" in asked.names else None
        return gradient_of(input, target, whole, factor, None, of_lse, None, None, of_loss, asked), None, None


class Softmax(_Shared):
    """(slice's elements, asked) -> the slice of the rows' softmax, or of its logarithm."""

    @staticmethod
    def forward(input, asked):
        math = "log_softmax" if asked.log else "softmax"
        how = way(math, input, asked)
        result = torch.empty_like(input, dtype=asked.dtype)
        cut, to = input[..., : asked.width], result[..., : asked.width]

        def send(piece: slice) -> Tensor:
            make = kernels.states if how.kernels else formulas.exchanged_states
            return make(_rows(cut, piece), None, asked)

        def receive(piece: slice, every: Tensor) -> None:
            whole, _ = (kernels if how.kernels else formulas).merged(every, None, asked)
            _finish(math, [_rows(cut, piece)], _rows(to, piece), whole, asked, how)

        if not input.shape[:-1].numel():
            pass
        elif exchange := _exchange(math, how, (input,), asked.dtype, asked):
            on_chip.softmax(cut, to, asked, exchange)
        else:
            exchanged(_pieces(cut, how), send, receive, asked.group)
        result[..., asked.width :].fill_(-torch.inf if asked.log else 0.0)
        return result

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, asked = inputs
        ctx.asked = asked.asks(dtype=input.dtype)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return slice_gradient_of(grad, result, ctx.asked), None


class SliceGradient(_Once):
    """(upstream gradient, slice of a softmax or its logarithm, asked, whose dtype is the input's) -> the gradient of
    the slice; one collective."""

    @staticmethod
    def forward(grad, result, asked):
        math = "log_softmax_backward" if asked.log else "softmax_backward"
        how = way(math.removesuffix("_backward"), result, asked)
        d = torch.empty_like(result, dtype=asked.dtype)
        dy, y, to = (t[..., : asked.width] for t in (grad, result, d))
        dy = kernels.laid_like(dy, y) if how.kernels and dy.numel() else dy

        def send(piece: slice) -> Tensor:
            make = kernels.sums if how.kernels else formulas.exchanged_sums
            return make(_rows(dy, piece), _rows(y, piece), asked)

        def receive(piece: slice, every: Tensor) -> None:
            total = (kernels if how.kernels else formulas).total(every)
            _finish(
                math, [_rows(dy, piece), _rows(y, piece)], _rows(to, piece), total.unsqueeze(0), asked, how
            )

        if not result.shape[:-1].numel():
            pass
        elif exchange := _exchange(math, how, (grad, result), asked.dtype, asked):
            on_chip.gradient(dy, y, to, asked, exchange)
        else:
            exchanged(_pieces(y, how), send, receive, asked.group)
        d[..., asked.width :].zero_()
        return d


def _pieces(cut: Tensor, how: Way) -> list[slice]:
    """The rows of the first dimension, in as many pieces as the way says."""
    rows, count = (cut.shape[0] if cut.dim() > 1 else 1), how.pieces
    count = count if rows >= count else 1
    edges = [rows * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)] if count > 1 else [slice(None)]


def _rows(tensor: Tensor, piece: slice) -> Tensor:
    return tensor if piece == slice(None) else tensor[piece]


def _finish(math: str, tensors: list[Tensor], to: Tensor, whole: Tensor, asked: Shared, how: Way) -> None:
    if how.kernels:
        kernels.finished(math, tensors, to, whole, asked)
    else:
        formulas.finished(math, tensors, to, whole.view(len(whole), *to.shape[:-1]), asked)


# -- Calls -------------------------------------------------------------------------------------------------------------

_ASKED = (
    "str group, SymInt start, SymInt width, SymInt size, bool alike, SymInt block, SymInt blocks, float scale, "
    "ScalarType dtype, bool log, str results, str reduction, SymInt ignore, float smoothing, float squares"
)


def _fake_numbers(input, index, asked):
    rows, nothing = input.shape[:-1], input.new_empty(0, dtype=asked.dtype)
    found = [
        input.new_empty(rows, dtype=asked.dtype) if n in asked.names else nothing.clone() for n in RESULTS
    ]
    return *found, _fake_whole(input, asked)


def _fake_whole(input: Tensor, asked: Shared) -> Tensor:
    return input.new_empty((asked.whole, input.shape[:-1].numel()), dtype=wide(input.dtype))


def _fake_loss(input, target, asked):
    rows = input.shape[:-1]
    whole = _fake_whole(input, asked)
    loss = input.new_empty(rows if asked.reduction == "none" else (), dtype=asked.dtype)
    return (
        loss,
        whole.new_empty(rows if "lse" in asked.names else 0),
        whole,
        whole.new_empty(1 if asked.reduction == "mean" else 0),
    )


def _ways(function: type[Function], name: str, schema: str, fake, like: int | None = None) -> Ways:
    operator = operator_of(f"sharded_{name}", schema.format(_ASKED), function, Shared, fake, like)
    return ways_of(function, function.forward, operator)


_NUMBERS = _ways(
    Numbers,
    "numbers",
    "(Tensor input, Tensor? index, {}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_numbers,
)
_LOSS = _ways(
    Loss, "loss", "(Tensor input, Tensor target, {}) -> (Tensor, Tensor, Tensor, Tensor)", _fake_loss
)
_SOFTMAX = _ways(
    Softmax,
    "softmax",
    "(Tensor input, {}) -> Tensor",
    lambda input, asked: torch.empty_like(input, dtype=asked.dtype),
    like=0,
)
_GRADIENT = _ways(
    Gradient,
    "numbers_backward",
    "(Tensor input, Tensor? index, Tensor whole, Tensor? share, Tensor? found, Tensor? lse, Tensor? entropy, "
    "Tensor? even, Tensor? loss, {}) -> Tensor",
    lambda input, *_: torch.empty_like(input),
    like=0,
)
_SLICE_GRADIENT = _ways(
    SliceGradient,
    "softmax_backward",
    "(Tensor grad, Tensor output, {}) -> Tensor",
    lambda grad, result, asked: torch.empty_like(result, dtype=asked.dtype),
    like=1,
)


def _served(ways: Ways, call: tuple, differentiable: int) -> object:
    """A call in any state of torch but functorch's transforms. differentiable: how many of its first tensors are."""
    if not torch.compiler.is_compiling() and tells() and transformed():
        raise NotImplementedError(TRANSFORMED)
    return ways.serve(call, call[:-1], call[:differentiable])


def numbers(input: Tensor, index: Tensor | None, asked: Shared) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Numbers` in any state of torch, without what is kept."""
    return _served(_NUMBERS, (input, index, asked), 1)[:-1]


def loss(input: Tensor, target: Tensor, asked: Shared, visit: bool | None = False) -> tuple[Tensor, Tensor]:
    """`Loss` in any state of torch, without what is kept. visit: by `on_chip.loss`, which writes the gradient at once;
    None: where that can be and pays. Raises ValueError where it is asked for and cannot be."""
    if visit or (visit is None and input.dtype in VISITS_PAY):
        exchange = None
        if _visits(input, target, asked):
            exchange = _exchange("softmax", way("visit", input, asked), (input,), input.dtype, asked)
        if exchange is not None:
            return on_chip.loss(input, target, asked, exchange), input.new_empty(0)
        if visit:
            raise ValueError(
                "this call on rows that ranks share is not served in one visit: that is a mean or a sum of bfloat16 or "
                "float32 logits, neither smoothed nor traced, in slices that are alike and stay on chip while ranks "
                "reach each other's memory"
            )
    return _served(_LOSS, (input, target, asked), 1)[:2]


def _visits(input: Tensor, target: Tensor, asked: Shared) -> bool:
    """Whether the gradient of a loss may be written in forward, as in `cross_entropy` of rows of one rank."""
    plain = asked.reduction != "none" and not asked.even and "lse" not in asked.names
    there = input.dtype in of_losses.ONE_VISIT and input.shape[:-1].numel() > 0
    return plain and there and recorded(input) and unseen(input, target)


def softmax(input: Tensor, asked: Shared) -> Tensor:
    """`Softmax` in any state of torch."""
    return _served(_SOFTMAX, (input, asked), 1)


def gradient_of(*call) -> Tensor:
    """`Gradient` in any state of torch."""
    return _served(_GRADIENT, call, len(call) - 1)


def slice_gradient_of(*call) -> Tensor:
    """`SliceGradient` in any state of torch."""
    return _served(_SLICE_GRADIENT, call, 2)
