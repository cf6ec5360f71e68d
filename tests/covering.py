"""A few cases in the place of many: what any two of their properties do to each other is still tested."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case")
ALL = os.environ.get("CUTE_SOFTMAX_TEST_CLASSES") == "all"


def covering(
    found: Iterable[Case],
    has: Callable[[Case], set],
    cost: Callable[[Case], float],
    first: Iterable[Case] = (),
) -> list[Case]:
    """Some cases, `first` among them, that have all that those of `found` have.

    With CUTE_SOFTMAX_TEST_CLASSES=all all of them.
    """
    chosen = [*first]
    found = [*chosen, *found]
    if ALL:
        return found
    sets = [has(case) for case in found]
    left = set().union(*sets).difference(*sets[: len(chosen)])
    # What adds most for what it costs comes first; what one adds becomes less only.
    heap = [(-len(s) / cost(case), i) for i, (case, s) in enumerate(zip(found, sets, strict=True))]
    heapify(heap)
    while left:
        before, i = heappop(heap)
        now = -len(sets[i] & left) / cost(found[i])
        if now > before:
            heappush(heap, (now, i))
        else:
            chosen.append(found[i])
            left -= sets[i]
    return chosen


def pairs(properties: Iterable) -> set:
    """Any two of some properties."""
    return {*combinations(properties, 2)}


# What an architecture changes, where it does not change all.
ARCHITECTURES = ("architecture", "math", "dtypes", "cluster_n", "threads")


def of_class(c: object, config: Sequence[str] = ()) -> set:
    """What a Plan class has: its configuration, of as many tensors as a thread keeps; the values of any two of the
    fields that its configuration does not have; and any two of what an architecture changes."""
    names = [f.name for f in fields(c) if f.name not in (*config, "architecture")]
    chosen = len(c.access), *(getattr(c, name) for name in config)
    return (
        pairs((n, getattr(c, n)) for n in names) | pairs((n, getattr(c, n)) for n in ARCHITECTURES) | {chosen}
    )


def cost_of_class(c: object) -> float:
    """How long a class takes to compile, roughly: its code is written out for every vector of a thread."""
    return 1 + c.steps * c.vector * getattr(c, "rows_per_thread", 1) / 40


def check_covered(found: Collection[Case], chosen: Collection[Case], has: Callable[[Case], set]) -> None:
    """Nothing is left out, and fewer cases remain."""
    assert set().union(*map(has, found)) <= set().union(*map(has, chosen))
    assert ALL or len(chosen) < len(found)
