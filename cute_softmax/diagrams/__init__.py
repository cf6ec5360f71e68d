"""Plan -> named figures, drawn from the very layouts that the kernel is built from.

`figures(plan)` gives them by name, `write(plan, folder)` puts them into files beside the explorer, and
`python -m cute_softmax diagrams 4096x65536 --dtype bf16 -o out/` does so from the command line. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from layouts import Layout
from layouts.figures import Figure
from layouts.html import Step, save_explorer

from ..hardware import ARCHITECTURES, H200
from ..plan import MATHS, PanelClass, PanelPlan, Plan, RowClass, plan
from ..problem import Operand, canonical, canonical_dims
from . import panel, row
from .command import main
from .command import parser as _parser
from .common import FOLLOWED
from .row import View

__all__ = [
    "FOLLOWED",
    "View",
    "_parser",
    "drawn",
    "figures",
    "main",
    "overview",
    "page",
    "plan_of",
    "plan_shape",
    "walk",
    "write",
]


def _movement(plan: Plan | PanelPlan) -> ModuleType:
    """The module that draws a Plan."""
    return panel if isinstance(plan, PanelPlan) else row


def drawn(c: RowClass | PanelClass) -> dict[str, Layout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    return panel.drawn(c) if isinstance(c, PanelClass) else row.drawn(c)


def figures(plan: Plan | PanelPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works.

    tv: one step of all threads. tile: the CTA's whole tile in global memory. smem: staged inputs in shared
    memory. edges: head, body and tail of rows off a vector boundary. predicate: the vectors that exist.
    shuffle, reduction_buffer, cluster: how partial results meet in a CTA and a cluster; meeting: in global memory.
    thread: `thread` (by default one at the end of a group) followed through all of them. What a Plan does not use is
    left out. Raises ValueError for a thread that the CTA lacks.
    """
    return _movement(plan).figures(plan, thread)


def overview(plan: Plan | PanelPlan) -> Figure:
    """The tile of a Plan over its explanation: what a notebook shows."""
    explained = (" ".join(line.split()) for line in plan.explain().splitlines())
    return _movement(plan).overview(plan).noted(*explained)


def walk(plan: Plan | PanelPlan, found: dict[str, Figure], thread: int | None = None) -> list[Step]:
    """The steps of the explorer: one group on its way through the figures of the Plan."""
    return _movement(plan).walk(plan, found, thread)


def write(
    plan: Plan | PanelPlan, folder: str | Path, png: bool = False, thread: int | None = None
) -> list[Path]:
    """Write all figures of a Plan as SVG (and PNG) and its explorer, a page that links them.

    Returns the paths. png: needs cairosvg, RuntimeError without it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = figures(plan, thread)
    endings = [".svg", ".png"] if png else [".svg"]
    paths = [figure.save(folder / f"{name}{end}") for name, figure in found.items() for end in endings]
    return [*paths, save_explorer(folder / "explorer.html", **page(plan, found, thread))]


def page(plan: Plan | PanelPlan, found: dict[str, Figure] | None = None, thread: int | None = None) -> dict:
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

    Raises NotPlanned where no kernel serves it, IndexError for a dimension out of range, KeyError for an architecture
    that is not in `ARCHITECTURES`.
    """
    facts, dims = MATHS[math, online], canonical_dims(dim, len(shape))
    operands = [Operand(dtype, _strides(shape, ()))] * facts.full
    operands += [Operand(dtype, _strides(shape, dims))] * len(facts.group_outputs)
    device = replace(H200, architecture=ARCHITECTURES[architecture])
    return plan(math, canonical(shape, dims, operands), device, online=online)


def _strides(shape: Sequence[int], reduced: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor with one element in each reduced dimension, where they are 0."""
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        if d not in reduced:
            strides[d], step = step, step * shape[d]
    return tuple(strides)
