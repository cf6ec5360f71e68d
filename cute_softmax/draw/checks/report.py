"""What the checks of a Plan find, and what requests to memory cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from layouts import access
from layouts.figures.scene import count

from ...plan import WARP
from ...plan.base import PlanBase

MAX_PHASES = 64  # rows or panels looked at: more than there are ways to lie off a vector boundary


@dataclass(frozen=True)
class Traffic:
    """The requests of one operand in the grid's first tile, all CTAs of its cluster together.

    name: of the operand; width: bytes that a lane moves; requests: of warps; sectors: of 32 bytes that they
    touch; ideal: sectors that the same bytes would take side by side.
    """

    name: str
    width: int
    requests: int
    sectors: int
    ideal: int

    @staticmethod
    def of(name: str, width: int, requests: Iterable[access.Lanes]) -> Traffic:
        """The requests' sectors added up; ValueError names lane and address of an access that is not aligned."""
        found = [access.global_request(lanes, width) for lanes in requests]
        return Traffic(
            name, width, len(found), sum(r.sectors for r in found), sum(r.ideal_sectors for r in found)
        )

    def __str__(self) -> str:
        if not self.requests:
            return f"{self.name}: no whole vector, only scalars."
        return (
            f"{self.name}: {self.requests:,} requests of {self.width} bytes a lane touch "
            f"{self.sectors:,} sectors of 32 bytes; side by side their bytes would fill {self.ideal:,}."
        )


def requests_of(
    elements: Sequence[int | None], item: int, vector: int = 1, width: int = 1
) -> Iterator[list[int | None]]:
    """The byte addresses of each request of warps whose threads move a vector of elements of `item` bytes, `width` of
    them at a time; elements: each thread's first one, None where it moves nothing."""
    for first in range(0, len(elements), WARP):
        lanes = elements[first : first + WARP]
        if any(e is not None for e in lanes):
            for part in range(0, vector, width):
                yield [None if e is None else (e + part) * item for e in lanes]


def wavefronts(requests: Iterable[access.Lanes], width: int, each: str = "a lane") -> str:
    """What requests to shared memory cost, in words."""
    found = [access.shared_request(lanes, width) for lanes in requests]
    total, conflicts = sum(r.wavefronts for r in found), sum(r.conflicts for r in found)
    a_request = f"{total / len(found):.4g} wavefront{'s' * (total != len(found))}"
    return f"{width} bytes {each}, {a_request} a request, {count(conflicts, 'bank conflict')}"


@dataclass(frozen=True)
class Report:
    """What `check` found: `problems` is empty where all is well."""

    plan: PlanBase
    problems: tuple[str, ...]
    coverage: str
    traffic: tuple[Traffic, ...]
    shared: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report as sentences, problems first."""
        found = [f"PROBLEM: {p}" for p in self.problems]
        return [*found, self.coverage, *(f"First tile, {t}" for t in self.traffic), *self.shared]
