"""Figures of rows that ranks share and keep on chip: that they show what the kernel does."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from cutlass import Int32
from drawings import SHARED, made
from traced import trace, wrong

from cute_softmax import draw
from cute_softmax.draw import row_ring
from cute_softmax.kernels.ranks import Ranks, Turns
from cute_softmax.plan import NotPlanned, RowClass, describe
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.ranks import states_of
from cute_softmax.plan.shards import plan_merge
from cute_softmax.runtime.compile import build_math

HALF = 1 << 14


@pytest.fixture(scope="module", params=SHARED)
def plan(request):
    return made(request.param)


def places_of_kernel(c: RowClass, rows: int, ranks: int, epoch: int) -> dict[tuple[int, int], int]:
    """(row, CTA of all ranks) -> the byte of a workspace where the kernel puts its state."""
    kernel = Ranks(c, build_math(c))
    turns = Turns(None, None, None, Int32(epoch), None)
    launch = SimpleNamespace(numbers={"ranks": ranks, "half": HALF})
    at = {
        (row, peer): kernel.place(SimpleNamespace(index=row, launch=launch), turns, peer)
        for row in range(rows)
        for peer in range(ranks * c.cluster_n)
    }
    return {key: int(place) for key, place in at.items()}


def test_states_lie_where_the_kernel_puts_them(plan):
    c, ranks = plan.kernel, row_ring.RANKS
    figure = row_ring.workspace(plan)
    found = {
        tuple(map(int, re.findall(r"\d+", cell.facts.coordinate))): cell.facts.byte
        for cell in figure.cells
        if cell.facts.coordinate
    }
    kernel = places_of_kernel(c, row_ring.ROWS, ranks, 2)
    assert found == kernel
    assert places_of_kernel(c, 1, ranks, 3)[0, 0] == HALF + kernel[0, 0]  # the other half
    # Each number of each state has a place of its own, and there are no gaps.
    states = states_of(c, ranks, row_ring.ROWS)
    assert sorted(states.offsets()) == list(range(states.size))
    assert states[2].size == Ranks(c, build_math(c)).words


def lies(c: RowClass, tiles: int) -> list[dict[int, row_ring.Held]]:
    """What is in which place in each turn, by carrying out what `RingKernel.tiles` does."""
    places, found = {i % c.ring: i for i in range(c.ahead)}, []
    for turn in range(tiles + c.lag):
        shown = {at: row_ring.Held(tile, row_ring.LOADING) for at, tile in places.items() if tile < tiles}
        for tile in range(max(turn - c.lag, 0), min(turn, tiles)):
            what = row_ring.FINISHED if tile == turn - c.lag else row_ring.WAITING
            assert places[tile % c.ring] == tile  # nothing has been loaded over it
            shown[tile % c.ring] = row_ring.Held(tile, what)
        if turn < tiles:
            assert places[turn % c.ring] == turn
            shown[turn % c.ring] = row_ring.Held(turn, row_ring.REDUCED)
        found.append(shown)
        places[(turn + c.ahead) % c.ring] = turn + c.ahead
    return found


def test_tiles_are_where_the_kernel_has_them(plan):
    c, tiles = plan.kernel, 11
    for turn, expected in enumerate(lies(c, tiles)):
        assert dict(row_ring.phases(c, turn, tiles)) == expected
    told = [cell.facts.note for cell in row_ring.turns(plan).cells if cell.facts.note]
    shown = c.ring + c.lag + 2
    assert [told.count(row_ring.TOLD[what]) for what in (row_ring.REDUCED, row_ring.FINISHED)] == [shown] * 2
    assert told.count(row_ring.TOLD[row_ring.WAITING]) == shown * (c.lag - 1)


class Eager(RowClass):
    """A class whose kernel loads a tile more than there is room for."""

    @property
    def ahead(self) -> int:
        return super().ahead + 1


def test_a_tile_that_is_loaded_over_is_seen():
    c = made("shared log").kernel
    assert c.lag > 1
    eager = Eager(**{f.name: getattr(c, f.name) for f in fields(c)})
    with pytest.raises(AssertionError):
        lies(eager, 11)
    assert dict(row_ring.phases(replace(c, lag=1), 5, 11)) != lies(c, 11)[5]


def test_layouts_are_those_of_the_kernel(plan):
    assert wrong(plan.kernel, trace(plan.kernel)) == []
    assert plan.kernel.smem.rank == 3 and plan.kernel.smem[2].size == plan.kernel.ring


def test_a_buffer_is_that_of_one_cta(plan):
    figure = draw.figures(plan).get("reduction_buffer")
    assert (figure is None) is not plan.kernel.exchanges
    if figure is not None:
        assert figure.title == "Reduction buffer" and "workspaces" in figure.svg()


def test_what_no_figure_shows_says_so():
    merge = plan_merge("state", "fp32", (), ("lse",), (100, 2), H200)
    for asked in (draw.figures, draw.overview, draw.page):
        with pytest.raises(ValueError, match="merge movement has no figures"):
            asked(merge)
    with pytest.raises(NotPlanned, match="do not fit on chip"):
        describe.plan_shared(10, 10**6)
