"""Columns off a vector boundary: aligned blocks of memory are copied, and what they hold is shifted into place.

Rows of memory of an odd length begin anywhere. A *line* is what threads of a warp that stand side by side over a panel
hold of one such row: a vector each. It is copied in aligned blocks of a vector's size, one a lane and `extra` ones at
its end; each lane then takes its vector out of two of them and puts it where its own block was:

    blocks     | . . . a b c d e | f g h i j k l m | n o p . . . . . |
    vectors          | a b c d e   f g h | i j k l m   n o p |               shift = 3

From there on nothing differs, until results are stored. They are shifted back into blocks, each with the elements that
it has of the lane before. A line shares its last vector with the next line's first: so of every block there is a line
that has all elements, and stores it in one access. Only where memory's own rows begin and end are there scalars.

Names as in `panel`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ..common import reduce
from ..common.copy import apart, global_pointer, load_async, store, vector_of, words_of

# Vectors whose blocks a thread holds at a time while it shifts them.
AT_ONCE = 4


def _pair(low: Uint32, high: Uint32, bits: Int32, left: bool) -> Uint32:
    """Shift the low one's bits out of two words: 32 of them, `bits` behind the first or, to the left, before the
    high one's."""
    return cute.arch.inline_ptx(
        f"shf.{'l' if left else 'r'}.wrap.b32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
        write_only_types=[Uint32],
        read_only_args=[low, high, bits],
    )


def funnel(low: list, high: list, shift: Int32, bits: int, left: bool = False) -> list:
    """The vector out of two neighbouring ones, in words, that begins `shift` elements of so many bits behind the first
    or, to the left, before the second; by less than a vector."""
    n, each = len(low), 32 // bits
    words, step = [*low, *high], n // 2
    if left:
        words.reverse()
    while step:
        far = (shift & (step * each)) != 0
        words = [Uint32(cutlass.select_(far, b, a)) for a, b in zip(words, words[step:], strict=False)]
        step //= 2
    words = words[: n + 1]
    if left:
        words.reverse()
    if each == 1:
        return words[1:] if left else words[:n]
    return [_pair(words[j], words[j + 1], (shift & 1) * bits, left) for j in range(n)]


