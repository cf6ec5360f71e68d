"""How many CTAs of each class of rows an SM holds: a register more can cost one, and with it a sixth of the speed.

`python tests/occupancy.py` compiles the classes of the table for sm_90a (minutes), records them in `occupancy.json` and
names those of which an SM holds fewer than it did.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]

import classes  # noqa: E402
import pytest  # noqa: E402
from compiled import Compiled, compile_anew  # noqa: E402

from benchmarks.tune_rules import RESIDENT_THREADS  # noqa: E402
from cute_softmax.plan import RowClass  # noqa: E402
from cute_softmax.plan.hardware import ARCHITECTURES  # noqa: E402

ARCHITECTURE = "sm_90a"
MATHS = ("softmax", "log_softmax", "logsumexp", "softmax_backward", "log_softmax_backward")
FILE = HERE / "occupancy.json"
CTAS = 32  # of an SM, at most
GRAIN = 8  # registers of a thread are given out in


def held(c: RowClass, found: Compiled) -> int:
    """CTAs of a compiled class that an SM holds."""
    architecture = ARCHITECTURES[c.architecture]
    registers = -(-found.registers // GRAIN) * GRAIN * c.threads
    room = architecture.registers // registers, architecture.ctas_of(c.shared_memory)
    return min(RESIDENT_THREADS // c.threads, *room, CTAS)


def recorded() -> dict[str, int]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def told(c: RowClass) -> str:
    return f"{c.math} {c.dtypes[0]} {c.name}" + (f" min_blocks {c.min_blocks}" if c.min_blocks else "")


def of_table() -> Iterator[RowClass]:
    """Those that most calls run."""
    found = classes.all_classes(ARCHITECTURE, classes.SAME[::2], two_pass=False)
    return (c for c in found if c.math in MATHS)


def _held_anew(c: RowClass) -> int:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        return held(c, compile_anew(c, Path(folder), patch))


def main() -> None:
    before, found = recorded(), list(dict.fromkeys(of_table()))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        now = dict(zip(map(told, found), pool.map(_held_anew, found, chunksize=4), strict=True))
    for name, ctas in now.items():
        if ctas < before.get(name, 0):
            print(f"{name}: {ctas} CTAs, {before[name]} before")
    FILE.write_text(json.dumps(dict(sorted(now.items())), indent=0) + "\n")
    print(f"{len(now)} classes")


if __name__ == "__main__":
    main()
