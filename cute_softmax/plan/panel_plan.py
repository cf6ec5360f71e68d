"""Plans of the column and split movements: the numbers of one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import PlanBase, counted
from .modes import offset_of
from .panel_class import PanelClass, exchange_words
from .problem import Problem

# An exchange point waits so long (nanoseconds) before a CTA leaves its part to the last one that arrives.
PATIENCE = 1_000_000


@dataclass(frozen=True)
class PanelPlan(PlanBase):
    """How one launch over columns, or over rows that several CTAs share, runs: the column and split movements.

    A plan consists of plain numbers: what is compiled, and what changes from call to call. It needs no GPU, torch or
    cutlass. A *group* is reduced together; a *panel* is a set of neighbouring groups that a CTA works on together. A
    notebook draws the tile of the first CTA.

    Attributes:
        problem: The call in canonical form: its dimensions merged, sizes and strides in elements, dtypes.
        kernel: What is compiled: threads, vectors, cluster, staging.
        length: Elements of a group; where rows of memory lie side by side, of each column.
        kept: Sizes of the kept dimensions, the slowest first; vectors of columns run along the last, which has all
            columns of the rows that lie side by side.
        reduced: Sizes of the reduced dimensions, likewise.
        parts: CTAs (clusters) that share a panel.
        share: Elements of a group that one CTA takes.
        operand_strides: Per operand, its strides in the kept and then in the reduced dimensions, each the fastest
            first, in elements.
        evict_last: Whether loads ask L2 to evict their lines last.
        resident: CTAs that the GPU holds at a time.
        last_row: Columns of the last of these rows, which may be fewer; 0 where none lie side by side.
        spacing: Groups from a panel to the next; 0 for as many as its threads have.
        patience: Nanoseconds that a CTA waits for the others before it leaves its part to the last CTA.
        table: The name and digest of the table that the configuration comes from.
        invariant: Whether the order of additions is the same for all calls with this math, length, dtypes, GPU and
            table.
        laid_out: Which operands of the call are copied first: to contiguous rows, for such an order, or a bias or a
            mask into the layout of the elements.
        laid_strides: The strides of these copies, in elements.
    """

    problem: Problem
    kernel: PanelClass
    length: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    parts: int
    share: int
    operand_strides: tuple[tuple[int, ...], ...]
    evict_last: bool
    resident: int
    last_row: int = 0
    spacing: int = 0
    patience: int = PATIENCE
    table: str = ""
    invariant: bool = False
    laid_out: tuple[int, ...] = ()
    laid_strides: tuple[tuple[int, ...], ...] = ()

    @property
    def chunks(self) -> int:
        """The number of chunks of a share; some may be empty."""
        return self.kernel.chunks_of(self.share)

    @property
    def again(self) -> int:
        """The number of chunks that are read twice, because they are not held."""
        return self.kernel.again_of(self.share)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return math.prod(self.kept)

    def group(self, operand: int, index: int) -> int:
        """Elements from the beginning of an operand to that of a group."""
        strides = self.operand_strides[operand][: len(self.kept)]
        return offset_of(index, self.kept, strides[::-1])

    def element(self, operand: int, index: int) -> int:
        """Elements from the beginning of a group to one of its elements."""
        strides = self.operand_strides[operand][len(self.kept) :]
        return offset_of(index, self.reduced, strides[::-1])

    def pieces(self, group: int) -> tuple[int, int]:
        """(head, body) of a group: the elements before its first cache line, and those in whole vectors; the rest is
        its tail. Tensors are assumed to begin `problem.offsets` elements past a cache line."""
        c = self.kernel
        if not c.edges:
            return 0, self.length
        start = self.problem.offsets[c.facts.reference] + self.group(c.facts.reference, group)
        head = min(-start % c.line, self.length)
        return head, (self.length - head) // c.vector * c.vector

    def bounds(self, part: int, rank: int, group: int = 0) -> range:
        """The elements of a group's body that a CTA takes: CTA `rank` of the cluster of a part."""
        head, body = self.pieces(group)
        first = (part * self.kernel.cluster_n + rank) * self.share
        return range(head + first, head + max(first, min(first + self.share, body)))

    @property
    def abreast(self) -> int:
        """The number of columns that panels divide: if vectors are shifted, or rows lie side by side, those of the last
        kept mode."""
        return self.kept[-1] if self.kernel.shifted or self.last_row else self.groups

    def panel(self, tile: int) -> range:
        """The groups of a panel."""
        c, outer, inner = self.kernel, *divmod(tile, math.ceil(self.abreast / self.advance))
        first = outer * self.abreast
        return range(first, first + self.abreast)[inner * self.advance :][
            : min(c.columns, self.advance + c.overlap)
        ]

    @property
    def tiles(self) -> int:
        """The number of panels."""
        return panels_of(self.advance, self.groups, self.abreast)

    @property
    def advance(self) -> int:
        """Groups from a panel to the next."""
        return self.spacing or self.kernel.advance_of(self.abreast)

    @property
    def ctas(self) -> int:
        """CTAs of the grid, or clusters; those that stream to outputs process several items in turn."""
        c, items = self.kernel, self.tiles * self.parts
        several = c.streaming and c.facts.outputs and c.cluster_n == 1
        return min(items, self.resident) if several else items

    @property
    def exchange_bytes(self) -> int:
        """Bytes of all exchange points, a multiple of 16."""
        return -(-self.tiles * exchange_words(self.parts) * 4 // 16) * 16

    @property
    def scratch(self) -> int:
        """Bytes of zeroed memory that the launch needs: the exchange points, then the parts' states."""
        if not self.kernel.exchange:
            return 0
        states = self.tiles * self.parts * self.kernel.groups * self.kernel.published_bytes
        return self.exchange_bytes + states

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the scratch memory, the prologue's numbers
        or the operands."""
        return (
            self.ctas,
            self.tiles * self.parts,
            self.length,
            self.groups,
            self.parts,
            self.share,
            int(self.evict_last),
            self.patience,
            self.chunks,
            self.advance,
            self.exchange_bytes,
            *self.kept[:0:-1],
            *self.reduced[:0:-1],
            *([self.last_row] if self.last_row else []),
        )

    @property
    def _residents(self) -> str:
        """What is resident, in words."""
        c = self.kernel
        return " and ".join(c.facts.inputs[i] + (" in bits" if c.bits(i) else "") for i in c.residents)

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.kernel
        if c.orientation == "column":
            columns = min(c.columns, self.advance + c.overlap)
            where = f"panels of {counted(columns, 'column')} by {self.length} elements, {c.across} x {c.down} threads"
        else:
            where = f"one or more CTAs per row, {c.threads} threads along it"
        if c.cluster_n > 1:
            where += f", clusters of {c.cluster_n} CTAs"
        if c.exchange:
            where += f"; {self.parts} parts that exchange states in global memory"
        lines = [
            f"{c.math} of {counted(self.problem.groups, 'group')} of {self.problem.length}, "
            f"{' -> '.join(c.own_dtypes)}, for {c.architecture}",
            f"  movement   {c.movement}: {where}; class {c.name}",
            f"  threads    {c.threads} per CTA; tile of {c.tile} elements by {counted(c.columns, 'group')}",
            f"  thread     {counted(c.steps, 'vector')} of {counted(c.vector, 'element')} in shared memory"
            + (f", {c.registers * c.chunk_steps} in registers" if c.registers else ""),
            f"  loads      cp.async, {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            *(
                [
                    f"  rows       {c.rows_abreast} side by side: {self.abreast} columns, of the last {self.last_row}"
                ]
                if c.rows_abreast > 1
                else []
            ),
            *([f"  resident   {self._residents}, loaded once for all rows"] if c.residents else []),
            *([f"  prologue   {told}"] if (told := c.prologue.told) else []),
            *(["  edges      head and tail element by element"] if c.edges else []),
            *(
                [
                    f"  edges      aligned blocks, {'as they lie' if c.aligned else 'shifted into place'}; "
                    f"a panel every {self.advance} columns"
                ]
                if c.shifted
                else []
            ),
            f"  modes      kept {' x '.join(map(str, self.kept))}, "
            f"reduced {' x '.join(map(str, self.reduced))}",
            f"  reduction  {counted(c.stages, 'stage')}; buffer {c.reduction_buffer}, "
            f"{c.reduction_buffer.cosize * 4} bytes",
            f"  grid       {counted(self.ctas, 'cluster' if c.cluster_n > 1 else 'CTA')} "
            f"for {counted(self.tiles, 'panel')}; {c.shared_memory} bytes of shared memory per CTA",
            f"  traffic    {self.problem.bytes / 1e6:.1f} MB, "
            + (
                f"{self.again} of {self.chunks} chunks read twice"
                if self.again
                else "every element read once"
            )
            + (" and written once" if c.facts.outputs else ", one result written per group"),
            *([f"  table      {self.table}"] if self.table else []),
            *self.bits,
        ]
        return "\n".join(lines)


def panels_of(advance: int, groups: int, abreast: int) -> int:
    """How many panels there are of so many groups, side by side in so many, from each to the next `advance` groups."""
    return groups // abreast * math.ceil(abreast / advance)
