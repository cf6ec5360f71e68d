"""Figures of Plans of the column and split movements.

A tile is drawn with an element of its groups in each row and a group in each column; where a CTA has one group, that
is one row from left to right.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.figures.scene import count

from ..plan import WARP, PanelClass
from . import panel_ahead, panel_exchanges, panel_shift
from .common import space
from .panel_view import View
from .panel_walk import walk

__all__ = ["View", "drawn", "figures", "heading", "tile", "walk"]


def drawn(c: PanelClass) -> dict[str, Layout]:
    """The layouts of a class that its kernel has and figures draw; see `draw.drawn`."""
    return {"smem": c.smem, "reduction_buffer": c.reduction_buffer, "peers": c.peers}


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    c = view.kernel
    found = {"tv": _tv(view), "predicate": _predicate(view), "tile": tile(view), "smem": _smem(view)}
    if c.across < WARP and c.down > 1 and not c.aligned:
        found["shuffle"] = panel_exchanges.shuffle(view)
    if c.down > 1:
        found["reduction_buffer"] = panel_exchanges.reduction_buffer(view)
    if c.cluster_n > 1:
        found["cluster"] = panel_exchanges.cluster(view)
    if c.shifted:
        found["shift"] = (panel_shift.blocks if c.aligned else panel_shift.lines)(view.plan)
    if c.ahead:
        found["places"] = panel_ahead.places(view.plan)
    if c.exchange:
        found["exchange"] = panel_exchanges.exchange(view)
    return found


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    p, c = view.plan, view.kernel
    return (
        f"{c.math} of {p.problem.groups:,} groups of {p.problem.length:,}, {' to '.join(c.own_dtypes)}",
        f"class {c.name} for {c.architecture}; first panel{view.where}, {c.threads:,} threads per CTA",
    )


def _tv(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_value(
        c.tv,
        view.tiler(1),
        element_bytes=view.size,
        fold=c.threads <= 4 * WARP,
        title=f"TV layout: one step of the {c.threads:,} threads of a CTA",
    )
    stand = (
        f"{count(c.across, 'thread')} side by side over {count(c.columns, 'group')}, and {c.down} down the groups"
        if not view.flat
        else f"{count(c.down, 'thread')} along the group"
    )
    value = "neighbouring groups" if not view.flat else "elements of the group"
    one = f"V = {c.vector} {value}, moved by one access." if c.vector > 1 else "V = 1 element."
    return figure.noted(
        f"Thread mode ({c.across}, {c.down}): {stand}. Value mode: {one}",
        f"A CTA's tile takes {count(c.steps, 'such step')} one after the other along its groups: "
        f"{count(c.tile, 'element')} of each.",
    )


def tile(view: View) -> Figure:
    """The first tile in global memory."""
    p, c = view.plan, view.kernel
    name = space(c.facts.inputs[0])
    end = len(p.bounds(0, 0))
    keep = (view.first, min(end, c.tile))
    title = f"{name}: the first tile in global memory{view.where}"
    figure = _of_tile(view, keep, memory=view.memory(0), space=name, title=title)
    modes = len(p.kept)
    reduced = p.operand_strides[0][modes:][::-1]
    along = ", ".join(f"{n:,} elements {s:,} apart" for n, s in zip(p.reduced, reduced, strict=True) if n > 1)
    kept = p.operand_strides[0][:modes][::-1]
    one = "column" if c.rows_abreast > 1 else "group"
    side = ", ".join(f"{n:,} {one}s {s:,} apart" for n, s in zip(p.kept, kept, strict=True) if n > 1)
    notes = [f"A {one}: {along or 'one element'}. Side by side: {side or 'one group'}."]
    others = [space(n) for n in (*c.facts.inputs[1:], *c.facts.outputs)]
    if others:
        notes.append(
            f"{' and '.join(others)}: the same threads at the same coordinates, by strides of their own."
        )
    notes += [f"{space(n)}: one element a group, stored by its first thread." for n in c.facts.group_outputs]
    if c.ahead:
        notes.append(
            f"This CTA takes {count(end, 'element')} of each row in {p.chunks} chunks of {c.chunk:,}, and finishes "
            f"them while it absorbs the next row. The first {c.registers} chunks move to registers, the others stay "
            "in shared memory."
        )
        residents = [space(c.facts.inputs[i]) + (" in bits" if c.bits(i) else "") for i in c.residents]
        if residents:
            notes.append(
                f"{' and '.join(residents)}: the same for all rows, so loaded once, and kept in shared memory."
            )
    elif c.streaming:
        notes.append(
            f"This CTA takes {count(end, 'element')} of each group in chunks of {c.chunk:,}: while one is worked on "
            + ("the other is on its way" if c.buffers == 2 else f"{c.buffers - 1} others are on their way")
            + ". The last ones stay in shared memory"
            + (", the others are read a second time, backwards." if c.facts.outputs else ".")
        )
    elif end < c.tile:
        notes.append(
            f"This CTA takes {count(end, 'element')} of each group: the predicate skips what is past them."
        )
    if not view.flat and p.abreast < c.columns:
        beside = " side by side" if p.abreast < p.groups else ""
        notes.append(f"There are only {count(p.abreast, one)}{beside}: what is past them is skipped.")
    if c.overlap:
        notes.append(
            f"Panels overlap: the next one begins {p.advance} groups further on, so that each block of the result "
            "has a line that holds all of it."
        )
    if c.aligned:
        notes.append(
            "Threads keep aligned blocks: in each row groups begin where blocks do, before those of the panel. Results "
            "of groups that some row of threads has not are never stored."
        )
    if p.advance < c.advance and c.rows_abreast == 1:
        notes.append(
            f"A panel has {p.panel(0).stop} of these groups: so all turns of the CTAs have as many panels, and equal "
            "ones."
        )
    if c.rows_abreast > 1:
        notes.append(
            f"{c.rows_abreast} rows of memory lie side by side, which are whole vectors: columns "
            f"{p.abreast // c.rows_abreast} apart are of one group. The last row has {count(p.last_row, 'column')}."
        )
    if c.down == 1:
        notes.append("Each thread has its groups for itself: nothing is exchanged.")
    report = replace(view.report, shared=())  # that stands under the figures of shared memory
    return figure.noted(*notes, *report.lines())


def _smem(view: View) -> Figure:
    c = view.kernel
    names = [space(n, "s") for i, n in enumerate(c.facts.inputs) if c.tile_of(i) == c.smem]
    height, slots, a_step = c.tile, c.smem.offsets(), c.blocks
    vectors = product(range(c.steps), range(c.vector), map(c.block, range(c.threads)))
    slot = {
        at: slots[element + c.vector * (block + a_step * step)]
        for at, (step, element, block) in zip(c.tiled(c.steps).offsets(), vectors, strict=True)
    }

    def memory(at: tuple[int, int]) -> int:
        element, group = view.place(*at)
        return slot[element + height * group]

    title = f"{names[0]}: slots of threads in shared memory, {c.smem}"
    figure = _of_tile(view, (view.first,), memory=memory, space=names[0], shared=True, title=title)
    notes = [f"One buffer each: {', '.join(names)}."] if len(names) > 1 else []
    if c.shifted and not c.aligned:
        notes += [
            f"(element of the vector, block, step): each line has blocks of {count(c.lanes, 'lane')} and "
            f"{c.extra} behind them. They are copied as they lie in memory; when its warp's copies have come, each "
            "thread takes its vector out of two of them and puts it where its own block was.",
            "Lines that do not exist become padding that changes no result: every later step takes all slots.",
        ]
        return figure.noted(*notes, *view.report.shared[: len(c.facts.inputs)])
    notes += [
        "(element of the vector, thread, step): each thread has slots of its own, next to its neighbours', and reads "
        "back only what it copied itself. So waiting for its own copies is enough: no barrier between threads.",
        "What lies outside is filled with padding that changes no result: every later step takes all slots.",
    ]
    return figure.noted(*notes, *view.report.shared[: len(c.facts.inputs)])


def _of_tile(view: View, keep: tuple[int, ...], **options) -> Figure:
    """The threads of the CTA's tile, drawn around the elements `keep` however many there are."""
    c, step = view.kernel, view.tiler(1)[1]
    along = {"keep": keep, "step": step} if view.flat else {"keep_rows": keep}
    tile = c.tiled(c.steps), view.tiler(c.steps)
    return draw.thread_value(*tile, element_bytes=view.size, **along, **options)


