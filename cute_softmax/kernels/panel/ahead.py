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

A bias or a mask that is the same for all rows is *resident*: a CTA loads its part once. So it has one for each chunk of
its share in shared memory, beside the ring.

Where chunks lie: the steps of all rows go round a ring of places. In it each row begins `ahead` places behind the one
before, as so many of its places are free: so a chunk that stays comes to where chunk n - `ahead` of the row before was.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...plan import PanelClass
from ..common.index import select
from ..common.reduce import WARP
from ..maths.slots import nothing
from . import exchange
from .schedule import Schedule
from .work import Item, Launch, chunk_of, chunks_of, item_of


@dataclass(frozen=True)
class Rows:
    """Three rows that follow each other: the one that is finished, the one that is absorbed, and the next.

    turn: where in the ring the places of the second begin; places: of the ring.
    """

    before: Item
    item: Item
    following: Item
    turn: Int32
    places: Int32


def around(place: Int32, places: Int32) -> Int32:
    """A place of the ring that was counted past its end, at most once."""
    return select(place >= places, place - places, place)


def place_of(spec: PanelClass, turn: Int32, places: Int32, n: Int32 | int) -> Int32:
    """Where chunk n of the row that begins at `turn` lies in shared memory or, if n is an int, comes to before it moves
    to registers; n + `ahead` is where chunk n of the row before lies."""
    if isinstance(n, int) and n < spec.registers:
        n = spec.registers + (n + spec.wait) % spec.ahead
    return around(turn + n - spec.registers, places)


