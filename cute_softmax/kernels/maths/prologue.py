"""Scores from elements: what a prologue makes of a row before its math, and of the results after it.

`score = x * scale + bias`, or capped by a tanh, -inf where a mask is False or beyond the diagonal; results are
multiplied by alpha. A row math sees the scores as it sees a `copy.Fragment` and stays as it is.

A movement hands each row's inputs to the math, and behind them one `Given`.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from ...plan.prologue import WHOLE
from ..common import online
from ..common.copy import Fragment, unpack
from ..common.index import select
from ..common.online import rounded_product
from ..common.reduce import tree
from . import states
from .maths import RowMath

NOTHING = -float("inf")
# -inf, as often as it fits into a word.
NOTHINGS = {cutlass.BFloat16: 0xFF80FF80, cutlass.Float16: 0xFC00FC00, cutlass.Float32: 0xFF800000}
WHERE = 0xE2  # of lop3: the first where the second is set, else the third
LEAST = 2.0**-149  # the smallest positive float32


@dataclass
class Given:
    """What else belongs to a row.

    numbers: those of the prologue, and of its tensors those of the row, by their names; counts: for each of this
    thread's vectors, then for its scalars, how many elements count, from the first on (0 for what does not exist);
    exist: whether there are any.
    """

    numbers: dict[str, Float32]
    counts: list[Int32]
    exist: list[Boolean]


def floats(prologue, numbers: dict[str, Int64]) -> dict[str, Float32]:
    """The floats among a launch's numbers, which come as their bits."""
    names = [name for name in prologue.numbers if name not in WHOLE]
    return {name: Int32(numbers[name]).bitcast(Float32) for name in names}


class Scores:
    """One thread's scores of a row, computed from its elements anew in each pass unless they are kept.

    Every pass rounds them alike, so that a row sums to 1 however large they are.
    """

    def __init__(self, prologue, inputs: dict[str, Fragment], given: Given, keep: bool):
        self.prologue, self.inputs, self.given = prologue, inputs, given
        self.staging, self.slots, self.waited = inputs["x"].staging, inputs["x"].slots, inputs["x"].waited
        self.kept = {} if keep and not self.slots else None
        # Padding that is capped, or scaled and nothing else, is finite.
        alone = prologue.scale and not (prologue.bias or prologue.mask)
        self.counted = prologue.causal or prologue.softcap or alone
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
            counts = self.given.counts[k:]
            x, bias = ([n.to(Float32) for n in numbers.get(name, ())] for name in ("x", "bias"))
            allowed = [n != 0 for n in numbers.get("mask", ())]
            return [self._score(x, bias, allowed, counts[v], 0, v) for v in range(len(x))]
        vectors = {name: fragment.packed(k) for name, fragment in self.inputs.items()}
        x, bias = (unpack(vectors[name]) if name in vectors else [] for name in ("x", "bias"))
        allowed = truths(vectors["mask"]) if "mask" in vectors else []
        return [self._score(x, bias, allowed, self.given.counts[k], v, v) for v in range(len(x))]

    def _score(self, x: list, bias: list, allowed: list, left: Int32, place: int, v: int) -> Float32:
        """The score of element v, of which `left` - `place` and more to come count."""
        return score_of(
            x[v],
            self.given.numbers.get("scale"),
            bias[v] if bias else None,
            allowed[v] if allowed else None,
            left > place if self.counted else None,
            self.given.numbers.get("softcap"),
        )

    def parts(self, steps: int) -> Iterator[list[Float32]]:
        """`Fragment.parts` of the scores."""
        for k in range(0, self.steps, steps):
            part = [score for j in range(k, min(k + steps, self.steps)) for score in self.vector(j)]
            yield part + (self.vector(self.steps) if k + steps >= self.steps else [])

    def parts_and_maxima(self, steps: int) -> Iterator[tuple[Callable[[], Float32], list[Float32]]]:
        """`Fragment.parts_and_maxima` of the scores."""
        for part in self.parts(steps):
            yield partial(tree, online.maximum, part), part

    def __iter__(self) -> Iterator[Float32]:
        for part in self.parts(1):
            yield from part

    def maximum(self) -> Float32:
        """The largest score; NaN if one is NaN."""
        return tree(online.maximum, self)


def score_of(
    x: Float32,
    scale: Float32 | None,
    bias: Float32 | None,
    allowed: Boolean | None,
    counts: Boolean | None,
    cap: Float32 | None = None,
) -> Float32:
    """The score of an element, by those of these that there are; counts: whether it does, wherever it lies; cap: what
    no score is beyond, see `online.capped`."""
    score = x
    if scale is not None and bias is not None:
        score = cute.math.fma(score, scale, bias)
    elif scale is not None:
        # Not to be joined with what is subtracted later: each pass would round in its own way.
        score = rounded_product(score, scale)
    elif bias is not None:
        score = score + bias
    if cap is not None:
        score = online.capped(score, cap)
    if allowed is not None:
        score = select(allowed, score, Float32(NOTHING))
    if counts is not None:
        score = select(counts, score, Float32(NOTHING))
    return score