def _predicate(view: View) -> Figure:
    p, c = view.plan, view.kernel
    part, rank = view.last
    if view.flat:
        bounds = {"n": view.final.stop, "column_start": view.final.start}
        stored = Layout((1, 1, c.steps), (0, 0, 1))
    else:
        start, end = view.start % p.abreast, p.abreast
        if c.shifted:  # whole vectors that hold something, line by line
            width = c.lanes * c.slots
            left = [end - start - c.column(a) for a in range(0, c.across, c.lanes)]
            end = start + sum(max(min(-(-n // c.slots) * c.slots, width), 0) for n in left)
        bounds = {"n": end, "column_start": start, "rows_inside": min(len(view.final), c.tile)}
        stored = Layout((1, c.steps, 1), (0, 1, 0))
    names = [f"CTA {rank}"] if c.cluster_n > 1 else []
    names += [f"part {part}"] if c.exchange else []
    figure = draw.predicate_tensor(
        stored,
        c.tv,
        view.tiler(1),
        vector=c.vector,
        thread=view.followed,
        element_bytes=view.size,
        title=f"The predicate where the last panel ends: {', '.join([f'panel {p.tiles - 1:,}', *names])}",
        **bounds,
    )
    notes = [
        "Drawn as bits, but nothing is stored: a thread knows how much of the group is left from its first element "
        f"on, here of {view.final.start:,} to {view.final.stop - 1:,}, and vector k exists where that is more than k "
        f"steps of {c.down * c.unit}: one comparison each."
    ]
    if c.edges:
        head, body = p.pieces(view.start)
        notes.append(
            f"Vectors begin with the first line of cache in this row: {count(head, 'scalar')} before it and "
            f"{count(p.length - head - body, 'scalar')} after the last whole vector belong to threads of part 0."
        )
    if c.shifted:
        notes.append(
            f"There are {p.abreast:,} groups side by side, here in whole vectors: a block is copied if it holds some "
            "group of its line, and what else it holds is never stored."
        )
    elif c.rows_abreast > 1:
        notes.append(
            f"There are {p.abreast:,} columns, drawn as if all rows had them; the last one has {p.last_row:,}. Of its "
            "vectors those exist that begin before its end, and what one has behind it is padding."
        )
    elif not view.flat:
        notes.append(
            f"Groups past the last of {p.groups:,} have nothing left at all. A vector holds "
            f"{count(c.vector, 'group')}, and all of them exist or none."
        )
    return figure.noted(*notes)
