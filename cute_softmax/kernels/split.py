"""The split movement: CTAs of the whole GPU share a panel and meet in global memory, within one launch.

    ... -> fold -> merge (as in `panel`) -> hand over -> the last to arrive merges all parts -> finish -> store

See `meeting` for how nobody waits for ever, and `panel` for the names.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import meeting, reduce
from .panel import PanelKernel

LOADS = 8  # states of parts that a thread has on their way at a time


class SplitKernel(PanelKernel):
    """The kernel of one Plan class whose panels are cut into parts."""

    @cute.jit
    def meet(self, this, mine: tuple, first: Int32, end: Int32):
        """Merge with the other parts of the panel, then finish this one; without full outputs the last part to
        come ends the work and nobody waits."""
        s, words, sC = self.spec, this.words, this.sC
        ours = self.part_state(this, this.part)
        if this.tidx < s.columns:
            ours[this.tidx] = reduce.pack(mine)
        cute.arch.barrier()
        if this.tidx == 0:
            is_last = meeting.arrive(this.sync, this.parts)
            words[0] = Int32(is_last)  # whether the merged states are here
            words[1] = Int32(is_last)
        cute.arch.barrier()
        merged = self.part_state(this, this.parts)
        if words[1] != 0:
            self.merge_parts(this)
            if this.tidx < s.columns:
                merged[this.tidx] = sC[this.tidx, 0]
            cute.arch.barrier()
            if this.tidx == 0:
                meeting.announce(this.sync)
        else:
            if const_expr(len(self.math.outputs) > 0):
                if this.tidx == 0:
                    words[0] = Int32(meeting.wait(this.sync, this.part, this.patience))
                cute.arch.barrier()
                if (words[0] != 0) & (this.tidx < s.columns):
                    at = merged.iterator + this.tidx
                    sC[this.tidx, 0] = cute.arch.load(at, self.slot, sem="relaxed", scope="gpu")
                cute.arch.barrier()
        if words[0] != 0:
            states = [reduce.unpack(sC[this.a * s.slots + v, 0]) for v in range(s.slots)]
            if words[1] != 0:
                self.store_groups(this, states)
            if const_expr(len(self.math.outputs) > 0):
                self.write(this, first, end, states, loaded=True)
                self.rescue(this, states)

    @cute.jit
    def rescue(self, this, states):
        """The last to arrive finishes the parts whose CTAs did not wait."""
        words = this.words
        if words[1] != 0:
            cute.arch.barrier()
            if this.tidx == 0:
                words[0] = Int32(meeting.any_given_up(this.sync))
            cute.arch.barrier()
            if words[0] != 0:
                for part in cutlass.range(this.parts, unroll=1):
                    cute.arch.barrier()
                    if this.tidx == 0:
                        words[0] = Int32(meeting.take(this.sync, part))
                    cute.arch.barrier()
                    if words[0] != 0:
                        first, end = self.bounds(this, part)
                        self.write(this, first, end, states, loaded=False)

    def part_state(self, this, part: Int32) -> cute.Tensor:
        """The states of a part in global memory, one per column."""
        size = self.slot.width // 8
        at = this.states + Int64(part) * (self.spec.columns * size)
        pointer = cute.make_ptr(self.slot, at, cute.AddressSpace.gmem, assumed_align=size)
        return cute.make_tensor(pointer, cute.make_layout(max(self.spec.columns, 2)))

    @cute.jit
    def merge_parts(self, this):
        """Merge the states of all parts of the panel into sC[column, 0]; `readers` threads a column read those of
        every `readers`-th part, several at once."""
        s, sC = self.spec, this.sC
        numbers, whole = len(self.math.whole.identity), self.math.whole
        reader, column = this.tidx // s.columns, this.tidx % s.columns
        rS = cute.make_rmem_tensor(max(numbers, 2), Float32)
        for n in cutlass.range_constexpr(numbers):
            rS[n] = Float32(self.math.whole.identity[n])
        for first in cutlass.range(reader, this.parts, s.readers * LOADS, unroll=1):
            seen = []
            for k in cutlass.range_constexpr(LOADS):
                # Past the last part its state is read again; what does not count is replaced below.
                part = cutlass.min(first + k * s.readers, this.parts - 1)
                at = self.part_state(this, part).iterator + column
                seen.append(cute.arch.load(at, self.slot, sem="relaxed", scope="gpu"))
            states = [tuple(rS[n] for n in range(numbers))]
            for k in cutlass.range_constexpr(LOADS):
                exists = first + k * s.readers < this.parts
                state = zip(reduce.unpack(seen[k]), self.math.whole.identity, strict=True)
                states.append(tuple(Float32(cutlass.select_(exists, x, Float32(no))) for x, no in state))
            merged = self.math.whole.merge_all(states)
            for n in cutlass.range_constexpr(numbers):
                rS[n] = merged[n]
        if reader < s.readers:
            sC[column, reader] = reduce.pack(tuple(rS[n] for n in range(numbers)))
        cute.arch.barrier()
        theirs = whole.merge_all([reduce.unpack(sC[column, i]) for i in range(s.readers)])
        cute.arch.barrier()
        if this.tidx < s.columns:
            sC[this.tidx, 0] = reduce.pack(theirs)
        cute.arch.barrier()
