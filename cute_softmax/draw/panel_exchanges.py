"""Figures of how the threads of panels exchange their states."""

from __future__ import annotations

from layouts import Layout
from layouts import figures as draw
from layouts.figures import Figure, Slots, Use
from layouts.figures.scene import count

from ..plan import WARP, PanelClass
from .panel_view import GLOBAL, SHARED, View


def shuffle(view: View) -> Figure:
    c = view.kernel
    figure = draw.warp_shuffle(WARP, start=c.across, warp=view.warp)
    notes = [f"Merged: {name}, one after the other." if len(view.exchanges) > 2 else f"Merged: {name}."
             for name, _ in view.exchanges]  # fmt: skip
    if not view.flat:
        notes.insert(
            0,
            f"Lanes {c.across} apart have the same groups, so that only they merge: each lane does so for the "
            f"{count(c.slots, 'group')} of its vectors.",
        )
    return figure.noted(*notes)


def reduction_buffer(view: View) -> Figure:
    c = view.kernel
    columns, warps, stages = c.reduction_buffer.shape
    column_stride, warp_stride, stage_stride = c.reduction_buffer.stride

    def merged(writer: int, wrote: str, column: int) -> Use:
        """What a thread has written, and those read that merge the column."""
        readers = range(c.merged_by(column) % c.threads, c.threads, c.columns)
        note = f"written by {wrote}, read by " + (
            f"one thread in {c.columns}" if c.columns > 1 else "all threads"
        )
        return Use((writer, *(t for t in readers if t != writer)), f"T{writer}", note)

    def of_place(place: int, row: int) -> Use:
        """Where threads keep aligned blocks: row `row` of threads has its groups `shift` places further on."""
        at = place - c.before + view.shift(row)
        if not 0 <= at < c.columns:
            return Use((), "", "no thread's of this row")
        writer, column = row * c.across + at // c.slots, place - c.before
        if not 0 <= column <= c.columns - c.slots:
            return Use(
                (writer,),
                f"T{writer}",
                f"written by thread {writer}; not all rows have it, and nobody reads it",
            )
        return merged(writer, f"thread {writer}", column)

    def use(column: int, warp: int) -> Use:
        thread = warp * max(c.across, WARP) + column // c.slots
        return merged(thread, f"lane {thread % WARP} of warp {thread // WARP}", column)

    buffers = [
        view.slots(
            f"stage {stage}: {name}",
            f"{SHARED}, reduction buffer, stage {stage}",
            Layout((columns, warps), (column_stride, warp_stride)),
            4,
            "row" if c.aligned else "warp",
            of_place if c.aligned else use,
            base=stage * stage_stride * 4,
        )
        for name, stage in view.exchanges
    ]
    figure = draw.slots(
        buffers,
        title=f"Reduction buffer{view.where}",
        who="who writes the slot",
        lead=f"{c.reduction_buffer}: (column, {'thread' if c.aligned else 'warp'} down the panel, stage), "
        f"{c.reduction_buffer.cosize * 4:,} bytes.",
    )
    notes = [
        "The first lane of each warp writes the warp's result; after a barrier every thread merges those of all "
        "warps."
        if c.columns == 1
        else f"Each thread writes the results of its groups, of which {count(c.before, 'place')} may lie before the "
        f"panel's; after a barrier thread t merges those in slot t mod {c.columns}, from all rows of threads."
        if c.aligned
        else "Each lane that has merged a group's results writes them; after a barrier thread t merges those in slot "
        f"t mod {c.columns}, from all warps."
    ]
    if c.apart:
        notes.append(
            f"Slot t is that of column {c.slots} (t mod {c.across}) + t div {c.across}: threads side by side take the "
            "same element of their vectors at a time, and neighbours merge neighbouring slots, in different banks."
        )
    if c.rows_abreast > 1:
        notes.append(
            f"Then thread t merges those of group t, which has a column in each of the {c.rows_abreast} rows that lie "
            "side by side, and puts what they become into the first of them."
        )
    if stages > 1:
        notes.append(
            "What stage 0 has found goes back through slot 0 of its column to all threads of the column: stage 1 "
            "is relative to it, so that nothing is ever rescaled."
            + " It takes the place of stage 0, but for the first row."
            * c.aligned
        )
    return figure.noted(*notes, *view.report.shared[len(c.facts.inputs) :])


def cluster(view: View) -> Figure:
    c = view.kernel
    if c.trips == 2:
        return _two_trips(view)

    def use(column: int, cta: int) -> Use:
        return Use((column,), f"T{column}", f"from CTA {cta}")

    columns, ctas = c.groups, c.cluster_n
    layout, base = _merged(c, ctas)
    buffer = Slots(
        "",
        f"{SHARED}, peers",
        layout,
        c.whole_bytes,
        use,
        base=base,
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
            f"Thread t of each CTA does the same for its column, of {columns}. "
            if columns > 1
            else "Each CTA does so. "
        )
        + f"A state has {c.whole_bytes} bytes: {', '.join(name for name, _ in view.exchanges)}. Each CTA "
        "waits only on its own mbarrier, and merges what it has received in the same order.",
    )


