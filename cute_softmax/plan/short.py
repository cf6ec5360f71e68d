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
from .modes import MODES
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Problem, merged
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .short_configs import ShortConfig
from .table import Table, table_of

# A row of single 16-bit elements begins in the middle of a word every other time. A thread's rows come in twos, so that
# all lanes of a warp look at rows that begin alike, whose words lie in different banks.
PAIR = 2
# Rows of bytes begin anywhere in a word; they are read, and those that lie apart are copied, by words of so many.
BYTES = 4
# Vectors in shared memory after which one place is left empty, where rows are an even number of vectors: 8 of 16 bytes
# are all banks once.
SKEW = 8
# Rows of classes up to this capacity are of one length each, which the compiler knows: of so few elements each
# predicate costs as much as what it guards (of 3 in bf16 37 instructions of PTX an element, else 25).
ONE_LENGTH = 8
# Warps of an SM from which on a warp takes more rows than it has lanes: those keep the memory busy.
WARPS = 16
# How the rows of an input lie: one behind another, each somewhere, or each a single element that counts for all of it.
DENSE, APART, SINGLE = LAID = "dense", "apart", "single"
# CTAs that an SM must hold where some lie apart: others work while a warp waits. Rows of 49 in bf16 with a mask of each
# window ran at 0.72 of a copy, and at 0.51 without this (H100, 2026-11-24).
BLOCKS_APART = 4


