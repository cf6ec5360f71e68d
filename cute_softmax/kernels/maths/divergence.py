"""A softmax against another, their Kullback-Leibler divergence, or against weights, a cross entropy; and gradients."""

import copy
import operator
from collections.abc import Iterator, Sequence

import cutlass.cute as cute
from cutlass import Float32

from ..common import online
from ..common.copy import Fragment
from ..common.index import select
from ..common.reduce import SUM, Both, tree
from .entropy import RUN
from .maths import LogSumExp, RowMath, Softmax


def log_of(exp: online.Fast | online.Near, total: Float32, ref: Float32) -> Float32:
    """The logarithm of a sum of exponentials, relative to the reference's own: differences to that are exact."""
    return cute.math.log(online.quotient(total, exp.exponential(ref, ref)))


def less(a: Float32, b: Float32) -> Float32:
    """a - b of two rounded numbers: 0 where both are made alike."""
    return online.rounded_sum(a, -b)


class Divergence(RowMath):
    """KL(target || input) = sum(p * (log p - log q)), with p the softmax of the target and q that of the input.

    Two stages: the state of both softmaxes, then the sum of differences of logarithms, each weighted with its
    exponential. Where p is 0 nothing is added, whatever q is there.

    Of equal rows divergence and gradients are exactly 0: both states are made by the same operations, and so are the
    numbers whose difference is taken, each of them rounded.
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
            # In parts both or neither: in parts where one of them is waited for.
            recurs = any(x.staging != "direct" and not x.waited for x in inputs)
            states = (
                (s.by_parts(x, width) if recurs else s.partial(0, [x], [], width))[0]
                for s, x in zip(self.softmaxes, inputs, strict=True)
            )
            return sum(states, ()), None
        total = tree(operator.add, (self.term_of(*pair) for pair in self.differences(*inputs, *carry)))
        return SUM.lanes((total,), width), None

    def advance(self, values: list, state: tuple) -> tuple:
        """The states of both softmaxes, and the sum of differences, the target's to its maximum less the input's,
        weighted with the exponentials."""
        parts = (v.parts_and_maxima(s.part) for s, v in zip(self.softmaxes, values[:2], strict=True))
        for both in zip(*parts, strict=True):
            state = self.advanced([part for _, part in both], [largest() for largest, _ in both], state)
        return state

    def advanced(self, parts: list, maxima: list[Float32], state: tuple) -> tuple:
        """A state, with the next elements of both inputs; maxima: theirs."""
        before = self.whole.apart(state[:4])
        seen = [online.maximum(own[0], largest) for own, largest in zip(before, maxima, strict=True)]
        refs = [online.reference(row_max) for row_max in seen]
        # First: what was seen before takes no registers then.
        olds = [
            op.seen_from(own, row_max)[0]
            for op, own, row_max in zip(self.whole.parts, before, seen, strict=True)
        ]
        moved, pairs = self.moved(state, seen), [*zip(*parts, strict=True)]
        runs = (self.run(pairs[k : k + RUN], refs) for k in range(0, len(pairs), RUN))
        sums = tree(lambda a, b: tuple(map(operator.add, a, b)), runs)
        x_total, target_total, cross = map(operator.add, (*olds, moved), sums)
        return seen[0], x_total, seen[1], target_total, cross

    def run(self, pairs: list, refs: list[Float32]) -> tuple[Float32, Float32, Float32]:
        """What neighbouring elements add to both sums of exponentials, and to that of weighted differences."""
        exps, powers, cross = [s.exp for s in self.softmaxes], ([], []), Float32(0.0)
        for a, b in pairs:
            for exp, own, x, ref in zip(exps, powers, (a, b), refs, strict=True):
                own.append(exp.exponential(x, ref))
            weight, difference = powers[1][-1], (b - refs[1]) - (a - refs[0])
            cross = select(weight == 0.0, cross, cute.math.fma(weight, difference, cross))
        return *(tree(operator.add, own) for own in powers), cross

    def moved(self, state: tuple, seen: Sequence[Float32]) -> Float32:
        """The sum of weighted differences of a state, to maxima that are no smaller and relative to that of the target:
        finite where nothing has been seen."""
        shifts, (of_x, of_target) = [], self.whole.apart(state[:4])
        for (old, _), new in zip((of_x, of_target), seen, strict=True):
            shift = online.reference(old) - online.reference(new)
            shifts.append(online.maximum(shift, Float32(online.LOWEST)))
        ratio = self.softmaxes[1].exp.ratio(online.reference(of_target[0]), online.reference(seen[1]))
        return self.term_of(ratio, cute.math.fma(of_target[1], shifts[1] - shifts[0], state[4]))

    def contributed(self, stage: int, state: tuple, carry: list) -> tuple:
        """Both softmaxes, then what `partial` sums up in the second stage."""
        if stage == 0:
            return state[:4]
        of_x, of_target = self.whole.apart(carry[0])
        cross = self.softmaxes[1].exp.score(self.moved(state, (of_x[0], of_target[0])))
        (total,) = self.whole.parts[1].seen_from(state[2:4], of_target[0])
        logs = self.logs(of_x, of_target)
        return (cute.math.fma(total, less(*logs), cross),)

    def logs(self, *states: tuple) -> list[Float32]:
        """Of the state of each softmax the logarithm of its sum, relative to its maximum."""
        return [
            log_of(s.exp, total, online.reference(row_max))
            for s, (row_max, total) in zip(self.softmaxes, states, strict=True)
        ]

    def differences(self, x: Fragment, target: Fragment, state: tuple) -> Iterator[tuple[Float32, Float32]]:
        """Of each element the exponential of its target, relative to the largest, and log p - log q."""
        of_x, of_target = self.whole.apart(state[:4])
        refs = [online.reference(row_max) for row_max, _ in (of_x, of_target)]
        logs, exp = self.logs(of_x, of_target), self.softmaxes[1].exp
        for a, b in zip(x, target, strict=True):
            weight = exp.exponential(b, refs[1])
            yield weight, exp.score((b - refs[1]) - (a - refs[0])) + less(*logs)

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
        return [(self.numbers["alpha"] * less(b, a) for b, a in zip(q, p, strict=True))]

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
        return self.weighed(values, width), None

    def advance(self, values: list, state: tuple) -> tuple:
        return self.weighed(values, 1, state)

    def weighed(self, values: list, width: int, state: tuple | None = None) -> tuple:
        """The state of these elements and their weights, merged over lanes; state: of those before."""
        x, target, given = values
        x.exist = given.exist[: x.steps], given.exist[x.steps :]
        weighing = copy.copy(self.softmax)
        weighing.weights = target.parts(weighing.part)
        return weighing.by_parts(x, width, state)[0]

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


def divergence(prologue, sources: tuple[str, str], *, online: bool, precise: bool, part: int) -> RowMath:
    """The math that a prologue asks for; sources: the dtypes of the input and of the target; part: see `Softmax`."""
    if prologue.against != "weights" and sources[0] != sources[1]:
        sources = ("fp32", "fp32")  # of equal numbers of two dtypes, too
    if prologue.alpha:
        of = [Softmax(source, online=online, precise=precise, keep=False, part=part) for source in sources]
    else:
        of = [LogSumExp(source, online=online, part=part) for source in sources]
    if prologue.against == "weights":
        return (WeightedOfInput if prologue.alpha else Weighted)(prologue, of[0])
    softmaxes = tuple(one.separate() for one in of)
    if prologue.against == "loss":
        return Divergence(prologue, softmaxes)
    return (DivergenceOfInput if prologue.against == "input" else DivergenceOfTarget)(prologue, softmaxes)
