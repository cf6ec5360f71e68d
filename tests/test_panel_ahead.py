"""The steps of `kernels.ahead`: what is copied where, and what lies there when it is used."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import panels
import pytest

from cute_softmax.hardware import H200
from cute_softmax.plan import plan_panel
from cute_softmax.plan.panel import Team


def place_of(n: int, ring: int, chunks: int, again: int, ahead: int, odd: int) -> int:
    """As the kernel has it."""
    held = n - again
    return ring if n < again else ahead + (chunks - again - 1 - held if odd else held)


def walk(rows: int, chunks: int, again: int, ahead: int, buffers: int) -> dict[tuple[str, int, int], int]:
    """The steps of a CTA with so many rows: when each chunk is absorbed, and when finished.

    A copy is there `ahead` steps after it was asked for, and not before. Raises AssertionError where a place has
    another chunk than the step takes.
    """
    begin, lies, coming, done, now = again - ahead, {}, [], {}, 0

    def ask(place: int, row: int, n: int, needed: int):
        assert 0 <= place < buffers
        lies[place] = None  # from now on
        coming.append((needed, place, row, n))

    def take(what: str, place: int, row: int, n: int):
        assert lies.get(place) == (row, n), f"{what} {n} of row {row}: there is {lies.get(place)}"
        assert (what, row, n) not in done
        done[what, row, n] = now

    for n in range(ahead):
        ask(n, 0, n, n)
    turn = odd = 0
    steps = chunks + begin
    for row in range(rows + 1):
        for t in range(steps):
            for arrived in [c for c in coming if c[0] <= now]:
                lies[arrived[1]] = arrived[2:]
                coming.remove(arrived)
            ring = (turn + t) % ahead
            if t < chunks and row < rows:
                take("absorb", place_of(t, ring, chunks, again, ahead, odd), row, t)
            if t >= begin and row > 0:
                n = steps - 1 - t
                take("finish", place_of(n, ring, chunks, again, ahead, 1 - odd), row - 1, n)
            late = t + ahead
            come = late >= steps
            n, which = (late - steps, row + 1) if come else (late, row)
            if (late < chunks or come) and which < rows:
                ask(place_of(n, ring, chunks, again, ahead, odd), which, n, now + ahead)
            n = steps - 1 - late
            if t >= begin and 0 <= n < again and row > 0:
                ask(ring, row - 1, n, now + ahead)
            now += 1
        turn, odd = (turn + steps) % ahead, 1 - odd
    return done


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(("steps", "ahead"), [(4, 1), (4, 2), (6, 2), (8, 3), (14, 2), (14, 3), (14, 7)])
def test_every_chunk_lies_where_it_is_taken(steps, ahead, rows):
    """Of all lengths that a part may have."""
    problem = panels.problem_of("softmax", ("bf16", "bf16"), (rows, 1 << 20), (1,))
    made = plan_panel("softmax", problem, H200, False)
    for length in range(1, 40):
        plan = panels.forced(made, Team(512, steps, buffers=steps, ahead=ahead), 2)
        plan = replace(plan, share=length * plan.kernel.chunk)
        chunks, again = plan.chunks, plan.again
        assert chunks >= length and ahead <= again <= chunks - ahead
        done = walk(rows, chunks, again, ahead, steps)
        for what, row, n in product(("absorb", "finish"), range(rows), range(chunks)):
            assert (what, row, n) in done
        for row in range(rows):
            absorbed = max(done["absorb", row, n] for n in range(chunks))
            finished = min(done["finish", row, n] for n in range(chunks))
            assert finished > absorbed + again - ahead, "a meeting has these steps to come true"


def test_a_wrong_walk_is_found():
    with pytest.raises(AssertionError, match="there is"):
        walk(3, 4, 3, 2, 14)  # fewer held chunks than steps ahead


def test_what_is_planned():
    """Rows that the GPU nearly holds, of which there are several; as many at once as that allows."""

    def planned(rows: int, columns: int, dtype: str = "bf16"):
        problem = panels.problem_of("softmax", (dtype, dtype), (rows, columns), (1,))
        return plan_panel("softmax", problem, H200, False)

    for rows, columns, dtype, parts in (
        (64, 1 << 24, "bf16", 132), (128, 1 << 23, "bf16", 66), (64, 1 << 23, "fp32", 132), (256, 1 << 21, "bf16", 16),
    ):  # fmt: skip
        made = planned(rows, columns, dtype)
        assert made.kernel.ahead == 2 and made.parts == parts and made.ctas == 132 // parts * parts
        assert (made.chunks, made.again) == (16, 4)
        assert "4 of 16 chunks read twice" in made.explain()
    for rows, columns in ((1, 1 << 24), (4, 1 << 28), (2, 1 << 23)):
        assert not planned(rows, columns).kernel.ahead
