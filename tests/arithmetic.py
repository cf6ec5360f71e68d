"""The row maths' own arithmetic on plain float32 numbers: what a kernel computes of a row, without a GPU.

The DSL's functions are replaced by numpy's, rounded as the hardware's are (approximations by the nearest number), so
that the very code which is traced into a kernel runs, a thread after the other.
"""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from cute_softmax.kernels.common import copy, online, reduce
from cute_softmax.kernels.maths import divergence, maths, prologue, scores
from cute_softmax.kernels.maths.scores import Given
from cute_softmax.plan import Prologue, RowClass
from cute_softmax.runtime.compile import build_math


def _by(op, back: bool = False):
    """The method of an operation that rounds once; back: of the second operand."""
    return lambda a, b: Number(op(Number(b).value, a.value) if back else op(a.value, Number(b).value))


def _sum(op, back: bool = False):
    """The same of an addition, which may take one product as it was before it was rounded."""

    def found(a, b):
        numbers, joins = [Number(b), a] if back else [a, Number(b)], Number.joins
        joined = joins.integers(3) if joins else 2  # the first, the second or none
        return Number(op(*(n.product if i == joined else n.value for i, n in enumerate(numbers))))

    return found


def _product(a, b) -> Number:
    exact = np.float64(a.value) * np.float64(Number(b).value)
    return Number(exact, exact)


def _is(op):
    return lambda a, b: bool(op(a.value, Number(b).value))


class Number:
    """A Float32: every operation rounds once.

    product: of a product, and what has its value, the number before it was rounded. joins: a source of random numbers;
    with one an addition may be an FMA, as the compiler makes of any product and sum that are not kept apart.
    """

    width = 32
    joins: ClassVar[np.random.Generator | None] = None

    def __init__(self, value, product: np.float64 | None = None):
        if isinstance(value, Number):
            value, product = value.value, value.product
        self.value = np.float32(value)
        self.product = self.value if product is None else product

    __add__, __radd__ = _sum(operator.add), _sum(operator.add, True)
    __sub__, __rsub__ = _sum(operator.sub), _sum(operator.sub, True)
    __mul__ = __rmul__ = _product
    __truediv__ = _by(operator.truediv)
    __lt__, __gt__, __le__, __ge__ = map(_is, (operator.lt, operator.gt, operator.le, operator.ge))
    __eq__, __hash__ = _is(operator.eq), None

    def __neg__(self) -> Number:
        return Number(-self.value, -self.product)

    def to(self, kind) -> Number:
        return self

    def bitcast(self, kind) -> Word:
        return Word(int(self.value.view(np.int32)))


class Word(int):
    """An Int32 of a float's bits."""

    def __add__(self, other) -> Word:
        return Word(int(self) + int(other))

    def __lshift__(self, count) -> Word:
        return Word(((int(self) << count) + (1 << 31)) % (1 << 32) - (1 << 31))

    def __and__(self, other) -> Word:
        return Word(int(self) & int(other))

    def bitcast(self, kind) -> Number:
        return Number(np.int32(self).view(np.float32))


class Vector(list):
    """A vector of registers."""

    element_type = None


def _exact(a, b, c) -> np.float64:
    return np.float64(Number(a).value) * np.float64(Number(b).value) + np.float64(Number(c).value)


def _fma(a, b, c) -> Number:
    return Number(_exact(a, b, c))


def _saturated(a, b, c) -> Number:
    found = _fma(a, b, c).value
    return Number(0 if np.isnan(found) else min(max(found, 0), 1))


def _rounded_down(a, b, c) -> Number:
    exact = _exact(a, b, c)
    nearest = np.float32(exact)
    return Number(np.nextafter(nearest, np.float32(-np.inf)) if nearest > exact else nearest)


def _extreme(op):
    def found(a, b, nan=False):
        a, b = Number(a).value, Number(b).value
        return Number(op(a, b) if nan or not (np.isnan(a) or np.isnan(b)) else (b if np.isnan(a) else a))

    return found


def _of(function):
    return lambda x, fastmath=False: Number(function(np.float64(Number(x).value)))


CUTE = SimpleNamespace(
    arch=SimpleNamespace(
        fmax=_extreme(np.maximum),
        fmin=_extreme(np.minimum),
        rcp_approx=_of(lambda x: np.float64(1.0) / x),
        warp_reduction=lambda value, op, threads_in_group: value,
    ),
    math=SimpleNamespace(fma=_fma, exp2=_of(np.exp2), log=_of(np.log)),
    size=len,
)


def _rounded(op):
    return lambda a, b: Number(op(Number(a).value, Number(b).value))