class Ahead(Schedule):
    """Rows a row ahead."""

    @cute.jit
    def run(self, first: Item):
        """This CTA's items, from `first` on."""
        s, launch, index = self.spec, first.launch, first.index
        places = launch.chunks - s.registers + s.ahead
        for n in cutlass.range(launch.chunks, unroll=1):
            self.chunks.reside(first, n)
        for n in cutlass.range_constexpr(s.ahead):
            self.fetch(first, Int32(n), place_of(s, Int32(0), places, n), first.index < launch.items)
            cute.arch.cp_async_commit_group()
        # The first chunks of this row; those of the row before whose places they take.
        kept = [self.registers(launch) for _ in range(s.registers)]
        last = [self.registers(launch) for _ in range(s.wait)]
        rE, last_rE = self.scalars.none(launch), self.scalars.none(launch)
        patience, given_up, turn = launch.patience, Int32(0), Int32(0)
        for i in cutlass.range(index, launch.items + launch.ctas, launch.ctas, unroll=1):
            rows = Rows(
                before=self.scores.known(item_of(launch, cutlass.max(i - launch.ctas, index))),
                item=self.scores.known(item_of(launch, i)),
                following=item_of(launch, i + launch.ctas),
                turn=turn,
                places=places,
            )
            before, item = rows.before, rows.item
            rS = nothing(self.math, 1)
            if (launch.tidx == 0) & (i < launch.items):
                exchange.expect(item.sync)
                exchange.expect(self.parts.place(item, item.part, Int32(0)))
            self.scalars.load(item, rE)
            finishing = Int32(0)
            for t in cutlass.range_constexpr(s.wait - 1):
                self.step(rows, rS, [], t, finishing, kept[t], True)
            # The states are on their way during the last of these steps, from L2. Only both help: a read from DRAM
            # takes longer than a step, and without reading ahead the latency of L2 counts, too.
            seen = self.parts.unseen(before, launch.tidx)
            if launch.tidx < s.readers:
                self.parts.look(before, seen, launch.tidx, Int32(0))
            self.step(rows, rS, [], s.wait - 1, finishing, kept[s.wait - 1], True)
            if i > index:
                finishing = self.parts.collect(before, patience, seen)
                patience = select(finishing != 0, patience, Int32(0))
            states = self.scores.joined(before, self.merge.of_slots(before))
            self.scalars.finish(before, last_rE, states, finishing)
            for t in cutlass.range_constexpr(s.wait, s.registers):
                self.step(rows, rS, states, t, finishing, kept[t], True)
            for t in cutlass.range(s.registers, launch.chunks, unroll=1):
                self.step(rows, rS, states, t, finishing, None, True)
            if const_expr(s.edges):
                self.chunks.absorb(item, rS, item.first, None, rE)
                copy([rE], [last_rE])
            if i < launch.items:
                given_up = given_up | self.hand_over(item, tuple(rS[n, 0] for n in range(rS.shape[0])))
            for n in cutlass.range_constexpr(s.wait):
                self.step(rows, rS, states, launch.chunks + n, finishing, last[n], False)
                copy(kept[n], last[n])
            turn = around(turn + places - s.ahead, places)
        self.parts.rescue(launch, index, given_up)

    @cute.jit
    def hand_over(self, item: Item, state: tuple) -> Int32:
        """Merge the threads' states and publish what comes of it; nobody but the first warp waits for that. In its
        first thread, whether a part of the row has been given up."""
        s, sB = self.spec, item.launch.shared.sB
        lane, warp = item.launch.tidx % WARP, item.launch.tidx // WARP
        state = self.math.whole.lanes(state, WARP)
        if lane == 0:
            for n in cutlass.range_constexpr(len(state)):
                sB[0, warp, n] = state[n]
        cute.arch.barrier()
        given_up = Int32(0)
        if warp == 0:
            row = cutlass.min(lane, s.warps_down - 1)
            theirs = [
                select(lane < s.warps_down, sB[0, row, n], Float32(number))
                for n, number in enumerate(self.math.whole.identity)
            ]
            self.parts.publish(item, self.math.whole.lanes(tuple(theirs), WARP))
            if lane == 0:
                given_up = Int32(exchange.arrive(item.sync) >= exchange.GIVE_UP)
        return given_up

    @cute.jit
    def step(
        self,
        rows: Rows,
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
        s, before, item, launch = self.spec, rows.before, rows.item, rows.item.launch
        cute.arch.cp_async_wait_group(s.ahead - 1)
        free = place_of(s, rows.turn, rows.places, t + s.ahead if const_expr(absorbs) else t)
        if const_expr(len(states) > 0):
            n = t if const_expr(absorbs) else t - launch.chunks
            if finishing != 0:
                where = free * s.chunk_steps if const_expr(kept is None) else kept
                if const_expr(s.hides):
                    self.finish_or_hide(before, n, where, states)
                else:
                    self.chunks.finish(before, before.first + n * s.chunk, where, states)
        if const_expr(absorbs):
            base, at = place_of(s, rows.turn, rows.places, t) * s.chunk_steps, item.first + t * s.chunk
            self.chunks.align(item, at, base)
            if const_expr(kept is not None):
                copy(
                    [[x[None, base + k] for k in range(s.chunk_steps)] for x in self.of_chunks(launch)], kept
                )
            where = base if const_expr(kept is None) else kept
            if const_expr(s.hides):
                if t < chunks_of(item):
                    self.chunks.absorb(item, rS, at, where)
            else:
                self.chunks.absorb(item, rS, at, where)
            exists = (t + s.ahead < launch.chunks) & (item.index < launch.items)
            self.fetch(item, t + s.ahead, free, exists)
        if const_expr(not absorbs or (kept is None and s.wait < s.ahead)):
            n = t + s.ahead - launch.chunks - s.wait
            self.fetch(rows.following, n, free, (n >= 0) & (rows.following.index < launch.items))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def finish_or_hide(self, item: Item, n: Int32 | int, where: Int32 | list, states: list):
        """Finish chunk n of a row that ends at a diagonal; of what lies beyond, nothing is computed."""
        at = item.first + n * self.spec.chunk
        if n < chunks_of(item):
            self.chunks.finish(item, at, where, states)
        else:
            self.chunks.put(item, at, self.chunks.hidden(item, states))

    def of_chunks(self, launch: Launch) -> list[cute.Tensor]:
        """tXsX of each input that is not resident."""
        return launch.shared.tXsX[: len(self.math.inputs) - len(self.spec.residents)]

    def registers(self, launch: Launch) -> list:
        """Registers for a chunk: per input that is not resident its vectors."""
        chunk = []
        for i in range(len(self.of_chunks(launch))):
            dtype = launch.mX[i].dtype
            chunk.append(
                [cute.make_rmem_tensor(self.spec.vector, dtype) for _ in range(self.spec.chunk_steps)]
            )
            for vector in chunk[i]:
                vector.fill(dtype(0.0))
        return chunk

    @cute.jit
    def fetch(self, item: Item, n: Int32, place: Int32, exists: Boolean):
        """Load chunk n to a place, if it exists."""
        if exists:
            policy = item.launch.policies.once
            self.chunks.fetch(item.launch, chunk_of(item, n), place * self.spec.chunk_steps, policy)


def copy(chunk: list, to: list):
    """Copy the vectors of all inputs."""
    for vectors, places in zip(chunk, to, strict=True):
        for vector, place in zip(vectors, places, strict=True):
            cute.autovec_copy(vector, place)
