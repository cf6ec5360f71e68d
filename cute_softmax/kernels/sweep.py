"""The sweep movement: columns of any length in two passes over memory, the first for their states, the second for their
results. Nothing is held in between, but for what L2 does.

One or more rows of memory that follow each other are a *line*: so many that lines are whole vectors and begin alike,
which a row of an odd number of columns does not. A thread has the same vector of each line of its part, and so the same
columns: there is nothing to exchange before a part has ended.

    rows of 3, vectors of 4 | a b c a | b c a b | c a b c |        a line of 4 rows
                            | a b c a | b c a b | c a b c |        the next
                            | a b c a | b c . .                    the rest

    coordinates -> load -> absorb -> publish | gather -> merge -> store | load again -> finish -> store

The bars are the ends of kernels, which one call launches: `statistics`, `merge` and `results`. CTAs that run together
are neighbours in memory, too: panels of the same lines. In the second pass the last lines of all parts come first, as
L2 still has them.

A column has a state for each part of its panel, times the rows of a line: in memory they are rows of columns once more.

A bias or a mask has one element for a row of memory. A vector lies in one row, or ends in the next.
"""

from collections.abc import Sequence
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from layouts.trace import observe

from ..plan.sweep import LOADS, MERGED, MERGERS, TURNS, SweepClass
from .common.copy import (
    DTYPES,
    PACKED_MAX,
    element,
    global_tensors,
    in_global,
    load,
    pack,
    packed_maxima,
    policy,
    store,
    unpack,
)
from .common.early import begins_early, wait_for_stream
from .common.index import ceil_div, larger, select, smaller, wide
from .common.reduce import tree
from .maths.maths import RowMath
from .maths.scores import NOTHING, floats, score_of
from .maths.slots import absorb, nothing
from .sweep_work import Item, Launch, item_of, state_at, turn_of


