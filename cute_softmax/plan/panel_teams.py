"""Which threads and CTAs share a panel: the tables of the column and split movements, with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import ALIGNMENT

# Bytes of neighbouring columns that a panel takes. Copying panels of (128, 1048576) bf16 in this way reaches 0.67 of
# a plain copy with 32 bytes, 0.76 with 64, 0.87 with 128 and 0.95 with 256 and 512 (H200, 2026-11-20): what counts is
# how much of a DRAM page is touched at once. Panels that all SMs share reach, copied through a queue in shared memory
# by TMA (2026-11-22), 0.88 of it with 256 bytes (65536 x 4096, 262144 x 1024), 0.68 with 192, 0.78 with 128, 0.61 and
# 0.44 with 64; 1048576 x 64 in its 128 bytes 0.86: softmax can do no better in this order.
PANEL_BYTES = 256
NARROWEST_BYTES = 32  # a sector of L2
# Columns whose vectors would have fewer bytes than these, as they begin anywhere, are copied in whole vectors that are
# shifted into place, if so many lie side by side. H200, 2026-11-22, bf16, ratio to a copy, shifted / not: vectors of 2
# bytes 4096 x 65537 0.626 / 0.368, of 4 4096 x 65538 0.618 / 0.504, of 8 128 x 1048580 0.794 / 0.821; 2048 x 1000 x 33
# over 1000 0.323 / 0.447, 256 x 2048 x 49 over 2048 0.401 / 0.418, its backward 0.476 / 0.202.
SHIFTED_BELOW_BYTES = 8
SHIFTED_FROM = 48
# Such lines begin on a sector of L2, at a multiple of two vectors of 16 bytes: 32 x 512 x 55 x 55 0.728 with one, 0.721
# with two, 0.697 with four, 0.634 with eight; 256 x 50257 0.736, 0.765, 0.762, 0.748 (each takes its room).
EXTRA_BLOCKS = 2


@dataclass(frozen=True)
class Team:
    """threads of a CTA, vectors that each holds, CTAs of a cluster, CTAs that an SM must hold.

    alone: each thread has its columns for itself, and nothing is exchanged.
    vector_bytes: of an access; narrower vectors are fewer columns a thread, whose states cost less to merge.
    panel_bytes: of a panel's width, see `PANEL_BYTES`.
    buffers: chunks that the vectors make up where a CTA takes more than it holds, or several parts.
    ahead, registers: steps that copies are asked for ahead, where rows are absorbed a row ahead, and chunks of them
    that are kept in registers; see `kernels.panel.ahead`.
    longest, chunks: of deep columns, the elements at most, and the chunks of a part at least; see `DEEP`.
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
    chunks: float = 0
    narrow: bool = False


