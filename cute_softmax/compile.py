"""Plan class -> compiled function. The only module that imports cutlass, and only when something must be built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import RowClass


def compile_class(row_class: RowClass, options: str = "") -> Any:
    """Compile the kernel of a Plan class for its architecture; needs no GPU and takes about a second.

    options: more compiler options, such as "--keep-ptx --keep-cubin".
    Returns what `cute.compile` returns: a function of (stream, rows, columns, ctas, reads, address and row
    stride of each operand), all ints.
    """
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    from .kernels import row

    operands = [Int64(0)] * (2 * len(row_class.dtypes))
    return cute.compile(
        row.RowKernel(row_class, build_math(row_class)),
        cute.runtime.make_fake_stream(),
        Int64(0),
        Int32(0),
        Int32(0),
        Int32(0),
        *operands,
        options=f"--enable-tvm-ffi --gpu-arch={row_class.architecture} {options}",
    )


def build_math(row_class: RowClass) -> Any:
    """The row math of a class."""
    from .kernels import maths

    if row_class.math == "softmax":
        return maths.Softmax(
            online=row_class.online, precise=row_class.precise, keep=row_class.keep, part=row_class.part
        )
    return maths.SoftmaxBackward(keep=row_class.keep)
