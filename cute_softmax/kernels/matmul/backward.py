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

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from layouts.trace import observe

from ..common.copy import DTYPES, global_pointer
from ..common.tensor_cores import WARPGROUP, by_columns, by_rows, mma, row_of_transposed
from .backward_exponentials import Exponentials, hide
from .backward_unaligned import ScoreLines
from .backward_values import SLAB, ValueRows, swizzled

REGISTERS = {
    1: (24, 240),
    2: (24, 240),
    3: (24, 160),
}  # of producer and consumers, by the number of consumers


class MatmulBackwardKernel(Exponentials, ScoreLines, ValueRows):
    """The kernel of one Plan class, see `cute_softmax.plan.MatmulBackwardClass`."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtypes[0]]  # of S and dS
        self.half = DTYPES[spec.dtypes[1]]  # of the tensor cores' operands
        self.dv_dtype = DTYPES[spec.dtypes[2]]

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
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
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        modes = (M, heads, inner, outer)
        atom_dO, mdO = cpasync.make_tiled_tma_atom(
            load,
            matrix(self.half, dO, modes, D),
            by_rows(self.half, s.rows, s.depth, s.stages),
            (s.rows, s.depth),
        )
        tma = [atom_dO, mdO]
        if const_expr(not s.lines):
            tile, slab = (
                by_rows(self.dtype, s.rows, s.columns, s.stages),
                by_rows(self.dtype, s.rows, SLAB, 1),
            )
            tma += cpasync.make_tiled_tma_atom(
                load, matrix(self.dtype, S, modes, N), tile, (s.rows, s.columns)
            )
            tma += cpasync.make_tiled_tma_atom(save, matrix(self.dtype, dS, modes, N), slab, (s.rows, SLAB))
        # Copied by a tensor map, too: racecheck does not follow other bulk copies through a ring.
        blocks = (M + s.rows - 1) // s.rows * heads * inner * outer
        layout = cute.make_layout((2 * s.rows, blocks), stride=(1, 2 * s.rows))
        mL = cute.make_tensor(global_pointer(Float32, stats, Int64(0), 128), layout)
        tma += cpasync.make_tiled_tma_atom(load, mL, cute.make_layout((2 * s.rows, 1)), (2 * s.rows, 1))
        self.kernel(
            tma,
            (M, N, D, heads, inner, outer, splits, offset),
            scale,
            factor,
            (*V, *dV, *S, *dS, *operands[25:]),
        ).launch(grid=[ctas, 1, 1], block=[s.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        tma: list,
        sizes: tuple,
        scale: Float32,
        factor: Float32,
        operands: tuple,
    ):
        s = self.spec
        M, N, D, heads, inner, outer, splits, offset = sizes
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
        full = smem.allocate_array(Int64, num_elems=s.stages)
        empty = smem.allocate_array(Int64, num_elems=s.stages)
        if tidx == 0:
            for i in cutlass.range_constexpr(s.stages):
                cute.arch.mbarrier_init(full + i, s.fillers)
                cute.arch.mbarrier_init(empty + i, s.releases)
        cute.arch.mbarrier_init_fence()
        if const_expr(s.zeros > 0):
            words = cute.make_tensor(cute.recast_ptr(rawZ, dtype=Int32), cute.make_layout(s.zeros // 2))
            for i in cutlass.range(tidx, s.zeros // 2, s.threads):
                words[i] = 0
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()

        sO_layout = by_rows(self.half, s.rows, s.depth, s.stages)
        sOt_layout = by_columns(self.half, s.depth, s.rows, s.stages)
        sS_layout = by_rows(self.dtype, s.rows, s.columns, s.stages)
        observe("sO", sO_layout)
        observe("sOt", sOt_layout)
        if const_expr(not s.lines):
            observe("sS", sS_layout)

        row_blocks = (M + s.rows - 1) // s.rows
        column_blocks = (N + s.columns - 1) // s.columns
        this = SimpleNamespace(
            M=M,
            N=N,
            D=D,
            heads=heads,
            inner=inner,
            splits=splits,
            offset=offset,
            cta=cta,
            ctas=ctas,
            row_blocks=row_blocks,
            column_blocks=column_blocks,
            tiles=column_blocks * inner * outer * splits,
            scale=scale,
            factor=factor,
            V=operands[0:4],
            dV=operands[4:9],
            S=operands[9:14],
            dS=operands[14:19],
            mask=operands[19:25] if s.mask else None,
            bias=operands[-6:] if s.bias else None,
            rawS=rawS,
            rawZ=rawZ,
            rawV=rawV,
            sO=swizzled(rawO, sO_layout),
            sOt=swizzled(rawO, sOt_layout),
            sS=None if s.lines else swizzled(rawS, sS_layout),
            sL=sL,
            full=full,
            empty=empty,
        )
        if group == s.consumers:
            cute.arch.setmaxregister_decrease(REGISTERS[s.consumers][0])
            worker = warp_idx - s.consumers * 4
            if worker < s.producers:
                self.produce(this, tma, tidx % 32, worker)
            elif const_expr(s.causal):
                self.clear(this, tma, tidx % 32, worker - s.producers)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[s.consumers][1])
            self.consume(this, tma, tidx % WARPGROUP, group // s.shares, group % s.shares)

    def place(self, this, tile: Int32) -> SimpleNamespace:
        """Where a tile lies and what it walks over: blocks of rows from `top` on, of one head after another."""
        s = self.spec
        n, rest = tile % this.column_blocks, tile // this.column_blocks
        split, batch = rest % this.splits, rest // this.splits
        top = Int32(0)
        if const_expr(s.causal):
            # Blocks of rows in which no column of this tile counts.
            top = cutlass.min(cutlass.max(n * s.columns - this.offset, 0) // s.rows, this.row_blocks)
        height = this.row_blocks - top
        first, end = part_of(height * this.heads, split, this.splits)
        height = cutlass.max(height, 1)
        return SimpleNamespace(
            n=n,
            batch=(batch % this.inner, batch // this.inner),
            split=split,
            top=top,
            first=first,
            end=end,
            head=first // height,
            m=top + first % height,
        )

    @cute.jit
    def produce(self, this, tma: list, lane: Int32, worker: Int32):
        """One warp loads step after step to the ring, of lines each of several its share."""
        s = self.spec
        one = cute.make_layout(1)
        # (row of the tile, column, row block, column block, batch modes)
        gO = cute.flat_divide(tma[1], (s.rows, s.depth))
        tOsO, tOgO = cpasync.tma_partition(
            tma[0], 0, one, cute.group_modes(this.sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        tSsS = tSgS = None
        if const_expr(not s.lines):
            gS = cute.flat_divide(tma[3], (s.rows, s.columns))
            tSsS, tSgS = cpasync.tma_partition(
                tma[2], 0, one, cute.group_modes(this.sS, 0, 2), cute.group_modes(gS, 0, 2)
            )
        gL = cute.flat_divide(tma[-1], (2 * s.rows, 1))
        sL = cute.make_tensor(this.sL.iterator, cute.make_layout((2 * s.rows, 1, s.stages)))
        tLsL, tLgL = cpasync.tma_partition(
            tma[-2], 0, one, cute.group_modes(sL, 0, 2), cute.group_modes(gL, 0, 2)
        )
        stage, phase = Int32(0), Int32(1)
        tile = this.cta
        while tile < this.tiles:
            at = self.place(this, tile)
            n, batch, head, m = at.n, at.batch, at.head, at.m
            for _ in cutlass.range(at.first, at.end, unroll=1):
                bar = this.full + stage
                cute.arch.mbarrier_wait(this.empty + stage, phase)
                if const_expr(s.lines):
                    self.load_lines(this, bar, stage, m, n, head, batch, lane, worker)
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, s.step_bytes)
                    cute.copy(tma[2], tSgS[(None, m, n, head, *batch)], tSsS[None, stage], tma_bar_ptr=bar)
                if worker == 0:
                    cute.copy(tma[0], tOgO[(None, m, 0, head, *batch)], tOsO[None, stage], tma_bar_ptr=bar)
                    index = (batch[1] * this.inner + batch[0]) * this.heads + head
                    block = index * this.row_blocks + m
                    cute.copy(tma[-2], tLgL[(None, 0, block)], tLsL[None, stage], tma_bar_ptr=bar)
                stage, phase = advance(stage, phase, s.stages)
                head, m = next_step(head, m, at.top, this.row_blocks)
            tile += this.ctas

    @cute.jit
    def consume(self, this, tma: list, tid: Int32, slab: Int32, share: Int32):
        """A warpgroup computes dS of its slab of columns step by step, and its share of these rows of dV."""
        s = self.spec
        lane, warp_idx = tid % 32, cute.arch.make_warp_uniform(tid // 32)

        # dP^T (64 columns of S, rows) = V (columns, depth) @ dO^T; dV (columns, depth) = P^T (columns, rows) @ dO.
        mma_P = mma(self.half, s.rows, a_in_registers=not s.deep, a_by_rows=True, b_by_rows=True)
        mma_V = mma(self.half, s.share_depth, a_in_registers=True, a_by_rows=True, b_by_rows=False)
        observe("mma_P", mma_P)
        observe("mma_V", mma_V)
        thr_P, thr_V = mma_P.get_slice(tid), mma_V.get_slice(tid)
        rP = thr_P.make_fragment_C(thr_P.partition_shape_C((SLAB, s.rows)))
        rdV = thr_V.make_fragment_C(thr_V.partition_shape_C((SLAB, s.share_depth)))
        rE = thr_V.make_fragment_A(thr_V.partition_shape_A((SLAB, s.rows)))
        if const_expr(s.deep):
            sV_layout = by_rows(self.half, SLAB, s.depth, s.slabs)
            observe("sV", sV_layout)
            sV = swizzled(this.rawV, sV_layout)
            rV = thr_P.make_fragment_A(thr_P.partition_A(sV))[None, None, None, slab]
        else:
            rV = thr_P.make_fragment_A(thr_P.partition_shape_A((SLAB, s.depth)))
        tPrO = thr_P.make_fragment_B(thr_P.partition_B(this.sO))
        sOt = cute.local_tile(this.sOt, (s.share_depth, s.rows, s.stages), (share, 0, 0))
        tVrO = thr_V.make_fragment_B(thr_V.partition_B(sOt))
        tSsS = tSgS = None
        if const_expr(not s.lines):
            gdS = cute.group_modes(cute.flat_divide(tma[5], (s.rows, SLAB)), 0, 2)
            sdS = cute.group_modes(cute.flat_divide(this.sS, (s.rows, SLAB)), 0, 2)  # (tile, 0, slab, stage)
            tSsS, tSgS = cpasync.tma_partition(tma[4], 0, cute.make_layout(1), sdS, gdS)

        # Where this lane's row of the four 8 x 8 matrices of an ldmatrix or stmatrix lies: rows 0-7 and 8-15 of S,
        # each with columns 0-7 and 8-15 of the warp's 16.
        row, piece = row_of_transposed(lane, warp_idx)
        mine = slab * (s.rows * SLAB) + row * SLAB + piece * 8
        # This thread's columns of S and rows of dP are (column, column + 8) and, of every 8, (pair, pair + 1).
        in_tile, pair = slab * SLAB + warp_idx * 16 + lane // 4, lane % 4 * 2

        stage, phase, before = Int32(0), Int32(0), Int32(-1)
        tile = this.cta
        while tile < this.tiles:
            at = self.place(this, tile)
            n, batch, head, m = at.n, at.batch, at.head, at.m
            column = n * s.columns + in_tile
            if const_expr(s.deep):
                self.share_values(this, column, pair, batch, warp_idx * 16 + lane // 4, slab, share)
            else:
                self.load_values(this, rV, column, pair, batch)
            rdV.fill(0.0)
            for _ in cutlass.range(at.first, at.end, unroll=1):
                cute.arch.mbarrier_wait(this.full + stage, phase)
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
                tileS = this.rawS + stage * s.score_elements
                if const_expr(s.lines):
                    self.load_from_lines(this, tileS, rS, in_tile, pair, m, n, head, batch)
                else:
                    self.load_scores(tileS, mine, rS)
                exps = cute.make_rmem_tensor(s.rows // 2, Float32)
                counts = self.exponentials(this, rS, exps, stage, m, column, pair, head, batch)
                warpgroup.wait_group(1)  # the last dV: its operands may be overwritten
                if const_expr(s.lines and not s.sent):
                    self.leave(this, before)
                rE.store(exps.load().to(self.half).reshape(rE.shape))
                warpgroup.fence()
                multiply(mma_V, rdV, rE, tVrO[None, None, None, stage], anew=False)
                warpgroup.commit_group()

                # dS^T, while the tensor cores are at dV.
                warpgroup.wait_group(1)
                for i, j, k, _ in self.each():
                    delta = this.sL[j * 8 + pair + k, 1, stage]
                    # 128 accumulators and more leave no room for the unrounded P.
                    exponential = rE[i].to(Float32) if const_expr(s.deep) else exps[i]
                    exps[i] = exponential * cute.math.fma(rP[i], this.factor, -delta)
                if const_expr(s.hides):
                    hide(exps, counts)
                rS.store(exps.load().to(self.dtype))
                if const_expr(s.lines):
                    where = (n, head, batch)
                    self.write_lines(this, tileS, rS, tid, slab, share, m, column, pair, before, where)
                else:
                    place = (None, m, n * s.slabs + slab, head, *batch)
                    source, target = tSsS[None, 0, slab, stage], tSgS[place]
                    self.write_tile(
                        this, tileS, mine, rS, slab, share, warp_idx, before, tma[4], source, target
                    )
                before = stage
                stage, phase = advance(stage, phase, s.stages)
                head, m = next_step(head, m, at.top, this.row_blocks)
            warpgroup.wait_group(0)
            self.store_values(this, rdV, column, pair + share * s.share_depth, at.split, batch)
            tile += this.ctas
        if const_expr(s.sent):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def write_tile(
        self,
        this,
        tileS,
        mine: Int32,
        rS,
        slab: Int32,
        share: Int32,
        warp_idx: Int32,
        before: Int32,
        atom,
        source,
        target,
    ):
        """dS to the place of S, and from there to global memory by TMA."""
        if const_expr(self.spec.shares > 1):
            self.sync_slab(slab)  # the other warpgroups of the slab have read S, too
        if share == 0:
            self.store_scores(tileS, mine, rS)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + slab, number_of_threads=WARPGROUP)
            if warp_idx == 0:
                cute.copy(atom, source, target)
                cute.arch.cp_async_bulk_commit_group()
                # dS of the step before must have left.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
        # All warps have passed a barrier, and so have left the step before.
        if (warp_idx == 0) & (before >= 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(this.empty + before)

    def load_scores(self, tile, mine: Int32, rS):
        """The slab's S^T, in the order of the accumulators of dP^T."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        for j in range(self.spec.rows // 16):
            cute.copy(atom, self.matrices(tile, mine, j), eight(rS, j))

    def store_scores(self, tile, mine: Int32, rS):
        """dS^T to where S^T came from."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        for j in range(self.spec.rows // 16):
            cute.copy(atom, eight(rS, j), self.matrices(tile, mine, j))

    def matrices(self, tile, mine: Int32, j: int) -> cute.Tensor:
        """This lane's 16 bytes of the four matrices that hold rows 16 j to 16 j + 15."""
        address = (tile + mine + j * (16 * SLAB)).toint()
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((8, 1)))

    @cute.jit
    def clear(self, this, tma: list, lane: Int32, worker: Int32):
        """Zeros into dS where the diagonal cuts off whole tiles, by the warps that do not fill the ring."""
        s = self.spec
        tSsS = tSgS = None
        if const_expr(not s.lines):
            sZ = swizzled(this.rawZ, by_rows(self.dtype, s.rows, SLAB, 1))
            gdS = cute.group_modes(cute.flat_divide(tma[5], (s.rows, SLAB)), 0, 2)
            tSsS, tSgS = cpasync.tma_partition(
                tma[4], 0, cute.make_layout(1), cute.group_modes(sZ, 0, 2), gdS
            )
        tile = this.cta
        while tile < this.tiles:
            at = self.place(this, tile)
            first, end = part_of(at.top * this.heads, at.split, this.splits)
            for block in cutlass.range(first + worker, end, 4 - s.producers, unroll=1):
                head, m = block // at.top, block % at.top
                if const_expr(s.lines):
                    self.clear_lines(this, m, at.n, head, at.batch, lane)
                else:
                    for slab in cutlass.range_constexpr(s.slabs):
                        place = (None, m, at.n * s.slabs + slab, head, *at.batch)
                        cute.copy(tma[4], tSsS[None, 0], tSgS[place])
                    cute.arch.cp_async_bulk_commit_group()
                    # Not all at once: the same unit loads S and dO.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
            tile += this.ctas
        cute.arch.cp_async_bulk_wait_group(0, read=True)


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


def eight(fragment: cute.Tensor, j: int) -> cute.Tensor:
    """Eight elements of a register vector, of rank 2 as copies want it."""
    return cute.make_tensor(fragment.iterator + 8 * j, cute.make_layout((8, 1)))


def part_of(steps: Int32, split: Int32, splits: Int32) -> tuple[Int32, Int32]:
    """The first of so many steps that a part takes, and the one after its last."""
    return Int32(Int64(steps) * split // splits), Int32(Int64(steps) * (split + 1) // splits)


def advance(stage: Int32, phase: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next slot of a ring, and the parity of its barrier."""
    last = stage == stages - 1
    return (
        Int32(cutlass.select_(last, Int32(0), stage + 1)),
        Int32(cutlass.select_(last, phase ^ 1, phase)),
    )


def next_step(head: Int32, m: Int32, top: Int32, row_blocks: Int32) -> tuple[Int32, Int32]:
    """The next block of rows, of the next head behind the last."""
    last = m == row_blocks - 1
    return Int32(cutlass.select_(last, head + 1, head)), Int32(cutlass.select_(last, top, m + 1))
