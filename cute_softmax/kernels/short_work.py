"""What a thread of the short kernel works on: its vectors of a stretch, its rows, and where these lie in words.

All here is index arithmetic, see `common.index`.
"""

from cutlass import Boolean, Int32, Int64, Numeric, Uint32

from ..plan import WARP
from ..plan.short import BYTES, PAIR, SKEW, ShortClass
from .common.index import larger, narrow, select, smaller

SKEW_BITS = SKEW.bit_length() - 1


def in_pairs(spec: ShortClass, columns: Int32, warp_rows: Int32) -> Boolean:
    """Whether neighbouring rows are one thread's: where they begin in the middle of words every other time, and there
    is room."""
    if not spec.narrow:
        return columns < 0  # no 16-bit elements: never
    if not spec.shares_words:
        return (columns & 1) == 1
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


def place_of_element(element: Int32, vector: int, skew: Int32) -> Int32:
    """The place of an element of a stretch in shared memory, in elements."""
    bits = vector.bit_length() - 1  # a division would ask for the element's sign
    return (place_of(element >> bits, skew) << bits) | (element & (vector - 1))


def distinct_rows(first_row: Int64, rows: Int32, repeat: Int32) -> tuple[Int32, Int32]:
    """Of an operand whose rows are each that of `repeat` neighbours: the number of the first that a stretch needs,
    and of the one behind its last. first_row, rows: of the stretch."""
    first = narrow(first_row)
    return first // repeat, (first + rows - 1) // repeat + 1


def distinct_row(first_row: Int64, rows: Int32, repeat: Int32, row: Int32) -> Int32:
    """Which of these a row of the stretch has; of rows that do not exist the last."""
    first = narrow(first_row)
    return (first + smaller(row, rows - 1)) // repeat - first // repeat


def words_of_run(to: Int32, count: Int32, each: int) -> tuple[Int32, Int32]:
    """Of so many elements from one of the stretch on, how many come before the first whole word, of `each`, that is
    copied as such, and how many words are: those with as many elements around them, so that the two words of memory
    that each lies in hold nothing else."""
    head = smaller((-to & (each - 1)) + each, count)
    return head, larger(count - head - each, 0) // each


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


def byte_word_is_read(j: int, columns: Int32) -> Boolean:
    """Whether word j, counted from the one that a row of bytes begins in, can hold some of it."""
    return BYTES * j < columns + BYTES - 1


def bytes_of_word(j: int, columns: Int32) -> Uint32:
    """Which bits of word j of a row of bytes, counted from its beginning, are the row's."""
    missing = larger(smaller(BYTES * (j + 1) - columns, BYTES), 0)
    every = Uint32(0xFFFFFFFF) if isinstance(missing, Numeric) else 0xFFFFFFFF
    half = narrow(missing * 4, Uint32)
    return every >> half >> half  # twice: a shift by all 32 bits would be by none