def leave_out(rX: cute.Tensor, rM: cute.Tensor, here: Int32 | None, rP: cute.Tensor) -> None:
    """Put padding, rP, in the place of a vector's elements whose row a mask leaves out, word by word. rM: what the mask
    has for the rows of `here`, see `Item`."""
    words, padding = (cute.recast_tensor(r, Uint32) for r in (rX, rP))
    every, width = Uint32(0xFFFFFFFF), rX.element_type.width
    first, *second = (select(rM[r] != 0, Uint32(0), every) for r in range(cute.size(rM)))
    for j in range(cute.size(words)):
        out = first
        if here is not None:
            behind = Uint32(0)  # bits of the elements in the second row
            for e in range(32 // width):
                bits = Uint32((1 << width) - 1 << width * e)
                behind = behind | select(32 // width * j + e < here, Uint32(0), bits)
            out = (first & (behind ^ every)) | (second[0] & behind)
        words[j] = (words[j] & (out ^ every)) | (padding[j] & out)


class SweepKernel:
    """The kernels of one Plan class, see `cute_softmax.plan.sweep.SweepClass`.

    math: a row math of `maths`; its element functions are used.
    """

    def __init__(self, spec: SweepClass, math: RowMath):
        self.spec, self.math = spec, math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.inputs, self.numbers = range(len(math.inputs)), len(math.whole.identity)
        # Those that lie beside the elements come last.
        self.beside = spec.facts.beside
        self.vectors = self.inputs[: len(self.inputs) - len(self.beside)]
        # Of a mask alone elements are their scores, if they are not left out.
        self.scored = bool(self.beside) and not math.plain
        self.words = spec.state_bytes // 4  # of a state in memory, where three numbers take the room of four
        # What is read again had better stay in L2.
        self.hint = "evict_last" if math.outputs else "evict_normal"

    @cute.jit
    def __call__(
        self,
        stream,
        outer: Int32,
        columns: Int32,
        abreast: Int32,
        lines: Int32,
        rest: Int32,
        panels: Int32,
        parts: Int32,
        share: Int32,
        found: Int64,
        scratch: Int64,
        *operands: Int64,
    ):
        """Launch all kernels.

        outer: matrices; columns: of each; abreast: rows of a line; lines: whole ones; rest: elements of the one behind
        them; panels: of a line; parts: of the lines; share: lines of a part; found: bytes from the address of the
        scratch memory to the states of columns; operands: the numbers of the prologue (by their bits), then of each
        operand the address and two strides, see `SweepPlan`.
        """
        s = self.spec
        numbers = (columns, abreast, lines, rest, panels, parts, share, scratch, scratch + found)
        passes = {
            "stream": stream,
            "block": [s.threads, 1, 1],
            "min_blocks_per_mp": s.min_blocks,
            "preferred_smem_carveout": -1,
        }
        ctas = outer * panels * parts
        grid = [ctas, 1, 1]
        self.statistics(numbers, operands).launch(grid=grid, use_pdl=begins_early(s, grid), **passes)
        grid = [outer * ceil_div(columns, MERGED), 1, 1]
        self.merge(numbers, operands).launch(
            grid=grid, block=[MERGERS, 1, 1], stream=stream, use_pdl=begins_early(s, grid)
        )
        if const_expr(len(self.math.outputs) > 0):
            grid = [ctas * TURNS, 1, 1]
            self.results(numbers, operands).launch(grid=grid, use_pdl=begins_early(s, grid), **passes)

    def launch_of(self, numbers: tuple, operands: tuple) -> Launch:
        """What a thread knows of its launch."""
        prologue, names = self.spec.prologue, self.spec.prologue.numbers
        given = floats(prologue, dict(zip(names, operands[: len(names)], strict=True)))
        return Launch(*numbers, given, global_tensors(self.dtypes, operands[len(names) :], 1, 1))

    def thread_column(self) -> Int32:
        """A thread's first column of a panel."""
        s, (tidx, _, _) = self.spec, cute.arch.thread_idx()
        tv = cute.make_layout(s.tv.shape, stride=s.tv.stride)
        observe("tv", tv)
        return cute.crd2idx((tidx, 0), tv) // s.steps

    # The first pass.

    @cute.kernel
    def statistics(self, numbers: tuple, operands: tuple):
        """The states of the columns of a part."""
        cta, _, _ = cute.arch.block_idx()
        launch = self.launch_of(numbers, operands)
        item = item_of(launch, cta, self.spec.columns, self.thread_column())
        wait_for_stream(self.spec.early)
        self.take(self.absorb_part, launch, item)

    @cute.jit
    def take(self, work: cutlass.Constexpr, launch: Launch, item: Item):
        """Do the work of an item. Where no vector of a warp ends in another row of memory than it begins in, which is
        rare in rows that are long, what is beside the elements needs no choice between two."""
        there, apart = item.column < launch.width, Boolean(True)
        if const_expr(len(self.beside) > 0):
            one = (item.here >= self.spec.vector) | (item.column >= launch.width)
            apart = not cute.arch.vote_all_sync(one)
            if there & (not apart):
                work(launch, replace(item, here=None))
        if there & apart:
            work(launch, item)

    @cute.jit
    def absorb_part(self, launch: Launch, item: Item):
        """Store the states of a thread's columns in a part."""
        self.publish(launch, item, self.absorbed(launch, item))

    @cute.jit
    def absorbed(self, launch: Launch, item: Item) -> cute.Tensor:
        """rS: the states of a thread's columns, (number, column)."""
        s, hint = self.spec, policy(self.hint)
        rS = nothing(self.math, s.vector, self.words)
        batches = larger(item.end - item.first, 0) // s.steps
        for b in cutlass.range(batches, unroll=1):
            lines = self.loaded(launch, item, item.first + b * s.steps, hint)
            self.absorb(rS, [self.elements(launch, item, vectors) for vectors in lines], lines)
        line = item.first + batches * s.steps
        if line < item.end:
            lines = self.padded(self.loaded(launch, item, line, hint, item.end), line, item.end)
            elements = [
                self.elements(launch, item, x, [line + u < item.end] * s.vector) for u, x in enumerate(lines)
            ]
            self.absorb(rS, elements, lines)
        if item.last & (item.column < launch.rest):
            vectors = self.rest(launch, item)
            exist = [item.column + v < launch.rest for v in range(s.vector)]
            self.absorb(rS, [self.elements(launch, item, vectors, exist)], [vectors])
        return rS

    def elements(
        self,
        launch: Launch,
        item: Item,
        vectors: Sequence[cute.Tensor],
        exist: Sequence[Boolean] | None = None,
    ) -> list[tuple[Float32, ...]]:
        """What the math takes of a vector of each input: an element of each. exist: whether there are these
        elements, or padding."""
        if self.scored:
            return list(zip(self.scores(launch, item, *vectors, exist=exist)))
        if self.beside:  # a mask alone
            leave_out(*vectors, item.here, self.padding(0))
            vectors = vectors[:1]
        found = zip(*map(unpack, vectors), strict=True)
        if self.beside or not self.spec.prologue:
            return list(found)
        scale, exist = launch.numbers.get("scale"), exist or [None] * self.spec.vector
        return [self.math.elements(e, scale, exists) for e, exists in zip(found, exist, strict=True)]

    def scores(
        self,
        launch: Launch,
        item: Item,
        rX: cute.Tensor,
        *beside: cute.Tensor,
        exist: Sequence[Boolean] | None,
    ) -> list[Float32]:
        """The scores of a vector's elements. Those that are left out are 0 times the scale, and -inf is added."""
        given = dict(zip(self.math.names[1:], beside, strict=True))
        added = [Float32(0.0)] * cute.size(beside[0])
        if "bias" in given:
            added = [given["bias"][r].to(Float32) for r in range(len(added))]
        if "mask" in given:
            leave_out(rX, given["mask"], item.here, self.padding(0))
            added = [select(given["mask"][r] != 0, b, Float32(NOTHING)) for r, b in enumerate(added)]
        columns = range(self.spec.vector)
        added = [added[0] if item.here is None else select(v < item.here, *added) for v in columns]
        if exist is not None:
            added = [select(exists, b, Float32(NOTHING)) for exists, b in zip(exist, added, strict=True)]
        scale = launch.numbers.get("scale")
        return [score_of(x, scale, b) for x, b in zip(unpack(rX), added, strict=True)]

    def of_rows(self, launch: Launch, item: Item, i: int, line: Int32) -> cute.Tensor:
        """rX: what operand i has for the row in which a vector of a line begins, and for that in which it ends."""
        mX = launch.mX[i]
        places = [item.matrix * mX.kept[0] + (line * launch.abreast + item.row) * mX.reduced[0]]
        if item.here is not None:
            places.append(places[0] + select(item.here < self.spec.vector, mX.reduced[0], Int64(0)))
        rX = cute.make_rmem_tensor(len(places), mX.dtype)
        for r, at in enumerate(places):
            rX[r] = mX.element(at)[0]
        return rX

    def vector(self, launch: Launch, item: Item, i: int, line: Int32) -> cute.Tensor:
        """gX: this thread's vector of a line of operand i."""
        mX = launch.mX[i]
        at = item.matrix * mX.kept[0] + line * mX.reduced[0] + item.column
        return in_global(mX.dtype, mX.address, at, self.spec.vector)

    def loaded(
        self, launch: Launch, item: Item, line: Int32, hint: Int64, end: Int32 | None = None
    ) -> list[list[cute.Tensor]]:
        """Per line, `steps` of them from one on, the vectors rX of all inputs; from `end` on the line before it."""
        found = []
        for u in range(self.spec.steps):
            at = line + u if end is None else smaller(line + u, end - 1)
            vectors = [cute.make_rmem_tensor(self.spec.vector, self.dtypes[i]) for i in self.vectors]
            for i, rX in enumerate(vectors):
                load(self.vector(launch, item, i, at), rX, self.spec.vector, hint)
            found.append([*vectors, *[self.of_rows(launch, item, i, at) for i in self.beside]])
        return found

    def padded(self, lines: list[list[cute.Tensor]], line: Int32, end: Int32) -> list[list[cute.Tensor]]:
        """Such lines from one on, those from `end` on with what stands for nothing."""
        for u, vectors in enumerate(lines):
            for i, rX in enumerate(vectors[: len(self.vectors)]):
                words, padding = (cute.recast_tensor(r, Uint32) for r in (rX, self.padding(i)))
                for j in range(cute.size(words)):
                    words[j] = select(line + u < end, words[j], padding[j])
        return lines

    def padding(self, i: int) -> cute.Tensor:
        """A vector of what stands for elements of input i that do not exist."""
        rP = cute.make_rmem_tensor(self.spec.vector, self.dtypes[i])
        rP.fill(self.dtypes[i](0.0 if self.scored else self.math.padding[i]))
        return rP

    @cute.jit
    def rest(self, launch: Launch, item: Item) -> list[cute.Tensor]:
        """The vectors of the line behind the whole ones, padded where there is nothing."""
        V, found = self.spec.vector, []
        for i in cutlass.range_constexpr(len(self.vectors)):
            gX, rX = self.vector(launch, item, i, launch.lines), self.padding(i)
            if item.column + V <= launch.rest:
                cute.autovec_copy(gX, rX)
            else:
                for v in cutlass.range_constexpr(V):
                    if item.column + v < launch.rest:
                        rX[v] = gX[v]
            found.append(rX)
        if const_expr(item.here is not None):
            # A row that would begin behind the last element is not there.
            there = launch.rest - item.column > item.here
            item = replace(item, here=select(there, item.here, Int32(V)))
        return found + [self.of_rows(launch, item, i, launch.lines) for i in self.beside]

    def absorb(
        self, rS: cute.Tensor, elements: list[list[tuple[Float32, ...]]], lines: list[list[cute.Tensor]]
    ) -> None:
        """Fold lines into the states of this thread's columns, (number, column). elements: of the vectors of lines."""
        math, columns = self.math, range(self.spec.vector)
        packed = (
            self.dtypes[0] in PACKED_MAX
            and len(columns) > 1
            and not (self.scored or self.spec.prologue.scale)
        )

        def totals(stage: int, carry: list[tuple]) -> list[Float32]:
            if math.maximum_first and stage == 0 and packed:
                words = [cute.recast_tensor(rX, Uint32) for rX, *_ in lines]
                pairs = ([w[j] for w in words] for j in range(len(columns) // 2))
                return packed_maxima(self.dtypes[0], pairs)
            op = math.reductions[stage].op
            return [tree(op, [math.term(stage, e[v], carry[v]) for e in elements]) for v in columns]

        absorb(math, rS, totals)

    def publish(self, launch: Launch, item: Item, rS: cute.Tensor) -> None:
        """Store the states of a thread's columns."""
        rF = cute.make_tensor(rS.iterator, cute.make_layout(cute.size(rS)))
        at = state_at(launch, item) * self.words
        cute.autovec_copy(rF, in_global(Float32, launch.of_parts, at, cute.size(rS), 16))

    # Between the passes.

    @cute.kernel
    def merge(self, numbers: tuple, operands: tuple):
        """The states of columns, of those of all parts, or what they are worth."""
        s, merge_all = self.spec, self.math.whole.merge_all
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        launch = self.launch_of(numbers, operands)
        tiles = ceil_div(launch.columns, MERGED)
        matrix, mine, reader = cta // tiles, tidx % MERGED, tidx // MERGED
        column = cta % tiles * MERGED + mine
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(s.reduction_buffer.shape, stride=s.reduction_buffer.stride)
        sS = smem.allocate_tensor(Float32, layout, 16)
        observe("reduction_buffer", sS)
        wait_for_stream(s.early)
        rS = cute.make_rmem_tensor(self.words, Float32)
        rS.fill(0.0)
        for n in cutlass.range_constexpr(self.numbers):
            rS[n] = Float32(self.math.whole.identity[n])
        rows = launch.parts * launch.abreast
        for row in cutlass.range(reader, rows, MERGERS // MERGED * LOADS, unroll=1):
            read = [self.state(launch, matrix, row + k * (MERGERS // MERGED), column) for k in range(LOADS)]
            merged = merge_all([tuple(rS[n] for n in range(self.numbers)), *read])
            for n in cutlass.range_constexpr(self.numbers):
                rS[n] = merged[n]
        for n in cutlass.range_constexpr(self.numbers):
            sS[n, mine, reader] = rS[n]
        cute.arch.barrier()
        if (reader == 0) & (column < launch.columns):
            readers = range(MERGERS // MERGED)
            state = merge_all([tuple(sS[n, mine, r] for n in range(self.numbers)) for r in readers])
            if const_expr(len(self.math.outputs) > 0):
                for n in cutlass.range_constexpr(self.numbers):
                    rS[n] = state[n]
                at = (wide(matrix) * launch.columns + column) * self.words
                cute.autovec_copy(rS, in_global(Float32, launch.of_columns, at, self.words))
            else:
                results = zip(launch.mX[len(self.inputs) :], self.math.group_results(state), strict=True)
                for mX, number in results:
                    gX = element(mX.dtype, mX.address, matrix * mX.kept[0] + column * mX.reduced[0])
                    gX[0] = number.to(mX.dtype)

    def state(self, launch: Launch, matrix: Int32, row: Int32, column: Int32) -> tuple[Float32, ...]:
        """The state of a column in a row of states, of nothing where there is none."""
        rows, identity = launch.parts * launch.abreast, self.math.whole.identity
        mine = smaller(column, launch.columns - 1)
        at = (wide(matrix) * rows + smaller(row, rows - 1)) * launch.columns + mine
        read = zip(self.numbers_at(launch.of_parts, at), identity, strict=True)
        return tuple(select(row < rows, number, Float32(no)) for number, no in read)

    def numbers_at(self, address: Int64, at: Int64) -> tuple[Float32, ...]:
        """State number `at` of those in memory."""
        rS = cute.make_rmem_tensor(self.words, Float32)
        cute.autovec_copy(in_global(Float32, address, at * self.words, self.words), rS)
        return tuple(rS[n] for n in range(self.numbers))

    # The second pass.

    @cute.kernel
    def results(self, numbers: tuple, operands: tuple):
        """The results of a turn of a part, the last line first."""
        cta, _, _ = cute.arch.block_idx()
        launch, (ctas, _, _) = self.launch_of(numbers, operands), cute.arch.grid_dim()
        of_a_turn = ctas // TURNS
        item = item_of(launch, cta % of_a_turn, self.spec.columns, self.thread_column())
        item = turn_of(launch, item, cta // of_a_turn, self.spec.steps)
        wait_for_stream(self.spec.early)
        self.take(self.finished, launch, item)

    @cute.jit
    def finished(self, launch: Launch, item: Item):
        """Store the results of an item."""
        s, hint, states = self.spec, policy("evict_normal"), self.states(launch, item)
        if item.last & (item.column < launch.rest):
            self.finish_rest(launch, item, states)
        batches = larger(item.end - item.first, 0) // s.steps
        line = item.first + batches * s.steps
        if line < item.end:
            lines = self.loaded(launch, item, line, hint, item.end)
            self.finish(launch, item, line, lines, states, item.end)
        for b in cutlass.range(batches, unroll=1):
            line = item.first + (batches - 1 - b) * s.steps
            self.finish(launch, item, line, self.loaded(launch, item, line, hint), states)

    def states(self, launch: Launch, item: Item) -> list[tuple[Float32, ...]]:
        """The states of a thread's columns, which go on with the first one of the next row of its line."""
        found, first = [], item.column % launch.columns
        for v in range(self.spec.vector):
            column = select(first + v < launch.columns, first + v, first + v - launch.columns)
            found.append(self.numbers_at(launch.of_columns, wide(item.matrix) * launch.columns + column))
        return found

    def worked_out(
        self, launch: Launch, item: Item, vectors: Sequence[cute.Tensor], states: list[tuple[Float32, ...]]
    ) -> cute.Tensor:
        """rY: the results of the vectors of a line."""
        elements = zip(self.elements(launch, item, vectors), states, strict=True)
        given = [launch.numbers.get(name) for name in ("scale", "alpha")] if self.spec.prologue else []
        rY = cute.make_rmem_tensor(self.spec.vector, self.dtypes[len(self.inputs)])
        pack((self.math.result(e, state, *given) for e, state in elements), rY)
        return rY

    def finish(
        self,
        launch: Launch,
        item: Item,
        line: Int32,
        lines: list[list[cute.Tensor]],
        states: list[tuple[Float32, ...]],
        end: Int32 | None = None,
    ) -> None:
        """Store the results of lines from one on, up to `end` if that comes first."""
        for u, vectors in enumerate(lines):
            gY = self.vector(launch, item, len(self.inputs), line + u)
            store(
                self.worked_out(launch, item, vectors, states),
                gY,
                exists=None if end is None else line + u < end,
            )

    @cute.jit
    def finish_rest(self, launch: Launch, item: Item, states: list[tuple[Float32, ...]]):
        """Store the results of the line behind the whole ones."""
        rY = self.worked_out(launch, item, self.rest(launch, item), states)
        gY = self.vector(launch, item, len(self.inputs), launch.lines)
        if item.column + self.spec.vector <= launch.rest:
            store(rY, gY)
        else:
            for v in cutlass.range_constexpr(self.spec.vector):
                if item.column + v < launch.rest:
                    gY[v] = rY[v]
