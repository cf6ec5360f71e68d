"""Scores that TMA cannot read as tiles: rows off 16-byte boundaries, or of float32.

A line is what a CTA needs of a row of S. It comes to shared memory by a bulk copy of its own: the whole 16 bytes around
it, so that it begins there as it does in global memory, somewhere within the first 16 bytes. Where a line of dS begins
as that of S it takes its place and is sent by a bulk copy, too, but for the elements at its ends that share 16 bytes
with others; elsewhere dS goes out element by element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.copy import global_pointer
from ..common.index import dot
from ..common.tensor_cores import WARPGROUP
from .backward_values import SLAB


class ScoreLines:
    """What `MatmulBackwardKernel` does where its class has `lines`."""

    @cute.jit
    def write_lines(
        self,
        this,
        tile,
        rS,
        tid: Int32,
        slab: Int32,
        share: Int32,
        m: Int32,
        column: Int32,
        pair: Int32,
        before: Int32,
        where: tuple,
    ):
        """dS to global memory: from the place of S, or straight. where: (column block, head, batch modes)."""
        s = self.spec
        n, head, batch = where
        if const_expr(s.sent):
            if const_expr(s.shares > 1):
                self.sync_slab(slab)  # the other warpgroups of the slab have read S, too
            if share == 0:
                in_tile = column - n * s.columns
                self.store_in_lines(this, tile, rS, in_tile, pair, m, n, head, batch)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1 + slab, number_of_threads=WARPGROUP)
                self.send_lines(this, tile, tid, slab, m, n, head, batch)
            cute.arch.cp_async_bulk_commit_group()
            # dS of the step before must have left.
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            self.leave(this, before)
        else:
            if share == 0:
                self.store_lines(this, rS, m, column, pair, head, batch)

    @cute.jit
    def leave(self, this, stage: Int32):
        """A thread is done with a stage, if there is one. Each says so itself: racecheck follows bulk copies without a
        tensor map, but not a thread that speaks for its warp."""
        if stage >= 0:
            cute.arch.mbarrier_arrive(this.empty + stage)

    @cute.jit
    def load_lines(
        self,
        this,
        bar,
        stage: Int32,
        m: Int32,
        n: Int32,
        head: Int32,
        batch: tuple,
        lane: Int32,
        worker: Int32,
    ):
        """S line by line: the whole 16 bytes around a line's columns, wherever they begin; a lane loads a line."""
        s = self.spec
        item = self.dtype.width // 8
        share = s.rows // s.producers
        columns = cutlass.min(this.N - n * s.columns, s.columns)
        row = worker * share + lane
        start = self.line(this, this.S, m * s.rows + row, n, head, batch)
        end = (start + columns * item + 15) // 16 * 16
        inside = (lane < share) & (m * s.rows + row < this.M)
        size = Int32(cutlass.select_(inside, Int32(end - start // 16 * 16), 0))
        # Numbers of rows and dO report to the same barrier.
        first = (worker == 0) & (lane == 0)
        others = Int32(cutlass.select_(first, s.step_bytes - s.score_bytes, 0))
        cute.arch.mbarrier_arrive_and_expect_tx(bar, size + others)
        if size > 0:
            to = this.rawS + stage * s.score_elements + row * s.pitch
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[Int32(to.toint()), start // 16 * 16, size, Int32(bar.toint())],
            )

    def line(self, this, operand: tuple, row: Int32, n: Int32, head: Int32, batch: tuple) -> Int64:
        """The address of S or dS at a row and the first column of a tile."""
        address, *strides = operand
        begin = dot([row, head, *batch], strides) + n * self.spec.columns
        return address + begin * (self.dtype.width // 8)

    def load_from_lines(
        self, this, tile, rS, in_tile: Int32, pair: Int32, m: Int32, n: Int32, head: Int32, batch: tuple
    ):
        """`load_scores` from lines that begin somewhere within their first 16 bytes."""
        places = self.places(this, tile, in_tile, pair, m, n, head, batch)
        for i, _, _, _ in self.each():
            rS[i] = places[i][0]

    def store_in_lines(
        self, this, tile, rS, in_tile: Int32, pair: Int32, m: Int32, n: Int32, head: Int32, batch: tuple
    ):
        """dS^T to where `load_from_lines` has found S^T."""
        places = self.places(this, tile, in_tile, pair, m, n, head, batch)
        for i, _, _, _ in self.each():
            places[i][0] = rS[i]

    def places(
        self, this, tile, in_tile: Int32, pair: Int32, m: Int32, n: Int32, head: Int32, batch: tuple
    ) -> list[cute.Tensor]:
        """This thread's elements of the lines in shared memory."""
        item = self.dtype.width // 8
        # What an address is within 16 bytes needs no more than 32 bits, and repeats every 8 rows.
        first = Int32(self.line(this, this.S, m * self.spec.rows, n, head, batch) & 15)
        step = Int32(this.S[1] & 15) * item
        begins = []
        for k in range(2):
            row = pair + k
            shift = (first + row * step) & 15
            begins.append(tile.toint() + row * (self.spec.pitch * item) + shift + in_tile * item)
        found = []
        for _, j, k, h in self.each():
            address = begins[k] + 8 * (j * self.spec.pitch + h) * item
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=item)
            found.append(cute.make_tensor(pointer, cute.make_layout(1)))
        return found

    @cute.jit
    def send_lines(self, this, tile, tid: Int32, slab: Int32, m: Int32, n: Int32, head: Int32, batch: tuple):
        """The slab's part of each line from shared to global memory. One thread sends the whole 16 bytes of a part and
        stores the elements before them, another those behind; all warps share them, as a warp starts its copies one
        after another."""
        s = self.spec
        item = self.dtype.width // 8
        share, lane = s.rows // 4, tid % 32
        row, end = tid // 32 * share + lane % share, lane // share
        count = cutlass.min(this.N - n * s.columns - slab * SLAB, SLAB)
        if (m * s.rows + row < this.M) & (count > 0) & (end < 2):
            begin = self.line(this, this.dS, m * s.rows + row, n, head, batch)
            source = tile.toint() + row * (s.pitch * item) + Int32(begin & 15) + slab * (SLAB * item)
            begin += slab * (SLAB * item)
            before = cutlass.min(Int32(-begin & 15) // item, count)
            whole = (count - before) * item // 16 * 16
            behind = before + whole // item
            if (end == 0) & (whole > 0):
                cute.arch.inline_ptx(
                    "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                    read_only_args=[begin + before * item, Int32(source + before * item), whole],
                )
            first = Int32(cutlass.select_(end == 0, Int32(0), behind))
            last = Int32(cutlass.select_(end == 0, before, count))
            for i in cutlass.range_constexpr(16 // item - 1):
                if first + i < last:
                    place = (first + i) * item
                    held = cute.make_ptr(
                        self.dtype, source + place, cute.AddressSpace.smem, assumed_align=item
                    )
                    to = cute.make_ptr(self.dtype, begin + place, cute.AddressSpace.gmem, assumed_align=item)
                    one = cute.make_layout(1)
                    cute.make_tensor(to, one)[0] = cute.make_tensor(held, one)[0]

    @cute.jit
    def store_lines(self, this, rS, m: Int32, column: Int32, pair: Int32, head: Int32, batch: tuple):
        """dS^T straight to global memory, element by element."""
        address, *strides = this.dS
        for i, j, k, h in self.each():
            row = m * self.spec.rows + 8 * j + pair + k
            if (row < this.M) & (column + 8 * h < this.N):
                begin = dot([row, head, *batch], strides) + (column + 8 * h)
                pointer = global_pointer(self.dtype, address, begin, self.dtype.width // 8)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = rS[i]

    @cute.jit
    def clear_lines(self, this, m: Int32, n: Int32, head: Int32, batch: tuple, lane: Int32):
        """Zeros into a tile of dS, element by element; by one warp."""
        s = self.spec
        item = self.dtype.width // 8
        rows = cutlass.min(this.M - m * s.rows, s.rows)
        columns = cutlass.min(this.N - n * s.columns, s.columns)
        for row in cutlass.range(rows, unroll=1):
            begin = self.line(this, this.dS, m * s.rows + row, n, head, batch)
            for column in cutlass.range(lane, columns, 32, unroll=1):
                to = cute.make_ptr(
                    self.dtype, begin + column * item, cute.AddressSpace.gmem, assumed_align=item
                )
                cute.make_tensor(to, cute.make_layout(1))[0] = self.dtype(0.0)
