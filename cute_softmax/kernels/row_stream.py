"""The stream movement: rows of any length that are only read, a CTA each, tile after tile.

coordinates -> shared memory -> load the first tile -> for each tile: load the next, wait, reduce -> exchange -> store

A thread reads back only what it copied itself, so that waiting for its own copies is enough: the CTA's threads meet
when the row has ended, and not before.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..plan import WARP
from .common.copy import Fragment, load_async
from .maths.scores import Given
from .row import RowKernel
from .row_scalars import Edges
from .row_staging import copy_if
from .row_work import Launch, Row, count, partition, reads, row_of, tile_of


class StreamKernel(RowKernel):
    """The kernel of one Plan class, see `cute_softmax.plan.stream`."""

    def place(self, row: Row, i: int, number: Int32, k: int) -> cute.Tensor:
        """tXsX: this thread's place in shared memory for vector k of a tile of input i."""
        tXsX = row.launch.shared.tXsX[i]
        at = cute.crd2idx(((0, 0), 0, number % self.spec.stages * self.spec.steps + k), tXsX.layout)
        align = self.spec.vector * self.dtypes[i].width // 8
        return cute.make_tensor((tXsX.iterator + at).align(align), cute.make_layout(self.spec.vector))

    @cute.jit
    def begin(self, launch: Launch, tile: Int64):
        """Start the loads of a row's first tiles."""
        for number in cutlass.range_constexpr(self.spec.stages - 1):
            self.fetch(row_of(launch, tile, 0), Int32(number))

    @cute.jit
    def fetch(self, whole: Row, number: Int32):
        """Start to load this thread's vectors of a tile, those that exist, as one commit group."""
        s, row = self.spec, tile_of(whole, number)
        tXgX = [partition(row, i) for i in self.inputs]
        for k in cutlass.range_constexpr(s.steps):
            if reads(row, k):
                for i in self.inputs:
                    load_async(
                        tXgX[i][None, k], self.place(row, i, number, k), s.access[i], row.launch.policy
                    )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def tile(self, rows: list[Row], turn: Int32, known: list | None):
        """A row, from loading to storing."""
        (row,) = rows
        launch = row.launch
        edges = self.scalars.load_edges([row], {})
        if const_expr(len(self.math.group_inputs) > 0):
            # As in the row movement: no load waits for what a row has one of.
            cute.arch.sync_warp()
        numbers = self.scalars.numbers(launch, self.scalars.of_group(row))
        chosen = self.scalars.chosen(row, None, None) if const_expr(self.scalars.selects) else None
        math = self.math.for_row([Given(numbers, [], [])])
        own, states = self.walk(row, edges, numbers, math), []
        for stage in cutlass.range_constexpr(len(math.reductions)):
            op, part = math.reductions[stage], math.contributed(stage, own, states)
            states.append(self.exchange(launch.shared, stage, op, op.lanes(part, WARP), turn))
        state = sum(states, ())
        found = [chosen.score] if const_expr(self.scalars.selects) else []
        if const_expr(self.spec.prologue.sink):
            state, found = math.joined(state, numbers["sink"]), [*found, numbers["sink"]]
        self.scalars.store_groups(row, partial(math.group_results, state, *found), chosen)

    @cute.jit
    def walk(self, row: Row, edges: Edges, numbers: dict, math: cutlass.Constexpr) -> tuple:
        """The state of this thread's elements of a row: of whole tiles, then of what is behind them and the scalars at
        the row's edges."""
        # Names of their own: what a loop on the GPU calls methods of would be carried through it.
        advance, values_of, fetch, ahead = math.advance, self.values_of, self.fetch, self.spec.stages - 1
        nothing = sum((op.identity for op in math.reductions), ())
        state, whole = tuple(Float32(number) for number in nothing), row.body // self.spec.tiler[1]
        for number in cutlass.range(whole, unroll=1):
            fetch(row, number + ahead)
            cute.arch.cp_async_wait_group(ahead)
            state = advance(values_of(row, number, None, numbers), state)
        cute.arch.cp_async_wait_group(0)
        return advance(values_of(row, whole, edges, numbers), state)

    def values_of(
        self, row: Row, number: Int32, edges: Edges | None, numbers: dict
    ) -> list[Fragment | Given]:
        """What the math sees of a tile. edges: of the last one, which ends where the row does."""
        s, row = self.spec, tile_of(row, number)
        exist = [Boolean(True) if edges is None else reads(row, k) for k in range(s.steps)]
        counts = [count(row, k, exist[k]) for k in range(s.steps)]
        scalars, values = range(s.edge_scalars if edges is not None else 0), []
        for i in self.inputs:
            vectors = [
                partial(self.held, row, i, number, k, None if edges is None else exist[k])
                for k in range(s.steps)
            ]
            values.append(Fragment(vectors, [edges.rE[i][e, 0] for e in scalars], False, "shared"))
        if s.prologue:
            exist += [edges.counted[e, 0] for e in scalars]
            counts += [Int32(edges.counted[e, 0]) for e in scalars]
            values.append(Given(numbers, counts, exist))
        return values

    def held(self, row: Row, i: int, number: Int32, k: int, exists: Boolean | None) -> cute.Tensor:
        """tXrX: vector k of a tile of input i in registers, padding if it is one that does not exist."""
        tXsX, tXrX = self.place(row, i, number, k), self.staging.padded(i)
        if exists is None:
            cute.autovec_copy(tXsX, tXrX)
        else:
            copy_if(exists, tXsX, tXrX)
        return tXrX
