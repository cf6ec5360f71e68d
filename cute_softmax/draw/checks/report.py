"""What the checks of a Plan find."""

from __future__ import annotations

from dataclasses import dataclass

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
