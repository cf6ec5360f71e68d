"""Writes what the docs do not say by hand: tables, plans, the reference and figures.

::

    python docs/generate.py            write all of it
    python docs/generate.py --check    status 1 if a committed file differs

A page marks what is generated: ``<!-- generated: NAME -->`` to ``<!-- end of NAME -->``. The functions in
`BLOCKS` make it. (The pages below ``docs/layouts`` have a generator of their own.)
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for place in (HERE, ROOT):
    sys.path.insert(0, str(place))

import committed  # noqa: E402
import ladder_page  # noqa: E402
import names_figure  # noqa: E402
import reference  # noqa: E402
from committed import table  # noqa: E402

from benchmarks import console, report, results  # noqa: E402
from benchmarks.cases import FEW_ROWS  # noqa: E402
from cute_softmax import draw, explain  # noqa: E402
from cute_softmax.plan import choose, describe  # noqa: E402
from cute_softmax.plan.catalogue import classes, longest_row, of_few_rows, operand_dtypes  # noqa: E402
from cute_softmax.plan.hardware import ARCHITECTURES  # noqa: E402
from cute_softmax.plan.problem import ITEM_SIZE  # noqa: E402
from layouts.figures import Figure  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
HEADLINE = "rows-forward"
# Suites that have tables of their own.
ELSEWHERE = ("ladder", "directions", "vocabularies")
PANELS = (
    ((4, 1_000_000), (0,), "softmax"),
    ((64, 262_144), (0,), "softmax"),
    ((1024, 262_144), (0,), "softmax"),
    ((4096, 65_536), (0,), "softmax"),
    ((65_536, 4096), (0,), "softmax"),
    ((1024, 262_145), (0,), "softmax"),
    ((64, 50, 1000), (0, 2), "softmax"),
    ((4, 4_000_000), (1,), "softmax"),
    ((64, 3_000_001), (1,), "softmax"),
    ((64, 1 << 24), (1,), "softmax"),
    ((4096, 65_536), (0,), "softmax_backward"),
    ((65_536, 4096), (0,), "logsumexp"),
)
COUNTED = ("softmax", "softmax_backward")  # reductions have the configurations of softmax


def suite(path: Path) -> str:
    """The tables of a results file, and where they come from."""
    found = results.load(path)
    h = found.header
    versions = [f"{name} {h[key]}" for name, key in (("torch", "torch"), ("cutlass-dsl", "cutlass_dsl"),
                ("Liger", "liger"), ("QuACK", "quack"), ("cuDNN", "cudnn")) if h.get(key)]  # fmt: skip
    source = f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`; {', '.join(versions)}."
    parts = [f"**{t.title}**\n\n{console.as_markdown(t)}" for t in report.tables(found)]
    return "\n\n".join([*parts, source])


def headline() -> str:
    """The one table of the README."""
    path = RESULTS / f"{HEADLINE}.json"
    if not path.exists():
        return (
            f"No results are committed yet: `python -m benchmarks --suite {HEADLINE} --save` measures them."
        )
    found = results.load(path)
    first = report.tables(found)[0]
    h = found.header
    return f"**{first.title}**\n\n{console.as_markdown(first)}\n\n`{h['command']}`, {h['date'][:10]}."


def all_results() -> str:
    """Every committed suite but those with tables of their own."""
    files = [p for p in sorted(RESULTS.glob("*.json")) if not p.name.startswith(ELSEWHERE) and _is_suite(p)]
    return "\n\n".join(map(suite, files)) or "No results are committed yet."


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
    return "\n\n".join(parts) or "No results are committed yet."


def products() -> str:
    """Times of softmax_matmul beside the product alone and QuACK's softmax followed by it."""
    path = RESULTS / "matmul.json"
    if not path.exists():
        return "No results are committed yet: `python -m benchmarks --suite matmul --save` measures them."
    found = results.load(path)
    rows = []
    for key, cell in results.cells(found.rows).items():
        if key.method != "events-cold":
            continue
        times = [
            cell.get(name, {}).get("us")
            for name in ("cute_softmax", "copy", "quack", "torch", "torch.compile")
        ]
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
        return "No results are committed yet: `python tests/opinfo.py --save` writes them."
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


def _is_suite(path: Path) -> bool:
    try:
        results.load(path)
    except ValueError:  # other measurements lie there too
        return False
    return True


def class_list(math: str, kind: Callable = classes, arch: str = "sm_90a", dtype: str = "bf16") -> str:
    """The classes of a math, with what a person asks first."""
    rows = [
        [
            f"`{c.name}`",
            f"{longest_row(c):,}",
            f"{c.cluster_n}" if c.cluster_n > 1 else "",
            f"{c.threads}",
            f"{c.threads_per_row}",
            f"{c.rows_per_thread} x {c.steps} x {c.vector}",
            " ".join(dict.fromkeys(c.staging)),
            f"{c.shared_memory:,}",
        ]
        for c in kind(math, ARCHITECTURES[arch], operand_dtypes(math, dtype))
    ]
    head = [
        "class",
        "longest row",
        "cluster",
        "threads a CTA",
        "a row",
        "a thread holds",
        "loads",
        "smem, bytes",
    ]
    return table(head, rows)


