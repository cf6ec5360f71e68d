"""The states of row slices, gathered from all ranks, merged into numbers of whole rows: one thread a row.

A part of a row is one rank's; the others have the state of nothing in its place, which changes no bit. Parts are merged
in the order of blocks and ranks, so that every rank computes the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.shards import MERGE_THREADS, MergeClass
from ..common import online
from ..common.copy import DTYPES, element
from ..common.index import ceil_div, select, wide
from ..common.online import Precise
from ..common.reduce import Averaged, Online, Weighted

UNROLL = 8
INDEX_ERROR = "cute_softmax: index %lld in row %d is out of range: a row has %lld elements"


def place_of(
    row: Int32, rank: Int32, block: Int32, i: int, rows: Int32, blocks: Int32, numbers: int
) -> Int64:
    """Where the states have number i of a part: `MergePlan.states` of numbers that a launch knows."""
    return ((wide(rank) * numbers + i) * blocks + block) * rows + row


class MergeKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.shards`."""

    def __init__(self, spec: MergeClass):
        self.spec = spec
        self.result = DTYPES[spec.dtypes[0]]
        self.exp = Precise()
        # Exponents are natural here, as the numbers of states are.
        self.op = (Weighted if spec.weighted else Averaged if spec.even else Online)(self.exp)

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int32,
        ranks: Int32,
        blocks: Int32,
        ignore: Int64,
        size: Int64,
        smoothing: Int64,
        squares: Int64,
        *addresses: Int64,
    ):
        """Launch. addresses: of the class's operands."""
        self.kernel(rows, ranks, blocks, ignore, size, smoothing, squares, addresses).launch(
            grid=[ceil_div(rows, MERGE_THREADS), 1, 1], block=[MERGE_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        rows: Int32,
        ranks: Int32,
        blocks: Int32,
        ignore: Int64,
        size: Int64,
        smoothing: Int64,
        squares: Int64,
        addresses: tuple,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row = cta * MERGE_THREADS + tidx
        mX = dict(zip(self.spec.operands, addresses, strict=True))
        if row < rows:
            if const_expr(self.spec.math == "sum"):
                total = Float32(0.0)
                for block in cutlass.range(blocks):
                    for rank in cutlass.range(ranks, unroll=UNROLL):
                        total = total + self.number(mX["states"], row, rank, block, 0, rows, blocks)
                element(Float32, mX["whole"], row)[0] = total
            else:
                state = self.merged(mX["states"], row, rows, ranks, blocks)
                index = ignore
                if const_expr(self.spec.chosen):
                    index = element(Int64, mX["index"], row)[0]
                self.write(mX, row, rows, state, index, ignore, size, smoothing, squares)

    def number(
        self, address: Int64, row: Int32, rank: Int32, block: Int32, i: int, rows: Int32, blocks: Int32
    ) -> Float32:
        """Number i of the state of a part."""
        return element(Float32, address, place_of(row, rank, block, i, rows, blocks, self.spec.numbers))[0]

    @cute.jit
    def merged(self, address: Int64, row: Int32, rows: Int32, ranks: Int32, blocks: Int32):
        """(maximum, sums relative to it, the chosen score) of a whole row: first the maximum, so that each part's sums
        are moved once."""
        s = self.spec
        top, score = Float32(-float("inf")), Float32(-float("inf"))
        for block in cutlass.range(blocks):
            for rank in cutlass.range(ranks, unroll=UNROLL):
                top = online.maximum(top, self.number(address, row, rank, block, 0, rows, blocks))
                if const_expr(s.chosen):
                    of_part = self.number(address, row, rank, block, 2 + s.weighted, rows, blocks)
                    score = online.maximum(score, of_part)
        sums = [Float32(0.0) for _ in range(1 + s.weighted + 2 * s.even)]
        first = 3 if const_expr(s.chosen and not s.weighted) else 2
        for block in cutlass.range(blocks):
            for rank in cutlass.range(ranks, unroll=UNROLL):
                places = [0, 1, *range(first, first + len(sums) - 1)]
                part = [self.number(address, row, rank, block, i, rows, blocks) for i in places]
                moved = self.op.seen_from(tuple(part), top)
                sums = [a + b for a, b in zip(sums, moved, strict=True)]
        return top, sums, score

    @cute.jit
    def write(
        self,
        mX: dict,
        row: Int32,
        rows: Int32,
        state: tuple,
        index: Int64,
        ignore: Int64,
        size: Int64,
        smoothing: Int64,
        squares: Int64,
    ):
        """Store a row's numbers."""
        s, (top, sums, score) = self.spec, state
        log = self.exp.log(sums[0], online.reference(top))
        infinity = Float32(float("inf"))
        numbers = {"lse": select(top == infinity, infinity, top + log)}  # as of a row that is one rank's
        whole = [top, sums[0]]
        if const_expr(s.weighted):
            numbers["entropy"] = log - sums[1] / sums[0]
            whole.append(numbers["entropy"])
        if const_expr(s.even):
            numbers["even"] = sums[1] / sums[2] - log
        if const_expr(s.chosen):
            numbers["found"] = score - top - log
        if const_expr("loss" in s.results):
            loss = -numbers["found"]
            if const_expr(s.even):
                share = Int32(smoothing).bitcast(Float32)
                loss = (1.0 - share) * loss - share * numbers["even"]
            if const_expr(s.squares):
                loss = loss + Int32(squares).bitcast(Float32) * numbers["lse"] * numbers["lse"]
            numbers["loss"] = select(index == ignore, Float32(0.0), loss)
        for i in cutlass.range_constexpr(len(whole)):
            element(Float32, mX["whole"], Int64(rows) * i + row)[0] = whole[i]
        for name in s.results:
            element(self.result, mX[name], row)[0] = numbers[name].to(self.result)
        if const_expr(s.chosen):
            wrong = (size > 0) & ((index < 0) | (index >= size))
            if const_expr("loss" in s.results):
                wrong = wrong & (index != ignore)
            if wrong:
                cute.printf(INDEX_ERROR, index, row, size)
                cute.arch.inline_ptx("trap;")
