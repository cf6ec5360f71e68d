"""Plan -> named figures, drawn from the very layouts that the kernel is built from.

`figures(plan)` gives them by name, `write(plan, folder)` puts them into files beside the explorer, and
`python -m cute_softmax diagrams 4096x65536 --dtype bf16 -o out/` does so from the command line; with `--matmul 128` it
is softmax(S) @ V with 128 columns of V. Needs no GPU.

A module for each movement has its `View` of a Plan, which layouts are `drawn`, and of a view the `figures`, the `tile`
among them, the `walk` through them and the `heading` of its page.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from layouts import AnyLayout
from layouts.figures import Figure, follow_thread
from layouts.html import save_explorer

from ..plan import PanelClass, RowClass, RowPlan, SweepClass
from ..plan.matmul import MatmulPlan
from ..plan.matmul_backward import MatmulBackwardClass, MatmulBackwardPlan
from ..plan.matmul_class import MatmulClass
from ..plan.short import ShortClass
from ..plan.topk import TopkClass, TopkPlan
from . import matmul, matmul_backward, panel, row, short, sweep, topk
from .row import View

__all__ = ["FOLLOWED", "View", "drawn", "figures", "overview", "page", "write"]

FOLLOWED = "thread"  # the figure of one thread, which the explorer makes itself
AnyPlan = RowPlan | MatmulPlan | MatmulBackwardPlan | TopkPlan
MODULES = {
    "row": row,
    "stream": row,
    "short": short,
    "column": panel,
    "split": panel,
    "sweep": sweep,
    "matmul": matmul,
    "matmul_backward": matmul_backward,
    "topk": topk,
}
# What a person reads in the place of a figure's key.
NAMES = {
    "tv": "threads and values",
    "tile": "tile in global memory",
    "rows": "rows of threads",
    "smem": "tile in shared memory",
    "edges": "head, body, tail",
    "shift": "shifted columns",
    "predicate": "predicate",
    "shuffle": "warp shuffles",
    "reduction_buffer": "reduction buffer",
    "cluster": "exchange in the cluster",
    "exchange": "exchange between CTAs",
    "places": "places of a row ahead",
    "ring": "ring of stages",
    "scores": "scores in shared memory",
    "lines": "lines of scores",
    "pairs": "pairs of scores",
    "ldmatrix": "ldmatrix",
    "registers": "registers of a thread",
    "values": "values in shared memory",
    "grad": "gradient in shared memory",
    "operand": "operand of V",
    "fragments": "fragments of the product",
    "first_product": "first product",
    "second_product": "second product",
    "spread": "k gradients in shared memory",
    "turns": "turns of the ring",
    "workspace": "states of all ranks",
}


def drawn(
    c: RowClass | ShortClass | PanelClass | SweepClass | MatmulClass | MatmulBackwardClass | TopkClass,
) -> dict[str, AnyLayout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    return MODULES[c.movement].drawn(c)


def figures(plan: AnyPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works.

    tv: one step of all threads. tile: the CTA's whole tile in global memory. smem: staged inputs in shared
    memory. edges: head, body and tail of rows off a vector boundary; shift: blocks and vectors of columns off one.
    predicate: the vectors that exist.
    shuffle, reduction_buffer, cluster: how partial results are exchanged in a CTA and a cluster; exchange: in global
    memory. rows: which thread has which short row. Of softmax(S) @ V: tile: its blocks. ring: stages of shared
    memory. scores, values, grad: swizzled tiles there. ldmatrix, pairs, lines: scores on their way to registers.
    registers: one thread's, up to the operand.
    fragments, first_product, second_product: A, B and C of the instructions. exchange: before the store. Of the
    gradient of topk_softmax, spread: the k gradients of a row in shared memory. Of rows that ranks share, turns: the
    places of the ring; workspace: the states of all ranks.
    thread: `thread` (by default one at the end of a group) followed through all of them. What a Plan does not use is
    left out. Raises ValueError for a thread that the CTA lacks; of softmax(S) @ V they count within a warpgroup.
    """
    module = _module_of(plan)
    view = module.View(plan, thread)
    found = module.figures(view)
    shown = [figure for name, figure in found.items() if name not in view.aside]
    return found | {FOLLOWED: follow_thread(shown, view.followed, title=view.whose)}


def _module_of(plan: AnyPlan) -> ModuleType:
    """The module that draws a Plan. Raises ValueError for a movement without figures."""
    if plan.movement not in MODULES:
        raise ValueError(f"the {plan.movement} movement has no figures: it is described in words alone")
    return MODULES[plan.movement]


def overview(plan: AnyPlan) -> Figure:
    """The tile of a Plan over its explanation: what a notebook shows."""
    module = _module_of(plan)
    explained = (" ".join(line.split()) for line in plan.explain().splitlines())
    return module.tile(module.View(plan)).noted(*explained)


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
    """The arguments of `layouts.html.explorer` for a Plan: its figures, and one group's or block's way through them."""
    module = _module_of(plan)
    view, found = module.View(plan, thread), found or figures(plan, thread)
    shown = {name: figure for name, figure in found.items() if name != FOLLOWED}
    title, subtitle = module.heading(view)
    steps = [step for step in module.walk(view) if step.figure in shown]
    names = {name: NAMES[name] for name in shown}
    return {"figures": shown, "title": title, "subtitle": subtitle, "steps": steps, "names": names}
