"""Figures of Plans of softmax(S) @ V."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layouts import AnyLayout, Layout
from layouts import figures as draw
from layouts.figures import Facts, Figure, Slots
from layouts.figures.scene import count
from layouts.html import Step

from ..plan import WARP
from ..plan import matmul_layouts as named
from ..plan.matmul_class import BLOCK_ROWS, LINE_N, TILE_N
from ..plan.problem import ITEM_SIZE
from . import matmul_mma, matmul_tile
from .matmul_tile import (
    WIDEST,
    Blocks,
    first_stage,
    in_grid,
    instruction,
    loaded,
    product,
    products,
    ring,
    stages,
    swizzled,
)

BLOCKS = TILE_N // named.INSTRUCTION_K  # instructions of a step
UNSWIZZLED = "without its swizzle"  # what a check tells for comparison
STORED = 32  # columns of the result that a quad exchanges at a time

# The layouts of a class that its kernel has and figures draw, by name.
drawn = named.forward_layouts


@dataclass(frozen=True)
class View(matmul_tile.View):
    """What the figures of a Plan show: the first block of 64 rows in the first stage of the ring."""

    @property
    def aside(self) -> frozenset[str]:
        """Figures that do not show threads of a warpgroup: with mma.sync they are lanes of any warp."""
        mma = ("operand", "fragments") if self.kernel.instruction == "mma" else ()
        return frozenset({"ring", "scores", "values", *mma})

    @property
    def row(self) -> int:
        """The followed thread's first row."""
        return named.fragment(8)(self.followed, 0) % BLOCK_ROWS

    @cached_property
    def scores(self) -> AnyLayout:
        """(row, column) of the tile of S -> element of its stage."""
        c = self.kernel
        if c.lines:  # as where all rows begin at 16 bytes
            return Layout((c.rows, LINE_N), (LINE_N, 1))
        return named.first_stage(named.by_rows(self.size, c.rows, TILE_N, 1))

    @cached_property
    def values(self) -> AnyLayout:
        """(row, column) of the tile of V -> element of its stage."""
        c = self.kernel
        return named.first_stage(named.by_rows(self.half, TILE_N, c.depth, 1))


def figures(view: View) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    c = view.kernel
    found = {"tile": tile(view), "ring": _ring(view)}
    if c.lines:
        found["lines"] = _lines(view)
    elif c.dtypes[0] == "fp32":
        found |= {"scores": _scores(view), "pairs": _pairs(view)}
    else:
        found |= {"scores": _scores(view), "ldmatrix": _ldmatrix(view)}
    found |= {"registers": _registers(view), "values": _values(view)}
    if c.instruction == "mma":
        found |= {"operand": matmul_mma.operand(view.values), "fragments": matmul_mma.fragments(c)}
    else:
        found["fragments"] = _fragments(view)
    if c.vector == 8 and not c.split:
        found["exchange"] = _exchange(view)
    return found


