"""Compile Plan classes ahead, into the store on disk, with a process per core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from .cache import Store
from .plan import RowClass


def precompile(wanted: Sequence[RowClass]) -> Iterator[RowClass]:
    """Have every class in the store of this user; yields each as soon as it and those before it are there.

    Needs no GPU. About a second of one core each; what the store has already takes milliseconds. Raises OSError where
    nothing can be kept in the store's folder.
    """
    if not wanted:
        return iter(())
    Store().check()
    return _in_order(wanted)


def _in_order(wanted: Sequence[RowClass]) -> Iterator[RowClass]:
    # Spawned, not forked: a forked child could use neither this process's threads nor its CUDA context.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), spawn) as pool:
        yield from pool.map(_into_store, wanted)


def _into_store(c: RowClass) -> RowClass:
    from .launch import function_of

    function_of(c)
    return c
