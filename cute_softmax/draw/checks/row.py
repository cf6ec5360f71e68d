"""The row movement checked on a Plan's own numbers; the arithmetic is that of `kernels/row.py`."""

from __future__ import annotations

from collections.abc import Iterator

from layouts import Layout, access
from layouts.figures import Pieces
from layouts.operations import with_steps

from ...plan import Plan, RowClass
from ...plan.problem import ITEM_SIZE
from .report import MAX_PHASES, Report, Traffic, requests_of, wavefronts


def tile_tv(c: RowClass) -> Layout:
    """(thread, value) -> index in the CTA's whole tile: the TV layout of one step, repeated over all."""
    return with_steps(c.tv, c.step_tiler, c.steps)


def pieces(plan: Plan, row: int) -> Pieces:
    """How a row divides into head, body and tail; one tensor decides where vectors begin."""
    reference = plan.row_class.facts.reference
    start = plan.problem.offsets[reference] + plan.row_start(reference, row)
    vector = plan.row_class.vector
    return Pieces(plan.columns, vector, start % vector if plan.row_class.edges else 0)


def columns_of(plan: Plan, row: int, cta: int) -> range:
    """The columns of a row's body, counted from the end of its head, that a CTA of the cluster takes."""
    first = cta * plan.share
    return range(first, max(first, min(pieces(plan, row).body, first + plan.share)))


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


def check(plan: Plan) -> Report:
    """Coverage of the tile and of the rows, alignment and sectors of every request of the first tile, and the
    wavefronts of staged inputs."""
    c = plan.row_class
    problems = []
    try:
        found = access.coverage(tile_tv(c), c.tiler)
        if not found.exact:
            problems.append(
                f"the tile of {c.tiler[0]} x {c.tiler[1]}: {len(found.missing)} elements have no thread and "
                f"{len(found.repeated)} have several"
            )
    except ValueError as error:  # a thread points past the tile
        return Report(plan, (str(error),), "Coverage: see the problem.", (), ())
    rows = min(plan.rows, MAX_PHASES)
    for row in range(rows):
        problems += row_coverage(plan, row)
    traffic = []
    for operand, name in enumerate((*c.facts.inputs, *c.facts.outputs)):
        if c.access[operand : operand + 1] == (0,):
            continue  # one element a row
        try:
            traffic.append(traffic_of(plan, operand, name))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    told = "every element of a row has exactly one thread" if not problems else "see the problems"
    if c.cluster_n > 1:
        told += f", at most {plan.share:,} elements in each of {c.cluster_n} CTAs"
    if c.edges:
        told += f"; heads and tails go as scalars (checked on {rows} rows)"
    return Report(plan, tuple(problems), f"Coverage: {told}.", tuple(traffic), tuple(staged(c)))


def row_coverage(plan: Plan, row: int) -> list[str]:
    """What is wrong with how the threads of all CTAs share a row; empty if each element has one thread."""
    c = plan.row_class
    cut = pieces(plan, row)
    taken = []
    for cta in range(c.cluster_n):
        held = columns_of(plan, row, cta)
        if len(held) > c.tiler[1]:
            return [f"row {row}: CTA {cta} takes {len(held)} columns and its tile has {c.tiler[1]}"]
        if len(held) % c.vector:
            return [f"row {row}: CTA {cta} takes {len(held)} columns, not whole vectors of {c.vector}"]
        if held:
            taken.append((cut.head + held.start, cut.head + held.stop))
    for slot in range(c.threads_per_row * c.edge_scalars):
        after = cut.head + cut.body + slot - (c.vector - 1)
        if slot < cut.head:
            taken.append((slot, slot + 1))
        elif slot >= c.vector - 1 and after < plan.columns:
            taken.append((after, after + 1))
    end = 0
    for start, stop in sorted(taken):
        if start != end:
            return [f"row {row}: columns {min(start, end)} to {max(start, end)} are taken twice or never"]
        end = stop
    return [] if end == plan.columns else [f"row {row}: taken up to column {end} of {plan.columns}"]


def traffic_of(plan: Plan, operand: int, name: str = "") -> Traffic:
    """The requests of an operand's vectors in the first tile.

    Raises ValueError naming lane and address where an access is not aligned to its width.
    """
    c = plan.row_class
    every = (lanes for cta in range(c.cluster_n) for lanes in requests(plan, operand, cta=cta))
    return Traffic.of(name, c.accesses[operand] * ITEM_SIZE[c.dtypes[operand]], every)


def staged(c: RowClass) -> Iterator[str]:
    """A sentence for each input that passes through shared memory: its wavefronts and bank conflicts."""
    rows, columns = c.tiler
    for i, (name, how, elements) in enumerate(zip(c.facts.inputs, c.staging, c.access, strict=False)):
        if how == "direct":
            continue
        size = ITEM_SIZE[c.dtypes[i]]
        # A vector begins where its slots do, which may be wider than its elements.
        apart = c.slot_bytes[i] // size
        memory = Layout((rows, (c.vector, columns // c.vector)), (columns * apart, (1, c.vector * apart)))
        ways = {"written": (memory, size, elements), "read": (memory, size, c.vector)}
        if c.keeps_shared:
            ways["kept in float32 and read again"] = (c.smem, c.slot_bytes[i], c.vector)
        told = []
        for way, (memory, element_bytes, vector) in ways.items():
            copies = access.copy_requests(tile_tv(c), c.tiler, memory, element_bytes, vector)
            told.append(f"{way} {wavefronts((r.addresses for r in copies), vector * element_bytes)}")
        yield f"{name} in shared memory ({how}): {'; '.join(told)}."
