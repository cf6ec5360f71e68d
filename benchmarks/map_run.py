"""Runs the map in slices that resume: what a file has of the same commit is not measured again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layouts.arguments import Parser

from . import results
from .map_cells import SLICES
from .resume import earlier, go_on, remaining

CALLS, WARM = 5, 1


def parser() -> Parser:
    """Arguments of `python -m benchmarks map`."""
    made = Parser(
        prog="python -m benchmarks map",
        description="Measures the plane of lengths and counts; continues where a run of this commit stopped.",
    )
    made.add_argument("slices", nargs="*", metavar="SLICE", help="slices to measure (all; see --list)")
    made.add_argument("--list", action="store_true", help="list the slices, and stop")
    made.add_argument("--minutes", type=float, default=10.0, metavar="M", help="stop after M minutes (10)")
    made.add_argument("--calls", type=int, default=CALLS, metavar="N", help=f"timed calls per cell ({CALLS})")
    place = "write DIR/<gpu>/<slice>.json (benchmarks/results)"
    # Without a folder it says what is done anyway: results name the command that made them, and no folder.
    made.add_argument(
        "--save",
        nargs="?",
        const=results.FOLDER,
        default=results.FOLDER,
        type=Path,
        metavar="DIR",
        help=place,
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Measures what is asked for, and saves each slice as far as it got; 0 when nothing is left, else 1."""
    made = parser()
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
