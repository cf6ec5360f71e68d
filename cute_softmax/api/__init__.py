"""What users call: the public functions, what they mean, and the checks of their arguments."""

from __future__ import annotations

from ..plan.base import PlanBase


def _repr_svg_(plan: PlanBase) -> str | None:
    """The tile of a plan's first CTA, as a notebook shows it; None, and so its text, where nothing draws it."""
    try:
        from ..draw import MODULES, overview
    except ModuleNotFoundError:  # drawsvg, or all of it (on the kernel hub)
        return None
    return overview(plan).svg() if plan.movement in MODULES else None


PlanBase._repr_svg_ = _repr_svg_
