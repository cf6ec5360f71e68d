"""What was measured per GPU: a file for each, of the configurations that plans choose from.

A configuration stands in a line, with the names of `RowConfig` or `PanelConfig` and what differs from their defaults.
In a list the shortest capacity comes first; the first that a row or panel fits into and the architecture has room for
is taken. How they were found stands in docs/experiments.md.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

MEASURED = "h200"  # the table of all GPUs: other ones were only compiled for


@cache
def table(name: str = MEASURED) -> dict:
    """The table of a GPU as it lies in its file."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())


def lists(found: dict[str, list[dict] | str], kind: type) -> dict[str, tuple]:
    """Lists of configurations by name; one that has another's name shares its list."""
    made = {
        name: tuple(kind(**fields) for fields in entries)
        for name, entries in found.items()
        if not isinstance(entries, str)
    }
    return {name: made[entries if isinstance(entries, str) else name] for name, entries in found.items()}
