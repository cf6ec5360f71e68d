"""Regenerates the gallery: every figure, ``gallery.md``, ``plans.md``, the explorers, and the table of
``access.md``.

::

    python docs/layouts/gallery.py            write all files
    python docs/layouts/gallery.py --check    status 1 if a committed file differs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for place in (HERE, HERE.parent, ROOT):
    sys.path.insert(0, str(place))

import committed  # noqa: E402
import measure_access  # noqa: E402
import other_kernels  # noqa: E402
import plans  # noqa: E402

from layouts import Layout, figures, parse  # noqa: E402
from layouts.figures import Figure  # noqa: E402
from layouts.html import explorer  # noqa: E402
from layouts.walk import row_walk  # noqa: E402

COUNTERS = ROOT / "docs/layouts/access.json"
CLUSTER = Layout.ordered((1, (4, 4), 1), (1, 0, 2))


@dataclass(frozen=True)
class Entry:
    """One figure of the gallery: file name, heading, a sentence, and the code that draws it."""

    name: str
    heading: str
    words: str
    draw: Callable[[], Figure]
    code: str


def entry(name: str, heading: str, words: str, code: str) -> Entry:
    """An entry whose figure is what its own code draws."""
    names = {**vars(figures), "Layout": Layout, "parse": parse}
    return Entry(name, heading, words, lambda: eval(code, names), code)


ENTRIES = [
    entry(
        "plain",
        "A plain layout",
        "Offsets of a row-major matrix; row indices left, column indices on top.",
        'layout_grid(parse("(8,16):(16,1)"))',
    ),
    entry(
        "hierarchical",
        "A hierarchical layout",
        "Nested modes show the index and the nested coordinate; thick borders surround the innermost blocks.",
        'layout_grid(parse("((2,4),(4,4)):((1,8),(2,32))"))',
    ),
    entry(
        "composed",
        "A composition",
        "Every second row of a row-major matrix, four columns of it: the operands and the resulting layout.",
        'composed(parse("(8,8):(8,1)"), parse("(4,4):(2,8)"))',
    ),
    entry(
        "swizzle",
        "A swizzle, by bank",
        "Eight rows of 128 bytes. Without the swizzle a column is in the same four banks; with it, in "
        "all 32.",
        'swizzle_banks(parse("S<3,3,3> o 0 o (8,64):(64,1)"), element_bytes=2)',
    ),
    entry(
        "thread_value",
        "Thread-value layout of a row kernel",
        "Four rows, one warp per row, 16 bytes per thread: the tile as thread grid times value grid.",
        'thread_value(parse("((32,4),8):((32,1),4)"), (4, 256), element_bytes=2)',
    ),
    entry(
        "thread_value_steps",
        "The same over 1,024 columns",
        "Four steps of the tile's width; the tile is folded at the page's width, every vector is one cell.",
        'thread_value(parse("((32,4),(8,4)):((32,1),(4,1024))"), (4, 1024), element_bytes=2)',
    ),
    entry(
        "several_owners",
        "Cells with several owners",
        "Four groups of eight threads read the same values; every cell names all its owners.",
        'thread_value(parse("((8,4),4):((4,0),1)"), (4, 8), element_bytes=4)',
    ),
    entry(
        "tiled_copy",
        "A tiled copy",
        "What each thread reads, and what it writes: here a copy that reads rows and stores columns.",
        """\
tiled_copy(
    parse("((8,16),4):((64,1),16)"),
    parse("((16,8),4):((1,64),16)"),
    (16, 32),
    element_bytes=4,
)""",
    ),
    entry(
        "predicate",
        "The predicate tensor",
        "N = 1,000 in a tile of 1,024: one bit per vector, at the actual end of the row.",
        """\
predicate_tensor(
    Layout((1, 1, 4), (4, 0, 1)), parse("((32,4),8):((32,1),4)"), (4, 256), 1000, vector=8, element_bytes=2
)""",
    ),
    entry(
        "predicate_rows",
        "Rows that share their bits",
        "Each thread owns three rows: stride 0 stores their bits once; the ghost cells are the same bits again.",
        """\
