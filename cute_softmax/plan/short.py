"""Short rows that lie one behind another: the Plan classes; `short_plan` has the numbers of one launch.

R neighbouring rows of N elements are one stretch of R * N, which a warp loads and stores in aligned vectors whatever N
is. Between the two each thread takes rows of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase
from .maths import WARP, Math
from .problem import ALIGNMENT, ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .short_configs import ShortConfig
from .table import Table, table_of

# A row of single 16-bit elements begins in the middle of a word every other time. A thread's rows come in twos, so that
# all lanes of a warp look at rows that begin alike, whose words lie in different banks.
PAIR = 2
# Rows of bytes begin anywhere in a word; they are read, and those that lie apart are copied, by words of so many.
BYTES = 4
# Elements of a row that are moved without a predicate each, if all are there.
CHUNK = 8
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

    capacity, least: elements of the longest row and of the shortest. columns: of all rows, where the class is for one
        length; else 0.
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
    logs: ClassVar[bool] = False
    cluster_n: ClassVar[int] = 1
    threads_per_row: ClassVar[int] = 1

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    capacity: int
    least: int
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
    def sure(self) -> int:
        """How many elements of a row are there whatever its length, in whole chunks; one at least comes behind them."""
        return (self.least - 1) // CHUNK * CHUNK

    @property
    def part(self) -> int:
        """Pieces of a row that row maths which advance in parts take at once: all."""
        return self.capacity // self.piece

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


def configs_of(
    table: Table, facts: Math, dtypes: Sequence[str], prologue: Prologue = NO_PROLOGUE
) -> tuple[ShortConfig, ...]:
    """The configurations of a table for the short rows of a math. The longest ones lack registers for float32, for what
    becomes of capped scores, and for gradients without a loss."""
    narrow = "index" in facts.group_inputs and all(ITEM_SIZE[d] == 2 for d in dtypes[: facts.full])
    few_registers = facts.outputs and (prologue.softcap or prologue.target == "found")
    return table.short + table.chosen if narrow and not few_registers else table.short


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
    configs = configs_of(table or table_of(), facts, dtypes, prologue)
    config = next((c for c in configs if columns <= c.capacity), None)
    if config is None or prologue.long_rows:
        return None
    laid = laid or (DENSE,) * len(facts.inputs)
    widest = max(ITEM_SIZE[d] for d in dtypes[: facts.full])
    vector = ALIGNMENT // widest
    whole = vector % columns == 0 and APART not in laid
    unit = WARP * vector * widest  # bytes of one vector a lane
    steps = (config.whole_bytes if whole else _stretch(config, widest)) // unit
    each = vector // columns if whole else 1
    alone = whole or config.capacity <= ONE_LENGTH  # a class for rows of this length
    shorter = [c.capacity for c in configs if c.capacity < columns]
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
        least=columns if alone else max(shorter, default=0) + 1,
        columns=columns if alone else 0,
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
