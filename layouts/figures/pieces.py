"""Rows that begin and end off a vector boundary: head and tail scalars around a body of whole vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..style import thread_paint
from .grid import cell_size, windows
from .scene import Canvas, Facts, Figure, Swatch, finish

BODY = 700.0  # px for the vectors of a row
MORE = 120.0  # px for "n more"
HEIGHT, LINE = 34.0, 44.0  # of a cell, and from one row to the next


@dataclass(frozen=True)
class Pieces:
    """A row of ``n`` elements that starts ``misalignment`` elements past a vector boundary, in pieces."""

    n: int
    vector: int
    misalignment: int

    @property
    def head(self) -> int:
        """Scalars before the first boundary."""
        return min(self.n, -self.misalignment % self.vector)

    @property
    def body(self) -> int:
        """Elements in whole vectors."""
        return (self.n - self.head) // self.vector * self.vector

    @property
    def tail(self) -> int:
        """Scalars after the last vector."""
        return self.n - self.head - self.body


def row_pieces(
    n: int,
    *,
    vector: int,
    starts: Sequence[int],
    threads: int,
    element_bytes: int,
    share: int = 0,
    cta: int = 0,
    space: str = "row",
    title: str | None = None,
) -> Figure:
    """Rows of ``n`` elements cut into head scalars, whole aligned vectors and tail scalars; one line a row.

    ``starts`` are the offsets of the rows' first elements in the tensor ``space``, whose offset 0 lies on a
    vector boundary. A row has 2 * (vector - 1) scalar slots, the first half for its head, the second for
    its tail, dealt to its ``threads`` in turn as the vectors are. With a ``share``, each CTA of a cluster
    takes so many elements of the body and CTA 0 all scalars; cells name the threads of ``cta``. All but
    ``element_bytes`` is in elements. Raises ``ValueError`` for a share that is no whole number of vectors.
    """
    if n < 1 or vector < 1 or threads < 1 or not starts or min(starts) < 0:
        raise ValueError(
            f"a row needs n, vector and threads of at least 1 and starts of at least 0, got {n}, {vector}, "
            f"{threads} and {list(starts)}"
        )
    if share % vector:
        raise ValueError(f"share must be a multiple of the vector of {vector} elements, got {share}")
    rows = [Pieces(n, vector, start % vector) for start in starts]
    body = Canvas()
    left = 112.0
    scalar = max(38.0, cell_size([(f"T{min(threads, 2 * vector) - 1}", str(n))])[0])
    wide = max(64.0, cell_size([(_owner(share, 15, threads - 1), f"{n - vector}..{n}")])[0])
    limit = max(3, int(BODY // wide))
    middle = left + (vector * scalar + 26 if any(r.head for r in rows) else 0)
    if max(r.body // vector for r in rows) * wide <= limit * wide + MORE:  # "more" would take their place
        limit = max(r.body // vector for r in rows)
    drawn = [windows(r.body // vector, limit) for r in rows]
    gap = max((_extent(w, wide) for w in drawn), default=0.0)
    right = middle + gap + 26

    def line(r: int, y: float) -> None:
        row, start = rows[r], starts[r]

        def scalars(first: int, count: int, slot: int, x: float) -> None:
            for i in range(count):
                thread, turn = (slot + i) % threads, (slot + i) // threads
                column = first + i
                facts = Facts(
                    threads=(thread,) if cta == 0 else (),
                    coordinate=f"({r}, {column})",
                    space=space,
                    start=start + column,
                    stop=start + column + 1,
                    byte=(start + column) * element_bytes,
                    note=f"one scalar: slot {slot + i}, turn {turn} of thread {thread}"
                    + (" of CTA 0" if share else ""),
                )
                words = (f"T{thread}", str(column))
                body.cell(x + i * scalar, y, (scalar, HEIGHT), "scalar", words, facts)

        body.words(left - 8, y + 14, f"row {r}", "axis", "end")
        body.words(left - 8, y + 28, f"starts at +{row.misalignment}", "axis", "end")
        scalars(0, row.head, 0, left + row.misalignment * scalar)
        x = middle
        for i, run in enumerate(drawn[r]):
            if i:
                more = f"⋯ {run.start - drawn[r][i - 1].stop:,} more ⋯"
                body.words(x + MORE / 2, y + HEIGHT / 2 + 3.5, more, "axis", "middle")
                x += MORE
            for v in run:
                facts, paint, words = _vector(row, start, v, r)
                body.cell(x, y, (wide, HEIGHT), paint, words, facts)
                x += wide
        scalars(row.head + row.body, row.tail, vector - 1, right)

    def _vector(row: Pieces, start: int, v: int, r: int) -> tuple[Facts, str, tuple[str, str]]:
        first = row.head + v * vector
        owner, within = divmod(v * vector, share) if share else (0, v * vector)
        thread, step = within // vector % threads, within // vector // threads
        facts = Facts(
            threads=(thread,) if owner == cta else (),
            coordinate=f"({r}, {first}..{first + vector - 1})",
            space=space,
            start=start + first,
            stop=start + first + vector,
            byte=(start + first) * element_bytes,
            note=f"one vector of {vector * element_bytes} bytes: step {step} of thread {thread}"
            + (f" of CTA {owner}" if share else ""),
        )
        words = (_owner(share, owner, thread), f"{first}..{first + vector - 1}")
        return facts, thread_paint(thread), words

    if any(r.head for r in rows):
        body.words(left, 12, "head", "head")
        for i in range(vector):
            body.words(left + (i + 0.5) * scalar, 30, f"+{i}", "axis", "middle")
    body.words(middle, 12, f"body: vectors of {vector} elements, {vector * element_bytes} bytes", "head")
    if any(r.tail for r in rows):
        body.words(right, 12, "tail", "head")
        for i in range(max(r.tail for r in rows)):
            body.words(right + (i + 0.5) * scalar, 30, f"+{i}", "axis", "middle")
    for r in range(len(rows)):
        line(r, 38 + r * LINE)
    first = rows[0]
    counts = f"row 0 = {first.head} + {first.body // vector:,} \u00d7 {vector} + {first.tail}"
    swatches = [
        Swatch(
            "scalar", "T0", "one element, loaded alone by the thread named" + (" of CTA 0" if share else "")
        ),
        Swatch("t0", "T0", "one vector and its columns; colour = thread mod 8"),
        Swatch("plain", "+3", "place within the vector that it would belong to"),
    ]
    if share:
        swatches.append(Swatch("plain", "C1 T0", "thread 0 of CTA 1 of the cluster"))
    return finish(
        body,
        title or f"Rows of {n:,} that start off a vector boundary",
        f"Rows of {n:,} elements, {threads} threads a row: {counts} elements. Slots 0 to {vector - 2} are "
        f"the head, {vector - 1} to {2 * vector - 3} the tail, dealt to the threads in turn."
        + (f" Each CTA takes {share:,} elements of the body, CTA 0 the scalars." if share else ""),
        f"Rows of {n} elements cut into head scalars, aligned vectors of {vector} and tail scalars: "
        + "; ".join(f"row {i}: {r.head} + {r.body} + {r.tail}" for i, r in enumerate(rows))
        + ".",
        swatches,
    )


def _owner(share: int, cta: int, thread: int) -> str:
    return f"C{cta} T{thread}" if share else f"T{thread}"


def _extent(runs: Sequence[range], wide: float) -> float:
    """The px of the drawn vectors of a row with their gaps."""
    return sum(len(run) for run in runs) * wide + MORE * (len(runs) - 1)
