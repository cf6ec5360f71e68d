"""The row movement checked on a Plan's own numbers; the arithmetic is that of `kernels/row.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layouts import Layout, access
from layouts.figures import Pieces
from layouts.operations import with_steps

from ...plan import Plan, RowClass
from ...plan.problem import ITEM_SIZE
from .common import MAX_PHASES, requests_of, traffic, uncovered, unshared, wavefronts
from .report import Report


def tile_tv(c: RowClass) -> Layout:
    """(thread, value) -> index in the CTA's whole tile: the TV layout of one step, repeated over all."""
    return with_steps(c.tv, c.step_tiler, c.steps)


def pieces(plan: Plan, row: int) -> Pieces:
    """How a row divides into head, body and tail; one tensor decides where vectors begin."""
    reference = plan.row_class.facts.reference
    start = plan.problem.offsets[reference] + plan.row_start(reference, row)
    vector = plan.row_class.vector
    return Pieces(plan.columns, vector, start % vector if plan.row_class.edges else 0)


def columns_of(plan: Plan, row: int, cta: int, turn: int = 0) -> range:
    """The columns of a row's body, counted from the end of its head, that a CTA of the cluster takes. turn: of a row
    that comes in tiles, which of them."""
    tile = plan.row_class.tiler[1] if turns(plan) > 1 else plan.share
    first = cta * plan.share + turn * tile
    end = min(pieces(plan, row).body, (cta + 1) * plan.share, first + tile)
    return range(first, max(first, end))


def turns(plan: Plan) -> int:
    """Tiles of a row that a CTA takes one after the other."""
    return -(-plan.share // plan.row_class.tiler[1]) if plan.row_class.movement == "stream" else 1


def requests(plan: Plan, operand: int, tile: int = 0, cta: int = 0) -> Iterator[list[int | None]]:
    """The lanes' byte addresses in each request for a full operand's vectors, None where the predicate is false.

    operand: index among inputs, then outputs; addresses count from the 16-byte boundary before the tensor.
    """
    c = plan.row_class
    size = ITEM_SIZE[c.dtypes[operand]]
    width = c.accesses[operand]
    offset = plan.problem.offsets[operand]
    height, across = c.step_tiler
    index = c.tv.offsets()
    starts, limits = [], []
    for r in range(height):
        row = tile * height + r
        held = columns_of(plan, row, cta)
        starts.append(offset + plan.row_start(operand, row) + pieces(plan, row).head + held.start)
        limits.append(len(held) if row < plan.rows else 0)
    for m in range(c.rows_per_thread):
        places = [divmod(i, height)[::-1] for i in index[m * c.vector * c.threads :][: c.threads]]
        for k in range(c.steps):
            at = [
                starts[r] + column + k * across if column + k * across < limits[r] else None
                for r, column in places
            ]
            yield from requests_of(at, size, c.vector, width)


def of_first_tile(plan: Plan, operand: int) -> Iterator[list[int | None]]:
    """The requests of all CTAs of the first tile."""
    for cta in range(plan.row_class.cluster_n):
        yield from requests(plan, operand, cta=cta)


def check(plan: Plan) -> Report:
    """Coverage of the tile and of the rows, alignment and sectors of every request of the first tile, and the
    wavefronts of staged inputs."""
    c = plan.row_class
    try:
        problems = uncovered(f"the tile of {c.tiler[0]} x {c.tiler[1]}", tile_tv(c), c.tiler)
    except ValueError as error:  # a thread points past the tile
        return Report(plan, (str(error),), "Coverage: see the problem.", (), ())
    rows = min(plan.rows, MAX_PHASES)
    for row in range(rows):
        cut = pieces(plan, row)
        held = [columns_of(plan, row, cta, turn) for cta in range(c.cluster_n) for turn in range(turns(plan))]
        held = [range(cut.head + h.start, cut.head + h.stop) for h in held]
        slots = c.threads_per_row * c.edge_scalars
        found = unshared(
            held, cut.head, cut.body, cut.n, unit=c.vector, tile=c.tiler[1], slots=slots, line=c.vector
        )
        problems += [f"row {row}: {p}" for p in found]
    moved = tuple(traffic(c, lambda operand: of_first_tile(plan, operand), problems))
    told = "every element of a row has exactly one thread" if not problems else "see the problems"
    if turns(plan) > 1:
        told += f", in {turns(plan)} tiles, the first of which is drawn"
    if c.cluster_n > 1:
        told += f", at most {plan.share:,} elements in each of {c.cluster_n} CTAs"
    if c.edges:
        told += f"; heads and tails go as scalars (checked on {rows} rows)"
    return Report(plan, tuple(problems), f"Coverage: {told}.", moved, tuple(staged(c)))


def staged(c: RowClass) -> Iterator[str]:
    """A sentence for each input that passes through shared memory: its wavefronts and bank conflicts."""
    for i, (name, how, elements) in enumerate(zip(c.facts.inputs, c.staging, c.access, strict=False)):
        if how == "direct":
            continue
        held = replace(c, steps=c.steps_of(i), staged=0)
        rows, columns = held.tiler
        size = ITEM_SIZE[c.dtypes[i]]
        # A vector begins where its slots do, which may be wider than its elements.
        apart = c.slot_bytes[i] // size
        memory = Layout((rows, (c.vector, columns // c.vector)), (columns * apart, (1, c.vector * apart)))
        ways = {"written": (memory, size, elements), "read": (memory, size, c.vector)}
        if c.keeps_shared:
            ways["kept in float32 and read again"] = (c.smem, c.slot_bytes[i], c.vector)
        told = []
        for way, (memory, element_bytes, vector) in ways.items():
            copies = access.copy_requests(tile_tv(held), held.tiler, memory, element_bytes, vector)
            told.append(f"{way} {wavefronts((r.addresses for r in copies), vector * element_bytes)}")
        yield f"{name} in shared memory ({how}): {'; '.join(told)}."
