"""Row maths: what is loaded, reduced and written. A movement calls them; they know nothing of memory.

A row math has

- `inputs`, `outputs`, `group_inputs`, `group_outputs`: the names of its tensors, in the order of the kernel's operands;
  those of the last two kinds have one element per row;
- `padding`: per input, what an element outside the row counts as;
- `reductions`: the operators of its stages, in order;
- `whole`: the operator on the finished stages' states together, which parts of a row are merged with;
- `keep`: whether converted values stay in registers between the passes over the row;
- `together`: whether a stage takes an element of every input at once;
- `maximum_first`: whether the first stage takes the maximum of the first input's elements themselves;
- `term(stage, elements, carry)`: what an element of the row (of each input) adds to a stage;
- `result(elements, state)`: what becomes of it;
- `partial(stage, values, carry, width)`: this thread's part of one row, merged over `width` lanes; returns the
  state and whatever the thread wants to keep for `finish`; as a rule the `term`s of its elements;
- `advance(values, state)`: of a row that comes tile after tile, the numbers of all `reductions`: of a tile and of those
  before; `contributed(stage, state, carry)`: what of them goes into a stage;
- `finish(values, kept, state)`: the row's results, one iterable per output; as a rule the `result`s of its elements.
  kept: from the last `partial` for the same elements, or None; state: of `whole`, merged over all of the row;
- `group_results(state)`: one number per group output; with a group input "index", also of the element that it chooses.

`values` holds one `copy.Fragment` per input: the elements of the row that this thread owns. `carry` holds the
states of the finished stages, each merged over as much of the row as the threads that exchange hold.
"""

import copy
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator

import cutlass.cute as cute
from cutlass import Float32

from ..common import online
from ..common.copy import Fragment
from ..common.index import select
from ..common.online import Corrected, Fast, Near, Precise
from ..common.reduce import MAX, SUM, Averaged, Online, Scalar, Separate, tree


class RowMath:
    """What most row maths share: one stage, a sum unless it is the maximum; no result beyond the full ones.

    plain: whether it takes the elements of its inputs as they are, where padding stands for those that do not count.
    """

    outputs: tuple[str, ...] = ()
    group_inputs: tuple[str, ...] = ()
    group_outputs: tuple[str, ...] = ()
    keep = False
    together = False
    maximum_first = False
    plain = True

    @property
    def ordinary(self) -> tuple[Float32, ...]:
        """A state of `whole` with which all results are what they mostly are: that of nothing may make them NaN."""
        return tuple(Float32(1.0) for _ in self.whole.identity)

    def for_row(self, values: list) -> "RowMath":
        """The math of the row of these values, where it depends on them."""
        return self

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        if self.maximum_first:
            return MAX.lanes((values[0].maximum(),), width), None
        total = tree(operator.add, (self.term(stage, e, ()) for e in zip(*values, strict=True)))
        return SUM.lanes((total,), width), None

    def advance(self, values: list, state: tuple) -> tuple:
        """This thread's state of a part of the row, merged with that of what comes before."""
        return self.whole.merge(state, self.partial(0, values, [], 1)[0])

    def contributed(self, stage: int, state: tuple, carry: list) -> tuple:
        return state

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        return elements[0]

    def finish(self, values: list, kept: object, state: tuple) -> list:
        return [(self.result(e, state) for e in zip(*values, strict=True)) for _ in self.outputs]

    def group_results(self, state: tuple) -> list[Float32]:
        return [*state] if self.group_outputs else []


def wide(source: str) -> Near:
    """The exponentials of elements of a dtype for results stored in float32."""
    return Precise() if source == "fp32" else Corrected()


