"""The steps of rows a row ahead, from a Plan's numbers alone: which chunk lies where, and when; see `kernels.ahead`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ..plan import PanelPlan

ASKED, ABSORBED, KEPT, FINISHED = "asked for", "absorbed", "kept", "finished"


@dataclass(frozen=True)
class Event:
    """In a step, counted from the first of the first row: what becomes of a chunk of a row, in which place."""

    step: int
    what: str
    place: int
    row: int
    chunk: int


@dataclass(frozen=True)
class Walk:
    """A CTA's way through so many rows of so many chunks. ahead, registers, wait: of the Plan class.

    Places are counted: first those of shared memory, then the registers for the chunks that are kept, then those for
    the chunks of the row before that are finished last.
    """

    rows: int
    chunks: int
    ahead: int
    registers: int
    wait: int

    @property
    def steps(self) -> int:
        """Of a row."""
        return self.chunks + self.wait

    @property
    def shared(self) -> int:
        """Places of shared memory."""
        return self.chunks - self.registers + self.ahead

    @property
    def places(self) -> int:
        return self.shared + self.registers + self.wait

    def place(self, row: int, n: int, early: bool) -> int:
        """Where chunk n of a row lies in shared memory; early: or comes to, before it moves to registers."""
        if early and n < self.registers:
            n = self.registers + (n + self.wait) % self.ahead
        place = (-row * self.ahead) % self.shared + n - self.registers
        return place - self.shared if place >= self.shared else place

    def events(self) -> Iterator[Event]:
        """What happens, in its order."""
        kept, last = self.shared, self.shared + self.registers
        for n in range(self.ahead):
            yield Event(n - self.ahead, ASKED, self.place(0, n, True), 0, n)
        for row in range(self.rows + 1):
            for t in range(self.steps):
                step, absorbs, early = row * self.steps + t, t < self.chunks, t < self.registers
                coming = t + self.ahead
                free = self.place(row, coming, early) if absorbs else self.place(row, t, False)
                n = t if absorbs else t - self.chunks
                if t >= self.wait and row > 0:
                    where = kept + t if early else free if absorbs else last + n
                    yield Event(step, FINISHED, where, row - 1, n)
                if absorbs and row < self.rows:
                    yield Event(step, ABSORBED, self.place(row, t, early), row, t)
                    if early:
                        yield Event(step, KEPT, kept + t, row, t)
                if coming < self.chunks and row < self.rows:
                    yield Event(step, ASKED, free, row, coming)
                following = not absorbs or (not early and self.wait < self.ahead)
                if following and coming >= self.steps and row + 1 < self.rows:
                    yield Event(step, ASKED, free, row + 1, coming - self.steps)
                if not absorbs and row < self.rows:
                    yield Event(step, KEPT, last + n, row, n)

    def problems(self, buffers: int) -> Iterator[str]:
        """What is wrong with it, where shared memory has so many places for chunks. A copy is there `ahead` steps after
        it was asked for, and not before."""
        lies: dict[int, tuple[int, int] | None] = {}
        coming: dict[int, tuple[int, tuple[int, int]]] = {}
        done: Counter[tuple[str, int, int]] = Counter()
        if self.shared > buffers:
            yield f"{self.shared} places of {buffers}"
        for step, events in groupby(self.events(), lambda e: e.step):
            for place, (due, what) in [*coming.items()]:
                if due <= step:
                    lies[place] = what
                    del coming[place]
            for e in events:
                what, there = (e.row, e.chunk), lies.get(e.place)
                done[e.what, e.row, e.chunk] += 1
                if e.what == ASKED:
                    if e.place in coming or not 0 <= e.place < self.shared:
                        yield f"step {step}: no place for chunk {e.chunk} of row {e.row}"
                    lies[e.place] = None
                    coming[e.place] = (step + self.ahead, what)
                elif e.what == KEPT:
                    if there:
                        yield f"step {step}: chunk {e.chunk} of row {e.row} comes upon {there}"
                    source = self.shared + e.chunk if e.place >= self.shared + self.registers else None
                    if source is not None and lies.pop(source, None) != what:
                        yield f"step {step}: chunk {e.chunk} of row {e.row} is not in registers"
                    lies[e.place] = what
                else:
                    if there != what:
                        yield f"step {step}: chunk {e.chunk} of row {e.row} is {e.what}, and there is {there}"
                    if e.what == FINISHED:
                        lies.pop(e.place, None)
        for row in range(self.rows):
            for n in range(self.chunks):
                for what in (ASKED, ABSORBED, FINISHED):
                    if done[what, row, n] != 1:
                        yield f"chunk {n} of row {row} is {what} {done[what, row, n]} times"


def walk_of(plan: PanelPlan, rows: int = 3) -> Walk:
    """Of a CTA of a plan, with so many rows."""
    c = plan.kernel
    return Walk(rows, plan.chunks, c.ahead, c.registers, c.wait)
