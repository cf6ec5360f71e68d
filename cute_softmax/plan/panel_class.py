"""The Plan classes of the column and split movements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from layouts.algebra import Layout

from .base import ClassBase
from .maths import CACHE_LINE, WARP, Math
from .panel_configs import EXTRA_BLOCKS, PANEL_BYTES
from .problem import ALIGNMENT, ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of

HEADER = 1  # words of an exchange point before its parts'
WORD = 4  # bytes: what is copied to shared memory at least
BITS = 8  # of a place that holds those of a vector


def exchange_words(parts: int) -> int:
    """Words of the exchange point of a panel of so many parts, see `kernels.panel.exchange`."""
    return HEADER + parts


@dataclass(frozen=True)
class PanelClass(ClassBase):
    """What is compiled for the `column` and `split` movements, as plain numbers; see `kernels.panel.panel`.

    orientation: "column" (a vector lies across groups) or "row" (along its group); vector: elements of an access of the
    output; access: per input, elements of one load: as many, or fewer where its groups are aligned differently, or 0
    for a bias or a mask that has one element for all of a vector;
    edges: whether rows may begin or end off a vector boundary, so that scalars are handled apart; shifted: whether
    vectors of columns may, so that aligned blocks are copied and shifted into place, see `kernels.panel.shift`;
    across: threads side by side over groups; threads: of a CTA; steps: vectors that a thread holds; cluster_n: CTAs
    that share a panel through distributed shared memory;
    kept_modes, reduced_modes: how many; exchange: whether CTAs exchange states in global memory;
    buffers: chunks that a CTA holds of what it takes, of which it reads the others twice; 1 if it holds everything;
    min_blocks: CTAs that an SM must hold;
    ahead: steps that copies are asked for ahead, where a row is absorbed while another is finished; else 0;
    registers: chunks of such a row that are kept in registers;
    prologue: what happens to the scores before the math and to its results; query: which kept mode the index of has a
    group's position, counted from the fastest; alike: threads side by side whose vectors have the same element of an
    input with an access of 0, which they load for each other: a part of their `lanes`; aligned: whether threads keep
    shifted columns in the blocks that memory has them in, see `kernels.panel.aligned`; rows_abreast: rows of memory
    that lie side by side in a panel, where rows of few columns follow each other: so many make whole vectors, see
    `kernels.panel.abreast`.
    """

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    orientation: str
    vector: int
    access: tuple[int, ...]
    edges: bool
    shifted: bool
    across: int
    threads: int
    steps: int
    cluster_n: int
    kept_modes: int
    reduced_modes: int
    exchange: bool
    buffers: int
    min_blocks: int
    ahead: int = 0
    registers: int = 0
    prologue: Prologue = NO_PROLOGUE
    query: int = 0
    alike: int = 1
    aligned: bool = False
    rows_abreast: int = 1

    online = False
    keep = True
    part = 2
    logs = False

    @property
    def signature(self) -> str:
        """The numbers of `PanelPlan.arguments`, sizes of modes, an exchange's scratch memory, the prologue's numbers,
        addresses and strides."""
        modes = self.kept_modes + self.reduced_modes
        operands = len(self.prologue.numbers) + len(self.dtypes) * (1 + modes)
        return "i" * 10 + "l" + "l" * (modes - 2 + (self.rows_abreast > 1) + self.exchange + operands)

    @property
    def early(self) -> bool:  # what states are exchanged in has been cleared just before
        return super().early and not self.exchange

    @property
    def movement(self) -> str:
        return "split" if self.exchange or self.orientation == "row" else "column"

    @property
    def facts(self) -> Math:
        return facts_of(self.math, True, self.prologue)

    @property
    def whole_bytes(self) -> int:
        """Bytes of a state: the results of all stages together."""
        return self.facts.stages * self.facts.state_bytes

    @property
    def stages(self) -> int:
        """Exchanges of one float32 each."""
        return self.facts.numbers

    @property
    def down(self) -> int:
        """Threads along the groups."""
        return self.threads // self.across

    @property
    def warps_down(self) -> int:
        """Warps along the groups, of whose threads each lane has partial results of the same; if `aligned`, threads."""
        return self.down if self.aligned else max(self.threads // max(self.across, WARP), 1)

    @property
    def lanes(self) -> int:
        """Lanes of a line: threads of one warp that stand side by side over the groups."""
        return min(self.across, WARP)

    @property
    def extra(self) -> int:
        """Blocks that a shifted line has behind those of its lanes: it begins at a multiple of so many."""
        return min(EXTRA_BLOCKS, self.lanes) if self.shifted and not self.aligned else 0

    @property
    def blocks(self) -> int:
        """Vectors of a step in shared memory: one a thread and, where they are shifted, `extra` ones a line."""
        return self.threads + self.threads // self.lanes * self.extra

    def block(self, thread: int) -> int:
        """The block of a step that is a thread's."""
        return thread // self.lanes * (self.lanes + self.extra) + thread % self.lanes

    def column(self, a: int) -> int:
        """Groups from a panel's first to that of its thread `a` side by side; lines may overlap."""
        return a * self.slots - a // self.lanes * self.overlap

    @property
    def overlap(self) -> int:
        """Groups that a line has in common with the next, so that each block of results has a line that holds it, and
        each group, where blocks are `aligned`, a thread in all rows."""
        return (bool(self.shifted and self.facts.outputs) + self.aligned) * self.slots

    @property
    def before(self) -> int:
        """Groups before a panel's first that its threads have elements of."""
        return self.slots if self.aligned else 0

    @property
    def advance(self) -> int:
        """Groups from a panel to the next, at most."""
        return self.columns - self.across // self.lanes * self.overlap

    def advance_of(self, abreast: int) -> int:
        """Groups from a panel to the next of so many side by side, at most: all, where one panel has them in all rows
        of its threads, and no block of results is another's, too."""
        if self.rows_abreast > 1:
            return abreast
        alone = -(-abreast // self.slots) * self.slots
        one_line = self.aligned and self.across == self.lanes
        return alone if one_line and alone <= self.columns - self.slots else self.advance

    @property
    def slots(self) -> int:
        """Groups that a thread holds elements of."""
        return self.vector if self.orientation == "column" else 1

    @property
    def unit(self) -> int:
        """Elements of its group that a vector covers."""
        return 1 if self.orientation == "column" else self.vector

    @property
    def columns(self) -> int:
        """Columns of a panel: groups, or those of all `rows_abreast`."""
        return self.across * self.slots

    @property
    def groups(self) -> int:
        """Groups of a panel, which have a state each."""
        return self.columns // self.rows_abreast

    @property
    def tile(self) -> int:
        """Elements of each group that a CTA holds."""
        return self.down * self.steps * self.unit

    def filled(self, share: int) -> PanelClass:
        """This class in as many steps as a CTA with so many elements of each group needs."""
        return replace(self, steps=math.ceil(share / (self.down * self.unit)))

    @property
    def width(self) -> int:
        """Bytes of a panel's width, of the narrowest full operand."""
        return self.columns * min(ITEM_SIZE[self.dtypes[i]] for i in self.facts.main)

    @property
    def line(self) -> int:
        """Elements of a cache line, of the operand that decides where the vectors of a row with edges begin."""
        return CACHE_LINE // ITEM_SIZE[self.dtypes[self.facts.reference]]

    @property
    def edge_slots(self) -> int:
        """Scalars at most before a row's first line and after its last whole vector."""
        return self.line - 1 + self.vector - 1 if self.edges else 0

    @property
    def edge_scalars(self) -> int:
        """The `edge_slots` that a thread takes."""
        return math.ceil(self.edge_slots / self.threads)

    @property
    def prefetches(self) -> int:
        """Bytes that L2 fetches around those which a panel loads, for its neighbour: 2% for panels of 128 bytes."""
        return 256 if self.orientation == "column" and self.width < PANEL_BYTES else 0

    @property
    def streaming(self) -> bool:
        """Whether a CTA takes more than it holds, in chunks: while one is worked on the others are on their way."""
        return self.buffers > 1

    @property
    def repeats(self) -> bool:
        """Whether chunks that a CTA does not hold are read a second time."""
        return self.streaming and bool(self.facts.outputs) and not self.ahead

    @property
    def hides(self) -> bool:
        """Whether rows end at a diagonal, beyond which nothing is read."""
        return self.prologue.causal and self.orientation == "row"

    @property
    def chunk_steps(self) -> int:
        """Vectors of a chunk that a thread holds."""
        return self.steps // self.buffers

    @property
    def chunk(self) -> int:
        """Elements of each group in a chunk."""
        return self.tile // self.buffers

    @property
    def wait(self) -> int:
        """Steps of the next row, where one is absorbed ahead, before a row is finished: so many that together with the
        chunks in registers they go round the places for what is on its way; see `kernels.panel.ahead`."""
        return self.ahead - self.registers % self.ahead

    def chunks_of(self, share: int) -> int:
        """Chunks of a share; where a row is absorbed ahead so many at the least, of which some may be empty."""
        fewest = self.registers + self.ahead - self.wait if self.ahead else 1
        return max(math.ceil(share / self.chunk), fewest)

    def again_of(self, share: int) -> int:
        """Chunks of a share that are read twice, because they are not held."""
        return max(self.chunks_of(share) - self.buffers, 0) if self.repeats else 0

    @property
    def most_chunks(self) -> int:
        """Chunks of the longest share that a CTA holds, of which each is absorbed ahead."""
        return self.buffers - self.ahead + self.registers

    @property
    def residents(self) -> tuple[int, ...]:
        """Inputs of which a CTA keeps its part for all rows, as it is the same for them: what is beside the elements,
        where rows are absorbed ahead."""
        return self.facts.beside if self.ahead else ()

    def bits(self, i: int) -> bool:
        """Whether input i lies in shared memory in bits, one for an element: a mask that is resident."""
        return i in self.residents and self.dtypes[i] == "bool"

    def place_bytes(self, i: int) -> int:
        """Bytes of a place of input i in shared memory, of which a vector has several or, of bits, one."""
        return BITS // 8 if self.bits(i) else WORD if self.words(i) else ITEM_SIZE[self.dtypes[i]]

    def steps_of(self, i: int) -> int:
        """Vectors of input i that a thread has room for in shared memory."""
        return self.most_chunks * self.chunk_steps if i in self.residents else self.steps

    @property
    def trips(self) -> int:
        """How often CTAs of a cluster send each other states, see `kernels.panel.merge`.

        Two take room for two states of a column instead of `cluster_n`, so that more CTAs share an SM.
        """
        return 2 if self.cluster_n == 16 and self.width >= PANEL_BYTES else 1

    @property
    def readers(self) -> int:
        """Threads that read the parts' states of one column."""
        return min(self.threads // self.groups, WARP)

    @property
    def lanes_read(self) -> bool:
        """Whether the readers of a state are the lanes of a warp."""
        return self.columns == 1 and self.readers == WARP

    @property
    def loads(self) -> int:
        """States of parts that a reader has on their way at a time: of 132 parts of a row, of 66 of columns, all that
        it reads, if it has the registers. Columns of 65536 x 4096 reach 0.744 of a copy, with 8 of them 0.70 to 0.73.
        """
        if self.orientation == "row":
            return 5
        return 17 if self.min_blocks == 1 else 8

    @property
    def published_bytes(self) -> int:
        """Bytes of a state in global memory: pairs of numbers."""
        return max(self.whole_bytes, 8)

    # Named layouts: the kernel builds its cute layouts from these values and the diagrams draw them.

    def tiled(self, steps: int) -> Layout:
        """(thread, value) -> index in the tile of so many steps, elements of a group fastest, then groups.

        Threads stand `across` groups first, then down; a value is (element of the vector, step).
        """
        height, step = self.down * self.unit * steps, self.down * self.unit
        values = height if self.orientation == "column" else 1
        return Layout(
            ((self.across, self.down), (self.vector, steps)),
            ((self.slots * height, self.unit), (values, step)),
        )

    @property
    def tv(self) -> Layout:
        """(thread, value) -> index in the tile of one step, elements of a group fastest."""
        return self.tiled(1)

    @property
    def smem(self) -> Layout:
        """(element of a vector, block, step) -> element of an input's tile in shared memory; a thread's own block is
        `block(thread)`."""
        return self.tile_of(0)

    def words(self, i: int) -> int:
        """Words of 4 bytes that hold a vector of input i in shared memory, wherever in them it begins; 0 for an input
        whose vectors lie there as they are, as loads of 4 bytes and more bring them.

        Of a bias or a mask alone: of what begins at no multiple of 4 bytes, and of columns that are shifted, whose last
        vector may end outside the tensor.
        """
        size, access = ITEM_SIZE[self.dtypes[i]], self.access[i]
        if i not in self.facts.beside or access == 0 or (access * size >= WORD and not self.shifted):
            return 0
        furthest = WORD - min(access * size, WORD)  # into the first word
        return math.ceil((furthest + self.vector * size) / WORD)

    @property
    def spread(self) -> bool:
        """Whether some input has one element for all of a vector."""
        return 0 in self.access

    def access_bytes(self, operand: int) -> int:
        if operand in self.facts.beside and self.words(operand):
            return WORD
        return super().access_bytes(operand) or ITEM_SIZE[self.dtypes[operand]]

    @property
    def load_widths(self) -> list[str]:
        """How many bytes loads take, in words."""
        return list(dict.fromkeys(f"{self.access_bytes(i)} bytes" for i in range(len(self.access))))

    def tile_of(self, i: int) -> Layout:
        """`smem` of input i: of its elements or, where there are `words` or `bits`, of these. What is one for all of a
        vector and for threads that are alike has strides of 0: (element, (thread that is alike, others), step)."""
        if self.access[i] == 0:
            others = self.threads // self.alike
            return Layout((self.vector, (self.alike, others), self.steps), (0, (0, 1), others))
        places = 1 if self.bits(i) else self.words(i) or self.vector
        return Layout.ordered((places, self.blocks, self.steps_of(i)), (0, 1, 2))

    @property
    def reduction_buffer(self) -> Layout:
        """(column, warp down the panel, stage) -> slot of the reduction buffer; a float32 each.

        Of aligned blocks, of which each thread has a slot, a stage takes the place of the one before: that has been
        merged, and goes back to the threads through its first row alone, which is left.
        """
        columns, rows = self.column_slots, self.warps_down
        row = columns.size
        return Layout(
            (columns.shape, rows, self.stages), (columns.stride, row, row if self.aligned else row * rows)
        )

    @property
    def peers(self) -> Layout:
        """(column, CTA of the cluster, trip or reader of parts) -> slot of a state."""
        readers = self.readers if self.exchange and not self.lanes_read else 1
        senders = self.cluster_n if self.trips == 1 else self.trips
        columns = self.column_slots if self.rows_abreast == 1 else Layout(self.groups)
        return Layout((columns.shape, max(senders, readers)), (columns.stride, columns.size))

    @property
    def apart(self) -> bool:
        """Whether slots of a thread's columns lie apart where states are exchanged: threads side by side take the same
        element of their vectors at a time, and would meet the same banks.

        Elsewhere one access takes several slots, by fewer registers: 38 columns, 12 CTAs of an SM, 128 us, apart 198
        (H200, 2026-11-28; docs/experiments.md).
        """
        return self.slots > 1 and self.rows_abreast == 1 and (self.aligned or self.cluster_n > 1)

    @property
    def column_slots(self) -> Layout:
        """Column -> slot, of those before the panel's, too."""
        vectors = self.across + self.before // self.slots
        return Layout((self.slots, vectors), (vectors, 1)) if self.apart else Layout(self.slots * vectors)

    def merged_by(self, column: int) -> int:
        """The first thread that merges a column: neighbours merge slots that are neighbours."""
        return column % self.slots * self.across + column // self.slots if self.apart else column

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        held = [self.tile_of(i).cosize * self.place_bytes(i) for i in range(len(self.facts.inputs))]
        # Each begins at a boundary of 16 bytes.
        placed = sum(-(-n // ALIGNMENT) * ALIGNMENT for n in (*held, self.reduction_buffer.cosize * 4))
        return placed + self.peers.cosize * self.whole_bytes + 8 + 8 * self.trips

    @property
    def name(self) -> str:
        """A readable name. Of one math, dtypes and architecture classes that share it differ in `min_blocks` alone: two
        configurations can be filled to one layout."""
        parts = [f"{self.orientation}{self.across}x{self.down}x{self.steps}x{self.vector}"]
        if self.kept_modes > 1 or self.reduced_modes > 1:
            parts.append(f"modes{self.kept_modes}_{self.reduced_modes}")
        if self.cluster_n > 1:
            parts.append(f"cluster{self.cluster_n}")
        if self.exchange:
            parts.append("exchange")
        if self.streaming:
            parts.append(f"streaming{self.buffers}")
        if self.edges:
            parts.append("edges")
        if self.shifted:
            parts.append("aligned" if self.aligned else "shifted")
        if self.rows_abreast > 1:
            parts.append(f"rows{self.rows_abreast}")
        if any(a != self.vector for a in self.access):
            parts.append("access" + "_".join(map(str, self.access)))
        if self.alike > 1:
            parts.append(f"alike{self.alike}")
        if self.ahead:
            parts.append(f"ahead{self.ahead}_registers{self.registers}")
        if self.prologue:
            parts.append(self.prologue.name + (f"_query{self.query}" if self.query else ""))
        return "_".join(parts)
