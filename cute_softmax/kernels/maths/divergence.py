"""A softmax against another, their Kullback-Leibler divergence, or against weights, a cross entropy; and gradients."""

import copy
import operator
from collections.abc import Iterator

import cutlass.cute as cute
from cutlass import Float32

from ..common import online
from ..common.copy import Fragment
from ..common.index import select
from ..common.reduce import SUM, Both, tree
from .maths import LogSumExp, RowMath, Softmax


def log_of(exp: online.Fast | online.Near, total: Float32, ref: Float32) -> Float32:
    """The logarithm of a sum of exponentials, relative to the reference's own: differences to that are exact."""
    return cute.math.log(online.quotient(total, exp.exponential(ref, ref)))


class Divergence(RowMath):
    """KL(target || input) = sum(p * (log p - log q)), with p the softmax of the target and q that of the input.

    Two stages: the state of both softmaxes, then the sum of differences of logarithms, each weighted with its
    exponential. Where p is 0 nothing is added, whatever q is there.
    """

    inputs = ("x", "target")
    group_outputs = ("loss",)
    padding = (-float("inf"), -float("inf"))

    def __init__(self, prologue, softmaxes: tuple[Softmax, Softmax]):
        self.prologue, self.group_inputs = prologue, prologue.groups
        self.set(softmaxes)

    def set(self, softmaxes: tuple[Softmax, Softmax]) -> None:
        """The maths of the two softmaxes, and what depends on them."""
        self.softmaxes = softmaxes
        self.whole = Both(*(s.whole for s in softmaxes))
        self.reductions = (self.whole, SUM)

    def for_row(self, values: list) -> RowMath:
        made = copy.copy(self)
        made.numbers = values[-1].numbers
        scale = made.numbers.get("scale")
        if scale is not None:
            made.set(tuple(s.scaled(scale) for s in self.softmaxes))
        return made

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        inputs = values[:2]
        if stage == 0:
            states = (s.partial(0, [x], [], width)[0] for s, x in zip(self.softmaxes, inputs, strict=True))
            return sum(states, ()), None
        total = tree(operator.add, (self.term_of(*pair) for pair in self.differences(*inputs, *carry)))
        return SUM.lanes((total,), width), None

    def differences(self, x: Fragment, target: Fragment, state: tuple) -> Iterator[tuple[Float32, Float32]]:
        """Of each element the exponential of its target, relative to the largest, and log p - log q."""
        of_x, of_target = self.whole.apart(state[:4])
        refs = [online.reference(row_max) for row_max, _ in (of_x, of_target)]
        exps = [s.exp for s in self.softmaxes]
        totals = of_x[1], of_target[1]
        logs = [log_of(exp, total, ref) for exp, total, ref in zip(exps, totals, refs, strict=True)]
        for a, b in zip(x, target, strict=True):
            weight = exps[1].exponential(b, refs[1])
            yield weight, exps[1].score((b - refs[1]) - (a - refs[0])) + (logs[0] - logs[1])

    @staticmethod
    def term_of(weight: Float32, difference: Float32) -> Float32:
        """Their product; 0 where the weight is."""
        return select(weight == 0.0, Float32(0.0), weight * difference)

    def finish(self, values: list, kept: None, state: tuple) -> list:
        return []

    def group_results(self, state: tuple) -> list[Float32]:
        *_, total, cross = state
        return [cross / total]


class DivergenceOfInput(Divergence):
    """Its gradient in the input: alpha * (q - p)."""

    outputs = ("y",)
    group_outputs = ()

    def set(self, softmaxes: tuple[Softmax, Softmax]) -> None:
        super().set(softmaxes)
        self.reductions = (self.whole,)

    def finish(self, values: list, kept: None, state: tuple) -> list:
        parts = zip(self.softmaxes, values[:2], self.whole.apart(state), strict=True)
        q, p = (s.results(x, [], *own, None) for s, x, own in parts)
        return [(self.numbers["alpha"] * (b - a) for b, a in zip(q, p, strict=True))]

    def group_results(self, state: tuple) -> list[Float32]:
        return []


class DivergenceOfTarget(DivergenceOfInput):
    """Its gradient in the target: alpha * p * (log p - log q - KL)."""

    def finish(self, values: list, kept: None, state: tuple) -> list:
        factor = self.numbers["alpha"] * cute.arch.rcp_approx(state[3])
        pairs = self.differences(*values[:2], state)
        return [(self.term_of(weight, d - self.numbers["loss"]) * factor for weight, d in pairs)]


class Weighted(RowMath):
    """sum(w * (lse - x)): the cross entropy against a target of probabilities, or any weights, w."""

    inputs = ("x", "target")
    group_outputs = ("loss",)
    padding = (-float("inf"), 0.0)

    def __init__(self, prologue, softmax: Softmax):
        self.prologue, self.group_inputs = prologue, prologue.groups
        self.set(softmax.averaged())

    def set(self, softmax: Softmax) -> None:
        """The math of the softmax, in whose state are the sums of weighted differences and of weights."""
        self.softmax, self.whole, self.reductions = softmax, softmax.whole, softmax.reductions

    def for_row(self, values: list) -> RowMath:
        made = copy.copy(self)
        made.numbers = values[-1].numbers
        scale = made.numbers.get("scale")
        made.set(self.softmax if scale is None else self.softmax.scaled(scale))
        return made

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        x, target, given = values
        x.exist = given.exist[: x.steps], given.exist[x.steps :]
        weighing = copy.copy(self.softmax)
        weighing.weights = target.parts(weighing.part)
        return weighing.by_parts(x, width)[0], None

    def finish(self, values: list, kept: None, state: tuple) -> list:
        return []

    def group_results(self, state: tuple) -> list[Float32]:
        row_max, total, fallen, weight = state
        exp = self.softmax.exp
        return [weight * log_of(exp, total, online.reference(row_max)) - exp.score(fallen)]


class WeightedOfInput(Weighted):
    """Its gradient in the input: alpha * (sum(w) * softmax - w)."""

    outputs = ("y",)
    group_outputs = ()

    def finish(self, values: list, kept: None, state: tuple) -> list:
        row_max, total, _, weight = state
        x, target = values[:2]
        p = self.softmax.results(x, [], row_max, total, None)
        alpha = self.numbers["alpha"]
        return [(alpha * (weight * y - w) for y, w in zip(p, target, strict=True))]

    def group_results(self, state: tuple) -> list[Float32]:
        return []


def divergence(prologue, sources: tuple[str, str], *, online: bool, precise: bool) -> RowMath:
    """The math that a prologue asks for; sources: the dtypes of the input and of the target."""
    if prologue.against == "weights":
        if prologue.alpha:
            return WeightedOfInput(prologue, Softmax(sources[0], online=online, precise=precise, keep=False))
        return Weighted(prologue, LogSumExp(sources[0], online=online))
    if prologue.against == "loss":
        return Divergence(prologue, tuple(LogSumExp(source, online=online).separate() for source in sources))
    softmaxes = tuple(
        Softmax(source, online=online, precise=precise, keep=False).separate() for source in sources
    )
    return (DivergenceOfInput if prologue.against == "input" else DivergenceOfTarget)(prologue, softmaxes)
