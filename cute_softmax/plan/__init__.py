"""The decisions: which movement, how wide an access, how many threads and CTAs share a row.

`plan(problem, ...)` gives a `Plan`: the numbers of one launch and its *Plan class* (`RowClass`), which is what is
compiled. Row counts, lengths, strides and addresses are not part of the class, so that a new shape compiles
nothing unless it falls into another class. Pure Python: no GPU, torch or cutlass.
"""

from .choose import RowPlan, plan, plan_call
from .maths import CACHE_LINE, MATHS, WARP, Math, NotPlanned, math_of
from .modes import MODES
from .panel import plan_panel
from .panel_class import PanelClass
from .panel_plan import PanelPlan
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row import PART, VECTORS_PER_ROW, RowClass, row_class, vector_of
from .row_configs import RowConfig
from .row_plan import Plan
from .short import ShortClass
from .short_plan import ShortPlan
from .sweep import SweepClass, SweepPlan
from .table import Table, table_of

__all__ = [
    "CACHE_LINE",
    "MATHS",
    "MODES",
    "NO_PROLOGUE",
    "PART",
    "VECTORS_PER_ROW",
    "WARP",
    "Math",
    "NotPlanned",
    "PanelClass",
    "PanelPlan",
    "Plan",
    "Prologue",
    "RowClass",
    "RowConfig",
    "RowPlan",
    "ShortClass",
    "ShortPlan",
    "SweepClass",
    "SweepPlan",
    "Table",
    "facts_of",
    "math_of",
    "plan",
    "plan_call",
    "plan_panel",
    "row_class",
    "table_of",
    "vector_of",
]
