"""Columns off a vector boundary: aligned blocks of memory are copied, and what they hold is shifted into place.

Rows of memory of an odd length begin anywhere. A *line* is what threads of a warp that stand side by side over a panel
hold of one such row: a vector each. It is copied in aligned blocks of a vector's size, one a lane and `extra` ones at
its end; each lane then takes its vector out of two of them and puts it where its own block was:

    blocks     | . . . a b c d e | f g h i j k l m | n o p . . . . . |
    vectors          | a b c d e   f g h | i j k l m   n o p |               shift = 3

From there on nothing differs, until results are stored. They are shifted back into blocks, each with the elements that
it has of the lane before. A line shares its last vector with the next line's first: so of every block there is a line
that has all elements, and stores it in one access. Only where memory's own rows begin and end are there scalars.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ..common.copy import funnel_shift, load_async, store, vector_of, words_of
from ..common.index import narrow, select, smaller
from ..common.reduce import WARP
from .blocks import BlockChunks
from .work import Chunk, Item, Launch, Line, left, places

# Vectors whose blocks a thread holds at a time while it shifts them.
AT_ONCE = 4


def funnel(low: list, high: list, shift: Int32, bits: int, left: bool = False) -> list:
    """The vector out of two neighbouring ones, in words, that begins `shift` elements of so many bits behind the first
    or, to the left, before the second; by less than a vector."""
    n, each = len(low), 32 // bits
    words, step = [*low, *high], n // 2
    if left:
        words.reverse()
    while step:
        far = (shift & (step * each)) != 0
        words = [select(far, b, a) for a, b in zip(words, words[step:], strict=False)]
        step //= 2
    words = words[: n + 1]
    if left:
        words.reverse()
    if each == 1:
        return words[1:] if left else words[:n]
    return [funnel_shift(words[j], words[j + 1], (shift & 1) * bits, left) for j in range(n)]


def shift_of(launch: Launch, i: int, place: Int64, blocks: int) -> Int32:
    """Elements of operand i from a boundary of so many blocks to where a line begins. place: of this thread's
    vector."""
    itemsize, vector = launch.mX[i].itemsize, launch.spec.vector
    start = narrow(place & (blocks * vector * itemsize - 1)) // itemsize - launch.lane * vector
    return start & (blocks * vector - 1)


def shifts_of(launch: Launch, i: int, vectors: list[Int64]) -> list[Int32]:
    """Elements from the boundary of a block to each of a thread's vectors, at these places. They are all alike where so
    many rows lie between them that these make up whole blocks."""
    s = launch.spec
    if s.reduced_modes == 1 and s.down % s.vector == 0:
        return [shift_of(launch, i, vectors[0], 1)] * len(vectors)
    return [shift_of(launch, i, place, 1) for place in vectors]


def beyond(chunk: Chunk, shift: Int32, line: int) -> tuple[Int32, Int32]:
    """Elements that are wanted from a lane's block on, and from the one on that it fills behind the line's so many.
    What follows memory's row may lie outside the tensor."""
    own = chunk.wanted + shift
    return own, own - line


def holds_own(launch: Launch, shift: Int32, own: Int32) -> Boolean:
    """Whether a lane's block holds elements that are wanted."""
    return ((launch.lane + 1) * launch.spec.vector > shift) & (own > 0)


def holds_behind(launch: Launch, shift: Int32, behind: Int32) -> Boolean:
    """Whether the block that a lane fills behind the line does."""
    return (launch.lane * launch.spec.vector < shift) & (behind > 0)


def stores(item: Item, shift: Int32, exists: Boolean) -> tuple[Boolean, Boolean]:
    """(whether a lane stores the block that its vector begins in, `shift` elements before it; whether all of the block
    are groups)."""
    launch, line, vector = item.launch, item.line, item.launch.spec.vector
    # The line's last block is the next line's first if it begins there, and so is the panel's last the next one's.
    ours = exists & ((launch.lane > 0) | (shift == 0) | (line.column == 0))
    ours = ours & ((line.alone & (launch.lane < launch.spec.lanes - 1)) | (shift > 0))
    return ours, (shift <= line.column) & (vector - shift <= line.beside)


def is_group(line: Line, shift: Int32, v: int) -> Boolean:
    """Whether element v of such a block is a group."""
    return (shift <= line.column + v) & (v < line.beside + shift)


