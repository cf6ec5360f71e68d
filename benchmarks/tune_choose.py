"""Which of the measured configurations make up a list: as few as hold every length at nearly the best time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

STAYS = 0.98  # of an incumbent's time: what does not beat it by 2% in both passes does not take its place
PENALTY = 0.01  # of one length's time: what a class more must save
# Of the logarithm of the time of few rows, beside that of many: few threads that have many vectors each may be the
# fastest for many short rows, and take half as long again where there are few (docs/experiments.md, "Filled steps").
FEW_WEIGHT = 0.25


@dataclass
class Measured:
    """A configuration's times in microseconds by length, one a pass; `longest` of the lengths that it holds at all;
    `taken`: those that it holds in the table as it is; `few`: of short rows, the time of a call of few of them;
    `classes`: by length what is compiled, where that is not the same for all."""

    config: Hashable
    longest: int
    incumbent: bool = False
    us: dict[int, list[float]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    few: dict[int, float] = field(default_factory=dict)
    classes: dict[int, Hashable] = field(default_factory=dict)

    def time(self, length: int) -> float | None:
        """What counts: the best time of an incumbent, less what it may be beaten by, and the worst of another's; with
        the weight that few rows have."""
        found = self.us.get(length)
        if not found:
            return None
        counted = min(found) * STAYS if self.incumbent else max(found)
        return counted * self.few.get(length, 1.0) ** FEW_WEIGHT


def together(found: Sequence[Sequence[Measured]]) -> list[Measured]:
    """What was measured in several dtypes as one: at each length the geometric mean of its times, pass by pass."""
    first, *others = ({m.config: m for m in measured} for measured in found)
    made = []
    for config, m in first.items():
        all_of = [m, *(other[config] for other in others if config in other)]
        if len(all_of) < len(found):
            continue  # it is none in one of them: what spills, say
        shared = set.intersection(*(set(one.us) for one in all_of))
        us = {
            n: [math.prod(t) ** (1 / len(t)) for t in zip(*(one.us[n] for one in all_of), strict=True)]
            for n in shared
        }
        few = {n: math.prod(one.few[n] for one in all_of) ** (1 / len(all_of)) for n in shared & set(m.few)}
        made.append(
            Measured(
                config, min(one.longest for one in all_of), m.incumbent, us, m.taken & shared, few, m.classes
            )
        )
    return [m for m in made if m.us]


def with_others(
    picked: Sequence[Measured],
    measured: Sequence[Measured],
    known: Iterable[Hashable],
    holds: Callable[[Hashable], float] | None = None,
) -> list[Hashable]:
    """The chosen configurations, and those of a table that are there for other shapes and GPUs: that none of the calls
    is planned with, or that hold more than all chosen ones, as columns of narrower vectors are half as long.

    holds: the longest that one does; of panels that depends on the shape, and is taken from the calls. One that holds
    what lies between two of the lengths keeps its place by that; any other comes behind the first that holds as much,
    and takes no length from it.
    """
    found = {m.config: m for m in measured}
    most = max(m.longest for m in picked)
    holds = holds or (lambda config: found[config].longest if config in found else math.inf)
    lengths = {n for m in measured for n in m.us}
    before: list[list[Hashable]] = [[] for _ in picked]
    behind: list[list[Hashable]] = [[] for _ in picked]
    chosen = [m.config for m in picked]
    for config in known:
        m = found.get(config)
        if config in chosen or (m and m.taken and m.longest <= most):
            continue
        place = next((i for i, one in enumerate(chosen) if holds(one) >= holds(config)), -1)
        shorter = holds(chosen[place - 1]) if place > 0 else 0
        own = place < 0 or any(shorter < n <= holds(config) for n in lengths)
        (behind if own else before)[place].append(config)
    together = zip(before, chosen, behind, strict=True)
    return [config for front, one, rest in together for config in (*sorted(front, key=holds), one, *rest)]


def best_times(measured: Sequence[Measured], lengths: Sequence[int]) -> dict[int, float]:
    """The least time of each length that has one."""
    found = {n: [t for m in measured if (t := m.time(n)) is not None] for n in lengths}
    return {n: min(times) for n, times in found.items() if times}


def chain(measured: Sequence[Measured], lengths: Sequence[int], most: int) -> list[Measured]:
    """Configurations of at most `most` classes, the shortest capacity first, whose times over all lengths have the
    least geometric mean; each length is held by the first that it fits.

    Raises ValueError where no such list holds every length that has a time.
    """
    best = best_times(measured, lengths)
    served = [n for n in sorted(lengths) if n in best]
    # states[p]: the chains that hold the first p lengths, as (cost, configurations), by the number of their classes.
    states: list[dict[int, tuple[float, tuple[Measured, ...]]]] = [{0: (0.0, ())}]
    states += [{} for _ in served]
    for begin in range(len(served)):
        if not states[begin]:
            continue
        for one in measured:
            # Every length up to the longest that fits is this one's: it comes first in the list.
            end = sum(n <= one.longest for n in served)
            times = [one.time(n) for n in served[begin:end]]
            if not times or None in times:
                continue
            more = len({one.classes.get(n) for n in served[begin:end]})
            cost = PENALTY * more
            cost += sum(math.log(t / best[n]) for t, n in zip(times, served[begin:], strict=False))
            for count, (before, taken) in states[begin].items():
                known = states[end].get(count + more)
                if count + more <= most and (known is None or before + cost < known[0]):
                    states[end][count + more] = (before + cost, (*taken, one))
    if not states[-1]:
        raise ValueError(
            f"no list of at most {most} classes, of {len(measured)} configurations, holds all {len(served)} lengths"
        )
    return list(min(states[-1].values(), key=lambda found: found[0])[1])


def single(measured: Sequence[Measured], lengths: Sequence[int]) -> Measured:
    """The one whose times over all lengths have the least geometric mean; ValueError where none has all times."""
    whole = [m for m in measured if all(m.time(n) is not None for n in lengths)]
    if not whole:
        raise ValueError(f"none of {len(measured)} configurations was measured at all {len(lengths)} lengths")
    return min(whole, key=lambda m: sum(math.log(m.time(n)) for n in lengths))


def holders(chosen: Sequence[Measured], lengths: Iterable[int]) -> dict[int, Measured]:
    """By length, the first of a list that holds it; none of what is longer than all hold."""
    ordered = sorted(chosen, key=lambda m: m.longest)
    found = {n: next((m for m in ordered if n <= m.longest), None) for n in lengths}
    return {n: m for n, m in found.items() if m is not None}
