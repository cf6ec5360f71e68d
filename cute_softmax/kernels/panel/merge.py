"""The states of a panel's groups, merged over the threads of a CTA and over the CTAs of a cluster."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...plan import PanelClass
from ..common import reduce
from ..common.index import select
from ..common.reduce import WARP
from ..maths.maths import RowMath
from .work import Item


class Merge:
    """Thread t merges the t-th slot of a panel's columns, see `place`; a thread holds elements of the columns in its
    slots."""

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec, self.math = spec, math
        self.slot = reduce.slot_type(math.whole)

    def reduce(self, item: Item, partials: Callable[[int, list], list]) -> tuple[tuple, list]:
        """(the state of all of the CTA's elements of a column, in thread t; per slot the stages before the last).

        A thread that has its columns for itself exchanges nothing, and has per slot the whole state instead. The
        largest elements of all first, then the sums of exponentials relative to them, and so on: nothing is ever
        rescaled, but each stage waits for all threads. partials: (stage, per slot the results of the stages before) ->
        per slot this thread's partial result.
        """
        s, stages = self.spec, self.math.reductions
        carry, mine = [() for _ in range(s.slots)], ()
        for stage, op in enumerate(stages):
            totals = partials(stage, carry)
            if s.down == 1:
                carry = [(*c, t) for c, t in zip(carry, totals, strict=True)]
                continue
            merged, everywhere = self.across_warps(item, op, totals, stage, stage + 1 < len(stages))
            mine += (merged,)
            if everywhere is not None:
                carry = [(*c, m) for c, m in zip(carry, everywhere, strict=True)]
        return mine, carry

    def reduce_states(self, item: Item, states: list[tuple]) -> tuple:
        """`reduce` of states, per slot this thread's: the state of a column in thread t."""
        refer = self.math.whole.refer
        merged, _ = self.reduce(
            item,
            lambda stage, carry: [refer(stage, x, before) for x, before in zip(states, carry, strict=True)],
        )
        return merged

    @cute.jit
    def across_warps(
        self,
        item: Item,
        op: cutlass.Constexpr,
        totals: list,
        stage: cutlass.Constexpr[int],
        spread: cutlass.Constexpr[bool],
    ) -> tuple:
        """Merge the threads' results of a stage: that of a column in thread t and, if `spread`, per slot in every
        thread."""
        s, tidx = self.spec, item.launch.tidx
        sB, places = item.launch.shared.sB[None, None, stage], self.places(item)
        lane, row, partials = cute.arch.lane_idx(), tidx // max(s.across, WARP), totals
        if const_expr(s.aligned):
            lane, row = item.launch.a, item.launch.d
        else:
            partials = [op.lanes((t,), WARP, min(s.across, WARP))[0] for t in totals]
        if lane < s.across:
            for v in cutlass.range_constexpr(s.slots):
                sB[places[v], row] = partials[v]
        cute.arch.barrier()
        if const_expr(s.rows_abreast > 1):
            self.across_rows(item, op, sB)
        mine = self.place(tidx)
        merged = op.all([sB[mine, i] for i in range(1 if s.rows_abreast > 1 else s.warps_down)])
        everywhere = None
        if const_expr(spread):
            cute.arch.barrier()
            if tidx < s.groups:
                sB[mine, 0] = merged
            cute.arch.barrier()
            everywhere = [sB[place, 0] for place in self.groups(item)]
        return merged, everywhere

    @cute.jit
    def across_rows(self, item: Item, op: cutlass.Constexpr, sB: cute.Tensor):
        """Merge what lies in the columns of a group, one in each of the rows that lie side by side, in its first."""
        s, launch = self.spec, item.launch
        turns = range(0, s.columns, s.threads)
        places = [(launch.tidx + turn) % s.columns for turn in turns]
        found = [op.all([sB[place, i] for i in range(s.warps_down)]) for place in places]
        cute.arch.barrier()
        for turn, place, number in zip(turns, places, found, strict=True):
            if launch.tidx + turn < s.columns:
                sB[place, 0] = number
        cute.arch.barrier()
        beside, group = launch.spacing // s.rows_abreast, launch.tidx % s.groups
        merged = op.all([sB[group + row * beside, 0] for row in range(s.rows_abreast)])
        cute.arch.barrier()
        if launch.tidx < s.groups:
            sB[group, 0] = merged
        cute.arch.barrier()

    @cute.jit
    def across_cluster(self, item: Item, mine: tuple) -> tuple:
        """Merge what thread t has merged over the CTAs of the cluster, in thread t. In one trip each CTA sends all its
        states to all; in two each merges those of its share of the columns, and sends what comes of them to all."""
        s, whole, launch = self.spec, self.math.whole, item.launch
        sC, barriers = launch.shared.sC, launch.shared.barriers
        tidx, rank = launch.tidx, launch.rank
        column, each, place = tidx % s.groups, s.groups // s.cluster_n, self.place(tidx)
        if tidx < s.trips:
            received = s.groups * (s.cluster_n if const_expr(s.trips == 1) else 1) * self.slot.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + tidx, received)
        # As late as possible: it waits until all CTAs of the cluster have started.
        cute.arch.cluster_wait()
        if const_expr(s.trips == 1):
            if tidx < s.groups:
                for peer in cutlass.range_constexpr(s.cluster_n):
                    reduce.store_remote(mine, sC, (place, rank), barriers, Int32(peer))
            cute.arch.mbarrier_wait(barriers, 0)
            theirs = [reduce.unpack(sC[place, i]) for i in range(s.cluster_n)]
            return whole.merge_all(theirs)
        if tidx < s.groups:
            at = (self.place(column % each * s.cluster_n + rank), 0)
            reduce.store_remote(mine, sC, at, barriers, column // each)
        cute.arch.mbarrier_wait(barriers, 0)
        # The states of one column lie in neighbouring threads, one for each CTA; each sends the result to one.
        merged = whole.lanes(reduce.unpack(sC[place, 0]), s.cluster_n)
        if tidx < s.groups:
            at = (self.place(rank * each + column // s.cluster_n), 1)
            reduce.store_remote(merged, sC, at, barriers + 1, column % s.cluster_n)
        cute.arch.mbarrier_wait(barriers + 1, 0)
        return reduce.unpack(sC[place, 1])

    @cute.jit
    def spread(self, item: Item, mine: tuple) -> list:
        """Per slot of a thread the state, from what thread t has merged."""
        tidx, sC = item.launch.tidx, item.launch.shared.sC
        cute.arch.barrier()
        if tidx < self.spec.groups:
            sC[self.place(tidx), 0] = reduce.pack(mine)
        cute.arch.barrier()
        return self.of_slots(item)

    def place(self, t: Int32) -> Int32 | tuple[Int32, Int32]:
        """The t-th slot in shared memory of a panel's columns, or groups: of neighbouring threads, neighbours. Some
        columns lie `before` the panel's."""
        s, t = self.spec, t % self.spec.groups
        return (t // s.across, t % s.across + s.before // s.slots) if s.apart else t + s.before

    def places(self, item: Item) -> list:
        """Per slot of a thread that of its column in shared memory."""
        s, a = self.spec, item.launch.a
        if not s.apart:
            return [a * s.slots + v for v in range(s.slots)]
        first, log = s.before - item.shift, s.slots.bit_length() - 1
        return [((first + v) & (s.slots - 1), a + ((first + v) >> log)) for v in range(s.slots)]

    def groups(self, item: Item) -> list:
        """Per slot of a thread that of its group in shared memory."""
        s = self.spec
        if s.rows_abreast == 1:
            return self.places(item)
        beside = item.launch.spacing // s.rows_abreast
        found = [self.places(item)[0] % beside]
        for _ in range(1, s.slots):
            following = found[-1] + 1
            found.append(select(following < beside, following, 0))
        return found

    def of_slots(self, item: Item) -> list:
        """Per slot of a thread the state that lies in shared memory."""
        sC = item.launch.shared.sC
        return [reduce.unpack(sC[group, 0]) for group in self.groups(item)]
