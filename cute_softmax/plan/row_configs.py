"""Configurations of the row movement: which threads and CTAs share rows of which length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowConfig:
    """How many threads and CTAs share a row, and what each holds. Vectors are accesses of `RowClass.vector` elements.

    threads_per_row: of one CTA; steps: vectors of a row that a thread holds; threads: of a CTA;
    rows_per_thread: rows a thread works on at once; cluster_n: CTAs that share a row;
    staging: per input, how it gets to the thread (see `RowClass`);
    keep: hold converted values between the passes (see `RowClass`);
    persistent: CTAs take one tile after another;
    min_blocks: CTAs that an SM must hold, which caps registers;
    least: of a configuration for few rows, CTAs, one an SM, that each row can have in `row.TURNS_OF_FEW` turns where
        rows are few enough for it, however little of it they fill; as many as its own fill, if 0;
    above: only for rows of more than so many vectors;
    precise: only for results in float32 (True) or in 16 bits (False): the former spend more instructions and half
        the registers per vector.
    """

    threads_per_row: int
    steps: int
    threads: int = 128
    rows_per_thread: int = 1
    cluster_n: int = 1
    staging: tuple[str, ...] = ("direct", "direct")
    keep: bool = True
    persistent: bool = False
    min_blocks: int = 0
    precise: bool | None = None
    least: int = 0
    above: int = 0

    def __post_init__(self):
        object.__setattr__(self, "staging", tuple(self.staging))

    @cached_property
    def capacity(self) -> int:
        """The longest row, in vectors."""
        return self.threads_per_row * self.steps * self.cluster_n

    @cached_property
    def sms(self) -> int:
        """SMs that the CTAs of a row fill."""
        return math.ceil(self.cluster_n / max(self.min_blocks, 1))

    @cached_property
    def takes(self) -> int:
        """`least`, or the SMs that the CTAs of a row fill."""
        return self.least or self.sms
