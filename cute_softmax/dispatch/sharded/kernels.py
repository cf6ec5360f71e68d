"""Rows that ranks share, by our kernels: the states of a slice, their merge, and what a slice becomes: tensors to
launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from ...plan import NotPlanned
from ...plan.shards import plan_merge, plan_slice
from ...runtime import launch
from ..heads.kernels import Rows, scaled, statistics
from ..softmax.kernels import lie_apart
from . import formulas
from .states import NOTHING, Shared, blocks_of

Tensor = torch.Tensor


def states(input: Tensor, index: Tensor | None, asked: Shared) -> Tensor:
    """The numbers of a slice's states, (numbers, blocks, rows), as they are exchanged: written by the kernel that reads
    the slice. input: (..., its elements); index: (...) into whole rows."""
    rows = input.shape[:-1]
    mine = torch.empty(
        (len(asked.numbers), asked.blocks, rows.numel()), dtype=torch.float32, device=input.device
    )
    if asked.blocks > 1 or not asked.width:
        for numbers, name in zip(mine, asked.numbers, strict=True):
            numbers.fill_(NOTHING[name])
    if not asked.block:
        if asked.width:
            _state(input, index, asked, [n.view(rows) for n in mine[:, 0]])
        return mine
    for columns, first, count in blocks_of(asked):
        part = input[..., columns].unflatten(-1, (count, -1))
        to = mine[:, first : first + count].mT.unflatten(1, rows)
        _state(part, None, asked, [n for n, name in zip(to, asked.numbers, strict=True) if name != "score"])
    if index is not None:
        mine[asked.numbers.index("score"), asked.home] = formulas.chosen(input, index, asked).view(-1)
    return mine


def _state(input: Tensor, index: Tensor | None, asked: Shared, to: list[Tensor]) -> None:
    """The states of rows (..., elements) into tensors (...); without an index none of chosen scores."""
    try:
        launch.run(*state_work(input, index, asked, to))
    except NotPlanned:  # rows whose elements do not lie side by side, or longer ones than a cluster holds
        _composed(input, index, asked, to)


def state_work(input: Tensor, index: Tensor | None, asked: Shared, to: list[Tensor]) -> launch.Work:
    """The launch that writes the states of rows: see `_state`."""
    entropies, chosen = "weighted" in asked.beside, index is not None
    name = {(False, True): "selective", (True, False): "entropy", (True, True): "selective_entropy"}
    prologue, numbers = scaled(asked.scale, even=asked.even, state="chosen" if chosen else "alone")
    tensors = input, *[t.unsqueeze(-1).expand(input.shape) for t in ([index] * chosen + to)]
    return launch.Work(
        name.get((entropies, chosen), "logsumexp"),
        tensors,
        (input.dim() - 1,),
        prologue=prologue,
        numbers=numbers + (asked.start,) * chosen,
        invariant=asked.block > 0,
    )


def _composed(input: Tensor, index: Tensor | None, asked: Shared, to: list[Tensor]) -> None:
    """`_state` of the numbers that kernels give of all rows."""
    if asked.even:
        found = formulas.states(input, index, asked)
    else:
        rows = Rows((input.dim() - 1,), asked.scale, "entropy", asked.block > 0)
        top, log, entropy = (t.squeeze(-1) for t in statistics(input, rows))
        total = log.exp()
        found = [top, total]
        if "weighted" in asked.beside:
            found.append(torch.where(total == 0, 0.0, (log - entropy) * total))
        if index is not None:
            found.append(formulas.chosen(input, index, asked))
    for number, tensor in zip(found, to, strict=True):
        tensor.copy_(number)


def sums(grad: Tensor, output: Tensor, asked: Shared) -> Tensor:
    """What the gradient of a softmax, or of its logarithm, sums over a slice: (1, blocks, rows)."""
    rows = output.shape[:-1]
    mine = torch.empty((1, asked.blocks, rows.numel()), dtype=torch.float32, device=output.device)
    if asked.blocks > 1 or not asked.width:
        mine.zero_()
    if not asked.block:
        if asked.width:
            _sum(grad, output, asked, mine[0, 0].view(rows))
        return mine
    for columns, first, count in blocks_of(asked):
        cut = (t[..., columns].unflatten(-1, (count, -1)) for t in (grad, output))
        _sum(*cut, asked, mine[0, first : first + count].mT.unflatten(0, rows))
    return mine


def _sum(grad: Tensor, output: Tensor, asked: Shared, to: Tensor) -> None:
    try:
        launch.run(*sum_work(grad, output, asked, to))
    except NotPlanned:
        terms = grad.float() if asked.log else grad.float() * output
        to.copy_(terms.sum(-1))


def sum_work(grad: Tensor, output: Tensor, asked: Shared, to: Tensor) -> launch.Work:
    """The launch that writes what `sums` gives of rows, (...)."""
    to, invariant = to.unsqueeze(-1).expand(output.shape), asked.block > 0
    dims = (output.dim() - 1,)
    if asked.log:
        return launch.Work("sum", (grad, to), dims, invariant=invariant)
    prologue, _ = scaled(1.0, state="alone")
    return launch.Work("softmax_backward", (grad, output, to), dims, prologue=prologue, invariant=invariant)


def merged(every: Tensor, index: Tensor | None, asked: Shared) -> tuple[Tensor, dict[str, Tensor]]:
    """(the numbers of whole rows that are kept, (numbers, rows); the results that are asked for, by name, (rows))."""
    ranks, _, blocks, rows = every.shape
    whole = every.new_empty((asked.whole, rows))
    # The losses of rows are reduced further.
    dtype = torch.float32 if "loss" in asked.names and asked.reduction != "none" else asked.dtype
    results = {name: every.new_empty(rows, dtype=dtype) for name in asked.names}
    bits = launch.float_bits(asked.smoothing), launch.float_bits(asked.squares)
    ignore = asked.ignore if "loss" in asked.names else -1
    numbers = rows, ranks, blocks, ignore, asked.size, *bits
    at = [index.contiguous()] if "chosen" in asked.beside else []
    given = every, *at, whole, *results.values()
    written = launch.DTYPE_NAMES[dtype] if results else "fp32"
    _launch(given, plan_merge, "state", written, asked.beside, asked.names, numbers)
    return whole, results


def total(every: Tensor) -> Tensor:
    """The sums of rows, (rows), from those of all parts, (ranks, 1, blocks, rows)."""
    ranks, _, blocks, rows = every.shape
    found = every.new_empty(rows)
    _launch((every, found), plan_merge, "sum", "fp32", (), (), (rows, ranks, blocks))
    return found


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
    """What a slice becomes, into `output`: of its elements, or a gradient and the result, and of whole rows' numbers.

    math: one of `plan.shards.OF_SLICES`. whole: (numbers, rows). index, upstream, share: of the gradient of numbers:
    chosen elements, what flows back into each, (rows) or one number of all, and the factor on that of a loss.
    """
    if not output.numel():
        return
    upstream = dict(upstream or {})
    full = [matrix(t) for t in (*tensors, output)]
    if any(t is None for t in full):
        rows = output.shape[:-1]
        given = {name: t.view(rows) if t.dim() else t.expand(rows) for name, t in upstream.items()}
        given = given if math == "gradient" else None
        at = None if index is None else index.view(rows)
        formulas.finished(math, tensors, output, whole.view(len(whole), *rows), asked, at, given, share)
        return
    dtype = next((t.dtype for t in upstream.values()), None)
    flags = {"scaled": asked.scale != 1}
    if "loss" in upstream:
        flags |= {
            "smoothed": asked.smoothing != 0,
            "squares": asked.squares != 0,
            "shared": share is not None,
        }
    of_rows, steps = (
        [t.to(dtype).contiguous() for t in upstream.values()],
        [t.dim() for t in upstream.values()],
    )
    floats = asked.scale, asked.smoothing, asked.squares
    numbers = asked.size, asked.start, asked.ignore, *map(launch.float_bits, floats)
    at = [] if index is None else [index.contiguous()]
    given = *full, whole, *at, *of_rows, *[share] * (share is not None)
    _launch(
        given, plan_slice, math, tuple(full[0].shape), tuple(map(launch.operand, full)),
        tuple(name for name, on in flags.items() if on), tuple(upstream),
        launch.DTYPE_NAMES[dtype] if dtype else "", tuple(steps), numbers,
    )  # fmt: skip


def laid_like(grad: Tensor, output: Tensor) -> Tensor:
    """A gradient that lies as the result does, so that both are read alike."""
    if lie_apart(grad, output, (output.dim() - 1,)):
        return torch.empty_like(output, dtype=grad.dtype).copy_(grad)
    return grad


def matrix(tensor: Tensor) -> Tensor | None:
    """The rows of a tensor as a matrix over the same memory; None where they are not equally far apart, or their
    elements do not lie side by side."""
    try:
        rows = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else None


def _launch(tensors: tuple[Tensor, ...], plan_of: Callable, *arguments: object) -> None:
    device = tensors[0].get_device()
    _call(device, plan_of, *arguments).on_device(device, *[t.data_ptr() for t in tensors])


@lru_cache(maxsize=1024)
def _call(device: int, plan_of: Callable, *arguments: object) -> launch.Call:
    """The Call of a plan without a prologue."""
    plan = plan_of(*arguments, launch.device_facts(device))
    return launch.Call(plan, launch.function_of(plan.kernel))
