"""Tables from results: shapes down, providers across, speed and the ratio to the copy in each cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from .cases import PEERS, PROVIDERS, SPECIALISTS, labels
from .console import Table
from .results import Results, Row, cells, key_of
from .suites import SUITES

METHODS = {
    "events-cold": "CUDA events, cold L2",
    "graph-rotating": "CUDA graph, rotating buffers",
    "graph-warm": "CUDA graph, warm L2",
    "host-clock": "time of the calling thread",
    "fresh-process": "fresh process",
}


_HOST = ("host-clock", "fresh-process")
SLOWEST = 10.0  # GB/s that a table shows


def is_timed(rows: Iterable[Row]) -> bool:
    """Whether the figures of a method are shown as times: GB/s out of a warm L2 would be no bandwidth of the memory,
    and those of calls that move next to nothing say nothing."""
    rows = [row for row in rows if "us" in row]
    if any(row["gbps"] is None or row["method"] == "graph-warm" for row in rows):
        return True
    return any(row["gbps"] < SLOWEST for row in rows if row["provider"] == "cute_softmax")


_VERSIONS = {
    "torch": "torch",
    "torch.compile": "torch",
    "liger": "liger",
    "quack": "quack",
    "trl": "trl",
    "flashinfer": "flashinfer",
}


def with_version(provider: str, header: dict) -> str:
    """A provider with the version that was measured, as far as a header names it: "torch.compile 2.11.0"."""
    version = header.get(_VERSIONS.get(provider, "")) or ""
    return f"{provider} {version.partition('+')[0]}".strip()


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of the logarithms."""
    return math.exp(sum(map(math.log, values)) / len(values))


def best_peer(cell: dict[str, Row]) -> str | None:
    """The fastest provider of a cell that is neither the copy nor ours."""
    peers = [p for p in (*PEERS, *SPECIALISTS) if "us" in cell.get(p, {})]
    return min(peers, key=lambda p: cell[p]["us"]) if peers else None


def winners(cell: dict[str, Row]) -> list[str]:
    """The fastest providers of a cell, the copy apart: all that a table shows as equally fast; none without a peer."""
    timed = {name: row for name, row in cell.items() if name != "copy" and "us" in row}
    if not timed.keys() - {"cute_softmax"}:
        return []
    best = _shown(min(timed.values(), key=lambda row: row["us"]))
    return [name for name, row in timed.items() if _shown(row) == best]


def providers_of(rows: Iterable[Row]) -> list[str]:
    """The providers that occur, in the usual order, then any others."""
    present = dict.fromkeys(row["provider"] for row in rows)
    return [*(p for p in PROVIDERS if p in present), *(p for p in present if p not in PROVIDERS)]


def failure_word(error: str) -> str:
    """How a table says that a provider gave no figure."""
    if "wrong result" in error:
        return "wrong"
    return "absent" if error.startswith("not installed") or "ModuleNotFoundError" in error else "refuses"


def format_time(us: float) -> str:
    """Microseconds with three digits, in the unit that suits them."""
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / scale:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def _ratio_text(row: Row) -> str:
    ratio, digits = (row.get("vs_torch"), 2) if row["gbps"] is None else (row["vs_copy"], 3)
    return "" if ratio is None else f"{ratio:.{digits}f}"


def _shown(row: Row) -> str:
    """What a table shows of a row's speed: the ratio, or the time where there is none."""
    return _ratio_text(row) or format_time(row["us"])


def _cell_text(row: Row | None, timed: bool) -> str:
    if row is None:
        return ""
    if "error" in row:
        return failure_word(row["error"])
    figure = format_time(row["us"]) if timed else f"{row['gbps']:.0f}"
    return f"{figure} {_ratio_text(row)}".rstrip()


def suite_title(name: str) -> str:
    """The title of a suite by its name, that of another dtype included."""
    if name in SUITES:
        return SUITES[name].title
    titles = (suite.title for suite in SUITES.values() if name.startswith(suite.name + "-"))
    return next(titles, name)


def _geometric_means(grouped: Sequence[dict[str, Row]], names: Sequence[str]) -> list[str]:
    line = ["geometric mean of the ratio"]
    for name in names:
        ratios = [c[name]["vs_copy"] for c in grouped if c.get(name, {}).get("vs_copy")]
        part = f" ({len(ratios)} of {len(grouped)})" if len(ratios) < len(grouped) else ""
        line.append(f"{geometric_mean(ratios):.3f}{part}" if ratios else "")
    return line


def _note(rows: Iterable[Row], marked: bool) -> str:
    spreads = [row["spread"] for row in rows if "error" not in row]
    if not spreads:
        return ""
    typical, most = statistics.median(spreads), max(spreads)
    mark = "The fastest of each row is marked, the copy apart. " if marked else ""
    return f"{mark}Spread (interquartile range over median): {typical:.1%} in the median, {most:.1%} at most."


def tables(results: Results) -> list[Table]:
    """One table for each method and element type of a results file."""
    built = []
    all_cells = cells(results.rows)
    for method, dtype in dict.fromkeys((key.method, key.case.dtype) for key in all_cells):
        chosen = {
            k.case: cell for k, cell in all_cells.items() if (k.method, k.case.dtype) == (method, dtype)
        }
        rows = [row for cell in chosen.values() for row in cell.values()]
        names, timed, on_host = providers_of(rows), is_timed(rows), method in _HOST
        figure = "time" if timed else "GB/s"
        unit = "time and its ratio to torch" if on_host else f"{figure} and ratio to copy"
        table = Table(
            title=f"{suite_title(results.suite)}, {dtype}, {results.header['gpu']} "
            f"({METHODS.get(method, method)}; {unit})",
            columns=["shape", *names],
            rows=[],
        )
        for i, (label, cell) in enumerate(zip(labels(list(chosen)), chosen.values(), strict=True)):
            table.rows.append([label, *(_cell_text(cell.get(name), timed) for name in names)])
            table.strong |= {(i, 1 + names.index(name)) for name in winners(cell)}
        table.note = _note(rows, bool(table.strong))
        if not on_host:
            table.footers.append(_geometric_means(list(chosen.values()), names))
        built.append(table)
    return built


def refusals(results: Results) -> list[str]:
    """One line for each provider and reason that gave no figure, with the shapes concerned."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in results.rows:
        if "error" in row:
            shape = " ".join(("x".join(map(str, row["shape"])), *key_of(row).case.details))
            shapes = by_reason.setdefault((row["provider"], row["error"]), [])
            if shape not in shapes:
                shapes.append(shape)
    return [f"{name} at {', '.join(shapes)}: {error}" for (name, error), shapes in by_reason.items()]
