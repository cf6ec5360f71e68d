"""Plans of the kernel that multiplies a tensor in place by a number of the device's, and leaves it alone where that is
1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from .base import ClassBase, PlanBase
from .hardware import Device
from .maths import check_counts
from .problem import ALIGNMENT, ITEM_SIZE, Operand, canonical

LINE = 1 << 14  # elements that a CTA takes at a time where a tensor is one stretch of memory
# Of fewer lines than FEW, those of more than LONG elements are launched one by one: CTAs share what is one stretch.
FEW, LONG = 128, 1 << 20
THREADS, CTAS_AN_SM = 256, 8


@dataclass(frozen=True)
class RescaleClass(ClassBase):
    """What is compiled: the dtypes of the tensor and of the factor, and the elements of one access."""

    movement: ClassVar[str] = "rescale"
    math: ClassVar[str] = "rescale"

    architecture: str
    dtypes: tuple[str, ...]
    vector: int

    @property
    def signature(self) -> str:
        """The numbers of `RescalePlan.arguments`, and the addresses of the tensor and the factor."""
        return "iillll"

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        return f"vector{self.vector}"


@dataclass(frozen=True)
class RescalePlan(PlanBase):
    """One launch: lines of so many elements, `pitch` apart, the last of which ends with the tensor; CTAs take them in
    turn."""

    kernel: RescaleClass
    lines: int
    columns: int
    pitch: int
    total: int
    ctas: int

    scratch: ClassVar[int] = 0
    operand_strides: ClassVar[tuple[tuple[int, ...], ...]] = ((), ())

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the addresses."""
        return self.columns, self.ctas, self.pitch, self.total


@lru_cache
def matrices(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """What is launched for a tensor of any strides whose elements do not overlap: (lines, elements of a line), how far
    apart lines begin, and where each launch begins."""
    modes = canonical(shape, (), [Operand("fp32", strides)]).kept
    outer, columns = [(m.size, *m.strides) for m in modes], 1
    if outer and outer[-1][1] == 1:
        columns, _ = outer.pop()
    lines, pitch = 1, columns
    if outer and (outer[-1][0] >= FEW or columns <= LONG):
        lines, pitch = outer.pop()
    begins = [0]
    for size, stride in outer:
        begins = [begin + i * stride for begin in begins for i in range(size)]
    return (lines, columns), pitch, tuple(begins)


def plan_rescale(shape: tuple[int, int], operands: tuple[Operand, Operand], device: Device) -> RescalePlan:
    """The plan for one of these `matrices`, and a factor.

    Raises NotPlanned for more lines than 32 bits count.
    """
    (rows, columns), (operand, factor) = shape, operands
    pitch, size = operand.strides[0], ITEM_SIZE[operand.dtype]
    total = rows * columns
    if pitch == columns or rows == 1:
        rows, columns, pitch = math.ceil(total / LINE), LINE, LINE
    check_counts({"lines": rows, "elements of a line": columns})
    # As many elements as every line begins with a multiple of.
    vector = math.gcd(operand.address or ALIGNMENT, pitch * size, ALIGNMENT) // size
    kernel = RescaleClass(device.architecture.name, (operand.dtype, factor.dtype), vector)
    ctas = min(rows, CTAS_AN_SM * device.multiprocessors)
    return RescalePlan(kernel, rows, columns, pitch, total, ctas)
