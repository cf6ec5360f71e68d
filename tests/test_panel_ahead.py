"""The steps of `kernels.ahead`: what is copied where, and what lies there when it is used."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import panels
import pytest

from cute_softmax.hardware import H200
from cute_softmax.plan import plan_panel
from cute_softmax.plan.panel import Team


def walk(rows: int, chunks: int, ahead: int, registers: int, wait: int, buffers: int) -> dict[tuple, int]:
    """The steps of a CTA with so many rows: when each chunk is absorbed, and when finished.

    A copy is there `ahead` steps after it was asked for, and not before. Raises AssertionError where a place has
    another chunk than the step takes.
    """
    lies, coming, kept, last, done, now, turn = {}, [], {}, {}, {}, -ahead, 0
    places = chunks - registers + ahead

    def place_of(n: int, early: bool = False) -> int:
        if early and n < registers:
            n = registers + (n + wait) % ahead
        place = turn + n - registers
        return place - places if place >= places else place

    def ask(place: int, row: int, n: int):
        assert 0 <= place < min(places, buffers)
        assert all(place != other for _, other, *_ in coming), "two copies on their way to one place"
        lies[place] = None  # from now on
        coming.append((now + ahead, place, row, n))

    def take(what: str, lying: tuple | None, row: int, n: int):
        assert lying == (row, n), f"{what} {n} of row {row}: there is {lying}"
        assert (what, row, n) not in done
        done[what, row, n] = now

    for n in range(ahead):
        ask(place_of(n, True), 0, n)
        now += 1
    for row in range(rows + 1):
        for t in range(chunks + wait):
            for arrived in [c for c in coming if c[0] <= now]:
                lies[arrived[1]] = arrived[2:]
                coming.remove(arrived)
            absorbs, early = t < chunks, t < registers
            free = place_of(t + ahead, early) if absorbs else place_of(t)
            n = t if absorbs else t - chunks
            if t >= wait and row > 0:
                where = kept.get(t) if early else lies.get(free) if absorbs else last.get(n)
                take("finish", where, row - 1, n)
            if absorbs and row < rows:
                take("absorb", lies.get(place_of(t, early)), row, t)
                if early:
                    kept[t] = (row, t)
            if t + ahead < chunks and row < rows:
                ask(free, row, t + ahead)
            if (
                (not absorbs or (not early and wait < ahead))
                and t + ahead >= chunks + wait
                and row + 1 < rows
            ):
                ask(free, row + 1, t + ahead - chunks - wait)
            if not absorbs:
                last[n] = kept.get(n)
            now += 1
        turn = turn + places - ahead
        turn -= places if turn >= places else 0
    return done


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    ("steps", "ahead", "registers"),
    [(4, 1, 1), (4, 2, 2), (6, 2, 3), (8, 3, 4), (14, 4, 6), (14, 4, 4), (14, 3, 7), (14, 7, 8)],
)
def test_every_chunk_lies_where_it_is_taken(steps, ahead, registers, rows):
    """Of all lengths that a part may have."""
    problem = panels.problem_of("softmax", ("bf16", "bf16"), (rows, 1 << 20), (1,))
    made = plan_panel("softmax", problem, H200, False)
    team = Team(512, steps, buffers=steps, ahead=ahead, registers=registers)
    plan = panels.forced(made, team, 8)
    assert 1 <= plan.kernel.wait <= ahead
    for length in range(1, plan.kernel.longest + 1):
        plan = replace(plan, share=length * plan.kernel.chunk)
        assert length <= plan.chunks <= plan.kernel.longest and plan.again == 0
        done = walk(rows, plan.chunks, ahead, registers, plan.kernel.wait, steps)
        for what, row, n in product(("absorb", "finish"), range(rows), range(plan.chunks)):
            assert (what, row, n) in done
        for row in range(rows):
            absorbed = max(done["absorb", row, n] for n in range(plan.chunks))
            finished = min(done["finish", row, n] for n in range(plan.chunks))
            assert finished > absorbed + 2 * plan.kernel.wait, "a meeting has these steps to come true"


@pytest.mark.parametrize(
    ("chunks", "registers", "wait", "buffers"),
    [(7, 6, 2, 14), (17, 6, 2, 14), (16, 6, 1, 14), (16, 5, 2, 14)],
    ids=["too short", "too long", "waits too little", "does not go round"],
)
def test_a_wrong_walk_is_found(chunks, registers, wait, buffers):
    with pytest.raises(AssertionError):
        walk(3, chunks, 4, registers, wait, buffers)


def test_what_is_planned():
    """Rows that the GPU nearly holds, of which there are several; as many at once as that allows."""

    def planned(rows: int, columns: int, dtype: str = "bf16"):
        problem = panels.problem_of("softmax", (dtype, dtype), (rows, columns), (1,))
        return plan_panel("softmax", problem, H200, False)

    for rows, columns, dtype, parts in (
        (64, 1 << 24, "bf16", 132), (128, 1 << 23, "bf16", 66), (64, 1 << 23, "fp32", 132), (256, 1 << 21, "bf16", 16),
    ):  # fmt: skip
        made = planned(rows, columns, dtype)
        assert made.kernel.ahead == 4 and made.parts == parts and made.ctas == 132 // parts * parts
        assert made.chunks == made.kernel.longest == 16
        assert "every element read once" in made.explain()
    for rows, columns in ((1, 1 << 24), (4, 1 << 28), (2, 1 << 23)):
        assert not planned(rows, columns).kernel.ahead
