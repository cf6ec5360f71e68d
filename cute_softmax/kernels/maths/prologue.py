"""Row maths with a prologue: of scores in place of elements, and with what becomes of results behind them, which are
multiplied by alpha or have another at their row's target.
"""

import copy
from collections.abc import Iterator

import cutlass.cute as cute
from cutlass import Boolean, Float32

from ..common import online
from ..common.index import select
from . import states
from .maths import RowMath
from .scores import LEAST, NOTHING, Packed, Scores, score_of


class Prologued(RowMath):
    """A row math of scores.

    Panels take elements one by one: `elements` makes them scores, `term` and `result` go on from there, and of what
    `group_results` are none else. They are `plain` where a score is the element, or -inf.
    rough: whether results are stored in 16 bits, so that the last pass may have scores that are capped roughly.
    """

    def __init__(self, math: RowMath, prologue, rough: bool):
        self.math, self.prologue, self.rough = math, prologue, rough and prologue.softcap
        more = ("even",) if prologue.averages and math.group_outputs else ()
        more += ("sink_log",) if prologue.sink and math.outputs else ()
        self.outputs, self.group_outputs = math.outputs, (*math.group_outputs, *more)
        self.group_outputs = states.names_of(prologue, math) if prologue.state else self.group_outputs
        if prologue.averages:
            self.math = math = math.averaged()
        if prologue.softcap:
            # The maximum of a part and its exponentials from the same scores: they take long.
            self.math = math = copy.copy(math)
            math.recurs = True
        self.reductions, self.whole, self.keep = math.reductions, math.whole, math.keep
        self.names = ("x", *["bias"] * prologue.bias, *["mask"] * prologue.mask)
        self.inputs, self.group_inputs = self.names, (*math.group_inputs, *prologue.groups)
        self.rescores = prologue.rescores
        padding = {"x": 0.0 if (prologue.scale and not prologue.packs) or prologue.bias else NOTHING}
        padding |= {"bias": NOTHING, "mask": 0}
        self.padding = tuple(padding[name] for name in self.names)
        self.maximum_first = math.maximum_first
        self.plain = not (prologue.scale or prologue.softcap or prologue.bias)

    def elements(self, numbers: tuple, scale: Float32 | None, counts: Boolean) -> tuple:
        """What the math takes of an element. numbers: of each input, truth for a mask; counts: whether the element
        does, as far as padding does not say so."""
        if not self.rescores:
            return numbers
        given = dict(zip(self.names, numbers, strict=True))
        padded = self.prologue.mask or self.prologue.bias
        counts = None if padded and not self.prologue.causal else counts
        return (score_of(given["x"], scale, given.get("bias"), given.get("mask"), counts),)

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        return self.math.term(stage, elements, carry)

    def result(
        self, elements: tuple, state: tuple, scale: Float32 | None = None, alpha: Float32 | None = None
    ) -> Float32:
        """What becomes of what `elements` gave. scale, alpha: of its row, where there are any."""
        result = self.math.result(elements, self.ended(state))
        return result if alpha is None else result * alpha

    def of(self, values: list) -> list:
        """What the math takes as its values."""
        *fragments, given = values
        if self.rescores and not hasattr(given, "scores"):
            inputs = dict(zip(self.names, fragments, strict=True))
            if self.prologue.packs:
                given.scores = Packed(inputs, given).fragment()
            else:
                given.scores = Scores(self.prologue, inputs, given, self.keep)
        found = [given.scores] if self.rescores else fragments
        steps = found[0].steps
        exist = given.each or given.exist
        found[0].exist = exist[:steps], exist[steps:]
        return found

    def of_last(self, values: list) -> list:
        """`of` in the last pass over a row."""
        (scores, *others) = self.of(values)
        if self.rough and scores.kept is None:
            rough = Scores(self.prologue, scores.inputs, values[-1], keep=False, rough=True)
            rough.exist, scores = scores.exist, rough
        return [scores, *others]

    def for_row(self, values: list) -> RowMath:
        scale = values[-1].numbers.get("scale")
        if scale is None or not self.prologue.packs:
            return self
        made = copy.copy(self)
        # Not 0: times that, what is -inf would be NaN.
        made.math = self.math.scaled(online.maximum(cute.arch.fmax(scale, -scale, nan=True), Float32(LEAST)))
        made.reductions, made.whole = made.math.reductions, made.math.whole
        return made

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        return self.math.partial(stage, self.of(values), carry, width)

    def advance(self, values: list, state: tuple) -> tuple:
        return self.math.advance(self.of(values), state)

    def finish(self, values: list, kept: object, state: tuple) -> list:
        numbers = values[-1].numbers
        alpha = numbers.get("alpha")
        if self.prologue.entropy:
            alpha = Float32(0.0) if alpha is None else alpha
            of_entropy = numbers["down"], numbers["entropy"]
            results = [self.math.with_logs(*self.of_last(values), self.ended(state), alpha, *of_entropy)]
        else:
            results = self.math.finish(
                self.of_last(values), kept, self.ended(state), *([] if alpha is None else [alpha])
            )
        return [self.of_elements(result, values, numbers.get("even")) for result in results]

    def of_elements(
        self, results: Iterator[Float32], values: list, even: Float32 | None
    ) -> Iterator[Float32]:
        """The gradients of the elements from those of the scores, to each of which `even` is added if there is one."""
        if even is not None:
            results = (y + even for y in results)
        if not self.prologue.softcap:
            return results
        cap = values[-1].numbers["softcap"]
        scores = self.of_last(values)
        return (y * online.cap_slope(score, cap) for y, score in zip(results, *scores, strict=True))

    def group_results(self, state: tuple, *chosen: Float32) -> list[Float32]:
        if self.prologue.state:
            return states.numbers_of(self.prologue, self.math, state, *chosen)
        if self.prologue.sink:
            return self.beside_sink(self.ended(state), *chosen)
        results = self.math.group_results(self.ended(state), *chosen)
        return [*results, self.even(state)] if self.prologue.averages else results

    def joined(self, state: tuple, sink: Float32) -> tuple:
        """The state of a whole row, which its sink has joined."""
        return self.math.whole.merge(state, (sink, self.math.exp.exponential(sink, online.reference(sink))))

    def beside_sink(self, state: tuple, sink: Float32) -> list[Float32]:
        """`group_results` of a state that the sink has joined: with its logarithm in the softmax, which is -inf for a
        sink of -inf even where there is nothing else."""
        if not self.outputs:
            return self.math.group_results(state)
        row_max, log = self.logs(state)
        return [select(sink == NOTHING, sink, (sink - row_max) - log)]

    def logs(self, state: tuple) -> tuple[Float32, Float32]:
        """The largest score, and the logarithm of the sum relative to it: apart, their sum is rounded."""
        row_max, total = state[:2]
        return self.math.exp.score(row_max), self.math.exp.log(total, online.reference(row_max))

    def even(self, state: tuple) -> Float32:
        """The mean over the row of the logarithm of the softmax."""
        *_, fallen, count = state
        return self.math.exp.score(fallen / count) - self.logs(state)[1]

    def at_target(self, numbers: dict[str, Float32], state: tuple, *chosen: Float32) -> Float32:
        """The result at the element that "index" names."""
        less = online.less_one(numbers["found"])
        result = numbers["alpha"] * less
        if self.prologue.entropy:
            log = online.maximum(numbers["found"], Float32(online.VANISHES))
            result = result + numbers["down"] * (1.0 + less) * (log + numbers["entropy"])
        result = result + numbers["more"] if self.prologue.more else result
        if self.prologue.softcap:
            row_max, log = self.logs(state)
            result = result * online.cap_slope(numbers["found"] + row_max + log, numbers["softcap"])
        return result

    def ended(self, state: tuple) -> tuple:
        """The state of a whole row, as the math shall finish with it."""
        state = state[:2] if self.prologue.averages else state
        if not self.prologue.zero:
            return state
        # Without a sum nothing is left; with any other all results are 0, or its logarithm.
        largest, total, *rest = state
        return largest, select(total == 0.0, Float32(1.0), total), *rest


