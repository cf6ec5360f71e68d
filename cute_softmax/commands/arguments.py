"""Arguments that commands share."""

from __future__ import annotations

import argparse


def shape(text: str) -> tuple[int, ...]:
    """The shape written as "4096x8192"."""
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = (-1,)
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"a shape is written 4096x8192, not {text!r}")
    return sizes


def dims(text: str) -> tuple[int, ...]:
    """The dimension or dimensions written as "-1" or "1,2"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"dimensions are written -1 or 1,2, not {text!r}") from None
