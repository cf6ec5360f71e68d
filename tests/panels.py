"""Panel plans: forced into every movement, and walked through by the kernel's own index arithmetic.

`touched` runs `kernels/panel/work.py` and `shift.py` on arrays, with the numbers of a plan and with no others: its
arguments, the operands' strides and the class. `expected` says from the problem alone what must be touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import classes
import numpy as np

from cute_softmax.kernels.common.copy import GlobalTensor
from cute_softmax.kernels.panel import abreast, aligned, work
from cute_softmax.kernels.panel import shift as shift_module
from cute_softmax.plan import MATHS, MODES, WARP, PanelClass, PanelPlan
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.panel_configs import PANEL_BYTES, PanelConfig
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE, Operand, Problem, canonical

# Few columns, dimension 0, planned as was fastest on an H200.
FEW_COLUMNS = [
    ("softmax", "bf16", (50257, 6), "column1x128x26x2_cluster16"),  # four panels or so, of a part of a sector
    ("softmax", "fp32", (100352, 4), "column1x256x26x1_cluster16"),  # more bytes a thread, more threads
    ("softmax", "fp32", (4984, 48), "column4x32x10x2_cluster16"),  # of a sector
    ("softmax", "fp32", (8192, 256), "column4x32x16x4_cluster16"),  # held as of large tensors
    ("softmax", "bf16", (16832, 256), "column4x32x34x4_cluster16"),
    ("softmax_backward", "bf16", (7480, 64), "column2x64x8x8_cluster16"),  # of two inputs whole vectors
    ("softmax", "bf16", (256, 64), "column4x32x2x4_cluster4"),
    ("softmax", "bf16", (262144, 4), "column1x512x20x4_exchange_streaming5"),  # too many steps
    ("softmax", "fp32", (100352, 8), "column2x256x20x4_exchange_streaming5"),  # too many sectors
    ("softmax", "bf16", (25248, 256), "column16x32x24x8_exchange_streaming6"),  # too many bytes in all
]

INT32 = range(-(1 << 31), 1 << 31)


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
    if made.kernel.rows_abreast > 1:  # a panel has all columns
        across, widest = None, config.threads // 2
    c = replace(
        made.kernel,
        # Shifted lines have two lanes and more.
        across=config.threads
        if alone
        else max(
            min(across or made.kernel.across, widest), 1 + made.kernel.shifted + 2 * made.kernel.aligned
        ),
        threads=config.threads,
        steps=config.steps,
        cluster_n=config.cluster_n,
        min_blocks=config.min_blocks,
        ahead=config.ahead,
        registers=config.registers,
    )
    c = replace(c, aligned=c.aligned and c.down % c.vector == 0)
    grain = c.unit * config.cluster_n
    share = math.ceil(math.ceil(made.length / parts) / grain) * c.unit
    parts = math.ceil(made.length / (share * config.cluster_n))
    # What all groups have in common all lanes of a line have.
    spread = [made.operand_strides[i][: c.kept_modes] for i, a in enumerate(c.access) if a == 0]
    alike = c.lanes if spread and not any(map(any, spread)) else math.gcd(c.alike, c.lanes)
    alike = alike if c.orientation == "column" else 1
    c = replace(c, exchange=parts > 1 if exchange is None else exchange, alike=alike)
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


def keeps_residents(plan: PanelPlan) -> bool:
    """Whether what a plan's CTAs load once is the same for all of their rows."""
    c = plan.kernel
    kept = [n for i in c.residents for n in plan.operand_strides[i][: c.kept_modes]]
    own = plan.ctas % plan.parts == 0 and not c.edges
    return not c.residents or (
        own and not any(kept) and all(c.access[i] and not c.words(i) for i in c.residents)
    )


