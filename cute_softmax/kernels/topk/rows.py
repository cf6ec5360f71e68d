"""A lane's part of a short row: which columns it has, and how they come and go."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...plan.topk import TopkClass
from ..common.copy import in_global


def columns_of(spec: TopkClass, tv: cute.Layout, tidx: Int32) -> tuple[Int32, list[int]]:
    """(column of this thread's first element, columns of all its elements relative to it)."""
    own = [spec.tv(0, value) // spec.rows for value in range(spec.elements)]
    return tv((tidx, 0)) // spec.rows, own


@cute.jit
def load_row(
    spec: cutlass.Constexpr,
    rX: cute.Tensor,
    address: Int64,
    offset: Int64,
    first: Int32,
    cX: cutlass.Constexpr[list],
    columns: Int32,
):
    """Load this thread's vectors of the row at an offset (elements) from an address, those that exist."""
    for i in cutlass.range_constexpr(spec.vectors):
        column = first + cX[i * spec.vector]
        if column < columns:
            cute.autovec_copy(_vector(spec, rX.element_type, address, offset + column), rX[None, i])


@cute.jit
def store_row(
    spec: cutlass.Constexpr,
    rX: cute.Tensor,
    address: Int64,
    offset: Int64,
    first: Int32,
    cX: cutlass.Constexpr[list],
    columns: Int32,
):
    """Store as `load_row` loads."""
    for i in cutlass.range_constexpr(spec.vectors):
        column = first + cX[i * spec.vector]
        if column < columns:
            cute.autovec_copy(rX[None, i], _vector(spec, rX.element_type, address, offset + column))


def _vector(spec: TopkClass, dtype: type, address: Int64, at: Int64) -> cute.Tensor:
    return in_global(dtype, address, at, spec.vector)
