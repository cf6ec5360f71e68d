"""Plan class -> compiled function. The only module that imports cutlass, and only when something must be built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plan import PanelClass, RowClass
    from ..plan.matmul_backward import MatmulBackwardClass, MatmulDeltaClass
    from ..plan.matmul_class import MatmulClass


def compile_class(c: RowClass | PanelClass | MatmulClass, options: str = "") -> Any:
    """Compile the kernel of a Plan class for its architecture; needs no GPU and takes about a second.

    options: more compiler options, such as "--keep-ptx --keep-cubin".
    Returns what `cute.compile` returns: a function of (stream, the plan's arguments, the address of its scratch
    memory if it has some, address and strides of each operand), all ints.
    """
    import cutlass.cute as cute

    kernel, arguments = MOVEMENTS[c.movement](c)
    return cute.compile(
        kernel,
        cute.runtime.make_fake_stream(),
        *arguments,
        options=f"--enable-tvm-ffi --gpu-arch={c.architecture} {options}",
    )


def _row(c: RowClass) -> tuple[Any, list]:
    """The kernel of a class, and arguments of the types that it takes after the stream."""
    from cutlass import Int32, Int64

    from ..kernels.row import RowKernel

    operands = c.kept_modes - 1 + len(c.prologue.numbers) + len(c.dtypes) * (1 + c.kept_modes)
    return RowKernel(c, build_math(c)), [Int64(0), Int32(0), Int32(0), Int32(0), *[Int64(0)] * operands]


def _panel(c: PanelClass) -> tuple[Any, list]:
    from cutlass import Int32, Int64

    from ..kernels.panel.panel import PanelKernel
    from ..kernels.panel.split import SplitKernel

    modes = c.kept_modes + c.reduced_modes
    rest = modes - 2 + c.meeting + len(c.dtypes) * (1 + modes)
    return (SplitKernel if c.meeting else PanelKernel)(c, build_math(c)), [
        *[Int32(0)] * 9,
        Int64(0),
        *[Int64(0)] * rest,
    ]


def _matmul(c: MatmulClass) -> tuple[Any, list]:
    from cutlass import Float32, Int32, Int64

    from ..kernels.matmul.forward_mma import MmaKernel
    from ..kernels.matmul.forward_wgmma import MatmulKernel

    mma = c.instruction == "mma"
    return (MmaKernel if mma else MatmulKernel)(c), [
        *[Int32(0)] * (9 if mma else 11),
        Float32(0),
        Int32(0),
        *[Int64(0)] * (11 + 6 * (c.mask + bool(c.bias)) + c.lse + c.split + c.stats),
    ]


def _matmul_backward(c: MatmulBackwardClass) -> tuple[Any, list]:
    from cutlass import Float32, Int32, Int64

    from ..kernels.matmul.backward import MatmulBackwardKernel

    operands = 25 + 6 * (c.mask + bool(c.bias))
    return MatmulBackwardKernel(c), [*[Int32(0)] * 9, *[Float32(0.0)] * 2, *[Int64(0)] * operands]


def _matmul_delta(c: MatmulDeltaClass) -> tuple[Any, list]:
    from cutlass import Float32, Int32, Int64

    from ..kernels.matmul.backward_delta import MatmulDeltaKernel

    return MatmulDeltaKernel(c), [*[Int32(0)] * 6, Float32(0.0), *[Int64(0)] * (16 + 5 * c.lse_grad)]


# By the movement of a class.
MOVEMENTS = {
    "row": _row,
    "column": _panel,
    "split": _panel,
    "matmul": _matmul,
    "matmul_backward": _matmul_backward,
    "matmul_delta": _matmul_delta,
}


def build_math(c: RowClass | PanelClass) -> Any:
    """The row math of a class, with its prologue."""
    from ..kernels.common import reduce
    from ..kernels.maths import maths, prologue
    from ..plan import PanelClass

    p = c.prologue
    # A panel is shared by more threads than a row, whose additions would show in a float32.
    wide = isinstance(c, PanelClass) and c.dtypes[-1] == "fp32"
    total = reduce.COMPENSATED if wide else reduce.SUM
    # Scores that were scaled or added to may have any float32's distance from each other.
    source = "fp32" if p.scale or p.bias else c.dtypes[0]
    built = {
        "softmax": lambda: maths.Softmax(
            source, online=c.online, precise=c.precise, keep=c.keep, part=c.part, total=total
        ),
        "softmax_backward": lambda: maths.SoftmaxBackward(keep=c.keep, total=total),
        "log_softmax": lambda: maths.LogSoftmax(source, online=c.online, precise=c.precise, keep=c.keep),
        "log_softmax_backward": lambda: maths.LogSoftmaxBackward(
            precise=c.precise, masked=p.mask or p.causal, keep=c.keep, total=total
        ),
        "logsumexp": lambda: maths.LogSumExp(source, online=c.online),
        "entropy": lambda: maths.Entropy(source, online=c.online),
        "selective": lambda: maths.Selected(source, online=c.online),
        "selective_entropy": lambda: maths.SelectedEntropy(source, online=c.online),
        "amax": maths.Maximum,
        "sum": lambda: maths.Sum(total),
    }[c.math]()
    if not p:
        return built
    return (prologue.ProloguedGradient if c.math.endswith("_backward") else prologue.Prologued)(built, p)
