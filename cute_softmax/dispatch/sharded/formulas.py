"""What the kernels for shared rows compute, in torch's operations: for CPU and float64 tensors, and for rows whose
elements do not lie side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

from ..common.formulas import wide
from ..heads.kernels import in_pieces, product
from .states import NOTHING, Shared, blocks_of

Tensor = torch.Tensor


def in_order(numbers: Tensor) -> Tensor:
    """The sum over the first dimension, in its order."""
    return reduce(torch.add, numbers.unbind(0))


def reference(top: Tensor) -> Tensor:
    """What is subtracted before the exponential: finite where nothing is above -inf."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def states(input: Tensor, index: Tensor | None, asked: Shared) -> list[Tensor]:
    """The numbers of the states of rows (..., elements), each (...). index: into these rows, where it lies in them."""
    s = input.to(wide(input.dtype))
    s = s if asked.scale == 1 else s * asked.scale
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    apart = s - reference(top).unsqueeze(-1)
    e = apart.exp()
    found = {"max": top, "sum": e.sum(-1)}
    if "weighted" in asked.beside:
        found["weighted"] = product(e, apart).sum(-1)
    if "chosen" in asked.beside and index is not None:
        found["score"] = chosen(input, index, asked)
    if "even" in asked.beside:
        found["fallen"], found["count"] = apart.sum(-1), torch.full_like(top, s.shape[-1])
    return [found[name] for name in asked.numbers if name in found]


def exchanged_states(input: Tensor, index: Tensor | None, asked: Shared) -> Tensor:
    """The numbers of a slice's states, (numbers, blocks, rows), as they are exchanged."""
    if not asked.block:
        return torch.stack(states(input, index, asked)).view(len(asked.numbers), 1, -1)
    mine = _of_nothing(asked.numbers, input, asked)
    places = [i for i, name in enumerate(asked.numbers) if name != "score"]
    for columns, first, count in blocks_of(asked):
        found = states(input[..., columns].unflatten(-1, (count, -1)), None, asked)
        for i, numbers in zip(places, found, strict=True):
            mine[i, first : first + count] = numbers.reshape(-1, count).mT
    if index is not None:
        mine[asked.numbers.index("score"), asked.home] = chosen(input, index, asked).reshape(-1)
    return mine


def exchanged_sums(grad: Tensor, output: Tensor, asked: Shared) -> Tensor:
    """What the gradient of a softmax, or of its logarithm, sums over a slice: (1, blocks, rows)."""
    type_ = wide(output.dtype)
    terms = grad.to(type_) if asked.log else grad.to(type_) * output
    if not asked.block:
        return terms.sum(-1).view(1, 1, -1)
    mine = _of_nothing(("sum",), output, asked)
    for columns, first, count in blocks_of(asked):
        found = terms[..., columns].unflatten(-1, (count, -1)).sum(-1)
        mine[0, first : first + count] = found.reshape(-1, count).mT
    return mine


def _of_nothing(names: tuple[str, ...], input: Tensor, asked: Shared) -> Tensor:
    rows = input.shape[:-1].numel()
    values = torch.tensor([NOTHING[name] for name in names], dtype=wide(input.dtype), device=input.device)
    return values.view(-1, 1, 1).repeat(1, asked.blocks, rows)


def chosen(input: Tensor, index: Tensor, asked: Shared) -> Tensor:
    """The scores at an index into whole rows, -inf where it lies elsewhere."""
    local, here = asked.local(index)
    nothing = input.new_full(local.shape, -torch.inf, dtype=wide(input.dtype))
    if not input.shape[-1]:
        return nothing
    scores = input.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(nothing.dtype) * asked.scale
    return torch.where(here, scores, nothing)


def total(every: Tensor) -> Tensor:
    """The sums of rows from those of all parts, (ranks, 1, blocks, rows)."""
    return in_order(every.squeeze(1).transpose(0, 1).flatten(0, 1))


def merged(every: Tensor, index: Tensor | None, asked: Shared) -> tuple[Tensor, dict[str, Tensor]]:
    """(the numbers of whole rows that are kept, the results that are asked for, by name) from the states of all parts,
    (ranks, numbers, blocks, rows)."""
    parts = every.permute(2, 0, 1, 3).flatten(0, 1).unbind(1)
    n = dict(zip(asked.numbers, parts, strict=True))
    top = n["max"].amax(0)
    shift = reference(n["max"]) - reference(top)
    ratio = shift.exp()
    sums = in_order(n["sum"] * ratio)
    log = sums.log()
    found = {"lse": torch.where(top == torch.inf, top, top + log)}
    whole = [top, sums]
    if "weighted" in asked.beside:
        weighted = n["weighted"] + n["sum"] * shift.clamp(min=-1e4)
        found["entropy"] = log - in_order(weighted * ratio) / sums
        whole.append(found["entropy"])
    if "even" in asked.beside:
        found["even"] = in_order(n["fallen"] + n["count"] * shift) / in_order(n["count"]) - log
    if "chosen" in asked.beside:
        found["found"] = n["score"].amax(0) - top - log
        _check(index, asked)
    if "loss" in asked.names:
        loss = -found["found"]
        if asked.smoothing:
            loss = (1 - asked.smoothing) * loss - asked.smoothing * found["even"]
        loss = loss + asked.squares * found["lse"].square() if asked.squares else loss
        found["loss"] = torch.where(index == asked.ignore, 0.0, loss)
    return torch.stack(whole), {name: found[name] for name in asked.names}


