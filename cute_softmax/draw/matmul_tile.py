"""What the figures of softmax_matmul's two directions share: products of blocks, and rings of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layouts import Layout
from layouts.figures import Figure, Slots, Use
from layouts.figures.grid import Grid, beside, draw, headed, stacked
from layouts.figures.scene import Canvas, Facts, Swatch, finish
from layouts.style import thread_paint

from ..plan import WARP
from ..plan.matmul import MatmulPlan
from ..plan.matmul_backward import WARPGROUP, MatmulBackwardClass, MatmulBackwardPlan
from ..plan.matmul_class import MatmulClass

FOLLOWED_LANE = 5  # by default: neither the first row nor the first column of its matrices
HEIGHT = 40.0


def checked(thread: int | None) -> int:
    """The thread to follow, counted within its warpgroup. Raises ValueError for one that there is not."""
    if thread is None:
        return FOLLOWED_LANE
    if not 0 <= thread < WARPGROUP:
        raise ValueError(f"thread must be 0 to {WARPGROUP - 1}, those of a warpgroup, got {thread}")
    return thread


@dataclass(frozen=True)
class Followed:
    """A Plan, and the thread that its figures follow. Raises ValueError for one that a warpgroup does not have."""

    plan: MatmulPlan | MatmulBackwardPlan
    thread: int | None = None

    def __post_init__(self):
        checked(self.thread)

    @property
    def kernel(self) -> MatmulClass | MatmulBackwardClass:
        return self.plan.kernel

    @property
    def followed(self) -> int:
        return checked(self.thread)

    @property
    def warp(self) -> int:
        return self.followed // WARP


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks: `rows` and `columns` are their sizes, `owner(row, column)` the warpgroup that holds a block
    in registers, or None for shared memory that several read; `label(row, column)` its words."""

    heading: str
    rows: Sequence[int]
    columns: Sequence[int]
    owner: Callable[[int, int], int | None]
    label: Callable[[int, int], str]
    space: str
    width: float = 96.0

    def canvas(self) -> Canvas:
        """The blocks under their heading."""

        def span(sizes: Sequence[int], i: int) -> str:
            first = sum(sizes[:i])
            return f"{first}..{first + sizes[i] - 1}"

        def cell(r: int, c: int):
            owner = self.owner(r, c)
            facts = Facts(
                threads=tuple(range(WARPGROUP)) if owner == 0 else (),
                coordinate=f"({span(self.rows, r)}, {span(self.columns, c)})",
                note=f"{self.space}: {self.label(r, c)}"
                if owner is None
                else f"{self.space} of warpgroup {owner}",
            )
            words = (self.label(r, c), "" if owner is None else f"warpgroup {owner}")
            return "plain" if owner is None else thread_paint(owner), tuple(filter(None, words)), facts

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
        return headed(self.heading, draw(grid, [range(grid.rows)], [[range(grid.columns)]]))


def product(formula: str, left: Blocks, top: Blocks, result: Blocks) -> Canvas:
    """`result = left @ top`, as it is written: one above, the other beside the result."""
    canvases = [b.canvas() for b in (left, top, result)]
    body = Canvas()
    across, below = canvases[0].right + 30, canvases[1].bottom + 22
    # Row labels differ in width: the columns of both stand over each other at the right.
    body.place(canvases[1], across + canvases[2].right - canvases[1].right, 0)
    body.place(canvases[0], 0, below)
    body.place(canvases[2], across, below)
    body.words(0, 14, formula, "formula")
    return body


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


@dataclass(frozen=True)
class Stages:
    """The stages of one buffer: `bytes` each; `label(stage)` and `note(stage)` in words."""

    heading: str
    space: str
    stages: int
    bytes: int
    label: Callable[[int], str]
    note: Callable[[int], str]


def ring(title: str, lead: str, buffers: Sequence[Stages]) -> Figure:
    """The stages of buffers in shared memory."""

    def slots(b: Stages) -> Canvas:
        return Slots(
            f"{b.heading}: {b.stages} stages of {b.bytes:,} bytes",
            b.space,
            Layout((1, b.stages), (0, 1)),
            b.bytes,
            lambda r, c: Use((), b.label(c), b.note(c)),
            row_label=lambda r: "",
            row_name="",
            column_name="stage",
        ).canvas()

    return finish(
        stacked([slots(b) for b in buffers], 24),
        title,
        lead,
        f"{title}. {lead}",
        [Swatch("plain", "@1024", "byte in the buffer at which the stage begins")],
    )
