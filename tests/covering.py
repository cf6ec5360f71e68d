"""A few classes in the place of many: what any two of their properties do to each other is still compiled."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from heapq import heapify, heappop, heappush
from itertools import combinations


def covering(found: Iterable, *together: Sequence[str], first: Iterable = ()) -> list:
    """Some classes, `first` among them, in which all pairs of two fields' values occur that occur in `found`, and all that
    the fields of a group have `together`. With CUTE_SOFTMAX_TEST_CLASSES=all all of them, each once."""
    chosen = [*dict.fromkeys(first)]
    found = [*dict.fromkeys((*chosen, *found))]
    if os.environ.get("CUTE_SOFTMAX_TEST_CLASSES") == "all":
        return found
    has = [values(c, together) for c in found]
    left = set().union(*has).difference(*has[: len(chosen)])
    # Those that add most for what they take come first; what one adds becomes less only.
    heap = [(-len(values) / cost(c), i) for i, (c, values) in enumerate(zip(found, has, strict=True))]
    heapify(heap)
    while left:
        before, i = heappop(heap)
        now = -len(has[i] & left) / cost(found[i])
        if now > before:
            heappush(heap, (now, i))
        else:
            chosen.append(found[i])
            left -= has[i]
    return chosen


def values(c: object, together: Iterable[Sequence[str]] = ()) -> set:
    """What a class has: the values of any two fields, and of each group."""
    groups = [*combinations((f.name for f in fields(c)), 2), *map(tuple, together)]
    return {(names, *(getattr(c, name) for name in names)) for names in groups}


def cost(c: object) -> float:
    """How long a class takes to compile, roughly: its code is written out for every vector of a thread."""
    return 1 + c.steps * c.vector * getattr(c, "rows_per_thread", 1) / 40
