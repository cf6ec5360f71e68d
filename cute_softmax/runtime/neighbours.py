"""What an installed version of cutlass-dsl switches off beside this package: torch's own operators in the CuTe DSL.

Recent versions of torch have operators of their own in it, of which they register none unless the version of
cutlass-dsl is one of a list. The list is private; where torch has none under that name, nothing is known.
"""

from __future__ import annotations

import os
import re
from importlib import metadata

import torch

from .private import look_up

DISTRIBUTION = "nvidia-cutlass-dsl"
_ANYHOW = "TORCH_NATIVE_SKIP_VERSION_CHECK"


def switched_off() -> str:
    """A line on torch's operators that are off because of the version of cutlass-dsl; empty where none are."""
    taken = look_up("_native.cutedsl_utils._CUTEDSL_REQUIRED_VERSIONS")
    if not taken or not torch.backends.cuda.is_built() or os.environ.get(_ANYHOW) == "1":
        return ""
    try:
        found = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
    if found in map(str, taken):
        return ""
    known = sorted(map(str, taken), key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
    return (
        f"torch {torch.__version__} has its own CuTe DSL operators off: it takes cutlass-dsl {', '.join(known)}, "
        f"and this is {found}"
    )
