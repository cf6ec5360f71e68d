"""Rows that ranks share and keep on chip while their states are exchanged: which Plan class.

A CTA has several rows in shared memory, each in another phase: on its way from global memory, reduced, waiting for the
states of the other ranks, finished. So what an exchange takes is hidden behind the loads of the rows after it.
"""

from __future__ import annotations

import math

from layouts.algebra import Layout

from .hardware import Architecture, Device
from .maths import CACHE_LINE, NotPlanned
from .problem import ITEM_SIZE
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row import PART, RowClass, vector_of

THREADS = 512
# (threads, CTAs) that share a row of a rank. Of several rows of a CTA one is exchanged while another is worked on; 8
# CTAs are there on every GPU that has clusters.
WAYS = ((32, 1), (64, 1), (128, 1), (256, 1), (256, 2), (256, 4), (256, 8), (512, 8))
# Bytes of a row, or of several short ones, that a CTA has: with four places for such a share in the 227 KiB of an SM
# two rows are on their way while one waits.
SHARE = 56 * 1024
# Few rows are shared by more CTAs than they need, until there are so many.
FILL, MANY = 96, 1 << 30
LEAST, MOST = 3, 6  # places for rows in shared memory
LAG = 3  # turns that a row waits for the states of other ranks, at most
BESIDE = 2048  # bytes of shared memory for all else
# SMs that are left to other kernels: a peer may need one of them to get as far as its own part of the rows.
LEFT_OVER = 8
LANES = 32  # that read the states of a row: of all CTAs that share it on all ranks
# Bytes of a workspace in front of the states: a cache line of words that kernels count in, then a word of each rank.
COUNTERS = 128
HEADER = COUNTERS + 4 * LANES


def sharers(
    math_name: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    columns: int,
    rows: int = MANY,
    prologue: Prologue = NO_PROLOGUE,
) -> str:
    """Threads and CTAs that share a slice of this many elements, as `Prologue.ranks` has them: of the widest slice, all
    ranks take the same.

    dtypes: of all full operands. rows: how many there are. Raises NotPlanned where no cluster holds three such slices.
    """
    vector, bytes_of_element = _units(math_name, dtypes, columns, prologue)
    step = THREADS * vector * bytes_of_element
    ways = [way for way in WAYS if way[1] <= architecture.cluster_limit]
    for threads_per_row, cluster_n in ways:
        fits = _steps(columns, threads_per_row, cluster_n, vector, dtypes) * step <= SHARE
        if fits and math.ceil(rows / (THREADS // threads_per_row)) * cluster_n >= FILL:
            break
    if _places(_steps(columns, threads_per_row, cluster_n, vector, dtypes) * step, architecture) < LEAST:
        raise NotPlanned(
            f"slices of {columns} elements ({', '.join(dtypes)}) that ranks share do not fit on chip on "
            f"{architecture.name}"
        )
    return f"{threads_per_row}x{cluster_n}"


def ring_class(
    math_name: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    columns: int,
    *,
    edges: bool,
    access: tuple[int, ...],
    prologue: Prologue,
    kept_modes: int = 1,
) -> RowClass:
    """The class of slices of this many elements. Raises NotPlanned for those that are not held on chip."""
    facts = facts_of(math_name, True, prologue)
    threads_per_row, cluster_n = map(int, prologue.ranks.split("x"))
    vector, bytes_of_element = _units(math_name, dtypes[: facts.full], columns, prologue)
    steps = _steps(columns, threads_per_row, cluster_n, vector, dtypes[: facts.full])
    ring = _places(THREADS * steps * vector * bytes_of_element, architecture)
    if ring < LEAST or cluster_n > architecture.cluster_limit:
        raise NotPlanned(
            f"slices of {columns} elements shared by {prologue.ranks} threads do not fit on chip"
        )
    return RowClass(
        math=math_name,
        architecture=architecture.name,
        dtypes=dtypes,
        vector=vector,
        edges=edges,
        access=tuple(math.gcd(a, vector) for a in access),
        online=True,
        threads_per_row=threads_per_row,
        steps=steps,
        threads=THREADS,
        rows_per_thread=1,
        cluster_n=cluster_n,
        staging=("shared",) * len(facts.inputs),
        keep=False,
        persistent=True,
        min_blocks=1,
        part=PART,
        kept_modes=kept_modes,
        prologue=prologue,
        ring=ring,
        lag=min(LAG, ring - 2),
    )


def sms_of(device: Device) -> int:
    """SMs that clusters of up to 8 CTAs have. With a cluster more than run at once it would be twice as long until all
    rows are finished."""
    most = device.multiprocessors - LEFT_OVER
    return min(most, 8 * device.eights) if device.eights else most - LEFT_OVER


def words_of(math_name: str, prologue: Prologue) -> int:
    """Numbers that a CTA exchanges of a row, at most: its state and, with a target, its score."""
    return facts_of(math_name, True, prologue).state_bytes // 4 + bool(prologue.target)


def states_of(c: RowClass, ranks: int, rows: int) -> Layout:
    """(row, (CTA of its rank, rank), number) -> place of 8 bytes in a half of a workspace, a number and its tag: a
    reduction buffer whose peers are the CTAs of all ranks."""
    words = words_of(c.math, c.prologue)
    peers = c.cluster_n * ranks
    return Layout((rows, (c.cluster_n, ranks), words), (words * peers, (words, words * c.cluster_n), 1))


def _units(math_name: str, dtypes: tuple[str, ...], columns: int, prologue: Prologue) -> tuple[int, int]:
    """(elements of a vector, bytes of an element of all inputs together)."""
    inputs = facts_of(math_name, True, prologue).inputs
    return vector_of(dtypes, columns), sum(ITEM_SIZE[dtypes[i]] for i in range(len(inputs)))


def _steps(columns: int, threads_per_row: int, cluster_n: int, vector: int, dtypes: tuple[str, ...]) -> int:
    """Vectors that a thread has of a row."""
    line = CACHE_LINE // min(ITEM_SIZE[d] for d in dtypes)
    share = columns if cluster_n == 1 else math.ceil(math.ceil(columns / cluster_n) / line) * line
    return math.ceil(share / (threads_per_row * vector))


def _places(share: int, architecture: Architecture) -> int:
    """Places for shares of so many bytes in shared memory."""
    return min((architecture.shared_memory - BESIDE) // share, MOST)
