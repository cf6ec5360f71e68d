"""Configurations of the column and split movements: which threads and CTAs share a panel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import Architecture
from .problem import ALIGNMENT

# Thresholds, measured as docs/experiments.md says.
PANEL_BYTES = (
    256  # of neighbouring columns that a panel takes: how much of a DRAM page is touched at once counts
)
NARROWEST_BYTES = 32  # a sector of L2
# Classes have any number of steps up to here, beyond mostly an even one, so that they are fewer.
ALL_NUMBERS_OF_STEPS = 8
# Columns that begin anywhere are copied in whole vectors and shifted into place where vectors of their own would have
# fewer bytes than these, and where so many columns lie side by side; of long ones, where they are more than a warp has
# such vectors for.
SHIFTED_BELOW_BYTES = 8
SHIFTED_FROM, LONG_COLUMNS = 48, 1 << 17
# Rows of memory lie side by side in a panel where they have so many bytes at most, and vectors of their own would be
# single elements; of so many rows of a panel.
ABREAST_BYTES, ABREAST_ROWS = 128, 32
ALIGNED_INSTRUCTIONS = 0.8  # of such columns where all rows of a thread begin alike: 0.65 to 0.89 (emulated)
# A thread's registers for each of its columns, then: 26 columns in bf16 took 198 us in 9 CTAs of an SM, in 12, which
# spill 128 bytes, 340 (H200, 2026-11-28).
ALIGNED_REGISTERS = 7
# CTAs of so many columns of threads and steps at most: one more spills 16 to 88 bytes, and 80, 144 and 512 channels of
# 57 x 57 took 8, 30 and 9% longer. What other steps spill costs less than a CTA (H200, 2026-11-28).
ALIGNED_CTAS = {(1024, 10): 6, (1024, 16): 4, (2048, 10): 3}
EXTRA_BLOCKS = 2  # shifted lines begin at multiples of so many vectors: a sector of L2
# Rather than all panels at once, few with many parts are worked on, so that L2 still holds what is read again; but a
# part has so many chunks at least, against which its exchange weighs little. Columns have a state each, a row has one.
CHUNKS_OF_A_PART = {"column": 32, "row": 16}
# Panels are twice as wide where rows of memory begin at multiples of fewer bytes, of what DRAM gives at a time, or off
# lines in so few such panels: all are worked on at once, and exchange once.
WIDE_BELOW_BYTES, FEW_WIDE_PANELS = 64, 5
DEEP_ROWS_AT_ONCE = 2  # as many as can be held, but so many at least
CHUNKS_OF_A_PART_ALONE = 64  # from here on one row is worked on at a time
# Few columns: steps and threads to choose from, more threads where CTAs have an SM each and a thread more than so many
# bytes of a tensor; the part of SMs that clusters of 16 reach; how many CTAs of clusters take as long to start as a
# step takes, and steps as long as a cluster's exchange. Chosen by exact steps, gradients of 5000 x 16 and 1100 x 128
# took 1.08 and 1.09 of the time, and nothing was gained in the mean (bf16, H200, 2026-11-29).
STEPS_OF_FEW, THREADS_OF_FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40), (128, 256)
BYTES_OF_A_THREAD, REACHED = 128, 7 / 8
CTAS_OF_A_STEP, STEPS_OF_AN_EXCHANGE = 16, 2
# Their panels: of so many columns at least, or so many panels where that makes fewer; bytes of a vector; what CTAs of
# clusters hold together, and one reads of a tensor, where parts are not faster.
COLUMNS_OF_FEW, PANELS_OF_FEW, VECTOR_BYTES_OF_FEW = 16, 4, 8
HELD_OF_FEW, READ_OF_FEW = 12 << 20, 112 << 10
FEW_ELEMENTS = 8  # of a column, which threads reduce alone even if a single CTA has all


@dataclass(frozen=True)
class Least:
    """From where on columns are swept over: elements of a column, of all full tensors, and bytes of a row of memory."""

    length: int
    elements: int
    row: int


# By whether columns are read alone, and by where rows of memory begin: off whole vectors, or off cache lines. Where
# they begin with lines, panels in chunks are faster: of few panels at a time L2 still has what is read again. In place
# odd columns cannot be shifted. H200, 1,186 tensors of 16 to 256 MB, 2026-11-29; docs/experiments.md, Two passes.
SWEPT = {
    "reads": Least(6 << 10, 6 << 20, 160),
    "reads_off_vectors": Least(2560, 6 << 20, 160),
    "in_place": Least(6 << 10, 16 << 20, 128),
    "off_vectors": Least(6 << 10, 40 << 20, 128),
    "off_lines": Least(24 << 10, 72 << 20, 128),
}
# Chunks in registers of rows a row ahead that have something beside them, which takes registers, too: with more of them
# kernels spill, and 64 x 1456104 bf16 with a bias took 164 us for 132, with a mask 134 for 128 (H200, 2026-11-30).
REGISTERS_BESIDE = (2, 3)
INVARIANT_ROWS = 64  # what batch-invariant plans of split rows are made for, however many rows there are


@dataclass(frozen=True)
class PanelConfig:
    """threads of a CTA, vectors that each holds at most, CTAs of a cluster, CTAs that an SM must hold.

    alone: each thread has its columns for itself, and nothing is exchanged.
    vector_bytes: of an access; narrower vectors are fewer columns a thread, whose states cost less to merge.
    panel_bytes: of a panel's width, see `PANEL_BYTES`.
    buffers: chunks that the vectors make up where a CTA takes more than it holds, or several parts.
    ahead, registers: steps that copies are asked for ahead, where rows are absorbed a row ahead, and chunks of them
    that are kept in registers; see `kernels.panel.ahead`.
    longest, chunks, chunks_alone: of deep columns, the elements at most (of short ones two CTAs share an SM: one reads
        while the other exchanges), and the chunks of a part at least, of panels that are worked on one at a time, too:
        of several one exchanges while another is read.
    narrow: only for columns with full outputs whose vectors have fewer than 16 bytes, in panels enough for all SMs.
    """

    threads: int
    steps: int
    cluster_n: int = 1
    min_blocks: int = 1
    alone: bool = False
    vector_bytes: int = ALIGNMENT
    panel_bytes: int = PANEL_BYTES
    buffers: int = 2
    ahead: int = 0
    registers: int = 0
    longest: int = 1 << 31
    chunks: int = 0
    chunks_alone: int = 0
    narrow: bool = False

    @property
    def room(self) -> float:
        """Elements of a column that it holds, in panels of its width; no bound of narrow ones."""
        if self.narrow:
            return math.inf
        down = 1 if self.alone else self.threads // (self.panel_bytes // self.vector_bytes)
        return down * self.steps * self.cluster_n

    def has_registers(self, elements: int, architecture: Architecture) -> bool:
        """Whether a thread that has its columns for itself keeps so many elements a step, as float32, in registers.

        12 steps of four ran at 1.46 times the speed of what comes next, 12 of eight, which spill, at 0.81 (H200).
        """
        held = self.steps * elements * self.threads * self.min_blocks
        return not self.alone or held <= architecture.registers