def _check(index: Tensor, asked: Shared) -> None:
    """Raise IndexError for an index of which no rank has the element, where it is known how long rows are."""
    if not asked.size or index.device.type != "cpu" or not index.numel():
        return
    wrong = (index < 0) | (index >= asked.size)
    wrong &= index != asked.ignore if "loss" in asked.names else True
    if wrong.any():
        raise IndexError(
            f"index has an element {int(index[wrong][0])}: it must lie in 0 to {asked.size - 1}, the rows' elements"
        )


def finished(
    math: str,
    tensors: list[Tensor],
    output: Tensor,
    whole: Tensor,
    asked: Shared,
    index: Tensor | None = None,
    upstream: Mapping[str, Tensor] | None = None,
    share: Tensor | None = None,
) -> None:
    """What a slice becomes, see `kernels.finished`; whole: (numbers, ...) in the shape of the rows."""
    of_rows, at = [*whole.unbind(0)], None
    entropies = upstream is not None and "entropy" in upstream
    if upstream is not None:
        g, at = _gradients(tensors[0], of_rows, asked, index, upstream, share)
        of_rows = [*of_rows[: 2 + entropies], *g.values()]
    of_rows, scale = [t.unsqueeze(-1) for t in of_rows], asked.scale

    def finish(y: Tensor, x: Tensor, *rest: Tensor) -> None:
        x = x.to(wide(x.dtype, whole.dtype))
        if math == "softmax_backward":
            other, total = rest
            y.copy_((x - total) * other * scale)
            return
        if math == "log_softmax_backward":
            other, total = rest
            y.copy_((x - other.to(x.dtype).exp() * total) * scale)
            return
        top, total, *more = rest
        apart = x * scale - top
        if math == "log_softmax":
            y.copy_(apart - total.log())
        elif math == "softmax":
            y.copy_(apart.exp() / total)
        else:
            y.copy_(_terms(apart, total, more) * scale)

    in_pieces(finish, [output, *tensors, *of_rows], output.dim() - 1)
    if at is not None and output.shape[-1]:
        local, here = asked.local(index)
        values = torch.where(
            here.unsqueeze(-1), at.unsqueeze(-1).to(output.dtype), output.gather(-1, local[..., None])
        )
        output.scatter_(-1, local.unsqueeze(-1), values)


def _terms(apart: Tensor, total: Tensor, more: list[Tensor]) -> Tensor:
    """The gradient of scores that are not chosen. more: what `_gradients` gives, behind an entropy if that has one."""
    p = apart.exp() / total
    if len(more) == 2:
        of_lse, even = more
        return p * of_lse + even
    entropy, of_lse, even, of_entropy = more
    return p * of_lse - of_entropy * product(p, apart - total.log() + entropy) + even


def _gradients(
    input: Tensor,
    of_rows: list[Tensor],
    asked: Shared,
    index: Tensor | None,
    upstream: Mapping[str, Tensor],
    share: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """(what all elements of a row take of the gradients of its numbers, the gradient of the chosen one)."""
    top, total, *entropy = of_rows
    zero = torch.zeros_like(top)
    g = {
        name: upstream[name].to(top.dtype) if name in upstream else zero for name in ("found", "lse", "even")
    }
    log = total.log()
    if "loss" in upstream:
        of_loss = upstream["loss"].to(top.dtype) * (1 if share is None else share.to(top.dtype))
        of_loss = torch.where(index == asked.ignore, 0.0, of_loss)
        g["found"], g["even"] = -(1 - asked.smoothing) * of_loss, -asked.smoothing * of_loss
        g["lse"] = g["lse"] + 2 * asked.squares * (top + log) * of_loss
    made = {"total": g["lse"] - g["found"] - g["even"], "even": g["even"] / max(asked.size, 1)}
    of_entropy = upstream.get("entropy")
    if of_entropy is not None:
        made["entropy"] = of_entropy.to(top.dtype)
    at = None
    if "found" in upstream or "loss" in upstream:
        found = chosen(input, index, asked) - top - log
        p = found.exp()
        at = (g["lse"] - g["even"]) * p - g["found"] * torch.expm1(found)
        if of_entropy is not None:
            at = at - made["entropy"] * product(p, found + entropy[0])
        at = (at + made["even"]) * asked.scale
    return made, at