class ProloguedLoss(Prologued):
    """A softmax whose results are the gradient of a cross entropy, with the losses of the rows; of a logsumexp these
    alone.

    A row's loss is ``lse - score at the target``, and with squares ``squares * lse ** 2`` more, so that the gradient of
    its scores is ``(1 + 2 * squares * lse) * softmax``, less one at the target; `alpha` is a factor on it. With
    smoothing the mean score takes that share of the target's place.
    """

    def __init__(self, math: RowMath, prologue, rough: bool):
        super().__init__(math, prologue, rough)
        self.group_outputs = ("loss",)

    def for_row(self, values: list) -> RowMath:
        made = copy.copy(super().for_row(values))
        made.numbers = values[-1].numbers
        return made

    def finish(self, values: list, kept: object, state: tuple) -> list:
        if not self.outputs:
            return []
        alpha = factor = self.numbers["alpha"]
        if self.prologue.squares:
            factor = alpha * (1.0 + self.more(state))
        (result,) = self.math.finish(self.of_last(values), kept, self.ended(state), factor)
        even = -alpha * self.share(state) if self.prologue.even else None
        return [self.of_elements(result, values, even)]

    def share(self, state: tuple) -> Float32:
        """That of each class in the target, by smoothing."""
        return self.numbers["smoothing"] / state[-1]

    def more(self, state: tuple) -> Float32:
        """What the squares add to the factor on the softmax."""
        row_max, log = self.logs(state)
        return 2.0 * self.numbers["squares"] * (row_max + log)

    def found(self, state: tuple, chosen: Float32) -> Float32:
        """The logarithm of the softmax at the target."""
        row_max, log = self.logs(state)
        return chosen - row_max - log

    def at_target(self, numbers: dict[str, Float32], state: tuple, chosen: Float32) -> Float32:
        result = online.less_one(self.found(state, chosen))
        if self.prologue.squares:
            result = result + self.more(state) * (1.0 + result)
        if self.prologue.even:
            result = result + (self.numbers["smoothing"] - self.share(state))
        if self.prologue.softcap:
            result = result * online.cap_slope(chosen, numbers["softcap"])
        return numbers["alpha"] * result

    def group_results(self, state: tuple, chosen: Float32) -> list[Float32]:
        loss = -self.found(state, chosen)
        if self.prologue.even:
            smoothing = self.numbers["smoothing"]
            loss = (1.0 - smoothing) * loss - smoothing * self.even(state)
        if self.prologue.squares:
            row_max, log = self.logs(state)
            lse = row_max + log
            loss = loss + self.numbers["squares"] * lse * lse
        return [loss]


