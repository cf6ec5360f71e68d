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
