"""Which kernels a program used: written down as it runs, so that they can be compiled ahead elsewhere.

With `$CUTE_SOFTMAX_RECORD` set to a path every process appends each Plan class that it loads or compiles, a line of
JSON each; `python -m cute_softmax precompile --recorded FILE` compiles them on another machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from ..plan import PanelClass, Prologue, RowClass
from ..plan.base import ClassBase

ENVIRONMENT = "CUTE_SOFTMAX_RECORD"


def kinds() -> dict[str, type[ClassBase]]:
    """The classes of all movements by name."""
    # Here, as a program that only writes a record needs none of them: 10 ms of its start.
    from ..plan.matmul_backward import MatmulBackwardClass, MatmulDeltaClass
    from ..plan.matmul_class import MatmulClass
    from ..plan.mean import MeanClass
    from ..plan.rescale import RescaleClass
    from ..plan.shards import MergeClass, SliceClass
    from ..plan.short import ShortClass
    from ..plan.stream import StreamClass
    from ..plan.topk import TopkClass
    from ..plan.topk_long import LongTopkClass

    matmul = MatmulClass, MatmulBackwardClass, MatmulDeltaClass
    every = RowClass, StreamClass, ShortClass, PanelClass, *matmul, MeanClass, RescaleClass
    every += MergeClass, SliceClass, TopkClass, LongTopkClass
    return {kind.__name__: kind for kind in every}


def note(kernel: ClassBase) -> None:
    """Append a class to the record, if one is kept. Lines of processes that write at the same time stay whole."""
    if path := os.environ.get(ENVIRONMENT):
        line = json.dumps({"kind": type(kernel).__name__, **asdict(kernel)}) + "\n"
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)


def read(path: Path) -> list[ClassBase]:
    """The classes of a record, each once; ValueError for a line that is none, OSError for a file that is not there."""
    found, known = {}, kinds()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = {name: _tuples(value) for name, value in json.loads(line).items()}
            kind = known[fields.pop("kind")]
            if "prologue" in fields:
                fields["prologue"] = Prologue(**fields["prologue"])
            found[kind(**fields)] = None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no Plan class: {error}") from None
    return list(found)


def _tuples(value: object) -> object:
    """JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
