"""`python -m cute_softmax`, which is `cute-softmax`: see `commands.line`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, 1 for a wrong result, 2 for what cannot be done."""
    try:
        import click  # noqa: F401
    except ModuleNotFoundError:
        print("error: the command line needs click: pip install 'cute-softmax[cli]'", file=sys.stderr)
        return 2
    from .commands.line import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
