"""What a prologue makes of a panel's elements: numbers of their groups, and a bias or a mask beside them.

A bias or a mask comes to shared memory as the elements do, a vector beside each of theirs. Where loads of 4 bytes and
more bring such a vector it lies there as it is. Others begin anywhere: the aligned words that hold something of them
are copied, and shifted into place when they are looked at. Of what is one element for a whole vector, and for those of
the threads beside, there is one in shared memory, see `PanelClass.tile_of`.

    bytes of a mask    | . . . a | b c d e | f g h . |        a vector of 8, 3 bytes into its first word
    in registers       | a b c d | e f g h |
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ...plan import PanelClass
from ...plan.panel_class import WORD
from ..common.copy import element, funnel_shift, load_async, load_if, unpack, vector_of
from ..common.index import larger, narrow, smaller
from ..maths.maths import RowMath
from ..maths.scores import NOTHINGS, truths

if TYPE_CHECKING:
    from .work import Chunk, Item, Launch


@dataclass(frozen=True)
class Numbers:
    """What the prologue has for a thread's groups, per slot: factors, how many elements are before the diagonal, and
    sinks; None for what there is not."""

    scale: list[Float32] | None
    alpha: list[Float32] | None
    limit: list[Int32] | None
    sink: list[Float32] | None

    def of(self, slot: int) -> tuple[Float32 | None, Float32 | None]:
        """(scale, alpha) of a slot's group."""
        return tuple(None if n is None else n[slot] for n in (self.scale, self.alpha))


