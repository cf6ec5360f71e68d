"""Scores from elements: what a prologue makes of a row before its math, and of the results after it.

`score = x * scale + bias`, -inf where a mask is False or beyond the diagonal; results are multiplied by alpha. A row
math sees the scores as it sees a `copy.Fragment` and stays as it is.

A movement hands each row's inputs to the math, and behind them one `Given`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from . import online
from .copy import Fragment, unpack
from .maths import RowMath
from .online import rounded_product
from .reduce import tree

NOTHING = -float("inf")


@dataclass
class Given:
    """What else belongs to a row.

    numbers: "scale" and "alpha", those that there are; left: for each of this thread's vectors, then for its scalars,
    how many elements count, from the first on (0 for what does not exist).
    """

    numbers: dict[str, Float32]
    left: list[Int32]


class Scores:
    """One thread's scores of a row, computed from its elements anew in each pass unless they are kept.

    Every pass rounds them alike, so that a row sums to 1 however large they are.
    """

    def __init__(self, prologue, inputs: dict[str, Fragment], given: Given, keep: bool):
        self.prologue, self.inputs, self.given = prologue, inputs, given
        self.kept = {} if keep else None
        self.steps = len(inputs["x"].vectors)

    def vector(self, k: int) -> list[Float32]:
        """The scores of vector k; those of the scalars for k = steps."""
        if self.kept is None:
            return self._scores(k)
        if k not in self.kept:
            self.kept[k] = self._scores(k)
        return self.kept[k]

    def _scores(self, k: int) -> list[Float32]:
        if k == self.steps:
            numbers = {name: fragment.scalars for name, fragment in self.inputs.items()}
            counts = self.given.left[k:]
            x, bias = ([n.to(Float32) for n in numbers.get(name, ())] for name in ("x", "bias"))
            allowed = [n != 0 for n in numbers.get("mask", ())]
            return [self._score(x, bias, allowed, counts[v], 0, v) for v in range(len(x))]
        vectors = {name: fragment.packed(k) for name, fragment in self.inputs.items()}
        x, bias = (unpack(vectors[name]) if name in vectors else [] for name in ("x", "bias"))
        allowed = truths(vectors["mask"]) if "mask" in vectors else []
        return [self._score(x, bias, allowed, self.given.left[k], v, v) for v in range(len(x))]

    def _score(self, x: list, bias: list, allowed: list, left: Int32, place: int, v: int) -> Float32:
        """The score of element v, of which `left` - `place` and more to come count."""
        score, scale = x[v], self.given.numbers.get("scale")
        selects = allowed or self.prologue.causal
        if scale is not None and bias:
            score = cute.math.fma(score, scale, bias[v])
        elif scale is not None and selects:
            # Not to be joined with what is subtracted later: each pass would round in its own way.
            score = rounded_product(score, scale)
        elif scale is not None:
            # What does not exist is -inf, whatever the sign of scale: padding alone could not be.
            absent = Float32(cutlass.select_(left > 0, Float32(0.0), Float32(NOTHING)))
            score = cute.math.fma(score, scale, absent)
        elif bias:
            score = score + bias[v]
        if allowed:
            score = Float32(cutlass.select_(allowed[v], score, Float32(NOTHING)))
        if self.prologue.causal:
            score = Float32(cutlass.select_(left > place, score, Float32(NOTHING)))
        return score

    def parts(self, steps: int) -> Iterator[list[Float32]]:
        """As `Fragment.parts`."""
        for k in range(0, self.steps, steps):
            part = [score for j in range(k, min(k + steps, self.steps)) for score in self.vector(j)]
            yield part + (self.vector(self.steps) if k + steps >= self.steps else [])

    def __iter__(self) -> Iterator[Float32]:
        for part in self.parts(1):
            yield from part

    def maximum(self) -> Float32:
        """The largest score; NaN if one is NaN."""
        return tree(online.maximum, self)


def truths(vector: cute.Tensor) -> list[Boolean]:
    """The elements of a register vector of bytes that are not 0."""
    n = cute.size(vector)
    if n % 4:
        return [vector[v] != 0 for v in range(n)]
    words = cute.recast_tensor(vector, Uint32)
    return [words[v // 4] & Uint32(0xFF << 8 * (v % 4)) != 0 for v in range(n)]


class Prologued(RowMath):
    """A row math of scores, whose results are multiplied by `factor` of the given numbers, if that is among them."""

    factor = "alpha"

    def __init__(self, math: RowMath, prologue):
        self.math, self.prologue = math, prologue
        self.outputs, self.group_outputs = math.outputs, math.group_outputs
        self.reductions, self.whole, self.keep = math.reductions, math.whole, math.keep
        self.names = ("x", *["bias"] * prologue.bias, *["mask"] * prologue.mask)
        self.inputs, self.group_inputs = self.names, prologue.groups
        self.rescores = prologue.rescores
        padding = {"x": 0.0 if prologue.scale or prologue.bias else NOTHING, "bias": NOTHING, "mask": 0}
        self.padding = tuple(padding[name] for name in self.names)

    def of(self, values: list) -> list:
        """What the math takes as its values."""
        *fragments, given = values
        if not self.rescores:
            return fragments
        if not hasattr(given, "scores"):
            inputs = dict(zip(self.names, fragments, strict=True))
            given.scores = Scores(self.prologue, inputs, given, self.keep)
        return [given.scores]

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        return self.math.partial(stage, self.of(values), carry, width)

    def finish(self, values: list, kept: object, state: tuple) -> list:
        results = self.math.finish(self.of(values), kept, self.ended(state))
        factor = values[-1].numbers.get(self.factor)
        return results if factor is None else [(y * factor for y in result) for result in results]

    def group_results(self, state: tuple) -> list[Float32]:
        return self.math.group_results(self.ended(state))

    def ended(self, state: tuple) -> tuple:
        """The state of a whole row, as the math shall finish with it."""
        if not self.prologue.zero:
            return state
        # Without a sum nothing is left; with any other all results are 0, or its logarithm.
        largest, total, *rest = state
        return largest, Float32(cutlass.select_(total == 0.0, Float32(1.0), total)), *rest


class ProloguedGradient(Prologued):
    """The gradient of a prologued math: scale is a factor on it, alpha the inverse of the forward's."""

    factor = "scale"

    def __init__(self, math: RowMath, prologue):
        super().__init__(math, prologue)
        self.inputs = self.names = math.inputs
        self.padding, self.rescores = math.padding, False

    def finish(self, values: list, kept: object, state: tuple) -> list:
        numbers = values[-1].numbers
        inverse, factor = numbers.get("alpha"), numbers.get("scale")
        results = super().finish(values, kept, state if inverse is None else (state[0] * inverse,))
        if self.prologue.scale != "groups":
            return results
        # Callers mark rows in which nothing counts by a factor of 0: of NaN, too, it makes 0.
        none = factor == 0.0
        return [(Float32(cutlass.select_(none, Float32(0.0), y)) for y in result) for result in results]

    def ended(self, state: tuple) -> tuple:
        return state
