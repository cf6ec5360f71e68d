"""The `topk_long` movement: the largest logarithms of a softmax over rows of any length, and a chosen element's place.

A CTA reads a share of a row tile after tile, as its only read: it adds up the exponentials, counts what is larger than
the chosen element, and keeps in shared memory what may be among the k largest. Rows that are few are held in the
registers of a cluster, whose CTAs exchange in shared memory; shares of others meet in global memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase, PlanBase, counted
from .choose import EVICT_LAST_ABOVE
from .hardware import Device
from .maths import WARP, NotPlanned, check_counts
from .problem import ALIGNMENT, ITEM_SIZE, Operand
from .prologue import NO_PROLOGUE, Prologue

STEPS = 4  # vectors of a thread in a tile
HELD_STEPS = 2  # of a row that is held and must be read again, which takes less room
STAGES = 2  # tiles in shared memory: one is worked on, the next one is on its way
# Bytes that L2 fetches around those which a thread asks for, whose neighbours take the others: without it rows of
# float32 take 1.25 times as long as logsumexp, with it 1.03 (H200, 2026-11-26).
AHEAD = 128
# Threads of a multiprocessor, at most, that select and count what is larger than a chosen element: more lack registers.
CHOSEN_THREADS = 768
MOST = 1024  # the largest k
SHARES = (
    16  # of a row at most: a warp reads their states, and their candidates must fit where those of one do
)
# Of rows that are held: threads of a CTA; of a multiprocessor, at most; of a cluster, at most, if they can hold a row.
# Vectors of a thread: of each number there is a class, and up to HELD_FEW fewer threads are better. Vectors of a CTA,
# if others need not share them.
HELD_SIZES, HELD_THREADS, HELD_CLUSTER = (128, 256, 512), 1024, 4096
HELD_VECTORS, HELD_FEW, HELD_LEAST = (1, 2, 3, 4, 5, 6, 8, 10, 11, 12), 5, 512
# Of the CTAs that there is room for those of clusters of more than two that run at once: of 64 clusters of 8, of which
# 66 would fit, some began when others had ended (H200, 2026-11-29: 14.2 us instead of 9.9 with 48).
HELD_SHARE = 7 / 8
HELD_K = 128  # the largest k of rows that are held
# Groups of a cluster's elements for each of the k largest: 1.4 times k elements reach the k-th of so many maxima.
HELD_GROUPS = 2
KEY = 8  # bytes
BARRIERS = 3  # mbarriers of a cluster's CTA
# Words of shared memory: how many candidates there are, a flag, how many elements are larger than the chosen one, the
# least and the largest number of a group, and a number for each bit of a key; see `kernels.topk`.
COUNT, FLAG, LARGER, BOUND, LEAST, MOST_OF_ALL, COUNTS = 0, 1, 2, 3, 4, 5, 8
WORDS = COUNTS + 64
SPARE_BITS = {"bf16": 16, "fp16": 13, "fp32": 0}  # of a float32, its last, that a dtype does not have
BINS = 256  # intervals of numbers that order candidates: a power of two, and some for each lane of a warp
MANY = 64  # candidates: bins of fewer cost more than they save
COLUMN = 4  # bytes beside a unit that is noted


@dataclass(frozen=True)
class Room:
    """What a CTA has room for, by the largest k that it is for.

    threads: all of which work on one row; fewer begin and end rows in less time. places: for candidates. groups: of
    a thread's elements, of each of which the largest is known: the k-th largest of all groups is a bound, tighter
    the more there are; more than STEPS are halves of vectors. unit: vectors of a thread in a tile that are noted
    together. spare: units that a warp notes before candidates are made of them, beside those of a whole tile. blocks:
    CTAs of a multiprocessor, for which there are registers and shared memory: while one begins or ends a row the reads
    of others go on.
    """

    k: int
    threads: int
    places: int
    groups: int
    unit: int
    spare: int
    blocks: int

    @property
    def few(self) -> int:
        """Candidates whose places among each other are counted; of more, some are dropped before."""
        return self.places - self.places // 4


# As much as so many CTAs have room for. Few threads begin and end a row in less time, while those of other CTAs read;
# the fewer there are, the more groups each of them needs. Rows that are too few for that have the last one of their k.
ROOMS = (
    Room(8, 128, 256, 1, STEPS, 8, 7),
    Room(32, 128, 256, 2, 2, 8, 7),
    Room(32, 256, 256, 1, STEPS, 8, 4),
    Room(128, 128, 512, STEPS, 1, 64, 6),
    Room(128, 256, 1024, 1, 1, 88, 3),
    Room(512, 256, 2048, STEPS, 1, 32, 3),
    Room(MOST, 256, 2048, 2 * STEPS, 1, 32, 3),
)
NO_ROOM = Room(0, 256, 0, 1, STEPS, 0, 4)
HEADER, STATE = 4, 16  # bytes in global memory: a row's count of shares, and what a share's state takes


@dataclass(frozen=True)
class LongTopkClass(ClassBase):
    """What is compiled for the `topk_long` movement.

    Attributes:
        math: "topk_log_softmax".
        architecture: What it is compiled for.
        dtypes: Of the row, and of the logarithms.
        vector: Elements of one access to the row.
        edges: Whether rows may begin or end off a vector boundary, so that scalars are handled apart.
        most: The largest k of its `room` in shared memory; 0 where nothing is selected.
        threads: Of a CTA.
        chosen: Whether an index chooses an element of each row, whose rank is counted.
        split: Whether several CTAs share a row in global memory.
        scaled: Whether the logits are multiplied by a positive number.
        cluster_n: CTAs of a cluster, which share a row; 1 without clusters.
        held: Vectors of its share that each thread of these holds in registers; 0 without clusters.
        movement: How data reaches the threads.
    """

    movement: ClassVar[str] = "topk_long"
    math: ClassVar[str] = "topk_log_softmax"

    architecture: str
    dtypes: tuple[str, ...]
    vector: int
    edges: bool
    most: int
    threads: int
    chosen: bool
    split: bool
    scaled: bool
    cluster_n: int = 1
    held: int = 0

    @property
    def fields(self) -> dict:
        return {**super().fields, "math": self.math, "movement": self.movement}

    @property
    def early(self) -> bool:  # what a row's CTAs leave in memory has been cleared just before
        return super().early and not self.split

    @property
    def min_blocks(self) -> int:
        """CTAs that a multiprocessor must have room for."""
        if self.held:
            return HELD_THREADS // self.threads
        return min_blocks(self.room, self.chosen)

    @property
    def steps(self) -> int:
        """Vectors of a thread in a tile."""
        return HELD_STEPS if self.held else STEPS

    @property
    def room(self) -> Room:
        """What is in shared memory beside the tiles."""
        if self.held:
            # Nothing is noted, unless the first CTA of a cluster must read a row alone.
            return replace(rooms_of(self.most)[0], threads=self.threads, unit=self.steps, spare=0)
        return next(room for room in rooms_of(self.most) if room.threads == self.threads)

    @property
    def groups(self) -> int:
        """Of a thread's elements: a vector of one element has no halves."""
        return min(self.room.groups, self.steps * min(self.vector, 2))

    @property
    def lanes(self) -> int:
        """Neighbouring threads whose elements are one of the groups of which a whole cluster knows the largest."""
        wanted = max(HELD_GROUPS * self.most, WARP)  # a warp looks at them
        return next((n for n in (32, 16, 8, 4, 2) if self.threads * self.cluster_n >= n * wanted), 1)

    @property
    def places(self) -> int:
        """For candidates in shared memory."""
        return self.room.places

    @property
    def noted(self) -> int:
        """Places for units that may have candidates: a whole tile's, where it comes to that."""
        return (
            self.threads * self.steps // self.room.unit + self.threads // WARP * self.room.spare
            if self.most
            else 0
        )

    @property
    def prologue(self) -> Prologue:
        """The scale, as other movements have it."""
        return Prologue(scale="number") if self.scaled else NO_PROLOGUE

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return self.threads * self.steps * self.vector

    @property
    def tv(self) -> Layout:
        """((lane, warp), value) -> column in a tile; a value is (element of the vector, vector)."""
        V = self.vector
        return Layout(
            ((WARP, self.threads // WARP), (V, self.steps)), ((V, self.steps * WARP * V), (1, WARP * V))
        )

    @property
    def smem(self) -> Layout:
        """(column in a tile, stage) -> element in shared memory."""
        return Layout((self.tile, STAGES), (1, self.tile))

    @property
    def reduction_buffer(self) -> Layout:
        """(row, (warp, CTA of the cluster)) -> slot of a (maximum, sum) pair."""
        return Layout.ordered((1, (self.threads // WARP, self.cluster_n)), (1, 0))

    @property
    def slot(self) -> int:
        """Bytes of a slot of it: CTAs of a cluster also exchange how many elements are larger than the chosen one."""
        return 16 if self.held and self.chosen else 8

    @property
    def maxima(self) -> Layout:
        """(group, CTA of the cluster) -> word of shared memory with the number of a group's largest element."""
        return Layout.ordered((self.threads // self.lanes, self.cluster_n), (0, 1))

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        edges = 2 * self.vector * self.edges
        kept = self.staged + KEY * (self.places + edges) + 4 * WORDS
        kept += self.reduction_buffer.cosize * self.slot
        return kept + 4 * self.maxima.cosize * bool(self.most) + BARRIERS * 8 if self.held else kept

    @property
    def staged(self) -> int:
        """Bytes of shared memory for tiles, and for units that are noted: of a row that is held only if its first CTA
        must read it again, alone."""
        vector = self.vector * ITEM_SIZE[self.dtypes[0]]
        tile = self.threads * self.steps * vector
        return STAGES * tile + self.noted * (self.room.unit * vector + COLUMN)

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors of a launch, in their order; all but the rows, and what chooses in them, are written."""
        return (
            "x",
            *["index"] * self.chosen,
            *["values", "indices"] * bool(self.most),
            *("max", "log"),
            *["found", "ranks"] * self.chosen,
        )

    @property
    def signature(self) -> str:
        """A letter for each argument of what is compiled: rows, columns, k, shares of a row, vectors of each, whether
        reads ask L2 to keep them; the scratch memory of split rows, the scale; then addresses in bytes, those of what
        is read with the stride from row to row in elements."""
        return "liiiii" + "l" * (self.split + self.scaled + len(self.operands) + 1 + self.chosen)

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        parts = [f"{self.threads}x{self.held or self.steps}x{self.vector}"]
        parts += [f"most{self.most}"] * bool(self.most)
        parts += [f"cluster{self.cluster_n}"] * bool(self.held)
        flags = ("edges", "chosen", "split", "scaled")
        return "_".join([*parts, *(flag for flag in flags if getattr(self, flag))])


def rooms_of(k: int) -> list[Room]:
    """The rooms that finding the k largest takes, that of many rows first. Raises NotPlanned for more than `MOST`."""
    if not k:
        return [NO_ROOM]
    if k > MOST:
        raise NotPlanned(f"k is {k}: topk_log_softmax takes at most {MOST}")
    most = next(room.k for room in ROOMS if k <= room.k)
    return [room for room in ROOMS if room.k == most]


def min_blocks(room: Room, chosen: bool) -> int:
    """CTAs of a multiprocessor."""
    return min(room.blocks, CHOSEN_THREADS // room.threads) if chosen and room.k else room.blocks


@dataclass(frozen=True)
class LongTopkPlan(PlanBase):
    """How one launch runs: the `k` largest elements of each row of `columns` elements are found.

    Attributes:
        kernel: What is compiled.
        rows: The number of rows.
        columns: Elements of a row.
        k: How many elements are chosen; 0 for none.
        shares: CTAs that share a row.
        vectors: Of a share at most.
        operand_strides: Row strides of the inputs, in elements; results are contiguous.
        evict_last: Whether loads ask L2 to evict their lines last.
        invariant: Whether the class, which determines the order of additions, is the same for all calls with this
            length, k and dtype.
        laid_out: Operands that are first copied to contiguous rows, for such a class: the first one, or none.
    """

    kernel: LongTopkClass
    rows: int
    columns: int
    k: int
    shares: int
    vectors: int
    operand_strides: tuple[tuple[int, ...], ...]
    evict_last: bool = False
    invariant: bool = False
    laid_out: tuple[int, ...] = ()

    @property
    def tiles(self) -> int:
        """Of a share at most."""
        return math.ceil(self.vectors / (self.kernel.threads * self.kernel.steps))

    @property
    def ctas(self) -> int:
        """CTAs of the grid; clusters where there are any."""
        return self.rows * self.shares // self.kernel.cluster_n

    @property
    def scratch(self) -> int:
        """Bytes of zeroed memory that a launch needs in addition to its operands: a count per row, padded to 16 bytes,
        then the states of all shares, then their candidates."""
        if not self.kernel.split:
            return 0
        counts = math.ceil(self.rows * HEADER / ALIGNMENT) * ALIGNMENT
        return counts + self.ctas * (STATE + KEY * self.k)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the operands."""
        return self.rows, self.columns, self.k, self.shares, self.vectors, int(self.evict_last)

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.kernel
        what = [f"the {self.k} largest"] * bool(self.k) + ["a chosen element's rank"] * c.chosen
        lines = [
            f"log_softmax and {' and '.join(what)} of {counted(self.rows, 'row')} of {self.columns}, "
            f"{' -> '.join(c.dtypes)}, for {c.architecture}",
            f"  movement   topk_long: class {c.name}",
            f"  tile       {c.tile} elements of a row, {c.steps} vectors of {c.vector} per thread of {c.threads}; "
            f"{self.tiles} of them per CTA, in turn"
            if not c.held
            else f"  held       {c.held} vectors of {c.vector} per thread of {c.threads}, in registers",
            *([f"  prologue   {told}"] if (told := c.prologue.told) else []),
            "  edges      "
            + ("head and tail element by element" if c.edges else "none: rows begin and end on a vector"),
        ]
        if self.k and c.held:
            lines += [
                f"  selects    elements that reach about the {self.k}th largest of {c.maxima.cosize} groups' maxima, "
                f"which all CTAs of a cluster know, go to {c.places} slots of the first one; if those run out, it "
                "reads the row again, alone",
            ]
        elif self.k:
            lines += [
                f"  selects    vectors that reach about the {self.k}th largest of {c.threads * c.groups} groups' "
                f"maxima are noted, in {c.noted} slots; at the row's end, elements that still reach it go to "
                f"{c.places} slots; if those run out, an exact threshold is found bit by bit; if the former do, the "
                "row is read again, and checked tile by tile",
            ]
        if self.k:
            lines.append("  ties       to the lowest index; NaN is larger than any number")
        share = "one CTA per row"
        if c.held:
            share = f"a cluster of {c.cluster_n} CTAs per row"
        elif self.shares > 1:
            share = f"{self.shares} CTAs share a row; the last one merges"
        grid = counted(self.ctas, "cluster" if c.held else "CTA")
        lines.append(f"  grid       {grid}: {share}; {c.shared_memory} bytes of shared memory per CTA")
        return "\n".join([*lines, *self.bits])


def plan_topk_long(
    rows: int,
    columns: int,
    k: int,
    operand: Operand,
    device: Device,
    *,
    result: str = "fp32",
    index_stride: int | None = None,
    scaled: bool = False,
    invariant: bool = False,
) -> LongTopkPlan:
    """The plan of the k largest logarithms of a softmax over each row, and of the rank of an element.

    operand: the matrix (rows, columns), whose columns are contiguous; result: the dtype of the logarithms;
    index_stride: elements from row to row of the index that chooses one, None for none; invariant: one whose order of
    additions depends on the length of rows and the dtype alone: vectors begin where rows do, of others a copy is read,
    and no row is shared.
    Raises NotPlanned for a k above `MOST`, and for more rows or columns than 32 bits count.
    """
    rooms = rooms_of(k)
    check_counts({"rows": rows, "columns": columns})
    widest, stride = ALIGNMENT // ITEM_SIZE[operand.dtype], operand.strides[0] if rows > 1 else 0
    copied = False
    if invariant:
        vector, edges = math.gcd(widest, columns), False
        copied = bool(operand.offset % vector or stride % vector)
    else:
        vector, edges = widest, bool(operand.offset % widest or stride % widest or columns % widest)
    chosen, vectors = index_stride is not None, max(columns // vector, 1)

    def at_once(room: Room) -> int:
        """CTAs that run at once."""
        return device.multiprocessors * min_blocks(room, chosen)

    def made(room: Room, **shared) -> LongTopkClass:
        """The class."""
        return LongTopkClass(
            architecture=device.architecture.name,
            dtypes=(operand.dtype, result),
            vector=vector,
            edges=edges,
            most=room.k,
            threads=room.threads,
            chosen=chosen,
            scaled=scaled,
            **shared,
        )

    c = None
    if not invariant and k <= HELD_K:
        c = _held(made, rooms[0], rows, vectors, device)
    if c is not None:
        shares, each = c.cluster_n, _share(vectors, c.cluster_n)
    else:
        room = rooms[0] if invariant or 2 * rows > at_once(rooms[0]) else rooms[-1]
        shares = 1
        if not invariant:
            wanted, tiles = max(at_once(room) // rows, 1), math.ceil(vectors / (room.threads * STEPS))
            shares = min(wanted, tiles, SHARES, room.places // k if k else SHARES)
        each = _share(vectors, shares)
        shares = math.ceil(vectors / each)
        c = made(room, split=shares > 1)
    check_counts({"CTAs": rows * shares})
    read = (columns if copied else operand.strides[0],), *[(index_stride,)] * c.chosen
    strides = (*read, *[()] * (len(c.operands) - len(read)))
    size = rows * columns * ITEM_SIZE[operand.dtype]
    last = size > EVICT_LAST_ABOVE * device.l2
    return LongTopkPlan(c, rows, columns, k, shares, each, strides, last, invariant, (0,) if copied else ())


def _share(vectors: int, shares: int) -> int:
    """Vectors of a share at most: as long as each other, all CTAs read together and end together."""
    return math.ceil(vectors / shares / WARP) * WARP


def _held(
    made: Callable[..., LongTopkClass], room: Room, rows: int, vectors: int, device: Device
) -> LongTopkClass | None:
    """The class of rows that clusters hold, all of which run at once; None where there is none. As many CTAs as there
    are multiprocessors, or more if threads would have to hold too much."""
    limit, threads = device.architecture.cluster_limit, HELD_THREADS * device.multiprocessors
    fewest = min(device.multiprocessors // rows, vectors // HELD_LEAST, limit)
    most = min(threads // HELD_SIZES[0] // rows, vectors // (HELD_LEAST // 2), limit)
    for n in range(max(fewest, 2), most + 1):
        found, full = None, HELD_SHARE if n > 2 else 1
        for size in HELD_SIZES:
            each = math.ceil(_share(vectors, n) / size)
            capacity = next((t for t in HELD_VECTORS if t >= each), None)
            if capacity is None or (found and (found.held <= HELD_FEW or n * size > HELD_CLUSTER)):
                continue
            # Whether they all fit is asked first: most calls have so many rows that they do not.
            if rows * n * size <= threads * full:
                c = made(replace(room, threads=size), split=False, cluster_n=n, held=capacity)
                blocks = device.architecture.ctas_of(c.shared_memory)
                found = c if rows * n <= blocks * device.multiprocessors * full else found
        if found:
            return found
    return None
