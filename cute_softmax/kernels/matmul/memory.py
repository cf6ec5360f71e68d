"""Elements of memory by their addresses."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...plan.matmul_class import MatmulClass
from ..common.copy import DTYPES, element, in_global
from ..common.index import dot


def get(address: Int64, at: Int64) -> Float32:
    """Element `at` of float32 numbers in global memory."""
    return element(Float32, address, at)[0]


def put(dtype: type, address: Int64, at: Int64, numbers: cute.Tensor, first: int, count: int):
    """Store `count` of a thread's numbers side by side in global memory, element `at` on."""
    held = cute.make_tensor(numbers.iterator + first, cute.make_layout(count))
    cute.autovec_copy(held, in_global(dtype, address, at, count))


@cute.jit
def put_if(
    condition: Boolean,
    dtype: cutlass.Constexpr,
    address: Int64,
    at: Int64,
    numbers: cute.Tensor,
    first: cutlass.Constexpr[int],
    count: cutlass.Constexpr[int],
):
    """`put` where a condition holds."""
    if condition:
        put(dtype, address, at, numbers, first, count)


def sink_of(spec: MatmulClass, operand: tuple, row: Int32, modes: tuple, rows: Int32) -> Float32:
    """The sink (address, strides) of one of so many rows; beyond them the last one's."""
    return nearest(DTYPES[spec.sink], operand, row, Int32(0), modes, (rows, 1)).to(Float32)


def nearest(dtype: type, operand: tuple, row: Int32, column: Int32, modes: tuple, limits: tuple):
    """An element of a mask or a bias (address, strides); beyond the rows and columns in `limits` the last one."""
    address, *strides = operand
    at = [cutlass.min(row, limits[0] - 1), cutlass.min(column, limits[1] - 1), *modes]
    return element(dtype, address, dot(at, strides))[0]
