"""Figures of Plans of the row movement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from layouts import Layout, ints
from layouts import figures as draw
from layouts.figures import Figure
from layouts.figures.scene import count
from layouts.html import Step
from layouts.walk import row_walk

from ..plan import WARP, Plan, RowClass
from ..plan.modes import power_of_two
from ..plan.problem import ITEM_SIZE
from . import checks, common, row_ring
from .common import exchanged, space


@dataclass(frozen=True)
class View(common.View):
    """What the figures of a Plan show: the first tile, in the CTA of the cluster where its rows end."""

    plan: Plan

    @cached_property
    def cta(self) -> int:
        """The CTA of the cluster that holds the end of row 0."""
        last = max(checks.pieces(self.plan, 0).body - 1, 0)
        return min(last // self.plan.share, self.kernel.cluster_n - 1)

    @cached_property
    def columns(self) -> range:
        """The columns of row 0 that this CTA holds, counted from the end of the row's head."""
        return checks.columns_of(self.plan, 0, self.cta)

    @cached_property
    def end(self) -> int:
        """The column of the tile at which row 0 ends."""
        return len(self.columns)

    @cached_property
    def usual(self) -> int:
        """The thread that holds the last vector of row 0, or where warps exchange the first lane of its warp, which
        writes the warp's result."""
        c = self.kernel
        column = max(self.end - 1, 0) % c.step_tiler[1] // c.vector * c.vector
        index = column * c.tiler[0]
        found = next((t for t in range(c.threads) if c.tv(t, 0) == index), 0)
        return found // WARP * WARP if c.exchanges else found

    @cached_property
    def keep(self) -> tuple[int, ...]:
        """Columns that are drawn however wide the tile: the followed thread's first, and those at the end."""
        c = self.kernel
        own = c.tv(self.followed, 0) // c.tiler[0]
        last = own + max(0, (self.end - 1 - own) // c.step_tiler[1]) * c.step_tiler[1]
        return tuple(sorted({own, last, self.end}))

    def memory(self, operand: int):
        """(row, column) of this CTA's tile -> offset in an operand's tensor, in elements."""
        starts = [
            self.plan.row_start(operand, r) + checks.pieces(self.plan, r).head
            for r in range(self.kernel.tiler[0])
        ]
        return lambda at: starts[at[0]] + self.columns.start + at[1]

    @cached_property
    def where(self) -> str:
        """Which CTA is drawn, for titles; empty without a cluster."""
        last = self.kernel.cluster_n - 1
        return f", CTA {self.cta} (of 0 to {last})" if last else ""

    @cached_property
    def exchanges(self) -> list[tuple[str, int]]:
        """What each exchange carries, and the first stage of the reduction buffer that it uses."""
        c = self.kernel
        names = exchanged(c.math, c.online, c.facts.stages, c.prologue.against)
        return [(name, i * c.turns) for i, name in enumerate(names)]


def drawn(c: RowClass) -> dict[str, Layout]:
    """The layouts that figures of a Plan class draw, under the names by which its kernel tells them while it
    is traced (`layouts.trace.observing`)."""
    found = {"tv": c.tv} if c.movement == "stream" else {"tv": c.tv, "predicate": c.predicate}
    if any(how != "direct" for how in c.staging):
        found["smem"] = c.smem
    if c.exchanges:
        found["reduction_buffer"] = c.reduction_buffer
    return found


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    c = view.kernel
    found = {"tv": _tv(view), "tile": tile(view)}
    layouts = drawn(c)
    if "smem" in layouts:
        found["smem"] = _smem(view)
    if c.edges:
        found["edges"] = _edges(view)
    if "predicate" in layouts:
        found["predicate"] = _predicate(view)
    if c.threads_per_row > 1:
        found["shuffle"] = _shuffle(view)
    if "reduction_buffer" in layouts:
        found["reduction_buffer"] = _reduction_buffer(view)
    if c.peers > 1:
        found["cluster"] = _cluster(view)
    if c.ring:
        found |= {"turns": row_ring.turns(view.plan), "workspace": row_ring.workspace(view.plan)}
    return found


def _tv(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_value(
        c.tv,
        c.step_tiler,
        element_bytes=view.size,
        fold=c.threads <= 4 * WARP,
        title=f"TV layout: one step of the {c.threads:,} threads of a CTA",
    )
    (across, down), (vector, own) = c.tv.shape
    height, width = c.step_tiler
    return figure.noted(
        f"Thread mode ({across}, {down}): {count(across, 'thread')} along a row and {count(down, 'row')} "
        f"of them. Value mode ({vector}, {own}): V = {count(vector, 'neighbouring element')}, moved by one "
        f"access, in each of M = {count(own, 'row')}.",
        f"The strides lead to an index that runs down the columns of the {height} \u00d7 {width} tile: "
        f"an index of 1 more is the next row, of {height} more the next column.",
        f"A row of the CTA's tile takes K = {count(c.steps, 'such step')}: partitioned by this copy it has "
        f"the shape ((V, M), 1, K) = (({vector}, {own}), 1, {c.steps}).",
    )


def tile(view: View) -> Figure:
    """The first tile in global memory."""
    c = view.kernel
    name = space(c.facts.inputs[0])
    figure = draw.thread_value(
        checks.tile_tv(c),
        c.tiler,
        memory=view.memory(0),
        space=name,
        element_bytes=view.size,
        keep=view.keep,
        step=c.step_tiler[1],
        title=f"{name}: the first tile in global memory{view.where}",
    )
    others = [space(n) for n in (*c.facts.inputs[1:], *c.facts.outputs)]
    notes = [f"{' and '.join(others)}: the same threads at the same coordinates."] if others else []
    notes += [
        f"{space(n)}: one element a row, which the first thread of the row stores"
        + (", in CTA 0 of the cluster." if c.cluster_n > 1 else ".")
        for n in c.facts.group_outputs
    ]
    if view.end < c.tiler[1]:
        notes.append(
            f"Row 0 has {count(view.end, 'column')} of this tile in whole vectors: those past them are "
            "drawn here and skipped by the predicate."
        )
    report = replace(view.report, shared=())  # that stands under the figure of shared memory
    return figure.noted(*notes, *report.lines())


def _smem(view: View) -> Figure:
    c = view.kernel
    staged = [n for n, how in zip(c.facts.inputs, c.staging, strict=True) if how != "direct"]
    # Of a ring the first place: the others are alike.
    places, memory = (f", place 0 of {c.ring}", lambda at: c.smem((*at, 0))) if c.ring else ("", c.smem)
    name, held = (
        space(staged[0], "s"),
        replace(c, steps=c.steps_of(c.facts.inputs.index(staged[0])), staged=0),
    )
    figure = draw.thread_value(
        checks.tile_tv(held),
        held.tiler,
        memory=memory,
        space=name,
        element_bytes=c.slot_bytes[c.facts.inputs.index(staged[0])],
        shared=True,
        keep=view.keep,
        step=c.step_tiler[1],
        title=f"{name}: the tile in shared memory, {c.smem}{places}",
    )
    notes = [f"One buffer each: {', '.join(space(n, 's') for n in staged)}."] if len(staged) > 1 else []
    notes.append(
        "Each thread reads back only what it copied itself, so waiting for its own copies is enough: no "
        "barrier between threads."
    )
    if c.keeps_shared:
        notes.append(
            "The exponential of an element takes its place, in float32, until the row's sum is known."
        )
    if c.ring:
        apart = c.smem.stride[2] * c.slot_bytes[c.facts.inputs.index(staged[0])]
        notes.append(f"The next place begins {apart:,} bytes further, with another tile.")
    elif c.staged:
        notes.append(
            f"A thread has {c.staged} slots for its {c.steps} vectors: as soon as one is read it is filled with the "
            f"vector that is {c.staged} behind, of the next tile in the end."
        )
    elif c.movement == "stream":
        notes.append("While a tile is worked on the next one of the row is on its way to the other half.")
    elif c.persistent:
        notes.append("As soon as a slot is read it is filled with the next tile's vector: loads never stop.")
    if "resident" in c.staging:
        notes.append("The mask or bias is the same for all rows: it is loaded once, and stays.")
    return figure.noted(*notes, *view.report.shared)


def _edges(view: View) -> Figure:
    p, c = view.plan, view.kernel
    reference = c.facts.reference
    starts: list[int] = []
    for row in range(min(p.rows, checks.MAX_PHASES)):
        start = p.problem.offsets[reference] + p.row_start(reference, row)
        if start % c.vector in [s % c.vector for s in starts]:
            break
        starts.append(start)
    same = p.operand_strides[0] == p.operand_strides[reference] and p.problem.offsets[reference] == 0
    name = c.facts.operands[0 if same else reference]
    figure = draw.row_pieces(
        p.columns,
        vector=c.vector,
        starts=starts,
        threads=c.threads_per_row,
        element_bytes=ITEM_SIZE[c.dtypes[reference]],
        share=p.share if c.cluster_n > 1 else 0,
        cta=view.cta,
        space=space(name),
        title=f"Head, body and tail of rows of {p.columns:,}",
    )
    return figure.noted(
        f"Shown: {count(len(starts), 'row')}, one for each way in which the rows of this matrix begin off a "
        f"vector boundary of the {'output' if c.facts.outputs else 'input'}. Threads are counted within their row.",
        f"A thread has room for {count(c.edge_scalars, 'scalar')} in addition to its vectors; a scalar exists where "
        "its slot falls into the head or the tail of its row.",
    )


def _predicate(view: View) -> Figure:
    p, c = view.plan, view.kernel
    figure = draw.predicate_tensor(
        c.predicate,
        c.tv,
        c.step_tiler,
        view.columns.stop,
        vector=c.vector,
        column_start=view.columns.start,
        rows_inside=min(p.rows, c.tiler[0]),
        row_bits=True,
        thread=view.followed,
        element_bytes=view.size,
        title=f"pX: the predicate of rows of {p.columns:,}{view.where}",
    )
    notes = [
        f"Shape (M, rows of the copy, K) = {ints.show(c.predicate.shape)}: one bit decides a vector of "
        f"{count(c.vector, 'element')}.",
        f"Mode 0 counts the M = {count(c.rows_per_thread, 'row')} that a thread owns within one step, mode 1 the "
        "rows over which the copy repeats: here one copy covers all rows of the tile, so that its size is 1. "
        + (
            "All rows end at the same vector and share their bits: stride 0."
            if c.rows_end_alike
            else "Each row ends at a vector of its own and has bits of its own."
        ),
        "Whether a row exists is a separate bit, pR: a vector is loaded if both are true.",
    ]
    if c.edges:
        notes.append(
            "Columns are counted from the end of the head: row 0 has a body of "
            f"{checks.pieces(p, 0).body:,} elements. In rows of another phase it may be one vector shorter, "
            "and each row compares with its own."
        )
    if c.cluster_n > 1:
        notes.append(
            f"Each of {c.cluster_n} CTAs takes {p.share:,} columns: equal shares in whole cache lines of "
            f"{c.line} elements. CTA {view.cta} holds the end of the row."
        )
    left = p.rows % c.tiler[0]
    if left and p.rows > c.tiler[0]:
        notes.append(
            f"In the last tile only {left} of {c.tiler[0]} rows exist: the bits of the other rows are false."
        )
    return figure.noted(*notes)


def _shuffle(view: View) -> Figure:
    c = view.kernel
    figure = draw.warp_shuffle(min(c.threads_per_row, WARP), warp=view.warp)
    notes = [f"Merged: {name}." for name, _ in view.exchanges]
    rescaled = (
        "every lane rescales its sum once to the common maximum, and the rounds run again for the sums: "
        "one exponential a lane instead of one a round."
    )
    peers = c.warps_per_row * c.peers
    width = min(power_of_two(peers), WARP)  # few peers lie in as few neighbouring lanes, again and again
    who = f"the {WARP} lanes merge" if width == WARP else f"every {width} neighbouring lanes merge"
    later = f"Later {who} in the same way what they have read from the buffer."
    if (c.math, c.online) == ("softmax", True):
        if (c.keep and not c.keeps_shared) or (c.ring and not c.prologue.softcap):
            notes.append(
                "The rounds run for the maxima first; the lanes compute exponentials relative to the common "
                "maximum, and the rounds run again for their sums."
            )
            later = f"Later {who} what they have read from the buffer, the maxima first: {rescaled}"
        else:
            notes.append(f"The rounds run for the maxima first; {rescaled}")
    if c.exchanges:
        notes.append(later)
    return figure.noted(*notes)


def _reduction_buffer(view: View) -> Figure:
    c = view.kernel
    figure = draw.reduction_buffer(
        c.reduction_buffer,
        element_bytes=c.facts.state_bytes,
        cta=view.cta if c.peers > 1 else 0,
        title=f"Reduction buffer{view.where if c.peers > 1 else ''}",
    )
    notes = [
        "Shape (rows, (warps of a row, CTAs of the cluster), stages) in order (1, 0, 2): the peers of a row "
        "lie side by side, so that one load fetches them into the lanes of a warp."
    ]
    for name, stage in view.exchanges:
        which = (
            f"Stage {stage} carries" if c.turns == 1 else f"Stages {stage} and {stage + 1} carry, in turn,"
        )
        notes.append(f"{which} {name}: {c.facts.state_bytes} bytes a slot.")
    if c.turns > 1:
        notes.append(
            "The CTAs are persistent and alternate between two buffers from tile to tile: to write one again a warp "
            "must have passed the exchange in the other, so that it never overwrites what a slow warp still "
            "reads."
        )
    if c.ring:
        notes.append(
            "It merges what the warps of a CTA have. CTAs that share a row exchange states in the ranks' workspaces."
        )
    return figure.noted(*notes)


def _cluster(view: View) -> Figure:
    c = view.kernel
    figure = draw.cluster_exchange(
        c.reduction_buffer, element_bytes=c.facts.state_bytes, cta=view.cta, warp=view.warp
    )
    return figure.noted(
        "Warp 0 of each CTA tells its own mbarrier how many bytes to expect; it completes when they have arrived."
    )


def walk(view: View) -> list[Step]:
    """The steps of the explorer: row 0 of the tile on its way through the figures of the Plan."""
    c = view.kernel
    found = row_walk(
        0,
        tile="tile",
        predicate="predicate" if "predicate" in drawn(c) else "",
        pieces="edges",
        staged="smem" if "smem" in drawn(c) else "",
        shuffle="shuffle",
        buffer="reduction_buffer",
        cluster="cluster" if c.peers > 1 else "",
        end=view.end or c.tiler[1],
        exchanges=view.exchanges,
    )
    return [*found[:-1], *row_ring.walk(), found[-1]] if c.ring else found


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    p, c = view.plan, view.kernel
    return (
        f"{c.math} of {p.rows:,} rows of {p.columns:,}, {' to '.join(dict.fromkeys(c.dtypes))}",
        f"class {c.name} for {c.architecture}; first tile{view.where}, {c.threads:,} threads per CTA",
    )
