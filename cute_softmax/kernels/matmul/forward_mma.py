"""softmax(S) @ V on tensor cores without wgmma (sm_80 and newer): the same kernel, by mma.sync and cp.async.

All warps load and multiply. A step's tiles of S and V come by cp.async into a ring of stages, whose boxes lie in shared
memory as TMA would have put them: ldmatrix reads S as the A operand, and V transposed as the B operand. Four warps hold
a block of 64 rows as a warpgroup does, 16 rows each, so that `Rows` finds scores, exponentials and accumulators in the
same registers.

    coordinates -> shared memory -> load -> exponentials -> multiply -> finish -> store
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr
from cutlass.cute.nvgpu import warp

from layouts.trace import observe

from ...plan.matmul_class import BLOCK_ROWS, TILE_N, WARPGROUP, MatmulClass
from ...plan.matmul_class import LINE_N as PITCH
from ...plan.matmul_layouts import BOX, QUAD, WARP_ROWS
from ...plan.problem import ALIGNMENT as PIECE  # bytes that the swizzle exchanges
from ..common.copy import DTYPES, element, in_global, in_shared, load_async
from ..common.early import begins_early, wait_for_stream
from ..common.index import dot, select
from ..common.tensor_cores import ldmatrix, row_of_matrix
from .merge_global import Merge, hand_over
from .softmax_rows import STEP_PRODUCTS, block_of
from .tiles import Call, Work, call_of, tiles_of

UNROLLED = 8


@dataclass(frozen=True)
class Source:
    """What a CTA reads of S or of V: its dtype and address, its row stride in bytes, how many rows and columns it has,
    and the first ones that are read."""

    dtype: type
    address: Int64
    pitch: Int64
    limits: tuple[Int32, Int32]
    row: Int32 | int
    column: Int32 | int


class MmaKernel:
    """The kernel of one Plan class; spec: see `cute_softmax.plan.matmul_class.MatmulClass`."""

    def __init__(self, spec: MatmulClass):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int32,
        columns: Int32,
        depth: Int32,
        batch_0: Int32,
        batch_1: Int32,
        batch_2: Int32,
        ctas: Int32,
        parts: Int32,
        part_steps: Int32,
        scale: Float32,
        offset: Int32,
        *operands: Int64,
    ):
        """Launch. Arguments as of `MatmulKernel`, without those of its `lines`."""
        s = self.spec
        shape, batch, S, V = (rows, columns, depth), (batch_0, batch_1, batch_2), operands[:5], operands[5:10]
        call = call_of(s, shape, batch, (parts, part_steps), S, V, scale, offset, operands[10:])
        grid = [ctas, 1, 1]
        self.kernel(call).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=begins_early(s, grid),
        )
        if const_expr(s.split):
            Merge(s).launch(call, stream)

    @cute.kernel
    def kernel(self, call: Call):
        s = self.spec

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        group, thread, lane = tidx // WARPGROUP, tidx % WARPGROUP, tidx % 32

        # Shared memory.
        smem = cutlass.memory.SmemAllocator()
        sS = smem.allocate(s.stages * s.score_stage_bytes, byte_alignment=1024).toint()
        sV = smem.allocate(s.stages * s.value_stage_bytes, byte_alignment=1024).toint()

        wait_for_stream(s.early)
        tiles = tiles_of(s, call)
        work = tiles.work(Int32(0))
        S = self.source(0, call.scores, work, (call.rows, call.columns), work.row_tile * s.rows, 0)
        V = self.source(1, call.values, work, (call.columns, call.depth), 0, work.depth_tile * s.depth)
        if const_expr(s.lines):
            # Every eighth row begins equally far from a multiple of 16 bytes.
            begins = Int32(S.address & 15) + lane // QUAD * Int32(S.pitch & 15)
            work = replace(work, shifts=(begins & 15, begins & 15))

        # Partition.
        row, piece = row_of_matrix(lane, 0)
        from_V = sV + row * BOX + piece * PIECE
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(V.dtype, Float32, (16, 8, 16)), atom_layout_mnk=(4, 1, 1)
        )
        observe("mma", tiled_mma)
        blocks = []
        for b in cutlass.range_constexpr(s.blocks):
            top = group * s.blocks * BLOCK_ROWS + BLOCK_ROWS * b
            of_warp = top + thread // 32 * WARP_ROWS
            own, read = of_warp + lane // QUAD, (of_warp + row, piece)
            blocks.append(block_of(tiles, tiled_mma, sS, top, own, read, lane))
            blocks[b].begin(work)

        # Load.
        for i in cutlass.range_constexpr(s.stages - 1):
            self.load(work, S, V, sS, sV, Int32(i), Int32(i), tidx)
        stage = Int32(0)
        for step in cutlass.range(work.steps, unroll=1):
            cute.arch.cp_async_wait_group(s.stages - 2)
            cute.arch.barrier()  # the stage is full, and all have read the one before it
            before = select(stage == 0, Int32(s.stages - 1), stage - 1)
            self.load(work, S, V, sS, sV, step + (s.stages - 1), before, tidx)
            # Exponentials.
            for b in cutlass.range_constexpr(s.blocks):
                blocks[b].prepare(work, work.first + step, stage, None)
                blocks[b].take_over()
            # Multiply.
            self.product(tiled_mma, blocks, from_V + stage * s.value_stage_bytes)
            stage = select(stage == s.stages - 1, Int32(0), stage + 1)
        cute.arch.cp_async_wait_group(0)

        for b in cutlass.range_constexpr(s.blocks):
            if const_expr(s.split):
                hand_over(blocks[b], work)
            else:
                blocks[b].finish(work)

    def product(self, tiled_mma: cute.TiledMma, blocks: list, from_V: Int32):
        """The powers of a step times its tile of V; from_V: the address that this lane gives to the first ldmatrix.

        An ldmatrix loads 16 rows and 16 columns, the B operand of two products for each block."""
        s = self.spec
        rV = cute.make_rmem_tensor(((2, 2), 2), DTYPES[s.dtypes[1]])
        words = cute.recast_tensor(rV, Uint32)
        two = cute.make_layout(((2, 2), 1, 2))
        for k in range(STEP_PRODUCTS):
            for n in range(s.depth // 16):
                at = from_V + (n // 4 * TILE_N + k * 16) * BOX
                matrices = ldmatrix(at ^ (n % 4 * 2 * PIECE), transposed=True)
                for j in range(4):
                    words[j] = matrices[j]
                for block in blocks:
                    rO = cute.make_tensor(block.rO.iterator + n * cute.size(two), two)
                    cute.gemm(tiled_mma, rO, block.rA[(None, None, k)], rV, rO)

    def source(
        self, i: int, operand: tuple, work: Work, limits: tuple, row: Int32 | int, column: Int32 | int
    ) -> Source:
        """What the CTA reads of S (i = 0) or V (i = 1)."""
        dtype = DTYPES[self.spec.dtypes[i]]
        address, row_stride, *batch = operand
        size = dtype.width // 8
        return Source(
            dtype, address + dot([*work.modes], batch) * size, row_stride * size, limits, row, column
        )

    @cute.jit
    def load(
        self, work: Work, S: Source, V: Source, sS: Int32, sV: Int32, step: Int32, stage: Int32, tidx: Int32
    ):
        """Begin to load a step's tiles, if there is such a step; one group of cp.async in any case."""
        s = self.spec
        if step < work.steps:
            first = (work.first + step) * TILE_N
            at = sS + stage * s.score_stage_bytes
            if const_expr(s.lines):
                self.load_lines(S, first, at, tidx)
            else:
                self.load_boxes(S, (s.rows, TILE_N), s.access[0], (S.row, first), at, tidx)
            at = sV + stage * s.value_stage_bytes
            self.load_boxes(V, (TILE_N, s.depth), s.access[1], (first, V.column), at, tidx)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_boxes(
        self,
        source: Source,
        shape: cutlass.Constexpr[tuple],
        access: cutlass.Constexpr[int],
        corner: tuple[Int32, Int32],
        to: Int32,
        tidx: Int32,
    ):
        """A tile of this shape into shared memory at `to`, as boxes of 128 bytes of columns, zeros beyond the limits.

        A thread loads pieces of `access` bytes, of one column and every few rows."""
        size, (rows, columns), limits = source.dtype.width // 8, shape, source.limits
        boxes, pieces = columns * size // BOX, BOX // access
        apart = self.spec.threads // pieces  # rows between two pieces of a thread
        piece, row = tidx % pieces, tidx // pieces
        for box in cutlass.range_constexpr(boxes):
            column = corner[1] + (box * BOX + piece * access) // size
            count = cutlass.min(cutlass.max(limits[1] - column, 0), access // size) * size
            inside = (piece * access) // PIECE, (piece * access) % PIECE
            tile = to + box * rows * BOX
            turns = rows // apart
            unrolled = min(turns, UNROLLED)
            # From one piece to the next by an addition: addresses held for all steps would not fit into registers.
            address = source.address + Int64(corner[0] + row) * source.pitch + Int64(column) * size
            left = limits[0] - corner[0] - row
            for turn in cutlass.range(turns // unrolled, unroll=1):
                held = []
                for j in cutlass.range_constexpr(unrolled):
                    r = row + (turn * unrolled + j) * apart
                    here = select(left > 0, count, 0)
                    target = tile + r * BOX + ((inside[0] ^ (r % 8)) * PIECE + inside[1])
                    if const_expr(access >= 4):
                        self.copy_async(source, address, target, access, here)
                    else:
                        # Where nothing is to be read the first element is.
                        begin = select(here > 0, address, source.address)
                        held.append((target, here, element(Uint16, begin)[0]))
                    address += source.pitch * apart
                    left -= apart
                for target, here, word in held:
                    in_shared(Uint16, target)[0] = select(here > 0, word, Uint16(0))

    @cute.jit
    def load_lines(self, source: Source, column: Int32, to: Int32, tidx: Int32):
        """A tile of 16-bit scores whose rows begin anywhere: of each row the whole 16 bytes around its part of a tile,
        so that it begins as far from such a multiple as in global memory; rows of `PITCH` columns, without a swizzle.
        A thread loads one of the first eight pieces of every few rows, and the last one of one row."""
        s = self.spec
        pieces = PITCH * 2 // PIECE
        first = pieces - 1
        apart = s.threads // first
        row, piece = tidx // first, tidx % first
        address, count = self.piece(source, row, piece, column)
        left = source.limits[0] - source.row - row
        for j in cutlass.range_constexpr(s.rows // apart):
            here = select(left > 0, count, 0)
            self.copy_async(source, address, to + ((row + j * apart) * PITCH + piece * 8) * 2, PIECE, here)
            address += source.pitch * apart  # as far from 16 bytes: `apart` is a multiple of 8
            left -= apart
        if tidx < s.rows:
            address, count = self.piece(source, tidx, Int32(first), column)
            count = select(source.row + tidx < source.limits[0], count, 0)
            self.copy_async(source, address, to + (tidx * PITCH + first * 8) * 2, PIECE, count)

    def copy_async(self, source: Source, address: Int64, target: Int32, size: int, exist: Int32):
        """cp.async of `size` bytes to shared memory, of which `exist` are read; the others are zero."""
        count = size * 8 // source.dtype.width
        gX, sX = in_global(source.dtype, address, 0, count), in_shared(source.dtype, target, count)
        load_async(gX, sX, count, None, exist=exist)

    def piece(self, source: Source, row: Int32, piece: Int32, column: Int32) -> tuple:
        """(address, bytes that count) of 16 bytes of a row of S, the first of which lie around `column`."""
        start = source.address + Int64(source.row + row) * source.pitch
        column = column + piece * 8
        left = source.limits[1] - column + Int32(start & 15) // 2
        return (start & -16) + Int64(column) * 2, cutlass.min(cutlass.max(left, 0), 8) * 2
