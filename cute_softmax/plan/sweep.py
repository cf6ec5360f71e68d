"""The sweep movement: columns too long to be held, read once for their states and once more for their results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase, PlanBase, counted
from .hardware import Device
from .maths import CACHE_LINE, Math
from .modes import rows_of_vectors
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Problem
from .prologue import NO_PROLOGUE, Prologue, facts_of

THREADS, CTAS_AN_SM = 256, 2
# That a thread loads at a time, of all inputs; half of it where states have three numbers, or 16-bit scores a mask and
# more: registers are few, then.
LOADED_BYTES = 128
# CTAs that write the results of a part, the last lines first: smaller ones share the SMs better, whose share of the
# memory differs.
TURNS = 4
# The kernel that merges states: columns and threads of a CTA, and states of a column that a thread loads at a time.
MERGED, MERGERS, LOADS = 16, 512, 8
ROUNDS = 4  # of CTAs of the first pass, at most: each writes a state for each of its columns
# How much longer the first pass takes where lines begin off cache lines, by the bytes at whose multiples they do: a
# warp's loads touch one cache line more.
OFF_LINES = {16: 1.08, 32: 1.05, 64: 1.03, CACHE_LINE: 1.0}
WIDEST = 1 << 26  # elements of a line


@dataclass(frozen=True)
class SweepClass(ClassBase):
    """What is compiled for the sweep movement, three kernels, as plain numbers; see `kernels.sweep`.

    dtypes: of the math's operands; vector: elements of an access to the full ones; steps: lines that a thread loads at
    a time. prologue: one that `sweeps`, of whose bias and mask a row of memory has one element.
    """

    movement: ClassVar[str] = "sweep"
    online: ClassVar[bool] = False
    keep: ClassVar[bool] = False
    part: ClassVar[int] = 2
    logs: ClassVar[bool] = False
    cluster_n: ClassVar[int] = 1
    threads: ClassVar[int] = THREADS
    min_blocks: ClassVar[int] = CTAS_AN_SM

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    vector: int
    steps: int
    prologue: Prologue = NO_PROLOGUE

    @property
    def facts(self) -> Math:
        return facts_of(self.math, True, self.prologue)

    @property
    def access(self) -> tuple[int, ...]:
        """Per input, elements of one load."""
        beside = self.facts.beside
        return tuple(1 if i in beside else self.vector for i in range(len(self.facts.inputs)))

    @property
    def state_bytes(self) -> int:
        """Bytes of a column's state in memory."""
        return self.facts.stages * self.facts.state_bytes

    @property
    def columns(self) -> int:
        """Columns of a panel: what a CTA has of a line."""
        return self.threads * self.vector

    @property
    def tile(self) -> int:
        """Elements of a column that a CTA loads at a time: lines."""
        return self.steps

    @property
    def signature(self) -> str:
        """The numbers of `SweepPlan.arguments`, the scratch memory and the prologue's numbers; of each operand its
        address and two strides."""
        return "i" * 8 + "l" * (2 + len(self.prologue.numbers)) + "lll" * len(self.dtypes)

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        return "_".join(filter(None, (f"sweep{self.threads}x{self.steps}x{self.vector}", self.prologue.name)))

    # Named layouts: the kernel builds its cute layouts from these values and the diagrams draw them.

    @property
    def tiler(self) -> tuple[int, int]:
        """(lines, columns) of what a CTA loads at a time."""
        return self.steps, self.columns

    @property
    def tv(self) -> Layout:
        """(thread, value) -> index in these lines, of a column fastest; a value is (element of the vector, line)."""
        return Layout((self.threads, (self.vector, self.steps)), (self.vector * self.steps, (self.steps, 1)))

    @property
    def reduction_buffer(self) -> Layout:
        """(number of a state, column, thread that merges states of this column) -> float32 in shared memory of the
        kernel that merges states."""
        return Layout.ordered((self.facts.numbers, MERGED, MERGERS // MERGED), (0, 1, 2))

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA of the kernel that merges states; the others have none."""
        return 4 * self.reduction_buffer.cosize


@dataclass(frozen=True)
class SweepPlan(PlanBase):
    """How columns are swept over twice. A *line* is one or more rows of memory, which lie side by side; of `length`
    rows the last line may have fewer. A *panel* is what a CTA has of a line, in all lines.

    Attributes:
        problem: The call in canonical form.
        kernel: What is compiled.
        outer: Matrices that lie one behind another, whose columns are apart.
        columns: Of each.
        length: Elements of a column.
        abreast: Rows of memory in a line.
        parts: CTAs that share the lines of a panel.
        share: Lines that each takes.
        operand_strides: In elements, of full operands (from a matrix to the next, from a line to the next), of a bias
            or mask (from a matrix, from a row of memory to the next), of results that are one number a column (from a
            matrix, from a column to the next).
        zeroed: Whether the scratch memory must be zero: no state is read before it is written.
    """

    zeroed: ClassVar[bool] = False

    problem: Problem
    kernel: SweepClass
    outer: int
    columns: int
    length: int
    abreast: int
    parts: int
    share: int
    operand_strides: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Columns of a line, those of all its rows."""
        return self.abreast * self.columns

    @property
    def lines(self) -> int:
        """Whole lines of a matrix."""
        return self.length // self.abreast

    @property
    def rest(self) -> int:
        """Elements of the line behind them."""
        return self.length % self.abreast * self.columns

    @property
    def panels(self) -> int:
        """Panels of a line."""
        return math.ceil(self.width / self.kernel.columns)

    @property
    def ctas(self) -> int:
        """CTAs of the first pass."""
        return self.outer * self.panels * self.parts

    @property
    def grids(self) -> tuple[int, ...]:
        """CTAs of each of the kernels, in the order of their launches."""
        merging = self.outer * math.ceil(self.columns / MERGED)
        return self.ctas, merging, *([TURNS * self.ctas] if self.kernel.facts.outputs else [])

    @property
    def found(self) -> int:
        """Bytes from the parts' states in the scratch memory to those of whole columns."""
        states = self.outer * self.parts * self.width * self.kernel.state_bytes
        return -(-states // ALIGNMENT) * ALIGNMENT

    @property
    def scratch(self) -> int:
        """Bytes of memory that the launch needs: the parts' states, then those of whole columns."""
        return self.found + self.outer * self.columns * self.kernel.state_bytes

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the scratch memory."""
        numbers = self.outer, self.columns, self.abreast, self.lines, self.rest
        return *numbers, self.panels, self.parts, self.share, self.found

    def explain(self) -> str:
        """The plan as readable text."""
        c, columns = self.kernel, counted(self.columns, "column")
        written = "twice and written once" if c.facts.outputs else "once, one result written per group"
        return "\n".join(
            [
                f"{c.math} of {counted(self.problem.groups, 'group')} of {self.problem.length}, "
                f"{' -> '.join(c.own_dtypes)}, for {c.architecture}",
                f"  movement   sweep: lines of {counted(self.abreast, 'row')} of {columns}; class {c.name}",
                f"  threads    {c.threads} per CTA, side by side over {c.columns} columns of a line",
                f"  thread     a vector of {counted(c.vector, 'element')} of each line, {c.steps} lines at a time",
                *([f"  prologue   {told}"] if (told := c.prologue.told) else []),
                f"  parts      {self.parts} of {counted(self.share, 'line')}, for {counted(self.panels, 'panel')}; "
                f"{self.scratch / 1e6:.1f} MB of states",
                f"  grid       {' + '.join(map(str, self.grids))} CTAs of {len(self.grids)} kernels",
                f"  traffic    {self.problem.bytes / 1e6:.1f} MB, every element read {written}",
            ]
        )


def plan_sweep(
    math_name: str, problem: Problem, device: Device, prologue: Prologue = NO_PROLOGUE
) -> SweepPlan | None:
    """The plan of columns in two passes; None where rows of memory, or lines of as many as make whole vectors, are not
    contiguous vectors, and where those have more than one element of a bias or a mask."""
    facts, found = facts_of(math_name, True, prologue), _modes(problem)
    if found is None or facts.group_inputs:
        return None
    outer, reduced, inner = found
    if any(inner.strides[i] for i in facts.beside):
        return None
    size = {i: ITEM_SIZE[problem.dtypes[i]] for i in facts.main}
    vector = ALIGNMENT // max(size.values())
    unit = rows_of_vectors(problem, [outer], reduced, inner, vector, facts)
    if unit is None or inner.size < vector:
        return None
    crowded = "mask" in facts.inputs and (prologue.bias or prologue.scale) and size[0] == 2
    loaded = LOADED_BYTES if facts.numbers < 3 and not crowded else LOADED_BYTES // 2
    c = SweepClass(
        math=math_name,
        architecture=device.architecture.name,
        dtypes=problem.dtypes,
        vector=vector,
        steps=loaded // sum(vector * size[i] for i in facts.main if i < len(facts.inputs)),
        prologue=prologue,
    )
    dense = unit > 1 or all(reduced.strides[i] == inner.size for i in facts.main)
    abreast, parts = _cut(c, problem.length, outer.size, inner.size, unit, dense, device)
    return SweepPlan(
        problem=problem,
        kernel=c,
        outer=outer.size,
        columns=inner.size,
        length=problem.length,
        abreast=abreast,
        parts=parts,
        share=math.ceil(problem.length // abreast / parts),
        operand_strides=tuple(
            (outer.strides[i], _along(i, facts, reduced, inner) * (abreast if i in facts.main else 1))
            for i in range(len(problem.dtypes))
        ),
    )


def _along(i: int, facts: Math, reduced: Mode, inner: Mode) -> int:
    """Elements from one row of memory to the next of a full operand, from one column to the next of another."""
    return (reduced if i < facts.full else inner).strides[i]


def _modes(problem: Problem) -> tuple[Mode, Mode, Mode] | None:
    """(outer, reduced, inner) modes; None for more, or for one column."""
    if len(problem.reduced) != 1 or len(problem.kept) not in (1, 2):
        return None
    one = Mode(1, (0,) * len(problem.dtypes))
    *outer, inner = problem.kept
    return (*outer, one)[0], problem.reduced[0], inner


def _cut(
    c: SweepClass, length: int, outer: int, columns: int, unit: int, dense: bool, device: Device
) -> tuple[int, int]:
    """(rows of a line, parts) with which the first pass takes the least time.

    unit: rows that make whole vectors; dense: whether rows follow each other.
    """
    resident, size = device.multiprocessors * c.min_blocks, ITEM_SIZE[c.dtypes[0]]
    of_lines = unit * (CACHE_LINE // math.gcd(CACHE_LINE, unit * columns * size))
    # Where rows do not follow each other a line is one of them, and begins where it begins.
    rows = {unit * k for k in range(1, 9)} | {of_lines * k for k in range(1, 9)} if dense else {1}

    def cuts() -> Iterator[tuple[float, int, int]]:
        for abreast in rows:
            width, lines = abreast * columns, length // abreast
            if abreast > unit and (width > WIDEST or lines < c.steps):
                continue
            panels = outer * math.ceil(width / c.columns)
            begin = max(math.gcd(CACHE_LINE, width * size), ALIGNMENT)
            for rounds in range(1, ROUNDS + 1):
                parts = min(max(rounds * resident // panels, 1), max(lines, 1))
                share = math.ceil(lines / parts)
                parts = max(math.ceil(lines / max(share, 1)), 1)
                # Lines that a place for a CTA reads, in whole steps; then states, which are written and read again.
                read = math.ceil(panels * parts / resident) * (share + c.steps / 2) * OFF_LINES[begin]
                states = 2 * outer * parts * width * c.state_bytes
                inputs = len(c.facts.inputs) - len(c.facts.beside)
                yield read + states / (resident * c.columns * size * inputs), abreast, parts

    return min(cuts())[1:]