# In the order of the longest columns that they hold; the first that a panel fits into and that the architecture has
# room for is taken. H200, 2026-11-20 and 22, bf16, the best of 5 to 15 at each length. Small CTAs of which several
# share an SM overlap loading with storing; a cluster exchanges in a microsecond what takes three through global memory.
# Room that stays empty is CTAs that do not fit beside: columns of 1280 elements reach 0.92 of a copy in teams for 1280,
# 0.86 for 1536, 0.71 for 2048, and in narrow panels for 2048 0.77; of 3000 0.91 for 3072, 0.78 for 4096; of 4096 0.86
# in panels of 256 bytes, 0.81 of 128; backward of 5000 0.84 for 5120, 0.58 for 8192.
# What limits 4096 x 65536, 2026-11-22: where it had 0.875, a copy in the same CTAs has 0.915, softmax without
# exponentials in its results 0.889, without folding 0.896, without the exchange 0.876. Tried and lost: CTAs that stay
# and refill their slots as they finish, 0.69 for 0.85 in three clusters an SM, 0.77 in two (128 x 1048576 0.87 for
# 0.905); folding what has come while the rest is on its way (0.877 for 0.877). Registers as room, as `AHEAD` has it: 8
# of 32 vectors of 128 threads, of which four CTAs then share an SM, 0.889 for 0.881, for this length alone; 8192 x
# 16384 in panels of 256 bytes (8 of 32, 256 threads, two CTAs) 0.830 for 0.848, of 128 bytes (10 of 32, four) 0.783, in
# clusters of 8 (8 of 32, 256 threads, two) 0.818; loads without predicates where a panel is whole 0.845.
# Narrow vectors are few bytes a thread: only many threads of many steps hold long columns. Ratio to a copy with the
# last two teams / streamed, at odd places that are shifted now: bf16 4096 x 65537 0.372 / 0.207, x 65538 0.503 / 0.328,
# 8192 x 32769 0.380 / 0.212, float32 4096 x 32769 0.510 / 0.324; 4096 x 65537 with 512 threads of 16 steps 0.335.
TEAMS = {
    1: (  # one full input
        Team(64, 4, min_blocks=16, alone=True),
        Team(64, 8, min_blocks=12, alone=True),
        Team(128, 4, min_blocks=8, vector_bytes=8),
        Team(128, 8, min_blocks=8, vector_bytes=8),
        Team(128, 8, min_blocks=8),
        Team(128, 16, min_blocks=5),
        Team(256, 8, cluster_n=2, min_blocks=4),
        Team(128, 12, cluster_n=4, min_blocks=7),
        Team(128, 16, cluster_n=4, min_blocks=5),
        Team(512, 8, min_blocks=2),  # without clusters
        Team(128, 10, cluster_n=8, min_blocks=6),
        Team(128, 12, cluster_n=8, min_blocks=6),
        Team(128, 16, cluster_n=8, min_blocks=5),
        Team(128, 10, cluster_n=16, min_blocks=8),
        Team(128, 12, cluster_n=16, min_blocks=7),
        Team(128, 16, cluster_n=16, min_blocks=5),
        Team(128, 16, cluster_n=8, min_blocks=5, panel_bytes=128),  # without clusters of 16
        Team(128, 20, cluster_n=16, min_blocks=4),
        Team(128, 24, cluster_n=16, min_blocks=4),
        Team(256, 16, cluster_n=16, min_blocks=3),
        Team(128, 20, cluster_n=16, min_blocks=4, panel_bytes=128),
        Team(128, 24, cluster_n=16, min_blocks=4, panel_bytes=128),
        Team(128, 28, cluster_n=16, min_blocks=3, panel_bytes=128),
        Team(128, 32, cluster_n=16, min_blocks=3, panel_bytes=128),
        Team(256, 32, cluster_n=16, min_blocks=3, vector_bytes=8, narrow=True),
        Team(512, 32, cluster_n=16, min_blocks=2, vector_bytes=8, narrow=True),
    ),
    2: (  # two
        Team(64, 4, min_blocks=12, alone=True),
        Team(64, 8, min_blocks=8, alone=True),
        Team(128, 2, min_blocks=8),
        Team(128, 8, min_blocks=6),
        Team(256, 8, min_blocks=3),
        Team(256, 8, cluster_n=2, min_blocks=2),
        Team(256, 8, cluster_n=4, min_blocks=2),
        Team(512, 4, min_blocks=2),  # without clusters
        Team(256, 8, cluster_n=8, min_blocks=2),
        Team(256, 6, cluster_n=16, min_blocks=3),
        Team(256, 8, cluster_n=16, min_blocks=2),
        Team(256, 10, cluster_n=16, min_blocks=2),
        Team(256, 12, cluster_n=16, min_blocks=2),
        Team(256, 8, cluster_n=16, min_blocks=2, panel_bytes=128),
        Team(256, 10, cluster_n=16, min_blocks=2, panel_bytes=128),
        Team(256, 12, cluster_n=16, min_blocks=2, panel_bytes=128),
    ),
}
# Shifted columns: H200, 2026-11-22, bf16, softmax, dim=0 of (rows, 2^27 / rows) or so. Instructions and wavefronts of
# shared memory bind them as much as DRAM does, so that room for rows that do not exist costs more: 77 rows 0.806 in
# teams for 80, 0.571 for 128; 150 rows 0.809 for 160, 0.530 for 256; backward of 21 rows 0.879 for 24, 0.432 for 64.
# Panels of 512 bytes have fewer ends of lines, but 0.82 for 0.81 at 128 rows, 0.45 for 0.61 at 4096. Where each panel
# stored the vectors at its ends by element, 128 x 1048577 had 0.618; in lines that overlap, so that all but memory's
# own ends are whole vectors, 0.784. What is read once anyway need not be held in clusters of 16: logsumexp of 2048 x
# 65535 0.539, streamed 0.630, of 4096 x 32769 0.447 and 0.647. Threads that are alone need their registers: 8 rows
# 0.825 (158 of them), with 9 CTAs an SM, where they are spilled, 0.499, in vectors of 8 bytes 0.765, not shifted 0.692;
# 3 rows 0.669 and 0.309. Tried and lost: alone up to 24 rows (21 rows 0.475 for 0.671, but logsumexp 0.656 for 0.486);
# states whose slots lie vector by vector, so that lanes read neighbours (4096 x 65537 0.589 for 0.630).
SHIFTED_TEAMS = {
    1: (
        Team(64, 4, min_blocks=10, alone=True),
        Team(64, 8, min_blocks=6, alone=True),
        Team(128, 4, min_blocks=8, vector_bytes=8),
        Team(128, 6, min_blocks=8, vector_bytes=8),
        Team(128, 6, min_blocks=8),
        Team(128, 10, min_blocks=7),
        Team(128, 16, min_blocks=5),
        Team(256, 10, min_blocks=4),
        Team(256, 8, cluster_n=2, min_blocks=4),
        Team(512, 8, min_blocks=2),  # without clusters
        Team(128, 10, cluster_n=4, min_blocks=7),
        Team(128, 16, cluster_n=4, min_blocks=5),
        Team(128, 10, cluster_n=8, min_blocks=7),
        Team(256, 8, cluster_n=8, min_blocks=4),
        Team(128, 10, cluster_n=16, min_blocks=7),
        Team(128, 16, cluster_n=16, min_blocks=5),
        Team(256, 12, cluster_n=16, min_blocks=3),
        Team(256, 16, cluster_n=16, min_blocks=2),
        Team(128, 24, cluster_n=16, min_blocks=4, panel_bytes=128),
        Team(128, 32, cluster_n=16, min_blocks=3, panel_bytes=128),
    ),
    2: (
        Team(64, 4, min_blocks=12, alone=True),
        Team(64, 8, min_blocks=8, alone=True),
        Team(128, 2, min_blocks=8),
        Team(128, 3, min_blocks=8),
        Team(128, 6, min_blocks=6),
        Team(256, 5, min_blocks=3),
        Team(256, 8, min_blocks=2),
        Team(256, 5, cluster_n=2, min_blocks=3),
        Team(256, 8, cluster_n=2, min_blocks=2),
        Team(512, 4, min_blocks=2),  # without clusters
        Team(256, 5, cluster_n=4, min_blocks=3),
        Team(128, 8, cluster_n=8, min_blocks=5),
        Team(256, 5, cluster_n=8, min_blocks=3),
        Team(256, 8, cluster_n=8, min_blocks=2),
        Team(256, 5, cluster_n=16, min_blocks=3),
        Team(256, 8, cluster_n=16, min_blocks=2),
        Team(256, 6, cluster_n=16, min_blocks=2, panel_bytes=128),
        Team(256, 8, cluster_n=16, min_blocks=2, panel_bytes=128),
    ),
}
# For panels that no team holds: streamed. The deep teams, by orientation and full inputs, hold 192 or 224 KB of what
# they read twice; they are for what has a full output, where the architecture has room for them. H200, 2026-11-21,
# ratio to a copy, deep / not, each with the parts that suit it: bf16 columns 65536 x 4096 0.690 / 0.605, 262144 x 1024
# 0.627 / 0.584, 1048576 x 64 0.596 / 0.554, float32 columns 65536 x 2048 0.669 / 0.644; rows of 2^24 bf16 0.725 /
# 0.668, of 2^23 float32 0.688 / 0.677. Rows of 2^24 by chunks held, with 132 parts, 2026-11-22: 0.640 (14 of 16 KB),
# 0.675 (7 of 32), 0.685 (6 of 32). Two inputs, bf16 columns, to the sum of two tensors, 2026-11-22: 65536 x 4096 0.693
# (6 chunks), 0.676 (3), 262144 x 1024 0.580 (6), 0.577 (3); two such CTAs of half the size an SM 0.631 and 0.576. The
# first that is for the length is taken: up to 16384 elements two of half the size share an SM, so that one reads while
# the other meets. 2026-11-22, two (parts) / one: 16384 x 8192 0.761 (29), 0.754 (44) / 0.721, x 16384 0.790 (29), 0.761
# (44) / 0.777, float32 0.774 (29) / 0.751; but 10000 x 26816 0.702 (18) / 0.708, 24576 x 10880 0.721 (43) / 0.763; two
# inputs 8192 x 16384 0.785 (29), 0.801 (44) / 0.760, 12288 x 10880 0.745 (43) / 0.735, 16384 x 8192 0.756 (57), 0.721
# (43) / 0.734; but 32768 x 8192 0.678 (86) / 0.746.
SHORT = 16384
DEEP = {
    ("column", 1): (
        Team(256, 24, min_blocks=2, buffers=6, longest=SHORT, chunks=8.5),
        Team(512, 24, buffers=6, chunks=7.5),
        Team(256, 20, min_blocks=2, buffers=5, longest=SHORT, chunks=8.5),  # shifted columns take more room
        Team(512, 20, buffers=5, chunks=7.5),
    ),
    ("row", 1): (Team(512, 28, buffers=7),),
    ("column", 2): (
        Team(256, 12, min_blocks=2, buffers=6, longest=SHORT, chunks=8.5),
        Team(512, 12, buffers=6, chunks=11),
    ),
}
# Rows a row ahead, where parts have so many chunks at most: 10 of 16 KB are held in shared memory and 6 in registers,
# and 4 more are on their way. H200, 2026-11-22, ratio to a copy, ahead / `DEEP`: bf16 64 rows of 2^24 0.874 / 0.741,
# 256 of 2^22 0.916 / 0.722, 256 of 2^21 0.873 / 0.759, 440 of 1200000 0.857 / 0.727, float32 64 of 2^23 0.864 / 0.727.
# By what is in registers, waited for and on its way: 4, 2, 2 0.859, float32 0.816; 4, 4, 2 0.865, 0.796; 5, 3, 3 0.874,
# 0.834; nothing in registers and 4 chunks read a second time 0.812, 0.784; 3, 2, 1 0.710, 0.655. With 384 threads and
# chunks of 12 KB 8, 4, 4 0.885, 0.848, but 256 rows of 2^21 0.856; 4 of 24 KB, 2, 2 0.823, 0.794; 2 of 32 KB 0.691,
# 0.742; 1024 threads 0.828, 0.699, 256 threads 0.804, 0.729. Tried and lost: sums that are rescaled only where the
# maximum has grown by 8 (0.844 / 0.851); stores that branch nowhere (0.799 / 0.875, as registers spill); a warp of its
# own that meets (0.735 / 0.801); bulk copies that another warp asks for (0.758 / 0.765).
AHEAD = Team(512, 28, buffers=14, ahead=4, registers=6)
STREAMING = {1: Team(512, 8, min_blocks=2), 2: Team(512, 8)}
# Rather than all panels at once, few with many parts are worked on, so that L2 still holds what is read again; but a
# part has so many chunks at least, against which its meeting weighs little. Columns have a state each, a row has one.
# H200, 2026-11-20, bf16, ratio to a copy by parts: 65536 x 4096 over columns 0.597 (8), 0.612 (33), 0.583 (66),
# 0.443 (132); 64 rows of 2^24 0.659 (4), 0.682 (66), 0.539 (264).
CHUNKS_OF_A_PART = {"column": 32, "row": 16}
# Deep parts of columns: of two panels at once and more, as one meets while the other is read; of so many chunks that
# few are read again. They share all SMs out evenly, so that a CTA keeps its part. H200, 2026-11-22, bf16, ratio to a
# copy by parts (chunks of a part): 24576 x 10880 0.755 for 22 (9), 0.70 for 26 (8), 0.716 for 27, which do not share
# evenly; 32768 x 8192 0.738 for 22 (12), 0.776 for 33 (8), 0.71 for 36 and for 44 (6); 40000 x 6656 0.752 for 33 (10),
# 0.72 for 44 (8); 65536 x 4096 0.71 for 33 (16), 0.73 for 44 (12), 0.735 for 66 (8), 0.53 for 132 (4); two inputs, to a
# sum: 32768 x 8192 0.710 for 33 (16), 0.744 for 44 (12), 0.724 for 66 (8); 65536 x 4096 0.619 for 33, 0.693 for 66
# (16), 0.660 for 132. Narrower panels that are held without reading again lose: 65536 x 4096 0.69 in 128 bytes, 0.63 in
# 64, 0.35 in 32. Tried and lost, 2026-11-22: the next panel brought into L2 while one is worked on, in teams that hold
# theirs (1024 x 262144 0.93 to 0.69); states of 65536 x 4096 that one part merges for all and passes on (0.66 for
# 0.73); chunks in a queue, absorbed at the head and finished 10 behind it, so that meetings have time (4096 x 65536
# 0.54 for 0.82, 16384 x 8192 0.58 for 0.73: bound by instructions), and the same by TMA, in half of the instructions,
# with warps of their own to absorb, to meet and to finish (65536 x 4096 0.60 to 0.69, without its meetings 0.87: these
# take 6 to 12 us while memory is busy, for which there is room in neither shared memory nor registers); parts of 65536
# x 4096 by the speed of their SM, of which some have 1.3 times the others' bandwidth (0.80 for 0.80, without meetings);
# a panel ahead, as rows are (65536 x 4096 0.66 for 0.744, 16384 x 8192 0.64 for 0.745, backward 0.59 for 0.698); states
# merged with one barrier instead of five before they are published, together with stores that branch nowhere (65536 x
# 4096 0.726 for 0.744, 16384 x 8192 0.750 for 0.745, rows of 2^23 float32 0.767 for 0.786).
DEEP_PANELS_AT_ONCE = 2
# Deep parts of rows: as many rows at once as can be held, but some, for the same reason, and one alone where a part has
# a great many chunks. H200, 2026-11-22, by parts: 64 rows of 2^24 0.734 (66), 0.675 (132), 4 rows of 2^28 0.606 (66),
# 0.629 (132), and with 14 chunks of 16 KB 256 rows of 2^22 0.722 (44), 128 of 2^23 0.747 (66), 0.584 (132).
DEEP_ROWS_AT_ONCE = 2
CHUNKS_OF_A_PART_ALONE = 64
