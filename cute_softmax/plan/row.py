"""The `row` movement: its teams, its Plan classes, and which of them holds a row of a given length."""

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


@dataclass(frozen=True)
class Team:
    """How many threads and CTAs share a row, and what each holds. Vectors are accesses of `RowClass.vector` elements.

    threads_per_row: of one CTA; steps: vectors of a row that a thread holds; threads: of a CTA;
    rows_per_thread: rows a thread works on at once; cluster_n: CTAs that share a row;
    staging: per input, how it gets to the thread (see `RowClass`);
    keep: hold converted values between the passes (see `RowClass`);
    persistent: CTAs that stay and take one tile after another;
    min_blocks: CTAs that an SM must hold, which caps registers;
    precise: only for results in float32 (True) or in 16 bits (False): the former spend more instructions and half
        the registers per vector.
    """

    threads_per_row: int
    steps: int
    threads: int = 128
    rows_per_thread: int = 1
    cluster_n: int = 1
    staging: tuple[str, ...] = ("direct", "direct")
    keep: bool = True
    persistent: bool = False
    min_blocks: int = 0
    precise: bool | None = None

    @property
    def capacity(self) -> int:
        """The longest row, in vectors."""
        return self.threads_per_row * self.steps * self.cluster_n

    @property
    def sms(self) -> int:
        """SMs that the CTAs of a row fill."""
        return math.ceil(self.cluster_n / max(self.min_blocks, 1))


# In the order of their capacity; the first that the row fits into and the architecture has room for is taken.
# Measured on one H200 on 2026-11-20, `python -m benchmarks --suite all` (its results lie in benchmarks/results):
# the best of 3 to 12 teams tried at each capacity. What decides is how many bytes an SM has in flight: a CTA
# alternates between loading and storing, so two to eight of them must share an SM, which bounds registers; and
# a cluster starts and meets together, so the smallest one that leaves room for that is the fastest.
_SHORT = (
    Team(4, 1, rows_per_thread=8),
    Team(8, 1, rows_per_thread=2),
    Team(16, 1, rows_per_thread=2),
    Team(16, 2),
    Team(32, 2, threads=64),
    Team(32, 4, threads=64),
    Team(64, 3, threads=64),
    Team(128, 2),
    Team(128, 3),
    Team(128, 4),
)
# The next row arrives while this one is worked on: where no two fit an SM.
_PREFETCHING = {"staging": ("async", "async"), "keep": False, "persistent": True}


def _waiting(threads: int, steps: int, cluster_n: int, min_blocks: int) -> tuple[Team, Team]:
    """Teams whose rows stay in shared memory, for results in float32 and in 16 bits: as many CTAs an SM as that holds.

    A float32 exponential costs a dozen instructions: those take their elements' places, so that none is evaluated
    twice. In 16 bits that is cheaper than the room.

    What does not exist of a row costs its instructions all the same, so that steps must suit. H200, 2026-11-23, 2048
    rows, ratio to a copy: float32 151936 columns 1.00 in 10 steps, 0.89 in 13, 0.73 in 17; bf16 1.01, 0.98, 0.77.
    float32, before (7 clusters of 512 threads of 16 steps on all of the GPU) and in these: 131080 0.31, 0.98; 200064
    0.45, 0.99; 262144 0.57, 0.98; 400000 0.82, 0.96; bf16 262152 0.39, 0.93; 400128 0.56, 1.01; 800000 0.92, 0.99.
    """
    team = Team(
        threads,
        steps,
        threads,
        cluster_n=cluster_n,
        staging=("shared", "shared"),
        min_blocks=min_blocks,
        precise=True,
    )
    return team, replace(team, keep=False, precise=False)


