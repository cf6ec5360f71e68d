"""Runs the map in slices that resume: what a file has of the same commit is not measured again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from . import results
from .map_cells import SLICES
from .parsers import of_map
from .resume import earlier, go_on, remaining

WARM = 1


def main(argv: Sequence[str]) -> int:
    """Measures what is asked for, and saves each slice as far as it got; 0 when nothing is left, else 1."""
    made = of_map()
    given = made.parse_args(argv)
    if given.list:
        for chosen in SLICES.values():
            cells, providers = len(chosen.suite.cases), ", ".join(chosen.providers)
            print(f"{chosen.name}: {chosen.title}, {cells} cells, {providers}")
        return 0
    if unknown := [name for name in given.slices if name not in SLICES]:
        made.error(f"no slice {', '.join(unknown)}; there are {', '.join(SLICES)}")
    if given.calls < 1:
        made.error("--calls must be at least 1")
    end = time.monotonic() + 60 * given.minutes

    import torch

    if not torch.cuda.is_available():
        print("benchmarks need an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    from .run import Options
    from .timing import settle

    settle()
    header = results.make_header(["map", *argv])
    options = replace(Options(), calls=given.calls, warm=WARM)
    folder = given.save / results.gpu_folder(header["gpu"])
    left = 0
    for name in given.slices or SLICES:
        suite = SLICES[name].suite
        rows = earlier(folder / f"{name}.json", header["commit"])
        known = len(rows)
        rows, lost = go_on(suite, rows, suite.providers, options, end)
        if len(rows) > known:
            results.save(results.Results(header, rows), given.save)
        cases = remaining(suite, rows)
        left += len(cases)
        print(f"{name}: {len(suite.cases) - len(cases)} of {len(suite.cases)} cells", flush=True)
        if lost:
            return 1
    return int(left > 0)
