"""The configurations that the plans of a GPU choose from: a `Table`, made of one of the files in `tables`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

from . import tables
from .maths import MATHS
from .panel_configs import PanelConfig
from .prologue import Prologue
from .row_configs import RowConfig
from .short_configs import ShortConfig

Config = TypeVar("Config", RowConfig, PanelConfig, ShortConfig)
DEFAULT = "h200"  # of GPUs that no table was measured on
WIDENED = "_widened"  # after a math's name: of its results in float32 where elements have 16 bits
# Vectors of rows whose gradients of entropies have log_softmax's configurations; longer ones have the losses' (H200,
# 2026-11-26, bf16: rows of 128 elements 325 us by the former, 384 by the latter; 256 294, 267; 520 335, 269; 2048 275,
# 258; 16384 310, 263; 32000 265, 253; 65024 265, 253).
AS_LOGARITHMS = 24


@dataclass(frozen=True, eq=False)
class Table:
    """What was measured on one GPU.

    many, few: by row math, and of "loss" (a softmax with a target), for many rows, and what comes first where there
        are so few that all run at once; rows of no more than few_above vectors are always as many are. Some maths have
        lists of their own for results that are wider than the elements (`WIDENED`).
    causal, prologue: what takes a configuration's place where the diagonal cuts half of each row off, and with scores.
    short: rows of no more elements than the last one's capacity, that lie one behind another. chosen: longer ones,
        of which an index chooses an element: what it costs beside the row costs as much in each thread that shares one.
    held, shifted: by how many full inputs there are, panels that are held, and those of columns that begin anywhere;
        held[0]: of what is only read.
    streaming: panels that none of these holds. deep: by orientation and full inputs, those that hold 192 or 224 KB of
        what they read twice: for what has a full output, where the architecture has room. "wide": of columns whose
        rows of memory begin off cache lines.
    ahead: rows a row ahead, where parts have so many chunks at most.

    Of a list the first configuration that a row or panel fits into, and the architecture has room for, is taken.
    """

    name: str
    digest: str
    few_above: int
    many: dict[str, tuple[RowConfig, ...]]
    few: dict[str, tuple[RowConfig, ...]]
    causal: dict[RowConfig, RowConfig]
    prologue: dict[RowConfig, RowConfig]
    short: tuple[ShortConfig, ...]
    chosen: tuple[ShortConfig, ...]
    held: dict[int, tuple[PanelConfig, ...]]
    shifted: dict[int, tuple[PanelConfig, ...]]
    deep: dict[tuple[str, int], tuple[PanelConfig, ...]]
    streaming: dict[int, PanelConfig]
    ahead: PanelConfig

    @property
    def title(self) -> str:
        """Its name and digest."""
        return f"{self.name}, {self.digest}"

    @classmethod
    def of(cls, name: str, data: dict) -> Table:
        """The table of a file's contents; TypeError or KeyError for names that there are not."""
        rows, panels = data["row"], data["panel"]
        held = _by_inputs(panels["held"])
        deep = _lists(panels["deep"], PanelConfig)
        return cls(
            name=name,
            digest=digest_of(data),
            few_above=rows["few_above"],
            many=_lists(rows["many"], RowConfig),
            few=_lists(rows["few"], RowConfig),
            causal=_pairs(rows["causal"]),
            prologue=_pairs(rows["prologue"]),
            short=tuple(ShortConfig(**fields) for fields in data["short"]),
            chosen=tuple(ShortConfig(**fields) for fields in data.get("chosen", ())),
            held={**held, 0: held.get(0, held[1])},  # before 0.3 what is only read had no list of its own
            shifted=_by_inputs(panels["shifted"]),
            deep={(key.split()[0], int(key.split()[1])): found for key, found in deep.items()},
            streaming={int(inputs): PanelConfig(**fields) for inputs, fields in panels["streaming"].items()},
            ahead=PanelConfig(**panels["ahead"]),
        )

    def held_of(self, inputs: int, written: bool) -> tuple[PanelConfig, ...]:
        """The configurations of panels that are held; written: whether there is a full output."""
        return self.held[inputs if written else 0]

    @lru_cache(maxsize=1024)  # noqa: B019  tables are few, and live as long as the process
    def rows(
        self, math_name: str, prologue: Prologue, edges: bool, widened: bool = False
    ) -> tuple[tuple[RowConfig, ...], tuple[RowConfig, ...]]:
        """The configurations of a row math for few rows and for many; widened: with results wider than the elements. A
        bias is a second input of as many registers, as in a gradient."""

        def listed(name: str) -> tuple[tuple[RowConfig, ...], tuple[RowConfig, ...]]:
            own = name + WIDENED if widened else name
            return self.few.get(own, self.few[name]), self.many.get(own, self.many[name])

        if not prologue:
            return listed(math_name)
        if prologue.state:  # of which nothing is kept
            found = self.rows(math_name, replace(prologue, state=""), edges, widened)
            few, many = (tuple(replace(config, keep=False) for config in configs) for configs in found)
            return few, many
        if prologue.against:  # two inputs, of which nothing is kept
            found = listed("softmax_backward")
            few, many = (tuple(replace(config, keep=False) for config in configs) for configs in found)
            return few, many
        if prologue.entropy or (prologue.softcap and math_name == "softmax"):
            # Results are made of logarithms or scores, too: no exponentials are kept. What a cap and its slope are made
            # of costs a CTA an SM.
            few, many = listed("log_softmax")
            if prologue.softcap:
                return _roomier(few), _roomier(many)
            longer = (replace(c, keep=False) for c in listed("loss")[1] if c.capacity > AS_LOGARITHMS)
            return few, (*(c for c in many if c.capacity <= AS_LOGARITHMS), *longer)
        reads = not MATHS[math_name, True].outputs
        if reads and prologue.target:
            return listed("selective")
        if prologue.target == "loss" and prologue.even:
            # A mean is a number more for each thread: where registers hold the row it costs a CTA an SM.
            few, many = listed("loss")
            return _roomier(few, "direct"), _roomier(many, "direct")
        if prologue.target:
            return listed("loss")
        numbers = prologue.packs or prologue.softcap or prologue.even
        if reads and numbers and not (prologue.mask or prologue.bias or prologue.causal):
            return listed("selective")
        gradient = math_name.endswith("_backward")
        # What is kept: the exponentials, or the scores, where they are used three times.
        composed = math_name == "log_softmax" and prologue.rescores and not prologue.packs
        keeps = gradient or math_name == "softmax" or composed
        instead = self.causal if prologue.causal else {}
        if keeps and not gradient and not prologue.bias and not edges:  # scalars take registers of their own
            instead = instead | self.prologue
        name = "softmax_backward" if prologue.bias or gradient else "softmax"

        def adapted(config: RowConfig) -> RowConfig:
            config = instead.get(config, config)
            # In shared memory exponentials take the place of elements, of which a logarithm is made once more.
            lost = composed and config.staging[0] == "shared"
            return replace(config, keep=config.keep and keeps and not lost)

        few, many = (tuple(map(adapted, found)) for found in listed(name))
        return few, many


