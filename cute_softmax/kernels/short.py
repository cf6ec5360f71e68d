"""The short movement: rows of a few elements that lie one behind another.

A warp has a *stretch* of neighbouring rows, contiguous in memory. It is loaded in aligned vectors, all lanes side by
side whatever the length of rows, and laid into shared memory as it is; each thread then takes rows of its own out of
it, whole ones, and puts their results in their places. From there they are stored as they were loaded:

    memory         | vector | vector | vector | vector | ...     lane by lane, coalesced
    shared memory  | row  | row  | row  | row  | row  | ...      a row a thread

Where vectors hold whole rows (of 1, 2, 4 or 8 elements) these stay in the registers that they were loaded to.

    coordinates -> stretch -> shared memory -> load -> read -> reduce -> finish -> write -> store

Warps do not wait for each other. Names: as in `row`. `short_work` has the coordinates and predicates, `short_rows` the
way between shared memory and registers.
"""

from collections.abc import Iterator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from layouts.trace import observe

from ..plan import WARP
from ..plan.short import ShortClass
from . import short_work
from .common.copy import (
    DTYPES,
    Fragment,
    global_pointer,
    global_tensors,
    in_global,
    load,
    load_async,
    pack,
    read_policy,
    store,
)
from .maths.maths import RowMath
from .short_rows import SharedRows, Stretch, part


class ShortKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.short.ShortClass`.
    math: a row math of `maths`.
    """

    def __init__(self, spec: ShortClass, math: RowMath):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.held = SharedRows(spec, math)
        self.inputs = range(len(math.inputs))
        self.outputs = range(len(math.inputs), spec.facts.full)
        self.group_outputs = range(spec.facts.full, len(spec.dtypes))

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int64,
        columns: Int32,
        warp_rows: Int32,
        ctas: Int32,
        evict_last: Int32,
        *operands: Int64,
    ):
        """Launch.

        warp_rows: rows of a warp's stretch. ctas: of the grid. evict_last: whether reads ask L2 to keep them, see
        `copy.read_policy`. operands: the address of each full operand in bytes, then (address, stride in elements) of
        each group output.
        """
        s = self.spec
        self.kernel(rows, columns, warp_rows, evict_last, operands).launch(
            grid=[ctas, 1, 1],
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
        )

    @cute.kernel
    def kernel(self, rows: Int64, columns: Int32, warp_rows: Int32, evict_last: Int32, operands: tuple):
        s, F = self.spec, self.spec.facts.full

        # Coordinates: the thread's lane, and which stretch its warp has.
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        cta, _, _ = cute.arch.block_idx()
        number = Int64(cta) * s.warps + warp
        if const_expr(s.columns > 0):
            columns = Int32(s.columns)  # which the compiler then knows
        left = short_work.elements_left(rows, columns, number, warp_rows)

        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)

        # Shared memory: a part for each warp, in which results take the place of inputs.
        smem = cutlass.memory.SmemAllocator()
        sX = [] if const_expr(s.whole) else self.held.allocate(smem, warp)

        stretch = Stretch(
            lane=lane,
            columns=columns,
            tv=tv,
            begin=number * warp_rows * columns,
            first_row=number * warp_rows,
            left=left,
            rows=left // columns,
            mX=global_tensors(self.dtypes[:F], operands[:F], 0)
            + global_tensors(self.dtypes[F:], operands[F:], 1),
            sX=sX,
            policy=read_policy(evict_last),
            skew=short_work.skew_of(columns, s.vector),
            pairs=short_work.in_pairs(s, columns, warp_rows),
        )
        if left > 0:
            if const_expr(s.whole):
                self.whole_rows(stretch)
            else:
                self.load(stretch)
                cute.arch.sync_warp()
                for group in cutlass.range(warp_rows // (WARP * s.rows_per_thread), unroll=1):
                    self.rows(stretch, group)
                if const_expr(len(self.outputs) > 0):
                    cute.arch.sync_warp()
                    self.store(stretch)

    # Vectors of a stretch.

    def vector_at(self, stretch: Stretch, i: int, k: int) -> cute.Tensor:
        """gX: vector k of this lane, of operand i in global memory."""
        mX = stretch.mX[i]
        at = stretch.begin + self.first_of(stretch, k)
        return in_global(mX.dtype, mX.address, at, self.spec.vector, self.spec.access[i] * mX.itemsize)

    def first_of(self, stretch: Stretch, k: int) -> Int32:
        """The element of the stretch that vector k of this lane begins with."""
        return cute.crd2idx((stretch.lane, (0, k)), stretch.tv)

    @cute.jit
    def load(self, stretch: Stretch):
        """Load a stretch into shared memory. What does not exist stays as it is: nothing of it is stored."""
        s = self.spec
        for k in cutlass.range_constexpr(s.steps):
            first = self.first_of(stretch, k)
            place = short_work.place_of_step(stretch.lane, k, stretch.skew)
            for i in self.inputs:
                tXgX = self.vector_at(stretch, i, k)
                if first + s.vector <= stretch.left:
                    load_async(tXgX, self.held.place(stretch, i, place), s.access[i], stretch.policy)
        # The elements behind the last whole vector.
        whole = stretch.left // s.vector
        if whole * s.vector + stretch.lane < stretch.left:
            for i in self.inputs:
                gX = stretch.mX[i].element(stretch.begin + whole * s.vector + stretch.lane)
                load_async(gX, self.held.element_at(stretch, i, whole), 1, stretch.policy)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def store(self, stretch: Stretch):
        """Store a stretch of results from shared memory."""
        s = self.spec
        for k in cutlass.range_constexpr(s.steps):
            first = self.first_of(stretch, k)
            place = short_work.place_of_step(stretch.lane, k, stretch.skew)
            for i in self.outputs:
                tXgY = self.vector_at(stretch, i, k)
                if first + s.vector <= stretch.left:
                    tXrY = cute.make_rmem_tensor(s.vector, self.dtypes[i])
                    cute.autovec_copy(self.held.place(stretch, i, place), tXrY)
                    self.store_vector(tXrY, tXgY, s.access[i])
        whole = stretch.left // s.vector
        if whole * s.vector + stretch.lane < stretch.left:
            for i in self.outputs:
                gY = stretch.mX[i].element(stretch.begin + whole * s.vector + stretch.lane)
                gY[0] = self.held.element_at(stretch, i, whole)[0]

    def store_vector(self, src: cute.Tensor, dst: cute.Tensor, access: int):
        """Registers to global memory, `access` elements at a time."""
        for j in range(0, cute.size(src), access):
            to = dst.iterator + cute.crd2idx(j, dst.layout)
            store(part(src, j, access), cute.make_tensor(to, cute.make_layout(access)))

    # Rows of a thread.

    @cute.jit
    def rows(self, stretch: Stretch, group: Int32):
        """Some rows of each thread, from shared memory and back to it."""
        s = self.spec
        R = s.rows_per_thread
        at = [short_work.row_of(stretch.lane, group * R + r, stretch.pairs) for r in range(R)]
        rX = [[self.held.read(stretch, i, row) for i in self.inputs] for row in at]
        found = [self.results([self.fragment(x) for x in of_row]) for of_row in rX]
        for r in cutlass.range_constexpr(R):
            results, groups = found[r]
            for j in cutlass.range_constexpr(len(self.outputs)):
                i = self.outputs[j]
                rY = self.held.empty(i)
                for k in cutlass.range_constexpr(s.capacity // s.piece):
                    pack(results[j], rY[None, k])
                self.held.exchange(stretch, i, at[r], self.held.flat(rY), True)
            for j in cutlass.range_constexpr(len(self.group_outputs)):
                i = self.group_outputs[j]
                gX = self.number_of(stretch, i, at[r])
                if at[r] < stretch.rows:
                    gX[0] = groups[j].to(self.dtypes[i])

    def number_of(self, stretch: Stretch, i: int, row: Int32) -> cute.Tensor:
        """gX: what group output i has for a row of the stretch, and behind it those of the next rows."""
        mX, access = stretch.mX[i], self.spec.access[i]
        stride = mX.kept[0] if access == 1 else 1
        start = global_pointer(mX.dtype, mX.address, (stretch.first_row + row) * stride, access * mX.itemsize)
        return cute.make_tensor(start, cute.make_layout(self.spec.rows_per_thread, stride=stride))

    def fragment(self, rX: cute.Tensor) -> Fragment:
        """A row in registers, as maths look at it."""
        pieces = [partial(self.piece, rX, k) for k in range(cute.size(rX, mode=[1]))]
        return Fragment(pieces, [], not self.math.keep)

    def piece(self, rX: cute.Tensor, k: int) -> cute.Tensor:
        return rX[None, k]

    def results(self, values: list[Fragment]) -> tuple[list[Iterator], list]:
        """(results of a row by output, numbers by group output). The whole row is one thread's: no lanes meet."""
        math, carry, kept = self.math.for_row(values), [], None
        for stage in range(len(math.reductions)):
            state, kept = math.partial(stage, values, carry, 1)
            carry.append(state)
        state = sum(carry, ())
        results = math.finish(values, kept, state) if len(self.outputs) else []
        return [iter(r) for r in results], math.group_results(state) if len(self.group_outputs) else []

    # Whole rows in a vector.

    @cute.jit
    def whole_rows(self, stretch: Stretch):
        """A stretch of rows of which a vector holds several, or one."""
        s = self.spec
        R, K = s.rows_per_thread, s.steps
        rX = [cute.make_rmem_tensor((s.vector, K), self.dtypes[i]) for i in self.inputs]
        for i in self.inputs:
            rX[i].fill(self.dtypes[i](self.math.padding[i]))
        for k in cutlass.range_constexpr(K):
            first = self.first_of(stretch, k)
            for i in self.inputs:
                tXgX = self.vector_at(stretch, i, k)
                if first + s.vector <= stretch.left:
                    load(tXgX, rX[i][None, k], s.access[i], stretch.policy)
                else:
                    for e in cutlass.range_constexpr(s.vector):
                        if first + e < stretch.left:
                            rX[i][e, k] = tXgX[e]
        for k in cutlass.range_constexpr(K):
            found = [self.results([self.row_in(rX[i], r, k) for i in self.inputs]) for r in range(R)]
            first = self.first_of(stretch, k)
            for j in cutlass.range_constexpr(len(self.outputs)):
                i = self.outputs[j]
                rY = cute.make_rmem_tensor(s.vector, self.dtypes[i])
                for r in cutlass.range_constexpr(R):
                    pack(found[r][0][j], part(rY, r * s.capacity, s.capacity))
                self.store_some(rY, self.vector_at(stretch, i, k), stretch.left - first, s.access[i])
            for j in cutlass.range_constexpr(len(self.group_outputs)):
                i = self.group_outputs[j]
                rY = cute.make_rmem_tensor(R, self.dtypes[i])
                for r in cutlass.range_constexpr(R):
                    rY[r] = found[r][1][j].to(self.dtypes[i])
                gY = self.number_of(stretch, i, first // s.capacity)
                self.store_some(rY, gY, (stretch.left - first) // s.capacity, s.access[i])

    def row_in(self, rX: cute.Tensor, r: int, k: int) -> Fragment:
        """Row r of vector k."""
        N = self.spec.capacity
        return Fragment([partial(part, rX[None, k], r * N, N)], [], not self.math.keep)

    @cute.jit
    def store_some(self, src: cute.Tensor, dst: cute.Tensor, left: Int32, access: cutlass.Constexpr[int]):
        """Store a vector, or as many of its elements as there are."""
        if left >= cute.size(src):
            self.store_vector(src, dst, access)
        else:
            for e in cutlass.range_constexpr(cute.size(src)):
                if e < left:
                    dst[e] = src[e]