class ShiftedChunks(BlockChunks):
    """Chunks of columns that begin off a vector boundary."""

    @cute.jit
    def copy(self, launch: Launch, chunk: Chunk, base: Int32, policy: Int64):
        """Copy the blocks that hold something of a chunk. What does not exist stays as it is."""
        s = self.spec
        for i in self.words:
            self.fetch_words(launch, chunk, i, base)
        for i in self.vectors:
            itemsize = launch.mX[i].itemsize
            vectors = places(launch, i, chunk.starts[i], chunk.at)
            # Behind the line's, of which this lane fills one.
            behind_sX = launch.shared.sX[i][None, launch.own + s.lanes, None]
            for k in cutlass.range_constexpr(s.chunk_steps):
                shift = shift_of(launch, i, vectors[k], s.extra)
                exists = chunk.rest > k * s.down  # lanes without groups have blocks of the last vector
                own, behind = beyond(chunk, shift, s.lanes * s.vector)
                block = vectors[k] - shift * itemsize
                if exists & holds_own(launch, shift, own):
                    self.fetch_block(launch, i, block, launch.shared.tXsX[i][None, base + k], own, policy)
                if exists & holds_behind(launch, shift, behind):
                    block += s.lanes * s.vector * itemsize
                    self.fetch_block(launch, i, block, behind_sX[None, base + k], behind, policy)

    def fetch_block(
        self, launch: Launch, i: int, address: Int64, tXsX: cute.Tensor, exist: Int32, policy: Int64
    ):
        """Load the block at an address, of which so many elements exist or more."""
        s, itemsize = self.spec, launch.mX[i].itemsize
        exist = smaller(exist * itemsize, s.vector * itemsize)
        load_async(self.vector(launch, i, address), tXsX, s.access[i], policy, s.prefetches, exist)

    @cute.jit
    def align(self, item: Item, at: Int32, base: Int32):
        """Shift this thread's vectors of the chunk that begins at element `at` into its blocks, padding what does not
        exist, when its warp's copies have come."""
        s, launch, rest = self.spec, item.launch, left(item, at)
        # A copy that a thread has waited for is seen by its warp from here on.
        cute.arch.sync_warp()
        for i in self.vectors:
            dtype = launch.mX[i].dtype
            padded = words_of(self.padding(launch, i))
            vectors = places(launch, i, item.starts[i], at)
            shifts = shifts_of(launch, i, vectors)
            for first in cutlass.range_constexpr(0, s.chunk_steps, AT_ONCE):
                steps, found = range(first, min(first + AT_ONCE, s.chunk_steps)), []
                for k in steps:
                    shift = shift_of(launch, i, vectors[k], s.extra)
                    block = launch.own + shift // s.vector
                    low, high = (self.block(launch, i, n, base + k) for n in (block, block + 1))
                    found.append(funnel(low, high, shifts[k], dtype.width))
                # All have read before one writes.
                cute.arch.sync_warp()
                for k, words in zip(steps, found, strict=True):
                    exists = rest > k * s.down
                    # Not a branch: between two the compiler would schedule what one vector needs, and no other.
                    words = [select(exists, w, none) for w, none in zip(words, padded, strict=True)]
                    cute.autovec_copy(vector_of(words, dtype), launch.shared.tXsX[i][None, base + k])

    def block(self, launch: Launch, i: int, block: Int32, step: Int32) -> list[Uint32]:
        """The words of a block in shared memory."""
        held = cute.make_rmem_tensor(self.spec.vector, launch.mX[i].dtype)
        cute.autovec_copy(launch.shared.sX[i][None, block, step], held)
        return words_of(held)

    def finish_blocks(self, item: Item, at: Int32, where: Int32, states: list, ends: bool):
        """Each lane stores the block that its vector begins in, with what it gets of the lane before."""
        s, launch, line, i = self.spec, item.launch, item.line, len(self.inputs)
        rest, mY = left(item, at), launch.mX[i]
        vectors = places(launch, i, item.starts[i], at)
        shifts = shifts_of(launch, i, vectors)
        segment = (WARP - s.lanes) << 8
        for k in range(s.chunk_steps):
            tXrY, shift = self.results(item, k, at, where, states), shifts[k]
            own = words_of(tXrY)
            before = [cute.arch.shuffle_sync_up(word, 1, mask_and_clamp=segment) for word in own]
            block = vector_of(funnel(before, own, shift, mY.dtype.width, left=True), mY.dtype)
            ours, whole = stores(item, shift, rest > k * s.down)
            address = vectors[k] - shift * mY.itemsize
            store(block, self.vector(launch, i, address), self.hint(launch, block), ours & whole)
            if ends:
                split = ours & (whole == 0)
                there = lambda v, split=split, shift=shift: split & is_group(line, shift, v)  # noqa: E731
                self.store_scalars(address, block, there)
