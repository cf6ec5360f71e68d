"""Configurations of the row movement: which threads and CTAs share rows of which length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .maths import MATHS
from .prologue import Prologue
from .tables import lists, table


@dataclass(frozen=True)
class RowConfig:
    """How many threads and CTAs share a row, and what each holds. Vectors are accesses of `RowClass.vector` elements.

    threads_per_row: of one CTA; steps: vectors of a row that a thread holds; threads: of a CTA;
    rows_per_thread: rows a thread works on at once; cluster_n: CTAs that share a row;
    staging: per input, how it gets to the thread (see `RowClass`);
    keep: hold converted values between the passes (see `RowClass`);
    persistent: CTAs take one tile after another;
    min_blocks: CTAs that an SM must hold, which caps registers;
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

    def __post_init__(self):
        object.__setattr__(self, "staging", tuple(self.staging))

    @property
    def capacity(self) -> int:
        """The longest row, in vectors."""
        return self.threads_per_row * self.steps * self.cluster_n

    @property
    def sms(self) -> int:
        """SMs that the CTAs of a row fill."""
        return math.ceil(self.cluster_n / max(self.min_blocks, 1))


_rows = table()["row"]
# By row math: for many rows, and what comes first where there are so few that all run at once.
MANY, FEW = lists(_rows["many"], RowConfig), lists(_rows["few"], RowConfig)
FEW_ABOVE: int = _rows["few_above"]  # vectors: rows of no more are always as many are
# What takes a configuration's place where the diagonal cuts half of each row off, and with a prologue.
_CAUSAL, _PROLOGUE = (
    {RowConfig(**a): RowConfig(**b) for a, b in _rows[name]} for name in ("causal", "prologue")
)


@lru_cache(maxsize=1024)
def configurations(
    math_name: str, prologue: Prologue, edges: bool
) -> tuple[tuple[RowConfig, ...], tuple[RowConfig, ...]]:
    """The configurations of a row math for few rows and for many. A bias is a second input of as many registers, as in
    a gradient."""
    if not prologue:
        return FEW[math_name], MANY[math_name]
    if not MATHS[math_name, True].outputs and prologue.packs and not prologue.mask:
        return FEW["selective"], MANY["selective"]
    gradient = math_name.endswith("_backward")
    # What is kept: the exponentials, or the scores, where they are used three times.
    composed = math_name == "log_softmax" and prologue.rescores and not prologue.packs
    keeps = gradient or math_name == "softmax" or composed
    instead = _CAUSAL if prologue.causal else {}
    if keeps and not gradient and not prologue.bias and not edges:  # scalars take registers of their own
        instead = instead | _PROLOGUE
    name = "softmax_backward" if prologue.bias or gradient else "softmax"
    few, many = (
        tuple(replace(instead.get(c, c), keep=instead.get(c, c).keep and keeps) for c in found)
        for found in (FEW[name], MANY[name])
    )
    return few, many
