"""Which table of configurations a GPU's plans are made of: the user's own, the one measured on it, or the default."""

from __future__ import annotations

import os
from pathlib import Path

from ..plan.table import DEFAULT
from ..plan.tables import name_for, shipped
from .folders import settings_folder

ENVIRONMENT = "CUTE_SOFTMAX_TABLE"


def own_table(gpu: str) -> Path:
    """Where a user's own table of a GPU lies: in the folder of his settings."""
    return settings_folder() / "tables" / f"{name_for(gpu)}.json"


def table_for(gpu: str, shipped_only: bool = False) -> str:
    """The table for a GPU: what `$CUTE_SOFTMAX_TABLE` names (one that is shipped, or a path), else the user's own, else
    the one measured on such a GPU, else the default. shipped_only: neither of the first two."""
    if not shipped_only:
        if named := os.environ.get(ENVIRONMENT):
            return named
        if (own := own_table(gpu)).exists():
            return str(own)
    return name_for(gpu) if name_for(gpu) in shipped() else DEFAULT
