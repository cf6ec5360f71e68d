"""What the checks of a Plan find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layouts import access

from ...plan.base import PlanBase


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
