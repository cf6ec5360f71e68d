"""The layouts of softmax_matmul's kernels as values: tiles in shared memory, fragments in registers, ldmatrix's rows.

`kernels.tensor_cores` builds its cute layouts of shared memory from these values, figures draw them, and a test
compares them and the fragments with what cute evaluates while the kernels are traced. Offsets are elements, those that
a swizzle exchanges as well (cute's own swizzles count bytes).
"""

from __future__ import annotations

from layouts.algebra import AnyLayout, ComposedLayout, Layout, Swizzle

from .matmul_backward import MatmulBackwardClass
from .matmul_class import BLOCK_ROWS, LINE_N, SLAB, TILE_N, MatmulClass
from .problem import ALIGNMENT, ITEM_SIZE

BOX = 128  # bytes of a row of a box: all banks once
ATOM_ROWS = 8  # after which the swizzle repeats
INSTRUCTION_K = 16  # terms that an instruction of the tensor cores adds up, of 16 bits
# (thread, value) -> index in 8 columns of V by 16 of its rows: the B operand of mma.sync m16n8k16.
VALUES_OPERAND = Layout(((4, 8), (2, 2)), ((16, 1), (8, 64)))
WARP_ROWS = 16  # of a warpgroup's 64, and those of mma.sync
QUAD = 4  # lanes that hold a row of a fragment
LINES = 8  # boxes of a tile whose rows begin anywhere, each of every eighth row