TEAMS = {
    "softmax": (
        *_SHORT,
        Team(128, 6),
        Team(128, 8),
        Team(256, 6, threads=256),
        Team(256, 8, threads=256),
        Team(128, 6, cluster_n=4),
        Team(256, 4, threads=256, cluster_n=4),
        Team(1024, 4, threads=1024),  # without clusters
        Team(128, 6, cluster_n=8),
        Team(128, 7, cluster_n=8),
        Team(128, 8, cluster_n=8, min_blocks=6),
        Team(1024, 8, threads=1024, keep=False),  # without clusters: a packed row is 32 of 64 registers
        Team(256, 6, threads=256, cluster_n=8),
        Team(256, 8, threads=256, cluster_n=8, min_blocks=3),
        _waiting(256, 5, 16, 5)[1],
        Team(256, 12, threads=256, cluster_n=8, min_blocks=2, precise=True),
        *_waiting(256, 8, 16, 5),
        _waiting(256, 9, 16, 5)[0],
        Team(256, 10, threads=256, cluster_n=16, min_blocks=4, precise=True),
        _waiting(256, 10, 16, 4)[1],
        *_waiting(256, 13, 16, 4),
        *_waiting(256, 17, 16, 3),
        *_waiting(256, 25, 16, 2),
        Team(512, 16, threads=512, cluster_n=16, **_PREFETCHING),
    ),
    "softmax_backward": (
        *_SHORT,
        Team(256, 3, threads=256),
        Team(512, 2, threads=512),
        Team(256, 3, threads=256, cluster_n=2),
        Team(256, 4, threads=256, cluster_n=2),
        Team(512, 4, threads=512),  # without clusters
        Team(256, 3, threads=256, cluster_n=4),
        Team(256, 4, threads=256, cluster_n=4),
        Team(1024, 4, threads=1024, keep=False),  # without clusters
        Team(256, 3, threads=256, cluster_n=8),
        Team(256, 4, threads=256, cluster_n=8),
        Team(256, 3, threads=256, cluster_n=16),
        Team(256, 4, threads=256, cluster_n=16),
        Team(256, 6, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 7, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 8, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 10, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 13, threads=256, cluster_n=16, staging=("shared", "shared"), keep=False, min_blocks=2),
        # The two rows of a whole SM: one in shared memory, one in registers.
        Team(256, 19, threads=256, cluster_n=16, staging=("shared", "direct"), keep=False, min_blocks=2),
        Team(512, 13, threads=512, cluster_n=16, staging=("shared", "direct"), keep=False),
        Team(512, 16, threads=512, cluster_n=16, staging=("shared", "direct"), keep=False),
    ),
}
# Nothing is kept for a logarithm, and larger shares suit 16-bit elements whose results are float32: 151936 columns 0.93
# in clusters of 8, 0.83 of 16 (float32 elements 0.99 and 1.00).
_LOGARITHM = {
    _waiting(256, 9, 16, 5)[0]: _waiting(384, 12, 8, 3)[0],
    Team(256, 10, threads=256, cluster_n=16, min_blocks=4, precise=True): _waiting(256, 20, 8, 2)[0],
}
TEAMS["log_softmax"] = tuple(replace(_LOGARITHM.get(t, t), keep=False) for t in TEAMS["softmax"])
# What is only read keeps nothing but the packed row: a thread holds more of it, and a cluster is smaller. Logsumexp on
# an H200, 2026-11-21, bf16, time over torch.sum's: 50304 columns 0.92 (256 x 7, 4 CTAs), 0.99 (128 x 7, 8 CTAs);
# 131072 0.97 (256 x 8 and 4 CTAs an SM), 1.15 (3); 151936 0.96 (512 x 10, 4 CTAs), 1.42 (256 x 5, 16 CTAs).
_READING = (
    *(team for team in TEAMS["log_softmax"] if team.capacity <= 6144),
    Team(256, 7, threads=256, cluster_n=4, min_blocks=5, keep=False),
    Team(256, 8, threads=256, cluster_n=4, min_blocks=4, keep=False),
    Team(1024, 8, threads=1024, keep=False),  # without clusters
    Team(256, 6, threads=256, cluster_n=8, min_blocks=5, keep=False),
    Team(256, 8, threads=256, cluster_n=8, min_blocks=4, keep=False),
    Team(512, 10, threads=512, cluster_n=4, min_blocks=2, keep=False),
    Team(256, 13, threads=256, cluster_n=8, min_blocks=3, keep=False),
    Team(256, 8, threads=256, cluster_n=16, min_blocks=4, keep=False),
    Team(256, 10, threads=256, cluster_n=16, min_blocks=4, keep=False),
)
# Longer rows are streamed by the split movement, as what is only read need not stay on chip. That knows neither an
# index nor a prologue: with those, such rows stay all the same.
_INDEXING = (*_READING, *(t for t in TEAMS["log_softmax"] if t.capacity > _READING[-1].capacity))
TEAMS |= {name: _READING for name in ("logsumexp", "amax", "sum", "entropy")}
TEAMS |= {name: _INDEXING for name in ("selective", "selective_entropy")}
TEAMS["log_softmax_backward"] = TEAMS["softmax_backward"]


