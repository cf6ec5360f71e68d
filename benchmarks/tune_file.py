"""The file of a table: what the tuner writes. A configuration stands in a line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from cute_softmax.plan import RowConfig, Table
from cute_softmax.plan.panel_configs import PanelConfig
from cute_softmax.plan.short_configs import ShortConfig
from cute_softmax.plan.table import digest_of


def said(config: RowConfig | ShortConfig | PanelConfig) -> dict[str, Any]:
    """A configuration as a line of a table: what differs from the defaults."""
    kept = {f.name: value for f in fields(config) if (value := getattr(config, f.name)) != f.default}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}


def _lists_said(lists: dict[Any, Any]) -> dict[str, Any]:
    """Lists by name; one that another has, too, is named."""
    found: dict[str, Any] = {}
    for key, configs in lists.items():
        name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        if isinstance(configs, PanelConfig):
            found[name] = said(configs)
            continue
        first = next(k for k in lists if lists[k] is configs)
        found[name] = str(first) if first != key else [said(c) for c in configs]
    return found


def data_of(table: Table, gpu: str, figures: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a table's file holds."""
    pairs = {
        name: [(said(a), said(b)) for a, b in getattr(table, name).items()] for name in ("causal", "prologue")
    }
    rows = {
        "few_above": table.few_above,
        "many": _lists_said(table.many),
        "few": _lists_said(table.few),
        **pairs,
    }
    panels = {name: _lists_said(getattr(table, name)) for name in ("held", "shifted", "deep")}
    panels |= {"ahead": said(table.ahead), "streaming": _lists_said(table.streaming)}
    short, chosen = ([said(config) for config in configs] for configs in (table.short, table.chosen))
    return {
        "device": gpu,
        "row": rows,
        "short": short,
        "chosen": chosen,
        "panel": panels,
        **({"figures": figures} if figures else {}),
    }


def text_of(data: Any, indent: int = 0) -> str:
    """JSON with a line for each configuration, figure or pair."""
    if isinstance(data, tuple) or not any(isinstance(v, (dict, list, tuple)) and v for v in _nested(data)):
        return json.dumps(data)
    inner = " " * (indent + 2)
    if isinstance(data, dict):
        parts = [f"{inner}{json.dumps(key)}: {text_of(value, indent + 2)}" for key, value in data.items()]
    else:
        parts = [inner + text_of(value, indent + 2) for value in data]
    first, last = "{}" if isinstance(data, dict) else "[]"
    return f"{first}\n" + ",\n".join(parts) + f"\n{' ' * indent}{last}"


def _nested(data: Any) -> list[Any]:
    """What within it needs lines of its own: a list of words does not."""
    values = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else []
    return [v for v in values if not (isinstance(v, list) and all(isinstance(word, str) for word in v))]


def save(path: Path, table: Table, gpu: str, figures: dict[str, Any]) -> str:
    """Writes a table whole or not at all; returns its digest."""
    data = data_of(table, gpu, figures)
    Table.of(path.stem, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text_of(data) + "\n", encoding="utf-8")
    temporary.replace(path)
    return digest_of(data)
