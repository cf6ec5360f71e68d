"""What Plans and Plan classes of all movements have alike."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from .hardware import ARCHITECTURES
from .maths import BESIDE, OF_SINKS
from .problem import ITEM_SIZE


def counted(number: int, noun: str) -> str:
    """A number of things, in words: "1 row", "2 rows"."""
    return f"{number} {noun}" + "s" * (number != 1)


class ClassBase:
    """A Plan class: a frozen dataclass of plain numbers with `dtypes`, and `facts` of its math.

    signature: the types of what a compiled kernel takes after the stream, in their order, a letter each: "i" and "l"
    are ints of 32 and 64 bits, "f" a float of 32.
    """

    @property
    def early(self) -> bool:
        """Whether the kernel may be launched while what precedes it still runs, see `kernels.common.early`."""
        return ARCHITECTURES[self.architecture].early

    @property
    def precise(self) -> bool:
        """Whether the result is worth a float32's rounding."""
        return self.dtypes[self.facts.result] == "fp32"

    @property
    def own_dtypes(self) -> list[str]:
        """The dtypes of the math's tensors, each once, without those of a prologue."""
        extras = {*BESIDE, *OF_SINKS, *self.facts.group_inputs}
        named = zip(self.dtypes, self.facts.operands, strict=True)
        return list(dict.fromkeys(d for d, name in named if name not in extras))

    @property
    def accesses(self) -> tuple[int, ...]:
        """Per full operand, elements of one access: of each input a load of `access`, of outputs a `vector`."""
        return *self.access, *[self.vector] * len(self.facts.outputs)

    def access_bytes(self, operand: int) -> int:
        """Bytes of one access to a full operand; 0 for an input that is no vectors."""
        return self.accesses[operand] * ITEM_SIZE[self.dtypes[operand]]

    @property
    def load_widths(self) -> list[str]:
        """How many bytes loads take, in words; an input that has one element for a whole row is loaded alone."""
        loads = zip(self.access, self.dtypes, strict=False)
        return list(dict.fromkeys(f"{(a or 1) * ITEM_SIZE[d]} bytes" for a, d in loads))

    @property
    def fields(self) -> dict:
        """The class as plain values: the key of the compiled kernel."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {"prologue": self.prologue.name} if "prologue" in found else found


class PlanBase:
    """A Plan: its class is `kernel`.

    zeroed: whether the scratch memory that a launch needs must be zero.
    invariant: whether it is one of batch-invariant calls. laid_out, laid_strides: operands of the call that are copied
    first, and to which strides, see `choose.plan_call`. Plans that can be so have fields of these names.
    """

    zeroed: ClassVar[bool] = True
    invariant: ClassVar[bool] = False
    laid_out: ClassVar[tuple[int, ...]] = ()
    laid_strides: ClassVar[tuple[tuple[int, ...], ...]] = ()

    @property
    def bits(self) -> list[str]:
        """The lines of `explain` about operands that are copied first, and about what the bits of a row depend on."""
        if not self.invariant:
            return ["  copied     a bias or a mask, into the layout of the elements"] if self.laid_out else []
        copied = (
            f"; {counted(len(self.laid_out), 'operand')} copied to contiguous rows" if self.laid_out else ""
        )
        return [f"  bits       batch-invariant: they depend on the row and its length{copied}"]

    @property
    def given(self) -> list[str]:
        """The lines of `explain` about the dimensions, and about the scores."""
        found = []
        if self.kernel.kept_modes > 1:
            sizes = " x ".join(map(str, self.kept))
            found.append(f"  rows       index in {sizes}: dimensions that do not merge")
        if told := self.kernel.prologue.told:
            found.append(f"  prologue   {told}")
        return found

    @property
    def movement(self) -> str:
        """How data reaches the threads: "short", "row", "stream", "column", "sweep", "split", "matmul" and others."""
        return self.kernel.movement
