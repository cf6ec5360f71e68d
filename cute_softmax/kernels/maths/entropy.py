"""Maths of heads over a vocabulary: statistics of a row, its entropy, and the logarithm of a chosen element."""

import operator
from collections.abc import Iterable

import cutlass.cute as cute
from cutlass import Float32

from ..common import online
from ..common.reduce import MAX, SUM, Weighted, tree
from .maths import LogSumExp

RUN = 8  # elements whose weighted exponents are added up one after the other


class Statistics(LogSumExp):
    """max, and log(sum(exp(x - max))): apart, as their sum is rounded to the size of the scores."""

    group_outputs = ("max", "log")

    def group_results(self, state: tuple) -> list[Float32]:
        row_max, total = state
        return [self.exp.score(row_max), self.exp.log(total, online.reference(row_max))]


class Entropy(Statistics):
    """max, log(sum), and the entropy of the softmax: log(sum) - sum(exp(x - max) * (x - max)) / sum.

    Elements of -inf contribute nothing.
    """

    group_outputs = ("max", "log", "entropy")

    def __init__(self, source: str, *, online: bool, part: int = 2):
        super().__init__(source, online=online, part=part)
        self.whole = Weighted(self.exp)
        self.reductions = (self.whole,) if online else (MAX, SUM, SUM)

    def sums(self, exponentials: Iterable[Float32], part: Iterable[Float32], ref: Float32) -> list[Float32]:
        part = list(part)
        runs = (self.run(part[k : k + RUN], ref) for k in range(0, len(part), RUN))
        return tree(lambda a, b: (a[0] + b[0], a[1] + b[1]), runs)

    def run(self, run: list[Float32], ref: Float32) -> tuple[Float32, Float32]:
        """What neighbouring elements add to both sums: an FMA each for the second one, where a tree has a product and a
        sum."""
        powers, weighted = [], None
        for x in run:
            exponential, exponent = self.exp.power(x, ref)
            powers.append(exponential)
            weighted = (
                exponential * exponent if weighted is None else cute.math.fma(exponential, exponent, weighted)
            )
        return tree(operator.add, powers), weighted

    def weighted(self, x: Float32, ref: Float32) -> tuple[Float32, Float32]:
        """exp(x - ref), and the same times its exponent of 2, which is 0 for -inf."""
        exponential, exponent = self.exp.power(x, ref)
        return exponential, exponential * exponent

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        if stage < 2:
            return super().term(stage, elements, carry)
        return self.weighted(elements[0], online.reference(carry[0]))[1]

    def group_results(self, state: tuple) -> list[Float32]:
        row_max, log = super().group_results(state[:2])
        return [row_max, log, log - self.mean(state)]

    def mean(self, state: tuple) -> Float32:
        """That of the differences to the maximum, by the softmax."""
        seen, total, weighted = state
        ref = online.reference(seen)
        # Of the exponents, that of the reference being 0.
        return (weighted / total - self.exp.exponent(ref, ref)) * Float32(online.LN_2)


class Selected(Statistics):
    """`Statistics` and, of one chosen element of each row, its logarithm in the softmax: `found`."""

    group_inputs = ("index",)
    group_outputs = ("found", "max", "log")

    def group_results(self, state: tuple, chosen: Float32) -> list[Float32]:
        row_max, log, *rest = super().group_results(state)
        return [chosen - row_max - log, row_max, log, *rest]


class SelectedEntropy(Selected, Entropy):
    """`Selected` and `Entropy` in one."""

    group_outputs = ("found", "max", "log", "entropy")
