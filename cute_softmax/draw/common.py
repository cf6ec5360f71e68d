"""What the figures of all movements share: the thread that they follow, and words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from layouts.figures import Facts

from ..plan import WARP
from ..plan.base import ClassBase, PlanBase
from ..plan.problem import ITEM_SIZE
from . import checks

# What each exchange carries, by math and whether it goes over the row once; maths that are not named here say
# "partial result".
EXCHANGED = {
    ("softmax", True): ("the maximum, and the sum of exponentials relative to it",),
    ("softmax", False): ("the maximum", "the sum of exponentials relative to the maximum"),
    ("softmax_backward", True): ("the sum of dy times y",),
    ("logsumexp", True): ("the maximum, and the sum of exponentials relative to it",),
    ("logsumexp", False): ("the maximum", "the sum of exponentials relative to the maximum"),
    ("amax", True): ("the maximum",),
    ("sum", True): ("the sum",),
}
# By what a softmax is held against.
_PAIRS = "the maximum of each input, and the sum of exponentials relative to it"
AGAINST = {
    "loss": (_PAIRS, "the sum of weighted differences of logarithms"),
    "input": (_PAIRS,),
    "target": (_PAIRS,),
    "weights": (
        "the maximum, the sum of exponentials and that of weighted differences relative to it, and the sum of weights",
    ),
}


@dataclass(frozen=True)
class View:
    """What the figures of a Plan show, and the thread that they follow; each movement has its own.

    usual: the thread to follow if none is asked for; where: which CTA is drawn, for titles, empty where there is but
    one; aside: figures that do not show threads of this CTA; counted: among what threads are counted, if not in the
    CTA. Raises ValueError for a thread that there is not.
    """

    plan: PlanBase
    thread: int | None = None

    counted: ClassVar[str] = ""
    aside: ClassVar[frozenset[str]] = frozenset({"tv", "places", "shift", "turns", "workspace"})

    def __post_init__(self):
        if self.thread is not None and not 0 <= self.thread < self.threads:
            raise ValueError(f"thread must be 0 to {self.threads - 1}{self.counted}, got {self.thread}")

    @property
    def kernel(self) -> ClassBase:
        return self.plan.kernel

    @property
    def threads(self) -> int:
        """How many there are to follow."""
        return self.kernel.threads

    @property
    def size(self) -> int:
        """Bytes of an element of the first operand."""
        return ITEM_SIZE[self.kernel.dtypes[0]]

    @cached_property
    def followed(self) -> int:
        """The thread to follow: the one asked for, else the usual one."""
        return self.usual if self.thread is None else self.thread

    @property
    def warp(self) -> int:
        """The followed thread's."""
        return self.followed // WARP

    @property
    def whose(self) -> str:
        """The title of the followed thread."""
        return f"Thread {self.followed} of {self.threads:,}{self.where}"

    @cached_property
    def report(self) -> checks.Report:
        """What the checks of the Plan find."""
        return checks.check(self.plan)

    def own(self, facts: Facts) -> bool:
        """Whether a cell is the followed thread's."""
        return self.followed in facts.threads


def exchanged(math: str, online: bool, stages: int, against: str = "") -> list[str]:
    """What each exchange carries, in words. against: see `Prologue`."""
    names = AGAINST.get(against) or EXCHANGED.get((math, online)) or EXCHANGED.get((math, True), ())
    return [*names, *["a partial result"] * (stages - len(names))]


def space(name: str, where: str = "g") -> str:
    """The name of an operand's part: gX in global memory, sX in shared memory."""
    return where + name.upper()
