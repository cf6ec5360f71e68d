"""The walk of softmax_matmul's backward: which block of columns of S a CTA takes, its steps down the rows, and what its
threads know of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...plan.matmul_backward import MatmulBackwardClass
from ..common.index import narrow, select, wide
from ..common.tensor_cores import Ring


@dataclass(frozen=True)
class Call:
    """A call as the kernel gets it: sizes, numbers, and (address in bytes, strides in elements) of tensors.

    See `MatmulBackwardKernel.__call__`; mask and bias may be empty.
    """

    M: Int32
    N: Int32
    D: Int32
    heads: Int32
    inner: Int32
    outer: Int32
    splits: Int32
    offset: Int32
    scale: Float32
    factor: Float32
    V: tuple[Int64, ...]
    dV: tuple[Int64, ...]
    S: tuple[Int64, ...]
    dS: tuple[Int64, ...]
    mask: tuple[Int64, ...]
    bias: tuple[Int64, ...]


@dataclass(frozen=True)
class Step:
    """A tile of S: the indices of its block of rows and of its block of columns, and its place among the batches."""

    m: Int32
    n: Int32
    head: Int32
    batch: tuple[Int32, Int32]

    @property
    def modes(self) -> tuple[Int32, ...]:
        return self.head, *self.batch


@dataclass(frozen=True)
class Work:
    """Where a tile lies and what it walks over: blocks of rows from `top` on, of one head after another.

    first, end: of its steps; head, m: of the first one.
    """

    n: Int32
    batch: tuple[Int32, Int32]
    split: Int32
    top: Int32
    first: Int32
    end: Int32
    head: Int32
    m: Int32

    def step(self, head: Int32, m: Int32) -> Step:
        """The step at a head and a block of rows."""
        return Step(m, self.n, head, self.batch)


@dataclass(frozen=True)
class Walk:
    """The tiles of a call, and the CTA that takes some of them."""

    spec: cutlass.Constexpr[MatmulBackwardClass]
    call: Call
    cta: Int32
    ctas: Int32
    row_blocks: Int32
    column_blocks: Int32
    tiles: Int32

    def work(self, tile: Int32) -> Work:
        """The walk of a tile."""
        s, call = self.spec, self.call
        n, rest = tile % self.column_blocks, tile // self.column_blocks
        split, batch = rest % call.splits, rest // call.splits
        top = Int32(0)
        if s.causal:
            # Blocks of rows in which no column of this tile counts.
            top = cutlass.min(cutlass.max(n * s.columns - call.offset, 0) // s.rows, self.row_blocks)
        height = self.row_blocks - top
        first, end = part_of(height * call.heads, split, call.splits)
        height = cutlass.max(height, 1)
        modes = batch % call.inner, batch // call.inner
        return Work(n, modes, split, top, first, end, first // height, top + first % height)

    def next(self, head: Int32, m: Int32, top: Int32) -> tuple[Int32, Int32]:
        """The next block of rows, of the next head behind the last."""
        last = m == self.row_blocks - 1
        return select(last, head + 1, head), select(last, top, m + 1)


def walk_of(spec: MatmulBackwardClass, call: Call, cta: Int32, ctas: Int32) -> Walk:
    """The walk of a CTA among so many."""
    row_blocks = (call.M + spec.rows - 1) // spec.rows
    column_blocks = (call.N + spec.columns - 1) // spec.columns
    tiles = column_blocks * call.inner * call.outer * call.splits
    return Walk(spec, call, cta, ctas, row_blocks, column_blocks, tiles)


def part_of(steps: Int32, split: Int32, splits: Int32) -> tuple[Int32, Int32]:
    """The first of so many steps that a part takes, and the one after its last."""
    return narrow(wide(steps) * split // splits), narrow(wide(steps) * (split + 1) // splits)


@dataclass(frozen=True)
class Memory:
    """What lies in shared memory: the stages of S and dO, a slab of zeros and V, if they are there, two numbers of each
    row; sO, sOt, sS: dO, dO^T and S as tiles."""

    S: cute.Pointer
    Z: cute.Pointer
    V: cute.Pointer
    sO: cute.Tensor
    sOt: cute.Tensor
    sS: cute.Tensor | None
    sL: cute.Tensor
    ring: Ring


@dataclass(frozen=True)
class Thread:
    """A thread that computes: its index in its warpgroup, the slab of 64 columns of S that this has, and which share of
    the columns of dV.

    in_tile, pair: of S^T it holds columns in_tile and in_tile + 8 of the CTA's tile and, of every 8 rows, rows pair and
    pair + 1.
    """

    index: Int32
    warp: Int32
    slab: Int32
    share: Int32
    in_tile: Int32
    pair: Int32


def each(rows: int) -> Iterator[tuple[int, int, int, int]]:
    """(register, block of 8 rows, row of the pair, column of the pair) of a thread's part of S^T."""
    for j in range(rows // 8):
        for h in range(2):
            for k in range(2):
                yield j * 4 + h * 2 + k, j, k, h
