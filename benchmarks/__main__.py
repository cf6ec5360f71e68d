"""The command line.

python -m benchmarks --list
python -m benchmarks --suite rows-forward rows-backward --save
python -m benchmarks map   [SLICE...]
python -m benchmarks tune  [JOB...] [--quick]
python -m benchmarks bits  [--save] [--launches N]
python -m benchmarks sharded [--save]      on two GPUs or more
python -m benchmarks table  FILE... [--markdown]
python -m benchmarks plot  [FILE...]
python -m benchmarks check [FILE...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from layouts.arguments import Parser

from . import console, report, results
from .cases import ITEM_BYTES, LADDER, PROVIDERS, SPECIALISTS, Suite, labels, parse_shape
from .parsers import PARSERS, add_save
from .suites import SUITES

_COMMANDS = (*PARSERS, "table", "plot", "check")
_EVERY = (*PROVIDERS, *SPECIALISTS, *LADDER)
LISTED = 8  # cases of a suite that the list names


def _split(values: Sequence[str] | None) -> list[str]:
    """Values given as several arguments, separated by commas, or both."""
    return [part for value in values or () for part in value.split(",") if part]


def _choose(parser: Parser, what: str, given: list[str], known: Sequence[str]) -> list[str]:
    if not given:
        parser.error(f"{what}: name at least one of {', '.join(known)}")
    if unknown := [g for g in given if g not in known]:
        parser.error(f"{what} {', '.join(unknown)}: not among {', '.join(known)}")
    return [k for k in known if k in given]


def run_parser() -> Parser:
    """Arguments of a run."""
    parser = Parser(
        prog="python -m benchmarks",
        description="Measures softmax providers on this machine's GPU. "
        "Other commands: map, tune, bits, sharded, table, plot, check (each with --help).",
    )
    parser.add_argument("--suite", nargs="+", metavar="NAME", help="suites to run, or all (see --list)")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bf16", help="element type")
    parser.add_argument("--providers", nargs="+", metavar="NAME", help=f"some of {','.join(_EVERY)}")
    parser.add_argument("--shapes", nargs="+", metavar="MxN", help="measure these instead of the suite's own")
    parser.add_argument("--calls", type=int, metavar="N", help="timed calls per case (15)")
    parser.add_argument("--quick", action="store_true", help="few calls, no graphs; not for publication")
    add_save(parser, "<suite>")
    parser.add_argument(
        "--minutes", type=float, metavar="M",
        help="stop after M minutes; with --save, a later run of this commit continues",
    )  # fmt: skip
    parser.add_argument("--plot", action="store_true", help="plot what was saved (needs matplotlib)")
    parser.add_argument("--list", action="store_true", help="list suites and providers, and stop")
    return parser


def _list() -> None:
    for suite in SUITES.values():
        shown, more = labels(suite.cases)[:LISTED], len(suite.cases) - LISTED
        print(f"{suite.name}: {suite.title}")
        print(f"    {'; '.join(shown)}" + (f"; and {more} more" if more > 0 else ""))
        print(f"    {', '.join(suite.providers)}")


def show(found: results.Results) -> None:
    """Prints the tables of some results and the reasons of refusals."""
    for table in report.tables(found):
        console.show(table)
    for line in report.refusals(found):
        print(f"  {line}")
    print(flush=True)


def _suites(parser: Parser, given: argparse.Namespace) -> list[Suite]:
    names = _split(given.suite)
    chosen = _choose(parser, "suite", list(SUITES) if "all" in names else names, list(SUITES))
    suites = [SUITES[name].with_dtype(given.dtype) for name in chosen]
    if given.shapes:
        try:
            shapes = [parse_shape(text) for text in _split(given.shapes)]
        except ValueError as error:
            parser.error(f"--shapes: {error}")
        if not shapes:
            parser.error("--shapes: name at least one, such as 4096x8192")
        for suite, shape in itertools.product(suites, shapes):
            if lacking := {d for c in suite.cases for d in c.dim if not -len(shape) <= d < len(shape)}:
                parser.error(
                    f"--shapes: {'x'.join(map(str, shape))} has no dimension {min(lacking)}, which {suite.name} reduces"
                )
        suites = [suite.with_shapes(shapes) for suite in suites]
    return suites


def run(argv: Sequence[str]) -> int:
    """Runs suites; saves and shows each as soon as it is done."""
    parser = run_parser()
    given = parser.parse_args(argv)
    if given.list:
        _list()
        return 0
    if not given.suite:
        parser.error("--suite is needed (or --list)")
    if given.shapes and given.save == results.FOLDER:
        parser.error("--shapes changes what a suite is: give --save another folder")
    if given.plot and not given.save:
        parser.error("--plot draws what --save wrote")
    if given.calls is not None and given.calls < 1:
        parser.error("--calls must be at least 1")
    suites = _suites(parser, given)
    asked = list(_EVERY) if given.providers is None else _split(given.providers)
    names = _choose(parser, "provider", asked, _EVERY)

    import torch

    if not torch.cuda.is_available():
        print("benchmarks need an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    if given.save:
        try:  # now rather than after the measurements
            given.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--save: {error}")
    from dataclasses import replace

    from .resume import earlier, go_on, remaining
    from .run import Options

    options = Options.quick() if given.quick else Options()
    if given.calls is not None:
        options = replace(options, calls=given.calls)
    end = math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes
    saved: list[Path] = []
    left = 0
    for suite in suites:
        providers = [name for name in names if name in suite.providers]
        if not providers:
            print(f"{suite.name}: none of {', '.join(names)} takes part", file=sys.stderr)
            continue
        header, rows = results.make_header(argv), []
        if given.save and given.minutes is not None:
            path = given.save / results.gpu_folder(header["gpu"]) / f"{suite.name}.json"
            rows = earlier(path, header["commit"])
        rows, lost = go_on(suite, rows, providers, options, end)
        found = results.Results(header, rows)
        if rows:
            show(found)
        if lost:
            print(f"{suite.name}: nothing of it is saved", file=sys.stderr)
            return 1
        if rows and given.save:
            saved.append(results.save(found, given.save))
            print(f"saved {saved[-1].name}", flush=True)
        if cases := remaining(suite, rows):
            left += len(cases)
            print(f"{suite.name}: {len(cases)} of {len(suite.cases)} cases are left", file=sys.stderr)
    if given.plot:
        _plot(saved)
    return int(left > 0)


def _files(given: Sequence[Path]) -> list[Path]:
    return list(given) or sorted(results.FOLDER.glob("*/*.json"))


def _file_parser(command: str, description: str) -> Parser:
    parser = Parser(prog=f"python -m benchmarks {command}", description=description)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results files (default: all)")
    return parser


def table(argv: Sequence[str]) -> int:
    """Prints tables from results files."""
    parser = _file_parser("table", "Prints tables from results files.")
    parser.add_argument("--markdown", action="store_true", help="as Markdown, for the docs")
    given = parser.parse_args(argv)
    for path in _files(given.files):
        found = results.load(path)
        if given.markdown:
            print("\n\n".join(console.as_markdown(t) for t in report.tables(found)))
        else:
            show(found)
    return 0


def _plot(files: Sequence[Path], folder: Path | None = None, together: bool = False) -> int:
    try:
        from . import plot
    except ImportError:
        print("plots need matplotlib: pip install 'cute-softmax[bench]'", file=sys.stderr)
        return 2
    for group in [files] if together else [[path] for path in files]:
        for written in plot.save(folder or group[0].parent, *map(results.load, group)):
            print(f"wrote {written.name}")
    return 0


def plot_files(argv: Sequence[str]) -> int:
    """Draws a PNG and an SVG for each results file, or for all together."""
    parser = _file_parser("plot", "Draws a PNG and an SVG beside each results file.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to this folder instead")
    parser.add_argument("--together", action="store_true", help="one figure for all, named after the first")
    given = parser.parse_args(argv)
    return _plot(_files(given.files), given.out, given.together)


def check(argv: Sequence[str]) -> int:
    """Compares results with what is required of them; 1 when one falls short."""
    from . import requirements

    given = _file_parser("check", "Compares results with what is required of them.").parse_args(argv)
    loaded = map(results.load, _files(given.files))
    verdicts = [v for found in loaded for v in requirements.judge(found)]
    for verdict in verdicts:
        print(verdict)
    if not verdicts:
        print("nothing to check: no results, or none with requirements", file=sys.stderr)
        return 2
    return int(not all(v.met for v in verdicts))


def main(argv: Sequence[str]) -> int:
    """The exit status of the command line `argv`."""
    if argv and argv[0] in _COMMANDS:
        if argv[0] in PARSERS:
            PARSERS[argv[0]]().parse_args(argv[1:])  # what is wrong is said before torch is loaded
            from . import bits, map_run, sharded, tune

            return {"map": map_run, "tune": tune, "bits": bits, "sharded": sharded}[argv[0]].main(argv[1:])
        command = {"table": table, "plot": plot_files, "check": check}[argv[0]]
        try:
            return command(argv[1:])
        except (OSError, ValueError) as error:  # of files that cannot be read, or are of another kind
            print(f"error: {error}", file=sys.stderr)
            return 2
    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