class Shifted:
    """What `PanelKernel` does where `spec.shifted`."""

    def slots_of_line(self, tidx: Int32, sX: list) -> dict:
        """`sX`: per input, this thread's slots in shared memory; `blocks`: all of them; `own`: which is this thread's,
        and `lane`: which it is of its line."""
        s = self.spec
        lane, own = tidx % s.lanes, s.block(tidx)
        return {"sX": [x[None, own, None] for x in sX], "blocks": sX, "own": own, "lane": lane}

    def line_of(self, launch, tile: Int32) -> tuple[list, dict]:
        """The coordinates of this thread's first group in the kept modes, the fastest first; and of the
        fastest `column`, that group, `beside`, how many there are from it on, and `ends`, whether memory's rows begin
        or end in the panel."""
        s = self.spec
        abreast = launch.kept_sizes[0] if s.kept_modes > 1 else launch.groups
        panels = cute.ceil_div(abreast, s.advance)
        first = tile % panels * s.advance
        column = first + s.column(launch.a)
        outer = apart(tile // panels, launch.kept_sizes[1:]) if s.kept_modes > 1 else []
        ends = (first == 0) | (first + s.columns > abreast)
        return [column, *outer], {"column": column, "beside": abreast - column, "ends": ends}

    def shift(self, this, i: int, place: Int64, blocks: int) -> Int32:
        """Elements of tensor i from a boundary of so many blocks to where this line begins. place: of this thread's
        vector."""
        size, vector = self.dtypes[i].width // 8, self.spec.vector
        start = Int32(place & (blocks * vector * size - 1)) // size - this.lane * vector
        return start & (blocks * vector - 1)

    def shifts(self, this, i: int, places: list) -> list:
        """Elements from the boundary of a block to each of this thread's vectors. They are all alike where so many rows
        lie between them that these make up whole blocks."""
        s = self.spec
        if s.reduced_modes == 1 and s.down % s.vector == 0:
            return [self.shift(this, i, places[0], 1)] * len(places)
        return [self.shift(this, i, place, 1) for place in places]

    @cute.jit
    def fetch_blocks(
        self, this, starts: list, at: Int32, left: Int32, beside: Int32, base: Int32, policy: Int64
    ):
        """Load the blocks that hold something of a chunk, see `PanelKernel.fetch`. What lies outside stays as it
        is."""
        s = self.spec
        for i in self.inputs:
            size = self.dtypes[i].width // 8
            places = self.places(this, i, starts[i], at)
            # Behind the line's, of which this lane fills one.
            sX = this.blocks[i][None, this.own + s.lanes, None]
            for k in cutlass.range_constexpr(s.chunk_steps):
                shift = self.shift(this, i, places[k], s.extra)
                exists = left > k * s.down
                # Of memory's row from this lane's block on, and from that behind the line on. What follows the row may
                # lie outside the tensor.
                own, behind = beside + shift, beside + shift - s.lanes * s.vector
                block = places[k] - shift * size
                if exists & ((this.lane + 1) * s.vector > shift) & (own > 0):
                    self.fetch_block(i, block, this.sX[i][None, base + k], own * size, policy)
                if exists & (this.lane * s.vector < shift) & (behind > 0):
                    block += s.lanes * s.vector * size
                    self.fetch_block(i, block, sX[None, base + k], behind * size, policy)

    def fetch_block(self, i: int, address: Int64, slot: cute.Tensor, exist: Int32, policy: Int64):
        """Load the block at an address, of which so many bytes exist or more."""
        s = self.spec
        exist = cutlass.min(exist, s.vector * self.dtypes[i].width // 8)
        load_async(self.vector(i, address), slot, s.access[i], policy, s.prefetches, exist)

    def align(self, this, at: Int32, base: Int32):
        """Put this thread's vectors of the chunk that begins at element `at` into its slots, padding where there are
        none, when its warp's copies have come; nothing where they are there."""
        if self.spec.shifted:
            self.align_blocks(this, at, base)

    @cute.jit
    def align_blocks(self, this, at: Int32, base: Int32):
        s, left = self.spec, self.left(this, at)
        # A copy that a thread has waited for is seen by its warp from here on.
        cute.arch.sync_warp()
        for i in self.inputs:
            dtype = self.dtypes[i]
            padded = words_of(self.padding(i))
            places = self.places(this, i, this.starts[i], at)
            shifts = self.shifts(this, i, places)
            for first in cutlass.range_constexpr(0, s.chunk_steps, AT_ONCE):
                steps, found = range(first, min(first + AT_ONCE, s.chunk_steps)), []
                for k in steps:
                    shift = self.shift(this, i, places[k], s.extra)
                    slot = this.own + shift // s.vector
                    low, high = (self.block(this, i, n, base + k) for n in (slot, slot + 1))
                    found.append(funnel(low, high, shifts[k], dtype.width))
                # All have read before one writes.
                cute.arch.sync_warp()
                for k, words in zip(steps, found, strict=True):
                    exists = left > k * s.down
                    # Not a branch: between two the compiler would schedule what one vector needs, and no other.
                    words = [
                        Uint32(cutlass.select_(exists, w, none))
                        for w, none in zip(words, padded, strict=True)
                    ]
                    cute.autovec_copy(vector_of(words, dtype), this.sX[i][None, base + k])

    def block(self, this, i: int, slot: Int32, step: Int32) -> list:
        """The words of a block in shared memory."""
        held = cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
        cute.autovec_copy(this.blocks[i][None, slot, step], held)
        return words_of(held)

    def finish_blocks(self, this, at: Int32, base: Int32, states: list, ends: bool):
        """Compute and store the results of a chunk, see `PanelKernel.finish`; with scalars where memory's rows end.

        Each lane stores the block that its vector begins in, with what it gets of the lane before.
        """
        s, left, i = self.spec, self.left(this, at), len(self.math.inputs)
        dtype = self.dtypes[i]
        places = self.places(this, i, this.starts[i], at)
        shifts = self.shifts(this, i, places)
        segment = (reduce.WARP - s.lanes) << 8
        for k in range(s.chunk_steps):
            rounded, shift = self.results(this, k, base, states), shifts[k]
            own = words_of(rounded)
            before = [cute.arch.shuffle_sync_up(word, 1, mask_and_clamp=segment) for word in own]
            block = vector_of(funnel(before, own, shift, dtype.width, left=True), dtype)
            # The line's last block is the next line's first if it begins there.
            ours = (left > k * s.down) & ((this.lane > 0) | (shift == 0) | (this.column == 0))
            ours = ours & ((this.lane < s.lanes - 1) | (shift > 0))
            whole = (shift <= this.column) & (s.vector - shift <= this.beside)
            address = places[k] - shift * (dtype.width // 8)
            store(block, self.vector(i, address), self.hint(this, block), ours & whole)
            if ends:
                self.store_scalars(this, address, block, shift, ours & (whole == 0))

    def store_scalars(self, this, address: Int64, block: cute.Tensor, shift: Int32, exists: Boolean):
        """Store those elements of a block at an address, `shift` before this thread's first group, that are groups."""
        dtype = block.element_type
        for v in range(self.spec.vector):
            scalar = cute.make_rmem_tensor(1, dtype)
            scalar[0] = block[v]
            there = (shift <= this.column + v) & (v < this.beside + shift)
            place = global_pointer(dtype, address + v * (dtype.width // 8), Int64(0), dtype.width // 8)
            store(scalar, cute.make_tensor(place, cute.make_layout(1)), None, exists & there)
