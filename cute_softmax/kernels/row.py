"""The row movement: the reduced group is contiguous and whole rows stay on chip.

A CTA holds a tile of rows; `threads_per_row` threads share a row, and in a cluster the CTAs share it too. A row
that does not begin on a vector boundary is cut into a head of fewer than V scalars, a body of whole vectors and a
tail of fewer than V scalars; the first threads of the row take the scalars, one or two each.

    coordinates -> tile -> shared memory -> predicates -> cluster init -> load -> fill -> reduce -> finish -> store

Names: mX a tensor in global memory, gX a part of it, cX coordinates in the CTA's tile, sX shared memory, rX
registers, pX predicates over columns and pR over rows; gE, rE and pE the same for the scalars at a row's edges; tXgX is
gX partitioned by X's tiled copy, tXsX and tXcX likewise. `row_work` has the coordinates and predicates, `row_staging`
what comes through shared memory, `row_scalars` what is loaded and stored by the element.
"""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ..plan import RowClass
from .common import reduce
from .common.copy import (
    DTYPES,
    Fragment,
    Slots,
    global_tensors,
    load,
    pack,
    read_policy,
    store,
)
from .common.early import FEW_CTAS, MOST_CTAS, SMS, begins_early, wait_for_stream
from .maths.maths import RowMath
from .maths.scores import Given
from .row_scalars import Chosen, Edges, Scalars
from .row_staging import Staging
from .row_work import (
    Launch,
    Row,
    Shared,
    Vectors,
    count,
    partition,
    reads,
    row_of,
    share_of,
    writes,
)

LIGHT = 1024  # vectors of a CTA, of which an SM has room for eight


@dataclass(frozen=True)
class Held:
    """What a thread has of its rows: vectors and edges, what the math sees of each row, and of each the target, a
    column (None without one), and whether it is this thread's."""

    vectors: Vectors
    edges: Edges
    values: list[list[Fragment | Given]]
    targets: list[Int32 | None]
    owned: list[Boolean | None]


class RowKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.RowClass`.
    math: a row math of `maths`.
    """

    def __init__(self, spec: RowClass, math: RowMath):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs = range(len(math.inputs))
        self.full = range(len(math.inputs) + len(math.outputs))
        self.staging = Staging(spec, math)
        self.scalars = Scalars(spec, math)
        self.branchless = False  # stores, see `copy.store`

    @cute.jit
    def __call__(
        self,
        stream,
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
        self.precede(stream, operands)
        grid = [ctas, s.cluster_n, 1]
        self.kernel(rows, columns, evict_last, operands).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            cluster=[1, s.cluster_n, 1] if const_expr(s.cluster_n > 1) else None,
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
            use_pdl=begins_early(s, grid),
        )

    @property
    def located_first(self) -> int:
        """Of how many CTAs a grid finds its rows before it waits, see `common.early`. With edges and several inputs,
        clusters lack the registers for it: ptxas would wait for the first vectors before it loads the last."""
        s = self.spec
        if s.cluster_n == 1:
            return MOST_CTAS
        return 0 if s.edges and len(self.inputs) > 1 else FEW_CTAS

    @property
    def told(self) -> int:
        """Of how many CTAs a grid lets the next one begin before it ends, see `common.early`."""
        s = self.spec
        if s.cluster_n == 1 or s.persistent:
            return MOST_CTAS
        return FEW_CTAS if s.threads * s.steps <= LIGHT else SMS

    def precede(self, stream, operands: tuple):
        """What is launched in front of the kernel: nothing."""

    def apart(self, operands: tuple) -> tuple[list[Int64], dict[str, Int64], list[Int64]]:
        """(sizes of modes, numbers of the prologue by name, addresses and strides), see `__call__`."""
        sizes, rest, names = self.spec.kept_modes - 1, [*operands], self.spec.prologue.numbers
        numbers, behind = rest[sizes : sizes + len(names)], rest[sizes + len(names) :]
        return rest[:sizes], dict(zip(names, numbers, strict=True)), behind

    @cute.kernel
    def kernel(self, rows: Int64, columns: Int32, evict_last: Int32, operands: tuple):
        s = self.spec
        wait_for_stream(s.early, above=self.located_first, told=self.told)

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
        tXsX = self.staging.partitions(smem, thr_copy)
        buffer = None
        barriers = None
        if const_expr(s.exchanges):
            layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
            slot = reduce.slot_type(self.math.reductions[0])
            buffer = smem.allocate_tensor(slot, layout, byte_alignment=max(slot.width // 8, 8))
            observe("reduction_buffer", buffer)
            if const_expr(s.peers > 1):
                stages = s.reduction_buffer.shape[2]
                barriers = smem.allocate_array(Int64, num_elems=stages)
                if tidx == 0:
                    for stage in cutlass.range_constexpr(stages):
                        cute.arch.mbarrier_init(barriers + stage, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.cluster_arrive_relaxed()

        # Tensors, behind the sizes of modes and the prologue's numbers.
        sizes, numbers, addresses = self.apart(operands)
        share = share_of(s, columns)
        launch = Launch(
            spec=s,
            rows=rows,
            columns=columns,
            share=share,
            first=rank * share,
            rank=rank,
            lane=tidx % s.threads_per_row,
            sizes=sizes,
            numbers=numbers,
            mX=global_tensors(self.dtypes, addresses, s.kept_modes),
            tXcX=tXcX,
            policy=read_policy(evict_last),
            zero=evict_last >> 1,
            shared=Shared(tXsX=tXsX, buffer=buffer, barriers=barriers),
        )

        self.tiles(launch, smem, cta, ctas)

    @cute.jit
    def tiles(self, launch: Launch, smem: cutlass.memory.SmemAllocator, cta: Int32, ctas: Int32):
        """The tile of a CTA, or of a persistent one every `ctas`-th."""
        s = self.spec
        first = self.rows_of(launch, Int64(cta))
        wait_for_stream(s.early, upto=self.located_first, told=self.told)
        self.begin(launch, Int64(cta))
        if const_expr(not s.persistent):
            self.take(first, Int32(0), None)
        else:
            if const_expr(s.cluster_n > 1):
                cute.arch.cluster_wait()
            tile, turn = Int64(cta), Int32(0)
            tiles = (launch.rows + s.tiler[0] - 1) // s.tiler[0]
            # A tile ahead, as all else: waiting for them would cost a tenth of the time.
            coming = self.scalars.of_groups(launch, tile)
            while tile < tiles:
                known = coming
                coming = self.scalars.of_groups(launch, tile + ctas)
                self.take(self.rows_of(launch, tile), turn, known)
                tile += ctas
                turn += 1

    def begin(self, launch: Launch, tile: Int64):
        """Load what shared memory has room for of a CTA's first tile."""
        self.staging.begin(launch, tile)

    # Partition.

    def rows_of(self, launch: Launch, tile: Int64) -> list[Row]:
        """The rows of this thread in a tile, with where their inputs lie if that is found before the kernel waits: not
        those with edges, which need the registers."""
        rows = [row_of(launch, tile, m) for m in range(self.spec.rows_per_thread)]
        inputs = self.inputs if self.located_first and not self.spec.edges else []
        return [replace(row, tXgX=[partition(row, i) for i in inputs]) for row in rows]

    def input(self, row: Row, i: int) -> cute.Tensor:
        """The partition of an input."""
        return row.tXgX[i] if row.tXgX else partition(row, i)

    @cute.jit
    def take(self, rows: list[Row], turn: Int32, known: list | None):
        """A tile of rows, or of a row of which nothing here counts what is left to do; arguments as of `tile`."""
        if const_expr(self.spec.hides):
            if (rows[0].launch.rank > 0) & (rows[0].seen <= 0):
                self.hide(rows[0], turn, None if known is None else known[0])
            else:
                self.tile(rows, turn, known)
        else:
            self.tile(rows, turn, known)

    @cute.jit
    def tile(self, rows: list[Row], turn: Int32, known: list | None):
        """One tile of rows, from loading to storing.

        rows: `rows_of`; turn: how many tiles this CTA has done before; known: `of_groups`, if they are loaded already.
        """
        held = self.hold(rows, known)
        # Before anything is written: a result may take the place of what is chosen.
        chosen = [
            self.scalars.chosen(row, target, o) if const_expr(self.scalars.selects) else None
            for row, target, o in zip(rows, held.targets, held.owned, strict=True)
        ]
        maths = [self.math.for_row(v) for v in held.values]
        states, kept = self.reduce(rows[0].launch.shared, held.values, maths, turn)
        self.finish(rows, held, maths, chosen, kept, states)

    def hold(self, rows: list[Row], known: list | None) -> Held:
        """Load rows, as far as they are not in shared memory. known: see `tile`."""
        vectors = self.load(rows)
        edges = self.scalars.load_edges(rows, vectors.ones)
        if self.staging.loads_first or (known is None and self.math.group_inputs):
            # ptxas moves no load across it: it would wait for what a row has one of, or for the first vectors that
            # meet those in shared memory, before it loads the row.
            cute.arch.sync_warp()
        values = [
            self.values(rows[m], vectors, edges, None if known is None else known[m])
            for m in range(len(rows))
        ]
        targets = [v[-1].numbers["index"] if self.scalars.marks else None for v in values]
        owned = [
            self.scalars.owns(row, target, edges) if self.scalars.marks else None
            for row, target in zip(rows, targets, strict=True)
        ]
        return Held(vectors, edges, values, targets, owned)

    @cute.jit
    def finish(self, rows: list[Row], held: Held, maths: list, chosen: list, kept: list, states: list):
        """Store what becomes of rows whose states are whole. chosen: of each row what its index chooses; kept: what the
        thread has kept of each for its math."""
        for m in cutlass.range_constexpr(len(rows)):
            self.store(rows[m], maths[m].finish(held.values[m], kept[m], states[m]), held.vectors, held.edges)
            self.finish_scalars(rows[m], held, maths[m], chosen[m], states[m])

    @cute.jit
    def finish_scalars(self, row: Row, held: Held, math: RowMath, chosen: Chosen | None, state: tuple):
        """Store what is apart from a row's vectors: the result at its target, and its numbers."""
        m = row.m
        found = [chosen.score] if const_expr(self.scalars.selects) else []
        if const_expr(self.scalars.marks):
            result = partial(math.at_target, held.values[m][-1].numbers, state, *found)
            self.scalars.store_target(row, held.targets[m], held.owned[m], result)
        if const_expr(len(self.math.group_outputs) > 0):
            found += [held.values[m][-1].numbers["sink"]] if const_expr(self.spec.prologue.sink) else []
            self.scalars.store_groups(row, partial(math.group_results, state, *found), chosen)

    # Load.

    @cute.jit
    def load(self, rows: list[Row]) -> Vectors:
        """Load what comes directly from global memory, over the padding of what lies outside a row."""
        s = self.spec
        V, M, K = s.vector, s.rows_per_thread, s.steps

        # Predicates: whether a vector's columns exist, a bit that the rows of a thread share where they end alike; and
        # whether a row does.
        pX = cute.make_rmem_tensor(cute.make_layout(s.predicate.shape, stride=s.predicate.stride), Boolean)
        observe("predicate", pX)
        for m in cutlass.range_constexpr(1 if const_expr(s.rows_end_alike) else M):
            for k in cutlass.range_constexpr(K):
                pX[m, 0, k] = reads(rows[m], k)
        pR = [row.inside for row in rows]

        rX = [cute.make_rmem_tensor(((V, M), 1, K), self.dtypes[i]) for i in self.full]
        for i in self.inputs:
            rX[i].fill(self.dtypes[i](self.math.padding[i]))
        ones = {}
        for m in cutlass.range_constexpr(M):
            for i in self.inputs:
                tXgX = self.input(rows[m], i)
                if const_expr(s.access[i] == 0):
                    ones[i, m] = self.scalars.one(rows[m], i, Int32(0))
                    for k in cutlass.range_constexpr(K):
                        if pR[m] & pX[m, 0, k]:
                            rX[i][(None, m), 0, k].fill(ones[i, m])
                elif const_expr(s.staging[i] == "direct"):
                    for k in cutlass.range_constexpr(K):
                        if pR[m] & pX[m, 0, k]:
                            load(tXgX[None, k], rX[i][(None, m), 0, k], s.access[i], rows[m].launch.policy)
        return Vectors(rX, pX, pR, ones)

    # Reduce.

    def values(self, row: Row, vectors: Vectors, edges: Edges, known: list | None) -> list[Fragment | Given]:
        """What the math sees of a row: the elements of each input and, with a prologue, what else belongs to it. known:
        `of_group`, if it is loaded already."""
        s, m = self.spec, row.m
        K, E, waiting = s.steps, s.edge_scalars, set() if s.ring else set(range(0, s.steps, s.part))
        values = []
        for i in self.inputs:
            slots = None
            if s.keeps_shared and i == 0:  # where the math keeps numbers for the elements
                slots = Slots([row.launch.shared.tXsX[i][(None, m), 0, k] for k in range(K)])
            tXrX = [partial(self.held, row, i, k, vectors, waiting) for k in range(K)]
            scalars = [edges.rE[i][e, m] for e in range(E)]
            values.append(Fragment(tXrX, scalars, not self.math.keep, s.staging[i], slots, s.ring > 0))
        if s.prologue:
            exist = [vectors.pR[m] & vectors.pX[m, 0, k] for k in range(K)]
            counts = [count(row, k, exist[k]) for k in range(K)]
            counts += [Int32(edges.counted[e, m]) for e in range(E)]
            exist += [edges.counted[e, m] for e in range(E)]
            known = self.scalars.of_group(row) if known is None else known
            values.append(Given(self.scalars.numbers(row.launch, known), counts, exist))
        return values

    def held(self, row: Row, i: int, k: int, vectors: Vectors, waiting: set) -> cute.Tensor:
        """tXrX: vector k of input i in registers. The first touch of an asynchronously loaded part waits for it."""
        if self.staging.inputs and k in waiting:
            waiting.remove(k)
            self.staging.arrive(row, k, vectors)
        if self.spec.staging[i] in ("direct", "async"):
            return vectors.rX[i][(None, row.m), 0, k]
        return self.staging.vector(row, i, k, vectors)

    @cute.jit
    def reduce(self, shared: Shared, values: list, maths: list[RowMath], turn: Int32) -> tuple[list, list]:
        """By row (the state of the whole row, what the thread keeps of it for `finish`)."""
        s, width = self.spec, min(self.spec.threads_per_row, reduce.WARP)
        carry = [[] for _ in values]
        kept = [None for _ in values]
        for stage in cutlass.range_constexpr(len(self.math.reductions)):
            for m in cutlass.range_constexpr(len(values)):
                state, kept[m] = maths[m].partial(stage, values[m], carry[m], width)
                if const_expr(s.exchanges):
                    state = self.exchange(shared, stage, maths[m].reductions[stage], state, turn)
                carry[m].append(state)
        states = [sum(states, ()) for states in carry]
        if const_expr(s.prologue.sink):
            sinks = [v[-1].numbers["sink"] for v in values]
            states = [
                math.joined(state, sink) for math, state, sink in zip(maths, states, sinks, strict=True)
            ]
        return states, kept

    def exchange(self, shared: Shared, stage: int, op: object, state: tuple, turn: Int32) -> tuple:
        """Merge a state with the other warps and CTAs of the row.

        A persistent kernel alternates between two buffers, so that a fast warp never overwrites what a slow one
        still reads: to write a buffer again it must have passed the exchange in between.
        """
        if self.spec.peers > 1 and not self.spec.persistent and stage == 0:
            # As late as possible: it waits until all CTAs of the cluster have started.
            cute.arch.cluster_wait()
        which, phase = (turn % 2, turn // 2 % 2) if self.spec.persistent else (0, Int32(0))
        which = which + stage * self.spec.turns
        barrier = None if shared.barriers is None else shared.barriers + which
        buffer, s = shared.buffer[None, None, which], self.spec
        return reduce.across_warps(op, state, buffer, barrier, phase, s.peers, s.ring > 0)

    # Beyond the diagonal.

    @cute.jit
    def hide(self, row: Row, turn: Int32, known: list | None):
        """The part of a row of which nothing counts: its results are stored at once, as they are in a row of ordinary
        numbers, and again if the state of this one makes them others. known: `of_group`, if it is loaded already."""
        s, nothing = self.spec, []
        if const_expr(s.persistent):
            for k in cutlass.range_constexpr(0, s.steps, s.part):
                self.staging.refill(row, k)
        for i in self.inputs:
            vector = self.staging.padded(i)
            nothing.append(Fragment([lambda vector=vector: vector], [], not self.math.keep))
        numbers = self.scalars.numbers(row.launch, self.scalars.of_group(row) if known is None else known)
        nothing.append(Given(numbers, [Int32(0)], [Boolean(False)]))
        math, states = self.math.for_row(nothing), []
        ordinary = self.hidden(math, nothing, math.ordinary)
        self.fill(row, ordinary)
        for stage in cutlass.range_constexpr(len(math.reductions)):
            op = math.reductions[stage]
            state = tuple(Float32(number) for number in op.identity)
            states.append(self.exchange(row.launch.shared, stage, op, state, turn))
        state = sum(states, ())
        if const_expr(s.prologue.sink):
            state = math.joined(state, numbers["sink"])
        found = self.hidden(math, nothing, state)
        if found != ordinary:
            self.fill(row, found)

    def hidden(self, math: RowMath, nothing: list, state: tuple) -> Float32:
        """What becomes of an element that does not count. nothing: `values` of such elements."""
        (results,) = math.finish(nothing, None, state)
        return next(iter(results))

    @cute.jit
    def fill(self, row: Row, number: Float32):
        """Store a number in all vectors of a row that this CTA has."""
        i = len(self.inputs)
        tXgY, tXrY = partition(row, i), cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
        tXrY.fill(number.to(self.dtypes[i]))
        for k in cutlass.range_constexpr(self.spec.steps):
            if row.inside & writes(row, k, reads(row, k)):
                store(tXrY, tXgY[None, k])

    # Store.

    @cute.jit
    def store(self, row: Row, results: list, vectors: Vectors, edges: Edges):
        """Store the results of a row."""
        m = row.m
        for j in cutlass.range_constexpr(len(self.math.outputs)):
            i = len(self.inputs) + j
            tXgY = partition(row, i)
            result = iter(results[j])
            for k in cutlass.range_constexpr(self.spec.steps):
                tXrY = vectors.rX[i][(None, m), 0, k]
                pack(result, tXrY)
                exists = vectors.pR[m] & writes(row, k, vectors.pX[m, 0, k])
                if const_expr(self.branchless):
                    store(tXrY, tXgY[None, k], exists=exists)
                elif exists:
                    store(tXrY, tXgY[None, k])
            self.scalars.store_edges(row, i, result, edges)
