"""The short movement: rows of a few elements that lie one behind another.

A warp has a *stretch* of neighbouring rows, contiguous in memory. It is loaded in aligned vectors, all lanes side by
side whatever the length of rows, and laid into shared memory as it is; each thread then takes rows of its own out of
it, whole ones, and puts their results in their places. From there they are stored as they were loaded:

    memory         | vector | vector | vector | vector | ...     lane by lane, coalesced
    shared memory  | row  | row  | row  | row  | row  | ...      a row a thread

Where vectors hold whole rows (of 1, 2, 4 or 8 elements) these stay in the registers that they were loaded to. Of a bias
or a mask that is broadcast the rows lie apart in memory: what a stretch needs of them is copied to shared memory, each
row once however many have it, and read from there as the others are.

    coordinates -> stretch -> shared memory -> load -> read -> reduce -> finish -> write -> store

What is the same for several rows, pieces or words of a thread is in loops that the compiler unrolls (`unroll_full`): to
trace what loops in Python write out took most of the time to compile.

Warps do not wait for each other. Names: as in `row`. `short_work` has the coordinates and predicates, `short_rows` the
way between shared memory and registers.
"""

from collections.abc import Callable, Iterator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr

from layouts.trace import observe

from ..plan import WARP
from ..plan.short import APART, DENSE, ShortClass
from . import short_work
from .common.copy import (
    DTYPES,
    Fragment,
    GlobalTensor,
    global_tensors,
    in_global,
    load,
    load_async,
    pack,
    read_policy,
    store,
)
from .common.early import begins_early, wait_for_stream
from .common.index import dot, reach_of, select, smaller
from .maths.maths import RowMath
from .maths.scores import Given
from .short_rows import SharedRows, Stretch, part
from .short_scalars import ABSENT, StretchScalars


class ShortKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.short.ShortClass`.
    math: a row math of `maths`.
    """

    def __init__(self, spec: ShortClass, math: RowMath):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.held, self.scalars = SharedRows(spec, math), StretchScalars(spec, math)
        self.inputs = range(len(math.inputs))
        self.outputs = range(len(math.inputs), spec.facts.full)
        self.group_outputs = self.scalars.group_outputs
        self.dense = [i for i in self.inputs if spec.laid[i] == DENSE]
        self.apart = [i for i in self.inputs if spec.laid[i] == APART]

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
        `copy.read_policy`. operands: the sizes of the kept modes but the slowest, the prologue's numbers, and of each
        operand its address in bytes, of those that do not lie densely with their strides in the kept modes in elements.
        """
        s = self.spec
        grid = [ctas, 1, 1]
        self.kernel(rows, columns, warp_rows, evict_last, operands).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
            use_pdl=begins_early(s, grid),
        )

    @cute.kernel
    def kernel(self, rows: Int64, columns: Int32, warp_rows: Int32, evict_last: Int32, operands: tuple):
        s = self.spec

        # Coordinates: the thread's lane, and which stretch its warp has.
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        cta, _, _ = cute.arch.block_idx()
        number = Int64(cta) * s.warps + warp
        if const_expr(s.columns > 0):
            columns = s.columns  # known while the kernel is written
        left = short_work.elements_left(rows, columns, number, warp_rows)

        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)

        # Shared memory: a part for each warp, in which results take the place of inputs.
        smem = cutlass.memory.SmemAllocator()
        sX = [] if const_expr(s.whole) else self.held.allocate(smem, warp)

        # Tensors, behind the sizes of modes and the prologue's numbers.
        sizes, rest = operands[: s.kept_modes - 1], operands[s.kept_modes - 1 :]
        names = s.prologue.numbers
        stretch = Stretch(
            lane=lane,
            columns=columns,
            tv=tv,
            begin=number * warp_rows * columns,
            first_row=number * warp_rows,
            left=left,
            rows=left // columns,
            mX=self.tensors(rest[len(names) :]),
            sX=sX,
            policy=read_policy(evict_last),
            skew=short_work.skew_of(columns, s.vector),
            pairs=short_work.in_pairs(s, columns, warp_rows),
            sizes=sizes,
            numbers=dict(zip(names, rest[: len(names)], strict=True)),
        )
        wrong = cute.make_rmem_tensor(1, Boolean)  # whether an index is
        wrong[0] = Boolean(False)
        wait_for_stream(s.early)
        if left > 0:
            if const_expr(s.whole):
                self.whole_rows(stretch, wrong)
            else:
                ones, coming = (self.scalars.no_ones(s.rows_per_thread) for _ in range(2))
                self.scalars.ones_of(stretch, Int32(0), coming)  # a turn ahead
                self.load(stretch)
                for i in self.apart:
                    self.fetch(stretch, i)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
                for group in cutlass.range(warp_rows // (WARP * s.rows_per_thread), unroll=1):
                    for i in cutlass.range_constexpr(len(ones)):
                        ones[i].store(coming[i].load())
                    self.scalars.ones_of(stretch, group + 1, coming)
                    self.rows(stretch, group, ones, wrong)
                if const_expr(len(self.outputs) > 0):
                    cute.arch.sync_warp()
                    self.store(stretch)
            if const_expr(self.scalars.selects):
                self.scalars.complain(stretch, wrong)

    def tensors(self, operands: tuple) -> list[GlobalTensor]:
        """mX of each operand; of those that lie densely without strides. What rows that lie apart have behind theirs,
        see `ShortPlan.operand_strides`, stands in the place of strides of reduced modes."""
        found, rest, kept = [], operands, self.spec.kept_modes
        for i, dtype in enumerate(self.dtypes):
            strides = (0 if i in (*self.dense, *self.outputs) else kept), 2 * (i in self.apart)
            each = 1 + sum(strides)
            found += global_tensors([dtype], rest[:each], *strides)
            rest = rest[each:]
        return found

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
        """Start to load a stretch into shared memory. What does not exist stays as it is: nothing of it is stored."""
        s = self.spec
        for k in cutlass.range(s.steps, unroll_full=True):
            first = self.first_of(stretch, k)
            place = short_work.place_of_step(stretch.lane, k, stretch.skew)
            for i in self.dense:
                tXgX = self.vector_at(stretch, i, k)
                if first + s.vector <= stretch.left:
                    load_async(tXgX, self.held.place(stretch, i, place), s.access[i], stretch.policy)
        # The elements behind the last whole vector.
        whole = stretch.left // s.vector
        if whole * s.vector + stretch.lane < stretch.left:
            for i in self.dense:
                gX = stretch.mX[i].element(stretch.begin + whole * s.vector + stretch.lane)
                load_async(gX, self.held.element_at(stretch, i, whole), 1, stretch.policy)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, stretch: Stretch, i: cutlass.Constexpr[int]):
        """The rows of an operand that lie apart into shared memory, those that neighbours have in common once; runs of
        rows that lie one behind another are copied lane by lane."""
        mX, columns = stretch.mX[i], stretch.columns
        repeat, run = Int32(mX.reduced[0]), Int32(mX.reduced[1])
        begin, end = short_work.distinct_rows(stretch.first_row, stretch.rows, repeat)
        row = begin
        while row < end:
            behind = smaller((row // run + 1) * run, end)
            start = (
                dot(self.scalars.place_of(stretch, row // run * run * repeat), mX.kept) + row % run * columns
            )
            self.held.copy_run(stretch, i, start, (row - begin) * columns, (behind - row) * columns)
            row = behind

    @cute.jit
    def store(self, stretch: Stretch):
        """Store a stretch of results from shared memory."""
        s = self.spec
        for k in cutlass.range(s.steps, unroll_full=True):
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

    def row_of(self, stretch: Stretch, turn: Int32) -> Int32:
        """The row of the stretch that a thread has at its turn."""
        return short_work.row_of(stretch.lane, turn, stretch.pairs)

    @cute.jit
    def rows(self, stretch: Stretch, group: Int32, ones: list[cute.Tensor], wrong: cute.Tensor):
        """Some rows of each thread, from shared memory and back to it."""
        s, R = self.spec, self.spec.rows_per_thread
        rX, rY = ([self.held.empty(i, R) for i in of] for of in (self.inputs, self.outputs))
        targets = (
            [cute.make_rmem_tensor(R, self.dtypes[i]) for i in self.outputs] if self.scalars.marks else []
        )
        for r in cutlass.range(R, unroll_full=True):
            turn = group * R + r
            of_row = [one[r] for one in ones]
            numbers = self.scalars.numbers(stretch, of_row)
            for i in self.inputs:
                self.row(stretch, i, turn, numbers, of_row, rX[i][None, None, r])
        for r in cutlass.range(R, unroll_full=True):
            row = self.row_of(stretch, group * R + r)
            found = [self.pieces(x[None, None, r]) for x in rX]
            of_row, chosen = [one[r] for one in ones], []
            numbers = self.scalars.numbers(stretch, of_row)
            if const_expr(self.scalars.selects):
                at = row * stretch.columns + self.scalars.column(numbers)
                chosen = [self.scalars.score(numbers, self.held.element(stretch, 0, at)[0])]
                self.scalars.note(stretch, of_row, wrong)
            results, groups, target = self.results(stretch, found, numbers, row, chosen)
            for j in cutlass.range_constexpr(len(self.outputs)):
                for k in cutlass.range_constexpr(s.capacity // s.piece):
                    pack(results[j], rY[j][None, k, r])
                if const_expr(self.scalars.marks):
                    targets[j][r] = target.to(self.dtypes[self.outputs[j]])
            for j in cutlass.range_constexpr(len(self.group_outputs)):
                i = self.group_outputs[j]
                gX = self.scalars.numbers_at(stretch, i, row)
                if row < stretch.rows:
                    gX[0] = groups[j].to(self.dtypes[i])
        # A lane writes its half of a word when its neighbour has read the other.
        if const_expr(s.shares_words):
            cute.arch.sync_warp()
        for r in cutlass.range(R, unroll_full=True):
            turn = group * R + r
            for j in cutlass.range_constexpr(len(self.outputs)):
                i, flat = self.outputs[j], self.held.flat(rY[j][None, None, r])
                row = self.row_of(stretch, turn)
                self.held.exchange(stretch, i, row, turn, flat, True)
                if const_expr(self.scalars.marks):
                    column = self.scalars.numbers(stretch, [one[r] for one in ones])["index"]
                    sY = self.held.element(stretch, i, row * stretch.columns + column)
                    if column > ABSENT:
                        sY[0] = targets[j][r]
        if const_expr(s.shares_words):
            cute.arch.sync_warp()

    @cute.jit
    def row(
        self,
        stretch: Stretch,
        i: cutlass.Constexpr[int],
        turn: Int32,
        numbers: dict,
        ones: list,
        rX: cute.Tensor,
    ):
        """Bring the row of a turn of operand i to registers, over padding."""
        rX.fill(self.nothing(i, numbers))
        if const_expr(i in self.scalars.single):
            flat, one = self.held.flat(rX), ones[self.scalars.single.index(i)]
            for j in cutlass.range(self.spec.capacity, unroll_full=True):
                if j < stretch.columns:
                    flat[j] = one
        else:
            row = self.row_of(stretch, turn)
            if const_expr(i in self.apart):
                repeat = Int32(stretch.mX[i].reduced[0])
                row = short_work.distinct_row(stretch.first_row, stretch.rows, repeat, row)
            self.held.read(stretch, i, row, turn, self.held.flat(rX))

    def nothing(self, i: int, numbers: dict) -> cutlass.Numeric:
        """Padding of operand i. What is negated with the elements by a negative scale is the opposite."""
        p, nothing = self.spec.prologue, self.dtypes[i](self.math.padding[i])
        if i == 0 and p.scale and p.packs and self.math.rescores:
            return select(numbers["scale"] < 0.0, self.dtypes[i](-self.math.padding[i]), nothing)
        return nothing

    def pieces(self, rX: cute.Tensor) -> list[Callable]:
        """A row in registers, piece by piece."""
        return [partial(self.piece, rX, k) for k in range(cute.size(rX, mode=[1]))]

    def piece(self, rX: cute.Tensor, k: int) -> cute.Tensor:
        return rX[None, k]

    def results(
        self,
        stretch: Stretch,
        row: list[list[Callable]],
        numbers: dict[str, Numeric],
        number: Int32,
        chosen: list[Float32],
    ) -> tuple[list[Iterator], list, Float32 | None]:
        """(results of a row by output, numbers by group output, the result at the target). The whole row is one
        thread's: no lanes meet.

        row: of each input, its pieces; number: which row of the stretch it is; chosen: the score at its index, if there
        is one.
        """
        p, reach = self.spec.prologue, stretch.columns
        if p.causal:
            reach = reach_of(
                self.scalars.place_of(stretch, stretch.first_row + number)[-1],
                stretch.numbers["offset"],
                reach,
            )
            if not self.math.rescores:  # of what lies beyond nothing counts, whatever it is
                for i in self.inputs:
                    self.cut(row[i], reach, self.dtypes[i](self.math.padding[i]))
        values = [Fragment(pieces, [], not self.math.keep) for pieces in row]
        if p:
            sizes = [cute.size(piece()) for piece in row[0]]
            before = [sum(sizes[:k]) for k in range(len(sizes))]
            counts = [reach - first for first in before]
            each = None
            if p.averages:  # not with a diagonal
                each = [self.each(reach, *part) for part in zip(before, sizes, strict=True)]
            values.append(Given(numbers, counts, [Boolean(True)] * len(sizes), each))
        math, carry, kept = self.math.for_row(values), [], None
        for stage in range(len(math.reductions)):
            state, kept = math.partial(stage, values, carry, 1)
            carry.append(state)
        state = sum(carry, ())
        state = math.joined(state, numbers["sink"]) if p.sink else state
        results = math.finish(values, kept, state) if len(self.outputs) else []
        groups = self.scalars.results(numbers, math, state, chosen)
        target = math.at_target(numbers, state, *chosen) if self.scalars.marks else None
        return [iter(r) for r in results], groups, target

    def each(self, columns: Int32, first: int, size: int) -> list[Boolean]:
        """Which of so many elements a row has, from one on."""
        sure = self.spec.columns or self.spec.sure
        return [Boolean(True) if j < sure else Boolean(columns > j) for j in range(first, first + size)]

    def cut(self, pieces: list[Callable], reach: Int32, nothing: cutlass.Numeric):
        """Make the elements of a row from `reach` on padding."""
        j = 0
        for piece in pieces:
            vector = piece()
            for e in range(cute.size(vector)):
                vector[e] = select(j < reach, vector[e], nothing)
                j += 1

    # Whole rows in a vector.

    @cute.jit
    def whole_rows(self, stretch: Stretch, wrong: cute.Tensor):
        """A stretch of rows of which a vector holds several, or one."""
        s = self.spec
        R, K = s.rows_per_thread, s.steps
        rX = [cute.make_rmem_tensor((s.vector, K), self.dtypes[i]) for i in self.inputs]
        for i in self.inputs:
            rX[i].fill(self.dtypes[i](self.math.padding[i]))
        ones = self.scalars.no_ones(R, K)
        for k in cutlass.range(K, unroll_full=True):
            first = self.first_of(stretch, k)
            for i in self.dense:
                tXgX = self.vector_at(stretch, i, k)
                if first + s.vector <= stretch.left:
                    load(tXgX, rX[i][None, k], s.access[i], stretch.policy)
                else:
                    for e in cutlass.range(s.vector, unroll_full=True):
                        if first + e < stretch.left:
                            rX[i][e, k] = tXgX[e]
            for r in cutlass.range(R, unroll_full=True):
                self.scalars.ones(stretch, first // s.capacity + r, ones, r, k)
        for k in cutlass.range(K, unroll_full=True):
            first = self.first_of(stretch, k)
            rY = [cute.make_rmem_tensor(s.vector, self.dtypes[i]) for i in self.outputs]
            of_groups = [cute.make_rmem_tensor(R, self.dtypes[i]) for i in self.group_outputs]
            for r in cutlass.range(R, unroll_full=True):
                of_row, chosen = [one[r, k] for one in ones], []
                for j in cutlass.range_constexpr(len(self.scalars.single)):
                    self.row_in(rX[self.scalars.single[j]], r, k).fill(of_row[j])
                found = [[partial(self.row_in, x, r, k)] for x in rX]
                row, numbers = first // s.capacity + r, self.scalars.numbers(stretch, of_row)
                if const_expr(self.scalars.selects):
                    element = self.chosen(self.row_in(rX[0], r, k), numbers["index"])
                    chosen = [self.scalars.score(numbers, element)]
                    self.scalars.note(stretch, of_row, wrong)
                results, groups, target = self.results(stretch, found, numbers, row, chosen)
                for j in cutlass.range_constexpr(len(self.outputs)):
                    of_row = part(rY[j], r * s.capacity, s.capacity)
                    pack(results[j], of_row)
                    if const_expr(self.scalars.marks):
                        self.put(of_row, numbers["index"], target.to(of_row.element_type))
                for j in cutlass.range_constexpr(len(self.group_outputs)):
                    of_groups[j][r] = groups[j].to(of_groups[j].element_type)
            for j in cutlass.range_constexpr(len(self.outputs)):
                i = self.outputs[j]
                self.store_some(rY[j], self.vector_at(stretch, i, k), stretch.left - first, s.access[i])
            for j in cutlass.range_constexpr(len(self.group_outputs)):
                self.store_numbers(stretch, j, first // s.capacity, of_groups[j])

    @cute.jit
    def store_numbers(self, stretch: Stretch, j: cutlass.Constexpr[int], row: Int32, rY: cute.Tensor):
        """Store what group output j has for the rows of a vector, from `row` on."""
        s, i = self.spec, self.group_outputs[j]
        if const_expr(s.kept_modes == 1):
            self.store_some(rY, self.scalars.numbers_at(stretch, i, row), stretch.rows - row, s.access[i])
        else:
            for r in cutlass.range(cute.size(rY), unroll_full=True):
                gY = self.scalars.numbers_at(stretch, i, row + r)
                if row + r < stretch.rows:
                    gY[0] = rY[r]

    def chosen(self, row: cute.Tensor, column: Int32) -> Numeric:
        """The element of a row in registers that is at a column, the first where there is none."""
        found = row[0]
        for e in range(1, cute.size(row)):
            found = select(column == e, row[e], found)
        return found

    def put(self, row: cute.Tensor, column: Int32, element: Numeric):
        """Put an element at a column of a row in registers, if there is such a one."""
        for e in range(cute.size(row)):
            row[e] = select(column == e, element, row[e])

    def row_in(self, rX: cute.Tensor, r: int, k: int) -> cute.Tensor:
        """Row r of vector k."""
        return part(rX[None, k], r * self.spec.capacity, self.spec.capacity)

    @cute.jit
    def store_some(self, src: cute.Tensor, dst: cute.Tensor, left: Int32, access: cutlass.Constexpr[int]):
        """Store a vector, or as many of its elements as there are."""
        if left >= cute.size(src):
            self.store_vector(src, dst, access)
        else:
            for e in cutlass.range(cute.size(src), unroll_full=True):
                if e < left:
                    dst[e] = src[e]
