"""Torch's private names. Whoever uses one says, beside it, what serves where a version of torch lacks it.

What state torch is in (transforms, forward mode, dispatch modes) only such names tell. Where one is missing it may be
in any: calls then go the ways that are right in every state, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch.autograd import forward_ad as _forward_ad


def look_up(path: str) -> object | None:
    """What torch has by a private name (``"_C._cuda_getDevice"``), None where it has nothing."""
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


Function = TypeVar("Function", bound=Callable)


def constant_when_traced(function: Function) -> Function:
    """Mark a function as `torch.compiler.assume_constant_result` does, which would load all of Dynamo for it: a second
    of every program's start. Where a version of torch has another mark, torch.compile traces the function."""
    function._dynamo_marked_constant = True
    return function


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


current_device = look_up("_C._cuda_getDevice") or torch.cuda.current_device
current_stream = look_up("_C._cuda_getCurrentRawStream") or _current_stream

# Its `_current_level` is above -1 in forward mode, and read anew by every call.
forward_ad = _forward_ad if hasattr(_forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
