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
from cutlass import Float32, Int32, Int64, const_expr


class Streaming:
    """What `PanelKernel` does in chunks."""

    @cute.jit
    def stream(self, launch, item: Int32):
        """This CTA's items, from `item` on."""
        s = self.spec
        begun = self.at(launch, item)
        for n in cutlass.range_constexpr(s.buffers):
            self.fetch_chunk(begun, Int32(n), self.chunks(begun), Int32(n * s.chunk_steps))
        turn, patience, duties = Int32(0), launch.patience, Int32(0)
        for i in cutlass.range(item, launch.items, launch.ctas, unroll=1):
            this = self.at(launch, i)
            chunks, edges = self.chunks(this), self.edges(this)
            mine, states = self.reduce(this, self.absorb_all(this, chunks, turn, edges))
            if const_expr(s.cluster_n > 1):
                mine = self.across_cluster(this, mine)
            if const_expr(len(self.math.outputs) == 0):
                # One item a CTA: see `PanelPlan.ctas`.
                if const_expr(s.exchange):
                    self.conclude(this, mine)  # of `split.SplitKernel`
                else:
                    if const_expr(s.down > 1):
                        states = self.spread(this, mine)
                    self.store_groups(this, states)
            else:
                following = self.at(launch, i + launch.ctas)
                coming = Int32(
                    cutlass.select_(following.item < launch.items, self.chunks(following), Int32(0))
                )
                merged = Int32(1)
                if const_expr(s.exchange):
                    duties = duties | self.hand_over(this, mine)
                    merged = self.collect(this, patience)
                    states = self.merged(this)
                    patience = Int32(cutlass.select_(merged != 0, patience, Int32(0)))
                elif const_expr(s.down > 1):
                    states = self.spread(this, mine)
                self.finish_edges(this, edges, states, merged)
                turn = self.finish_all(this, following, chunks, coming, turn, states, merged)
        if const_expr(s.exchange and len(self.math.outputs) > 0):
            self.rescue(launch, item, duties)

    def chunks(self, this) -> Int32:
        """Chunks of this CTA's share."""
        return cute.ceil_div(this.end - this.first, self.spec.chunk)

    def buffer(self, n: Int32) -> Int32:
        """Where the n-th chunk of the ring lies in shared memory: the first of its steps."""
        return n % self.spec.buffers * self.spec.chunk_steps

    def fetch_nth(self, this, n: Int32, base: Int32, policy: Int64):
        """Load chunk n of this CTA's share."""
        at = this.first + n * self.spec.chunk
        self.fetch(this, this.starts, at, self.left(this, at), this.beside, base, policy)

    @cute.jit
    def fetch_chunk(self, this, n: Int32, chunks: Int32, base: Int32):
        """Load chunk n, if there is one, for the first time; the last of them will not be read again."""
        if n < chunks:
            again = n < chunks - self.spec.buffers
            self.fetch_nth(this, n, base, Int64(cutlass.select_(again, this.twice, this.once)))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def absorb_all(self, this, chunks: Int32, turn: Int32, edges: list) -> list:
        """Per slot the state of all of this thread's elements. turn: where in the ring the first chunk is."""
        s, op = self.spec, self.math.whole
        rS = cute.make_rmem_tensor((len(op.identity), s.slots), Float32)
        for v in cutlass.range_constexpr(s.slots):
            for n in cutlass.range_constexpr(len(op.identity)):
                rS[n, v] = Float32(op.identity[n])
        for n in cutlass.range(chunks, unroll=1):
            cute.arch.cp_async_wait_group(s.buffers - 1)
            base = self.buffer(turn + n)
            self.align(this, this.first + n * s.chunk, base)
            self.absorb(this, rS, base)
            self.fetch_chunk(this, n + s.buffers, chunks, base)
        if const_expr(s.edges):
            self.absorb(this, rS, None, edges)
        return [tuple(rS[n, v] for n in range(len(op.identity))) for v in range(s.slots)]

    def absorb(self, this, rS, base: Int32 | list | None, edges: list = ()):
        """Take a chunk into the states of this thread's slots, or the scalars at the edges of a row."""
        math, slots = self.math, range(self.spec.slots)
        before = [tuple(rS[n, v] for n in range(len(math.whole.identity))) for v in slots]
        carry = [() for _ in slots]
        for stage, op in enumerate(math.reductions):
            totals = self.fold(this, stage, carry, base, edges)
            for v in slots:
                carry[v] += (op.op(totals[v], math.whole.refer(stage, before[v], carry[v])),)
        for v in slots:
            for n, number in enumerate(carry[v]):
                rS[n, v] = number

    @cute.jit
    def finish_all(
        self, this, following, chunks: Int32, coming: Int32, turn: Int32, states: list, merged: Int32
    ) -> Int32:
        """Finish all chunks, if the states are there, and fetch those of the following item, `coming` in number;
        where in the ring its first chunk is."""
        s = self.spec
        beyond = cutlass.max(chunks - s.buffers, 0)  # chunks that are not held
        for t in cutlass.range(cutlass.max(chunks, s.buffers), unroll=1):
            cute.arch.cp_async_wait_group(s.buffers - 1)
            base = self.buffer(turn + beyond + t)
            n = Int32(cutlass.select_(t < s.buffers, beyond + t, chunks - 1 - t))
            if const_expr(s.shifted):
                self.align_again(this, t, n, base)
            if (n < chunks) & (merged != 0):
                self.finish(this, this.first + n * s.chunk, base, states)
            again, k = t < beyond, t - beyond
            if again | (k < coming):
                here, there = chunks - 1 - t - s.buffers, k
                here, there = this.first + here * s.chunk, following.first + there * s.chunk
                left = Int32(cutlass.select_(again, self.left(this, here), self.left(following, there)))
                twice = (t >= beyond) & (k < coming - s.buffers)
                beside = None
                if const_expr(s.shifted):
                    beside = Int32(cutlass.select_(again, this.beside, following.beside))
                self.fetch(
                    this,
                    [Int64(cutlass.select_(again, this.starts[i], following.starts[i])) for i in self.inputs],
                    Int32(cutlass.select_(again, here, there)),
                    left,
                    beside,
                    base,
                    Int64(cutlass.select_(twice, this.twice, this.once)),
                )
            cute.arch.cp_async_commit_group()
        return (turn + 2 * beyond) % s.buffers

    @cute.jit
    def align_again(self, this, t: Int32, n: Int32, base: Int32):
        """`align` for chunk n, finished in turn t, if it was read a second time."""
        if t >= self.spec.buffers:
            self.align(this, this.first + n * self.spec.chunk, base)

    @cute.jit
    def redo(self, this, states: list):
        """Read and finish a share of which nothing is held."""
        s = self.spec
        for n in cutlass.range(self.chunks(this), unroll=1):
            self.fetch_nth(this, n, Int32(0), this.once)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            self.align(this, this.first + n * s.chunk, Int32(0))
            self.finish(this, this.first + n * s.chunk, Int32(0), states)
        self.finish_edges(this, self.edges(this), states)
