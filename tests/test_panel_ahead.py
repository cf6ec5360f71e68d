"""The steps of `kernels.panel.ahead`: what is copied where, and what lies there when it is used."""

from __future__ import annotations

from dataclasses import replace

import panels
import pytest
import torch

from cute_softmax import plan_softmax
from cute_softmax.draw.checks.panel_ahead import ABSORBED, FINISHED, Walk, walk_of
from cute_softmax.plan import Prologue, plan_panel
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.panel_configs import REGISTERS_BESIDE, PanelConfig


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


LONG = (1 << 20) + 8
SIZES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("beside", [("mask",), ("bias",), ("bias", "mask")], ids="_".join)
@pytest.mark.parametrize("shape", [(64, LONG), (64, 1456104), (7, 3000008), (512, 1200000)])
def test_what_is_beside_all_rows_is_planned_once(shape, beside, dtype):
    """With as few chunks in registers as leave room, and each CTA keeps its part of all its rows."""
    tensors = {"mask": torch.bool, "bias": SIZES[dtype]}
    given = {name: torch.empty(shape[1], dtype=tensors[name], device="meta") for name in beside}
    made = plan_softmax(torch.empty(shape, dtype=SIZES[dtype], device="meta"), device=H200, **given)
    c = made.kernel
    assert c.ahead and made.again == 0 and c.registers in REGISTERS_BESIDE
    assert c.residents == c.facts.beside and [c.bits(i) for i in c.residents] == [n == "mask" for n in beside]
    assert made.chunks <= c.most_chunks == c.steps_of(c.residents[0]) // c.chunk_steps
    panels.check_numbers(made)
    assert f"resident   {' and '.join(n + ' in bits' * (n == 'mask') for n in beside)}," in made.explain()
    # A bit for each element, in a byte for each vector.
    places = c.threads * c.most_chunks * c.chunk_steps
    held = (
        c.shared_memory
        - replace(c, prologue=Prologue(), dtypes=(dtype,) * 2, access=c.access[:1]).shared_memory
    )
    assert held == places * (("mask" in beside) + 16 * ("bias" in beside))


@pytest.mark.parametrize(
    ("shape", "beside"),
    [
        ((64, LONG), {"mask": (64, LONG)}),
        ((64, LONG), {"mask": (64, 1)}),
        ((64, LONG), {"bias": (64, LONG)}),
        ((2, 32, LONG), {"mask": (2, 1, LONG)}),
        ((64, LONG + 1), {"mask": (LONG + 1,)}),
    ],
    ids=["of each row", "one for a row", "a bias of each row", "of a batch", "rows that begin anywhere"],
)
def test_what_is_not_the_same_for_all_rows_is_loaded_for_each(shape, beside):
    tensors = {"mask": torch.bool, "bias": torch.bfloat16}
    given = {n: torch.empty(own, dtype=tensors[n], device="meta") for n, own in beside.items()}
    made = plan_softmax(torch.empty(shape, dtype=torch.bfloat16, device="meta"), device=H200, **given)
    assert made.movement == "split" and not made.kernel.ahead and not made.kernel.residents


def test_a_mask_that_begins_anywhere_is_not_kept_in_bits():
    memory = torch.empty(LONG + 1, dtype=torch.bool, device="meta")
    x = torch.empty((64, LONG), dtype=torch.bfloat16, device="meta")
    assert plan_softmax(x, device=H200, mask=memory[:-1]).kernel.ahead
    assert not plan_softmax(x, device=H200, mask=memory[1:]).kernel.ahead
