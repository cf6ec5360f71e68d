"""``python -m layouts``: draw, explore, check and explain layouts and atoms from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import access
from .algebra import AnyLayout, ComposedLayout, Layout, Swizzle
from .arguments import Parser
from .atoms import ATOMS, WARPGROUP, Copy, Mma, atom, is_atom
from .coordinates import is_coordinates, parse_coordinates
from .explain import explain
from .ints import as_tuple
from .notation import parse
from .operations import composition

if TYPE_CHECKING:
    from .figures import Figure


def tile(text: str) -> tuple[int, int]:
    """``4,256`` as (4, 256); one number is a row of it."""
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not 1 <= len(sizes) <= 2 or any(s < 1 for s in sizes):
        raise argparse.ArgumentTypeError(f"a tile is rows,columns (4,256), got {text!r}")
    return (1, *sizes) if len(sizes) == 1 else sizes


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m layouts", description="Layouts in CuTe's notation.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Parser:
        added = commands.add_parser(name, help=text, description=text)
        what = "such as ((32,4),8):((32,1),4), S<3,3,3> o 0 o (8,64):(64,1) or (8,64):(1@0,1@1), or an atom's name"
        several = "+" if name == "explorer" else None
        added.add_argument("layout", nargs=several, metavar="LAYOUT", help=what)
        return added

    commands.add_parser("atoms", help="List the MMA and copy atoms that can be named.")
    explorer = command("explorer", "Make a page of layouts that are linked cell by cell.")
    show = command("show", "Draw a layout or an atom as SVG; with --tile as a thread-value layout.")
    explorer.add_argument("-o", "--output", type=Path, default=Path("explorer.html"), help="(explorer.html)")
    explorer.set_defaults(thread=None)
    for added in (show, explorer):
        drawing_options(added)
    show.add_argument("--thread", type=int, help="with --tile, dim everything that this thread does not own")
    show.add_argument(
        "-o", "--output", type=Path, help="file to write (.svg or .png); by default SVG on standard output"
    )
    show.add_argument("--png", action="store_true", help="also write a PNG next to the SVG (needs cairosvg)")

    check = command(
        "check", "Check coverage and memory traffic of a tiled copy; status 1 unless it covers its tile."
    )
    check.add_argument("--tile", type=tile, required=True, help="rows,columns of the tile")
    check.add_argument("--memory", help="layout of the tile in memory, in elements; row-major if left out")
    check.add_argument("--element-bytes", type=int, required=True, help="bytes of an element")
    check.add_argument("--vector", type=int, required=True, help="elements that one access moves")
    check.add_argument("--space", choices=("global", "shared"), default="global", help="which memory")
    check.add_argument("--base", type=int, default=0, help="byte address of offset 0")

    words = command("explain", "Describe a layout in words.")
    words.add_argument(
        "--tile", type=tile, default=(), help="rows,columns, to read it as a thread-value layout"
    )
    return parser


def drawing_options(parser: Parser) -> None:
    """How layouts are drawn."""
    parser.add_argument("--tile", type=tile, help="rows,columns of the tile that the layout maps into")
    parser.add_argument("--element-bytes", type=int, help="bytes of an element (2 for a swizzle)")
    parser.add_argument("--access-bytes", type=int, help="bytes of one cell of a swizzle (16)")
    parser.add_argument("--title", help="the figure's title")


def layout_of(text: str) -> AnyLayout:
    """The layout that ``text`` names; ``ValueError`` for a swizzle without one."""
    value = parse(text)
    if isinstance(value, Swizzle):
        raise ValueError(f"{value} alone has no shape: give '{value} o 0 o shape:stride'")
    return value


def composition_of(value: AnyLayout) -> tuple[Layout, ...]:
    """The two layouts that one was composed of, if they are matrices whose composition is a layout, too; or nothing."""
    if not isinstance(value, ComposedLayout) or isinstance(value.outer, Swizzle) or value.offset:
        return ()
    try:
        composition(value.outer, value.inner)
    except ValueError:
        return ()
    matrices = all(len(as_tuple(layout.shape)) <= 2 for layout in (value.outer, value.inner))
    return (value.outer, value.inner) if matrices else ()


def figure_of(text: str, options: argparse.Namespace) -> Figure:
    """The figure of a layout, of coordinates or of an atom."""
    from . import figures

    asked = {name: getattr(options, name) for name in ("title", "element_bytes", "access_bytes", "tile")}
    given = {name: what for name, what in asked.items() if what is not None}
    if is_atom(text) or is_coordinates(text):
        if others := [name for name in given if name != "title"]:
            raise ValueError(f"--{others[0].replace('_', '-')} is of layouts of offsets: {text} is none")
        figure = atom_figure(atom(text), **given) if is_atom(text) else coordinate_figure(text, **given)
        return followed(figure, options.thread)
    value = layout_of(text)
    tiler = given.pop("tile", None)
    swizzled = isinstance(value, ComposedLayout) and isinstance(value.outer, Swizzle) and not tiler
    operands = () if tiler or given.keys() & {"element_bytes", "access_bytes"} else composition_of(value)
    if "access_bytes" in given and not swizzled:
        raise ValueError("--access-bytes is of the cells of a swizzled layout, drawn without --tile")
    if swizzled:
        figure = figures.swizzle_banks(value, **{"element_bytes": 2, **given})
    elif operands:
        figure = figures.composed(*operands, **given)
    elif tiler:
        figure = figures.thread_value(value, tiler, **given)
    else:
        figure = figures.layout_grid(value, **given)
    return followed(figure, options.thread)


def atom_figure(found: Mma | Copy, title: str | None = None) -> Figure:
    """Who holds which element of an atom."""
    from . import figures

    if isinstance(found, Mma):
        return figures.mma_fragments(
            found.shape_mnk, found.a, found.b, found.c, title=title or f"MMA atom {found.name}"
        )
    said = title or f"Copy atom {found.name}: a column is a row of 16 bytes of shared memory"
    return figures.tiled_copy(
        found.source,
        found.destination,
        found.tiler,
        title=said,
        names=("addresses", "registers"),
        element_bytes=2,
    )


def coordinate_figure(text: str, title: str | None = None) -> Figure:
    """The grid of an identity layout or a part of one."""
    from .figures.coordinates import coordinate_grid

    return coordinate_grid(parse_coordinates(text), title=title)


def followed(figure: Figure, thread: int | None) -> Figure:
    """The figure with one thread in colour."""
    if thread is None:
        return figure
    if not any(thread in cell.facts.threads for cell in figure.cells):
        raise ValueError(f"--thread {thread}: no cell that is drawn is this thread's")
    return figure.following(thread)


def show(options: argparse.Namespace) -> int:
    """Write the figure."""
    figure = figure_of(options.layout, options)
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


def explorer(options: argparse.Namespace) -> int:
    """Write the page."""
    from .html import save_explorer

    found = {text: figure_of(text, options) for text in options.layout}
    title = options.title or (options.layout[0] if len(found) == 1 else f"{len(found)} layouts")
    print(save_explorer(options.output, found, title=title))
    return 0


def atoms(options: argparse.Namespace) -> int:
    """Print the names of atoms."""
    print(*ATOMS, *WARPGROUP, sep="\n")
    return 0


def said(options: argparse.Namespace) -> int:
    """Print a layout or an atom in words."""
    text = options.layout
    if is_atom(text):
        found = atom(text)
        parts = (
            {"A": found.a, "B": found.b, "C": found.c}
            if isinstance(found, Mma)
            else {"source": found.source, "destination": found.destination}
        )
        size = found.shape_mnk if isinstance(found, Mma) else found.tiler
        print(f"{found.name}, {' x '.join(map(str, size))}")
        print(*(f"{name} {explain(layout)}" for name, layout in parts.items()), sep="\n")
    elif is_coordinates(text):
        value = parse_coordinates(text)
        print(
            f"{value}\n  {value.size:,} places, each of which stands for a coordinate of {len(value.axes)} axes"
        )
        print(*(f"  axis {i}: {axis}" for i, axis in enumerate(value.axes)), sep="\n")
    else:
        print(explain(parse(text), options.tile))
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
    run = {"show": show, "explorer": explorer, "atoms": atoms, "check": check, "explain": said}
    try:
        return run[options.command](options)
    except (ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
