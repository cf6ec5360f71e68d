"""What results must reach (and should): one table, and the judgement of a results file by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .cases import FORWARD_BACKWARD, GRAD, NO_GRAD, SUITES, WARM_STORE
from .report import best_peer, format_time, geometric_mean
from .results import Results, Row, cells

OURS = "cute_softmax"

Cell = dict[str, Row]


@dataclass(frozen=True)
class Requirement:
    """A bound on `metric` over the cells of `suite` with these columns (all when empty), mode and method.

    `METRICS` says whether it bounds from below or above. `aim` is reported, never enforced; without `must`
    the figures need only be there.
    """

    suite: str
    metric: str
    must: float | None
    aim: float | None = None
    columns: tuple[int, ...] = ()
    mode: str = ""
    method: str = "events-cold"


@dataclass(frozen=True)
class Metric:
    """`value(cell)` of one cell, None without a figure; the worst cell counts, or `combine` of all."""

    title: str
    value: Callable[[Cell], float | None]
    at_least: bool
    text: Callable[[float], str] = "{:.3f}".format
    combine: Callable[[list[float]], float] | None = None


def _figure(cell: Cell, key: str) -> float | None:
    return cell.get(OURS, {}).get(key)


def _behind(cell: Cell) -> float | None:
    best, us = best_peer(cell), _figure(cell, "us")
    return None if best is None or us is None else us / cell[best]["us"] - 1


METRICS = {
    "mean_vs_copy": Metric(
        "geometric mean of the ratio to copy", lambda c: _figure(c, "vs_copy"), True, combine=geometric_mean
    ),
    "vs_copy": Metric("ratio to copy", lambda c: _figure(c, "vs_copy"), True),
    "behind_peer": Metric("time over the best peer's", _behind, False, "{:+.1%}".format),
    "vs_torch": Metric("host time over torch's", lambda c: _figure(c, "vs_torch"), False, "{:.2f}".format),
    "us": Metric("time", lambda c: _figure(c, "us"), False, format_time),
}

_MIDDLE = (256, 1024, 4096, 8192, 32768)
_LONG = (65536, 131072, 262144)

REQUIREMENTS = (
    Requirement("rows-forward", "mean_vs_copy", must=0.97, aim=1.0),
    Requirement("rows-forward", "behind_peer", must=0.015, aim=0.0),
    Requirement("small-rows", "behind_peer", must=0.02),
    Requirement("small-rows", "vs_copy", must=None, aim=1.0),
    Requirement("long-rows", "vs_copy", must=0.90, aim=0.97),
    Requirement("odd-rows", "vs_copy", must=0.85, aim=0.95),
    Requirement("rows-backward", "vs_copy", must=0.95, aim=1.0, columns=_MIDDLE),
    Requirement("rows-backward", "behind_peer", must=0.015, columns=_MIDDLE),
    Requirement("rows-backward", "vs_copy", must=0.90, aim=0.97, columns=_LONG),
    Requirement("fp32-rows", "vs_copy", must=0.95, aim=0.99),
    Requirement("overhead", "vs_torch", must=1.0, mode=NO_GRAD, method="host-clock"),
    Requirement("overhead", "vs_torch", must=1.5, mode=GRAD, method="host-clock"),
    Requirement("overhead", "vs_torch", must=1.5, mode=FORWARD_BACKWARD, method="host-clock"),
    Requirement("first-call", "us", must=1e6, aim=2e5, mode=WARM_STORE, method="fresh-process"),
)


@dataclass(frozen=True)
class Verdict:
    """One requirement against one file. `value` is None, and nothing is met, when figures are missing."""

    requirement: Requirement
    value: float | None
    where: str

    def _within(self, bound: float) -> bool:
        if self.value is None:
            return False
        return self.value >= bound if METRICS[self.requirement.metric].at_least else self.value <= bound

    @property
    def met(self) -> bool:
        """Whether the result is what it must be."""
        must = self.requirement.must
        return self.value is not None if must is None else self._within(must)

    def __str__(self) -> str:
        r = self.requirement
        metric = METRICS[r.metric]
        scope = ", ".join(
            filter(None, (r.mode, "N = " + ", ".join(map(str, r.columns)) if r.columns else ""))
        )
        sign = ">=" if metric.at_least else "<="
        found = "no figure" if self.value is None else metric.text(self.value)
        text = (
            f"{'pass' if self.met else 'FAIL'}  {r.suite}: {metric.title}{f' ({scope})' if scope else ''}: "
        )
        text += f"{found} {self.where}".rstrip()
        if r.must is not None:
            text += f"; must {sign} {metric.text(r.must)}"
        if r.aim is not None:
            text += f"; aim {sign} {metric.text(r.aim)}{' (reached)' if self._within(r.aim) else ''}"
        return text


def _judge_one(requirement: Requirement, results: Results) -> Verdict:
    metric = METRICS[requirement.metric]
    by_case = {
        (key[1], key[4]): cell for key, cell in cells(results.rows).items() if key[5] == requirement.method
    }
    found: list[tuple[float, str]] = []
    for case in SUITES[requirement.suite].cases:
        if case.mode != requirement.mode:
            continue
        if requirement.columns and case.shape[-1] not in requirement.columns:
            continue
        value = metric.value(by_case.get((case.shape, case.mode), {}))
        if value is None:
            return Verdict(requirement, None, f"at {case.label}")
        found.append((value, case.label))
    if metric.combine:
        return Verdict(requirement, metric.combine([value for value, _ in found]), "")
    value, label = (min if metric.at_least else max)(found)
    return Verdict(requirement, value, f"at {label}")


def judge(results: Results) -> Iterator[Verdict]:
    """A verdict for each requirement on the suite of `results`."""
    for requirement in REQUIREMENTS:
        if requirement.suite == results.suite:
            yield _judge_one(requirement, results)
