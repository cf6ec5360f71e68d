"""The Plan classes of the row movement, and which of them holds a row of a given length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase
from .hardware import Architecture
from .maths import CACHE_LINE, WARP, Math, NotPlanned
from .problem import ALIGNMENT, ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row_configs import RowConfig
from .table import Table, table_of

# A row has at least so many vectors: a short one is divided finely enough that several threads load it at once.
VECTORS_PER_ROW = 8
# Vectors that one commit group of asynchronous copies loads, and that the online recurrence takes at a time. Of what
# is kept in shared memory each part has a maximum of its own, so that larger ones are faster (docs/experiments.md).
PART, KEPT_PART = 2, 4
KEPT_BYTES = 4  # of what is kept of an element
TICKET = 16  # bytes: which rows are a cluster's, where ranks share them, and a barrier for all of its CTAs to know it
# Rows are few where their CTAs, as many an SM as a configuration says, all run in so many turns: 64 rows of 151936
# elements in clusters of 16 ran at 0.84 of a copy, in those of as many rows as fill the memory's queues at 0.76 (H200).
TURNS_OF_FEW = 2
# Of a configuration for few rows, where not all of them would run in one turn: half empty it took up to 1.24 times what
# many rows have, filled from here on 0.84 to 0.93 (64 rows of 80,000 to 200,000 elements, H200). In one turn more CTAs
# are faster however empty they are (4 x 8200 float32: 2.3 us, in one CTA 3.2), as many are not (4 x 151936: 6.0, 5.1).
FEW_FILL = 0.78
# Maths that give logarithms of a row's sum: a batch-invariant plan has log_softmax's own configurations and
# exponentials for them. Those with an entropy need exponents, which these exponentials do not have.
OF_LOGS = ("logsumexp", "selective")


@dataclass(frozen=True)
class RowClass(ClassBase):
    """What is compiled for the `row` movement: everything that shapes the code, as plain numbers.

    vector: elements of one access of the output, 16 bytes of the widest full operand; also the unit of predicates.
    edges: whether rows may begin or end off a vector boundary, so that scalars are handled apart.
    access: per input, elements of one load: `vector`, or fewer where its rows are aligned differently; 0 if it has one
        element for a whole row.
    staging: per input "direct" (global memory to registers), "async" (through shared memory with cp.async), "shared"
        (stays in shared memory, read there in every pass) or "resident" (the same for all rows of a persistent CTA:
        stays there from the first to the last of them).
    staged: places in shared memory that a thread has for the vectors of an "async" input where residents leave no room
        for all of them, which take turns; 0 for one each.
    keep: whether converted values are held between the passes: in registers, or in shared memory if the elements are.
    kept_modes: into how many coordinates a row's index is taken apart, each with a stride of its own per operand.
    prologue: what happens to the scores before the math and to its results.
    logs: whether sums of exponentials are taken as log_softmax takes them, so that the logarithms are the same bits.
    ring: of rows that ranks share, how many a thread has in shared memory, each in another phase of its way through the
        kernel (see `ranks`); 0 for all others. CTAs of a cluster exchange in global memory then, as the ranks do.
    lag: how many of them are reduced after another and before that one is finished, whose states are on their way.
    """

    movement: ClassVar[str] = "row"

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    vector: int
    edges: bool
    access: tuple[int, ...]
    online: bool
    threads_per_row: int
    steps: int
    threads: int
    rows_per_thread: int
    cluster_n: int
    staging: tuple[str, ...]
    keep: bool
    persistent: bool
    min_blocks: int
    part: int
    kept_modes: int = 1
    prologue: Prologue = NO_PROLOGUE
    logs: bool = False
    staged: int = 0
    ring: int = 0
    lag: int = 0

    @property
    def early(self) -> bool:  # ranks have met in another kernel just before
        return super().early and not self.ring

    def __post_init__(self):
        if self.exchanges and self.rows_per_thread > 1:
            raise ValueError(
                "threads with several rows exchange by shuffles only: the buffer has one slot a warp"
            )
        if self.persistent and "shared" in self.staging and not self.ring:
            raise ValueError(
                "a persistent kernel refills its slots while it works: inputs cannot stay in them"
            )
        if self.keeps_shared and self.math != "softmax":
            raise ValueError(
                "exponentials take the place of elements, of which other maths make their results"
            )
        if "resident" in self.staging and (self.edges or not self.persistent):
            raise ValueError(
                "what stays for all rows needs CTAs that take several, and rows that begin alike"
            )
        if self.staged and (not self.persistent or self.steps % self.staged or self.staged % self.part):
            raise ValueError("places are shared by whole parts of a row, in CTAs that refill them")

    @property
    def facts(self) -> Math:
        return facts_of(self.math, self.online, self.prologue)

    @property
    def warps_per_row(self) -> int:
        return max(self.threads_per_row // WARP, 1)

    @property
    def threads_down(self) -> int:
        """Threads along the rows of the CTA's tile."""
        return self.threads // self.threads_per_row

    @property
    def tiler(self) -> tuple[int, int]:
        """(rows, columns) of a CTA's tile."""
        return self.threads_down * self.rows_per_thread, self.threads_per_row * self.vector * self.steps

    @property
    def step_tiler(self) -> tuple[int, int]:
        """(rows, columns) that one step of all threads covers: the tile of the TiledCopy."""
        return self.tiler[0], self.threads_per_row * self.vector

    @property
    def capacity(self) -> int:
        """The longest row, in elements, head and tail scalars not counted."""
        return self.tiler[1] * self.cluster_n

    @property
    def edge_scalars(self) -> int:
        """Scalars per thread for the at most V - 1 elements before and after a row's whole vectors."""
        return math.ceil(2 * (self.vector - 1) / self.threads_per_row) if self.edges else 0

    @property
    def line(self) -> int:
        """Elements of a cache line, of the narrowest operand; the grain of a CTA's share of a row."""
        return CACHE_LINE // min(ITEM_SIZE[d] for d in self.dtypes[: self.facts.full])

    @property
    def ahead(self) -> int:
        """Rows of the ring that are loaded ahead."""
        return self.ring - self.lag

    @property
    def peers(self) -> int:
        """CTAs that exchange through distributed shared memory."""
        return 1 if self.ring else self.cluster_n

    @property
    def turns(self) -> int:
        """Reduction buffers per stage: a persistent kernel alternates between two."""
        return 2 if self.persistent else 1

    # Named layouts: the kernel builds its cute layouts from these values and the diagrams draw them.

    @property
    def tv(self) -> Layout:
        """(thread, value) -> index in the tile of one step (rows fastest).

        Threads run along the row first; a value is (element of the vector, row of the thread).
        """
        rows, T, R, V, M = (
            self.tiler[0],
            self.threads_per_row,
            self.threads_down,
            self.vector,
            self.rows_per_thread,
        )
        return Layout(((T, R), (V, M)), ((V * rows, 1), (rows, R)))

    @property
    def smem(self) -> Layout:
        """(row, column) of the tile -> element of the first staged input in shared memory."""
        return self.smem_of(0)

    def smem_of(self, i: int) -> Layout:
        """`smem` of staged input i: of as many columns as it has a place for."""
        rows, columns = self.step_tiler
        columns *= self.steps_of(i) or self.steps
        return (
            Layout.ordered((rows, columns, self.ring), (1, 0, 2))
            if self.ring
            else Layout.ordered((rows, columns), (1, 0))
        )

    @property
    def staged_steps(self) -> int:
        """Places in shared memory that a thread has for vectors of an "async" input."""
        return self.staged or self.steps

    def steps_of(self, i: int) -> int:
        """Places in shared memory that a thread has for vectors of input i."""
        return {"direct": 0, "async": self.staged_steps}.get(self.staging[i], self.steps)

    @property
    def rows_end_alike(self) -> bool:
        """Whether all rows of a thread end at the same vector: they share their bits of the predicate."""
        return not (self.edges or self.prologue.causal)

    @property
    def hides(self) -> bool:
        """Whether a CTA asks if all it has of a row lies beyond the diagonal: of two CTAs that gains nothing."""
        apart = self.ring or "index" in self.facts.group_inputs  # results that are stored apart
        return self.prologue.causal and self.cluster_n > 2 and len(self.facts.outputs) == 1 and not apart

    @property
    def predicate(self) -> Layout:
        """(row of the thread, rows of the copy, step) -> predicate bit: one per vector, stride 0 over rows.

        Rows that end each at a vector of its own (`rows_end_alike`) have bits of their own. Whether a row exists is a
        bit apart, one for each row of the thread.
        """
        return Layout((self.rows_per_thread, 1, self.steps), (0 if self.rows_end_alike else self.steps, 0, 1))

    @property
    def reduction_buffer(self) -> Layout:
        """(row, (warp of the row, CTA of the cluster), stage) -> slot; peers next to each other, stages slowest."""
        rows = self.threads // WARP // self.warps_per_row
        stages = self.facts.stages * self.turns
        return Layout.ordered((rows, (self.warps_per_row, self.peers), stages), (1, 0, 2))

    @property
    def signature(self) -> str:
        """Rows, columns, CTAs, the cache policy; sizes of kept modes, the prologue's numbers, addresses and strides."""
        operands = self.kept_modes - 1 + len(self.prologue.numbers) + len(self.dtypes) * (1 + self.kept_modes)
        return "liii" + "l" * operands

    @property
    def exchanges(self) -> bool:
        """Whether warps that share a row exchange in shared memory."""
        return self.warps_per_row * self.peers > 1

    @property
    def keeps_shared(self) -> bool:
        """Whether what is kept takes the place of the first input's elements in shared memory, in float32."""
        return self.keep and self.staging[0] == "shared"

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Per input the bytes that an element has in shared memory: 0 for what is not staged."""
        sizes = [ITEM_SIZE[d] * (how != "direct") for d, how in zip(self.dtypes, self.staging, strict=False)]
        return (KEPT_BYTES if self.keeps_shared else sizes[0], *sizes[1:])

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        step = math.prod(self.step_tiler)
        staged = step * sum(self.steps_of(i) * size for i, size in enumerate(self.slot_bytes))
        staged = staged * self.ring + TICKET if self.ring else staged
        if not self.exchanges:
            return staged
        stages = self.facts.stages * self.turns
        barriers = 8 * stages if self.peers > 1 else 0
        slots = self.threads // WARP * self.peers * stages  # of the reduction buffer
        return staged + slots * self.facts.state_bytes + barriers

    @property
    def name(self) -> str:
        """A readable name. Of one math, dtypes and architecture no two classes for many rows share it, nor for few."""
        parts = [f"{self.threads_per_row}x{self.steps}x{self.vector}"]
        if self.rows_per_thread > 1:
            parts.append(f"rows{self.rows_per_thread}")
        if self.cluster_n > 1:
            parts.append(f"cluster{self.cluster_n}")
        if self.persistent:
            parts.append("persistent")
        if self.staging[0] == "shared" and not self.ring:
            parts.append("shared")
        if "resident" in self.staging:
            parts.append("resident" + (f"_staged{self.staged}" if self.staged else ""))
        if self.ring:
            parts.append(f"ring{self.ring}_lag{self.lag}")
        if self.edges:
            parts.append("edges")
        if any(a != self.vector for a in self.access):
            parts.append("access" + "_".join(map(str, self.access)))
        if not self.online:
            parts.append("two_pass")
        if self.kept_modes > 1:
            parts.append(f"modes{self.kept_modes}")
        if self.prologue:
            parts.append(self.prologue.name)
        if self.logs:
            parts.append("logs")
        return "_".join(parts)


def vector_of(dtypes: tuple[str, ...], columns: int) -> int:
    """Elements of a vector: 16 bytes of the widest of full operands, fewer for rows of less than eight of those."""
    widest = ALIGNMENT // max(ITEM_SIZE[d] for d in dtypes)
    finest = max(columns // VECTORS_PER_ROW, 1)
    return min(widest, 1 << (finest.bit_length() - 1))


def row_class(
    math_name: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    columns: int,
    *,
    edges: bool,
    access: tuple[int, ...],
    online: bool = True,
    kept_modes: int = 1,
    prologue: Prologue = NO_PROLOGUE,
    ctas: int = 1,
    table: Table | None = None,
    invariant: bool = False,
    common: bool = False,
) -> RowClass:
    """The class of rows of this many elements; ctas: CTAs, one an SM, that each row can have in `TURNS_OF_FEW` turns, 1
    where there are many; table: of configurations, the default one if None; invariant: one whose order of additions
    depends on the math, `columns`, dtypes, architecture and table alone, as `plan.order` has it (for rows without
    edges); common: whether what lies beside the elements is the same for all rows, vector by vector.

    Raises NotPlanned if no configuration of this architecture can hold such a row on chip.
    """
    facts = facts_of(math_name, online, prologue)
    vector = vector_of(dtypes[: facts.full], columns)
    precise = bool(facts.outputs) and dtypes[facts.result] == "fp32"
    logs, listed, stays, of_list = False, math_name, common and not (edges or invariant), prologue
    if invariant:
        vector, ctas = math.gcd(vector, columns), 1
        if math_name in OF_LOGS and not prologue.rescores:
            logs, listed, precise = True, "log_softmax", dtypes[0] == "fp32"
            of_list = replace(prologue, target="", squares=False)

    def first_of(configs: tuple[RowConfig, ...]) -> tuple[RowConfig, RowClass] | None:
        """The first configuration that the row fits into and the architecture has room for, and its class."""
        for config in configs:
            if columns > config.capacity * vector or (config.above and columns <= config.above * vector):
                continue
            if config.cluster_n > architecture.cluster_limit or config.precise not in (None, precise):
                continue
            whole = (*config.staging, "direct")
            staging = tuple(how if a else "direct" for how, a in zip(whole, access, strict=False))
            if stays and config.persistent:
                staging = tuple("resident" if i in facts.beside else how for i, how in enumerate(staging))
            candidate = RowClass(
                math=math_name,
                architecture=architecture.name,
                dtypes=dtypes,
                vector=vector,
                edges=edges,
                access=tuple(a and math.gcd(a, vector) for a in access),
                online=online,
                threads_per_row=config.threads_per_row,
                steps=config.steps,
                threads=config.threads,
                rows_per_thread=config.rows_per_thread,
                cluster_n=config.cluster_n,
                staging=staging,
                keep=config.keep,
                persistent=config.persistent,
                min_blocks=config.min_blocks,
                part=KEPT_PART if config.keep and staging[0] == "shared" else PART,
                kept_modes=kept_modes,
                prologue=prologue,
                logs=logs,
            )
            # Whether a bias has one element for a row must not decide who adds up its scores.
            room = replace(candidate, staging=whole[: len(access)]) if invariant else candidate
            if "resident" in staging and room.shared_memory > architecture.shared_memory:
                candidate = room = replace(candidate, staged=candidate.steps // 2)
            if _covers(candidate, columns) and room.shared_memory <= architecture.shared_memory:
                return config, candidate
        return None

    table = table or table_of()
    widened = precise and ITEM_SIZE[dtypes[0]] < ITEM_SIZE["fp32"]
    few, many = table.rows(listed, of_list, edges, widened)
    if columns > table.few_above * vector:
        in_turns = ctas < TURNS_OF_FEW * max((c.sms for c in few), default=0)
        emptier = columns / vector / FEW_FILL
        few = tuple(c for c in few if c.takes <= ctas and (c.least or c.capacity < emptier or not in_turns))
        if found := first_of(few):
            usual = first_of(many) if found[0].capacity >= emptier else None
            if usual is None or usual[0].cluster_n < found[0].cluster_n:
                return found[1]
    if stays:  # it takes no registers, then: as long rows are listed without it
        without = table.rows(listed, replace(prologue, bias=False), edges, widened)[1]
        if (found := first_of(without)) and found[0].persistent:
            return found[1]
    if found := first_of(many):
        return found[1]
    raise NotPlanned(
        f"rows of {columns} elements ({', '.join(dtypes)}) do not fit on chip on {architecture.name}: "
        "longer rows need the split movement"
    )


def _covers(c: RowClass, columns: int) -> bool:
    """Whether every element of a row has a thread, wherever its vectors begin."""
    if c.cluster_n == 1:
        return columns <= c.tiler[1]
    return math.ceil(math.ceil(columns / c.cluster_n) / c.line) * c.line <= c.tiler[1]
