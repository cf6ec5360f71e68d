"""The map: which calls cover the plane of lengths and counts. Plain data; needs neither torch nor a GPU.

A line is one operation over many lengths, the rest held; a slice is lines that are run, saved and resumed together.
Lengths come from a grid, from powers of two and just past them, from primes and from the vocabularies in use: none of
them knows where a plan changes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from .cases import CAUSAL, DEPTH, ITEM_BYTES, MASK, SCALED, TO, Case, Suite

VOCABULARIES = (
    32000, 32768, 50257, 50304, 65024, 92416, 100352, 102400, 128256, 129280, 151552, 151936, 152064, 154880,
    200064, 201088, 256000, 262144,
)  # fmt: skip
LONGEST = 1 << 28
PAST = 8  # elements past a power of two: still whole vectors, and often the next configuration
FILL_BYTES = 256 << 20  # of the input, where a line has as many rows as keep the memory busy
MOST_BYTES = 4 << 30  # of one tensor: what is larger is left out
FEW, SOME = 4, 64  # rows, or columns
FINE, COARSE = 1.2, 1.5
ALIGNMENT = 16  # bytes of the widest vector
# In the place of a size: the length of the line, and as many as fill `FILL_BYTES`, in whole vectors or an odd number.
N, MANY, ODD = "N", "many", "odd"


def grid(step: float, longest: int = LONGEST) -> list[int]:
    """Whole numbers from 1, each about `step` times the one before; from 64 on multiples of 8, so that neighbours begin
    at vector boundaries alike."""
    found = (round(step**i) for i in range(math.floor(math.log(longest, step)) + 1))
    return sorted({n if n < 64 else n // 8 * 8 for n in found})


def powers(longest: int = LONGEST) -> list[int]:
    """Powers of two, and what lies `PAST` each."""
    return sorted({n for i in range(longest.bit_length()) for n in (1 << i, (1 << i) + PAST) if n <= longest})


def primes(longest: int = LONGEST) -> list[int]:
    """A prime in the middle of each octave."""
    from sympy import nextprime

    found = (int(nextprime((3 << i >> 1) - 1)) for i in range(longest.bit_length()))
    return sorted({n for n in found if n <= longest})


def lengths(step: float, longest: int = LONGEST) -> tuple[int, ...]:
    """The lengths of a line; a fine one has powers of two and primes as well."""
    more = [*powers(longest), *primes(longest)] if step == FINE else []
    return tuple(sorted({*grid(step, longest), *more, *(n for n in VOCABULARIES if n <= longest)}))


def beside_peers() -> tuple[int, ...]:
    """Where peers are measured: every vocabulary, every power of two, a prime an octave."""
    return tuple(sorted({*VOCABULARIES, *(1 << i for i in range(LONGEST.bit_length())), *primes()}))


@dataclass(frozen=True)
class Line:
    """One operation over `lengths`: `sizes` is its shape, with `N` where it is reduced, and `MANY` or `ODD`."""

    op: str
    dtype: str
    sizes: tuple[int | str, ...]
    lengths: tuple[int, ...]
    mode: str = ""

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return " ".join(filter(None, (self.op, self.dtype, self.mode, " x ".join(map(str, self.sizes)))))

    def shape(self, length: int) -> tuple[int, ...]:
        """The shape of the call with this length."""
        known = math.prod(n for n in self.sizes if isinstance(n, int)) * length * ITEM_BYTES[self.dtype]
        fill = max(FILL_BYTES // known, 1)
        vectors = fill // ALIGNMENT * ALIGNMENT or fill
        values = {N: length, MANY: vectors, ODD: (vectors - 1) | 1}
        return tuple(values.get(n, n) for n in self.sizes)

    @cached_property
    def cells(self) -> dict[int, Case]:
        """The calls by length, those whose tensors are small enough."""
        dim = self.sizes.index(N)
        dims = (-1,) if dim == len(self.sizes) - 1 else (dim,)
        made = {n: Case(self.op, self.shape(n), self.dtype, dims, self.mode) for n in self.lengths}
        width = max(ITEM_BYTES[self.dtype], ITEM_BYTES[self.mode.removeprefix(TO)] if TO in self.mode else 0)
        return {n: case for n, case in made.items() if case.elements * width <= MOST_BYTES}

    def alignment(self, length: int) -> int:
        """The widest vector, in elements, at whose boundaries all rows (or the lines of columns) begin."""
        behind = self.shape(length)[self.sizes.index(N) + 1 :]
        return math.gcd(math.prod(behind) if behind else length, ALIGNMENT // ITEM_BYTES[self.dtype])


@dataclass(frozen=True)
class Slice:
    """Lines that are run and saved together."""

    name: str
    title: str
    lines: tuple[Line, ...]
    providers: tuple[str, ...] = ("cute_softmax", "copy")

    @cached_property
    def suite(self) -> Suite:
        """Its cells as a suite: a call that two lines have is measured once."""
        cells = dict.fromkeys(case for line in self.lines for case in line.cells.values())
        return Suite(self.name, self.title, tuple(cells), self.providers, kind="map")


def _rows(op: str, dtype: str, found: tuple[int, ...], mode: str = "") -> tuple[Line, ...]:
    return tuple(Line(op, dtype, (beside, N), found, mode) for beside in (FEW, SOME, MANY))


def _slices() -> tuple[Slice, ...]:
    fine, coarse = lengths(FINE), lengths(COARSE)
    tall = lengths(COARSE, 1 << 22)
    over_images = lengths(COARSE, 1 << 14)
    on_chip = lengths(COARSE, 1 << 20)  # rows that a cluster holds
    peers = ("cute_softmax", "copy", "torch", "torch.compile", "liger", "quack")

    made = [
        Slice(f"map-softmax-{d}", f"softmax over rows of every length, {d}", _rows("softmax", d, fine))
        for d in ("bf16", "fp32")
    ]
    made += [
        Slice(f"map-{name}", f"{title} over rows of every length", tuple(lines))
        for name, title, lines in (
            ("other-types", "softmax in other types", (
                *_rows("softmax", "fp16", coarse), *_rows("softmax", "bf16", coarse, f"{TO}fp32"))),
            *((op.replace("_", "-"), op, (*_rows(op, "bf16", coarse), *_rows(op, "fp32", coarse)))
              for op in ("softmax_backward", "log_softmax", "logsumexp")),
            ("scores", "scaled, masked and causal softmax", (
                line for mode in (SCALED, MASK, CAUSAL) for line in _rows("masked_softmax", "bf16", coarse, mode))),
            ("heads", "cross entropy with its gradient, and log-probabilities of given tokens,", (
                *_rows("cross_entropy", "bf16", on_chip), *_rows("selective_log_softmax", "bf16", on_chip))),
        )
    ]  # fmt: skip
    made += [
        Slice(
            "map-columns",
            "softmax and its gradient over the first dimension, every height",
            tuple(
                Line(op, dtype, (N, beside), tall)
                for op, dtype in (("softmax", "bf16"), ("softmax", "fp32"), ("softmax_backward", "bf16"))
                for beside in (FEW, SOME, MANY, ODD)
            ),
        ),
        Slice(
            "map-images",
            "softmax and its gradient over the channels of images",
            tuple(
                Line(op, "bf16", (MANY, N, size, size), over_images)
                for op in ("softmax", "softmax_backward")
                for size in (55, 56)
            ),
        ),
        Slice(
            "map-products",
            "softmax(S) @ V over batch, rows, columns and depth; the yardstick is the product alone",
            tuple(
                Line("softmax_matmul", "bf16", (batch, rows, N), (1000, 1024, 4096, 16384), f"{DEPTH}{depth}")
                for batch, rows, depth in itertools.product((1, 8, 64), (1, 64, 1024, 4096), (64, 128, 256))
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
    ]
    made += [
        Slice(
            f"map-peers-{d}",
            f"softmax over rows beside its peers, {d}",
            _rows("softmax", d, beside_peers()),
            peers,
        )
        for d in ("bf16", "fp32")
    ]
    return tuple(made)


SLICES = {found.name: found for found in _slices()}