class Scores:
    """The elements of a panel as a row math takes them.

    floats: inputs that are no mask; cuts: whether padding stands for what lies beyond a diagonal, see `Chunks.cut`;
    plain: whether it stands for all that does not count, and the math takes elements as they are.
    """

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec, self.math = spec, math
        self.floats = [i for i, name in enumerate(math.inputs) if name != "mask"]
        self.cuts = spec.hides and math.plain and all(spec.access[i] for i in self.floats)
        self.plain = math.plain and (self.cuts or not spec.prologue.causal)
        full = len(math.inputs) + len(math.outputs)
        self.group_inputs = {name: full + i for i, name in enumerate(math.group_inputs)}

    # Numbers.

    def known(self, item: "Item") -> "Item":
        """An item with the numbers of its groups. Of a group that does not exist they are 0."""
        if not self.spec.prologue:
            return item
        limit = None
        if self.spec.prologue.causal:
            offset = Int32(item.launch.numbers["offset"])
            limit = [position + offset + 1 for position in positions(item)]
        scale, alpha, sink = (self.number(item, name) for name in ("scale", "alpha", "sink"))
        return replace(item, numbers=Numbers(scale, alpha, limit, sink))

    def number(self, item: "Item", name: str) -> list[Float32] | None:
        """A number of each slot's group."""
        launch, slots = item.launch, range(self.spec.slots)
        if name in launch.numbers:
            return [Int32(launch.numbers[name]).bitcast(Float32)] * len(slots)
        if name not in self.group_inputs:
            return None
        i = self.group_inputs[name]
        mX, exist = launch.mX[i], (item.index < launch.items) & item.inside
        return [
            load_if(exist if item.line is None else exist & item.line.has(v), element).to(Float32)
            for v in slots
            for element in [mX.element(item.starts[i] + v * mX.kept[0])]
        ]

    def joined(self, item: "Item", states: list) -> list:
        """Per slot the state of the whole group, which its sink has joined if there is one."""
        if not self.spec.prologue.sink:
            return states
        return [self.math.joined(*each) for each in zip(states, item.numbers.sink, strict=True)]

    # Elements.

    def vector(self, item: "Item", tXrX: list[cute.Tensor], k: int, at: Int32, rest: Int32) -> list[tuple]:
        """What the math takes of a thread's vector k, of which tXrX are all inputs, of the chunk at element `at`, of
        which so much is left (see `work.left`)."""
        s, math = self.spec, self.math
        if self.plain:  # as a mask has left them, see `Chunks.masked`
            return zip(*(unpack(tXrX[i]) for i in self.floats), strict=True)
        numbers = zip(*(self.numbers(i, vector) for i, vector in enumerate(tXrX)), strict=True)
        exists, first = rest > k * s.down * s.unit, at + (item.launch.d + k * s.down) * s.unit
        found = []
        for v, each in enumerate(numbers):
            slot = v % s.slots
            counts = exists
            if s.prologue.causal:
                counts = exists & (first + (v if s.unit > 1 else 0) < item.numbers.limit[slot])
            found.append(math.elements(each, item.numbers.of(slot)[0], counts))
        return found

    def scalar(self, item: "Item", x: list, at: Int32, exists: Boolean) -> tuple:
        """What the math takes of a scalar at a row's edges: element `at` of each input, if it exists."""
        if not self.spec.prologue:
            return tuple(n.to(Float32) for n in x)
        beside = self.spec.dtypes
        numbers = tuple(n != 0 if beside[i] == "bool" else n.to(Float32) for i, n in enumerate(x))
        if self.spec.prologue.causal:
            exists = exists & (at < item.numbers.limit[0])
        return self.math.elements(numbers, item.numbers.of(0)[0], exists)

    def numbers(self, i: int, vector: cute.Tensor) -> list:
        """The elements of a register vector: truth for a mask."""
        found = truths(vector) if self.spec.dtypes[i] == "bool" else unpack(vector)
        return found[: self.spec.vector]  # those of less than a word lie in one

    def result(self, item: "Item", elements: tuple, states: list, slot: int) -> Float32:
        """What becomes of what `vector` or `scalar` gave. states: per slot that of the whole group."""
        if not self.spec.prologue:
            return self.math.result(elements, states[slot])
        return self.math.result(elements, states[slot], *item.numbers.of(slot))

    # Words.

    def copy_words(self, launch: "Launch", chunk: "Chunk", i: int, place: Int64, step: Int32) -> None:
        """Copy the words that hold something of the vector of input i at `place` into this thread's own of a step; of
        the last not what lies behind it."""
        itemsize = launch.mX[i].itemsize
        tXsX, into = launch.shared.tXsX[i][None, step], into_word(place)
        for j in range(self.spec.words(i)):
            gX = element(Uint32, place - into, j)
            sX = cute.make_tensor(tXsX.iterator + j, cute.make_layout(1))
            load_async(gX, sX, 1, None, exist=wanted(self.spec, i, itemsize, into, chunk.wanted, j))

    def fill_words(self, launch: "Launch", i: int, step: Int32) -> None:
        """Put padding into this thread's own words of a step."""
        tXsX = launch.shared.tXsX[i][None, step]
        dtype = launch.mX[i].dtype
        for j in range(self.spec.words(i)):
            tXsX[j] = Uint32(NOTHINGS.get(dtype, 0))

    def from_words(self, launch: "Launch", i: int, place: Int64, step: Int32) -> cute.Tensor:
        """tXrX: the vector at `place` of input i, of whose words of a step this thread has its own."""
        s, mX = self.spec, launch.mX[i]
        rW = cute.make_rmem_tensor(s.words(i), Uint32)
        cute.autovec_copy(launch.shared.tXsX[i][None, step], rW)
        words = [rW[j] for j in range(s.words(i))]
        needed = -(-s.vector * mX.itemsize // WORD)
        if s.access[i] * mX.itemsize < WORD:
            bits = into_word(place) * 8
            words = [
                funnel_shift(a, b, bits, False) for a, b in zip(words, [*words[1:], words[-1]], strict=True)
            ]
        return vector_of(words[:needed], mX.dtype)


def positions(item: "Item") -> list[Int32]:
    """The positions of a thread's groups, per slot: their indices in the mode of queries."""
    s = item.launch.spec
    return [item.position + (v if s.query == 0 else 0) for v in range(s.slots)]


def into_word(place: Int64) -> Int32:
    """Bytes from a word's beginning to an address."""
    return narrow(place & (WORD - 1))


def wanted(
    spec: PanelClass, i: int, itemsize: int, into: Int32, beside: Int32 | None, j: int
) -> Int32 | None:
    """Bytes of word j that are read for a vector of input i that begins so many bytes `into` the first; None for all.

    beside: elements from the vector's first to the end of the tensor's row, where columns are shifted.
    """
    size = spec.vector * itemsize
    if beside is not None:
        size = smaller(beside, spec.vector) * itemsize
    elif size >= WORD * (j + 1):
        return None
    return smaller(larger(into + size - WORD * j, 0), WORD)
