"""The k largest of a row's elements, in order: keys that hold an element and its index, sorted in a lane and between
lanes.

Keys are integers that compare as the elements do, NaN above all, and of equal elements the one of the lower index as
the larger: no two are equal, and a key says all that there is to know. Of 16 bits a key takes 32, of a float32 it takes
64, which are compared and moved in three times as many instructions. So there are rough keys of a float32, too, in 32
bits, in which an index takes the place of its last bits: as long as no two that follow each other differ in the index
alone, their order is right. Where two do, the elements themselves are compared; where three do, or the last one chosen
and the next, the largest elements are taken one by one from there on. All but multiply-adds, keys of 64
bits and the methods of `Keys` holds for plain integers, too, and for arrays of them.

A lane sorts its elements in blocks and merges these, keeping the largest ones. Then the lists of lanes are merged, of
which each in the end has as many as there are; or the largest of the lanes' first ones is taken k times, and the lane
that had it moves up. Source of the networks: Batcher, "Sorting networks and their
applications", 1968.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric

from ...plan.topk import GROW, HALVE, TopkClass
from ..common.copy import unpack, vector_of
from ..common.index import select

Exchange = Callable[[Numeric, Numeric], tuple[Numeric, Numeric]]


def ordered(bits: Int32, kept: int) -> Int32:
    """The bits of a float as an integer that compares as it does, and such an integer's bits: its own inverse.

    kept: a mask of the bits but the sign.
    """
    return bits ^ ((bits >> 31) & kept)


def exchange(a: Numeric, b: Numeric) -> tuple[Numeric, Numeric]:
    """(the larger, the smaller)."""
    if isinstance(a, Int32):
        return cutlass.max(a, b), cutlass.min(a, b)
    below = a < b  # of 64 bits two instructions: not twice
    return select(below, b, a), select(below, a, b)


def balanced(one: Int32) -> Exchange:
    """`exchange` of keys of 32 bits that finds two smaller ones of three as the sum without the larger one: in two
    multiply-adds, which have a pipe of their own beside that of comparisons.

    one: 1, which the compiler must not know, or it would make additions of them.
    """
    turns, minus = itertools.cycle((True, True, False)), 0 - one

    def exchange(a: Int32, b: Int32) -> tuple[Int32, Int32]:
        high = cutlass.max(a, b)
        if next(turns):
            return high, multiply_add(high, minus, multiply_add(a, one, b))
        return high, cutlass.min(a, b)

    return exchange


def multiply_add(a: Int32, b: Int32, c: Int32) -> Int32:
    """a * b + c in one instruction."""
    return cute.arch.inline_ptx(
        "mad.lo.s32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, c]
    )


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Pairs of places, a power of two of them, that sort when the larger goes to the first of each: odd-even merges."""
    half = 1
    while half < count:
        step = half
        while step:
            for start in range(step % half, count - step, 2 * step):
                for i in range(start, min(start + step, count - step)):
                    if i // (2 * half) == (i + step) // (2 * half):
                        yield i, i + step
            step //= 2
        half *= 2


def sort(keys: list, pairs: Iterable[tuple[int, int]], exchange: Exchange = exchange) -> None:
    """Exchange the keys of pairs of places, the larger to the first."""
    for i, j in pairs:
        keys[i], keys[j] = exchange(keys[i], keys[j])


def bitonic(count: int) -> Iterator[tuple[int, int]]:
    """Pairs of places that sort what rises and falls, or falls and rises, once."""
    step = count // 2
    while step:
        for i in range(count):
            if not i & step:
                yield i, i + step
        step //= 2


def largest(keys: Iterator, count: int, length: int, exchange: Exchange = exchange) -> list:
    """The `length` largest of so many keys, the largest first; both are powers of two. Keys are taken a block at a
    time, so that no more than three blocks are held."""
    found = None
    for _ in range(0, count, length):
        block = [next(keys) for _ in range(length)]
        sort(block, comparators(length), exchange)
        if found is None:
            found = block
        else:
            # One list falls, the other, from its end, rises: the larger of each pair are the largest of all.
            found = [exchange(a, b)[0] for a, b in zip(found, reversed(block), strict=True)]
            sort(found, bitonic(length), exchange)
    return found