# What takes a team's place where half of each row is not read: fewer threads, that each read more. H200, 2026-11-20,
# bf16, time over the unmasked softmax's: 2048 columns 0.778 (64 x 4), 0.800 (128 x 2); its gradient at 8192 columns
# 0.727 (256 x 4), 0.861 (512 x 2).
_CAUSAL = {
    Team(128, 2): Team(64, 4, threads=64),
    Team(512, 2, threads=512): Team(256, 4, threads=256),
}
# What takes a team's place with a prologue: as many CTAs an SM as without, where a register more would cost one. H200,
# 2026-11-21, bf16, time over softmax's own: 50304 columns with a scale 1.00 (7 CTAs), 1.05 (6); 16384 with a mask 0.98
# (256 x 4, 2 CTAs), 1.01 (256 x 8).
_PROLOGUES = {
    Team(256, 8, threads=256): Team(256, 4, threads=256, cluster_n=2),
    Team(256, 4, threads=256, cluster_n=4): Team(256, 4, threads=256, cluster_n=4, min_blocks=5),
    Team(128, 7, cluster_n=8): Team(128, 7, cluster_n=8, min_blocks=7),
}
# What comes first where there are so few rows that all run at once, with as many CTAs an SM as the team may have there:
# a row takes as long as its loads, of which many threads have fewer one after the other. H200, 2026-11-22, bf16,
# microseconds a call in a replayed graph, one row, these / the team for many rows: softmax of 16384 columns 2.02 /
# 2.99, 32000 2.21 / 2.49, 50304 2.36 / 2.54, 128256 2.96 / 3.41, 262144 3.97 / 4.77; its gradient 1.87 / 2.25, 2.00 /
# 2.28, 2.20 / 2.26, 2.68 / 2.70, 3.37 / 3.42; logsumexp of 151936 2.77 / 3.98. No other cluster and CTA gained more
# than 0.06 on that. Ratio to a copy of 16 rows, rotating buffers, 2026-11-23, in registers / in shared memory: bf16
# 151936 0.701 / 0.662, 262152 0.857 / 0.790, 303872 0.659 / 0.650; float32 151936 in shared memory with three CTAs an
# SM 0.697, with registers for the whole row and four 0.677.
_FEW = (
    Team(128, 2, cluster_n=8),
    Team(128, 4, cluster_n=8),
    Team(128, 4, cluster_n=16),
    Team(256, 4, threads=256, cluster_n=16),
    Team(256, 5, threads=256, cluster_n=16, min_blocks=4),
)
_FEW_LONG = (
    *(
        Team(256, steps, threads=256, cluster_n=16, keep=False, min_blocks=3, precise=False)
        for steps in (7, 8, 10)
    ),
    Team(256, 8, threads=256, cluster_n=16, precise=True),
    _waiting(256, 8, 16, 5)[0],
    _waiting(256, 10, 16, 3)[0],
)
FEW = {name: (*_FEW, Team(256, 8, threads=256, cluster_n=16, min_blocks=4)) for name in TEAMS}
FEW |= {name: (*_FEW, *_FEW_LONG) for name in ("softmax", "log_softmax")}
# Longer gradients are in clusters of 16 anyway.
FEW |= {name: _FEW[:4] for name in TEAMS if name.endswith("_backward")}
FEW = {
    name: tuple(replace(t, keep=t.keep and TEAMS[name][0].keep) for t in teams) for name, teams in FEW.items()
}
# Such rows are longer than this, in vectors.
FEW_ABOVE = 1024


def teams_of(math_name: str, prologue: Prologue, edges: bool) -> tuple[tuple[Team, ...], tuple[Team, ...]]:
    """The teams of a row math for few rows and for many. A bias is a second input of as many registers, as in a
    gradient."""
    if not prologue:
        return FEW[math_name], TEAMS[math_name]
    if TEAMS[math_name] in (_READING, _INDEXING) and prologue.packs and not prologue.mask:
        return FEW["selective"], TEAMS["selective"]
    gradient = math_name.endswith("_backward")
    # What is kept: the exponentials, or the scores, where they are used three times.
    composed = math_name == "log_softmax" and prologue.rescores and not prologue.packs
    keeps = gradient or math_name == "softmax" or composed
    instead = _CAUSAL if prologue.causal else {}
    if keeps and not gradient and not prologue.bias and not edges:  # scalars take registers of their own
        instead = instead | _PROLOGUES
    name = "softmax_backward" if prologue.bias or gradient else "softmax"
    few, many = (
        tuple(replace(instead.get(t, t), keep=instead.get(t, t).keep and keeps) for t in teams)
        for teams in (FEW[name], TEAMS[name])
    )
    return few, many


# A row has at least so many vectors: a short one is divided finely enough that several threads load it at once.
VECTORS_PER_ROW = 8
# Vectors that one commit group of asynchronous copies brings, and that the online recurrence takes at a time. Of what
# is kept in shared memory each part has a maximum of its own: float32 262144 columns 0.974 of a copy in fours, 0.963
# in twos, 16 rows of 262152 0.908 and 0.858 (H200, 2026-11-23).
PART, KEPT_PART = 2, 4
KEPT_BYTES = 4  # of what is kept of an element


