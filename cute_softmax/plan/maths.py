"""What plans know of the row maths: their tensors, and what partial results weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

WARP = 32
CACHE_LINE = 128  # bytes
BESIDE = ("bias", "mask")  # inputs that scores are made of beside the elements; they may be broadcast
OF_SINKS = ("sink_log", "sink_grad")  # results of groups beside full ones, see `Prologue.sink`


@dataclass(frozen=True)
class Math:
    """What a plan must know of a row math: its tensors, and what one exchange between warps carries.

    inputs, outputs: full tensors, an element for each of a group; group_inputs, group_outputs: tensors with one element
    per group, whose stride is 0 in the reduced dimensions. The operands of a kernel come in this order: inputs,
    outputs, group inputs, group outputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: int  # exchanges per row
    state_bytes: int  # of one exchanged state
    group_outputs: tuple[str, ...] = ()
    group_inputs: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return self.inputs + self.outputs + self.group_inputs + self.group_outputs

    @cached_property
    def full(self) -> int:
        """How many tensors are full; they are the first operands."""
        return len(self.inputs) + len(self.outputs)

    @cached_property
    def main(self) -> tuple[int, ...]:
        """The full operands that say how a problem is cut: all but those `BESIDE` the elements."""
        return tuple(i for i, name in enumerate(self.operands[: self.full]) if name not in BESIDE)

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """The inputs that are `BESIDE` the elements."""
        return tuple(i for i, name in enumerate(self.inputs) if name in BESIDE)

    @property
    def numbers(self) -> int:
        """Numbers of a whole row's state: a triple takes the room of four."""
        return {4: 1, 8: 2, 16: 3}[self.stages * self.state_bytes]

    @property
    def result(self) -> int:
        """The operand whose dtype says how precise a result is worth being: the first that is written."""
        return self.operands.index((*self.outputs, *self.group_outputs)[0])

    @property
    def reference(self) -> int:
        """The operand that decides where a row's vectors begin: what is written, or else what is read first."""
        return self.full - 1 if self.outputs else 0


MATHS = {
    ("softmax", True): Math(("x",), ("y",), stages=1, state_bytes=8),  # online: one (max, sum) pair
    ("softmax", False): Math(("x",), ("y",), stages=2, state_bytes=4),  # max, then sum
    ("softmax_backward", True): Math(("dy", "y"), ("dx",), stages=1, state_bytes=4),
    ("log_softmax", True): Math(("x",), ("y",), stages=1, state_bytes=8),
    ("log_softmax_backward", True): Math(("dy", "y"), ("dx",), stages=1, state_bytes=4),
    ("logsumexp", True): Math(("x",), (), stages=1, state_bytes=8, group_outputs=("lse",)),
    ("amax", True): Math(("x",), (), stages=1, state_bytes=4, group_outputs=("max",)),
    ("sum", True): Math(("x",), (), stages=1, state_bytes=4, group_outputs=("total",)),
    # The triple (max, sum of exponentials, the same weighted with their exponents), padded.
    ("entropy", True): Math(("x",), (), stages=1, state_bytes=16, group_outputs=("max", "log", "entropy")),
    # Of one element of each row that an index chooses.
    ("selective", True): Math(
        ("x",), (), stages=1, state_bytes=8, group_outputs=("found", "max", "log"), group_inputs=("index",)
    ),
    ("selective_entropy", True): Math(
        ("x",),
        (),
        stages=1,
        state_bytes=16,
        group_outputs=("found", "max", "log", "entropy"),
        group_inputs=("index",),
    ),
}


def math_of(name: str, online: bool) -> Math:
    """The facts of a row math, in one pass over the row (`online`) or in two.

    Raises ValueError where there is none: two passes are there for softmax alone.
    """
    if (name, True) not in MATHS:
        raise ValueError(f"math is {name!r}: the row maths are {', '.join(n for n, one in MATHS if one)}")
    if (name, online) not in MATHS:
        raise ValueError(f"{name} takes one pass over its rows: online=False is for softmax")
    return MATHS[name, online]


class NotPlanned(NotImplementedError, ValueError):
    """A problem that no kernel supports, with the reason. It is both a NotImplementedError and a ValueError."""


MOST = (1 << 31) - (1 << 20)  # groups, elements of a group, CTAs: their indices are 32-bit


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise NotPlanned for what 32 bits do not count. counts: how many there are, by what they are."""
    for name, number in counts.items():
        if number > MOST:
            raise NotPlanned(f"{number} {name}: at most {MOST} are counted in 32 bits")