predicate_tensor(
    Layout((2, 3, 4), (4, 0, 1)), parse("((8,4),8):((32,1),4)"), (4, 64), 200, vector=4, element_bytes=4
)""",
    ),
    entry(
        "row_pieces",
        "Rows that start off a vector boundary",
        "Scalars up to the boundary, whole vectors, scalars to the end; an odd length gives eight alignments.",
        "row_pieces(1003, vector=8, starts=[1003 * row for row in range(8)], threads=32, element_bytes=2)",
    ),
    entry(
        "warp_shuffle",
        "A reduction within a warp",
        "Five rounds of shuffles; lanes of one colour hold the same value.",
        "warp_shuffle()",
    ),
    entry(
        "reduction_buffer",
        "The reduction buffer",
        "Two stages, two rows of four warps: peers fastest, then rows, then stages.",
        "reduction_buffer(Layout.ordered((2, (4, 1), 2), (1, 0, 2)), element_bytes=4)",
    ),
    entry(
        "reduction_buffer_cluster",
        "The reduction buffer of a cluster",
        "Sixteen (max, sum) pairs of four warps in four CTAs; one lane reads each.",
        "reduction_buffer(Layout.ordered((1, (4, 4), 1), (1, 0, 2)), element_bytes=8)",
    ),
    entry(
        "cluster",
        "The exchange within a cluster",
        "One warp stores into the shared memory of every CTA; each mbarrier counts the bytes of all.",
        "cluster_exchange(Layout.ordered((1, (4, 4), 1), (1, 0, 2)), element_bytes=8, cta=1, warp=2)",
    ),
    entry(
        "mma",
        "Fragments of an MMA atom",
        "B above C, A left of C: which thread holds which element of m16n8k16.",
        """\
mma_fragments(
    (16, 8, 16),
    parse("((4,8),(2,2,2)):((32,1),(16,8,128))"),
    parse("((4,8),(2,2)):((16,1),(8,64))"),
    parse("((4,8),(2,2)):((32,1),(16,8))"),
)""",
    ),
    entry(
        "shared_operand_product",
        "A product with an operand in shared memory",
        "One wgmma: A and C in registers, B by address, in pieces of 16 bytes with their banks.",
        """\
shared_operand_product(
    (64, 16, 16),
    parse("((4,8,4),(2,2,2)):((128,1,16),(64,8,512))"),
    parse("((4,8,4),(2,2,2)):((128,1,16),(64,8,512))"),
    parse("S<3,3,3> o 0 o (64,(8,8)):(1,(64,512))"),
)""",
    ),
    entry(
        "matrix_load",
        "ldmatrix",
        "Which lane gives which address in a swizzled tile, and which thread then holds what.",
        """\
matrix_load(
    parse("((16,2),8):((1,128),16)"),
    parse("((4,8),(2,2,2)):((32,1),(16,8,128))"),
    (16, 16),
    parse("S<3,3,3> o 0 o (16,64):(64,1)"),
)""",
    ),
    entry(
        "thread_registers",
        "One thread's registers",
        "Which element of the tile each register holds: the A operands of two instructions.",
        """\
thread_registers(parse("((4,8,4),(2,2,4)):((128,1,16),(64,8,512))"), (64, 32), 5, group="k-block")""",
    ),
    entry(
        "follow",
        "One thread followed",
        "What thread 29 owns and touches; the rest is dimmed.",
        """\
