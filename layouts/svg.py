"""Figures written as SVG through drawsvg: text as text, one style sheet, light and dark, no ids."""

from __future__ import annotations

import math
from collections.abc import Iterable

import drawsvg

from . import style
from .figures.scene import Box, Cell, Figure, Stroke, Words

ANCHORS = {"start": "", "middle": " mid", "end": " end"}


def render(figure: Figure, styled: bool = True) -> str:
    """``figure`` as an SVG document; the same figure gives the same bytes.

    Without ``styled`` it lacks its style sheet, for a page that brings ``style_sheet`` itself.
    """
    drawing = drawsvg.Drawing(_trim(figure.width), _trim(figure.height), id_prefix="f", role="img")
    if styled:
        drawing.append_css(style_sheet([figure]))
    drawing.append_title(figure.title)
    drawing.append(drawsvg.Raw(f"<desc>{_escape(figure.description)}</desc>"))
    drawing.append(drawsvg.Rectangle(0, 0, _trim(figure.width), _trim(figure.height), rx=8, class_="page"))
    for item in figure.items:
        for element in _elements(item):
            drawing.append(element)
    return drawing.as_svg()


def to_png(svg: str, scale: float = 2.0) -> bytes:
    """The SVG as PNG bytes through cairosvg; ``RuntimeError`` says how to install it where it is
    missing."""
    try:
        import cairosvg
    except ImportError as error:
        raise RuntimeError("PNG needs cairosvg: pip install cairosvg") from error
    # cairosvg tries the first family of a list only
    plain = svg.replace(style.MONO, "monospace").replace(style.SANS, "sans-serif")
    return cairosvg.svg2png(bytestring=plain.encode(), scale=scale)


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
