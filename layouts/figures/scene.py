"""What a figure consists of, as data: placed cells with their facts, words, boxes and strokes.

Builders in this package put these on a ``Canvas``; ``render`` writes them as SVG, and ``layouts.html`` links the
cells of several figures through their facts. All lengths are px at 100%.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

try:
    import drawsvg
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "figures need drawsvg: pip install 'cute-softmax[draw]'", name=error.name
    ) from error

from .. import style
from ..style import VOICES, text_width

MARGIN = 18


@dataclass(frozen=True, slots=True)
class Facts:
    """What a cell is about. ``space`` names a tensor or buffer; ``start``/``stop`` are elements in it.

    ``threads`` own or touch the cell; ``value`` names their registers; ``byte`` is the first byte's address
    in the space, ``bank`` the shared-memory bank or banks; ``note`` is a sentence. ``role`` says what the cell is
    among others of its figure; it is not shown: walks find cells by it.
    """

    threads: tuple[int, ...] = ()
    value: str = ""
    coordinate: str = ""
    space: str = ""
    start: int | None = None
    stop: int | None = None
    byte: int | None = None
    bank: str = ""
    note: str = ""
    role: str = ""

    def sentence(self) -> str:
        """All facts in one line, as a tooltip shows them."""
        parts = []
        if self.threads:
            parts.append(f"thread {ranges(self.threads)}")
        if self.value:
            parts.append(f"value {self.value}")
        if self.coordinate:
            parts.append(f"coordinate {self.coordinate}")
        if self.start is not None:
            span = (
                str(self.start) if self.stop in (None, self.start + 1) else f"{self.start}..{self.stop - 1}"
            )
            parts.append(f"{self.space} offset {span}".strip())
        if self.byte is not None:
            parts.append(f"byte {self.byte}")
        if self.bank:
            parts.append(f"bank {self.bank}")
        if self.note:
            parts.append(self.note)
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: lines of text on a painted rectangle, and its facts."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    lines: tuple[str, ...]
    facts: Facts
    dim: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text with its baseline at ``y``; ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    voice: str
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Box:
    """A painted rectangle behind or beside cells."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    radius: float = 0


@dataclass(frozen=True, slots=True)
class Stroke:
    """A polyline; ``kind`` is thick, link or edge; ``arrow`` puts a tip on its end."""

    points: tuple[tuple[float, float], ...]
    kind: str
    arrow: bool = False


Item = Cell | Words | Box | Stroke


def count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs folded: ``0..3, 8``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}..{b}" for a, b in runs)