def movements(made: PanelPlan, clusters: int = 16) -> Iterator[tuple[str, PanelPlan]]:
    """A plan in all movements. clusters: CTAs of the largest cluster."""
    for name, (config, parts, *resident) in SMALL.items():
        if config.cluster_n > clusters:
            continue
        if config.ahead and (made.kernel.orientation == "column" or not made.kernel.facts.outputs):
            continue
        across = across_of_two_trips(config) if made.kernel.orientation == "column" else None
        plan = forced(made, config, parts, across=across, resident=resident[0] if resident else None)
        if not config.ahead or (plan.chunks <= plan.kernel.most_chunks and keeps_residents(plan)):
            yield name, plan
        if (
            plan.kernel.orientation == "column"
            and plan.kernel.rows_abreast == 1
            and name in ("one CTA", "exchange, streaming")
        ):
            vectors = plan.kernel.advance // plan.kernel.slots
            yield (
                f"{name}, narrower panels",
                replace(plan, spacing=max(vectors * 2 // 3, 1) * plan.kernel.slots),
            )


class Touched(NamedTuple):
    """A row for each element that is touched: the group's number, then its place in each operand, in elements.

    reduced: what enters the states; finished: what is computed from what they became, empty without full outputs;
    groups: the results that a group has one of; unaligned: accesses at addresses that are no multiple of their width.
    """

    reduced: np.ndarray
    finished: np.ndarray
    groups: np.ndarray
    unaligned: int


def launch_of(plan: PanelPlan, tidx: np.ndarray | int, rank: int = 0) -> work.Launch:
    """The launch of a plan as the kernel sees it, on plain numbers; tensors begin at the problem's offsets."""
    c = plan.kernel
    ctas, items, length, groups, parts, share, _, patience, chunks, spacing, _, *sizes = plan.arguments
    mX = []
    for dtype, offset, strides in zip(c.dtypes, plan.problem.offsets, plan.operand_strides, strict=True):
        kind = SimpleNamespace(width=8 * ITEM_SIZE[dtype])
        mX.append(
            GlobalTensor(kind, offset * ITEM_SIZE[dtype], strides[: c.kept_modes], strides[c.kept_modes :])
        )
    return work.Launch(
        spec=c,
        ctas=ctas,
        items=items,
        length=length,
        groups=groups,
        parts=parts,
        share=share,
        patience=patience,
        chunks=chunks,
        spacing=spacing,
        last_row=sizes.pop() if c.rows_abreast > 1 else 0,
        kept_sizes=sizes[: c.kept_modes - 1],
        reduced_sizes=sizes[c.kept_modes - 1 :],
        mX=mX,
        tidx=tidx,
        rank=rank,
        a=tidx % c.across,
        d=tidx // c.across,
        own=c.block(tidx),
        lane=tidx % c.lanes,
        policies=None,
        shared=None,
        exchanges=0,
        states=0,
        numbers={"offset": plan.problem.length},  # so that all elements count
    )


class Walk:
    """All threads of a launch, in the CTAs of one rank of their clusters: arrays over (item, thread)."""

    def __init__(self, plan: PanelPlan, rank: int):
        c = self.c = plan.kernel
        self.plan, self.full, self.unaligned = plan, c.facts.full, 0
        modes = (*plan.problem.kept, *plan.problem.reduced)
        self.last = [
            offset + sum((m.size - 1) * m.strides[i] for m in modes)
            for i, offset in enumerate(plan.problem.offsets)
        ]
        self.launch = launch = launch_of(plan, np.arange(c.threads), rank)
        index = np.arange(launch.items)[:, None]
        self.item = work.item_of(launch, index)
        tile = index // launch.parts if c.exchange else index
        if c.shifted:
            self.group = self.item.line.column + tile // math.ceil(plan.abreast / plan.advance) * plan.abreast
        else:
            self.group = tile * plan.advance + launch.a * c.slots
        # What a plan says of it, for figures and checks.
        for i in {0, launch.items - 1}:
            group = self.at(self.group + self.item.shift, i)
            held = plan.bounds(self.at(index % launch.parts * c.exchange, i), rank, group)
            first, end = self.at(self.item.first, i), self.at(self.item.end, i)
            assert (held.start, held.stop) == (first, max(first, end))
            assert plan.panel(self.at(tile, i)).start == self.at(self.group + self.item.shift, i)

    def at(self, array: np.ndarray | int, item: int) -> int:
        """What the first thread of a CTA has."""
        return int(np.broadcast_to(array, self.group.shape)[item, 0])

    def neighbour(self, i: int) -> int:
        """Elements of a full operand from one of a vector to the next: none where it has one for all."""
        return 0 if i < len(self.c.access) and self.c.access[i] == 0 else 1

    def rows(self, exists: np.ndarray, addresses: Callable[[int], np.ndarray], slots: int) -> np.ndarray:
        """Elements that exist, (item, thread, element): the group of each, and its place in each operand. addresses: of
        an operand's first elements, in bytes; slots: 1 where elements lie across groups, else 0."""
        v = np.arange(exists.shape[-1])
        found = [self.group_of(self.group[..., None] + v * slots)]
        for i, mX in enumerate(self.launch.mX):
            place = (addresses(i) - mX.address)[..., None] // mX.itemsize
            found.append(place + v * (self.neighbour(i) if i < self.full else slots * mX.kept[0]))
        return np.stack([np.broadcast_to(f, exists.shape)[exists] for f in found], -1)

    def group_of(self, column: np.ndarray) -> np.ndarray:
        """The number of the group that a column is of."""
        if self.c.rows_abreast == 1:
            return column
        beside = self.plan.abreast // self.c.rows_abreast
        return column // self.plan.abreast * beside + column % self.plan.abreast % beside

    def places(self, n: int) -> Iterator[tuple[np.ndarray, np.ndarray, work.Chunk]]:
        """(each operand's addresses, whether there is a vector, the chunk) of each step of chunk n."""
        c, launch = self.c, self.launch
        chunk = work.chunk_of(self.item, n)
        each = [work.places(launch, i, chunk.starts[i], chunk.at) for i in range(self.full)]
        each += [
            [mX.address + start * mX.itemsize] * c.chunk_steps
            for mX, start in zip(launch.mX[self.full :], chunk.starts[self.full :], strict=True)
        ]
        for k in range(c.chunk_steps):
            shape = self.group.shape
            addresses = [np.broadcast_to(each[i][k], shape) for i in range(len(each))]
            yield addresses, np.broadcast_to(chunk.left > k * c.down * c.unit, shape), chunk

    def check_alike(self, n: int):
        """Raise AssertionError unless what threads load of chunk n for those that are alike is what these need, and
        exists."""
        c, launch, chunk, shape = self.c, self.launch, work.chunk_of(self.item, n), self.group.shape
        steps = np.arange(c.chunk_steps)
        wanted = np.broadcast_to(chunk.left, shape)[..., None] > steps * c.down * c.unit
        for i in (i for i, access in enumerate(c.access) if access == 0):
            came = np.full(wanted.shape, -1)
            for j in range(math.ceil(c.chunk_steps / c.alike)):
                k = work.loaded_step(launch, j)
                got = np.broadcast_to(work.place(launch, i, chunk.starts[i], chunk.at, k), shape)
                exists = np.broadcast_to((k < c.chunk_steps) & (chunk.rest > k * c.down * c.unit), shape)
                place = got[exists] // launch.mX[i].itemsize
                assert ((place >= 0) & (place <= self.last[i])).all(), "outside the tensor"
                for t in np.flatnonzero(k < c.chunk_steps):
                    first = t - t % c.alike
                    came[:, first : first + c.alike, k[t]] = np.where(exists[:, t], got[:, t], -1)[:, None]
            needed = work.places(launch, i, chunk.starts[i], chunk.at)
            needed = np.stack([np.broadcast_to(place, shape) for place in needed], -1)
            assert (came == needed)[wanted].all(), "another element than the vector's"

    def vectors(self, n: int) -> Iterator[np.ndarray]:
        """What chunk n touches, where each vector is one access or several whole ones."""
        c = self.c
        self.check_alike(n)
        for k, (addresses, exists, chunk) in enumerate(self.places(n)):
            for i in range(self.full):
                width = max(c.accesses[i], 1) * self.launch.mX[i].itemsize
                self.unaligned += np.count_nonzero(addresses[i][exists] % width)
            exists = np.repeat(exists[..., None], c.vector, -1)
            if c.rows_abreast > 1:
                there = np.where(abreast.is_last(c, chunk.left, k), chunk.wanted, c.vector)
                exists = exists & (np.arange(c.vector) < there[..., None])
            yield self.rows(exists, addresses.__getitem__, int(c.orientation == "column"))

    def copied(self, n: int) -> Iterator[np.ndarray]:
        """What comes with the blocks that are copied of chunk n, where columns are shifted."""
        self.check_alike(n)
        c, launch, line = self.c, self.launch, self.item.line
        lane, threads = launch.lane, launch.tidx - launch.lane
        v = np.arange(c.vector)
        for addresses, exists, chunk in self.places(n):
            wanted = exists[..., None] & (v < line.beside[..., None])
            # Lanes without groups have blocks that hold some of the last vector.
            exists = exists[:, threads]
            for i in (i for i, access in enumerate(c.access) if access and not c.words(i)):
                shift = shift_module.shift_of(launch, i, addresses[i], c.extra)
                own, behind = shift_module.beyond(chunk, shift, c.lanes * c.vector)
                own = exists & shift_module.holds_own(launch, shift, own)
                behind = exists & shift_module.holds_behind(launch, shift, behind)
                assert not behind[:, lane >= c.extra].any(), "a block that has no slot"
                # The lane whose block, or whose block behind the line, holds an element of this thread's vector.
                block = lane[:, None] + (shift[..., None] + v) // c.vector
                assert (block < c.lanes + c.extra).all()
                cta, holder = np.arange(len(own))[:, None, None], threads[:, None] + block % c.lanes
                came = np.where(block < c.lanes, own[cta, holder], behind[cta, holder])
                self.unaligned += np.count_nonzero(wanted & ~came)
                # A block that holds nothing of the row may lie outside the tensor.
                first = line.column - lane * c.vector
                for fetched, begin in ((own, lane * c.vector), (behind, (c.lanes + lane) * c.vector)):
                    some = (begin + c.vector > shift) & (first - shift + begin < self.plan.abreast)
                    assert not (fetched & ~some).any(), "a block of which nothing is wanted"
            yield self.rows(wanted, addresses.__getitem__, 1)

    def own(self, panel: int) -> np.ndarray:
        """Which of a thread's groups are in memory's row and among so many from the panel's first on, where threads
        keep aligned blocks."""
        v, item = np.arange(self.c.slots), self.item
        place = (self.launch.a * self.c.slots - item.shift)[..., None] + v
        return (place >= 0) & (place < panel) & (v < item.line.beside[..., None])

    def kept(self, n: int) -> Iterator[np.ndarray]:
        """What comes with the aligned blocks of chunk n, of groups of which all threads have theirs."""
        c = self.c
        for addresses, exists, chunk in self.places(n):
            assert (np.broadcast_to(chunk.wanted, exists.shape)[exists] > 0).all(), "outside of memory's row"
            for i in range(self.full):
                bytes_ = c.vector * self.launch.mX[i].itemsize
                self.unaligned += np.count_nonzero(addresses[i][exists] % bytes_)
            yield self.rows(exists[..., None] & self.own(c.columns - c.slots + 1), addresses.__getitem__, 1)

    def returned(self, n: int) -> Iterator[np.ndarray]:
        """What the aligned blocks that are stored of chunk n hold."""
        c, line = self.c, self.item.line
        ours, whole = aligned.stores(self.item)
        scalars = np.stack([line.has(v) for v in range(c.vector)], -1)
        for addresses, exists, _ in self.places(n):
            keep = (exists & ours)[..., None] & np.where(
                whole[..., None], True, line.ends[..., None] & scalars
            )
            assert not (keep & ~self.own(c.columns - c.slots + 1)).any(), "a group that some threads lack"
            yield self.rows(keep, addresses.__getitem__, 1)

    def stored(self, n: int) -> Iterator[np.ndarray]:
        """What the blocks that are stored of chunk n hold, where columns are shifted."""
        c, line, i = self.c, self.item.line, len(self.c.facts.inputs)
        for addresses, exists, _ in self.places(n):
            shift = shift_module.shift_of(self.launch, i, addresses[i], 1)
            ours, whole = shift_module.stores(self.item, shift, exists)
            scalars = np.stack([shift_module.is_group(line, shift, v) for v in range(c.vector)], -1)
            keep = ours[..., None] & np.where(whole[..., None], True, line.ends[..., None] & scalars)
            walk = copy(self)
            walk.group = self.group - shift
            strides = [
                mX.itemsize * (self.neighbour(j) if j < self.full else mX.kept[0])
                for j, mX in enumerate(self.launch.mX)
            ]
            yield walk.rows(keep, lambda j: addresses[j] - shift * strides[j], 1)  # noqa: B023

    def edges(self) -> Iterator[np.ndarray]:
        """What the threads touch of the edges of rows."""
        for e in range(self.c.edge_scalars):
            at, exists = work.edge(self.item, e)

            def address(i: int) -> np.ndarray:
                mX = self.launch.mX[i]
                step = mX.reduced[0] if i in self.c.facts.beside else int(i < self.full)
                return mX.address + (self.item.starts[i] + at * step) * mX.itemsize  # noqa: B023

            yield self.rows(exists[..., None], address, 0)

    def groups(self) -> np.ndarray:
        """The results that a group has one of, by the threads of one part."""
        exists = np.broadcast_to(
            self.item.inside & (self.launch.d == 0) & (self.item.part == 0), self.group.shape
        )
        exists = np.repeat(exists[..., None], self.c.slots, -1)
        if self.c.rows_abreast > 1:
            column = (self.launch.a * self.c.slots)[:, None] + np.arange(self.c.slots)
            exists = exists & (column < self.plan.abreast // self.c.rows_abreast)
        elif self.c.aligned:
            exists = exists & self.own(self.launch.spacing)
        elif self.c.shifted:
            exists = exists & (np.arange(self.c.slots) < self.item.line.beside[..., None])
        starts = self.item.starts
        return self.rows(
            exists, lambda i: self.launch.mX[i].address + starts[i] * self.launch.mX[i].itemsize, 1
        )[:, [0, *range(1 + self.full, 1 + len(starts))]]


def touched(plan: PanelPlan) -> Touched:
    """What all threads of a launch touch, by the kernel's own index arithmetic."""
    c = plan.kernel
    nothing = np.zeros((0, 1 + len(plan.operand_strides)), dtype=np.int64)
    reduced, finished, unaligned = [nothing], [nothing], 0
    for rank in range(c.cluster_n):
        walk = Walk(plan, rank)
        chunks = np.max(work.chunks_of(walk.item)) if c.streaming else 1
        for n in range(chunks):
            reduced += walk.kept(n) if c.aligned else walk.copied(n) if c.shifted else walk.vectors(n)
            if c.facts.outputs:
                finished += (
                    walk.returned(n) if c.aligned else walk.stored(n) if c.shifted else walk.vectors(n)
                )
        edges = [*walk.edges()]
        reduced += edges
        finished += edges
        unaligned += walk.unaligned
    return Touched(
        np.concatenate(reduced),
        np.concatenate(finished) if c.facts.outputs else nothing,
        Walk(plan, 0).groups(),
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


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that there are, and how often: `np.unique` of an axis, which compares bytes, in a tenth of the time."""
    ordered = rows[np.lexsort(rows.T)]
    begins = np.ones(len(rows), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(-1)
    return ordered[begins], np.diff(np.flatnonzero(np.append(begins, True)))


def check_owners(plan: PanelPlan):
    """Raise AssertionError unless each element of each group is reduced once, and finished once."""
    want, got, full = expected(plan.problem), touched(plan), plan.kernel.facts.full
    assert got.unaligned == 0, f"{got.unaligned} accesses are not aligned"
    for what, rows in (("reduced", got.reduced), ("finished", got.finished)):
        if what == "finished" and not plan.kernel.facts.outputs:
            assert not rows.size
            continue
        if what == "reduced" and plan.kernel.overlap:  # lines of columns that overlap: in two panels at most
            rows, times = distinct(rows)
            assert times.max() <= 2
        assert len(rows) == len(want), f"{len(rows)} elements {what} of {len(want)}"
        ours, theirs = (r[np.lexsort(r[:, 1:].T)] for r in (rows, want))
        assert (ours[:, 1:] == theirs[:, 1:]).all(), f"other elements are {what} than there are"
        # One group of the kernel for each group of the problem. (What lies in one place in all operands is of one
        # group, or is written twice with the same.)
        pairs, _ = distinct(np.stack([ours[:, 0], theirs[:, 0]], -1))
        assert len(pairs) == plan.problem.groups, f"groups are mixed where they are {what}"
    found = distinct(got.groups)[0] if plan.kernel.overlap else got.groups
    assert len(found) == plan.problem.groups == len(np.unique(found[:, 0]))
    if full < len(plan.problem.dtypes):
        theirs = np.unique(want[:, full + 1])
        assert (np.sort(found[:, 1]) == theirs).all(), "not one result per group"


def check_numbers(made: PanelPlan):
    """What holds for every plan, however large."""
    c = made.kernel
    arch, problem = ARCHITECTURES[c.architecture], made.problem
    # Limits of the architecture.
    assert c.threads <= arch.threads and c.threads % WARP == 0
    assert c.cluster_n <= arch.cluster_limit and c.cluster_n & (c.cluster_n - 1) == 0
    assert c.shared_memory <= arch.shared_memory
    assert c.block(c.threads - 1) == c.blocks - c.extra - 1 and c.smem.cosize == c.vector * c.blocks * c.steps
    assert made.tiles * made.parts * c.cluster_n < 1 << 31, "CTAs of a grid"
    assert 0 < made.ctas <= made.tiles * made.parts
    # A thread's share of the panel.
    assert c.across & (c.across - 1) == 0 and c.across * c.down == c.threads
    assert c.down == 1 or c.groups <= c.threads, "a thread for each group's state"
    assert c.down == 1 or c.rows_abreast > 1 or c.across <= WARP
    assert c.down > 1 or not (c.exchange or c.streaming or c.cluster_n > 1), "nothing is exchanged"
    assert c.chunk_steps * c.buffers == c.steps and c.chunk * c.buffers == c.tile
    assert made.chunks * c.chunk >= made.share
    if c.ahead:
        # Chunks that stay in shared memory have places, and so has what is on its way.
        assert c.orientation == "row" and c.exchange and c.streaming and c.facts.outputs
        assert 1 <= c.wait <= min(c.ahead, c.registers) and (c.wait + c.registers) % c.ahead == 0
        assert made.chunks - c.registers + c.ahead <= c.buffers
        assert made.ctas % made.parts == 0 or made.ctas < made.parts
        assert keeps_residents(made)
    # Groups and their parts.
    assert made.length == math.ceil(problem.length / c.rows_abreast) == math.prod(made.reduced)
    assert math.prod(made.kept) == problem.groups * c.rows_abreast == made.groups
    if c.rows_abreast > 1:
        beside = made.abreast // c.rows_abreast
        rows = (made.length - 1) * c.rows_abreast
        assert made.abreast == made.advance <= c.columns and c.vector * ITEM_SIZE[c.dtypes[0]] <= 16
        assert made.last_row == beside * (problem.length - rows) and beside <= c.groups
    if c.shifted:
        assert made.tiles * made.abreast == math.ceil(made.abreast / made.advance) * made.groups
        assert (
            c.lanes > 1
            and c.orientation == "column"
            and not c.edges
            and 0 < made.advance <= max(c.advance, c.advance_of(made.abreast))
        )
    else:
        assert (made.tiles - 1) * made.advance < made.groups <= made.tiles * made.advance
        assert 0 < made.advance <= c.columns and made.advance % c.slots == 0
    assert made.panel(made.tiles - 1).stop == made.groups
    shared = max(made.length // c.vector, 1) * c.vector if c.edges else made.length
    assert made.parts * c.cluster_n * made.share >= shared > (made.parts - 1) * c.cluster_n * made.share
    assert made.share % c.unit == 0
    assert c.streaming or made.share <= c.tile
    several = made.share > c.tile or made.ctas < made.tiles * made.parts
    assert c.streaming if several else not c.streaming or (c.orientation == "column" and c.facts.outputs)
    assert c.exchange == (made.parts > 1)
    resident = c.min_blocks <= arch.ctas_of(c.shared_memory)
    assert resident or not (c.exchange and c.facts.outputs), "they wait in vain"
    assert not (c.cluster_n > 1 and (c.exchange or c.streaming)), "clusters hold what they take"
    # Vectors are as wide as the operands allow.
    widest = 16 // max(ITEM_SIZE[c.dtypes[i]] for i in c.facts.main)
    assert 1 <= c.vector <= widest and widest % c.vector == 0
    assert c.orientation in ("column", "row") and (c.orientation == "column" or c.across == 1)
    if c.orientation == "column":
        assert c.shifted or made.kept[-1] % c.vector == 0
    else:
        assert c.edges or made.reduced[-1] % c.vector == 0
        assert c.vector == 1 or all(made.operand_strides[i][c.kept_modes] == 1 for i in c.facts.main)
    for i in c.facts.beside:
        inner = made.operand_strides[i][0 if c.orientation == "column" else c.kept_modes]
        assert c.vector == 1 or inner == (c.access[i] > 0), "elements beside each other, or one for a vector"
        assert c.access[i] * ITEM_SIZE[c.dtypes[i]] <= 16
    # What the kernel is given: all but the bytes of the exchange points are of 32 bits.
    assert c.kept_modes in MODES and c.reduced_modes in MODES
    operands = sum(1 + len(strides) for strides in made.operand_strides)
    assert len(c.signature) == len(made.arguments) + c.exchange + len(c.prologue.numbers) + operands
    assert all(n in INT32 for i, n in enumerate(made.arguments) if i != 9)
    assert max(made.parts * c.cluster_n * made.share, made.length + c.tile) in INT32, "an index in 32 bits"
    # Scratch memory: the words of each exchange point, then a state for each part of each panel.
    assert bool(made.scratch) == c.exchange
    assert made.exchange_bytes >= made.tiles * (1 + made.parts) * 4 and made.exchange_bytes % 16 == 0
    assert made.movement in ("column", "split") and PanelClass(**c.fields | {"prologue": c.prologue}) == c


@cache
def check_merging(c: PanelClass, parts: int):
    """Raise AssertionError unless each thread's result is merged once: over lanes, warps and parts."""
    if c.down == 1:  # a thread has its columns for itself
        assert not c.exchange and c.cluster_n == 1
        return
    if c.aligned:
        check_places(c)
    else:
        check_warps(c)
    if c.exchange:
        read = sorted(p for reader in range(c.readers) for p in range(reader, parts, c.readers))
        assert read == list(range(parts)) and c.readers * c.groups <= c.threads
        assert c.readers <= (WARP if c.lanes_read else c.peers.shape[1])
    check_cluster(c)


def check_places(c: PanelClass):
    """Raise AssertionError unless each thread's results of aligned blocks have places of their own, wherever its rows
    begin, and those of the panel's columns some of each row of threads."""
    places, rows, _ = (mode.size for mode in c.reduction_buffer)
    assert rows == c.down and places == c.columns + c.before
    for shift in range(c.vector):
        found = [a * c.slots + c.before - shift + v for a in range(c.across) for v in range(c.slots)]
        assert len({*found}) == c.columns and min(found) >= 0 and max(found) < places
        assert {*found} >= {*range(c.before, c.before + c.columns - c.slots + 1)}


def check_warps(c: PanelClass):
    """Raise AssertionError unless each thread's result is merged once over the lanes of a warp, and over warps."""
    start = min(c.across, WARP)
    buffer: dict[tuple[int, int], list[int]] = {}
    for thread in range(c.threads):
        lane, a, row = thread % WARP, thread % c.across, thread // max(c.across, WARP)
        if lane < c.across:
            warp = range(thread - lane, thread - lane + WARP)
            alike = [t for t in warp if t % start == lane % start]
            for v in range(c.slots):
                slot = (a * c.slots + v, row)
                assert slot not in buffer, f"two threads write {slot}"
                assert row < c.warps_down
                buffer[slot] = alike
    for column in range(c.columns):
        merged = sorted(t for row in range(c.warps_down) for t in buffer[column, row])
        assert merged == [*range(column // c.slots, c.threads, c.across)]


def check_cluster(c: PanelClass):
    """Raise AssertionError unless each CTA of a cluster gets the states of all, in one trip or in two."""
    if c.trips == 1:
        assert c.cluster_n <= c.peers.shape[1]
        return
    each, slots = c.groups // c.cluster_n, c.groups
    assert each * c.cluster_n == c.groups <= c.threads and c.cluster_n <= WARP
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
