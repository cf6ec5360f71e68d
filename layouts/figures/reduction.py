"""Where partial results meet: the reduction buffer in shared memory, and the exchange within a cluster."""

from __future__ import annotations

from dataclasses import replace

from ..access import WARP, banks_of, shared_request
from ..algebra import Layout
from ..style import text_width, thread_paint
from .grid import MAX_WIDTH, Grid, arrange, cell_size, draw, headed, outline, stacked
from .scene import Canvas, Facts, Figure, Swatch, count, finish, ranges

SPACE = "reduction buffer"


class _Buffer:
    """A reduction buffer (rows, (warps a row, CTAs of the cluster), stages) and who uses which slot."""

    def __init__(self, buffer: Layout, element_bytes: int, cta: int):
        if buffer.rank != 3 or buffer[1].rank != 2:
            raise ValueError(
                f"a reduction buffer has the shape (rows, (warps_per_row, cluster_n), stages), got {buffer}"
            )
        self.layout, self.element_bytes, self.cta = buffer, element_bytes, cta
        self.rows = buffer[0].size
        self.warps_per_row, self.cluster_n = buffer[1][0].size, buffer[1][1].size
        self.stages = buffer[2].size
        self.num_warps = self.rows * self.warps_per_row
        if not 0 <= cta < self.cluster_n:
            raise ValueError(f"cta must be 0 to {self.cluster_n - 1}, got {cta}")
        if element_bytes not in (4, 8, 16):
            raise ValueError(f"element_bytes must be 4, 8 (a pair) or 16 (a triple), got {element_bytes}")

    def space(self, cta: int) -> str:
        """The name of a CTA's buffer, which links figures of the same one."""
        return SPACE if self.cluster_n == 1 else f"{SPACE} of CTA {cta}"

    def slot(self, row: int, peer: int, stage: int) -> int:
        """The element offset of a slot; ``peer`` counts the warps of the row over all CTAs."""
        return self.layout((row, peer, stage))

    def banks(self, slot: int) -> str:
        return banks_of(slot * self.element_bytes, self.element_bytes)

    def facts(self, row: int, peer: int, stage: int) -> Facts:
        slot = self.slot(row, peer, stage)
        warp = row * self.warps_per_row + peer % self.warps_per_row
        source = peer // self.warps_per_row
        readers = range(row * self.warps_per_row, (row + 1) * self.warps_per_row)
        lane, turn = peer % WARP, peer // WARP
        again = f" in turn {turn}" if self.warps_per_row * self.cluster_n > WARP else ""
        writer = warp * WARP + (self.cta if self.cluster_n > 1 else 0)
        touching = {w * WARP + lane for w in readers} | ({writer} if source == self.cta else set())
        return Facts(
            threads=tuple(sorted(touching)),
            coordinate=f"(row {row}, peer {peer}, stage {stage})",
            space=self.space(self.cta),
            start=slot,
            stop=slot + 1,
            byte=slot * self.element_bytes,
            bank=self.banks(slot),
            note=f"written by warp {warp} of CTA {source}, "
            f"read by lane {lane}{again} of warps {ranges(readers)}",
        )

    def read(self) -> str:
        """What the shared loads of row 0 cost, in words."""
        peers = self.warps_per_row * self.cluster_n
        lanes = [self.slot(0, p, 0) * self.element_bytes for p in range(min(peers, WARP))]
        request = shared_request(lanes, self.element_bytes)
        conflict = "no bank conflict" if request.conflicts == 0 else f"{request.conflicts} conflicts"
        wavefronts = count(request.wavefronts, "wavefront")
        which = f"the {count(peers, 'slot')}" if peers <= WARP else f"{WARP} of the {peers} slots"
        return f"a warp reads {which} of its row in {wavefronts}, {conflict}"


