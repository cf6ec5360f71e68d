"""Generated files that are committed: written, or compared with what is there; and their tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column to the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(description: str, wanted: dict[Path, str], figures: Path, complaint: str) -> int:
    """Write `wanted` (file -> text), or with --check name on stderr each file that differs or that `figures` holds
    in vain, followed by `complaint`. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only compare with the committed files")
    if parser.parse_args().check:
        old = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        stray = [p for p in figures.glob("*.svg") if p not in wanted]
        root = Path(__file__).resolve().parents[1]
        for path in [*old, *stray]:
            print(f"{path.relative_to(root)} {complaint}", file=sys.stderr)
        return 1 if old or stray else 0
    figures.mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0
