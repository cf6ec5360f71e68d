"""Scores: what a prologue makes of the elements of a row, `x * scale + bias`, or capped by a tanh, -inf where a mask is
False or beyond the diagonal.

A row math sees them as it sees a `copy.Fragment`. A movement hands each row's inputs to the math, and behind them one
`Given`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32

from ...plan.prologue import FROM_ABOVE, WHOLE
from ..common import online
from ..common.copy import Fragment, unpack
from ..common.index import select
from ..common.online import rounded_product
from ..common.reduce import tree

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
    exist: whether there are any. each: of each vector, which of its elements there are, where it may lie across the
    end of the row.
    """

    numbers: dict[str, Float32]
    counts: list[Int32]
    exist: list[Boolean]
    each: list[list[Boolean]] | None = None


def factored(prologue, numbers: dict[str, Float32]) -> dict[str, Float32]:
    """A row's numbers, the upstream gradients times the launch's factor, if it has one."""
    if not prologue.factor:
        return numbers
    return {n: x * numbers["factor"] if n in FROM_ABOVE else x for n, x in numbers.items()}


def floats(prologue, numbers: dict[str, Int64]) -> dict[str, Float32]:
    """The floats among a launch's numbers, which come as their bits."""
    names = [name for name in prologue.numbers if name not in WHOLE]
    return {name: Int32(numbers[name]).bitcast(Float32) for name in names}


class Scores:
    """One thread's scores of a row, computed from its elements anew in each pass unless they are kept.

    Every pass rounds them alike, so that a row sums to 1 however large they are; but for those that are capped, of
    which the last pass may have `rough` ones, see `online.capped`.
    """

    def __init__(self, prologue, inputs: dict[str, Fragment], given: Given, keep: bool, rough: bool = False):
        self.prologue, self.inputs, self.given, self.rough = prologue, inputs, given, rough
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
            self.rough,
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
    scale: Float32 | None = None,
    bias: Float32 | None = None,
    allowed: Boolean | None = None,
    counts: Boolean | None = None,
    cap: Float32 | None = None,
    rough: bool = False,
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
        score = online.capped(score, cap, rough)
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
    # prmt spreads the highest bit of a byte over as many bytes as an element has.
    spread = (0x9988, 0xBBAA) if dtype.width == 16 else (0x8888, 0x9999, 0xAAAA, 0xBBBB)
    for j in range(n // 4):
        high = highest_bits(bytes_[j])
        for i, selector in enumerate(spread):
            at = j * len(spread) + i
            words[at] = cute.arch.inline_ptx(
                f"{{.reg .b32 w; prmt.b32 w, {{$r1}}, 0, {selector}; "
                f"lop3.b32 {{$w0}}, {{$r0}}, w, {nothing}, {WHERE};}}",
                write_only_types=[Uint32],
                read_only_args=[words[at], high],
            )


def highest_bits(word: Uint32) -> Uint32:
    """A word whose bytes have their highest bits set where any of their bits is; of the others some may be."""
    low = Uint32(0x7F7F7F7F)
    return ((word & low) + low) | word


def truths(vector: cute.Tensor) -> list[Boolean]:
    """The elements of a register vector of bytes that are not 0."""
    n = cute.size(vector)
    if n > cute.cosize(vector.layout):
        return [vector[0] != 0] * n
    if n % 4:
        return [vector[v] != 0 for v in range(n)]
    words = cute.recast_tensor(vector, Uint32)
    return [words[v // 4] & Uint32(0xFF << 8 * (v % 4)) != 0 for v in range(n)]


def bits_of(mask: cute.Tensor) -> Uint32:
    """A bit for each byte of a register vector, of four or a multiple, set where the byte is not 0."""
    bytes_, found = cute.recast_tensor(mask, Uint32), Uint32(0)
    for j in range(cute.size(bytes_)):
        set_ = (highest_bits(bytes_[j]) >> 7) & Uint32(0x01010101)
        # Byte b to bit 24 + b: nothing else comes there.
        found = found | (set_ * Uint32(0x01020408) >> 24) << (4 * j)
    return found


def bytes_of(bits: Uint32, n: int) -> cute.Tensor:
    """The register vector of n bytes, 1 or 0, of so many bits."""
    mask = cute.make_rmem_tensor(n, Uint8)
    bytes_ = cute.recast_tensor(mask, Uint32)
    for j in range(n // 4):
        # Bit b to bit 8 * b, by a shift of 7 * b.
        bytes_[j] = ((bits >> (4 * j)) & Uint32(0xF)) * Uint32(0x00204081) & Uint32(0x01010101)
    return mask
