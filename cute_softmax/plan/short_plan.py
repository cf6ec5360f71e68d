"""The numbers of one launch on short rows, and which they are: see `short`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layouts.algebra import Layout

from .base import PlanBase, counted
from .hardware import Device
from .maths import WARP, Math, check_counts
from .modes import MODES
from .problem import ITEM_SIZE, Mode, Problem, merged
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .short import APART, BYTES, DENSE, PAIR, SINGLE, SKEW, WARPS, ShortClass, configs_of, short_class
from .table import table_of


@dataclass(frozen=True)
class ShortPlan(PlanBase):
    """How one launch of the short movement runs: what is compiled, and the numbers that change from call to call.

    Attributes:
        problem: The call in canonical form.
        kernel: What is compiled.
        rows: The number of rows.
        columns: Elements of a row.
        warp_rows: Rows of a warp's stretch.
        ctas: CTAs of the grid.
        evict_last: Whether loads ask L2 to evict their lines last.
        kept: Sizes of the dimensions that form a row's index, the slowest first.
        operand_strides: For each operand that is not dense, its strides in these dimensions, in elements; for dense
            operands the length of rows is enough. For an operand whose rows are apart, also how many neighbouring rows
            share each of its rows, and how many of its rows are contiguous.
        table: The name and digest of the table that the configuration comes from.
        laid_out: Which operands of the call are copied first: a bias or a mask, into the layout of the elements.
        laid_strides: The strides of these copies, in elements.
        scratch: Bytes of zeroed memory that a launch needs in addition to its operands.
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
        """The number of stretches; each is one warp's."""
        return math.ceil(self.rows / self.warp_rows)

    @property
    def pairs(self) -> bool:
        """Whether each thread takes pairs of neighbouring rows, see `PAIR`."""
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
        """The row in shared memory for a row of the first stretch; neighbours share one if the operand's rows are
        apart."""
        if self.kernel.lying[operand] == APART:
            return row // self.operand_strides[operand][-2]
        return row

    @property
    def beside(self) -> list[str]:
        """The layout of inputs that are not dense, in words."""
        found = []
        for name, how, strides in zip(
            self.kernel.facts.inputs, self.kernel.laid, self.operand_strides, strict=False
        ):
            if how == SINGLE:
                found.append(f"{name}: one element per row, in registers")
            elif how == APART:
                repeat, run = strides[-2:]
                shared = f"each shared by {repeat} neighbours, " if repeat > 1 else ""
                found.append(f"{name}: rows apart, {shared}{run} contiguous; copied to shared memory once")
        return found

    @property
    def skew(self) -> int:
        """Slots left empty in shared memory after every `SKEW` vectors."""
        return int(not self.kernel.whole and self.columns % (2 * self.kernel.vector) == 0)

    def place(self, element: int) -> int:
        """Where an element of a stretch is in shared memory."""
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
        """The plan as readable text."""
        c = self.kernel
        between = (
            f"registers: a vector holds {counted(c.rows_per_thread, 'row')}"
            if c.whole
            else f"shared memory: {counted(c.rows_per_thread, 'row')} per thread at a time, of at most "
            f"{c.capacity} elements"
        )
        lines = [
            f"{c.math} of {counted(self.rows, 'row')} of {self.columns}, {' -> '.join(c.own_dtypes)}, "
            f"for {c.architecture}",
            f"  movement   short: contiguous rows, each held by one thread; class {c.name}",
            *self.given,
            f"  threads    {c.threads} per CTA; each warp has a stretch of {counted(self.warp_rows, 'row')}, "
            f"{self.warp_rows * self.columns} elements",
            f"  loads      {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            f"  rows       in {between}",
            *(f"  beside     {told}" for told in self.beside),
            f"  grid       {counted(self.ctas, 'CTA')} for {self.stretches} stretch{'es' * (self.stretches != 1)}; "
            f"{c.shared_memory} bytes of shared memory "
            "per CTA",
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
    if all(
        columns > config.capacity for config in configs_of(table, facts, problem.dtypes, prologue)
    ):  # before anything that takes longer
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
