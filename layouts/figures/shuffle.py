"""A reduction within a warp: who is combined with whom in each round of shuffles."""

from __future__ import annotations

from ..access import WARP
from ..style import thread_paint
from .grid import Grid, arrange, draw
from .scene import Facts, Figure, Swatch, finish


def warp_shuffle(width: int = WARP, *, start: int = 1, warp: int = 0, title: str | None = None) -> Figure:
    """A butterfly reduction over groups of ``width`` lanes of one warp (``shfl.bfly``), round by round.

    With ``start`` only every start-th lane of a group is merged, so that it ends with ``start`` results side by
    side. A lane's cell names the lane it is combined with and how many lanes' values it then holds; lanes of one
    colour hold the same value. ``ValueError`` unless both are powers of two, ``start`` <= ``width`` <= 32.
    """
    if width not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"width must be a power of two up to {WARP}, got {width}")
    if start not in (1, 2, 4, 8, 16, 32) or start > width:
        raise ValueError(f"start must be a power of two up to the width of {width}, got {start}")
    merged = width // start
    rounds = merged.bit_length() - 1

    def cell(r: int, lane: int):
        held = 1 << r
        value = lane // (start * held) * start + lane % start
        facts = {"threads": (warp * WARP + lane,), "value": f"of {held} lane" + ("s" if held > 1 else "")}
        if r == 0:
            return (
                thread_paint(lane),
                (f"L{lane}", "own"),
                Facts(**facts, note="its own values, already reduced"),
            )
        partner = lane ^ (start * held >> 1)
        note = f"round {r}: combined with lane {partner}"
        return thread_paint(value), (f"L{partner}", f"{held}/{merged}"), Facts(**facts, note=note)

    grid = Grid(
        rounds + 1,
        WARP,
        cell,
        (45, 34),
        row_label=lambda r: "start" if r == 0 else f"xor {start << (r - 1)}",
        row_name="round",
        column_name="lane",
        thick_columns=frozenset(range(0, WARP, width)) if width < WARP else frozenset(),
    )
    every = "lanes" if start == 1 else f"lanes that lie {start} apart"
    kept = "every lane of a group holds the result" if start == 1 else f"lanes 0 to {start - 1} hold one each"
    turns = f"{rounds} round{'s' * (rounds != 1)}"
    return finish(
        draw(grid, *arrange(grid)),
        title or f"Warp reduction over {merged} {every}",
        f"Warp {warp}: {turns} of shuffles; after the last one {kept}.",
        f"Butterfly reduction over groups of {merged} {every} in {turns}.",
        [
            Swatch("t0", "L3", "the lane it is combined with in this round; one colour = one value"),
            Swatch("plain", "4/32", "it holds the values of 4 of 32 lanes")
            if start == 1
            else Swatch("plain", f"2/{merged}", f"it holds the values of 2 of {merged} lanes"),
        ],
    )
