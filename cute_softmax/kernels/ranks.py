"""Rows that ranks share: the CTAs of all ranks that have a share of a row exchange its states in global memory, while
what they have read stays on chip.

    ... -> reduce row i -> push its state to every rank -> read all states of row i - lag -> finish -> store

A CTA writes the state of its share into the workspace of each rank, at a place of its own there, and reads those of all
others in that of its own rank. Every number goes with a tag, both in one store of 8 bytes: whoever finds the tag of
this launch there has the number, too, without a fence. All read the same states, and merge them in the same order:
results have the same bits on every rank.

The tag is the launch's epoch, which the device counts itself, so that a replayed graph has new ones. There are two
halves of places, which launches take in turn: a rank may be a launch ahead of another, never two, as it waits for all
states.

Nobody waits for CTAs that may never run. A kernel of one warp first waits until all ranks have come to the launch.
Clusters then take tickets in the order in which they come to run, so that those of the first rows are there on every
rank before others wait for theirs; and all shares of a row on a rank are one cluster's.

A workspace begins with words of the kernels' own.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..plan import RowClass
from ..plan.ranks import COUNTERS, HEADER
from .common.copy import element, global_pointer
from .common.index import select
from .common.reduce import MAX, WARP, Both, pack, store_remote, unpack
from .maths.maths import RowMath
from .row_work import Launch, Row

# Words of a workspace's header; in a cache line behind them, by rank, the last launch that it has come to.
EPOCH, TICKETS, DONE, FAILED = range(4)
COME = COUNTERS // 4


@dataclass(frozen=True)
class Turns:
    """The tiles of a cluster: every `clusters`-th from `first` on, `count` of them; the tag of this launch's states.

    peer: the workspace of the rank that this lane writes to.
    """

    first: Int32
    clusters: Int32
    count: Int32
    epoch: Int32
    peer: Int64

    def tile(self, turn: Int32) -> Int32:
        # Launches are of fewer rows than a workspace has places for.
        return self.first + turn * self.clusters


class Ranks:
    """What CTAs that share a row on several ranks do for each other.

    words: numbers of what they exchange: the state of the math and, with a target, its score.
    """

    def __init__(self, spec: RowClass, math: RowMath):
        self.spec, self.math = spec, math
        self.words = len(math.whole.identity) + bool(spec.prologue.target)

    def operator(self, math: RowMath) -> object:
        """What merges the states that are exchanged."""
        return Both(math.whole, MAX) if self.spec.prologue.target else math.whole

    def word(self, numbers: dict[str, Int64], which: int) -> cute.Pointer:
        return global_pointer(Int32, numbers["workspace"], which, 4)

    def count_up(self, at: cute.Pointer, last: Int32) -> Int32:
        """What a counter was; behind `last` it begins at 0 again."""
        return cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[at.toint(), last],
        )

    @cute.jit
    def rendezvous(self, numbers: dict[str, Int64]):
        """Wait in one warp until all ranks have come to this launch.

        A rank may first need a kernel of this one, of a collective of another group say: those that wait here leave it
        all SMs but one, while the clusters behind wait for nothing but clusters that are about to run.
        """
        lane = cute.arch.lane_idx()
        epoch = cute.arch.load(self.word(numbers, EPOCH), Int32, sem="relaxed", scope="gpu") + 1
        if lane < Int32(numbers["ranks"]):
            peer = element(Int64, numbers["peers"], Int64(lane))[0]
            at = global_pointer(Int32, peer, COME + numbers["rank"], 4)
            cute.arch.store(at, epoch, sem="relaxed", scope="sys")
            mine = global_pointer(Int32, numbers["workspace"], COME + lane, 4)
            behind, waited, began = Boolean(True), Int64(0), cute.arch.globaltimer()
            while behind & (waited < numbers["patience"]):
                # It may be a launch ahead, and epochs begin again behind the last of 32 bits.
                behind = cute.arch.load(mine, Int32, sem="relaxed", scope="sys") - epoch < 0
                failed = cute.arch.load(self.word(numbers, FAILED), Int32, sem="relaxed", scope="gpu")
                waited = select(failed != 0, numbers["patience"], cute.arch.globaltimer() - began)
            if behind:
                self.give_up(numbers)

    @cute.jit
    def begin(self, launch: Launch, sT: cute.Tensor, barrier: cute.Pointer | None) -> Turns:
        """Take the cluster's ticket, and tell it to all of its CTAs by `sT` and `barrier`."""
        s, tidx = self.spec, cute.arch.thread_idx()[0]
        clusters = cute.arch.grid_dim()[0]
        if const_expr(s.cluster_n > 1):
            if tidx == 0:
                cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            if tidx == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 8)
        if (tidx == 0) & (launch.rank == 0):
            ticket = self.count_up(self.word(launch.numbers, TICKETS), clusters - 1)
            epoch = cute.arch.load(self.word(launch.numbers, EPOCH), Int32, sem="relaxed", scope="gpu")
            both = (ticket.bitcast(Float32), epoch.bitcast(Float32))
            if const_expr(s.cluster_n > 1):
                for peer in cutlass.range_constexpr(s.cluster_n):
                    store_remote(both, sT, (0, 0), barrier, Int32(peer))
            else:
                sT[0, 0] = pack(both)
        if const_expr(s.cluster_n > 1):
            cute.arch.mbarrier_wait(barrier, 0)
        else:
            cute.arch.barrier()
        ticket, epoch = (number.bitcast(Int32) for number in unpack(sT[0, 0]))
        tiles = Int32((launch.rows + s.tiler[0] - 1) // s.tiler[0])
        lane = cute.arch.lane_idx()
        of_lane = select(lane < Int32(launch.numbers["ranks"]), lane, Int32(0))
        return Turns(
            first=ticket,
            clusters=clusters,
            count=(tiles - ticket + clusters - 1) // clusters,
            # Not 0, which a workspace is before its first launch.
            epoch=epoch + 1,
            peer=element(Int64, launch.numbers["peers"], Int64(of_lane))[0],
        )

    @cute.jit
    def end(self, launch: Launch, turns: Turns):
        """Count this cluster out; the last one of all begins the next epoch."""
        if (cute.arch.thread_idx()[0] == 0) & (launch.rank == 0):
            last = cute.arch.grid_dim()[0] - 1
            if self.count_up(self.word(launch.numbers, DONE), last) == last:
                cute.arch.store(self.word(launch.numbers, EPOCH), turns.epoch, sem="relaxed", scope="gpu")

    def place(self, row: Row, turns: Turns, peer: Int32) -> Int64:
        """Where in a workspace the state of a row lies that a CTA pushes: `peer` counts those of all ranks."""
        numbers, cluster_n = row.launch.numbers, self.spec.cluster_n
        index = row.index * (numbers["ranks"] * cluster_n) + peer
        return HEADER + Int64(turns.epoch & 1) * numbers["half"] + index * (8 * self.words)

    @cute.jit
    def publish(self, row: Row, turns: Turns, state: tuple):
        """Push the state of this CTA's share of a row to all ranks."""
        s, launch = self.spec, row.launch
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        ranks, rank = Int32(launch.numbers["ranks"]), Int32(launch.numbers["rank"])
        if row.inside & (warp % s.warps_per_row == 0) & (lane < ranks):
            at = turns.peer + self.place(row, turns, rank * s.cluster_n + launch.rank)
            for i in cutlass.range_constexpr(self.words):
                word = pack((state[i], turns.epoch.bitcast(Float32)))
                cute.arch.store(global_pointer(Int64, at, i, 8), word, sem="relaxed", scope="sys")

    def unseen(self) -> cute.Tensor:
        """What `look` reads the words of a state into: nothing yet."""
        rP = cute.make_rmem_tensor(self.words, Int64)
        rP.fill(Int64(0))
        return rP

    @cute.jit
    def look(self, row: Row, turns: Turns, wanted: Boolean, rP: cute.Tensor) -> Boolean:
        """Read what is missing of the state that this lane merges; whether some still is."""
        launch, lane = row.launch, cute.arch.lane_idx()
        peers = Int32(launch.numbers["ranks"]) * self.spec.cluster_n
        wanted = wanted & row.inside & (lane < peers)
        at = launch.numbers["workspace"] + self.place(row, turns, lane)
        missing = Boolean(False)
        for i in cutlass.range_constexpr(self.words):
            here = wanted & (self.tag(rP, i) != turns.epoch)
            rP[i] = cute.arch.inline_ptx(
                "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b64 {$w0}, {$r2}; "
                "@p ld.relaxed.sys.global.b64 {$w0}, [{$r0}];}",
                write_only_types=[Int64],
                read_only_args=[at + 8 * i, Int32(here), rP[i]],
            )
        for i in cutlass.range_constexpr(self.words):
            missing = missing | (wanted & (self.tag(rP, i) != turns.epoch))
        return missing

    def tag(self, rP: cute.Tensor, i: int) -> Int32:
        return Int32(rP[i] >> 32)

    @cute.jit
    def gather(self, row: Row, turns: Turns, math: RowMath, rP: cute.Tensor) -> tuple:
        """The state of a whole row, merged in every warp that has a share of it. rP: what `look` has read so far.

        NaN where a rank's has not come in time; the host is told.
        """
        launch, lane = row.launch, cute.arch.lane_idx()
        patience = launch.numbers["patience"]
        missing = self.look(row, turns, Boolean(True), rP)
        began, waited = Int64(0), Int64(0)
        while missing & (waited < patience):
            now = cute.arch.globaltimer()
            began = select(began == 0, now, began)
            missing = self.look(row, turns, Boolean(True), rP)
            failed = cute.arch.load(self.word(launch.numbers, FAILED), Int32, sem="relaxed", scope="gpu")
            waited = select(failed != 0, patience, now - began)
        if missing:
            self.give_up(launch.numbers)
        op = self.operator(math)
        exists = row.inside & (lane < Int32(launch.numbers["ranks"]) * self.spec.cluster_n)
        nothing = [Float32(number) for number in op.identity]
        lost = Float32(float("nan"))
        state = [
            select(exists, select(missing, lost, Int32(rP[i]).bitcast(Float32)), nothing[i])
            for i in range(self.words)
        ]
        return op.lanes(tuple(state), WARP)

    @cute.jit
    def give_up(self, numbers: dict[str, Int64]):
        """Let the others of this rank not wait any longer, and the host know."""
        cute.arch.store(self.word(numbers, FAILED), Int32(1), sem="relaxed", scope="gpu")
        alarm = global_pointer(Int32, numbers["alarm"], 0, 4)
        cute.arch.store(alarm, Int32(1), sem="relaxed", scope="sys")
