"""What results must reach (and should): one table, and the judgement of a results file by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from . import sharded_judge
from .cases import (
    AND_CAUSAL,
    CAUSAL,
    CHOSEN,
    DEPTH,
    FEW_ROWS,
    FORWARD_BACKWARD,
    GRAD,
    GROUP_BIAS,
    GROUP_MASK,
    IN_TURN,
    INVARIANT,
    ITEM_BYTES,
    MASK,
    NO_GRAD,
    RECOMPUTED,
    ROW_MASK,
    SCALED,
    T_A_ROW,
    TEMPERATURE,
    TO,
    WARM_STORE,
    WITH_ENTROPY,
    Case,
)
from .map_cells import SLICES
from .map_judge import MapVerdict
from .map_judge import judge as judge_map
from .report import best_peer, format_time, geometric_mean
from .results import Key, Results, Row, cells
from .suites import INVARIANT_SHAPES, SUITES, VOCABULARIES

OURS = "cute_softmax"

Cell = dict[str, Row]
Cells = Callable[[Case], Cell]


@dataclass(frozen=True)
class Requirement:
    """A bound on `metric` over the cells of `suite` with these shapes and this op (all when empty), mode and method.

    `METRICS` says whether it bounds from below or above. `aim` is reported, never enforced; without `must`
    the figures need only be there.
    """

    suite: str
    metric: str
    must: float | None
    aim: float | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    mode: str = ""
    method: str = "events-cold"

    @property
    def cases(self) -> list[Case]:
        """The cases it is about."""
        return [
            case
            # The element type that the suite itself stands for.
            for case in SUITES[self.suite].with_dtype("bf16").cases
            if case.mode == self.mode
            and (not self.shapes or case.shape in self.shapes)
            and self.op in ("", case.op)
        ]


@dataclass(frozen=True)
class Metric:
    """`value(at, case)` for one case, where `at` finds the cell of a case, or None without a figure.

    The worst case counts, or `combine` of all.
    """

    title: str
    value: Callable[[Cells, Case], float | None]
    at_least: bool
    text: Callable[[float], str] = "{:.3f}".format
    combine: Callable[[list[float]], float] | None = None


def _ours(key: str) -> Callable[[Cells, Case], float | None]:
    return lambda at, case: at(case).get(OURS, {}).get(key)


_us = _ours("us")


def _behind(at: Cells, case: Case) -> float | None:
    best, us = best_peer(at(case)), _us(at, case)
    return None if best is None or us is None else us / at(case)[best]["us"] - 1


def _over(other: Callable[[Case], Case]) -> Callable[[Cells, Case], float | None]:
    """Our time of a case over that of another one."""

    def value(at: Cells, case: Case) -> float | None:
        ours, others = _us(at, case), _us(at, other(case))
        return None if ours is None or others is None else ours / others

    return value


def _plain(case: Case, **changes: str) -> Case:
    """A case outside of its mode."""
    return replace(case, mode="", **changes)


def _unmasked(case: Case) -> Case:
    return replace(case, mode=case.mode.removesuffix(AND_CAUSAL))


def _over_provider(provider: str, key: str) -> Callable[[Cells, Case], float | None]:
    def value(at: Cells, case: Case) -> float | None:
        ours, theirs = (at(case).get(name, {}).get(key) for name in (OURS, provider))
        return None if ours is None or not theirs else ours / theirs

    return value


def _memory_over_scores(at: Cells, case: Case) -> float | None:
    peak = _ours("peak_bytes")(at, case)
    return None if peak is None else peak / (case.elements * ITEM_BYTES[case.dtype])


METRICS = {
    "mean_vs_copy": Metric(
        "geometric mean of the ratio to copy", _ours("vs_copy"), True, combine=geometric_mean
    ),
    "vs_copy": Metric("ratio to copy", _ours("vs_copy"), True),
    "behind_peer": Metric("time over the best peer's", _behind, False, "{:+.1%}".format),
    "over_softmax": Metric(
        "time over softmax's own", _over(partial(_plain, op="softmax")), False, "{:.2f}".format
    ),
    "over_logsumexp": Metric(
        "time over logsumexp's own", _over(partial(_plain, op="logsumexp")), False, "{:.2f}".format
    ),
    "vs_torch": Metric("host time over torch's", _ours("vs_torch"), False, "{:.2f}".format),
    "over_torch": Metric("time over torch's", _over_provider("torch", "us"), False, "{:.2f}".format),
    "memory_over_torch": Metric(
        "memory over torch's", _over_provider("torch", "peak_bytes"), False, "{:.2f}".format
    ),
    "memory_over_scores": Metric("memory over the scores' own", _memory_over_scores, False, "{:.3f}".format),
    "over_quack": Metric(
        "time over QuACK's and a product's", _over_provider("quack", "us"), False, "{:.2f}".format
    ),
    "over_unmasked": Metric("time over its own without a mask", _over(_unmasked), False, "{:.2f}".format),
    "over_plain": Metric("time over its own outside the mode", _over(_plain), False, "{:.2f}".format),
    "us": Metric("time", _us, False, format_time),
}

_MIDDLE = ((32768, 256), (32768, 1024), (16384, 4096), (8192, 8192), (4096, 32768))
_LONG = ((4096, 65536), (2048, 131072), (8192, 262144))
_PRODUCTS = ((32, 4096, 4096), (8, 8192, 8192), (1, 16384, 16384))
_VOCABULARIES = tuple((2048, n) for n in VOCABULARIES)
_LOGITS = ((4096, 151936), (8192, 32768))
_FEW_ROWS_US = {
    (1, 128256): 2.8, (8, 151936): 3.5, (64, 128256): 7.0, (8, 1048576): 9.0, (64, 1048576): 70.0,
}  # fmt: skip


def _invariant(must: float | None, aim: float | None, shapes: tuple[tuple[int, ...], ...]) -> Requirement:
    return Requirement(
        "batch-invariant", "over_plain", must, aim, shapes, mode=INVARIANT, method="graph-warm"
    )


def _over_softmax_at(must: float, mode: str, shape: tuple[int, ...]) -> Requirement:
    return Requirement("masked", "over_softmax", must, op="masked_softmax", mode=mode, shapes=(shape,))


REQUIREMENTS = (
    Requirement("rows-forward", "mean_vs_copy", must=0.97, aim=1.0),
    Requirement("rows-forward", "behind_peer", must=0.015, aim=0.0),
    Requirement("small-rows", "behind_peer", must=0.02),
    Requirement("small-rows", "vs_copy", must=None, aim=1.0),
    Requirement("long-rows", "vs_copy", must=0.90, aim=0.97),
    Requirement("odd-rows", "vs_copy", must=0.85, aim=0.95),
    Requirement("rows-backward", "vs_copy", must=0.95, aim=1.0, shapes=_MIDDLE),
    Requirement("rows-backward", "behind_peer", must=0.015, shapes=_MIDDLE),
    Requirement("rows-backward", "vs_copy", must=0.90, aim=0.97, shapes=_LONG),
    Requirement("fp32-rows", "vs_copy", must=0.95, aim=0.99),
    Requirement("columns-forward", "vs_copy", must=0.90, aim=0.98),
    Requirement("columns-tall", "vs_copy", must=0.80, aim=0.95),
    Requirement("columns-backward", "vs_copy", must=0.75, aim=0.95),
    Requirement("any-dims", "vs_copy", must=0.85, aim=0.95),
    Requirement("odd-columns", "vs_copy", must=0.58, aim=0.90),
    Requirement("split-rows", "vs_copy", must=0.85, aim=0.97, shapes=((512, 1048576), (64, 16777216))),
    Requirement("split-rows", "vs_copy", must=0.80, aim=0.97, shapes=((64, 3000001),)),
    # Beyond what the chip holds: the row is read twice.
    Requirement("split-rows", "vs_copy", must=0.62, aim=0.66, shapes=((4, 268435456),)),
    Requirement("few-rows", "behind_peer", must=0.0, method="graph-warm"),
    *(
        Requirement(suite, "behind_peer", must=0.0, mode=mode, method="graph-warm")
        for suite in ("sampling", "sampling-fp32")
        for mode in (f"{TEMPERATURE}1", T_A_ROW)
    ),
    *(
        Requirement("few-rows", "us", must=None, aim=us, shapes=(shape,), method="graph-warm")
        for shape, us in _FEW_ROWS_US.items()
    ),
    # Few rows lose what their own configurations gain, many nothing; odd lengths are loaded by the element.
    _invariant(1.5, 1.05, tuple(s for s in INVARIANT_SHAPES if s[0] < FEW_ROWS and not s[1] % 8)),
    _invariant(1.05, 1.0, tuple(s for s in INVARIANT_SHAPES if s[0] >= FEW_ROWS and not s[1] % 8)),
    _invariant(None, 1.5, tuple(s for s in INVARIANT_SHAPES if s[1] % 8)),
    Requirement("reductions", "vs_copy", must=0.90, aim=0.97, op="logsumexp", shapes=((32768, 50304),)),
    Requirement(
        "reductions", "over_softmax", must=1.0, op="logsumexp", shapes=((1, 151936),), method="graph-warm"
    ),
    *(
        Requirement("family", "vs_copy", must=must, op=op)
        for op, must in (
            ("softmax", 0.95),
            ("log_softmax", 0.95),
            ("logsumexp", 0.90),
            ("log_softmax_backward", 0.95),
        )
    ),
    *(
        Requirement("vocabularies", metric, must=must, op=op, shapes=_VOCABULARIES)
        for op in ("softmax", "log_softmax", "logsumexp", "softmax_backward", "log_softmax_backward")
        for metric, must in (("vs_copy", 0.90), ("behind_peer", 0.015))
    ),
    # Arithmetic is the bound where 16 bits become 32.
    *(
        Requirement(
            "vocabularies", "vs_copy", must=None, aim=0.90, op=op, mode=f"{TO}fp32", shapes=_VOCABULARIES
        )
        for op in ("softmax", "log_softmax")
    ),
    # Of torch's matrices (log-probabilities, their gradient, that of the logits) only the last is there.
    *(
        Requirement("selective", metric, must=must, op=op, shapes=((8192, 151936),))
        for op, time, memory in (
            ("selective_log_softmax", 0.5, 0.01),
            ("selective_gradient", 0.5, 0.34),
        )
        for metric, must in (("over_torch", time), ("memory_over_torch", memory))
    ),
    # A read and a write; of two reads and a write the yardstick is as many bytes, a copy and a half.
    *(
        Requirement("cross-entropy", "vs_copy", must=1 / must, mode=mode, shapes=shapes)
        for mode, must, shapes in (
            ("", 1.10, _LOGITS),
            ("", 1.60, ((512, 151936),)),
            (RECOMPUTED, 1.55, _LOGITS),
        )
    ),
    *(
        Requirement("information", "over_logsumexp", must=must, mode=f"{CHOSEN}{k}")
        for k, must in ((8, 1.15), (128, 1.5))
    ),
    Requirement("cross-entropy", "memory_over_scores", must=1.01, shapes=_LOGITS),
    Requirement("selective", "vs_copy", must=1.5 / 1.55, op="selective_gradient"),
    Requirement(
        "selective", "vs_copy", must=1.5 / 1.60, op="selective_gradient", mode=WITH_ENTROPY, shapes=_LOGITS
    ),
    *(
        Requirement(suite, "behind_peer", must=0.015, mode=mode)
        for suite in ("routers", "routers-fp32")
        for mode in dict.fromkeys(case.mode for case in SUITES[suite].cases)
    ),
    # Half of the scores is not read.
    *(_over_softmax_at(0.82, CAUSAL, shape) for shape in ((64, 4096, 4096),)),
    # Within 3% of the bytes: a mask of the scores' shape is a byte beside four.
    *(
        _over_softmax_at(must, mode, (32768, 4096))
        for mode, must in ((SCALED, 1.03), (MASK, 1.29), (ROW_MASK, 1.03))
    ),
    # What is one for all groups is hardly any bytes.
    *(
        Requirement("scores", "over_softmax", must=1.15, op="masked_softmax", mode=mode)
        for mode in (SCALED, GROUP_MASK, GROUP_BIAS)
    ),
    Requirement("fp32-any", "vs_copy", must=0.85, aim=0.97),
    Requirement("views", "vs_copy", must=0.85, aim=0.95),
    # The yardstick is the product alone: 1.3, 1.4 and 1.6 times its time; of few rows a copy of as many bytes.
    *(
        Requirement("matmul", "vs_copy", must=must, aim=aim, mode=f"{DEPTH}{depth}", shapes=shapes)
        for depth, shapes, must, aim in (
            (64, ((32, 4096, 4096),), 1 / 1.3, 1 / 1.05),
            (128, _PRODUCTS, 1 / 1.3, 1 / 1.05),
            (128, ((64, 2048, 2048),), 1 / 1.4, 1 / 1.1),
            (128, ((16, 4097, 4095),), 1 / 1.6, 1 / 1.2),
            (128, ((32, 1, 131072), (32, 16, 131072)), 0.7, 0.9),
        )
    ),
    Requirement("matmul", "over_quack", must=1 / 2.2, mode=f"{DEPTH}64", shapes=((32, 4096, 4096),)),
    Requirement("matmul", "over_quack", must=1 / 2.2, mode=f"{DEPTH}128", shapes=_PRODUCTS),
    Requirement("matmul", "over_unmasked", must=0.7, aim=0.58, mode=f"{DEPTH}128{AND_CAUSAL}"),
    # Beyond the gradient of the scores there is that of the values, and two numbers a row.
    *(
        Requirement("matmul-backward", metric, must=must, mode=f"{DEPTH}128", shapes=((32, 4096, 4096),))
        for metric, must in (("over_torch", 1 / 1.8), ("memory_over_scores", 1.05))
    ),
    Requirement("overhead", "vs_torch", must=1.0, mode=NO_GRAD, method="host-clock"),
    Requirement("overhead", "vs_torch", must=1.5, aim=1.35, mode=GRAD, method="host-clock"),
    Requirement("overhead", "vs_torch", must=1.5, aim=1.15, mode=FORWARD_BACKWARD, method="host-clock"),
    Requirement("overhead", "vs_torch", must=1.2, mode=IN_TURN, method="host-clock"),
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
        # A single shape is named already, as the place of the worst.
        shapes = [" x ".join(map(str, shape)) for shape in r.shapes] if len(r.shapes) > 1 else []
        scope = ", ".join(filter(None, (r.op, r.mode, *shapes)))
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
    metric, measured = METRICS[requirement.metric], cells(results.rows)
    found: list[tuple[float, str]] = []
    for case in requirement.cases:
        value = metric.value(lambda c: measured.get(Key(c, requirement.method), {}), case)
        if value is None:
            return Verdict(requirement, None, f"at {case.label}")
        found.append((value, case.label))
    if metric.combine:
        return Verdict(requirement, metric.combine([value for value, _ in found]), "")
    value, label = (min if metric.at_least else max)(found)
    return Verdict(requirement, value, f"at {label}")


def judge(results: Results) -> Iterator[Verdict | MapVerdict | sharded_judge.Verdict]:
    """A verdict for each requirement on the suite of `results`, one for a slice of the map."""
    if results.suite in SLICES:
        yield judge_map(results)
    if results.suite == sharded_judge.SUITE:
        yield from sharded_judge.judge(results)
    for requirement in REQUIREMENTS:
        if requirement.suite == results.suite:
            yield _judge_one(requirement, results)
