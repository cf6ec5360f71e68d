"""One thread followed through several figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .scene import MARGIN, Canvas, Facts, Figure, Swatch, finish, wrapped

MAX_SENTENCES = 6


def follow_thread(figures: Sequence[Figure], thread: int, *, title: str | None = None) -> Figure:
    """All ``figures`` below each other with everything dimmed that ``thread`` does not touch.

    Above each stands in words what the thread touches there. Raises ``ValueError`` where it occurs in none.
    """
    body = Canvas()
    touched = 0
    for figure in figures:
        mine = [c.facts for c in figure.cells if thread in c.facts.threads]
        touched += len(mine)
        part = Canvas()
        part.items = list(figure.following(thread).items)
        part.right, part.bottom = figure.width - MARGIN, figure.height - MARGIN
        y = body.bottom + 26 if body.items else 0.0
        for line in _told(mine, thread, figure.width):
            body.words(0, y + 12, line, "note")
            y += 17
        body.place(part, -MARGIN, y - 4)
    if not touched:
        raise ValueError(f"thread {thread} touches nothing in {', '.join(f.title for f in figures)}")
    return finish(
        body,
        title or f"Thread {thread}",
        f"Warp {thread // 32}, lane {thread % 32}: what it owns and touches, figure by figure; all else "
        "is dimmed.",
        f"Thread {thread} followed through: {', '.join(f.title for f in figures)}.",
        [Swatch("t" + str(thread % 8), f"T{thread}", "the thread followed")],
    )


def _told(mine: Sequence[Facts], thread: int, width: float) -> list[str]:
    if not mine:
        return [f"T{thread} touches nothing drawn here."]
    said = [replace(f, threads=()).sentence() for f in mine]
    said = list(dict.fromkeys(s for s in said if s))
    more = f"; and {len(said) - MAX_SENTENCES} more" if len(said) > MAX_SENTENCES else ""
    return wrapped(
        f"T{thread}: " + "; ".join(said[:MAX_SENTENCES]) + more, "note", max(width - 2 * MARGIN, 700)
    )
