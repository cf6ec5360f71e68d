"""Code of the kernels for the pages, as it stands in the source: what a page shows is what runs."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "cute_softmax" / "kernels"
ROW, WORK, MATHS, REDUCE = "row.py", "row_work.py", "maths/maths.py", "common/reduce.py"


def function(path: str, name: str) -> list[str]:
    """The lines of a function, or of a method written Class.method. Raises ValueError where there is none."""
    text = (KERNELS / path).read_text(encoding="utf-8")
    found: ast.AST = ast.parse(text)
    for part in name.split("."):
        inner = {node.name: node for node in ast.iter_child_nodes(found) if hasattr(node, "name")}
        if part not in inner:
            raise ValueError(f"{path} has no {name}")
        found = inner[part]
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return text.splitlines()[first - 1 : found.end_lineno]


def stretches(lines: list[str], parts: tuple[tuple[str, str], ...]) -> Iterator[list[str]]:
    """From a line that begins with the first words of a part to the next one that begins with the last.

    Raises ValueError where no line or several begin so.
    """
    at = 0
    for first, last in parts:
        begins = [i for i, line in enumerate(lines) if line.strip().startswith(first)]
        if len(begins) != 1 or begins[0] < at:
            raise ValueError(f"{len(begins)} lines begin with {first!r}")
        ends = [i for i, line in enumerate(lines) if i >= begins[0] and line.strip().startswith(last)]
        if not ends:
            raise ValueError(f"no line behind {first!r} begins with {last!r}")
        at = ends[0] + 1
        yield lines[begins[0] : at]


def excerpt(path: str, name: str, *parts: tuple[str, str]) -> str:
    """A function, or some stretches of it with dots for what is between them, and where it stands."""
    lines = function(path, name)
    shown: list[str] = []
    for part in stretches(lines, parts) if parts else [lines]:
        if shown:
            indent = len(part[0]) - len(part[0].lstrip())
            shown.append(f"{' ' * indent}...")
        shown += part
    code = textwrap.dedent("\n".join(shown))
    link = f"../cute_softmax/kernels/{path}"
    # As it is in the source, where it stands further in: not as ruff would have it here.
    shown_as = f"<!-- fmt: off -->\n\n```py\n{code}\n```\n\n<!-- fmt: on -->"
    return f"{shown_as}\n\n`{name.rpartition('.')[2]}` of [`kernels/{path}`]({link})"


BLOCKS = {
    "code of coordinates": partial(excerpt, ROW, "RowKernel.kernel", ("# Coordinates:", 'observe("tXcX"')),
    "code of shared memory": partial(
        excerpt, ROW, "RowKernel.kernel", ("# Shared memory:", "cute.arch.cluster_arrive_relaxed")
    ),
    "code of shares": partial(excerpt, WORK, "share_of"),
    "code of a tile": partial(
        excerpt,
        ROW,
        "RowKernel.tile",
        ("def tile", "def tile"),
        ("held = ", "held = "),
        ("maths = [", "self.finish("),
    ),
    "code of held rows": partial(
        excerpt,
        ROW,
        "RowKernel.hold",
        ("def hold", "edges = "),
        ("values = [", "]"),
        ("return Held", "return"),
    ),
    "code of the end": partial(
        excerpt, ROW, "RowKernel.finish", ("def finish", "thread has kept"), ("for m in", "self.store(")
    ),
    "code of partitions": partial(excerpt, WORK, "partition"),
    "code of loads": partial(excerpt, ROW, "RowKernel.load"),
    "code of partials": partial(
        excerpt,
        MATHS,
        "Softmax.partial",
        ("def partial", "(x,) = values"),
        ("if stage == 0", "(seen,) = MAX"),
        ("ref, kept", "return ((seen"),
    ),
    "code of reductions": partial(excerpt, ROW, "RowKernel.reduce"),
    "code of the exchange": partial(
        excerpt, REDUCE, "across_warps", ("rows, (warps_per_row, _)", "return op.lanes")
    ),
    "code of results": partial(excerpt, MATHS, "Softmax.results"),
    "code of stores": partial(excerpt, ROW, "RowKernel.store"),
}