@dataclass(frozen=True)
class Figure:
    """A finished figure. ``cells`` are its cells in drawing order, the data that the explorer uses."""

    title: str
    description: str
    width: float
    height: float
    items: tuple[Item, ...] = field(repr=False)

    @property
    def cells(self) -> list[Cell]:
        """The cells in drawing order."""
        return [item for item in self.items if isinstance(item, Cell)]

    def svg(self) -> str:
        """The figure as an SVG document; the same figure gives the same bytes."""
        return render(self)

    @cached_property
    def _unstyled(self) -> str:
        """The same without its style sheet: what takes the time, once for a file and an explorer."""
        return _drawn(self)

    def save(self, path: str | Path) -> Path:
        """Write the figure: SVG, or PNG where the name ends in .png (needs cairosvg). Returns the path.

        Raises ``ValueError`` for a name with another ending, and ``RuntimeError`` where cairosvg is missing.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise ValueError(f"a figure is written as .svg or .png, got {str(path)!r}")
        if path.suffix == ".png":
            path.write_bytes(to_png(self.svg()))
        else:
            path.write_text(self.svg(), encoding="utf-8")
        return path

    def _repr_svg_(self) -> str:
        return self.svg()

    def following(self, thread: int) -> Figure:
        """The same figure with everything dimmed that ``thread`` does not own or touch."""

        def dimmed(item: Item) -> Item:
            if isinstance(item, Cell) and item.facts != Facts():  # a legend's samples have no facts
                return replace(item, dim=thread not in item.facts.threads)
            return item

        return replace(self, items=tuple(map(dimmed, self.items)))

    def noted(self, *notes: str) -> Figure:
        """The same figure with sentences under it, wrapped to its width and added to its description."""
        items, y = list(self.items), self.height - MARGIN + 8.0
        for note in notes:
            for i, line in enumerate(wrapped(note, "note", self.width - 2 * MARGIN - 14)):
                y += 17
                if i == 0:
                    items.append(Words(MARGIN, y, "\u2022", "note"))
                items.append(Words(MARGIN + 14, y, line, "note"))
            y += 3
        description = " ".join([self.description, *notes])
        return replace(self, description=description, height=round(y + MARGIN), items=tuple(items))


class Canvas:
    """Collects items; coordinates are relative to the canvas and shifted when it is placed on another."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.right = self.bottom = 0.0

    def _reach(self, x: float, y: float) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)

    def cell(self, x: float, y: float, size: tuple[float, float], paint: str, lines, facts: Facts) -> None:
        self.items.append(Cell(x, y, *size, paint, tuple(lines), facts))
        self._reach(x + size[0], y + size[1])

    def words(self, x: float, y: float, text: str, voice: str = "note", anchor: str = "start") -> None:
        self.items.append(Words(x, y, text, voice, anchor))
        wide = text_width(text, voice)
        self._reach(x + {"start": wide, "middle": wide / 2, "end": 0}[anchor], y + VOICES[voice][0] * 0.3)

    def box(self, x: float, y: float, width: float, height: float, paint: str, radius: float = 0) -> None:
        self.items.append(Box(x, y, width, height, paint, radius))
        self._reach(x + width, y + height)

    def stroke(self, points: Sequence[tuple[float, float]], kind: str, arrow: bool = False) -> None:
        self.items.append(Stroke(tuple(points), kind, arrow))
        for p in points:
            self._reach(*p)

    def place(self, other: Canvas, x: float, y: float) -> None:
        """Put all of ``other`` here, shifted by (x, y)."""
        for item in other.items:
            if isinstance(item, Stroke):
                item = replace(item, points=tuple((a + x, b + y) for a, b in item.points))
            else:
                item = replace(item, x=item.x + x, y=item.y + y)
            self.items.append(item)
        self._reach(other.right + x, other.bottom + y)


@dataclass(frozen=True, slots=True)
class Swatch:
    """One entry of a legend: a painted sample with its own short text, and what it means."""

    paint: str
    sample: str
    meaning: str


def legend(entries: Sequence[Swatch], width: float) -> Canvas:
    """The entries in lines no wider than ``width``."""
    canvas, x, y = Canvas(), 0.0, 0.0
    for entry in entries:
        sample = max(26.0, text_width(entry.sample, "small") + 10)
        needed = sample + 7 + text_width(entry.meaning, "note")
        if x and x + needed > width:
            x, y = 0.0, y + 26
        canvas.cell(x, y, (sample, 18), entry.paint, (entry.sample,) if entry.sample else (), Facts())
        canvas.words(x + sample + 7, y + 13.5, entry.meaning, "note")
        x += needed + 22
    return canvas


