"""The column and split movements: groups along any dimensions, shared by the threads of a CTA and by several CTAs.

A *panel* is what a CTA works on: `across` vectors of neighbouring groups by all elements of those groups (columns),
or one group (rows, where `across` is 1 and a vector lies along the group). Its threads stand `across` by `down`;
step k of a thread takes unit ``k * down + d`` of the group, a unit being an element (columns) or a vector (rows).
A panel may be cut along the groups into `parts`, one CTA each, that meet in global memory. What a CTA cannot hold in
registers it reads twice, the second time backwards, from L2 as far as that kept it.

    coordinates -> panel -> shared memory -> predicates -> load -> collect -> merge -> meet -> finish -> store

Names as in `row`: mX a tensor, rX registers, pX predicates, sX shared memory. A *slot* is a group that a thread
holds elements of: V of them in columns, one in rows.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from . import meeting, reduce
from .copy import DTYPES, Columns, Fragment, forget, global_pointer, load, pack, read_policy, store


class PanelKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.PanelClass`.
    math: a row math of `maths` that keeps nothing between its passes.
    """

    def __init__(self, spec, math):
        self.spec = spec
        self.math = math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs = range(len(math.inputs))
        self.outputs = range(len(math.inputs), len(math.inputs) + len(math.outputs))
        self.group_outputs = range(len(math.inputs) + len(math.outputs), len(spec.dtypes))
        self.op = math.reductions[0]
        self.slot = reduce.slot_type(self.op)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        ctas: Int32,
        length: Int32,
        width: Int32,
        panels: Int32,
        parts: Int32,
        share: Int32,
        evict_last: Int32,
        patience: Int32,
        sync: Int64,
        states: Int64,
        *rest: Int64,
    ):
        """Launch.

        ctas: of the grid: panels times outer groups times parts; length: elements of a group; width: groups side
        by side (columns); panels: that they are cut into; parts: CTAs per panel; share: elements of a group that
        each of them takes; evict_last: see `copy.read_policy`; patience: nanoseconds, see `meeting`.
        sync, states: addresses of the meeting points (zeroed) and of the parts' states.
        rest: sizes of the outer kept modes but the slowest, and of the reduced modes but the slowest, the fastest
        first; then of each operand the address in bytes and the strides in elements of the outer kept modes, of
        the mode across, and of the reduced modes, the fastest first.
        """
        s = self.spec
        self.kernel(length, width, panels, parts, share, evict_last, patience, sync, states, rest).launch(
            grid=[ctas, 1, 1],
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
        )

    @cute.kernel
    def kernel(
        self,
        length: Int32,
        width: Int32,
        panels: Int32,
        parts: Int32,
        share: Int32,
        evict_last: Int32,
        patience: Int32,
        sync: Int64,
        states: Int64,
        rest: tuple,
    ):
        s = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        kept_sizes = [Int32(n) for n in rest[: s.kept_modes - 1]]
        reduced_sizes = [Int32(n) for n in rest[s.kept_modes - 1 : s.kept_modes + s.reduced_modes - 2]]
        operands = rest[s.kept_modes + s.reduced_modes - 2 :]
        each = 2 + s.kept_modes + s.reduced_modes

        # Coordinates: which panel, which part of it, which groups.
        part, tile = cta % parts, cta // parts
        panel, outer = tile % panels, tile // panels
        a, d = tidx % s.across, tidx // s.across
        column = (panel * s.across + a) * s.slots
        outer_index = apart(outer, kept_sizes)
        mX = []
        for i in cutlass.range_constexpr(len(self.dtypes)):
            address, *strides = operands[i * each : (i + 1) * each]
            kept, across, reduced = (
                strides[: s.kept_modes],
                strides[s.kept_modes],
                strides[s.kept_modes + 1 :],
            )
            start = dot(outer_index, kept) + Int64(column) * across
            mX.append(SimpleNamespace(address=address, start=start, across=across, reduced=reduced))

        # Shared memory: the states of the warps, the merged ones, and what one thread tells the others.
        smem = cutlass.memory.SmemAllocator()
        sB = smem.allocate_tensor(self.slot, cute.make_layout(s.buffer.shape, stride=s.buffer.stride), 16)
        sM = smem.allocate_tensor(self.slot, cute.make_layout(max(s.columns, 2)), 16)
        word = smem.allocate_tensor(Int32, cute.make_layout(2), 8)

        this = SimpleNamespace(
            tidx=tidx,
            a=a,
            d=d,
            inside=column < width,
            column=column,
            width=width,
            length=length,
            part=part,
            parts=parts,
            share=share,
            patience=patience,
            reduced_sizes=reduced_sizes,
            policy=read_policy(evict_last),
            mX=mX,
            sB=sB,
            sM=sM,
            word=word,
            sync=sync + Int64(tile) * (4 * meeting.HEADER) + Int64(tile) * 4 * parts,
            states=states + (Int64(tile) * parts) * (s.columns * self.slot.width // 8),
        )
        rX = [cute.make_rmem_tensor((s.vector, s.steps), dtype) for dtype in self.dtypes]
        self.panel(this, rX)

    @cute.jit
    def panel(self, this, rX):
        """One part of a panel, from loading to storing."""
        s = self.spec
        first = this.part * this.share
        end = cutlass.min(first + this.share, this.length)
        grain = s.down * s.unit * s.steps
        last = first  # where the tile begins that stays in registers
        if const_expr(s.streaming):
            last = first + cutlass.max((end - first - 1) // grain, 0) * grain

        # Load and collect; without `streaming` all is held.
        rS = cute.make_rmem_tensor((len(self.op.identity), s.slots), Float32)
        for v in cutlass.range_constexpr(s.slots):
            for n in cutlass.range_constexpr(len(self.op.identity)):
                rS[n, v] = Float32(self.op.identity[n])
        if const_expr(s.streaming):
            for at in cutlass.range(first, last, grain, unroll=1):
                self.fetch(this, at, end, rX)
                self.collect(rX, rS)
        self.fetch(this, last, end, rX)
        self.collect(rX, rS)

        # Merge, and finish what is held, then what was read before it.
        if const_expr(s.meeting):
            self.meet(this, rX, rS, first, last, end)
        else:
            carry = self.merge(this, rS)
            self.store_groups(this, carry)
            self.finish(this, last, end, rX, carry)
            if const_expr(s.streaming):
                self.stream_back(this, first, last, end, rX, carry)

    @cute.jit
    def meet(self, this, rX, rS, first: Int32, last: Int32, end: Int32):
        s = self.spec
        self.hand_over(this, rS)
        cute.arch.barrier()
        if this.tidx == 0:
            is_last = meeting.arrive(this.sync, this.parts)
            met = is_last
            if const_expr(self.math.outputs):
                if not is_last:
                    met = meeting.wait(this.sync, this.part, this.parts, this.patience)
            this.word[0] = Int32(met)
            this.word[1] = Int32(is_last)
        cute.arch.barrier()
        if this.word[0] != 0:
            carry = self.merge_parts(this)
            if this.word[1] != 0:
                self.store_groups(this, carry)
            if const_expr(self.math.outputs):
                self.finish(this, last, end, rX, carry)
                if const_expr(s.streaming):
                    self.stream_back(this, first, last, end, rX, carry)
                self.rescue(this, rX, carry)

    @cute.jit
    def rescue(self, this, rX, carry):
        """The last to arrive finishes the parts whose CTAs did not wait."""
        if this.word[1] != 0:
            cute.arch.barrier()
            if this.tidx == 0:
                this.word[0] = Int32(meeting.any_given_up(this.sync))
            cute.arch.barrier()
            if this.word[0] != 0:
                for part in cutlass.range(this.parts, unroll=1):
                    cute.arch.barrier()
                    if this.tidx == 0:
                        this.word[0] = Int32(meeting.take(this.sync, part))
                    cute.arch.barrier()
                    if this.word[0] != 0:
                        first = part * this.share
                        end = cutlass.min(first + this.share, this.length)
                        self.stream_back(this, first, end, end, rX, carry)

    @cute.jit
    def stream_back(self, this, first: Int32, last: Int32, end: Int32, rX, carry):
        """Read what lies before `last` again, backwards, and finish it."""
        s = self.spec
        grain = s.down * s.unit * s.steps
        for n in cutlass.range(cute.ceil_div(last - first, grain), unroll=1):
            at = first + (cute.ceil_div(last - first, grain) - 1 - n) * grain
            self.fetch(this, at, end, rX)
            self.finish(this, at, end, rX, carry)

    def index(self, this, at: Int32, k: int) -> Int32:
        """The first element of vector k of this thread within its groups, of the tile that begins at `at`."""
        s = self.spec
        return at + (this.d + k * s.down) * s.unit

    def pointer(self, this, i: int, index: Int32):
        """Where the vector at `index` of the groups lies in tensor i."""
        s = self.spec
        mX, dtype = this.mX[i], self.dtypes[i]
        offset = mX.start + dot(apart(index, this.reduced_sizes), mX.reduced)
        pointer = global_pointer(dtype, mX.address, offset, s.vector * dtype.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(s.vector))

    @cute.jit
    def fetch(self, this, at: Int32, end: Int32, rX):
        """Load a tile of all inputs, over the padding of what lies outside."""
        s = self.spec
        for i in self.inputs:
            rX[i].fill(self.dtypes[i](self.math.padding[i]))
        for k in cutlass.range_constexpr(s.steps):
            index = self.index(this, at, k)
            if this.inside & (index < end):
                for i in self.inputs:
                    load(self.pointer(this, i, index), rX[i][None, k], s.vector, this.policy)

    def fragments(self, rX) -> list:
        """Per slot, one fragment of each input."""
        s = self.spec
        held = [[rX[i][None, k] for k in range(s.steps)] for i in self.inputs]
        if s.orientation == "row":
            return [[Fragment([lambda v=v: v for v in vectors], [], False) for vectors in held]]
        columns = [Columns(vectors) for vectors in held]
        return [[c.slot(v) for c in columns] for v in range(s.slots)]

    def collect(self, rX, rS):
        """Merge what this thread holds into its states."""
        for v, values in enumerate(self.fragments(rX)):
            state = self.math.collect(values)
            if self.spec.streaming:
                state = self.op.merge(tuple(rS[n, v] for n in range(len(state))), state)
            for n, number in enumerate(state):
                rS[n, v] = number

    def lanes(self, rS) -> list:
        """The states merged over the lanes of a warp that share a group."""
        s = self.spec
        states = [tuple(rS[n, v] for n in range(len(self.op.identity))) for v in range(s.slots)]
        return [self.op.lanes(state, reduce.WARP, start=min(s.across, reduce.WARP)) for state in states]

    @cute.jit
    def merge_warps(self, this, rS) -> tuple:
        """States of all of the CTA: in rows in every thread, in columns that of column t in thread t."""
        s = self.spec
        states = self.lanes(rS)
        lane = cute.arch.lane_idx()
        row = this.tidx // max(s.across, reduce.WARP)
        if lane < s.across:
            for v in cutlass.range_constexpr(s.slots):
                this.sB[row, this.a * s.slots + v] = reduce.pack(states[v])
        cute.arch.barrier()
        rows = s.buffer.shape[0]
        merged = tuple(Float32(n) for n in self.op.identity)
        if const_expr(s.orientation == "row"):
            if lane < rows:
                merged = reduce.unpack(this.sB[lane, 0])
            merged = self.op.lanes(merged, reduce.WARP)
        else:
            merged = reduce.unpack(this.sB[0, this.tidx % s.columns])
            for i in cutlass.range_constexpr(1, rows):
                merged = self.op.merge(merged, reduce.unpack(this.sB[i, this.tidx % s.columns]))
        return merged

    @cute.jit
    def spread(self, this, merged: tuple) -> list:
        """The state of each of this thread's slots, from column t's in thread t."""
        s = self.spec
        if const_expr(s.orientation == "row"):
            carry = [[merged]]
        else:
            sM = this.sM
            if this.tidx < s.columns:
                sM[this.tidx] = reduce.pack(merged)
            cute.arch.barrier()
            carry = [[reduce.unpack(this.sM[this.a * s.slots + v])] for v in range(s.slots)]
        return carry

    @cute.jit
    def merge(self, this, rS) -> list:
        """The states of this thread's slots, merged over the CTA."""
        if const_expr(self.spec.down == 1):
            carry = [[state] for state in self.lanes(rS)]
        else:
            carry = self.spread(this, self.merge_warps(this, rS))
        return carry

    @cute.jit
    def hand_over(self, this, rS):
        """Put the states of this part where the other CTAs of the panel read them."""
        s = self.spec
        merged = self.merge_warps(this, rS)
        mine = self.part_state(this, this.part)
        if this.tidx < s.columns:
            mine[this.tidx] = reduce.pack(merged)

    def part_state(self, this, part: Int32) -> cute.Tensor:
        size = self.slot.width // 8
        at = this.states + Int64(part) * (self.spec.columns * size)
        pointer = cute.make_ptr(self.slot, at, cute.AddressSpace.gmem, assumed_align=size)
        return cute.make_tensor(pointer, cute.make_layout(self.spec.columns))

    @cute.jit
    def merge_parts(self, this) -> list:
        """The states of this thread's slots, merged over all parts of the panel.

        Every `readers`-th part is read by the same threads; in rows those are the lanes of each warp.
        """
        s = self.spec
        state = [Float32(n) for n in self.op.identity]
        if const_expr(s.orientation == "row"):
            reader, readers, column = cute.arch.lane_idx(), reduce.WARP, 0
        else:
            reader, readers, column = this.tidx // s.columns, s.readers, this.tidx % s.columns
        rS = cute.make_rmem_tensor(len(state), Float32)
        for n in cutlass.range_constexpr(len(state)):
            rS[n] = state[n]
        for part in cutlass.range(reader, this.parts, readers, unroll=4):
            at = self.part_state(this, part).iterator + column
            seen = reduce.unpack(cute.arch.load(at, self.slot, sem="relaxed", scope="gpu"))
            merged = self.op.merge(tuple(rS[n] for n in range(len(state))), seen)
            for n in cutlass.range_constexpr(len(state)):
                rS[n] = merged[n]
        merged = tuple(rS[n] for n in range(len(state)))
        if const_expr(s.orientation == "row"):
            merged = self.op.lanes(merged, reduce.WARP)
        elif const_expr(readers > 1):
            if reader < readers:
                this.sB[reader, column] = reduce.pack(merged)
            cute.arch.barrier()
            merged = reduce.unpack(this.sB[0, column])
            for i in cutlass.range_constexpr(1, readers):
                merged = self.op.merge(merged, reduce.unpack(this.sB[i, column]))
        return self.spread(this, merged)

    @cute.jit
    def store_groups(self, this, carry):
        """Write the results that a group has one of."""
        s = self.spec
        if const_expr(len(self.group_outputs) > 0):
            if (this.d == 0) & this.inside:
                for v in cutlass.range_constexpr(s.slots):
                    for i, result in zip(self.group_outputs, self.math.group_results(carry[v]), strict=True):
                        mX, dtype = this.mX[i], self.dtypes[i]
                        at = global_pointer(dtype, mX.address, mX.start + v * mX.across, dtype.width // 8)
                        cute.make_tensor(at, cute.make_layout(1))[0] = result.to(dtype)

    @cute.jit
    def finish(self, this, at: Int32, end: Int32, rX, carry):
        """Compute and store the results of the tile in registers."""
        s = self.spec
        if const_expr(len(self.outputs) > 0):
            for i in self.inputs:
                for k in cutlass.range_constexpr(s.steps):
                    forget(rX[i][None, k])
            results = [
                self.math.finish(values, None, carry[v]) for v, values in enumerate(self.fragments(rX))
            ]
            for j in cutlass.range_constexpr(len(self.math.outputs)):
                i = len(self.inputs) + j
                streams = [iter(r[j]) for r in results]
                for k in cutlass.range_constexpr(s.steps):
                    pack((next(streams[v % s.slots]) for v in range(s.vector)), rX[i][None, k])
                    index = self.index(this, at, k)
                    if this.inside & (index < end):
                        store(rX[i][None, k], self.pointer(this, i, index))


def apart(index: Int32, sizes: list) -> list:
    """The coordinates of an index in modes of these sizes, the fastest first; the slowest has no size."""
    found = []
    for size in sizes:
        found.append(index % size)
        index = index // size
    return [*found, index]


def dot(coordinates: list, strides: list) -> Int64:
    """The offset of coordinates."""
    total = Int64(0)
    for c, stride in zip(coordinates, strides, strict=True):
        total += Int64(c) * stride
    return total
