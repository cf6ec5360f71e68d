"""The explorer: several figures on one self-contained page, linked cell by cell.

Hovering or focusing a cell shows its facts and highlights the same thread and the same addresses in every
other figure; following a thread dims all else. ``Step`` values make a walk through the figures. The page's address
keeps the cell, the thread, the step and the scale, so that a link shows what its sender saw. The page needs no
network and works by keyboard, and on a phone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from .figures.scene import Facts, Figure, ranges, render, style_sheet


@dataclass(frozen=True)
class Step:
    """One step of a walk: words, the figure it happens in, and which of its cells take part."""

    title: str
    text: str
    figure: str = ""
    where: Callable[[Facts], bool] = lambda facts: False


def explorer(
    figures: Mapping[str, Figure],
    *,
    title: str,
    subtitle: str = "",
    steps: Sequence[Step] = (),
    names: Mapping[str, str] | None = None,
) -> str:
    """An HTML page of ``figures`` (key -> figure, in order) with an optional walk.

    ``names`` says what a person reads in the place of a key; keys without a name are shown as they are.
    Raises ``ValueError`` where a step names no figure of the page or none of its cells.
    """
    shown = [(names or {}).get(key, key) for key in figures]
    data = {"figures": [_cells(f) for f in figures.values()], "steps": _steps(figures, steps)}
    sections = [
        f'<section class="x-figure" id="x-f{i}" aria-label="{escape(name)}"><div class="x-scroll">'
        f"{_inline(figure)}</div></section>"
        for i, (name, figure) in enumerate(zip(shown, figures.values(), strict=True))
    ]
    links = [f'<a href="#x-f{i}">{escape(name)}</a>' for i, name in enumerate(shown)]
    page = {
        "title": escape(title),
        "subtitle": escape(subtitle),
        "figure_css": style_sheet(figures.values()),
        "page_css": _asset("explorer.css"),
        "links": "".join(links),
        "figures": "\n".join(sections),
        "walk_hidden": "" if steps else "hidden",
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
        "script": _asset("explorer.js"),
    }
    text = _asset("explorer.html")
    for key, value in page.items():
        text = text.replace(f"<!--{key}-->", value)
    return text


def save_explorer(path: str | Path, figures: Mapping[str, Figure], **options) -> Path:
    """Write ``explorer(figures, **options)``; returns the path."""
    path = Path(path)
    path.write_text(explorer(figures, **options), encoding="utf-8")
    return path


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _inline(figure: Figure) -> str:
    """The SVG without its XML declaration and style sheet."""
    text = render(figure, styled=False)
    return text[text.index("<svg") :]


def _cells(figure: Figure) -> list[dict | int]:
    """Of each cell in drawing order its facts, without what is empty; 0 for a cell without facts."""
    return [_facts(cell.facts) or 0 for cell in figure.cells]


def _facts(facts: Facts) -> dict:
    found = {
        "t": ranges(facts.threads),
        "v": facts.value,
        "c": facts.coordinate,
        "s": facts.space,
        "o": facts.start,
        "e": facts.stop,
        "b": facts.byte,
        "k": facts.bank,
        "n": facts.note,
    }
    return {k: v for k, v in found.items() if v not in ("", None)}


def _steps(figures: Mapping[str, Figure], steps: Sequence[Step]) -> list[dict]:
    out = []
    names = list(figures)
    for step in steps:
        found: dict = {"title": step.title, "text": step.text, "figure": -1, "cells": []}
        if step.figure:
            if step.figure not in figures:
                raise ValueError(f"step {step.title!r} names figure {step.figure!r}; there are {names}")
            cells = figures[step.figure].cells
            found["figure"] = names.index(step.figure)
            found["cells"] = [i for i, c in enumerate(cells) if c.facts != Facts() and step.where(c.facts)]
            if not found["cells"]:
                raise ValueError(f"step {step.title!r} matches no cell of figure {step.figure!r}")
        out.append(found)
    return out
