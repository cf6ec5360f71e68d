"""What Plans and Plan classes of all movements have alike."""

from __future__ import annotations

from dataclasses import asdict


class ClassBase:
    """A Plan class: a frozen dataclass of plain numbers with `dtypes`, and `facts` of its math."""

    @property
    def precise(self) -> bool:
        """Whether the result is worth a float32's rounding."""
        return self.dtypes[self.facts.result] == "fp32"

    @property
    def fields(self) -> dict:
        """The class as plain values: the key of the compiled kernel."""
        return asdict(self)


class PlanBase:
    """A Plan: its class is `kernel`."""

    @property
    def movement(self) -> str:
        return self.kernel.movement

    def _repr_svg_(self) -> str:
        """The tile of the first CTA, as a notebook shows it."""
        from ..diagrams import overview

        return overview(self).svg()