def swizzle(item: int) -> Swizzle:
    """The 128-byte swizzle, of elements of `item` bytes: 16-byte pieces of a row are exchanged by the row modulo 8."""
    return Swizzle(3, (ALIGNMENT // item).bit_length() - 1, 3)


def by_rows(item: int, rows: int, columns: int, stages: int) -> ComposedLayout:
    """(row, column, stage) -> element: boxes of 128 bytes of columns, each of all rows, its rows 128 bytes apart."""
    box = BOX // item
    boxes = columns // box
    shape = ((ATOM_ROWS, rows // ATOM_ROWS), (box, boxes), (1, stages))
    stride = (
        (box, _step(rows // ATOM_ROWS, ATOM_ROWS * box)),
        (1, _step(boxes, rows * box)),
        (0, _step(stages, rows * columns)),
    )
    return ComposedLayout(swizzle(item), 0, Layout(shape, stride))


def by_columns(item: int, columns: int, rows: int, stages: int) -> ComposedLayout:
    """(column, row, stage) -> element: the same memory as `by_rows`, with the columns as the first mode."""
    (row, column, stage), (d_row, d_column, d_stage) = (
        f(by_rows(item, rows, columns, stages).inner) for f in (lambda x: x.shape, lambda x: x.stride)
    )
    return ComposedLayout(swizzle(item), 0, Layout((column, row, stage), (d_column, d_row, d_stage)))


def _step(size: int, stride: int) -> int:
    """A mode's stride, 0 where it has but one element."""
    return stride if size > 1 else 0


def eighths(rows: int, stages: int) -> Layout:
    """(row of a box, column, box) -> element: a tile's boxes of every eighth row, after each other, without a swizzle.
    Lines of 144 bytes begin four banks apart, and a row begins somewhere within its line's first 16 bytes."""
    each = rows // LINES
    return Layout((each, LINE_N, LINES * stages), (LINE_N, 1, each * LINE_N))


def fragment(columns: int, warps: int = 4) -> Layout:
    """(thread, value) -> index in a tile of 16 rows a warp by so many columns, rows fastest.

    The accumulator of wgmma m64nXk16 for X columns and, of 16 columns, its A operand from registers; with one warp
    those of mma.sync m16n8k16. A value is (neighbour, 8 rows below, each 8 columns further).
    """
    rows = WARP_ROWS * warps
    return Layout(((4, 8, warps), (2, 2, columns // 8)), ((2 * rows, 1, WARP_ROWS), (rows, 8, 8 * rows)))


def matrices(columns: int, transposed: bool = False) -> Layout:
    """(thread of a warpgroup, element) -> index in the tile of `fragment`: the 8 neighbours whose address a thread
    gives to ldmatrix (or stmatrix), so that the threads then hold the fragment. Of each 16 columns there is one
    instruction.

    transposed: neighbours in memory are neighbours of a column, as where S is read as S^T.
    """
    rows, count = BLOCK_ROWS, columns // 16
    if transposed:
        return Layout(
            ((8, 2, 2, 4), (8, count)), ((rows, 8, 8 * rows, WARP_ROWS), (1, _step(count, 16 * rows)))
        )
    return Layout(((16, 2, 4), (8, count)), ((1, 8 * rows, WARP_ROWS), (rows, _step(count, 16 * rows))))


def values_fragment() -> Layout:
    """(thread, value) -> index in a tile of 16 columns of V by 16 of its rows, columns fastest: the B operands of two
    mma.sync, which one ldmatrix loads."""
    return Layout(((4, 8), (2, 2, 2)), ((32, 1), (16, 128, 8)))


def value_matrices() -> Layout:
    """(thread, element) -> index in the tile of `values_fragment`: the 8 neighbours whose address a thread gives."""
    return Layout(((16, 2), 8), ((16, 8), 1))


def stored() -> Layout:
    """(thread of a warpgroup, value) -> index in its 64 rows by 32 columns: what a quad has exchanged `fragment` for
    before it stores 16 bytes a thread; a value is (neighbour, 8 rows below)."""
    return Layout(((4, 8, 4), (8, 2)), ((8 * BLOCK_ROWS, 1, WARP_ROWS), (BLOCK_ROWS, 8)))


def forward_layouts(c: MatmulClass) -> dict[str, AnyLayout]:
    """The layouts of a forward class, by the names by which its kernel tells them; without wgmma those of one
    instruction of a warp."""
    if c.instruction == "mma":
        return {"rA": fragment(INSTRUCTION_K, 1), "rB": VALUES_OPERAND, "rO": fragment(8, 1)}
    scores, values = ITEM_SIZE[c.dtypes[0]], ITEM_SIZE[c.dtypes[1]]
    return {
        "sS": eighths(c.rows, c.score_stages) if c.lines else by_rows(scores, c.rows, TILE_N, c.score_stages),
        "sV": by_columns(values, c.depth, TILE_N, c.value_stages),
        "rA": fragment(INSTRUCTION_K),
        "rO": fragment(c.depth),
    }


def backward_layouts(c: MatmulBackwardClass) -> dict[str, AnyLayout]:
    """The layouts of a backward class: sO and sOt are dO as the operand of both products."""
    item = ITEM_SIZE[c.dtypes[1]]
    found = {
        "sO": by_rows(item, c.rows, c.depth, c.stages),
        "sOt": by_columns(item, c.depth, c.rows, c.stages),
        "rP": fragment(c.rows),
        "rE": fragment(INSTRUCTION_K),
        "rdV": fragment(c.share_depth),
    }
    if not c.lines:
        found["sS"] = by_rows(ITEM_SIZE[c.dtypes[0]], c.rows, c.columns, c.stages)
    if c.deep:
        found["sV"] = by_rows(item, SLAB, c.depth, c.slabs)
    return found


def first_stage(layout: ComposedLayout) -> ComposedLayout:
    """A tile's first stage as (row, column)."""
    return ComposedLayout(
        layout.outer, layout.offset, Layout(layout.inner.shape[:2], layout.inner.stride[:2])
    )


__all__ = [
    "ATOM_ROWS",
    "BLOCK_ROWS",
    "BOX",
    "INSTRUCTION_K",
    "LINES",
    "QUAD",
    "WARP_ROWS",
    "backward_layouts",
    "by_columns",
    "by_rows",
    "eighths",
    "first_stage",
    "forward_layouts",
    "fragment",
    "matrices",
    "stored",
    "swizzle",
    "value_matrices",
    "values_fragment",
]
