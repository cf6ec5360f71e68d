"""Rows that CTAs of the whole GPU nearly hold: while one is finished the next is absorbed.

A CTA takes its share of one row after the other, in chunks. It absorbs them in their order, and finishes them in the
opposite one when the state of the whole row is known. The last are held in between; the first, `again` in number, are
read a second time from L2. What becomes free takes what comes next: so nobody waits for a meeting, which has the
first steps of the next row to come true, nor for copies:

    row 0    absorb 0 1 2 3 4 5 6 7 |             finish 7 6 5 4 3 2 1 0
    row 1                             absorb 0 1         2 3 4 5 6 7     |            finish 7 6 ...
    step                                     0 1         2 3 4 5 6 7 8 9

(8 chunks, 4 of them again, `ahead` = 2.) A step asks for what is needed `ahead` steps later: held chunks come to the
place of the one that it finished, chunks that are read twice to a ring of `ahead` places.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import meeting, reduce


class Ahead:
    """What `SplitKernel` does with rows a row ahead."""

    @cute.jit
    def ahead(self, launch, item: Int32):
        """This CTA's items, from `item` on."""
        s, nothing = self.spec, self.math.whole.identity
        begin = launch.again - s.ahead  # the step in which a row begins to be finished
        first = self.at(launch, item)
        for n in cutlass.range_constexpr(s.ahead):
            self.fetch_again(first, Int32(n), Int32(n), first.twice)
            cute.arch.cp_async_commit_group()
        rS = cute.make_rmem_tensor((len(nothing), 1), Float32)
        patience, duties, turn, odd = launch.patience, Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(item, launch.items + launch.ctas, launch.ctas, unroll=1):
            at = SimpleNamespace(
                before=self.at(launch, cutlass.max(i - launch.ctas, item)),
                this=self.at(launch, i),
                following=self.at(launch, i + launch.ctas),
                steps=launch.chunks + begin,
                turn=turn,
                odd=odd,
            )
            for n in cutlass.range_constexpr(len(nothing)):
                rS[n, 0] = Float32(nothing[n])
            if (launch.tidx == 0) & (i < launch.items):
                meeting.expect(at.this.sync)
                meeting.expect(self.place(at.this, at.this.part, Int32(0)))
            finishing = Int32(0)
            last = cutlass.max(begin - 1, 0)
            for t in cutlass.range(last, unroll=1):
                self.step(at, rS, [], t, finishing, True, False)
            # The states are on their way during the last of these steps, from L2: 0.813 of a copy in 64 rows of 2^24
            # where it was 0.799, 0.788 / 0.759 in float32 rows of 2^23. Only both help: a look from DRAM takes longer
            # than a step, and who does not look ahead waits for L2, too (0.801, 0.802; H200, 2026-11-22).
            seen = self.unseen(at.before, launch.tidx)
            if launch.tidx < s.readers:
                self.look(at.before, seen, launch.tidx, Int32(0))
            for t in cutlass.range(last, begin, unroll=1):
                self.step(at, rS, [], t, finishing, True, False)
            if i > item:
                finishing = self.collect(at.before, patience, seen)
                patience = Int32(cutlass.select_(finishing != 0, patience, Int32(0)))
            states = self.merged(at.before)
            for t in cutlass.range(begin, launch.chunks, unroll=1):
                self.step(at, rS, states, t, finishing, True, True)
            if i < launch.items:
                duties = duties | self.hand_over_row(at.this, tuple(rS[n, 0] for n in range(len(nothing))))
            for t in cutlass.range(launch.chunks, launch.chunks + begin, unroll=1):
                self.step(at, rS, states, t, finishing, False, True)
            turn, odd = (turn + launch.chunks + begin) % s.ahead, 1 - odd
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
                duty = Int32(meeting.arrive(this.sync) >= meeting.GIVE_UP)
        return duty

    @cute.jit
    def step(
        self,
        at,
        rS: cute.Tensor,
        states: list,
        t: Int32,
        finishing: Int32,
        absorbs: cutlass.Constexpr[bool],
        finishes: cutlass.Constexpr[bool],
    ):
        """Absorb chunk t of this row, if there is one; finish one of the row before, if it is `finishing`; ask for what
        the step `ahead` of this one needs."""
        s, before, this, following = self.spec, at.before, at.this, at.following
        cute.arch.cp_async_wait_group(s.ahead - 1)
        # Where chunks lie that are read twice, of this step and of the one ahead.
        ring = (at.turn + t) % s.ahead
        if const_expr(absorbs):
            place = self.place_of(t, ring, this, at.odd)
            if this.item < this.items:
                self.absorb(this, rS, place * s.chunk_steps)
        if const_expr(finishes):
            n = at.steps - 1 - t
            place = self.place_of(n, ring, this, 1 - at.odd)
            if finishing != 0:
                self.finish(before, before.first + n * s.chunk, place * s.chunk_steps, states)
        t += s.ahead
        come = t >= at.steps  # of the row that follows
        n = Int32(cutlass.select_(come, t - at.steps, t))
        exists = Int32(cutlass.select_(come, following.item, this.item)) < this.items
        if ((t < this.chunks) | come) & exists:
            starts = [Int64(cutlass.select_(come, following.starts[i], this.starts[i])) for i in self.inputs]
            there = Int32(cutlass.select_(come, following.first, this.first)) + n * s.chunk
            left = Int32(cutlass.select_(come, self.left(following, there), self.left(this, there)))
            policy = Int64(cutlass.select_(n < this.again, this.twice, this.once))
            self.fetch(
                this, starts, there, left, self.place_of(n, ring, this, at.odd) * s.chunk_steps, policy
            )
        if const_expr(finishes):
            n = at.steps - 1 - t
            if (n >= 0) & (n < this.again) & (finishing != 0):
                self.fetch_again(before, n, ring, before.once)
        cute.arch.cp_async_commit_group()

    def place_of(self, n: Int32, ring: Int32, this, odd: Int32) -> Int32:
        """Where chunk n of a row lies in shared memory. odd: whether it is this CTA's second, fourth, ... row."""
        held = n - this.again
        held = Int32(cutlass.select_(odd != 0, this.chunks - this.again - 1 - held, held))
        return Int32(cutlass.select_(n < this.again, ring, self.spec.ahead + held))

    def fetch_again(self, this, n: Int32, place: Int32, policy: Int64):
        """Bring chunk n, which is read twice."""
        at = this.first + n * self.spec.chunk
        self.fetch(this, this.starts, at, self.left(this, at), place * self.spec.chunk_steps, policy)
