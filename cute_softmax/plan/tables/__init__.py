"""What was measured per GPU: a file for each, of the configurations that plans choose from (see `plan.table`).

A configuration stands in a line, with the names of `RowConfig` or `PanelConfig` and what differs from their defaults.
In a list the shortest capacity comes first. How they were found stands in docs/experiments.md.
"""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent


def shipped() -> list[str]:
    """The names of the tables that come with the package."""
    return sorted(path.stem for path in _HERE.glob("*.json"))


def path_of(name: str) -> Path:
    """The file of a shipped table."""
    return _HERE / f"{name}.json"


def name_for(gpu: str) -> str:
    """The name of a GPU's table, and of the folder of its results: "NVIDIA H200" gives "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
