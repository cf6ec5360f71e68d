"""The `topk` movement: the largest of a short row with their probabilities, and the gradient of that.

A row of at most 1,024 elements is read once by some lanes of a warp, so that nothing but shuffles joins its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase, PlanBase, counted
from .hardware import Device
from .maths import WARP, NotPlanned, check_counts
from .modes import power_of_two
from .problem import ALIGNMENT, ITEM_SIZE, Operand, check_float

MOST_COLUMNS = 1024
LEAST_COLUMNS = 8  # of a class: shorter rows have the room of so many
THREADS = 128  # of a CTA
MORE_THREADS = 512  # where there are more than FEW_WARPS, and all run at once: fewer CTAs start sooner
FEW = 8  # results that a router asks for, at the most
EXACT = 4  # float32 elements that a lane sorts by keys of 64 bits at once
RESIDENT = 64  # warps of a multiprocessor: of more than these rows wait for others
FEW_WARPS = 8  # of a multiprocessor: so few have nothing to do while each waits for its vectors

# How many lanes share a row, by bytes of an element and by whether there are more than FEW results: by the row's room,
# from so many rows of a multiprocessor on. A comparison in a lane costs two instructions for the elements of 32 rows,
# one between lanes as many and two shuffles; one after another they take the longer the more elements a lane has.
# The fastest of all numbers of lanes: 64 to 1,024 elements, 1 to 65,536 rows, k = 2, 8 and 32 (H200, 2026-11-27).
LANES = {
    (2, False): {
        64: {0: 4},
        128: {0: 8, 64: 4},
        256: {0: 16, 32: 8},
        512: {0: 32, 16: 16},
        1024: {0: 32, 16: 16},
    },
    (2, True): {
        64: {0: 16, 32: 8, 256: 4},
        128: {0: 16, 32: 8, 256: 4},
        256: {0: 16, 32: 8},
        512: {0: 32, 16: 16},
        1024: {0: 32, 16: 16},
    },
    (4, False): {
        64: {0: 8, 256: 4},
        128: {0: 8},
        256: {0: 16, 48: 8},
        512: {0: 32, 128: 16},
        1024: {0: 32},
    },
    (4, True): {
        64: {0: 16, 16: 8, 256: 4},
        128: {0: 16, 32: 8},
        256: {0: 32, 128: 8},
        512: {0: 32, 128: 16},
        1024: {0: 32},
    },
}
# By bytes of an element, as many are kept: two and eight are what routers choose, and each number is a class of its
# own. A lane often has both of two, and rough keys want the next one as well.
LISTS = {2: (2, 8, 32), 4: (4, 8, 32)}
# What becomes of the sorted lists of two lanes that are merged: one that is twice as long; the same length, in half as
# many elements of each lane; or the same in both lanes.
GROW, HALVE, COPY = "grow", "halve", "copy"


@dataclass(frozen=True)
class TopkClass(ClassBase):
    """What is compiled for the `topk` movement.

    Attributes:
        math: "topk_softmax", or "topk_softmax_backward".
        architecture: What it is compiled for.
        dtypes: Of the row and of the k values; of the gradient: of what it is computed from (the row, or the k values
            where those are renormalized), of the k gradients, and of the result.
        index: The dtype of the k indices.
        vector: Elements of one access to the row.
        vectors: Vectors of a lane.
        threads_per_row: Lanes that share a row.
        kept: How many of the largest elements are found: a power of two, or 0 in the gradient, which selects nothing.
        renormalize: Whether probabilities are those of the k elements among themselves.
        loads_first: Whether all vectors are loaded before the first is sorted, and none while another is.
        queued: Whether rows of `rough` elements wait for others, so that the number of instructions counts, and not how
            long one row takes: lanes keep shorter lists.
        threads: Threads of a CTA.
        movement: How data reaches the threads.
        min_blocks: CTAs that a multiprocessor must have room for; 0: as many as there is.
        cluster_n: CTAs of a cluster.
    """

    movement: ClassVar[str] = "topk"
    min_blocks: ClassVar[int] = 0
    cluster_n: ClassVar[int] = 1

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    index: str
    vector: int
    vectors: int
    threads_per_row: int
    kept: int
    renormalize: bool
    loads_first: bool = False
    queued: bool = False
    threads: int = THREADS

    @property
    def forward(self) -> bool:
        """Whether elements are selected, and no gradient is made."""
        return self.math == "topk_softmax"

    @property
    def elements(self) -> int:
        """Elements of a row that a lane has."""
        return self.vector * self.vectors

    @property
    def rough(self) -> bool:
        """Whether float32 elements are compared without their last bits first, and by all bits where that leaves a
        doubt: for lanes that sort many."""
        return (
            self.forward and self.dtypes[0] == "fp32" and self.elements > EXACT and self.threads_per_row > 1
        )

    @property
    def half_full(self) -> int:
        """CTAs on a multiprocessor that leave room for as many of another kernel: lanes that sort many elements take
        half as many registers again."""
        many = self.elements * ITEM_SIZE[self.dtypes[0]] >= 64 and (
            self.dtypes[0] == "fp32" or self.kept > FEW
        )
        return (512 if many else 1024) // self.threads

    @property
    def precise(self) -> bool:
        """Whether the result is worth a float32's rounding."""
        return self.dtypes[-1] == "fp32"

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.threads // self.threads_per_row

    @property
    def capacity(self) -> int:
        """The longest row, in elements."""
        return self.threads_per_row * self.elements

    @property
    def length(self) -> int:
        """Of the sorted list that a lane keeps of its largest elements. Of those that are taken one after another a
        lane seldom has more than four; where it has, the row's elements are looked at again."""
        return min(self.kept, self.elements, 4 if self.takes and self.queued else self.kept)

    @property
    def slots(self) -> int:
        """Results that a lane holds at the end, see `place_bits`."""
        return max(self.kept // self.threads_per_row, 1)

    @property
    def takes(self) -> bool:
        """Whether the largest of the lanes' first elements is taken as often as there are results, not lists merged: a
        whole warp has an instruction for that, whose results come sooner than those of as many shuffles."""
        return self.threads_per_row == WARP and self.kept <= FEW

    @property
    def merges(self) -> tuple[str, ...]:
        """What becomes of the lists of lanes that differ in a bit, the lowest bit first."""
        if self.takes:
            return ()
        found, mine, together = [], self.length, self.length
        for _ in range(self.threads_per_row.bit_length() - 1):
            if together < self.kept:
                found.append(GROW)
                together *= 2
            elif mine > 1:
                found.append(HALVE)
                mine //= 2
            else:
                found.append(COPY)
        return tuple(found)

    def places_after(self, merges: int) -> tuple[tuple[int, ...], int]:
        """(the bits of a lane's number that say which part of the list of its group it has after so many merges, the
        highest first; how many places that part has). Lanes that differ in another bit have the same part."""
        bits, mine = (), self.length
        for bit, what in enumerate(self.merges[:merges]):
            if what == GROW:
                bits = (bit, *bits)
            elif what == HALVE:
                bits, mine = (*bits, bit), mine // 2
        return bits, mine

    @property
    def place_bits(self) -> tuple[int, ...]:
        """Which bits of its number among the row's lanes say which results a lane has, the highest first: slot s is
        that of place ``bits * slots + s``. Lanes with another bit set have copies."""
        if self.takes:
            return tuple(reversed(range(WARP.bit_length() - 1)))
        return self.places_after(len(self.merges))[0]

    @property
    def tiler(self) -> tuple[int, int]:
        """(rows, columns) of a CTA's tile."""
        return self.rows, self.capacity

    # Named layouts: the kernel builds its cute layouts from these values and the diagrams draw them.

    @property
    def tv(self) -> Layout:
        """(thread, value) -> index in the CTA's tile (rows fastest): threads run along the row first, a value is
        (element of the vector, vector)."""
        T, R, V, K = self.threads_per_row, self.rows, self.vector, self.vectors
        return Layout(((T, R), (V, K)), ((V * R, 1), (R, T * V * R)))

    @property
    def spread(self) -> Layout:
        """(row, column) of the tile -> float32 in shared memory, where the k gradients of a row find its lanes."""
        return Layout.ordered(self.tiler, (1, 0))

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return 0 if self.forward else 4 * math.prod(self.tiler)

    @property
    def signature(self) -> str:
        """A letter for each argument of what is compiled: rows, columns, k, CTAs; then addresses in bytes, each with
        its strides in elements."""
        return "iiii" + ("llll" if self.forward else "lllllll")

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        parts = [f"{self.threads_per_row}x{self.vectors}x{self.vector}"]
        if self.forward:
            parts.append(f"list{self.kept}")
        if self.loads_first:
            parts.append("loads_first")
        if self.queued:
            parts.append("queued")
        if self.threads != THREADS:
            parts.append(f"{self.threads}threads")
        if self.renormalize:
            parts.append("renormalize")
        return "_".join([*parts, self.index])


@dataclass(frozen=True)
class TopkPlan(PlanBase):
    """How one launch runs: `k` elements are chosen from each row of `columns` elements.

    Attributes:
        kernel: What is compiled.
        rows: The number of rows.
        columns: Elements of a row.
        k: How many are chosen.
        ctas: CTAs of the grid.
        operand_strides: In elements: the row stride of the row's tensor; the k values and indices are contiguous. In
            the gradient: the row stride of the tensor that it is computed from, and the row and column strides of the k
            gradients; indices and result are contiguous.
        invariant: Whether the class, which determines the order of additions, is the same for all calls with this
            length, k and dtypes.
        laid_out: Operands that are first copied to contiguous rows, for such a class: the first one, or none.
        scratch: Bytes of zeroed memory that a launch needs in addition to its operands.
    """

    kernel: TopkClass
    rows: int
    columns: int
    k: int
    ctas: int
    operand_strides: tuple[tuple[int, ...], ...]
    invariant: bool = False
    laid_out: tuple[int, ...] = ()

    scratch: ClassVar[int] = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the operands."""
        return self.rows, self.columns, self.k, self.ctas

    @property
    def _selects(self) -> str:
        """How the lanes of a row find the k largest, in words."""
        c = self.kernel
        if c.threads_per_row == 1:
            return "there are no other lanes"
        if c.takes:
            return f"the largest of the lanes' first is taken {self.k} times"
        return f"their lists are merged, of two lanes, then of four, until {c.kept} of all are left"

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.kernel
        what = "softmax and its largest" if c.forward else "the gradient of softmax and its largest"
        among = ", renormalized" if c.renormalize else ""
        share = "one lane" if c.threads_per_row == 1 else f"{c.threads_per_row} lanes"
        lines = [
            f"{what} {self.k} of {counted(self.rows, 'row')} of {self.columns}{among}, "
            f"{' -> '.join(dict.fromkeys(c.dtypes))}, {c.index}, for {c.architecture}",
            f"  movement   topk: class {c.name}",
            f"  tile       {counted(c.rows, 'row')} per CTA of {c.threads} threads; {share} per row, "
            f"{counted(c.vectors, 'vector')} of {counted(c.vector, 'element')} each",
        ]
        if c.forward:
            lines += [
                f"  selects    each lane sorts its elements and keeps {c.length}; " + self._selects,
                "  ties       to the lowest index; NaN is larger than any number",
            ]
        else:
            read = "the k probabilities" if c.renormalize else "the row, once,"
            lines.append(f"  reads      {read} and the k gradients, gathered in shared memory")
        lines.append(
            f"  grid       {counted(self.ctas, 'CTA')}; {c.shared_memory} bytes of shared memory per CTA"
        )
        return "\n".join([*lines, *self.bits])


def plan_topk(
    rows: int,
    columns: int,
    k: int,
    operand: Operand,
    values: str,
    device: Device,
    *,
    index: str = "int64",
    renormalize: bool = False,
    invariant: bool = False,
) -> TopkPlan:
    """The plan of the k largest of each row with their probabilities.

    operand: the matrix (rows, columns), whose columns are contiguous; values: dtype of the probabilities; invariant:
    one whose class depends on the length of rows, k, dtypes and GPU alone, and is that of many rows. Its vectors are
    those of contiguous rows; of others a copy is read.
    Raises NotPlanned for rows longer than `MOST_COLUMNS`, and for more rows than 32 bits count.
    """
    copied = invariant and _misaligned(columns, operand, rows)
    if copied:
        operand = Operand(operand.dtype, (columns, 1))
    vector = _vector(columns, operand, rows)
    lanes = _lanes(rows, columns, k, ITEM_SIZE[operand.dtype], device, invariant)
    elements = _capacity(columns) // lanes
    kept = next((n for n in LISTS[ITEM_SIZE[operand.dtype]] if n >= k), power_of_two(k))
    c = TopkClass(
        math="topk_softmax",
        architecture=device.architecture.name,
        dtypes=(operand.dtype, values),
        index=index,
        vector=min(vector, elements),
        vectors=elements // min(vector, elements),
        threads_per_row=lanes,
        kept=min(kept, _capacity(columns)),
        renormalize=renormalize,
    )
    warps = math.ceil(rows * lanes / WARP / device.multiprocessors)
    waits = invariant or warps > RESIDENT
    # Between the two an SM has warps enough that some sort what they have while others' vectors are on their way.
    loads_first = c.vectors > 1 and (waits or warps <= FEW_WARPS)
    threads = MORE_THREADS if FEW_WARPS < warps <= RESIDENT // 2 and not invariant else THREADS
    c = replace(c, loads_first=loads_first, queued=c.rough and waits, threads=threads)
    return _planned(c, rows, columns, k, ((operand.strides[0],), (), ()), invariant, copied)


def plan_topk_backward(
    rows: int,
    columns: int,
    k: int,
    source: Operand,
    grad: Operand,
    result: str,
    device: Device,
    *,
    index: str = "int64",
    renormalize: bool = False,
    invariant: bool = False,
) -> TopkPlan:
    """The plan of the gradient of the row from those of the k values.

    source: the matrix of logits (rows, columns), or with `renormalize` of the k values; grad: of the k gradients;
    result: dtype of the gradient; invariant: as for `plan_topk`, though no plan of a gradient has more lanes for few
    rows.
    Raises NotPlanned as `plan_topk`.
    """
    check_float(result)
    written = Operand(result, (columns, 1))
    copied = invariant and not renormalize and _misaligned(columns, source, rows)
    if copied:
        source = Operand(source.dtype, (columns, 1))
    vector = _vector(columns, written, rows)
    if not renormalize:
        vector = min(vector, _vector(columns, source, rows))
    lanes = min(WARP, _capacity(columns) // LEAST_COLUMNS)
    elements = _capacity(columns) // lanes
    c = TopkClass(
        math="topk_softmax_backward",
        architecture=device.architecture.name,
        dtypes=(source.dtype, grad.dtype, result),
        index=index,
        vector=min(vector, elements),
        vectors=elements // min(vector, elements),
        threads_per_row=lanes,
        kept=0,
        renormalize=renormalize,
    )
    strides = (source.strides[0],), grad.strides, (), ()
    return _planned(c, rows, columns, k, strides, invariant, copied)


def _planned(
    c: TopkClass,
    rows: int,
    columns: int,
    k: int,
    strides: tuple[tuple[int, ...], ...],
    invariant: bool,
    copied: bool,
) -> TopkPlan:
    check_counts({"rows": rows})
    ctas = math.ceil(rows / c.rows)
    return TopkPlan(c, rows, columns, k, ctas, strides, invariant, (0,) if copied else ())


def _capacity(columns: int) -> int:
    """The room that a row gets, a power of two. Raises NotPlanned for what a warp does not hold."""
    if columns > MOST_COLUMNS:
        raise NotPlanned(
            f"rows of {columns} elements: topk_softmax takes at most {MOST_COLUMNS}, topk_log_softmax any number"
        )
    return max(power_of_two(columns), LEAST_COLUMNS)


def _lanes(rows: int, columns: int, k: int, itemsize: int, device: Device, invariant: bool) -> int:
    """Lanes that share a row; invariant: those of many rows, and any number of these has them."""
    capacity, longer = _capacity(columns), k > FEW
    if k > LISTS[itemsize][-1]:  # lists that lanes hold whole
        return min(WARP, capacity // 8)
    lanes = LANES[itemsize, longer].get(capacity)
    if lanes is None:
        return capacity // (4 if longer else 8)
    return lanes[max(n for n in lanes if invariant or n * device.multiprocessors <= rows)]


def _misaligned(columns: int, operand: Operand, rows: int) -> bool:
    """Whether accesses to the rows are narrower than where rows follow each other without gaps."""
    return _vector(columns, operand, rows) < _vector(columns, Operand(operand.dtype, (columns, 1)), rows)


def _vector(columns: int, operand: Operand, rows: int) -> int:
    """The most elements, a power of two, in whose multiples all rows begin and end: at most 16 bytes."""
    size = ITEM_SIZE[operand.dtype]
    stride = operand.strides[0] if rows > 1 else 0
    return math.gcd(ALIGNMENT // size, columns, stride, operand.offset)
