"""The column and split movements: groups along any dimensions, shared by the threads of a CTA and by several CTAs.

A *panel* is what a CTA works on: `across` vectors of neighbouring groups by all elements of those groups (columns),
or one group (rows, where `across` is 1 and a vector lies along the group). Its threads stand `across` by `down`;
step k of a thread takes unit ``k * down + d`` of the group, a unit being an element (columns) or a vector (rows).
A panel may be cut along the groups into `parts`, one CTA each, that exchange states in global memory. What a CTA cannot
hold in shared memory it takes in chunks, see `stream`.

A row that begins or ends off a vector boundary is cut into a head, a body of whole vectors that begins on a cache line,
and a tail of fewer than V scalars. Parts share the body; threads of the first take the scalars of head and tail, the
row's `edges`.

    coordinates -> panel -> shared memory -> fetch -> fold -> merge -> exchange -> finish -> store

Names as in `row`: mX a tensor, rS states in registers, sX shared memory. A *slot* is a group that a thread
holds elements of: V of them in columns, one in rows.
"""

from functools import partial
from itertools import chain
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from ..common import reduce
from ..common.copy import (
    DTYPES,
    PACKED_MAX,
    apart,
    dot,
    global_pointer,
    load_async,
    pack,
    packed_maximum,
    policy,
    read_policy,
    store,
    unpack,
)
from . import exchange
from .shift import Shifted
from .stream import Streaming


