"""The column and split movements: groups along any dimensions, shared by the threads of a CTA and by several CTAs.

A *panel* is what a CTA works on: `across` vectors of neighbouring groups by all elements of those groups (columns),
or one group (rows, where `across` is 1 and a vector lies along the group). Its threads stand `across` by `down`;
step k of a thread takes unit ``k * down + d`` of the group, a unit being an element (columns) or a vector (rows).
A panel may be cut along the groups into `parts`, one CTA each, that exchange states in global memory. What a CTA cannot
hold in shared memory it takes in chunks, see `stream`.

A row that begins or ends off a vector boundary is cut into a head, a body of whole vectors that begins on a cache line,
and a tail of fewer than V scalars. Parts share the body; threads of the first take the scalars of head and tail, the
row's `edges`.

With a prologue the math sees the scores of the elements, computed of them whenever they are looked at, see `scores`.

    coordinates -> panel -> shared memory -> fetch -> fold -> merge -> exchange -> finish -> store

Names as in `row`, and rS states in registers. A *slot* is a group that a thread holds elements of: V of them in
columns, one in rows. The files, each of which imports from those before: `exchange`, `scores` (what a prologue makes of
elements), `work` (who works on what), `chunks`, `shift`, `aligned` and `abreast` (vectors), `scalars`, `merge`,
`parts`, and the orders of work: `schedule`, `stream` and `ahead`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from layouts.trace import observe

from ...plan import PanelClass
from ..common.copy import DTYPES, global_tensors, policy, read_policy
from ..common.early import FEW_CTAS, begins_early, wait_for_stream
from ..maths.maths import RowMath
from .ahead import Ahead
from .schedule import Whole
from .stream import Stream
from .work import Launch, Policies, Shared, item_of


class PanelKernel:
    """The kernel of one Plan class.

    spec: the plain numbers and named layouts of the class, see `cute_softmax.plan.PanelClass`.
    math: a row math of `maths`; its element functions are used.
    """

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs = range(len(math.inputs))
        self.schedule = (Ahead if spec.ahead else Stream if spec.streaming else Whole)(spec, math)

    @cute.jit
    def __call__(
        self,
        stream,
        ctas: Int32,
        items: Int32,
        length: Int32,
        groups: Int32,
        parts: Int32,
        share: Int32,
        evict_last: Int32,
        patience: Int32,
        chunks: Int32,
        spacing: Int32,
        exchange_bytes: Int64,
        *rest: Int64,
    ):
        """Launch.

        ctas: CTAs of the grid, or clusters; items: panels times parts, each the work of one CTA or cluster;
        length: elements of a group; groups: how many, side by side; parts: of a panel; share: elements of a group
        that a CTA takes; evict_last: see `copy.read_policy`; patience: nanoseconds, see `exchange`; chunks: of a
        share, see `ahead`; spacing: groups from a panel to the next; exchange_bytes: bytes of all exchange points.
        rest: sizes of all kept modes but the slowest, and of all reduced modes but the slowest, the fastest first;
        where rows lie side by side the columns of the last of them;
        with exchange points the address of zeroed memory for them, and behind them for the parts' states; the numbers
        of the prologue (floats by their bits); then of each operand the address in bytes and the strides in elements of
        the kept and of the reduced modes, the fastest first.
        """
        s = self.spec
        numbers = (
            ctas,
            items,
            length,
            groups,
            parts,
            share,
            evict_last,
            patience,
            chunks,
            spacing,
            exchange_bytes,
        )
        grid = [ctas * s.cluster_n, 1, 1]
        self.kernel(numbers, rest).launch(
            grid=grid,
            block=[s.threads, 1, 1],
            cluster=[s.cluster_n, 1, 1] if const_expr(s.cluster_n > 1) else None,
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1 if const_expr(s.min_blocks > 1) else None,
            use_pdl=begins_early(s, grid),
        )

    @cute.kernel
    def kernel(self, numbers: tuple, rest: tuple):
        s = self.spec
        wait_for_stream(s.early, above=FEW_CTAS)
        ctas, items, length, groups, parts, share, evict_last, patience, chunks, spacing, exchange_bytes = (
            numbers
        )

        # Coordinates.
        tidx, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        rank = Int32(0)
        if const_expr(s.cluster_n > 1):
            item, rank = item // s.cluster_n, cute.arch.block_idx_in_cluster()

        # Tensors.
        modes = s.kept_modes + s.reduced_modes
        sizes, operands = [Int32(n) for n in rest[: modes - 2]], rest[modes - 2 :]
        last_row = Int32(0)
        if const_expr(s.rows_abreast > 1):
            last_row, operands = Int32(operands[0]), operands[1:]
        exchanges, names = Int64(0), s.prologue.numbers
        if const_expr(s.exchange):
            exchanges, operands = operands[0], operands[1:]
        prologue, operands = dict(zip(names, operands[: len(names)], strict=True)), operands[len(names) :]
        mX = global_tensors(self.dtypes, operands, s.kept_modes, s.reduced_modes)

        # Shared memory: the tiles, the warps' partial results (one buffer a stage), what CTAs exchange.
        smem = cutlass.memory.SmemAllocator()
        tiles = [s.tile_of(i) for i in self.inputs]
        sX = [
            smem.allocate_tensor(
                Uint32 if s.words(i) else Uint8 if s.bits(i) else self.dtypes[i],
                cute.make_layout(tiles[i].shape, stride=tiles[i].stride),
                16,
            )
            for i in self.inputs
        ]
        buffer = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        sB = smem.allocate_tensor(Float32, buffer, 16)
        peers = cute.make_layout(s.peers.shape, stride=s.peers.stride)
        sC = smem.allocate_tensor(self.schedule.merge.slot, peers, 16)
        for name, tensor in (("smem", sX[0]), ("reduction_buffer", sB), ("peers", sC)):
            observe(name, tensor)
        words = smem.allocate_tensor(Int32, cute.make_layout(2), 8)
        barriers = None

        # Cluster init.
        if const_expr(s.cluster_n > 1):
            barriers = smem.allocate_array(Int64, num_elems=s.trips)
            if tidx < s.trips:
                cute.arch.mbarrier_init(barriers + tidx, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

        # Partition.
        a, d = tidx % s.across, tidx // s.across
        policies = self.policies(evict_last)
        lane, own = tidx % s.lanes, s.block(tidx) if const_expr(s.shifted) else tidx
        tXsX = [x[None, own if const_expr(s.access[i]) else tidx, None] for i, x in enumerate(sX)]
        launch = Launch(
            spec=s,
            ctas=ctas,
            items=items,
            length=length,
            groups=groups,
            parts=parts,
            share=share,
            patience=patience,
            chunks=chunks,
            spacing=spacing if const_expr(s.columns > 1) else Int32(1),  # registers are for the row
            last_row=last_row,
            kept_sizes=sizes[: s.kept_modes - 1],
            reduced_sizes=sizes[s.kept_modes - 1 :],
            mX=mX,
            tidx=tidx,
            rank=rank,
            a=a,
            d=d,
            own=own,
            lane=lane,
            policies=policies,
            shared=Shared(sX=sX, tXsX=tXsX, sB=sB, sC=sC, words=words, barriers=barriers),
            exchanges=exchanges,
            states=exchanges + exchange_bytes,
            numbers=prologue,
        )
        begun = item_of(launch, item)
        wait_for_stream(s.early, upto=FEW_CTAS)
        self.schedule.run(begun)

    def policies(self, evict_last: Int32) -> Policies:
        """The L2 eviction policies of a launch.

        What is read twice stays in L2 rather than what is not needed any more. That leaves first, but where CTAs share
        an SM: there the usual order is faster. Rows a row ahead are read once, and yet leave last.
        (docs/experiments.md)
        """
        if self.spec.repeats:
            usual = self.spec.min_blocks > 1
            once = policy("evict_normal" if usual else "evict_first")
            return Policies(twice=policy("evict_last"), once=once, writes=None if usual else once)
        reads = read_policy(evict_last)
        return Policies(twice=reads, once=reads, writes=None)
