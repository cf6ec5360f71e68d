"""How a problem is cut into panels and parts, or swept over: the decisions of the column, split and sweep movements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from .hardware import Device
from .maths import CACHE_LINE, check_counts
from .panel_class import PanelClass
from .panel_configs import (
    ALIGNED_INSTRUCTIONS,
    CHUNKS_OF_A_PART,
    CHUNKS_OF_A_PART_ALONE,
    DEEP_ROWS_AT_ONCE,
    FEW_ELEMENTS,
    FEW_WIDE_PANELS,
    REGISTERS_BESIDE,
    SWEPT,
    WIDE_BELOW_BYTES,
    PanelConfig,
)
from .panel_few import plan_few
from .panel_groups import Groups, keeping
from .panel_plan import PanelPlan
from .problem import Problem
from .prologue import NO_PROLOGUE, Prologue
from .sweep import SweepPlan, plan_sweep


def plan_panel(
    math_name: str,
    problem: Problem,
    device: Device,
    evict_last: bool,
    invariant: bool = False,
    prologue: Prologue = NO_PROLOGUE,
) -> PanelPlan | SweepPlan:
    """The plan of the column, split or sweep movement for any problem; invariant, prologue: see `choose.plan`. A bias
    or a mask has one element for each vector, or its elements lie beside each other: see `in_rows.spread`.

    Raises NotPlanned for groups of 2^31 elements and more, for as many groups, and for tensors of too many dimensions.
    """
    check_counts({"elements in a group": problem.length, "groups": problem.groups})
    groups = Groups.of(math_name, problem, device, evict_last, invariant, prologue)
    # What is only read need not be held.
    first = (_held, _swept) if groups.facts.outputs else (_swept, _held)
    return next(made for way in (*first, _deep, _streamed) if (made := way(groups)) is not None)


def _swept(g: Groups) -> SweepPlan | None:
    """The plan of columns in two passes; None where they are too few or too short, or panels are faster."""
    if g.orientation != "column" or not g.prologue.sweeps or g.invariant:
        return None
    off_vectors = g.shifted or g.vector < g.widest
    if not g.facts.outputs:
        kind = "reads_off_vectors" if off_vectors else "reads"
    elif off_vectors:
        kind = "in_place" if g.problem.in_place else "off_vectors"
    elif g.boundary < CACHE_LINE:
        kind = "off_lines"
    else:
        return None
    least, row = SWEPT[kind], g.kept[-1].size // g.rows_abreast * g.smallest
    elements = g.problem.length * g.problem.groups * len(g.facts.main)
    if g.problem.length < least.length or elements < least.elements or row < least.row:
        return None
    return plan_sweep(g.math, g.problem, g.device, g.prologue)


def _held(g: Groups) -> PanelPlan | None:
    """The plan of panels that a CTA or a cluster holds; None where there is no such configuration."""
    sms = g.device.multiprocessors
    for config in g.configs:
        if (g.shifted or g.orientation == "row") and not g.facts.outputs and config.cluster_n == 16:
            return None  # what is only read need not be held: see docs/experiments.md
        if not g.has_threads(config) or g.splits_sectors(config):
            continue
        c = g.class_of(config)
        if not (
            config.has_registers(g.inputs * c.vector, g.device.architecture) and g.holds(c, config.alone)
        ):
            continue
        few_bytes = g.orientation == "column" and g.vector < g.widest and g.facts.outputs
        if config.narrow and not (few_bytes and g.panels(c) * c.cluster_n >= sms):
            continue
        # In one CTA threads that share columns are faster, but for a few elements: 8 x 4 bf16 1.7 us, alone 1.5, 11 x 4
        # float32 1.7 and 2.5.
        if config.alone and g.panels(c) == 1 and config.steps > FEW_ELEMENTS:
            continue
        if not config.alone and g.panels(c) * c.cluster_n < sms:  # some SMs would be idle
            if few := plan_few(g):
                return few
            for c in g.widths(config):
                if g.panels(c) * c.cluster_n >= sms:
                    break
        return g.plan(c, 1, g.share(c, c.cluster_n))
    return plan_few(g)


def _deep(g: Groups) -> PanelPlan | None:
    """The plan of a deep configuration for what has a full output, if the architecture has room for as many as share an
    SM; of rows if a CTA takes more than it holds or several parts."""
    if not g.facts.outputs:
        return None
    if g.orientation == "column":
        wide = _columns(g, "wide") if g.boundary < CACHE_LINE else None
        if wide and (g.boundary < WIDE_BELOW_BYTES or wide.tiles <= FEW_WIDE_PANELS):
            return wide
        return _columns(g, "column")
    config = _fitting(g, g.orientation)
    if config is None:
        return None
    made = _row_ahead(g) or g.cut(config, partial(_held_parts, g), several=True)
    return made if made.kernel.streaming else None


def _fitting(g: Groups, kind: str) -> PanelConfig | None:
    """The first deep configuration of a kind that there is room for."""
    for config in map(g.beside, g.table.deep.get((kind, g.inputs), ())):
        if g.length <= config.longest and g.fits(g.class_of(config, exchange=True, streaming=True)):
            return config
    return None


def _columns(g: Groups, kind: str) -> PanelPlan | None:
    """The plan of columns in chunks: as few panels at a time as leave their parts enough of them.

    All SMs have as many parts, so that a CTA keeps its part. Wide panels are as wide as makes all turns alike; of
    others, which end with lines, as many are taken at a time as take the fewest loads.
    """
    config = _fitting(g, kind)
    if config is None:
        return None
    c, resident = g.class_of(config, streaming=True), g.device.multiprocessors * config.min_blocks
    panels = g.panels(c)

    def at_once_of(chunks: int) -> int:
        """How many panels have parts of so many chunks at least."""
        parts = math.ceil(g.length / ((chunks - 1) * c.chunk)) - 1
        return math.ceil(resident / max(parts, 1))

    at_once = at_once_of(config.chunks)
    if at_once == 1:
        at_once = min(at_once_of(config.chunks_alone), 2)
    at_once = min(at_once, panels)
    if kind == "wide" and panels <= FEW_WIDE_PANELS:
        at_once = panels
    elif kind != "wide":
        at_once = min(range(at_once, min(2 * at_once, panels, resident) + 1), key=partial(_loads, g, c))
    made = _taken(g, c, at_once)
    if kind != "wide":
        return made
    beside = math.ceil(panels / at_once) * at_once // (g.groups // g.abreast)  # in a row of memory
    step = 2 * c.slots
    return replace(made, spacing=min(math.ceil(g.abreast / beside / step) * step, c.advance_of(g.abreast)))


def _held_parts(g: Groups, c: PanelClass, resident: int) -> int:
    """Parts of as many rows at a time as can be held, of some at least, but of one where a part is very long."""
    at_once = max(resident // math.ceil(g.length / c.tile), DEEP_ROWS_AT_ONCE)
    if g.length >= CHUNKS_OF_A_PART_ALONE * resident * c.chunk:
        at_once = 1
    # As many in the last round as in the others, or nearly.
    at_once = math.ceil(g.panels(c) / math.ceil(g.panels(c) / at_once))
    return max(resident // at_once, 1)


def _row_ahead(g: Groups) -> PanelPlan | None:
    """The plan with as many rows at once as are held, and the next ahead; None for longer rows, and for no more."""
    # With few rows there would be no row ahead, and another order of additions.
    if g.invariant or g.inputs > 1 or not g.common:
        return None
    ways, cost = [], _loads
    if g.facts.beside:  # parts have fewer chunks, so that the steps between rows count
        ways = [way for n in REGISTERS_BESIDE for way in _ahead(g, replace(g.table.ahead, registers=n))]
        cost = _steps
    ways = ways or [*_ahead(g, g.table.ahead)]
    return _taken(g, *min(ways, key=lambda way: cost(g, *way))) if ways else None


def _ahead(g: Groups, config: PanelConfig) -> Iterator[tuple[PanelClass, int]]:
    """(class, rows at once) of which the GPU holds all of one row and less than all there are."""
    c, resident = g.class_of(g.beside(config), exchange=True, streaming=True), g.device.multiprocessors
    fewest = math.ceil(g.length / (c.most_chunks * c.chunk))
    held = g.fits(c) and c.chunks_of(1) <= c.most_chunks
    # The states of all parts are read at once.
    if held and 1 < fewest <= resident <= c.readers * c.loads and g.problem.groups > resident // fewest:
        for at_once in range(1, resident // fewest + 1):
            yield c, at_once


def _steps(g: Groups, c: PanelClass, at_once: int) -> tuple[int, int]:
    """Steps that a CTA takes then, see `kernels.panel.ahead`, and of how many rows."""
    rows = math.ceil(g.panels(c) / at_once)
    return _loads(g, c, at_once) + rows * c.wait, rows


def _share(g: Groups, c: PanelClass, at_once: int) -> int:
    """Elements of a group that a CTA takes where so many panels are worked on at a time."""
    return g.share(c, g.device.multiprocessors * c.min_blocks // at_once)


def _loads(g: Groups, c: PanelClass, at_once: int) -> int:
    """Chunks that a CTA loads then, one after the other, some of them twice."""
    share = _share(g, c, at_once)
    return math.ceil(g.panels(c) / at_once) * (c.chunks_of(share) + c.again_of(share))


def _taken(g: Groups, c: PanelClass, at_once: int) -> PanelPlan:
    """The plan of so many panels at a time: each CTA keeps its part."""
    share = _share(g, c, at_once)
    parts = math.ceil(g.length / share)
    return keeping(g.plan(replace(c, exchange=parts > 1), parts, share))


def _streamed(g: Groups) -> PanelPlan:
    """The plan of parts that are streamed, or held where they are short."""
    config = g.beside(g.table.streaming[g.inputs])
    while not g.fits(g.class_of(config, exchange=True, streaming=True)):
        config = replace(config, steps=config.steps // 2)

    def cut(g: Groups) -> PanelPlan:
        return g.cut(config, partial(g.parts_of_chunks, chunks=CHUNKS_OF_A_PART[g.orientation]))

    made = cut(g)
    if made.kernel.aligned and not g.facts.outputs and not g.invariant:
        # There are more panels of aligned blocks, and now and then a round of CTAs more.
        other = cut(replace(g, aligned=False))
        if _rounds(other) < ALIGNED_INSTRUCTIONS * _rounds(made):
            return other
    return made


def _rounds(made: PanelPlan) -> int:
    """How long CTAs with an item each take, in elements of a group: a share for each round of them."""
    return math.ceil(made.tiles * made.parts / made.resident) * made.share
