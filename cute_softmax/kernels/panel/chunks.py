"""The chunks of a panel in a thread's hands: copied to shared memory, folded into states, finished and stored."""

from itertools import chain

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr

from ...plan import PanelClass
from ..common import reduce
from ..common.copy import PACKED_MAX, element, in_global, load_async, pack, packed_maxima, store
from ..common.index import ceil_div, larger
from ..maths.maths import RowMath
from ..maths.scores import bits_of, bytes_of, keep
from ..maths.slots import absorb
from .scores import Scores
from .work import Chunk, Item, Launch, chunks_of, edge, left, loaded_step, place, places, rest


class Chunks:
    """Chunks whose vectors are one access each, or several whole ones.

    Where a chunk lies: the first of its steps in shared memory or, of one that is kept in registers (see `ahead`), per
    input its vectors. What is resident lies where it is in its share.
    """

    def __init__(self, spec: PanelClass, math: RowMath):
        self.spec, self.math, self.scores = spec, math, Scores(spec, math)
        self.inputs = range(len(math.inputs))
        self.spread = [i for i in self.inputs if spec.access[i] == 0]
        self.words = [i for i in self.inputs if spec.words(i)]
        self.vectors = [i for i in self.inputs if i not in (*self.spread, *self.words, *spec.residents)]
        # Whether a mask alone has made elements -inf.
        self.masks = "mask" in math.inputs and self.scores.plain
        # Whether the first look at a chunk masks it for good. An element for a whole vector masks it as fast again, and
        # of a chunk that is loaded twice nobody knows whether this is the first.
        self.settles = self.masks and 1 not in self.spread and not spec.repeats

    def vector(self, launch: Launch, i: int, address: Int64) -> cute.Tensor:
        """The vector of operand i at an address."""
        dtype = launch.mX[i].dtype
        return in_global(dtype, address, Int64(0), self.spec.vector, self.spec.accesses[i] * dtype.width // 8)

    def padding(self, launch: Launch, i: int) -> cute.Tensor:
        """A vector in registers of what stands for elements of input i that do not exist."""
        dtype = launch.mX[i].dtype
        padding = cute.make_rmem_tensor(max(self.spec.vector, 2), dtype)
        padding.fill(dtype(self.math.padding[i]))
        return padding

    @cute.jit
    def fetch(self, launch: Launch, chunk: Chunk, base: Int32, policy: Int64):
        """Load a chunk of all inputs into this thread's own blocks of shared memory from step `base` on, padding what
        does not exist. policy: of L2, see `Policies`."""
        # Asked for first, as they are waited for, and put down last.
        elements = [self.asked_for(launch, i) for i in self.spread]
        for i, rX in zip(self.spread, elements, strict=True):
            self.ask(launch, chunk, i, rX)
        self.copy(launch, chunk, base, policy)
        for i, rX in zip(self.spread, elements, strict=True):
            self.put_down(launch, i, base, rX)

    def copy(self, launch: Launch, chunk: Chunk, base: Int32, policy: Int64):
        """Copy the vectors of a chunk."""
        for i in self.vectors:
            # What others of the groups may have, too, leaves L2 as usual.
            beside = i in self.spec.facts.beside
            self.fetch_vectors(launch, chunk, i, base, None if beside else policy)
        for i in self.words:
            self.fetch_words(launch, chunk, i, base)

    def reside(self, item: Item, n: Int32) -> None:
        """Load what is resident of chunk n of a share."""
        at = item.first + n * self.spec.chunk
        # Of another row more may count.
        chunk = Chunk(item.starts, at, left(item, at), rest(item, at, item.end), None)
        for i in self.spec.residents:
            if self.spec.bits(i):
                self.note_bits(item.launch, chunk, i, n * self.spec.chunk_steps)
            else:
                self.fetch_vectors(item.launch, chunk, i, n * self.spec.chunk_steps, None)

    @cute.jit
    def note_bits(self, launch: Launch, chunk: Chunk, i: int, base: Int32):
        """Load a mask's vectors, and keep a bit for each element; of what does not exist nothing counts."""
        s, addresses = self.spec, places(launch, i, chunk.starts[i], chunk.at)
        for k in cutlass.range_constexpr(s.chunk_steps):
            rM = cute.make_rmem_tensor(s.vector, launch.mX[i].dtype)
            rM.fill(launch.mX[i].dtype(0))
            if chunk.left > k * s.down * s.unit:
                cute.autovec_copy(self.vector(launch, i, addresses[k]), rM)
            launch.shared.tXsX[i][0, base + k] = bits_of(rM).to(Uint8)

    def asked_for(self, launch: Launch, i: int) -> cute.Tensor:
        """rX: the elements of input i that a thread loads, where each vector has one: those of every `alike`-th step,
        for all threads that are alike."""
        dtype = launch.mX[i].dtype
        rX = cute.make_rmem_tensor(ceil_div(self.spec.chunk_steps, self.spec.alike), dtype)
        rX.fill(dtype(self.math.padding[i]))
        return rX

    @cute.jit
    def ask(self, launch: Launch, chunk: Chunk, i: int, rX: cute.Tensor):
        """Load these elements."""
        s = self.spec
        for j in cutlass.range_constexpr(cute.size(rX)):
            k = loaded_step(launch, j)
            address = place(launch, i, chunk.starts[i], chunk.at, k)
            if (k < s.chunk_steps) & (chunk.rest > k * s.down * s.unit):
                rX[j] = element(launch.mX[i].dtype, address)[0]

    @cute.jit
    def put_down(self, launch: Launch, i: int, base: Int32, rX: cute.Tensor):
        """Put these elements into shared memory."""
        # Whoever is alike has seen what lay there.
        cute.arch.sync_warp()
        tXsX = launch.shared.tXsX[i]
        for j in cutlass.range_constexpr(cute.size(rX)):
            k = loaded_step(launch, j)
            if k < self.spec.chunk_steps:
                tXsX[0, base + k] = rX[j]

    @cute.jit
    def fetch_vectors(self, launch: Launch, chunk: Chunk, i: int, base: Int32, policy: Int64 | None):
        """Load vectors of input i."""
        s, padding = self.spec, self.padding(launch, i)
        tXgX = [self.vector(launch, i, at) for at in places(launch, i, chunk.starts[i], chunk.at)]
        for k in cutlass.range_constexpr(s.chunk_steps):
            tXsX = launch.shared.tXsX[i][None, base + k]
            if chunk.left > k * s.down * s.unit:
                load_async(tXgX[k], tXsX, s.access[i], policy, s.prefetches)
            else:
                for v in cutlass.range_constexpr(s.vector):
                    tXsX[v] = padding[v]

    @cute.jit
    def fetch_words(self, launch: Launch, chunk: Chunk, i: int, base: Int32):
        """Load the words of input i, see `Scores`."""
        vectors = places(launch, i, chunk.starts[i], chunk.at)
        for k in cutlass.range_constexpr(self.spec.chunk_steps):
            if chunk.left > k * self.spec.down * self.spec.unit:
                self.scores.copy_words(launch, chunk, i, vectors[k], base + k)
            else:
                self.scores.fill_words(launch, i, base + k)

    def align(self, item: Item, at: Int32, base: Int32):
        """Put this thread's vectors of the chunk that begins at element `at` into its blocks, when its warp's copies
        have come: there they are."""
        if self.spread:
            cute.arch.sync_warp()  # what others of the warp have put down is seen from here on
        if self.scores.cuts:
            self.cut(item, at, base)

    @cute.jit
    def cut(self, item: Item, at: Int32, base: Int32):
        """Put padding behind the diagonal into the vector of the chunk at element `at` that it goes through."""
        s, launch, counting = self.spec, item.launch, item.seen - at
        if (counting > 0) & (counting < s.chunk):
            vector = counting // s.unit
            if launch.d == vector % s.down:
                tXsX = [launch.shared.tXsX[i][None, base + vector // s.down] for i in self.scores.floats]
                padding = [self.padding(launch, i) for i in self.scores.floats]
                for i in cutlass.range_constexpr(len(tXsX)):
                    for v in cutlass.range_constexpr(s.vector):
                        if v >= counting % s.unit:
                            tXsX[i][v] = padding[i][v]

    def held(self, item: Item, k: int, at: Int32, where: Int32 | int | list) -> list[cute.Tensor]:
        """tXrX: vector k of each input of the chunk at element `at` that lies there, in registers."""
        launch, residents = item.launch, self.spec.residents
        found = [vectors[k] for vectors in where] if isinstance(where, list) else []
        for i in residents if found else self.inputs:
            if i in self.words:
                address = places(launch, i, item.starts[i], at)[k]
                found.append(self.scores.from_words(launch, i, address, where + k))
                continue
            step = (at - item.first) // self.spec.chunk * self.spec.chunk_steps if i in residents else where
            tXsX = launch.shared.tXsX[i][None, step + k]
            if self.spec.bits(i):
                found.append(bytes_of(tXsX[0].to(Uint32), self.spec.vector))
                continue
            tXrX = cute.make_rmem_tensor(tXsX.layout, launch.mX[i].dtype)
            if i in self.spread:  # one element, with a stride of 0
                tXrX[0] = tXsX[0]
            else:
                cute.autovec_copy(tXsX, tXrX)
            found.append(tXrX)
        return found

    def masked(
        self, item: Item, k: int, at: Int32, where: Int32 | int | list, folded: bool
    ) -> list[cute.Tensor]:
        """tXrX: as `held`; a mask alone has made elements -inf. folded: whether a look at the chunk, in which they are
        put back so, came before."""
        tXrX = self.held(item, k, at, where)
        if self.masks and not (folded and self.settles):
            keep(*tXrX)
            if self.settles and not isinstance(where, list):
                cute.autovec_copy(tXrX[0], item.launch.shared.tXsX[0][None, where + k])
        return tXrX

    def settle(self, item: Item, at: Int32, where: Int32 | int) -> None:
        """Mask the chunk at element `at` that lies there if it is not to be folded."""
        if self.settles:
            for k in range(self.spec.chunk_steps):
                self.masked(item, k, at, where, False)

    def elements(self, item: Item, k: int, at: Int32, where: Int32 | int | list, folded: bool) -> list[tuple]:
        """What the math takes of vector k of the chunk at element `at` that lies there. folded: see `masked`."""
        return self.scores.vector(item, self.masked(item, k, at, where, folded), k, at, left(item, at))

    def scalars(self, item: Item, edges: list) -> list[tuple]:
        """What the math takes of the scalars at a row's edges; `edges` is empty without any."""
        found = []
        for e in range(self.spec.edge_scalars if edges else 0):
            at, exists = edge(item, e)
            found.append(self.scores.scalar(item, [x[e] for x in edges], at, exists))
        return found

    def fold(
        self, item: Item, stage: int, carry: list, at: Int32, where: Int32 | int | list | None, edges: list
    ) -> list:
        """Per slot this thread's partial result of a stage, over the chunk at element `at` that lies there and the
        scalars at a row's edges. carry: per slot, the results of the stages before. where: None without a chunk; edges:
        empty without scalars."""
        s, math = self.spec, self.math
        op = math.reductions[stage].op
        dtype = item.launch.mX[0].dtype
        ends = [math.term(stage, e, carry[0]) for e in self.scalars(item, edges)]
        packed = dtype in PACKED_MAX and s.vector > 1 and self.scores.plain
        steps = range(0 if where is None else s.chunk_steps)
        if where is None:
            totals = []
        elif math.maximum_first and stage == 0 and packed:
            words = [cute.recast_tensor(self.masked(item, k, at, where, False)[0], Uint32) for k in steps]
            totals = packed_maxima(dtype, ([w[j] for w in words] for j in range(s.vector // 2)))
        else:
            terms = (
                [math.term(stage, e, carry[v % s.slots]) for v, e in enumerate(elements)]
                for elements in (self.elements(item, k, at, where, stage > 0) for k in steps)
            )
            if s.orientation == "row":
                # Pairwise all through: a chain rounds what came first once more with each addition.
                return [reduce.tree(op, chain((reduce.tree(op, vector) for vector in terms), ends))]
            totals = next(terms)
            for vector in terms:
                totals = [op(a, b) for a, b in zip(totals, vector, strict=True)]
        return totals if s.orientation == "column" else [reduce.tree(op, [*totals, *ends])]

    def absorb(self, item: Item, rS: cute.Tensor, at: Int32, where: Int32 | list | None, edges: list = ()):
        """Fold the chunk at element `at`, or the scalars at the edges of a row, into the states of this thread's slots,
        (number, slot)."""
        absorb(self.math, rS, lambda stage, carry: self.fold(item, stage, carry, at, where, edges))

    def results(self, item: Item, k: int, at: Int32, where: Int32 | list, states: list) -> cute.Tensor:
        """tXrY: the results of vector k of the chunk at element `at` that lies there, in registers."""
        s = self.spec
        elements = self.elements(item, k, at, where, True)
        results = [self.scores.result(item, e, states, v % s.slots) for v, e in enumerate(elements)]
        tXrY = cute.make_rmem_tensor(s.vector, item.launch.mX[len(self.inputs)].dtype)
        pack(iter(results), tXrY)
        return tXrY

    @cute.jit
    def finish(self, item: Item, at: Int32, where: Int32 | list, states: list):
        """Compute and store the results of the chunk that begins at element `at` and lies there. states: per slot that
        of the whole group."""
        s, launch = self.spec, item.launch
        rest = left(item, at)
        i = len(self.inputs)
        tXgY = [self.vector(launch, i, address) for address in places(launch, i, item.starts[i], at)]
        for k in cutlass.range_constexpr(s.chunk_steps):
            tXrY = self.results(item, k, at, where, states)
            exists = rest > k * s.down * s.unit
            if const_expr(not s.streaming):
                store(tXrY, tXgY[k], exists=exists)
            elif exists:
                store(tXrY, tXgY[k], self.hint(launch, tXrY))

    # Beyond the diagonal.

    @cute.jit
    def hide(self, item: Item, number: Float32):
        """Store a number in the chunks of a row's share of which nothing counts."""
        first, end = larger(chunks_of(item), 0), ceil_div(item.end - item.first, self.spec.chunk)
        for n in cutlass.range(first, end, unroll=1):
            self.put(item, item.first + n * self.spec.chunk, number)

    @cute.jit
    def put(self, item: Item, at: Int32, number: Float32):
        """Store a number in this thread's vectors of the chunk that begins at element `at`."""
        s, launch, rest, i = self.spec, item.launch, left(item, at), len(self.inputs)
        tXrY = cute.make_rmem_tensor(s.vector, launch.mX[i].dtype)
        tXrY.fill(number.to(launch.mX[i].dtype))
        tXgY = [self.vector(launch, i, address) for address in places(launch, i, item.starts[i], at)]
        for k in cutlass.range_constexpr(s.chunk_steps):
            if rest > k * s.down * s.unit:
                store(tXrY, tXgY[k], self.hint(launch, tXrY))

    def hidden(self, item: Item, states: list) -> Float32:
        """What becomes of an element of a row that does not count. states: of the row."""
        numbers = (
            Boolean(False) if self.spec.dtypes[i] == "bool" else Float32(self.math.padding[i])
            for i in self.inputs
        )
        elements = self.math.elements(tuple(numbers), item.numbers.of(0)[0], Boolean(False))
        return self.scores.result(item, elements, states, 0)

    def hint(self, launch: Launch, tXrY: cute.Tensor) -> Int64 | None:
        """The L2 policy of a store; those of less than four bytes can have none."""
        return launch.policies.writes if cute.size(tXrY) * tXrY.element_type.width >= 32 else None
