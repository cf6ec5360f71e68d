"""The backward of softmax(S) @ V on Hopper's tensor cores, with S read once and dS written once.

    P = exp(S - lse)      dV = P^T dO      dS = P * (dO V^T - delta)      delta = rowsum(dO * O)

A CTA owns a block of columns of S, which are rows of V, and walks down the rows of S. Everything is transposed, so
that it stays in registers: dP^T = V dO^T leaves the tensor cores just as P^T must enter them for dV += P^T dO, V
itself waits in registers as an operand, and `ldmatrix` transposes S on its way there. dS takes the place of S in
shared memory. A producer warp keeps a ring of steps full; each consumer warpgroup owns a slab of 64 columns.

Rows of S that TMA cannot read as tiles (off 16-byte boundaries, or of float32) come line by line: see
`backward_unaligned`.

Names: mX a tensor in global memory, gX a tile of it, sX shared memory, rX registers; tXsX = sX partitioned by X's copy.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from layouts.trace import observe

from ...plan.matmul_backward import MatmulBackwardClass
from ...plan.matmul_class import SLAB, WARPGROUP
from ..common.copy import DTYPES, global_pointer, in_shared
from ..common.early import begins_early, wait_for_stream
from ..common.index import select
from ..common.tensor_cores import by_columns, by_rows, ldmatrix, mma, partition, ring_of, row_of_transposed
from .backward_exponentials import exponentials, hide
from .backward_unaligned import clear_lines, leave, load_from_lines, load_lines, write_lines
from .backward_values import load_values, share_values, store_values, sync_slab
from .backward_walk import Call, Memory, Thread, Walk, each, part_of, walk_of

REGISTERS = {
    1: (24, 240),
    2: (24, 240),
    3: (24, 160),
}  # of producer and consumers, by the number of consumers


@dataclass(frozen=True)
class Maps:
    """(TMA atom, tensor of coordinates) of dO, of S and dS, if they are read as tiles, and of the numbers of rows."""

    dO: tuple
    S: tuple
    dS: tuple
    L: tuple


class MatmulBackwardKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.MatmulBackwardClass`."""

    def __init__(self, spec: MatmulBackwardClass):
        self.spec = spec
        self.dtype = DTYPES[spec.dtypes[0]]  # of S and dS
        self.half = DTYPES[spec.dtypes[1]]  # of the tensor cores' operands

    @cute.jit
    def __call__(
        self,
        stream,
        M: Int32,
        N: Int32,
        D: Int32,
        heads: Int32,
        inner: Int32,
        outer: Int32,
        splits: Int32,
        ctas: Int32,
        offset: Int32,
        scale: Float32,
        factor: Float32,
        *operands: Int64,
    ):
        """Launch.

        heads: those that share a V; inner, outer: sizes of the batch modes of different V; splits: parts of the walk
            over rows and heads.
        offset: of the diagonal: column j of row i counts if j <= i + offset. scale: of scores before the softmax;
        factor: of dS after all; delta's numbers have it already.
        operands: address in bytes and strides in elements of S (row, head, inner, outer), dO (the same), V (row,
            inner, outer); the address of delta's numbers; dS (as S), dV (row, split, inner, outer), and, if the class
            has them, mask and bias (row, column, head, inner, outer).
        """
        s = self.spec
        S, dO, V, stats, dS, dV = (
            operands[0:5],
            operands[5:10],
            operands[10:14],
            operands[14],
            operands[15:20],
            operands[20:25],
        )
        mask, bias = operands[25:31] if s.mask else (), operands[-6:] if s.bias else ()
        call = Call(M, N, D, heads, inner, outer, splits, offset, scale, factor, V, dV, S, dS, mask, bias)
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        modes = (M, heads, inner, outer)
        tile = by_rows(self.half, s.rows, s.depth, s.stages)
        map_dO = cpasync.make_tiled_tma_atom(load, matrix(self.half, dO, modes, D), tile, (s.rows, s.depth))
        map_S = map_dS = ()
        if const_expr(not s.lines):
            tile, slab = (
                by_rows(self.dtype, s.rows, s.columns, s.stages),
                by_rows(self.dtype, s.rows, SLAB, 1),
            )
            mS, mdS = (matrix(self.dtype, operand, modes, N) for operand in (S, dS))
            map_S = tuple(cpasync.make_tiled_tma_atom(load, mS, tile, (s.rows, s.columns)))
            map_dS = tuple(cpasync.make_tiled_tma_atom(save, mdS, slab, (s.rows, SLAB)))
        # Copied by a tensor map, too: racecheck does not follow other bulk copies through a ring.
        blocks = (M + s.rows - 1) // s.rows * heads * inner * outer
        layout = cute.make_layout((2 * s.rows, blocks), stride=(1, 2 * s.rows))
        mL = cute.make_tensor(global_pointer(Float32, stats, Int64(0), 128), layout)
        map_L = cpasync.make_tiled_tma_atom(load, mL, cute.make_layout((2 * s.rows, 1)), (2 * s.rows, 1))
        grid = [ctas, 1, 1]
        self.kernel(Maps(tuple(map_dO), map_S, map_dS, tuple(map_L)), call).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=begins_early(s, grid),
        )

    @cute.kernel
    def kernel(self, maps: Maps, call: Call):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tidx // 32)

        # Shared memory: the ring's tiles of S and dO and its numbers of rows, its barriers, and a slab of zeros.
        smem = cutlass.memory.SmemAllocator()
        rawS = smem.allocate_array(self.dtype, s.stages * s.score_elements, byte_alignment=1024)
        rawO = smem.allocate_array(self.half, s.stages * s.rows * s.depth, byte_alignment=1024)
        rawZ = rawS
        if const_expr(s.zeros > 0):
            rawZ = smem.allocate_array(self.dtype, s.zeros, byte_alignment=1024)
        rawV = rawO
        if const_expr(s.deep):
            rawV = smem.allocate_array(self.half, s.columns * s.depth, byte_alignment=1024)
        sL = smem.allocate_tensor(Float32, cute.make_layout((s.rows, 2, s.stages)), byte_alignment=128)
        ring = ring_of(smem, s.stages, s.step_bytes, s.releases, s.fillers)
        ring.initialise(tidx)
        cute.arch.mbarrier_init_fence()
        if const_expr(s.zeros > 0):
            words = cute.make_tensor(cute.recast_ptr(rawZ, dtype=Int32), cute.make_layout(s.zeros // 2))
            for i in cutlass.range(tidx, s.zeros // 2, s.threads):
                words[i] = 0
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        wait_for_stream(s.early)

        sO_layout = by_rows(self.half, s.rows, s.depth, s.stages)
        sOt_layout = by_columns(self.half, s.depth, s.rows, s.stages)
        sS_layout = by_rows(self.dtype, s.rows, s.columns, s.stages)
        observe("sO", sO_layout)
        observe("sOt", sOt_layout)
        if const_expr(not s.lines):
            observe("sS", sS_layout)
        walk = walk_of(s, call, cta, ctas)
        sS = None if const_expr(s.lines) else swizzled(rawS, sS_layout)
        memory = Memory(rawS, rawZ, rawV, swizzled(rawO, sO_layout), swizzled(rawO, sOt_layout), sS, sL, ring)
        if group == s.consumers:
            cute.arch.setmaxregister_decrease(REGISTERS[s.consumers][0])
            worker = warp_idx - s.consumers * 4
            if worker < s.producers:
                self.produce(walk, maps, memory, tidx % 32, worker)
            elif const_expr(s.causal):
                self.clear(walk, maps, memory, tidx % 32, worker - s.producers)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[s.consumers][1])
            self.consume(walk, maps, memory, tidx % WARPGROUP, group // s.shares, group % s.shares)

    @cute.jit
    def produce(self, walk: Walk, maps: Maps, memory: Memory, lane: Int32, worker: Int32):
        """One warp loads step after step to the ring, of lines each of several its share."""
        s, call, ring = self.spec, walk.call, memory.ring
        # (row of the tile, column, row block, column block, batch modes)
        tma_O, mO = maps.dO
        tOsO, tOgO = partition(tma_O, memory.sO, cute.flat_divide(mO, (s.rows, s.depth)))
        tma_S = tSsS = tSgS = None
        if const_expr(not s.lines):
            tma_S, mS = maps.S
            tSsS, tSgS = partition(tma_S, memory.sS, cute.flat_divide(mS, (s.rows, s.columns)))
        tma_L, mL = maps.L
        sL = cute.make_tensor(memory.sL.iterator, cute.make_layout((2 * s.rows, 1, s.stages)))
        tLsL, tLgL = partition(tma_L, sL, cute.flat_divide(mL, (2 * s.rows, 1)))
        stage, phase = Int32(0), Int32(1)
        tile = walk.cta
        while tile < walk.tiles:
            work = walk.work(tile)
            head, m = work.head, work.m
            for _ in cutlass.range(work.first, work.end, unroll=1):
                step = work.step(head, m)
                bar = ring.full + stage
                ring.wait_empty(stage, phase)
                if const_expr(s.lines):
                    load_lines(walk, memory, step, bar, stage, lane, worker)
                else:
                    ring.announce(stage)
                    cute.copy(tma_S, tSgS[(None, m, step.n, *step.modes)], tSsS[None, stage], tma_bar_ptr=bar)
                if worker == 0:
                    cute.copy(tma_O, tOgO[(None, m, 0, *step.modes)], tOsO[None, stage], tma_bar_ptr=bar)
                    inner, outer = step.batch
                    index = (outer * call.inner + inner) * call.heads + head
                    block = index * walk.row_blocks + m
                    cute.copy(tma_L, tLgL[(None, 0, block)], tLsL[None, stage], tma_bar_ptr=bar)
                stage, phase = advance(stage, phase, s.stages)
                head, m = walk.next(head, m, work.top)
            tile += walk.ctas

    @cute.jit
    def consume(self, walk: Walk, maps: Maps, memory: Memory, tidx: Int32, slab: Int32, share: Int32):
        """A warpgroup computes dS of its slab of columns step by step, and its share of these rows of dV."""
        s, call = self.spec, walk.call
        lane, warp_idx = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)

        # dP^T (64 columns of S, rows) = V (columns, depth) @ dO^T; dV (columns, depth) = P^T (columns, rows) @ dO.
        mma_P = mma(self.half, s.rows, a_in_registers=not s.deep, a_by_rows=True, b_by_rows=True)
        mma_V = mma(self.half, s.share_depth, a_in_registers=True, a_by_rows=True, b_by_rows=False)
        observe("mma_P", mma_P)
        observe("mma_V", mma_V)
        thr_P, thr_V = mma_P.get_slice(tidx), mma_V.get_slice(tidx)
        rP = thr_P.make_fragment_C(thr_P.partition_shape_C((SLAB, s.rows)))
        rdV = thr_V.make_fragment_C(thr_V.partition_shape_C((SLAB, s.share_depth)))
        rE = thr_V.make_fragment_A(thr_V.partition_shape_A((SLAB, s.rows)))
        if const_expr(s.deep):
            sV_layout = by_rows(self.half, SLAB, s.depth, s.slabs)
            observe("sV", sV_layout)
            sV = swizzled(memory.V, sV_layout)
            rV = thr_P.make_fragment_A(thr_P.partition_A(sV))[None, None, None, slab]
        else:
            rV = thr_P.make_fragment_A(thr_P.partition_shape_A((SLAB, s.depth)))
        tPrO = thr_P.make_fragment_B(thr_P.partition_B(memory.sO))
        sOt = cute.local_tile(memory.sOt, (s.share_depth, s.rows, s.stages), (share, 0, 0))
        tVrO = thr_V.make_fragment_B(thr_V.partition_B(sOt))
        tSsS = tSgS = None
        if const_expr(not s.lines):
            tma, mdS = maps.dS
            sdS = cute.flat_divide(memory.sS, (s.rows, SLAB))  # (row, column, 0, slab, stage)
            tSsS, tSgS = partition(tma, sdS, cute.flat_divide(mdS, (s.rows, SLAB)))

        # Where this lane's row of the four 8 x 8 matrices of an ldmatrix or stmatrix lies: rows 0-7 and 8-15 of S,
        # each with columns 0-7 and 8-15 of the warp's 16.
        row, piece = row_of_transposed(lane, warp_idx)
        mine = slab * (s.rows * SLAB) + row * SLAB + piece * 8
        in_tile, pair = slab * SLAB + warp_idx * 16 + lane // 4, lane % 4 * 2
        thread = Thread(tidx, warp_idx, slab, share, in_tile, pair)

        stage, phase, before = Int32(0), Int32(0), Int32(-1)
        tile = walk.cta
        while tile < walk.tiles:
            work = walk.work(tile)
            head, m = work.head, work.m
            column = work.n * s.columns + thread.in_tile
            if const_expr(s.deep):
                share_values(walk, work, thread, memory, column)
            else:
                load_values(walk, work, rV, column, thread.pair)
            rdV.fill(0.0)
            for _ in cutlass.range(work.first, work.end, unroll=1):
                step = work.step(head, m)
                memory.ring.wait(stage, phase)
                if const_expr(s.shares == 1):
                    warpgroup.fence()
                    multiply(mma_P, rP, rV, tPrO[None, None, None, stage], anew=True)
                    warpgroup.commit_group()
                else:
                    # dS is the first one's; groups are counted by all.
                    if share == 0:
                        warpgroup.fence()
                        multiply(mma_P, rP, rV, tPrO[None, None, None, stage], anew=True)
                        warpgroup.commit_group()
                    else:
                        warpgroup.commit_group()

                # P^T, while the tensor cores are at dP^T and still at the last dV.
                rS = cute.make_rmem_tensor(s.rows // 2, self.dtype)
                tileS = memory.S + stage * s.score_elements
                if const_expr(s.lines):
                    load_from_lines(walk, step, tileS, rS, thread.in_tile, thread.pair)
                else:
                    self.load_scores(tileS, mine, rS)
                exps = cute.make_rmem_tensor(s.rows // 2, Float32)
                counts = exponentials(walk, thread, step, column, memory.sL, stage, rS, exps)
                warpgroup.wait_group(1)  # the last dV: its operands may be overwritten
                if const_expr(s.lines and not s.sent):
                    leave(memory, before)
                rE.store(exps.load().to(self.half).reshape(rE.shape))
                warpgroup.fence()
                multiply(mma_V, rdV, rE, tVrO[None, None, None, stage], anew=False)
                warpgroup.commit_group()

                # dS^T, while the tensor cores are at dV.
                warpgroup.wait_group(1)
                for i, j, k, _ in each(s.rows):
                    delta = memory.sL[j * 8 + thread.pair + k, 1, stage]
                    # 128 accumulators and more leave no room for the unrounded P.
                    exponential = rE[i].to(Float32) if const_expr(s.deep) else exps[i]
                    exps[i] = exponential * cute.math.fma(rP[i], call.factor, -delta)
                if const_expr(s.hides):
                    hide(exps, counts)
                rS.store(exps.load().to(self.dtype))
                if const_expr(s.lines):
                    write_lines(walk, thread, memory, step, tileS, rS, column, before)
                else:
                    source = tSsS[None, 0, slab, stage]
                    target = tSgS[(None, m, step.n * s.slabs + slab, *step.modes)]
                    self.write_tile(thread, memory, tileS, mine, rS, before, tma, source, target)
                before = stage
                stage, phase = advance(stage, phase, s.stages)
                head, m = walk.next(head, m, work.top)
            warpgroup.wait_group(0)
            store_values(walk, work, rdV, column, thread.pair + share * s.share_depth)
            tile += walk.ctas
        if const_expr(s.sent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def write_tile(
        self,
        thread: Thread,
        memory: Memory,
        tile: cute.Pointer,
        mine: Int32,
        rS: cute.Tensor,
        before: Int32,
        tma: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
    ):
        """dS to the place of S, and from there to global memory by TMA. before: the stage of the step before, or -1."""
        if const_expr(self.spec.shares > 1):
            sync_slab(self.spec, thread.slab)  # the other warpgroups of the slab have read S, too
        if thread.share == 0:
            self.store_scores(tile, mine, rS)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + thread.slab, number_of_threads=WARPGROUP)
            if thread.warp == 0:
                cute.copy(tma, source, target)
                cute.arch.cp_async_bulk_commit_group()
                # dS of the step before must have left.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
        # All warps have passed a barrier, and so have left the step before.
        if (thread.warp == 0) & (before >= 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(memory.ring.empty + before)

    def load_scores(self, tile, mine: Int32, rS):
        """The slab's S^T, in the order of the accumulators of dP^T."""
        words = cute.recast_tensor(rS, Uint32)
        for j in range(self.spec.rows // 16):
            matrices = ldmatrix((tile + mine + j * (16 * SLAB)).toint(), transposed=True)
            for i in range(4):
                words[4 * j + i] = matrices[i]

    def store_scores(self, tile, mine: Int32, rS):
        """dS^T to where S^T came from."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        for j in range(self.spec.rows // 16):
            target = in_shared(self.dtype, (tile + mine + j * (16 * SLAB)).toint(), 8)
            cute.copy(atom, eight(rS.iterator + 8 * j), eight(target.iterator))

    @cute.jit
    def clear(self, walk: Walk, maps: Maps, memory: Memory, lane: Int32, worker: Int32):
        """Zeros into dS where the diagonal cuts off whole tiles, by the warps that do not fill the ring."""
        s = self.spec
        tma = tSsS = tSgS = None
        if const_expr(not s.lines):
            tma, mdS = maps.dS
            sZ = swizzled(memory.Z, by_rows(self.dtype, s.rows, SLAB, 1))
            tSsS, tSgS = partition(tma, sZ, cute.flat_divide(mdS, (s.rows, SLAB)))
        tile = walk.cta
        while tile < walk.tiles:
            work = walk.work(tile)
            first, end = part_of(work.top * walk.call.heads, work.split, walk.call.splits)
            for block in cutlass.range(first + worker, end, 4 - s.producers, unroll=1):
                step = work.step(block // work.top, block % work.top)
                if const_expr(s.lines):
                    clear_lines(walk, step, lane)
                else:
                    for slab in cutlass.range_constexpr(s.slabs):
                        place = (None, step.m, step.n * s.slabs + slab, *step.modes)
                        cute.copy(tma, tSsS[None, 0], tSgS[place])
                    cute.arch.cp_async_bulk_commit_group()
                    # Not all at once: the same unit loads S and dO.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
            tile += walk.ctas
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def swizzled(raw: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """The tensor of a swizzled layout in raw shared memory."""
    return cute.make_tensor(cute.recast_ptr(raw, layout.inner, raw.dtype), layout.outer)


def matrix(dtype: type, operand: tuple, modes: tuple, columns: Int32) -> cute.Tensor:
    """(row, column, batch modes) of a tensor in global memory."""
    address, row, *batch = operand
    layout = cute.make_layout((modes[0], columns, *modes[1:]), stride=(row, 1, *batch))
    return cute.make_tensor(global_pointer(dtype, address, Int64(0), 16), layout)


def multiply(tiled_mma: cute.TiledMma, rC, rA, rB, anew: bool):
    """C += A @ B, or C = A @ B: wgmma of this warpgroup, 16 terms at a time."""
    for k in range(cute.size(rA, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, not (anew and k == 0))
        cute.gemm(tiled_mma, rC, rA[None, None, k], rB[None, None, k], rC)


def eight(first: cute.Pointer) -> cute.Tensor:
    """Eight elements side by side, of rank 2 as copies want it."""
    return cute.make_tensor(first, cute.make_layout((8, 1)))


def advance(stage: Int32, phase: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next stage, and the parity of its barrier: `Ring.advance` for stages that are taken one by one."""
    last = stage == stages - 1
    return (
        select(last, Int32(0), stage + 1),
        select(last, phase ^ 1, phase),
    )
