"""What a CTA of a panel kernel works on: its launch, an item of its work, and where the elements of that lie.

Coordinates of a thread: `a` side by side over the groups, `d` down along them. All here is index arithmetic, see
`common.index`.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...plan import PanelClass
from ...plan.panel_class import exchange_words
from ..common.copy import GlobalTensor
from ..common.index import (
    apart,
    at_edges,
    ceil_div,
    dot,
    head_of,
    larger,
    narrow,
    reach_of,
    select,
    smaller,
    wide,
)
from .scores import Numbers


@dataclass(frozen=True)
class Policies:
    """L2 eviction policies: of reads that are repeated, of all others, and of writes; None for the usual one."""

    twice: Int64
    once: Int64
    writes: Int64 | None


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA.

    sX: the tile of each input, (element of a vector, block, step); tXsX: this thread's own block of it.
    sB: the warps' partial results; sC: states that CTAs exchange; barriers: of the cluster's trips; words: two that all
    threads read.
    """

    sX: list[cute.Tensor]
    tXsX: list[cute.Tensor]
    sB: cute.Tensor
    sC: cute.Tensor
    words: cute.Tensor
    barriers: cute.Pointer | None


@dataclass(frozen=True)
class Launch:
    """What a thread knows of its launch; numbers as `PanelKernel.__call__` takes them.

    own: the thread's block of a step in shared memory; lane: which of its line it is. exchanges, states: addresses of
    the exchange points and of the parts' states. numbers: of the prologue, as they are given.
    """

    spec: PanelClass
    ctas: Int32
    items: Int32
    length: Int32
    groups: Int32
    parts: Int32
    share: Int32
    patience: Int32
    chunks: Int32
    spacing: Int32
    last_row: Int32
    kept_sizes: list[Int32]
    reduced_sizes: list[Int32]
    mX: list[GlobalTensor]
    tidx: Int32
    rank: Int32
    a: Int32
    d: Int32
    own: Int32
    lane: Int32
    policies: Policies
    shared: Shared
    numbers: dict[str, Int64]
    exchanges: Int64
    states: Int64


@dataclass(frozen=True)
class Line:
    """Where a thread's groups lie among those of the fastest kept mode, where columns are shifted.

    column: the first of them; alone: whether the next panel has it not, too; beside: how many there are from it on,
    and wanted of the panel; ends: whether memory's rows begin or end in the panel.
    """

    column: Int32
    alone: Boolean
    beside: Int32
    wanted: Int32
    ends: Boolean

    def has(self, v: int) -> Boolean:
        """Whether the thread's slot v is a group of memory's row."""
        return (self.column + v >= 0) & (v < self.beside)

    def before(self, shift: Int32) -> "Line":
        """Where groups lie that begin so many before these."""
        return replace(
            self, column=self.column - shift, beside=self.beside + shift, wanted=self.wanted + shift
        )


@dataclass(frozen=True)
class Item:
    """One item of a CTA's work: which part of which panel, and which elements of this thread's groups.

    starts: of each operand, from its beginning to that of the thread's first group; inside: whether that exists.
    shift: groups from that to where it would be if rows began with blocks, see `aligned`; where rows lie side by side
    tail: elements of the thread's last vector, which may end outside the tensor; short: 1 if the last row has none.
    head: elements before a row's first line; first, end: the elements that the CTA takes. seen: of a row where those
    end that count, if that comes before.
    sync, states: addresses of the panel's exchange point, and of its parts' states.
    position: of the thread's first group, see `Prologue.causal`; numbers: what the prologue has for its groups, once
    they are `scores.Scores.known`.
    """

    launch: Launch
    index: Int32
    part: Int32
    starts: list[Int64]
    inside: Boolean
    line: Line | None
    shift: Int32 | int
    tail: Int32 | None
    short: Int32 | int
    head: Int32
    first: Int32
    end: Int32
    seen: Int32
    sync: Int64
    states: Int64
    position: Int32
    numbers: Numbers | None = None


@dataclass(frozen=True)
class Chunk:
    """What is copied at a time: of the groups that begin at `starts` the elements from `at` on, of which so many are
    `left` from this thread's first on; rest: as many, whether or not its groups exist. wanted: see `Line`, or of rows
    that lie side by side `Item.tail`."""

    starts: list[Int64]
    at: Int32
    left: Int32
    rest: Int32
    wanted: Int32 | None