def install(monkeypatch) -> None:
    """Let the maths compute with numbers."""
    for module in (online, maths, prologue, scores, divergence, reduce, copy):
        monkeypatch.setattr(module, "cute", CUTE)
        if hasattr(module, "Float32"):
            monkeypatch.setattr(module, "Float32", Number)
    for module in (online, scores):
        monkeypatch.setattr(module, "rounded_product", _rounded(operator.mul))
    monkeypatch.setattr(online, "rounded_sum", _rounded(operator.add))
    monkeypatch.setattr(online, "saturated", _saturated)
    monkeypatch.setattr(online, "rounded_down", _rounded_down)
    monkeypatch.setattr(online, "Int32", int)
    monkeypatch.setattr(scores, "negate", _negate)
    for module in (copy, scores):
        monkeypatch.setattr(module, "unpack", list)
    monkeypatch.setattr(copy, "forget", lambda vector: None)


def _negate(vector: Vector, negative: bool) -> None:
    vector[:] = [-x if negative else x for x in vector]


def class_of(math_name: str, asked: Prologue, **fields: object) -> RowClass:
    """What of a class its math looks at."""
    found = dict(
        math=math_name, prologue=asked, dtypes=("fp32",) * 9, online=True, precise=False, keep=False, part=2
    )
    return SimpleNamespace(**{**found, "logs": False, **fields})


def row(
    c: RowClass,
    inputs: list[np.ndarray],
    numbers: dict[str, float],
    chosen: int | None = None,
    *,
    threads: int = 3,
    vector: int = 4,
    staging: str | tuple[str, ...] = "direct",
) -> tuple[np.ndarray, list[float], float | None]:
    """(the results of a row of full inputs, its group results, the result at the target): float64.

    A row is dealt out to the threads vector by vector; a last vector in part is scalars of the first thread. staging:
    of all inputs or of each.
    """
    with np.errstate(all="ignore"):
        math_ = build_math(c)
        hows = (staging,) * len(inputs) if isinstance(staging, str) else staging
        n = len(inputs[0])
        body = n // vector * vector
        owned = [[] for _ in range(threads)]
        for k in range(0, body, vector):
            owned[k // vector % threads].append(range(k, k + vector))
        steps = max(1, *map(len, owned))
        values, at = [], []
        for t, vectors in enumerate(owned):
            rest = range(body, n) if t == 0 else ()
            exist = [True] * len(vectors) + [False] * (steps - len(vectors)) + [True] * len(rest)
            fragments = []
            for x, padding, how in zip(inputs, math_.padding, hows, strict=True):
                held = [Vector(Number(x[i]) for i in v) for v in vectors]
                held += [Vector([Number(padding)] * vector) for _ in range(steps - len(vectors))]
                makers = [lambda v=v, how=how: Vector(v) if how == "shared" else v for v in held]
                fragments.append(copy.Fragment(makers, [Number(x[i]) for i in rest], False, how))
            counts = [vector * e for e in exist[:steps]] + [1] * len(rest)
            values.append(
                [
                    *fragments,
                    *([Given({k: Number(v) for k, v in numbers.items()}, counts, exist)] * bool(c.prologue)),
                ]
            )
            at.append([*[list(v) for v in vectors], *[[None] * vector] * (steps - len(vectors)), list(rest)])
        maths_ = [math_.for_row(v) for v in values]
        states, kept = [()] * threads, [None] * threads
        for stage in range(len(math_.reductions)):
            found = []
            for t in range(threads):
                state, kept[t] = maths_[t].partial(stage, values[t], [states[t]] if states[t] else [], 1)
                found.append(state)
            merged = maths_[0].reductions[stage].merge_all(found)
            states = [s + merged for s in states]
        sinks = [Number(numbers["sink"])] if c.prologue.sink else []
        if sinks:
            states = [maths_[0].joined(state, *sinks) for state in states]
        results = np.full(n, np.nan)
        for t in range(threads):
            for result in maths_[t].finish(values[t], kept[t], states[t]):
                for i, y in zip([i for v in at[t] for i in v], result, strict=True):
                    if i is not None:
                        results[i] = y.value
        score = sinks
        if chosen is not None and numbers.get("found") is None:
            x = Number(inputs[0][chosen])
            x = x * Number(numbers["scale"]) if "scale" in numbers else x
            score = [online.capped(x, Number(numbers["softcap"])) if "softcap" in numbers else x]
        groups = [float(g.value) for g in maths_[0].group_results(states[0], *score)]
        target = None
        if c.prologue.target and math_.outputs:
            given = {k: Number(v) for k, v in numbers.items()}
            target = float(maths_[0].at_target(given, states[0], *score).value)
        return results, groups, target


def close(found, expected, tolerance: float = 2e-6) -> bool:
    """Whether numbers agree, relative to the largest of them or absolutely, infinities and NaN exactly."""
    found, expected = np.atleast_1d(np.float64(found)), np.atleast_1d(np.float64(expected))
    finite = np.isfinite(expected)
    unit = max(1.0, np.abs(expected[finite]).max(initial=0.0)) if math.isfinite(tolerance) else 1.0
    same = np.array_equal(found[~finite], expected[~finite], equal_nan=True)
    return same and bool((np.abs(found[finite] - expected[finite]) <= tolerance * unit).all())
