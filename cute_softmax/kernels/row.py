"""The row movement: the reduced group is contiguous and whole rows stay on chip.

A CTA holds a tile of rows; `threads_per_row` threads share a row, and in a cluster the CTAs share it too. A row
that does not begin on a vector boundary is cut into a head of fewer than V scalars, a body of whole vectors and a
tail of fewer than V scalars; the first threads of the row take the scalars, one or two each.

    coordinates -> tile -> shared memory -> predicates -> cluster init -> load -> fill -> reduce -> finish -> store

Names: mX a tensor in global memory, gX a part of it, cX coordinates in the CTA's tile, sX shared memory, rX
registers, pX predicates over columns and pR over rows; rE and pE the same for the scalars at a row's edges; tXcX is cX
partitioned by X's tiled copy.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from .common import online, reduce
from .common.copy import (
    DTYPES,
    Fragment,
    Slots,
    global_pointer,
    load,
    load_async,
    load_if,
    pack,
    read_policy,
    store,
)
from .common.index import apart, dot
from .common.online import rounded_product
from .maths.prologue import Given

INDEX_ERROR = (
    "cute_softmax.selective_log_softmax: index %lld in row %lld is out of range: a row has %d elements"
)


class RowKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.RowClass`.
    math: a row math of `maths`.
    """

    def __init__(self, spec, math):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs = range(len(math.inputs))
        self.full = range(len(math.inputs) + len(math.outputs))
        self.group_inputs = range(len(self.full), len(self.full) + len(math.group_inputs))
        # Those that every thread of a row looks at: of an index to choose a score by the first one alone does.
        self.selects = "index" in math.group_inputs and not spec.prologue.target
        self.group_names = [name for name in math.group_inputs if not (self.selects and name == "index")]
        self.access = [*spec.access, *[spec.vector] * len(math.outputs)]
        self.staged = [i for i in self.inputs if spec.staging[i] != "direct"]
        # What the slots of staged inputs hold: an element, or what is kept of it.
        self.slots = {i: Float32 if spec.keeps_shared and i == 0 else self.dtypes[i] for i in self.staged}

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        rows: Int64,
        columns: Int32,
        ctas: Int32,
        evict_last: Int32,
        *operands: Int64,
    ):
        """Launch.

        ctas: CTAs (clusters, with one) of the grid: the number of tiles, or fewer for a persistent kernel.
        evict_last: whether reads ask L2 to keep them, see `copy.read_policy`.
        operands: sizes of all kept modes but the slowest (none in the plain case of one), then the numbers of the
            prologue (floats by their bits), then (address in bytes, stride of each kept mode in elements) of each
            input, output, group input and group output.
        """
        s = self.spec
        self.kernel(rows, columns, evict_last, operands).launch(
            grid=[ctas, s.cluster_n, 1],
            block=[s.threads, 1, 1],
            cluster=[1, s.cluster_n, 1] if const_expr(s.cluster_n > 1) else None,
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
        )

    @cute.kernel
    def kernel(self, rows: Int64, columns: Int32, evict_last: Int32, operands: tuple):
        s = self.spec

        # Coordinates: (row, column) of each of this thread's elements in the CTA's tile, ((V, M), 1, K).
        tidx, _, _ = cute.arch.thread_idx()
        cta, rank, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        bits = s.vector * self.dtypes[0].width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtypes[0], num_bits_per_copy=bits)
        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        tiled_copy = cute.make_tiled_copy(atom, tv, s.step_tiler)
        thr_copy = tiled_copy.get_slice(tidx)
        tXcX = thr_copy.partition_S(cute.make_identity_tensor(s.tiler))
        observe("tv", tiled_copy)
        observe("tXcX", tXcX)

        # Shared memory: staged tiles, the reduction buffer, and an mbarrier for each of its stages.
        smem = cutlass.memory.SmemAllocator()
        sX_layout = cute.make_layout(s.smem.shape, stride=s.smem.stride)
        sX = {i: smem.allocate_tensor(self.slots[i], sX_layout, byte_alignment=16) for i in self.staged}
        tXsX = {i: thr_copy.partition_D(sX[i]) for i in self.staged}
        for i in self.staged:
            observe("smem", sX[i])
        buffer = None
        barriers = None
        if const_expr(s.exchanges):
            layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
            slot = reduce.slot_type(self.math.reductions[0])
            buffer = smem.allocate_tensor(slot, layout, byte_alignment=max(slot.width // 8, 8))
            observe("reduction_buffer", buffer)
            if const_expr(s.cluster_n > 1):
                stages = s.reduction_buffer.shape[2]
                barriers = smem.allocate_array(Int64, num_elems=stages)
                if tidx == 0:
                    for stage in cutlass.range_constexpr(stages):
                        cute.arch.mbarrier_init(barriers + stage, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.cluster_arrive_relaxed()

        # The CTAs of a cluster take equal shares of the row, in whole cache lines: a short row leaves none idle.
        share = columns
        if const_expr(s.cluster_n > 1):
            share = cute.ceil_div(cute.ceil_div(columns, s.cluster_n), s.line) * s.line
        first_tensor = s.kept_modes - 1 + len(s.prologue.numbers)
        this = SimpleNamespace(
            rows=rows,
            columns=columns,
            tiles=(rows + s.tiler[0] - 1) // s.tiler[0],
            share=share,
            first=rank * share,
            rank=rank,
            lane=tidx % s.threads_per_row,
            ctas=ctas,
            policy=read_policy(evict_last),
            zero=evict_last >> 1,  # which the compiler does not know
            sizes=operands[: s.kept_modes - 1],
            numbers=dict(zip(s.prologue.numbers, operands[s.kept_modes - 1 : first_tensor], strict=True)),
            mX=[
                SimpleNamespace(address=operands[i], strides=operands[i + 1 : i + 1 + s.kept_modes])
                for i in range(first_tensor, len(operands), 1 + s.kept_modes)
            ],
            tXcX=tXcX,
            tXsX=tXsX,
            buffer=buffer,
            barriers=barriers,
        )

        if const_expr(self.staged):
            for k in cutlass.range_constexpr(0, s.steps, s.part):
                self.prefetch(this, Int64(cta), k)
        if const_expr(not s.persistent):
            self.tile(this, Int64(cta), Int32(0), None)
        else:
            if const_expr(s.cluster_n > 1):
                cute.arch.cluster_wait()
            tile, turn = Int64(cta), Int32(0)
            # A tile ahead, as all else: waiting for them would cost a tenth of the time.
            groups = [self.groups(this, self.row(this, tile, m)) for m in range(s.rows_per_thread)]
            while tile < this.tiles:
                now = groups
                groups = [self.groups(this, self.row(this, tile + ctas, m)) for m in range(s.rows_per_thread)]
                self.tile(this, tile, turn, now)
                tile += ctas
                turn += 1

    def row(self, this, tile: Int64, m: int) -> SimpleNamespace:
        """Row m of this thread: its coordinates, and how it divides into head, body and tail (elements)."""
        V = self.spec.vector
        index = tile * self.spec.tiler[0] + this.tXcX[(0, m), 0, 0][0]
        at = self.coordinates(this, index)
        head = Int32(0)
        if const_expr(self.spec.edges):
            # One tensor, the output if there is one, decides where vectors begin.
            r = self.spec.facts.reference
            size = self.dtypes[r].width // 8
            misaligned = Int32((this.mX[r].address // size + self.begin(this, at, r)) & (V - 1))
            head = cutlass.min((V - misaligned) & (V - 1), this.columns)
        body = (this.columns - head) // V * V
        inside = index < this.rows
        limit = cutlass.min(body - this.first, this.share)
        reach, seen = this.columns, limit
        if const_expr(self.spec.prologue.causal):
            counted = Int64(at[-1]) + this.numbers["offset"] + 1
            reach = Int32(cutlass.max(cutlass.min(counted, Int64(this.columns)), Int64(0)))
            seen = cutlass.min(limit, reach - head - this.first)
        return SimpleNamespace(
            index=index,
            at=at,
            inside=inside,
            head=head,
            body=body,
            # Columns of the body that this CTA holds, and those of them that it reads.
            limit=limit,
            seen=seen,
            # Columns of the row that count.
            reach=reach,
            start=head + this.first + this.tXcX[(0, m), 0, 0][1],
        )

    def coordinates(self, this, index: Int64) -> list[Int64]:
        """The row's index in each kept mode, the slowest first."""
        if self.spec.prologue:
            # Plans with a prologue have no more rows than that: 64-bit divisions would cost as much as a short row.
            return apart(Uint32(index), [Uint32(size) for size in this.sizes[::-1]])[::-1]
        return apart(index, this.sizes[::-1])[::-1]

    def begin(self, this, at: list[Int64], i: int) -> Int64:
        """Elements from the beginning of tensor i to that of the row with these coordinates."""
        return dot(at, this.mX[i].strides)

    def reads(self, this, row: SimpleNamespace, m: int, k: int) -> Boolean:
        """The predicate of vector k over columns, to be read: one bit for its V elements."""
        return this.tXcX[(0, m), 0, k][1] < row.seen

    def writes(self, this, row: SimpleNamespace, m: int, k: int, read: Boolean) -> Boolean:
        """Whether a vector is to be written: what lies beyond the diagonal, too."""
        return this.tXcX[(0, m), 0, k][1] < row.limit if self.spec.prologue.causal else read

    def vectors(self, this, row: SimpleNamespace, i: int):
        """k -> vector k of this thread's part of a row of tensor i in global memory."""
        s = self.spec
        dtype, mX = self.dtypes[i], this.mX[i]
        align = max(self.access[i], 1) * dtype.width // 8
        start = global_pointer(dtype, mX.address, self.begin(this, row.at, i) + row.start, align)
        return lambda k: cute.make_tensor(
            start + k * s.threads_per_row * s.vector, cute.make_layout(s.vector)
        )

    def scalar(self, this, row: SimpleNamespace, i: int, column: Int32) -> cute.Tensor:
        dtype, mX = self.dtypes[i], this.mX[i]
        at = global_pointer(dtype, mX.address, self.begin(this, row.at, i) + column, dtype.width // 8)
        return cute.make_tensor(at, cute.make_layout(1))

    def slot(self, this, i: int, m: int, k: int) -> cute.Tensor:
        """This thread's place in shared memory for vector k of staged input i, of its row m; in slots that are to hold
        something wider it takes the beginning."""
        slot = this.tXsX[i][(None, m), 0, k]
        if self.slots[i] is self.dtypes[i]:
            return slot
        return cute.make_tensor(
            cute.recast_ptr(slot.iterator, dtype=self.dtypes[i]), cute.make_layout(self.spec.vector)
        )

    def kept(self, this, i: int, m: int) -> Slots | None:
        """Where the math keeps numbers for the elements of row m of input i; None for in registers, or not at all."""
        if not (self.spec.keeps_shared and i == 0):
            return None
        return Slots([this.tXsX[i][(None, m), 0, k] for k in range(self.spec.steps)])

    @cute.jit
    def prefetch(self, this, tile: Int64, first: cutlass.Constexpr[int]):
        """Start the asynchronous loads of vectors first .. first + part into this thread's own slots of shared
        memory, as one commit group."""
        s = self.spec
        for m in cutlass.range_constexpr(s.rows_per_thread):
            row = self.row(this, tile, m)
            for i in self.staged:
                gX = self.vectors(this, row, i)
                for k in cutlass.range_constexpr(first, min(first + s.part, s.steps)):
                    if row.inside & self.reads(this, row, m, k):
                        load_async(gX(k), self.slot(this, i, m, k), self.access[i], this.policy)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def tile(self, this, tile: Int64, turn: Int32, groups: list[list] | None):
        """One tile of rows, from loading to storing.

        turn: how many tiles this CTA has done before; groups: of each row the `groups`, if they are known.
        """
        s, math = self.spec, self.math
        V, M, K, T, E = s.vector, s.rows_per_thread, s.steps, s.threads_per_row, s.edge_scalars
        rows = [self.row(this, tile, m) for m in range(M)]

        # Predicates: whether a vector's columns exist, a bit that the rows of a thread share where they end alike; and
        # whether a row does.
        pX = cute.make_rmem_tensor(cute.make_layout(s.predicate.shape, stride=s.predicate.stride), Boolean)
        observe("predicate", pX)
        for m in cutlass.range_constexpr(1 if s.rows_end_alike else M):
            for k in cutlass.range_constexpr(K):
                pX[m, 0, k] = self.reads(this, rows[m], m, k)
        pR = [row.inside for row in rows]

        # Load, over the padding of what lies outside the row.
        rX = [cute.make_rmem_tensor(((V, M), 1, K), self.dtypes[i]) for i in self.full]
        for i in self.inputs:
            rX[i].fill(self.dtypes[i](math.padding[i]))
        ones = {}
        for m in cutlass.range_constexpr(M):
            for i in self.inputs:
                gX = self.vectors(this, rows[m], i)
                if const_expr(self.access[i] == 0):
                    ones[i, m] = self.one(this, rows[m], i, Int32(0))
                    for k in cutlass.range_constexpr(K):
                        if pR[m] & pX[m, 0, k]:
                            rX[i][(None, m), 0, k].fill(ones[i, m])
                elif const_expr(s.staging[i] == "direct"):
                    for k in cutlass.range_constexpr(K):
                        if pR[m] & pX[m, 0, k]:
                            load(gX(k), rX[i][(None, m), 0, k], self.access[i], this.policy)

        # Of the row math: the score of the element that an index chooses.
        chosen = [[self.chosen(this, row)] if self.selects else [] for row in rows]

        # The scalars at the edges of a row: slots 0 .. V-2 are its head, V-1 .. 2V-3 its tail.
        rE = [cute.make_rmem_tensor((max(E, 1), M), self.dtypes[i]) for i in self.full]
        pE = cute.make_rmem_tensor((max(E, 1), M), Boolean)
        counted = {}
        columns = {}
        for m in cutlass.range_constexpr(M):
            for e in cutlass.range_constexpr(E):
                row = rows[m]
                slot = this.lane + e * T
                after_body = row.head + row.body + slot - (V - 1)
                in_head = slot < row.head
                in_tail = (slot >= V - 1) & (after_body < this.columns)
                columns[e, m] = Int32(cutlass.select_(in_head, slot, after_body))
                pE[e, m] = pR[m] & (in_head | in_tail) & (this.rank == 0)
                counted[e, m] = pE[e, m]
                if const_expr(s.prologue.causal):
                    counted[e, m] = pE[e, m] & (columns[e, m] < row.reach)
                for i in self.inputs:
                    rE[i][e, m] = self.dtypes[i](math.padding[i])
                    gE = self.scalar(this, row, i, columns[e, m])
                    if counted[e, m]:
                        rE[i][e, m] = ones[i, m] if const_expr(self.access[i] == 0) else gE[0]

        # Reduce.
        values = []
        for m in cutlass.range_constexpr(M):
            waiting = set(range(0, K, s.part))
            values.append(
                [
                    Fragment(
                        [
                            lambda i=i, m=m, k=k, waiting=waiting: self.vector(
                                this, tile, i, m, k, pR, pX, rX, waiting
                            )
                            for k in range(K)
                        ],
                        [rE[i][e, m] for e in range(E)],
                        not math.keep,
                        s.staging[i],
                        self.kept(this, i, m),
                    )
                    for i in self.inputs
                ]
            )
            if const_expr(s.prologue):
                held = [pR[m] & pX[m, 0, k] for k in range(K)]
                left = [self.left(this, rows[m], m, k, held[k]) for k in range(K)]
                left += [Int32(counted[e, m]) for e in range(E)]
                held += [counted[e, m] for e in range(E)]
                held_groups = self.groups(this, rows[m]) if groups is None else groups[m]
                values[m].append(Given(self.numbers(this, held_groups), left, held))
        maths = [math.for_row(values[m]) for m in range(M)]
        carry = [[] for _ in range(M)]
        kept = [None] * M
        for stage in cutlass.range_constexpr(len(math.reductions)):
            for m in cutlass.range_constexpr(M):
                state, kept[m] = maths[m].partial(stage, values[m], carry[m], min(T, reduce.WARP))
                if const_expr(s.exchanges):
                    if const_expr(s.cluster_n > 1 and not s.persistent and stage == 0):
                        # As late as possible: it waits until all CTAs of the cluster have started.
                        cute.arch.cluster_wait()
                    state = self.exchange(this, stage, maths[m].reductions[stage], state, turn)
                carry[m].append(state)

        # Finish and store.
        for m in cutlass.range_constexpr(M):
            results = maths[m].finish(values[m], kept[m], sum(carry[m], ()))
            for j in cutlass.range_constexpr(len(math.outputs)):
                i = len(self.inputs) + j
                gX = self.vectors(this, rows[m], i)
                result = iter(results[j])
                for k in cutlass.range_constexpr(K):
                    pack(result, rX[i][(None, m), 0, k])
                    if pR[m] & self.writes(this, rows[m], m, k, pX[m, 0, k]):
                        store(rX[i][(None, m), 0, k], gX(k))
                for e in cutlass.range_constexpr(E):
                    value = next(result).to(self.dtypes[i])
                    gE = self.scalar(this, rows[m], i, columns[e, m])
                    if pE[e, m]:
                        gE[0] = value
                if const_expr(s.prologue.target):
                    self.at_target(this, rows[m], i, values[m][-1].numbers, columns, pE, m)
            # All threads of the row know its state; the first one stores what becomes of it.
            first = rows[m].inside & (this.lane == 0) & (this.rank == 0)
            if const_expr(len(math.group_outputs) > 0):
                results = partial(
                    maths[m].group_results, sum(carry[m], ()), *[score for score, *_ in chosen[m]]
                )
                self.store_groups(this, rows[m], first, results, chosen[m])

    @cute.jit
    def store_groups(self, this, row: SimpleNamespace, first: Boolean, results: Callable, chosen: list):
        i = len(self.full) + len(self.group_inputs)
        count = len(self.math.group_outputs)
        gX = [self.scalar(this, row, i + j, Int32(0)) for j in range(count)]
        if first:
            numbers = results()
            for j in cutlass.range_constexpr(count):
                gX[j][0] = numbers[j].to(self.dtypes[i + j])
            if const_expr(len(chosen) > 0):
                # Behind all else: behind a trap the compiler would put a copy of what follows it.
                _, index, exists = chosen[0]
                if not exists:
                    cute.printf(INDEX_ERROR, index, row.index, this.columns)
                    cute.arch.inline_ptx("trap;")

    def left(self, this, row: SimpleNamespace, m: int, k: int, held: Boolean) -> Int32:
        """How many elements of vector k there are before the end of the row, or its diagonal; 0 if it is not held."""
        column = row.head + this.first + this.tXcX[(0, m), 0, k][1]
        return Int32(cutlass.select_(held, row.reach - column, Int32(0)))

    def numbers(self, this, groups: list) -> dict:
        """The scale and alpha of a row, in all of its threads; groups: its `groups`."""
        names = self.spec.prologue.numbers
        found = {n: Int32(this.numbers[n]).bitcast(Float32) for n in names if n != "offset"}
        return found | dict(zip(self.group_names, groups, strict=True))

    def groups(self, this, row: SimpleNamespace) -> list:
        """What the tensors of one element per group have for a row; of an index that no element has, -1."""
        inputs = dict(zip(self.math.group_inputs, self.group_inputs, strict=True))
        found = []
        for name in self.group_names:
            value = self.one(this, row, inputs[name], this.lane * this.zero)
            if name == "index":
                exists = (value >= 0) & (value < this.columns)
                found.append(Int32(cutlass.select_(exists, value, Int64(-1))))
            else:
                found.append(value.to(Float32))
        return found

    @cute.jit
    def one(self, this, row: SimpleNamespace, i: int, offset: Int32):
        """The one element that tensor i has for a row; 0 outside of them.

        offset: 0. Multiplied by the lane, ptxas does not see that all lanes have the same address: it would move what
        they load into a uniform register, and wait for it in the midst of the loads of the row.
        """
        held = cute.make_rmem_tensor(1, self.dtypes[i])
        held[0] = self.dtypes[i](0)
        gX = self.scalar(this, row, i, offset)
        if row.inside:
            held[0] = gX[0]
        return held[0]

    def group(self, this, row: SimpleNamespace, name: str) -> cute.Tensor:
        """The element of group input `name` for a row, in global memory."""
        return self.scalar(this, row, self.group_inputs[self.math.group_inputs.index(name)], Int32(0))

    def chosen(self, this, row: SimpleNamespace) -> tuple[Float32, Int64, Boolean]:
        """The score, in the first thread of a row, of the element that "index" chooses, the index, and whether the row
        has such an element; without one the score is another's, and `store_groups` complains."""
        first = row.inside & (this.lane == 0) & (this.rank == 0)
        index = load_if(first, self.group(this, row, "index"))
        exists = (index >= 0) & (index < this.columns)
        column = Int32(cutlass.select_(exists, index, Int64(0)))
        score = load_if(first, self.scalar(this, row, 0, column)).to(Float32)
        if self.spec.prologue.scale:
            score = rounded_product(score, self.numbers(this, self.groups(this, row))["scale"])
        return score, index, exists

    @cute.jit
    def at_target(self, this, row: SimpleNamespace, i: int, numbers: dict, columns: dict, pE, m: int):
        """Store alpha * (p - 1) into tensor i at the row's target, by the thread that has stored alpha * p there."""
        s = self.spec
        target = numbers["index"]
        place = target - row.head - this.first
        mine = (place >= 0) & (place < row.limit) & (place // s.vector % s.threads_per_row == this.lane)
        mine = mine & row.inside
        for e in cutlass.range_constexpr(s.edge_scalars):
            mine = mine | (pE[e, m] & (columns[e, m] == target))
        gX, alpha, found = self.scalar(this, row, i, target), numbers["alpha"], numbers["found"]
        if mine:
            gX[0] = (alpha * online.less_one(found)).to(self.dtypes[i])

    def vector(self, this, tile: Int64, i: int, m: int, k: int, pR, pX, rX, waiting: set) -> cute.Tensor:
        """Vector k of input i in registers. The first touch of an asynchronously loaded part waits for it."""
        if self.staged and k in waiting:
            waiting.remove(k)
            self.arrive(this, tile, m, k, pR, pX, rX)
        if self.spec.staging[i] != "shared":
            return rX[i][(None, m), 0, k]
        held = cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
        held.fill(self.dtypes[i](self.math.padding[i]))
        self.from_shared(self.slot(this, i, m, k), held, pR[m] & pX[m, 0, k])
        return held

    @cute.jit
    def from_shared(self, src: cute.Tensor, dst: cute.Tensor, inside: Boolean):
        if inside:
            cute.autovec_copy(src, dst)

    @cute.jit
    def arrive(self, this, tile: Int64, m: cutlass.Constexpr[int], first: cutlass.Constexpr[int], pR, pX, rX):
        """Wait for vectors first .. first + part, move them to registers and, if persistent, refill their slots."""
        s = self.spec
        groups = -(-s.steps // s.part)
        cute.arch.cp_async_wait_group(groups - 1 - (0 if s.persistent else first // s.part))
        for i in self.staged:
            if const_expr(s.staging[i] == "async"):
                for k in cutlass.range_constexpr(first, min(first + s.part, s.steps)):
                    held = pR[m] & pX[m, 0, k]
                    self.from_shared(self.slot(this, i, m, k), rX[i][(None, m), 0, k], held)
        if const_expr(s.persistent):
            self.prefetch(this, tile + this.ctas, first)

    def exchange(self, this, stage: int, op: object, state: tuple, turn: Int32) -> tuple:
        """Merge a state with the other warps and CTAs of the row.

        A persistent kernel alternates between two buffers, so that a fast warp never overwrites what a slow one
        still reads: to write a buffer again it must have passed the exchange in between.
        """
        which, phase = (turn % 2, turn // 2 % 2) if self.spec.persistent else (0, Int32(0))
        which = which + stage * self.spec.turns
        barrier = None if this.barriers is None else this.barriers + which
        return reduce.across_warps(
            op, state, this.buffer[None, None, which], barrier, phase, self.spec.cluster_n
        )
