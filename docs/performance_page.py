"""What is generated of the pages about performance, from results files and nothing else."""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from committed import table

from benchmarks import console, report, results, step
from benchmarks.cases import FEW_ROWS, PEERS, SPECIALISTS
from benchmarks.map_cells import SLICES

HERE = Path(__file__).resolve().parent
RESULTS = results.FOLDER / "h200"
# Slices of the map are drawn, not tabled; suites of the ladder stand on its own page.
MAP = "map-"
LADDER = ("ladder", "directions")
# Each page has the suites whose names begin so; what no page names is on the last one.
PAGES: dict[str, tuple[str, ...]] = {
    "results of rows": (
        *("rows-", "fp32-rows", "small-rows", "odd-rows", "long-rows", "split-rows", "few-rows", "views"),
    ),
    "results of vocabularies": (
        *(
            "family",
            "masked",
            "selective",
            "cross-entropy",
            "information",
            "routers",
            "reductions",
            "sampling",
        ),
    ),
    "results of dimensions": ("any-dims", "columns-", "odd-columns", "fp32-any"),
    "results of products": ("matmul",),
    "results of the host": ("overhead", "first-call"),
}
FILES = {
    "results of rows": "performance-rows.md",
    "results of vocabularies": "performance-vocabularies.md",
    "results of dimensions": "performance-dims.md",
    "results of products": "performance-products.md",
    "results of the host": "performance-host.md",
}
# Summed up in tables of their own.
TABLED = ("vocabularies", "sharded")
LAST = "results of rows"
NOTHING = "No results are committed yet."
SOURCES = (
    ("torch", "torch"),
    ("cutlass-dsl", "cutlass_dsl"),
    ("Liger", "liger"),
    ("QuACK", "quack"),
    ("TRL", "trl"),
    ("FlashInfer", "flashinfer"),
    ("cuDNN", "cudnn"),
)


def page_of(name: str) -> str:
    """The block that shows a suite's results; "" for those that are shown in another way."""
    if name.startswith((MAP, *LADDER, *TABLED)):
        return ""
    return next((page for page, names in PAGES.items() if name.startswith(names)), LAST)


@functools.cache
def _load(path: Path) -> results.Results | None:
    try:
        return results.load(path)
    except ValueError:  # other measurements lie there too
        return None


def _suites(folder: Path) -> dict[Path, results.Results]:
    found = {path: _load(path) for path in sorted(folder.glob("*.json"))}
    return {path: result for path, result in found.items() if result is not None}


