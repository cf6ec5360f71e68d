"""softmax(S) @ V on tensor cores without wgmma (sm_80 and newer): the same kernel, by mma.sync and cp.async.

All warps load and multiply. A step's tiles of S and V come by cp.async into a ring of stages, whose boxes lie in shared
memory as TMA would have put them: ldmatrix reads S as the A operand, and V transposed as the B operand. Four warps hold
a block of 64 rows as a warpgroup does, 16 rows each, so that `Rows` finds scores, exponentials and accumulators in the
same registers.

    coordinates -> shared memory -> load -> exponentials -> multiply -> finish -> store
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr
from cutlass.cute.nvgpu import warp

from layouts.trace import observe

from ..common.index import dot
from ..common.tensor_cores import BOX, WARPGROUP, ldmatrix, row_of_matrix
from .merge_global import Parts
from .softmax_rows import QUAD, STEP_PRODUCTS, TILE_N, Rows
from .tiles import Works
from .unaligned import PITCH, Eighths

PIECE = 16  # bytes that the swizzle exchanges
UNROLLED = 8


class MmaKernel(Works, Rows, Eighths, Parts):
    """The kernel of one Plan class; spec: see `cute_softmax.plan.matmul_mma.MmaClass`."""

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
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
        shape, sizes = (rows, columns, depth), (batch_0, batch_1, batch_2)
        extra = 10 + 6 * (s.mask + bool(s.bias))
        results = operands[extra:]
        self.kernel(
            shape,
            sizes,
            (parts, part_steps),
            operands[:5],
            operands[5:10],
            scale,
            offset,
            operands[10:extra],
            results,
        ).launch(grid=[ctas, 1, 1], block=[s.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
        self.launch_merge(shape, sizes, parts, scale, results, stream)

    @cute.kernel
    def kernel(
        self,
        shape: tuple,
        sizes: tuple,
        parts: tuple,
        scores: tuple,
        values: tuple,
        scale: Float32,
        offset: Int32,
        extras: tuple,
        results: tuple,
    ):
        s = self.spec

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        group, thread, lane = tidx // WARPGROUP, tidx % WARPGROUP, tidx % 32

        # Shared memory.
        smem = cutlass.memory.SmemAllocator()
        sS = smem.allocate(s.stages * s.score_stage_bytes, byte_alignment=1024).toint()
        sV = smem.allocate(s.stages * s.value_stage_bytes, byte_alignment=1024).toint()

        this = self.call(shape, sizes, parts, scale, offset, extras, results, sS=sS, sV=sV)
        work = self.work(this, Int32(0))
        boxes_S = self.source(this, scores, work, 0, work.row_tile * s.rows, 0)
        boxes_V = self.source(this, values, work, 1, 0, work.depth_tile * s.depth)
        if const_expr(s.lines):
            # Every eighth row begins equally far from a multiple of 16 bytes.
            begins = Int32(boxes_S.address & 15) + lane // QUAD * Int32(boxes_S.pitch & 15)
            work.shifts = [begins & 15] * 2

        # Partition.
        row, piece = row_of_matrix(lane, 0)
        from_V = sV + row * BOX + piece * PIECE
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtypes[1], Float32, (16, 8, 16)), atom_layout_mnk=(4, 1, 1)
        )
        observe("mma", tiled_mma)
        blocks = []
        for b in cutlass.range_constexpr(s.blocks):
            first = group * s.blocks * 64 + 64 * b
            operand = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((64, TILE_N)))
            blocks.append(
                SimpleNamespace(
                    # Stages are waited for and given back for all blocks at once.
                    begins=False,
                    ends=False,
                    first=first,
                    row=first + thread // 32 * 16 + lane // QUAD,
                    base=sS,
                    sS=sS + (first + thread // 32 * 16 + row) * BOX + piece * PIECE,
                    rO=tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((64, s.depth))),
                    rA=operand,
                    rP=operand,
                    rRef=cute.make_rmem_tensor(2, Float32),
                    rSlope=cute.make_rmem_tensor(2, Float32),
                    rShift=cute.make_rmem_tensor(2, Float32),
                    rTotal=cute.make_rmem_tensor(2, Float32),
                    rSum=cute.make_rmem_tensor(2, Float32),
                    rFall=cute.make_rmem_tensor(3, Float32),
                )
            )
            self.begin(this, blocks[b], work)

        # Load.
        for i in cutlass.range_constexpr(s.stages - 1):
            self.load(this, work, boxes_S, boxes_V, Int32(i), Int32(i), tidx)
        stage = Int32(0)
        for step in cutlass.range(work.steps, unroll=1):
            cute.arch.cp_async_wait_group(s.stages - 2)
            cute.arch.barrier()  # the stage is full, and all have read the one before it
            before = Int32(cutlass.select_(stage == 0, s.stages - 1, stage - 1))
            self.load(this, work, boxes_S, boxes_V, step + (s.stages - 1), before, tidx)
            # Exponentials.
            for b in cutlass.range_constexpr(s.blocks):
                self.prepare(this, blocks[b], work, work.first + step, stage, Int32(0), lane, None)
                self.take_over(blocks[b])
            # Multiply.
            self.product(tiled_mma, blocks, from_V + stage * s.value_stage_bytes)
            stage = Int32(cutlass.select_(stage == s.stages - 1, 0, stage + 1))
        cute.arch.cp_async_wait_group(0)

        for b in cutlass.range_constexpr(s.blocks):
            if const_expr(s.split):
                self.hand_over(this, blocks[b], work, 0, lane)
            else:
                self.finish(this, blocks[b], work, lane)

    def product(self, tiled_mma: cute.TiledMma, blocks: list, from_V: Int32):
        """The powers of a step times its tile of V; from_V: the address that this lane gives to the first ldmatrix.

        An ldmatrix loads 16 rows and 16 columns, the B operand of two products for each block."""
        s = self.spec
        rV = cute.make_rmem_tensor(((2, 2), 2), self.dtypes[1])
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

    def source(self, this, operand: tuple, work: SimpleNamespace, i: int, row: Int32, column: Int32):
        """What a CTA reads of S (i = 0) or V (i = 1): address, row stride in bytes, first row and column."""
        address, row_stride, *batch = operand
        size = self.dtypes[i].width // 8
        return SimpleNamespace(
            address=address + dot([*work.modes], batch) * size,
            pitch=row_stride * size,
            row=row,
            column=column,
        )

    @cute.jit
    def load(self, this, work, scores, values, step: Int32, stage: Int32, tidx: Int32):
        """Begin to load a step's tiles, if there is such a step; one group of cp.async in any case."""
        s = self.spec
        if step < work.steps:
            first = (work.first + step) * TILE_N
            at = this.sS + stage * s.score_stage_bytes
            limits = this.rows, this.columns
            if const_expr(s.lines):
                self.load_lines(scores, first, limits, at, tidx)
            else:
                self.load_boxes(scores, 0, s.rows, (scores.row, first), limits, at, tidx)
            at = this.sV + stage * s.value_stage_bytes
            limits = this.columns, this.depth
            self.load_boxes(values, 1, TILE_N, (first, values.column), limits, at, tidx)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_boxes(
        self,
        source,
        i: cutlass.Constexpr[int],
        rows: cutlass.Constexpr[int],
        corner: tuple[Int32, Int32],
        limits: tuple[Int32, Int32],
        to: Int32,
        tidx: Int32,
    ):
        """A tile into shared memory at `to`, as boxes of 128 bytes by `rows` side by side, zeros beyond the limits.

        A thread loads pieces of `access` bytes, of one column and every few rows."""
        s, dtype = self.spec, self.dtypes[i]
        size, access = dtype.width // 8, s.access[i]
        boxes = (s.depth if i else TILE_N) * size // BOX
        pieces = BOX // access
        apart = s.threads // pieces  # rows between two pieces of a thread
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
                    here = Int32(cutlass.select_(left > 0, count, 0))
                    target = tile + r * BOX + ((inside[0] ^ (r % 8)) * PIECE + inside[1])
                    if const_expr(access >= 4):
                        copy_async(target, address, access, here)
                    else:
                        # Where nothing is to be read the first element is.
                        held.append(
                            (target, here, word_at(Int64(cutlass.select_(here > 0, address, source.address))))
                        )
                    address += source.pitch * apart
                    left -= apart
                for target, here, word in held:
                    pointer = cute.make_ptr(Uint16, target, cute.AddressSpace.smem, assumed_align=2)
                    word = Uint16(cutlass.select_(here > 0, word, Uint16(0)))
                    cute.make_tensor(pointer, cute.make_layout(1))[0] = word

    @cute.jit
    def load_lines(self, source, column: Int32, limits: tuple, to: Int32, tidx: Int32):
        """A tile of 16-bit scores whose rows begin anywhere: of each row the whole 16 bytes around its part of a tile,
        so that it begins as far from such a multiple as in global memory; rows of `PITCH` columns, without a swizzle.
        A thread loads one of the first eight pieces of every few rows, and the last one of one row."""
        s = self.spec
        pieces = PITCH * 2 // PIECE
        first = pieces - 1
        apart = s.threads // first
        row, piece = tidx // first, tidx % first
        address, count = self.piece(source, row, piece, column, limits)
        left = limits[0] - source.row - row
        for j in cutlass.range_constexpr(s.rows // apart):
            here = Int32(cutlass.select_(left > 0, count, 0))
            copy_async(to + ((row + j * apart) * PITCH + piece * 8) * 2, address, PIECE, here)
            address += source.pitch * apart  # as far from 16 bytes: `apart` is a multiple of 8
            left -= apart
        if tidx < s.rows:
            address, count = self.piece(source, tidx, Int32(first), column, limits)
            count = Int32(cutlass.select_(source.row + tidx < limits[0], count, 0))
            copy_async(to + (tidx * PITCH + first * 8) * 2, address, PIECE, count)

    def piece(self, source: SimpleNamespace, row: Int32, piece: Int32, column: Int32, limits: tuple) -> tuple:
        """(address, bytes that count) of 16 bytes of a row of S, the first of which lie around `column`."""
        start = source.address + Int64(source.row + row) * source.pitch
        column = column + piece * 8
        left = limits[1] - column + Int32(start & 15) // 2
        return (start & -16) + Int64(column) * 2, cutlass.min(cutlass.max(left, 0), 8) * 2


def copy_async(target: Int32, address: Int64, size: int, count: Int32):
    """cp.async of `size` bytes to shared memory, of which `count` come from global memory; the others are zero."""
    through = "cg" if size == PIECE else "ca"  # only 16-byte copies can pass L1 by
    cute.arch.inline_ptx(
        f"cp.async.{through}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[target, address, count],
    )


def word_at(address: Int64) -> Uint16:
    """Two bytes in global memory."""
    pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.gmem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
