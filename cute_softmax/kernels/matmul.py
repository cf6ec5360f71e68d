"""softmax(S) @ V on sm_90a: S is read once, exponentiated in registers and multiplied from there.

One warp brings tiles of S into shared memory, one tiles of V, each into a ring of stages of its own. A warpgroup
takes 64 rows of S: it loads its part of a tile into the registers of a wgmma operand, finds the rows' maxima,
turns scores into powers in place, and multiplies them with V's tile while it prepares the next one.

    coordinates -> shared memory -> roles -> load -> maximum -> powers -> multiply -> finish -> store

The powers of a row refer to one number, `rRef`, at most `LAG` powers of two below the largest score seen: sums and
accumulators are rescaled only when a tile's maximum lies further above it.

Names as in `row`; tAs and tOr: partitioned by the multiplication's A operand and its output.
"""

import operator
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from . import online, tensor_cores
from .copy import DTYPES, PACKED_MAX, global_pointer, packed_maximum, unpack
from .reduce import tree
from .tensor_cores import WARPGROUP, Ring

TILE_N = 64
LAG = 6.0
HEADROOM = {"bf16": 0.0, "fp16": 8.0}
QUAD = 4


class MatmulKernel:
    """The kernel of one Plan class; spec: see `cute_softmax.plan.MatmulClass`."""

    def __init__(self, spec):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.exp = online.Fast(spec.dtypes[0])
        self.headroom = HEADROOM[spec.dtypes[1]]

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
        scale: Float32,
        offset: Int32,
        *operands: Int64,
    ):
        """Launch.

        operands: (address in bytes, row stride, three batch strides in elements) of S and V, the address of the
            output and of the log-sum-exps, if wanted; both are contiguous.
        """
        s = self.spec
        sizes = (batch_0, batch_1, batch_2)
        sS_layout = tensor_cores.by_rows(self.dtypes[0], s.rows, TILE_N, s.score_stages)
        sV_layout = tensor_cores.by_columns(self.dtypes[1], s.depth, TILE_N, s.value_stages)
        mS = self.matrix(0, operands[:5], (rows, columns), sizes, transposed=False)
        mV = self.matrix(1, operands[5:10], (columns, depth), sizes, transposed=True)
        tma_S, tS = tensor_cores.tensor_map(mS, sS_layout, (s.rows, TILE_N))
        tma_V, tV = tensor_cores.tensor_map(mV, sV_layout, (s.depth, TILE_N))
        tiled_mma = tensor_cores.mma(
            self.dtypes[1], s.depth, a_in_registers=True, a_by_rows=True, b_by_rows=False
        )
        self.kernel(
            tma_S,
            tS,
            tma_V,
            tV,
            sS_layout,
            sV_layout,
            tiled_mma,
            (rows, columns, depth),
            sizes,
            scale,
            offset,
            operands[10:],
        ).launch(grid=[ctas, 1, 1], block=[s.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

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
        tma_S: cute.CopyAtom,
        tS: cute.Tensor,
        tma_V: cute.CopyAtom,
        tV: cute.Tensor,
        sS_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        shape: tuple,
        sizes: tuple,
        scale: Float32,
        offset: Int32,
        results: tuple,
    ):
        s = self.spec

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows, columns, depth = shape
        row_tiles, depth_tiles = cute.ceil_div(rows, s.rows), cute.ceil_div(depth, s.depth)

        # Shared memory.
        smem = cutlass.memory.SmemAllocator()
        sS = tensor_cores.shared(smem, self.dtypes[0], sS_layout)
        sV = tensor_cores.shared(smem, self.dtypes[1], sV_layout)
        warps = s.warpgroups * 4
        scores = Ring(smem, s.score_stages, s.score_stage_bytes, warps)
        values = Ring(smem, s.value_stages, s.value_stage_bytes, warps)
        scores.initialise(tidx)
        values.initialise(tidx)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()

        this = SimpleNamespace(
            rows=rows,
            columns=columns,
            depth=depth,
            sizes=sizes,
            row_tiles=row_tiles,
            depth_tiles=depth_tiles,
            batches=sizes[0] * sizes[1] * sizes[2],
            works=sizes[0] * sizes[1] * sizes[2] * row_tiles * depth_tiles,
            cta=cta,
            ctas=ctas,
            scale=scale,
            offset=offset,
            scores=scores,
            values=values,
            tma_S=tma_S,
            tS=tS,
            sS=sS,
            tma_V=tma_V,
            tV=tV,
            sV=sV,
            results=results,
        )

        # Roles.
        if warp < 4:
            cute.arch.setmaxregister_decrease(s.producer_registers)
            if warp == 0:
                self.bring_scores(this)
            if warp == 1:
                self.bring_values(this)
        else:
            cute.arch.setmaxregister_increase(s.consumer_registers)
            self.consume(this, tiled_mma, tidx - WARPGROUP)

    def work(self, this, turn: Int32) -> SimpleNamespace:
        """The tile that this CTA takes in its turn: its place, and how many steps of columns it has.

        Tiles of one batch follow each other, so that V is in L2. Causal ones come in the order of their length, the
        longest first, and every second turn in reverse: CTAs then end together.
        """
        s = self.spec
        index = turn * this.ctas + this.cta
        end = this.columns
        if const_expr(s.causal):
            backwards = turn * this.ctas + this.ctas - 1 - this.cta
            index = Int32(cutlass.select_(turn % 2 == 1, backwards, index))
            depth_tile, rest = index % this.depth_tiles, index // this.depth_tiles
            batch, row_tile = rest % this.batches, this.row_tiles - 1 - rest // this.batches
            last = cutlass.min((row_tile + 1) * s.rows, this.rows) - 1
            end = cutlass.min(end, last + this.offset + 1)
        else:
            depth_tile, rest = index % this.depth_tiles, index // this.depth_tiles
            row_tile, batch = rest % this.row_tiles, rest // this.row_tiles
        b2, rest = batch % this.sizes[2], batch // this.sizes[2]
        return SimpleNamespace(
            exists=index < this.works,
            row_tile=row_tile,
            depth_tile=depth_tile,
            batch=batch,
            modes=(rest // this.sizes[1], rest % this.sizes[1], b2),
            steps=cutlass.max(cute.ceil_div(end, TILE_N), 1),
        )

    def place(self, tensor: cute.Tensor, work: SimpleNamespace) -> tuple:
        """The batch coordinates of a work in a TMA tensor, 0 where it is broadcast."""
        return tuple(cutlass.min(b, n - 1) for b, n in zip(work.modes, tensor.shape[2:], strict=True))

    @cute.jit
    def bring_scores(self, this):
        """The warp that fills the ring of scores."""
        s, ring = self.spec, this.scores
        gS = cute.flat_divide(this.tS, (s.rows, TILE_N))
        tSsS, tSgS = cpasync.tma_partition(
            this.tma_S, 0, cute.make_layout(1), cute.group_modes(this.sS, 0, 2), cute.group_modes(gS, 0, 2)
        )
        stage, phase = ring.begin()
        turn = Int32(0)
        work = self.work(this, turn)
        exists = work.exists
        while exists:
            work = self.work(this, turn)
            place = self.place(this.tS, work)
            for step in cutlass.range(work.steps, unroll=1):
                barrier = ring.acquire(stage, phase)
                cute.copy(
                    this.tma_S,
                    tSgS[(None, work.row_tile, step, *place)],
                    tSsS[(None, stage)],
                    tma_bar_ptr=barrier,
                )
                stage, phase = ring.advance(stage, phase)
            turn += 1
            exists = self.work(this, turn).exists

    @cute.jit
    def bring_values(self, this):
        """The warp that fills the ring of values."""
        s, ring = self.spec, this.values
        gV = cute.flat_divide(this.tV, (s.depth, TILE_N))
        tVsV, tVgV = cpasync.tma_partition(
            this.tma_V, 0, cute.make_layout(1), cute.group_modes(this.sV, 0, 2), cute.group_modes(gV, 0, 2)
        )
        stage, phase = ring.begin()
        turn = Int32(0)
        work = self.work(this, turn)
        exists = work.exists
        while exists:
            work = self.work(this, turn)
            place = self.place(this.tV, work)
            for step in cutlass.range(work.steps, unroll=1):
                barrier = ring.acquire(stage, phase)
                cute.copy(
                    this.tma_V,
                    tVgV[(None, work.depth_tile, step, *place)],
                    tVsV[(None, stage)],
                    tma_bar_ptr=barrier,
                )
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
        load = cute.make_tiled_copy_A(tensor_cores.ldmatrix(self.dtypes[0]), tiled_mma)
        gS = cute.local_tile(this.sS, (64, TILE_N), (group, 0, None))
        tAsS = load.get_slice(thread).partition_S(gS)
        thr_mma = tiled_mma.get_slice(thread)
        tOrV = tiled_mma.make_fragment_B(thr_mma.partition_B(this.sV))
        rO = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((64, s.depth)))
        rP = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((64, TILE_N)))
        mine = SimpleNamespace(
            load=load,
            tAsS=tAsS,
            lane=lane,
            # The first of this thread's rows in the CTA's tile (the other lies 8 below), and its first column.
            row=group * 64 + thread // 32 * 16 + lane // QUAD,
            column=lane % QUAD * 2,
            first_row=group * 64,
            rS=tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((64, TILE_N))),
            rRef=cute.make_rmem_tensor(2, Float32),
            rTotal=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
            rFall=cute.make_rmem_tensor(2, Float32),
        )
        rTotal, rSum, rFall = mine.rTotal, mine.rSum, mine.rFall

        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        s_stage, s_phase = this.scores.begin()
        v_stage, v_phase = this.values.begin()
        turn = Int32(0)
        exists = self.work(this, turn).exists
        while exists:
            work = self.work(this, turn)
            rO.fill(0.0)
            mine.rRef.fill(-float("inf"))
            rTotal.fill(0.0)

            self.prepare(this, mine, work, Int32(0), s_stage, s_phase)
            s_stage, s_phase = this.scores.advance(s_stage, s_phase)
            rP.store(mine.rS.load())
            for h in cutlass.range_constexpr(2):
                rTotal[h] = rSum[h]
            for step in cutlass.range(1, work.steps, unroll=1):
                this.values.wait(v_stage, v_phase)
                self.multiply(tiled_mma, rP, tOrV[(None, None, None, v_stage)], rO)
                grew = self.prepare(this, mine, work, step, s_stage, s_phase)
                s_stage, s_phase = this.scores.advance(s_stage, s_phase)
                warpgroup.wait_group(0)
                this.values.release(v_stage, lane)
                v_stage, v_phase = this.values.advance(v_stage, v_phase)
                if grew:
                    for i in cutlass.range_constexpr(cute.size(rO)):
                        rO[i] = rO[i] * rFall[i // 2 % 2]
                    for h in cutlass.range_constexpr(2):
                        rTotal[h] = rTotal[h] * rFall[h]
                for h in cutlass.range_constexpr(2):
                    rTotal[h] = rTotal[h] + rSum[h]
                rP.store(mine.rS.load())
            this.values.wait(v_stage, v_phase)
            self.multiply(tiled_mma, rP, tOrV[(None, None, None, v_stage)], rO)
            warpgroup.wait_group(0)
            this.values.release(v_stage, lane)
            v_stage, v_phase = this.values.advance(v_stage, v_phase)
            self.finish(this, mine, work, rO)
            turn += 1
            exists = self.work(this, turn).exists

    def multiply(self, tiled_mma: cute.TiledMma, rP: cute.Tensor, tOrV: cute.Tensor, rO: cute.Tensor):
        """rO += rP @ V's tile, begun."""
        warpgroup.fence()
        for k in range(cute.size(rP, mode=[2])):
            cute.gemm(tiled_mma, rO, rP[(None, None, k)], tOrV[(None, None, k)], rO)
        warpgroup.commit_group()

    @cute.jit
    def prepare(self, this, mine, work, step: Int32, stage: Int32, phase: Int32) -> Boolean:
        """Turn the next tile of scores into powers in rS, their sums in rSum; whether a row's reference grew, by
        the factors in rFall."""
        s = self.spec
        rS, rRef, rSum, rFall = mine.rS, mine.rRef, mine.rSum, mine.rFall
        this.scores.wait(stage, phase)
        cute.copy(mine.load, mine.tAsS[(None, None, None, stage)], mine.load.retile(rS))
        cute.arch.sync_warp()
        this.scores.release(stage, mine.lane)

        # What lies beyond the last column, or the diagonal.
        row = work.row_tile * s.rows + mine.row
        limits = [this.columns, this.columns]
        whole = this.columns
        if const_expr(s.causal):
            limits = [cutlass.min(this.columns, row + 8 * h + this.offset + 1) for h in range(2)]
            whole = cutlass.min(whole, work.row_tile * s.rows + mine.first_row + this.offset + 1)
        words = cute.recast_tensor(rS, Uint32)
        if const_expr(s.scaled):
            flip = Uint32(cutlass.select_(this.scale < 0.0, Uint32(0x80008000), Uint32(0)))
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = words[i] ^ flip
        if (step + 1) * TILE_N > whole:
            for i in cutlass.range_constexpr(cute.size(rS)):
                column = step * TILE_N + mine.column + i % 2 + i // 4 * 8
                if column >= limits[i // 2 % 2]:
                    rS[i] = rS.element_type(-float("inf"))

        # The maxima of both rows, in the halves of one word.
        dtype = rS.element_type
        pairs = [
            tree(lambda a, b: packed_maximum(dtype, a, b), [words[i] for i in range(h, cute.size(words), 2)])
            for h in range(2)
        ]
        both = packed_maximum(dtype, prmt(*pairs, 0x5410), prmt(*pairs, 0x7632))
        for distance in cutlass.range_constexpr(1, 3):
            both = packed_maximum(dtype, both, cute.arch.shuffle_sync_bfly(both, offset=distance))
        rMax = cute.make_rmem_tensor(2, dtype)
        cute.recast_tensor(rMax, Uint32)[0] = both
        maxima = unpack(rMax)

        # References.
        scale = Float32(1.0)
        if const_expr(s.scaled):
            scale = cute.arch.fmax(this.scale, -this.scale)
        grows = [(maxima[h] - rRef[h]) * scale > Float32(LAG) for h in range(2)]
        grew = cute.arch.vote_any_sync(grows[0] | grows[1])
        if grew:
            for h in cutlass.range_constexpr(2):
                old, new = rRef[h], cute.arch.fmax(rRef[h], maxima[h])
                rRef[h] = new
                new = finite(new)
                rFall[h] = self.exp.fall(finite(old), new, self.exp.slope(new, scale))

        # Powers.
        lines = []
        for h in cutlass.range_constexpr(2):
            ref = finite(rRef[h])
            slope = self.exp.slope(ref, scale)
            lines.append((slope, self.exp.shift(ref, slope, self.headroom)))
        sums = [[], []]
        for k in cutlass.range_constexpr(cute.size(words) // 4):
            part = cute.make_rmem_tensor(8, dtype)
            for j in cutlass.range_constexpr(8):
                part[j] = rS[8 * k + j]
            powers = [self.exp.power_on(x, *lines[j // 2 % 2]) for j, x in enumerate(unpack(part))]
            for h in cutlass.range_constexpr(2):
                sums[h].append(tree(operator.add, [p for j, p in enumerate(powers) if j // 2 % 2 == h]))
            rounded = cute.make_rmem_tensor(8, Float32)
            for j in cutlass.range_constexpr(8):
                rounded[j] = powers[j]
            part.store(rounded.load().to(dtype))
            for j in cutlass.range_constexpr(8):
                rS[8 * k + j] = part[j]
        for h in cutlass.range_constexpr(2):
            rSum[h] = tree(operator.add, sums[h])
        return grew

    @cute.jit
    def finish(self, this, mine, work, rO: cute.Tensor):
        """Divide by the sums and store."""
        s = self.spec
        dtype = self.dtypes[2]
        scale = this.scale if const_expr(s.scaled) else Float32(1.0)
        for h in cutlass.range_constexpr(2):
            total = mine.rTotal[h]
            for distance in cutlass.range_constexpr(1, 3):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
            inverse = cute.arch.rcp_approx(total)
            if const_expr(s.zero):
                inverse = Float32(cutlass.select_(total == 0.0, Float32(0.0), inverse))
            row = work.row_tile * s.rows + mine.row + 8 * h
            if row < this.rows:
                group = Int64(work.batch) * this.rows + row
                for j in cutlass.range_constexpr(s.depth // 8):
                    column = work.depth_tile * s.depth + mine.column + 8 * j
                    pair = cute.make_rmem_tensor(2, Float32)
                    for e in cutlass.range_constexpr(2):
                        pair[e] = rO[4 * j + 2 * h + e] * inverse
                    rounded = cute.make_rmem_tensor(2, dtype)
                    rounded.store(pair.load().to(dtype))
                    width = 2 if const_expr(s.pairs) else 1
                    for e in cutlass.range_constexpr(0, 2, width):
                        if column + e < this.depth:
                            at = global_pointer(
                                dtype, this.results[0], group * this.depth + column + e, 2 * width
                            )
                            gO = cute.make_tensor(at, cute.make_layout(width))
                            for i in cutlass.range_constexpr(width):
                                pass
                            cute.autovec_copy(
                                cute.make_tensor(rounded.iterator + e, cute.make_layout(width)), gO
                            )
                if const_expr(s.lse):
                    if mine.lane % QUAD == 0:
                        ref = finite(mine.rRef[h])
                        signed = Float32(cutlass.select_(scale < 0.0, -ref, ref))
                        lse = signed * scale + cute.math.log(total)
                        at = global_pointer(Float32, this.results[1], group, 4)
                        cute.make_tensor(at, cute.make_layout(1))[0] = lse - Float32(
                            self.headroom * online.LN_2
                        )


def finite(ref: Float32) -> Float32:
    """A reference; 0 for rows that have seen nothing but -inf."""
    return Float32(cutlass.select_(ref == Float32(-float("inf")), Float32(0.0), ref))


def prmt(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Four bytes chosen from two words."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )
