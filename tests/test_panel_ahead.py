"""The steps of `kernels.panel.ahead`: what is copied where, and what lies there when it is used."""

from __future__ import annotations

from dataclasses import replace

import panels
import pytest

from cute_softmax.draw.checks.panel_ahead import ABSORBED, FINISHED, Walk, walk_of
from cute_softmax.plan import plan_panel
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.panel_configs import PanelConfig


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    ("steps", "ahead", "registers"),
    [(4, 1, 1), (4, 2, 2), (6, 2, 3), (8, 3, 4), (14, 4, 6), (14, 4, 4), (14, 3, 7), (14, 7, 8)],
)
def test_every_chunk_lies_where_it_is_taken(steps, ahead, registers, rows):
    """Of all lengths that a part may have."""
    problem = panels.problem_of("softmax", ("bf16", "bf16"), (rows, 1 << 20), (1,))
    made = plan_panel("softmax", problem, H200, False)
    config = PanelConfig(512, steps, buffers=steps, ahead=ahead, registers=registers)
    plan = panels.forced(made, config, 8)
    assert 1 <= plan.kernel.wait <= ahead
    for length in range(1, plan.kernel.most_chunks + 1):
        plan = replace(plan, share=length * plan.kernel.chunk)
        assert length <= plan.chunks <= plan.kernel.most_chunks and plan.again == 0
        walk = walk_of(plan, rows)
        assert not [*walk.problems(steps)]
        for row in range(rows):
            absorbed = max(e.step for e in walk.events() if (e.what, e.row) == (ABSORBED, row))
            finished = min(e.step for e in walk.events() if (e.what, e.row) == (FINISHED, row))
            assert finished > absorbed + 2 * plan.kernel.wait, "an exchange has these steps to come true"


@pytest.mark.parametrize(
    ("chunks", "registers", "wait", "told"),
    [
        (7, 6, 2, "times"),
        (17, 6, 2, "15 places of 14"),
        (16, 6, 1, "no place"),
        (16, 5, 2, "there is"),
    ],
    ids=["too short", "too long", "waits too little", "does not go round"],
)
def test_a_wrong_walk_is_found(chunks, registers, wait, told):
    assert any(told in problem for problem in Walk(3, chunks, 4, registers, wait).problems(14))


def test_what_is_planned():
    """Rows that the GPU nearly holds, of which there are several; as few at once as take no more steps."""

    def planned(rows: int, columns: int, dtype: str = "bf16"):
        problem = panels.problem_of("softmax", (dtype, dtype), (rows, columns), (1,))
        return plan_panel("softmax", problem, H200, False)

    for rows, columns, dtype, parts, chunks in (
        (64, 1 << 24, "bf16", 132, 16), (128, 1 << 23, "bf16", 132, 8), (64, 1 << 23, "fp32", 132, 16),
        (256, 1 << 21, "bf16", 33, 8), (64, 1800184, "bf16", 22, 10), (64, 868144, "fp32", 22, 10),
    ):  # fmt: skip
        made = planned(rows, columns, dtype)
        assert made.kernel.ahead == 4 and made.parts == parts and made.ctas == 132 // parts * parts
        assert made.chunks == chunks and made.kernel.most_chunks == 16
        assert "every element read once" in made.explain()
    for rows, columns in ((1, 1 << 24), (4, 1 << 28), (2, 1 << 23)):
        assert not planned(rows, columns).kernel.ahead
