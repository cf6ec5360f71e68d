"""A lane's part of a short row: which columns it has, and how they come and go."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...plan.topk import TopkClass
from ..common.copy import global_pointer


def columns_of(spec: TopkClass, tv: cute.Layout, tidx: Int32) -> tuple[Int32, list[int]]:
    """(column of this thread's first element, columns of all its elements relative to it)."""
    own = [spec.tv(0, value) // spec.rows for value in range(spec.elements)]
    return tv((tidx, 0)) // spec.rows, own


def lane_tensor(spec: TopkClass, dtype: type, address: Int64, at: Int64, cX: list[int]) -> cute.Tensor:
    """(element, vector) -> a thread's elements in global memory, of a row that is there whole; at: of the first one, in
    elements from an address on. cX: see `columns_of`."""
    step = cX[spec.vector] if spec.vectors > 1 else 0
    pointer = global_pointer(dtype, address, at, spec.vector * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((spec.vector, spec.vectors), stride=(1, step)))


def across_vectors(spec: TopkClass, rX: cute.Tensor, cX: list[int]) -> tuple[cute.Tensor, list[int]]:
    """(a thread's elements, their columns) in the order in which they are sorted: the first word of each vector, of the
    last vector first, then their second words.

    So the vector that is loaded last is needed first. Sorted vector by vector, the compiler put off loads until the
    vectors before had been sorted, and a lane waited for memory several times.
    """
    word = 32 // rX.element_type.width
    if spec.vector % word:  # words of two vectors
        return rX, cX
    begin = (spec.vectors - 1) * spec.vector
    order = cute.make_layout((word, spec.vectors, spec.vector // word), stride=(1, -spec.vector, word))
    return cute.make_tensor(rX.iterator + begin, order), [cX[begin + order(i)] for i in range(spec.elements)]


@cute.jit
def load_row(
    spec: cutlass.Constexpr,
    gX: cute.Tensor,
    rX: cute.Tensor,
    first: Int32,
    cX: cutlass.Constexpr[list],
    columns: Int32,
):
    """Load this thread's vectors that exist; -inf for those that do not."""
    rX.fill(-float("inf"))
    for i in cutlass.range_constexpr(spec.vectors):
        if first + cX[i * spec.vector] < columns:
            cute.autovec_copy(gX[None, i], rX[None, i])


@cute.jit
def store_row(
    spec: cutlass.Constexpr,
    rX: cute.Tensor,
    gX: cute.Tensor,
    first: Int32,
    cX: cutlass.Constexpr[list],
    columns: Int32,
):
    """Store as `load_row` loads."""
    for i in cutlass.range_constexpr(spec.vectors):
        if first + cX[i * spec.vector] < columns:
            cute.autovec_copy(rX[None, i], gX[None, i])
