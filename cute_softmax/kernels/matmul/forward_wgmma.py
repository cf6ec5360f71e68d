"""softmax(S) @ V on sm_90a: S is read once, exponentiated in registers and multiplied from there.

One warp loads tiles of S into shared memory, one tiles of V, each into a ring of stages of its own. A warpgroup
takes one or two blocks of 64 rows of S: it loads a block of a tile into the registers of a wgmma operand, turns
scores into exponentials in place, and multiplies them with V's tile while it prepares the next block.

    coordinates -> shared memory -> roles -> load -> maximum -> exponentials -> multiply -> finish -> store

The powers of a row refer to one number, not far below the largest score seen: maxima are looked for, and sums and
accumulators rescaled, only when a sum shows that it lies too low. See `softmax_rows` for these.

Names as in `row`; tAs and tOr: partitioned by the multiplication's A operand and its output.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from layouts.trace import observe

from ...plan.matmul_class import BLOCK_ROWS, TILE_N, WARPGROUP, MatmulClass
from ...plan.matmul_layouts import BOX, QUAD, WARP_ROWS
from ..common import tensor_cores
from ..common.copy import DTYPES
from ..common.early import begins_early, wait_for_stream
from ..common.tensor_cores import Ring, partition, row_of_matrix
from .merge_cluster import Meeting, meeting_of, merge_halves, merge_shares
from .merge_global import Merge, hand_over
from .softmax_rows import STEP_PRODUCTS, block_of
from .tiles import Call, Tiles, Work, call_of, here, matrix, place, tiles_of
from .unaligned import EighthLoads, eighths_layout, eighths_maps, eighths_shifts


@dataclass(frozen=True)
class TileLoads:
    """Loads of tiles of S, or of V, by TMA."""

    tma: cute.CopyAtom
    mX: cute.Tensor
    tXsX: cute.Tensor
    tXgX: cute.Tensor
    scores: cutlass.Constexpr[bool]

    def load(self, work: Work, step: Int32, stage: Int32, barrier: cute.Pointer):
        """Begin to load a step's tile into a stage."""
        tile = work.row_tile if self.scores else work.depth_tile
        at = self.tXgX[(None, tile, work.first + step, *place(self.mX, work))]
        cute.copy(self.tma, at, self.tXsX[(None, stage)], tma_bar_ptr=barrier)


def tile_loads(tma: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor, rows: int, scores: bool) -> TileLoads:
    """Loads of tiles of so many rows of S, or columns of V."""
    return TileLoads(tma, mX, *partition(tma, sX, cute.flat_divide(mX, (rows, TILE_N))), scores)


