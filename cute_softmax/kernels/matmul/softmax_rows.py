"""What softmax(S) @ V does with the rows of S: scores become exponentials, sums are kept, results divided and stored.

A thread holds 16 columns of each of two rows of a block, as the A operand of wgmma has them: element i lies in row
``i // 2 % 2`` (of two, 8 apart) and column ``i % 2 + i // 4 * 8`` after the thread's first. The four lanes of a quad
share their rows.
"""

import operator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...plan.matmul_class import TILE_N
from ...plan.matmul_layouts import LINES
from ..common import online, tensor_cores
from ..common.copy import DTYPES, global_pointer, packed_maximum, unpack
from ..common.index import dot
from ..common.reduce import MAX, tree
from .unaligned import QUAD

STEP_PRODUCTS = TILE_N // 16  # wgmma takes 16 terms at a time
# The exponential of a row's reference is 2 ** HEADROOM, as small exponentials lose bits in float16, and a thread's sum
# of 16 exponentials may reach BOUND before the reference is moved: below what float16 holds, and so high that it rarely
# happens.
HEADROOM = 4.0
BOUND = 2.0**14
KNOWN_HEADROOM = 14.0  # where sums are given: then no exponential exceeds 1
NOTHING = {"bf16": 0xFF80FF80, "fp16": 0xFC00FC00}  # -inf in both halves of a word
TINY = 1e-30  # a scale of 0 leaves masked scores masked


