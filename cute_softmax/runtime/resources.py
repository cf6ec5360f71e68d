"""What a compiled kernel takes of an SM: registers and stack as cuobjdump reads them, and shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plan import RowClass


@dataclass(frozen=True)
class Resources:
    """registers: per thread; stack: bytes per thread, where spilled registers go (0: none spilled);
    shared_memory: bytes per CTA.
    """

    registers: int
    stack: int
    shared_memory: int


@cache
def cuobjdump() -> str:
    """The path of cuobjdump: of the package nvidia-cuda-cuobjdump, or the one on PATH.

    Raises FileNotFoundError where there is neither.
    """
    try:
        for file in metadata.files("nvidia-cuda-cuobjdump") or ():
            if file.name == "cuobjdump":
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    if found := shutil.which("cuobjdump"):
        return found
    raise FileNotFoundError("cuobjdump is missing: pip install nvidia-cuda-cuobjdump")


def resources(row_class: RowClass) -> Resources:
    """Compile a Plan class, for its own architecture and without a GPU, and read what it takes."""
    from .compile import compile_class

    return Resources(*registers_of(partial(compile_class, row_class)), row_class.shared_memory)


def registers_of(build: Callable[[str], Any]) -> tuple[int, int]:
    """Registers and bytes of stack per thread of what `build`, given options of the compiler, compiles: of several
    kernels, those of the one that takes the most."""
    tool = cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        compiled = build(f"--keep-cubin --dump-dir={folder}")
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.artifacts.CUBIN)
        told = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    if not found:
        raise RuntimeError(f"cuobjdump named no resources: {told.stdout}{told.stderr}")
    registers, stack = max((int(registers), int(stack)) for registers, stack in found)
    return registers, stack
