"""Compile Plan classes ahead, into the store on disk, with a process per core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

from .cache import Store

Kernel = TypeVar("Kernel")


def precompile(wanted: Sequence[Kernel], load: Callable[[Kernel], object] | None = None) -> Iterator[Kernel]:
    """Have every kernel in the store of this user; yields each as soon as it and those before it are there.

    wanted: Plan classes, or what else `load` compiles, or takes from the store. Needs no GPU. About a second of one
    core each; what the store has already takes milliseconds. Raises OSError where nothing can be kept in the store's
    folder.
    """
    if not wanted:
        return iter(())
    Store().check()
    return _in_order(wanted, load)


def _in_order(wanted: Sequence[Kernel], load: Callable[[Kernel], object] | None) -> Iterator[Kernel]:
    # Spawned, not forked: a forked child could use neither this process's threads nor its CUDA context.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), spawn) as pool:
        yield from pool.map(partial(_into_store, load), wanted)


def _into_store(load: Callable[[Kernel], object] | None, kernel: Kernel) -> Kernel:
    if load is None:
        from .launch import function_of as load

    load(kernel)
    return kernel
