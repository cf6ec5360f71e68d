"""How a call would run: its Plan, and that in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..dispatch.common.arguments import dims_or_all, given_dims, of_shape, served, torch_dtype
from ..dispatch.common.spec import ScoreArguments, check_names, scores_of, with_scores
from ..dispatch.heads.reductions import NAMES, shape_of, work_of
from ..dispatch.sharded.functions import explained
from ..dispatch.softmax.kernels import backward_work, forward_work, numbers_of_rows
from ..plan import PanelPlan, Plan, ShortPlan
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
) -> Plan | ShortPlan | PanelPlan:
    """The plan of `softmax` for a CUDA tensor, or for a contiguous tensor of some shape on a described GPU.

    A plan is plain numbers: nothing is compiled or launched, and no GPU is needed for a shape. Its `explain()` says it
    in words; `explain` also says what happens where there is none.

    Args:
        input: A tensor, whose strides count and, on CUDA, its address and GPU; or the shape of a contiguous one.
        dim: The dimension or dimensions to reduce.
        dtype: Of the result, a torch dtype or "bf16", "fp16" or "fp32"; for a shape also of the input (bfloat16 if
            None).
        backward: The plan of the backward pass instead.
        log: That of `log_softmax` instead.
        online: As in `softmax`.
        in_place: Whether the result goes to the input, as with `softmax_`.
        device: The GPU to plan for, unless the input is a CUDA tensor.
        scale: As in `softmax`. Tensors here and below may be of any device if the input is a shape.
        bias: As in `softmax`.
        mask: As in `softmax`.
        causal: As in `softmax`.
        alpha: As in `softmax`.
        empty_rows: As in `softmax`.
        sink: As in `softmax`.

    Returns:
        The plan: a `ShortPlan` of short rows that lie one behind another, a `Plan` where whole contiguous rows are held
            on chip by a CTA or a cluster, else a `PanelPlan`.

    Raises:
        TypeError: For dtypes that have no kernels, and as for `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As for `softmax`.
        NotPlanned: As for `softmax`.

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
    result = torch.empty_like(described, dtype=dtype, device="meta")
    *scored, sink = operands
    rows = None if sink is None else numbers_of_rows(result, dims)
    if backward:
        mask, scale = (t if t is None else t.to("meta") for t in scored[1:])
        of_input = torch.empty_like(result, dtype=described.dtype)
        work = backward_work(result, result, mask, scale, spec, of_input, rows, rows)
    else:
        work = forward_work(described, *scored, spec, result, sink=sink, sink_log=rows)
    return work.plan(device, in_place)


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
    group: ProcessGroup | int | None = None,
    **options: object,
) -> str:
    """How `softmax` would run on a tensor or a shape, in words: the plan of its kernel, or why ATen gets it.

    And, where it is so, that the version of cutlass-dsl switches off torch's own operators in the CuTe DSL.

    Args:
        input: A tensor, or the shape of one.
        dim: The dimension or dimensions to reduce.
        dtype: Of the result; for a shape also of the input (bfloat16 if None).
        group: The ranks that share rows, as in `softmax`, of which the input is a slice; or how many there are.
        **options: The other arguments of `plan_softmax`; with a group `log`, `scale` and `device` of them.

    Returns:
        Text of about ten lines, of one for an empty tensor.

    Raises:
        TypeError: As for `plan_softmax`.
        IndexError: For a dimension out of range.
        ValueError: As for `plan_softmax`.
        NotPlanned: As for `softmax`.

    Examples:
        >>> from cute_softmax import explain
        >>> print(explain((4096, 8192), dtype="bf16").splitlines()[0])
        softmax of 4096 rows of 8192, bf16, for sm_90a
    """
    if group is not None:
        device = options.pop("device", H200)
        described, dtype, device = _described(input, dtype, device, on_ranks=True)
        return explained(described, given_dims(dim, described), dtype, group, device, **options)
    name = "log_softmax" if options.get("log") else "softmax"
    tensors = [t for t in map(options.get, ("bias", "scale", "sink")) if isinstance(t, torch.Tensor)]
    wanted = launch.TORCH_DTYPES.get(dtype, torch_dtype(dtype))
    if isinstance(input, torch.Tensor) and not served(input, wanted or input.dtype, *tensors):
        return (
            f"{name} of a {input.dtype} tensor on {input.device} goes to torch.{name} (ATen): "
            "the kernels here take bfloat16, float16 and float32 on CUDA"
        )
    made = plan_softmax(input, dim, dtype, **options)
    if not (made.problem.length and made.problem.groups):
        return f"{name} of an empty tensor, {tuple(getattr(input, 'shape', input))}: nothing is launched"
    beside = switched_off()
    return f"{made.explain()}\n  {'beside':<10} {beside}" if beside else made.explain()


def plan_reduction(
    name: str,
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    device: Device = H200,
) -> Plan | ShortPlan | PanelPlan:
    """The plan of a reduction for a CUDA tensor, or for a contiguous tensor of some shape on a described GPU.

    Its `explain()` says in words how the call would run.

    Args:
        name: "logsumexp", "amax" or "sum".
        input: A tensor, whose strides count and, on CUDA, its address and GPU; or the shape of a contiguous one.
        dim: The dimension or dimensions to reduce; all of them if None or empty.
        dtype: Of the result, a torch dtype or "bf16", "fp16" or "fp32"; for a shape also of the input (bfloat16 if
            None).
        device: The GPU to plan for, unless the input is a CUDA tensor.

    Returns:
        The plan: a `ShortPlan` of short rows that lie one behind another, a `Plan` where whole contiguous rows are held
            on chip by a CTA or a cluster, else a `PanelPlan`.

    Raises:
        TypeError: For dtypes that have no kernels.
        IndexError: For a dimension out of range.
        ValueError: For another name, and for a repeated dimension.
        NotPlanned: As for `logsumexp`.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}: the reductions are {', '.join(NAMES)}")
    described, result, device = _described(input, dtype, device)
    dims = dims_or_all(dim, described)
    whole = torch.empty(shape_of(described.shape, dims, True), dtype=result, device="meta")
    return work_of(described, name, dims, True, whole, in_force()).plan(device)
