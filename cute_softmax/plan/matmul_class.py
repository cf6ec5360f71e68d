"""The Plan classes of softmax(S) @ V, and those to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import ClassBase
from .hardware import KIB, Architecture
from .maths import WARP
from .problem import ALIGNMENT, ITEM_SIZE

TILE_N = 64  # columns of S (rows of V) of a step: 128 bytes of 16-bit scores, the width of a swizzled box
LINE_N = TILE_N + 8  # of a tile whose rows begin anywhere within 16 bytes
BLOCK_ROWS = 64  # of wgmma
WARPGROUP = 4 * WARP  # threads
RESERVED = 2 * KIB  # of shared memory: alignment to the swizzle's 1024 bytes, and what the driver keeps
STAGE_BARRIERS = 16  # bytes of the two barriers of a stage
SLAB = 64  # columns of 16 bits in the 128 bytes of a swizzled row of shared memory
MAX_DEPTH = 256  # columns of an instruction
CLUSTERS = (1, 2, 4, 8)  # CTAs whose warpgroups take turns
TURN_DEPTHS = (128, 64)  # columns of V that they may take
MOST_STAGES = {"wgmma": 8, "mma": 4}
VALUE_STAGES = 3


@dataclass(frozen=True)
class MatmulClass(ClassBase):
    """What is compiled for the `matmul` movement.

    dtypes: of scores, values and output, and "fp32" for the log-sum-exps where they are wanted.
    warpgroups: that multiply; blocks: of 64 rows of S, of each of them.
    depth: columns of V that a CTA takes, a multiple of 64.
    score_stages, value_stages: stages of the two rings.
    causal: whether columns beyond the diagonal are skipped; scaled: whether scores are multiplied by a number.
    zero: whether rows with nothing left give zeros instead of NaN.
    vector: elements of the output that are stored at a time.
    lines: whether rows of S begin anywhere: all of 16 bytes around a row's part of a tile is loaded.
    mask: whether there is one; bias: its dtype, or "".
    mergers: where columns are cut into parts, whose results are merged in a second launch, the threads of it that have
        different parts of the same numbers; 0 without one. alternate: whether the warpgroups take turns with the steps
        of the same rows, each with results of its own, instead of rows.
    cluster: CTAs of a cluster, which have a part of the columns each and merge their results on chip. CTAs that are
        alone are persistent.
    instruction: "wgmma", or "mma" for mma.sync, whose warps all load and multiply, by copies of `access` bytes of
        scores and of values; its two rings are one, and `resident` CTAs share a multiprocessor.
    stats: whether the rows' log-sum-exps are given.
    sink: the dtype of the rows' sinks, scores that join the sums at the end; or "".
    """

    movement: ClassVar[str] = "matmul"
    math: ClassVar[str] = "softmax_matmul"

    architecture: str
    dtypes: tuple[str, ...]
    warpgroups: int
    blocks: int
    depth: int
    score_stages: int
    value_stages: int
    causal: bool = False
    scaled: bool = False
    zero: bool = False
    vector: int = 8
    lines: bool = False
    mask: bool = False
    bias: str = ""
    mergers: int = 0
    alternate: bool = False
    cluster: int = 1
    instruction: str = "wgmma"
    access: tuple[int, int] = (ALIGNMENT, ALIGNMENT)
    resident: int = 1
    stats: bool = False
    sink: str = ""

    @property
    def signature(self) -> str:
        """The numbers of `MatmulPlan.arguments`, addresses and strides."""
        extra = self.mask + bool(self.bias) + bool(self.sink)
        operands = 11 + 6 * extra + self.lse + self.split + self.stats
        return "i" * (9 if self.instruction == "mma" else 11) + "fi" + "l" * operands

    @property
    def eighths(self) -> bool:
        """Whether each eighth row of S is a tensor of its own to TMA."""
        return self.lines and self.instruction == "wgmma"

    @property
    def stages(self) -> int:
        """Stages of the one ring without wgmma."""
        return self.score_stages

    @property
    def split(self) -> bool:
        """Whether there is a second launch."""
        return self.mergers > 0

    @property
    def merge_loads(self) -> int:
        """Parts that a thread of the second launch reads at a time."""
        return 8 if self.mergers > 1 else 4

    @property
    def wide(self) -> bool:
        """Whether scores are handled in float32 before the maximum, not as packed pairs."""
        return bool(self.bias) or self.dtypes[0] == "fp32"

    @property
    def shares(self) -> int:
        """Warpgroups that take turns with the steps of the same rows."""
        return self.warpgroups if self.alternate else 1

    @property
    def step_cost(self) -> float:
        """About how many nanoseconds a step takes, of all warpgroups where they take turns (H200, 2026-11-26)."""
        if self.instruction == "mma":
            # Of all CTAs of a multiprocessor; not measured: two blocks share what is read of V.
            return self.rows * self.resident * {1: 6.0, 2: 5.0}[self.blocks] * max(1.0, self.depth / 128)
        if self.alternate:
            return 460.0 + 2.4 * self.depth
        return {1: 610.0, 2: 1090.0}[self.blocks] + 0.85 * self.blocks * self.depth

    @property
    def paired(self) -> bool:
        """Whether two CTAs with blocks of rows have a half of the columns each."""
        return self.cluster > 1 and not self.alternate

    @property
    def lse(self) -> bool:
        return len(self.dtypes) > 3

    @property
    def rows(self) -> int:
        """Rows of S of a CTA's tile."""
        return (1 if self.alternate else self.warpgroups) * self.blocks * BLOCK_ROWS

    @property
    def left_bytes(self) -> int:
        """What is left of a block for others: accumulators, and two numbers of each row, or four of each thread."""
        return BLOCK_ROWS * (self.depth + (2 if self.alternate else 8)) * 4

    @property
    def kept_bytes(self) -> int:
        """Of shared memory, for what warpgroups leave that take turns in CTAs that are persistent."""
        return self.shares * self.left_bytes if self.alternate and self.cluster == 1 else 0

    @property
    def landed_bytes(self) -> int:
        """Of shared memory, for what the CTAs of a cluster send whose warpgroups take turns: numbers of the columns
        that this CTA finishes, and two of each row."""
        return BLOCK_ROWS * (self.depth + 2 * self.cluster) * 4 if self.alternate and self.cluster > 1 else 0

    @property
    def pieces(self) -> int:
        """Of eight columns, that a CTA finishes whose warpgroups take turns."""
        return self.depth // 8 // self.cluster

    @property
    def taken(self) -> int:
        """Pieces that one of these warpgroups finishes, if any are left."""
        return math.ceil(self.pieces / self.shares)

    @property
    def threads(self) -> int:
        """The warpgroups that multiply, and for wgmma one of which two warps load tiles: registers move between
        warpgroups."""
        return WARPGROUP * (self.warpgroups + (self.instruction == "wgmma"))

    @property
    def loads(self) -> str:
        """How tiles come to shared memory, in words."""
        return "TMA" if self.instruction == "wgmma" else "cp.async of {} and {} bytes".format(*self.access)

    @property
    def moves_registers(self) -> bool:
        """Whether threads have fewer registers at the launch than a thread can have."""
        return self.instruction == "wgmma" and self.warpgroups > 1

    @property
    def producer_registers(self) -> int:
        return 80 if self.lines else 24

    @property
    def consumer_registers(self) -> int:
        """A thread's share of what the CTA was launched with, less the producers'."""
        launched = 65536 // self.threads // 8 * 8 * self.threads
        return min((launched - 128 * self.producer_registers) // (128 * self.warpgroups) // 8 * 8, 240)

    @property
    def score_stage_bytes(self) -> int:
        return self.rows * (LINE_N if self.lines else TILE_N) * ITEM_SIZE[self.dtypes[0]]

    @property
    def value_stage_bytes(self) -> int:
        return TILE_N * self.depth * ITEM_SIZE[self.dtypes[1]]

    @property
    def shared_memory(self) -> int:
        return (
            self.score_stages * self.score_stage_bytes
            + self.value_stages * self.value_stage_bytes
            + self.kept_bytes
            + self.landed_bytes
            + STAGE_BARRIERS * (self.score_stages + self.value_stages)
            + (STAGE_BARRIERS // 2 if self.landed_bytes else 0)
        )

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        parts = [f"{self.rows}x{self.depth}_stages{self.score_stages}_{self.value_stages}"]
        if self.alternate:
            parts[0] = f"{self.warpgroups}x{parts[0]}"
        flags = ("causal", "scaled", "zero", "mask", "paired", "lse", "lines", "stats")
        parts += [n for n in flags if getattr(self, n)]
        if self.split:
            parts.append(f"split{self.mergers}")
        if self.alternate and self.cluster > 1:
            parts.append(f"cluster{self.cluster}")
        if self.bias:
            parts.append(f"bias_{self.bias}")
        if self.sink:
            parts.append(f"sink_{self.sink}")
        if self.vector != 8:
            parts.append(f"vector{self.vector}")
        if self.instruction == "mma":
            parts.append(f"mma{self.warpgroups}x{self.blocks}_access{self.access[0]}_{self.access[1]}")
        return "_".join(parts)


def matmul_classes(
    architecture: Architecture, dtypes: tuple[str, ...], rows: int, depth: int, **flags: object
) -> Iterator[MatmulClass]:
    """The classes to choose from for so many rows and so many columns of V."""
    plain = MatmulClass(architecture.name, dtypes, 1, 1, depth, 1, 1, **flags)
    wgmma = plain.instruction == "wgmma"
    # Without wgmma operands and scores in float32 share the registers with all accumulators.
    chunks = math.ceil(depth / (MAX_DEPTH // 2 if plain.wide and not wgmma else MAX_DEPTH))
    plain = replace(plain, depth=math.ceil(math.ceil(depth / chunks) / SLAB) * SLAB)
    tiles = [replace(plain, warpgroups=w, blocks=b) for w, b in _tiles(plain, rows)]
    # With a mask a thread has few registers for what follows the loop.
    if wgmma and not (tiles and plain.mask):
        # Fewer columns of V are more CTAs, and exponentials that several of them compute.
        turns = replace(plain, warpgroups=2, alternate=True)
        depths = (d for d in TURN_DEPTHS if d <= plain.depth)
        tiles += [replace(turns, depth=d, cluster=cluster) for d in depths for cluster in CLUSTERS]
    for c in tiles:
        # A thread may take 255 registers: 256 threads have them all.
        for resident in (2, 1) if not wgmma and c.warpgroups == 1 else (1,):
            stages = _stages(c, architecture.shared_memory // resident - RESERVED)
            if min(stages) >= 2:
                yield replace(c, score_stages=stages[0], value_stages=stages[1], resident=resident)
                break


def _tiles(c: MatmulClass, rows: int) -> list[tuple[int, int]]:
    """(warpgroups, blocks) of tiles for so many rows, whose warpgroups have rows of their own."""
    if c.instruction == "wgmma":
        if rows <= BLOCK_ROWS:
            return []
        # The accumulators of two blocks and 128 columns are 128 of a thread's 240 registers.
        fits = c.depth <= 128 and not (c.wide or c.mask or c.lines)
        return [(2, 2), (2, 1)] if fits and rows > 2 * BLOCK_ROWS else [(2, 1)]
    if rows <= BLOCK_ROWS:
        return [(1, 1)]
    # More would not fit into a thread's 255 registers.
    fits = c.depth <= (64 if c.causal or c.lines else 128) and not (c.wide or c.mask)
    return [(2, 2), (1, 2), (2, 1)] if fits else [(2, 1), (1, 1)]


def _stages(c: MatmulClass, room: int) -> tuple[int, int]:
    """As many stages of scores and of values as there is room for."""
    most = MOST_STAGES[c.instruction]
    scores, values = c.score_stage_bytes + STAGE_BARRIERS, c.value_stage_bytes + STAGE_BARRIERS
    if c.instruction == "wgmma" and not c.alternate:
        return min((room - VALUE_STAGES * values) // scores, most), VALUE_STAGES
    stages = min((room - c.kept_bytes - c.landed_bytes) // (scores + values), most) // c.shares * c.shares
    return stages, stages
