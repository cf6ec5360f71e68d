"""How a call would run: its Plan, and that in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..dispatch.common.arguments import dims_or_all, given_dims, of_shape, served, torch_dtype
from ..dispatch.common.spec import ScoreArguments, check_names, number, scores_of, with_scores
from ..dispatch.heads.reductions import shape_of, work_of
from ..dispatch.sharded.explained import explained
from ..dispatch.softmax.kernels import backward_work, forward_work, numbers_of_rows
from ..plan import NotPlanned, PanelPlan, Plan, ShortPlan, SweepPlan
from ..plan.describe import GRADIENTS, HEADS, OPERATIONS, REDUCTIONS, SOFTMAXES, plan_rows
from ..plan.hardware import H200, Device
from ..runtime import launch
from ..runtime.invariance import in_force
from ..runtime.neighbours import switched_off

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack


@with_scores
def plan_softmax(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    backward: bool = False,
    log: bool = False,
    online: bool = True,
    in_place: bool = False,
    device: Device = H200,
    **scores: Unpack[ScoreArguments],
) -> Plan | ShortPlan | PanelPlan | SweepPlan:
    """Return the plan of `softmax` for a CUDA tensor, or for a contiguous tensor of a given shape on a given GPU.

    A plan is plain numbers: nothing is compiled or launched, and a shape needs no GPU. Its `explain()` describes it in
    words; `cute_softmax.explain` also covers calls without a plan.

    Args:
        input: A tensor, of which the strides and, on CUDA, the address and GPU matter; or the shape of a contiguous
            one.
        dim: The dimension or dimensions to reduce.
        dtype: The dtype of the result, a torch dtype or "bf16", "fp16" or "fp32"; for a shape also that of the input
            (bfloat16 if None).
        backward: The plan of the backward pass instead.
        log: Plan `log_softmax` instead.
        online: As in `softmax`.
        in_place: Whether the result overwrites the input, as in `softmax_`.
        device: The GPU to plan for, unless the input is a CUDA tensor.
        scale: As in `softmax`. Tensors here and below may be on any device if the input is a shape.
        bias: As in `softmax`.
        mask: As in `softmax`.
        causal: As in `softmax`.
        alpha: As in `softmax`.
        empty_rows: As in `softmax`.
        sink: As in `softmax`.

    Returns:
        The plan: a `ShortPlan` for short contiguous rows, a `Plan` if a CTA or a cluster holds whole contiguous rows on
        chip, a `SweepPlan` for long columns that are read twice, otherwise a `PanelPlan`.

    Raises:
        TypeError: For dtypes without kernels, and as in `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As in `softmax`.
        NotPlanned: As in `softmax`.

    Examples:
        >>> from cute_softmax import plan_softmax
        >>> plan_softmax((4096, 262144), 0).movement
        'column'
    """
    check_names("plan_softmax", scores)
    described, dtype, device = _described(input, dtype, device)
    dims = given_dims(dim, described)
    scored = input
    if not isinstance(input, torch.Tensor):
        scored = described
        scores = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in scores.items()}
    operands, spec = scores_of(scored, dims, dtype, log, online, **scores)
    result = _like(described, dtype)
    *scored, sink = operands
    rows = None if sink is None else numbers_of_rows(result, dims)
    if backward:
        mask, scale = (t if t is None else t.to("meta") for t in scored[1:])
        of_input = _like(result, described.dtype)
        work = backward_work(result, result, mask, scale, spec, of_input, rows, rows)
    else:
        work = forward_work(described, *scored, spec, result, sink=sink, sink_log=rows)
    return work.plan(device, in_place)


def _like(described: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result of such a tensor, without its memory. For the strides of others torch imports SymPy: half a second."""
    if described.is_contiguous():
        return of_shape(described.shape, dtype)
    return torch.empty_like(described, dtype=dtype, device="meta")


def _described(
    input: torch.Tensor | Sequence[int],
    dtype: torch.dtype | str | None,
    device: Device,
    on_ranks: bool = False,
) -> tuple[torch.Tensor, torch.dtype, Device]:
    """A tensor like the input of a call, the dtype of its result, and its GPU: what a CUDA tensor says itself.

    on_ranks: see `launch.facts_for`.
    Raises TypeError for dtypes without kernels, ValueError for a shape that no tensor has.
    """
    name = launch.DTYPE_NAMES.get(dtype, dtype)
    given = isinstance(input, torch.Tensor)
    source = launch.DTYPE_NAMES.get(input.dtype, input.dtype) if given else name or "bf16"
    if not {source, name or source} <= launch.TORCH_DTYPES.keys():
        raise TypeError(f"no kernels for {source} -> {name or source}: these go to ATen")
    result = launch.TORCH_DTYPES[name or source]
    if given and input.is_cuda:
        return input, result, launch.facts_for(input.get_device(), in_force(), on_ranks)
    if given:
        return (
            torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta"),
            result,
            device,
        )
    return of_shape(input, launch.TORCH_DTYPES[source]), result, device


def explain(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    op: str = "softmax",
    group: ProcessGroup | int | None = None,
    **options: object,
) -> str:
    """Describe how a call would run on a tensor or a shape: the plan of its kernel, or why torch serves it instead.

    It also tells if the installed version of cutlass-dsl switches off torch's own CuTe DSL operators.

    Args:
        input: A tensor, or the shape of one.
        dim: The dimension or dimensions to reduce.
        dtype: The dtype of the result; for a shape also that of the input (bfloat16 if None).
        op: The function: "softmax", "log_softmax", "logsumexp", "amax", "sum", "entropy", "selective_log_softmax",
            "cross_entropy" or "kl_div".
        group: The ranks that share the rows, as in `softmax`, where the input is one rank's slice; or the number of
            ranks.
        **options: The other arguments of `plan_softmax`; with a group, and for functions with only numbers per row as
            results, `backward`, `scale` and `device`.

    Returns:
        About ten lines of text; one line if nothing is launched.

    Raises:
        TypeError: As in `plan_softmax`.
        IndexError: For a dimension out of range.
        ValueError: For another `op`, for the gradient of amax or sum, and as in `plan_softmax`.
        NotPlanned: As in `softmax`.

    Examples:
        >>> from cute_softmax import explain
        >>> print(explain((4096, 8192), dtype="bf16").splitlines()[0])
        softmax of 4096 rows of 8192, bf16, for sm_90a
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}: it must be one of {', '.join(OPERATIONS)}")
    if op in SOFTMAXES and options.pop("log", False):
        op = "log_softmax"
    if group is not None:
        described, dtype, device = _described(input, dtype, options.pop("device", H200), on_ranks=True)
        return explained(op, described, given_dims(dim, described), dtype, group, device, **options)
    tensors = [t for t in map(options.get, ("bias", "scale", "sink")) if isinstance(t, torch.Tensor)]
    wanted = launch.TORCH_DTYPES.get(dtype, torch_dtype(dtype))
    if isinstance(input, torch.Tensor) and not served(input, wanted or input.dtype, *tensors):
        whose = f"goes to torch.{op} (ATen)" if op in SOFTMAXES else "goes to torch's operations"
        return (
            f"{op} of a {input.dtype} tensor on {input.device} {whose}: "
            "the kernels here take bfloat16, float16 and float32 on CUDA"
        )
    shape = tuple(getattr(input, "shape", input))
    if 0 in shape:
        dims_or_all(dim, of_shape(shape, torch.float32))
        return f"{op} of an empty tensor, {shape}: nothing is launched"
    try:
        text = plan_call_of(op, input, dim, dtype, **options).explain()
    except NotPlanned as reason:
        if op not in ("selective_log_softmax", "cross_entropy"):
            raise
        numbers = "logsumexp" if options.get("backward") else "entropy"
        text = (
            f"composed: {reason}. So numbers of whole rows come from the kernel below, and what belongs to the chosen "
            f"elements from torch's operations\n{plan_call_of(numbers, input, dim, dtype, **options).explain()}"
        )
    beside = switched_off()
    return f"{text}\n  {'beside':<10} {beside}" if beside else text


def plan_call_of(
    op: str,
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    device: Device = H200,
    backward: bool = False,
    **options: object,
) -> Plan | ShortPlan | PanelPlan | SweepPlan:
    """The plan of a function's kernel, or of its gradient's: see `explain`. Raises NotPlanned where it is composed."""
    if op in SOFTMAXES:
        log = op == "log_softmax"
        return plan_softmax(input, dim, dtype, log=log, backward=backward, device=device, **options)
    if op in REDUCTIONS and not backward:
        return plan_reduction(op, input, dim, dtype, device=device, **options)
    if op in ("amax", "sum"):
        raise ValueError(f"the gradient of {op} has no kernel of its own")
    if others := sorted(options.keys() - {"scale"}):
        raise TypeError(f"{op} takes no {', '.join(others)}")
    described, _, device = _described(input, dtype, device)
    math, parts = (GRADIENTS if backward else HEADS)[op]
    how = {"scale": number("scale", options.get("scale", 1.0)), "invariant": in_force()}
    dims, whole = given_dims(dim, described), launch.operand(described)
    return plan_rows(math, described.shape, dims, whole, device, **how, **parts)


def plan_reduction(
    name: str,
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    device: Device = H200,
) -> Plan | ShortPlan | PanelPlan | SweepPlan:
    """Return the plan of a reduction for a CUDA tensor, or for a contiguous tensor of a given shape on a given GPU.

    Its `explain()` tells in words how the call would run.

    Args:
        name: "logsumexp", "amax" or "sum".
        input: A tensor, of which the strides and, on CUDA, the address and GPU matter; or the shape of a contiguous
            one.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        dtype: The dtype of the result, a torch dtype or "bf16", "fp16" or "fp32"; for a shape also that of the input
            (bfloat16 if None).
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan: a `ShortPlan` for short contiguous rows, a `Plan` if a CTA or a cluster holds whole contiguous rows on
        chip, a `SweepPlan` for long columns that are read twice, otherwise a `PanelPlan`.

    Raises:
        TypeError: For dtypes without kernels.
        IndexError: For a dimension out of range.
        ValueError: For another name, and for a repeated dimension.
        NotPlanned: As in `logsumexp`.
    """
    if name not in REDUCTIONS:
        raise ValueError(f"name is {name!r}: the reductions are {', '.join(REDUCTIONS)}")
    described, result, device = _described(input, dtype, device)
    dims = dims_or_all(dim, described)
    whole = torch.empty(shape_of(described.shape, dims, True), dtype=result, device="meta")
    return work_of(described, name, dims, True, whole, in_force()).plan(device)
