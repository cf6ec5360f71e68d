"""Slots of a buffer through which threads hand something over: who writes each, who reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..access import banks_of
from ..algebra import Layout
from ..style import text_width, thread_paint
from .grid import MAX_CELLS, MAX_WIDTH, Grid, arrange, cell_size, draw, headed, outline, stacked
from .scene import Canvas, Facts, Figure, Swatch, finish

MAX_FOLDED = 64  # slots of a buffer that is drawn whole


class Use(NamedTuple):
    """Who uses a slot: threads of the CTA that is drawn, a short label, and a sentence."""

    threads: tuple[int, ...]
    label: str
    note: str


@dataclass(frozen=True)
class Slots:
    """A buffer of slots of ``element_bytes``: ``layout`` maps (row, column) to a slot, ``use`` to its ``Use``.

    ``base`` is the byte address of slot 0 in ``space``; ``shared`` says that it is shared memory, whose banks are
    named. ``role`` is that of the slots (see ``Facts``).
    """

    heading: str
    space: str
    layout: Layout
    element_bytes: int
    use: Callable[[int, int], Use]
    base: int = 0
    shared: bool = False
    row_name: str = "row"
    column_name: str = "column"
    row_label: Callable[[int], str] = str
    role: str = ""

    def facts(self, row: int, column: int) -> Facts:
        """The facts of a slot."""
        slot, use = self.layout((row, column)), self.use(row, column)
        byte = self.base + slot * self.element_bytes
        return Facts(
            threads=use.threads,
            coordinate=f"({self.row_name} {row}, {self.column_name} {column})",
            space=self.space,
            start=slot,
            stop=slot + 1,
            byte=byte,
            bank=banks_of(byte, self.element_bytes) if self.shared else "",
            note=use.note,
            role=self.role,
        )

    def lines(self, row: int, column: int) -> tuple[str, ...]:
        """The words of a slot."""
        facts = self.facts(row, column)
        bank = f" b{facts.bank}" if facts.bank else ""
        return self.use(row, column).label, f"@{facts.byte}{bank}"

    def canvas(self) -> Canvas:
        """The slots as a grid under their heading."""
        rows, columns = (mode.size for mode in self.layout)

        def cell(r: int, c: int):
            facts = self.facts(r, c)
            paint = thread_paint(facts.threads[0]) if facts.threads else "plain"
            return paint, self.lines(r, c), facts

        size = cell_size(
            [self.lines(r, c) for r in {0, rows - 1} for c in {0, columns // 2, columns - 1}], 60
        )
        grid = Grid(
            rows,
            columns,
            cell,
            size,
            row_label=self.row_label,
            row_name=self.row_name,
            column_name=self.column_name,
        )
        width = MAX_WIDTH if rows * columns <= MAX_CELLS else MAX_WIDTH * 0.6
        return headed(self.heading, draw(grid, *arrange(grid, width, fold=rows * columns <= MAX_FOLDED)))


def slots(buffers: Sequence[Slots], *, title: str, lead: str, who: str = "who uses the slot") -> Figure:
    """Buffers below each other: each slot's address, bank (of shared memory), writer and readers.

    who: what the label of a slot means.
    """
    legend = [
        Swatch("t0", "T0", f"{who}; colour = thread mod 8"),
        Swatch("plain", "@8", "byte address in the buffer" + (", and banks" if buffers[0].shared else "")),
    ]
    described = "; ".join(f"{b.heading}: {b.layout}, {b.element_bytes} bytes a slot" for b in buffers)
    return finish(stacked([b.canvas() for b in buffers], 26), title, lead, f"{lead} {described}.", legend)


PAD, LABEL, SLOT, GAP, HEAD, TOP = 4.0, 28.0, (56.0, 34.0), 4.0, 44.0, 96.0  # of a card: px


def slots_of_peers(slots: Slots, *, cta: int, column: int, expected: int) -> Figure:
    """One thread's store into the shared memory of every CTA of its cluster, and the barriers that count it.

    ``slots`` has the shape (column, CTA of the cluster); the CTA ``cta`` sends what it has of ``column`` to all, where
    the mbarrier waits for ``expected`` bytes.
    """
    ctas = slots.layout[1].size
    columns = f"{slots.layout[0].size} {slots.row_name}" + ("" if slots.layout[0].size == 1 else "s")
    card = 2 * PAD + LABEL + SLOT[0]
    body = Canvas()
    sender = slots.use(column, cta)
    told = f"CTA {cta}: {sender.label} stores the state of {slots.row_name} {column} into every CTA"
    across = ctas * (card + GAP) - GAP
    body.words(max(0.0, (across - text_width(told, "head")) / 2), 12, told, "head")
    middle = across / 2
    facts = Facts(
        threads=sender.threads,
        coordinate=f"({slots.row_name} {column})",
        note=f"st.async into {ctas} CTAs, {slots.element_bytes} bytes each complete on their mbarriers",
        role="sender",
    )
    body.cell(middle - SLOT[0] / 2, 20, (SLOT[0], 26), thread_paint(cta), (sender.label,), facts)
    for target in range(ctas):
        x = target * (card + GAP)
        body.box(x, TOP, card, HEAD + ctas * SLOT[1] + 50, "card", 6)
        body.words(x + card / 2, TOP + 18, f"CTA {target}", "head", "middle")
        body.words(x + PAD + LABEL - 4, TOP + 38, "from", "axis", "end")
        left = x + PAD + LABEL
        for source in range(ctas):
            y = TOP + HEAD + source * SLOT[1]
            facts = replace(
                slots.facts(column, source),
                threads=(),
                space=f"{slots.space} of CTA {target}",
                note=f"from CTA {source}",
                role="receiver" if source == cta else "",
            )
            body.words(left - 6, y + SLOT[1] / 2 + 3.5, str(source), "axis", "end")
            lines = (f"s{facts.start}", f"@{facts.byte}")
            body.cell(left, y, SLOT, thread_paint(source), lines, facts)
        y = TOP + HEAD + ctas * SLOT[1] + 8
        note = f"expects {expected} bytes, of {columns} of {ctas} CTAs"
        facts = Facts(space=f"mbarrier of CTA {target}", note=note, role="barrier")
        body.cell(x + PAD, y, (card - 2 * PAD, 32), "barrier", ("mbarrier", f"{expected:,} bytes"), facts)
        end, slot = left + SLOT[0] / 2, TOP + HEAD + cta * SLOT[1]
        body.stroke([(middle, 46), (middle, 56), (end, TOP - 16), (end, TOP - 2)], "link", arrow=True)
        body.stroke(outline(left, slot, SLOT), "thick")
    return finish(
        body,
        f"Cluster of {ctas} CTAs",
        f"Buffer {slots.layout}, {slots.row_name} {column} of {slots.layout[0].size} \u00b7 each mbarrier expects "
        f"{columns} \u00d7 {ctas} CTAs \u00d7 {slots.element_bytes} bytes = {expected:,} bytes.",
        f"Cluster of {ctas} CTAs: CTA {cta} stores its state of a column into the shared memory of every CTA.",
        [
            Swatch("t0", "s0", "slot; coloured by the CTA it comes from, the thick one receives"),
            Swatch("barrier", "mbarrier", "counts the bytes that arrive in this CTA"),
            Swatch("plain", "@40", "its byte address in that CTA's buffer"),
        ],
    )
