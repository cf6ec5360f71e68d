"""The `column` and `split` movements: their Plan classes, and how a problem is cut into panels and parts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from layouts import Layout

from ..hardware import Device
from ..problem import ALIGNMENT, ITEM_SIZE, Mode, Problem
from .maths import MATHS, WARP, Math, NotPlanned


@dataclass(frozen=True)
class PanelClass:
    """What is compiled for the `column` and `split` movements, as plain numbers; see `kernels.panel`.

    orientation: "column" (a vector lies across groups) or "row" (along its group); vector: elements of an access;
    across: threads side by side over groups; threads: of a CTA; steps: vectors that a thread holds;
    kept_modes, reduced_modes: how many, the mode across not counted; meeting: whether CTAs share a panel;
    streaming: whether a CTA reads twice what it cannot hold; min_blocks: CTAs that an SM must hold.
    """

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    orientation: str
    vector: int
    across: int
    threads: int
    steps: int
    kept_modes: int
    reduced_modes: int
    meeting: bool
    streaming: bool
    min_blocks: int

    online = True
    keep = False
    part = 2

    @property
    def movement(self) -> str:
        return "split" if self.meeting else self.orientation

    @property
    def facts(self) -> Math:
        return MATHS[self.math, True]

    @property
    def precise(self) -> bool:
        """Whether the result is worth a float32's rounding."""
        return self.dtypes[-1] == "fp32"

    @property
    def down(self) -> int:
        """Threads along the groups."""
        return self.threads // self.across

    @property
    def slots(self) -> int:
        """Groups that a thread holds elements of."""
        return self.vector if self.orientation == "column" else 1

    @property
    def unit(self) -> int:
        """Elements of its group that a vector covers."""
        return 1 if self.orientation == "column" else self.vector

    @property
    def columns(self) -> int:
        """Groups of a panel."""
        return self.across * self.slots

    @property
    def tile(self) -> int:
        """Elements of each group that a CTA holds."""
        return self.down * self.steps * self.unit

    @property
    def readers(self) -> int:
        """Threads that read the parts' states of one column."""
        return max(self.threads // self.columns, 1)

    @property
    def buffer(self) -> Layout:
        """(warp down the panel, column) -> slot of the reduction buffer in shared memory."""
        warps = self.threads // max(self.across, WARP)
        return Layout.ordered((max(warps, self.readers if self.meeting else 1), self.columns), (1, 0))

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return (self.buffer.cosize + self.columns) * self.facts.state_bytes + 16

    @property
    def name(self) -> str:
        parts = [f"{self.orientation}{self.across}x{self.down}x{self.steps}x{self.vector}"]
        if self.kept_modes > 1 or self.reduced_modes > 1:
            parts.append(f"modes{self.kept_modes}_{self.reduced_modes}")
        if self.meeting:
            parts.append("meeting")
        if self.streaming:
            parts.append("streaming")
        return "_".join(parts)

    @property
    def fields(self) -> dict:
        """The class as plain values: the key of the compiled kernel."""
        return asdict(self)
