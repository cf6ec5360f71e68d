"""Figures of Plans of the column and split movements.

A tile is drawn with an element of its groups in each row and a group in each column; where a CTA has one group, that
is one row from left to right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure, Slots, Use

from ..plan import WARP, PanelClass, PanelPlan
from ..plan.problem import ITEM_SIZE
from . import checks, panel_ahead, panel_shift
from .common import EXCHANGED, FOLLOWED, count, space
from .panel_walk import walk_of

SHARED, GLOBAL = "shared memory", "global memory"


@dataclass(frozen=True)
class View:
    """What the figures of a Plan show: the first panel in its first CTA; the predicate, where data ends."""

    plan: PanelPlan
    thread: int | None = None

    def __post_init__(self):
        threads = self.plan.kernel.threads
        if self.thread is not None and not 0 <= self.thread < threads:
            raise ValueError(f"thread must be 0 to {threads - 1}, got {self.thread}")

    @property
    def kernel(self) -> PanelClass:
        return self.plan.kernel

    @property
    def flat(self) -> bool:
        """Whether the CTA has one group, drawn from left to right."""
        return self.kernel.orientation == "row"

    def tiler(self, steps: int) -> tuple[int, int]:
        """(rows, columns) of the drawing of so many steps."""
        height = self.kernel.down * self.kernel.unit * steps
        return (1, height) if self.flat else (height, self.kernel.columns)

    def place(self, element: int, group: int) -> tuple[int, int]:
        """(row, column) of the drawing."""
        return (group, element) if self.flat else (element, group)

    @property
    def start(self) -> int:
        """The first group of the last panel."""
        return self.plan.panel(self.plan.tiles - 1).start

    @cached_property
    def last(self) -> tuple[int, int]:
        """(part, CTA of its cluster) with the end of the last group, or of its body."""
        at = max(self.plan.pieces(self.start)[1] - 1, 0) // self.plan.share
        return at // self.kernel.cluster_n, at % self.kernel.cluster_n

    @cached_property
    def final(self) -> range:
        """The elements that this CTA holds at the end: its last chunks."""
        c, held = self.kernel, self.plan.bounds(*self.last, self.start)
        chunks = -(-len(held) // c.chunk)
        first = held.start + max(chunks - c.buffers, 0) * c.chunk
        return range(first, held.stop)

    @cached_property
    def followed(self) -> int:
        """The thread to follow: the one asked for, else the first lane of the warp with the end of a group."""
        if self.thread is not None:
            return self.thread
        c = self.kernel
        down = max(len(self.final) - 1, 0) % (c.down * c.unit) // c.unit
        return down * c.across // WARP * WARP

    @cached_property
    def own(self) -> int:
        """The first element of the followed thread."""
        return self.kernel.tv(self.followed, 0) % (self.kernel.down * self.kernel.unit)

    def memory(self, operand: int) -> Callable[[tuple[int, int]], int]:
        """(row, column) of the first CTA's tile -> offset in an operand's tensor, in elements."""

        def offset(at: tuple[int, int]) -> int:
            element, group = self.place(*at)
            element += self.plan.pieces(group)[0]
            c = self.kernel
            if c.shifted:  # in lines that overlap, of the last kept mode
                group = c.column(group // c.slots) + group % c.slots
                return group * self.plan.operand_strides[operand][0] + self.plan.element(operand, element)
            return self.plan.group(operand, group) + self.plan.element(operand, element)

        return offset

    @cached_property
    def where(self) -> str:
        """Which CTA is drawn, for titles; empty where there is but one to a panel."""
        c, names = self.kernel, []
        if c.cluster_n > 1:
            names.append(f"CTA 0 (of 0 to {c.cluster_n - 1})")
        if c.meeting:
            names.append(f"part 0 (of 0 to {self.plan.parts - 1})")
        return "".join(f", {n}" for n in names)

    @cached_property
    def exchanges(self) -> list[tuple[str, int]]:
        """What each exchange between threads carries, and its stage of the reduction buffer."""
        c = self.kernel
        if c.down == 1:  # each thread has its groups for itself
            return []
        names = EXCHANGED.get((c.math, False)) or EXCHANGED.get((c.math, True)) or ()
        names += ("a partial result",) * (c.stages - len(names))
        return [(name, stage) for stage, name in enumerate(names)]

    def slots(
        self,
        heading: str,
        where: str,
        layout: Layout,
        element_bytes: int,
        other: str,
        use: Callable[[int, int], Use],
        base: int = 0,
        role: str = "",
    ) -> Slots:
        """A buffer whose layout has the shape (group, `other`); use(group, other) says who has a slot, and role what
        slots are."""
        (groups, others), (group_stride, other_stride) = layout.shape, layout.stride
        turned = Layout((others, groups), (other_stride, group_stride))
        return Slots(
            heading,
            where,
            layout if self.flat else turned,
            element_bytes,
            use if self.flat else lambda r, c: use(c, r),
            base=base,
            shared=where.startswith(SHARED),
            row_name="column" if self.flat else other,
            column_name=other if self.flat else "column",
            role=role,
        )


def drawn(c: PanelClass) -> dict[str, Layout]:
    """The layouts of a class that its kernel has and figures draw; see `diagrams.drawn`."""
    return {"smem": c.smem, "reduction_buffer": c.reduction_buffer, "peers": c.peers}


def figures(plan: PanelPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `diagrams.figures`."""
    view, c = View(plan, thread), plan.kernel
    found = {"tv": _tv(view), "predicate": _predicate(view), "tile": _tile(view), "smem": _smem(view)}
    if c.across < WARP and c.down > 1:
        found["shuffle"] = _shuffle(view)
    if c.down > 1:
        found["reduction_buffer"] = _reduction_buffer(view)
    if c.cluster_n > 1:
        found["cluster"] = _cluster(view)
    if c.shifted:
        found["shift"] = panel_shift.lines(plan)
    if c.ahead:
        found["places"] = panel_ahead.places(plan)
    if c.meeting:
        found["meeting"] = _meeting(view)
    followed = [f for name, f in found.items() if name not in ("tv", "places", "shift")]
    found[FOLLOWED] = draw.follow_thread(
        followed, view.followed, title=f"Thread {view.followed} of {c.threads:,}{view.where}"
    )
    return found


