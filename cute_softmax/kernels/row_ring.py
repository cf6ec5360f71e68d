"""The row movement of rows that ranks share: slices stay on chip, in a ring of places in shared memory, while their
states go to the other ranks and come from there.

    load the first tiles -> for each tile: reduce; finish an older one, load another in its place; push the tile's state
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..plan import RowClass
from .common import reduce
from .common.index import select
from .maths.maths import RowMath
from .ranks import Ranks, Turns
from .row import Held, RowKernel
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
        # With a loss a turn is bound by instructions, and 4% shorter; without, by memory, and 6% longer (two H200).
        self.branchless = self.scalars.marks

    def precede(self, stream, operands: tuple):
        """A warp, which waits until all ranks have come to the launch."""
        self.rendezvous(operands).launch(grid=[1, 1, 1], block=[reduce.WARP, 1, 1], stream=stream)

    @cute.kernel
    def rendezvous(self, operands: tuple):
        _, numbers, _ = self.apart(operands)
        self.ranks.rendezvous(numbers)

    @cute.jit
    def tiles(self, launch: Launch, smem: cutlass.memory.SmemAllocator, cta: Int32, ctas: Int32):
        """All tiles of a cluster, which takes a ticket for them.

        A turn has no branches but where a state has not come: what one row's reduction waits for is hidden behind what
        becomes of the other row. Of the first and the last turns one of the two does not exist.
        """
        s = self.spec
        launch = replace(launch, rows=Int32(launch.rows))  # launches are of few rows, see `Turns.tile`
        sT = smem.allocate_tensor(Int64, cute.make_layout((1, 1)), byte_alignment=8)
        turns = self.ranks.begin(launch, sT, smem.allocate_array(Int64, num_elems=1))
        for turn in cutlass.range_constexpr(s.ahead):
            self.staging.prefetch(launch, turns.tile(Int32(turn)), 0, s.steps, Int32(turn))
        if const_expr(not self.staging.asks):
            self.staging.pad(launch, turns.tile(Int32(0)), s.ring)
        first = self.row_of_turn(launch, turns, Int32(0))
        known = self.scalars.of_group(first)
        of_older = self.scalars.loaded(self.row_of_turn(launch, turns, Int32(-s.lag)))
        target = self.target(first, known)
        seen = self.ranks.unseen()
        for turn in cutlass.range(turns.count + s.lag, unroll=1):
            row, older = self.row_of_turn(launch, turns, turn), self.row_of_turn(launch, turns, turn - s.lag)
            coming = self.row_of_turn(launch, turns, turn + 1)
            next_older = self.row_of_turn(launch, turns, turn + 1 - s.lag)
            held = self.hold([older], [self.scalars.known(launch, of_older)])
            math = self.math.for_row(held.values[0])
            if const_expr(s.lag > 1):
                whole = self.ranks.gather(older, turns, math, seen)

            # Behind the one loop: in front of it the compiler would wait for them.
            of_coming, of_older = self.scalars.loaded(coming), self.scalars.loaded(next_older)
            cute.arch.cp_async_wait_group(s.ahead - 1)
            (values,) = self.hold([row], [known]).values
            own = self.math.for_row(values)
            state, _ = own.partial(0, values, [], reduce.WARP)
            if const_expr(s.lag == 1):  # the others wait for it now, as this rank does for theirs
                self.push(row, turns, turn, own, state, target)
                whole = self.ranks.gather(older, turns, math, seen)
            # As late as it is there when the next turn begins: most states have come by then.
            ahead = self.ranks.unseen()
            self.ranks.look(next_older, turns, Boolean(True), ahead)
            whole, chosen = self.apart_from_score(held, whole)
            self.store(older, math.finish(held.values[0], None, whole), held.vectors, held.edges)
            self.staging.prefetch(launch, turns.tile(turn + s.ahead), 0, s.steps, (turn + s.ahead) % s.ring)
            if const_expr(s.lag > 1):
                self.push(row, turns, turn, own, state, target)
            # One warp's work, which the others do not wait for when they exchange the state of the other row.
            self.finish_scalars(older, held, math, chosen, whole)

            seen.store(ahead.load())
            known = self.scalars.known(launch, of_coming)
            target = self.target(coming, known)
        self.ranks.end(launch, turns)

    def row_of_turn(self, launch: Launch, turns: Turns, turn: Int32) -> Row:
        """The row that is reduced in a turn; before the first one and behind the last one it does not exist."""
        tile = select(turn >= 0, turns.tile(turn), launch.rows)
        return row_of(launch, tile, 0, (turn + self.spec.ring) % self.spec.ring)

    def target(self, row: Row, known: list) -> tuple:
        """`Scalars.target` of a row, if rows have one. known: `of_group`."""
        if not self.scalars.marks:
            return ()
        return self.scalars.target(row, known[self.scalars.group_names.index("index")])

    def push(self, row: Row, turns: Turns, turn: Int32, math: RowMath, state: tuple, target: tuple):
        """Push the state of this CTA's share of a row to all ranks, and the score of its target, if there is one."""
        if self.spec.exchanges:
            state = self.exchange(row.launch.shared, 0, math.whole, state, turn)
        score = (self.scalars.score(row, *target),) if target else ()
        self.ranks.publish(row, turns, (*state, *score))

    def apart_from_score(self, held: Held, whole: tuple) -> tuple[tuple, Chosen | None]:
        """The state of a row, and the score of its target, if rows have one, of what all ranks have pushed."""
        if not self.scalars.marks:
            return whole, None
        *state, score = whole
        return tuple(state), Chosen(score, held.targets[0] != self.scalars.absent)
