"""Short rows that lie one behind another: the Plan classes, and the numbers of one launch.

R neighbouring rows of N elements are one stretch of R * N, which a warp loads and stores in aligned vectors whatever N
is. Between the two each thread takes rows of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase, PlanBase
from .hardware import Device
from .maths import MATHS, WARP, Math, check_counts
from .problem import ALIGNMENT, ITEM_SIZE, Problem
from .prologue import NO_PROLOGUE, Prologue
from .short_configs import ShortConfig
from .table import Table, table_of

# A row of single 16-bit elements begins in the middle of a word every other time. A thread's rows come in twos, so that
# all lanes of a warp look at rows that begin alike, whose words lie in different banks.
PAIR = 2
# Vectors in shared memory after which one place is left empty, where rows are an even number of vectors: 8 of 16 bytes
# are all banks once.
SKEW = 8
# Rows of classes up to this capacity are of one length each, which the compiler knows: of so few elements each
# predicate costs as much as what it guards (of 3 in bf16 37 instructions of PTX an element, else 25).
ONE_LENGTH = 8
# Warps of an SM from which on a warp takes more rows than it has lanes: those keep the memory busy.
WARPS = 16


@dataclass(frozen=True)
class ShortClass(ClassBase):
    """What is compiled for the `short` movement: everything that shapes the code, as plain numbers.

    capacity: elements of the longest row. columns: of all rows, where the class is for one length; else 0.
    whole: whether a vector holds several rows, or one: then rows stay in the registers that they are loaded to.
    vector: elements of an access, 16 bytes of the widest full operand. access: per operand, elements of one load or
        store: `vector`, or fewer where the tensor begins off that boundary; of group outputs those of a vector's rows,
        1 where they lie apart.
    steps: vectors that a thread loads; rows_per_thread: rows that it works on at once, those of a vector if they are
        whole; threads: of a CTA; min_blocks: CTAs that an SM must hold.
    """

    movement: ClassVar[str] = "short"
    # What row maths ask of a class: one pass over a row that lies in registers.
    online: ClassVar[bool] = True
    prologue: ClassVar[Prologue] = NO_PROLOGUE
    part: ClassVar[int] = 1
    logs: ClassVar[bool] = False
    cluster_n: ClassVar[int] = 1
    threads_per_row: ClassVar[int] = 1

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    capacity: int
    columns: int
    whole: bool
    vector: int
    access: tuple[int, ...]
    steps: int
    rows_per_thread: int
    threads: int
    min_blocks: int

    @property
    def facts(self) -> Math:
        return MATHS[self.math, True]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of an element of each full operand."""
        return tuple(ITEM_SIZE[d] for d in self.dtypes[: self.facts.full])

    @property
    def narrow(self) -> bool:
        """Whether a full operand has elements of 16 bits."""
        return 2 in self.sizes

    @property
    def keep(self) -> bool:
        """Whether exponentials stay in registers: where they are the result."""
        return self.math == "softmax"

    @property
    def accesses(self) -> tuple[int, ...]:
        return self.access[: self.facts.full]

    @property
    def load_widths(self) -> list[str]:
        loads = zip(self.access[: len(self.facts.inputs)], self.dtypes, strict=False)
        return list(dict.fromkeys(f"{a * ITEM_SIZE[d]} bytes" for a, d in loads))

    @property
    def staging(self) -> tuple[str, ...]:
        """How inputs get to the threads, see `RowClass`."""
        return ("direct" if self.whole else "async",) * len(self.facts.inputs)

    @property
    def warps(self) -> int:
        """Warps of a CTA, each with a stretch of its own."""
        return self.threads // WARP

    @property
    def elements(self) -> int:
        """The most elements of a warp's stretch."""
        return WARP * self.vector * self.steps

    @property
    def piece(self) -> int:
        """Elements that a thread has side by side in registers: of a vector, as many as divide the row."""
        return math.gcd(self.vector, self.capacity)

    @property
    def sources(self) -> tuple[int, ...]:
        """Per full operand, whose place in shared memory it has: results take that of an input whose elements are of
        their size, if there is one."""
        sizes, inputs = self.sizes, len(self.facts.inputs)
        same = {sizes[i]: i for i in reversed(range(inputs))}
        return (*range(inputs), *(same.get(sizes[i], i) for i in range(inputs, self.facts.full)))

    @property
    def places(self) -> int:
        """Elements of a warp's part of shared memory, those left empty (`SKEW`) counted."""
        return 0 if self.whole else self.elements + self.elements // SKEW

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.warps * self.places * sum(ITEM_SIZE[self.dtypes[i]] for i in {*self.sources})

    # Named layouts: the kernel builds its cute layouts from these values and the diagrams draw them.

    @property
    def tv(self) -> Layout:
        """(lane, (element of a vector, step)) -> element of the warp's stretch."""
        V = self.vector
        return Layout((WARP, (V, self.steps)), (V, (1, WARP * V)))

    @property
    def smem(self) -> Layout:
        """(element, warp) -> place in shared memory, without skew."""
        return Layout((self.places, self.warps), (1, self.places))

    @property
    def signature(self) -> str:
        """Rows, columns, rows of a warp, CTAs, the cache policy, addresses; with those of group outputs a stride."""
        return "liiii" + "l" * (len(self.dtypes) + len(self.facts.group_outputs))

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        parts = [f"short{self.columns or self.capacity}", f"{self.steps}x{self.vector}"]
        if self.whole:
            parts.append("whole")
        if self.rows_per_thread > 1:
            parts.append(f"rows{self.rows_per_thread}")
        aligned = [self.vector] * self.facts.full
        if [*self.accesses] != aligned:
            parts.append("access" + "_".join(map(str, self.accesses)))
        return "_".join(parts)