follow_thread(
    [
        thread_value(parse("((32,4),8):((32,1),4)"), (4, 256), element_bytes=2),
        predicate_tensor(
            Layout((1, 1, 4), (4, 0, 1)), parse("((32,4),8):((32,1),4)"), (4, 256), 1000, vector=8
        ),
    ],
    29,
)""",
    ),
]

OTHERS = {
    "transpose_copy": "A transpose kernel: which thread copies what in one pass.",
    "transpose_smem": "Its tile in shared memory: swizzled, so that a column falls into 32 banks.",
    "product_mma": "A tensor-core kernel: the fragments of its MMA atom.",
    "product_copy": "How its operand A is copied, and how the product uses it.",
}


def sample_explorer() -> str:
    """The figures of one row kernel on one page."""
    tv = parse("((128,1),8):((8,1),1)")
    memory = Layout((1, 1024), (1024, 1))
    page = {
        "thread-value": figures.thread_value(tv, (1, 1024), element_bytes=2, memory=memory, space="gX"),
        "predicate": figures.predicate_tensor(
            Layout((1, 1, 1), (1, 0, 1)), tv, (1, 1024), 3800, vector=8, column_start=3072, element_bytes=2
        ),
        "shuffles": figures.warp_shuffle(),
        "reduction buffer": figures.reduction_buffer(CLUSTER, element_bytes=8, cta=3),
        "cluster": figures.cluster_exchange(CLUSTER, element_bytes=8, cta=3),
    }
    walk = {"tile": "thread-value", "predicate": "predicate", "shuffle": "shuffles"}
    return explorer(
        page,
        title="A row of 3,800 elements over a cluster of four CTAs",
        subtitle="bf16, 128 threads a CTA, 1,024 columns a CTA; drawn for the last CTA",
        steps=row_walk(0, **walk, buffer="reduction buffer", cluster="cluster"),
    )


def imports(code: str) -> list[str]:
    """The lines that import what ``code`` names."""
    words = set(re.findall(r"\w+", code))
    values = sorted(words & {"Layout", "parse"})
    drawn = sorted(words & set(figures.__all__))
    lines = [f"from layouts import {', '.join(values)}"] if values else []
    return [*lines, f"from layouts.figures import {', '.join(drawn)}"]


def gallery_text() -> str:
    """``gallery.md``."""
    parts = [
        "# Gallery",
        "",
        "The code under each figure draws it; `python docs/layouts/gallery.py` ",
    ]
    parts[-1] += "draws them again. [A sample explorer](explorer.html) links several of them."
    for e in ENTRIES:
        parts += ["", f"## {e.heading}", "", e.words, "", f"![{e.heading}](figures/{e.name}.svg)", ""]
        parts += ["```python", *imports(e.code), "", e.code, "```"]
    parts += [
        "",
        "## From other kernels",
        "",
        "Traced from `other_kernels.py`, two kernels that are not softmax.",
    ]
    for name, words in OTHERS.items():
        parts += ["", words, "", f"![{words}](figures/{name}.svg)"]
    return "\n".join(parts) + "\n"


def access_table() -> str:
    """The table between the marks of ``access.md``: predictions, and counters where they are committed."""
    measured = {}
    source = "No counters are committed yet; the predictions stand alone."
    if COUNTERS.exists():
        found = json.loads(COUNTERS.read_text(encoding="utf-8"))
        measured = {row["name"]: row["measured"] for row in found["rows"]}
        h = found["header"]
        source = f"Measured on {h['gpu']}, driver {h['driver']}, {h['date']}: `{h['command']}`."
    lines = [
        source,
        "",
        "| kernel (128 threads) | counter | predicted | measured | |",
        "|---|---|--:|--:|---|",
    ]
    for case in measure_access.CASES:
        for counter, predicted in measure_access.predict(case).items():
            if counter.endswith("requests"):
                continue
            got = measured.get(case.name, {}).get(counter)
            note = "" if got in (None, predicted) else measure_access.EXPLAINED.get(case.name, "differs")
            verdict = "equal" if got == predicted else note
            shown = "" if got is None else f"{got:,}"
            lines.append(f"| {case.name} | {counter} | {predicted:,} | {shown} | {verdict} |")
    return "\n".join(lines)


def access_text() -> str:
    """``access.md`` with its table replaced."""
    text = (HERE / "access.md").read_text(encoding="utf-8")
    start, end = "<!-- generated: table -->", "<!-- end of table -->"
    before, after = text.split(start)[0], text.split(end)[1]
    return f"{before}{start}\n\n{access_table()}\n\n{end}{after}"


def files() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    out = {HERE / "figures" / f"{e.name}.svg": e.draw().svg() for e in ENTRIES}
    out |= {HERE / "figures" / f"{n}.svg": f.svg() for n, f in other_kernels.figures().items()}
    out |= {HERE / "figures" / f"{n}.svg": f.svg() for n, f in plans.figures().items()}
    out[HERE / "plans.md"] = plans.text()
    out[HERE / "plan_explorer.html"] = plans.plan_explorer()
    out[HERE / "explorer.html"] = sample_explorer()
    out[HERE / "gallery.md"] = gallery_text()
    out[HERE / "access.md"] = access_text()
    return out


def main() -> int:
    """Write or check."""
    complaint = "is not what docs/layouts/gallery.py writes"
    return committed.main(__doc__.splitlines()[0], files(), HERE / "figures", complaint)


if __name__ == "__main__":
    sys.exit(main())
