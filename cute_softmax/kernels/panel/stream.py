"""Panels of which a CTA takes more than it holds: chunk by chunk through a ring of buffers in shared memory.

A CTA works on one item, a part of a panel, after the other. It absorbs the chunks of its share into the states, holds
the last `buffers` of them, and finishes those first; the others it reads again, the last first, from L2 as far as that
kept them. Whatever buffer is free takes the chunk that is needed next, be it of the next item:

    absorb 0 1 2 3 4 5 6 7 | exchange | finish 4 5 6 7, 3 2 1 0 | the next item
    fetch  4 5 6 7 - - - -          3 2 1 0, and of the next item 0 1 2 3        (8 chunks, 4 buffers)

So copies are on their way all the time but for the last chunks' absorption and the exchange.
Each visit of a chunk begins one group of copies and waits for the one `buffers` before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ..common.index import select
from ..maths.slots import nothing
from .schedule import Schedule
from .work import Chunk, Item, chunk_at, chunk_of, chunks_of, item_of


class Stream(Schedule):
    """Items in chunks, one after the other."""

    @cute.jit
    def run(self, begun: Item):
        """This CTA's items, from `begun` on."""
        s, launch, index, outputs = self.spec, begun.launch, begun.index, len(self.math.outputs) > 0
        for n in cutlass.range_constexpr(s.buffers):
            self.fetch(begun, Int32(n), chunks_of(begun), Int32(n * s.chunk_steps))
        turn, patience, given_up = Int32(0), launch.patience, Int32(0)
        for i in cutlass.range(index, launch.items, launch.ctas, unroll=1):
            item = self.scores.known(item_of(launch, i))
            chunks, rE = chunks_of(item), self.scalars.loaded(item)
            held = self.absorb_all(item, chunks, turn, rE)
            if const_expr(s.hides and outputs):
                # Before the states are known, which seldom matter here.
                self.chunks.hide(item, self.chunks.hidden(item, [self.math.ordinary]))
            mine = self.merge.reduce_states(item, held)
            if const_expr(s.cluster_n > 1):
                mine = self.merge.across_cluster(item, mine)
            # Without full outputs a CTA has one item: see `PanelPlan.ctas`.
            if const_expr(s.exchange and not outputs):
                self.parts.conclude(item, mine)
            elif const_expr(not outputs):
                states = self.scores.joined(item, self.merge.spread(item, mine))
                self.scalars.store_groups(item, states)
            else:
                following = item_of(launch, i + launch.ctas)
                coming = select(following.index < launch.items, chunks_of(following), Int32(0))
                merged = Int32(1)
                if const_expr(s.exchange):
                    given_up = given_up | self.parts.hand_over(item, mine)
                    merged = self.parts.collect(item, patience)
                    states = self.scores.joined(item, self.merge.of_slots(item))
                    patience = select(merged != 0, patience, Int32(0))
                else:
                    states = self.scores.joined(item, self.merge.spread(item, mine))
                self.scalars.finish(item, rE, states, merged)
                if const_expr(s.hides):
                    number = self.chunks.hidden(item, states)
                    if (merged != 0) & (number != self.chunks.hidden(item, [self.math.ordinary])):
                        self.chunks.hide(item, number)
                turn = self.finish_all(item, following, chunks, coming, turn, states, merged)
        if const_expr(s.exchange and outputs):
            self.parts.rescue(launch, index, given_up)

    def buffer(self, n: Int32) -> Int32:
        """Where the n-th chunk of the ring lies in shared memory: the first of its steps."""
        return n % self.spec.buffers * self.spec.chunk_steps

    @cute.jit
    def fetch(self, item: Item, n: Int32, chunks: Int32, base: Int32):
        """Load chunk n, if there is one, for the first time; the last of them will not be read again."""
        launch, policies = item.launch, item.launch.policies
        if n < chunks:
            again = n < chunks - self.spec.buffers
            policy = select(again, policies.twice, policies.once)
            self.chunks.fetch(launch, chunk_of(item, n), base, policy)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def absorb_all(self, item: Item, chunks: Int32, turn: Int32, rE: list) -> list:
        """Per slot the state of all of this thread's elements. turn: where in the ring the first chunk is."""
        s = self.spec
        rS = nothing(self.math, s.slots)
        for n in cutlass.range(chunks, unroll=1):
            cute.arch.cp_async_wait_group(s.buffers - 1)
            base, at = self.buffer(turn + n), item.first + n * s.chunk
            self.chunks.align(item, at, base)
            self.chunks.absorb(item, rS, at, base)
            self.fetch(item, n + s.buffers, chunks, base)
        if const_expr(s.edges):
            self.chunks.absorb(item, rS, item.first, None, rE)
        return [tuple(rS[n, v] for n in range(rS.shape[0])) for v in range(s.slots)]

    @cute.jit
    def finish_all(
        self,
        item: Item,
        following: Item,
        chunks: Int32,
        coming: Int32,
        turn: Int32,
        states: list,
        merged: Int32,
    ) -> Int32:
        """Finish all chunks, if the states are there, and fetch those of the following item, `coming` in number;
        where in the ring its first chunk is."""
        s, launch = self.spec, item.launch
        beyond = cutlass.max(chunks - s.buffers, 0)  # chunks that are not held
        for t in cutlass.range(cutlass.max(chunks, s.buffers), unroll=1):
            cute.arch.cp_async_wait_group(s.buffers - 1)
            base = self.buffer(turn + beyond + t)
            n = select(t < s.buffers, beyond + t, chunks - 1 - t)
            if const_expr((s.shifted and not s.aligned) or s.spread or self.scores.cuts):
                self.align_again(item, t, n, base)
            if (n < chunks) & (merged != 0):
                self.chunks.finish(item, item.first + n * s.chunk, base, states)
            again, k = t < beyond, t - beyond
            if again | (k < coming):
                earlier = item.first + (chunks - 1 - t - s.buffers) * s.chunk
                later = following.first + k * s.chunk
                here, there = chunk_at(item, earlier), chunk_at(following, later)
                twice = (t >= beyond) & (k < coming - s.buffers)
                chunk = either(again, here, there)
                policy = select(twice, launch.policies.twice, launch.policies.once)
                self.chunks.fetch(launch, chunk, base, policy)
            cute.arch.cp_async_commit_group()
        return (turn + 2 * beyond) % s.buffers

    @cute.jit
    def align_again(self, item: Item, t: Int32, n: Int32, base: Int32):
        """Align chunk n, finished in turn t, if it was read a second time."""
        if t >= self.spec.buffers:
            self.chunks.align(item, item.first + n * self.spec.chunk, base)


def either(which: Boolean, a: Chunk, b: Chunk) -> Chunk:
    """One of two chunks."""
    left, rest = select(which, a.left, b.left), select(which, a.rest, b.rest)
    wanted = None if a.wanted is None else select(which, a.wanted, b.wanted)
    starts = [select(which, x, y) for x, y in zip(a.starts, b.starts, strict=True)]
    return Chunk(starts, select(which, a.at, b.at), left, rest, wanted)
