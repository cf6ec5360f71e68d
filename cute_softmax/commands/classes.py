"""`classes` and `precompile`: what there is to compile, listed or compiled into the store."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from ..plan import MATHS, RowClass, table_of
from ..plan.catalogue import (
    classes,
    longest_row,
    of_few_rows,
    of_long_rows,
    of_shared_rows,
    operand_dtypes,
    used_dtypes,
)
from ..plan.hardware import Device
from ..plan.maths import MOST
from .plans import device

KINDS = classes, of_shared_rows, of_few_rows  # of rows that are held
NAMES = tuple(dict.fromkeys(name for name, _ in MATHS))


def listed(gpu: Device, dtype: str) -> Iterable[tuple[str, ...]]:
    """The rows of the list of classes, under a head, math by math."""
    yield "math", "class", "longest row", "CTAs x threads a row", "vectors a thread", "smem a CTA"
    table = table_of(gpu.table)
    for math in NAMES:
        which = math, gpu.architecture, operand_dtypes(math, dtype)
        for c in (*(c for kind in KINDS for c in kind(*which, table=table)), *of_long_rows(*which)):
            threads, longest = f"{c.cluster_n} x {c.threads_per_row}", longest_row(c)
            told = "any" if longest == MOST else f"{longest:,}"
            yield math, c.name, told, threads, str(c.steps), f"{c.shared_memory:,} B"


def show(arch: str | None, dtype: str) -> int:
    """Print the list."""
    gpu = device(arch)
    rows = list(listed(gpu, dtype))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    print(
        f'\n{gpu.architecture.name}, {dtype}. Those that follow a math\'s longest are for few rows, and "any" for many '
        "long ones that are read alone. Each with vectors exists a second time, as NAME_edges, for rows that begin or "
        "end off a vector boundary."
    )
    return 0


def compile_all(arch: str | None, dtypes: Iterable[str], recorded: Path | None) -> int:
    """Compile what is recorded, or else all classes of some dtypes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..runtime import precompile, record
    from ..runtime.cache import Store

    wanted = record.read(recorded) if recorded else list(of_dtypes(device(arch), dtypes))
    compiled = precompile.precompile(wanted)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(wanted))
        for c in compiled:
            bar.update(task, advance=1, description=f"{c.math} {c.dtypes[0]} {c.name}")
    architectures = ", ".join(dict.fromkeys(c.architecture for c in wanted)) or "no architecture"
    print(f"{len(wanted)} kernels for {architectures} in {Store().root}")
    return 0


def of_dtypes(gpu: Device, dtypes: Iterable[str]) -> Iterable[RowClass]:
    """All classes of some dtypes, of all row maths."""
    table = table_of(gpu.table)
    for dtype, math in product(dict.fromkeys(dtypes), NAMES):
        for operands in used_dtypes(math, dtype):
            which = math, gpu.architecture, operands
            for edges, kind in product((False, True), KINDS):
                yield from kind(*which, edges=edges, table=table)
            for edges in (False, True):
                yield from of_long_rows(*which, edges=edges)
