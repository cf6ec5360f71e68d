"""What a Plan does to memory, checked on its own numbers: coverage, alignment, sectors, bank conflicts.

The arithmetic is that of the kernels, written again from the Plan alone, so that a Plan which loses an element,
reads one twice or misaligns an access is found without a GPU. Pure Python: no torch or cutlass.
"""

from __future__ import annotations

from ...plan import PanelPlan, RowPlan, SweepPlan
from ...plan.matmul import MatmulPlan
from ...plan.matmul_backward import MatmulBackwardPlan
from ...plan.short_plan import ShortPlan
from . import matmul, panel, row, short, sweep
from .common import MAX_PHASES
from .report import Report, Traffic
from .row import columns_of, pieces, requests, tile_tv

__all__ = ["MAX_PHASES", "Report", "Traffic", "check", "columns_of", "pieces", "requests", "tile_tv"]


def check(plan: RowPlan | MatmulPlan | MatmulBackwardPlan) -> Report:
    """Coverage, alignment and sectors of the first tile or panel, and the wavefronts of shared memory."""
    if isinstance(plan, (MatmulPlan, MatmulBackwardPlan)):
        return matmul.check(plan)
    if isinstance(plan, ShortPlan):
        return short.check(plan)
    if isinstance(plan, SweepPlan):
        return sweep.check(plan)
    return panel.check(plan) if isinstance(plan, PanelPlan) else row.check(plan)