def short_class(
    math_name: str,
    architecture: str,
    dtypes: tuple[str, ...],
    columns: int,
    *,
    offsets: Sequence[int] = (),
    apart: bool = False,
    table: Table | None = None,
) -> ShortClass | None:
    """The class of short rows of so many elements; None where rows of other movements begin.

    offsets: of the operands past a 16-byte boundary, in elements; nothing for aligned ones. apart: whether numbers of
    groups lie with gaps.
    """
    facts = MATHS[math_name, True]
    config = next((c for c in (table or table_of()).short if columns <= c.capacity), None)
    if config is None or facts.group_inputs:
        return None
    widest = max(ITEM_SIZE[d] for d in dtypes[: facts.full])
    vector = ALIGNMENT // widest
    whole = vector % columns == 0
    unit = WARP * vector * widest  # bytes of one vector a lane
    steps = (config.whole_bytes if whole else _stretch(config, widest)) // unit
    each = vector // columns if whole else 1
    placed = offsets or (0,) * len(dtypes)
    numbers = 1 if apart else each  # side by side
    access = tuple(
        math.gcd(vector if i < facts.full else min(numbers, ALIGNMENT // ITEM_SIZE[d]), offset)
        for i, (d, offset) in enumerate(zip(dtypes, placed, strict=True))
    )
    return ShortClass(
        math=math_name,
        architecture=architecture,
        dtypes=dtypes,
        capacity=columns if whole else config.capacity,
        columns=columns if whole or config.capacity <= ONE_LENGTH else 0,
        whole=whole,
        vector=vector,
        access=access,
        steps=steps,
        rows_per_thread=each if whole else config.rows_per_thread,
        threads=config.threads,
        min_blocks=config.min_blocks,
    )


def _stretch(config: ShortConfig, widest: int) -> int:
    """Bytes of a warp's stretch in the widest dtype: as configured, and enough for what its lanes work on at once, or
    for two rows of each where some begin in the middle of words."""
    each = max(config.rows_per_thread, PAIR if widest == 2 else 1)
    return max(config.bytes, WARP * each * config.capacity * widest)


@dataclass(frozen=True)
class ShortPlan(PlanBase):
    """How one launch of the short movement runs: what is compiled, and the numbers that change from call to call.

    Attributes:
        problem: The call in canonical form.
        kernel: What is compiled.
        rows: How many rows there are.
        columns: Elements of a row.
        warp_rows: Rows of a warp's stretch.
        ctas: CTAs of the grid.
        evict_last: Whether reads ask to be evicted from L2 last.
        table: The name and digest of the table that the configuration is of.
        scratch: Bytes of zeroed memory that a launch needs besides its operands.
    """

    scratch: ClassVar[int] = 0

    problem: Problem
    kernel: ShortClass
    rows: int
    columns: int
    warp_rows: int
    ctas: int
    evict_last: bool
    table: str = ""

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the operands' addresses."""
        return self.rows, self.columns, self.warp_rows, self.ctas, int(self.evict_last)

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """Of rows that lie densely the length says all; of group outputs the stride from row to row, in elements."""
        facts = self.kernel.facts
        return ((),) * facts.full + tuple((s,) for s in _strides(self.problem)[facts.full :])

    @property
    def stretches(self) -> int:
        """How many stretches there are, of a warp each."""
        return math.ceil(self.rows / self.warp_rows)

    @property
    def pairs(self) -> bool:
        """Whether neighbouring rows are one thread's, see `PAIR`."""
        return self.kernel.narrow and self.columns % 2 == 1 and self.warp_rows % (WARP * PAIR) == 0

    @property
    def turns(self) -> int:
        """Rows of each thread, one after another."""
        return self.warp_rows // WARP

    @property
    def rows_tv(self) -> Layout:
        """(lane, (element of a row, turn)) -> index in the (rows, columns) of a stretch (rows fastest)."""
        R, N, each = self.warp_rows, self.columns, self.kernel.rows_per_thread
        if self.kernel.whole:
            return Layout((WARP, (N, (each, self.turns // each))), (each, (R, (1, WARP * each))))
        if self.pairs:
            return Layout((WARP, (N, (PAIR, self.turns // PAIR))), (PAIR, (R, (1, WARP * PAIR))))
        return Layout((WARP, (N, self.turns)), (1, (R, WARP)))

    def row_at(self, lane: int, turn: int) -> int:
        """The row of a lane at its turn."""
        return self.rows_tv(lane, turn * self.columns)

    @property
    def skew(self) -> int:
        """Places left empty in shared memory behind `SKEW` vectors."""
        return int(not self.kernel.whole and self.columns % (2 * self.kernel.vector) == 0)

    def place(self, element: int) -> int:
        """Where an element of a stretch lies in shared memory."""
        V = self.kernel.vector
        v, within = divmod(element, V)
        return (v + v // SKEW * self.skew) * V + within

    def piece(self, operand: int) -> int:
        """Elements of one access to a row in shared memory: as wide as all rows of this length allow."""
        V, width = self.kernel.vector, ITEM_SIZE[self.kernel.dtypes[operand]]
        fits = next((p for p in (V, V // 2) if self.columns % p == 0), 1)
        return max(fits, PAIR) if width == 2 else fits

    def explain(self) -> str:
        """The plan as a person would want to read it."""
        c = self.kernel
        dtypes = list(dict.fromkeys(c.dtypes))
        between = (
            f"registers: a vector holds {c.rows_per_thread} row(s)"
            if c.whole
            else f"shared memory: {c.rows_per_thread} row(s) of a thread at once, of at most {c.capacity} elements"
        )
        lines = [
            f"{c.math} of {self.rows} rows of {self.columns}, {' -> '.join(dtypes)}, for {c.architecture}",
            f"  movement   short: rows lie one behind another, a thread holds whole ones; class {c.name}",
            f"  threads    {c.threads} a CTA; a warp has a stretch of {self.warp_rows} rows, "
            f"{self.warp_rows * self.columns} elements",
            f"  loads      {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            f"  rows       in {between}",
            f"  grid       {self.ctas} CTAs for {self.stretches} stretches; {c.shared_memory} bytes of shared memory "
            "a CTA",
            f"  traffic    {self.problem.bytes / 1e6:.1f} MB, every element read once"
            + (" and written once" if c.facts.outputs else ", one result written per row"),
            *([f"  table      {self.table}"] if self.table else []),
            *self.bits,
        ]
        return "\n".join(lines)


def is_dense(problem: Problem, facts: Math) -> bool:
    """Whether rows lie one behind another in every operand."""
    if len(problem.kept) > 1 or len(problem.reduced) > 1:
        return False
    if problem.reduced and any(s != 1 for s in problem.reduced[0].strides[: facts.full]):
        return False
    return not problem.kept or all(s == problem.length for s in _strides(problem)[: facts.full])


def _strides(problem: Problem) -> tuple[int, ...]:
    """Of each operand, from row to row; 1 where there is but one."""
    return problem.kept[0].strides if problem.kept else (1,) * len(problem.dtypes)


def plan_short(math_name: str, problem: Problem, device: Device, evict_last: bool) -> ShortPlan | None:
    """The plan of the short movement; None where rows are no short ones that lie one behind another."""
    facts, table = MATHS[math_name, True], table_of(device.table)
    rows, columns = problem.groups, problem.length
    if not (rows and columns and is_dense(problem, facts)):
        return None
    c = short_class(
        math_name,
        device.architecture.name,
        problem.dtypes,
        columns,
        offsets=problem.offsets,
        apart=any(s != 1 for s in _strides(problem)[facts.full :]),
        table=table,
    )
    if c is None or c.shared_memory > device.architecture.shared_memory:
        return None
    if c.whole:
        warp_rows = c.elements // columns
    else:
        unit = WARP * c.rows_per_thread
        if c.narrow and columns % 2 and PAIR * WARP * columns <= c.elements:
            unit = math.lcm(unit, PAIR * WARP)
        most = c.elements // columns // unit * unit
        warp_rows = min(most, math.ceil(rows / (device.multiprocessors * WARPS * unit)) * unit)
    ctas = math.ceil(rows / (warp_rows * c.warps))
    check_counts({"CTAs": ctas})
    return ShortPlan(
        problem=problem,
        kernel=c,
        rows=rows,
        columns=columns,
        warp_rows=warp_rows,
        ctas=ctas,
        evict_last=evict_last,
        table=table.title,
    )
