"""Configurations of the short movement: how rows of which length are divided among threads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConfig:
    """Of rows of no more than `capacity` elements.

    rows_per_thread: rows that a thread works on at once; bytes: of a warp's stretch, of the widest operand (more where
    each lane needs them for its rows); whole_bytes: the same where vectors hold whole rows; threads: of a CTA;
    min_blocks: CTAs that an SM must hold, which caps registers.
    """

    capacity: int
    rows_per_thread: int = 1
    bytes: int = 4096
    whole_bytes: int = 2048
    threads: int = 128
    min_blocks: int = 0
