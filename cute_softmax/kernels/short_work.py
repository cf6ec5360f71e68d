"""What a thread of the short kernel works on: its vectors of a stretch, its rows, and where these lie in words.

All here is index arithmetic, see `common.index`.
"""

from cutlass import Boolean, Int32, Int64

from ..plan import WARP
from ..plan.short import PAIR, SKEW, ShortClass
from .common.index import larger, narrow, select, smaller

SKEW_BITS = SKEW.bit_length() - 1


def in_pairs(spec: ShortClass, columns: Int32, warp_rows: Int32) -> Boolean:
    """Whether neighbouring rows are one thread's: where they begin in the middle of words every other time."""
    if not spec.narrow:
        return columns < 0  # no 16-bit elements: never
    return ((columns & 1) == 1) & ((warp_rows & (WARP * PAIR - 1)) == 0)


def row_of(lane: Int32, turn: Int32, pairs: Boolean) -> Int32:
    """The row of a lane at its turn, in the warp's stretch: the lanes of a warp have neighbouring rows, or every other
    one of twice as many."""
    alone = turn * WARP + lane
    paired = (turn & -PAIR) * WARP + lane * PAIR + (turn & (PAIR - 1))
    return select(pairs, paired, alone)


def elements_left(rows: Int64, columns: Int32, stretch: Int64, warp_rows: Int32) -> Int32:
    """Elements of a warp's stretch that exist."""
    left = larger(smaller(rows - stretch * warp_rows, warp_rows), 0)
    return narrow(left) * columns


def skew_of(columns: Int32, vector: int) -> Int32:
    """Places left empty behind `SKEW` vectors: 1 where rows are an even number of vectors, which would lie in the same
    banks, else 0."""
    return 1 - smaller(columns & (2 * vector - 1), 1)


def place_of(v: Int32, skew: Int32) -> Int32:
    """The place of vector v of a stretch in shared memory, in vectors."""
    return v + (v >> SKEW_BITS) * skew


def place_of_step(lane: Int32, step: int, skew: Int32) -> Int32:
    """The same of a lane's vector of a step."""
    return place_of(lane, skew) + (WARP + (WARP >> SKEW_BITS) * skew) * step


def begins_within(start: Int32) -> Boolean:
    """Whether a row of 16-bit elements that begins at this one begins in the middle of a word."""
    return (start & 1) == 1


def word_is_read(j: int, columns: Int32, odd: int) -> Boolean:
    """Whether word j + odd holds elements of a row of 16-bit elements that begins in word 0, `odd` past its beginning,
    and that the word before does not hold."""
    return 2 * j + odd < columns


def word_is_last(j: int, columns: Int32) -> Boolean:
    """Whether of the elements 2 * j and 2 * j + 1 the first is the row's last."""
    return 2 * j + 1 == columns


def word_is_written(j: int, columns: Int32, odd: int) -> Boolean:
    """Whether all of word j + odd is the row's."""
    return 2 * j + 1 + odd < columns
