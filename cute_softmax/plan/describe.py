"""Plans of contiguous tensors that are described by their shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .choose import RowPlan, plan_call
from .hardware import ARCHITECTURES, H200, Device
from .maths import NotPlanned, math_of
from .matmul import MatmulPlan, canonical_matmul, instruction_of, plan_matmul
from .matmul_backward import MatmulBackwardPlan, plan_matmul_backward
from .problem import ALIGNMENT, ITEM_SIZE, Operand, canonical_dims, check_float, contiguous
from .prologue import FROM_ABOVE, Prologue, facts_of
from .ranks import sharers
from .row_plan import Plan

SOFTMAXES = ("softmax", "log_softmax")
REDUCTIONS = ("logsumexp", "amax", "sum")
# Of functions that give numbers of rows: the row math, and the parts of its prologue; then those of the softmax that is
# their gradient. Of a cross entropy in one visit the gradient has both directions.
HEADS = {
    "entropy": ("entropy", {}),
    "selective_log_softmax": ("selective", {}),
    "cross_entropy": ("logsumexp", {"target": "loss"}),
    "kl_div": ("logsumexp", {"against": "loss"}),
}
GRADIENTS = {
    "logsumexp": ("softmax", {"alpha": "groups"}),
    "entropy": ("softmax", {"entropy": True, "factor": True}),
    "selective_log_softmax": ("softmax", {"alpha": "groups", "target": "found", "factor": True}),
    "cross_entropy": ("softmax", {"alpha": "groups", "target": "loss"}),
    "kl_div": ("softmax", {"alpha": "groups", "against": "input"}),
}
OPERATIONS = (*SOFTMAXES, *REDUCTIONS, *HEADS)


def plan_rows(
    math: str,
    shape: Sequence[int],
    dims: tuple[int, ...],
    whole: Operand,
    device: Device,
    *,
    scale: float = 1.0,
    invariant: bool = False,
    **parts: object,
) -> RowPlan:
    """The plan of a row math whose numbers of rows are float32, as heads ask for it, but for upstream gradients, of the
    dtype of the results. whole: how each of the tensors with all elements lies; parts: of the prologue. Raises
    NotPlanned where no kernel serves it."""
    prologue = Prologue(scale="" if scale == 1 else "number", **parts)
    facts, number = facts_of(math, True, prologue), contiguous("fp32", shape, dims)
    dtypes = {"index": "int64", **(dict.fromkeys(FROM_ABOVE, whole.dtype) if prologue.factor else {})}
    operands = [
        *[whole] * len(facts.inputs),
        *[number._replace(dtype=dtypes.get(name, "fp32")) for name in facts.group_inputs],
        *[whole] * len(facts.outputs),
        *[number] * len(facts.group_outputs),
    ]
    return plan_call(math, shape, dims, operands, device, prologue=prologue, invariant=invariant)


def plan_of(rows: int, columns: int, dtype: str = "bf16", **options) -> RowPlan:
    """The plan for the rows of contiguous (rows, columns) matrices; options as for `plan_shape`."""
    return plan_shape((rows, columns), dtype, **options)


def plan_shape(
    shape: Sequence[int],
    dtype: str = "bf16",
    *,
    dim: int | Sequence[int] = -1,
    math: str = "softmax",
    online: bool = True,
    architecture: str = H200.architecture.name,
) -> RowPlan:
    """The plan for contiguous tensors of a shape, for an H200 or another architecture in its place.

    Raises NotPlanned where no kernel serves it, IndexError for a dimension out of range, TypeError for a dtype without
    kernels, ValueError for a math that there is not (see `math_of`) and for more elements than `contiguous` counts,
    KeyError for an architecture that is not in `ARCHITECTURES`.
    """
    facts, dims = math_of(math, online), canonical_dims(dim, len(shape))
    operands = [contiguous(dtype, shape)] * facts.full
    operands += [contiguous(dtype, shape, dims)] * len(facts.group_outputs)
    device = replace(H200, architecture=ARCHITECTURES[architecture])
    return plan_call(math, shape, dims, operands, device, online=online)


def plan_shared(rows: int, columns: int, dtype: str = "bf16", *, math: str = "softmax") -> Plan:
    """The plan of rows that ranks share and keep on chip, for contiguous slices of (rows, columns) on H200s.

    Raises NotPlanned where they do not fit there, TypeError for a dtype without kernels, ValueError for a math that
    there is not.
    """
    full = math_of(math, True).full
    operands = [contiguous(dtype, (rows, columns))] * full
    ranks = sharers(math, H200.architecture, (dtype,) * full, columns, rows)
    return plan_call(math, (rows, columns), (1,), operands, H200, prologue=Prologue(ranks=ranks))


def plan_matmul_shape(
    shape: Sequence[int],
    depth: int,
    dtype: str = "bf16",
    *,
    scores: str | None = None,
    backward: bool = False,
    causal: int | None = None,
    scale: float = 1.0,
    instruction: str | None = None,
    device: Device = H200,
) -> MatmulPlan | MatmulBackwardPlan:
    """The plan of softmax(S) @ V, or with `backward` that of its gradients, for contiguous S (.., M, N) of `shape` and
    V (.., N, depth).

    dtype: of all, but for what `scores` says of S and dS. causal: the offset of the diagonal. instruction: "wgmma" or
    "mma", None for the device's. Rows of V that TMA cannot step by are padded, as calls do.
    Raises ValueError for a shape of one dimension, with nothing in it or with more elements than `contiguous` counts,
    TypeError for a dtype without kernels, NotPlanned where no kernel serves it.
    """
    if len(shape) < 2:
        raise ValueError(f"scores have at least two dimensions, got {tuple(shape)}")
    if min(*shape, depth) < 1:
        raise ValueError(f"scores {tuple(shape)} and {depth} columns of values: all must be at least 1")
    check_float(dtype)
    if ITEM_SIZE[dtype] != 2:
        raise NotPlanned(f"values in {dtype} take two steps: the softmax, and a product by torch")
    *batch, rows, columns = shape

    instruction = instruction or instruction_of(device.architecture)
    tma = backward or instruction == "wgmma"
    unit = ALIGNMENT // ITEM_SIZE[dtype] if tma else 1
    pitch = -(-depth // unit) * unit

    s, v = contiguous(scores or dtype, shape), contiguous(dtype, (*batch, columns, pitch))
    if not backward:
        problem = canonical_matmul(shape, depth, s, v, dtype, tma=tma)
        return plan_matmul(problem, device, scale=scale, causal=causal, instruction=instruction)
    o = contiguous(dtype, (*batch, rows, pitch))
    operands = {
        "scores": s,
        "grad": o,
        "values": v,
        "dscores": s,
        "dvalues": v,
        "output": o,
        "lse": contiguous("fp32", (*batch, rows)),
    }
    return plan_matmul_backward(shape, (False,) * len(batch), depth, operands, device, causal=causal)
