"""Writes what the docs do not say by hand: tables, plans, the reference and figures.

::

    python docs/generate.py            write all of it
    python docs/generate.py --check    status 1 if a committed file differs

A page marks what is generated: ``<!-- generated: NAME -->`` to ``<!-- end of NAME -->``. The functions in
`BLOCKS` make it. (The pages below ``docs/layouts`` have a generator of their own.)
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for place in (HERE, ROOT):
    sys.path.insert(0, str(place))

import committed  # noqa: E402
import concept_figures  # noqa: E402
import excerpts  # noqa: E402
import ladder_page  # noqa: E402
import names_figure  # noqa: E402
import performance_page  # noqa: E402
import reference  # noqa: E402
import shards_page  # noqa: E402
from committed import table  # noqa: E402

from cute_softmax import draw, explain  # noqa: E402
from cute_softmax.plan import choose, describe  # noqa: E402
from cute_softmax.plan.catalogue import classes, longest_row, of_few_rows, operand_dtypes  # noqa: E402
from cute_softmax.plan.hardware import ARCHITECTURES, H200  # noqa: E402
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical  # noqa: E402
from layouts.figures import Figure  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
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
    ((65_536, 4095), (0,), "softmax"),
)
FOLLOWED = (8192, 30_000)  # the call with which the kernel of rows is read
COUNTED = ("softmax", "softmax_backward")  # reductions have the configurations of softmax


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
        "threads per CTA",
        "per row",
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
    "forward classes": lambda: class_list("softmax"),
    "backward classes": lambda: class_list("softmax_backward"),
    "reduction classes": lambda: class_list("logsumexp"),
    "classes of few rows": lambda: class_list("softmax", of_few_rows),
    "class counts": class_counts,
    "panel classes": panel_classes,
    "a plan of columns": lambda: said((1024, 262144), 0),
    "a plan of two passes": lambda: said((128256, 1039), 0),
    "a plan": lambda: said((4096, 8192)),
    "the plan that is followed": lambda: said(FOLLOWED),
    "a plan of shared rows": lambda: said((4096, 75_968), group=2),
    **excerpts.BLOCKS,
    "a plan with edges": lambda: said((8192, 50257)),
    "why this policy": lambda: comment_above("EVICT_LAST_ABOVE"),
    "functions": reference.functions,
    "modules": reference.modules,
    "objects": reference.objects,
    **ladder_page.BLOCKS,
    **performance_page.BLOCKS,
    **shards_page.BLOCKS,
}


def drawings() -> dict[str, Figure]:
    """The figures of the pages by name."""
    panels = draw.figures(describe.plan_shape((1024, 262144), dim=0))
    parts = draw.figures(describe.plan_shape((4, 4_000_000)))
    product = draw.figures(describe.plan_matmul_shape((32, 4096, 4096), 128))
    shared = draw.figures(describe.plan_shared(4096, 75_968))
    followed, ragged = draw.figures(describe.plan_of(*FOLLOWED)), describe.plan_of(4096, 1023)
    # Whose results begin elsewhere in their blocks than the elements.
    columns = [Operand("bf16", (2001, 1), offset) for offset in (0, 2)]
    apart = canonical((1000, 2001), (0,), columns)
    return {
        "names": names_figure.names(),
        "edges": draw.figures(ragged)["edges"],
        "cluster": followed["cluster"],
        "walk_buffer": followed["reduction_buffer"],
        **{f"walk_{name}": followed[name] for name in ("tile", "predicate", "shuffle")},
        "panel": panels["tv"],
        "exchange": parts["exchange"],
        "blocks": draw.figures(describe.plan_shape((1000, 2001), dim=0))["shift"],
        "shift": draw.figures(choose.plan("softmax", apart, H200))["shift"],
        "places": draw.figures(describe.plan_shape((64, 1 << 24)))["places"],
        **{name: shared[name] for name in ("turns", "workspace")},
        "trips": draw.figures(describe.plan_shape((4096, 65536), dim=0))["cluster"],
        **{name: make() for name, make in concept_figures.FIGURES.items()},
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
