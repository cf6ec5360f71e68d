"""Commands of the benchmarks, which a checkout has and a wheel does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(arguments: Sequence[str], root: Path = ROOT) -> int:
    """What `python -m benchmarks` does with some arguments; FileNotFoundError outside a checkout."""
    if not (root / "benchmarks" / "__main__.py").exists():
        raise FileNotFoundError(
            "the benchmarks are in the repository, not in the installed package: get a checkout of it, "
            "pip install -e '.[cli,bench]' there, and run this again"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from benchmarks.__main__ import main

    return main(list(arguments))
