"""Plan class -> compiled function. The only module that imports cutlass, and only when something must be built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plan import PanelClass, RowClass, SweepClass
    from ..plan.base import ClassBase


def compile_class(c: ClassBase, options: str = "") -> Any:
    """Compile the kernel of a Plan class for its architecture; needs no GPU and takes about a second.

    options: more compiler options, such as "--keep-ptx --keep-cubin".
    Returns what `cute.compile` returns: a function of the stream and of what `c.signature` says.
    """
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64

    from .frames import with_room

    types = {"i": Int32, "l": Int64, "f": Float32}
    return with_room(
        cute.compile,
        kernel_of(c),
        cute.runtime.make_fake_stream(),
        *(types[letter](0) for letter in c.signature),
        options=f"--enable-tvm-ffi --gpu-arch={c.architecture} {options}",
    )


def kernel_of(c: ClassBase) -> Any:
    """The kernel of a Plan class."""
    if c.movement == "row":
        from ..kernels.row import RowKernel
        from ..kernels.row_ring import RingKernel

        return (RingKernel if c.ring else RowKernel)(c, build_math(c))
    if c.movement == "stream":
        from ..kernels.row_stream import StreamKernel

        return StreamKernel(c, build_math(c))
    if c.movement == "short":
        from ..kernels.short import ShortKernel

        return ShortKernel(c, build_math(c))
    if c.movement in ("column", "split"):
        from ..kernels.panel.panel import PanelKernel

        return PanelKernel(c, build_math(c))
    if c.movement == "sweep":
        from ..kernels.sweep import SweepKernel

        return SweepKernel(c, build_math(c))
    if c.movement == "rescale":
        from ..kernels.rescale import RescaleKernel

        return RescaleKernel(c)
    if c.movement == "mean":
        from ..kernels.mean import MeanKernel

        return MeanKernel(c)
    if c.movement == "merge":
        from ..kernels.shards.merge import MergeKernel

        return MergeKernel(c)
    if c.movement == "slice":
        from ..kernels.shards.slice import SliceKernel

        return SliceKernel(c)
    if c.movement == "matmul":
        from ..kernels.matmul.forward_mma import MmaKernel
        from ..kernels.matmul.forward_wgmma import MatmulKernel

        return (MmaKernel if c.instruction == "mma" else MatmulKernel)(c)
    if c.movement == "matmul_backward":
        from ..kernels.matmul.backward import MatmulBackwardKernel

        return MatmulBackwardKernel(c)
    if c.movement == "topk":
        from ..kernels.topk.backward import TopkBackwardKernel
        from ..kernels.topk.forward import TopkKernel

        return (TopkKernel if c.forward else TopkBackwardKernel)(c)
    if c.movement == "topk_long":
        from ..kernels.topk.held import HeldTopkKernel
        from ..kernels.topk.long import LongTopkKernel

        return (HeldTopkKernel if c.held else LongTopkKernel)(c)
    from ..kernels.matmul.backward_delta import MatmulDeltaKernel

    return MatmulDeltaKernel(c)


def build_math(c: RowClass | PanelClass | SweepClass) -> Any:
    """The row math of a class, with its prologue."""
    from ..kernels.common import reduce
    from ..kernels.maths import divergence, entropy, maths, prologue
    from ..plan import PanelClass, SweepClass

    p = c.prologue
    if p.against:
        # Scores that are scaled may have any float32's distance from each other.
        sources = ("fp32", "fp32") if p.scale else c.dtypes[:2]
        return divergence.divergence(p, sources, online=c.online, precise=c.precise, part=c.part)
    # Where a few terms are all of a sum, every addition between lanes rounds most of it, which shows in a float32: rows
    # summed to 1 within 2.7 ulp in a simulation of 20,000, and within 1.5 where lanes round once. The other sums are
    # worth that in columns and parts alone, of which more threads share one.
    of_softmax = reduce.COMPENSATED if c.precise else reduce.SUM
    total = of_softmax if isinstance(c, PanelClass | SweepClass) else reduce.SUM
    # Scores that were scaled or added to may have any float32's distance from each other, and from a sink.
    source = "fp32" if p.scale or p.bias or p.sink else c.dtypes[0]
    # The exponentials of log_softmax, for the same sum; the others are as good, and cheaper where no score is near.
    logs = (maths.Precise() if c.dtypes[0] == "fp32" else maths.Near()) if c.logs else None
    built = {
        "softmax": lambda: maths.Softmax(
            source, online=c.online, precise=c.precise, keep=c.keep, part=c.part, total=of_softmax
        ),
        "softmax_backward": lambda: maths.SoftmaxBackward(keep=c.keep, total=total),
        "log_softmax": lambda: maths.LogSoftmax(source, online=c.online, precise=c.precise, keep=c.keep),
        "log_softmax_backward": lambda: maths.LogSoftmaxBackward(
            precise=c.precise, masked=p.mask or p.causal, keep=c.keep, total=total
        ),
        "logsumexp": lambda: maths.LogSumExp(source, online=c.online, part=c.part, exp=logs),
        "entropy": lambda: entropy.Entropy(source, online=c.online, part=c.part),
        "selective": lambda: entropy.Selected(source, online=c.online, part=c.part, exp=logs),
        "selective_entropy": lambda: entropy.SelectedEntropy(source, online=c.online, part=c.part),
        "amax": maths.Maximum,
        "sum": lambda: maths.Sum(total),
    }[c.math]()
    if not p:
        return built
    if p.target == "loss":
        return prologue.ProloguedLoss(built, p, rough=not c.precise)
    made = prologue.ProloguedGradient if c.math.endswith("_backward") else prologue.Prologued
    return made(built, p, rough=not c.precise)
