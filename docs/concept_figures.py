"""Figures of ideas: the machine, a softmax's scores, the heads of a row, a row that ranks share.

What has a Plan is drawn from it, by `cute_softmax.draw`; here stands what explains how Plans come about.
"""

from __future__ import annotations

from cute_softmax.hardware import H200
from cute_softmax.plan import describe
from cute_softmax.plan.shards import MergeClass, MergePlan
from layouts import Layout
from layouts.figures import Figure
from layouts.figures.grid import Grid, arrange, beside, draw, headed
from layouts.figures.scene import Canvas, Facts, Swatch, finish
from layouts.style import thread_paint

KIB, MIB = 1 << 10, 1 << 20
LANES, VECTOR = 7, 8  # threads that are drawn of a warp of 32; elements of a vector of 16 bits


def _card(
    canvas: Canvas, at: tuple[float, float], size: tuple[float, float], words: str, note: str = ""
) -> None:
    """A box with a heading and what it holds."""
    canvas.box(*at, *size, "card", 6)
    canvas.words(at[0] + 12, at[1] + 20, words, "head")
    if note:
        canvas.words(at[0] + 12, at[1] + 37, note, "note")


def _arrow(canvas: Canvas, start: tuple[float, float], end: tuple[float, float], words: str = "") -> None:
    canvas.stroke([start, end], "link", arrow=True)
    if words:
        canvas.words((start[0] + end[0]) / 2 + 9, (start[1] + end[1]) / 2 + 4, words, "axis")


def machine() -> Figure:
    """Where a row of a softmax is while it is worked on: memory, cluster, CTA, warp, thread."""
    p = describe.plan_of(4096, 65536)
    c, arch = p.kernel, H200.architecture
    warps, share = c.threads // 32, c.tiler[1]
    body, wide, half = Canvas(), 1120.0, 530.0
    _card(body, (0, 0), (wide, 62), "global memory (DRAM): the tensors", f"the row: {p.columns:,} elements")
    part = (wide - 330) / c.cluster_n
    for cta in range(c.cluster_n):
        body.cell(316 + cta * part, 18, (part, 28), thread_paint(cta), (f"CTA {cta}",), Facts())
    _card(
        body,
        (0, 92),
        (wide, 48),
        f"L2 cache, {H200.l2 // MIB} MB: every byte passes, all CTAs share it",
    )
    for x, words in (
        (half / 2, "1 load, 16 bytes per thread and access"),
        (half + 60 + half / 2 + 90, "6 store"),
    ):
        ends = ((x, 62), (x, 92)) if words.startswith("1") else ((x, 92), (x, 62))
        _arrow(body, *ends, words)
    top = 172.0
    body.box(0, top, wide, 356, "card", 6)
    foot = f"cluster: {c.cluster_n} CTAs that access each other's shared memory (sm_90 and newer)"
    body.words(16, top + 343, foot, "head")
    for i, cta in enumerate((0, c.cluster_n - 1)):
        left, y = 16 + i * (half + 28), top + 16
        name = f"CTA {cta}: {c.threads} threads on one SM, {share:,} elements of the row"
        _card(body, (left, y), (half, 304), name)
        down, up = (
            ((left + half / 2 - 20, top - 32), (left + half / 2 - 20, y)),
            ((left + half / 2 + 130, y), (left + half / 2 + 130, top - 32)),
        )
        _arrow(body, *down)
        _arrow(body, *up)
        for w, warp in enumerate((0, warps - 1)):
            x, line = left + 14 + w * 258, y + 36
            body.box(x, line, 246, 150, "plain", 5)
            body.words(x + 10, line + 18, f"warp {warp}: 32 threads", "head")
            for lane in range(LANES):
                thread = 32 * warp + lane
                body.cell(
                    x + 10 + lane * 32,
                    line + 30,
                    (32, 26),
                    thread_paint(thread),
                    (f"T{thread}",),
                    Facts(threads=(thread,)),
                )
            body.words(x + 10, line + 74, f"registers: {c.steps} vectors of {c.vector} elements,", "axis")
            body.words(x + 10, line + 88, "and the state so far (max, sum)", "axis")
            body.words(x + 10, line + 112, "2 reduce a thread's elements", "note")
            body.words(x + 10, line + 130, "3 five rounds of shuffles", "note")
        low = y + 214
        body.box(left + 14, low, half - 28, 76, "plain", 5)
        body.words(left + 24, low + 18, f"shared memory, at most {arch.shared_memory // KIB} KB", "head")
        slots = c.cluster_n * warps
        body.words(left + 24, low + 36, f"reduction buffer: {slots} states, one per warp of each CTA", "axis")
        body.words(
            left + 24, low + 58, "4 every warp writes its state; a barrier; every warp reads all", "note"
        )
        for w in range(2):
            _arrow(body, (left + 120 + w * 258, y + 186), (left + 120 + w * 258, low))
    middle, level = 16 + half + 14, top + 16 + 214 + 20
    body.stroke([(middle - 26, level), (middle + 26, level)], "link", arrow=True)
    body.stroke([(middle + 26, level + 14), (middle - 26, level + 14)], "link", arrow=True)
    body.words(middle, level - 8, "5", "head", "middle")
    told = "5 st.async: each warp stores its state into every CTA of the cluster"
    body.words(wide / 2 + 34, top + 343, told, "note")
    return finish(
        body,
        "Memory, cluster, CTA, warp, thread",
        f"A row of {p.columns:,} elements in bf16 on an H200, class {c.name}: read once and written once. "
        f"Shown are {LANES} threads in each of two warps of two CTAs.",
        "The levels of a GPU with what each holds of a row, and the six steps of a softmax between them.",
    )