class Softmax(RowMath):
    """y = exp(x - max) / sum(exp(x - max)), online (one exchange of pairs) or in two passes (max, then sum).

    source: the elements' dtype; precise: for results stored in float32.
    keep: hold the exponentials until the end, in registers or in the elements' slots of shared memory; without it they
        are evaluated again, which costs a second exp2 per element and halves the registers of a 16-bit row.
    part: the online recurrence advances by so many vectors at a time, unless registers keep the whole row.
    total: the operator of the sum. recurs: advance by the online recurrence however the row comes; averages: see
    `averaged`.
    """

    inputs = ("x",)
    outputs = ("y",)
    padding = (-float("inf"),)
    maximum_first = True
    averages = recurs = False
    weights = None

    def __init__(
        self,
        source: str,
        *,
        online: bool,
        precise: bool,
        keep: bool,
        part: int = 2,
        exp: Fast | Near | None = None,
        total: Scalar = SUM,
    ):
        self.online, self.precise, self.keep, self.part = online, precise, keep, part
        self.exp = exp or (wide(source) if precise else Fast(source))
        self.whole = Online(self.exp, total)
        self.reductions = (self.whole,) if online else (MAX, total)

    def scaled(self, factor: Float32) -> "Softmax":
        """The math of elements times a positive factor."""
        exp = online.scaled(self.exp, factor)
        made = self.merged_by(type(self.whole)(exp, self.whole.total))
        made.exp = exp
        return made

    def separate(self) -> "Softmax":
        """The math whose state is the same for the same elements, whatever else its kernel computes. The products that
        exponentials are, are with powers of two: joined with sums or not they are the same."""
        return self.merged_by(Separate(self.exp, self.whole.total))

    def merged_by(self, whole: Online) -> "Softmax":
        """The math whose states another operator merges."""
        made = copy.copy(self)
        made.whole, made.reductions = whole, (whole,) if self.online else self.reductions
        return made

    def averaged(self) -> "Softmax":
        """The math with the sum and number of the elements' differences to the maximum in its state."""
        made = copy.copy(self)
        made.averages, made.recurs, made.whole = True, True, Averaged(self.exp, self.whole.total)
        made.reductions = (made.whole,)
        return made

    def exponentials(self, values: list, ref: Float32) -> Iterator[Float32]:
        return self.exp.exponentials(values, ref)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        (x,) = values
        if self.recurs or (self.online and (x.slots or not (x.staging == "direct" or self.keep or x.waited))):
            return self.by_parts(x, width)
        if stage == 0:
            (seen,) = MAX.lanes((x.maximum(),), width)
            if not self.online:
                return (seen,), None
        else:
            ((seen,),) = carry
        ref, kept = online.reference(seen), []
        parts = x.parts(self.part) if x.slots else [x]
        exponentials = (
            self.kept(x, k, seen, self.exponentials(part, ref), kept) for k, part in enumerate(parts)
        )
        (total,) = self.whole.total.over(itertools.chain.from_iterable(exponentials), width)
        return ((seen, total) if self.online else (total,)), kept

    def by_parts(self, x: Fragment, width: int, state: tuple | None = None) -> tuple:
        """`partial` by the online recurrence, part after part. state: of what comes before."""
        kept = []
        for k, (part_max, part) in enumerate(x.parts_and_maxima(self.part)):
            seen = part_max() if state is None else online.maximum(state[0], part_max())
            ref = online.reference(seen)
            sums = self.sums(self.kept(x, k, seen, self.exponentials(part, ref), kept), part, ref)
            if self.averages:
                sums = [*sums, *self.differences(x, k, part, ref)]
            if state is not None:
                sums = [a + b for a, b in zip(self.whole.seen_from(state, seen), sums, strict=True)]
            state = (seen, *sums)
        return self.whole.lanes(state, width) if width > 1 else state, kept

    def advance(self, values: list, state: tuple) -> tuple:
        return self.by_parts(values[0], 1, state)[0]

    def sums(self, exponentials: Iterable[Float32], part: list[Float32], ref: Float32) -> list[Float32]:
        """What a part of the row adds to the sums of the state, relative to `ref`."""
        return [tree(operator.add, exponentials)]

    def differences(self, x: Fragment, k: int, part: list[Float32], ref: Float32) -> tuple[Float32, Float32]:
        """(sum of the differences of part k's elements to `ref`, how many elements it has); padding counts nothing: a
        vector, or of one that is given so (`Given.each`) an element.

        With `weights`, an iterator of as many for each part: the sum of differences times weights, and that of these.
        """
        weights = next(self.weights) if self.weights else None
        vectors, scalars = x.exist
        vectors = vectors[k * self.part : (k + 1) * self.part]
        scalars = scalars if (k + 1) * self.part >= x.steps else []
        width, found = (len(part) - len(scalars)) // len(vectors), []
        for j, exists in enumerate((*vectors, *scalars)):
            first = min(j, len(vectors)) * width + max(j - len(vectors), 0)
            end, zero = first + (width if j < len(vectors) else 1), Float32(0.0)
            terms, count = (v - ref for v in part[first:end]), Float32(float(end - first))
            if isinstance(exists, list):
                total = tree(operator.add, (select(e, d, zero) for e, d in zip(exists, terms, strict=True)))
                found.append((total, tree(operator.add, (select(e, Float32(1.0), zero) for e in exists))))
                continue
            if weights is not None:
                terms = (w * d for w, d in zip(weights[first:end], terms, strict=True))
                count = tree(operator.add, weights[first:end])
            total = tree(operator.add, terms)
            found.append((select(exists, total, zero), select(exists, count, zero)))
        return tree(lambda a, b: (a[0] + b[0], a[1] + b[1]), found)

    def kept(
        self, x: Fragment, k: int, seen: Float32, exponentials: Iterator[Float32], kept: list
    ) -> Iterable[Float32]:
        """The exponentials of part k, relative to `seen`, as they are, and noted in `kept` as far as they are kept."""
        if self.keep:
            exponentials = list(exponentials)
            again = (
                x.slots.keep(k * self.part, self.part, exponentials)
                if x.slots
                else functools.partial(iter, exponentials)
            )
            kept.append((seen, again))
        return exponentials

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        return elements[0] if stage == 0 else self.exp.exponential(elements[0], online.reference(carry[0]))

    def result(self, elements: tuple, state: tuple) -> Float32:
        row_max, total = state
        exponential = self.exp.exponential(elements[0], online.reference(row_max))
        # Alone: what `inverse` takes of registers beside the total, panels do not have.
        if self.precise:
            return online.quotient(exponential, total)
        return exponential * cute.arch.rcp_approx(total)

    def finish(self, values: list, kept: list, state: tuple, alpha: Float32 | None = None) -> list:
        """alpha: a factor on the results."""
        return [self.results(values[0], kept, *state, alpha)]

    def results(
        self, x: Fragment, kept: list, row_max: Float32, total: Float32, alpha: Float32 | None
    ) -> Iterator[Float32]:
        inverse, rest = self.inverse(total)
        if alpha is not None and not self.precise:
            inverse, alpha = inverse * alpha, None
        for seen, again in kept or [
            (row_max, functools.partial(self.exponentials, x, online.reference(row_max)))
        ]:
            scaled = inverse, rest
            if seen is not row_max:
                # These refer to the maximum of a part of the row.
                correction = online.rescale(Float32(1.0), seen, row_max, self.exp)
                scaled = self.product(inverse, rest, correction)
            yield from self.quotients(again(), scaled, alpha)

    def inverse(self, total: Float32) -> tuple[Float32, Float32 | None]:
        """1 / total, rounded, and of precise results what that lacks. total: at least 1, or 0 where all is -inf, or
        NaN."""
        inverse = cute.arch.rcp_approx(total)
        return inverse, cute.math.fma(-total, inverse, Float32(1.0)) * inverse if self.precise else None

    def product(
        self, inverse: Float32, rest: Float32 | None, factor: Float32
    ) -> tuple[Float32, Float32 | None]:
        """An `inverse` times a factor."""
        if rest is None:
            return inverse * factor, None
        product = online.rounded_product(inverse, factor)
        return product, cute.math.fma(rest, factor, cute.math.fma(inverse, factor, -product))

    def with_logs(
        self, x: Fragment, state: tuple, alpha: Float32, down: Float32, entropy: Float32
    ) -> Iterator[Float32]:
        """y * (alpha + down * (log(y) + entropy)) instead of y, and 0 where that is 0."""
        row_max, total = state
        ref = online.reference(row_max)
        at_most = cute.math.fma(down, entropy - self.exp.norm(total, ref), alpha)
        inverse, slope = self.inverse(total), down * Float32(self.exp.unit)
        if not self.precise:
            at_most, slope = at_most * inverse[0], slope * inverse[0]
        for v in x:
            exponential, log = self.exp.power(v, ref)
            if self.precise:
                (exponential,) = self.quotients(iter([exponential]), inverse)
            yield exponential * cute.math.fma(slope, log, at_most)

    def quotients(
        self,
        exponentials: Iterable[Float32],
        inverse: tuple[Float32, Float32 | None],
        alpha: Float32 | None = None,
    ) -> Iterator[Float32]:
        """inverse: see the method. What is rounded of a precise result is the quotient itself, and nothing before."""
        inverse, rest = inverse
        for exponential in exponentials:
            if rest is None:
                quotient = exponential * inverse
            else:
                quotient = cute.math.fma(exponential, inverse, exponential * rest)
            yield quotient if alpha is None else quotient * alpha


