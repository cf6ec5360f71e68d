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


def of_class(c: object, config: Sequence[str] = ()) -> set:
    """What a Plan class has: its configuration, of as many tensors as a thread keeps; the values of any two of the
    fields that its configuration does not have; and any two of what an architecture changes.

    Of its dtypes, which its math decides as well, those of the elements and of the results."""
    ends = {"input": c.dtypes[0], "output": c.dtypes[-1]}
    has = {f.name: getattr(c, f.name) for f in fields(c) if f.name not in (*config, "architecture", "dtypes")}
    changed = {name: getattr(c, name) for name in ("architecture", "math", "cluster_n", "threads")}
    chosen = len(c.access), *(getattr(c, name) for name in config)
    return pairs((has | ends).items()) | pairs((changed | ends).items()) | {chosen}


def cost_of_class(c: object) -> float:
    """How long a class takes to compile, roughly: its code is written out for every vector of a thread."""
    return 1 + c.steps * c.vector * getattr(c, "rows_per_thread", 1) / 40


def check_covered(found: Collection[Case], chosen: Collection[Case], has: Callable[[Case], set]) -> None:
    """Nothing is left out, and fewer cases remain."""
    assert set().union(*map(has, found)) <= set().union(*map(has, chosen))
    assert ALL or len(chosen) < len(found)
