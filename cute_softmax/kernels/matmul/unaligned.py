"""S whose rows do not begin at multiples of 16 bytes, for softmax(S) @ V.

TMA steps by multiples of 16 bytes, in memory and in its coordinates. But each eighth row begins equally far from such a
multiple, so that S is eight tensors to it, each beginning with up to 7 elements that lie before. A tile comes as eight
boxes, each of every eighth row and of 8 columns more than a tile has; a row is read from where it begins in its box.
Rows of 144 bytes lie in different banks without a swizzle.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...plan import matmul_layouts
from ...plan.matmul_class import LINE_N as PITCH
from ...plan.matmul_class import TILE_N, MatmulClass
from ...plan.matmul_layouts import LINES, QUAD
from ..common.copy import DTYPES, funnel_shift, in_shared
from ..common.index import select
from ..common.tensor_cores import partition, tensor_map
from .tiles import Tiles, Work, matrix, place


def eighths_layout(spec: MatmulClass) -> cute.Layout:
    """(rows of a box, its columns, boxes): those of a stage after each other, in the order of their first rows."""
    layout = matmul_layouts.eighths(spec.rows, spec.score_stages)
    return cute.make_layout(layout.shape, stride=layout.stride)


def eighths_maps(spec: MatmulClass, operand: tuple, shape: tuple, batch: tuple) -> tuple:
    """Make, on the host, (TMA atom, tensor of coordinates) of rows k, k + 8, .. of S, for all k.

    shape: the rows that follow each other at the row stride, and the columns.
    """
    layout = eighths_layout(spec)
    address, row, *strides = operand
    rows, columns = shape
    maps = []
    for k in range(LINES):
        first = address + row * (2 * k)
        # A map must not be empty: without a row it is the first one's.
        first = select(k < rows, first, address)
        before = Int32((first & 15) // 2)
        count = cutlass.max((rows - k + LINES - 1) // LINES, 1)
        pieces = (first - Int64(before) * 2, row * LINES, *strides)
        mS = matrix(DTYPES[spec.dtypes[0]], pieces, (count, columns + before), batch)
        maps.append(tuple(tensor_map(mS, layout, (spec.rows // LINES, PITCH))))
    return tuple(maps)


@dataclass(frozen=True)
class EighthLoads:
    """Loads of tiles of S by the maps of `eighths_maps`."""

    tiles: Tiles
    maps: tuple
    sS: cute.Tensor

    def load(self, work: Work, step: Int32, stage: Int32, barrier: cute.Pointer):
        """Begin to load a step's tile into a stage."""
        s, top = self.tiles.spec, top_of(self.tiles, work)
        for k in range(LINES):
            tma, mS = self.maps[k]
            box = (k - top) & (LINES - 1)
            corner = (top + box) // LINES, (work.first + step) * TILE_N
            gS = cute.domain_offset((*corner, *place(mS, work)), mS)
            gS = cute.flat_divide(gS, (s.rows // LINES, PITCH))
            tSsS, tSgS = partition(tma, self.sS, gS)
            at = tSgS[(None, 0, 0, 0, 0, 0)]
            cute.copy(tma, at, tSsS[(None, stage * LINES + box)], tma_bar_ptr=barrier)


def top_of(tiles: Tiles, work: Work) -> Int32:
    """A tile's first row among all that follow each other at the row stride of S."""
    return work.row_tile * tiles.spec.rows + work.batch * tiles.call.scores[2]


def eighths_shifts(tiles: Tiles, work: Work, row: Int32) -> tuple[Int32, ...]:
    """How many bytes a thread's rows begin after a multiple of 16: the same in all tiles of a work. row: its first."""
    address, row_stride, _ = tiles.call.scores
    # What an address is within 16 bytes needs no more than 32 bits.
    first, step = Int32(address & 15), Int32(row_stride & 7) * 2
    boxes = [(row + 8 * h) // (tiles.spec.rows // LINES) for h in range(2)]
    return tuple((first + step * (top_of(tiles, work) + box)) & 15 for box in boxes)


def read_eighths(words: cute.Tensor, base: Int32, row: Int32, lane: Int32, shifts: tuple):
    """A block's scores of a tile as wgmma's operand: pairs that may lie across two words.

    base: the address of the tile; row: this thread's first row; shifts: see `Work`.
    """
    for h in range(2):
        at = base + (row + 8 * h) * (PITCH * 2)
        at = at + lane % QUAD * 4 + shifts[h]
        bits = (at & 2) * 8
        for i in range(cute.size(words) // 2):
            pair = in_shared(Uint32, (at & -4) + 16 * i, 2, align=4)
            words[2 * i + h] = funnel_shift(pair[0], pair[1], bits)