class SoftmaxBackward(RowMath):
    """dx = y * (dy - sum(dy * y)). total: the operator of the sum."""

    inputs = ("dy", "y")
    outputs = ("dx",)
    padding = (0.0, 0.0)
    together = True

    def __init__(self, *, keep: bool, total: Scalar = SUM):
        self.keep, self.whole, self.reductions = keep, total, (total,)

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        dy, y = elements
        return dy * y

    def result(self, elements: tuple, state: tuple) -> Float32:
        (dy, y), (dot,) = elements, state
        return y * (dy - dot)


class LogSumExp(Softmax):
    """lse = max + log(sum(exp(x - max))): as softmax, but the elements are read and nothing else. exp: which
    exponentials, if not the fastest."""

    outputs = ()
    group_outputs = ("lse",)

    def __init__(self, source: str, *, online: bool, part: int = 2, exp: Fast | Near | None = None):
        super().__init__(source, online=online, precise=False, keep=False, part=part, exp=exp)

    def partial(self, stage: int, values: list, carry: list, width: int) -> tuple:
        (x,) = values
        if self.recurs or not (
            x.staging == "direct" or x.waited
        ):  # work on what is there while the rest is on its way
            return self.by_parts(x, width)
        # The maximum of all lanes first: their sums then refer to the same number and need no correction.
        (seen,) = MAX.lanes((x.maximum(),), width)
        ref = online.reference(seen)
        totals = self.sums(self.exponentials(x, ref), x, ref)
        return (seen, *(SUM.lanes((total,), width)[0] for total in totals)), None

    def finish(self, values: list, kept: None, state: tuple) -> list:
        return []

    def group_results(self, state: tuple) -> list[Float32]:
        row_max, total = state
        result = self.exp.score(row_max) + self.exp.log(total, online.reference(row_max))
        # +inf in the row has made the sum NaN; without NaN among the elements the result is +inf, as in torch.
        infinity = Float32(float("inf"))
        return [select(row_max == infinity, infinity, result)]


