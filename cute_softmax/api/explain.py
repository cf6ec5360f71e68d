"""How a call would run: its Plan, and that in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..dispatch.arguments import dims_or_all, served
from ..dispatch.reductions import NAMES, result_of
from ..dispatch.softmax_kernels import gradient_prologue, prologue_of, rows_left
from ..dispatch.spec import DEFAULTS, ScoreArguments, Scores, Spec, check_names, scores_of, with_scores
from ..plan import NotPlanned, PanelPlan, Plan, plan
from ..plan.hardware import H200, Device
from ..plan.problem import Operand, canonical, canonical_dims, contiguous
from ..runtime import launch

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TORCH_DTYPES = {name: dtype for dtype, name in launch.DTYPE_NAMES.items()}


@with_scores
def plan_softmax(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    backward: bool = False,
    log: bool = False,
    online: bool = True,
    device: Device = H200,
    **scores: Unpack[ScoreArguments],
) -> Plan | PanelPlan:
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
        device: The GPU to plan for, unless the input is a CUDA tensor.
        scale: As in `softmax`. Tensors here and below may be of any device if the input is a shape.
        bias: As in `softmax`.
        mask: As in `softmax`.
        causal: As in `softmax`.
        alpha: As in `softmax`.
        empty_rows: As in `softmax`.

    Returns:
        The plan: a `Plan` where whole contiguous rows are held on chip by a CTA or a cluster, else a `PanelPlan`.

    Raises:
        TypeError: For dtypes that have no kernels, and as for `softmax`.
        IndexError: For a dimension out of range.
        ValueError: As for `softmax`.
        NotPlanned: As for `softmax`, and for scores that torch's operations compose first.

    Examples:
        >>> from cute_softmax import plan_softmax
        >>> plan_softmax((4096, 262144), 0).movement
        'column'
    """
    shape, first, dtype, device = operand_of(input, dtype, device)
    dims = canonical_dims(dim, len(shape))
    found = _scores(input, dims, scores)
    spec = found.spec(dims, _TORCH_DTYPES[dtype], log)
    result = Operand(dtype, launch.result_strides(shape, first.strides))
    factors = found.scale
    if backward:
        factors = _factors(shape, found, spec)
        prologue = gradient_prologue(found.mask, factors, spec)
        inputs, last = [result, result], first._replace(address=0)
    else:
        prologue = prologue_of(found.bias, found.mask, found.scale, spec)
        inputs, last = [first], result
        inputs += [launch.operand(t.expand(shape)) for t in (found.bias, found.mask) if t is not None]
    if factors is not None:
        inputs.append(Operand("fp32", factors.expand(shape).stride()))
    name, operands = f"{spec.math}_backward" if backward else spec.math, [*inputs, last]
    prologue = prologue.of(name)
    operands = [operands[i] for i in launch.kernel_order(name, prologue)]
    query = len(shape) - 2 if prologue.causal else None
    problem = canonical(shape, dims, operands, query)
    # There are two ways of the softmax alone: its gradient and its logarithm have one.
    return plan(name, problem, device, online=online or log or backward, prologue=prologue)


def _factors(shape: tuple[int, ...], found: Scores, spec: Spec) -> torch.Tensor | None:
    """What a backward multiplies rows by, on no device: see `softmax_kernels.backward`."""
    shapes = [] if found.scale is None else [found.scale.shape]
    if found.mask is not None and not found.zero:
        shapes.append(rows_left(found.mask.to("meta"), spec, torch.empty(shape, device="meta")).shape)
    return torch.empty(torch.broadcast_shapes(*shapes), device="meta") if shapes else None


def _scores(input: torch.Tensor | Sequence[int], dims: tuple[int, ...], given: dict[str, object]) -> Scores:
    check_names("plan_softmax", given)
    if not isinstance(input, torch.Tensor):
        input = torch.empty(tuple(input), device="meta")
        given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    return scores_of(input, dims, **given)


def operand_of(
    input: torch.Tensor | Sequence[int], dtype: torch.dtype | str | None, device: Device
) -> tuple[tuple[int, ...], Operand, str, Device]:
    """(shape, operand of the input, dtype of the result, device) of a call on a tensor, or on a contiguous tensor of
    a shape. Raises TypeError for dtypes without kernels, ValueError for a shape that no tensor has."""
    name = launch.DTYPE_NAMES.get(dtype, dtype)
    if isinstance(input, torch.Tensor):
        shape, strides, source = (
            tuple(input.shape),
            input.stride(),
            launch.DTYPE_NAMES.get(input.dtype, input.dtype),
        )
        address = input.data_ptr() % 16 if input.is_cuda else 0
        device = launch.device_facts(input.get_device()) if input.is_cuda else device
    else:
        shape, source = tuple(input), name or "bf16"
        strides, address = contiguous(source, shape).strides, 0
    if source not in launch.DTYPE_NAMES.values() or (name or source) not in launch.DTYPE_NAMES.values():
        raise TypeError(f"no kernels for {source} -> {name or source}: these go to ATen")
    return shape, Operand(source, strides, address), name or source, device


def explain(
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    **options: object,
) -> str:
    """How `softmax` would run on a tensor or a shape, in words: the plan of its kernel, or why ATen gets it.

    Args:
        input: A tensor, or the shape of one.
        dim: The dimension or dimensions to reduce.
        dtype: Of the result; for a shape also of the input (bfloat16 if None).
        **options: The other arguments of `plan_softmax`.

    Returns:
        Text of about ten lines. It begins with "composed" where torch's operations make scores before a kernel runs.

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
    name = "log_softmax" if options.get("log") else "softmax"
    tensors = [t for t in (options.get("bias"), options.get("scale")) if isinstance(t, torch.Tensor)]
    wanted = _TORCH_DTYPES.get(dtype, dtype)
    if isinstance(input, torch.Tensor) and not served(input, wanted or input.dtype, *tensors):
        return (
            f"{name} of a {input.dtype} tensor on {input.device} goes to torch.{name} (ATen): "
            "the kernels here take bfloat16, float16 and float32 on CUDA"
        )
    try:
        return plan_softmax(input, dim, dtype, **options).explain()
    except NotPlanned as reason:
        plain = {k: v for k, v in options.items() if k not in DEFAULTS}
        if len(plain) == len(options):
            raise
        return (
            f"composed: {reason}. So torch's operations make a float32 tensor of scores first"
            f"{', and its gradient' if options.get('backward') else ''}; without scores the call runs as\n"
            + plan_softmax(input, dim, dtype, **plain).explain()
        )


def plan_reduction(
    name: str,
    input: torch.Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    dtype: torch.dtype | str | None = None,
    *,
    device: Device = H200,
) -> Plan | PanelPlan:
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
        The plan: a `Plan` where whole contiguous rows are held on chip by a CTA or a cluster, else a `PanelPlan`.

    Raises:
        TypeError: For dtypes that have no kernels.
        IndexError: For a dimension out of range.
        ValueError: For another name, and for a repeated dimension.
        NotPlanned: As for `logsumexp`.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}: the reductions are {', '.join(NAMES)}")
    shape, first, result, device = operand_of(input, dtype, device)
    dims = dims_or_all(dim, torch.empty(shape, device="meta"))
    _, strides = result_of(shape, dims, True)
    return plan(name, canonical(shape, dims, [first, Operand(result, strides)]), device)
