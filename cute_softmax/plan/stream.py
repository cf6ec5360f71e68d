"""The `stream` movement: long rows that are only read, each by one CTA, tile after tile.

Nothing of a row stays on chip but its state, so that one class serves rows of every length, and while the CTAs of a
multiprocessor are at different places of their rows its loads never stop. Of rows that a cluster holds the CTAs load
together, and exchange together while nothing is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from layouts.algebra import Layout

from .hardware import Architecture, Device
from .maths import MOST
from .problem import ALIGNMENT, ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row import RowClass

THREADS = 256


class StreamConfig(NamedTuple):
    """How rows are cut, and which they are.

    steps: vectors of a thread in a tile, of each input. stages: tiles in shared memory: one is worked on, the others
    are on their way. min_blocks: CTAs of a multiprocessor.
    from_bytes: of a row of all inputs: shorter ones take as long to begin and to end as to be read.
    rows_of_an_sm: of fewer some multiprocessors have one more than others.
    """

    steps: int
    stages: int
    min_blocks: int
    from_bytes: int
    rows_of_an_sm: int


# By the number of inputs. With two their states take the registers of a fourth CTA, and shorter and fewer rows are
# these, too. Divergences on an H200, 2026-11-25: 4096 x 151936, bf16, (steps, stages, min_blocks): (2, 2, 3) 573 us,
# (2, 3, 3) 569, (2, 4, 3) 565, (4, 2, 3) 772, (2, 3, 2) 561, (1, 4, 3) 570; fp32 1118, 1102, 1099, 1104, 1102, 1112.
# Streamed over clusters, as shares of a copy's rate: 132 x 151936 0.779 / 0.473, 264 rows 0.866 / 0.433, 528 rows
# 0.679 / 0.402; 8192 x 12288 0.694 / 0.656, 16384 elements 0.772 / 0.678, 32768 0.918 / 0.614.
# With one, clusters read fewer rows faster (logsumexp, bf16: 1040 x 127832 70 us, streamed 82; 2048 x 131080 132, 142).
CONFIGS = {1: StreamConfig(4, 2, 4, 3 << 16, 16), 2: StreamConfig(2, 3, 3, 3 << 14, 1)}


@dataclass(frozen=True)
class StreamClass(RowClass):
    """What is compiled for the `stream` movement: that of the row movement, of which a CTA takes a tile at a time.

    stages: tiles in shared memory.
    """

    movement: ClassVar[str] = "stream"

    stages: int = CONFIGS[1].stages

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


def long_and_many(rows: int, columns: int, dtypes: Sequence[str], device: Device) -> bool:
    """Whether rows of so many elements are the `stream` movement's. dtypes: of the inputs."""
    config = CONFIGS.get(len(dtypes))
    if config is None or rows < config.rows_of_an_sm * device.multiprocessors:
        return False
    return columns * sum(ITEM_SIZE[dtype] for dtype in dtypes) >= config.from_bytes


def stream_class(
    math_name: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    *,
    edges: bool,
    access: tuple[int, ...] | None = None,
    online: bool = True,
    kept_modes: int = 1,
    prologue: Prologue = NO_PROLOGUE,
) -> StreamClass | None:
    """The class of rows of any length; None for maths with results as long as a row, or with something beside the
    elements. access: see `RowClass`; of inputs that lie towards vector boundaries as the first one does if None."""
    facts = facts_of(math_name, online, prologue)
    if facts.outputs or facts.beside or prologue.causal:
        return None
    inputs = len(facts.inputs)
    vector, config = ALIGNMENT // max(ITEM_SIZE[d] for d in dtypes[:inputs]), CONFIGS[inputs]
    return StreamClass(
        math=math_name,
        architecture=architecture.name,
        dtypes=dtypes,
        vector=vector,
        edges=edges,
        access=(vector,) * inputs if access is None else tuple(math.gcd(a, vector) for a in access),
        online=online,
        threads_per_row=THREADS,
        steps=config.steps,
        threads=THREADS,
        rows_per_thread=1,
        cluster_n=1,
        staging=("async",) * inputs,
        keep=False,
        persistent=False,
        min_blocks=config.min_blocks,
        part=config.steps,
        kept_modes=kept_modes,
        prologue=prologue,
        stages=config.stages,
    )
