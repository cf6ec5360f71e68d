"""The rows of S in softmax(S) @ V: scores become exponentials, sums are kept, results divided and stored."""

import operator
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...plan.matmul_class import BLOCK_ROWS, TILE_N, MatmulClass
from ...plan.matmul_layouts import BOX, INSTRUCTION_K, LINES, QUAD
from ...plan.problem import ALIGNMENT
from ..common import online
from ..common.copy import DTYPES, in_shared, pack, packed_maximum, unpack, vector_of
from ..common.index import select
from ..common.reduce import MAX, tree
from ..common.tensor_cores import ldmatrix
from .memory import get, nearest, put_if, sink_of
from .softmax import BOUND, HEADROOM, KNOWN_HEADROOM, Softmax, finite
from .tiles import Call, Tiles, Work
from .unaligned import read_eighths

STEP_PRODUCTS = TILE_N // INSTRUCTION_K
NOTHING = {"bf16": 0xFF80FF80, "fp16": 0xFC00FC00}  # -inf in both halves of a word


@dataclass(frozen=True)
class Product:
    """The product of a block's exponentials with a tile of V, under way in pieces of 16 of its rows."""

    tiled_mma: cute.TiledMma
    rO: cute.Tensor
    rA: cute.Tensor
    tOrV: cute.Tensor

    def multiply(self, k: int):
        """Begin the k-th piece."""
        if k == 0:
            warpgroup.fence()
        cute.gemm(self.tiled_mma, self.rO, self.rA[(None, None, k)], self.tOrV[(None, None, k)], self.rO)
        if k == STEP_PRODUCTS - 1:
            warpgroup.commit_group()


