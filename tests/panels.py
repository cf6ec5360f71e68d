"""Panel plans: forced into every movement, and walked through by the kernel's own index arithmetic.

`touched` does in numpy what `kernels/panel.py` does with the numbers of a plan, and with no others: its arguments,
the operands' strides and the class. `expected` says from the problem alone what must be touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import classes
import numpy as np

from cute_softmax.plan import MATHS, WARP, PanelClass, PanelPlan
from cute_softmax.plan.panel_configs import PANEL_BYTES, PanelConfig
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE, Operand, Problem, canonical


def dense(shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def problem_of(name: str, pair, shape, dims, strides=None, offsets=(0, 0, 0, 0)) -> Problem:
    """Full operands of these strides (contiguous if None), and a contiguous group output."""
    dtypes, full = classes.operands(name, pair), MATHS[name, True].full
    kept = [1 if d in dims else n for d, n in enumerate(shape)]
    group = tuple(0 if d in dims else s for d, s in enumerate(dense(kept)))
    operands = [
        Operand(d, (strides or dense(shape)) if i < full else group, offsets[i] * ITEM_SIZE[d])
        for i, d in enumerate(dtypes)
    ]
    return canonical(shape, dims, operands)


def forced(
    made: PanelPlan,
    config: PanelConfig,
    parts: int = 1,
    *,
    exchange: bool | None = None,
    across: int | None = None,
    resident: int | None = None,
) -> PanelPlan:
    """The plan with another configuration, `parts` CTAs or clusters a panel, and, as far as needed, streaming.

    exchange: whether parts exchange; None for where there are several. resident: another number of CTAs at a time.
    """
    alone = config.alone and made.kernel.orientation == "column"
    # Several threads along a group, so that there is something to exchange; unless they are alone.
    widest = min(config.threads // max(made.kernel.slots, 2), WARP)
    c = replace(
        made.kernel,
        # Shifted lines have two lanes and more.
        across=config.threads
        if alone
        else max(min(across or made.kernel.across, widest), 1 + made.kernel.shifted),
        threads=config.threads,
        steps=config.steps,
        cluster_n=config.cluster_n,
        min_blocks=config.min_blocks,
        ahead=config.ahead,
        registers=config.registers,
    )
    grain = c.unit * config.cluster_n
    share = math.ceil(math.ceil(made.length / parts) / grain) * c.unit
    parts = math.ceil(made.length / (share * config.cluster_n))
    c = replace(c, exchange=parts > 1 if exchange is None else exchange)
    c = replace(c, buffers=config.buffers if share > c.tile or config.ahead else 1)
    return replace(made, kernel=c, parts=parts, share=share, resident=resident or made.resident)


# Every movement on lengths of a few hundred units: name -> (configuration, parts[, CTAs at a time]).
SMALL = {
    "one CTA": (PanelConfig(256, 8), 1),
    "streaming": (PanelConfig(128, 2), 1),
    "cluster": (PanelConfig(128, 4, cluster_n=4), 1),
    "cluster of 16": (PanelConfig(128, 4, cluster_n=16), 1),
    "exchange": (PanelConfig(128, 4), 5),
    "exchange, streaming": (PanelConfig(128, 2), 3),
    "exchange, three chunks held": (PanelConfig(128, 3, buffers=3), 2),
    "one after the other": (PanelConfig(128, 3, buffers=3), 1, 2),
    "exchange, one after the other": (PanelConfig(128, 3, buffers=3), 2, 4),
    "exchange, fewer at a time than exchange": (PanelConfig(128, 2), 3, 2),
    "a row ahead": (PanelConfig(32, 12, buffers=12, ahead=2, registers=2), 3, 6),
    "a row ahead, fewer at a time than exchange": (
        PanelConfig(32, 12, buffers=12, ahead=4, registers=6),
        3,
        2,
    ),
}


def across_of_two_trips(config: PanelConfig) -> int | None:
    """Threads side by side over a panel of columns whose states a cluster exchanges in two trips; None for
    configurations that do it in one."""
    return PANEL_BYTES // ALIGNMENT if config.cluster_n == 16 and config.panel_bytes == PANEL_BYTES else None


def movements(made: PanelPlan, clusters: int = 16) -> Iterator[tuple[str, PanelPlan]]:
    """A plan in all movements. clusters: CTAs of the largest cluster."""
    for name, (config, parts, *resident) in SMALL.items():
        if config.cluster_n > clusters:
            continue
        if config.ahead and (made.kernel.orientation == "column" or not made.kernel.facts.outputs):
            continue
        across = across_of_two_trips(config) if made.kernel.orientation == "column" else None
        plan = forced(made, config, parts, across=across, resident=resident[0] if resident else None)
        if not config.ahead or plan.chunks <= plan.kernel.most_chunks:
            yield name, plan


class Touched(NamedTuple):
    """A row for each element that is touched: the group's number, then its place in each operand, in elements.

    reduced: what enters the states; finished: what is computed from what they became, empty without full outputs;
    groups: the results that a group has one of; unaligned: accesses at addresses that are no multiple of their width.
    """

    reduced: np.ndarray
    finished: np.ndarray
    groups: np.ndarray
    unaligned: int


def _apart(index: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    found = []
    for size in sizes:
        found.append(index % size)
        index = index // size
    return [*found, index]


def _dot(coordinates: list, strides: Sequence[int]) -> np.ndarray:
    return sum(c.astype(np.int64) * s for c, s in zip(coordinates, strides, strict=True))


def touched(plan: PanelPlan, given_up: Sequence[int] = ()) -> Touched:
    """What all threads of a launch touch. given_up: parts that are finished by the last CTA to arrive instead."""
    c = plan.kernel
    _, items, length, groups, parts, share, _, _, _, _, *sizes = plan.arguments
    kept_sizes, reduced_sizes = sizes[: c.kept_modes - 1], sizes[c.kept_modes - 1 :]
    assert len(reduced_sizes) == c.reduced_modes - 1
    full = c.facts.full
    tile, tidx = np.arange(items), np.arange(c.threads)
    part, tile = (tile % parts, tile // parts) if c.exchange else (np.zeros_like(tile), tile)
    a, d = tidx % c.across, tidx // c.across
    column = (tile[:, None] * c.across + a) * c.slots  # (CTA, thread)
    index = _apart(column, kept_sizes)
    abreast, lane, inner = groups, a % c.lanes, column
    if c.shifted:
        abreast = kept_sizes[0] if kept_sizes else groups
        ahead = math.ceil(abreast / c.advance)
        inner = (tile % ahead * c.advance)[:, None] + a * c.slots - a // c.lanes * c.overlap
        index = [inner, *(_apart(tile // ahead, kept_sizes[1:]) if kept_sizes else [])]
        index = [np.broadcast_to(i if i.ndim > 1 else i[:, None], inner.shape) for i in index]
        column = inner + (tile // ahead * abreast)[:, None]
    starts, across, reduced_strides = [], [], []
    for strides in plan.operand_strides:
        assert len(strides) == c.kept_modes + c.reduced_modes
        starts.append(_dot(index, strides[: c.kept_modes]))
        across.append(strides[0])
        reduced_strides.append(strides[c.kept_modes :])
    inside, v, unaligned = inner < abreast if c.shifted else column < groups, np.arange(c.vector), 0
    access = c.accesses
    head, body = np.zeros_like(column), np.full_like(column, length)
    if c.edges:
        r = c.facts.reference
        head = np.minimum(-(plan.problem.offsets[r] + starts[r]) % c.line, length)
        body = (length - head) // c.vector * c.vector

    def touch(found: list[np.ndarray]) -> np.ndarray:
        return np.stack(found, -1).reshape(-1, len(found))

    def scalars(cta: np.ndarray) -> list[np.ndarray]:
        """What the threads of these CTAs touch of the edges of their rows."""
        rows = []
        for e in range(c.edge_scalars):
            slot = tidx + e * c.threads
            after = slot - (c.line - 1)
            in_head = slot < head[cta]
            tail = head[cta] + body[cta]
            in_tail = (after >= 0) & (tail + after < length)
            where, thread = np.nonzero((in_head | in_tail) & inside[cta])
            at = np.where(in_head, slot, tail + after)[where, thread]
            where = cta[where]
            found = [column[where, thread]]
            found += [starts[i][where, thread] + (at if i < full else 0) for i in range(len(starts))]
            rows.append(touch(found))
        return rows

    def places(cta: np.ndarray, first: int, n: int, stored: bool = False) -> np.ndarray:
        """What these CTAs touch of chunk n of their share, which begins at `first`."""
        nonlocal unaligned
        rows, at = [], head[cta] + first + n * c.chunk
        end = head[cta] + np.maximum(np.minimum(first + share, body[cta]), first)
        for k in range(c.chunk_steps):
            there = end - at - d * c.unit > k * c.down * c.unit
            if c.shifted:
                rows.append(shifted(cta, there, at, k, stored))
                continue
            exists = inside[cta] & there
            where, thread = np.nonzero(exists)
            begin, where = at[where, thread], cta[where]
            index = _apart(begin + (d[thread] + k * c.down) * c.unit, reduced_sizes)
            slot = v if c.orientation == "column" else 0 * v
            found = [column[where, thread][:, None] + slot]
            for i in range(len(plan.operand_strides)):
                first = starts[i][where, thread] + _dot(index, reduced_strides[i])
                if i < full:
                    unaligned += np.count_nonzero((plan.problem.offsets[i] + first) % access[i])
                    found.append(first[:, None] + v)
                else:
                    found.append(first[:, None] + slot * across[i])
            rows.append(touch(found))
        return np.concatenate(rows)

    def shifted(cta: np.ndarray, there: np.ndarray, at: np.ndarray, k: int, stored: bool) -> np.ndarray:
        """Step k of a chunk in lines that are shifted: elements that come with the blocks that are copied; or those of
        the blocks that are stored."""
        nonlocal unaligned
        index = _apart(at + d + k * c.down, reduced_sizes)
        firsts = [starts[i][cta] + _dot(index, reduced_strides[i]) for i in range(len(starts))]
        beside, mine = (abreast - inner)[cta], inner[cta]
        group = np.broadcast_to(column[cta][..., None], (*mine.shape, c.vector))

        def taken(keep: np.ndarray, by: np.ndarray) -> np.ndarray:
            """The elements v of each thread's vector, `by` further on, that are kept."""
            found = [group + v + by]
            found += [f[..., None] + (v + by) * (1 if i < full else across[i]) for i, f in enumerate(firsts)]
            return np.stack(found, -1)[keep]

        if stored:
            i = len(c.facts.inputs)
            shift = (plan.problem.offsets[i] + firsts[i]) % c.vector
            ours = there & ((lane > 0) | (shift == 0) | (mine == 0)) & ((lane < c.lanes - 1) | (shift > 0))
            whole = (shift <= mine) & (c.vector - shift <= beside)
            first = (tile % ahead * c.advance)[cta][:, None]
            ends = (first == 0) | (first + c.columns > abreast)
            scalar = (shift[..., None] <= mine[..., None] + v) & (v < beside[..., None] + shift[..., None])
            keep = ours[..., None] & np.where(whole[..., None], True, ends[..., None] & scalar)
            return taken(keep, -shift[..., None])
        for i in range(len(c.facts.inputs)):
            shift = (plan.problem.offsets[i] + firsts[i] - lane * c.vector) % (c.extra * c.vector)
            copied = there & ((lane + 1) * c.vector > shift) & (beside + shift > 0)
            behind = there & (lane * c.vector < shift) & (beside + shift > c.lanes * c.vector)
            assert not behind[:, lane >= c.extra].any(), "a block that has no slot"
            # The lane whose block, or whose block behind the line, holds an element of this thread's vector.
            block = lane[:, None] + (shift[..., None] + v) // c.vector
            assert (block < c.lanes + c.extra).all()
            holder = (tidx - lane)[:, None] + block % c.lanes
            cta_index = np.arange(len(cta))[:, None, None]
            came = np.where(block < c.lanes, copied[cta_index, holder], behind[cta_index, holder])
            wanted = there[..., None] & (v < beside[..., None])
            unaligned += np.count_nonzero(wanted & ~came)
            # A block that holds nothing of the row may lie outside the tensor.
            line = mine - lane * c.vector - shift
            for is_copied, begin in ((copied, lane * c.vector), (behind, (c.lanes + lane) * c.vector)):
                some = (line + begin + c.vector > mine - lane * c.vector) & (line + begin < abreast)
                assert not (is_copied & ~some).any(), "a block of which nothing is wanted"
        return taken(there[..., None] & (v < beside[..., None]), np.zeros_like(mine)[..., None])

    reduced, finished = [], []
    for of in range(parts if c.exchange else 1):
        cta = np.flatnonzero(part == of)
        for rank in range(c.cluster_n):
            first = (of * c.cluster_n + rank) * share
            chunks = max(-((first - min(first + share, length)) // c.chunk), 0)
            reduced += [places(cta, first, n) for n in range(chunks if c.streaming else 1)]
            behind = range(chunks) if c.streaming or of in given_up else range(1)
            finished += [places(cta, first, n, True) for n in reversed(behind)]
            if first == 0:
                reduced += scalars(cta)
                finished += scalars(cta)
    last_to_come = np.flatnonzero(part == parts - 1)
    where, thread = np.nonzero(inside[last_to_come] & (d == 0))
    where, slots = last_to_come[where], np.arange(c.slots)
    results = [column[where, thread][:, None] + slots]
    results += [
        starts[i][where, thread][:, None] + slots * across[i] for i in range(full, len(plan.operand_strides))
    ]
    if c.shifted:
        kept = slots < (abreast - inner)[where, thread][:, None]
        results = [r[kept] for r in results]
    nothing = np.zeros((0, 1 + len(plan.operand_strides)), dtype=np.int64)
    everything = np.concatenate([nothing, *finished]) if c.facts.outputs else nothing
    return Touched(
        np.concatenate([nothing, *reduced]),
        everything,
        np.stack(results, -1).reshape(-1, len(results)),
        unaligned,
    )


def expected(problem: Problem) -> np.ndarray:
    """A row for each element of the problem: its group's number, then its place in each operand."""
    modes = (*problem.kept, *problem.reduced)
    index = np.indices([m.size for m in modes]).reshape(len(modes), problem.groups * problem.length)
    group = np.repeat(np.arange(problem.groups), problem.length)
    places = [
        sum((index[j] * m.strides[i] for j, m in enumerate(modes)), 0 * group)
        for i in range(len(problem.dtypes))
    ]
    return np.stack([group, *places], -1)


def check_owners(plan: PanelPlan, given_up: Sequence[int] = ()):
    """Raise AssertionError unless each element of each group is reduced once, and finished once."""
    want, got, full = expected(plan.problem), touched(plan, given_up), plan.kernel.facts.full
    assert got.unaligned == 0, f"{got.unaligned} accesses are not aligned"
    ends = {}
    for what, rows in (("reduced", got.reduced), ("finished", got.finished)):
        if what == "finished" and not plan.kernel.facts.outputs:
            assert not rows.size
            continue
        if what == "reduced" and plan.kernel.overlap:  # lines of columns that overlap: in two panels at most
            rows, times = np.unique(rows, axis=0, return_counts=True)
            assert times.max() <= 2
        assert len(rows) == len(want), f"{len(rows)} elements {what} of {len(want)}"
        ours, theirs = (r[np.lexsort(r[:, 1:].T)] for r in (rows, want))
        assert (ours[:, 1:] == theirs[:, 1:]).all(), f"other elements are {what} than there are"
        # One group of the kernel for each group of the problem. (What lies in one place in all operands is of one
        # group, or is written twice with the same.)
        pairs = np.unique(np.stack([ours[:, 0], theirs[:, 0]]), axis=1)
        assert pairs.shape[1] == plan.problem.groups, f"groups are mixed where they are {what}"
        ends[what] = pairs
    found = np.unique(got.groups, axis=0) if plan.kernel.overlap else got.groups
    assert len(found) == plan.problem.groups == len(np.unique(found[:, 0]))
    if full < len(plan.problem.dtypes):
        theirs = np.unique(want[:, full + 1])
        assert (np.sort(found[:, 1]) == theirs).all(), "not one result per group"


@cache
def check_merging(c: PanelClass, parts: int):
    """Raise AssertionError unless each thread's result is merged once: over lanes, warps and parts."""
    if c.down == 1:  # a thread has its columns for itself
        assert not c.exchange and c.cluster_n == 1
        return
    start = min(c.across, WARP)
    buffer: dict[tuple[int, int], list[int]] = {}
    for thread in range(c.threads):
        lane, a, row = thread % WARP, thread % c.across, thread // max(c.across, WARP)
        if lane < c.across:
            warp = range(thread - lane, thread - lane + WARP)
            for v in range(c.slots):
                slot = (a * c.slots + v, row)
                assert slot not in buffer, f"two threads write {slot}"
                assert row < c.warps_down
                buffer[slot] = [t for t in warp if t % start == lane % start]
    for column in range(c.columns):
        merged = sorted(t for row in range(c.warps_down) for t in buffer[column, row])
        assert merged == [t for t in range(c.threads) if t % c.across == column // c.slots]
    if c.exchange:
        read = sorted(p for reader in range(c.readers) for p in range(reader, parts, c.readers))
        assert read == list(range(parts)) and c.readers * c.columns <= c.threads
        assert c.readers <= (WARP if c.lanes_read else c.peers.shape[1])
    check_cluster(c)


def check_cluster(c: PanelClass):
    """Raise AssertionError unless each CTA of a cluster gets the states of all, in one trip or in two."""
    if c.trips == 1:
        assert c.cluster_n <= c.peers.shape[1]
        return
    each, slots = c.columns // c.cluster_n, c.columns
    assert each * c.cluster_n == c.columns <= c.threads and c.cluster_n <= WARP
    assert c.peers.shape[1] >= c.trips
    # Thread `column` of CTA `rank` sends its state to a slot of the CTA that merges the column.
    sent = {
        (column // each, column % each * c.cluster_n + rank): (column, rank)
        for rank in range(c.cluster_n)
        for column in range(slots)
    }
    assert len(sent) == slots * c.cluster_n and all(slot < slots for _, slot in sent)
    got = set()
    for rank in range(c.cluster_n):
        for thread in range(slots):
            # The lanes of `cluster_n` neighbours merge what lies in their slots: one column of all CTAs.
            group = range(thread - thread % c.cluster_n, thread - thread % c.cluster_n + c.cluster_n)
            merged = [sent[rank, slot] for slot in group]
            assert [r for _, r in merged] == list(range(c.cluster_n))
            column = rank * each + thread // c.cluster_n
            assert {found for found, _ in merged} == {column}
            got.add((thread % c.cluster_n, column))
    assert got == {(rank, column) for rank in range(c.cluster_n) for column in range(slots)}
