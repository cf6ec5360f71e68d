"""How a call on rows shared by ranks would run, in words: whether slices stay on chip, and what reads them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from ...plan import NotPlanned
from ...plan.hardware import Device
from ...runtime import launch
from ...runtime.peers import reaches
from ..common.spec import number
from ..heads import loss as of_losses
from ..heads.kernels import scaled
from .functions import block_asked, shared_dim
from .kernels import state_work, sum_work
from .on_chip import sharers_of
from .states import Shared, check_group, slice_of
from .ways import VISITS_PAY, Facts, way_of

Tensor = torch.Tensor
# What functions of numbers of rows ask of the exchange: see `Shared`.
RESULTS = {
    "logsumexp": "lse",
    "entropy": "entropy",
    "selective_log_softmax": "found",
    "cross_entropy": "loss",
}
ON_CHIP = "slices stay on chip and are read once, as ranks write states into each other's memory"
BEFORE, TWICE = "before it", "before and after it"  # when slices are read


def explained(
    op: str,
    input: Tensor,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    group: dist.ProcessGroup | int,
    device: Device,
    *,
    scale: float = 1.0,
    backward: bool = False,
) -> str:
    """How a function of rows that ranks share runs, or its gradient; of a cross entropy that is both directions.

    input: a slice, or a tensor that describes it, equally long on all ranks; group: the ranks that share rows, or how
    many there are.
    Raises ValueError for a function that takes no group, and for more dimensions than one.
    """
    if op not in RESULTS and op not in ("softmax", "log_softmax"):
        raise ValueError(f"{op} takes no group")
    scale = number("scale", scale)
    dim = shared_dim(input, dims)
    if backward and op in RESULTS and op != "cross_entropy":
        return f"the gradient of {op} needs no collective: one kernel reads a slice and writes its gradient"
    if type(group) is not int:
        check_group(group)
    elif group < 1:
        raise ValueError(f"group is {group}: at least one rank has the rows")
    ranks = group if type(group) is int else dist.get_world_size(group)
    title = f"{'the gradient of ' * backward}{op} of rows shared by {ranks} ranks"
    columns = input.shape[dim]
    if not input.numel():
        return f"{title}: nothing is launched for an empty slice"
    part = slice_of(columns, "", 0, ranks * columns, True, block_asked() or None)
    asked = part.asks(scale=scale, dtype=dtype, log=op == "log_softmax", results=RESULTS.get(op, ""))
    shape = input.numel() // columns, columns
    x, y = (torch.empty(shape, dtype=d, device="meta") for d in (input.dtype, dtype))
    found, reached = None, None if type(group) is int else reaches(group)
    function, tensors, kept = _on_chip(op, x, y, asked, backward)
    facts = Facts(function, ranks, *shape, columns, x.dtype, torch.device("cuda"), asked.block > 0, True)
    if way_of(facts).on_chip and reached is not False:
        found = sharers_of(kept.math, [t.dtype for t in tensors], shape, ranks, device)
    bytes_, when, work = _by_collective(op, x, y, asked, backward)
    gathered = f"one all-gather of the states, {bytes_} bytes per row from each; slices are read {when}"
    if found is None:
        try:
            return f"{title}: {gathered}, first by the following kernel\n{work.plan(device).explain()}"
        except NotPlanned as reason:
            return f"{title}: {gathered}; no kernel writes the states: they are composed ({reason})"
    how = ON_CHIP if reached else f"{ON_CHIP}, if they can access it; otherwise {gathered}"
    work = kept._replace(prologue=replace(kept.prologue, ranks=found))
    return f"{title}: {how}\n{work.plan(device).explain()}"


def _on_chip(
    op: str, x: Tensor, y: Tensor, asked: Shared, backward: bool
) -> tuple[str, list[Tensor], launch.Work | None]:
    """(the function of `Facts`, the tensors with all elements, the launch whose slices stay on chip, if there is one);
    without the ranks in its prologue."""
    if op not in RESULTS:
        tensors = [y, y, x] if backward else [x, y]
        math = f"{op}_backward" if backward else op
        return op, tensors, launch.Work(math, tuple(tensors), (1,), prologue=scaled(asked.scale)[0])
    if not backward or x.dtype not in VISITS_PAY:
        return "loss", [], None
    prologue, _ = of_losses.asked_of_kernel(of_losses.Loss("mean", asked.ignore, asked.scale), alpha="groups")
    alpha, target, losses = _of_rows(x, torch.float32, torch.int64, torch.float32)
    tensors = of_losses.operands_of(x, None, alpha.unsqueeze(-1), target, x, losses)
    return "visit", [x, x], launch.Work("softmax", tensors, (1,), prologue=prologue)


def _by_collective(
    op: str, x: Tensor, y: Tensor, asked: Shared, backward: bool
) -> tuple[int, str, launch.Work]:
    """(the bytes of a state, when slices are read, the launch before the collective)."""
    if op not in RESULTS and backward:
        (to,) = _of_rows(x, torch.float32)
        return 4, TWICE, sum_work(y, y, asked, to)
    index = _of_rows(x, torch.int64)[0] if op in ("selective_log_softmax", "cross_entropy") else None
    to = _of_rows(x, *[torch.float32] * len(asked.numbers))
    when = BEFORE if op in RESULTS and not backward else TWICE
    return 4 * len(to), when, state_work(x, index, asked, to)


def _of_rows(x: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """Numbers of the rows, one tensor a dtype."""
    return [torch.empty(len(x), dtype=dtype, device="meta") for dtype in dtypes]
