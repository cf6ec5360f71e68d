"""softmax(S) @ V on sm_90a: S is read once, exponentiated in registers and multiplied from there.

One warp loads tiles of S into shared memory, one tiles of V, each into a ring of stages of its own. A warpgroup
takes one or two blocks of 64 rows of S: it loads a block of a tile into the registers of a wgmma operand, turns
scores into exponentials in place, and multiplies them with V's tile while it prepares the next block.

    coordinates -> shared memory -> roles -> load -> maximum -> exponentials -> multiply -> finish -> store

The powers of a row refer to one number, not far below the largest score seen: maxima are looked for, and sums and
accumulators rescaled, only when a sum shows that it lies too low. See `softmax_rows` for these.

Names as in `row`; tAs and tOr: partitioned by the multiplication's A operand and its output.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from layouts.trace import observe

from ..common import tensor_cores
from ..common.copy import global_pointer
from ..common.tensor_cores import WARPGROUP, Ring
from .merge_cluster import Pairs
from .merge_global import Parts
from .softmax_rows import QUAD, STEP_PRODUCTS, TILE_N, Rows, multiply
from .tiles import Works
from .unaligned import Eighths


class MatmulKernel(Works, Rows, Eighths, Parts, Pairs):
    """The kernel of one Plan class; spec: see `cute_softmax.plan.MatmulClass`."""

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
        all_rows: Int32,
        batch_rows: Int32,
        scale: Float32,
        offset: Int32,
        *operands: Int64,
    ):
        """Launch.

        parts, part_steps: into how many parts the columns are cut, and the steps of each.
        all_rows, batch_rows: for `lines`, the rows of S that follow each other at its row stride, and those from one
            batch to the next among them (0 where batches have strides of their own).
        operands: (address in bytes, row stride, three batch strides in elements) of S and V; (address, row and column
            stride, three batch strides) of the mask and the bias, if there are any; the addresses of the output, of
            the log-sum-exps, if wanted, of the parts' results, if there are several, and of the given log-sum-exps.
            These are contiguous.
        """
        s = self.spec
        shape, sizes = (rows, columns, depth), (batch_0, batch_1, batch_2)
        sV_layout = tensor_cores.by_columns(self.dtypes[1], s.depth, TILE_N, s.value_stages)
        if const_expr(s.lines):
            sS_layout = self.eighths_layout(s.score_stages)
            maps_S = self.eighths_maps(operands[:5], (all_rows, columns), sizes)
        else:
            sS_layout = tensor_cores.by_rows(self.dtypes[0], s.rows, TILE_N, s.score_stages)
            mS = self.matrix(0, operands[:5], (rows, columns), sizes, transposed=False)
            maps_S = (tuple(tensor_cores.tensor_map(mS, sS_layout, (s.rows, TILE_N))),)
        mV = self.matrix(1, operands[5:10], (columns, depth), sizes, transposed=True)
        tma_V, tV = tensor_cores.tensor_map(mV, sV_layout, (s.depth, TILE_N))
        tiled_mma = tensor_cores.mma(
            self.dtypes[1], s.depth, a_in_registers=True, a_by_rows=True, b_by_rows=False
        )
        observe("sS", sS_layout)
        observe("sV", sV_layout)
        observe("mma", tiled_mma)
        extra = 10 + 6 * (s.mask + bool(s.bias))
        results = operands[extra:]
        self.kernel(
            maps_S,
            tma_V,
            tV,
            sS_layout,
            sV_layout,
            tiled_mma,
            shape,
            sizes,
            (parts, part_steps),
            (operands[0], operands[1], batch_rows),
            scale,
            offset,
            operands[10:extra],
            results,
        ).launch(
            grid=[ctas, 1, 1],
            block=[s.threads, 1, 1],
            cluster=[2, 1, 1] if const_expr(s.paired) else None,
            stream=stream,
            min_blocks_per_mp=1,
        )
        self.launch_merge(shape, sizes, parts, scale, results, stream)

    def matrix(self, i: int, operand: tuple, shape: tuple, sizes: tuple, transposed: bool) -> cute.Tensor:
        """A tensor in global memory as (rows, columns, batch modes), or (columns, rows, batch modes); modes that are
        broadcast have one element."""
        address, row, *batch = operand
        once = [stride == 0 for stride in batch]
        sizes = [Int32(cutlass.select_(o, Int32(1), n)) for o, n in zip(once, sizes, strict=True)]
        strides = [Int64(cutlass.select_(o, Int64(8), n)) for o, n in zip(once, batch, strict=True)]
        strides = [cute.assume(n, divby=8) for n in (row, *strides)]
        pointer = global_pointer(self.dtypes[i], address, Int64(0), 16)
        if transposed:
            layout = cute.make_layout((*shape[::-1], *sizes), stride=(1, *strides))
        else:
            layout = cute.make_layout((*shape, *sizes), stride=(strides[0], 1, *strides[1:]))
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(
        self,
        maps_S: tuple,
        tma_V: cute.CopyAtom,
        tV: cute.Tensor,
        sS_layout: cute.Layout | cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        shape: tuple,
        sizes: tuple,
        parts: tuple,
        lines: tuple,
        scale: Float32,
        offset: Int32,
        extras: tuple,
        results: tuple,
    ):
        s = self.spec

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # Shared memory.
        smem = cutlass.memory.SmemAllocator()
        if const_expr(s.lines):
            sS = smem.allocate_tensor(self.dtypes[0], sS_layout, byte_alignment=tensor_cores.BOX)
        else:
            sS = tensor_cores.shared(smem, self.dtypes[0], sS_layout)
        sV = tensor_cores.shared(smem, self.dtypes[1], sV_layout)
        warps = 4 if const_expr(s.alternate) else s.warpgroups * 4  # that read a stage
        scores = Ring(smem, s.score_stages, s.score_stage_bytes, warps)
        values = Ring(smem, s.value_stages, s.value_stage_bytes, warps)
        scores.initialise(tidx)
        values.initialise(tidx)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()

        this = self.call(
            shape,
            sizes,
            parts,
            scale,
            offset,
            extras,
            results,
            lines=lines,
            scores=scores,
            values=values,
            sS=sS,
            sV=sV,
        )

        # Roles.
        if warp < 4:
            if const_expr(s.moves_registers):
                cute.arch.setmaxregister_decrease(s.producer_registers)
            if warp == 0:
                if const_expr(s.lines):
                    self.load_eighths(this, maps_S, sS)
                else:
                    self.load(this, *maps_S[0], sS, scores, s.rows, True)
            if warp == 1:
                self.load(this, tma_V, tV, sV, values, s.depth, False)
        else:
            if const_expr(s.moves_registers):
                cute.arch.setmaxregister_increase(s.consumer_registers)
            self.consume(this, tiled_mma, tidx - WARPGROUP)

    def place(self, tensor: cute.Tensor, work: SimpleNamespace) -> tuple:
        """The batch coordinates of a work in a TMA tensor, 0 where it is broadcast."""
        return tuple(cutlass.min(b, n - 1) for b, n in zip(work.modes, tensor.shape[2:], strict=True))

    @cute.jit
    def load(
        self,
        this,
        tma: cute.CopyAtom,
        tX: cute.Tensor,
        sX: cute.Tensor,
        ring: Ring,
        rows: cutlass.Constexpr[int],
        scores: cutlass.Constexpr[bool],
    ):
        """A warp that fills the ring of scores, or that of values. tX, sX: in global and in shared memory; rows: of a
        tile, or columns of V."""
        gX = cute.flat_divide(tX, (rows, TILE_N))
        tXsX, tXgX = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        stage, phase = ring.begin()
        turn = Int32(0)
        exists = self.work(this, turn).exists
        while exists:
            work = self.work(this, turn)
            place = self.place(tX, work)
            tile = work.row_tile if const_expr(scores) else work.depth_tile
            for step in cutlass.range(work.steps * self.spec.shares, unroll=1):
                barrier = ring.acquire(stage, phase)
                at = tXgX[(None, tile, work.first + step, *place)]
                cute.copy(tma, at, tXsX[(None, stage)], tma_bar_ptr=barrier)
                stage, phase = ring.advance(stage, phase)
            turn += 1
            exists = self.work(this, turn).exists

    @cute.jit
    def consume(self, this, tiled_mma: cute.TiledMma, tidx: Int32):
        """A warpgroup that multiplies; tidx: among all that do."""
        s = self.spec
        group, thread, lane = tidx // WARPGROUP, tidx % WARPGROUP, tidx % 32
        group = cute.arch.make_warp_uniform(group)

        # Partition.
        row, piece = tensor_cores.row_of_matrix(lane, thread // 32)
        thr_mma = tiled_mma.get_slice(thread)
        tOrV = tiled_mma.make_fragment_B(thr_mma.partition_B(this.sV))
        share = group if const_expr(s.alternate) else 0
        first = 0 if const_expr(s.alternate) else group * s.blocks * 64
        blocks = []
        for b in cutlass.range_constexpr(s.blocks):
            operand = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((64, TILE_N)))
            # With one block its product is under way while its operand is prepared anew.
            prepared = cute.make_rmem_tensor_like(operand) if const_expr(s.blocks == 1) else operand
            blocks.append(
                SimpleNamespace(
                    begins=b == 0,
                    ends=b == s.blocks - 1,
                    first=first + 64 * b,  # the first of its rows in the CTA's tile
                    # This thread's first row (the other lies 8 below).
                    row=first + 64 * b + thread // 32 * 16 + lane // QUAD,
                    base=this.sS.iterator.toint(),
                    sS=this.sS.iterator.toint() + (first + 64 * b + row) * tensor_cores.BOX + piece * 16,
                    rO=tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((64, s.depth))),
                    rA=operand,
                    rP=prepared,
                    rRef=cute.make_rmem_tensor(2, Float32),
                    rSlope=cute.make_rmem_tensor(2, Float32),
                    rShift=cute.make_rmem_tensor(2, Float32),
                    rTotal=cute.make_rmem_tensor(2, Float32),
                    rSum=cute.make_rmem_tensor(2, Float32),
                    rFall=cute.make_rmem_tensor(3, Float32),
                )
            )

        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        s_stage, s_phase = this.scores.begin(share)
        v_stage, v_phase = this.values.begin(share)
        turn = Int32(0)
        exists = self.work(this, turn).exists
        while exists:
            work = self.work(this, turn)
            first = work.first + share
            if const_expr(s.lines):
                work.shifts = self.eighths_shifts(this, blocks[0], work)
            for b in cutlass.range_constexpr(s.blocks):
                self.begin(this, blocks[b], work)
            # One product at a time is under way, and one block prepared meanwhile: accumulators are touched only
            # when none is, or ptxas would make every product wait for the one before.
            self.prepare(this, blocks[0], work, first, s_stage, s_phase, lane, None)
            self.take_over(blocks[0])
            if const_expr(s.blocks == 1):
                s_stage, s_phase = this.scores.advance(s_stage, s_phase, s.shares)
            for step in cutlass.range(1, work.steps, unroll=1):
                this.values.wait(v_stage, v_phase)
                product = tiled_mma, blocks[0], tOrV[(None, None, None, v_stage)]
                at = first + step * s.shares
                if const_expr(s.blocks == 2):
                    self.prepare(this, blocks[1], work, at - s.shares, s_stage, s_phase, lane, product)
                    s_stage, s_phase = this.scores.advance(s_stage, s_phase, s.shares)
                    warpgroup.wait_group(0)
                    self.take_over(blocks[1])
                    product = tiled_mma, blocks[1], tOrV[(None, None, None, v_stage)]
                self.prepare(this, blocks[0], work, at, s_stage, s_phase, lane, product)
                if const_expr(s.blocks == 1):
                    s_stage, s_phase = this.scores.advance(s_stage, s_phase, s.shares)
                warpgroup.wait_group(0)
                self.take_over(blocks[0])
                this.values.release(v_stage, lane)
                v_stage, v_phase = this.values.advance(v_stage, v_phase, s.shares)
            this.values.wait(v_stage, v_phase)
            product = tiled_mma, blocks[0], tOrV[(None, None, None, v_stage)]
            if const_expr(s.blocks == 2):
                at = first + (work.steps - 1) * s.shares
                self.prepare(this, blocks[1], work, at, s_stage, s_phase, lane, product)
                s_stage, s_phase = this.scores.advance(s_stage, s_phase, s.shares)
                warpgroup.wait_group(0)
                self.take_over(blocks[1])
                product = tiled_mma, blocks[1], tOrV[(None, None, None, v_stage)]
            for k in cutlass.range_constexpr(STEP_PRODUCTS):
                multiply(product, k)
            warpgroup.wait_group(0)
            this.values.release(v_stage, lane)
            v_stage, v_phase = this.values.advance(v_stage, v_phase, s.shares)
            if const_expr(s.paired):
                self.merge_halves(this, blocks, work, lane)
            else:
                for b in cutlass.range_constexpr(s.blocks):
                    if const_expr(s.split):
                        self.hand_over(this, blocks[b], work, share, lane)
                    else:
                        self.finish(this, blocks[b], work, lane)
            turn += 1
            exists = self.work(this, turn).exists
