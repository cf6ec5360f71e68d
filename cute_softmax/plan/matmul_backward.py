"""The backward of softmax_matmul: its Plan classes, and the numbers of a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..hardware import Device
from ..problem import ALIGNMENT, ITEM_SIZE, Mode, Operand, _coalesce
from .base import ClassBase, PlanBase
from .maths import NotPlanned

WARPGROUP = 128  # threads
SLAB = 64  # columns of 16 bits in the 128 bytes of a swizzled row of shared memory
ROWS = 64  # of S in one step
OPERANDS = ("scores", "grad", "values", "dscores", "dvalues", "output", "lse")
# The walk over rows is cut into parts until this share of the SMs has work all the time, if it can be.
ENOUGH = 0.9
MOST_SPLITS = 64
STEPS = 8  # the fewest of a part


@dataclass(frozen=True)
class MatmulBackwardClass(ClassBase):
    """What is compiled: everything that shapes the code, as plain numbers.

    depth: columns of V that a CTA holds, D rounded up to whole slabs; consumers: warpgroups that compute, each with
    a slab of 64 columns of S; rows: rows of S of one step; stages: steps on their way or in work at a time.
    """

    movement: ClassVar[str] = "matmul_backward"
    math: ClassVar[str] = "softmax_matmul_backward"

    architecture: str
    dtypes: tuple[str, ...]  # of S and dS, of V and dO, of dV (float32: parts that are yet to be added up)
    depth: int
    consumers: int = 2
    rows: int = ROWS
    stages: int = 6

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def columns(self) -> int:
        """Columns of S, and rows of V, of a CTA."""
        return self.consumers * SLAB

    @property
    def step_bytes(self) -> int:
        """What one step brings to shared memory: tiles of S and dO, and two float32 numbers a row."""
        return self.rows * (
            self.columns * ITEM_SIZE[self.dtypes[0]] + self.depth * ITEM_SIZE[self.dtypes[1]] + 8
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA: the ring, and two barriers of each of its stages."""
        return self.stages * (self.step_bytes + 16)

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        return f"{self.columns}x{self.rows}x{self.depth}_stages{self.stages}"


