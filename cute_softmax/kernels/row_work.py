"""What a thread of the row kernel works on: its launch, its rows, and which of their elements are its own.

All here is index arithmetic, see `common.index`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..plan import RowClass
from .common.copy import GlobalTensor, global_pointer
from .common.index import at_edges, ceil_div, dot, head_of, of_row, reach_of, select, smaller


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA: of each staged input this thread's part of the tile; the reduction buffer and an mbarrier
    for each of its stages, None where nothing is exchanged."""

    tXsX: dict[int, cute.Tensor]
    buffer: cute.Tensor | None
    barriers: cute.Pointer | None


@dataclass(frozen=True)
class Launch:
    """What a thread knows of its launch; numbers as `RowKernel.__call__` takes them.

    tXcX: (row, column) in the CTA's tile of each of the thread's elements, ((V, M), 1, K).
    share: columns of a row that a CTA takes; first: the first that this one does; rank: which CTA of the cluster it is.
    lane: which thread of its rows this is. sizes: of the kept modes but the slowest; numbers: of the prologue, by name.
    policy: of L2, for reads. zero: which the compiler does not know.
    """

    spec: RowClass
    rows: Int64
    columns: Int32
    share: Int32
    first: Int32
    rank: Int32
    lane: Int32
    sizes: list[Int64]
    numbers: dict[str, Int64]
    mX: list[GlobalTensor]
    tXcX: cute.Tensor
    policy: Int64
    zero: Int32
    shared: Shared


@dataclass(frozen=True)
class Row:
    """Row m of a thread in a tile, and how it divides into head, body and tail (elements).

    at: its index in each kept mode, the slowest first; inside: whether it exists.
    limit: columns of the body that this CTA holds; seen: those of them that it reads. reach: columns of the row that
    count. start: the column of this thread's first vector. place: which of the places for rows in shared memory it has.
    tXgX: its part in global memory of each input, where that is known already.
    """

    launch: Launch
    tile: Int64
    m: int
    index: Int64
    at: list[Int64]
    inside: Boolean
    head: Int32
    body: Int32
    limit: Int32
    seen: Int32
    reach: Int32
    start: Int32
    place: Int32 | int = 0
    tXgX: Sequence[cute.Tensor] = ()


@dataclass(frozen=True)
class Vectors:
    """A thread's vectors in registers: rX of each full operand, ((V, M), 1, K); whether their columns exist, pX,
    (M, 1, K), and their rows, pR; and by (input, row) the one element that an input has for a row, where its access is
    0."""

    rX: list[cute.Tensor]
    pX: cute.Tensor
    pR: list[Boolean]
    ones: dict[tuple[int, int], object]


def share_of(spec: RowClass, columns: Int32) -> Int32:
    """Columns that each CTA of a cluster takes: equal shares, in whole cache lines, so that a short row leaves none
    idle."""
    if spec.cluster_n == 1:
        return columns
    return ceil_div(ceil_div(columns, spec.cluster_n), spec.line) * spec.line


def row_of(launch: Launch, tile: Int64, m: int, place: Int32 | int = 0) -> Row:
    """Row m of this thread in a tile."""
    s = launch.spec
    V = s.vector
    index = tile * s.tiler[0] + launch.tXcX[(0, m), 0, 0][0]
    at = of_row(index, launch.sizes, bool(s.prologue))
    head = 0
    if s.edges:
        # One tensor, the output if there is one, decides where vectors begin.
        mX = launch.mX[s.facts.reference]
        head = head_of(mX.address // mX.itemsize + dot(at, mX.kept), V, launch.columns)
    body = (launch.columns - head) // V * V
    # CTAs that have a row each are as many as rows are: asked again with each vector it would take two instructions.
    inside = index < launch.rows if s.persistent or s.tiler[0] > 1 else True
    limit = smaller(body - launch.first, launch.share)
    reach, seen = launch.columns, limit
    if s.prologue.causal:
        reach = reach_of(at[-1], launch.numbers["offset"], launch.columns)
        seen = smaller(limit, reach - head - launch.first)
    start = head + launch.first + launch.tXcX[(0, m), 0, 0][1]
    return Row(launch, tile, m, index, at, inside, head, body, limit, seen, reach, start, place)


def tile_of(row: Row, number: Int32) -> Row:
    """A tile of a row that comes in several, as if the row began there."""
    first = number * row.launch.spec.tiler[1]
    launch = replace(row.launch, first=row.launch.first + first)
    left = {"limit": row.limit - first, "seen": row.seen - first}
    return replace(row, launch=launch, start=row.start + first, **left)


def partition(row: Row, i: int) -> cute.Tensor:
    """tXgX: this thread's part of a row of operand i in global memory, (V, K)."""
    s, mX = row.launch.spec, row.launch.mX[i]
    align = max(s.accesses[i], 1) * mX.itemsize
    start = global_pointer(mX.dtype, mX.address, dot(row.at, mX.kept) + row.start, align)
    layout = cute.make_layout((s.vector, s.steps), stride=(1, s.threads_per_row * s.vector))
    return cute.make_tensor(start, layout)


def following(spec: RowClass, k: int) -> tuple[int, int]:
    """What takes the place of vector k in shared memory when it has been read, in a persistent kernel: (how many of its
    tiles later, which vector)."""
    return divmod(k + spec.staged_steps, spec.steps)


def speaks(row: Row) -> Boolean:
    """Whether this thread is the first of a row that exists."""
    return row.inside & (row.launch.lane == 0) & (row.launch.rank == 0)


def reads(row: Row, k: int) -> Boolean:
    """The predicate of vector k over columns, to be read: one bit for its V elements."""
    return row.launch.tXcX[(0, row.m), 0, k][1] < row.seen


def writes(row: Row, k: int, read: Boolean) -> Boolean:
    """Whether a vector is to be written: what lies beyond the diagonal, too."""
    return row.launch.tXcX[(0, row.m), 0, k][1] < row.limit if row.launch.spec.prologue.causal else read


def count(row: Row, k: int, exists: Boolean) -> Int32:
    """How many elements of vector k there are before the end of the row, or its diagonal; 0 if it does not exist."""
    column = row.head + row.launch.first + row.launch.tXcX[(0, row.m), 0, k][1]
    return select(exists, row.reach - column, 0)


def edge(row: Row, e: int) -> tuple[Int32, Boolean]:
    """Scalar e of this thread at the edges of a row: its column, and whether there is one. Slots 0 .. V-2 are those of
    the head, V-1 .. 2V-3 of the tail."""
    launch, V = row.launch, row.launch.spec.vector
    slot = launch.lane + e * launch.spec.threads_per_row
    column, exists = at_edges(slot, row.head, row.head + row.body, V - 1, launch.columns)
    return column, row.inside & exists & (launch.rank == 0)
