"""The Plan classes there are: found by asking `plan.row_class` for every length, as callers do.

Tests that compile or trace take a sample of them; with CUTE_SOFTMAX_TEST_CLASSES=all they take every one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

from cute_softmax.plan import MATHS, NotPlanned, RowClass, row_class, table_of, vector_of
from cute_softmax.plan.catalogue import ctas_counts
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.matmul_class import MatmulClass
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE
from cute_softmax.plan.row import TURNS_OF_FEW
from cute_softmax.plan.short import configs_of

SAME = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
MIXED = (("bf16", "fp32"), ("fp32", "bf16"))
PAIRS = SAME + MIXED  # (input, output) of softmax
REDUCTIONS = ("logsumexp", "amax", "sum", "entropy", "selective", "selective_entropy")
# Maths whose configurations are those of others: a selection of their classes is compiled, and the GPU tests that need
# them build them by themselves.
FAMILY = ("log_softmax", "log_softmax_backward", "entropy", "selective", "selective_entropy")
# (input, output) that the public functions ask for, autocast aside.
PAIRS_OF = {
    "softmax": PAIRS,
    "softmax_backward": PAIRS,
    "log_softmax": (*SAME[::2], ("bf16", "fp32")),
    "log_softmax_backward": SAME[::2],
    "logsumexp": SAME,
    "entropy": (("bf16", "fp32"), ("fp32", "fp32")),
    "selective": (("bf16", "fp32"), ("fp32", "fp32")),
    "selective_entropy": (("bf16", "fp32"), ("fp32", "fp32")),
    "amax": SAME,
    "sum": (*SAME, ("bf16", "fp32")),
}


def operands(math: str, pair: tuple[str, str]) -> tuple[str, ...]:
    """The dtypes of all operands for the (input, output) dtypes of the forward function."""
    source, result = pair
    if math.endswith("_backward"):
        return result, result, source
    return (source, *("int64" if name == "index" else result for name in MATHS[math, True].operands[1:]))


class Interval(NamedTuple):
    """A class and the lengths that it serves."""

    row_class: RowClass
    first: int
    last: int
    ctas: int  # that each row can have


@cache
def intervals(
    math: str,
    architecture: str,
    dtypes: tuple[str, ...],
    *,
    edges: bool = False,
    width: tuple[int, ...] | None = None,
    online: bool = True,
    ctas: int = 1,
) -> list[Interval]:
    """All classes of one form of call, by length.

    width: per input, the elements of an access at most; None for whole vectors. ctas: CTAs that each row can have.
    """
    target, facts = ARCHITECTURES[architecture], MATHS[math, online]

    def of(columns: int) -> RowClass | None:
        vector = vector_of(dtypes[: facts.full], columns)
        access = tuple(min(w, vector) for w in width or (vector,) * len(facts.inputs))
        try:
            return row_class(
                math, target, dtypes, columns, edges=edges, access=access, online=online, ctas=ctas
            )
        except NotPlanned:
            return None

    found, first = [], 1
    while edges and of(first).vector == 1:  # every row begins and ends on a vector of one element
        first += 1
    while (here := of(first)) is not None:
        low, high = first, here.capacity + 1  # of(low) is here; of(high) is not
        if of(here.capacity) == here:  # as a rule: no search is needed
            low = here.capacity
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if of(middle) == here else (low, middle)
        found.append(Interval(here, first, low, ctas))
        first = low + 1
    return found


def shorter(math: str, dtypes: tuple[str, ...]) -> int:
    """The longest row of the short movement."""
    return configs_of(table_of(), MATHS[math, True], dtypes)[-1].capacity


def ctas_of(architecture: str, pair: tuple[str, str]) -> tuple[int, ...]:
    """CTAs that rows may have, as far as other classes come of it; for one pair of dtypes of each size."""
    limit = ARCHITECTURES[architecture].cluster_limit if pair in SAME[::2] else 1
    return tuple(ctas for ctas in ctas_counts() if ctas < TURNS_OF_FEW * limit)


def own_intervals(math: str, architecture: str, dtypes: tuple[str, ...], ctas: int, **how) -> list[Interval]:
    """Those of `intervals` that are not there where rows have fewer CTAs."""
    fewer = [c for c in ctas_counts() if c < ctas]
    known = {i.row_class for c in fewer for i in intervals(math, architecture, dtypes, ctas=c, **how)}
    return [i for i in intervals(math, architecture, dtypes, ctas=ctas, **how) if i.row_class not in known]


@contextmanager
def given(ctas: int) -> Iterator[None]:
    """Plans of the row movement are made as if each row could have so many CTAs, however many rows there are, and of
    short rows, too."""
    from remembered import forget_calls

    from cute_softmax.plan import choose

    with patch.object(choose, "ctas_a_row", lambda device, rows: ctas), by_rows():
        forget_calls()
        yield
    forget_calls()


@contextmanager
def by_rows() -> Iterator[None]:
    """Short rows are planned for the row movement, as those that lie with gaps are."""
    from cute_softmax.plan import choose

    with patch.object(choose, "plan_short", lambda *_: None):
        yield


@contextmanager
def however_few() -> Iterator[None]:
    """Short rows are planned for the short movement where threads that share a row are faster, too."""
    from remembered import forget_calls

    from cute_softmax.plan import choose

    with patch.object(choose, "_shares_rows", lambda *_: False):
        forget_calls()
        yield
    forget_calls()


@contextmanager
def products(wanted: Callable[[MatmulClass], bool]) -> Iterator[None]:
    """softmax_matmul is planned as classes that are wanted alone, of which there must be some."""
    from cute_softmax.plan import matmul

    cost, met = matmul.cost_of, []

    def cost_of(c: MatmulClass, *rest) -> float:
        met.append(wanted(c))
        return cost(c, *rest) if met[-1] else float("inf")

    with patch.object(matmul, "cost_of", cost_of):
        yield
    assert any(met), "no class that is wanted"


def taken(math: str, architecture: str, dtypes: tuple[str, ...], **how) -> Iterator[Interval]:
    """All intervals, for many rows and for few, each while plans take its class."""
    for ctas in ctas_counts():
        with given(ctas):
            yield from own_intervals(math, architecture, dtypes, ctas, **how)


def sample(found: Sequence, every: int, first: int = 0) -> Sequence:
    """Every so many-th, from the `first` on (counted on from the beginning where that is past the sample's period)."""
    return found if os.environ.get("CUTE_SOFTMAX_TEST_CLASSES") == "all" else found[first % every :: every]


def selected(math: str, found: Sequence) -> Sequence:
    """All classes of a math, or a third of those whose configurations are another's."""
    return sample(found, 3 if math in FAMILY else 1)


def longest(math: str, architecture: str, dtypes: tuple[str, ...], online: bool = True) -> int:
    """The longest row that is planned."""
    return intervals(math, architecture, dtypes, online=online)[-1].last


def widths(math: str, dtypes: tuple[str, ...], online: bool = True) -> list[tuple[int, ...]]:
    """Every combination of access widths of the inputs, whole vectors first."""
    if not MATHS[math, online].outputs:
        return [(ALIGNMENT // ITEM_SIZE[dtypes[0]],)]  # the one input decides itself where its vectors begin
    vector = ALIGNMENT // max(ITEM_SIZE[d] for d in dtypes[: MATHS[math, online].full])
    each = [vector >> i for i in range(vector.bit_length())]
    return [*product(each, repeat=len(MATHS[math, online].inputs))]


def all_classes(
    architecture: str, pairs=PAIRS, *, narrow: bool = False, two_pass: bool = True
) -> Iterator[RowClass]:
    """The classes of all row maths of an architecture, of those pairs of dtypes that a math has.

    narrow: those whose inputs are read in narrower accesses than their outputs are written, too.
    """
    for (math, online), ctas in product(MATHS, ctas_counts()):
        if not online and not two_pass:
            continue
        for pair in (p for p in pairs if p in PAIRS_OF[math]):
            dtypes = operands(math, pair)
            for edges in (False, True):
                for width in widths(math, dtypes, online) if narrow else (None,):
                    how = {"edges": edges, "width": width, "online": online}
                    for interval in own_intervals(math, architecture, dtypes, ctas, **how):
                        yield interval.row_class


def launched(architecture: str) -> Iterator[RowClass]:
    """The classes that the GPU tests need: all whole ones, and of equal dtypes the narrow ones whose operands
    but one are aligned alike, or all inputs are."""
    yield from (c for c in all_classes(architecture) if c.math not in FAMILY)
    for math, pair, ctas in product((m for m in PAIRS_OF if m not in FAMILY), SAME, ctas_counts()):
        dtypes = operands(math, pair)
        for edges, width in product((False, True), widths(math, dtypes)):
            if len(width) == 1 or width[1] == max(width) or width[0] == width[1]:
                for interval in own_intervals(math, architecture, dtypes, ctas, edges=edges, width=width):
                    yield interval.row_class
