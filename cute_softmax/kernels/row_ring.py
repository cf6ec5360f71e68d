"""The row movement of rows that ranks share: slices stay on chip, in a ring of places in shared memory, while their
states go to the other ranks and come from there.

    load the first tiles -> for each tile: reduce, push its state; finish the one before; load another in its place
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..plan import RowClass
from .maths.maths import RowMath
from .ranks import Ranks, Turns
from .row import RowKernel
from .row_scalars import Chosen
from .row_work import Launch, Row, row_of


class RingKernel(RowKernel):
    """The kernel of one Plan class, see `cute_softmax.plan.ranks`, and `ranks` for what is exchanged.

    A tile is loaded ahead, reduced in its turn, and finished `lag` turns later, when the states of its rows have come
    from all ranks.
    """

    def __init__(self, spec: RowClass, math: RowMath):
        super().__init__(spec, math)
        self.ranks = Ranks(spec, math)
        self.asks = True  # in the places of a ring other rows have been

    def slot(self, row: Row, i: int, k: int) -> cute.Tensor:
        """tXsX: this thread's vector k of staged input i in the row's place."""
        return row.launch.shared.tXsX[i][(None, row.m), 0, k, row.place]

    @cute.jit
    def tiles(self, launch: Launch, smem: cutlass.memory.SmemAllocator, cta: Int32, ctas: Int32):
        """All tiles of a cluster, which takes a ticket for them."""
        s = self.spec
        sT = smem.allocate_tensor(Int64, cute.make_layout((1, 1)), byte_alignment=8)
        turns = self.ranks.begin(launch, sT, smem.allocate_array(Int64, num_elems=1))
        for turn in cutlass.range_constexpr(s.ahead):
            self.prefetch(launch, turns.tile(Int32(turn)), 0, s.steps, Int32(turn))
        first = row_of(launch, turns.tile(Int32(0)), 0)
        known = self.scalars.of_group(first)
        score = self.score(first, known)
        seen = self.ranks.unseen()
        for turn in cutlass.range(turns.count + s.lag, unroll=1):
            before = turn - s.lag
            older = self.older(launch, turns, turn)
            coming = row_of(launch, turns.tile(turn + 1), 0)
            # Asked for before there is something else to do.
            of_older, of_coming = self.scalars.of_group(older), self.scalars.of_group(coming)
            if turn < turns.count:
                row = row_of(launch, turns.tile(turn), 0, turn % s.ring)
                self.reduce_in_turn(row, turns, turn, known, score)
            # What the next turn merges, a turn ahead: a load waits for those before it, of which there are many.
            ahead = self.ranks.unseen()
            self.ranks.look(self.older(launch, turns, turn + 1), turns, before + 1 >= 0, ahead)
            if before >= 0:
                self.finish_in_turn(older, turns, of_older, seen)
            seen.store(ahead.load())
            self.prefetch(launch, turns.tile(turn + s.ahead), 0, s.steps, (turn + s.ahead) % s.ring)
            known, score = of_coming, self.score(coming, of_coming)
        self.ranks.end(launch, turns)

    def older(self, launch: Launch, turns: Turns, turn: Int32) -> Row:
        """The row that is finished in a turn."""
        s = self.spec
        tile = turns.tile(cutlass.max(turn - s.lag, 0))
        return row_of(launch, tile, 0, (turn + s.ring - s.lag) % s.ring)

    def score(self, row: Row, known: list) -> tuple[Float32, ...]:
        """The score of a row's target, if rows have one. known: `of_group`."""
        if not self.scalars.marks:
            return ()
        return (self.scalars.score(row, known[self.scalars.group_names.index("index")]),)

    @cute.jit
    def reduce_in_turn(self, row: Row, turns: Turns, turn: Int32, known: list, score: tuple):
        """Push the state of a row's share to all ranks."""
        cute.arch.cp_async_wait_group(self.spec.ahead - 1)
        values = self.hold([row], [known]).values
        states, _ = self.reduce(row.launch.shared, values, [self.math.for_row(values[0])], turn)
        self.ranks.publish(row, turns, (*states[0], *score))

    @cute.jit
    def finish_in_turn(self, row: Row, turns: Turns, known: list, seen: cute.Tensor):
        """Finish a row with the states of all ranks. known: `of_group`; seen: what `Ranks.look` has read of them."""
        held = self.hold([row], [known])
        math = self.math.for_row(held.values[0])
        state, chosen = self.ranks.gather(row, turns, math, seen), None
        if const_expr(self.scalars.marks):
            *state, score = state
            chosen = Chosen(score, held.targets[0] != self.scalars.absent)
        self.finish([row], held, [math], [chosen], [None], [tuple(state)])
