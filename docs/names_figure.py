"""The figure of names: a tensor, a CTA's tile of it, one thread's part, its registers and predicates."""

from __future__ import annotations

from cute_softmax import plan_softmax
from layouts.figures import Figure
from layouts.figures.scene import Canvas, Facts, Swatch, finish
from layouts.style import thread_paint

# A thread of this CTA has two rows, and the second one does not exist.
ROWS, COLUMNS, CTA, THREAD = 28, 60, 1, 80
CELL, HEIGHT, LEFT = 46.0, 20.0, 136.0


def names() -> Figure:
    """A matrix small enough for the page, dealt out by its Plan; all positions come from the class's layouts."""
    c = plan_softmax((ROWS, COLUMNS), dtype="fp32", log=True).row_class
    rows, width = c.tiler
    assert (c.rows_per_thread, c.steps) == (2, 1), "the figure is drawn for two rows a thread and one step"
    body, note = Canvas(), LEFT + 10.4 * CELL

    body.words(0, 12, f"mX: the whole tensor, {ROWS} x {COLUMNS}", "head")
    for i, first in enumerate(range(0, ROWS, rows)):
        text = f"rows {first} to {min(first + rows, ROWS) - 1}: "
        text += f"gX, the tile of CTA {CTA}" if i == CTA else f"CTA {i}"
        box = CELL * COLUMNS / c.vector, 22
        body.cell(LEFT, 24 + i * 22, box, "true" if i == CTA else "plain", (text,), Facts())

    # gX: the owner of each vector.
    top = 24 + -(-ROWS // rows) * 22 + 54
    head = f"gX: (row, column) of a tile of {rows} x {width}; a cell is a vector of {c.vector} elements"
    body.words(0, top - 24, head, "head")
    mine = []
    for thread in range(c.threads):
        for m in range(c.rows_per_thread):
            index = c.tv(thread, m * c.vector)
            row, column = index % rows, index // rows
            at = LEFT + column / c.vector * CELL, top + row * HEIGHT
            outside = column >= COLUMNS or CTA * rows + row >= ROWS
            followed = thread == THREAD
            if followed:
                mine.append((at, CTA * rows + row, outside))
            paint = "false" if outside else thread_paint(thread) if followed else "plain"
            body.cell(*at, (CELL, HEIGHT), paint, (f"T{thread}",), Facts(threads=(thread,)))
            if row == 0 and column % (4 * c.vector) == 0:
                body.words(at[0] + CELL / 2, top - 5, str(column), "axis", "middle")
    for row in range(rows):
        body.words(LEFT - 22, top + row * HEIGHT + 14, f"row {CTA * rows + row}", "axis", "end")

    # rX: what T94 holds of it.
    low = top + rows * HEIGHT + 82
    body.words(0, low - 38, "tXgX", "head")
    body.words(note, low - 38, f"gX partitioned by X's tiled copy: what T{THREAD} owns", "note")
    one = Facts(threads=(THREAD,))
    for m, ((x, y), _, outside) in enumerate(mine):
        left = LEFT + m * 4 * CELL
        side, turn, to = LEFT - 14 + 7 * m, low - 48 - 8 * m, left + 1.5 * CELL
        bend = [(side, y + HEIGHT / 2), (side, turn), (to, turn), (to, low - 22)]
        body.stroke([(x, y + HEIGHT / 2), *bend], "link", arrow=True)
        paint, value = ("ghost", "-inf") if outside else (thread_paint(THREAD), "x")
        for i, text in enumerate(((value, "0"), ("...",), (value, str(c.vector - 1)))):
            body.cell(left + i * CELL, low - 18, (CELL, 34), paint, text, one)
        body.words(left + 3.1 * CELL, low + 4, f"m = {m}", "axis")
        stored = m == 0 or c.predicate(m, 0, 0) != c.predicate(0, 0, 0)
        bit = "b0: 1" if stored else "= b0"
        body.cell(left + CELL, low + 36, (CELL, 24), "true" if stored else "ghost", (bit,), one)
        state = "false" if outside else "true"
        body.cell(left + CELL, low + 76, (CELL, 24), state, (f"r{m}: {int(not outside)}",), one)
    body.words(0, low + 4, f"rX  (({c.vector},{c.rows_per_thread}),1,{c.steps})", "head")
    body.words(0, low + 52, f"pX  {c.predicate}", "head")
    body.words(0, low + 92, f"pR  ({c.rows_per_thread}):(1)", "head")
    body.words(note, low + 4, "registers, filled with the padding first", "note")
    body.words(note, low + 52, "a bit for each vector of a row; stride 0: both rows share it", "note")
    body.words(note, low + 92, f"a bit for each row: row {mine[1][1]} does not exist", "note")
    return finish(
        body,
        "Names",
        f"Class {c.name}: a CTA of {c.threads} threads, {c.threads_per_row} a row, "
        f"{c.rows_per_thread} rows m a thread. Thread {THREAD} is followed.",
        "How the parts of a tensor are called on their way from global memory to one thread's registers.",
        [
            Swatch(thread_paint(THREAD), f"T{THREAD}", "the thread followed"),
            Swatch("false", "", "past the end of the rows, or no row: not loaded, not stored"),
        ],
    )