@dataclass(frozen=True)
class MatmulDeltaClass(ClassBase):
    """What is compiled for the numbers of each row that the backward needs.

    depth: columns of O rounded up; vector: elements of one load; rows: of a block, as in `MatmulBackwardClass`.
    """

    movement: ClassVar[str] = "matmul_delta"
    math: ClassVar[str] = "softmax_matmul_delta"

    architecture: str
    dtypes: tuple[str, ...]  # of dO, of O
    depth: int
    vector: int
    rows: int = ROWS

    @property
    def vectors(self) -> int:
        """Vectors that each of the four threads of a row loads."""
        return -(-self.depth // (4 * self.vector))


@dataclass(frozen=True)
class MatmulBackwardPlan(PlanBase):
    """The two launches of one backward pass: their classes, and the numbers that change from call to call.

    heads: batches of S that share a V; batches: those with a V of their own; splits: parts of the walk over the
    rows of all heads, whose dV are added up afterwards; strides: per operand (row, head, batch) in elements.
    """

    kernel: MatmulBackwardClass
    delta: MatmulDeltaClass
    rows: int
    columns: int
    depth: int
    heads: int
    batches: int
    splits: int
    ctas: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks of rows of a head."""
        return math.ceil(self.rows / self.kernel.rows)

    @property
    def delta_numbers(self) -> int:
        """float32 numbers that the first launch leaves to the second."""
        return self.heads * self.batches * self.blocks * 2 * self.kernel.rows

    @property
    def tiles(self) -> int:
        """Pieces of work: blocks of columns of each batch and part."""
        return math.ceil(self.columns / self.kernel.columns) * self.batches * self.splits

    def stride(self, operand: str) -> tuple[int, int, int]:
        return self.strides[OPERANDS.index(operand)]

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the second function takes between the stream and the scale."""
        return self.rows, self.columns, self.depth, self.heads, self.batches, self.splits, self.ctas

    @property
    def delta_arguments(self) -> tuple[int, ...]:
        """Those of the first."""
        return self.rows, self.depth, self.heads, self.heads * self.batches * self.blocks


def plan_matmul_backward(
    shape: Sequence[int],
    values_shape: Sequence[int],
    operands: dict[str, Operand],
    device: Device,
) -> MatmulBackwardPlan:
    """The plan for scores of a shape (..., M, N) and values of a shape (..., N, D) of the same rank.

    operands: all of OPERANDS, with one stride for each dimension of their batch and those of the matrix; that of
        lse has one dimension less. Dimensions that values broadcast over have stride 0 in values and dvalues.

    Raises NotPlanned for what the kernels do not take.
    """
    *batch, rows, columns = shape
    depth = values_shape[-1]
    if device.architecture.name != "sm_90a":
        raise NotPlanned(f"the backward of softmax_matmul needs sm_90a, not {device.architecture.name}")
    if depth > 2 * SLAB:
        raise NotPlanned(f"the backward of softmax_matmul takes D up to {2 * SLAB}, got {depth}")
    per_operand = [operands[name].strides for name in OPERANDS]
    modes = [Mode(size, tuple(s[i] for s in per_operand)) for i, size in enumerate(batch)]
    heads, batches = (
        _single([m for m, n in zip(modes, values_shape, strict=False) if (n == 1 and m.size > 1) == shared])
        for shared in (True, False)
    )
    strides = tuple(
        (s[len(batch)], h, b) for s, h, b in zip(per_operand, heads.strides, batches.strides, strict=True)
    )
    for name in ("scores", "grad", "dscores"):
        aligned(name, operands[name], strides[OPERANDS.index(name)], ALIGNMENT)
    for name in ("values", "dvalues"):
        aligned(name, operands[name], strides[OPERANDS.index(name)], 2 * ITEM_SIZE[operands[name].dtype])
    if depth % 2:
        raise NotPlanned(f"the backward of softmax_matmul takes even D, got {depth}")

    c = MatmulBackwardClass(
        device.architecture.name,
        tuple(operands[name].dtype for name in ("scores", "values", "dvalues")),
        math.ceil(depth / SLAB) * SLAB,
    )
    walk = math.ceil(rows / c.rows) * heads.size
    blocks = math.ceil(columns / c.columns) * batches.size
    splits = splits_of(blocks, walk, device.multiprocessors)
    if splits > 1:
        c = MatmulBackwardClass(c.architecture, (*c.dtypes[:2], "fp32"), c.depth)
    vector = math.gcd(
        8, depth, *(x for n in ("grad", "output") for x in (*strides[OPERANDS.index(n)], operands[n].offset))
    )
    return MatmulBackwardPlan(
        kernel=c,
        delta=MatmulDeltaClass(
            c.architecture, tuple(operands[n].dtype for n in ("grad", "output")), c.depth, vector
        ),
        rows=rows,
        columns=columns,
        depth=depth,
        heads=heads.size,
        batches=batches.size,
        splits=splits,
        ctas=min(blocks * splits, device.multiprocessors),
        strides=strides,
    )


def splits_of(blocks: int, walk: int, multiprocessors: int) -> int:
    """Parts of a walk of so many steps: as few as keep the SMs at work, when a part of each block is a CTA."""

    def busy(splits: int) -> float:
        tiles = blocks * splits
        return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)

    candidates = range(1, max(1, min(MOST_SPLITS, walk // STEPS)) + 1)
    return next((n for n in candidates if busy(n) >= ENOUGH), max(candidates, key=busy))


def _single(modes: list[Mode]) -> Mode:
    """The modes as one."""
    merged = _coalesce(modes)
    if len(merged) > 1:
        raise NotPlanned(f"batch dimensions of {[m.size for m in merged]} do not merge")
    # A stride that TMA takes, whatever the size.
    return merged[0] if merged else Mode(1, (ALIGNMENT,) * len(OPERANDS))


def aligned(name: str, operand: Operand, strides: Sequence[int], size: int) -> None:
    """Raise NotPlanned unless the operand's rows are contiguous and begin at multiples of `size` bytes."""
    item = ITEM_SIZE[operand.dtype]
    if operand.strides[-1] != 1 or any(n * item % size for n in strides) or operand.address % size:
        raise NotPlanned(
            f"rows of {name} (strides {operand.strides}) do not begin at multiples of {size} bytes"
        )
