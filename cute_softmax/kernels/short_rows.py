"""Rows in shared memory, as the short movement has them: a warp's stretch, and each thread's way to its own rows.

A row goes to registers and back in the widest pieces that all rows of its length are made of. Rows of an odd number of
16-bit elements go by words of two, of which neighbours share one; those of bytes, of a mask, by words that are shifted.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from ..plan import WARP
from ..plan.short import BYTES, CHUNK, DENSE, ShortClass
from . import short_work
from .common.copy import DTYPES, GlobalTensor, element, funnel_shift, in_shared
from .common.index import select, smaller
from .maths.maths import RowMath

WORD, HALF, BYTE = 32, 16, 8  # bits
# Words of rows that lie apart that each lane has under way at once.
TURNS = 8


@dataclass(frozen=True)
class Stretch:
    """What a thread knows of its warp's stretch.

    columns: elements of a row; a plain number where the class has one length, so that nothing is decided at run time.
    tv: the layout of that name. begin: the stretch's first element in memory; first_row: its first row. left: elements
    of it that exist; rows: that do. sX: its part of shared memory, of each full operand, None of single elements; skew:
    places left empty there, see `short_work.skew_of`; pairs: see `short_work.in_pairs`.
    sizes: of the kept modes but the slowest; numbers: of the prologue, by name.
    """

    lane: Int32
    columns: Int32
    tv: cute.Layout
    begin: Int64
    first_row: Int64
    left: Int32
    rows: Int32
    mX: list[GlobalTensor]
    sX: list[cute.Tensor | None]
    policy: Int64
    skew: Int32
    pairs: Boolean
    sizes: list[Int64]
    numbers: dict[str, Int64]


def part(vector: cute.Tensor, j: int, size: int) -> cute.Tensor:
    """The elements j .. j + size of a register vector."""
    return cute.make_tensor(vector.iterator + j, cute.make_layout(size))


class SharedRows:
    """spec, math: of the kernel."""

    def __init__(self, spec: ShortClass, math: RowMath):
        self.spec, self.math = spec, math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]

    def allocate(self, smem: cutlass.memory.SmemAllocator, warp: Int32) -> list[cute.Tensor]:
        """sX of each full operand: the warp's part of shared memory."""
        s, sX = self.spec, []
        for i in range(s.facts.full):
            if s.sources[i] == i and i not in s.placed:
                sX.append(None)
            elif s.sources[i] == i:
                layout = cute.make_layout(s.smem.shape, stride=s.smem.stride)
                of_all = smem.allocate_tensor(self.dtypes[i], layout, byte_alignment=16)
                observe("smem", of_all)
                sX.append(of_all[None, warp])
            else:
                taken = sX[s.sources[i]]
                sX.append(
                    cute.make_tensor(cute.recast_ptr(taken.iterator, dtype=self.dtypes[i]), taken.layout)
                )
        return sX

    def place(self, stretch: Stretch, i: int, place: Int32) -> cute.Tensor:
        """sX: the vector at a place of the warp's shared memory, see `short_work.place_of`."""
        V = self.spec.vector
        return self.shared_at(stretch, i, place * V, V)

    def shared_at(self, stretch: Stretch, i: int, offset: Int32, size: int) -> cute.Tensor:
        """sX: so many elements from an offset on that is a multiple of them."""
        return in_shared(self.dtypes[i], (stretch.sX[i].iterator + offset).toint(), size)

    def element_at(self, stretch: Stretch, i: int, v: Int32) -> cute.Tensor:
        """sX: this lane's element of vector v."""
        offset = short_work.place_of(v, stretch.skew) * self.spec.vector + stretch.lane
        return self.shared_at(stretch, i, offset, 1)

    def element(self, stretch: Stretch, i: int, element: Int32) -> cute.Tensor:
        """sX: an element of the stretch."""
        return self.shared_at(
            stretch, i, short_work.place_of_element(element, self.spec.vector, stretch.skew), 1
        )

    def word_at(self, stretch: Stretch, i: int, element: Int32) -> cute.Tensor:
        """sX: the word that an element of the stretch begins."""
        offset = short_work.place_of_element(element, self.spec.vector, stretch.skew)
        sX = self.shared_at(stretch, i, offset, WORD // self.dtypes[i].width)
        return cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Uint32), cute.make_layout(1))

    # Rows that lie apart, from global memory.

    @cute.jit
    def copy_run(self, stretch: Stretch, i: cutlass.Constexpr[int], start: Int64, to: Int32, count: Int32):
        """So many elements of an operand, from one on, to an element of the stretch on in shared memory: by words, but
        for the ends."""
        mX, each = stretch.mX[i], WORD // self.dtypes[i].width
        if const_expr(each == 1):
            self.copy_elements(stretch, i, start, to, count)
        else:
            head, words = short_work.words_of_run(to, count, each)
            tail = head + words * each
            # Both ends at once: there are no more elements than half the lanes.
            ends = head + count - tail
            at = stretch.lane + select(stretch.lane < head, Int32(0), tail - head)
            if stretch.lane < ends:
                sX = self.element(stretch, i, to + at)
                sX[0] = mX.element(start + at)[0]
            # Each word from the two that it lies in.
            source = mX.address + (start + head) * mX.itemsize
            shift = Int32(source & (WORD // 8 - 1)) * 8
            source = source - source % (WORD // 8)
            for first in cutlass.range(stretch.lane, words, WARP * TURNS, unroll=1):
                held = cute.make_rmem_tensor((2, TURNS), Uint32)
                for turn in cutlass.range(TURNS, unroll_full=True):
                    word = smaller(first + WARP * turn, words - 1)
                    for j in cutlass.range_constexpr(2):
                        held[j, turn] = element(Uint32, source, word + j)[0]
                for turn in cutlass.range(TURNS, unroll_full=True):
                    word = smaller(first + WARP * turn, words - 1)
                    sX = self.word_at(stretch, i, to + head + word * each)
                    sX[0] = funnel_shift(held[0, turn], held[1, turn], shift)

    @cute.jit
    def copy_elements(
        self, stretch: Stretch, i: cutlass.Constexpr[int], start: Int64, to: Int32, count: Int32
    ):
        """The same element by element."""
        for first in cutlass.range(stretch.lane, count, WARP * TURNS, unroll=1):
            # Beyond the end the last one again: behind a predicate the compiler would wait for each.
            held = cute.make_rmem_tensor(TURNS, self.dtypes[i])
            for turn in cutlass.range(TURNS, unroll_full=True):
                at = smaller(first + WARP * turn, count - 1)
                held[turn] = stretch.mX[i].element(start + at)[0]
            for turn in cutlass.range(TURNS, unroll_full=True):
                at = smaller(first + WARP * turn, count - 1)
                sX = self.element(stretch, i, to + at)
                sX[0] = held[turn]

    # Rows of a thread.

    def empty(self, i: int, rows: int) -> cute.Tensor:
        """Registers for rows of operand i, (element of a piece, piece, row)."""
        s = self.spec
        return cute.make_rmem_tensor((s.piece, s.capacity // s.piece, rows), self.dtypes[i])

    @cute.jit
    def read(self, stretch: Stretch, i: cutlass.Constexpr[int], row: Int32, turn: Int32, flat: cute.Tensor):
        """A row into registers, over padding."""
        if const_expr(self.dtypes[i].width == BYTE):
            self.read_bytes(stretch, i, row, flat)
        else:
            self.exchange(stretch, i, row, turn, flat, False)

    @cute.jit
    def exchange(
        self,
        stretch: Stretch,
        i: cutlass.Constexpr[int],
        row: Int32,
        turn: Int32,
        flat: cute.Tensor,
        write: cutlass.Constexpr[bool],
    ):
        """A row from shared memory to registers, or the opposite, in the widest pieces that rows of this length are
        made of. Those do not cross the ends of vectors.

        turn: at which the thread has it.
        """
        s = self.spec
        V, columns = s.vector, stretch.columns
        if (columns & (V - 1)) == 0:
            if const_expr(s.capacity % V == 0):
                self.pieces(stretch, i, row, flat, write, V)
        else:
            if (columns & (V // 2 - 1)) == 0:
                self.pieces(stretch, i, row, flat, write, V // 2)
            else:
                if const_expr(self.dtypes[i].width == HALF):
                    # Of rows in pairs all lanes take the same way, as the compiler knows: every other turn's row
                    # begins at a word.
                    alike = const_expr(s.lying[i] == DENSE and not s.shares_words)
                    if short_work.begins_within((turn if alike else row) * columns):
                        self.words(stretch, i, row, flat, write, 1)
                    else:
                        self.words(stretch, i, row, flat, write, 0)
                else:
                    self.pieces(stretch, i, row, flat, write, 1)

    @cute.jit
    def pieces(
        self,
        stretch: Stretch,
        i: cutlass.Constexpr[int],
        row: Int32,
        flat: cute.Tensor,
        write: cutlass.Constexpr[bool],
        size: cutlass.Constexpr[int],
    ):
        """A row of pieces of so many elements."""
        C, sure = self.spec.capacity, self.spec.sure
        for j in cutlass.range(0, sure, size, unroll_full=True):
            self.move(self.piece_at(stretch, i, row, j, size), part(flat, j, size), write)
        for j in cutlass.range(sure, C, size, unroll_full=True):
            if j < stretch.columns:
                self.move(self.piece_at(stretch, i, row, j, size), part(flat, j, size), write)

    def move(self, sX: cute.Tensor, rX: cute.Tensor, write: bool):
        """Shared memory to registers, or the opposite."""
        if write:
            cute.autovec_copy(rX, sX)
        else:
            cute.autovec_copy(sX, rX)

    def flat(self, rX: cute.Tensor) -> cute.Tensor:
        """The row as a vector."""
        return cute.make_tensor(rX.iterator, cute.make_layout(self.spec.capacity))

    def piece_at(self, stretch: Stretch, i: int, row: Int32, j: Int32, size: int) -> cute.Tensor:
        """sX: the elements j .. j + size of a row in shared memory."""
        V = self.spec.vector
        if size == V:
            v = row * (stretch.columns // V) + j // V
            return self.place(stretch, i, short_work.place_of(v, stretch.skew))
        return self.shared_at(stretch, i, row * stretch.columns + j, size)

    # Rows of 16-bit elements that begin anywhere: by words of two.

    @cute.jit
    def words(
        self,
        stretch: Stretch,
        i: cutlass.Constexpr[int],
        row: Int32,
        flat: cute.Tensor,
        write: cutlass.Constexpr[bool],
        odd: cutlass.Constexpr[int],
    ):
        """A row that begins at a word (odd: 0) or in its middle (1)."""
        C, columns = self.spec.capacity, stretch.columns
        start = self.shared_at(stretch, i, row * columns - odd, 2).iterator
        halves = cute.make_tensor(start, cute.make_layout(C + 2))
        sX = cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), cute.make_layout(C // 2 + 1))
        rX = cute.recast_tensor(flat, Uint32)
        if const_expr(write):
            self.write_words(sX, halves, rX, flat, columns, odd)
        else:
            self.read_words(sX, rX, columns, odd)

    @cute.jit
    def read_words(self, sX: cute.Tensor, rX: cute.Tensor, columns: Int32, odd: cutlass.Constexpr[int]):
        """sX: words of a row, and rX: registers for it, which have padding."""
        W, sure = self.spec.capacity // 2, self.spec.sure // 2
        nothing, held = rX[0], rX
        if const_expr(odd == 1):
            held = cute.make_rmem_tensor(W + 1, Uint32)
            held.fill(nothing)
        for j in cutlass.range(sure + odd, unroll_full=True):
            held[j] = sX[j]
        for c in cutlass.range_constexpr(sure, W, CHUNK // 2):
            end = min(c + CHUNK // 2, W)
            if 2 * end <= columns:
                for j in cutlass.range(c + odd, end + odd, unroll_full=True):
                    held[j] = sX[j]
            else:
                if 2 * c < columns:
                    for j in cutlass.range(c, end, unroll_full=True):
                        if short_work.word_is_read(j, columns, odd):
                            held[j + odd] = sX[j + odd]
                        if const_expr(odd == 0):
                            # Behind the row's last element comes another row.
                            last = (held[j] & Uint32(0xFFFF)) | (nothing & Uint32(0xFFFF0000))
                            held[j] = select(short_work.word_is_last(j, columns), last, held[j])
        if const_expr(odd == 1):
            for j in cutlass.range(W, unroll_full=True):
                rX[j] = funnel_shift(held[j], held[j + 1], Int32(HALF))

    @cute.jit
    def write_words(
        self,
        sX: cute.Tensor,
        halves: cute.Tensor,
        rX: cute.Tensor,
        flat: cute.Tensor,
        columns: Int32,
        odd: cutlass.Constexpr[int],
    ):
        """The opposite of `read_words`; of words that neighbours share, the row's half. halves: sX by the element."""
        W, sure = self.spec.capacity // 2 - odd, self.spec.sure // 2
        held = rX
        if const_expr(odd == 1):
            halves[1] = flat[0]
            held = cute.make_rmem_tensor(W, Uint32)
            for j in cutlass.range(W, unroll_full=True):
                held[j] = funnel_shift(rX[j], rX[j + 1], Int32(HALF))
        for j in cutlass.range(sure, unroll_full=True):
            sX[j + odd] = held[j]
        for c in cutlass.range_constexpr(sure, W, CHUNK // 2):
            end = min(c + CHUNK // 2, W)
            if 2 * end + odd <= columns:
                for j in cutlass.range(c, end, unroll_full=True):
                    sX[j + odd] = held[j]
            else:
                if 2 * c < columns:
                    for j in cutlass.range(c, end, unroll_full=True):
                        if short_work.word_is_written(j, columns, odd):
                            sX[j + odd] = held[j]
                        if const_expr(odd == 0):
                            last = short_work.word_is_last(j, columns)
                            if last:
                                halves[2 * j] = flat[2 * j]

    # Rows of bytes that begin anywhere: by words, shifted.

    @cute.jit
    def read_bytes(self, stretch: Stretch, i: cutlass.Constexpr[int], row: Int32, flat: cute.Tensor):
        """A row of bytes in registers, over zeros."""
        s, columns = self.spec, stretch.columns
        if (columns & (s.vector - 1)) == 0:
            if const_expr(s.capacity % s.vector == 0):
                self.pieces(stretch, i, row, flat, False, s.vector)
        else:
            start = row * columns
            rX = cute.recast_tensor(flat, Uint32)
            W = cute.size(rX)
            sX = self.shared_at(stretch, i, start & -BYTES, BYTES)
            sX = cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Uint32), cute.make_layout(W + 1))
            held = cute.make_rmem_tensor(W + 1, Uint32)
            held.fill(Uint32(0))
            sure = s.sure // BYTES
            for j in cutlass.range(sure, unroll_full=True):
                held[j] = sX[j]
            for j in cutlass.range(sure, W + 1, unroll_full=True):
                if short_work.byte_word_is_read(j, columns):
                    held[j] = sX[j]
            for j in cutlass.range(W, unroll_full=True):
                rX[j] = funnel_shift(held[j], held[j + 1], (start & (BYTES - 1)) * BYTE)
            for j in cutlass.range(sure, W, unroll_full=True):
                rX[j] = rX[j] & Uint32(short_work.bytes_of_word(j, columns))