def scores() -> Figure:
    """What is added to and taken from the scores on their way, by stride."""

    def part(name: str, layout: Layout) -> Canvas:
        def cell(r: int, c: int):
            offset = layout((r, c))
            return (
                thread_paint(offset),
                (str(offset),),
                Facts(coordinate=f"({r}, {c})", start=offset, stop=offset + 1),
            )

        grid = Grid(4, 6, cell, (34, 26), row_name="", column_name="")
        return headed(f"{name}  {layout}", draw(grid, *arrange(grid)))

    x, number = Layout((4, 6), (6, 1)), Layout((4, 6), (1, 0))
    row = Layout((4, 6), (0, 1))
    operands = beside([part("x", x), part("scale", number), part("bias", row)], 40, ["\u00b7", "+"])
    across = 16
    body = Canvas()
    body.words(
        0,
        12,
        "score = x \u00b7 scale + bias: the offset in memory from which each operand of an element is read",
        "head",
    )
    body.place(operands, 0, 26)
    top = 26 + operands.bottom + 40
    body.words(0, top, f"causal: which vectors of {VECTOR} elements a row reads", "head")

    def causal(r: int, c: int):
        row, first = r * VECTOR + r % VECTOR, c * VECTOR
        crossed = first <= row < first + VECTOR - 1
        paint = "scalar" if crossed else "true" if first <= row else "false"
        words = "part" if crossed else "all" if first <= row else "0"
        return paint, (words,), Facts(coordinate=f"({row}, {first}..{first + VECTOR - 1})")

    grid = Grid(
        8,
        across,
        causal,
        (46, 24),
        row_label=lambda r: str(r * VECTOR + r % VECTOR),
        column_label=lambda c: (str(c * VECTOR),),
        row_name="query",
        column_name="key",
    )
    body.place(draw(grid, *arrange(grid)), 0, top + 14)
    return finish(
        body,
        "Scores in the same read",
        "With stride 0 one number is read for a whole row or column; a row is read up to the diagonal.",
        "Operands of the scores by their strides, and the vectors that rows of a causal softmax load.",
        [
            Swatch("true", "all", "loaded"),
            Swatch("scalar", "part", "loaded; elements beyond the diagonal are -inf"),
            Swatch("false", "0", "not loaded, written as 0"),
        ],
    )