class Rows:
    """The part of `MatmulKernel` that knows softmax."""

    def begin(self, this, block, work):
        """A block of rows of which nothing has been seen."""
        block.rO.fill(0.0)
        if self.spec.stats:
            self.know(this, block, work)
            return
        block.rTotal.fill(0.0)
        block.rRef.fill(-float("inf"))
        block.rSlope.fill(0.0)
        block.rShift.fill(0.0)

    def know(self, this, block, work):
        """Let the rows' exponentials refer to their given log-sum-exps; rTotal is what results are multiplied by.

        That takes back what all exponents of 2 have in common, the rounding of the log-sum-exp's among it."""
        slope = self.factor(this.scale) * Float32(online.LOG2_E)
        for h in range(2):
            row = cutlass.min(self.row(work, block, h), this.rows - 1)
            lse = get(this.results[-1], Int64(work.batch) * this.rows + row)
            block.rRef[h], block.rSlope[h] = lse, slope
            base = finite(lse)
            shift = cute.math.fma(-base, Float32(online.LOG2_E), Float32(KNOWN_HEADROOM))
            block.rShift[h] = shift
            # Scores in float32 are subtracted from first, see `exponential`.
            raised = cute.math.fma(base, Float32(online.LOG2_E), shift)
            raised = Float32(KNOWN_HEADROOM) if self.spec.dtypes[0] == "fp32" else raised
            # NaN where the log-sum-exp is infinite: of a row with +inf, or with nothing.
            inverse = cute.math.exp2(-raised, fastmath=True) + (lse - lse)
            if self.spec.zero:
                nothing = lse == Float32(-float("inf"))
                inverse = Float32(cutlass.select_(nothing, Float32(0.0), inverse))
            block.rTotal[h] = inverse

    @cute.jit
    def take_over(self, block):
        """Let a block's sums and accumulators refer to what its latest exponentials refer to; these become its
        operand."""
        rTotal, rO, rFall = block.rTotal, block.rO, block.rFall
        if const_expr(not self.spec.stats):
            if rFall[2] != 0.0:
                for i in cutlass.range_constexpr(cute.size(rO)):
                    rO[i] = rO[i] * rFall[i // 2 % 2]
                for h in cutlass.range_constexpr(2):
                    rTotal[h] = rTotal[h] * rFall[h]
            for h in cutlass.range_constexpr(2):
                rTotal[h] = rTotal[h] + block.rSum[h]
        if const_expr(block.rA is not block.rP):
            copy_words(block.rP, block.rA)

    @cute.jit
    def prepare(
        self, this, block, work, step: Int32, stage: Int32, phase: Int32, lane: Int32, product: tuple | None
    ):
        """Turn a block's rows of the next tile of scores into exponentials in rP and their sums in rSum.

        They refer to what the rows' earlier exponentials refer to. Where a sum tells that this lies too low, the tile's
        maximum is found and the exponentials evaluated again; rFall says what becomes of the earlier ones.
        product: see `multiply`; begun meanwhile, in pieces, as a warp that issues one waits for the one before.
        """
        if const_expr(block.begins):
            this.scores.wait(stage, phase)
        if const_expr((self.spec.wide or self.spec.mask) and product is not None):
            # What is loaded besides takes the registers that this would need.
            for k in cutlass.range_constexpr(STEP_PRODUCTS):
                multiply(product, k)
            product = None
        if const_expr(self.spec.wide):
            self.evaluate(block, self.wide_scores(this, block, work, step, stage, lane), None)
        else:
            self.packed_scores(this, block, work, step, stage, lane)
            self.evaluate(block, None, product)
        if const_expr(not self.spec.stats):
            self.catch_up(this, block, work, step, stage, lane)
        if const_expr(block.ends):
            this.scores.release(stage, lane)

    @cute.jit
    def catch_up(self, this, block, work, step: Int32, stage: Int32, lane: Int32):
        """Where the sums of a tile's exponentials tell that their reference lies too low, find it and the exponentials
        again."""
        rRef, rSum, rFall = block.rRef, block.rSum, block.rFall
        outgrown = [(rSum[h] > Float32(BOUND)) | (rRef[h] == Float32(-float("inf"))) for h in range(2)]
        rFall[2] = 0.0
        if cute.arch.vote_any_sync(outgrown[0] | outgrown[1]):
            rFall[2] = 1.0
            if const_expr(self.spec.wide):
                wide = self.wide_scores(this, block, work, step, stage, lane)
                self.refer(this, block, self.wide_maxima(wide))
                self.evaluate(block, wide, None)
            else:
                self.packed_scores(this, block, work, step, stage, lane)
                self.refer(this, block, self.packed_maxima(block.rP))
                self.evaluate(block, None, None)

    def refer(self, this, block, maxima: list[Float32]):
        """Let the rows' exponentials refer to the largest scores seen, the tile's maxima included."""
        scale = self.factor(this.scale)
        for h in range(2):
            old, new = block.rRef[h], cute.arch.fmax(block.rRef[h], maxima[h])
            block.rRef[h] = new
            new = finite(new)
            slope = self.exp.slope(new, scale)
            block.rSlope[h] = slope
            block.rShift[h] = self.exp.shift(new, slope, HEADROOM)
            block.rFall[h] = self.exp.fall(finite(old), new, slope)

    def factor(self, scale: Float32) -> Float32:
        """What packed scores are multiplied by in the exponent; their sign is changed before."""
        if self.spec.wide or not self.spec.scaled:
            return Float32(1.0)
        return cute.arch.fmax(cute.arch.fmax(scale, -scale), Float32(TINY))

    def evaluate(self, block, wide: list[Float32] | None, product: tuple | None):
        """The powers of the scores in rP, or of wide ones, into rP, and the sums of this thread's; among them the
        pieces of a product."""
        rP = block.rP
        sums = [[], []]
        for k in range(0, cute.size(rP), 8):
            if product is not None:
                multiply(product, k // 8)
            part = cute.make_rmem_tensor(8, rP.element_type)
            for j in range(8):
                part[j] = rP[k + j]
            x = unpack(part) if wide is None else wide[k : k + 8]
            exponentials = [self.exponential(block, x[j], j // 2 % 2) for j in range(8)]
            for h in range(0 if self.spec.stats else 2):
                sums[h].append(tree(operator.add, [p for j, p in enumerate(exponentials) if j // 2 % 2 == h]))
            rounded = cute.make_rmem_tensor(8, Float32)
            for j in range(8):
                rounded[j] = exponentials[j]
            part.store(rounded.load().to(rP.element_type))
            for j in range(8):
                rP[k + j] = part[j]
        for h in range(0 if self.spec.stats else 2):
            block.rSum[h] = tree(operator.add, sums[h])

    def exponential(self, block, x: Float32, h: int) -> Float32:
        """exp(scale * (x - ref)) * 2 ** headroom; scores in float32 lie too close for a rounded product."""
        slope = block.rSlope[h]
        if self.spec.dtypes[0] == "fp32":
            headroom = KNOWN_HEADROOM if self.spec.stats else HEADROOM
            return self.exp.exponential_on(x - finite(block.rRef[h]), slope, Float32(headroom))
        return self.exp.exponential_on(x, slope, block.rShift[h])

    @cute.jit
    def packed_scores(self, this, block, work, step: Int32, stage: Int32, lane: Int32):
        """A block's 16-bit scores of a tile as they count, into rP."""
        s = self.spec
        words = cute.recast_tensor(block.rP, Uint32)
        self.load_packed(block, work, words, stage, lane)
        if const_expr(s.scaled):
            flip = Uint32(cutlass.select_(this.scale < 0.0, Uint32(0x80008000), Uint32(0)))
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = words[i] ^ flip
        rows, column, limits, whole = self.bounds(this, block, work, step, lane)
        if const_expr(s.mask):
            for i, bits in enumerate(self.mask_words(this, work, rows, column)):
                words[i] = self.nothing_but(words[i], bits)
        if (step + 1) * TILE_N > whole:
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = self.nothing_but(words[i], first_bits(limits[i % 2] - column - i // 2 * 8))

    def wide_scores(self, this, block, work, step: Int32, stage: Int32, lane: Int32) -> list[Float32]:
        """A block's scores of a tile as they count, in float32: scale * scores + bias."""
        s = self.spec
        if s.dtypes[0] == "fp32":
            scores = self.load_wide(block, stage, lane)
        else:
            self.load_packed(block, work, cute.recast_tensor(block.rP, Uint32), stage, lane)
            scores = unpack(block.rP)
        rows, column, limits, _ = self.bounds(this, block, work, step, lane)
        found = []
        for i, x in enumerate(scores):
            h, c = i // 2 % 2, column + i % 2 + i // 4 * 8
            if s.scaled:
                x = x * this.scale
            if s.bias:
                x = x + self.element(this, work, this.bias, DTYPES[s.bias], rows[h], c).to(Float32)
            counts = c < limits[h]
            if s.mask:
                counts = counts & (self.element(this, work, this.mask, Uint8, rows[h], c) != 0)
            found.append(Float32(cutlass.select_(counts, x, Float32(-float("inf")))))
        return found

    def row(self, work, block, h: int) -> Int32:
        """A thread's h-th row of S."""
        s = self.spec
        row = block.row + 8 * h
        if s.eighths:
            row = row % (s.rows // LINES) * LINES + row // (s.rows // LINES)
        return work.row_tile * s.rows + row

    def bounds(self, this, block, work, step: Int32, lane: Int32) -> tuple:
        """This thread's rows and first column, the columns that count in its two rows, and in all rows of the block."""
        s = self.spec
        rows = [self.row(work, block, h) for h in range(2)]
        limits, whole = [work.columns, work.columns], work.columns
        if s.causal:
            limits = [cutlass.min(work.columns, row + this.offset + 1) for row in rows]
            first = work.row_tile * s.rows + (0 if s.eighths else block.first)
            whole = cutlass.min(whole, first + this.offset + 1)
        return rows, step * TILE_N + lane % QUAD * 2, limits, whole

    def load_packed(self, block, work, words: cute.Tensor, stage: Int32, lane: Int32):
        """A block's 16-bit scores of a tile as wgmma's operand."""
        if self.spec.lines:
            self.read_eighths(block, work, words, stage, lane)
            return
        at = block.sS + stage * self.spec.score_stage_bytes
        for k in range(cute.size(words) // 4):
            # 16 columns are two pieces of 16 bytes, whose index the swizzle only exchanges bits of.
            matrices = tensor_cores.ldmatrix(at ^ (32 * k))
            for j in range(4):
                words[4 * k + j] = matrices[j]

    def load_wide(self, block, stage: Int32, lane: Int32) -> list[Float32]:
        """A block's float32 scores of a tile, in the order of wgmma's operand: pairs of 8 bytes."""
        s = self.spec
        found = []
        for i in range(0, 32, 2):
            h, column = i // 2 % 2, i // 4 * 8
            box, inside = divmod(column, tensor_cores.BOX // 4)
            row = block.row + 8 * h
            swizzled = (inside * 4 + lane % QUAD * 8) ^ (row % 8 * 16)
            at = block.base + stage * s.score_stage_bytes + (box * s.rows + row) * tensor_cores.BOX + swizzled
            pointer = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=8)
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
            found += [pair[0], pair[1]]
        return found

    def nothing_but(self, word: Uint32, kept: Uint32) -> Uint32:
        """A pair of scores, -inf in the halves whose bits are not kept."""
        return (word & kept) | (Uint32(NOTHING[self.spec.dtypes[0]]) & ~kept)

    def mask_words(self, this, work, rows: list[Int32], column: Int32) -> list[Uint32]:
        """Per word of wgmma's operand, the bits of the scores that the mask keeps."""
        found = []
        for i in range(16):
            lower, upper = (
                self.element(this, work, this.mask, Uint8, rows[i % 2], column + e + i // 2 * 8) != 0
                for e in range(2)
            )
            bits = Uint32(cutlass.select_(lower, Uint32(0xFFFF), Uint32(0)))
            found.append(bits | Uint32(cutlass.select_(upper, Uint32(0xFFFF0000), Uint32(0))))
        return found

    def element(self, this, work, operand: tuple, dtype: type, row: Int32, column: Int32):
        """An element of the mask or the bias; beyond their edges the last one."""
        address, *strides = operand
        at = [cutlass.min(row, this.rows - 1), cutlass.min(column, this.columns - 1), *work.modes]
        pointer = global_pointer(dtype, address, dot(at, strides), dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]

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
        rMax = cute.make_rmem_tensor(2, dtype)
        cute.recast_tensor(rMax, Uint32)[0] = both
        return unpack(rMax)

    def total(self, block, h: int) -> Float32:
        """The sum of a row's exponentials over the quad."""
        total = block.rTotal[h]
        if self.spec.stats:
            return total
        for distance in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        return total

    def log_sum(self, ref: Float32, total: Float32, scale: Float32) -> Float32:
        """The logarithm of a row's sum of exponentials."""
        return finite(ref) * self.factor(scale) + cute.math.log(total) - Float32(HEADROOM * online.LN_2)

    @cute.jit
    def finish(self, this, block, work, lane: Int32):
        """Divide by the sums and store."""
        s = self.spec
        dtype = self.dtypes[2]
        for h in cutlass.range_constexpr(2):
            total = self.total(block, h)
            inverse = self.inverse(total)
            row = self.row(work, block, h)
            inside = row < this.rows
            group = Int64(work.batch) * this.rows + row
            # Four lanes hold neighbouring pairs of columns.
            for j in cutlass.range_constexpr(s.depth // 32):
                column = work.depth_tile * s.depth + 32 * j
                words = self.quotients(block, h, j, inverse)
                if const_expr(s.vector == 8):
                    column = column + lane % QUAD * 8
                    exchange(words, lane)
                    at = group * this.depth + column
                    put_if(inside & (column < this.depth), dtype, this.results[0], at, words, 0, 8)
                else:
                    for e in cutlass.range_constexpr(0, 8, s.vector):
                        c = column + lane % QUAD * 2 + e // 2 * 8 + e % 2
                        at = group * this.depth + c
                        put_if(inside & (c < this.depth), dtype, this.results[0], at, words, e, s.vector)
            if const_expr(s.lse):
                one = cute.make_rmem_tensor(1, Float32)
                one[0] = self.log_sum(block.rRef[h], total, this.scale)
                first = (lane % QUAD == 0) & (work.depth_tile == 0)
                put_if(inside & first, Float32, this.results[1], group, one, 0, 1)

    def quotients(self, block, h: int, j: int, inverse: Float32) -> cute.Tensor:
        """This thread's results among 32 columns of a row, rounded: four pairs, 8 columns apart."""
        quotients = cute.make_rmem_tensor(8, Float32)
        for e in range(8):
            quotients[e] = block.rO[16 * j + 4 * (e // 2) + 2 * h + e % 2] * inverse
        rounded = cute.make_rmem_tensor(8, self.dtypes[2])
        rounded.store(quotients.load().to(self.dtypes[2]))
        return rounded

    def inverse(self, total: Float32) -> Float32:
        """What a row's sums are multiplied by."""
        if self.spec.stats:
            return total
        inverse = cute.arch.rcp_approx(total)
        if self.spec.zero:
            inverse = Float32(cutlass.select_(total == 0.0, Float32(0.0), inverse))
        return inverse


def exchange(numbers: cute.Tensor, lane: Int32):
    """Transpose four pairs in each lane of a quad: lane i gets the i-th ones of all lanes: eight columns side by
    side."""
    words = cute.recast_tensor(numbers, Uint32)
    for distance in (1, 2):
        upper = (lane & distance) != 0
        for a in (i for i in range(4) if not i & distance):
            kept, given = (
                Uint32(cutlass.select_(upper, words[x], words[y]))
                for x, y in ((a + distance, a), (a, a + distance))
            )
            taken = cute.arch.shuffle_sync_bfly(given, offset=distance)
            words[a] = Uint32(cutlass.select_(upper, taken, kept))
            words[a + distance] = Uint32(cutlass.select_(upper, kept, taken))


def multiply(product: tuple, k: int):
    """The k-th piece of a product, 16 of a tile's rows of V: (tiled mma, block, the tile as operand)."""
    tiled_mma, block, tOrV = product
    if k == 0:
        warpgroup.fence()
    cute.gemm(tiled_mma, block.rO, block.rA[(None, None, k)], tOrV[(None, None, k)], block.rO)
    if k == STEP_PRODUCTS - 1:
        warpgroup.commit_group()


def copy_words(source: cute.Tensor, target: cute.Tensor):
    """Copy registers so that ptxas sees them: it would take both for one and make products wait for each other."""
    words, copies = cute.recast_tensor(source, Uint32), cute.recast_tensor(target, Uint32)
    for i in range(cute.size(words)):
        copies[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[i]]
        )


def put(dtype: type, address: Int64, at: Int64, numbers: cute.Tensor, first: int, count: int):
    """Store `count` of a thread's numbers side by side in global memory, element `at` on."""
    pointer = global_pointer(dtype, address, at, count * dtype.width // 8)
    layout = cute.make_layout(count)
    cute.autovec_copy(cute.make_tensor(numbers.iterator + first, layout), cute.make_tensor(pointer, layout))


@cute.jit
def put_if(
    condition: Boolean,
    dtype: cutlass.Constexpr,
    address: Int64,
    at: Int64,
    numbers: cute.Tensor,
    first: cutlass.Constexpr[int],
    count: cutlass.Constexpr[int],
):
    """`put` where a condition holds."""
    if condition:
        put(dtype, address, at, numbers, first, count)


def get(address: Int64, at: Int64) -> Float32:
    """Element `at` of float32 numbers in global memory."""
    return cute.make_tensor(global_pointer(Float32, address, at, 4), cute.make_layout(1))[0]


def finite(ref: Float32) -> Float32:
    """A reference; 0 for rows that have seen nothing but -inf."""
    return Float32(cutlass.select_(ref == Float32(-float("inf")), Float32(0.0), ref))


def first_bits(count: Int32) -> Uint32:
    """The bits of the first `count` halves of a word, of which there are two."""
    bits = Uint32(cutlass.select_(count > 1, Uint32(0xFFFFFFFF), Uint32(0xFFFF)))
    return Uint32(cutlass.select_(count > 0, bits, Uint32(0)))


def prmt(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Four bytes chosen from two words."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )
