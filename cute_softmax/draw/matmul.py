"""Figures of Plans of softmax(S) @ V.

Threads are counted within their warpgroup: all warpgroups do the same, each with rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layouts import AnyLayout, Layout
from layouts import figures as draw
from layouts.figures import Figure
from layouts.html import Step

from ..plan import WARP
from ..plan import matmul_layouts as named
from ..plan.matmul import MatmulPlan
from ..plan.matmul_class import BLOCK_ROWS, LINE_N, TILE_N, MatmulClass
from ..plan.problem import ITEM_SIZE
from . import checks, matmul_mma
from .common import FOLLOWED, count
from .matmul_tile import Blocks, Followed, Stages, product, products, ring

BLOCKS = TILE_N // named.INSTRUCTION_K  # instructions of a step
UNSWIZZLED = "without its swizzle"  # what a check tells for comparison
STORED = 32  # columns of the result that a quad exchanges at a time


@dataclass(frozen=True)
class View(Followed):
    """What the figures of a Plan show: the first block of 64 rows in the first stage of the ring."""

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

    @property
    def size(self) -> int:
        return ITEM_SIZE[self.kernel.dtypes[0]]

    @cached_property
    def values(self) -> AnyLayout:
        """(row, column) of the tile of V -> element of its stage."""
        c = self.kernel
        return named.first_stage(named.by_rows(ITEM_SIZE[c.dtypes[1]], TILE_N, c.depth, 1))


def drawn(c: MatmulClass) -> dict[str, AnyLayout]:
    """The layouts of a class that its kernel has and figures draw; see `draw.drawn`."""
    return named.forward_layouts(c)


def figures(plan: MatmulPlan, thread: int | None = None) -> dict[str, Figure]:
    """The figures of a Plan by name, in the order in which a kernel works; see `draw.figures`."""
    view, c = View(plan, thread), plan.kernel
    found = {"tile": _tile(view), "ring": _ring(view)}
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
    aside = {"ring", "scores", "values"}
    if c.instruction == "mma":  # what they draw are lanes of any warp
        aside |= {"operand", "fragments"}
    followed = [f for name, f in found.items() if name not in aside]
    found[FOLLOWED] = draw.follow_thread(
        followed, view.followed, title=f"Thread {view.followed} of the first warpgroup"
    )
    return found


def overview(plan: MatmulPlan) -> Figure:
    """The tile of a Plan."""
    return _tile(View(plan))


def _tile(view: View) -> Figure:
    c, p = view.kernel, view.plan
    groups = [BLOCK_ROWS] * (c.rows // BLOCK_ROWS)

    def owner(block: int, column: int) -> int:
        return 0 if c.alternate else block // c.blocks

    boxes = [named.BOX // 2] * (c.depth // (named.BOX // 2))
    steps = [named.INSTRUCTION_K] * BLOCKS
    body = product(
        "O = softmax(S) V",
        Blocks(
            f"S: {c.rows} \u00d7 {TILE_N}, a step",
            groups,
            steps,
            owner,
            lambda r, i: f"k-block {i}",
            "A operand, registers",
        ),
        Blocks(
            f"V: {TILE_N} \u00d7 {c.depth}",
            steps,
            boxes,
            lambda r, i: None,
            lambda r, i: f"box {i}, k-block {r}",
            "sV",
            140.0,
        ),
        Blocks(
            f"O: {c.rows} \u00d7 {c.depth}, kept over all steps",
            groups,
            boxes,
            owner,
            lambda r, i: "32 sums a thread",
            "accumulators",
            140.0,
        ),
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
    if c.paired:
        notes.append(
            "Columns are cut in two, for the two CTAs of a cluster: of each block of rows one adds what the other "
            "leaves in shared memory, and stores."
        )
    return figure.noted(*notes, *(t for t in checks.check(p).lines() if UNSWIZZLED not in t))


def _ring(view: View) -> Figure:
    c = view.kernel
    if c.instruction == "mma":
        return matmul_mma.stages(c)
    readers = 1 if c.alternate else c.warpgroups
    shares = {n: f"WG {n}" for n in range(c.shares)}

    def buffer(name: str, space: str, stages: int, size: int, warp: int, tile: str) -> Stages:
        def label(i: int) -> str:
            return f"stage {i}" + (f": {shares[i % c.shares]}" if c.shares > 1 else "")

        def note(i: int) -> str:
            return (
                f"filled by warp {warp} with TMA; full when {size:,} bytes have come; empty when "
                f"{4 * readers} warps have read"
            )

        return Stages(f"{name}: {tile}", space, stages, size, label, note)

    return ring(
        "The rings of stages in shared memory",
        "Two warps ask TMA for tiles ahead of those that are worked on; the hardware counts the bytes that come.",
        [
            buffer("sS", "sS", c.score_stages, c.score_stage_bytes, 0, f"{c.rows} \u00d7 {TILE_N} scores"),
            buffer("sV", "sV", c.value_stages, c.value_stage_bytes, 1, f"{TILE_N} \u00d7 {c.depth} of V"),
        ],
    ).noted(
        "A stage has two mbarriers: full, which expects the tile's bytes, and empty, at which one lane of each of "
        f"{count(4 * readers, 'warp')} arrives when its warp has read. A position is (stage, phase): the phase flips "
        "after the last stage, so that a barrier is never mistaken for its last round. Stages begin at multiples "
        "of 1024 bytes, the period of the swizzle, and so are all swizzled alike.",
        f"Together {c.shared_memory:,} bytes of shared memory a CTA, barriers included.",
    )


def _scores(view: View) -> Figure:
    c = view.kernel
    rows = 2 * named.ATOM_ROWS
    part = named.first_stage(named.by_rows(view.size, c.rows, named.BOX // view.size, 1), rows)
    figure = draw.swizzle_banks(
        part, view.size, title=f"sS: the first {rows} rows of a tile of S in shared memory", space="sS"
    )
    return figure.noted(
        "A row of a box is 128 bytes, all 32 banks once. Without a swizzle the rows of a column of pieces would lie in "
        "the same four banks, and reading them together would take eight turns.",
        f"The swizzle exchanges the 16-byte pieces of a row: piece p of row r lies at place p xor (r mod 8). "
        f"TMA writes the tile so, ldmatrix reads it so. {part.outer} says it of offsets in elements: the "
        f"{part.outer.bits} bits above bit {part.outer.base} are exchanged with those {part.outer.shift} higher.",
        *[line for line in checks.check(view.plan).shared if line.startswith("sS")],
    )


def _ldmatrix(view: View) -> Figure:
    figure = draw.matrix_load(
        named.matrices(named.INSTRUCTION_K),
        named.fragment(named.INSTRUCTION_K),
        (BLOCK_ROWS, named.INSTRUCTION_K),
        view.scores,
        space="sS",
        warp=view.warp,
        title="ldmatrix: from the swizzled tile to the A fragment",
    )
    return figure.noted(
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
        *[line for line in checks.check(view.plan).shared if line.startswith("sS")],
    )


def _lines(view: View) -> Figure:
    figure = _of_two_rows(view, "sS: scores whose rows begin anywhere, read in words")
    alike = f", which is alike for the {named.LINES} rows that a warp reads at once" * view.kernel.eighths
    return figure.noted(
        f"Lines have {LINE_N} elements: the {TILE_N} of a step wherever in the first 16 bytes they begin"
        f"{alike}. Drawn as if at 0; else a thread reads "
        "two words for each pair and shifts them into one. No swizzle is needed: lines of 144 bytes begin four banks "
        "apart.",
        *[line for line in checks.check(view.plan).shared if line.startswith("sS")],
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
    size = ITEM_SIZE[c.dtypes[1]]
    box = named.BOX // size
    part = named.first_stage(named.by_rows(size, TILE_N, box, 1), named.INSTRUCTION_K)
    title = f"sV: {named.INSTRUCTION_K} rows of V and a box of {box} columns, of one instruction's B operand"
    figure = draw.swizzle_banks(part, size, title=title, space="sV")
    if c.instruction == "mma":
        read = matmul_mma.VALUES
    else:
        read = (
            f"The kernel names it the other way round, {named.forward_layouts(c)['sV']}: (column, row, stage), "
            "columns contiguous, which wgmma calls MN-major. V is multiplied as it lies in memory.",
            "The tensor cores read matrices of 8 rows by 8 columns, 16 bytes a row; the swizzle spreads each over all "
            "banks.",
        )
    return figure.noted(
        f"Rows of the drawing are rows of V (k), columns its columns (n). The tile has {c.depth // box} such "
        f"box{'es' * (c.depth > box)}, {TILE_N * named.BOX:,} bytes each, of {TILE_N} rows.",
        *read,
        *[line for line in checks.check(view.plan).shared if line.startswith("sV")],
    )


def _fragments(view: View) -> Figure:
    c = view.kernel
    layout = named.first_stage(named.forward_layouts(c)["sV"])
    figure = draw.shared_operand_product(
        (BLOCK_ROWS, c.depth, named.INSTRUCTION_K),
        named.fragment(named.INSTRUCTION_K),
        named.fragment(c.depth),
        layout,
        names=("P", "V", "O"),
        spaces=("rA", "sV"),
        element_bytes=ITEM_SIZE[c.dtypes[1]],
        warp=view.warp,
        title=f"A, B and C: one wgmma m{BLOCK_ROWS}n{c.depth}k{named.INSTRUCTION_K}",
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
        *(str(t) for t in checks.check(p).traffic),
    )


def walk(plan: MatmulPlan, found: dict[str, Figure], thread: int | None = None) -> list[Step]:
    """The steps of the explorer: the first block of 64 rows on its way through the figures of the Plan."""
    view = View(plan, thread)

    def own(facts) -> bool:
        return view.followed in facts.threads

    def all_cells(facts) -> bool:
        return bool(facts.coordinate)

    wgmma = plan.kernel.instruction == "wgmma"
    steps = [
        Step("A tile of work", "The block of rows that the followed thread helps with.", "tile", own),
        Step(
            "A stage is filled",
            "A warp waits until a stage is empty, announces the bytes and asks TMA for the next tile of S; "
            "another does so for V."
            if wgmma
            else "All threads begin copies of a later step's tiles into the stage that was emptied last.",
            "ring",
            lambda facts: facts.coordinate.endswith("stage 0)"),
        ),
    ]
    if "scores" in found:
        steps.append(Step("How the tile lies", "The pieces of each row are exchanged.", "scores", all_cells))
    if "lines" in found:
        steps.append(Step("Words to registers", "Each thread reads its words of two lines.", "lines", own))
    elif "pairs" in found:
        steps.append(Step("Pairs to registers", "Each thread reads its pairs.", "pairs", own))
    else:
        steps.append(
            Step(
                "ldmatrix",
                "The followed thread gives the address of one row of a matrix, and receives a pair of each matrix.",
                "ldmatrix",
                own,
            )
        )
    steps += [
        Step(
            "Scores become exponentials",
            "In place: a conversion, one multiply-add, one ex2 and one addition an element. These registers are "
            "then the A operand.",
            "registers",
            own,
        ),
    ]
    if wgmma:
        steps += [
            Step(
                "V as it lies",
                "The tensor cores read B from the stage of V, by address.",
                "values",
                all_cells,
            ),
            Step(
                "Multiply",
                "The warpgroup's instruction adds 16 terms to all sums, while the next block's exponentials are made.",
                "fragments",
                own,
            ),
        ]
    else:

        def lane(facts) -> bool:
            return view.followed % WARP in facts.threads

        steps += [
            Step("V as it lies", "Its pieces are exchanged as those of S.", "values", all_cells),
            Step("B to registers", "Each warp loads the fragments of V for itself.", "operand", lane),
            Step("Multiply", "An instruction adds 16 terms to the sums of 8 columns.", "fragments", lane),
        ]
    if "exchange" in found:
        steps.append(
            Step(
                "Store",
                "Sums are divided by the row's sum, exchanged within the quad and stored.",
                "exchange",
                own,
            )
        )
    return steps


def heading(plan: MatmulPlan, thread: int | None = None) -> tuple[str, str]:
    """The title and subtitle of the explorer."""
    c = plan.kernel
    batches = 1
    for n in plan.batch:
        batches *= n
    return (
        f"softmax(S) @ V, S {batches:,} \u00d7 {plan.rows:,} \u00d7 {plan.columns:,}, D {plan.depth}, {c.dtypes[1]}",
        f"class {c.name} for {c.architecture}; the first block of {BLOCK_ROWS} rows, threads of its warpgroup",
    )
