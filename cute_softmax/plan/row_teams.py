"""Teams of the row movement, measured: which threads and CTAs share rows of which length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .prologue import Prologue


@dataclass(frozen=True)
class Team:
    """How many threads and CTAs share a row, and what each holds. Vectors are accesses of `RowClass.vector` elements.

    threads_per_row: of one CTA; steps: vectors of a row that a thread holds; threads: of a CTA;
    rows_per_thread: rows a thread works on at once; cluster_n: CTAs that share a row;
    staging: per input, how it gets to the thread (see `RowClass`);
    keep: hold converted values between the passes (see `RowClass`);
    persistent: CTAs that stay and take one tile after another;
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

    @property
    def capacity(self) -> int:
        """The longest row, in vectors."""
        return self.threads_per_row * self.steps * self.cluster_n

    @property
    def sms(self) -> int:
        """SMs that the CTAs of a row fill."""
        return math.ceil(self.cluster_n / max(self.min_blocks, 1))


# In the order of their capacity; the first that the row fits into and the architecture has room for is taken.
# Measured on one H200 on 2026-11-20, `python -m benchmarks --suite all` (its results lie in benchmarks/results):
# the best of 3 to 12 teams tried at each capacity. What decides is how many bytes an SM has in flight: a CTA
# alternates between loading and storing, so two to eight of them must share an SM, which bounds registers; and
# a cluster starts and meets together, so the smallest one that leaves room for that is the fastest.
_SHORT = (
    Team(4, 1, rows_per_thread=8),
    Team(8, 1, rows_per_thread=2),
    Team(16, 1, rows_per_thread=2),
    Team(16, 2),
    Team(32, 2, threads=64),
    Team(32, 4, threads=64),
    Team(64, 3, threads=64),
    Team(128, 2),
    Team(128, 3),
    Team(128, 4),
)
# The next row arrives while this one is worked on: where no two fit an SM.
_PREFETCHING = {"staging": ("async", "async"), "keep": False, "persistent": True}


def _waiting(threads: int, steps: int, cluster_n: int, min_blocks: int) -> tuple[Team, Team]:
    """Teams whose rows stay in shared memory, for results in float32 and in 16 bits: as many CTAs an SM as that holds.

    A float32 exponential costs a dozen instructions: those take their elements' places, so that none is evaluated
    twice. In 16 bits that is cheaper than the room.

    What does not exist of a row costs its instructions all the same, so that steps must suit. H200, 2026-11-23, 2048
    rows, ratio to a copy: float32 151936 columns 1.00 in 10 steps, 0.89 in 13, 0.73 in 17; bf16 1.01, 0.98, 0.77.
    float32, before (7 clusters of 512 threads of 16 steps on all of the GPU) and in these: 131080 0.31, 0.98; 200064
    0.45, 0.99; 262144 0.57, 0.98; 400000 0.82, 0.96; bf16 262152 0.39, 0.93; 400128 0.56, 1.01; 800000 0.92, 0.99.
    """
    team = Team(
        threads,
        steps,
        threads,
        cluster_n=cluster_n,
        staging=("shared", "shared"),
        min_blocks=min_blocks,
        precise=True,
    )
    return team, replace(team, keep=False, precise=False)