def overview(plan: PanelPlan) -> Figure:
    """The tile of a Plan."""
    return _tile(View(plan))


def heading(plan: PanelPlan, thread: int | None = None) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    c = plan.kernel
    dtypes = " to ".join(dict.fromkeys(c.dtypes))
    return (
        f"{c.math} of {plan.groups:,} groups of {plan.length:,}, {dtypes}",
        f"class {c.name} for {c.architecture}; first panel{View(plan, thread).where}, {c.threads:,} threads a CTA",
    )


def walk(plan: PanelPlan, found: dict[str, Figure], thread: int | None = None):
    """The steps of the explorer: a group on its way through the figures."""
    return walk_of(found, View(plan, thread).exchanges, plan.kernel)


def _tv(view: View) -> Figure:
    c = view.kernel
    figure = draw.thread_value(
        c.tv,
        view.tiler(1),
        element_bytes=_size(view),
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


def _tile(view: View) -> Figure:
    p, c = view.plan, view.kernel
    name = space(c.facts.inputs[0])
    end = len(p.bounds(0, 0))
    keep = (view.own, min(end, c.tile))
    figure = draw.thread_value(
        c.tiled(c.steps),
        view.tiler(c.steps),
        memory=view.memory(0),
        space=name,
        element_bytes=_size(view),
        keep=keep if view.flat else (),
        keep_rows=() if view.flat else keep,
        step=view.tiler(1)[1] if view.flat else 0,
        title=f"{name}: the first tile in global memory{view.where}",
    )
    modes = len(p.kept)
    reduced = p.operand_strides[0][modes:][::-1]
    along = ", ".join(f"{n:,} elements {s:,} apart" for n, s in zip(p.reduced, reduced, strict=True) if n > 1)
    kept = p.operand_strides[0][:modes][::-1]
    side = ", ".join(f"{n:,} groups {s:,} apart" for n, s in zip(p.kept, kept, strict=True) if n > 1)
    notes = [f"A group: {along or 'one element'}. Side by side: {side or 'one group'}."]
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
        notes.append(f"There are only {count(p.abreast, 'group')}{beside}: what is past them is skipped.")
    if c.overlap:
        notes.append(
            f"Panels overlap: the next one begins {c.advance} groups further on, so that each block of the result "
            "has a line that holds all of it."
        )
    if c.down == 1:
        notes.append("Each thread has its groups for itself: nothing is exchanged.")
    report = replace(checks.check(p), shared=())  # that stands under the figures of shared memory
    return figure.noted(*notes, *report.lines())


def _smem(view: View) -> Figure:
    c = view.kernel
    names = [space(n, "s") for n in c.facts.inputs]
    height, index = c.tile, c.tiled(c.steps).offsets()
    smem, slot = c.smem, {}
    for i, at in enumerate(index):
        thread, value = i % c.threads, i // c.threads
        slot[at] = smem((value % c.vector, c.block(thread), value // c.vector))

    def memory(at: tuple[int, int]) -> int:
        element, group = view.place(*at)
        return slot[element + height * group]

    figure = draw.thread_value(
        c.tiled(c.steps),
        view.tiler(c.steps),
        memory=memory,
        space=names[0],
        element_bytes=_size(view),
        shared=True,
        keep=(view.own,) if view.flat else (),
        keep_rows=() if view.flat else (view.own,),
        step=view.tiler(1)[1] if view.flat else 0,
        title=f"{names[0]}: slots of threads in shared memory, {c.smem}",
    )
    notes = [f"One buffer each: {', '.join(names)}."] if len(names) > 1 else []
    if c.shifted:
        notes += [
            f"(element of the vector, block, step): each line has blocks of {count(c.lanes, 'lane')} and "
            f"{c.extra} behind them. They are copied as they lie in memory; when its warp's copies have come, each "
            "thread takes its vector out of two of them and puts it where its own block was.",
            "Lines that do not exist become padding that changes no result: every later step takes all slots.",
        ]
        return figure.noted(*notes, *list(checks.panel.shared(c))[: len(names)])
    notes += [
        "(element of the vector, thread, step): each thread has slots of its own, next to its neighbours', and reads "
        "back only what it copied itself. So waiting for its own copies is enough: no barrier between threads.",
        "What lies outside is filled with padding that changes no result: every later step takes all slots.",
    ]
    return figure.noted(*notes, *list(checks.panel.shared(c))[: len(names)])


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
    names += [f"part {part}"] if c.meeting else []
    figure = draw.predicate_tensor(
        stored,
        c.tv,
        view.tiler(1),
        vector=c.vector,
        thread=view.followed,
        element_bytes=_size(view),
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
    elif not view.flat:
        notes.append(
            f"Groups past the last of {p.groups:,} have nothing left at all. A vector holds "
            f"{count(c.vector, 'group')}, and all of them exist or none."
        )
    return figure.noted(*notes)


def _shuffle(view: View) -> Figure:
    c = view.kernel
    figure = draw.warp_shuffle(WARP, start=c.across, warp=view.followed // WARP)
    notes = [f"Merged: {name}, one after the other." if len(view.exchanges) > 2 else f"Merged: {name}."
             for name, _ in view.exchanges]  # fmt: skip
    if not view.flat:
        notes.insert(
            0,
            f"Lanes {c.across} apart have the same groups, so that only they merge: each lane does so for the "
            f"{count(c.slots, 'group')} of its vectors.",
        )
    return figure.noted(*notes)


def _reduction_buffer(view: View) -> Figure:
    c = view.kernel
    columns, warps, stages = c.reduction_buffer.shape
    column_stride, warp_stride, stage_stride = c.reduction_buffer.stride

    def use(column: int, warp: int) -> Use:
        writer = warp * WARP + column // c.slots
        readers = range(column, c.threads, c.columns)
        note = f"written by lane {column // c.slots} of warp {warp}, read by "
        note += f"one thread in {c.columns}" if c.columns > 1 else "all threads"
        return Use((writer, *(t for t in readers if t != writer)), f"T{writer}", note)

    buffers = [
        view.slots(
            f"stage {stage}: {name}",
            f"{SHARED}, reduction buffer",
            Layout((columns, warps), (column_stride, warp_stride)),
            4,
            "warp",
            use,
            base=stage * stage_stride * 4,
        )
        for name, stage in view.exchanges
    ]
    buffers = [replace(b, space=f"{b.space}, stage {i}") for i, b in enumerate(buffers)]
    figure = draw.slots(
        buffers,
        title=f"Reduction buffer{view.where}",
        who="who writes the slot",
        lead=f"{c.reduction_buffer}: (column, warp down the panel, stage), {columns * warps * stages * 4:,} bytes.",
    )
    notes = [
        "The first lane of each warp writes what its warp has found; after a barrier every thread merges that of all "
        "warps."
        if c.columns == 1
        else "Each lane that has merged a group's results writes them; after a barrier thread t merges those of column "
        f"t mod {c.columns}, from all warps."
    ]
    if stages > 1:
        notes.append(
            "What stage 0 has found goes back through slot 0 of its column to all threads of the column: stage 1 "
            "is relative to it, so that nothing is ever rescaled."
        )
    return figure.noted(*notes, *list(checks.panel.shared(c))[len(c.facts.inputs) :])


def _cluster(view: View) -> Figure:
    c = view.kernel
    if c.trips == 2:
        return _two_trips(view)

    def use(column: int, cta: int) -> Use:
        return Use((column,), f"T{column}", f"from CTA {cta}")

    columns, ctas = c.columns, c.cluster_n
    layout = Layout((columns, ctas), c.peers.stride)
    buffer = Slots(
        "",
        f"{SHARED}, peers",
        layout,
        c.whole_bytes,
        use,
        shared=True,
        row_name="column",
        column_name="CTA",
    )
    figure = draw.slots_of_peers(
        buffer,
        cta=0,
        column=view.followed if view.followed < columns else 0,
        expected=columns * ctas * c.whole_bytes,
    )
    return figure.noted(
        (
            f"Thread t of each CTA does the same for column t, of {columns}. "
            if columns > 1
            else "Each CTA does so. "
        )
        + f"A state has {c.whole_bytes} bytes: {', '.join(name for name, _ in view.exchanges)}. Each CTA "
        "waits for its own mbarrier only, and merges what it has received in the same order.",
    )


def _two_trips(view: View) -> Figure:
    c = view.kernel
    columns, ctas = c.columns, c.cluster_n
    each = columns // ctas

    def sent(column: int, cta: int) -> Use:
        thread = column * ctas + cta
        told = f"from thread {column} of CTA {cta}, read by thread {thread}, which sends what is merged to CTA {cta}"
        return Use((thread,), f"T{thread}", told)

    def merged(column: int, _: int) -> Use:
        sender = column % each * ctas
        return Use(
            (column,), f"T{column}", f"from thread {sender} of CTA {column // each}, read by thread {column}"
        )

    first = view.slots(
        f"first trip: of columns 0 to {each - 1}, what all CTAs have, and the thread that reads it",
        f"{SHARED}, peers, first trip",
        Layout((each, ctas), (ctas, 1)),
        c.whole_bytes,
        "CTA",
        sent,
        role="first trip",
    )
    second = view.slots(
        "second trip: of all columns, what is merged",
        f"{SHARED}, peers, second trip",
        Layout((columns, 1), (1, columns)),
        c.whole_bytes,
        "CTA",
        merged,
        base=columns * c.whole_bytes,
        role="second trip",
    )
    figure = draw.slots(
        [first, second],
        title=f"Two trips through a cluster of {ctas} CTAs, as CTA 0 sees them",
        lead=f"Buffer {c.peers} \u00b7 on each trip an mbarrier of each CTA expects {columns} states of "
        f"{c.whole_bytes} bytes = {columns * c.whole_bytes:,} bytes.",
    )
    return figure.noted(
        f"CTA r merges columns {each} r to {each} r + {each - 1} of all CTAs: thread t of each CTA sends the state of "
        f"column t to CTA t div {each}, where the {ctas} states of a column lie in neighbouring lanes and merge by "
        f"shuffles; each of these lanes sends the result to one CTA.",
        f"A state has {c.whole_bytes} bytes: {', '.join(name for name, _ in view.exchanges)}. In one trip each CTA "
        f"would need room for {columns * ctas:,} states instead of {2 * columns:,}, and fewer CTAs would share an SM.",
    )


def _meeting(view: View) -> Figure:
    p, c = view.plan, view.kernel
    waits = bool(c.facts.outputs)

    def word(_: int, i: int) -> Use:
        if i == 0:
            told = "the last thread of each part's CTA adds 1; a CTA that has waited in vain adds 65536"
            return Use((c.threads - 1,) if waits else (0,), "arrived", told)
        owner = (0,) if i == 1 else ()
        return Use(owner, f"part {i - 1}", "0: its own CTA finishes it; 1: given up; 2: taken by another CTA")

    def state(column: int, part: int) -> Use:
        reader = part % c.readers * c.columns + column
        own = (column,) if part == 0 and column != reader else ()
        readers = "every part" if waits else "the last part to arrive"
        return Use(
            (reader, *own),
            f"T{reader}",
            f"written by thread {column} of part {part}, read by thread {reader} of {readers}",
        )

    def read(column: int, reader: int) -> Use:
        thread = reader * c.columns + column
        return Use((thread,), f"T{thread}", f"written by thread {thread}, read by all threads of the column")

    words = Slots(
        "words in global memory, zero before the launch",
        f"{GLOBAL}, words",
        Layout((1, 1 + p.parts), (0, 1)),
        4,
        word,
        row_name="panel",
        column_name="word",
        role="word",
    )
    states = view.slots(
        "states in global memory, zero before the launch, and the thread that reads each",
        f"{GLOBAL}, states",
        Layout((c.columns, p.parts), (1, c.columns)),
        c.published_bytes,
        "part",
        state,
        base=p.meeting_bytes,
        role="published",
    )
    merged = view.slots(
        "merged by each reader, in shared memory",
        f"{SHARED}, peers",
        Layout((c.columns, c.readers), c.peers.stride),
        c.whole_bytes,
        "reader",
        read,
        role="merged",
    )
    figure = draw.slots(
        [words, states] if c.lanes_read else [words, states, merged],
        title=f"The meeting of {count(p.parts, 'part')} of panel 0",
        lead=f"{p.scratch:,} bytes of scratch memory for {count(p.tiles, 'panel')}: {p.meeting_bytes:,} of words, then "
        "the states.",
    )
    notes = [
        "Each CTA writes the states of its part and counts itself in. The last to arrive merges all and stores."
        if not waits
        else "Each CTA writes the states of its part and counts itself in. A state is never zero, so that its own bits "
        "say that it is there: each CTA reads the slots of all parts until none is zero, and merges.",
        f"{count(c.readers, 'thread')} a column read the states, each one in {c.readers}, in the order of the parts "
        "whoever came first: the same bits every time."
        + (" They are the lanes of a warp, and merge by shuffles." if c.lanes_read else ""),
    ]
    if waits:
        notes.append(
            f"Nobody waits for ever: after {p.patience / 1e6:g} ms a CTA marks its part as given up, and the "
            "last to arrive, which then certainly runs, finishes it when it has finished its own."
        )
    return figure.noted(*notes)


def _size(view: View) -> int:
    return ITEM_SIZE[view.kernel.dtypes[0]]
