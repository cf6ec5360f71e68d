"""Plans of the row movement: the numbers of one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import PlanBase, counted
from .maths import WARP
from .modes import offset_of
from .problem import Problem
from .row import RowClass

_STATES = {8: "online (max, sum) pairs", 16: "online (max, sum, weighted sum) triples"}  # by their bytes
_AGAINST = {  # of two inputs
    "loss": "online (max, sum) pairs of both inputs, then a weighted sum",
    "input": "online (max, sum) pairs of both inputs",
    "target": "online (max, sum) pairs of both inputs",
    "weights": "online (max, sum) pairs, with a weighted sum and that of the weights",
}


@dataclass(frozen=True)
class Plan(PlanBase):
    """How one launch of the row movement runs: what is compiled, and the numbers that change from call to call.

    Plain numbers, made without a GPU, torch or cutlass. A notebook draws it: the tile of the first CTA.

    Attributes:
        problem: The call in canonical form: its dimensions merged, sizes and strides in elements, dtypes.
        row_class: What is compiled: threads, vectors, cluster, staging.
        rows: The number of rows.
        columns: Elements of a row.
        ctas: CTAs of the grid; clusters where there are any.
        kept: Sizes of the dimensions that form a row's index, the slowest first.
        operand_strides: Per operand, its stride in each of these dimensions, in elements.
        evict_last: Whether loads ask L2 to evict their lines last.
        table: The name and digest of the table that the configuration comes from.
        invariant: Whether the order of additions is the same for all calls with this math, length, dtypes, GPU and
            table.
        laid_out: Which operands of the call are copied first: to contiguous rows, for such an order, or a bias or a
            mask into the layout of the elements.
        laid_strides: The strides of these copies, in elements.
        scratch: Bytes of zeroed memory that a launch needs in addition to its operands.
    """

    # Bytes of zeroed memory that a launch needs in addition to its operands.
    scratch: ClassVar[int] = 0

    problem: Problem
    row_class: RowClass
    rows: int
    columns: int
    ctas: int
    kept: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]
    evict_last: bool
    table: str = ""
    invariant: bool = False
    laid_out: tuple[int, ...] = ()
    laid_strides: tuple[tuple[int, ...], ...] = ()

    @property
    def kernel(self) -> RowClass:
        """What is compiled."""
        return self.row_class

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the prologue's numbers and operands."""
        return self.rows, self.columns, self.ctas, int(self.evict_last), *self.kept[1:]

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Per operand the stride between neighbouring rows, in elements."""
        return tuple(strides[-1] for strides in self.operand_strides)

    def row_start(self, operand: int, row: int) -> int:
        """Elements from the beginning of an operand to that of a row."""
        return offset_of(row, self.kept, self.operand_strides[operand])

    @property
    def tiles(self) -> int:
        """The number of tiles of rows."""
        return math.ceil(self.rows / self.row_class.tiler[0])

    @property
    def share(self) -> int:
        """The most columns of a row that one CTA takes."""
        c = self.row_class
        if c.cluster_n == 1:
            return self.columns
        return math.ceil(math.ceil(self.columns / c.cluster_n) / c.line) * c.line

    @property
    def _reduced(self) -> str:
        """What threads exchange, in words."""
        facts, against = self.row_class.facts, self.row_class.prologue.against
        return _AGAINST.get(against) or _STATES.get(facts.state_bytes) or counted(facts.stages, "stage")

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.row_class
        bytes_moved = self.problem.bytes
        where = {
            1: "a warp holds several rows" if c.threads_per_row < WARP else "a warp holds a row",
        }.get(c.warps_per_row, f"{c.warps_per_row} warps share a row")
        if c.cluster_n > 1:
            where = f"a cluster of {c.cluster_n} CTAs shares a row, {c.warps_per_row} warps in each"
        if c.movement == "stream":
            where = f"one CTA per row, {c.warps_per_row} warps, tile after tile"
        staging = ", ".join(f"{n}: {s}" for n, s in zip(c.facts.inputs, c.staging, strict=True))
        lines = [
            f"{c.math} of {counted(self.rows, 'row')} of {self.columns}, {' -> '.join(c.own_dtypes)}, "
            f"for {c.architecture}",
            f"  movement   {c.movement}: {where}; class {c.name}",
            *self.given,
            f"  threads    {c.threads} per CTA, {c.threads_per_row} per row; tile {c.tiler[0]} x {c.tiler[1]}",
            f"  thread     {counted(c.steps, 'vector')} of {counted(c.vector, 'element')}, "
            f"{counted(c.rows_per_thread, 'row')}; {'values' if c.keep else 'packed elements'} kept in "
            f"{'shared memory' if c.staging[0] == 'shared' and not (c.ring and c.keep) else 'registers'}",
            f"  loads      {staging}; {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            "  edges      "
            + ("head and tail element by element" if c.edges else "none: rows begin and end on a vector"),
            f"  reduction  {self._reduced}; "
            + (
                f"buffer {c.reduction_buffer}, {c.reduction_buffer.cosize * c.facts.state_bytes} bytes"
                if c.exchanges
                else "shuffles only"
            ),
            *(
                [
                    f"  ranks      states exchanged in the ranks' own memory, a tile finished {c.lag} turns "
                    f"after its reduction; {c.ring} tiles in shared memory, {c.ahead - 1} of them being loaded"
                ]
                if c.ring
                else []
            ),
            f"  grid       {counted(self.ctas, 'cluster' if c.cluster_n > 1 else 'CTA')} "
            f"for {counted(self.tiles, 'tile')}"
            + (", persistent" if c.persistent else "")
            + f"; {c.shared_memory} bytes of shared memory per CTA",
            f"  traffic    {bytes_moved / 1e6:.1f} MB, every element "
            + ("before the diagonal read once" if c.prologue.causal else "read once")
            + (" and written once" if c.facts.outputs else ", one result written per row"),
            *([f"  table      {self.table}"] if self.table else []),
            *self.bits,
        ]
        return "\n".join(lines)
