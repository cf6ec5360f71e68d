"""Heat maps of the map: a strip a line, lengths along it, the ratio to a copy as colour. Needs matplotlib."""

from __future__ import annotations

import itertools
import math

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from .map_cells import SLICES, Line
from .map_judge import behind, measured, ratios
from .results import Results

# Bands that are told apart at a glance and in grey; ours behind a peer is marked apart.
_EDGES = (0.0, 0.35, 0.5, 0.65, 0.75, 0.85, 0.95, 1.3)
_COLOURS = ("#3B0F0B", "#8C2D04", "#D9601A", "#F5A34A", "#FBD98B", "#C7E0A8", "#4C9A4F")


def _strip(
    axes: Axes, row: int, found: dict[int, float], norm: BoundaryNorm, colours: ListedColormap
) -> None:
    """The cells of a line, each as wide as half the way to its neighbours."""
    lengths = sorted(found)
    middles = [math.sqrt(a * b) for a, b in itertools.pairwise(lengths)]
    edges = [lengths[0] / 1.05, *middles, lengths[-1] * 1.05]
    values = [[found[n] for n in lengths]]
    axes.pcolormesh(edges, [row - 0.45, row + 0.45], values, norm=norm, cmap=colours, rasterized=True)


def _label(line: Line) -> str:
    return line.name.replace("_", " ")


def draw(*found: Results) -> Figure:
    """One figure of all lines of the slices, those of several slices one below the other."""
    every = [(line, measured(r)) for r in found for line in SLICES[r.suite].lines]
    strips = [(line, at, ratio) for line, at in every if len(ratio := ratios(line, at)) > 1]
    figure = Figure(figsize=(12, 1.2 + 0.26 * len(strips)), layout="constrained")
    axes = figure.subplots()
    norm, colours = BoundaryNorm(_EDGES, len(_COLOURS)), ListedColormap(_COLOURS)
    for row, (line, at, ratio) in enumerate(strips):
        _strip(axes, row, ratio, norm, colours)
        slower = [finding.length for finding in behind(line, at)]
        axes.plot(slower, [row] * len(slower), "v", color="#0072B2", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(strips)), [_label(line) for line, _, _ in strips])
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_xlabel("elements of the reduced dimension; a triangle: slower than a peer")
    axes.set_title(f"ratio to a copy of as many bytes, {found[0].header['gpu']}", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    scale = matplotlib.cm.ScalarMappable(norm, colours)
    figure.colorbar(scale, ax=axes, ticks=_EDGES[1:-1], pad=0.01, aspect=30)
    return figure