class LogSoftmax(LogSumExp):
    """y = (x - max) - log(sum(exp(x - max))); the difference first, which is exact where it matters."""

    outputs = ("y",)
    group_outputs = ()

    def __init__(self, source: str, *, online: bool, precise: bool, keep: bool):
        Softmax.__init__(
            self,
            source,
            online=online,
            precise=precise,
            keep=keep,
            exp=Precise() if precise and source == "fp32" else Near(),
        )

    def result(self, elements: tuple, state: tuple) -> Float32:
        row_max, total = state
        ref = online.reference(row_max)
        return self.exp.difference(elements[0], ref) - self.exp.log(total, ref)

    def finish(self, values: list, kept: None, state: tuple) -> list:
        ref = online.reference(state[0])
        log = self.exp.log(state[1], ref)
        return [(self.exp.difference(x, ref) - log for x in values[0])]

    def group_results(self, state: tuple) -> list[Float32]:
        return []


class LogSoftmaxBackward(SoftmaxBackward):
    """dx = dy - exp(y) * sum(dy).

    masked: where y is -inf it was masked, dx is 0 and dy does not count; without, dx is dy there, as in torch.
    """

    padding = (0.0, -float("inf"))
    together = False  # of y, exponentials are all that is needed, and last

    def __init__(self, *, precise: bool, masked: bool, keep: bool, total: Scalar = SUM):
        super().__init__(keep=keep, total=total)
        self.exp, self.masked = Precise() if precise else Fast("fp32"), masked

    def term(self, stage: int, elements: tuple, carry: tuple) -> Float32:
        dy, y = elements
        if self.masked:
            return select(y == -float("inf"), Float32(0.0), dy)
        return dy

    def result(self, elements: tuple, state: tuple) -> Float32:
        (total,) = state
        return self.term(0, elements, ()) - self.exp.exponential(elements[1], Float32(0.0)) * total


class Maximum(RowMath):
    """max of a row; NaN if one element is NaN."""

    inputs = ("x",)
    group_outputs = ("max",)
    padding = (-float("inf"),)
    reductions = (MAX,)
    whole = MAX
    maximum_first = True


class Sum(RowMath):
    """Sum of a row: pairwise within a thread, then over lanes, warps and CTAs by the operator `total`, in float32."""

    inputs = ("x",)
    group_outputs = ("total",)
    padding = (0.0,)

    def __init__(self, total: Scalar = SUM):
        self.whole, self.reductions = total, (total,)
