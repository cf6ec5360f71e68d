"""Which configurations the tuner tries: rules, and what cannot fit left out. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cute_softmax.plan import WARP, RowConfig
from cute_softmax.plan.hardware import Architecture
from cute_softmax.plan.panel_configs import PANEL_BYTES, PanelConfig
from cute_softmax.plan.problem import ALIGNMENT
from cute_softmax.plan.short_configs import ShortConfig

THREADS_PER_ROW = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
BETWEEN = (160, 192, 224, 288, 320, 352, 384, 448)  # other numbers of whole warps
CLUSTERS = (1, 2, 4, 8, 16)
SHARING = 128  # threads at least of each CTA of a cluster, and of one that keeps rows in shared memory
SHORT = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)  # elements of a short row, at most
SHORT_ELEMENTS = 96  # that a thread has of short rows at once
MOST_STEPS = 32
# Of what a configuration can hold, the least that the rows it is tried for have; with threads of another number than a
# power of two, which are there to be filled.
FULL, FILLED = 0.8, 0.95
HELD_REGISTERS = 128  # of a thread, for the row
OTHER_REGISTERS = 32  # of a thread, for addresses, predicates and partial results
RESIDENT_THREADS = 2048  # of an SM
PANEL_THREADS = 1536  # of an SM, at most: they have 40 registers each, and panels lie in shared memory


def row_candidates(
    vectors: int, inputs: int, precise: bool, architecture: Architecture
) -> Iterator[RowConfig]:
    """Configurations for rows of so many vectors of 16 bytes.

    inputs: full ones. precise: whether a vector has four elements (float32) and not eight.
    """
    for cluster, threads_per_row in product(CLUSTERS, (*THREADS_PER_ROW, *BETWEEN)):
        if cluster > architecture.cluster_limit or (cluster > 1 and threads_per_row < SHARING):
            continue
        steps = math.ceil(vectors / (cluster * threads_per_row))
        capacity = steps * cluster * threads_per_row
        least = FILLED if threads_per_row in BETWEEN else FULL
        if steps > MOST_STEPS or (vectors < least * capacity and threads_per_row > THREADS_PER_ROW[0]):
            continue
        config = RowConfig(
            threads_per_row, steps, threads=max(threads_per_row, 64), cluster_n=cluster, precise=None
        )
        yield from _holding(config, inputs, precise, architecture)


def _holding(
    config: RowConfig, inputs: int, precise: bool, architecture: Architecture
) -> Iterator[RowConfig]:
    """The ways to hold a row: in registers, as numbers or packed, with several rows a thread; in shared memory."""
    vectors = config.steps * inputs
    for keep in (True, False):
        registers = vectors * (8 if keep and not precise else 4)
        if precise and not keep:
            continue  # a float32 takes as much packed
        rows = (1, 2, 4, 8) if config.threads_per_row < WARP else (1,)
        for several, threads in product(rows, sorted({config.threads, max(config.threads, 128)})):
            held = several * registers + OTHER_REGISTERS
            if held > HELD_REGISTERS + OTHER_REGISTERS or held * threads > architecture.registers:
                continue
            made = replace(config, keep=keep, rows_per_thread=several, threads=threads)
            yield made
            if config.cluster_n > 1:
                blocks = min(architecture.registers // (held * threads), RESIDENT_THREADS // threads)
                if blocks > 1:
                    yield replace(made, min_blocks=blocks)
    if config.threads_per_row < SHARING:
        return
    shared = ("shared",) * inputs
    for staging, keep in product({shared, (*shared[:1], *("direct",) * (inputs - 1))}, (False, True)):
        if keep and inputs > 1:
            continue
        staged = sum(how == "shared" for how in staging)
        size = ALIGNMENT * (2 if keep and not precise else 1)
        cta = config.threads * config.steps * staged * size
        blocks = min(architecture.shared_memory // cta, RESIDENT_THREADS // config.threads)
        if blocks:
            yield replace(config, staging=(*staging, "direct")[:2], keep=keep, min_blocks=blocks)


def short_candidates() -> Iterator[ShortConfig]:
    """Configurations of short rows."""
    for capacity, rows, threads, kilobytes in product(SHORT, (1, 2, 4, 8), (64, 128, 256), (2, 4, 8)):
        least = WARP * rows * capacity * 2  # bytes of a stretch that gives each lane so many rows
        if rows * capacity > SHORT_ELEMENTS or (kilobytes > 2 and least > kilobytes * 1024):
            continue
        whole = (1, 2, 4) if capacity <= ALIGNMENT // 2 and rows == 1 else (2,)
        for whole_kilobytes in whole:
            yield ShortConfig(
                capacity, rows, bytes=kilobytes * 1024, whole_bytes=whole_kilobytes * 1024, threads=threads
            )


def panel_candidates(inputs: int, architecture: Architecture) -> Iterator[PanelConfig]:
    """Configurations for panels: which lengths they hold depends on the columns, and is asked of the plan."""
    for threads, steps, vector_bytes in product(
        (64, 128), (2, 4, 6, 8, 10, 12, 14, 16, 20, 24), (ALIGNMENT, ALIGNMENT // 2)
    ):
        blocks = min(_blocks(threads, steps, inputs, architecture), PANEL_THREADS // threads)
        # As many as shared memory holds, and as many as have registers for what they keep, of either size of elements.
        held = (steps * inputs * vector_bytes // size for size in (2, 4))
        for most in {blocks, *(architecture.registers // (threads * (n + OTHER_REGISTERS)) for n in held)}:
            if 0 < most <= blocks:
                yield PanelConfig(threads, steps, min_blocks=most, alone=True, vector_bytes=vector_bytes)
    for threads, steps, cluster, vector_bytes, panel_bytes in product(
        (128, 256, 512),
        (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
        CLUSTERS,
        (ALIGNMENT, ALIGNMENT // 2),
        (PANEL_BYTES, PANEL_BYTES // 2, PANEL_BYTES // 4),
    ):
        blocks = min(_blocks(threads, steps, inputs, architecture), PANEL_THREADS // threads)
        if not blocks or cluster > architecture.cluster_limit or (vector_bytes < ALIGNMENT and cluster > 1):
            continue
        # Threads and clusters are many, and panels narrow, where columns are long.
        if cluster < {PANEL_BYTES: 1, PANEL_BYTES // 2: 8}.get(panel_bytes, 16):
            continue
        if threads > 256 and cluster < 16:
            continue
        if vector_bytes < ALIGNMENT and threads > 128:
            continue
        yield PanelConfig(threads, steps, cluster, blocks, vector_bytes=vector_bytes, panel_bytes=panel_bytes)


def deep_candidates(kind: str, inputs: int, architecture: Architecture) -> Iterator[PanelConfig]:
    """Configurations that stream: what they hold is cut into chunks. kind: "column", "wide" or "row"."""
    panel_bytes = PANEL_BYTES * 2 if kind == "wide" else PANEL_BYTES
    fewest = [(0, 0)] if kind == "row" else [*product((7, 8, 11), (8, 14))]  # chunks of a part
    for threads, buffers, chunk_steps in product((256, 512, 1024), (2, 4, 5, 6, 7, 8), (1, 2, 4)):
        steps = buffers * chunk_steps
        blocks = min(_blocks(threads, steps, inputs, architecture), 2)
        for count, (chunks, alone) in product(range(1, blocks + 1), fewest):
            yield PanelConfig(
                threads, steps, min_blocks=count, panel_bytes=panel_bytes, buffers=buffers, chunks=chunks,
                chunks_alone=alone,
            )  # fmt: skip


def _blocks(threads: int, steps: int, inputs: int, architecture: Architecture) -> int:
    """CTAs whose panels an SM's shared memory holds; some is left for reductions."""
    room = architecture.shared_memory - 2048
    return min(room // (threads * steps * ALIGNMENT * inputs), RESIDENT_THREADS // threads, 16)


def neighbours(
    config: RowConfig | PanelConfig | ShortConfig,
) -> Iterator[RowConfig | PanelConfig | ShortConfig]:
    """Configurations that differ from one by a step: what a quick set tries around a table's own."""
    if isinstance(config, ShortConfig):
        for name in ("rows_per_thread", "bytes", "whole_bytes", "threads"):
            value = getattr(config, name)
            yield from (replace(config, **{name: v}) for v in (value // 2, value * 2) if v)
        return
    # Steps of a panel are cut into chunks.
    step = config.buffers if isinstance(config, PanelConfig) else 1
    changed = {
        "steps": (config.steps - step, config.steps + step),
        "cluster_n": (config.cluster_n // 2, config.cluster_n * 2),
        "min_blocks": (config.min_blocks - 1, config.min_blocks + 1),
    }
    if isinstance(config, PanelConfig) and config.ahead:
        changed = {
            name: (getattr(config, name) - 1, getattr(config, name) + 1) for name in ("ahead", "registers")
        }
    if isinstance(config, RowConfig) and config.threads_per_row == config.threads:
        # A warp more or less, of as many steps, and of one more or less.
        for threads, steps in product((config.threads - WARP, config.threads + WARP), (-1, 0, 1)):
            if SHARING <= threads <= THREADS_PER_ROW[-1] and 0 < config.steps + steps <= MOST_STEPS:
                yield replace(config, threads_per_row=threads, threads=threads, steps=config.steps + steps)
    for name, values in changed.items():
        for value in values:
            if 0 < value <= {"cluster_n": CLUSTERS[-1]}.get(name, MOST_STEPS):
                yield replace(config, **{name: value})