def item_of(launch: Launch, index: Int32) -> Item:
    """An item of a launch's work, whether or not it exists."""
    s = launch.spec
    part, tile = 0, index
    if s.exchange:
        part, tile = index % launch.parts, index // launch.parts
    if s.shifted:
        kept, line = line_of(launch, tile)
        inside = s.column(launch.a) < launch.spacing + s.overlap
    else:
        column = tile * launch.spacing + launch.a * s.slots
        # Threads without groups load for their neighbours, too.
        nearest = smaller(column, launch.groups - s.slots) if s.spread else column
        kept, line = apart(nearest, launch.kept_sizes), None
        inside = (launch.a * s.slots < launch.spacing) & (column < launch.groups)
    first, shift = (part * s.cluster_n + launch.rank) * launch.share, 0
    starts = [dot(kept, mX.kept) for mX in launch.mX]
    if s.aligned:
        shift = shift_of(launch, starts[0], first)
        line, inside = line.before(shift), inside & (line.beside + shift > 0)
        starts = [start - shift * mX.kept[0] for start, mX in zip(starts, launch.mX, strict=True)]
    head, body = 0, launch.length
    if s.edges:
        mX = launch.mX[s.facts.reference]
        head = head_of(mX.address // mX.itemsize + starts[s.facts.reference], s.line, launch.length)
        body = (launch.length - head) // s.vector * s.vector
    end = smaller(first + launch.share, body)
    if s.edges:  # the body may be shorter than another row's by a part's whole share
        first, end = head + first, head + larger(first, end)
    position, seen = kept[s.query] - (shift if s.query == 0 else 0), end
    if s.hides:
        seen = smaller(end, reach_of(wide(position), launch.numbers["offset"], launch.length))
    tail, short = None, 0
    if s.rows_abreast > 1:
        there = smaller(larger(launch.last_row - launch.a * s.slots, 0), s.vector)
        there = select(end == launch.length, there, s.vector)
        short = 1 - smaller(there, 1)
        tail = there + short * s.vector
    return Item(
        launch=launch,
        index=index,
        part=part,
        starts=starts,
        inside=inside,
        line=line,
        head=head,
        first=first,
        end=end,
        seen=seen,
        shift=shift,
        tail=tail,
        short=short,
        sync=launch.exchanges + wide(tile) * (4 * exchange_words(launch.parts)),
        states=launch.states + wide(tile) * launch.parts * (s.groups * s.published_bytes),
        position=position,
    )


def shift_of(launch: Launch, start: Int64, first: Int32) -> Int32:
    """Groups from the beginning of the block that a thread's first one lies in to that, in all of its rows from element
    `first` on. start: of the group, from the first operand's beginning."""
    mX = launch.mX[0]
    place = mX.address // mX.itemsize + start + (first + launch.d) * mX.reduced[0]
    return narrow(place & (launch.spec.vector - 1))


def line_of(launch: Launch, tile: Int32) -> tuple[list[Int32], Line]:
    """The coordinates of a thread's first group in the kept modes, the fastest first, where columns are shifted."""
    s = launch.spec
    abreast = launch.kept_sizes[0] if s.kept_modes > 1 else launch.groups
    panels = ceil_div(abreast, launch.spacing)
    first = tile % panels * launch.spacing
    column = first + s.column(launch.a)
    outer = apart(tile // panels, launch.kept_sizes[1:]) if s.kept_modes > 1 else []
    ends = (first == 0) | (first + launch.spacing + s.overlap > abreast)
    beside, own = abreast - column, launch.spacing - s.column(launch.a)
    return [column, *outer], Line(column, own > 0, beside, smaller(beside, own + s.overlap), ends)


def left(item: Item, at: Int32, end: Int32 | None = None) -> Int32:
    """How much of a group there is from this thread's first element of the chunk at `at` on, up to `end` if that is not
    the item's: vector k exists where more than k * down * unit is left."""
    return select(item.inside, rest(item, at, item.end if end is None else end) - item.short, 0)


def rest(item: Item, at: Int32, end: Int32) -> Int32:
    """`left`, whether or not the thread's groups exist."""
    return end - at - item.launch.d * item.launch.spec.unit


def chunk_at(item: Item, at: Int32) -> Chunk:
    """The chunk of an item that begins at an element."""
    wanted = item.line.wanted if item.line else item.tail
    return Chunk(item.starts, at, left(item, at, item.seen), rest(item, at, item.seen), wanted)


def chunk_of(item: Item, n: Int32) -> Chunk:
    """Chunk n of an item's share."""
    return chunk_at(item, item.first + n * item.launch.spec.chunk)


def chunks_of(item: Item) -> Int32:
    """How many chunks of an item's share have something that counts; none where it is 0 or less."""
    return ceil_div(item.seen - item.first, item.launch.spec.chunk)


def places(launch: Launch, i: int, start: Int64, at: Int32) -> list[Int64]:
    """The addresses of a thread's vectors of the chunk at element `at` in operand i, whose groups begin at `start`."""
    s, mX = launch.spec, launch.mX[i]
    first = at + launch.d * s.unit
    beside = i in s.facts.beside
    if s.reduced_modes == 1:
        # One multiplication, then additions: a 64-bit product for each vector would cost as much as its softmax.
        # A row's vectors lie where its neighbours are next to each other, or all of them have the one beside them.
        (stride,) = mX.reduced if s.unit == 1 or beside else (1,)
        addresses = [mX.address + (start + first * stride) * mX.itemsize]
        step = s.down * s.unit * mX.itemsize * stride
        for _ in range(1, s.chunk_steps):
            addresses.append(addresses[-1] + step)
        return addresses
    indices = [apart(first + k * s.down * s.unit, launch.reduced_sizes) for k in range(s.chunk_steps)]
    return [mX.address + (start + dot(index, mX.reduced)) * mX.itemsize for index in indices]


def loaded_step(launch: Launch, j: int) -> Int32:
    """The j-th step of a chunk that a thread loads for those that are alike, see `PanelClass.alike`."""
    return j * launch.spec.alike + launch.lane % launch.spec.alike


def place(launch: Launch, i: int, start: Int64, at: Int32, k: Int32) -> Int64:
    """One of `places`: of vector k, which need not be known while the kernel is traced."""
    s, mX = launch.spec, launch.mX[i]
    index = apart(at + (launch.d + k * s.down) * s.unit, launch.reduced_sizes)
    return mX.address + (start + dot(index, mX.reduced)) * mX.itemsize


def edge(item: Item, e: int) -> tuple[Int32, Boolean]:
    """Scalar e of this thread at the edges of a row: which element of the row it is, and whether there is one.

    The scalars of the head come first, and those of the tail behind the most that a head can have.
    """
    launch, s = item.launch, item.launch.spec
    slot = launch.tidx + e * s.threads
    tail = item.head + (launch.length - item.head) // s.vector * s.vector
    at, exists = at_edges(slot, item.head, tail, s.line - 1, launch.length)
    return at, exists & (item.part == 0) & (launch.rank == 0) & item.inside