@dataclass(frozen=True)
class Block:
    """A block of 64 rows of S in the registers of four warps, of which this is a thread's part.

    It holds 16 columns of each of two rows of a tile, as the A operand of wgmma has them: element i lies in row
    ``i // 2 % 2`` (of two, 8 apart) and column ``i % 2 + i // 4 * 8`` after the thread's first. The four lanes of a
    quad share their rows.

    base: the address of the first stage of scores; sS: of what this lane gives to the first ldmatrix.
    first: the block's first row, and row: this thread's first row, in the CTA's tile.
    rO: accumulators; rA: the operand of their product; rP: the operand that is being prepared.
    rRef, rSlope, rShift: of each row, what its exponentials refer to: ``score * slope + shift`` is an exponent of 2.
    rTotal: the sums of the exponentials; rSum: that of the latest ones; rFall: what becomes of the earlier ones when
    the reference is moved, and whether it is.
    """

    tiles: Tiles
    lane: Int32
    first: Int32
    row: Int32
    base: Int32
    sS: Int32
    rO: cute.Tensor
    rA: cute.Tensor
    rP: cute.Tensor
    rRef: cute.Tensor
    rSlope: cute.Tensor
    rShift: cute.Tensor
    rTotal: cute.Tensor
    rSum: cute.Tensor
    rFall: cute.Tensor

    @property
    def spec(self) -> MatmulClass:
        return self.tiles.spec

    @property
    def call(self) -> Call:
        return self.tiles.call

    @property
    def softmax(self) -> Softmax:
        return Softmax(self.tiles.spec)

    def product(self, tiled_mma: cute.TiledMma, tOrV: cute.Tensor) -> Product:
        """That of the block's operand with a tile of V."""
        return Product(tiled_mma, self.rO, self.rA, tOrV)

    def begin(self, work: Work):
        """A block of rows of which nothing has been seen."""
        self.rO.fill(0.0)
        if self.spec.stats:
            self.know(work)
            return
        self.rTotal.fill(0.0)
        self.rRef.fill(-float("inf"))
        self.rSlope.fill(0.0)
        self.rShift.fill(0.0)

    def know(self, work: Work):
        """Let the rows' exponentials refer to their given log-sum-exps; rTotal is what results are multiplied by.

        That takes back what all exponents of 2 have in common, the rounding of the log-sum-exp's among it."""
        call, slope = self.call, self.softmax.factor(self.call.scale) * Float32(online.LOG2_E)
        for h in range(2):
            row = cutlass.min(self.row_of(work, h), call.rows - 1)
            lse = get(call.stats, Int64(work.batch) * call.rows + row)
            self.rRef[h], self.rSlope[h] = lse, slope
            base = finite(lse)
            shift = cute.math.fma(-base, Float32(online.LOG2_E), Float32(KNOWN_HEADROOM))
            self.rShift[h] = shift
            # Scores in float32 are subtracted from first, see `exponential`.
            raised = cute.math.fma(base, Float32(online.LOG2_E), shift)
            raised = Float32(KNOWN_HEADROOM) if self.spec.dtypes[0] == "fp32" else raised
            # NaN where the log-sum-exp is infinite: of a row with +inf, or with nothing.
            inverse = cute.math.exp2(-raised, fastmath=True) + (lse - lse)
            if self.spec.zero:
                nothing = lse == Float32(-float("inf"))
                inverse = select(nothing, Float32(0.0), inverse)
            self.rTotal[h] = inverse

    @cute.jit
    def take_over(self):
        """Let a block's sums and accumulators refer to what its latest exponentials refer to; these become its
        operand."""
        rTotal, rO, rFall = self.rTotal, self.rO, self.rFall
        if const_expr(not self.spec.stats):
            if rFall[2] != 0.0:
                for i in cutlass.range_constexpr(cute.size(rO)):
                    rO[i] = rO[i] * rFall[i // 2 % 2]
                for h in cutlass.range_constexpr(2):
                    rTotal[h] = rTotal[h] * rFall[h]
            for h in cutlass.range_constexpr(2):
                rTotal[h] = rTotal[h] + self.rSum[h]
        if const_expr(self.rA is not self.rP):
            copy_words(self.rP, self.rA)

    @cute.jit
    def prepare_first(self, work: Work, step: Int32, stage: Int32):
        """As `prepare`, of the first tile of a block: its maximum is found at once."""
        if const_expr(self.spec.stats):
            self.prepare(work, step, stage, None)
        else:
            self.rFall[2] = 0.0
            self.refer_to_tile(work, step, stage)

    @cute.jit
    def prepare(self, work: Work, step: Int32, stage: Int32, product: Product | None):
        """Turn a block's rows of the next tile of scores into exponentials in rP and their sums in rSum.

        They refer to what the rows' earlier exponentials refer to. Where a sum tells that this lies too low, the tile's
        maximum is found and the exponentials evaluated again; rFall says what becomes of the earlier ones.
        product: begun meanwhile, in pieces, as a warp that issues one waits for the one before.
        """
        if const_expr((self.spec.wide or self.spec.mask) and product is not None):
            # What is loaded besides takes the registers that this would need.
            for k in cutlass.range_constexpr(STEP_PRODUCTS):
                product.multiply(k)
            product = None
        if const_expr(self.spec.wide):
            self.evaluate(self.wide_scores(work, step, stage), None)
        else:
            self.packed_scores(work, step, stage)
            self.evaluate(None, product)
        if const_expr(not self.spec.stats):
            self.catch_up(work, step, stage)

    @cute.jit
    def catch_up(self, work: Work, step: Int32, stage: Int32):
        """Where the sums of a tile's exponentials tell that their reference lies too low, find it and the exponentials
        again."""
        rRef, rSum, rFall = self.rRef, self.rSum, self.rFall
        outgrown = [(rSum[h] > Float32(BOUND)) | (rRef[h] == Float32(-float("inf"))) for h in range(2)]
        rFall[2] = 0.0
        if cute.arch.vote_any_sync(outgrown[0] | outgrown[1]):
            rFall[2] = 1.0
            self.refer_to_tile(work, step, stage)

    @cute.jit
    def refer_to_tile(self, work: Work, step: Int32, stage: Int32):
        """A tile's exponentials, which refer to the largest scores seen, the tile's among them."""
        if const_expr(self.spec.wide):
            wide = self.wide_scores(work, step, stage)
            self.refer(self.wide_maxima(wide))
            self.evaluate(wide, None)
        else:
            self.packed_scores(work, step, stage)
            self.refer(self.packed_maxima(self.rP))
            self.evaluate(None, None)

    def refer(self, maxima: list[Float32]):
        """Let the rows' exponentials refer to the largest scores seen, the tile's maxima included."""
        scale = self.softmax.factor(self.call.scale)
        for h in range(2):
            old, new = self.rRef[h], cute.arch.fmax(self.rRef[h], maxima[h])
            self.rRef[h] = new
            new = finite(new)
            slope = self.softmax.exp.slope(new, scale)
            self.rSlope[h] = slope
            self.rShift[h] = self.softmax.exp.shift(new, slope, HEADROOM)
            self.rFall[h] = self.softmax.exp.fall(finite(old), new, slope)

    def evaluate(self, wide: list[Float32] | None, product: Product | None):
        """The powers of the scores in rP, or of wide ones, into rP, and the sums of this thread's; among them the
        pieces of a product."""
        rP = self.rP
        sums = [[], []]
        for k in range(0, cute.size(rP), 8):
            if product is not None:
                product.multiply(k // 8)
            part = cute.make_rmem_tensor(8, rP.element_type)
            for j in range(8):
                part[j] = rP[k + j]
            x = unpack(part) if wide is None else wide[k : k + 8]
            exponentials = [self.exponential(x[j], j // 2 % 2) for j in range(8)]
            for h in range(0 if self.spec.stats else 2):
                sums[h].append(tree(operator.add, [p for j, p in enumerate(exponentials) if j // 2 % 2 == h]))
            pack(iter(exponentials), part)
            for j in range(8):
                rP[k + j] = part[j]
        for h in range(0 if self.spec.stats else 2):
            self.rSum[h] = tree(operator.add, sums[h])

    def exponential(self, x: Float32, h: int) -> Float32:
        """exp(scale * (x - ref)) * 2 ** headroom; scores in float32 lie too close for a rounded product."""
        slope = self.rSlope[h]
        if self.spec.dtypes[0] == "fp32":
            headroom = KNOWN_HEADROOM if self.spec.stats else HEADROOM
            return self.softmax.exp.exponential_on(x - finite(self.rRef[h]), slope, Float32(headroom))
        return self.softmax.exp.exponential_on(x, slope, self.rShift[h])

    @cute.jit
    def packed_scores(self, work: Work, step: Int32, stage: Int32):
        """A block's 16-bit scores of a tile as they count, into rP."""
        s = self.spec
        words = cute.recast_tensor(self.rP, Uint32)
        self.load_packed(work, words, stage)
        if const_expr(s.scaled):
            flip = select(self.call.scale < 0.0, Uint32(0x80008000), Uint32(0))
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = words[i] ^ flip
        rows, column, limits, whole = self.bounds(work, step)
        if const_expr(s.mask):
            for i, bits in enumerate(self.mask_words(work, rows, column)):
                words[i] = self.nothing_but(words[i], bits)
        if (step + 1) * TILE_N > whole:
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = self.nothing_but(words[i], first_bits(limits[i % 2] - column - i // 2 * 8))

    def wide_scores(self, work: Work, step: Int32, stage: Int32) -> list[Float32]:
        """A block's scores of a tile as they count, in float32: scale * scores + bias."""
        s = self.spec
        if s.dtypes[0] == "fp32":
            scores = self.load_wide(stage)
        else:
            self.load_packed(work, cute.recast_tensor(self.rP, Uint32), stage)
            scores = unpack(self.rP)
        rows, column, limits, _ = self.bounds(work, step)
        found = []
        for i, x in enumerate(scores):
            h, c = i // 2 % 2, column + i % 2 + i // 4 * 8
            if s.scaled:
                x = x * self.call.scale
            if s.bias:
                x = x + self.element(DTYPES[s.bias], self.call.bias, work, rows[h], c).to(Float32)
            counts = c < limits[h]
            if s.mask:
                counts = counts & self.kept(work, rows[h], c)
            found.append(select(counts, x, Float32(-float("inf"))))
        return found

    def row_of(self, work: Work, h: int) -> Int32:
        """A thread's h-th row of S."""
        s = self.spec
        row = self.row + 8 * h
        if s.eighths:
            row = row % (s.rows // LINES) * LINES + row // (s.rows // LINES)
        return work.row_tile * s.rows + row

    def bounds(self, work: Work, step: Int32) -> tuple:
        """This thread's rows and first column, the columns that count in its two rows, and in all rows of the block."""
        s = self.spec
        rows = [self.row_of(work, h) for h in range(2)]
        limits, whole = [work.columns, work.columns], work.columns
        if s.causal:
            limits = [cutlass.min(work.columns, row + self.call.offset + 1) for row in rows]
            first = work.row_tile * s.rows + (0 if s.eighths else self.first)
            whole = cutlass.min(whole, first + self.call.offset + 1)
        return rows, step * TILE_N + self.lane % QUAD * 2, limits, whole

    def load_packed(self, work: Work, words: cute.Tensor, stage: Int32):
        """A block's 16-bit scores of a tile as wgmma's operand."""
        if self.spec.lines:
            base = self.base + stage * self.spec.score_stage_bytes
            read_eighths(words, base, self.row, self.lane, work.shifts)
            return
        at = self.sS + stage * self.spec.score_stage_bytes
        for k in range(cute.size(words) // 4):
            # 16 columns are two pieces of 16 bytes, whose index the swizzle only exchanges bits of.
            matrices = ldmatrix(at ^ (32 * k))
            for j in range(4):
                words[4 * k + j] = matrices[j]

    def load_wide(self, stage: Int32) -> list[Float32]:
        """A block's float32 scores of a tile, in the order of wgmma's operand: pairs of 8 bytes."""
        s = self.spec
        found = []
        for i in range(0, 32, 2):
            h, column = i // 2 % 2, i // 4 * 8
            box, inside = divmod(column, BOX // 4)
            row = self.row + 8 * h
            swizzled = (inside * 4 + self.lane % QUAD * 8) ^ (row % 8 * 16)
            at = self.base + stage * s.score_stage_bytes + (box * s.rows + row) * BOX + swizzled
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(in_shared(Float32, at, 2), pair)
            found += [pair[0], pair[1]]
        return found

    def nothing_but(self, word: Uint32, kept: Uint32) -> Uint32:
        """A pair of scores, -inf in the halves whose bits are not kept."""
        return (word & kept) | (Uint32(NOTHING[self.spec.dtypes[0]]) & ~kept)

    def mask_words(self, work: Work, rows: list[Int32], column: Int32) -> list[Uint32]:
        """Per word of wgmma's operand, the bits of the scores that the mask keeps."""
        found = []
        for i in range(16):
            lower, upper = (self.kept(work, rows[i % 2], column + e + i // 2 * 8) for e in range(2))
            bits = select(lower, Uint32(0xFFFF), Uint32(0))
            found.append(bits | select(upper, Uint32(0xFFFF0000), Uint32(0)))
        return found

    def kept(self, work: Work, row: Int32, column: Int32) -> Boolean:
        """Whether the mask keeps a score."""
        return self.element(Uint8, self.call.mask, work, row, column) != 0

    def element(self, dtype: type, operand: tuple, work: Work, row: Int32, column: Int32):
        """What belongs to a score in the mask or the bias."""
        return nearest(dtype, operand, row, column, work.modes, (self.call.rows, self.call.columns))

    def wide_maxima(self, wide: list[Float32]) -> list[Float32]:
        """The maxima of both rows, over the quad."""
        maxima = [tree(online.maximum, [x for i, x in enumerate(wide) if i // 2 % 2 == h]) for h in range(2)]
        return [MAX.lanes((m,), QUAD)[0] for m in maxima]

    def packed_maxima(self, rP: cute.Tensor) -> list[Float32]:
        """The maxima of both rows, over the quad; they travel in the halves of one word."""
        dtype, words = rP.element_type, cute.recast_tensor(rP, Uint32)
        larger = partial(packed_maximum, dtype)
        pairs = [tree(larger, [words[i] for i in range(h, cute.size(words), 2)]) for h in range(2)]
        both = larger(prmt(*pairs, 0x5410), prmt(*pairs, 0x7632))
        for distance in (1, 2):
            both = larger(both, cute.arch.shuffle_sync_bfly(both, offset=distance))
        return unpack(vector_of([both], dtype))

    def total(self, h: int) -> Float32:
        """The sum of a row's exponentials over the quad."""
        total = self.rTotal[h]
        if self.spec.stats:
            return total
        for distance in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        return total

    @cute.jit
    def finish(self, work: Work):
        """Divide by the sums and store."""
        s, call = self.spec, self.call
        dtype = DTYPES[s.dtypes[2]]
        for h in cutlass.range_constexpr(2):
            total = self.total(h)
            sink = self.sink(work, h)
            inverse = self.softmax.inverse(total, self.rRef[h], call.scale, sink)
            row = self.row_of(work, h)
            inside = row < call.rows
            group = Int64(work.batch) * call.rows + row
            # Four lanes hold neighbouring pairs of columns.
            for j in cutlass.range_constexpr(s.depth // 32):
                column = work.depth_tile * s.depth + 32 * j
                words = self.quotients(h, j, inverse)
                if const_expr(s.vector == 8):
                    column = column + self.lane % QUAD * 8
                    exchange(words, self.lane)
                    at = group * call.depth + column
                    put_if(inside & (column < call.depth), dtype, call.out, at, words, 0, 8)
                else:
                    for e in cutlass.range_constexpr(0, 8, s.vector):
                        c = column + self.lane % QUAD * 2 + e // 2 * 8 + e % 2
                        at = group * call.depth + c
                        put_if(inside & (c < call.depth), dtype, call.out, at, words, e, s.vector)
            if const_expr(s.lse):
                one = cute.make_rmem_tensor(1, Float32)
                one[0] = self.softmax.log_sum(self.rRef[h], total, call.scale, sink)
                first = (self.lane % QUAD == 0) & (work.depth_tile == 0)
                put_if(inside & first, Float32, call.lse, group, one, 0, 1)

    def sink(self, work: Work, h: int) -> Float32 | None:
        """The sink of a thread's h-th row, if there is one."""
        if not self.spec.sink:
            return None
        return sink_of(self.spec, self.call.sink, self.row_of(work, h), work.modes, self.call.rows)

    def quotients(self, h: int, j: int, inverse: Float32) -> cute.Tensor:
        """This thread's results among 32 columns of a row, rounded: four pairs, 8 columns apart."""
        rounded = cute.make_rmem_tensor(8, DTYPES[self.spec.dtypes[2]])
        pack((self.rO[16 * j + 4 * (e // 2) + 2 * h + e % 2] * inverse for e in range(8)), rounded)
        return rounded


def block_of(
    tiles: Tiles,
    tiled_mma: cute.TiledMma,
    base: Int32,
    first: Int32 | int,
    row: Int32,
    read: tuple[Int32, Int32],
    lane: Int32,
) -> Block:
    """A block of four warps. read: (row of the CTA's tile, 16-byte piece) that this lane gives to the first ldmatrix.
    Else as `Block`."""
    spec = tiles.spec
    operand = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((BLOCK_ROWS, TILE_N)))
    # With one block its product is under way while its operand is prepared anew.
    alone = spec.instruction == "wgmma" and spec.blocks == 1
    return Block(
        tiles=tiles,
        lane=lane,
        first=first,
        row=row,
        base=base,
        sS=base + read[0] * BOX + read[1] * ALIGNMENT,
        rO=tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((BLOCK_ROWS, spec.depth))),
        rA=operand,
        rP=cute.make_rmem_tensor_like(operand) if alone else operand,
        rRef=cute.make_rmem_tensor(2, Float32),
        rSlope=cute.make_rmem_tensor(2, Float32),
        rShift=cute.make_rmem_tensor(2, Float32),
        rTotal=cute.make_rmem_tensor(2, Float32),
        rSum=cute.make_rmem_tensor(2, Float32),
        rFall=cute.make_rmem_tensor(3, Float32),
    )


def exchange(numbers: cute.Tensor, lane: Int32):
    """Transpose four pairs in each lane of a quad: lane i gets the i-th ones of all lanes: eight columns side by
    side."""
    words = cute.recast_tensor(numbers, Uint32)
    for distance in (1, 2):
        upper = (lane & distance) != 0
        for a in (i for i in range(4) if not i & distance):
            kept, given = (
                select(upper, words[x], words[y]) for x, y in ((a + distance, a), (a, a + distance))
            )
            taken = cute.arch.shuffle_sync_bfly(given, offset=distance)
            words[a] = select(upper, taken, kept)
            words[a + distance] = select(upper, kept, taken)


def copy_words(source: cute.Tensor, target: cute.Tensor):
    """Copy registers so that ptxas sees them: it would take both for one and make products wait for each other."""
    words, copies = cute.recast_tensor(source, Uint32), cute.recast_tensor(target, Uint32)
    for i in range(cute.size(words)):
        copies[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[i]]
        )


def first_bits(count: Int32) -> Uint32:
    """The bits of the first `count` halves of a word, of which there are two."""
    bits = select(count > 1, Uint32(0xFFFFFFFF), Uint32(0xFFFF))
    return select(count > 0, bits, Uint32(0))


def prmt(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Four bytes chosen from two words."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )
