"""Figures of Plans of softmax(S) @ V's gradients: everything is transposed, columns of S are the rows of products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layouts import AnyLayout, Layout
from layouts import figures as draw
from layouts.figures import Figure, Slots
from layouts.figures.scene import count
from layouts.html import Step

from ..plan import matmul_layouts as named
from ..plan.matmul_backward import SLAB
from . import matmul_tile
from .matmul_tile import (
    WIDE,
    Blocks,
    first_stage,
    in_grid,
    instruction,
    loaded,
    product,
    products,
    ring,
    stages,
    swizzled,
)

# The layouts of a class that its kernel has and figures draw, by name.
drawn = named.backward_layouts


@dataclass(frozen=True)
class View(matmul_tile.View):
    """What the figures of a Plan show: the first slab of 64 columns of S in the first stage of the ring."""

    aside: ClassVar[frozenset[str]] = frozenset({"ring", "scores", "grad"})

    @cached_property
    def scores(self) -> AnyLayout:
        """(row, column) of the tile of S -> element of its stage; lines as where all begin at 16 bytes."""
        c = self.kernel
        if c.lines:
            return Layout((c.rows, c.columns), (c.pitch, 1))
        return named.first_stage(named.by_rows(self.size, c.rows, c.columns, 1))


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    c = view.kernel
    found = {"tile": tile(view), "ring": _ring(view)}
    if c.lines:
        found["lines"] = _lines(view)
    else:
        found |= {"scores": _scores(view), "ldmatrix": _ldmatrix(view)}
    return found | {
        "grad": _grad(view),
        "first_product": _first_product(view),
        "registers": _registers(view),
        "second_product": _second_product(view),
    }


def tile(view: View) -> Figure:
    """The blocks of a CTA's tile, of both products."""
    c, p = view.kernel, view.plan
    slabs, boxes = [SLAB] * c.slabs, [SLAB] * (c.depth // SLAB)
    steps = [named.INSTRUCTION_K] * (c.rows // named.INSTRUCTION_K)

    def owner(slab: int, column: int) -> int:
        return slab * c.shares

    def share(slab: int, box: int) -> int:
        return slab * c.shares + box * SLAB // c.share_depth

    values, waits = f"V: {c.columns} \u00d7 {c.depth}", "A operand, registers"
    if c.deep:
        values = Blocks(values, slabs, boxes, "sV", "sV")
    else:
        values = Blocks(values, slabs, boxes, waits, "box {c}", owner)
    first = product(
        "dPᵀ = V dOᵀ",
        values,
        Blocks(f"dOᵀ: {c.depth} \u00d7 {c.rows}", boxes, [c.rows], "sO", "sO"),
        Blocks(
            f"dPᵀ: {c.columns} \u00d7 {c.rows}",
            slabs,
            [c.rows],
            "accumulators",
            f"{c.rows // 2} a thread",
            owner,
        ),
    )
    sums = f"dV: {c.columns} \u00d7 {c.depth}"
    second = product(
        "dV += Pᵀ dO",
        Blocks(f"Pᵀ: {c.columns} \u00d7 {c.rows}", slabs, steps, waits, "k-block {c}", owner),
        Blocks(f"dO: {c.rows} \u00d7 {c.depth}", steps, boxes, "sO", "sO", width=WIDE),
        Blocks(sums, slabs, boxes, "accumulators", "32 sums a thread", share, WIDE),
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
        *view.report.lines(),
    )


def _ring(view: View) -> Figure:
    c = view.kernel

    note = f"full when its bytes have come; empty when {count(c.releases, 'thread')} have released it"

    def buffer(space: str, held: str, size: int) -> Slots:
        return stages(f"{space}: {held}", space, c.stages, size, note)

    loading = "One warp loads" if c.producers == 1 else f"{c.producers} warps load"
    figure = ring(
        "The ring of stages in shared memory",
        f"{loading} step after step ahead of the warpgroups that compute; three buffers share a pair of barriers.",
        [
            buffer("sS", f"{c.rows} \u00d7 {c.columns} scores", c.score_bytes),
            buffer("sO", f"{c.rows} \u00d7 {c.depth} of dO", c.rows * c.depth * view.half),
            buffer("sL", "log-sum-exp and delta of each row", c.rows * 8),
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
    rows = 2 * named.ATOM_ROWS
    return swizzled(
        view,
        "sS",
        view.size,
        rows,
        f"sS: the first {rows} rows of a slab in shared memory, of S and then of dS",
        f"Boxes of {named.BOX // view.size} columns, one for each slab; in a box the 16-byte pieces of a row are "
        "exchanged by the row modulo 8 (the swizzle), as TMA writes and reads them.",
        "dS goes to exactly where its S came from, and TMA takes each slab's box from there to global memory.",
    )


def _ldmatrix(view: View) -> Figure:
    figure = loaded(view, "ldmatrix with transpose: Sᵀ in the order of dPᵀ's accumulators", transposed=True)
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
        *view.costs("sS"),
    )


def _turned(tv: Layout, rows: int, columns: int) -> Layout:
    """A thread-value layout over (rows, columns) as one over (columns, rows)."""

    def leaf(stride):
        if isinstance(stride, tuple):
            return tuple(map(leaf, stride))
        return stride % rows * columns + stride // rows

    return Layout(tv.shape, leaf(tv.stride))


def _grad(view: View) -> Figure:
    layouts, box = drawn(view.kernel), named.BOX // view.half
    return swizzled(
        view,
        "sO",
        view.half,
        named.INSTRUCTION_K,
        f"sO: the first {named.INSTRUCTION_K} rows and {box} columns of a step of dO",
        f"One tile, two B operands. As {layouts['sO']} its rows are n and its columns k: K-major, for dPᵀ = V dOᵀ.",
        f"As {layouts['sOt']} its columns are n and its rows k: MN-major, for dV += Pᵀ dO. Only the descriptor "
        "that the instruction is given differs.",
    )


def _first_product(view: View) -> Figure:
    c, layouts = view.kernel, drawn(view.kernel)
    figure = instruction(
        view,
        "dPᵀ = V dOᵀ",
        c.rows,
        named.first_stage(layouts["sV"]) if c.deep else named.fragment(named.INSTRUCTION_K),
        layouts["rP"],
        layouts["sO"],
        names=("V", "dOᵀ", "dPᵀ"),
        spaces=("sV" if c.deep else "rV", "sO"),
        a_shared=c.deep,
        b_down=True,
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
        drawn(c)["rP"],
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
    c, layouts = view.kernel, drawn(view.kernel)
    figure = instruction(
        view,
        "dV += Pᵀ dO",
        c.share_depth,
        layouts["rE"],
        layouts["rdV"],
        layouts["sOt"],
        names=("Pᵀ", "dO", "dV"),
        spaces=("rE", "sO"),
    )
    return figure.noted(
        f"{count(c.rows // named.INSTRUCTION_K, 'instruction')} of these a step. dV stays in registers, "
        f"{c.share_depth // 2} float32 sums of each thread, until the walk ends."
    )


def walk(view: View) -> list[Step]:
    """The steps of the explorer: the first slab of 64 columns on its way through the figures of the Plan; those of
    figures that it does not have are left out."""
    c = view.kernel
    return [
        Step("A tile of work", "The slab of columns that the followed thread helps with.", "tile", view.own),
        Step(
            "A step comes",
            "A warp waits until a stage is empty and asks for the next rows of S, of dO and their numbers.",
            "ring",
            first_stage,
        ),
        Step("dO as it lies", "Its tile is the B operand of both products.", "grad", in_grid),
        Step(
            "The first product",
            "dPᵀ = V dOᵀ begins; meanwhile the scores are loaded.",
            "first_product",
            view.own,
        ),
        Step("Scores to registers", "Element by element, from lines.", "lines", view.own),
        Step("Scores to registers", "ldmatrix transposes four matrices at a time.", "ldmatrix", view.own),
        Step(
            "P and dS",
            "Pᵀ = exp(Sᵀ - lse), rounded, is the A operand as it lies in registers; with dPᵀ it makes dSᵀ.",
            "registers",
            view.own,
        ),
        Step("The second product", "dV += Pᵀ dO.", "second_product", view.own),
        Step(
            "dS leaves",
            "dS takes the place of S in the stage, and goes to global memory from there."
            if c.sent
            else "dS goes to global memory element by element.",
            "lines" if c.lines else "scores",
            view.own if c.lines else in_grid,
        ),
    ]


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    return view.heading("Gradients of softmax(S) @ V", f"slab of {SLAB} columns")
