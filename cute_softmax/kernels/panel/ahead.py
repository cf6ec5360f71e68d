"""Rows that CTAs of the whole GPU hold: while one is finished the next is absorbed.

A CTA takes its share of one row after the other, in chunks, and absorbs them in their order. It finishes them when the
state of the whole row is known, `wait` steps after the next row has begun; from then on each step finishes one chunk
and absorbs another. So nobody waits for an exchange, which has the first steps of the next row to come true:

    row 0    absorb 0 1 2 3 4 5 6 7 |             finish 2 3 4 5 6 7 0 1
    row 1                             absorb 0 1         2 3 4 5 6 7     |            finish 2 3 ...
    step                                     0 1         2 3 4 5 6 7 8 9

(8 chunks, `wait` = 2.) All chunks come to shared memory. The first `registers` of a row move to registers when they are
absorbed, where they wait to be finished; the others stay where they are. What a step has made free takes the chunk that
the step `ahead` of it absorbs, so nobody waits for copies, either.

Where chunks lie: the steps of all rows go round a ring of places. In it each row begins `ahead` places behind the one
before, as so many of its places are free: so a chunk that stays comes to where chunk n - `ahead` of the row before was.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ..common import reduce
from . import exchange


class Ahead:
    """What `SplitKernel` does with rows a row ahead."""

    @cute.jit
    def ahead(self, launch, item: Int32):
        """This CTA's items, from `item` on."""
        s, nothing = self.spec, self.math.whole.identity
        places = launch.chunks - s.registers + s.ahead
        first, ring = self.at(launch, item), SimpleNamespace(turn=Int32(0), places=places)
        for n in cutlass.range_constexpr(s.ahead):
            self.fetch_at(first, Int32(n), self.place_of(ring, n), first.item < first.items)
            cute.arch.cp_async_commit_group()
        rS = cute.make_rmem_tensor((len(nothing), 1), Float32)
        # The first chunks of this row; those of the row before whose places they take.
        kept = [self.nothing() for _ in range(s.registers)]
        last = [self.nothing() for _ in range(s.wait)]
        edges, last_edges = self.no_edges(), self.no_edges()
        patience, duties, turn = launch.patience, Int32(0), Int32(0)
        for i in cutlass.range(item, launch.items + launch.ctas, launch.ctas, unroll=1):
            at = SimpleNamespace(
                before=self.at(launch, cutlass.max(i - launch.ctas, item)),
                this=self.at(launch, i),
                following=self.at(launch, i + launch.ctas),
                places=places,
                turn=turn,
            )
            for n in cutlass.range_constexpr(len(nothing)):
                rS[n, 0] = Float32(nothing[n])
            if (launch.tidx == 0) & (i < launch.items):
                exchange.expect(at.this.sync)
                exchange.expect(self.place(at.this, at.this.part, Int32(0)))
            self.edges(at.this, edges)
            finishing = Int32(0)
            for t in cutlass.range_constexpr(s.wait - 1):
                self.step(at, rS, [], t, finishing, kept[t], True)
            # The states are on their way during the last of these steps, from L2. Only both help: a read from DRAM
            # takes longer than a step, and without reading ahead the latency of L2 counts, too.
            seen = self.unseen(at.before, launch.tidx)
            if launch.tidx < s.readers:
                self.look(at.before, seen, launch.tidx, Int32(0))
            self.step(at, rS, [], s.wait - 1, finishing, kept[s.wait - 1], True)
            if i > item:
                finishing = self.collect(at.before, patience, seen)
                patience = Int32(cutlass.select_(finishing != 0, patience, Int32(0)))
            states = self.merged(at.before)
            self.finish_edges(at.before, last_edges, states, finishing)
            for t in cutlass.range_constexpr(s.wait, s.registers):
                self.step(at, rS, states, t, finishing, kept[t], True)
            for t in cutlass.range(s.registers, launch.chunks, unroll=1):
                self.step(at, rS, states, t, finishing, None, True)
            if const_expr(s.edges):
                self.absorb(at.this, rS, None, edges)
                self.copy([edges], [last_edges])
            if i < launch.items:
                duties = duties | self.hand_over_row(at.this, tuple(rS[n, 0] for n in range(len(nothing))))
            for n in cutlass.range_constexpr(s.wait):
                self.step(at, rS, states, launch.chunks + n, finishing, last[n], False)
                self.copy(kept[n], last[n])
            turn = self.around(at, turn + places - s.ahead)
        self.rescue(launch, item, duties)

    @cute.jit
    def hand_over_row(self, this, state: tuple) -> Int32:
        """Merge the threads' states and publish what comes of it; nobody but the first warp waits for that. In its
        first thread, whether a part of the row has been given up."""
        s, sB = self.spec, this.sB
        lane, warp = this.tidx % reduce.WARP, this.tidx // reduce.WARP
        state = self.math.whole.lanes(state, reduce.WARP)
        if lane == 0:
            for n in cutlass.range_constexpr(len(state)):
                sB[0, warp, n] = state[n]
        cute.arch.barrier()
        duty = Int32(0)
        if warp == 0:
            row = cutlass.min(lane, s.warps_down - 1)
            theirs = [
                Float32(cutlass.select_(lane < s.warps_down, sB[0, row, n], Float32(nothing)))
                for n, nothing in enumerate(self.math.whole.identity)
            ]
            self.publish(this, self.math.whole.lanes(tuple(theirs), reduce.WARP))
            if lane == 0:
                duty = Int32(exchange.arrive(this.sync) >= exchange.GIVE_UP)
        return duty

    @cute.jit
    def step(
        self,
        at,
        rS: cute.Tensor,
        states: list,
        t: Int32 | int,
        finishing: Int32,
        kept: cutlass.Constexpr,
        absorbs: cutlass.Constexpr[bool],
    ):
        """Finish a chunk of the row before, if it is `finishing`: chunk t or, past the end, the first ones; absorb
        chunk t of this row; ask for what the step `ahead` of this one absorbs. states: none as long as that of the row
        before is not known. kept: the registers that the chunks are in; None for those that stay in shared memory.

        Of a row that does not exist whatever lies there is absorbed: without a branch it is scheduled together with
        what is finished.
        """
        s, before, this = self.spec, at.before, at.this
        cute.arch.cp_async_wait_group(s.ahead - 1)
        free = self.place_of(at, t + s.ahead if const_expr(absorbs) else t)
        if const_expr(len(states) > 0):
            n = t if const_expr(absorbs) else t - this.chunks
            if finishing != 0:
                where = free * s.chunk_steps if const_expr(kept is None) else kept
                self.finish(before, before.first + n * s.chunk, where, states)
        if const_expr(absorbs):
            base = self.place_of(at, t) * s.chunk_steps
            if const_expr(kept is not None):
                self.copy([[x[None, base + k] for k in range(s.chunk_steps)] for x in this.sX], kept)
            self.absorb(this, rS, base if const_expr(kept is None) else kept)
            self.fetch_at(this, t + s.ahead, free, (t + s.ahead < this.chunks) & (this.item < this.items))
        if const_expr(not absorbs or (kept is None and s.wait < s.ahead)):
            n = t + s.ahead - this.chunks - s.wait
            self.fetch_at(at.following, n, free, (n >= 0) & (at.following.item < this.items))
        cute.arch.cp_async_commit_group()

    def nothing(self) -> list:
        """Registers for a chunk: per input its vectors."""
        s = self.spec
        chunk = [
            [cute.make_rmem_tensor(s.vector, self.dtypes[i]) for _ in range(s.chunk_steps)]
            for i in self.inputs
        ]
        for i in self.inputs:
            for vector in chunk[i]:
                vector.fill(self.dtypes[i](0.0))
        return chunk

    def copy(self, chunk: list, to: list):
        """Copy the vectors of all inputs."""
        for vectors, places in zip(chunk, to, strict=True):
            for vector, place in zip(vectors, places, strict=True):
                cute.autovec_copy(vector, place)

    def around(self, at, place: Int32) -> Int32:
        """A place of the ring that was counted past its end, at most once."""
        return Int32(cutlass.select_(place >= at.places, place - at.places, place))

    def place_of(self, at, n: Int32 | int) -> Int32:
        """Where chunk n of this row lies in shared memory or, if n is an int, comes to before it moves to registers;
        n + `ahead` is where chunk n of the row before lies."""
        s = self.spec
        if isinstance(n, int) and n < s.registers:
            n = s.registers + (n + s.wait) % s.ahead
        return self.around(at, at.turn + n - s.registers)

    @cute.jit
    def fetch_at(self, this, n: Int32, place: Int32, exists: Boolean):
        """Load chunk n to a place, if it exists."""
        if exists:
            self.fetch_nth(this, n, place * self.spec.chunk_steps, this.once)
