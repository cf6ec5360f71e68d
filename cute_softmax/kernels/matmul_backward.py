"""The backward of softmax(S) @ V on Hopper's tensor cores, with S read once and dS written once.

    P = exp(S - lse)      dV = P^T dO      dS = P * (dO V^T - delta)      delta = rowsum(dO * O)

A CTA owns a block of columns of S, which are rows of V, and walks down the rows of S. Everything is transposed, so
that it stays in registers: dP^T = V dO^T leaves the tensor cores just as P^T must enter them for dV += P^T dO, V
itself waits in registers as an operand, and `ldmatrix` transposes S on its way there. dS takes the place of S in
shared memory. A producer warp keeps a ring of steps full; each consumer warpgroup owns a slab of 64 columns.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .copy import DTYPES, global_pointer
from .online import LOG2_E

WARPGROUP = 128
SLAB = 64
REGISTERS = {2: (24, 240), 3: (24, 160)}  # of producer and consumers, by the number of consumer warpgroups


def slabs(rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(row, column, stage) -> element of 16 bits in shared memory: slabs of 64 columns with the 128-byte swizzle."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, SLAB), stride=(SLAB, 1))
    )
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def turned_slabs(rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(column, row, stage) -> the same element as `slabs`."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((SLAB, 8), stride=(1, SLAB))
    )
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))


class MatmulBackwardKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.MatmulBackwardClass`."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtypes[0]]
        self.dv_dtype = DTYPES[spec.dtypes[2]]

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        M: Int32,
        N: Int32,
        D: Int32,
        heads: Int32,
        batches: Int32,
        splits: Int32,
        ctas: Int32,
        scale: Float32,
        *operands: Int64,
    ):
        """Launch.

        heads: those that share a V; batches: different V; splits: parts of the walk over rows and heads.
        operands: addresses in bytes and strides in elements: S (address, row, head, batch), dO (the same), V
            (address, row, batch), stats (address), dS (as S), dV (address, row, split, batch).
        """
        s = self.spec
        S, dO, V, stats, dS, dV = (
            operands[0:4],
            operands[4:8],
            operands[8:11],
            operands[11],
            operands[12:16],
            operands[16:20],
        )

        def matrix(at, columns):
            return cute.make_tensor(
                global_pointer(self.dtype, at[0], Int64(0), 16),
                cute.make_layout((M, columns, heads, batches), stride=(at[1], 1, at[2], at[3])),
            )

        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tile, slab = slabs(s.rows, s.columns, s.stages), slabs(s.rows, SLAB, 1)
        atom_S, mS = cpasync.make_tiled_tma_atom(load, matrix(S, N), tile, (s.rows, s.columns))
        atom_dO, mdO = cpasync.make_tiled_tma_atom(
            load, matrix(dO, D), slabs(s.rows, s.depth, s.stages), (s.rows, s.depth)
        )
        atom_dS, mdS = cpasync.make_tiled_tma_atom(save, matrix(dS, N), slab, (s.rows, SLAB))
        self.kernel(
            atom_S, mS, atom_dO, mdO, atom_dS, mdS, (M, N, D, heads, batches, splits), scale, (*V, stats, *dV)
        ).launch(grid=[ctas, 1, 1], block=[s.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        atom_S: cute.CopyAtom,
        mS: cute.Tensor,
        atom_dO: cute.CopyAtom,
        mdO: cute.Tensor,
        atom_dS: cute.CopyAtom,
        mdS: cute.Tensor,
        sizes: tuple,
        scale: Float32,
        operands: tuple,
    ):
        s = self.spec
        M, N, D, heads, batches, splits = sizes
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tidx // 32)

        smem = cutlass.memory.SmemAllocator()
        rawS = smem.allocate_array(self.dtype, s.stages * s.rows * s.columns, byte_alignment=1024)
        rawO = smem.allocate_array(self.dtype, s.stages * s.rows * s.depth, byte_alignment=1024)
        sL = smem.allocate_tensor(Float32, cute.make_layout((s.rows, 2, s.stages)), byte_alignment=128)
        full = smem.allocate_array(Int64, num_elems=s.stages)
        empty = smem.allocate_array(Int64, num_elems=s.stages)
        if tidx == 0:
            for i in cutlass.range_constexpr(s.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, s.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        row_blocks = (M + s.rows - 1) // s.rows
        column_blocks = (N + s.columns - 1) // s.columns
        this = SimpleNamespace(
            M=M,
            N=N,
            D=D,
            heads=heads,
            batches=batches,
            splits=splits,
            cta=cta,
            ctas=ctas,
            row_blocks=row_blocks,
            column_blocks=column_blocks,
            tiles=column_blocks * batches * splits,
            steps=row_blocks * heads,
            scale=scale,
            V=operands[0:3],
            stats=operands[3],
            dV=operands[4:8],
            rawS=rawS,
            sS=swizzled(rawS, slabs(s.rows, s.columns, s.stages)),
            sO=swizzled(rawO, slabs(s.rows, s.depth, s.stages)),
            sOt=swizzled(rawO, turned_slabs(s.rows, s.depth, s.stages)),
            sL=sL,
            full=full,
            empty=empty,
        )
        if group == s.consumers:
            cute.arch.setmaxregister_decrease(REGISTERS[s.consumers][0])
            if warp_idx == s.consumers * 4:
                self.produce(this, atom_S, mS, atom_dO, mdO)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[s.consumers][1])
            self.consume(this, atom_dS, mdS, tidx % WARPGROUP, group)

    def place(self, this, tile: Int32) -> tuple:
        """(column block, batch, split) of a tile, and its first step and the one after its last."""
        n = tile % this.column_blocks
        rest = tile // this.column_blocks
        split, batch = rest % this.splits, rest // this.splits
        first = Int32(Int64(this.steps) * split // this.splits)
        end = Int32(Int64(this.steps) * (split + 1) // this.splits)
        return n, batch, split, first, end

    @cute.jit
    def produce(self, this, atom_S, mS, atom_dO, mdO):
        """One warp brings step after step to the ring."""
        s = self.spec
        # (row of the tile, column, row block, column block, head, batch)
        gS = cute.flat_divide(mS, (s.rows, s.columns))
        gO = cute.flat_divide(mdO, (s.rows, s.depth))
        one = cute.make_layout(1)
        tSsS, tSgS = cpasync.tma_partition(
            atom_S, 0, one, cute.group_modes(this.sS, 0, 2), cute.group_modes(gS, 0, 2)
        )
        tOsO, tOgO = cpasync.tma_partition(
            atom_dO, 0, one, cute.group_modes(this.sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        stats = cute.make_layout(2 * s.rows)
        stage, phase = Int32(0), Int32(1)
        tile = this.cta
        while tile < this.tiles:
            n, batch, _, first, end = self.place(this, tile)
            head, m = first // this.row_blocks, first % this.row_blocks
            for _ in cutlass.range(first, end, unroll=1):
                bar = this.full + stage
                cute.arch.mbarrier_wait(this.empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, s.step_bytes)
                cute.copy(atom_S, tSgS[None, m, n, head, batch], tSsS[None, stage], tma_bar_ptr=bar)
                cute.copy(atom_dO, tOgO[None, m, 0, head, batch], tOsO[None, stage], tma_bar_ptr=bar)
                block = Int64(batch * this.heads + head) * this.row_blocks + m
                with cute.arch.elect_one():
                    cute.copy(
                        bulk,
                        cute.make_tensor(
                            global_pointer(Float32, this.stats, block * (2 * s.rows), 128), stats
                        ),
                        cute.make_tensor(this.sL[None, None, stage].iterator, stats),
                        mbar_ptr=bar,
                    )
                stage, phase = advance(stage, phase, s.stages)
                head, m = next_step(head, m, this.row_blocks)
            tile += this.ctas

    @cute.jit
    def consume(self, this, atom_dS, mdS, tid: Int32, slab: Int32):
        """A warpgroup computes dS of its slab of columns step by step, and dV of its rows of V."""
        s = self.spec
        c = SimpleNamespace()
        lane, warp_idx = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        gdS = cute.flat_divide(mdS, (s.rows, SLAB))
        sdS = cute.flat_divide(this.sS, (s.rows, SLAB))  # (row, column, 0, slab, stage)
        tSsS, tSgS = cpasync.tma_partition(
            atom_dS, 0, cute.make_layout(1), cute.group_modes(sdS, 0, 2), cute.group_modes(gdS, 0, 2)
        )

        # dP^T (64 columns of S, rows) = V (columns, depth) @ dO^T; dV (columns, depth) = P^T (columns, rows) @ dO.
        mma_P = self.mma(s.rows, OperandMajorMode.K)
        mma_V = self.mma(s.depth, OperandMajorMode.MN)
        thr_P, thr_V = mma_P.get_slice(tid), mma_V.get_slice(tid)
        rP = thr_P.make_fragment_C(thr_P.partition_shape_C((SLAB, s.rows)))
        rdV = thr_V.make_fragment_C(thr_V.partition_shape_C((SLAB, s.depth)))
        rV = thr_P.make_fragment_A(thr_P.partition_shape_A((SLAB, s.depth)))
        rE = thr_V.make_fragment_A(thr_V.partition_shape_A((SLAB, s.rows)))
        tPrO = thr_P.make_fragment_B(thr_P.partition_B(this.sO))
        tVrO = thr_V.make_fragment_B(thr_V.partition_B(this.sOt))

        # Where this lane's row of the four 8 x 8 matrices of an ldmatrix or stmatrix lies: rows 0-7 and 8-15 of S,
        # each with columns 0-7 and 8-15 of the warp's 16.
        row, chunk = lane // 16 * 8 + lane % 8, warp_idx * 2 + lane // 8 % 2
        mine = slab * (s.rows * SLAB) + row * SLAB + ((chunk ^ (lane % 8)) * 8)
        pair = lane % 4 * 2

        stage, phase, before = Int32(0), Int32(0), Int32(-1)
        tile = this.cta
        while tile < this.tiles:
            n, batch, split, first, end = self.place(this, tile)
            column = n * s.columns + slab * SLAB + warp_idx * 16 + lane // 4
            self.load_values(this, rV, column, pair, batch)
            rdV.fill(0.0)
            head, m = first // this.row_blocks, first % this.row_blocks
            for _ in cutlass.range(first, end, unroll=1):
                cute.arch.mbarrier_wait(this.full + stage, phase)
                warpgroup.fence()
                self.gemm(mma_P, rP, rV, tPrO[None, None, None, stage], zero=True)
                warpgroup.commit_group()

                # P^T, while the tensor cores are at dP^T and still at the last dV.
                rS = cute.make_rmem_tensor(s.rows // 2, self.dtype)
                at = this.rawS + stage * (s.rows * s.columns)
                self.load_scores(at, mine, rS)
                exps = cute.make_rmem_tensor(s.rows // 2, Float32)
                for j in cutlass.range_constexpr(s.rows // 8):
                    for k in cutlass.range_constexpr(2):
                        lse = this.sL[j * 8 + pair + k, 0, stage]
                        for h in cutlass.range_constexpr(2):
                            i = j * 4 + h * 2 + k
                            x = rS[i].to(Float32)
                            exps[i] = cute.math.exp2(
                                cute.math.fma(x, this.scale * LOG2_E, -lse), fastmath=True
                            )
                warpgroup.wait_group(1)  # the last dV: its operands may be overwritten
                rE.store(exps.load().to(self.dtype).reshape(rE.shape))
                warpgroup.fence()
                self.gemm(mma_V, rdV, rE, tVrO[None, None, None, stage], zero=False)
                warpgroup.commit_group()

                # dS^T, while the tensor cores are at dV.
                warpgroup.wait_group(1)
                for j in cutlass.range_constexpr(s.rows // 8):
                    for k in cutlass.range_constexpr(2):
                        delta = this.sL[j * 8 + pair + k, 1, stage]
                        for h in cutlass.range_constexpr(2):
                            i = j * 4 + h * 2 + k
                            exps[i] = exps[i] * cute.math.fma(rP[i], this.scale, -delta)
                rS.store(exps.load().to(self.dtype))
                self.store_scores(at, mine, rS)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1 + slab, number_of_threads=WARPGROUP)
                if warp_idx == 0:
                    cute.copy(
                        atom_dS,
                        tSsS[None, 0, slab, stage],
                        tSgS[None, m, n * s.consumers + slab, head, batch],
                    )
                    cute.arch.cp_async_bulk_commit_group()
                    # All warps have left the step before; its dS must have left, too.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    if before >= 0:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(this.empty + before)
                before = stage
                stage, phase = advance(stage, phase, s.stages)
                head, m = next_step(head, m, this.row_blocks)
            warpgroup.wait_group(0)
            self.store_values(this, rdV, column, pair, split, batch)
            tile += this.ctas
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def mma(self, n: int, major: OperandMajorMode) -> cute.TiledMma:
        """64 x n x 16 with A from registers."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (SLAB, n, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            major,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    def gemm(self, mma, rC, rA, rB, zero: bool):
        for k in range(cute.size(rA, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (zero and k == 0))
            cute.gemm(mma, rC, rA[None, None, k], rB[None, None, k], rC)

    def load_scores(self, at, mine: Int32, rS):
        """The slab's S^T, in the order of the accumulators of dP^T."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        for j in range(self.spec.rows // 16):
            cute.copy(atom, self.matrices(at, mine, j), part(rS, j))

    def store_scores(self, at, mine: Int32, rS):
        """dS^T to where S^T came from."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        for j in range(self.spec.rows // 16):
            cute.copy(atom, part(rS, j), self.matrices(at, mine, j))

    def matrices(self, at, mine: Int32, j: int) -> cute.Tensor:
        """This lane's 16 bytes of the four matrices that hold rows 16 j to 16 j + 15."""
        pointer = cute.make_ptr(
            self.dtype,
            (at + mine + j * (16 * SLAB)).toint(),
            cute.AddressSpace.smem,
            assumed_align=16,
        )
        return cute.make_tensor(pointer, cute.make_layout((8, 1)))

    @cute.jit
    def load_values(self, this, rV, column: Int32, pair: Int32, batch: Int32):
        """This warpgroup's rows of V as the left operand; zeros outside."""
        words = cute.recast_tensor(rV, Int32)
        words.fill(0)
        address, row_stride, batch_stride = this.V
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(self.spec.depth // 8):
                if (column + 8 * h < this.N) & (8 * k + pair < this.D):
                    at = Int64(column + 8 * h) * row_stride + batch * batch_stride + (8 * k + pair)
                    words[k * 2 + h] = cute.make_tensor(
                        global_pointer(Int32, address, at // 2, 4), cute.make_layout(1)
                    )[0]

    @cute.jit
    def store_values(self, this, rdV, column: Int32, pair: Int32, split: Int32, batch: Int32):
        """This warpgroup's rows of dV."""
        address, row_stride, split_stride, batch_stride = this.dV
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(self.spec.depth // 8):
                if (column + 8 * h < this.N) & (8 * k + pair < this.D):
                    at = Int64(column + 8 * h) * row_stride + split * split_stride + batch * batch_stride
                    both = cute.make_rmem_tensor(2, Float32)
                    both[0], both[1] = rdV[k * 4 + h * 2], rdV[k * 4 + h * 2 + 1]
                    to = global_pointer(
                        self.dv_dtype, address, at + (8 * k + pair), 2 * self.dv_dtype.width // 8
                    )
                    cute.make_tensor(to, cute.make_layout(2)).store(both.load().to(self.dv_dtype))


def swizzled(raw: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """The tensor of a swizzled layout in raw shared memory."""
    return cute.make_tensor(cute.recast_ptr(raw, layout.inner, raw.dtype), layout.outer)


def part(fragment: cute.Tensor, j: int) -> cute.Tensor:
    """Eight elements of a register vector, of rank 2 as copies want it."""
    return cute.make_tensor(fragment.iterator + 8 * j, cute.make_layout((8, 1)))


def advance(stage: Int32, phase: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next slot of a ring, and the parity of its barrier."""
    last = stage == stages - 1
    return (
        Int32(cutlass.select_(last, Int32(0), stage + 1)),
        Int32(cutlass.select_(last, phase ^ 1, phase)),
    )


def next_step(head: Int32, m: Int32, row_blocks: Int32) -> tuple[Int32, Int32]:
    """The next block of rows, of the next head behind the last."""
    last = m == row_blocks - 1
    return Int32(cutlass.select_(last, head + 1, head)), Int32(cutlass.select_(last, Int32(0), m + 1))
