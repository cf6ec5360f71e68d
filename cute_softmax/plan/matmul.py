"""The `matmul` movement: softmax(S) @ V with S and V in memory, its Plan classes and which serves a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..hardware import KIB, Architecture, Device
from ..problem import ALIGNMENT, ITEM_SIZE, Operand
from .base import ClassBase, PlanBase
from .maths import NotPlanned

TILE_N = 64  # columns of S (rows of V) of a step: 128 bytes of 16-bit scores, the width of a swizzled box
BOX_COLUMNS = 64  # columns of V in a swizzled box
BATCH_MODES = 3  # with rows and columns the five modes of a TMA descriptor
WARPGROUP_ROWS = 64  # of wgmma
RESERVED = 2 * KIB  # of shared memory: alignment to the swizzle's 1024 bytes, barriers
# 16-byte steps are what TMA takes as strides; a mode of one element has this one.
UNIT = ALIGNMENT // 2


@dataclass(frozen=True)
class MatmulClass(ClassBase):
    """What is compiled for the `matmul` movement.

    dtypes: of scores, values and output, and "fp32" for the log-sum-exps where they are wanted.
    warpgroups: of 64 rows of S each; depth: columns of V that a CTA takes, a multiple of 64.
    score_stages, value_stages: stages of the two rings.
    causal: whether columns beyond the diagonal are skipped; scaled: whether scores are multiplied by a number.
    zero: whether rows with nothing left give zeros instead of NaN.
    pairs: whether the output is stored two elements at a time.
    """

    movement: ClassVar[str] = "matmul"
    math: ClassVar[str] = "softmax_matmul"

    architecture: str
    dtypes: tuple[str, ...]
    warpgroups: int
    depth: int
    score_stages: int
    value_stages: int
    causal: bool = False
    scaled: bool = False
    zero: bool = False
    pairs: bool = True

    @property
    def lse(self) -> bool:
        return len(self.dtypes) > 3

    @property
    def precise(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        """Rows of S of a CTA's tile."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """A warpgroup of producers, of which two warps work, and those that multiply."""
        return 128 * (self.warpgroups + 1)

    @property
    def consumer_registers(self) -> int:
        """What a thread of the multiplying warpgroups may use: the SM's registers less the producers'."""
        left = 65536 - 128 * self.producer_registers
        return min(left // (128 * self.warpgroups) // 8 * 8, 240)

    @property
    def producer_registers(self) -> int:
        return 24 if self.warpgroups > 3 else 32

    @property
    def score_stage_bytes(self) -> int:
        return self.rows * TILE_N * ITEM_SIZE[self.dtypes[0]]

    @property
    def value_stage_bytes(self) -> int:
        return TILE_N * self.depth * ITEM_SIZE[self.dtypes[1]]

    @property
    def shared_memory(self) -> int:
        return (
            self.score_stages * self.score_stage_bytes
            + self.value_stages * self.value_stage_bytes
            + 16 * (self.score_stages + self.value_stages)
        )

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        parts = [f"{self.rows}x{self.depth}_stages{self.score_stages}_{self.value_stages}"]
        parts += [n for n in ("causal", "scaled", "zero") if getattr(self, n)]
        if not self.pairs:
            parts.append("singles")
        return "_".join(parts)


@dataclass(frozen=True)
class MatmulPlan(PlanBase):
    """One launch of softmax(S) @ V.

    rows, columns, depth: M, N, D of S (batch, M, N) and V (batch, N, D); batch: sizes of the batch modes, the slowest
    first; operand_strides: of S and V in rows and in each batch mode (elements), those of one element replaced;
    ctas: of the grid, each taking one tile after another; scale, offset: see `softmax_matmul`.
    """

    matmul_class: MatmulClass
    rows: int
    columns: int
    depth: int
    batch: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]
    ctas: int
    scale: float
    offset: int

    scratch: ClassVar[int] = 0

    @property
    def kernel(self) -> MatmulClass:
        return self.matmul_class

    @property
    def tiles(self) -> int:
        """Tiles of rows and of D, of all batches."""
        c = self.matmul_class
        return math.prod(self.batch) * math.ceil(self.rows / c.rows) * math.ceil(self.depth / c.depth)

    @property
    def arguments(self) -> tuple:
        return self.rows, self.columns, self.depth, *self.batch, self.ctas, self.scale, self.offset
