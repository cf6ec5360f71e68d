"""The `stream` movement: long rows that are only read, each by one CTA, tile after tile.

Nothing of a row stays on chip but its state, so that one class serves rows of every length, and while the CTAs of a
multiprocessor are at different places of their rows its loads never stop. Of rows that a cluster holds the CTAs load
together, and exchange together while nothing is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layouts.algebra import Layout

from .hardware import Architecture, Device
from .maths import MOST
from .problem import ALIGNMENT, ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row import RowClass

THREADS = 256
STEPS = 4  # vectors of a thread in a tile
STAGES = 2  # one tile is worked on, the next one is on its way
MIN_BLOCKS = 4  # CTAs of a multiprocessor
# Rows of so many bytes, and so many of them on a multiprocessor: shorter ones take as long to begin and to end as to be
# read, and of fewer some multiprocessors have one more than others. Not measured.
FROM_BYTES = 3 << 16
ROWS_OF_AN_SM = 6


@dataclass(frozen=True)
class StreamClass(RowClass):
    """What is compiled for the `stream` movement: that of the row movement, of which a CTA takes a tile at a time.

    stages: tiles in shared memory.
    """

    movement: ClassVar[str] = "stream"

    stages: int = STAGES

    @property
    def fields(self) -> dict:
        return {**super().fields, "movement": self.movement}

    @property
    def capacity(self) -> int:
        """Rows of any length."""
        return MOST

    @property
    def staged_steps(self) -> int:
        """Vectors of a thread that are on their way before it begins."""
        return (self.stages - 1) * self.steps

    def steps_of(self, i: int) -> int:
        """Places in shared memory that a thread has for vectors of input i."""
        return self.stages * self.steps

    @property
    def smem(self) -> Layout:
        """(row, column of the tiles in shared memory) -> element of the input there, a tile behind the other."""
        return self.smem_of(0)

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, dtypes and architecture."""
        return f"stream{self.stages}_{super().name}"


def long_and_many(rows: int, columns: int, dtype: str, device: Device) -> bool:
    """Whether rows of so many elements are the `stream` movement's."""
    long = columns * ITEM_SIZE[dtype] >= FROM_BYTES
    return long and rows >= ROWS_OF_AN_SM * device.multiprocessors


def stream_class(
    math_name: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    *,
    edges: bool,
    online: bool = True,
    kept_modes: int = 1,
    prologue: Prologue = NO_PROLOGUE,
) -> StreamClass | None:
    """The class of rows of any length; None for maths with results as long as a row, with two inputs, or with two
    exchanges."""
    facts = facts_of(math_name, online, prologue)
    if facts.outputs or len(facts.inputs) > 1 or facts.stages > 1 or prologue.causal:
        return None
    vector = ALIGNMENT // ITEM_SIZE[dtypes[0]]
    return StreamClass(
        math=math_name,
        architecture=architecture.name,
        dtypes=dtypes,
        vector=vector,
        edges=edges,
        access=(vector,),
        online=online,
        threads_per_row=THREADS,
        steps=STEPS,
        threads=THREADS,
        rows_per_thread=1,
        cluster_n=1,
        staging=("async",),
        keep=False,
        persistent=False,
        min_blocks=MIN_BLOCKS,
        part=STEPS,
        kept_modes=kept_modes,
        prologue=prologue,
    )
