"""What rows load and store by the element: their edges, what they have one element of, and what an index chooses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..plan import RowClass
from . import indices
from .common.copy import DTYPES, load_if
from .common.index import dot, select
from .maths.maths import RowMath
from .maths.scores import NOTHING, factored, floats, score_of
from .row_work import Launch, Row, edge, row_of, speaks

# Columns of what is not in a whole row that ranks share, or not in this rank's slice of it.
NOWHERE, ELSEWHERE = -2, -1


@dataclass(frozen=True)
class Edges:
    """The scalars at the edges of a thread's rows: rE of each full operand, (E, M); and by (e, m) which columns they
    are, whether they exist, pE, and whether they count."""

    rE: list[cute.Tensor]
    pE: cute.Tensor
    columns: dict[tuple[int, int], Int32]
    counted: dict[tuple[int, int], Boolean]


@dataclass(frozen=True)
class Chosen:
    """What an index chooses in a row: the score, and whether the row has such an element."""

    score: Float32
    exists: Boolean


class Scalars:
    """selects: whether an index chooses a score, which the first thread of a row looks at, and the one that owns it if
    there is a result apart for it (`marks`); group_names: the tensors of one element per group that all threads of a
    row look at; absent: the column of an index that no element of the row has."""

    def __init__(self, spec: RowClass, math: RowMath):
        self.spec, self.math = spec, math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        full = len(math.inputs) + len(math.outputs)
        self.inputs, self.full = range(len(math.inputs)), range(full)
        self.group_inputs = {name: full + i for i, name in enumerate(math.group_inputs)}
        self.marks = bool(spec.prologue.target) and len(math.outputs) > 0
        self.absent = NOWHERE if spec.prologue.ranks else -1
        self.selects = "index" in math.group_inputs and "found" not in math.group_inputs
        self.group_names = [name for name in math.group_inputs if self.marks or name != "index"]

    def element(self, row: Row, i: int, column: Int32) -> cute.Tensor:
        """gX: an element of a row of operand i in global memory; column 0 for what has one for the row."""
        mX = row.launch.mX[i]
        return mX.element(dot(row.at, mX.kept) + column)

    @cute.jit
    def load_edges(self, rows: list[Row], ones: dict) -> Edges:
        """Load the scalars at the edges of rows, over padding. ones: see `row.Vectors`."""
        s = self.spec
        M, E = s.rows_per_thread, s.edge_scalars
        rE = [cute.make_rmem_tensor((max(E, 1), M), self.dtypes[i]) for i in self.full]
        pE = cute.make_rmem_tensor((max(E, 1), M), Boolean)
        columns, counted = {}, {}
        for m in cutlass.range_constexpr(M):
            for e in cutlass.range_constexpr(E):
                columns[e, m], pE[e, m] = edge(rows[m], e)
                counted[e, m] = pE[e, m]
                if const_expr(s.prologue.causal):
                    counted[e, m] = pE[e, m] & (columns[e, m] < rows[m].reach)
                for i in self.inputs:
                    rE[i][e, m] = self.dtypes[i](self.math.padding[i])
                    gE = self.element(rows[m], i, columns[e, m])
                    if counted[e, m]:
                        rE[i][e, m] = ones[i, m] if const_expr(s.access[i] == 0) else gE[0]
        return Edges(rE, pE, columns, counted)

    @cute.jit
    def one(self, row: Row, i: int, offset: Int32):
        """The one element that operand i has for a row; 0 outside of them.

        offset: 0. Multiplied by the lane, ptxas does not see that all lanes have the same address: it would move what
        they load into a uniform register, and wait for it in the midst of the loads of the row.
        """
        held = cute.make_rmem_tensor(1, self.dtypes[i])
        held[0] = self.dtypes[i](0)
        gX = self.element(row, i, offset)
        if row.inside:
            held[0] = gX[0]
        return held[0]

    def of_groups(self, launch: Launch, tile: Int64) -> list[list]:
        """`of_group` of this thread's rows of a tile."""
        return [self.of_group(row_of(launch, tile, m)) for m in range(self.spec.rows_per_thread)]

    def of_group(self, row: Row) -> list:
        """What the tensors of one element per group have for a row, as the math takes it."""
        return self.known(row.launch, self.loaded(row))

    def loaded(self, row: Row) -> list:
        """The elements themselves. Who keeps these, and asks for what is `known` later, does not wait for them."""
        launch = row.launch
        return [
            self.one(row, self.group_inputs[name], launch.lane * launch.zero) for name in self.group_names
        ]

    def known(self, launch: Launch, loaded: list) -> list:
        """Numbers in float32; of an index the column, `absent` where no element has it."""
        return [
            self.column(launch, value) if name == "index" else value.to(Float32)
            for name, value in zip(self.group_names, loaded, strict=True)
        ]

    def column(self, launch: Launch, index: Int64) -> Int32:
        """Where an index of a row lies in it."""
        place = index
        if self.spec.prologue.ranks:
            place = index - launch.numbers["start"]
            here = (place >= 0) & (place < launch.columns)
            place = select(here, place, Int64(ELSEWHERE))
        return Int32(select(self.counts(launch, index), place, Int64(self.absent)))

    def counts(self, launch: Launch, index: Int64) -> Boolean:
        """Whether an index is that of an element of the row, see `indices.counts`."""
        return indices.counts(self.spec.prologue, launch, index)

    def numbers(self, launch: Launch, of_group: list) -> dict[str, Float32]:
        """What a row has one of, in all of its threads."""
        found = floats(self.spec.prologue, launch.numbers)
        found |= dict(zip(self.group_names, of_group, strict=True))
        if self.marks and self.spec.prologue.target == "loss":  # of a row that is ignored nothing counts
            found["alpha"] = select(found["index"] > self.absent, found["alpha"], Float32(0.0))
        return factored(self.spec.prologue, found)

    def owns(self, row: Row, column: Int32, edges: Edges) -> Boolean:
        """Whether this thread stores an element of a row."""
        s, m = self.spec, row.m
        place = column - row.head - row.launch.first
        mine = (place >= 0) & (place < row.limit) & (place // s.vector % s.threads_per_row == row.launch.lane)
        mine = mine & row.inside
        for e in range(s.edge_scalars):
            mine = mine | (edges.pE[e, m] & (edges.columns[e, m] == column))
        return mine

    def chosen(self, row: Row, target: Int32 | None, owned: Boolean | None) -> Chosen:
        """What "index" chooses, in the first thread of a row and, if there is a result apart for it, in the one that
        owns it; of a row without such an element the score is another's, and `store_groups` complains.

        target: the column, -1 for none, where all threads of the row have it."""
        launch, wanted = row.launch, speaks(row)
        if owned is None:
            index = load_if(wanted, self.index(row))
            if self.spec.prologue.state:
                index = index - launch.numbers["start"]
            exists = self.counts(launch, index)
            column = Int32(select(exists, index, Int64(0)))
        else:
            wanted, exists = wanted | owned, target >= 0
            column = select(exists, target, Int32(0))
        score = self.score_at(row, wanted, column)
        if self.spec.prologue.state:  # another part of the row may have it
            score = select(exists, score, Float32(NOTHING))
        return Chosen(score, exists)

    def score_at(self, row: Row, wanted: Boolean, column: Int32) -> Float32:
        """The score of a column of a row, in threads that want it."""
        return self.score_of(row, load_if(wanted, self.element(row, 0, column)))

    def score_of(self, row: Row, element: cutlass.Numeric) -> Float32:
        """The score of an element of a row."""
        p, numbers = self.spec.prologue, {}
        if p.scale or p.softcap:
            numbers = self.numbers(row.launch, self.of_group(row))
        return score_of(element.to(Float32), numbers.get("scale"), cap=numbers.get("softcap"))

    def target(self, row: Row, column: Int32) -> tuple[cutlass.Numeric, Boolean]:
        """The element of the target, loaded and not yet looked at, and whether it is in this rank's slice."""
        here = row.inside & (column >= 0)
        return load_if(here, self.element(row, 0, select(here, column, Int32(0)))), here

    def score(self, row: Row, element: cutlass.Numeric, here: Boolean) -> Float32:
        """The score of the `target`, -inf where it is not in this rank's slice."""
        return select(here, self.score_of(row, element), Float32(NOTHING))

    def index(self, row: Row) -> cute.Tensor:
        """gX: the index of a row."""
        return self.element(row, self.group_inputs["index"], Int32(0))

    @cute.jit
    def store_edges(self, row: Row, i: int, results: Iterator[Float32], edges: Edges):
        """Store what is left of the results of a row, those of the scalars at its edges."""
        for e in cutlass.range_constexpr(self.spec.edge_scalars):
            value = next(results).to(self.dtypes[i])
            gE = self.element(row, i, edges.columns[e, row.m])
            if edges.pE[e, row.m]:
                gE[0] = value

    @cute.jit
    def store_target(self, row: Row, column: Int32, owned: Boolean, result: Callable):
        """Store the result at the row's target, by the thread that has stored another there."""
        i = len(self.inputs)
        gY = self.element(row, i, column)
        if owned:
            gY[0] = result().to(self.dtypes[i])

    @cute.jit
    def store_groups(self, row: Row, results: Callable, chosen: Chosen | None):
        """Store what becomes of the state of a row, which all of its threads know."""
        first = speaks(row)
        outputs = range(len(self.full) + len(self.group_inputs), len(self.dtypes))
        gX = [self.element(row, i, Int32(0)) for i in outputs]
        if first:
            numbers = results()
            if const_expr(self.spec.prologue.target == "loss"):
                numbers[0] = select(chosen.exists, numbers[0], Float32(0.0))
            for j in cutlass.range_constexpr(len(gX)):
                gX[j][0] = numbers[j].to(gX[j].element_type)
            if const_expr(chosen is not None and not self.spec.prologue.state):
                # Behind all else: behind a trap the compiler would put a copy of what follows it.
                self.complain(row, chosen)

    @cute.jit
    def complain(self, row: Row, chosen: Chosen):
        """Stop the kernel at an index that is out of range, unless that is how rows are ignored. It is loaded again:
        kept until here, it would take two registers of every thread."""
        index = load_if(chosen.exists ^ True, self.index(row))
        indices.complain(self.spec.prologue, row.launch, index, row.index, chosen.exists)