def heads() -> Figure:
    """What one read of a row of logits gives."""
    body, token = Canvas(), 9
    body.words(0, 12, "a row of logits, read once", "head")
    for i in range(16):
        words = "token" if i == token else "x"
        body.cell(
            i * 62,
            24,
            (62, 26),
            "scalar" if i == token else thread_paint(i),
            (words,),
            Facts(coordinate=str(i)),
        )
    states = (
        ("maximum", "m", "of the scores"),
        ("sum", "s", "of exp(x - m)"),
        ("weighted sum", "t", "of exp(x - m) (x - m)"),
        ("chosen", "c", "the score at the token"),
    )
    for i, (name, letter, what) in enumerate(states):
        x = i * 248.0
        _card(body, (x, 98), (232, 56), f"{letter}: {name}", what)
        if letter == "c":
            body.stroke(
                [(token * 62 + 31, 50), (token * 62 + 31, 74), (x + 116, 74), (x + 116, 98)],
                "link",
                arrow=True,
            )
        else:
            body.stroke([(x + 116, 50), (x + 116, 98)], "link", arrow=True)
    results = (
        ("logsumexp", "m + log s", "m, s"),
        ("entropy", "log s - t / s", "s, t"),
        ("log-probability", "c - m - log s", "m, s, c"),
        ("cross entropy", "its negative", "m, s, c"),
    )
    for i, (name, formula, _) in enumerate(results):
        x = i * 248.0
        body.box(x, 216, 232, 56, "plain", 6)
        body.words(x + 12, 236, name, "head")
        body.words(x + 12, 256, formula, "formula")
    for i, (_, _, needs) in enumerate(results):
        for letter in needs.split(", "):
            j = "mstc".index(letter)
            body.stroke([(j * 248 + 86 + 20 * i, 154), (i * 248 + 86 + 20 * j, 216)], "link", arrow=True)
    return finish(
        body,
        "Heads: numbers per row from one read",
        "A thread keeps the states of its elements; threads, warps, CTAs and ranks merge them. No matrix is written.",
        "A row of logits, the states that a kernel reduces it to, and the functions that are made of them.",
    )


def ranks() -> Figure:
    """A row of a vocabulary that four ranks share."""
    body, count, wide = Canvas(), 4, 280.0
    body.words(0, 12, "one row of logits, split over the ranks", "head")
    for rank in range(count):
        x = rank * (wide + 16)
        for i in range(4):
            chosen = rank == 2 and i == 1
            paint = "scalar" if chosen else thread_paint(rank)
            body.cell(x + i * wide / 4, 24, (wide / 4, 26), paint, ("token" if chosen else "x",), Facts())
        _card(body, (x, 92), (wide, 50), f"rank {rank}", "maximum, sum, score of the token")
        _arrow(body, (x + wide / 2, 50), (x + wide / 2, 92), "read once")
        _arrow(body, (x + wide / 2, 142), (x + wide / 2, 196))
    total = count * (wide + 16) - 16
    body.box(0, 196, total, 40, "barrier", 6)
    body.words(total / 2, 221, "one all-gather: 8 to 20 bytes per row from each rank", "head", "middle")
    for rank in range(count):
        x = rank * (wide + 16)
        _arrow(body, (x + wide / 2, 236), (x + wide / 2, 270))
        body.box(x, 270, wide, 92, "card", 6)
        for other in range(count):
            paint = "scalar" if other == 2 else thread_paint(other)
            body.cell(x + 12 + other * 64, 282, (64, 24), paint, (f"rank {other}",), Facts())
        body.words(x + 12, 326, "merged in rank order:", "axis")
        body.words(x + 12, 346, "the same bits everywhere", "note")
    return finish(
        body,
        "A row shared by four ranks",
        "States of slices merge like those of threads, warps and CTAs; gradients of losses need no communication.",
        "Slices of a row on four ranks, their states, one all-gather, and the merge on every rank.",
        [Swatch("scalar", "token", "the chosen element")],
    )


def gathered() -> Figure:
    """The states of four ranks as a reduction buffer."""
    count, rows, names = 4, 4, ("maximum", "sum", "score")
    kernel = MergeClass("state", H200.architecture.name, ("fp32",), chosen=True)
    states = MergePlan(kernel, rows, count).states

    def stage(number: int) -> Canvas:
        def cell(row: int, rank: int):
            place = states((row, (0, rank), number))
            facts = Facts(
                coordinate=f"(row {row}, rank {rank}, number {number})",
                start=place,
                stop=place + 1,
                byte=4 * place,
                note=f"written by rank {rank}, read by the thread of row {row} on every rank",
            )
            return thread_paint(rank), (str(place), f"@{4 * place}"), facts

        grid = Grid(
            rows,
            count,
            cell,
            (74, 38),
            column_label=lambda r: (f"rank {r}",),
            column_name="",
            thick_columns=range(1, count),
        )
        return headed(f"number {number}: {names[number]}", draw(grid, *arrange(grid)))

    return finish(
        beside([stage(number) for number in range(len(names))], 40),
        "The states of four ranks, gathered",
        f"{states} float32: rows, (blocks, ranks), numbers of a state. What a rank sends is contiguous, written "
        "by the kernel that reads its slice.",
        "The gathered states as a reduction buffer whose peers are ranks: for each number a grid of rows by ranks, "
        "each slot with its place and byte address.",
        [Swatch("t0", "0 @0", "element and byte in the gathered states; colour = rank")],
    )


FIGURES = {"machine": machine, "scores": scores, "heads": heads, "ranks": ranks, "gathered": gathered}
