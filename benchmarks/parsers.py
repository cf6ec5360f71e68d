"""What the commands that load all of torch take: an unusable argument is reported before that."""

from __future__ import annotations

from pathlib import Path

from layouts.arguments import Parser

from . import results

MAP_CALLS = 5  # timed, of each cell


def add_save(parser: Parser, name: str, default: Path | None = None) -> None:
    """The option that says where results, of a name, go."""
    parser.add_argument(
        "--save", nargs="?", const=results.FOLDER, default=default, type=Path, metavar="DIR",
        help=f"write DIR/<gpu>/{name}.json (benchmarks/results)",
    )  # fmt: skip


def of_map() -> Parser:
    """Arguments of `python -m benchmarks map`."""
    made = Parser(
        prog="python -m benchmarks map",
        description="Measures the plane of lengths and counts; continues where a run of this commit stopped.",
    )
    made.add_argument("slices", nargs="*", metavar="SLICE", help="slices to measure (all; see --list)")
    made.add_argument("--list", action="store_true", help="list the slices, and stop")
    made.add_argument("--minutes", type=float, default=10.0, metavar="M", help="stop after M minutes (10)")
    made.add_argument(
        "--calls", type=int, default=MAP_CALLS, metavar="N", help=f"timed calls per cell ({MAP_CALLS})"
    )
    # Without a folder it says what is done anyway: results name the command that made them, and no folder.
    add_save(made, "<slice>", results.FOLDER)
    return made


def of_tune() -> Parser:
    """Arguments of `python -m benchmarks tune`."""
    made = Parser(
        prog="python -m benchmarks tune",
        description="Measures configurations on this machine's GPU and writes the table that plans use.",
    )
    made.add_argument("jobs", nargs="*", metavar="JOB", help="jobs to run (all; see --list)")
    made.add_argument("--list", action="store_true", help="list the jobs, and stop")
    made.add_argument(
        "--quick", action="store_true", help="only the table's configurations and their neighbours"
    )
    made.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="begin no job after M minutes (10)"
    )
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="the table to write (your own table for this GPU)"
    )
    return made


def of_bits() -> Parser:
    """Arguments of `python -m benchmarks bits`."""
    parser = Parser(
        prog="python -m benchmarks bits", description="Records, or compares, the bits of fixed inputs."
    )
    parser.add_argument("--save", action="store_true", help="record the bits instead of comparing")
    parser.add_argument(
        "--launches", type=int, default=0, metavar="N", help="also launch N times while other work runs"
    )
    parser.add_argument(
        "--folder", type=Path, default=results.FOLDER, help="folder of results (benchmarks/results)"
    )
    return parser


def of_sharded() -> Parser:
    """Arguments of `python -m benchmarks sharded`."""
    parser = Parser(
        prog="python -m benchmarks sharded",
        description="Measures rows shared by ranks on the GPUs of one machine, one process per GPU.",
    )
    add_save(parser, "sharded")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="stop after M minutes (10)")
    parser.add_argument("--shapes", nargs="+", default=[], metavar="MxN", help="rows x vocabulary")
    return parser


PARSERS = {"map": of_map, "tune": of_tune, "bits": of_bits, "sharded": of_sharded}
