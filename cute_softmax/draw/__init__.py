"""Plan -> named figures, drawn from the very layouts that the kernel is built from.

`figures(plan)` gives them by name, `write(plan, folder)` puts them into files beside the explorer, and
`python -m cute_softmax diagrams 4096x65536 --dtype bf16 -o out/` does so from the command line; with `--matmul 128` it
is softmax(S) @ V with 128 columns of V. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from layouts import AnyLayout
from layouts.figures import Figure
from layouts.html import Step, save_explorer

from ..plan import NotPlanned, PanelClass, PanelPlan, Plan, RowClass, math_of, plan
from ..plan.hardware import ARCHITECTURES, H200, Device
from ..plan.matmul import MatmulClass, MatmulPlan, canonical_matmul, instruction_of, plan_matmul
from ..plan.matmul_backward import MatmulBackwardClass, MatmulBackwardPlan, plan_matmul_backward
from ..plan.problem import ALIGNMENT, ITEM_SIZE, canonical, canonical_dims, check_float, contiguous
from . import matmul, matmul_backward, panel, row
from .common import FOLLOWED
from .row import View

__all__ = [
    "FOLLOWED",
    "View",
    "drawn",
    "figures",
    "overview",
    "page",
    "plan_matmul_shape",
    "plan_of",
    "plan_shape",
    "walk",
    "write",
]


AnyPlan = Plan | PanelPlan | MatmulPlan | MatmulBackwardPlan
MODULES = {
    PanelPlan: panel,
    PanelClass: panel,
    MatmulPlan: matmul,
    MatmulClass: matmul,
    MatmulBackwardPlan: matmul_backward,
    MatmulBackwardClass: matmul_backward,
}


def _movement(made: AnyPlan | RowClass | PanelClass | MatmulClass | MatmulBackwardClass) -> ModuleType:
    """The module that draws a Plan or a class."""
    return next((module for kind, module in MODULES.items() if isinstance(made, kind)), row)


def drawn(c: RowClass | PanelClass | MatmulClass | MatmulBackwardClass) -> dict[str, AnyLayout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    return _movement(c).drawn(c)


def figures(plan: AnyPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works.

    tv: one step of all threads. tile: the CTA's whole tile in global memory. smem: staged inputs in shared
    memory. edges: head, body and tail of rows off a vector boundary; shift: blocks and vectors of columns off one.
    predicate: the vectors that exist.
    shuffle, reduction_buffer, cluster: how partial results meet in a CTA and a cluster; meeting: in global memory.
    Of softmax(S) @ V: tile: its blocks. ring: stages of shared memory. scores, values, grad: swizzled tiles there.
    ldmatrix, pairs, lines: scores on their way to registers. registers: one thread's, up to the operand. fragments,
    first_product, second_product: A, B and C of the instructions. exchange: before the store.
    thread: `thread` (by default one at the end of a group) followed through all of them. What a Plan does not use is
    left out. Raises ValueError for a thread that the CTA lacks; of softmax(S) @ V they count within a warpgroup.
    """
    return _movement(plan).figures(plan, thread)


def overview(plan: AnyPlan) -> Figure:
    """The tile of a Plan over its explanation: what a notebook shows."""
    explained = (" ".join(line.split()) for line in plan.explain().splitlines())
    return _movement(plan).overview(plan).noted(*explained)


def walk(plan: AnyPlan, found: dict[str, Figure], thread: int | None = None) -> list[Step]:
    """The steps of the explorer: one group on its way through the figures of the Plan."""
    return _movement(plan).walk(plan, found, thread)


def write(plan: AnyPlan, folder: str | Path, png: bool = False, thread: int | None = None) -> list[Path]:
    """Write all figures of a Plan as SVG (and PNG) and its explorer, a page that links them.

    Returns the paths. png: needs cairosvg, RuntimeError without it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = figures(plan, thread)
    endings = [".svg", ".png"] if png else [".svg"]
    paths = [figure.save(folder / f"{name}{end}") for name, figure in found.items() for end in endings]
    return [*paths, save_explorer(folder / "explorer.html", **page(plan, found, thread))]


def page(plan: AnyPlan, found: dict[str, Figure] | None = None, thread: int | None = None) -> dict:
    """The arguments of `layouts.html.explorer` for a Plan."""
    found = found or figures(plan, thread)
    shown = {name: figure for name, figure in found.items() if name != FOLLOWED}
    title, subtitle = _movement(plan).heading(plan, thread)
    return {"figures": shown, "title": title, "subtitle": subtitle, "steps": walk(plan, shown, thread)}


def plan_of(rows: int, columns: int, dtype: str = "bf16", **options) -> Plan | PanelPlan:
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
) -> Plan | PanelPlan:
    """The plan for contiguous tensors of a shape, for an H200 or another architecture in its place.

    Raises NotPlanned where no kernel serves it, IndexError for a dimension out of range, TypeError for a dtype without
    kernels, ValueError for a math that there is not (see `math_of`) and for more elements than `contiguous` counts,
    KeyError for an architecture that is not in `ARCHITECTURES`.
    """
    facts, dims = math_of(math, online), canonical_dims(dim, len(shape))
    operands = [contiguous(dtype, shape)] * facts.full
    operands += [contiguous(dtype, shape, dims)] * len(facts.group_outputs)
    device = replace(H200, architecture=ARCHITECTURES[architecture])
    return plan(math, canonical(shape, dims, operands), device, online=online)


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
