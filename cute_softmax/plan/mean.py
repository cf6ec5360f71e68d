"""Plans of the kernels around the losses of rows, a CTA each: what a mean divides by, and the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import ClassBase, PlanBase
from .hardware import Device
from .maths import check_counts

THREADS, UNROLL = 1024, 4


@dataclass(frozen=True)
class MeanClass(ClassBase):
    """What is compiled.

    math: "share": of int64 targets, one over the number of those that are not `ignore`, behind that times a number;
        "total": the sum of float32 numbers, times another if `shared`; "mean": the sum of float32 numbers over as many
        as targets of "share" count, and one over these.
    dtypes: of the elements and of the result.
    """

    movement: ClassVar[str] = "mean"

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    shared: bool = False

    @property
    def signature(self) -> str:
        """The numbers of `MeanPlan.arguments`, and the addresses of the operands."""
        return "lll" + "l" * len(self.operands)

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors of a launch, in their order."""
        return {
            "share": ("targets", "result"),
            "total": ("elements", "factor", "result") if self.shared else ("elements", "result"),
            "mean": ("elements", "targets", "result", "share"),
        }[self.math]

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, architecture and dtypes."""
        return f"one_cta{'_shared' * self.shared}"


@dataclass(frozen=True)
class MeanPlan(PlanBase):
    """One launch on so many elements, side by side. ignore: the element that does not count; number: the bits of the
    float32 that a share is multiplied by."""

    kernel: MeanClass
    elements: int
    ignore: int = 0
    number: int = 0

    scratch: ClassVar[int] = 0

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """None: all lie side by side."""
        return ((),) * len(self.kernel.operands)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the addresses."""
        return self.elements, self.ignore, self.number


def plan_share(elements: int, ignore: int, number: int, device: Device) -> MeanPlan:
    """The plan of (share * number, share) of so many targets. Raises NotPlanned for more than 32 bits count."""
    check_counts({"elements": elements})
    kernel = MeanClass("share", device.architecture.name, ("int64", "fp32"))
    return MeanPlan(kernel, elements, ignore, number)


def plan_total(elements: int, dtype: str, shared: bool, device: Device) -> MeanPlan:
    """The plan of the sum of so many float32 numbers, times a factor if `shared`, in a dtype; see `plan_share`."""
    check_counts({"elements": elements})
    return MeanPlan(MeanClass("total", device.architecture.name, ("fp32", dtype), shared), elements)


def plan_mean(elements: int, ignore: int, dtype: str, device: Device) -> MeanPlan:
    """The plan of the mean of so many float32 numbers, those that count by their targets, in a dtype; see
    `plan_share`."""
    check_counts({"elements": elements})
    return MeanPlan(MeanClass("mean", device.architecture.name, ("fp32", dtype)), elements, ignore)