def merged(
    c: TopkClass,
    keys: list,
    lane: Numeric,
    other: Callable[[Numeric, int], Numeric],
    exchange: Exchange = exchange,
) -> tuple[list, list]:
    """(this lane's share of the largest keys of all lanes, what it left out): by the class's `merges`, in its `places`.

    keys: this lane's, sorted. lane: its number; other(key, bits): the key of the lane whose number differs in these
    bits. The larger keys of a pair of lists of which one is turned around rise and fall, and so do the smaller ones:
    what sorts these is `bitonic`, of places that are bits of the lane as well as of a key's index.
    """
    keys, out = list(keys), []

    def sorted_by(bit: int, turned: bool = False) -> list:
        upper = (lane >> bit) & 1 == 1
        theirs = [other(key, 1 << bit) for key in (reversed(keys) if turned else keys)]
        return [pick(upper, key, its) for key, its in zip(keys, theirs, strict=True)]

    for bit, what in enumerate(c.merges):
        bits, _ = c.places_after(bit)
        mirrored = sum(1 << b for b in (*bits, bit))
        count = len(keys) if what == GROW else max(len(keys) // 2, 1)
        theirs = [other(key, mirrored) for key in reversed(keys[-count:])]
        pairs = [exchange(key, its) for key, its in zip(keys[:count], theirs, strict=True)]
        if what == GROW:
            upper = (lane >> bit) & 1 == 1
            keys = [select(upper, low, high) for high, low in pairs]
        else:
            keys = [high for high, _ in pairs]
            out += [low for _, low in pairs]
        for b in bits:
            keys = sorted_by(b)
        if what == HALVE:
            keys = sorted_by(bit, turned=True)
        sort(keys, bitonic(len(keys)), exchange)
    return keys, out


def places(c: TopkClass, lane: Numeric) -> list:
    """The places of a lane's results among the largest of its row; `kept` for those that it has copies of."""
    place = lane * 0
    for bit in c.place_bits:
        place = place * 2 + ((lane >> bit) & 1)
    others = c.threads_per_row - 1 - sum(1 << bit for bit in c.place_bits)
    found = [place * c.slots + i for i in range(c.slots)]
    return [select(lane & others == 0, i, lane * 0 + c.kept) for i in found] if others else found


def lane_of(c: TopkClass, place: Numeric) -> Numeric:
    """The lane that has the first of so many slots: of place number `place`, counted in lanes."""
    lane = place * 0
    for i, bit in enumerate(reversed(c.place_bits)):
        lane = lane | (((place >> i) & 1) << bit)
    return lane


def doubtful(
    c: TopkClass,
    chosen: list,
    beyond: Numeric,
    lane: Numeric,
    k: Numeric,
    of_lane: Callable[[Numeric, Numeric], Numeric],
) -> tuple[list[Boolean], list[Boolean]]:
    """Of this lane's rough keys, of `places`: (whether a key and the next place's are `alike`, and `settled` does not
    put them in order; whether they are alike and it does).

    It does not see to the last one chosen and the largest that was left out, nor to three alike in a row. Up to the
    first that it does not see to, all are in their places. beyond: the largest key that was left out. of_lane(key,
    lane): that lane's key.
    """
    last, mine = c.capacity - 1, places(c, lane)
    place = mine[-1] // c.slots + 1
    following = lane_of(c, place)
    at_end = place == 1 << len(c.place_bits)
    nexts = [*chosen[1:], select(at_end, beyond, of_lane(chosen[0], following))]
    same = [(n < k) & alike(key, its, last) for n, key, its in zip(mine, chosen, nexts, strict=True)]
    ones = [select(x, lane * 0 + 1, lane * 0) for x in same]
    after = [*ones[1:], select(at_end, lane * 0, of_lane(ones[0], following))]
    unsure = [x & ((n == k - 1) | (a == 1)) for n, x, a in zip(mine, same, after, strict=True)]
    near = [x & (n < k - 1) for n, x in zip(mine, same, strict=True)]
    return unsure, near


def settled(
    c: TopkClass,
    elements: list,
    indices: list,
    near: list[Boolean],
    lane: Numeric,
    of_lane: Callable[[Numeric, Numeric], Numeric],
) -> tuple[list, list]:
    """This lane's elements and their indices, in order where rough keys of neighbours were alike (`near`)."""
    place = places(c, lane)[0] // c.slots
    following, preceding = lane_of(c, place + 1), lane_of(c, place - 1)

    def shifted(numbers: list) -> tuple[list, list]:
        """(what the next place has, what the one before has)."""
        after, before = of_lane(numbers[0], following), of_lane(numbers[-1], preceding)
        return [*numbers[1:], after], [before, *numbers[:-1]]

    (after, before), (next_index, index_before) = shifted(elements), shifted(indices)
    swap = [x & (b > a) for x, a, b in zip(near, elements, after, strict=True)]
    ones = [select(x, lane * 0 + 1, lane * 0) for x in swap]
    swapped = [x == 1 for x in shifted(ones)[1]]
    swapped[0] = swapped[0] & (place > 0)

    def exchanged(own: list, after: list, before: list) -> list:
        both = zip(swap, swapped, own, after, before, strict=True)
        return [select(up, b, select(down, a, x)) for up, down, x, b, a in both]

    return exchanged(elements, after, before), exchanged(indices, next_index, index_before)


def pick(upper: Boolean, a: Numeric, b: Numeric) -> Numeric:
    """The smaller of two keys in upper lanes, in others the larger."""
    return select((a > b) ^ upper, a, b)


def rough_key(bits: Numeric, code: Numeric, last: int) -> Numeric:
    """The key, in 32 bits, of an element of which its last ones do not count, and of an index whose code has these, at
    most `last`, which is a power of two less one."""
    return ordered(bits & ~last | code, 0x7FFFFFFF & ~last)


def wide_key(number: Int32, code: Int32) -> Int64:
    """The key, in 64 bits, of an `ordered` number whose index has a code."""
    return (Int64(number) << 32) + code


def alike(a: Numeric, b: Numeric, last: int) -> Boolean:
    """Whether two rough keys differ in their codes alone, so that their order says nothing."""
    return ((a ^ b) & ~last) == 0


class Keys:
    """Keys of the elements of one dtype in rows of `capacity` elements, a power of two.

    An index is coded as what it lacks to the last one: larger for lower ones, and in fewer bits than a 16-bit element
    leaves of 32.
    """

    def __init__(self, dtype: type, capacity: int, rough: bool = False):
        self.dtype, self.last, self.rough = dtype, capacity - 1, rough
        self.full = dtype.width == 32
        self.wide = self.full and not rough
        # The bits of an element but its sign, as they lie in a float32 or in the upper half of a word.
        self.kept = 0x7FFFFFFF if self.full else 0x7FFF0000
        self.lowest = (Int64 if self.wide else Int32)(-(1 << (63 if self.wide else 31)))  # below all keys

    def lane_keys(self, held: cute.Tensor, columns: list[int], first: Int32, one: Int32) -> Iterator:
        """The keys of a lane's elements.

        columns: of each element relative to `first`, the column of the lane's own first one, which has no bit in common
        with any of them. one: 1, see `balanced`.
        """
        code = Int32(self.last) - first
        if self.rough:
            # A number that the compiler does not see through is joined with masked bits in one instruction.
            code = multiply_add(one, Int32(self.last), -first)
        for bits, column in zip(self.bits(held), columns, strict=True):
            if self.wide:
                yield wide_key(ordered(bits, self.kept), code - column)
            elif self.rough:
                yield multiply_add(one, Int32(-column), rough_key(bits, code, self.last))
            else:
                yield ordered(bits, self.kept) + (code - column)

    def bits(self, held: cute.Tensor) -> Iterator[Int32]:
        """The bits of elements, 16-bit ones in the upper half of a word. -0 becomes 0, and all NaN one, which is
        positive."""
        if self.full:
            for j in range(cute.size(held)):
                yield normal(held[j]).bitcast(Int32)
            return
        words = cute.recast_tensor(held, Int32)
        for j in range(cute.size(words)):
            word = packed_normal(words[j], self.dtype)
            yield word << 16
            yield word & Int32(-65536)

    def element(self, key: Numeric) -> Float32:
        """The element of a key; of a rough one without its last bits."""
        if self.wide:
            return ordered(Int32(key >> 32), self.kept).bitcast(Float32)
        if self.full:
            return (ordered(key, self.kept & ~self.last) & ~self.last).bitcast(Float32)
        word = ordered(key, self.kept)
        return unpack(vector_of([word.bitcast(cutlass.Uint32)], self.dtype))[1]

    def index(self, key: Numeric) -> Int32:
        """The index of a key."""
        return Int32(self.last) - (Int32(key) & Int32(self.last))

    def largest_of_lanes(self, key: Numeric) -> Numeric:
        """The largest key of a warp's lanes, in all of them."""
        if not self.wide:
            return cute.arch.warp_redux_sync(key, "max")
        # The upper halves first: where they are not the largest nothing is to be found in the lower ones.
        upper = cute.arch.warp_redux_sync(Int32(key >> 32), "max")
        code = Int32(key) & Int32(self.last)
        code = cute.arch.warp_redux_sync(select(Int32(key >> 32) == upper, code, Int32(0)), "max")
        return (Int64(upper) << 32) + code


def normal(x: Float32) -> Float32:
    """x, but 0 for -0 and the canonical NaN for any."""
    return cute.arch.inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[x]
    )


def packed_normal(word: Int32, dtype: type) -> Int32:
    """`normal` of both halves."""
    name, one = ("bf16x2", "0x3F803F80") if dtype is cutlass.BFloat16 else ("f16x2", "0x3C003C00")
    return cute.arch.inline_ptx(
        f"{{.reg .b32 one, zero; mov.b32 one, {one}; mov.b32 zero, 0; "
        f"fma.rn.{name} {{$w0}}, {{$r0}}, one, zero;}}",
        write_only_types=[Int32],
        read_only_args=[word],
    )
