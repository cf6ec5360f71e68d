"""Kernels that other packages have registered for operators of ATen, as torch's dispatcher tells of them.

Torch (2.13 and later) lets a package replace another's kernel without a word; before, it raised for a second one from
Python. What torch itself registers, compiled or from Python, is no override.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).resolve().parent)
_OURS = str(Path(__file__).resolve().parent)


def override_of(overload: str, key: str) -> str | None:
    """Where another package has registered what runs for `aten::<overload>` on a key of torch's dispatcher: a file and
    a line, as far as torch knows them. None where that is torch's own kernel, or ours."""
    if not tells_places():  # torch.library's own list tells no places, and has ours as well
        return "an unknown place" if _from_python(overload, key) else None
    # In force first, behind it what it replaced.
    found = re.findall(
        rf"^{re.escape(key)}(?: \(inactive\))?: registered at (.*?) :: ",
        torch._C._dispatch_dump(f"aten::{overload}"),
        re.MULTILINE,
    )
    if not found or found[0].startswith((_TORCH, _OURS)):
        return None
    compiled = not found[0].rpartition(":")[0].endswith(".py")
    return None if compiled and len(found) == 1 else found[0]


def tells_places() -> bool:
    """Whether torch says where kernels were registered: by a private name."""
    return hasattr(torch._C, "_dispatch_dump")


def _from_python(overload: str, key: str) -> bool:
    return f"aten/{overload}/{key}" in getattr(torch.library, "_impls", ())