def _merged(c: PanelClass, others: int) -> tuple[Layout, int]:
    """((the thread that merges a column, `others`) -> slot among the peers, the first slot's byte)."""
    column, base = (Layout(c.groups), 0)
    if c.apart:
        apart = c.column_slots.stride[0]
        column, base = Layout((c.across, c.slots), (1, apart)), c.before // c.slots
    return Layout((column.shape, others), (column.stride, c.peers.stride[1])), base * c.whole_bytes


def _two_trips(view: View) -> Figure:
    c = view.kernel
    columns, ctas = c.groups, c.cluster_n
    each, (slots, base) = columns // ctas, _merged(c, 2)
    # Of neighbouring slots each CTA has one.
    in_line = min(c.across // ctas, each) if c.apart else each
    line = slots.stride[0][1] if c.apart else columns
    received = Layout(((in_line, each // in_line), ctas), ((ctas, line), 1))

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
        f"first trip: the states of all CTAs for columns 0 to {each - 1}, and the thread that reads each",
        f"{SHARED}, peers, first trip",
        received,
        c.whole_bytes,
        "CTA",
        sent,
        base=base,
        role="first trip",
    )
    second = view.slots(
        "second trip: the merged states of all columns",
        f"{SHARED}, peers, second trip",
        Layout((slots.shape[0], 1), slots.stride),
        c.whole_bytes,
        "CTA",
        merged,
        base=base + slots.stride[1] * c.whole_bytes,
        role="second trip",
    )
    figure = draw.slots(
        [first, second],
        title=f"Two trips through a cluster of {ctas} CTAs, as CTA 0 sees them",
        lead=f"Buffer {c.peers} \u00b7 on each trip an mbarrier of each CTA expects {columns} states of "
        f"{c.whole_bytes} bytes = {columns * c.whole_bytes:,} bytes.",
    )
    return figure.noted(
        f"CTA r merges columns {each} r to {each} r + {each - 1} of all CTAs, in the order of the threads that have "
        f"merged them: thread t of each CTA sends its state to CTA t div {each}, where the {ctas} states of a column "
        "are in neighbouring lanes and merge by shuffles; each of these lanes sends the result to one CTA.",
        f"A state has {c.whole_bytes} bytes: {', '.join(name for name, _ in view.exchanges)}. In one trip each CTA "
        f"would need room for {columns * ctas:,} states instead of {2 * columns:,}, and fewer CTAs would share an SM.",
    )


def exchange(view: View) -> Figure:
    p, c = view.plan, view.kernel
    waits = bool(c.facts.outputs)

    def word(_: int, i: int) -> Use:
        if i == 0:
            told = "the last thread of each part's CTA adds 1; a CTA that has timed out adds 65536"
            return Use((c.threads - 1,) if waits else (0,), "arrived", told)
        owner = (0,) if i == 1 else ()
        return Use(owner, f"part {i - 1}", "0: its own CTA finishes it; 1: given up; 2: taken by another CTA")

    def state(column: int, part: int) -> Use:
        reader = part % c.readers * c.groups + column
        own = (column,) if part == 0 and column != reader else ()
        readers = "every part" if waits else "the last part to arrive"
        return Use(
            (reader, *own),
            f"T{reader}",
            f"written by thread {column} of part {part}, read by thread {reader} of {readers}",
        )

    def read(column: int, reader: int) -> Use:
        thread = reader * c.groups + column
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
        Layout((c.groups, p.parts), (1, c.groups)),
        c.published_bytes,
        "part",
        state,
        base=p.exchange_bytes,
        role="published",
    )
    slots, base = _merged(c, c.readers)
    merged = view.slots(
        "merged by each reader, in shared memory",
        f"{SHARED}, peers",
        slots,
        c.whole_bytes,
        "reader",
        read,
        base=base,
        role="merged",
    )
    figure = draw.slots(
        [words, states] if c.lanes_read else [words, states, merged],
        title=f"The exchange of {count(p.parts, 'part')} of panel 0",
        lead=f"{p.scratch:,} bytes of scratch memory for {count(p.tiles, 'panel')}: {p.exchange_bytes:,} of words, "
        "then the states.",
    )
    notes = [
        "Each CTA writes the states of its part and counts itself in. The last to arrive merges all and stores."
        if not waits
        else "Each CTA writes the states of its part and counts itself in. A state is never zero, so its own bits show "
        "that it has arrived: each CTA reads the slots of all parts until none is zero, and merges them.",
        f"{count(c.readers, 'thread')} a column read the states, each one in {c.readers}, in the order of the parts "
        "whichever came first: the same bits every time."
        + (" They are the lanes of a warp, and merge by shuffles." if c.lanes_read else ""),
    ]
    if waits:
        notes.append(
            f"No CTA waits forever: after {p.patience / 1e6:g} ms a CTA marks its part as given up, and the last to "
            "arrive, which is certainly running then, finishes that part after its own."
        )
    return figure.noted(*notes)
