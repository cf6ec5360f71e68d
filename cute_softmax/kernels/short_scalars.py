"""What the rows of a stretch have one element of: numbers of groups, and what an index chooses; `row_scalars` has the
same of the row movement."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from ..plan import WARP
from ..plan.short import SINGLE, ShortClass
from . import indices, short_work
from .common.copy import DTYPES, global_pointer
from .common.index import dot, larger, of_row, select, smaller
from .maths.maths import RowMath
from .maths.scores import factored, floats, score_of
from .short_rows import Stretch

ABSENT = -1  # the column of an index that no element of the row has


class StretchScalars:
    """single: the inputs with one element for all of a row. group_inputs, by name, and group_outputs: the tensors of
    one element per group. selects: whether an index chooses a score; marks: whether there is a result apart for it."""

    def __init__(self, spec: ShortClass, math: RowMath):
        self.spec, self.math = spec, math
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        F = spec.facts.full
        self.single = [i for i, how in enumerate(spec.laid) if how == SINGLE]
        self.group_inputs = {name: F + i for i, name in enumerate(math.group_inputs)}
        self.group_outputs = range(F + len(math.group_inputs), len(spec.dtypes))
        self.marks = bool(spec.prologue.target) and len(math.outputs) > 0
        self.selects = "index" in math.group_inputs and "found" not in math.group_inputs

    def place_of(self, stretch: Stretch, row: Int32) -> list[Int64]:
        """A row's index in each kept mode, the slowest first."""
        return of_row(row, stretch.sizes, bool(self.spec.prologue))

    # Loaded.

    def no_ones(self, *shape: int) -> list[cute.Tensor]:
        """Registers for what rows have one of, in each of the tensors of one element a row."""
        return [
            cute.make_rmem_tensor(shape, self.dtypes[i]) for i in (*self.single, *self.group_inputs.values())
        ]

    @cute.jit
    def ones_of(self, stretch: Stretch, group: Int32, ones: list[cute.Tensor]):
        """What each of the rows has one of that a thread works on at once."""
        R = self.spec.rows_per_thread
        for r in cutlass.range(R, unroll_full=True):
            self.ones(stretch, short_work.row_of(stretch.lane, group * R + r, stretch.pairs), ones, r)

    def ones(self, stretch: Stretch, row: Int32, ones: list[cute.Tensor], *where: Int32):
        """What a row has one of; of rows that do not exist what the last one has."""
        operands = (*self.single, *self.group_inputs.values())
        if not operands:
            return
        at = self.place_of(stretch, stretch.first_row + smaller(row, stretch.rows - 1))
        for i, one in zip(operands, ones, strict=True):
            one[where] = stretch.mX[i].element(dot(at, stretch.mX[i].kept))[0]

    def numbers(self, stretch: Stretch, ones: list) -> dict[str, Numeric]:
        """The prologue's numbers for a row of these `ones`; of an index the column, `ABSENT` where it does not count,
        and of a row that is ignored nothing does."""
        found, p = floats(self.spec.prologue, stretch.numbers), self.spec.prologue
        for name, one in zip(self.group_inputs, ones[len(self.single) :], strict=True):
            if name == "index":
                counts = indices.counts(p, stretch, one)
                found[name] = Int32(select(counts, one, Int64(ABSENT)))
            else:
                found[name] = one.to(Float32)
        if self.marks and p.target == "loss":
            found["alpha"] = select(found["index"] > ABSENT, found["alpha"], Float32(0.0))
        return factored(p, found)

    # What an index chooses.

    def score(self, numbers: dict[str, Numeric], element: Numeric) -> Float32:
        """The score of an element of a row of these numbers."""
        return score_of(element.to(Float32), numbers.get("scale"), cap=numbers.get("softcap"))

    def column(self, numbers: dict[str, Numeric]) -> Int32:
        """The column that an index chooses, some other one where that is none."""
        return larger(numbers["index"], 0)

    def note(self, stretch: Stretch, ones: list, wrong: cute.Tensor):
        """Note whether the index of a row of these `ones` is out of range, for `complain`."""
        index = ones[len(self.single) + [*self.group_inputs].index("index")]
        exists = indices.counts(self.spec.prologue, stretch, index)
        wrong[0] = wrong[0] | indices.is_wrong(self.spec.prologue, stretch, index, exists)

    @cute.jit
    def complain(self, stretch: Stretch, wrong: cute.Tensor):
        """Stop the kernel if the index of a row of the stretch is out of range. It is loaded again: behind all else,
        all that is kept of it is that there is one."""
        if cute.arch.vote_any_sync(wrong[0]):
            mX = stretch.mX[self.group_inputs["index"]]
            for row in cutlass.range(stretch.lane, stretch.rows, WARP, unroll=1):
                number = stretch.first_row + row
                index = mX.element(dot(self.place_of(stretch, number), mX.kept))[0]
                exists = indices.counts(self.spec.prologue, stretch, index)
                indices.complain(self.spec.prologue, stretch, index, number, exists)

    # Stored.

    def results(self, numbers: dict[str, Numeric], math: RowMath, state: tuple, chosen: list) -> list:
        """By group output, what a row of these numbers has. chosen: the score at its index, if there is one."""
        if not len(self.group_outputs):
            return []
        sink = [numbers["sink"]] if self.spec.prologue.sink else []
        found = math.group_results(state, *chosen, *sink)
        if self.spec.prologue.target == "loss":
            found[0] = select(numbers["index"] > ABSENT, found[0], Float32(0.0))
        return found

    def numbers_at(self, stretch: Stretch, i: int, row: Int32) -> cute.Tensor:
        """gX: what group output i has for a row of the stretch; where kept modes merge, behind it those of the next
        rows."""
        mX, access = stretch.mX[i], self.spec.access[i]
        stride = mX.kept[-1] if access == 1 else 1
        start = dot(self.place_of(stretch, stretch.first_row + row), [*mX.kept[:-1], stride])
        gX = global_pointer(mX.dtype, mX.address, start, access * mX.itemsize)
        return cute.make_tensor(gX, cute.make_layout(self.spec.rows_per_thread, stride=stride))
