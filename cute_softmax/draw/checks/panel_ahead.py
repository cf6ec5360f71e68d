"""The steps of rows a row ahead, from a Plan's numbers alone: which chunk lies where, and when.

The kernel's are in `kernels.panel.ahead`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...plan import PanelPlan

ASKED, ABSORBED, KEPT, FINISHED = "asked for", "absorbed", "kept", "finished"


@dataclass(frozen=True)
class Event:
    """What happens in a step, counted from the first of the first row: what becomes of a chunk of a row, in which
    place; and which place that leaves free."""

    step: int
    what: str
    place: int
    row: int
    chunk: int
    frees: int | None = None

    def apply(self, lies: dict[int, Event]):
        """What lies in each place, given by the event that left it there, after this one."""
        lies.pop(self.frees, None)
        if self.what != FINISHED:
            lies[self.place] = self


@dataclass(frozen=True)
class Walk:
    """A CTA's way through so many rows of so many chunks. ahead, registers, wait: of the Plan class.

    Places are counted: first those of shared memory, then from `kept` on the registers for the chunks that are kept,
    then from `last` on those for the chunks of the row before that are finished last.
    """

    rows: int
    chunks: int
    ahead: int
    registers: int
    wait: int

    @property
    def steps(self) -> int:
        """The steps of a row."""
        return self.chunks + self.wait

    @property
    def shared(self) -> int:
        """Places of shared memory."""
        return self.chunks - self.registers + self.ahead

    @property
    def kept(self) -> int:
        return self.shared

    @property
    def last(self) -> int:
        return self.kept + self.registers

    @property
    def places(self) -> int:
        return self.last + self.wait

    def place(self, row: int, n: int, early: bool) -> int:
        """Where chunk n of a row lies in shared memory; early: or comes to, before it moves to registers."""
        if early and n < self.registers:
            n = self.registers + (n + self.wait) % self.ahead
        place = (-row * self.ahead) % self.shared + n - self.registers
        return place - self.shared if place >= self.shared else place

    def events(self) -> Iterator[Event]:
        """What happens, in its order."""
        for n in range(self.ahead):
            yield Event(n - self.ahead, ASKED, self.place(0, n, True), 0, n)
        for row in range(self.rows + 1):
            for t in range(self.steps):
                step, absorbs, early = row * self.steps + t, t < self.chunks, t < self.registers
                coming = t + self.ahead
                free = self.place(row, coming, early) if absorbs else self.place(row, t, False)
                n = t if absorbs else t - self.chunks
                if t >= self.wait and row > 0:
                    where = self.kept + t if early else free if absorbs else self.last + n
                    yield Event(step, FINISHED, where, row - 1, n, where)
                if absorbs and row < self.rows:
                    here = self.place(row, t, early)
                    yield Event(step, ABSORBED, here, row, t)
                    if early:
                        yield Event(step, KEPT, self.kept + t, row, t, here)
                if coming < self.chunks and row < self.rows:
                    yield Event(step, ASKED, free, row, coming)
                following = not absorbs or (not early and self.wait < self.ahead)
                if following and coming >= self.steps and row + 1 < self.rows:
                    yield Event(step, ASKED, free, row + 1, coming - self.steps)
                if not absorbs and row < self.rows:
                    yield Event(step, KEPT, self.last + n, row, n, self.kept + n)

    def problems(self, buffers: int) -> Iterator[str]:
        """What is wrong with it, where shared memory has so many places for chunks. A copy is there `ahead` steps after
        it was asked for, and not before."""
        lies: dict[int, Event] = {}
        done: Counter[tuple[str, int, int]] = Counter()
        if self.shared > buffers:
            yield f"{self.shared} places of {buffers}"
        for e in self.events():
            told = f"step {e.step}: chunk {e.chunk} of row {e.row}"
            if e.what == ASKED and not 0 <= e.place < self.shared:
                yield f"{told} comes to no place"
            if e.what in (ASKED, KEPT) and e.place in lies:
                yield f"{told} has no place, there is {lies[e.place]}"
            # What is taken: nothing if it comes from global memory.
            taken = None if e.what == ASKED else e.place if e.what == ABSORBED else e.frees
            if taken is not None:
                there = lies.get(taken)
                known = there and (there.row, there.chunk) == (e.row, e.chunk)
                if not known or (there.what == ASKED) != (e.what == ABSORBED):
                    yield f"{told} is {e.what}, and there is {there}"
                elif e.what == ABSORBED and there.step + self.ahead > e.step:
                    yield f"{told} is still on its way"
            done[e.what, e.row, e.chunk] += 1
            e.apply(lies)
        for row in range(self.rows):
            for n in range(self.chunks):
                for what in (ASKED, ABSORBED, FINISHED):
                    if done[what, row, n] != 1:
                        yield f"chunk {n} of row {row} is {what} {done[what, row, n]} times"


def walk_of(plan: PanelPlan, rows: int = 3) -> Walk:
    """The walk of a CTA of a plan, with so many rows."""
    c = plan.kernel
    return Walk(rows, plan.chunks, c.ahead, c.registers, c.wait)