def panel_classes() -> str:
    """What panels of some shapes come to: the shapes that a person asks about first."""
    rows = []
    for shape, dim, math in PANELS:
        p = describe.plan_shape(shape, "bf16", dim=dim, math=math)
        c = p.kernel
        rows.append(
            [
                f"{math} of {' x '.join(f'{n:,}' for n in shape)}, dim {', '.join(map(str, dim))}",
                c.movement,
                f"`{c.name}`",
                f"{c.columns} x {c.tile:,}",
                f"{c.cluster_n}" if c.cluster_n > 1 else "",
                f"{p.parts}" if p.parts > 1 else "",
                f"{c.vector * ITEM_SIZE['bf16']}",
                f"{c.shared_memory:,}",
            ]
        )
    head = ["problem", "movement", "class", "tile: groups x elements", "cluster", "parts"]
    return table([*head, "access, bytes", "smem, bytes"], rows)


def class_counts() -> str:
    """How many classes there are, and the longest row, per architecture and dtype size."""
    rows = []
    for name, arch in ARCHITECTURES.items():
        row = [name]
        for math in COUNTED:
            for dtype in ("bf16", "fp32"):
                found = list(classes(math, arch, operand_dtypes(math, dtype)))
                row.append(f"{len(found)}: {longest_row(found[-1]):,}")
        rows.append(row)
    return table(["", *(f"{m}, {8 * ITEM_SIZE[d]} bit" for m in COUNTED for d in ("bf16", "fp32"))], rows)


def said(*arguments, **options) -> str:
    """What `explain` says."""
    return f"```text\n{explain(*arguments, **options)}\n```"


def comment_above(name: str) -> str:
    """The comment above a constant of `plan.choose`, as a quotation."""
    lines = inspect.getsource(choose).splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(rf"{name}\b", line))
    first = at
    while lines[first - 1].startswith("#"):
        first -= 1
    text = " ".join(line.lstrip("# ") for line in lines[first:at])
    whole = "" if lines[at].endswith("(") else f"\n>\n> `{lines[at]}`"
    return f"> {text}{whole}"


BLOCKS: dict[str, Callable[[], str]] = {
    "results": headline,
    "all results": all_results,
    "products": products,
    "vocabularies": vocabularies,
    "forward classes": lambda: class_list("softmax"),
    "backward classes": lambda: class_list("softmax_backward"),
    "reduction classes": lambda: class_list("logsumexp"),
    "classes of few rows": lambda: class_list("softmax", of_few_rows),
    "class counts": class_counts,
    "panel classes": panel_classes,
    "a plan of columns": lambda: said((1024, 262144), 0),
    "a plan": lambda: said((4096, 8192)),
    "a plan with edges": lambda: said((8192, 50257)),
    "why this policy": lambda: comment_above("EVICT_LAST_ABOVE"),
    "functions": reference.functions,
    "modules": reference.modules,
    "objects": reference.objects,
    "opinfo": opinfo,
    **ladder_page.BLOCKS,
}


def drawings() -> dict[str, Figure]:
    """The figures of the pages by name."""
    panels = draw.figures(describe.plan_shape((1024, 262144), dim=0))
    parts = draw.figures(describe.plan_shape((4, 4_000_000)))
    product = draw.figures(describe.plan_matmul_shape((32, 4096, 4096), 128))
    long, ragged = describe.plan_of(8192, 30000), describe.plan_of(4096, 1023)
    return {
        "names": names_figure.names(),
        "edges": draw.figures(ragged)["edges"],
        "cluster": draw.figures(long)["cluster"],
        "panel": panels["tv"],
        "exchange": parts["exchange"],
        "shift": draw.figures(describe.plan_shape((1000, 2001), dim=0))["shift"],
        "places": draw.figures(describe.plan_shape((64, 1 << 24)))["places"],
        **ladder_page.drawings(),
        **{f"matmul_{name}": product[name] for name in ("tile", "fragments", "registers", "values")},
    }


def filled(text: str) -> str:
    """A page with its blocks made anew."""

    def block(match: re.Match) -> str:
        name = match[1]
        return f"<!-- generated: {name} -->\n\n{BLOCKS[name]()}\n\n<!-- end of {name} -->"

    return re.sub(r"<!-- generated: ([\w ]+) -->.*?<!-- end of \1 -->", block, text, flags=re.S)


def files() -> dict[Path, str]:
    """Every file that holds something generated, and what it must hold."""
    out = {page: filled(page.read_text(encoding="utf-8")) for page in PAGES}
    return out | {HERE / "figures" / f"{name}.svg": f.svg() for name, f in drawings().items()}


def main() -> int:
    """Write or check."""
    complaint = "is out of date: run `python docs/generate.py`"
    return committed.main(__doc__.splitlines()[0], files(), HERE / "figures", complaint)


if __name__ == "__main__":
    sys.exit(main())
