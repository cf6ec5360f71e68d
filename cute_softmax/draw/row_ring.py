"""Figures of rows that ranks share and keep on chip: the ring's places turn after turn, and the states of all ranks in
a workspace. The arithmetic is that of `kernels/row_ring.py` and `kernels/ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from layouts.figures import Facts, Figure
from layouts.figures.grid import Grid, arrange, draw, headed
from layouts.figures.scene import Swatch, count, finish
from layouts.html import Step
from layouts.style import thread_paint

from ..plan import Plan, RowClass
from ..plan.ranks import HEADER, states_of

RANKS = 2  # that are drawn; a Plan serves any number
ROWS = 4  # of a workspace that are drawn
LOADING, REDUCED, WAITING, FINISHED = "loading", "reduced", "waiting", "finished"
TOLD = {
    LOADING: "being loaded from global memory",
    REDUCED: "reduced; its state is pushed to all ranks",
    WAITING: "reduced; waiting for the states of the other ranks",
    FINISHED: "finished with the states of all ranks",
}


class Held(NamedTuple):
    """A tile in a turn of its CTA: which of its tiles, and what happens to it."""

    tile: int
    what: str


def phases(c: RowClass, turn: int, tiles: int) -> Iterator[tuple[int, Held]]:
    """(place, what is there) of a turn, in which tile `turn` is reduced. tiles: of the CTA, in all."""
    for tile in range(max(turn - c.lag, 0), min(turn + c.ahead, tiles)):
        if tile > turn:
            what = LOADING
        elif tile == turn:
            what = REDUCED
        else:
            what = FINISHED if tile == turn - c.lag else WAITING
        yield tile % c.ring, Held(tile, what)


def turns(plan: Plan) -> Figure:
    """Which tile lies where, and what happens to it, turn after turn of a CTA."""
    c = plan.kernel
    shown = c.ring + c.lag + 2
    rows = [dict(phases(c, turn, shown)) for turn in range(shown + c.lag)]

    def cell(turn: int, place: int):
        held = rows[turn].get(place)
        if held is None:
            return "ghost", ("",), Facts()
        facts = Facts(coordinate=f"(turn {turn}, place {place})", note=TOLD[held.what])
        return thread_paint(held.tile), (f"tile {held.tile}", held.what), facts

    grid = Grid(
        len(rows),
        c.ring,
        cell,
        (84, 34),
        column_label=lambda i: ("slot", str(i)),
        row_name="turn",
        column_name="",
    )
    coming = "another is being loaded" if c.ahead == 2 else f"{c.ahead - 1} are being loaded"
    lead = (
        f"A CTA has {c.ring} slots for tiles of {c.tiler[0]} \u00d7 {c.tiler[1]:,} elements. In each turn one is "
        f"reduced, the tile of {count(c.lag, 'turn')} before is finished, and {coming}."
    )
    figure = finish(
        draw(grid, *arrange(grid)),
        f"The ring of {c.ring} slots, turn by turn",
        lead,
        f"The ring, turn by turn. {lead}",
        [
            Swatch("t0", "tile 0", "colour = tile mod 8"),
            *(Swatch("plain", what, told) for what, told in TOLD.items() if what != WAITING or c.lag > 1),
        ],
    )
    return figure.noted(
        "A tile stays in its slot until it is finished; then the slot is refilled.",
        f"Shown are {shown} tiles of one CTA. The first has the number of its cluster's ticket; each next one is "
        f"{plan.ctas:,} further, the number of {'clusters' if c.cluster_n > 1 else 'CTAs'}.",
    )


def workspace(plan: Plan) -> Figure:
    """The states of the first rows in a half of a rank's workspace."""
    c = plan.kernel
    states = states_of(c, RANKS, min(plan.rows, ROWS))
    words, peers = states[2].size, c.cluster_n * RANKS

    def cell(row: int, peer: int):
        place = states((row, peer, 0))
        cta, rank = peer % c.cluster_n, peer // c.cluster_n
        facts = Facts(
            coordinate=f"(row {row}, peer {peer})",
            space="workspace",
            start=place,
            stop=place + words,
            byte=HEADER + 8 * place,
            note=f"pushed by CTA {cta} of the cluster that rank {rank} has for the row, read by lane {peer} of the "
            "warps that share it here",
        )
        return thread_paint(rank), (str(place), f"@{HEADER + 8 * place}"), facts

    grid = Grid(
        states[0].size,
        peers,
        cell,
        (74, 38),
        column_label=lambda p: (f"rank {p // c.cluster_n}", f"CTA {p % c.cluster_n}"),
        column_name="",
        thick_columns=range(c.cluster_n, peers, c.cluster_n),
    )
    body = headed("the half of launches with an even epoch", draw(grid, *arrange(grid)))
    numbers = count(words, "number")
    figure = finish(
        body,
        f"The states of {RANKS} ranks in the workspace of each",
        f"{states} slots of 8 bytes: rows, (CTAs of a rank, ranks), numbers of a state. A row is shared by "
        f"{count(peers, 'CTA')}, whose states are adjacent.",
        "A workspace as a reduction buffer whose peers are the CTAs of all ranks: a grid of rows by peers, each slot "
        "with its index and byte address.",
        [Swatch("t0", f"0 @{HEADER}", "first slot of a state and its byte in the workspace; colour = rank")],
    )
    return figure.noted(
        f"A state is {numbers}. Each is stored with the epoch of its launch, in one store of 8 bytes to every rank.",
        f"The first {HEADER} bytes belong to the kernels: epoch, tickets, how many clusters are done, whether a "
        "rank is missing, to which launch each has come. Launches with an odd epoch use the other half.",
    )


def walk() -> list[Step]:
    """The steps of the explorer between the reduction of a row's share and its results."""
    return [
        Step(
            "To all ranks",
            "What the CTA has so far is the state of its share. One lane for each rank pushes it into that rank's "
            "workspace, every number with the launch's epoch.",
            "workspace",
            lambda facts: facts.coordinate.startswith("(row 0, "),
        ),
        Step(
            "Other tiles meanwhile",
            "The row waits while other tiles are loaded and reduced. When its turn has come all states of it are, as a "
            "rule, there: each lane reads one, and shuffles merge them.",
            "turns",
            lambda facts: facts.note == TOLD[FINISHED],
        ),
    ]