def _roomier(configs: tuple[RowConfig, ...], staging: str = "") -> tuple[RowConfig, ...]:
    """The configurations with a CTA less an SM, and so more registers; staging: those alone whose rows wait so."""
    return tuple(
        replace(c, min_blocks=max(c.min_blocks - 1, 0)) if staging in ("", c.staging[0]) else c
        for c in configs
    )


def digest_of(data: dict) -> str:
    """Eight digits that tell tables apart: of the configurations, not of the figures beside them."""
    told = {name: data.get(name) for name in ("row", "short", "chosen", "panel")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


def _lists(found: dict[str, list[dict] | str], kind: type[Config]) -> dict[str, tuple[Config, ...]]:
    """Lists of configurations by name; one that has another's name shares its list."""
    made = {
        name: tuple(kind(**fields) for fields in entries)
        for name, entries in found.items()
        if not isinstance(entries, str)
    }
    return {name: made[entries if isinstance(entries, str) else name] for name, entries in found.items()}


def _by_inputs(found: dict) -> dict[int, tuple[PanelConfig, ...]]:
    return {int(inputs): configs for inputs, configs in _lists(found, PanelConfig).items()}


def _pairs(found: list) -> dict[RowConfig, RowConfig]:
    return {RowConfig(**a): RowConfig(**b) for a, b in found}


def table_of(name: str | Table = DEFAULT) -> Table:
    """The table of a name: one that is shipped, or the path of a file. One that is tried out has no name: it is
    itself.

    Raises OSError where there is no such file, ValueError for one that is no table.
    """
    return name if isinstance(name, Table) else _read(name)


@cache
def _read(name: str) -> Table:
    shipped = name in tables.shipped()
    path = tables.path_of(name) if shipped else Path(name)
    try:
        return Table.of(name if shipped else path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of configurations: {type(error).__name__}: {error}") from None
