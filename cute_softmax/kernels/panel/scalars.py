"""What panels load and store an element at a time: the edges of rows, and the results that a group has one of."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...plan import PanelClass
from ..maths.maths import RowMath
from .scores import Scores
from .work import Item, Launch, edge


class Scalars:
    """rE: per input, the scalars at the edges of a row that a thread has; none in a class without edges."""

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec, self.math, self.scores = spec, math, Scores(spec, math)
        self.inputs = range(len(math.inputs))
        self.group_outputs = range(len(spec.dtypes) - len(math.group_outputs), len(spec.dtypes))

    def none(self, launch: Launch) -> list[cute.Tensor]:
        """Registers for the scalars, padding in all of them."""
        inputs = self.inputs if self.spec.edges else ()
        rE = [cute.make_rmem_tensor(self.spec.edge_scalars, launch.mX[i].dtype) for i in inputs]
        for i in inputs:
            rE[i].fill(launch.mX[i].dtype(self.math.padding[i]))
        return rE

    @cute.jit
    def load(self, item: Item, rE: list):
        """Load the scalars; padding where there are none."""
        mX = item.launch.mX
        for e in cutlass.range_constexpr(self.spec.edge_scalars):
            at, exists = edge(item, e)
            for i in self.inputs:
                scalars = rE[i]
                scalars[e] = mX[i].dtype(self.math.padding[i])
                # One beside a row may be all that there is.
                apart = at * mX[i].reduced[0] if const_expr(i in self.spec.facts.beside) else at
                gE = mX[i].element(item.starts[i] + apart)
                if exists:
                    scalars[e] = gE[0]

    def loaded(self, item: Item) -> list[cute.Tensor]:
        """The scalars, in registers of their own."""
        rE = self.none(item.launch)
        self.load(item, rE)
        return rE

    @cute.jit
    def finish(self, item: Item, rE: list, states: list, merged: Int32 | int = 1):
        """Compute and store the results of the scalars, and those that a group has one of, if the states are there."""
        scores, i = self.scores, len(self.inputs)
        mY = item.launch.mX[i]
        for e in cutlass.range_constexpr(self.spec.edge_scalars):
            at, exists = edge(item, e)
            elements = scores.scalar(item, [x[e] for x in rE], at, exists)
            result = scores.result(item, elements, states, 0)
            gE = mY.element(item.starts[i] + at)
            if exists & (merged != 0):
                gE[0] = result.to(mY.dtype)
        self.store_groups(item, states, (merged != 0) & (item.part == 0))

    def store_groups(self, item: Item, states: list, wanted: Boolean | bool = True):
        """Store the results that a group has one of, if they are wanted. states: per slot that of the whole group."""
        if self.group_outputs:
            sinks = zip(item.numbers.sink) if self.spec.prologue.sink else [()] * len(states)
            results = [self.math.group_results(state, *n) for state, n in zip(states, sinks, strict=True)]
            self.store_each(item, results, wanted)

    @cute.jit
    def store_each(self, item: Item, results: list, wanted: Boolean | bool):
        launch, line = item.launch, item.line
        if (launch.d == 0) & item.inside & (launch.rank == 0) & wanted:
            for v in cutlass.range_constexpr(self.spec.slots):
                if const_expr(self.spec.aligned):
                    place = launch.a * self.spec.slots + v - item.shift
                    if (v < line.beside) & (place >= 0) & (place < launch.spacing):
                        self.store_group(item, v, results[v])
                elif const_expr(self.spec.shifted):
                    if v < line.beside:
                        self.store_group(item, v, results[v])
                else:
                    self.store_group(item, v, results[v])

    def store_group(self, item: Item, v: int, results: list[Float32]):
        """Store the results of the group in slot v."""
        for i, result in zip(self.group_outputs, results, strict=True):
            mX = item.launch.mX[i]
            mX.element(item.starts[i] + v * mX.kept[0])[0] = result.to(mX.dtype)
