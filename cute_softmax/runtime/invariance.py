"""Whether a row's bits must not depend on its company: the mode that `batch_invariant` switches on.

Calls read the mode once, where they begin, and carry it with all else that describes them: a gradient runs in the mode
of its forward pass, on whichever thread autograd runs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

ENVIRONMENT = "CUTE_SOFTMAX_BATCH_INVARIANT"


def from_environment() -> tuple[bool, int | None]:
    """(whether the mode holds from the start, the block size of rows that ranks share) by the environment: 0, 1, or a
    block size.

    Raises ValueError for anything else.
    """
    value = os.environ.get(ENVIRONMENT, "").strip() or "0"
    if not (value.isascii() and value.isdigit()):
        raise ValueError(
            f"${ENVIRONMENT} is {value!r}: it is 0, 1, or the block size of rows that ranks share"
        )
    number = int(value)
    return number > 0, number if number > 1 else None


_ALWAYS, _BLOCK = from_environment()
_inside: ContextVar[bool] = ContextVar("cute_softmax.batch_invariant", default=_ALWAYS)
_block: ContextVar[int | None] = ContextVar("cute_softmax.block_size", default=_BLOCK)
_changing = threading.Lock()  # of the two that follow
_blocks = 0  # that are open now, in all threads
_anywhere = _ALWAYS  # what torch.compile puts a guard on: it knows no thread's state

# For calls that repeat, whose whole way takes a few microseconds: a C function.
inside = _inside.get


@contextmanager
def batch_invariant(*, block_size: int | None = None) -> Iterator[None]:
    """Make the bits of a row's result, within a block, independent of the tensor that the row is part of.

    The bits are then a function of the row's values, its length, dtypes, the function and its arguments, the GPU model,
    the version of this package and the digest of the table shipped for the GPU; the user's own tables are ignored. They
    do not depend on the number of rows, the row's position, alignment, strides, whether the result is written in place,
    other rows, the stream, or a CUDA graph. `docs/batch-invariance.md` has the details for each function, and the
    costs.

    The mode belongs to the thread, or asyncio task, that enters it. It also applies to gradients of calls within the
    block, wherever they are computed. Code from torch.compile has the mode while any thread is in such a block, and is
    compiled once more for it; torch.export and `prepare` fix the mode at the time of tracing. Under `accelerate`
    torch's own operators have it while any thread is in such a block. If `$CUTE_SOFTMAX_BATCH_INVARIANT` is set to 1,
    or to a block size, the mode is always on.

    Args:
        block_size: For rows shared by ranks (`group=`): the number of elements in the blocks by which a row is reduced.
            The ranks' slices begin at multiples of it, and any number of ranks gives the same bits. None: such calls
            raise ValueError.

    Returns:
        A context manager, which can also decorate functions.

    Raises:
        TypeError: For a block size that is not an int.
        ValueError: For a block size below 1.

    Examples:
        >>> import torch
        >>> import cute_softmax
        >>> x = torch.randn(64, 1000)
        >>> with cute_softmax.batch_invariant():
        ...     y = cute_softmax.softmax(x)
    """
    global _blocks, _anywhere
    if block_size is not None:
        if type(block_size) is not int:
            raise TypeError(f"block_size must be an int, not {type(block_size).__name__}")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: it must be at least 1")
    with _changing:
        _blocks += 1
        _anywhere = True
    mode, block = _inside.set(True), _block.set(block_size if block_size is not None else _block.get())
    try:
        yield
    finally:
        _inside.reset(mode)
        _block.reset(block)
        with _changing:
            _blocks -= 1
            _anywhere = _ALWAYS or _blocks > 0


def in_force() -> bool:
    """Whether a call that begins now is batch-invariant. Traced by torch.compile: whether one of any thread is."""
    return _anywhere if torch.compiler.is_compiling() else inside()


def anywhere() -> bool:
    """Whether some thread is in such a block, or all are."""
    return _anywhere


def block_size() -> int | None:
    """Elements of the blocks that rows which ranks share are reduced by, if they are given."""
    return _block.get()
