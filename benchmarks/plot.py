"""Plots of results: a PNG and an SVG for each file, the same bytes every time. Needs matplotlib."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import map_plot
from .cases import LADDER, Case
from .map_cells import SLICES
from .report import is_timed, providers_of, suite_title, with_version
from .results import Key, Results, Row, cells

# Okabe and Ito's palette, told apart with any colour vision; markers and dashes carry the difference as well.
_STYLE: dict[str, dict[str, str]] = {
    "cute_softmax": {"color": "#D55E00", "marker": "o"},
    "copy": {"color": "#000000", "marker": "_", "linestyle": "--"},
    "torch": {"color": "#0072B2", "marker": "s"},
    "torch.compile": {"color": "#56B4E9", "marker": "^"},
    "liger": {"color": "#009E73", "marker": "D"},
    "quack": {"color": "#CC79A7", "marker": "v"},
    "cudnn": {"color": "#E69F00", "marker": "P"},
    "trl": {"color": "#999933", "marker": "*"},
    "trl-form": {"color": "#F0E442", "marker": "X"},
    "flashinfer": {"color": "#8B5A2B", "marker": "h"},
    # The ladder, from light to dark, each rung with its number.
    **{
        name: {"color": f"#{shade:02x}{shade // 2:02x}{min(shade + 48, 255):02x}", "marker": f"${i}$"}
        for i, (name, shade) in enumerate(zip(LADDER, range(208, 0, -26), strict=True))
    },
}
_OTHER = {"color": "#777777", "marker": "x"}
_RC = {"svg.hashsalt": "cute_softmax", "svg.fonttype": "none", "font.size": 9, "figure.dpi": 100}

Cells = dict[Key, dict[str, Row]]


def _ticks(chosen: Cells) -> list[str]:
    """A few short lines a case: its shape where shapes differ, details, the operation where operations differ."""
    cases = [key.case for key in chosen]

    def differ(what: str) -> bool:
        return len({getattr(case, what) for case in cases}) > 1

    def lines(case: Case) -> list[str]:
        shape = " x\n".join(map(str, case.shape))
        named = not case.details or differ("shape")
        details = [detail.replace(", ", ",\n") for detail in case.details]
        return [*[shape] * named, *details, *[case.op.replace("_", "_\n")] * differ("op")]

    return ["\n".join(lines(case)) for case in cases]


def _primary(results: Results) -> Cells:
    """The cells of the file's first method: the one its suite is about."""
    every = cells(results.rows)
    first = next(iter(every)).method
    return {key: cell for key, cell in every.items() if key.method == first}


def _runs(keys: Sequence[Key]) -> list[list[int]]:
    """Neighbours that differ in one extent and nothing else: what a line may join, as places on the axis."""
    runs = [[0]]
    for i, (a, b) in enumerate(itertools.pairwise(key.case for key in keys), start=1):
        alike = len(a.shape) == len(b.shape) and replace(a, shape=b.shape) == b
        joined = alike and sum(m != n for m, n in zip(a.shape, b.shape, strict=True)) == 1
        runs[-1].append(i) if joined else runs.append([i])
    return runs


def _speed(axes: Axes, chosen: Cells, names: Sequence[str]) -> None:
    """GB/s over the shapes; lines join what differs in one extent; a provider without a figure leaves a gap and a cross
    on the axis."""
    for name in names:
        style = _STYLE.get(name, _OTHER)
        speed = [cell.get(name, {}).get("gbps") for cell in chosen.values()]
        front = 3 if name == "cute_softmax" else 2
        values = [float("nan") if v is None else v for v in speed]
        for run in _runs(list(chosen)):  # a color, a marker and one label for all of them
            label = name if run[0] == 0 else None
            points = [values[i] for i in run]
            axes.plot(run, points, label=label, zorder=front, linewidth=1.6, markersize=5, **style)
        gone = [i for i, cell in enumerate(chosen.values()) if "error" in cell.get(name, {})]
        offset = names.index(name) * 0.09 - 0.27
        if gone:  # an empty line that is not clipped has no place in a layout of several panels
            places = [i + offset for i in gone]
            axes.plot(places, [0] * len(gone), "x", color=style["color"], clip_on=False, zorder=4)
    axes.set_xticks(range(len(chosen)), _ticks(chosen))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    if any("error" in row for cell in chosen.values() for row in cell.values()):
        axes.set_xlabel("x on the axis: no result (refused or wrong)")


def _times(axes: Axes, chosen: Cells, names: Sequence[str]) -> None:
    """Bars of time, one group a case, on a logarithmic axis where they lie far apart."""
    times = [row["us"] for cell in chosen.values() for row in cell.values() if "us" in row]
    far_apart = bool(times) and max(times) > 50 * min(times)
    in_ms = bool(times) and max(times) > 1e4
    width = 0.8 / len(names)
    for j, name in enumerate(names):
        heights = [cell.get(name, {}).get("us", 0) / (1e3 if in_ms else 1) for cell in chosen.values()]
        places = [i + (j - (len(names) - 1) / 2) * width for i in range(len(heights))]
        axes.bar(places, heights, width * 0.92, label=name, color=_STYLE.get(name, _OTHER)["color"])
    axes.set_xticks(range(len(chosen)), _ticks(chosen))
    if far_apart:
        axes.set_yscale("log")
    axes.set_ylabel(("ms" if in_ms else "µs") + (", logarithmic" if far_apart else ""))


def draw(*found: Results) -> Figure:
    """The figure of a results file, or of several with the same providers, one below the other."""
    every = [_primary(results) for results in found]
    letters = max(len(line) for chosen in every for label in _ticks(chosen) for line in label.split("\n"))
    width = max(6.5, 1.5 + max(0.75, 0.09 * letters) * max(map(len, every)))
    figure = Figure(figsize=(width, 3.8 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for results, chosen, axes in zip(found, every, panels, strict=True):
        rows = [row for cell in chosen.values() for row in cell.values()]
        (_times if is_timed(rows) else _speed)(axes, chosen, providers_of(rows))
        dtype = next(iter(chosen)).case.dtype
        title = f"{suite_title(results.suite)}, {dtype}, {results.header['gpu']}"
        axes.set_title(textwrap.fill(title, int(9 * width)), fontsize=10)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    labels = [with_version(name, found[-1].header) for name in labels]
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def save(folder: Path, *found: Results) -> list[Path]:
    """Writes one figure of all, `<suite>.png` and `<suite>.svg` after the first, into `folder`; returns their paths.

    Slices of the map become a heat map. Raises ValueError for slices and suites together.
    """
    mapped = [results.suite in SLICES for results in found]
    if any(mapped) != all(mapped):
        raise ValueError("slices of the map and other results have no plot together")
    made = map_plot.draw if all(mapped) else draw
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_RC):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            path = folder / f"{found[0].suite}.{kind}"
            # A figure of its own for each file: layout of the first would shift the second.
            made(*found).savefig(path, dpi=150, metadata=metadata)
            written.append(path)
    return written
