"""What users call: the public functions, what they mean, and the checks of their arguments."""

from __future__ import annotations

from ..plan.base import PlanBase


def _repr_svg_(plan: PlanBase) -> str | None:
    """The tile of a plan's first CTA, as a notebook shows it; its text where the library that draws is missing."""
    try:
        from ..draw import overview
    except ModuleNotFoundError as error:
        if error.name != "drawsvg":
            raise
        return None
    return overview(plan).svg()


PlanBase._repr_svg_ = _repr_svg_