def _source(found: results.Results, *extra: str) -> str:
    h = found.header
    versions = [f"{name} {h[key]}" for name, key in SOURCES if h.get(key)]
    return f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`; {', '.join([*versions, *extra])}."


def _plot(path: Path, title: str) -> list[str]:
    """The plot beside a results file, if there is one."""
    drawn = path.with_suffix(".svg")
    return [f"![Plot: {title}]({os.path.relpath(drawn, HERE)})"] if drawn.exists() else []


def suite(path: Path) -> str:
    """A suite's section: its plot, its tables, and where they come from."""
    found = results.load(path)
    parts = [f"**{t.title}**\n\n{console.as_markdown(t)}" for t in report.tables(found)]
    return "\n\n".join([f"## {_heading(found)}", *_plot(path, _heading(found)), *parts, _source(found)])


def suites(page: str) -> str:
    """The sections of a page."""
    return "\n\n".join(suite(p) for p in _suites(RESULTS) if page_of(p.stem) == page) or NOTHING


def _heading(found: results.Results) -> str:
    """Of a suite's section."""
    title = report.suite_title(found.suite)
    other = ", fp32" if found.suite.endswith("-fp32") else ""
    return f"{title[0].upper()}{title[1:]}{other}"


def _mean(cells: list[dict[str, results.Row]], provider: str) -> str:
    """The geometric mean of a provider's ratios to the copy, and of how many calls where these are not all."""
    ratios = [cell[provider]["vs_copy"] for cell in cells if cell.get(provider, {}).get("vs_copy")]
    part = f" ({len(ratios)} of {len(cells)})" if len(ratios) < len(cells) else ""
    return f"{report.geometric_mean(ratios):.2f}{part}" if ratios else ""


def overview() -> str:
    """A line for each suite that has a copy beside it: geometric means, with a link to all of its calls."""
    lines: dict[str, list[list[str]]] = {page: [] for page in PAGES}
    for path, found in _suites(RESULTS).items():
        every = results.cells(found.rows)
        method = next(iter(every)).method
        cells = [cell for key, cell in every.items() if key.method == method]
        page = page_of(path.stem)
        if page and _mean(cells, "cute_softmax"):
            anchor = re.sub(r"[^\w -]", "", _heading(found).lower()).replace(" ", "-")
            link = f"[{_heading(found).partition(';')[0]}]({FILES[page]}#{anchor})"
            lines[page].append(
                [link, str(len(cells)), *(_mean(cells, name) for name in ("cute_softmax", *PEERS))]
            )
    rows = [line for page in PAGES for line in lines[page]]
    head = ["suite", "calls", "cute_softmax", *PEERS]
    return f"{table(head, rows)}\n\n{measured_beside(*_suites(RESULTS).values())}" if rows else NOTHING


def measured_beside(*found: results.Results, peers: tuple[str, ...] = PEERS) -> str:
    """The versions of the peers that were measured, in a sentence."""
    said = (report.with_version(name, f.header) for name in peers for f in found)
    return f"Peers: {', '.join(name for name in dict.fromkeys(said) if ' ' in name)}."


# -- Where a peer is faster --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    """A cell in which a peer is shown as faster."""

    gpu: str
    suite: str
    method: str
    label: str
    ours: float
    peer: str
    peers: float


def _lost(found: results.Results) -> Iterator[Lost]:
    for key, cell in results.cells(found.rows).items():
        ours, peer = cell.get("cute_softmax", {}).get("us"), report.best_peer(cell)
        if ours is None or peer is None or ours <= cell[peer]["us"] or "cute_softmax" in report.winners(cell):
            continue
        case = key.case
        label = f"{case.op}, {case.dtype}, {case.label}"
        gpu = found.header["gpu"].removeprefix("NVIDIA ").split()[0]
        yield Lost(gpu, found.suite, key.method, label, ours, peer, cell[peer]["us"])


def peers_ahead() -> str:
    """Every cell of every suite in which a peer is shown as faster, and how many cells there are."""
    every_lost, cells, compared = [], 0, []
    for folder in sorted(p for p in results.FOLDER.iterdir() if p.is_dir()):
        for found in _suites(folder).values():
            if found.suite.startswith(MAP):
                continue
            every = results.cells(found.rows)
            cells += sum(
                report.best_peer(c) is not None and "us" in c.get("cute_softmax", {}) for c in every.values()
            )
            every_lost += _lost(found)
            compared.append(found)
    every_lost.sort(key=lambda lost: lost.peers / lost.ours)
    by_peer = ", ".join(
        f"{name} {count}" for name, count in Counter(lost.peer for lost in every_lost).most_common()
    )
    beside = measured_beside(*compared, peers=(*PEERS, *SPECIALISTS))
    said = f"{len(every_lost)} of {cells} cells: {by_peer}. {beside}"
    rows = [
        [
            f"{lost.gpu}, {lost.suite}",
            lost.label,
            report.METHODS.get(lost.method, lost.method),
            report.format_time(lost.ours),
            f"{lost.peer}, {report.format_time(lost.peers)}",
            f"{lost.ours / lost.peers:.3f}",
        ]
        for lost in every_lost
    ]
    head = ["GPU, suite", "call", "method", "cute_softmax", "fastest peer", "times as long"]
    return f"{said}\n\n{table(head, rows)}"


# -- The map -----------------------------------------------------------------------------------------------------------


def heat_maps() -> str:
    """The slices of the map that are drawn, of each GPU."""
    parts = []
    for path, found in _suites_of_map():
        title = SLICES[found.suite].title
        drawn = _plot(path, title)
        if drawn:
            parts += [f"### {title[0].upper()}{title[1:]}, {found.header['gpu']}", *drawn, _source(found)]
    return "\n\n".join(parts) or (
        "No map is committed yet: `python -m benchmarks map` measures it, `python -m benchmarks plot FILE` draws it."
    )


def _suites_of_map() -> Iterator[tuple[Path, results.Results]]:
    for path in sorted(results.FOLDER.glob(f"*/{MAP}*.json")):
        found = _load(path)
        if found is not None:
            yield path, found


# -- Tables of their own -----------------------------------------------------------------------------------------------


def vocabularies() -> str:
    """Ratios to a copy over the vocabularies in use, in brackets QuACK's: a table for each dtype."""
    parts = []
    for path in sorted(RESULTS.glob("vocabularies*.json")):
        found = results.load(path)
        cold = {
            key.case: cell for key, cell in results.cells(found.rows).items() if key.method == "events-cold"
        }
        rows_of = sorted({case.shape[0] for case in cold})
        lines: dict[tuple[str, int], list[str]] = {}
        for case, cell in cold.items():
            what = " ".join(filter(None, (case.op, case.mode)))
            line = lines.setdefault((what, case.shape[1]), [""] * len(rows_of))
            ours, quack = (cell.get(name, {}) for name in ("cute_softmax", "quack"))
            beside = f" ({quack['vs_copy']:.2f})" if "us" in quack else ""
            beside = " (wrong)" if "wrong" in quack.get("error", "") else beside
            line[rows_of.index(case.shape[0])] = f"{ours['vs_copy']:.2f}{beside}"
        dtype, h = next(iter(cold)).dtype, found.header
        head = [dtype, "row", *(f"{m:,} rows" for m in rows_of)]
        note = f" ({h['note']})" if h.get("note") else ""
        source = f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`{note}; QuACK {h['quack']}."
        parts += [table(head, [[what, f"{n:,}", *line] for (what, n), line in lines.items()]), source]
    return "\n\n".join(parts) or NOTHING


