"""Runs the map in slices that resume: what a file has of the same commit is not measured again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import console, results
from .cases import CAUSAL, MASK, REDUCTIONS, Case
from .map_cells import SLICES, Slice
from .masked import SCALE

if TYPE_CHECKING:
    from .run import Options

CALLS, WARM = 5, 1


def parser() -> argparse.ArgumentParser:
    """Arguments of `python -m benchmarks map`."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks map",
        description="Measures the plane of lengths and counts; goes on where an earlier run of this commit stopped.",
    )
    made.add_argument("slices", nargs="*", metavar="SLICE", help="some of the slices (all; see --list)")
    made.add_argument("--list", action="store_true", help="list the slices, and stop")
    made.add_argument("--minutes", type=float, default=10.0, metavar="M", help="stop after so long (10)")
    made.add_argument("--calls", type=int, default=CALLS, metavar="N", help=f"timed calls each ({CALLS})")
    place = "write DIR/<gpu>/<slice>.json (benchmarks/results)"
    made.add_argument("--save", type=Path, default=results.FOLDER, metavar="DIR", help=place)
    return made


def classes_of(cases: Sequence[Case], device: object) -> Iterator[object]:
    """The Plan classes that cases need on a device; products have theirs built when they are first called."""
    import torch

    from cute_softmax import NotPlanned, plan_reduction, plan_softmax

    from .operations import DTYPES

    for case in cases:
        x = torch.empty(case.shape, dtype=DTYPES[case.dtype], device="meta")
        how = {"log": case.op.startswith("log_"), "backward": case.op.endswith("_backward")}
        if case.op == "masked_softmax":
            mask = (
                {"mask": torch.empty(case.shape, dtype=torch.bool, device="meta")}
                if case.mode == MASK
                else {}
            )
            how |= {"scale": SCALE, "causal": case.mode == CAUSAL, **mask}
        try:
            if case.op in REDUCTIONS:
                yield plan_reduction(case.op, x, case.dim, device=device).kernel
            elif case.op != "softmax_matmul":
                yield plan_softmax(x, case.dim, DTYPES[case.result], device=device, **how).kernel
        except NotPlanned:  # torch's operations come first, and what they leave is planned then
            continue


def _earlier(path: Path, commit: str | None) -> list[results.Row]:
    """The rows of the same commit that a file holds."""
    if commit is None or not path.exists():
        return []
    found = results.load(path)
    return found.rows if found.header["commit"] == commit else []


def remaining(chosen: Slice, rows: Sequence[results.Row]) -> tuple[Case, ...]:
    """The cells of a slice that no row is of."""
    there = {results.key_of(row).case for row in rows}
    return tuple(case for case in chosen.suite.cases if case not in there)


def measure(chosen: Slice, cases: tuple[Case, ...], options: Options, end: float) -> list[results.Row]:
    """Rows of these cells of a slice, as far as it gets until `end`; what they need is compiled first, on all cores."""
    import torch

    from cute_softmax.runtime.launch import device_facts
    from cute_softmax.runtime.precompile import precompile

    from .run import DeviceLost, run_suite

    for _ in precompile(list(dict.fromkeys(classes_of(cases, device_facts(torch.cuda.current_device()))))):
        pass
    suite = replace(chosen.suite, cases=cases)
    try:
        with console.progress(chosen.name, len(cases)) as progress:
            return run_suite(suite, suite.providers, options, progress, lambda: time.monotonic() > end)
    except DeviceLost as error:
        print(f"{chosen.name}: the GPU is lost {error}", file=sys.stderr)
        raise


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
    from .run import DeviceLost, Options
    from .timing import settle

    settle()
    header = results.make_header(["map", *argv])
    options = replace(Options(), calls=given.calls, warm=WARM)
    folder = given.save / results.gpu_folder(header["gpu"])
    left = 0
    for name in given.slices or SLICES:
        chosen = SLICES[name]
        rows = _earlier(folder / f"{name}.json", header["commit"])
        cases = remaining(chosen, rows)
        lost = False
        if cases and time.monotonic() < end:
            try:
                rows += measure(chosen, cases, options, end)
            except DeviceLost as error:
                rows, lost = [*rows, *error.rows], True
            if rows:
                results.save(results.Results(header, rows), given.save)
            cases = remaining(chosen, rows)
        left += len(cases)
        print(
            f"{name}: {len(chosen.suite.cases) - len(cases)} of {len(chosen.suite.cases)} cells", flush=True
        )
        if lost:
            return 1
    return int(left > 0)
