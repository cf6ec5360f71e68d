"""S whose rows do not begin at multiples of 16 bytes, for softmax(S) @ V.

TMA steps by multiples of 16 bytes, in memory and in its coordinates. But each eighth row begins equally far from such a
multiple, so that S is eight tensors to it, each beginning with up to 7 elements that lie before. A tile comes as eight
boxes, each of every eighth row and of 8 columns more than a tile has; a row is read from where it begins in its box.
Rows of 144 bytes lie in different banks without a swizzle.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from ...plan import matmul_layouts
from ...plan.matmul_class import LINE_N as PITCH
from ...plan.matmul_class import TILE_N
from ...plan.matmul_layouts import LINES
from ..common import tensor_cores

QUAD = 4


class Eighths:
    """What `MatmulKernel` does where its class has `lines`."""

    def eighths_layout(self, stages: int) -> cute.Layout:
        """(rows of a box, its columns, boxes): those of a stage after each other, in the order of their first rows."""
        layout = matmul_layouts.eighths(self.spec.rows, stages)
        return cute.make_layout(layout.shape, stride=layout.stride)

    def eighths_maps(self, operand: tuple, shape: tuple, sizes: tuple) -> tuple:
        """Make, on the host, (TMA atom, tensor of coordinates) of rows k, k + 8, .. of S, for all k."""
        s = self.spec
        layout = self.eighths_layout(s.score_stages)
        address, row, *batch = operand
        rows, columns = shape
        maps = []
        for k in range(LINES):
            first = address + row * (2 * k)
            # A map must not be empty: without a row it is the first one's.
            first = Int64(cutlass.select_(k < rows, first, address))
            before = Int32((first & 15) // 2)
            count = cutlass.max((rows - k + LINES - 1) // LINES, 1)
            pieces = (first - Int64(before) * 2, row * LINES, *batch)
            mS = self.matrix(0, pieces, (count, columns + before), sizes, transposed=False)
            maps.append(tuple(tensor_cores.tensor_map(mS, layout, (s.rows // LINES, PITCH))))
        return tuple(maps)

    @cute.jit
    def load_eighths(self, this, maps: tuple, sX: cute.Tensor):
        """The warp that fills the ring of scores."""
        s, ring = self.spec, this.scores
        stage, phase = ring.begin()
        turn = Int32(0)
        exists = self.work(this, turn).exists
        while exists:
            work = self.work(this, turn)
            top = self.top(this, work)
            for step in cutlass.range(work.steps * s.shares, unroll=1):
                barrier = ring.acquire(stage, phase)
                for k in cutlass.range_constexpr(LINES):
                    tma, tX = maps[k]
                    box = (k - top) & (LINES - 1)
                    corner = (top + box) // LINES, (work.first + step) * TILE_N
                    place = self.place(tX, work)
                    tile = cute.domain_offset((*corner, *place), tX)
                    tile = cute.flat_divide(tile, (s.rows // LINES, PITCH))
                    tXsX, tXgX = cpasync.tma_partition(
                        tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(tile, 0, 2)
                    )
                    at = tXgX[(None, 0, 0, 0, 0, 0)]
                    cute.copy(tma, at, tXsX[(None, stage * LINES + box)], tma_bar_ptr=barrier)
                stage, phase = ring.advance(stage, phase)
            turn += 1
            exists = self.work(this, turn).exists

    def top(self, this, work) -> Int32:
        """A tile's first row among all that follow each other at the row stride of S."""
        return work.row_tile * self.spec.rows + work.batch * this.lines[2]

    def eighths_shifts(self, this, block, work) -> list[Int32]:
        """How many bytes this thread's rows begin after a multiple of 16: the same in all tiles of a work."""
        address, row_stride, _ = this.lines
        # What an address is within 16 bytes needs no more than 32 bits.
        first, step = Int32(address & 15), Int32(row_stride & 7) * 2
        boxes = [(block.row + 8 * h) // (self.spec.rows // LINES) for h in range(2)]
        return [(first + step * (self.top(this, work) + box)) & 15 for box in boxes]

    def read_eighths(self, block, work, words: cute.Tensor, stage: Int32, lane: Int32):
        """A block's scores of a tile as wgmma's operand: pairs that may lie across two words."""
        s = self.spec
        for h in range(2):
            at = block.base + stage * s.score_stage_bytes + (block.row + 8 * h) * (PITCH * 2)
            at = at + lane % QUAD * 4 + work.shifts[h]
            bits = (at & 2) * 8
            for i in range(cute.size(words) // 2):
                pointer = cute.make_ptr(Uint32, (at & -4) + 16 * i, cute.AddressSpace.smem, assumed_align=4)
                pair = cute.make_tensor(pointer, cute.make_layout(2))
                words[2 * i + h] = cute.arch.inline_ptx(
                    "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};",
                    write_only_types=[Uint32],
                    read_only_args=[pair[0], pair[1], bits],
                )