def products() -> str:
    """Times of softmax_matmul beside the product alone and QuACK's softmax followed by it."""
    path = RESULTS / "matmul.json"
    if not path.exists():
        return f"{NOTHING} `python -m benchmarks --suite matmul --save` measures them."
    found = results.load(path)
    rows = []
    for key, cell in results.cells(found.rows).items():
        if key.method != "events-cold":
            continue
        names = ("cute_softmax", "copy", "quack", "torch", "torch.compile")
        times = [cell.get(name, {}).get("us") for name in names]
        ratio = "" if None in times[:2] else f"{times[0] / times[1]:.2f}"
        few = key.case.shape[-2] <= FEW_ROWS
        words = ["" if us is None else f"{us:.0f}" for us in times]
        words[1] += " (copy)" if few else ""
        rows.append([key.case.label, words[0], words[1], ratio, *words[2:]])
    head = [
        "S",
        "softmax_matmul, us",
        "product alone, us",
        "ratio",
        "QuACK and product",
        "torch",
        "torch.compile",
    ]
    h = found.header
    source = f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`; torch {h['torch']}, QuACK {h['quack']}."
    return f"{table(head, rows)}\n\n{source}"


def opinfo() -> str:
    """What PyTorch's samples found, per operator and route; all dtypes together."""
    path = RESULTS / "checks" / "opinfo.json"
    if not path.exists():
        return f"{NOTHING} `python tests/opinfo.py --save` writes them."
    found = json.loads(path.read_text(encoding="utf-8"))
    counts: dict[tuple[str, str], list[Counter[str]]] = {}
    for entry in found["rows"]:
        total, skipped, on = counts.setdefault(
            (entry["operator"], entry["route"]), [Counter() for _ in range(3)]
        )
        total += Counter(passed=entry["passed"], failed=len(entry["failed"]))
        skipped += Counter(entry["skipped"])
        on += Counter(entry["handed_on"])
    rows = [
        [
            f"`{operator.removeprefix('torch.ops.aten.').removesuffix('.default')}`",
            route,
            f"{total['passed']:,}",
            str(total["failed"]),
            *("; ".join(f"{n} {why}" for why, n in c.items()) for c in (on, skipped)),
        ]
        for (operator, route), (total, skipped, on) in counts.items()
    ]
    h = found["header"]
    head = ["operator", "route", "passed", "failed", "passed by ATen", "skipped"]
    return f"{table(head, rows)}\n\n{h['gpu']}, {h['date'][:10]}, `{h['command']}`; torch {h['torch']}."


# -- The README --------------------------------------------------------------------------------------------------------


def _cell(suite: str, label: str) -> dict[str, results.Row]:
    """The rows of one call of a suite, with a cold L2."""
    found = results.load(RESULTS / f"{suite}.json")
    cells = results.cells(found.rows)
    return next(c for k, c in cells.items() if k.method == "events-cold" and k.case.label == label)


def _beside(suite: str, label: str, *peers: str) -> str:
    """Ours and some peers' ratio to a copy, in brackets what they are of."""
    cell = _cell(suite, label)
    words = [
        f"{name} {row['vs_copy']:.2f}" if row.get("vs_copy") else f"{name} refuses"
        for name, row in ((peer, cell[peer]) for peer in peers)
    ]
    return f"{cell['cute_softmax']['vs_copy']:.2f} of a copy's speed ({', '.join(words)})"


def reasons() -> str:
    """Three reasons, each with its figures."""
    causal = _cell("masked", "2 x 16 x 4096 x 4096, causal")
    faster = causal["torch"]["us"] / causal["cute_softmax"]["us"]
    columns = _beside("columns-forward", "1024 x 262144, dim 0", "torch.compile", "torch", "quack")
    row = _beside("rows-forward", "4096 x 131072", "quack", "torch.compile", "liger")
    longer = _beside("split-rows", "64 x 16777216", "torch.compile", "torch", "quack")
    suites = ("masked", "columns-forward", "rows-forward", "split-rows")
    measured = [results.load(RESULTS / f"{name}.json") for name in suites]
    beside = measured_beside(*measured, peers=("torch", "torch.compile", "quack", "liger"))
    return "\n".join(
        [
            "- **Any dimension.** Columns, the channels of images, several dimensions at once, slices and transposed "
            f"views: nothing is copied or transposed. `dim=0` of 1024 x 262144 runs at {columns}.",
            "- **Any length.** One element or a billion, even or odd. Rows of up to 2^20 elements are read only once, "
            "and so are 16 or more rows of up to 2^24: they stay on chip between the reduction and the result, shared "
            "by a warp, a cluster or the whole GPU. "
            f"4096 rows of 131,072 run at {row}, 64 rows of 16,777,216 at {longer}.",
            "- **Scores and losses in the same read.** Scale, bias, mask and causal mask before the softmax; "
            "log-probabilities, cross entropy, entropy or a product with V after it, with no matrix in between. A "
            f"causal softmax of 2 x 16 x 4096 x 4096 is {faster:.0f} times as fast as torch's mask and softmax.",
            "",
            f"H200, bf16, forward, cold L2. {beside} "
            "[All figures, how they were measured, and where a peer is faster](docs/performance.md).",
        ]
    )


def steps() -> str:
    """A decoder's training step under torch, accelerated and patched, where it was measured."""
    rows, sources = [], []
    for path in sorted(results.FOLDER.glob(f"*/checks/{step.NAME}.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        h = found["header"]
        sources.append(
            f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`; torch {h['torch']}, driver {h['driver']}."
        )
        for entry in found["rows"]:
            gpu = h["gpu"].removeprefix("NVIDIA ").split()[0]
            rows.append([f"{gpu}: {entry['label']}", *(step.shown(entry, name) for name in step.WAYS)])
    head = ["step", "torch", "`accelerate()`", "`patch_transformers(model)`"]
    measured = "\n\n".join([table(head, rows), *sources])
    return measured if rows else f"No results file is committed yet: `{step.COMMAND}` writes one."


BLOCKS = {
    "reasons": reasons,
    "steps": steps,
    "overview": overview,
    "peers ahead": peers_ahead,
    "heat maps": heat_maps,
    "products": products,
    "vocabularies": vocabularies,
    "opinfo": opinfo,
    **{page: functools.partial(suites, page) for page in PAGES},
}
