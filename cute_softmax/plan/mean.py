"""Plans of the kernels around the losses of rows: what a mean divides by, and the mean.

One CTA adds up so many elements. Of more, CTAs add up a slice each, and another launch adds up the sums of the slices.
The order of additions depends on the number of elements alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import ClassBase, PlanBase
from .hardware import Device
from .maths import check_counts

THREADS, UNROLL = 1024, 4
# Elements that one launch of one CTA adds up, those of a slice at the least, and slices at the most.
ALONE, SLICE, SLICES = 1 << 14, 1 << 13, 256


@dataclass(frozen=True)
class MeanClass(ClassBase):
    """What is compiled.

    math: "share": of int64 targets, one over the number of those that are not `ignore`, behind that times a number;
        "total": the sum of float32 numbers, times another if `shared`; "mean": the sum of float32 numbers over as many
        as targets of "share" count, and one over these.
    dtypes: of the elements and of the result.
    sliced: whether each CTA stores the sums of its slice, and nothing else happens; counted: whether the targets are
        such sums already.
    """

    movement: ClassVar[str] = "mean"

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    shared: bool = False
    sliced: bool = False
    counted: bool = False

    @property
    def signature(self) -> str:
        """The numbers of `MeanPlan.arguments`, and the addresses of the operands."""
        return "lllll" + "l" * len(self.operands)

    @property
    def sources(self) -> tuple[str, ...]:
        """What is added up."""
        return {"share": ("targets",), "total": ("elements",), "mean": ("elements", "targets")}[self.math]

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors of a launch, in their order; sums: of each source those of all slices."""
        if self.sliced:
            return (*self.sources, "sums")
        return (*self.sources, *["factor"] * self.shared, "result", *["share"] * (self.math == "mean"))

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, architecture and dtypes."""
        return f"{'slices' if self.sliced else 'one_cta'}{'_shared' * self.shared}{'_counted' * self.counted}"


@dataclass(frozen=True)
class MeanPlan(PlanBase):
    """One launch on so many elements, side by side, a slice for each CTA. ignore: the element that does not count;
    number: the bits of the float32 that a share is multiplied by."""

    kernel: MeanClass
    elements: int
    ctas: int = 1
    ignore: int = 0
    number: int = 0

    scratch: ClassVar[int] = 0

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """None: all lie side by side."""
        return ((),) * len(self.kernel.operands)

    @property
    def each(self) -> int:
        """Elements of a slice."""
        return math.ceil(self.elements / self.ctas)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the addresses."""
        return self.ctas, self.elements, self.each, self.ignore, self.number


def plan_share(elements: int, ignore: int, number: int, device: Device) -> tuple[MeanPlan, ...]:
    """The launches of (share * number, share) of so many targets. Raises NotPlanned for more than 32 bits count."""
    kernel = MeanClass("share", device.architecture.name, ("int64", "fp32"))
    return _launches(kernel, elements, ignore, number)


def plan_total(elements: int, dtype: str, shared: bool, device: Device) -> tuple[MeanPlan, ...]:
    """The launches of the sum of so many float32 numbers, times a factor if `shared`, in a dtype; see `plan_share`."""
    return _launches(MeanClass("total", device.architecture.name, ("fp32", dtype), shared), elements)


def plan_mean(elements: int, ignore: int, dtype: str, device: Device) -> tuple[MeanPlan, ...]:
    """The launches of the mean of so many float32 numbers, those that count by their targets, in a dtype; see
    `plan_share`."""
    return _launches(MeanClass("mean", device.architecture.name, ("fp32", dtype)), elements, ignore)


def _launches(kernel: MeanClass, elements: int, ignore: int = 0, number: int = 0) -> tuple[MeanPlan, ...]:
    """One or two."""
    check_counts({"elements": elements})
    if elements <= ALONE:
        return (MeanPlan(kernel, elements, 1, ignore, number),)
    slices = min(math.ceil(elements / SLICE), SLICES)
    dtypes = kernel.dtypes[0], "fp32"
    first = replace(kernel, dtypes=dtypes, shared=False, sliced=True)
    then = replace(kernel, counted="targets" in kernel.sources)
    return MeanPlan(first, elements, slices, ignore), MeanPlan(then, slices, 1, 0, number)
