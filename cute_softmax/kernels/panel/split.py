"""The split movement: CTAs of the whole GPU share a panel and exchange states in global memory, within one launch.

    ... -> fold -> merge (as in `panel`) -> publish -> gather the states of all parts -> finish -> store

Without full outputs nobody waits: the last part to come gathers, and stores the groups' results. See `exchange` for how
nobody waits for ever, and `panel` for the names.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..common import reduce
from . import exchange
from .ahead import Ahead
from .panel import PanelKernel

FOREVER = (1 << 31) - 1


class SplitKernel(Ahead, PanelKernel):
    """The kernel of one Plan class whose panels are cut into parts."""

    @cute.jit
    def hand_over(self, this, mine: tuple) -> Int32:
        """Publish the states of this part; in the last thread, whether some part has been given up by now."""
        self.publish(this, mine)
        cute.arch.barrier()
        duty = Int32(0)
        if this.tidx == self.spec.threads - 1:
            duty = Int32(exchange.arrive(this.sync) >= exchange.GIVE_UP)
        return duty

    @cute.jit
    def collect(self, this, patience: Int32, seen: cute.Tensor | None = None) -> Int32:
        """Gather the states of all parts: whether they are here, or else this part has been given up. seen: see
        `gather`."""
        words = this.words
        if this.tidx == 0:
            words[0] = Int32(1)
        cute.arch.barrier()
        self.gather(this, patience, seen)
        if words[0] == 0:
            cute.arch.barrier()
            if this.tidx == 0:
                words[0] = Int32(exchange.give_up(this.sync, this.part, this.parts))
            cute.arch.barrier()
            if words[0] != 0:
                self.gather(this, Int32(FOREVER))
        return words[0]

    @cute.jit
    def conclude(self, this, mine: tuple):
        """Hand over the states of this part; the last to come stores the groups' results."""
        words = this.words
        self.publish(this, mine)
        cute.arch.barrier()
        if this.tidx == 0:
            words[0] = Int32(exchange.arrive(this.sync) == this.parts - 1)
        cute.arch.barrier()
        if words[0] != 0:
            self.gather(this, Int32(FOREVER))
            self.store_groups(this, self.merged(this))

    @cute.jit
    def rescue(self, launch, item: Int32, duty: Int32):
        """Finish parts that were given up, of the panels of this CTA's items from `item` on. duty: in the thread that
        counts this CTA in, whether there were any."""
        words = launch.words
        cute.arch.barrier()
        if launch.tidx == 0:
            words[0] = Int32(0)
        cute.arch.barrier()
        if duty != 0:
            words[0] = duty
        cute.arch.barrier()
        if words[0] != 0:
            for i in cutlass.range(item, launch.items, launch.ctas, unroll=1):
                this = self.at(launch, i)
                cute.arch.barrier()
                if this.tidx == 0:
                    words[0] = Int32(exchange.waits(this.sync, this.parts))
                cute.arch.barrier()
                if words[0] != 0:
                    self.gather(this, Int32(FOREVER))
                    states = self.merged(this)
                    for part in cutlass.range(this.parts, unroll=1):
                        cute.arch.barrier()
                        if this.tidx == 0:
                            words[0] = Int32(exchange.take(this.sync, part))
                        cute.arch.barrier()
                        if words[0] != 0:
                            self.redo(self.at(launch, i - this.part + part), states)

    def place(self, this, part: Int32, column: Int32) -> Int64:
        """Where the state of a column of a part lies."""
        s = self.spec
        return this.tile_states + (Int64(part) * s.columns + column) * s.published_bytes

    @cute.jit
    def publish(self, this, mine: tuple):
        """Let the other CTAs see the states of this part."""
        if this.tidx < self.spec.columns:
            exchange.publish(self.place(this, this.part, this.tidx), mine)

    def merged(self, this) -> list:
        """Per slot the state of the whole group, when it has been gathered."""
        s = self.spec
        return [reduce.unpack(this.sC[this.a * s.slots + v, 0]) for v in range(s.slots)]

    def unseen(self, this, first: Int32) -> cute.Tensor:
        """What `look` reads the states of every `readers`-th part from `first` on into: nothing yet. What is past the
        last part is not waited for."""
        s = self.spec
        rP = cute.make_rmem_tensor((exchange.pairs(len(self.math.whole.identity)), s.loads), Int64)
        for k in range(s.loads):
            for i in range(rP.shape[0]):
                rP[i, k] = Int64(cutlass.select_(first + k * s.readers < this.parts, Int64(0), Int64(1)))
        return rP

    @cute.jit
    def look(self, this, rP: cute.Tensor, first: Int32, column: Int32) -> Boolean:
        """Read what is missing of the states of a column, of every `readers`-th part from `first` on; whether some
        still is."""
        s = self.spec
        for k in cutlass.range_constexpr(s.loads):
            at = self.place(this, first + k * s.readers, column)
            for i in cutlass.range_constexpr(rP.shape[0]):
                rP[i, k] = exchange.look(at + 8 * i, rP[i, k])
        missing = Boolean(False)
        for k in cutlass.range_constexpr(s.loads):
            for i in cutlass.range_constexpr(rP.shape[0]):
                missing = missing | (rP[i, k] == 0)
        return missing

    @cute.jit
    def gather(self, this, patience: Int32, seen: cute.Tensor | None = None):
        """Wait until the states of all parts are published and merge them into sC[column, 0]; `readers` threads a
        column read those of every `readers`-th part, several at once. Clears words[0] after `patience` nanoseconds.
        seen: what `look` has read, where it reads all at once."""
        s, sC, words = self.spec, this.sC, this.words
        numbers = len(self.math.whole.identity)
        reader, column = this.tidx // s.columns, this.tidx % s.columns
        if reader < s.readers:
            rS = cute.make_rmem_tensor(max(numbers, 2), Float32)
            for n in cutlass.range_constexpr(numbers):
                rS[n] = Float32(self.math.whole.identity[n])
            begin = cute.arch.globaltimer()
            for first in cutlass.range(reader, this.parts, s.readers * s.loads, unroll=1):
                rP = seen
                if const_expr(seen is None):
                    rP = self.unseen(this, first)
                missing = self.look(this, rP, first, column)
                waited = Int64(0)
                while missing & (waited < patience):
                    missing = self.look(this, rP, first, column)
                    waited = cute.arch.globaltimer() - begin
                if missing:
                    words[0] = Int32(0)
                states = [tuple(rS[n] for n in range(numbers))]
                for k in cutlass.range_constexpr(s.loads):
                    exists = first + k * s.readers < this.parts
                    read = [n for i in range(rP.shape[0]) for n in reduce.unpack(rP[i, k])]
                    state = zip(read, self.math.whole.identity, strict=False)
                    states.append(tuple(Float32(cutlass.select_(exists, x, Float32(no))) for x, no in state))
                found = self.math.whole.merge_all(states)
                for n in cutlass.range_constexpr(numbers):
                    rS[n] = found[n]
            state = tuple(rS[n] for n in range(numbers))
            if const_expr(s.lanes_read):
                sC[0, 0] = reduce.pack(self.math.whole.lanes(state, reduce.WARP))
            else:
                sC[column, reader] = reduce.pack(state)
        cute.arch.barrier()
        if const_expr(not s.lanes_read):
            if this.tidx < s.columns:
                theirs = [reduce.unpack(sC[this.tidx, i]) for i in range(s.readers)]
                sC[this.tidx, 0] = reduce.pack(self.math.whole.merge_all(theirs))
            cute.arch.barrier()