def wrapped(text: str, voice: str, width: float) -> list[str]:
    """``text`` in lines no wider than ``width``."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", voice) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


LEAST = 520  # px of a figure's body


def finish(body: Canvas, title: str, lead: str, description: str, swatches: Sequence[Swatch] = ()) -> Figure:
    """``body`` under its title and lead line and over its legend, as a figure with margins."""
    width = max(body.right, LEAST, text_width(title, "title"))
    page = Canvas()
    page.words(MARGIN, MARGIN + 14, title, "title")
    y = MARGIN + 14.0
    for line in wrapped(lead, "lead", width):
        y += 18
        page.words(MARGIN, y, line, "lead")
    y += 18
    page.place(body, MARGIN, y)
    y += body.bottom
    if swatches:
        key = legend(swatches, width)
        page.place(key, MARGIN, y + 18)
        y += 18 + key.bottom
    total = max(page.right, MARGIN + width) + MARGIN
    return Figure(title, description, round(total), round(y + MARGIN), tuple(page.items))


# -- Written as SVG: text as text, one style sheet, light and dark, no ids ---------------------------------------------

ANCHORS = {"start": "", "middle": " mid", "end": " end"}


def render(figure: Figure, styled: bool = True) -> str:
    """``figure`` as an SVG document; the same figure gives the same bytes.

    Without ``styled`` it lacks its style sheet, for a page that brings ``style_sheet`` itself.
    """
    if not styled:
        return figure._unstyled
    css = f"<style>/*<![CDATA[*/{style_sheet([figure])}/*]]>*/</style>"
    return figure._unstyled.replace("<defs>", f"{css}\n<defs>", 1)


def _drawn(figure: Figure) -> str:
    drawing = drawsvg.Drawing(_trim(figure.width), _trim(figure.height), id_prefix="f", role="img")
    drawing.append_title(figure.title)
    drawing.append(drawsvg.Raw(f"<desc>{_escape(figure.description)}</desc>"))
    drawing.append(drawsvg.Rectangle(0, 0, _trim(figure.width), _trim(figure.height), rx=8, class_="page"))
    for item in figure.items:
        for element in _elements(item):
            drawing.append(element)
    return drawing.as_svg()


def to_png(svg: str) -> bytes:
    """The SVG as PNG bytes through cairosvg, twice as large; ``RuntimeError`` says how to install it where it
    is missing."""
    try:
        import cairosvg
    except ImportError as error:
        raise RuntimeError("PNG needs cairosvg: pip install cairosvg") from error
    # cairosvg tries the first family of a list only
    plain = svg.replace(style.MONO, "monospace").replace(style.SANS, "sans-serif")
    plain = plain.replace(style.DIM, style.DIM_PARTS)
    return cairosvg.svg2png(bytestring=plain.encode(), scale=2.0)


def style_sheet(figures: Iterable[Figure]) -> str:
    """The style sheet that the given figures share."""
    figures = list(figures)
    paints = {p for f in figures for p in _paints(f)}
    return style.css(paints, {v for f in figures for v in _voices(f)})


def _paints(figure: Figure) -> set[str]:
    return {i.paint for i in figure.items if isinstance(i, (Cell, Box))}


def _voices(figure: Figure) -> set[str]:
    voices = {i.voice for i in figure.items if isinstance(i, Words)}
    return voices | {voice for c in figure.cells for voice in _line_voices(c)}


def _line_voices(cell: Cell) -> list[str]:
    return ["cell" if i == 0 else "small" for i in range(len(cell.lines))]


def _elements(item: Cell | Words | Box | Stroke) -> list[drawsvg.DrawingElement]:
    if isinstance(item, Cell):
        return [_cell(item)]
    if isinstance(item, Words):
        return [_text(item.text, item.x, item.y, item.voice, item.anchor)]
    if isinstance(item, Box):
        return [_rectangle(item, f"frame {item.paint}", item.radius)]
    return _stroke(item)


def _cell(cell: Cell) -> drawsvg.Group:
    group = drawsvg.Group(class_="c dim" if cell.dim else "c")
    sentence = cell.facts.sentence()
    if sentence:
        group.append_title(sentence)
    group.append(_rectangle(cell, cell.paint))
    voices = _line_voices(cell)
    height = sum(style.VOICES[v][0] + 2 for v in voices) - 2
    y = cell.y + (cell.height - height) / 2
    for line, voice in zip(cell.lines, voices, strict=True):
        px = style.VOICES[voice][0]
        group.append(_text(line, cell.x + cell.width / 2, y + px * 0.82, voice, "middle"))
        y += px + 2
    return group


def _rectangle(shape: Cell | Box, css_class: str, radius: float = 0) -> drawsvg.Rectangle:
    rounding = {"rx": radius} if radius else {}
    place = (_trim(shape.x), _trim(shape.y), _trim(shape.width), _trim(shape.height))
    return drawsvg.Rectangle(*place, class_=css_class, **rounding)


def _text(text: str, x: float, y: float, voice: str, anchor: str) -> drawsvg.Text:
    muted = " muted" if style.VOICES[voice][3] else ""
    return drawsvg.Text(text, None, _trim(x), _trim(y), class_=f"{voice}{muted}{ANCHORS[anchor]}")


def _stroke(stroke: Stroke) -> list[drawsvg.DrawingElement]:
    points = [_trim(v) for point in stroke.points for v in point]
    line = drawsvg.Lines(*points, class_=stroke.kind)
    if not stroke.arrow:
        return [line]
    (x0, y0), (x1, y1) = stroke.points[-2:]
    angle = math.atan2(y1 - y0, x1 - x0)
    wings = [(x1 - 8 * math.cos(angle + s), y1 - 8 * math.sin(angle + s)) for s in (0.4, -0.4)]
    tip = [_trim(v) for point in [(x1, y1), *wings] for v in point]
    return [line, drawsvg.Lines(*tip, close=True, class_="tip")]


def _trim(value: float) -> float | int:
    """``value`` to a tenth of a px, as an int where it is one."""
    value = round(value, 1)
    return int(value) if value == int(value) else value


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
