"""``python -m layouts``: draw, check and explain layouts from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import access
from .algebra import AnyLayout, ComposedLayout, Swizzle
from .explain import explain
from .figures import Figure, layout_grid, swizzle_banks, thread_value
from .notation import parse


def tile(text: str) -> tuple[int, int]:
    """``4,256`` as (4, 256); one number is a row of it."""
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not 1 <= len(sizes) <= 2 or any(s < 1 for s in sizes):
        raise argparse.ArgumentTypeError(f"a tile is rows,columns (4,256), got {text!r}")
    return (1, *sizes) if len(sizes) == 1 else sizes


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m layouts", description="Layouts in CuTe's notation.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("layout", help='such as "((32,4),8):((32,1),4)" or "S<3,3,3> o 0 o (8,64):(64,1)"')
        return added

    show = command("show", "Draw a layout as SVG; with --tile as a thread-value layout.")
    show.add_argument("--tile", type=tile, help="rows,columns of the tile that the layout maps into")
    show.add_argument("--element-bytes", type=int, help="bytes of an element (2 for a swizzle)")
    show.add_argument("--access-bytes", type=int, help="bytes of one cell of a swizzle (16)")
    show.add_argument("--thread", type=int, help="with --tile, dim all that this thread does not own")
    show.add_argument("--title", help="the figure's title")
    show.add_argument(
        "-o", "--output", type=Path, help="file to write (.svg or .png); else SVG on the output"
    )
    show.add_argument("--png", action="store_true", help="write a PNG beside the SVG too (needs cairosvg)")

    check = command(
        "check", "Coverage and memory traffic of a tiled copy; status 1 unless it covers its tile."
    )
    check.add_argument("--tile", type=tile, required=True, help="rows,columns of the tile")
    check.add_argument("--memory", help="layout of the tile in memory, in elements; row-major if left out")
    check.add_argument("--element-bytes", type=int, required=True, help="bytes of an element")
    check.add_argument("--vector", type=int, required=True, help="elements that one access moves")
    check.add_argument("--space", choices=("global", "shared"), default="global", help="which memory")
    check.add_argument("--base", type=int, default=0, help="byte address of offset 0")

    said = command("explain", "Say in words what a layout is and does.")
    said.add_argument(
        "--tile", type=tile, default=(), help="rows,columns, to read it as a thread-value layout"
    )
    return parser


def layout_of(text: str) -> AnyLayout:
    """The layout that ``text`` names; ``ValueError`` for a swizzle without one."""
    value = parse(text)
    if isinstance(value, Swizzle):
        raise ValueError(f"{value} alone has no shape: give '{value} o 0 o shape:stride'")
    return value


def figure_of(options: argparse.Namespace) -> Figure:
    """The figure that ``show`` draws."""
    value = layout_of(options.layout)
    swizzled = isinstance(value, ComposedLayout) and isinstance(value.outer, Swizzle) and not options.tile
    if options.access_bytes is not None and not swizzled:
        raise ValueError("--access-bytes is of the cells of a swizzled layout, drawn without --tile")
    asked = {name: getattr(options, name) for name in ("title", "element_bytes", "access_bytes")}
    given = {name: what for name, what in asked.items() if what is not None}
    if swizzled:
        figure = swizzle_banks(value, **{"element_bytes": 2, **given})
    elif options.tile:
        figure = thread_value(value, options.tile, **given)
    else:
        figure = layout_grid(value, **given)
    if options.thread is None:
        return figure
    if not any(options.thread in cell.facts.threads for cell in figure.cells):
        raise ValueError(f"--thread {options.thread}: no cell that is drawn is this thread's")
    return figure.following(options.thread)


def show(options: argparse.Namespace) -> int:
    """Write the figure."""
    figure = figure_of(options)
    if options.output is None:
        if options.png:
            raise ValueError("--png needs -o FILE.svg to stand beside")
        print(figure.svg())
        return 0
    paths = [figure.save(options.output)]
    if options.png and options.output.suffix != ".png":
        paths.append(figure.save(options.output.with_suffix(".png")))
    print(*paths, sep="\n")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print the report."""
    memory = layout_of(options.memory) if options.memory is not None else None
    report = access.check_copy(
        layout_of(options.layout),
        options.tile,
        memory,
        element_bytes=options.element_bytes,
        vector=options.vector,
        space=options.space,
        base=options.base,
    )
    print(*report.lines_of_text(), sep="\n")
    return 0 if report.coverage.exact else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 when all is well, 1 for an incomplete copy, 2 for bad input."""
    options = build_parser().parse_args(arguments)
    try:
        if options.command == "show":
            return show(options)
        if options.command == "check":
            return check(options)
        print(explain(parse(options.layout), options.tile))
        return 0
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