@dataclass(frozen=True)
class RowClass(ClassBase):
    """What is compiled for the `row` movement: everything that shapes the code, as plain numbers.

    vector: elements of one access of the output, 16 bytes of the widest full operand; also the unit of predicates.
    edges: whether rows may begin or end off a vector boundary, so that scalars are handled apart.
    access: per input, elements of one load: `vector`, or fewer where its rows are aligned differently; 0 if it has one
        element for a whole row.
    staging: per input "direct" (global memory to registers), "async" (through shared memory with cp.async) or
        "shared" (stays in shared memory, read there in every pass).
    keep: whether converted values are held between the passes: in registers, or in shared memory if the elements are.
    kept_modes: into how many coordinates a row's index is taken apart, each with a stride of its own per operand.
    prologue: what happens to the scores before the math and to its results.
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

    def __post_init__(self):
        if self.exchanges and self.rows_per_thread > 1:
            raise ValueError(
                "threads with several rows exchange by shuffles only: the buffer has one slot a warp"
            )
        if self.persistent and "shared" in self.staging:
            raise ValueError(
                "a persistent kernel refills its slots while it works: inputs cannot stay in them"
            )

    @property
    def facts(self) -> Math:
        return facts_of(self.math, self.online, self.prologue)

    @property
    def fields(self) -> dict:
        return {**super().fields, "prologue": self.prologue.name}

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
        """(row, column) of the tile -> element of a staged input in shared memory."""
        return Layout.ordered(self.tiler, (1, 0))

    @property
    def rows_end_alike(self) -> bool:
        """Whether all rows of a thread end at the same vector: they share their bits of the predicate."""
        return not (self.edges or self.prologue.causal)

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
        return Layout.ordered((rows, (self.warps_per_row, self.cluster_n), stages), (1, 0, 2))

    @property
    def exchanges(self) -> bool:
        """Whether a row is shared by several warps."""
        return self.warps_per_row * self.cluster_n > 1

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
        staged = math.prod(self.tiler) * sum(self.slot_bytes)
        if not self.exchanges:
            return staged
        barriers = 8 * self.reduction_buffer.shape[2] if self.cluster_n > 1 else 0
        return staged + self.reduction_buffer.cosize * self.facts.state_bytes + barriers

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        parts = [f"{self.threads_per_row}x{self.steps}x{self.vector}"]
        if self.rows_per_thread > 1:
            parts.append(f"rows{self.rows_per_thread}")
        if self.cluster_n > 1:
            parts.append(f"cluster{self.cluster_n}")
        if self.persistent:
            parts.append("persistent")
        if self.staging[0] == "shared":
            parts.append("shared")
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
) -> RowClass:
    """The class of rows of this many elements; ctas: CTAs that each row can have at once, 1 where there are many rows.

    Raises NotPlanned if no team of this architecture can hold such a row on chip.
    """
    facts = facts_of(math_name, online, prologue)
    vector = vector_of(dtypes[: facts.full], columns)
    precise = bool(facts.outputs) and dtypes[facts.result] == "fp32"

    def first_of(teams: tuple[Team, ...]) -> tuple[Team, RowClass] | None:
        """The first team that the row fits into and the architecture has room for, and its class."""
        for team in teams:
            if team.cluster_n > architecture.cluster_limit or team.precise not in (None, precise):
                continue
            staging = (*team.staging, "direct")
            staging = tuple(how if a else "direct" for how, a in zip(staging, access, strict=False))
            candidate = RowClass(
                math=math_name,
                architecture=architecture.name,
                dtypes=dtypes,
                vector=vector,
                edges=edges,
                access=tuple(a and math.gcd(a, vector) for a in access),
                online=online,
                threads_per_row=team.threads_per_row,
                steps=team.steps,
                threads=team.threads,
                rows_per_thread=team.rows_per_thread,
                cluster_n=team.cluster_n,
                staging=staging,
                keep=team.keep,
                persistent=team.persistent,
                min_blocks=team.min_blocks,
                part=KEPT_PART if team.keep and staging[0] == "shared" else PART,
                kept_modes=kept_modes,
                prologue=prologue,
            )
            if _covers(candidate, columns) and candidate.shared_memory <= architecture.shared_memory:
                return team, candidate
        return None

    few, many = teams_of(math_name, prologue, edges)
    if columns > FEW_ABOVE * vector and (found := first_of(few)) and found[0].sms <= ctas:
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
