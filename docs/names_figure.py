"""The figure of names: a tensor, a CTA's tile of it, one thread's part, its registers and predicates."""

from __future__ import annotations

from dataclasses import replace

from cute_softmax import plan_softmax
from layouts.figures import Figure
from layouts.figures.scene import Canvas, Facts, Swatch, finish
from layouts.style import thread_paint

ROWS, COLUMNS, CTA, THREAD = 16, 120, 1, 31
CELL, HEIGHT = 46.0, 34.0


def names() -> Figure:
    """An example small enough for the page, 32 threads in two steps; all positions come from its layouts."""
    planned = plan_softmax((ROWS, COLUMNS)).row_class
    c = replace(planned, threads_per_row=8, steps=2, rows_per_thread=1, threads=32)
    rows, width = c.tiler
    owner = {}
    for thread in range(c.threads):
        for k in range(c.steps):
            index = c.tv(thread, 0) + k * c.step_tiler[1] * rows
            owner[index % rows, index // rows // c.vector] = thread, k
    body, x0 = Canvas(), 136.0

    body.words(0, 12, f"mX: the whole tensor, {ROWS} x {COLUMNS}", "head")
    for i in range(ROWS // rows):
        paint = "true" if i == CTA else "plain"
        text = (
            f"rows {i * rows} to {i * rows + rows - 1}: "
            + ("gX, the tile of CTA 1" if i == CTA else f"CTA {i}"),
        )
        body.cell(x0, 24 + i * 22, (CELL * COLUMNS / c.vector, 22), paint, text, Facts())

    top = 24 + ROWS // rows * 22 + 54
    head = f"gX: (row, column) of a tile of {rows} x {width}; a cell is a vector of {c.vector} elements"
    body.words(0, top - 24, head, "head")
    mine = []
    for (row, j), (thread, k) in sorted(owner.items()):
        at = x0 + j * CELL, top + row * HEIGHT
        outside = j * c.vector >= COLUMNS
        mine += [(k, at, outside)] if thread == THREAD else []
        paint = "false" if outside else thread_paint(thread) if thread == THREAD else "plain"
        lines = (f"T{thread}", f"k = {k}")
        body.cell(*at, (CELL, HEIGHT), paint, lines, Facts(threads=(thread,)))
        if row == 0 and j % 4 == 0:
            body.words(at[0] + CELL / 2, top - 5, str(j * c.vector), "axis", "middle")
    for row in range(rows):
        body.words(x0 - 8, top + row * HEIGHT + 21, f"row {CTA * rows + row}", "axis", "end")
    bottom = top + rows * HEIGHT

    low = bottom + 78
    for k, (x, y), _ in mine:
        to = x0 + k * 4 * CELL + 1.5 * CELL
        bend = [(x + CELL / 2, bottom + 14), (to, bottom + 22), (to, low - 22)]
        body.stroke([(x + CELL / 2, y + HEIGHT), *bend], "link", arrow=True)
    body.words(0, low - 34, "tXgX", "head")
    body.words(x0 + 8.4 * CELL, low - 34, f"gX partitioned by X's tiled copy: what T{THREAD} owns", "note")
    part = c.predicate
    for k, _, outside in mine:
        left = x0 + k * 4 * CELL
        paint = "ghost" if outside else thread_paint(THREAD)
        value = "-inf" if outside else "x"
        for half in range(3):
            text = (value, f"{half if half < 2 else c.vector - 1}") if half != 1 else ("...",)
            body.cell(left + half * CELL, low - 18, (CELL, HEIGHT), paint, text, Facts(threads=(THREAD,)))
        bit = part(0, 0, k)
        state = "false" if outside else "true"
        body.cell(
            left + CELL, low + 40, (CELL, 24), state, (f"{int(not outside)}",), Facts(threads=(THREAD,))
        )
        body.words(left + 2.1 * CELL, low + 56, f"bit {bit}", "axis")
    shape = f"(({c.vector},{c.rows_per_thread}),1,{c.steps})"
    body.words(0, low + 4, f"rX  {shape}", "head")
    body.words(0, low + 56, f"pX  {part}", "head")
    body.words(x0 + 8.4 * CELL, low - 2, "registers, filled with the padding first", "note")
    body.words(x0 + 8.4 * CELL, low + 56, "predicates: one bit a vector, the same for every row", "note")
    return finish(
        body,
        "Names",
        f"A CTA of {c.threads} threads: {c.threads_per_row} a row, {c.steps} steps k. "
        f"Thread {THREAD} is followed; its second vector begins past the end of its row.",
        "How the parts of a tensor are called on their way from global memory to one thread's registers.",
        [
            Swatch(thread_paint(THREAD), f"T{THREAD}", "the thread followed"),
            Swatch("false", "", "outside the row: not loaded, not stored"),
        ],
    )