TEAMS = {
    "softmax": (
        *_SHORT,
        Team(128, 6),
        Team(128, 8),
        Team(256, 6, threads=256),
        Team(256, 8, threads=256),
        Team(128, 6, cluster_n=4),
        Team(256, 4, threads=256, cluster_n=4),
        Team(1024, 4, threads=1024),  # without clusters
        Team(128, 6, cluster_n=8),
        Team(128, 7, cluster_n=8),
        Team(128, 8, cluster_n=8, min_blocks=6),
        Team(1024, 8, threads=1024, keep=False),  # without clusters: a packed row is 32 of 64 registers
        Team(256, 6, threads=256, cluster_n=8),
        Team(256, 8, threads=256, cluster_n=8, min_blocks=3),
        _waiting(256, 5, 16, 5)[1],
        Team(256, 12, threads=256, cluster_n=8, min_blocks=2, precise=True),
        *_waiting(256, 8, 16, 5),
        _waiting(256, 9, 16, 5)[0],
        Team(256, 10, threads=256, cluster_n=16, min_blocks=4, precise=True),
        _waiting(256, 10, 16, 4)[1],
        *_waiting(256, 13, 16, 4),
        *_waiting(256, 17, 16, 3),
        *_waiting(256, 25, 16, 2),
        Team(512, 16, threads=512, cluster_n=16, **_PREFETCHING),
    ),
    "softmax_backward": (
        *_SHORT,
        Team(256, 3, threads=256),
        Team(512, 2, threads=512),
        Team(256, 3, threads=256, cluster_n=2),
        Team(256, 4, threads=256, cluster_n=2),
        Team(512, 4, threads=512),  # without clusters
        Team(256, 3, threads=256, cluster_n=4),
        Team(256, 4, threads=256, cluster_n=4),
        Team(1024, 4, threads=1024, keep=False),  # without clusters
        Team(256, 3, threads=256, cluster_n=8),
        Team(256, 4, threads=256, cluster_n=8),
        Team(256, 3, threads=256, cluster_n=16),
        Team(256, 4, threads=256, cluster_n=16),
        Team(256, 6, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 7, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 8, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 10, threads=256, cluster_n=16, keep=False, min_blocks=2),
        Team(256, 13, threads=256, cluster_n=16, staging=("shared", "shared"), keep=False, min_blocks=2),
        # The two rows of a whole SM: one in shared memory, one in registers.
        Team(256, 19, threads=256, cluster_n=16, staging=("shared", "direct"), keep=False, min_blocks=2),
        Team(512, 13, threads=512, cluster_n=16, staging=("shared", "direct"), keep=False),
        Team(512, 16, threads=512, cluster_n=16, staging=("shared", "direct"), keep=False),
    ),
}
# Nothing is kept for a logarithm, and larger shares suit 16-bit elements whose results are float32: 151936 columns 0.93
# in clusters of 8, 0.83 of 16 (float32 elements 0.99 and 1.00).
_LOGARITHM = {
    _waiting(256, 9, 16, 5)[0]: _waiting(384, 12, 8, 3)[0],
    Team(256, 10, threads=256, cluster_n=16, min_blocks=4, precise=True): _waiting(256, 20, 8, 2)[0],
}
TEAMS["log_softmax"] = tuple(replace(_LOGARITHM.get(t, t), keep=False) for t in TEAMS["softmax"])
# What is only read keeps nothing but the packed row: a thread holds more of it, and a cluster is smaller. Logsumexp on
# an H200, 2026-11-21, bf16, time over torch.sum's: 50304 columns 0.92 (256 x 7, 4 CTAs), 0.99 (128 x 7, 8 CTAs);
# 131072 0.97 (256 x 8 and 4 CTAs an SM), 1.15 (3); 151936 0.96 (512 x 10, 4 CTAs), 1.42 (256 x 5, 16 CTAs).
_READING = (
    *(team for team in TEAMS["log_softmax"] if team.capacity <= 6144),
    Team(256, 7, threads=256, cluster_n=4, min_blocks=5, keep=False),
    Team(256, 8, threads=256, cluster_n=4, min_blocks=4, keep=False),
    Team(1024, 8, threads=1024, keep=False),  # without clusters
    Team(256, 6, threads=256, cluster_n=8, min_blocks=5, keep=False),
    Team(256, 8, threads=256, cluster_n=8, min_blocks=4, keep=False),
    Team(512, 10, threads=512, cluster_n=4, min_blocks=2, keep=False),
    Team(256, 13, threads=256, cluster_n=8, min_blocks=3, keep=False),
    Team(256, 8, threads=256, cluster_n=16, min_blocks=4, keep=False),
    Team(256, 10, threads=256, cluster_n=16, min_blocks=4, keep=False),
)
# Longer rows are streamed by the split movement, as what is only read need not stay on chip. That knows neither an
# index nor a prologue: with those, such rows stay all the same.
_INDEXING = (*_READING, *(t for t in TEAMS["log_softmax"] if t.capacity > _READING[-1].capacity))
TEAMS |= {name: _READING for name in ("logsumexp", "amax", "sum", "entropy")}
TEAMS |= {name: _INDEXING for name in ("selective", "selective_entropy")}
TEAMS["log_softmax_backward"] = TEAMS["softmax_backward"]


