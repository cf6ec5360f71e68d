"""What is different in the figures of softmax(S) @ V where mma.sync multiplies: loads, and V as an operand in
registers."""

from __future__ import annotations

from layouts import AnyLayout
from layouts import figures as draw
from layouts.figures import Figure, Slots
from layouts.figures.scene import count

from ..plan import matmul_layouts as named
from ..plan.matmul_class import BLOCK_ROWS, TILE_N, MatmulClass
from .matmul_tile import ring, stages

WIDTH = 8  # columns of V of an instruction


def filled(c: MatmulClass) -> Figure:
    """The ring that all threads fill."""

    def buffer(space: str, size: int, tile: str, access: int) -> Slots:
        note = f"filled by all threads with cp.async, {access} bytes at a time"
        return stages(f"{space}: {tile}", space, c.stages, size, note)

    return ring(
        "The ring of stages in shared memory",
        "All threads copy the tiles of steps ahead of the one that they work on, and go on without waiting for them.",
        [
            buffer("sS", c.score_stage_bytes, f"{c.rows} \u00d7 {TILE_N} scores", c.access[0]),
            buffer("sV", c.value_stage_bytes, f"{TILE_N} \u00d7 {c.depth} of V", c.access[1]),
        ],
    ).noted(
        "Each step is one group of copies: a thread waits until all but the youngest groups have come, then for the "
        "others at a barrier. The same barrier says that the stage of the step before can be filled again.",
        f"Together {c.shared_memory:,} bytes of shared memory a CTA; {count(c.resident, 'CTA')} on a multiprocessor.",
    )


VALUES = (
    "ldmatrix reads matrices of 8 rows by 8 columns, 16 bytes a row, and transposes them on the way: V is "
    "multiplied as it lies in memory. The swizzle spreads each matrix over all banks.",
)


def operand(values: AnyLayout) -> Figure:
    """V's way from shared memory to the B operand; values: (row, column) of the tile -> element."""
    figure = draw.matrix_load(
        named.value_matrices(),
        named.values_fragment(),
        (2 * WIDTH, named.INSTRUCTION_K),
        values,
        space="sV",
        transposed=True,
        title="ldmatrix with transpose: from the swizzled tile of V to the B fragments",
    )
    return figure.noted(
        f"Rows are rows of V (k), columns its columns (n). One ldmatrix loads the B operands of two "
        f"instructions, {WIDTH} columns each: their elements V0 to V3 and V4 to V7. Every warp loads them for itself.",
    )


def fragments(c: MatmulClass) -> Figure:
    """A, B and C of one instruction of a warp."""
    layouts = named.forward_layouts(c)
    figure = draw.mma_fragments(
        (named.WARP_ROWS, WIDTH, named.INSTRUCTION_K),
        layouts["rA"],
        layouts["rB"],
        layouts["rO"],
        title=f"A, B and C: one mma.sync m{named.WARP_ROWS}n{WIDTH}k{named.INSTRUCTION_K} of a warp",
    )
    return figure.noted(
        f"A: powers of the warp's {named.WARP_ROWS} rows. B: {WIDTH} columns of {named.INSTRUCTION_K} rows of V. "
        f"C: sums of these columns, of which a thread keeps {c.depth // 2} in all. A step is "
        f"{TILE_N // named.INSTRUCTION_K * c.depth // WIDTH} instructions for each {named.WARP_ROWS} rows.",
        "A and C place rows alike: lane t holds rows t / 4 and t / 4 + 8 in both. So each thread rescales the "
        "sums of just the two rows whose scores it holds.",
        f"Four warps are a block of {BLOCK_ROWS} rows, whose A and C are those of wgmma.",
    )
