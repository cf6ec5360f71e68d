"""Kernels that other packages have registered for operators of ATen, as torch's dispatcher tells of them.

Torch (2.13 and later) lets a package replace another's kernel without a word; before, it raised for a second one from
Python. What torch itself registers, compiled or from Python, is no override. Torch 2.8 says of no kernel from Python
where it was registered.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from ..runtime.private import look_up

_NOWHERE = "/dev/null"  # torch 2.8 has this for all that Python registers
_TORCH = str(Path(torch.__file__).resolve().parent)
_OURS = str(Path(__file__).resolve().parent)


def override_of(overload: str, key: str) -> str | None:
    """Where another package has registered what runs for `aten::<overload>` on a key of torch's dispatcher: a file and
    a line, as far as torch knows them. None where that is torch's own kernel, or ours."""
    # torch.library's own list tells no places, and has ours as well.
    if not tells_places() and f"aten/{overload}/{key}" in _registered():
        return "an unknown place"
    # In force first, behind it what it replaced.
    places = rf"^{re.escape(key)}(?: \(inactive\))?: registered at (.*?) :: "
    found = re.findall(places, _dump(f"aten::{overload}"), re.MULTILINE)
    if not found or found[0].startswith((_TORCH, _OURS)):
        return None
    compiled = not found[0].rpartition(":")[0].endswith(".py")
    return None if compiled and len(found) == 1 else found[0]


def tells_places() -> bool:
    """Whether torch says where Python has registered kernels. Asked of one that torch itself has registered."""
    for name in _registered():
        told = _dump("::".join(name.split("/")[:2]))
        return told != "" and _NOWHERE not in told
    return True


def _dump(operator: str) -> str:
    """What torch's dispatcher has for an operator, a line each; nothing where it does not say."""
    dump = look_up("_C._dispatch_dump")
    return "" if dump is None else dump(operator)


def _registered() -> Collection[str]:
    """What has been registered from Python: namespace, overload and key, with slashes between."""
    return look_up("library._impls") or ()
