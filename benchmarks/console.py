"""Progress and tables in the terminal: through rich where it is installed, as plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

try:
    import rich
except ImportError:  # a GPU host may lack it
    rich = None


@dataclass
class Table:
    """Text in cells. The first column is left-aligned; `strong` cells (row, column) stand out."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    footers: list[list[str]] = field(default_factory=list)
    note: str = ""
    strong: set[tuple[int, int]] = field(default_factory=set)


class Progress(Protocol):
    """What a run reports to: one `step` before each piece of work."""

    def step(self, text: str) -> None:
        """Says what comes next."""


class _Lines:
    """A line per step on standard error, with the time since the start."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._start = time.monotonic()

    def step(self, text: str) -> None:
        self._done += 1
        seconds = time.monotonic() - self._start
        line = f"{self._title} [{self._done}/{self._total}] {seconds:5.1f} s  {text}"
        print(line, file=sys.stderr, flush=True)


class _Bar:
    """A rich progress bar; the bar moves when the next step begins."""

    def __init__(self, progress, task) -> None:
        self._progress, self._task, self._begun = progress, task, False

    def step(self, text: str) -> None:
        self._progress.update(self._task, description=text, advance=int(self._begun))
        self._begun = True


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A progress bar on a terminal, lines elsewhere."""
    if rich is None or not sys.stderr.isatty():
        yield _Lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield _Bar(bar, task)
        bar.update(task, completed=total, description="done")


def as_text(table: Table) -> str:
    """The table in plain text; strong cells carry a `*`."""
    rows = [
        [cell + ("*" if (i, j) in table.strong else "") for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, *table.footers, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * w for w in widths)
    body = [line(table.columns), rule, *map(line, rows)]
    if table.footers:
        body += [rule, *map(line, table.footers)]
    return "\n".join([table.title, *body, *([table.note] if table.note else [])])


def as_markdown(table: Table) -> str:
    """The table in GitHub's Markdown; strong cells are bold. The title is left to the page."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rows = [
        [f"**{cell}**" if (i, j) in table.strong else cell for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    head = [line(table.columns), line(["---", *["---:"] * (len(table.columns) - 1)])]
    text = "\n".join([*head, *map(line, rows), *map(line, table.footers)])
    return f"{text}\n\n{table.note}" if table.note else text


def show(table: Table) -> None:
    """Prints the table to standard output."""
    if rich is None or not sys.stdout.isatty():
        print(as_text(table), end="\n\n")
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, caption=table.note or None)
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if i else "left")
    for i, row in enumerate(table.rows):
        cells = [f"[bold]{c}*[/bold]" if (i, j) in table.strong else c for j, c in enumerate(row)]
        drawn.add_row(*cells, end_section=i == len(table.rows) - 1)
    for row in table.footers:
        drawn.add_row(*row)
    Console().print(drawn)