class Packed:
    """Makes the elements of a row its scores in place, in the registers that hold them: a bias and a diagonal apart,
    all that has to happen to them is that some are -inf and, for a negative scale, that all are negated.

    The factor |scale| is left to the exponentials, see `online.Scaled`.
    """

    def __init__(self, inputs: dict[str, Fragment], given: Given):
        self.x, self.mask, self.given = inputs["x"], inputs.get("mask"), given
        scale = given.numbers.get("scale")
        self.negative = None if scale is None else scale < 0.0
        self.done = set()

    def fragment(self) -> Fragment:
        """The scores, over |scale|."""
        vectors = [lambda k=k: self.vector(k) for k in range(len(self.x.vectors))]
        scalars = [self.scalar(e, held) for e, held in enumerate(self.given.exist[len(vectors) :])]
        return Fragment(vectors, scalars, self.x.fresh, self.x.staging, self.x.slots, self.x.waited)

    def vector(self, k: int) -> cute.Tensor:
        vector = self.x.vectors[k]()
        if k not in self.done or self.x.staging == "shared":
            self.done.add(k)
            if self.negative is not None:
                negate(vector, self.negative & self.given.exist[k])
            if self.mask is not None:
                keep(vector, self.mask.vectors[k]())
        return vector

    def scalar(self, e: int, held: Boolean) -> Float32:
        x = self.x.scalars[e].to(Float32)
        if self.negative is not None:
            x = select(self.negative & held, -x, x)
        if self.mask is not None:
            x = select(self.mask.scalars[e] != 0, x, Float32(NOTHING))
        return x


def negate(vector: cute.Tensor, negative: Boolean) -> None:
    """Flip the signs of a register vector's elements."""
    width = vector.element_type.width
    if width * cute.size(vector) < 32:
        words, pattern = cute.recast_tensor(vector, Uint16), Uint16(0x8000)
    else:
        words, pattern = (
            cute.recast_tensor(vector, Uint32),
            Uint32(0x80000000 | (0x8000 if width == 16 else 0)),
        )
    flip = select(negative, pattern, type(pattern)(0))
    for j in range(cute.size(words)):
        words[j] = words[j] ^ flip


def keep(vector: cute.Tensor, mask: cute.Tensor) -> None:
    """Make the elements of a register vector -inf where those of a vector of bytes are 0, which may be one for all."""
    n, dtype = cute.size(vector), vector.element_type
    nothing = NOTHINGS[dtype]
    if n > cute.cosize(mask.layout):
        words, allowed = cute.recast_tensor(vector, Uint32), mask[0] != 0
        for j in range(cute.size(words)):
            words[j] = select(allowed, words[j], Uint32(nothing))
        return
    if n % 4:
        word = Uint16 if dtype.width == 16 else Uint32
        words = cute.recast_tensor(vector, word)
        for v in range(n):
            words[v] = select(mask[v] != 0, words[v], word(nothing >> (32 - word.width)))
        return
    words, bytes_ = cute.recast_tensor(vector, Uint32), cute.recast_tensor(mask, Uint32)
    # Of each byte the highest bit, set where any is; prmt spreads it over as many bytes as an element has.
    spread = (0x9988, 0xBBAA) if dtype.width == 16 else (0x8888, 0x9999, 0xAAAA, 0xBBBB)
    for j in range(n // 4):
        low = Uint32(0x7F7F7F7F)
        high = ((bytes_[j] & low) + low) | bytes_[j]
        for i, selector in enumerate(spread):
            at = j * len(spread) + i
            words[at] = cute.arch.inline_ptx(
                f"{{.reg .b32 w; prmt.b32 w, {{$r1}}, 0, {selector}; "
                f"lop3.b32 {{$w0}}, {{$r0}}, w, {nothing}, {WHERE};}}",
                write_only_types=[Uint32],
                read_only_args=[words[at], high],
            )


def truths(vector: cute.Tensor) -> list[Boolean]:
    """The elements of a register vector of bytes that are not 0."""
    n = cute.size(vector)
    if n > cute.cosize(vector.layout):
        return [vector[0] != 0] * n
    if n % 4:
        return [vector[v] != 0 for v in range(n)]
    words = cute.recast_tensor(vector, Uint32)
    return [words[v // 4] & Uint32(0xFF << 8 * (v % 4)) != 0 for v in range(n)]


class Prologued(RowMath):
    """A row math of scores.

    Panels take elements one by one: `elements` makes them scores, `term` and `result` go on from there, and of what
    `group_results` are none else. masks: whether a score is the element itself, or -inf by its mask, see `keep`.
    """

    def __init__(self, math: RowMath, prologue):
        self.math, self.prologue = math, prologue
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
        self.masks = self.names == ("x", "mask") and prologue.packs and not prologue.scale

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
        found[0].exist = given.exist[:steps], given.exist[steps:]
        return found

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
            results = [self.math.with_logs(*self.of(values), self.ended(state), alpha, *of_entropy)]
        else:
            results = self.math.finish(
                self.of(values), kept, self.ended(state), *([] if alpha is None else [alpha])
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
        return (y * online.cap_slope(score, cap) for y, score in zip(results, *self.of(values), strict=True))

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

    def __init__(self, math: RowMath, prologue):
        super().__init__(math, prologue)
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
        (result,) = self.math.finish(self.of(values), kept, self.ended(state), factor)
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

    def __init__(self, math: RowMath, prologue):
        super().__init__(math, prologue)
        self.group_outputs = ("sink_grad",) if prologue.sink else ("sum",) if prologue.state else ()
        self.inputs, self.outputs = math.inputs, () if prologue.state else math.outputs
        self.names, self.padding, self.rescores, self.masks = math.inputs, math.padding, False, False

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