# What takes a team's place where half of each row is not read: fewer threads, that each read more. H200, 2026-11-20,
# bf16, time over the unmasked softmax's: 2048 columns 0.778 (64 x 4), 0.800 (128 x 2); its gradient at 8192 columns
# 0.727 (256 x 4), 0.861 (512 x 2).
_CAUSAL = {
    Team(128, 2): Team(64, 4, threads=64),
    Team(512, 2, threads=512): Team(256, 4, threads=256),
}
# What takes a team's place with a prologue: as many CTAs an SM as without, where a register more would cost one. H200,
# 2026-11-21, bf16, time over softmax's own: 50304 columns with a scale 1.00 (7 CTAs), 1.05 (6); 16384 with a mask 0.98
# (256 x 4, 2 CTAs), 1.01 (256 x 8).
_PROLOGUES = {
    Team(256, 8, threads=256): Team(256, 4, threads=256, cluster_n=2),
    Team(256, 4, threads=256, cluster_n=4): Team(256, 4, threads=256, cluster_n=4, min_blocks=5),
    Team(128, 7, cluster_n=8): Team(128, 7, cluster_n=8, min_blocks=7),
}
# What comes first where there are so few rows that all run at once, with as many CTAs an SM as the team may have there:
# a row takes as long as its loads, of which many threads have fewer one after the other. H200, 2026-11-22, bf16,
# microseconds a call in a replayed graph, one row, these / the team for many rows: softmax of 16384 columns 2.02 /
# 2.99, 32000 2.21 / 2.49, 50304 2.36 / 2.54, 128256 2.96 / 3.41, 262144 3.97 / 4.77; its gradient 1.87 / 2.25, 2.00 /
# 2.28, 2.20 / 2.26, 2.68 / 2.70, 3.37 / 3.42; logsumexp of 151936 2.77 / 3.98. No other cluster and CTA gained more
# than 0.06 on that. Ratio to a copy of 16 rows, rotating buffers, 2026-11-23, in registers / in shared memory: bf16
# 151936 0.701 / 0.662, 262152 0.857 / 0.790, 303872 0.659 / 0.650; float32 151936 in shared memory with three CTAs an
# SM 0.697, with registers for the whole row and four 0.677.
_FEW = (
    Team(128, 2, cluster_n=8),
    Team(128, 4, cluster_n=8),
    Team(128, 4, cluster_n=16),
    Team(256, 4, threads=256, cluster_n=16),
    Team(256, 5, threads=256, cluster_n=16, min_blocks=4),
)
_FEW_LONG = (
    *(
        Team(256, steps, threads=256, cluster_n=16, keep=False, min_blocks=3, precise=False)
        for steps in (7, 8, 10)
    ),
    Team(256, 8, threads=256, cluster_n=16, precise=True),
    _waiting(256, 8, 16, 5)[0],
    _waiting(256, 10, 16, 3)[0],
)
FEW = {name: (*_FEW, Team(256, 8, threads=256, cluster_n=16, min_blocks=4)) for name in TEAMS}
FEW |= {name: (*_FEW, *_FEW_LONG) for name in ("softmax", "log_softmax")}
# Longer gradients are in clusters of 16 anyway.
FEW |= {name: _FEW[:4] for name in TEAMS if name.endswith("_backward")}
FEW = {
    name: tuple(replace(t, keep=t.keep and TEAMS[name][0].keep) for t in teams) for name, teams in FEW.items()
}
# Such rows are longer than this, in vectors.
FEW_ABOVE = 1024


@lru_cache(maxsize=1024)
def teams_of(math_name: str, prologue: Prologue, edges: bool) -> tuple[tuple[Team, ...], tuple[Team, ...]]:
    """The teams of a row math for few rows and for many. A bias is a second input of as many registers, as in a
    gradient."""
    if not prologue:
        return FEW[math_name], TEAMS[math_name]
    if TEAMS[math_name] in (_READING, _INDEXING) and prologue.packs and not prologue.mask:
        return FEW["selective"], TEAMS["selective"]
    gradient = math_name.endswith("_backward")
    # What is kept: the exponentials, or the scores, where they are used three times.
    composed = math_name == "log_softmax" and prologue.rescores and not prologue.packs
    keeps = gradient or math_name == "softmax" or composed
    instead = _CAUSAL if prologue.causal else {}
    if keeps and not gradient and not prologue.bias and not edges:  # scalars take registers of their own
        instead = instead | _PROLOGUES
    name = "softmax_backward" if prologue.bias or gradient else "softmax"
    few, many = (
        tuple(replace(instead.get(t, t), keep=instead.get(t, t).keep and keeps) for t in teams)
        for teams in (FEW[name], TEAMS[name])
    )
    return few, many
