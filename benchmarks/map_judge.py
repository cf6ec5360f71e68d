"""What the map shows: cells far below their neighbours, behind a peer, or below what their length allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from .cases import ITEM_BYTES, NUMBERS, STREAMS, Case
from .map_cells import ALIGNMENT, MANY, ODD, SLICES, Line, N
from .report import best_peer
from .results import Results, Row, cells, gpu_folder

OURS = "cute_softmax"
CLIFF = 0.9  # of a neighbour's ratio to the copy: a cell below it is a cliff
BEHIND = 0.02  # of a peer's time, and the larger spread of the two
LISTED = 0.02  # of all cells may be on the list of those whose bound is shown
FULL_BYTES = 64 << 20  # from here on the memory's rate counts, not the launch
OF_TOKENS = ("cross_entropy", "selective_log_softmax")  # each row has a token, an int64, and a float32 result
TOKEN_BYTES = 12

BOUNDS = Path(__file__).with_name("map_bounds.json")


@dataclass(frozen=True)
class Finding:
    """A cell that falls short. kind: "cliff", "peer" or "floor"; value: its ratio to what it must reach."""

    kind: str
    line: str
    length: int
    value: float
    against: str

    def __str__(self) -> str:
        return f"{self.kind:5}  {self.line}, {self.length}: {self.value:.3f} of {self.against}"


@dataclass(frozen=True)
class MapVerdict:
    """The judgement of a slice: `found` are findings that no list explains, `missing` counts cells without a figure."""

    name: str
    count: int
    missing: int
    found: tuple[Finding, ...]
    listed: int

    @property
    def met(self) -> bool:
        """Whether every cell is measured, and none falls short but a few whose bound is shown."""
        return not self.found and not self.missing and self.listed <= LISTED * self.count

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{sum(f.kind == kind for f in self.found)} {words}"
            for kind, words in (
                ("cliff", "cliffs"),
                ("peer", "behind a peer"),
                ("floor", "below their floor"),
            )
        )
        verdict = "pass" if self.met else "FAIL"
        lacking = f"{self.missing} of {self.count} cells without a figure"
        head = f"{verdict}  {self.name}: {lacking}, {kinds}, {self.listed} whose bound is shown"
        return "\n".join([head, *(f"      {finding}" for finding in self.found)])


def floor(line: Line, length: int) -> float | None:
    """The ratio to a copy of its elements that a cell must reach; None where none is asked for. What a row has beside
    them, its token and a number, is moved, too.
    """
    case, least = line.cells[length], of_elements(line, length)
    if least is None or case.op not in OF_TOKENS:
        return least
    return least * case.traffic / (case.traffic + TOKEN_BYTES * case.elements // length)


def of_elements(line: Line, length: int) -> float | None:
    """The ratio to a copy that the elements of a cell allow.

    Rows that two at a time fit a cluster's shared memory are read once by CTAs that overlap; of longer ones one fits on
    chip; beyond that a row is read twice but for what the L2 still has.
    """
    case = line.cells[length]
    if not {MANY, ODD} & set(line.sizes) or case.traffic < FULL_BYTES:
        return None
    if line.sizes[-1] != N:
        if line.sizes[0] == N and 5000 <= length <= 40000:
            return 0.65 if line.alignment(length) > 1 else 0.55
        return None
    row = length * ITEM_BYTES[case.dtype]
    if length < 64:
        return 0.95 if row % ALIGNMENT == 0 or ALIGNMENT % row == 0 else 0.85
    inputs = 1 if case.op in NUMBERS else max(STREAMS[case.op] - 1, 1)
    from cute_softmax.plan.hardware import H200 as device  # with all of torch

    architecture = device.architecture
    if 2 * inputs * row <= architecture.cluster_limit * architecture.shared_memory:
        return 0.95
    chip = device.multiprocessors * architecture.shared_memory
    if case.op in NUMBERS or inputs * row <= chip:
        return 0.85
    again = max(1 - (chip + device.l2) / (inputs * row), 0)
    return 0.85 * (inputs + 1) / (inputs + 1 + inputs * again)


def measured(found: Results) -> dict[Case, dict[str, Row]]:
    """Rows by case and provider, whatever the method: a cell of the map has one."""
    return {key.case: cell for key, cell in cells(found.rows).items()}


def ratios(line: Line, at: dict[Case, dict[str, Row]]) -> dict[int, float]:
    """Our ratio to the copy by length, of the cells that have one."""
    found = ((n, at.get(case, {}).get(OURS, {}).get("vs_copy")) for n, case in line.cells.items())
    return {n: ratio for n, ratio in found if ratio}


def cliffs(line: Line, ratio: dict[int, float]) -> Iterator[Finding]:
    """Cells far below a neighbour that begins at vector boundaries as they do."""
    lengths = sorted(ratio, key=lambda n: (line.alignment(n), n))
    for _, alike in groupby(lengths, key=line.alignment):
        row = list(alike)
        for i, n in enumerate(row):
            beside = max((ratio[m] for m in row[max(i - 1, 0) : i + 2] if m != n), default=0)
            if ratio[n] < CLIFF * beside:
                yield Finding("cliff", line.name, n, ratio[n] / beside, f"its neighbour's {beside:.3f}")


def behind(line: Line, at: dict[Case, dict[str, Row]]) -> Iterator[Finding]:
    """Cells behind the fastest peer by more than noise."""
    for n, case in line.cells.items():
        cell = at.get(case, {})
        peer = best_peer(cell)
        if peer is None or "us" not in cell.get(OURS, {}):
            continue
        noise = BEHIND + max(cell[OURS]["spread"], cell[peer]["spread"])
        if cell[OURS]["us"] > cell[peer]["us"] * (1 + noise):
            yield Finding("peer", line.name, n, cell[peer]["us"] / cell[OURS]["us"], f"{peer}'s speed")


def below_floor(line: Line, ratio: dict[int, float]) -> Iterator[Finding]:
    """Cells below what their length allows."""
    for n, reached in ratio.items():
        if (least := floor(line, n)) is not None and reached < least:
            yield Finding("floor", line.name, n, reached / least, f"{least:.2f} of a copy")


@cache
def bounds() -> dict[str, dict[str, str]]:
    """By GPU: the cells that may fall short ("kind, line, length"), and the counter or bound that shows why."""
    return json.loads(BOUNDS.read_text(encoding="utf-8"))


def judge(found: Results) -> MapVerdict:
    """The verdict on a slice."""
    chosen, at = SLICES[found.suite], measured(found)
    every: list[Finding] = []
    for line in chosen.lines:
        ratio = ratios(line, at)
        every += [*cliffs(line, ratio), *behind(line, at), *below_floor(line, ratio)]
    listed = bounds().get(gpu_folder(found.header["gpu"]), {})
    named = [f for f in every if f"{f.kind}, {f.line}, {f.length}" in listed]
    missing = sum(not at.get(case, {}).get(OURS, {}).get("vs_copy") for case in chosen.suite.cases)
    return MapVerdict(
        found.suite, len(chosen.suite.cases), missing, tuple(f for f in every if f not in named), len(named)
    )
