"""Where the chunks of rows lie that are absorbed a row ahead, step by step; see `kernels.panel.ahead`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from layouts.figures import Facts, Figure
from layouts.figures.grid import Grid, cell_size, draw, starts
from layouts.figures.scene import Swatch, finish
from layouts.style import thread_paint

from ..plan import PanelPlan
from .checks.panel_ahead import ABSORBED, ASKED, FINISHED, Event, Walk, walk_of

# Of three rows the steps of the second are drawn.
NAMES = "abc"
SHOWN = 1


def places(plan: PanelPlan) -> Figure:
    """Places of shared memory and of registers by the steps of a row."""
    walk, c = walk_of(plan, len(NAMES)), plan.kernel
    columns = list(_columns(walk))

    def words(place: int, t: int) -> tuple[str, str]:
        event, word = columns[t].get(place, (None, ""))
        return (f"{NAMES[event.row]}{event.chunk}", word) if event else ("", "")

    def cell(place: int, t: int):
        coordinate = f"(place {place}, step {t})"
        if place not in columns[t]:
            return "ghost", ("", ""), Facts(coordinate=coordinate, note="free")
        event, word = columns[t][place]
        facts = Facts(
            coordinate=coordinate,
            space="sX" if place < walk.shared else "registers",
            note=f"chunk {event.chunk} of row {NAMES[event.row]}: {word or 'waits to be finished'}",
        )
        return thread_paint(event.row), words(place, t), facts

    def name(place: int) -> str:
        if place < walk.shared:
            return f"shared {place}"
        return f"registers {place - walk.shared}"

    labels = [words(p, t) for p in range(walk.places) for t in range(walk.steps)]
    grid = Grid(
        walk.places,
        walk.steps,
        cell,
        cell_size(labels),
        row_label=name,
        row_name="",
        column_name="step",
        thick_rows=starts((walk.shared, walk.registers, walk.wait)),
    )
    body = draw(grid, [range(grid.rows)], [[range(grid.columns)]])
    lead = (
        f"{walk.chunks} chunks of a row in {walk.shared} slots of shared memory and {walk.registers + walk.wait} of "
        f"registers, {c.chunk * c.columns:,} elements each; the steps of row {NAMES[SHOWN]}."
    )
    before, after = NAMES[SHOWN - 1], NAMES[SHOWN + 1]
    return finish(
        body,
        "A row ahead: where each chunk is, step by step",
        lead,
        f"A row ahead. {lead}",
        [
            Swatch(
                thread_paint(SHOWN - 1), f"{before}3", f"chunk 3 of row {before}, which was absorbed before"
            ),
            Swatch(thread_paint(SHOWN), f"{NAMES[SHOWN]}3", "of this row"),
            Swatch(thread_paint(SHOWN + 1), f"{after}3", "of the next row"),
            Swatch("ghost", "", "free"),
        ],
    ).noted(
        f"A step loads the chunk that the step {c.ahead} later absorbs, into the slot that this step has freed.",
        f"Chunks 0 to {walk.registers - 1} move to registers when they are absorbed; the others stay in shared memory.",
        f"In the first {walk.wait} steps nothing is finished, and in the last {walk.wait} nothing is absorbed: this is "
        "the time in which the parts of a row exchange their states.",
    )


def _columns(walk: Walk) -> Iterator[dict[int, tuple[Event, str]]]:
    """For each step of the row that is shown: place -> what lies there while the step works, and in a word what becomes
    of it."""
    lies: dict[int, Event] = {}
    first = SHOWN * walk.steps
    for step, group in groupby(walk.events(), lambda e: e.step):
        events = list(group)
        if first <= step < first + walk.steps:
            found = {place: (e, "loading" if e.what == ASKED else "") for place, e in lies.items()}
            yield found | {e.place: (e, e.what) for e in events if e.what in (ABSORBED, FINISHED)}
        for e in events:
            e.apply(lies)
