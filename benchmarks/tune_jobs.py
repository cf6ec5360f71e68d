"""The tuner's jobs: which calls decide about which list of a table, what is tried there, and where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_softmax.plan import (
    MATHS,
    NO_PROLOGUE,
    Math,
    NotPlanned,
    PanelClass,
    PanelPlan,
    Plan,
    Prologue,
    RowClass,
    RowConfig,
    Table,
    facts_of,
    table_of,
)
from cute_softmax.plan.catalogue import operand_dtypes
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.panel_configs import PanelConfig
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE
from cute_softmax.plan.short_configs import ShortConfig
from cute_softmax.plan.table import WIDENED
from cute_softmax.runtime import launch

from .map_cells import FILL_BYTES as MAP_FILL_BYTES
from .map_cells import VOCABULARIES, grid
from .operations import DTYPES
from .tune_rules import SHORT, deep_candidates, neighbours, panel_candidates, row_candidates, short_candidates

Config = RowConfig | PanelConfig | ShortConfig
# Of an input: in 128 MB what begins and ends hides up to a fifth of the time that larger ones take. Panels have as many
# as the map's, and half of the time goes.
FILL_BYTES, PANEL_FILL_BYTES = 512 << 20, MAP_FILL_BYTES
WIDE_FILL_BYTES = 24 << 20  # larger tensors of columns off cache lines are swept over
LOSS = Prologue(alpha="groups", target="loss")
FEW_ELEMENTS = 16  # of rows that each have a length of their own
FEWEST_ROWS = 7  # clusters of 16 CTAs that an H100 and an H200 have at once
# Rows of up to so many vectors share a list with few of them, so that what these take counts, too; and their edges, of
# rows that begin off a boundary, are much of them.
SHORT_VECTORS, FEW_SHORT_ROWS, OFF = 512, 64, 3


@dataclass(frozen=True)
class Job:
    """One list of a table, and the calls that decide about it.

    place: the table's field and the key in it; None where the field is the list, or the configuration, itself. math,
        prologue: of the calls, and numbers: of the prologue.
    dim: the reduced dimension of the matrix; beside: rows, or columns, None for as many as fill; odd: one column less.
    """

    place: tuple[str, Any]
    math: str
    dim: int
    beside: int | None
    least: int  # bytes of a row or a column; elements of panels and of short rows
    most: int
    odd: bool = False
    prologue: Prologue = NO_PROLOGUE
    numbers: tuple[float, ...] = ()

    @property
    def facts(self) -> Math:
        """Of the math, with the tensors of its prologue."""
        return facts_of(self.math, True, self.prologue)

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        field, key = self.place
        keys = key if isinstance(key, tuple) else () if key is None else (key,)
        return "-".join(map(str, (field, *keys)))

    @property
    def widened(self) -> bool:
        """Whether its results are wider than the elements: in float32, of 16 bits."""
        return str(self.place[1]).endswith(WIDENED)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the elements that it is measured with."""
        several = self.of_rows and self.facts.outputs and not self.widened
        return ("bf16", "fp32") if several or self.of_panels or self.of_short else ("bf16",)

    def precise(self, dtype: str) -> bool:
        """Whether results of such elements are stored in float32."""
        return bool(self.facts.outputs) and (dtype == "fp32" or self.widened)

    @property
    def inputs(self) -> int:
        """Full inputs."""
        return len(self.facts.inputs)

    @property
    def of_rows(self) -> bool:
        """Whether its configurations are those of rows."""
        return self.place[0] in ("many", "few")

    @property
    def few(self) -> bool:
        """Whether its calls are of few rows, which are timed in graphs."""
        return self.of_rows and self.beside is not None

    def with_few(self, dtype: str, length: int) -> Job | None:
        """The job of few rows of a length, where what they take counts; else None."""
        short = self.place[0] == "many" and length <= SHORT_VECTORS * self.vector(dtype)
        return replace(self, beside=FEW_SHORT_ROWS) if short else None

    def vector(self, dtype: str) -> int:
        """Elements of a vector of rows."""
        return ALIGNMENT // ITEM_SIZE["fp32" if self.widened else dtype]

    @property
    def of_panels(self) -> bool:
        """Whether its configurations are those of panels that are held: as many elements of either size."""
        return self.place[0] in ("held", "shifted")

    @property
    def of_short(self) -> bool:
        """Whether its configurations are those of short rows: as many elements of either size."""
        return self.place[0] == "short"

    def holds(self, dtype: str) -> Callable[[Any], float] | None:
        """The longest row or column that a configuration of its list holds; None where the shape decides."""
        vector = self.vector(dtype)
        if self.of_panels:
            return lambda config: config.room
        return (lambda config: config.capacity * vector) if self.of_rows else None

    @property
    def before(self) -> list[tuple[str, Any]]:
        """Lists that plans look into first, which are left empty where a table has them."""
        return {
            "many": [("few", name) for name in dict.fromkeys((self.math, self.place[1]))],
            "streaming": [("held", self.inputs), ("deep", ("column", self.inputs))],
        }.get(self.place[0], [])

    @property
    def alone(self) -> bool:
        """Whether its place takes one configuration."""
        return self.place[0] in ("streaming", "ahead")

    @property
    def fill_bytes(self) -> int:
        """Bytes of an input of its calls."""
        if self.of_panels:
            return PANEL_FILL_BYTES
        return WIDE_FILL_BYTES if self.place == ("deep", ("wide", self.inputs)) else FILL_BYTES

    def shape(self, length: int, dtype: str) -> tuple[int, int]:
        """The matrix of a call."""
        fill = max(self.fill_bytes // (length * ITEM_SIZE[dtype]), 1)
        beside = self.beside or (fill // 64 * 64 or fill) - self.odd or 1
        return (beside, length) if self.dim else (length, beside)

    def lengths(self, dtype: str, step: float) -> list[int]:
        """What is measured: whole vectors (of rows; of short ones also others), in steps, and the vocabularies in use;
        every other long row is a vector longer, so that rows begin between sectors of memory, too; elements of panels
        and of short rows, of which the shortest are all different."""
        if self.of_short:
            return sorted({*range(1, FEW_ELEMENTS + 1), *grid(step, self.most)})
        if self.of_panels:
            return [n for n in grid(step, self.most) if n >= self.least]
        vector = ALIGNMENT // ITEM_SIZE[dtype] if self.dim else 1
        sizes = [n * ALIGNMENT // ITEM_SIZE["fp32"] for n in grid(step, self.most)]
        steps = sorted({max(n // vector, 1) * vector for n in sizes})
        between = {n for n in steps[1::2] if self.dim and n > SHORT_VECTORS * vector}
        found = {n // vector * vector for n in (VOCABULARIES if self.dim else ())}
        found |= {n + vector if n in between else n for n in steps}
        found |= {n + OFF for n in sorted(found)[::2] if self.with_few(dtype, n + OFF)}
        return sorted(n for n in found if self.least <= n * ITEM_SIZE[dtype] <= self.most)


def jobs() -> list[Job]:
    """A job for every list of a table that is no other's."""
    rows = [Job(("many", name), name.removesuffix(WIDENED), 1, None, 16, 1 << 21) for name in _own("many")]
    rows += [
        Job(("few", name), name.removesuffix(WIDENED), 1, FEWEST_ROWS, 1 << 14, 1 << 20)
        for name in _own("few")
    ]
    rows.append(Job(("short", None), "softmax", 1, None, 1, SHORT[-1]))
    of_loss = partial(Job, prologue=LOSS, numbers=(-100,))
    rows.append(of_loss(("many", "loss"), "softmax", 1, None, 16, 1 << 21))
    rows.append(of_loss(("few", "loss"), "softmax", 1, FEWEST_ROWS, 1 << 14, 1 << 20))
    panels = []
    for inputs, math in ((1, "softmax"), (2, "softmax_backward")):
        panels += [
            Job(("held", inputs), math, 0, None, 2, 1 << 15),
            Job(("shifted", inputs), math, 0, None, 2, 1 << 15, odd=True),
            Job(("deep", ("column", inputs)), math, 0, None, 1 << 15, 1 << 22),
            Job(("deep", ("wide", inputs)), math, 0, None, 1 << 15, 1 << 22, odd=True),
            Job(("streaming", inputs), math, 0, 256, 1 << 15, 1 << 22),
        ]
    panels.append(Job(("held", 0), "logsumexp", 0, None, 2, 1 << 15))
    panels += [
        Job(("deep", ("row", 1)), "softmax", 1, None, 1 << 22, 1 << 29),
        Job(("deep", ("row", 2)), "softmax_backward", 1, None, 1 << 22, 1 << 29),
        Job(("ahead", None), "softmax", 1, None, 1 << 22, 1 << 25),
    ]
    return [*rows, *panels]


def _own(field: str) -> list[str]:
    """The names of lists that are no other's, but of losses."""
    lists = getattr(table_of(), field)
    return [name for name in lists if name != "loss" and _owner(lists, name) == name]


def _owner(lists: dict[Any, Any], key: Any) -> Any:
    """Whose list one is that several share: the first's."""
    return next(other for other in lists if lists[other] is lists[key])


def with_list(table: Table, place: tuple[str, Any], configs: Sequence[Config]) -> Table:
    """The table with other configurations in one place."""
    field, key = place
    held = getattr(table, field)
    if key is None:
        return replace(table, **{field: tuple(configs) if isinstance(held, tuple) else configs[0]})
    # Who shares its list shares the new one; who shares another's has one of its own then.
    value = configs[0] if isinstance(held[key], PanelConfig) else tuple(configs)
    sharing = [other for other in held if held[other] is held[key]] if _owner(held, key) == key else [key]
    return replace(table, **{field: {**held, **dict.fromkeys(sharing, value)}})


def incumbents(table: Table, job: Job, precise: bool) -> list[Config]:
    """What the table has in a job's place."""
    field, key = job.place
    held = getattr(table, field) if key is None else getattr(table, field)[key]
    configs = [held] if isinstance(held, PanelConfig) else list(held)
    return [c for c in configs if getattr(c, "precise", None) in (None, precise)]


def candidates(
    job: Job, table: Table, dtype: str, lengths: Sequence[int], device: Device, quick: bool
) -> dict[Config | None, bool]:
    """What is tried, each with whether it stands in the table: by rules, or of a quick set its neighbours alone. Of
    panels and short rows also None, which leaves a length to the next list."""
    known = incumbents(table, job, job.precise(dtype))
    if quick or job.place[0] == "ahead":
        made: Iterator[Config] = (other for config in known for other in neighbours(config))
    elif job.of_rows:
        wide = dtype == "fp32" or job.widened
        vector = job.vector(dtype)
        made = (
            config
            for n in lengths
            for config in row_candidates(-(-n // vector), job.inputs, wide, device.architecture)
        )
    elif job.of_panels:
        made = panel_candidates(job.inputs, device.architecture)
    elif job.of_short:
        made = short_candidates()
    else:
        made = deep_candidates(job.place[1][0], job.inputs, device.architecture)
    # What bounds a deep configuration is found anew.
    known = [
        replace(c, longest=PanelConfig(1, 1).longest) if isinstance(c, PanelConfig) else c for c in known
    ]
    beyond = {None: True} if job.of_panels or job.of_short else {}
    return {**dict.fromkeys(made, False), **dict.fromkeys(map(plain, known), True), **beyond}


def plain(config: Config) -> Config:
    """A configuration as candidates are: of either precision."""
    return replace(config, precise=None) if isinstance(config, RowConfig) else config


def planned(
    job: Job, config: Config | None, dtype: str, length: int, table: Table, device: Device
) -> Plan | PanelPlan | None:
    """The plan of a call with one configuration in the list, or with none; None where nothing is planned."""
    alone = (
        table if config is None and job.alone else with_list(table, job.place, (config,) if config else ())
    )
    with suppress(ValueError):  # not planned, or no class that could be
        return _plan(job, dtype, length, alone, device)
    return None


def kernel_of(
    job: Job, dtype: str, length: int, table: Table, device: Device
) -> RowClass | PanelClass | None:
    """The class that a table has for a length; None where nothing is planned."""
    with suppress(NotPlanned):
        return _plan(job, dtype, length, table, device).kernel
    return None


def _plan(job: Job, dtype: str, length: int, table: Table, device: Device) -> Plan | PanelPlan:
    for place in job.before:
        if place[1] in getattr(table, place[0]):
            table = with_list(table, place, ())
    return work_of(job, dtype, length).plan(replace(device, table=table))


def work_of(job: Job, dtype: str, length: int, make: Callable[..., Tensor] | None = None) -> launch.Work:
    """A job's call on tensors that `make(shape, dtype=)` makes; on tensors without memory if it is None."""
    make = make or partial(torch.empty, device="meta")
    facts, shape = job.facts, job.shape(length, dtype)
    group = tuple(1 if d == job.dim else n for d, n in enumerate(shape))
    types = dict(zip(MATHS[job.math, True].operands, operand_dtypes(job.math, dtype), strict=True))
    types |= {name: "int64" if name == "index" else "fp32" for name in facts.operands if name not in types}
    torch_types = {**DTYPES, "int64": torch.int64}
    types |= dict.fromkeys(facts.outputs, "fp32") if job.widened else {}
    full = {*facts.inputs, *facts.outputs}
    order = (*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs)
    tensors = tuple(
        make(shape if name in full else group, dtype=torch_types[types[name]]).expand(shape) for name in order
    )
    return launch.Work(job.math, tensors, (job.dim,), prologue=job.prologue, numbers=job.numbers)


def fitting(
    job: Job,
    tried: Sequence[Config | None],
    dtype: str,
    lengths: Sequence[int],
    table: Table,
    device: Device,
) -> dict[Config | None, dict[int, Plan | PanelPlan]]:
    """By configuration and length the plans in which it is used: those that are others without it. Of None those
    without any of the list."""
    found: dict[Config | None, dict[int, Plan | PanelPlan]] = {config: {} for config in tried}
    for n in lengths:
        without = None if job.alone else planned(job, None, dtype, n, table, device)
        for config in tried:
            made = planned(job, config, dtype, n, table, device)
            if made is not None and (config is None or _uses(made, config, without)):
                found[config][n] = made
    return found


def _uses(made: Plan | PanelPlan, config: Config, without: Plan | PanelPlan | None) -> bool:
    """Whether a plan is of a configuration; without: what is planned when its list is empty, where it can be."""
    if without is not None:
        return made.kernel != without.kernel
    c = made.kernel
    if isinstance(config, RowConfig):
        return (c.threads, c.steps) == (config.threads, config.steps)
    same = all(getattr(c, name) == getattr(config, name) for name in ("threads", "ahead", "registers"))
    return same and c.steps <= config.steps  # as many as a share needs, if it is held
