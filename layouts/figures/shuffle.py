"""A reduction within a warp: who is combined with whom in each round of shuffles."""

from __future__ import annotations

from ..access import WARP
from ..style import thread_paint
from .grid import Grid, arrange, draw
from .scene import Facts, Figure, Swatch, finish


def warp_shuffle(width: int = WARP, *, warp: int = 0, title: str | None = None) -> Figure:
    """A butterfly reduction over groups of ``width`` lanes of one warp (``shfl.bfly``), round by round.

    A lane's cell names the lane it is combined with and how many lanes' values it then holds; lanes of one
    colour hold the same value. ``ValueError`` unless ``width`` is a power of two up to 32.
    """
    if width not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"width must be a power of two up to {WARP}, got {width}")
    rounds = width.bit_length() - 1

    def cell(r: int, lane: int):
        held = 1 << r
        group = lane & ~(held - 1)
        facts = {"threads": (warp * WARP + lane,), "value": f"of {held} lane" + ("s" if held > 1 else "")}
        if r == 0:
            return (
                thread_paint(lane),
                (f"L{lane}", "own"),
                Facts(**facts, note="its own values, already reduced"),
            )
        partner = lane ^ (held >> 1)
        note = f"round {r}: combined with lane {partner}"
        return thread_paint(group // held), (f"L{partner}", f"{held}/{width}"), Facts(**facts, note=note)

    grid = Grid(
        rounds + 1,
        WARP,
        cell,
        (45, 34),
        row_label=lambda r: "start" if r == 0 else f"xor {1 << (r - 1)}",
        row_name="round",
        column_name="lane",
        thick_columns=frozenset(range(0, WARP, width)) if width < WARP else frozenset(),
    )
    return finish(
        draw(grid, *arrange(grid)),
        title or f"Warp reduction over {width} lanes",
        f"Warp {warp}: {rounds} rounds of shuffles; after the last one every lane of a group holds the "
        "result.",
        f"Butterfly reduction over groups of {width} lanes in {rounds} rounds.",
        [
            Swatch("t0", "L3", "the lane it is combined with in this round; one colour = one value"),
            Swatch("plain", "4/32", "it holds the values of 4 of 32 lanes"),
        ],
    )