class MatmulKernel:
    """The kernel of one Plan class; spec: see `cute_softmax.plan.MatmulClass`."""

    def __init__(self, spec: MatmulClass):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]

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
        all_rows: Int32,
        batch_rows: Int32,
        scale: Float32,
        offset: Int32,
        *operands: Int64,
    ):
        """Launch.

        all_rows, batch_rows: for `lines`, the rows of S that follow each other at its row stride, and those from one
            batch to the next among them (0 where batches have strides of their own).
        operands: (address in bytes, row stride, three batch strides in elements) of S and V, and those of `Call`:
            mask, bias and the addresses of what is contiguous. Else as `Call`.
        """
        s = self.spec
        batch, S, V = (batch_0, batch_1, batch_2), operands[:5], operands[5:10]
        lines = (S[0], S[1], batch_rows)
        call = call_of(
            s, (rows, columns, depth), batch, (parts, part_steps), lines, (), scale, offset, operands[10:]
        )
        sV_layout = tensor_cores.by_columns(self.dtypes[1], s.depth, TILE_N, s.value_stages)
        if const_expr(s.lines):
            sS_layout = eighths_layout(s)
            maps_S = eighths_maps(s, S, (all_rows, columns), batch)
        else:
            sS_layout = tensor_cores.by_rows(self.dtypes[0], s.rows, TILE_N, s.score_stages)
            mS = matrix(self.dtypes[0], S, (rows, columns), batch)
            maps_S = (tuple(tensor_cores.tensor_map(mS, sS_layout, (s.rows, TILE_N))),)
        mV = matrix(self.dtypes[1], V, (columns, depth), batch, transposed=True)
        tma_V, mV = tensor_cores.tensor_map(mV, sV_layout, (s.depth, TILE_N))
        tiled_mma = tensor_cores.mma(
            self.dtypes[1], s.depth, a_in_registers=True, a_by_rows=True, b_by_rows=False
        )
        observe("sS", sS_layout)
        observe("sV", sV_layout)
        observe("mma", tiled_mma)
        grid = [ctas, 1, 1]
        self.kernel(maps_S, tma_V, mV, sS_layout, sV_layout, tiled_mma, call).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            cluster=[s.cluster, 1, 1] if const_expr(s.cluster > 1) else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=begins_early(s, grid),
        )
        if const_expr(s.split):
            Merge(s).launch(call, stream)

    @cute.kernel
    def kernel(
        self,
        maps_S: tuple,
        tma_V: cute.CopyAtom,
        mV: cute.Tensor,
        sS_layout: cute.Layout | cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        call: Call,
    ):
        s = self.spec

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # What comes before the first loads: descriptors on their way (eight would cost registers).
        if warp == 0:
            for tma_S, _ in () if s.lines else maps_S:
                cpasync.prefetch_descriptor(tma_S)
        if warp == 1:
            cpasync.prefetch_descriptor(tma_V)

        # Shared memory.
        smem = cutlass.memory.SmemAllocator()
        if const_expr(s.lines):
            sS = smem.allocate_tensor(self.dtypes[0], sS_layout, byte_alignment=BOX)
        else:
            sS = tensor_cores.shared(smem, self.dtypes[0], sS_layout)
        sV = tensor_cores.shared(smem, self.dtypes[1], sV_layout)
        warps = 4 if const_expr(s.alternate) else s.warpgroups * 4  # that read a stage
        scores = tensor_cores.ring_of(smem, s.score_stages, s.score_stage_bytes, warps)
        values = tensor_cores.ring_of(smem, s.value_stages, s.value_stage_bytes, warps)
        meeting = meeting_of(smem, s, sS.iterator.toint())
        scores.initialise(tidx)
        values.initialise(tidx)
        meeting.initialise(tidx)
        cute.arch.mbarrier_init_fence()
        meeting.open()
        cute.arch.barrier()
        tiles = tiles_of(s, call)

        # Roles.
        if warp < 4:
            if const_expr(s.moves_registers):
                cute.arch.setmaxregister_decrease(s.producer_registers)
            if warp == 0:
                if const_expr(s.lines):
                    self.fill(tiles, scores, EighthLoads(tiles, maps_S, sS))
                else:
                    self.fill(tiles, scores, tile_loads(*maps_S[0], sS, s.rows, True))
            if warp == 1:
                self.fill(tiles, values, tile_loads(tma_V, mV, sV, s.depth, False))
        else:
            if const_expr(s.moves_registers):
                cute.arch.setmaxregister_increase(s.consumer_registers)
            self.consume(tiles, tiled_mma, sS, sV, scores, values, meeting, tidx - WARPGROUP)

    @cute.jit
    def fill(self, tiles: Tiles, ring: Ring, loads: TileLoads | EighthLoads):
        """What a warp does that fills the ring of scores, or that of values."""
        stage, phase = ring.begin()
        turn = Int32(0)
        work = tiles.work(turn)
        wait_for_stream(self.spec.early)
        while work.exists:
            for step in cutlass.range(work.steps * self.spec.shares, unroll=1):
                loads.load(work, step, stage, ring.acquire(stage, phase))
                stage, phase = ring.advance(stage, phase)
            turn += 1
            work = tiles.work(turn)

    @cute.jit
    def consume(
        self,
        tiles: Tiles,
        tiled_mma: cute.TiledMma,
        sS: cute.Tensor,
        sV: cute.Tensor,
        scores: Ring,
        values: Ring,
        meeting: Meeting,
        tidx: Int32,
    ):
        """What a warpgroup does that multiplies. tidx: among all that multiply."""
        s = self.spec
        group, thread, lane = tidx // WARPGROUP, tidx % WARPGROUP, tidx % 32
        group = cute.arch.make_warp_uniform(group)

        # Partition.
        row, piece = row_of_matrix(lane, thread // 32)
        thr_mma = tiled_mma.get_slice(thread)
        tOrV = tiled_mma.make_fragment_B(thr_mma.partition_B(sV))
        share = group if const_expr(s.alternate) else 0
        first = 0 if const_expr(s.alternate) else group * s.blocks * BLOCK_ROWS
        blocks = []
        for b in cutlass.range_constexpr(s.blocks):
            top = first + BLOCK_ROWS * b
            own, base = top + thread // 32 * WARP_ROWS + lane // QUAD, sS.iterator.toint()
            blocks.append(block_of(tiles, tiled_mma, base, top, own, (top + row, piece), lane))

        wait_for_stream(s.early)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        s_stage, s_phase = scores.begin(share)
        v_stage, v_phase = values.begin(share)
        turn = Int32(0)
        exists = tiles.work(turn).exists
        while exists:
            tiles = tiles  # written, so that the loop carries it: without that ptxas orders all of it anew
            work = tiles.work(turn)
            first = work.first + share
            if const_expr(s.lines):
                work = replace(work, shifts=eighths_shifts(tiles, work, blocks[0].row))
            for b in cutlass.range_constexpr(s.blocks):
                blocks[b].begin(work)

            # One product at a time is under way, and one block prepared meanwhile: accumulators are touched only
            # when none is, or ptxas would make every product wait for the one before.
            scores.wait(s_stage, s_phase)
            blocks[0].prepare_first(work, first, s_stage)
            if const_expr(s.blocks == 1):
                scores.release(s_stage, lane)
            blocks[0].take_over()
            if const_expr(s.blocks == 1):
                s_stage, s_phase = scores.advance(s_stage, s_phase, s.shares)
            for step in cutlass.range(1, work.steps, unroll=1):
                values.wait(v_stage, v_phase)
                tile = tOrV[(None, None, None, v_stage)]
                product = blocks[0].product(tiled_mma, tile)
                at = first + step * s.shares
                if const_expr(s.blocks == 2):
                    blocks[1].prepare(work, at - s.shares, s_stage, product)
                    s_stage, s_phase = scores.leave(s_stage, s_phase, lane, s.shares)
                    warpgroup.wait_group(0)
                    blocks[1].take_over()
                    product = blocks[1].product(tiled_mma, tile)
                scores.wait(s_stage, s_phase)
                blocks[0].prepare(work, at, s_stage, product)
                if const_expr(s.blocks == 1):
                    s_stage, s_phase = scores.leave(s_stage, s_phase, lane, s.shares)
                warpgroup.wait_group(0)
                blocks[0].take_over()
                v_stage, v_phase = values.leave(v_stage, v_phase, lane, s.shares)

            # The last products.
            values.wait(v_stage, v_phase)
            tile = tOrV[(None, None, None, v_stage)]
            product = blocks[0].product(tiled_mma, tile)
            if const_expr(s.blocks == 2):
                at = first + (work.steps - 1) * s.shares
                blocks[1].prepare(work, at, s_stage, product)
                s_stage, s_phase = scores.leave(s_stage, s_phase, lane, s.shares)
                warpgroup.wait_group(0)
                blocks[1].take_over()
                product = blocks[1].product(tiled_mma, tile)
            for k in cutlass.range_constexpr(STEP_PRODUCTS):
                product.multiply(k)
            warpgroup.wait_group(0)
            v_stage, v_phase = values.leave(v_stage, v_phase, lane, s.shares)
            work = tiles.work(here(turn))
            if const_expr(s.alternate):
                merge_shares(blocks[0], work, share, meeting)
            elif const_expr(s.paired):
                merge_halves(blocks, work, meeting.left)
            else:
                for b in cutlass.range_constexpr(s.blocks):
                    if const_expr(s.split):
                        hand_over(blocks[b], work)
                    else:
                        blocks[b].finish(work)
            turn += 1
            exists = tiles.work(turn).exists