def reduction_buffer(buffer: Layout, *, element_bytes: int, cta: int = 0, title: str | None = None) -> Figure:
    """The reduction buffer of one CTA: address, bank, writer and readers of every slot.

    ``buffer`` has the shape (rows, (warps_per_row, cluster_n), stages) and maps to slots of
    ``element_bytes`` (4, 8 for a (max, sum) pair, 16 for a triple). One grid a stage: rows left, peers on top.
    ``cta`` is the CTA whose shared memory is drawn. Raises ``ValueError`` for another shape.
    """
    b = _Buffer(buffer, element_bytes, cta)
    peers = b.warps_per_row * b.cluster_n

    def lines(row: int, peer: int, stage: int) -> tuple[str, ...]:
        slot = b.slot(row, peer, stage)
        warp = row * b.warps_per_row + peer % b.warps_per_row
        return (
            f"slot {slot}",
            f"@{slot * element_bytes} b{b.banks(slot)}",
            f"W{warp} CTA{peer // b.warps_per_row}",
        )

    size = cell_size([lines(b.rows - 1, peers - 1, b.stages - 1)], 74)
    across = MAX_WIDTH - 80
    lines_in_all = b.stages * b.rows * -(-peers // int(across // size[0]))

    def stage_grid(stage: int) -> Canvas:
        def cell(row: int, peer: int):
            warp = row * b.warps_per_row + peer % b.warps_per_row
            return thread_paint(warp), lines(row, peer, stage), b.facts(row, peer, stage)

        def readers(row: int) -> str:
            first = row * b.warps_per_row
            return f"{row}  warps {ranges(range(first, first + b.warps_per_row))}"

        grid = Grid(
            b.rows,
            peers,
            cell,
            size,
            row_label=readers,
            column_label=lambda p: (f"lane {p % WARP}", str(p)),
            column_name="peer",
            thick_columns=frozenset(range(0, peers, b.warps_per_row)) if b.cluster_n > 1 else frozenset(),
        )
        return headed(f"stage {stage}", draw(grid, *arrange(grid, across, fold=lines_in_all <= MAX_BANDS)))

    return finish(
        stacked([stage_grid(s) for s in range(b.stages)]),
        title or "Reduction buffer",
        f"{buffer} slots of {element_bytes} bytes, {buffer.cosize * element_bytes:,} bytes in all · "
        f"{b.num_warps} "
        f"warps, {b.warps_per_row} a row, {count(b.cluster_n, 'CTA')} a row · {b.read()}",
        f"Reduction buffer {buffer}: {count(b.stages, 'stage')}, {count(b.rows, 'row')}, "
        f"{count(peers, 'peer')} a row; each slot "
        "with its "
        f"byte address, bank and writing warp.",
        [
            Swatch("t0", "W0 CTA0", "the warp and CTA that write the slot; colour = warp mod 8"),
            Swatch("plain", "@8 b2..3", "byte address and banks"),
            Swatch("plain", "lane 5", "the lane that reads it, in every warp named at the left"),
        ],
    )


MAX_BANDS = 16  # lines of slots over all stages before the middle peers are elided
PAD, LABEL, SLOT, GAP, CARD_HEAD = 6.0, 30.0, (46.0, 34.0), 4.0, 44.0  # of a card: px


def cluster_exchange(buffer: Layout, *, element_bytes: int, cta: int = 0, warp: int = 0) -> Figure:
    """One warp's store into the shared memory of every CTA of its cluster, and the barriers that count it.

    Lane i of ``warp`` in CTA ``cta`` stores the warp's partial result into CTA i (``st.async``), where the
    mbarrier of the stage waits for the bytes of all warps of all CTAs. ``buffer`` as in
    ``reduction_buffer``; stage 0 is drawn. Raises ``ValueError`` for a cluster of one or a warp that does
    not exist.
    """
    b = _Buffer(buffer, element_bytes, cta)
    if b.cluster_n == 1:
        raise ValueError("a cluster of one CTA exchanges nothing: draw its reduction_buffer")
    if not 0 <= warp < b.num_warps:
        raise ValueError(f"warp must be 0 to {b.num_warps - 1}, got {warp}")
    row, q = divmod(warp, b.warps_per_row)
    expected = b.num_warps * b.cluster_n * element_bytes
    columns = _card_columns(b, q)
    card = _card_width(len(columns))
    slot = b.slot(row, cta * b.warps_per_row + q, 0)
    body = Canvas()
    cards = b.cluster_n * (card + GAP) - GAP
    told = f"CTA {cta}, warp {warp}: lane i stores the warp's partial ({element_bytes} bytes) into CTA i"
    body.words(max(0, (cards - text_width(told, "head")) / 2), 12, told, "head")
    left = max(0, (cards - b.cluster_n * SLOT[0]) / 2)
    for target in range(b.cluster_n):
        x = left + SLOT[0] * target
        facts = Facts(
            threads=(warp * WARP + target,),
            space=b.space(target),
            start=slot,
            stop=slot + 1,
            byte=slot * element_bytes,
            bank=b.banks(slot),
            note=f"st.async from CTA {cta} into CTA {target}, {element_bytes} bytes complete on its mbarrier",
            role="sender",
        )
        body.cell(x, 22, (SLOT[0], 26), thread_paint(cta), (f"L{target}",), facts)
    top = 48.0 + max(50.0, cards / 12)
    for target in range(b.cluster_n):
        x = target * (card + GAP)
        body.place(_card(b, target, row, columns, slot, expected), x, top)
        at = x + PAD + LABEL + (columns.index(q) + 0.5) * SLOT[0]
        body.stroke(outline(at - SLOT[0] / 2, top + CARD_HEAD + cta * SLOT[1], SLOT), "thick")
        start = left + SLOT[0] * (target + 0.5)
        body.stroke([(start, 48), (start, 58), (at, top - 16), (at, top - 2)], "link", arrow=True)
    shown = "all drawn" if len(columns) == b.warps_per_row else f"warp {warp} drawn"
    return finish(
        body,
        f"Cluster of {b.cluster_n} CTAs",
        f"Buffer {buffer}, row {row} of {b.rows}, stage 0; {count(b.warps_per_row, 'warp')} a row, "
        f"{shown} · "
        f"each mbarrier expects {b.num_warps} warps \u00d7 {b.cluster_n} CTAs \u00d7 {element_bytes} bytes "
        f"= {expected:,} bytes.",
        f"Cluster of {b.cluster_n} CTAs: warp {warp} of CTA {cta} stores its partial into the shared "
        "memory of "
        f"every CTA; each mbarrier expects {expected} bytes.",
        [
            Swatch(
                "t0",
                "L0",
                "storing lane; slots are coloured by the CTA they come from, the thick one receives",
            ),
            Swatch("barrier", "bar 0", "mbarrier of a stage: counts the bytes that arrive in this CTA"),
            Swatch("plain", "s5", "slot"),
            Swatch("plain", "@40", "its byte address in that CTA's buffer"),
        ],
    )


def _card_width(columns: int) -> float:
    return 2 * PAD + LABEL + columns * SLOT[0]


def _card_columns(b: _Buffer, q: int) -> list[int]:
    """The warps of a row that every card shows: all where the cards fit one line, else the storing one."""
    wide = (_card_width(b.warps_per_row) + GAP) * b.cluster_n
    return list(range(b.warps_per_row)) if wide <= MAX_WIDTH else [q]


def _card(b: _Buffer, target: int, row: int, columns: list[int], receiver: int, expected: int) -> Canvas:
    """One CTA of the cluster: its slots of the row, by source CTA, and its barriers."""
    canvas = Canvas()
    card = _card_width(len(columns))
    canvas.box(0, 0, card, CARD_HEAD + 4 + b.cluster_n * SLOT[1] + 8 + 36 * b.stages, "card", 6)
    canvas.words(card / 2, 18, f"CTA {target}", "head", "middle")
    canvas.words(PAD + LABEL - 5, 38, "from", "axis", "end")
    for j, w in enumerate(columns):
        x = PAD + LABEL + (j + 0.5) * SLOT[0]
        canvas.words(x, 38, f"W{row * b.warps_per_row + w}", "axis", "middle")
    for source in range(b.cluster_n):
        y = CARD_HEAD + source * SLOT[1]
        canvas.words(PAD + LABEL - 6, y + SLOT[1] / 2 + 3.5, str(source), "axis", "end")
        for j, w in enumerate(columns):
            facts = b.facts(row, source * b.warps_per_row + w, 0)
            role = "receiver" if facts.start == receiver else ""
            there = replace(facts, threads=(), space=b.space(target), role=role)
            lines = (f"s{facts.start}", f"@{facts.byte}")
            canvas.cell(PAD + LABEL + j * SLOT[0], y, SLOT, thread_paint(source), lines, there)
    for stage in range(b.stages):
        y = CARD_HEAD + b.cluster_n * SLOT[1] + 8 + 36 * stage
        note = f"stage {stage}: expects {expected} bytes, of {b.num_warps} warps of {b.cluster_n} CTAs"
        facts = Facts(space=f"mbarrier of CTA {target}", note=note, role=f"barrier {stage}")
        canvas.cell(PAD, y, (card - 2 * PAD, 32), "barrier", (f"bar {stage}", f"{expected:,} bytes"), facts)
    return canvas
