"""What the jobs of `sanitize.py` share: tensors that are made and checked on the host, so that the sanitizer watches
hardly any kernel but ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from checking import Guarded

from cute_softmax.ladder import Form
from cute_softmax.plan.base import ClassBase


class Job(NamedTuple):
    """The classes, or the form of a rung, that a call launches, the elements that it is run on, what to call it, and a
    function that runs and checks it: it returns the seconds from the launch, which loads the kernels, to its end."""

    kernels: tuple[ClassBase | Form, ...]
    size: int
    what: str
    check: Callable[[], float]


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device that lies in a copy of all of the storage as the tensor does in its own, filled up to a
    whole word: for the sanitizer a copy of a part of a word (cp.async with a size) is one of all of it."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory = torch.nn.functional.pad(whole, (0, -whole.numel() % 4)).to("cuda")
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def received(guarded: Guarded, copy: torch.Tensor, written: bool = True) -> torch.Tensor:
    """The values of a guarded tensor's copy, on the host.

    Raises AssertionError if anything around them was written, or, with `written`, not all of them.
    """
    whole = torch.empty(0, dtype=guarded.bits.dtype, device=copy.device).set_(copy.untyped_storage())
    guarded.bits.copy_(whole[: guarded.bits.numel()].cpu())
    guarded.check(written)
    return guarded.tensor


def timed(launch: Callable[[], None]) -> float:
    """The seconds of a launch until all is done: an error is this class's."""
    begin = time.perf_counter()
    launch()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