def tile(view: View) -> Figure:
    """The blocks of a CTA's tile."""
    c, p = view.kernel, view.plan
    groups = [BLOCK_ROWS] * (c.rows // BLOCK_ROWS)
    boxes = [named.BOX // 2] * (c.depth // (named.BOX // 2))
    steps = [named.INSTRUCTION_K] * BLOCKS

    def owner(block: int, column: int) -> int:
        return 0 if c.alternate else block // c.blocks

    scores, values = f"S: {c.rows} \u00d7 {TILE_N}, a step", f"V: {TILE_N} \u00d7 {c.depth}"
    result = f"O: {c.rows} \u00d7 {c.depth}, kept over all steps"
    body = product(
        "O = softmax(S) V",
        Blocks(scores, groups, steps, "A operand, registers", "k-block {c}", owner),
        Blocks(values, steps, boxes, "sV", "box {c}, k-block {r}", width=WIDEST),
        Blocks(result, groups, boxes, "accumulators", "32 sums a thread", owner, WIDEST),
    )
    turns = (
        f"{c.warpgroups} warpgroups take turns with the steps of the same rows, each with sums of its own."
        if c.alternate
        else f"{c.warpgroups} warpgroups have {count(c.blocks, 'block')} of {BLOCK_ROWS} rows each."
    )
    figure = products(
        f"The tile of a CTA: {c.rows} rows of S, {c.depth} columns of V",
        f"The CTA walks along the {p.columns:,} columns of S in steps of {TILE_N}, which are as many rows of V.",
        [body],
    )
    notes = [
        turns,
        "A fragment is what the threads of a warpgroup hold of such a block in registers, in an order that the tensor "
        f"cores fix: S becomes the A operand, {BLOCKS} times {named.INSTRUCTION_K} columns a step; the sums of O are "
        "the accumulators. V is the B operand: "
        + (
            "the tensor cores read it from shared memory."
            if c.instruction == "wgmma"
            else "each warp loads its fragments from shared memory."
        ),
    ]
    if c.eighths:
        notes.append(
            "Rows of S begin anywhere, but every eighth row as far from 16 bytes as the first: the tile comes as "
            f"{named.LINES} boxes of every eighth row, so that row r of shared memory is row "
            f"{named.LINES} (r mod {c.rows // named.LINES}) + r / {c.rows // named.LINES} of the tile."
        )
    if c.split:
        notes.append(
            "Columns are cut into parts: each stores its sums, and a second launch merges the parts of a row in order."
        )
    if c.alternate:
        notes.append(
            "Warpgroups take turns with the steps of the same rows, "
            + (
                f"and each of the {c.cluster} CTAs of a cluster has a part of the columns: "
                if c.cluster > 1
                else ""
            )
            + "all leave their sums in shared memory, and each adds up some columns of V."
        )
    if c.paired:
        notes.append(
            "Columns are cut in two, for the two CTAs of a cluster: of each block of rows one adds what the other "
            "leaves in shared memory, and stores."
        )
    return figure.noted(*notes, *(t for t in view.report.lines() if UNSWIZZLED not in t))


def _ring(view: View) -> Figure:
    c = view.kernel
    if c.instruction == "mma":
        return matmul_mma.filled(c)
    readers = 4 * (1 if c.alternate else c.warpgroups)

    def buffer(space: str, held: str, number: int, size: int, warp: int) -> Slots:
        note = f"filled by warp {warp} with TMA; full when {size:,} bytes have come; "
        note += f"empty when {readers} warps have read"
        return stages(f"{space}: {held}", space, number, size, note, c.shares)

    return ring(
        "The rings of stages in shared memory",
        "Two warps ask TMA for tiles ahead of those that are worked on; the hardware counts the bytes that come.",
        [
            buffer("sS", f"{c.rows} \u00d7 {TILE_N} scores", c.score_stages, c.score_stage_bytes, 0),
            buffer("sV", f"{TILE_N} \u00d7 {c.depth} of V", c.value_stages, c.value_stage_bytes, 1),
        ],
    ).noted(
        "A stage has two mbarriers: full, which expects the tile's bytes, and empty, at which one lane of each of "
        f"{count(readers, 'warp')} arrives when its warp has read. A position is (stage, phase): the phase flips "
        "after the last stage, so that a barrier is never mistaken for its last round. Stages begin at multiples "
        "of 1024 bytes, the period of the swizzle, and so are all swizzled alike.",
        f"Together {c.shared_memory:,} bytes of shared memory a CTA, barriers included.",
    )


def _scores(view: View) -> Figure:
    rows, swizzle = 2 * named.ATOM_ROWS, named.swizzle(view.size)
    return swizzled(
        view,
        "sS",
        view.size,
        rows,
        f"sS: the first {rows} rows of a tile of S in shared memory",
        "A row of a box is 128 bytes, all 32 banks once. Without a swizzle the rows of a column of pieces would lie in "
        "the same four banks, and reading them together would take eight turns.",
        f"The swizzle exchanges the 16-byte pieces of a row: piece p of row r lies at place p xor (r mod 8). "
        f"TMA writes the tile so, ldmatrix reads it so. {swizzle} says it of offsets in elements: the "
        f"{swizzle.bits} bits above bit {swizzle.base} are exchanged with those {swizzle.shift} higher.",
    )


def _ldmatrix(view: View) -> Figure:
    return loaded(view, "ldmatrix: from the swizzled tile to the A fragment").noted(
        f"Thread t of a warp points at row t mod 16, columns 0 to 7 (t < 16) or 8 to 15. The next "
        f"{named.INSTRUCTION_K} columns are two pieces further: in the address two bits are exchanged, xor 32.",
        "The eight addresses of one matrix lie in eight groups of four banks: no conflict.",
    )


def _of_two_rows(view: View, title: str) -> Figure:
    """What the followed thread's quad reads of the tile of S without ldmatrix."""
    return draw.thread_value(
        named.fragment(TILE_N),
        (BLOCK_ROWS, TILE_N),
        memory=view.scores,
        space="sS",
        element_bytes=view.size,
        shared=True,
        keep_rows=(view.row, view.row + 8),
        fold=False,
        title=title,
    )


def _pairs(view: View) -> Figure:
    figure = _of_two_rows(view, "sS: float32 scores, read in pairs")
    return figure.noted(
        "Each thread reads the pairs that the A operand wants of it, 8 bytes at a time, and rounds the exponentials to "
        "the dtype of V afterwards.",
        *view.costs("sS"),
    )


def _lines(view: View) -> Figure:
    figure = _of_two_rows(view, "sS: scores whose rows begin anywhere, read in words")
    alike = f", which is alike for the {named.LINES} rows that a warp reads at once" * view.kernel.eighths
    return figure.noted(
        f"Lines have {LINE_N} elements: the {TILE_N} of a step wherever in the first 16 bytes they begin"
        f"{alike}. Drawn as if at 0; else a thread reads "
        "two words for each pair and shifts them into one. No swizzle is needed: lines of 144 bytes begin four banks "
        "apart.",
        *view.costs("sS"),
    )


def _registers(view: View) -> Figure:
    figure = draw.thread_registers(
        named.fragment(TILE_N),
        (BLOCK_ROWS, TILE_N),
        view.followed,
        group="k-block",
        title=f"From scores to the A operand: registers of thread {view.followed}",
    )
    if view.kernel.lines:
        loaded = "words of lines, each a pair"
    elif view.size == 4:
        loaded = "pairs of float32 scores come from shared memory and leave as powers of 16 bits"
    else:
        loaded = (
            "the four registers of the k-th ldmatrix are its matrices in order: rows 0 to 7 and 8 to 15 of the warp, "
            "then both 8 columns further"
        )
    return figure.noted(
        f"A line is one instruction's operand: {loaded}. Scores become exponentials in place, register by register, "
        "and are the operand as they are: nothing moves between threads.",
        "The four threads of a quad share a row, so that its sum and its maximum need two rounds of shuffles, at "
        "distances 1 and 2, and those only now and then.",
    )


def _values(view: View) -> Figure:
    c = view.kernel
    box = named.BOX // view.half
    if c.instruction == "mma":
        read = matmul_mma.VALUES
    else:
        read = (
            f"The kernel names it the other way round, {drawn(c)['sV']}: (column, row, stage), "
            "columns contiguous, which wgmma calls MN-major. V is multiplied as it lies in memory.",
            "The tensor cores read matrices of 8 rows by 8 columns, 16 bytes a row; the swizzle spreads each over all "
            "banks.",
        )
    return swizzled(
        view,
        "sV",
        view.half,
        named.INSTRUCTION_K,
        f"sV: {named.INSTRUCTION_K} rows of V and a box of {box} columns, of one instruction's B operand",
        f"Rows of the drawing are rows of V (k), columns its columns (n). The tile has {c.depth // box} such "
        f"box{'es' * (c.depth > box)}, {TILE_N * named.BOX:,} bytes each, of {TILE_N} rows.",
        *read,
    )


def _fragments(view: View) -> Figure:
    c, layouts = view.kernel, drawn(view.kernel)
    figure = instruction(
        view,
        "A, B and C",
        c.depth,
        layouts["rA"],
        layouts["rO"],
        layouts["sV"],
        names=("P", "V", "O"),
        spaces=("rA", "sV"),
    )
    return figure.noted(
        f"{count(BLOCKS, 'instruction')} of these multiply a step's 64 columns. A: exponentials P from registers. B: "
        f"{named.INSTRUCTION_K} rows of V, given by the address of the tile. C: {c.depth // 2} float32 sums a thread.",
        "A and C place rows alike: thread t of a warp holds its rows t / 4 and t / 4 + 8 in both. So each thread "
        "rescales the sums of just the two rows whose scores it holds, without asking anybody.",
        "A warp by itself is mma.sync m16n8k16, whose A and C fragments are the 16 rows of one warp.",
    )


def _exchange(view: View) -> Figure:
    c, p = view.kernel, view.plan
    lines = [range(view.row, view.row + 1), range(view.row + 8, view.row + 9)]

    def memory(at: tuple[int, int]) -> int:
        return at[0] * p.depth + at[1]

    figure = draw.tiled_copy(
        named.fragment(STORED),
        named.stored(),
        (BLOCK_ROWS, STORED),
        names=("summed by", "stored by"),
        memories=(None, memory),
        element_bytes=ITEM_SIZE[c.dtypes[2]],
        rows=lines,
        title=f"The results of {STORED} columns: a quad exchanges pairs and stores 16 bytes a thread",
    )
    return figure.noted(
        f"Drawn: the two rows of thread {view.followed} and its quad. Each thread has a pair of every 8 columns; "
        "in two rounds of shuffles, at distances 1 and 2, the i-th thread gets all pairs of the i-th 8 columns.",
        *(str(t) for t in view.report.traffic),
    )


def walk(view: View) -> list[Step]:
    """The steps of the explorer: the first block of 64 rows on its way through the figures of the Plan; those of
    figures that it does not have are left out."""
    wgmma = view.kernel.instruction == "wgmma"

    def lane(facts: Facts) -> bool:
        return view.followed % WARP in facts.threads

    return [
        Step("A tile of work", "The block of rows that the followed thread helps with.", "tile", view.own),
        Step(
            "A stage is filled",
            "A warp waits until a stage is empty, announces the bytes and asks TMA for the next tile of S; "
            "another does so for V."
            if wgmma
            else "All threads begin copies of a later step's tiles into the stage that was emptied last.",
            "ring",
            first_stage,
        ),
        Step("How the tile lies", "The pieces of each row are exchanged.", "scores", in_grid),
        Step("Words to registers", "Each thread reads its words of two lines.", "lines", view.own),
        Step("Pairs to registers", "Each thread reads its pairs.", "pairs", view.own),
        Step(
            "ldmatrix",
            "The followed thread gives the address of one row of a matrix, and receives a pair of each matrix.",
            "ldmatrix",
            view.own,
        ),
        Step(
            "Scores become exponentials",
            "In place: a conversion, one multiply-add, one ex2 and one addition an element. These registers are "
            "then the A operand.",
            "registers",
            view.own,
        ),
        Step(
            "V as it lies",
            "The tensor cores read B from the stage of V, by address."
            if wgmma
            else "Its pieces are exchanged as those of S.",
            "values",
            in_grid,
        ),
        Step("B to registers", "Each warp loads the fragments of V for itself.", "operand", lane),
        Step(
            "Multiply",
            "The warpgroup's instruction adds 16 terms to all sums, while the next block's exponentials are made."
            if wgmma
            else "An instruction adds 16 terms to the sums of 8 columns.",
            "fragments",
            view.own if wgmma else lane,
        ),
        Step(
            "Store",
            "Sums are divided by the row's sum, exchanged within the quad and stored.",
            "exchange",
            view.own,
        ),
    ]


def heading(view: View) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    return view.heading("softmax(S) @ V", f"block of {BLOCK_ROWS} rows")
