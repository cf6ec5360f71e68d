"""Panels that are cut into parts: CTAs of the whole GPU exchange states in global memory, within one launch.

    ... -> fold -> merge (as in `panel`) -> publish -> gather the states of all parts -> finish -> store

Without full outputs nobody waits: the last part to come gathers, and stores the groups' results. See `exchange` for how
nobody waits for ever.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ...plan import PanelClass
from ..common import reduce
from ..common.index import select
from ..maths.maths import RowMath
from ..maths.slots import nothing
from . import exchange
from .chunks import Chunks
from .merge import Merge
from .scalars import Scalars
from .work import Item, Launch, chunk_of, chunks_of, item_of

FOREVER = (1 << 31) - 1


class Parts:
    """What the CTAs of a panel's parts do for each other; thread t has the states of the column that it merges."""

    def __init__(self, spec: PanelClass, math: RowMath, chunks: Chunks, scalars: Scalars, merge: Merge):
        self.spec, self.math, self.chunks, self.scalars, self.merge = spec, math, chunks, scalars, merge
        self.pairs = spec.published_bytes // 8

    @cute.jit
    def hand_over(self, item: Item, mine: tuple) -> Int32:
        """Publish the states of this part; in the last thread, whether some part has been given up by now."""
        self.publish(item, mine)
        cute.arch.barrier()
        given_up = Int32(0)
        if item.launch.tidx == self.spec.threads - 1:
            given_up = Int32(exchange.arrive(item.sync) >= exchange.GIVE_UP)
        return given_up

    @cute.jit
    def collect(self, item: Item, patience: Int32, seen: cute.Tensor | None = None) -> Int32:
        """Gather the states of all parts: whether they are here, or else this part has been given up. seen: see
        `gather`."""
        launch, words = item.launch, item.launch.shared.words
        if launch.tidx == 0:
            words[0] = Int32(1)
        cute.arch.barrier()
        self.gather(item, patience, seen)
        if words[0] == 0:
            cute.arch.barrier()
            if launch.tidx == 0:
                words[0] = Int32(exchange.give_up(item.sync, item.part, launch.parts))
            cute.arch.barrier()
            if words[0] != 0:
                self.gather(item, Int32(FOREVER))
        return words[0]

    @cute.jit
    def conclude(self, item: Item, mine: tuple):
        """Hand over the states of this part; the last to come stores the groups' results."""
        launch, words = item.launch, item.launch.shared.words
        self.publish(item, mine)
        cute.arch.barrier()
        if launch.tidx == 0:
            words[0] = Int32(exchange.arrive(item.sync) == launch.parts - 1)
        cute.arch.barrier()
        if words[0] != 0:
            self.gather(item, Int32(FOREVER))
            self.scalars.store_groups(item, self.scalars.scores.joined(item, self.merge.of_slots(item)))

    @cute.jit
    def rescue(self, launch: Launch, index: Int32, given_up: Int32):
        """Finish parts that were given up, of the panels of this CTA's items from `index` on. given_up: in the thread
        that counts this CTA in, whether there were any."""
        words = launch.shared.words
        cute.arch.barrier()
        if launch.tidx == 0:
            words[0] = Int32(0)
        cute.arch.barrier()
        if given_up != 0:
            words[0] = given_up
        cute.arch.barrier()
        if words[0] != 0:
            for i in cutlass.range(index, launch.items, launch.ctas, unroll=1):
                item = item_of(launch, i)
                cute.arch.barrier()
                if launch.tidx == 0:
                    words[0] = Int32(exchange.waits(item.sync, launch.parts))
                cute.arch.barrier()
                if words[0] != 0:
                    self.gather(item, Int32(FOREVER))
                    for part in cutlass.range(launch.parts, unroll=1):
                        cute.arch.barrier()
                        if launch.tidx == 0:
                            words[0] = Int32(exchange.take(item.sync, part))
                        cute.arch.barrier()
                        if words[0] != 0:
                            scores = self.scalars.scores
                            given_up_item = scores.known(item_of(launch, i - item.part + part))
                            states = self.merge.of_slots(given_up_item)
                            self.redo(given_up_item, scores.joined(given_up_item, states))

    @cute.jit
    def redo(self, item: Item, states: list):
        """Read and finish a share of which nothing is held."""
        s, launch = self.spec, item.launch
        for n in cutlass.range(chunks_of(item), unroll=1):
            self.chunks.reside(item, n)
            self.chunks.fetch(launch, chunk_of(item, n), Int32(0), launch.policies.once)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            self.chunks.align(item, item.first + n * s.chunk, Int32(0))
            self.chunks.settle(item, item.first + n * s.chunk, Int32(0))
            self.chunks.finish(item, item.first + n * s.chunk, Int32(0), states)
        if const_expr(s.hides):
            self.chunks.hide(item, self.chunks.hidden(item, states))
        self.scalars.finish(item, self.scalars.loaded(item), states)

    def place(self, item: Item, part: Int32, column: Int32) -> Int64:
        """Where the state of a column of a part lies."""
        s = self.spec
        return item.states + (Int64(part) * s.groups + column) * s.published_bytes

    @cute.jit
    def publish(self, item: Item, mine: tuple):
        """Let the other CTAs see the states of this part. Those of columns that not all of its threads have, see
        `aligned`, are nobody's: of nothing, which is not zero, either."""
        s, column = self.spec, item.launch.tidx
        if const_expr(s.aligned):
            known, identity = column % s.across < s.across - s.before // s.slots, self.math.whole.identity
            mine = tuple(select(known, x, Float32(no)) for x, no in zip(mine, identity, strict=True))
        if column < s.groups:
            exchange.publish(self.place(item, item.part, column), mine)

    def unseen(self, item: Item, first: Int32) -> cute.Tensor:
        """What `look` reads the states of every `readers`-th part from `first` on into: nothing yet. What is past the
        last part is not waited for."""
        s = self.spec
        rP = cute.make_rmem_tensor((self.pairs, s.loads), Int64)
        for k in range(s.loads):
            for i in range(self.pairs):
                rP[i, k] = select(first + k * s.readers < item.launch.parts, Int64(0), Int64(1))
        return rP

    @cute.jit
    def look(self, item: Item, rP: cute.Tensor, first: Int32, column: Int32) -> Boolean:
        """Read what is missing of the states of a column, of every `readers`-th part from `first` on; whether some
        still is."""
        s = self.spec
        for k in cutlass.range_constexpr(s.loads):
            at = self.place(item, first + k * s.readers, column)
            for i in cutlass.range_constexpr(self.pairs):
                rP[i, k] = exchange.look(at + 8 * i, rP[i, k])
        missing = Boolean(False)
        for k in cutlass.range_constexpr(s.loads):
            for i in cutlass.range_constexpr(self.pairs):
                missing = missing | (rP[i, k] == 0)
        return missing

    @cute.jit
    def gather(self, item: Item, patience: Int32, seen: cute.Tensor | None = None):
        """Wait until the states of all parts are published and merge them into sC[column, 0]; `readers` threads a
        column read those of every `readers`-th part, several at once. Clears words[0] after `patience` nanoseconds.
        seen: what `look` has read, where it reads all at once."""
        s, launch = self.spec, item.launch
        sC, words, identity = launch.shared.sC, launch.shared.words, self.math.whole.identity
        reader, column = launch.tidx // s.groups, launch.tidx % s.groups
        if reader < s.readers:
            rS = nothing(self.math, 1)
            begin = cute.arch.globaltimer()
            for first in cutlass.range(reader, launch.parts, s.readers * s.loads, unroll=1):
                rP = seen
                if const_expr(seen is None):
                    rP = self.unseen(item, first)
                missing = self.look(item, rP, first, column)
                waited = Int64(0)
                while missing & (waited < patience):
                    missing = self.look(item, rP, first, column)
                    waited = cute.arch.globaltimer() - begin
                if missing:
                    words[0] = Int32(0)
                states = [tuple(rS[n, 0] for n in range(len(identity)))]
                for k in cutlass.range_constexpr(s.loads):
                    exists = first + k * s.readers < launch.parts
                    read = [n for i in range(self.pairs) for n in reduce.unpack(rP[i, k])]
                    state = zip(read, identity, strict=False)
                    states.append(tuple(select(exists, x, Float32(no)) for x, no in state))
                found = self.math.whole.merge_all(states)
                for n in cutlass.range_constexpr(len(identity)):
                    rS[n, 0] = found[n]
            state = tuple(rS[n, 0] for n in range(len(identity)))
            if const_expr(s.lanes_read):
                sC[0, 0] = reduce.pack(self.math.whole.lanes(state, reduce.WARP))
            else:
                sC[self.merge.place(column), reader] = reduce.pack(state)
        cute.arch.barrier()
        if const_expr(not s.lanes_read):
            if launch.tidx < s.groups:
                place = self.merge.place(launch.tidx)
                theirs = [reduce.unpack(sC[place, i]) for i in range(s.readers)]
                sC[place, 0] = reduce.pack(self.math.whole.merge_all(theirs))
            cute.arch.barrier()