class PanelKernel(Streaming, Shifted):
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.PanelClass`.
    math: a row math of `maths`; its element functions are used.
    """

    def __init__(self, spec, math):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs = range(len(math.inputs))
        self.group_outputs = range(len(math.inputs) + len(math.outputs), len(spec.dtypes))
        self.slot = reduce.slot_type(math.whole)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        ctas: Int32,
        items: Int32,
        length: Int32,
        groups: Int32,
        parts: Int32,
        share: Int32,
        evict_last: Int32,
        patience: Int32,
        chunks: Int32,
        exchanges: Int64,
        *rest: Int64,
    ):
        """Launch.

        ctas: CTAs of the grid, or clusters; items: panels times parts, each the work of one CTA or cluster;
        length: elements of a group; groups: how many, side by side; parts: of a panel; share: elements of a group
        that a CTA takes; evict_last: see `copy.read_policy`; patience: nanoseconds, see `exchange`; chunks: of a
        share, see `ahead`; exchanges: bytes of all exchange points.
        rest: sizes of all kept modes but the slowest, and of all reduced modes but the slowest, the fastest first;
        with exchange points the address of zeroed memory for them, and behind them for the parts' states; then of
        each operand the address in bytes and the strides in elements of the kept and of the reduced modes, the
        fastest first.
        """
        s = self.spec
        self.kernel(
            ctas, items, length, groups, parts, share, evict_last, patience, chunks, exchanges, rest
        ).launch(
            grid=[ctas * s.cluster_n, 1, 1],
            block=[s.threads, 1, 1],
            cluster=[s.cluster_n, 1, 1] if const_expr(s.cluster_n > 1) else None,
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
        )

    @cute.kernel
    def kernel(
        self,
        ctas: Int32,
        items: Int32,
        length: Int32,
        groups: Int32,
        parts: Int32,
        share: Int32,
        evict_last: Int32,
        patience: Int32,
        chunks: Int32,
        exchanges: Int64,
        rest: tuple,
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        rank = Int32(0)
        if const_expr(s.cluster_n > 1):
            item, rank = item // s.cluster_n, cute.arch.block_idx_in_cluster()
        kept_sizes = [Int32(n) for n in rest[: s.kept_modes - 1]]
        reduced_sizes = [Int32(n) for n in rest[s.kept_modes - 1 : s.kept_modes + s.reduced_modes - 2]]
        operands = rest[s.kept_modes + s.reduced_modes - 2 :]
        sync = Int64(0)
        if const_expr(s.exchange):
            sync, operands = operands[0], operands[1:]
        mX = []
        for i in cutlass.range_constexpr(len(self.dtypes)):
            each = 1 + s.kept_modes + s.reduced_modes
            address, *strides = operands[i * each : (i + 1) * each]
            mX.append(
                SimpleNamespace(
                    address=address, kept=strides[: s.kept_modes], reduced=strides[s.kept_modes :]
                )
            )

        # Shared memory: the tiles, the warps' partial results (one buffer a stage), what CTAs exchange.
        smem = cutlass.memory.SmemAllocator()
        sX_layout = cute.make_layout(s.smem.shape, stride=s.smem.stride)
        sX = [smem.allocate_tensor(self.dtypes[i], sX_layout, 16) for i in self.inputs]
        buffer = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        sB = smem.allocate_tensor(Float32, buffer, 16)
        sC = smem.allocate_tensor(self.slot, cute.make_layout(s.peers.shape, stride=s.peers.stride), 16)
        for name, tensor in (("smem", sX[0]), ("reduction_buffer", sB), ("peers", sC)):
            observe(name, tensor)
        words = smem.allocate_tensor(Int32, cute.make_layout(2), 8)
        barrier = None
        if const_expr(s.cluster_n > 1):
            barrier = smem.allocate_array(Int64, num_elems=s.trips)
            if tidx < s.trips:
                cute.arch.mbarrier_init(barrier + tidx, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

        launch = SimpleNamespace(
            ctas=ctas,
            items=items,
            tidx=tidx,
            a=tidx % s.across,
            d=tidx // s.across,
            rank=rank,
            groups=groups,
            length=length,
            parts=parts,
            share=share,
            patience=patience,
            chunks=chunks,
            kept_sizes=kept_sizes,
            reduced_sizes=reduced_sizes,
            **self.policies(evict_last),
            mX=mX,
            **self.slots_of(tidx, sX),
            sB=sB,
            sC=sC,
            words=words,
            barrier=barrier,
            exchanges=sync,
            states=sync + exchanges,
        )
        if const_expr(s.ahead):
            self.ahead(launch, item)  # of `ahead.Ahead`
        elif const_expr(s.streaming):
            self.stream(launch, item)
        else:
            self.panel(launch, item)

    def slots_of(self, tidx: Int32, sX: list) -> dict:
        """`sX`: per input, this thread's slots in shared memory."""
        if self.spec.shifted:
            return self.slots_of_line(tidx, sX)  # of `shift.Shifted`
        return {"sX": [x[None, tidx, None] for x in sX]}

    def policies(self, evict_last: Int32) -> dict[str, Int64]:
        """L2 eviction policies: of reads that are repeated, of all others, of writes.

        What is read twice stays in L2 rather than what is not needed any more. That leaves first, but where CTAs share
        an SM: there the usual order is faster. Rows a row ahead are read once, and yet leave last.
        (docs/experiments.md)
        """
        if self.spec.repeats:
            usual = self.spec.min_blocks > 1
            once = policy("evict_normal" if usual else "evict_first")
            return {"twice": policy("evict_last"), "once": once, "writes": None if usual else once}
        reads = read_policy(evict_last)
        return {"twice": reads, "once": reads, "writes": None}

    def at(self, launch, item: Int32) -> SimpleNamespace:
        """The launch as one item of its work sees it: which panel, which part of it, which groups and elements."""
        s = self.spec
        part, tile = Int32(0), item
        if s.exchange:
            part, tile = item % launch.parts, item // launch.parts
        if s.shifted:
            kept, line = self.line_of(launch, tile)  # of `shift.Shifted`
            inside = Boolean(True)
        else:
            column = (tile * s.across + launch.a) * s.slots
            kept, line = apart(column, launch.kept_sizes), {"beside": None}
            inside = column < launch.groups
        first = (part * s.cluster_n + launch.rank) * launch.share
        starts = [dot(kept, mX.kept) for mX in launch.mX]
        head, body = Int32(0), launch.length
        if s.edges:
            r = s.facts.reference
            misaligned = Int32(
                (launch.mX[r].address // (self.dtypes[r].width // 8) + starts[r]) & (s.line - 1)
            )
            head = cutlass.min((s.line - misaligned) & (s.line - 1), launch.length)
            body = (launch.length - head) // s.vector * s.vector
        end = cutlass.min(first + launch.share, body)
        if s.edges:  # the body may be shorter than another row's by a part's whole share
            first, end = head + first, head + cutlass.max(first, end)
        return SimpleNamespace(
            **vars(launch),
            item=item,
            part=part,
            starts=starts,
            inside=inside,
            **line,
            head=head,
            first=first,
            end=end,
            sync=launch.exchanges + Int64(tile) * (4 * exchange.words(launch.parts)),
            tile_states=launch.states + Int64(tile) * launch.parts * (s.columns * s.published_bytes),
        )

    @cute.jit
    def panel(self, launch, item: Int32):
        """One CTA's share of a panel, which it holds, from loading to storing."""
        s, this = self.spec, self.at(launch, item)
        left = self.left(this, this.first)
        self.fetch(this, this.starts, this.first, left, this.beside, Int32(0), this.once)
        edges = self.edges(this)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        self.align(this, this.first, Int32(0))
        mine, states = self.reduce(this, None, edges)
        if const_expr(s.cluster_n > 1):
            mine = self.across_cluster(this, mine)
        if const_expr(s.exchange):
            if const_expr(len(self.math.outputs) > 0):
                duty = self.hand_over(this, mine)  # of `split.SplitKernel`
                if self.collect(this, this.patience) != 0:
                    whole = self.merged(this)
                    self.finish(this, this.first, Int32(0), whole)
                    self.finish_edges(this, edges, whole)
                self.rescue(launch, item, duty)
            else:
                self.conclude(this, mine)
        else:
            if const_expr(s.down > 1):
                states = self.spread(this, mine)
            self.store_groups(this, states)
            if const_expr(len(self.math.outputs) > 0):
                self.finish(this, this.first, Int32(0), states)
                self.finish_edges(this, edges, states)

    def places(self, this, i: int, start: Int64, at: Int32) -> list:
        """The addresses of this thread's vectors of the chunk at element `at` in tensor i, whose groups begin at
        `start`."""
        s = self.spec
        mX, dtype = this.mX[i], self.dtypes[i]
        size = dtype.width // 8
        first = at + this.d * s.unit
        if s.reduced_modes == 1:
            # One multiplication, then additions: a 64-bit product for each vector would cost as much as its softmax.
            # A row's vectors lie where its neighbours are next to each other.
            (stride,) = mX.reduced if s.unit == 1 else (1,)
            addresses = [mX.address + (start + Int64(first) * stride) * size]
            step = Int64(s.down * s.unit * size) * stride
            for _ in range(1, s.chunk_steps):
                addresses.append(addresses[-1] + step)
        else:
            indices = [apart(first + k * s.down * s.unit, this.reduced_sizes) for k in range(s.chunk_steps)]
            addresses = [mX.address + (start + dot(index, mX.reduced)) * size for index in indices]
        return addresses

    def vectors(self, this, i: int, start: Int64, at: Int32) -> list:
        """The vectors at `places`."""
        return [self.vector(i, address) for address in self.places(this, i, start, at)]

    def vector(self, i: int, address: Int64) -> cute.Tensor:
        """The vector of tensor i at an address."""
        align = self.spec.accesses[i] * self.dtypes[i].width // 8
        pointer = global_pointer(self.dtypes[i], address, Int64(0), align)
        return cute.make_tensor(pointer, cute.make_layout(self.spec.vector))

    def left(self, this, at: Int32) -> Int32:
        """How much of the group there is from this thread's first element of a chunk on: vector k exists where more
        than k * down * unit is left."""
        return Int32(cutlass.select_(this.inside, this.end - at - this.d * self.spec.unit, Int32(0)))

    def fetch(
        self, this, starts: list, at: Int32, left: Int32, beside: Int32 | None, base: Int32, policy: Int64
    ):
        """Load the chunk that begins at element `at` of the groups at `starts`, of all inputs, into this thread's own
        slots of shared memory from step `base` on, padding what lies outside. beside: see `Shifted.line_of`. policy:
        see `policies`."""
        s = self.spec
        if s.shifted:
            self.fetch_blocks(this, starts, at, left, beside, base, policy)  # of `shift.Shifted`
        else:
            self.fetch_vectors(this, starts, at, left, base, policy)

    def padding(self, i: int) -> cute.Tensor:
        """A vector in registers of what stands for elements of input i that do not exist."""
        padding = cute.make_rmem_tensor(max(self.spec.vector, 2), self.dtypes[i])
        padding.fill(self.dtypes[i](self.math.padding[i]))
        return padding

    @cute.jit
    def fetch_vectors(self, this, starts: list, at: Int32, left: Int32, base: Int32, policy: Int64):
        """`fetch` where each vector is one access or several whole ones."""
        s = self.spec
        for i in self.inputs:
            padding = self.padding(i)
            gX = self.vectors(this, i, starts[i], at)
            for k in cutlass.range_constexpr(s.chunk_steps):
                slot = this.sX[i][None, base + k]
                if left > k * s.down * s.unit:
                    load_async(gX[k], slot, s.access[i], policy, s.prefetches)
                else:
                    for v in cutlass.range_constexpr(s.vector):
                        slot[v] = padding[v]

    def edge(self, this, e: int) -> tuple:
        """Scalar e of this thread: which element of the row it is, and whether there is one."""
        s = self.spec
        slot = this.tidx + e * s.threads
        after = slot - (s.line - 1)
        tail = this.head + (this.length - this.head) // s.vector * s.vector
        in_head = slot < this.head
        in_tail = (after >= 0) & (tail + after < this.length)
        exists = (in_head | in_tail) & (this.part == 0) & (this.rank == 0) & this.inside
        return Int32(cutlass.select_(in_head, slot, tail + after)), exists

    def scalar(self, this, i: int, at: Int32) -> cute.Tensor:
        """Element `at` of this group of tensor i in global memory."""
        dtype = self.dtypes[i]
        place = global_pointer(dtype, this.mX[i].address, this.starts[i] + at, dtype.width // 8)
        return cute.make_tensor(place, cute.make_layout(1))

    @cute.jit
    def edges(self, this, into: list | None = None) -> list:
        """Per input the scalars at the edges of a row that this thread has, padding where there are none; in registers
        of their own or in those given."""
        s = self.spec
        found = self.no_edges() if into is None else into
        for e in cutlass.range_constexpr(s.edge_scalars):
            at, exists = self.edge(this, e)
            for i in self.inputs:
                scalars = found[i]
                scalars[e] = self.dtypes[i](self.math.padding[i])
                gX = self.scalar(this, i, at)
                if exists:
                    scalars[e] = gX[0]
        return found

    def no_edges(self) -> list:
        """Registers for the scalars at the edges of a row, of each input; none in a class without."""
        inputs = self.inputs if self.spec.edges else ()
        found = [cute.make_rmem_tensor(self.spec.edge_scalars, self.dtypes[i]) for i in inputs]
        for i in inputs:
            found[i].fill(self.dtypes[i](self.math.padding[i]))
        return found

    @cute.jit
    def finish_edges(self, this, edges: list, states: list, merged: Int32 | int = 1):
        """Compute and store the results of the scalars at the edges of a row, if the states are there."""
        s, math = self.spec, self.math
        i = len(math.inputs)
        for e in cutlass.range_constexpr(s.edge_scalars):
            at, exists = self.edge(this, e)
            result = math.result(tuple(x[e].to(Float32) for x in edges), states[0])
            gX = self.scalar(this, i, at)
            if exists & (merged != 0):
                gX[0] = result.to(self.dtypes[i])

    def held(self, this, k: int, base: Int32 | int | list) -> list:
        """Vector k of each input in registers, of the chunk that lies at `base`; or is in registers, see `ahead`."""
        if isinstance(base, list):
            return [vectors[k] for vectors in base]
        found = []
        for i in self.inputs:
            vector = cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
            cute.autovec_copy(this.sX[i][None, base + k], vector)
            found.append(vector)
        return found

    def fold(self, this, stage: int, carry: list, base: Int32 | int | list | None, edges: list) -> list:
        """Per slot this thread's partial result of a stage, over one chunk and the scalars at a row's edges. carry: per
        slot, the results of the stages before; base: see `held`, None without a chunk; edges: empty without scalars."""
        s, math = self.spec, self.math
        op = math.reductions[stage].op
        dtype = self.dtypes[0]
        scalars = range(s.edge_scalars if edges else 0)
        ends = [math.term(stage, tuple(x[e].to(Float32) for x in edges), carry[0]) for e in scalars]
        steps = range(0 if base is None else s.chunk_steps)
        if base is None:
            totals = []
        elif math.maximum_first and stage == 0 and dtype in PACKED_MAX and s.vector > 1:
            words = [cute.recast_tensor(self.held(this, k, base)[0], Uint32) for k in steps]
            both = cute.make_rmem_tensor(s.vector, dtype)
            for j in range(s.vector // 2):
                largest = reduce.tree(partial(packed_maximum, dtype), [w[j] for w in words])
                cute.recast_tensor(both, Uint32)[j] = largest
            totals = unpack(both)
        else:
            terms = (
                [math.term(stage, e, carry[v % s.slots]) for v, e in enumerate(elements)]
                for elements in (zip(*map(unpack, self.held(this, k, base)), strict=True) for k in steps)
            )
            if s.orientation == "row":
                # Pairwise all through: a chain rounds what came first once more with each addition.
                return [reduce.tree(op, chain((reduce.tree(op, vector) for vector in terms), ends))]
            totals = next(terms)
            for vector in terms:
                totals = [op(a, b) for a, b in zip(totals, vector, strict=True)]
        return totals if s.orientation == "column" else [reduce.tree(op, [*totals, *ends])]

    def reduce(self, this, states: list | None, edges: list = ()) -> tuple[tuple, list]:
        """The state of all of the CTA's elements of column t, in thread t; if a thread has its columns for itself
        nothing is exchanged, and instead the states of its slots are returned.

        The largest elements of all first, then the sums of exponentials relative to them, and so on: nothing is
        ever rescaled, but each stage waits for all threads. states: per slot this thread's, None to find them, also in
        what `edges` has.
        """
        s, math = self.spec, self.math
        if s.down == 1 and states is not None:
            return (), states
        carry, mine = [() for _ in range(s.slots)], ()
        for stage, op in enumerate(math.reductions):
            if states is None:
                totals = self.fold(this, stage, carry, 0, edges)
            else:
                totals = [math.whole.refer(stage, states[v], carry[v]) for v in range(s.slots)]
            if s.down == 1:
                carry = [(*c, t) for c, t in zip(carry, totals, strict=True)]
                continue
            merged, everywhere = self.across_warps(
                this, op, totals, this.sB[None, None, stage], stage + 1 < len(math.reductions)
            )
            mine += (merged,)
            if everywhere is not None:
                carry = [(*c, m) for c, m in zip(carry, everywhere, strict=True)]
        return mine, carry

    @cute.jit
    def across_warps(
        self, this, op: cutlass.Constexpr, totals: list, buffer: cute.Tensor, spread: cutlass.Constexpr[bool]
    ) -> tuple:
        """Merge the threads' results: that of column t in thread t and, if `spread`, per slot in every thread.

        buffer: shape (columns, warps down the panel).
        """
        s = self.spec
        start = min(s.across, reduce.WARP)
        lane, row = cute.arch.lane_idx(), this.tidx // max(s.across, reduce.WARP)
        column = this.a * s.slots
        partials = [op.lanes((t,), reduce.WARP, start)[0] for t in totals]
        if lane < s.across:
            for v in cutlass.range_constexpr(s.slots):
                buffer[column + v, row] = partials[v]
        cute.arch.barrier()
        mine = this.tidx % s.columns
        merged = op.all([buffer[mine, i] for i in range(s.warps_down)])
        everywhere = None
        if const_expr(spread):
            cute.arch.barrier()
            if this.tidx < s.columns:
                buffer[mine, 0] = merged
            cute.arch.barrier()
            everywhere = [buffer[column + v, 0] for v in range(s.slots)]
        return merged, everywhere

    @cute.jit
    def across_cluster(self, this, mine: tuple) -> tuple:
        """Merge the states of column t over the CTAs of the cluster, in thread t. In one trip each CTA sends all its
        states to all; in two each merges those of its share of the columns, and sends what comes of them to all."""
        s, sC = self.spec, this.sC
        column, each = this.tidx % s.columns, s.columns // s.cluster_n
        if this.tidx < s.trips:
            received = s.columns * (s.cluster_n if s.trips == 1 else 1) * self.slot.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(this.barrier + this.tidx, received)
        # As late as possible: it waits until all CTAs of the cluster have started.
        cute.arch.cluster_wait()
        if const_expr(s.trips == 1):
            if this.tidx < s.columns:
                for peer in cutlass.range_constexpr(s.cluster_n):
                    reduce.store_remote(mine, sC, (column, this.rank), this.barrier, Int32(peer))
            cute.arch.mbarrier_wait(this.barrier, 0)
            theirs = [reduce.unpack(sC[column, i]) for i in range(s.cluster_n)]
            return self.math.whole.merge_all(theirs)
        if this.tidx < s.columns:
            at = (column % each * s.cluster_n + this.rank, 0)
            reduce.store_remote(mine, sC, at, this.barrier, column // each)
        cute.arch.mbarrier_wait(this.barrier, 0)
        # The states of one column lie in neighbouring threads, one for each CTA; each sends the result to one.
        merged = self.math.whole.lanes(reduce.unpack(sC[column, 0]), s.cluster_n)
        if this.tidx < s.columns:
            at = (this.rank * each + column // s.cluster_n, 1)
            reduce.store_remote(merged, sC, at, this.barrier + 1, column % s.cluster_n)
        cute.arch.mbarrier_wait(this.barrier + 1, 0)
        return reduce.unpack(sC[column, 1])

    @cute.jit
    def spread(self, this, mine: tuple) -> list:
        """Per slot the state, from column t's in thread t."""
        s, sC = self.spec, this.sC
        cute.arch.barrier()
        if this.tidx < s.columns:
            sC[this.tidx, 0] = reduce.pack(mine)
        cute.arch.barrier()
        return [reduce.unpack(sC[this.a * s.slots + v, 0]) for v in range(s.slots)]

    def store_groups(self, this, states):
        """Write the results that a group has one of."""
        if self.group_outputs:
            results = [self.math.group_results(state) for state in states]
            self.store_each(this, results)

    @cute.jit
    def store_each(self, this, results):
        if (this.d == 0) & this.inside & (this.rank == 0):
            for v in cutlass.range_constexpr(self.spec.slots):
                if const_expr(self.spec.shifted):
                    if v < this.beside:
                        self.store_group(this, v, results[v])
                else:
                    self.store_group(this, v, results[v])

    def store_group(self, this, v: int, results: tuple):
        """Write the results of the group in slot v."""
        for i, result in zip(self.group_outputs, results, strict=True):
            mX, dtype = this.mX[i], self.dtypes[i]
            at = global_pointer(dtype, mX.address, this.starts[i] + v * mX.kept[0], dtype.width // 8)
            cute.make_tensor(at, cute.make_layout(1))[0] = result.to(dtype)

    @cute.jit
    def finish(self, this, at: Int32, base: Int32, states: list):
        """Compute and store the results of the chunk that begins at element `at` and lies in shared memory."""
        if const_expr(not self.spec.shifted):
            self.finish_vectors(this, at, base, states)
        elif this.ends:
            self.finish_blocks(this, at, base, states, True)  # of `shift.Shifted`
        else:
            self.finish_blocks(this, at, base, states, False)

    def results(self, this, k: int, base: Int32, states: list) -> cute.Tensor:
        """The results of vector k of the chunk that lies at `base`, in registers."""
        s = self.spec
        elements = zip(*(unpack(vector) for vector in self.held(this, k, base)), strict=True)
        results = [self.math.result(e, states[v % s.slots]) for v, e in enumerate(elements)]
        rounded = cute.make_rmem_tensor(s.vector, self.dtypes[len(self.math.inputs)])
        pack(iter(results), rounded)
        return rounded

    @cute.jit
    def finish_vectors(self, this, at: Int32, base: Int32, states: list):
        """`finish` where each vector is one access."""
        s = self.spec
        left = self.left(this, at)
        i = len(self.math.inputs)
        gX = self.vectors(this, i, this.starts[i], at)
        for k in cutlass.range_constexpr(s.chunk_steps):
            rounded = self.results(this, k, base, states)
            exists = left > k * s.down * s.unit
            if const_expr(not s.streaming):
                store(rounded, gX[k], exists=exists)
            elif exists:
                store(rounded, gX[k], self.hint(this, rounded))

    def hint(self, this, rounded: cute.Tensor) -> Int64 | None:
        """The L2 policy of a store; those of less than four bytes can have none."""
        return this.writes if cute.size(rounded) * rounded.element_type.width >= 32 else None
