"""Index arithmetic that is the same for values of the DSL, while a kernel is traced, and for plain numbers.

So tests run the kernels' own arithmetic, on ints or on arrays of them, beside a map of who touches what.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Numeric, Uint32


def select(which: Boolean, yes: Numeric, no: Numeric) -> Numeric:
    """One of two numbers of the first one's type, without a branch."""
    if isinstance(which, Boolean):
        return type(yes)(cutlass.select_(which, yes, no))
    if isinstance(which, bool):
        return yes if which else no
    return no + (yes - no) * which


def smaller(a: Numeric, b: Numeric) -> Numeric:
    """The smaller of two numbers."""
    if isinstance(a, Numeric) or isinstance(b, Numeric):
        return cutlass.min(a, b)
    return select(a < b, a, b)


def larger(a: Numeric, b: Numeric) -> Numeric:
    """The larger of two numbers."""
    if isinstance(a, Numeric) or isinstance(b, Numeric):
        return cutlass.max(a, b)
    return select(a > b, a, b)


def ceil_div(a: Numeric, b: Numeric) -> Numeric:
    """a / b, rounded up."""
    if isinstance(a, Numeric) or isinstance(b, Numeric):
        return cute.ceil_div(a, b)
    return -(-a // b)


def divisor(number: Int32) -> Numeric:
    """What `divided` divides by, made on the host: it finds the reciprocal, with which a division takes a kernel 5
    instructions instead of 20."""
    return cute.fast_divmod_create_divisor_v2(number) if isinstance(number, Numeric) else number


def divided(number: Int32, by: Numeric) -> tuple[Int32, Int32]:
    """Quotient and remainder of a number from 0 on."""
    quotient, remainder = divmod(number, by)
    return type(number)(quotient), type(number)(remainder)


def wide(number: Int32) -> Int64:
    """A number in 64 bits."""
    return Int64(number) if isinstance(number, Numeric) else number


def narrow(number: Int64, dtype: type = Int32) -> Numeric:
    """A number in 32 bits."""
    return dtype(number) if isinstance(number, Numeric) else number


def apart(index: Numeric, sizes: list) -> list:
    """The coordinates of an index in modes of these sizes, the fastest first; the slowest has no size."""
    found = []
    for size in sizes:
        found.append(index % size)
        index = index // size
    return [*found, index]


def of_row(index: Int64, sizes: list[Int64], prologue: bool) -> list[Int64]:
    """A row's index in each kept mode, the slowest first. sizes: of all modes but that one.

    prologue: whether there is one. Plans with one have no more rows than 32 bits count, where there are several modes:
    64-bit divisions would cost as much as a short row.
    """
    if prologue and sizes:
        return apart(narrow(index, Uint32), [narrow(size, Uint32) for size in sizes[::-1]])[::-1]
    return apart(index, sizes[::-1])[::-1]


def reach_of(position: Int64, offset: Int64, columns: Int32) -> Int32:
    """How many elements of a row at this position count, before the diagonal."""
    return narrow(larger(smaller(position + offset + 1, columns), 0))


def dot(coordinates: list, strides: list) -> Int64:
    """The offset of coordinates, in 64 bits."""
    total = 0
    for coordinate, stride in zip(coordinates, strides, strict=True):
        total += wide(coordinate) * stride
    return total


def head_of(first: Int64, grain: int, length: Int32) -> Int32:
    """How many elements of a row come before the first that lies at a multiple of `grain`, a power of two. first: where
    the row begins, in elements."""
    misaligned = narrow(first & (grain - 1))
    return smaller((grain - misaligned) & (grain - 1), length)


def at_edges(slot: Int32, head: Int32, tail: Int32, most: int, length: Int32) -> tuple[Int32, Boolean]:
    """Which element of a row the scalar of this slot at its edges is, and whether there is one: first come those of the
    head and, behind the `most` that it can have, those of the tail, which begins at element `tail`."""
    after = slot - most
    in_head = slot < head
    in_tail = (after >= 0) & (tail + after < length)
    return select(in_head, slot, tail + after), in_head | in_tail
