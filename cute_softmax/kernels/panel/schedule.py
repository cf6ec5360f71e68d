"""The order in which a CTA does its work: whole panels that it holds. `stream` and `ahead` have the others."""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...plan import PanelClass
from ..maths.maths import RowMath
from .abreast import AbreastChunks
from .aligned import AlignedChunks
from .chunks import Chunks
from .merge import Merge
from .parts import Parts
from .scalars import Scalars
from .shift import ShiftedChunks
from .work import Item, chunk_at


def kind_of_chunks(spec: PanelClass) -> type[Chunks]:
    """How chunks of a class reach the threads."""
    if spec.rows_abreast > 1:
        return AbreastChunks
    if spec.shifted:
        return AlignedChunks if spec.aligned else ShiftedChunks
    return Chunks


class Schedule:
    """The parts of a kernel that every order of work is made of."""

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec, self.math = spec, math
        self.chunks = kind_of_chunks(spec)(spec, math)
        self.scalars = Scalars(spec, math)
        self.scores = self.scalars.scores
        self.merge = Merge(spec, math)
        self.parts = Parts(spec, math, self.chunks, self.scalars, self.merge)


class Whole(Schedule):
    """One item a CTA, which it holds."""

    @cute.jit
    def run(self, begun: Item):
        """The item of a CTA, from loading to storing."""
        s, launch, outputs = self.spec, begun.launch, len(self.math.outputs) > 0
        item = self.scores.known(begun)
        self.chunks.fetch(launch, chunk_at(item, item.first), Int32(0), launch.policies.once)
        rE = self.scalars.loaded(item)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        self.chunks.align(item, item.first, Int32(0))
        mine, states = self.merge.reduce(
            item, lambda stage, carry: self.chunks.fold(item, stage, carry, item.first, 0, rE)
        )
        if const_expr(s.cluster_n > 1):
            mine = self.merge.across_cluster(item, mine)
        if const_expr(s.exchange and outputs):
            given_up = self.parts.hand_over(item, mine)
            if self.parts.collect(item, launch.patience) != 0:
                whole = self.scores.joined(item, self.merge.of_slots(item))
                self.chunks.finish(item, item.first, Int32(0), whole)
                self.scalars.finish(item, rE, whole)
            self.parts.rescue(launch, item.index, given_up)
        elif const_expr(s.exchange):
            self.parts.conclude(item, mine)
        else:
            if const_expr(s.down > 1):
                states = self.merge.spread(item, mine)
            states = self.scores.joined(item, states)
            if const_expr(outputs):
                self.chunks.finish(item, item.first, Int32(0), states)
                self.scalars.finish(item, rE, states)
            else:
                self.scalars.store_groups(item, states)
