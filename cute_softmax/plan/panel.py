"""The `column` and `split` movements: their Plan classes, and how a problem is cut into panels and parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from layouts import Layout

from ..problem import ITEM_SIZE
from .maths import MATHS, WARP, Math


@dataclass(frozen=True)
class PanelClass:
    """What is compiled for the `column` and `split` movements, as plain numbers; see `kernels.panel`.

    orientation: "column" (a vector lies across groups) or "row" (along its group); vector: elements of an access;
    across: threads side by side over groups; threads: of a CTA; steps: vectors that a thread holds; cluster_n: CTAs
    that share a panel through distributed shared memory;
    kept_modes, reduced_modes: how many, the mode across not counted; meeting: whether CTAs share a panel;
    streaming: whether a CTA reads twice what it cannot hold; keep: whether converted values of what a CTA holds stay in registers; min_blocks: CTAs that an SM must hold.
    """

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    orientation: str
    vector: int
    across: int
    threads: int
    steps: int
    cluster_n: int
    kept_modes: int
    reduced_modes: int
    meeting: bool
    streaming: bool
    min_blocks: int

    online = False
    keep = True
    part = 2

    @property
    def movement(self) -> str:
        return "split" if self.meeting else self.orientation

    @property
    def facts(self) -> Math:
        return MATHS[self.math, (self.math, False) not in MATHS]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the states that parts exchange: of all stages together."""
        return 4 * self.facts.stages

    @property
    def precise(self) -> bool:
        """Whether the result is worth a float32's rounding."""
        return self.dtypes[-1] == "fp32"

    @property
    def down(self) -> int:
        """Threads along the groups."""
        return self.threads // self.across

    @property
    def warps_down(self) -> int:
        """Warps along the groups."""
        return max(self.threads // max(self.across, WARP), 1)

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
        return min(self.threads // self.columns, WARP)

    @property
    def smem(self) -> Layout:
        """(element of a vector, thread, step) -> element of an input's tile in shared memory."""
        return Layout.ordered((self.vector, self.threads, self.steps), (0, 1, 2))

    @property
    def reduction_buffer(self) -> Layout:
        """(column, warp down the panel, stage) -> slot of the reduction buffer; a float32 each."""
        return Layout.ordered((self.columns, self.warps_down, self.facts.stages), (0, 1, 2))

    @property
    def peers(self) -> Layout:
        """(column, CTA of the cluster or reader of parts) -> slot of a state."""
        return Layout.ordered(
            (self.columns, max(self.cluster_n, self.readers if self.meeting else 1)), (0, 1)
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        held = sum(ITEM_SIZE[d] for d in self.dtypes[: len(self.facts.inputs)])
        exchange = self.reduction_buffer.cosize * 4 + self.peers.cosize * self.whole_bytes
        return self.smem.cosize * held + exchange + 16

    @property
    def name(self) -> str:
        parts = [f"{self.orientation}{self.across}x{self.down}x{self.steps}x{self.vector}"]
        if self.kept_modes > 1 or self.reduced_modes > 1:
            parts.append(f"modes{self.kept_modes}_{self.reduced_modes}")
        if self.cluster_n > 1:
            parts.append(f"cluster{self.cluster_n}")
        if self.meeting:
            parts.append("meeting")
        if self.streaming:
            parts.append("streaming")
        return "_".join(parts)

    @property
    def fields(self) -> dict:
        """The class as plain values: the key of the compiled kernel."""
        return asdict(self)