class ProloguedGradient(Prologued):
    """The gradient of a prologued math: scale is a factor on it, alpha the inverse of the forward's."""

    def __init__(self, math: RowMath, prologue, rough: bool):
        super().__init__(math, prologue, rough)
        self.group_outputs = ("sink_grad",) if prologue.sink else ("sum",) if prologue.state else ()
        self.inputs, self.outputs = math.inputs, () if prologue.state else math.outputs
        self.names, self.padding, self.rescores, self.plain = math.inputs, math.padding, False, math.plain

    def elements(self, numbers: tuple, scale: Float32 | None, counts: Boolean) -> tuple:
        if not self.prologue.causal:
            return numbers
        padding = zip(numbers, self.padding, strict=True)
        return tuple(select(counts, x, Float32(nothing)) for x, nothing in padding)

    def result(
        self, elements: tuple, state: tuple, scale: Float32 | None = None, alpha: Float32 | None = None
    ) -> Float32:
        result = self.math.result(elements, state if alpha is None else (state[0] * alpha,))
        if scale is None:
            return result
        result = result * scale
        # As in `finish`.
        return select(scale == 0.0, Float32(0.0), result) if self.prologue.scale == "groups" else result

    def for_row(self, values: list) -> RowMath:
        return self

    def joined(self, state: tuple, sink: Float32) -> tuple:
        """The state as it is: what the sink takes of the softmax is not in the results that it is of."""
        return state

    def group_results(self, state: tuple, sink: Float32 | None = None) -> list[Float32]:
        """The gradient of the sink, less its probability times the sum, 0 where there was none; or a part's sum."""
        (total,) = state
        if self.prologue.state:
            return [total]
        probability = online.Precise().exponential(sink, Float32(0.0))
        return [select(sink == NOTHING, Float32(0.0), -probability * total)]

    def finish(self, values: list, kept: object, state: tuple) -> list:
        numbers = values[-1].numbers
        inverse, factor = numbers.get("alpha"), numbers.get("scale")
        state = state if inverse is None else (state[0] * inverse,)
        results = self.math.finish(values[:-1], kept, state)
        if factor is not None:
            results = [(y * factor for y in result) for result in results]
        if self.prologue.scale != "groups":
            return results
        # Callers mark rows in which nothing counts by a factor of 0: of NaN, too, it makes 0.
        none = factor == 0.0
        return [(select(none, Float32(0.0), y) for y in result) for result in results]
