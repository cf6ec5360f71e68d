"""The column and split movements checked on a Plan's own numbers; the arithmetic is that of `kernels/panel.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...plan import WARP, PanelClass, PanelPlan
from ...plan.panel_class import WORD
from ...plan.problem import ITEM_SIZE
from . import panel_ahead
from .common import MAX_PHASES, requests_of, traffic, uncovered, unshared, wavefronts
from .report import Report


def requests(
    plan: PanelPlan, operand: int, *, tile: int = 0, part: int = 0, rank: int = 0
) -> Iterator[list[int | None]]:
    """The lanes' byte addresses in each request of a CTA for vectors of a full operand, None where nothing is loaded.

    tile: which panel. Addresses count from the 16-byte boundary before the tensor.
    """
    c = plan.kernel
    size = ITEM_SIZE[c.dtypes[operand]]
    columns = plan.panel(tile)
    held = plan.bounds(part, rank, columns.start)
    base = plan.problem.offsets[operand]
    elements = {e: plan.element(operand, held.start + e) for e in range(0, min(c.tile, len(held)), c.unit)}
    words = operand < len(c.facts.inputs) and c.words(operand)
    if c.shifted and not words and c.accesses[operand]:
        yield from (aligned_requests if c.aligned else shifted_requests)(plan, operand, columns, elements)
        return
    places = {a * c.slots: c.column(a) for a in range(c.across)}
    groups = {
        g: plan.group(operand, columns.start + first) for g, first in places.items() if first < len(columns)
    }
    index, height, each = c.tiled(c.steps).offsets(), c.tile, c.vector * c.threads

    def at(t: int, k: int) -> int | None:
        """Elements to vector k of thread t, None where there is none."""
        group, element = divmod(index[k * each + t], height)
        exists = group in groups and element in elements
        return base + groups[group] + elements[element] if exists else None

    if c.accesses[operand] == 0:
        for first, j in product(range(0, c.steps, c.chunk_steps), range(0, c.chunk_steps, c.alike)):
            taken = [(t, j + t % c.alike) for t in range(c.threads)]
            lanes = [at(t, first + k) if k < c.chunk_steps else None for t, k in taken]
            yield from requests_of(lanes, size)
        return
    for k in range(c.steps):
        lanes = [at(t, k) for t in range(c.threads)]
        if words:
            yield from requests_of([None if e is None else e * size // WORD for e in lanes], WORD, words)
        else:
            yield from requests_of(lanes, size, c.vector, c.accesses[operand])


def shifted_requests(
    plan: PanelPlan, operand: int, columns: range, elements: dict[int, int]
) -> Iterator[list[int | None]]:
    """`requests` for blocks that are shifted: of an input those that hold something, of an output the whole ones (the
    scalars where memory's rows end are left out)."""
    c, size = plan.kernel, ITEM_SIZE[plan.kernel.dtypes[operand]]
    loads = operand < len(c.facts.inputs)
    ahead = columns.start % plan.abreast  # groups of memory's row before the panel
    left = plan.abreast - ahead
    wanted = min(left, len(columns))
    start = plan.problem.offsets[operand] + plan.group(operand, columns.start)
    column, lanes, advance = [c.column(a) for a in range(c.across)], c.lanes, plan.advance
    for k in range(c.steps):
        own: list[int | None] = []
        behind: list[int | None] = []
        for thread in range(c.threads):
            a, d = thread % c.across, thread // c.across
            lane, first = a % lanes, column[a - a % lanes]
            element = elements.get(d + k * c.down)
            if element is None:
                own.append(None)
                behind.append(None)
                continue
            line = start + first + element
            if loads:
                shift = line % (c.extra * c.vector)
                for block, found in ((lane, own), (lanes + lane, behind)):
                    group = first - shift + block * c.vector  # of the panel, the block's first
                    some = group + c.vector > first and group < min(wanted, first + lanes * c.vector)
                    found.append(line - shift + block * c.vector if some else None)
            else:
                shift = line % c.vector
                group = first - shift + lane * c.vector
                alone = lane < lanes - 1 and column[a] < advance
                ours = column[a] < wanted and (lane > 0 or shift == 0) and (alone or shift > 0)
                own.append(start + group + element if ours and group + c.vector <= left else None)
        yield from requests_of(own, size)
        yield from requests_of(behind, size)


def aligned_requests(
    plan: PanelPlan, operand: int, columns: range, elements: dict[int, int]
) -> Iterator[list[int | None]]:
    """`requests` for blocks that threads keep: of an input those that hold something, of an output the whole ones that
    are not the next panel's (the scalars where memory's rows end are left out)."""
    c, size = plan.kernel, ITEM_SIZE[plan.kernel.dtypes[operand]]
    loads = operand < len(c.facts.inputs)
    ahead = columns.start % plan.abreast  # groups of memory's row before the panel
    left, end = plan.abreast - ahead, plan.advance // c.vector
    start = plan.problem.offsets[operand] + plan.group(operand, columns.start)
    inside = [c.column(a) < plan.advance + c.overlap for a in range(c.across)]
    for k in range(c.steps):
        found: list[int | None] = []
        for d in range(c.down):
            element = elements.get(d + k * c.down)
            if element is None:
                found += [None] * c.across
                continue
            shift = (start + element) % c.vector
            for a in range(c.across):
                group = a * c.vector - shift  # of the panel, the block's first
                exists = inside[a] and group < left
                if not loads:
                    ours = (a > 0 or shift == 0) and (a < end or (a == end and shift > 0))
                    exists = exists and ours and group + c.vector <= left
                found.append(start + group + element if exists else None)
        yield from requests_of(found, size)


def of_first_tiles(plan: PanelPlan, operand: int) -> Iterator[list[int | None]]:
    """The requests of the first cluster's CTAs for their first tiles."""
    for rank in range(plan.kernel.cluster_n):
        yield from requests(plan, operand, rank=rank)


def check(plan: PanelPlan) -> Report:
    """Coverage of the panels, alignment and sectors of every request of the first CTA's or cluster's first tile, and
    the wavefronts of shared memory."""
    c = plan.kernel
    what = f"the tile of {c.tile} elements by {c.columns} groups"
    problems = [*uncovered(what, c.tiled(c.steps), (c.tile, c.columns)), *coverage(plan)]
    if c.ahead:
        problems += panel_ahead.walk_of(plan).problems(c.buffers)
    for operand, name in enumerate((*c.facts.inputs, *c.facts.outputs)):
        problems += [f"{name}: {p}" for p in alignment(plan, operand)]
    moved = tuple(traffic(c, lambda operand: of_first_tiles(plan, operand), problems))
    told = "every element of a group has exactly one thread" if not problems else "see the problems"
    ctas = c.cluster_n * plan.parts
    if ctas > 1:
        told += f", at most {plan.share:,} elements in each of {ctas} CTAs"
    if c.streaming:
        told += f"; a CTA takes them in chunks of {c.chunk:,}"
    return Report(plan, tuple(problems), f"Coverage: {told}.", moved, tuple(shared(c)))


def coverage(plan: PanelPlan) -> list[str]:
    """What is wrong with how CTAs share a group, and panels the groups; empty if each element has one CTA."""
    c, (head, body) = plan.kernel, plan.pieces(0)
    problems = unshared(
        [plan.bounds(part, rank) for part in range(plan.parts) for rank in range(c.cluster_n)],
        head,
        body,
        plan.length,
        unit=c.unit,
        tile=None if c.streaming else c.tile,
        slots=c.threads * c.edge_scalars if c.edges else 0,
        line=c.line,
    )
    if plan.kept[-1] % c.slots and not c.shifted:
        problems.append(f"vectors of {c.slots} groups straddle the end of a dimension of {plan.kept[-1]}")
    if plan.reduced[-1] % c.unit and not c.edges:
        problems.append(f"vectors of {c.unit} straddle the end of a dimension of {plan.reduced[-1]}")
    return problems


def alignment(plan: PanelPlan, operand: int) -> Iterator[str]:
    """What keeps vectors of an operand from being one access each, wherever their panel and their element lie."""
    c = plan.kernel
    one = c.accesses[operand]
    if c.vector == 1 or one == 0 or (operand < len(c.facts.inputs) and c.words(operand)):
        return
    neighbours = plan.operand_strides[operand][0 if c.orientation == "column" else len(plan.kept)]
    if neighbours != 1:
        yield f"the elements of a vector lie {neighbours} apart"
    if c.shifted:
        return  # they come in blocks, which are aligned by themselves
    groups = {
        (plan.group(operand, g) + plan.pieces(g)[0]) % one
        for g in range(0, min(plan.groups, MAX_PHASES * c.slots), c.slots)
    }
    elements = {
        plan.element(operand, e) % one for e in range(0, min(plan.length, MAX_PHASES * c.unit), c.unit)
    }
    offset = plan.problem.offsets[operand]
    if any((offset + a + b) % one for a in groups for b in elements):
        yield f"some accesses are not aligned to their {one * ITEM_SIZE[c.dtypes[operand]]} bytes"


def shared(c: PanelClass) -> Iterator[str]:
    """A sentence for each use of shared memory: its wavefronts and bank conflicts."""
    buffer = c.reduction_buffer
    for i, name in enumerate(c.facts.inputs):
        smem = c.tile_of(i)
        if c.access[i] == 0:
            size = ITEM_SIZE[c.dtypes[i]]
            slots = [smem(0, t, k) for k in range(c.steps) for t in range(c.threads)]
            told = wavefronts(requests_of(slots, size), size)
            yield f"{name} in shared memory, one element for each vector of {c.alike} threads, read: {told}."
            continue
        size, each = c.place_bytes(i), 1 if c.words(i) else smem.shape[0]
        slots = [smem(0, c.block(t), k) for k in range(c.steps_of(i)) for t in range(c.threads)]
        told = wavefronts(requests_of(slots, size), each * size)
        yield f"{name} in shared memory{', in bits' if c.bits(i) else ''}, written and read: {told}."
    if c.down == 1:
        return  # nothing is exchanged
    partial = range(c.slots)
    writes = [buffer(a * c.slots + v, 0, 0) if a < c.across else None for v in partial for a in range(WARP)]
    place = {c.merged_by(column): column + c.before for column in range(c.columns)}
    reads = [buffer(place[t % c.columns], w, 0) for w in range(c.warps_down) for t in range(WARP)]
    spread = [buffer(t % c.across * c.slots + v, 0, 0) for v in partial for t in range(WARP)]
    written, read, merged = (wavefronts(requests_of(s, 4), 4) for s in (writes, reads, spread))
    yield f"Reduction buffer, written by a warp: {written}."
    yield f"Reduction buffer, read by a warp: {read}; merged results, read: {merged}."
