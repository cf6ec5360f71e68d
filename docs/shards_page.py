"""What is generated of the page about rows that ranks share, from its results files and nothing else."""

from __future__ import annotations

from committed import table
from performance_page import RESULTS

from benchmarks import report, results
from benchmarks.results import Row
from benchmarks.sharded_judge import GPUS_A_HOST, HOP_US, NETWORK_HOP_US, SUITE, WAYS, fitted, judge, model

NOTHING = (
    "No figures are committed yet: `python -m benchmarks sharded --save` makes them on two GPUs or more."
)
PROVIDERS = ("cute_softmax", "local", "all-gather", "copy", "dtensor", "loss_parallel", "megatron")
NAMES = {
    "local": "the slice alone",
    "dtensor": "DTensor",
    "loss_parallel": "`loss_parallel`",
    "megatron": "Megatron's",
}


def _found() -> list[results.Results]:
    """Of each GPU that it was measured on."""
    return [results.load(path) for path in sorted(results.FOLDER.glob(f"*/{SUITE}.json"))]


def _of(rows: list[Row]) -> dict[tuple, dict[str, Row]]:
    """By (op, shape, way): the rows of each provider, by graphs where there are some."""
    cells: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        mode = row.get("mode", "")
        if row["op"] in ("all_gather", "merge") or mode.endswith(" ranks"):
            continue
        cell = cells.setdefault((row["op"], tuple(row["shape"]), mode if mode in WAYS else ""), {})
        if row["provider"] not in cell or row["method"].startswith("graph"):
            cell[row["provider"]] = row
    return cells


def measured() -> str:
    """Times and peak memory beside the peers', and what is required, on each GPU."""
    return "\n\n".join(map(_measured, _found())) or NOTHING


def _measured(found: results.Results) -> str:
    def told(row: Row | None) -> str:
        if row is None:
            return ""
        if "error" in row:
            return report.failure_word(row["error"])
        peak = f" ({row['peak_bytes'] / 1e6:,.0f} MB)" if row.get("peak_bytes") else ""
        return f"{row['us']:,.0f}{peak}"

    lines = [
        [
            ", ".join((f"`{op}`", " x ".join(map(str, shape)), *[way] * bool(way))),
            *(told(cell.get(name)) for name in PROVIDERS),
        ]
        for (op, shape, way), cell in _of(found.rows).items()
    ]
    verdicts = list(judge(found))
    missed = [f"- {verdict}" for verdict in verdicts if not verdict.met]
    head = [
        "microseconds (peak memory)",
        *(NAMES.get(name, f"`{name}`" if "_" in name else name) for name in PROVIDERS),
    ]
    gpus = f"{found.header.get('gpus', 2)} x {found.header['gpu']}"
    source = (
        f"{gpus}, {found.header['date'][:10]}, torch {found.header['torch']}, `{found.header['command']}`."
    )
    told_of = [f"Targets that are missed, {len(missed)} of {len(verdicts)}:\n\n" + "\n".join(missed)]
    return "\n\n".join([f"### {gpus}", table(head, lines), source, *(told_of if missed else ())])


def by_ranks() -> str:
    """What more ranks would cost."""
    path = RESULTS / f"{SUITE}.json"
    if not path.exists():
        return NOTHING
    found = results.load(path)
    try:
        cost, lines = fitted(found.rows), model(found)
    except ValueError as error:
        return f"Not measured: {error}."
    rows = [
        [
            str(line.ranks), *(f"{us:,.1f}" for us in (line.logsumexp, line.softmax, line.merge, line.gather)),
            f"{line.whole_logsumexp:,.0f}", f"{line.whole_softmax:,.0f}",
        ]
        for line in lines
    ]  # fmt: skip
    head = [
        "ranks",
        "read of a slice",
        "softmax of a slice",
        "merge",
        "all-gather",
        "`logsumexp`",
        "`softmax`",
    ]
    words = (
        f"All-gathers of two ranks take {cost.first:.0f} us and {cost.rate / 1e3:,.0f} GB/s (least squares over "
        f"{len([r for r in found.rows if r['op'] == 'all_gather'])} sizes). Each further rank is assumed to add a hop "
        f"of {HOP_US} us, or {NETWORK_HOP_US} us between hosts of {GPUS_A_HOST} GPUs, as NCCL's own tuning does. "
        "Slices and merges are measured, in microseconds, on one GPU; the collective beyond two ranks is a model."
    )
    return f"{table(head, rows)}\n\n{words}"


BLOCKS = {"shared rows": measured, "shared rows of many ranks": by_ranks}