@dataclass(frozen=True)
class ShortClass(ClassBase):
    """What is compiled for the `short` movement: everything that shapes the code, as plain numbers.

    capacity: elements of the longest row. columns: of all rows, where the class is for one length; else 0.
    whole: whether a vector holds several rows, or one: then rows stay in the registers that they are loaded to.
    vector: elements of an access, 16 bytes of the widest full operand. access: per operand, elements of one load or
        store: `vector`, or fewer where the tensor begins off that boundary; 0 for rows that are not `DENSE`; of what
        has one element for a row those of a vector's rows, 1 where they lie apart.
    laid: of each input one of `LAID`; all but a bias and a mask are dense. prologue: what happens to the scores before
        the math and to its results. kept_modes: how many dimensions a row's index is taken apart into.
    steps: vectors that a thread loads; rows_per_thread: rows that it works on at once, those of a vector if they are
        whole; threads: of a CTA; min_blocks: CTAs that an SM must hold.
    """

    movement: ClassVar[str] = "short"
    # What row maths ask of a class: one pass over a row that lies in registers.
    online: ClassVar[bool] = True
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
    laid: tuple[str, ...]
    prologue: Prologue = NO_PROLOGUE
    kept_modes: int = 1

    @property
    def facts(self) -> Math:
        return facts_of(self.math, True, self.prologue)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of an element of each full operand."""
        return tuple(ITEM_SIZE[d] for d in self.dtypes[: self.facts.full])

    @property
    def shares_words(self) -> bool:
        """Whether rows of 16-bit elements that begin in the middle of a word may be those of different lanes: there is
        room for one row of each, and no pair."""
        return self.narrow and not self.whole and self.elements < PAIR * WARP * self.capacity

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
        sizes = [ITEM_SIZE[d] for d in self.dtypes]
        loads = zip(self.laid, self.access, sizes, strict=False)
        widths = (max(size, BYTES) if how == APART else (a or 1) * size for how, a, size in loads)
        return [f"{width} bytes" for width in dict.fromkeys(widths)]

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
        """Per full operand, whose place in shared memory it has: results take that of a dense input whose elements are
        of their size, if there is one."""
        sizes, inputs = self.sizes, len(self.facts.inputs)
        same = {sizes[i]: i for i in reversed(range(inputs)) if self.laid[i] == DENSE}
        return (*range(inputs), *(same.get(sizes[i], i) for i in range(inputs, self.facts.full)))

    @property
    def places(self) -> int:
        """Elements of a warp's part of shared memory, those left empty (`SKEW`) counted."""
        return 0 if self.whole else self.elements + self.elements // SKEW

    @property
    def lying(self) -> tuple[str, ...]:
        """How the rows of each full operand lie: those of results densely."""
        return (*self.laid, *[DENSE] * len(self.facts.outputs))

    @property
    def placed(self) -> tuple[int, ...]:
        """The full operands that have a place of their own in shared memory: not single elements, which stay in
        registers."""
        return () if self.whole else tuple(i for i in sorted({*self.sources}) if self.lying[i] != SINGLE)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.warps * self.places * sum(ITEM_SIZE[self.dtypes[i]] for i in self.placed)

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
        """Rows, columns, rows of a warp, CTAs, the cache policy; sizes of kept modes, the prologue's numbers, and the
        address of each operand; with that of one that does not lie densely its strides."""
        strided = sum(how != DENSE for how in self.laid) + len(self.dtypes) - self.facts.full
        numbers = self.kept_modes - 1 + len(self.prologue.numbers)
        runs = 2 * self.laid.count(APART)
        return "liiii" + "l" * (numbers + len(self.dtypes) + strided * self.kept_modes + runs)

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        parts = [f"short{self.columns or self.capacity}", f"{self.steps}x{self.vector}"]
        if self.whole:
            parts.append("whole")
        if self.rows_per_thread > 1:
            parts.append(f"rows{self.rows_per_thread}")
        if [*self.accesses] != [self.vector * (how == DENSE) for how in self.lying]:
            parts.append("access" + "_".join(map(str, self.accesses)))
        if self.prologue:
            parts += [self.prologue.name, *(how for how in self.laid if how != DENSE)]
        if self.kept_modes > 1:
            parts.append(f"modes{self.kept_modes}")
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
    laid: tuple[str, ...] = (),
    prologue: Prologue = NO_PROLOGUE,
    kept_modes: int = 1,
) -> ShortClass | None:
    """The class of short rows of so many elements; None where rows of other movements begin.

    offsets: of the operands past a 16-byte boundary, in elements; nothing for aligned ones. apart: whether numbers of
    groups lie with gaps. laid: of the inputs, see `ShortClass`; nothing where all are dense.
    """
    facts = facts_of(math_name, True, prologue)
    config = next((c for c in (table or table_of()).short if columns <= c.capacity), None)
    if config is None or MATHS[math_name, True].group_inputs or prologue.of_rows:
        return None
    laid = laid or (DENSE,) * len(facts.inputs)
    widest = max(ITEM_SIZE[d] for d in dtypes[: facts.full])
    vector = ALIGNMENT // widest
    whole = vector % columns == 0 and APART not in laid
    unit = WARP * vector * widest  # bytes of one vector a lane
    steps = (config.whole_bytes if whole else _stretch(config, widest)) // unit
    each = vector // columns if whole else 1
    placed = offsets or (0,) * len(dtypes)
    numbers = 1 if apart else each  # side by side
    access = tuple(
        math.gcd(vector if i < facts.full else min(numbers, ALIGNMENT // ITEM_SIZE[d]), offset)
        for i, (d, offset) in enumerate(zip(dtypes, placed, strict=True))
    )
    access = tuple(a * (how == DENSE) for a, how in zip(access, laid, strict=False)) + access[len(laid) :]
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
        min_blocks=max(config.min_blocks, BLOCKS_APART) if APART in laid else config.min_blocks,
        laid=laid,
        prologue=prologue,
        kept_modes=kept_modes,
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
        kept: Sizes of the dimensions that a row's index is taken apart into, the slowest first.
        operand_strides: Of each operand that does not lie densely its stride in each of these, in elements; of the
            others the length of rows says all. Of one whose rows lie apart also how many neighbours have each of them,
            and how many of them lie one behind another.
        table: The name and digest of the table that the configuration is of.
        laid_out: Which operands of the call are copied first: a bias or a mask, to lie as the elements do.
        laid_strides: The strides of these copies, in elements.
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
    kept: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]
    table: str = ""
    laid_out: tuple[int, ...] = ()
    laid_strides: tuple[tuple[int, ...], ...] = ()

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the prologue's numbers and operands."""
        return self.rows, self.columns, self.warp_rows, self.ctas, int(self.evict_last), *self.kept[1:]

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

    def shared_row(self, operand: int, row: int) -> int:
        """Which row in shared memory a row of the first stretch has: of rows that lie apart those of neighbours are
        one."""
        if self.kernel.lying[operand] == APART:
            return row // self.operand_strides[operand][-2]
        return row

    @property
    def beside(self) -> list[str]:
        """How inputs lie that are not dense, in words."""
        found = []
        for name, how, strides in zip(
            self.kernel.facts.inputs, self.kernel.laid, self.operand_strides, strict=False
        ):
            if how == SINGLE:
                found.append(f"{name}: one element a row, in registers")
            elif how == APART:
                repeat, run = strides[-2:]
                shared = f"each that of {repeat} neighbours, " if repeat > 1 else ""
                found.append(
                    f"{name}: rows apart, {shared}{run} one behind another; copied to shared memory once"
                )
        return found

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
        if width == 1:
            return V if self.columns % V == 0 else BYTES
        fits = next((p for p in (V, V // 2) if self.columns % p == 0), 1)
        return max(fits, PAIR) if width == 2 else fits

    def explain(self) -> str:
        """The plan as a person would want to read it."""
        c = self.kernel
        between = (
            f"registers: a vector holds {c.rows_per_thread} row(s)"
            if c.whole
            else f"shared memory: {c.rows_per_thread} row(s) of a thread at once, of at most {c.capacity} elements"
        )
        lines = [
            f"{c.math} of {self.rows} rows of {self.columns}, {' -> '.join(c.own_dtypes)}, for {c.architecture}",
            f"  movement   short: rows lie one behind another, a thread holds whole ones; class {c.name}",
            *self.given,
            f"  threads    {c.threads} a CTA; a warp has a stretch of {self.warp_rows} rows, "
            f"{self.warp_rows * self.columns} elements",
            f"  loads      {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            f"  rows       in {between}",
            *(f"  beside     {told}" for told in self.beside),
            f"  grid       {self.ctas} CTAs for {self.stretches} stretches; {c.shared_memory} bytes of shared memory "
            "a CTA",
            f"  traffic    {self.problem.bytes / 1e6:.1f} MB, every element read once"
            + (" and written once" if c.facts.outputs else ", one result written per row"),
            *([f"  table      {self.table}"] if self.table else []),
            *self.bits,
        ]
        return "\n".join(lines)


def is_dense(modes: Sequence[Mode], operand: int) -> bool:
    """Whether an operand's elements lie one behind another in the order of these modes, the slowest first."""
    step = 1
    for mode in reversed(modes):
        if mode.size > 1 and mode.strides[operand] != step:
            return False
        step *= mode.size
    return True


def _kept(problem: Problem, facts: Math) -> tuple[Mode, ...]:
    """The kept modes in the order in which rows lie; a query dimension stays the last. At least one."""
    last = problem.kept[-1:] if problem.query else ()
    others = problem.kept[: len(problem.kept) - len(last)]
    found = merged(sorted(others, key=lambda m: m.strides[facts.reference], reverse=True)) + last
    return found or (Mode(1, (1,) * len(problem.dtypes)),)


def _laid(kept: Sequence[Mode], problem: Problem, facts: Math) -> tuple[str, ...] | None:
    """How each input lies, see `LAID`; None where the elements do not densely."""
    if len(kept) > MODES[-1] or len(problem.reduced) > 1:
        return None
    modes = (*kept, *problem.reduced)
    if not all(is_dense(modes, i) for i in facts.main):
        return None
    found = []
    for i in range(len(facts.inputs)):
        along = problem.reduced[0].strides[i] if problem.reduced else 1
        if along not in (0, 1):
            return None
        found.append(SINGLE if along == 0 else DENSE if is_dense(modes, i) else APART)
    return tuple(found)


def _runs(kept: Sequence[Mode], operand: int, columns: int) -> tuple[int, int]:
    """(how many neighbouring rows are one row of an operand, how many rows of it lie one behind another)."""
    found, step = [1, 1], 0
    for mode in reversed(kept):
        if mode.size == 1:
            continue
        if step == 0 and mode.strides[operand]:
            step = columns
        if mode.strides[operand] != step:
            break
        found[step > 0] *= mode.size
        step *= mode.size
    return found[0], found[1]


def plan_short(
    math_name: str, problem: Problem, device: Device, evict_last: bool, prologue: Prologue = NO_PROLOGUE
) -> ShortPlan | None:
    """The plan of the short movement; None where rows are no short ones that lie one behind another."""
    facts, table = facts_of(math_name, True, prologue), table_of(device.table)
    rows, columns = problem.groups, problem.length
    if all(columns > config.capacity for config in table.short):  # before anything that takes longer
        return None
    kept = _kept(problem, facts)
    if not (rows and columns) or (laid := _laid(kept, problem, facts)) is None:
        return None
    strides = [tuple(m.strides[i] for m in kept) for i in range(len(problem.dtypes))]
    if not prologue and len(kept) > 1:
        return None
    c = short_class(
        math_name,
        device.architecture.name,
        problem.dtypes,
        columns,
        offsets=problem.offsets,
        apart=any(s != (1,) for s in strides[facts.full :]),
        table=table,
        laid=laid,
        prologue=prologue,
        kept_modes=len(kept),
    )
    if c is None or c.shared_memory > device.architecture.shared_memory:
        return None
    if len(kept) > 1 or APART in laid:  # indices are taken apart in 32 bits
        check_counts({"groups": rows})
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
    for i, how in enumerate(c.lying):
        strides[i] = {DENSE: (), SINGLE: strides[i], APART: (*strides[i], *_runs(kept, i, columns))}[how]
    return ShortPlan(
        problem=problem,
        kernel=c,
        rows=rows,
        columns=columns,
        warp_rows=warp_rows,
        ctas=ctas,
        evict_last=evict_last,
        kept=tuple(m.size for m in kept),
        operand_strides=tuple(strides),
        table=table.title,
    )
