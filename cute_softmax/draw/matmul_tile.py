"""What the figures of softmax_matmul's two directions share: products of blocks, rings of stages, tiles in shared
memory, and how they come to registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from layouts import AnyLayout, Layout
from layouts import figures as draw
from layouts.figures import Facts, Figure, Slots, Use
from layouts.figures.grid import Grid, beside, headed, multiplied, stacked
from layouts.figures.grid import draw as draw_grid
from layouts.figures.scene import Canvas, Swatch, finish
from layouts.style import thread_paint

from ..plan import matmul_layouts as named
from ..plan.matmul import MatmulPlan
from ..plan.matmul_backward import MatmulBackwardPlan
from ..plan.matmul_class import BLOCK_ROWS, WARPGROUP
from ..plan.problem import ITEM_SIZE
from . import common

HEIGHT = 40.0
CELL, WIDE, WIDEST = 96.0, 120.0, 140.0  # of a block: px


@dataclass(frozen=True)
class View(common.View):
    """What figures of a product show: the first block of a warpgroup, in the first stage of the ring. Threads are
    counted within their warpgroup: all warpgroups do the same."""

    plan: MatmulPlan | MatmulBackwardPlan

    counted: ClassVar[str] = ", those of a warpgroup"
    threads: ClassVar[int] = WARPGROUP
    usual: ClassVar[int] = 5  # neither the first row nor the first column of its matrices

    @property
    def half(self) -> int:
        """Bytes of an element of V."""
        return ITEM_SIZE[self.kernel.dtypes[1]]

    @property
    def whose(self) -> str:
        """The title of the followed thread."""
        return f"Thread {self.followed} of the first warpgroup"

    def costs(self, buffer: str) -> list[str]:
        """What the checks say of how a buffer is read."""
        return [line for line in self.report.shared if line.startswith(buffer)]

    def heading(self, what: str, block: str) -> tuple[str, str]:
        """The title and subtitle of the explorer."""
        p, c = self.plan, self.kernel
        batches = prod(p.batch) * getattr(p, "heads", 1)
        return (
            f"{what}, S {batches:,} \u00d7 {p.rows:,} \u00d7 {p.columns:,}, D {p.depth}, {c.dtypes[1]}",
            f"class {c.name} for {c.architecture}; the first {block}, threads of its warpgroup",
        )


def in_grid(facts: Facts) -> bool:
    """Whether a cell is one of a grid."""
    return bool(facts.coordinate)


def first_stage(facts: Facts) -> bool:
    """Whether a cell is the first stage of a ring."""
    return facts.coordinate.endswith("stage 0)")


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks: `rows` and `columns` are their sizes, `label` the words of block (`r`, `c`) as a format,
    `owner(row, column)` the warpgroup that holds a block in registers, or None for shared memory that several read."""

    heading: str
    rows: Sequence[int]
    columns: Sequence[int]
    space: str
    label: str
    owner: Callable[[int, int], int] | None = None
    width: float = CELL

    def canvas(self) -> Canvas:
        """The blocks under their heading."""

        def span(sizes: Sequence[int], i: int) -> str:
            first = sum(sizes[:i])
            return f"{first}..{first + sizes[i] - 1}"

        def cell(r: int, c: int):
            owner = self.owner and self.owner(r, c)
            label = self.label.format(r=r, c=c)
            coordinate = f"({span(self.rows, r)}, {span(self.columns, c)})"
            if owner is None:
                facts = Facts(coordinate=coordinate, note=f"{self.space}: {label}")
                return "plain", (label,), facts
            threads = tuple(range(WARPGROUP)) if owner == 0 else ()
            facts = Facts(threads, coordinate=coordinate, note=f"{self.space} of warpgroup {owner}")
            return thread_paint(owner), (label, f"warpgroup {owner}"), facts

        grid = Grid(
            len(self.rows),
            len(self.columns),
            cell,
            (self.width, HEIGHT),
            row_label=lambda r: span(self.rows, r),
            column_label=lambda c: (span(self.columns, c),),
            row_name="",
            column_name="",
        )
        return headed(self.heading, draw_grid(grid, [range(grid.rows)], [[range(grid.columns)]]))


def product(formula: str, left: Blocks, top: Blocks, result: Blocks) -> Canvas:
    """`result = left @ top` in blocks."""
    return multiplied(formula, left.canvas(), top.canvas(), result.canvas(), gap=30)


def products(title: str, lead: str, parts: Sequence[Canvas]) -> Figure:
    """Products side by side where they fit, else below each other."""
    wide = sum(p.right for p in parts) <= 1300
    return finish(
        beside(parts, 60) if wide else stacked(parts, 34),
        title,
        lead,
        f"{title}. {lead}",
        [
            Swatch("t0", "warpgroup 0", "block in the registers of this warpgroup; colour = warpgroup"),
            Swatch("plain", "16 rows", "block in shared memory"),
        ],
    )


def stages(heading: str, space: str, number: int, size: int, note: str, shares: int = 1) -> Slots:
    """The stages of one buffer, `size` bytes each; shares: how many warpgroups take turns with them."""

    def use(_: int, i: int) -> Use:
        return Use((), f"stage {i}" + (f": WG {i % shares}" if shares > 1 else ""), note)

    return Slots(
        f"{heading}: {number} stages of {size:,} bytes",
        space,
        Layout((1, number), (0, 1)),
        size,
        use,
        row_label=lambda r: "",
        row_name="",
        column_name="stage",
    )


def ring(title: str, lead: str, buffers: Sequence[Slots]) -> Figure:
    """The stages of buffers in shared memory."""
    return finish(
        stacked([b.canvas() for b in buffers], 24),
        title,
        lead,
        f"{title}. {lead}",
        [Swatch("plain", "@1024", "byte in the buffer at which the stage begins")],
    )


def swizzled(view: View, space: str, item: int, rows: int, title: str, *notes: str) -> Figure:
    """The first rows of a box of a tile in shared memory, its pieces exchanged, and what reading it costs."""
    part = named.first_stage(named.by_rows(item, rows, named.BOX // item, 1))
    return draw.swizzle_banks(part, item, title=title, space=space).noted(*notes, *view.costs(space))


def loaded(view: View, title: str, transposed: bool = False) -> Figure:
    """Scores on their way from the swizzled tile to a fragment."""
    return draw.matrix_load(
        named.matrices(named.INSTRUCTION_K, transposed=transposed),
        named.fragment(named.INSTRUCTION_K),
        (BLOCK_ROWS, named.INSTRUCTION_K),
        view.scores,
        space="sS",
        warp=view.warp,
        transposed=transposed,
        title=title,
    )


def instruction(
    view: View, words: str, columns: int, a: AnyLayout, c: AnyLayout, b: AnyLayout, **options
) -> Figure:
    """A, B and C of one wgmma, whose B (columns, k) lies in shared memory; options: of `shared_operand_product`."""
    return draw.shared_operand_product(
        (BLOCK_ROWS, columns, named.INSTRUCTION_K),
        a,
        c,
        named.first_stage(b),
        element_bytes=view.half,
        warp=view.warp,
        title=f"{words}: one wgmma m{BLOCK_ROWS}n{columns}k{named.INSTRUCTION_K}",
        **options,
    )
