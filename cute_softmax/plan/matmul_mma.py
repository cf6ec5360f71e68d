"""Plan classes of softmax(S) @ V without wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .hardware import KIB, Architecture

if TYPE_CHECKING:
    from .matmul_class import MatmulClass

FEW_ROWS = 64  # that the four warps of one block hold
RESERVED = 2 * KIB  # of shared memory: alignment to the swizzle's 1024 bytes, what the driver keeps
MOST_STAGES = 4


def mma_classes(architecture: Architecture, plain: MatmulClass, rows: int) -> Iterator[MatmulClass]:
    """The classes that multiply by mma.sync, like `plain` but for what the rows decide."""
    if rows <= FEW_ROWS:
        configs = [(1, 1)]
    elif plain.depth <= (64 if plain.causal or plain.lines else 128) and not (plain.wide or plain.mask):
        # More would not fit into a thread's 255 registers.
        configs = [(2, 2), (1, 2), (2, 1)]
    else:
        configs = [(2, 1), (1, 1)]
    for warpgroups, blocks in configs:
        c = replace(plain, warpgroups=warpgroups, blocks=blocks)
        # A thread may take 255 registers: 256 threads have them all.
        for resident in (2, 1) if warpgroups == 1 else (1,):
            room = architecture.shared_memory // resident - RESERVED
            stages = min(room // (c.score_stage_bytes + c.value_stage_bytes), MOST_STAGES)
            if stages >= 2:
                yield replace(c, score_stages=stages, value_stages=stages, resident=resident)
                break
