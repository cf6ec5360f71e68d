"""How inputs of rows come through shared memory: asynchronously, each vector into a slot of the thread that loads it.
No thread waits for another."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from layouts.trace import observe

from ..plan import RowClass
from .common.copy import DTYPES, load_async
from .maths.maths import RowMath
from .row_work import Launch, Row, Vectors, following, partition, reads, row_of, writes


class Staging:
    """Of one Plan class; `RowClass.staging` says what each input does.

    inputs: those in shared memory; residents: those of them that are the same for all rows.
    slots: by input what its slots hold, an element or what is kept of it.
    asks: whether a slot is asked for whether it has a vector: two float32 inputs are slower without (H200, backward of
        128 x 262144: 114 us for 107); in a ring a thread's vectors differ from row to row.
    loads_first: whether vectors in registers, which meet those in shared memory element by element, are all loaded
        before. Loads of less than a register would need more of them for their addresses than there are.
    """

    def __init__(self, spec: RowClass, math: RowMath):
        self.spec, self.padding = spec, math.padding
        inputs = range(len(math.inputs))
        self.dtypes = [DTYPES[name] for name in spec.dtypes[: len(math.inputs)]]
        self.inputs = [i for i in inputs if spec.staging[i] != "direct"]
        self.residents = [i for i in self.inputs if spec.staging[i] == "resident"]
        self.asks = spec.edges if spec.ring else self.dtypes == [Float32, Float32]
        whole = all(a * d.width >= 32 for a, d in zip(spec.access, self.dtypes, strict=True))
        mixed = {*spec.staging} >= {"shared", "direct"}
        self.loads_first = math.together and mixed and whole
        self.slots = {i: Float32 if spec.keeps_shared and i == 0 else self.dtypes[i] for i in self.inputs}

    def partitions(
        self, smem: cutlass.memory.SmemAllocator, thr_copy: cute.ThrCopy
    ) -> dict[int, cute.Tensor]:
        """tXsX of each input, in shared memory allocated for it."""
        tiles = {i: self.spec.smem_of(i) for i in self.inputs}
        sX = {
            i: smem.allocate_tensor(self.slots[i], cute.make_layout(tile.shape, stride=tile.stride), 16)
            for i, tile in tiles.items()
        }
        if self.inputs:
            observe("smem", sX[self.inputs[0]])
        return {i: thr_copy.partition_D(sX[i]) for i in self.inputs}

    def slot(self, row: Row, i: int, k: int) -> cute.Tensor:
        """tXsX: this thread's place in shared memory for vector k of input i, of its row m, in a ring in the row's
        place; in slots that are to hold something wider it takes the beginning."""
        at = (None, row.m), 0, k % self.spec.steps_of(i), *[row.place] * bool(self.spec.ring)
        slot = row.launch.shared.tXsX[i][at]
        if self.slots[i] is self.dtypes[i]:
            return slot
        return cute.make_tensor(
            cute.recast_ptr(slot.iterator, dtype=self.dtypes[i]), cute.make_layout(self.spec.vector)
        )

    @cute.jit
    def begin(self, launch: Launch, tile: Int64):
        """Load what shared memory has room for of a CTA's first tile."""
        s = self.spec
        if const_expr(self.residents):
            self.settle(launch, tile)
        if const_expr(self.inputs):
            for k in cutlass.range_constexpr(0, s.staged_steps, s.part):
                self.prefetch(launch, tile, k, s.part, Int32(0))
        if const_expr("shared" in s.staging and not self.asks):
            self.pad(launch, tile)

    @cute.jit
    def settle(self, launch: Launch, tile: Int64):
        """Start the asynchronous loads of what is the same for all rows, as one commit group."""
        row = row_of(launch, tile, 0)
        for i in self.residents:
            tXgX = partition(row, i)
            for k in cutlass.range_constexpr(self.spec.steps):
                # Of another row more may count.
                if writes(row, k, reads(row, k)):
                    load_async(tXgX[None, k], self.slot(row, i, k), self.spec.access[i], launch.policy)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def prefetch(
        self,
        launch: Launch,
        tile: Int64,
        first: cutlass.Constexpr[int],
        steps: cutlass.Constexpr[int],
        place: Int32,
    ):
        """Start the asynchronous loads of `steps` vectors from `first` on into this thread's own slots, as one commit
        group. place: see `Row`."""
        s = self.spec
        for m in cutlass.range_constexpr(s.rows_per_thread):
            row = row_of(launch, tile, m, place)
            for i in [i for i in self.inputs if i not in self.residents]:
                tXgX = partition(row, i)
                for k in cutlass.range_constexpr(first, min(first + steps, s.steps)):
                    if row.inside & reads(row, k):
                        load_async(tXgX[None, k], self.slot(row, i, k), s.access[i], launch.policy)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def pad(self, launch: Launch, tile: Int64, places: cutlass.Constexpr[int] = 1):
        """Fill slots of what stays in shared memory that no vector comes to, so that no pass asks which they are.

        places: for rows in shared memory.
        """
        s = self.spec
        for m in cutlass.range_constexpr(s.rows_per_thread):
            row = row_of(launch, tile, m)
            held = [replace(row, place=place) for place in range(places)]
            if not (row.inside & reads(row, s.steps - 1)):
                for k in cutlass.range_constexpr(s.steps):
                    if not (row.inside & reads(row, k)):
                        for i in [i for i in self.inputs if s.staging[i] == "shared"]:
                            for place in cutlass.range_constexpr(places):
                                cute.autovec_copy(self.padded(i), self.slot(held[place], i, k))

    @cute.jit
    def arrive(self, row: Row, first: cutlass.Constexpr[int], vectors: Vectors):
        """Wait for vectors first .. first + part, move them to registers and, if persistent, refill their slots."""
        s, m = self.spec, row.m
        parts = -(-s.staged_steps // s.part)
        cute.arch.cp_async_wait_group(parts - 1 - (0 if const_expr(s.persistent) else first // s.part))
        for i in self.inputs:
            if const_expr(s.staging[i] == "async"):
                for k in cutlass.range_constexpr(first, min(first + s.part, s.steps)):
                    exists = vectors.pR[m] & vectors.pX[m, 0, k]
                    copy_if(exists, self.slot(row, i, k), vectors.rX[i][(None, m), 0, k])
        if const_expr(s.persistent):
            self.refill(row, first)

    @cute.jit
    def refill(self, row: Row, first: cutlass.Constexpr[int]):
        """Load what takes the place of vectors first .. first + part of a persistent kernel."""
        ctas, _, _ = cute.arch.grid_dim()
        later, coming = following(self.spec, first)
        tile = row.tile + ctas if const_expr(later > 0) else row.tile
        self.prefetch(row.launch, tile, coming, self.spec.part, Int32(0))

    @cute.jit
    def vector(self, row: Row, i: int, k: int, vectors: Vectors) -> cute.Tensor:
        """tXrX: vector k of an input that stays in shared memory, in registers."""
        tXrX = self.padded(i)
        if const_expr(self.spec.staging[i] == "shared" and not self.asks):
            cute.autovec_copy(self.slot(row, i, k), tXrX)
        else:
            copy_if(vectors.pR[row.m] & vectors.pX[row.m, 0, k], self.slot(row, i, k), tXrX)
        return tXrX

    def padded(self, i: int) -> cute.Tensor:
        """A vector in registers of what input i counts as where there is nothing."""
        tXrX = cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
        tXrX.fill(self.dtypes[i](self.padding[i]))
        return tXrX


@cute.jit
def copy_if(exists: Boolean, src: cute.Tensor, dst: cute.Tensor):
    """Move a vector from shared memory to registers if there is one."""
    if exists:
        cute.autovec_copy(src, dst)
