"""Figures of Plans of softmax(S) @ V's gradients: everything is transposed, columns of S are the rows of products.

Threads are counted within their warpgroup, as in `matmul`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from layouts import AnyLayout, Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.html import Step

from ..plan import matmul_layouts as named
from ..plan.matmul_backward import SLAB, MatmulBackwardClass, MatmulBackwardPlan
from ..plan.problem import ITEM_SIZE
from . import checks
from .common import FOLLOWED, count
from .matmul_tile import Blocks, Followed, Stages, product, products, ring


@dataclass(frozen=True)
class View(Followed):
    """What the figures of a Plan show: the first slab of 64 columns of S in the first stage of the ring."""

    @property
    def size(self) -> int:
        """Bytes of an element of S."""
        return ITEM_SIZE[self.kernel.dtypes[0]]

    @property
    def half(self) -> int:
        """Bytes of an element of V and dO."""
        return ITEM_SIZE[self.kernel.dtypes[1]]

    @cached_property
    def scores(self) -> AnyLayout:
        """(row, column) of the tile of S -> element of its stage; lines as where all begin at 16 bytes."""
        c = self.kernel
        if c.lines:
            return Layout((c.rows, c.columns), (c.pitch, 1))
        return named.first_stage(named.by_rows(self.size, c.rows, c.columns, 1))

    @cached_property
    def grad(self) -> AnyLayout:
        """(row, column) of the tile of dO -> element of its stage."""
        c = self.kernel
        return named.first_stage(named.by_rows(self.half, c.rows, c.depth, 1))


def drawn(c: MatmulBackwardClass) -> dict[str, AnyLayout]:
    """The layouts of a class that its kernel has and figures draw; see `draw.drawn`."""
    return named.backward_layouts(c)


def figures(plan: MatmulBackwardPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    view, c = View(plan, thread), plan.kernel
    found = {"tile": _tile(view), "ring": _ring(view)}
    if c.lines:
        found["lines"] = _lines(view)
    else:
        found |= {"scores": _scores(view), "ldmatrix": _ldmatrix(view)}
    found |= {
        "grad": _grad(view),
        "first_product": _first_product(view),
        "registers": _registers(view),
        "second_product": _second_product(view),
    }
    followed = [f for name, f in found.items() if name not in ("ring", "scores", "grad")]
    found[FOLLOWED] = draw.follow_thread(
        followed, view.followed, title=f"Thread {view.followed} of the first warpgroup"
    )
    return found


def overview(plan: MatmulBackwardPlan) -> Figure:
    """The tile of a Plan."""
    return _tile(View(plan))


def _tile(view: View) -> Figure:
    c, p = view.kernel, view.plan
    slabs, boxes = [SLAB] * c.slabs, [SLAB] * (c.depth // SLAB)
    steps = [named.INSTRUCTION_K] * (c.rows // named.INSTRUCTION_K)

    def owner(slab: int, column: int) -> int:
        return slab * c.shares

    def share(slab: int, box: int) -> int:
        return slab * c.shares + box * SLAB // c.share_depth

    first = product(
        "dPᵀ = V dOᵀ",
        Blocks(
            f"V: {c.columns} \u00d7 {c.depth}",
            slabs,
            boxes,
            (lambda r, i: None) if c.deep else owner,
            lambda r, i: "sV" if c.deep else f"box {i}",
            "sV" if c.deep else "A operand, registers",
        ),
        Blocks(
            f"dOᵀ: {c.depth} \u00d7 {c.rows}",
            boxes,
            [c.rows],
            lambda r, i: None,
            lambda r, i: "sO",
            "sO",
        ),
        Blocks(
            f"dPᵀ: {c.columns} \u00d7 {c.rows}",
            slabs,
            [c.rows],
            owner,
            lambda r, i: f"{c.rows // 2} a thread",
            "accumulators",
        ),
    )
    second = product(
        "dV += Pᵀ dO",
        Blocks(
            f"Pᵀ: {c.columns} \u00d7 {c.rows}",
            slabs,
            steps,
            owner,
            lambda r, i: f"k-block {i}",
            "A operand, registers",
        ),
        Blocks(
            f"dO: {c.rows} \u00d7 {c.depth}", steps, boxes, lambda r, i: None, lambda r, i: "sO", "sO", 120.0
        ),
        Blocks(
            f"dV: {c.columns} \u00d7 {c.depth}",
            slabs,
            boxes,
            share,
            lambda r, i: "32 sums a thread",
            "accumulators",
            120.0,
        ),
    )
    figure = products(
        f"The tile of a CTA: {c.columns} columns of S, which are rows of V",
        f"The CTA walks down the {p.rows:,} rows of S in steps of {c.rows} and keeps dV; dS leaves step by step.",
        [first, second],
    )
    whose = (
        f"{c.shares} warpgroups share a slab of {SLAB} columns: each makes Pᵀ and its {c.share_depth} columns of dV, "
        "the first one dPᵀ and dS, too."
        if c.shares > 1
        else f"A warpgroup has a slab of {SLAB} columns of S."
    )
    return figure.noted(
        whose,
        "The transpose is what keeps everything in registers: Sᵀ is loaded in the order in which dPᵀ leaves the "
        "tensor cores, so that dS = P (dP - delta) is one register with another, and Pᵀ is in the order in which the "
        "A operand must enter them.",
        "dO lies in shared memory once and is the B operand of both products, of one of them transposed.",
        *checks.check(p).lines(),
    )


def _ring(view: View) -> Figure:
    c = view.kernel

    def buffer(heading: str, size: int) -> Stages:
        return Stages(
            heading,
            heading.split(":")[0],
            c.stages,
            size,
            lambda i: f"stage {i}",
            lambda i: (
                f"full when its bytes have come; empty when {count(c.releases, 'thread')} have released it"
            ),
        )

    loading = "One warp loads" if c.producers == 1 else f"{c.producers} warps load"
    figure = ring(
        "The ring of stages in shared memory",
        f"{loading} step after step ahead of the warpgroups that compute; three buffers share a pair of barriers.",
        [
            buffer(f"sS: {c.rows} \u00d7 {c.columns} scores", c.score_bytes),
            buffer(f"sO: {c.rows} \u00d7 {c.depth} of dO", c.rows * c.depth * view.half),
            buffer("sL: log-sum-exp and delta of each row", c.rows * 8),
        ],
    )
    notes = [
        f"Each step loads {c.step_bytes:,} bytes; together {c.shared_memory:,} bytes of shared memory a CTA."
    ]
    if c.sent:
        notes.append(
            "dS takes the place of S: a stage is empty again only when dS has left it, one step later, so that "
            "one stage is in work and one on its way out."
        )
    return figure.noted(*notes)


def _scores(view: View) -> Figure:
    c = view.kernel
    rows = 2 * named.ATOM_ROWS
    part = named.first_stage(named.by_rows(view.size, c.rows, named.BOX // view.size, 1), rows)
    figure = draw.swizzle_banks(
        part,
        view.size,
        title=f"sS: the first {rows} rows of a slab in shared memory, of S and then of dS",
        space="sS",
    )
    return figure.noted(
        f"Boxes of {named.BOX // view.size} columns, one for each slab; in a box the 16-byte pieces of a row are "
        "exchanged by the row modulo 8 (the swizzle), as TMA writes and reads them.",
        "dS goes to exactly where its S came from, and TMA takes each slab's box from there to global memory.",
        *[line for line in checks.check(view.plan).shared if line.startswith("sS")],
    )


def _ldmatrix(view: View) -> Figure:
    figure = draw.matrix_load(
        named.matrices(named.INSTRUCTION_K, transposed=True),
        named.fragment(named.INSTRUCTION_K),
        (SLAB, named.INSTRUCTION_K),
        view.scores,
        space="sS",
        warp=view.warp,
        transposed=True,
        title="ldmatrix with transpose: Sᵀ in the order of dPᵀ's accumulators",
    )
    return figure.noted(
        "The drawing is S as it lies: rows down, columns across. An address still names 8 neighbours of a row, but the "
        "instruction deals each matrix out along its columns: a thread's pair is one column of S, two rows.",
        "stmatrix with transpose is the same picture backwards: it puts dSᵀ where Sᵀ came from.",
    )


def _lines(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_value(
        _turned(named.fragment(named.INSTRUCTION_K), SLAB, named.INSTRUCTION_K),
        (named.INSTRUCTION_K, SLAB),
        memory=view.scores,
        space="sS",
        element_bytes=view.size,
        shared=True,
        keep=(named.WARP_ROWS,),
        fold=False,
        title=f"sS: {named.INSTRUCTION_K} lines of scores, read element by element",
    )
    return figure.noted(
        f"Lines lie {c.pitch} elements apart, each beginning within its first 16 bytes as it does in global "
        "memory; drawn as if all began at 0. Each thread reads just the elements that dPᵀ's accumulators pair with.",
        *[line for line in checks.check(view.plan).shared if line.startswith("sS")],
    )


def _turned(tv: Layout, rows: int, columns: int) -> Layout:
    """A thread-value layout over (rows, columns) as one over (columns, rows)."""

    def leaf(stride):
        if isinstance(stride, tuple):
            return tuple(map(leaf, stride))
        return stride % rows * columns + stride // rows

    return Layout(tv.shape, leaf(tv.stride))


def _grad(view: View) -> Figure:
    c = view.kernel
    box = named.BOX // view.half
    part = named.first_stage(named.by_rows(view.half, c.rows, box, 1), named.INSTRUCTION_K)
    layouts = named.backward_layouts(c)
    figure = draw.swizzle_banks(
        part,
        view.half,
        title=f"sO: the first {named.INSTRUCTION_K} rows and {box} columns of a step of dO",
        space="sO",
    )
    return figure.noted(
        f"One tile, two B operands. As {layouts['sO']} its rows are n and its columns k: K-major, for dPᵀ = V dOᵀ.",
        f"As {layouts['sOt']} its columns are n and its rows k: MN-major, for dV += Pᵀ dO. Only the descriptor "
        "that the instruction is given differs.",
        *[line for line in checks.check(view.plan).shared if line.startswith("sO")],
    )


def _first_product(view: View) -> Figure:
    c = view.kernel
    layouts = named.backward_layouts(c)
    figure = draw.shared_operand_product(
        (SLAB, c.rows, named.INSTRUCTION_K),
        named.first_stage(layouts["sV"]) if c.deep else named.fragment(named.INSTRUCTION_K),
        layouts["rP"],
        named.first_stage(layouts["sO"]),
        names=("V", "dOᵀ", "dPᵀ"),
        spaces=("sV" if c.deep else "rV", "sO"),
        a_shared=c.deep,
        b_down=True,
        element_bytes=view.half,
        warp=view.warp,
        title=f"dPᵀ = V dOᵀ: one wgmma m{SLAB}n{c.rows}k{named.INSTRUCTION_K}",
    )
    waits = (
        "V waits in shared memory, as dV leaves no registers for it, and both operands are given by address"
        if c.deep
        else f"V waits in registers for all steps, {c.depth // 4} of each thread"
    )
    return figure.noted(
        f"{count(c.depth // named.INSTRUCTION_K, 'instruction')} of these make a step's dPᵀ: {waits}.",
        "A piece of dO is 8 neighbours of k: K-major, as the rows of dO are contiguous along D.",
    )


def _registers(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_registers(
        named.backward_layouts(c)["rP"],
        (SLAB, c.rows),
        view.followed,
        group="k-block",
        names=("column of S", "row of S"),
        title=f"From accumulators to the A operand: registers of thread {view.followed}",
    )
    return figure.noted(
        f"All of Sᵀ, dPᵀ, Pᵀ and dSᵀ have this order. An accumulator of {c.rows} columns has the order (2, 2, "
        f"{c.rows // 8}): neighbours, 8 rows below, 8 columns further. The A operand of one instruction has (2, "
        "2, 2): two such groups of 8 columns.",
        "So eight neighbouring accumulators, rounded to 16 bits in four registers, are one instruction's operand "
        "as they are: the re-layout between the two products is the identity.",
    )


def _second_product(view: View) -> Figure:
    c = view.kernel
    layouts = named.backward_layouts(c)
    figure = draw.shared_operand_product(
        (SLAB, c.share_depth, named.INSTRUCTION_K),
        layouts["rE"],
        layouts["rdV"],
        named.first_stage(layouts["sOt"]),
        names=("Pᵀ", "dO", "dV"),
        spaces=("rE", "sO"),
        element_bytes=view.half,
        warp=view.warp,
        title=f"dV += Pᵀ dO: one wgmma m{SLAB}n{c.share_depth}k{named.INSTRUCTION_K}",
    )
    return figure.noted(
        f"{count(c.rows // named.INSTRUCTION_K, 'instruction')} of these a step. dV stays in registers, "
        f"{c.share_depth // 2} float32 sums of each thread, until the walk ends."
    )


def walk(plan: MatmulBackwardPlan, found: dict[str, Figure], thread: int | None = None) -> list[Step]:
    """The steps of the explorer: the first slab of 64 columns on its way through the figures of the Plan."""
    view = View(plan, thread)

    def own(facts) -> bool:
        return view.followed in facts.threads

    def all_cells(facts) -> bool:
        return bool(facts.coordinate)

    steps = [
        Step("A tile of work", "The slab of columns that the followed thread helps with.", "tile", own),
        Step(
            "A step comes",
            "A warp waits until a stage is empty and asks for the next rows of S, of dO and their numbers.",
            "ring",
            lambda facts: facts.coordinate.endswith("stage 0)"),
        ),
        Step("dO as it lies", "Its tile is the B operand of both products.", "grad", all_cells),
        Step(
            "The first product",
            "dPᵀ = V dOᵀ begins; meanwhile the scores are loaded.",
            "first_product",
            own,
        ),
    ]
    if "lines" in found:
        steps.append(Step("Scores to registers", "Element by element, from lines.", "lines", own))
    else:
        steps.append(
            Step("Scores to registers", "ldmatrix transposes four matrices at a time.", "ldmatrix", own)
        )
    return [
        *steps,
        Step(
            "P and dS",
            "Pᵀ = exp(Sᵀ - lse), rounded, is the A operand as it lies in registers; with dPᵀ it makes dSᵀ.",
            "registers",
            own,
        ),
        Step("The second product", "dV += Pᵀ dO.", "second_product", own),
        Step(
            "dS leaves",
            "dS takes the place of S in the stage, and goes to global memory from there."
            if plan.kernel.sent
            else "dS goes to global memory element by element.",
            "lines" if "lines" in found else "scores",
            own if "lines" in found else all_cells,
        ),
    ]


def heading(plan: MatmulBackwardPlan, thread: int | None = None) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    c = plan.kernel
    batches = prod(plan.batch) * plan.heads
    return (
        f"Gradients of softmax(S) @ V, S {batches:,} \u00d7 {plan.rows:,} \u00d7 {plan.columns:,}, D {plan.depth}, "
        f"{c.dtypes[1]}",
        f"class {c.name} for {c.architecture}; the first slab of {SLAB} columns, threads of its warpgroup",
    )
