"""Plans of the two kernels around the states of row slices: one merges those of all ranks, the other makes results of a
slice's elements and the whole row's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from layouts.algebra import Layout

from .base import ClassBase, PlanBase
from .choose import EVICT_LAST_ABOVE
from .hardware import Device
from .maths import NotPlanned, check_counts
from .problem import ALIGNMENT, ITEM_SIZE, Operand

# Of a merge: few threads a CTA, so that even a few thousand rows have many SMs ask for their states at once.
MERGE_THREADS = 64
# Of a slice: a CTA takes so many vectors of one row at a time, all asked for at once. 128 threads with four vectors of
# 16 bytes leave room for eight CTAs an SM, 64 KB on their way. Not measured.
THREADS, STEPS, MIN_BLOCKS = 128, 4, 8
HELD = 128  # bytes that a thread asks for at most: more would spill
MERGES = ("state", "sum")
RESULTS = ("found", "lse", "entropy", "even", "loss")
OF_SLICES = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "gradient")
UPSTREAM = ("found", "lse", "entropy", "even", "loss")


@dataclass(frozen=True)
class MergeClass(ClassBase):
    """What is compiled to merge the states of row slices.

    math: "state", or "sum" of one number each. dtypes: of the results. weighted, chosen, even: what stands beside the
        maximum and the sum of a state, see `Prologue.state`.
    results: those of `RESULTS` that are written; squares: whether the square of the logsumexp is part of a loss.
    """

    movement: ClassVar[str] = "merge"
    early: ClassVar[bool] = False  # behind a collective
    threads: ClassVar[int] = MERGE_THREADS

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    weighted: bool = False
    chosen: bool = False
    even: bool = False
    results: tuple[str, ...] = ()
    squares: bool = False

    @property
    def numbers(self) -> int:
        """Of a state."""
        return 1 if self.math == "sum" else 2 + self.weighted + self.chosen + 2 * self.even

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors of a launch: the states, the indices of chosen elements, the whole rows' numbers, the results."""
        return ("states", *["index"] * self.chosen, "whole", *self.results)

    @property
    def signature(self) -> str:
        """The numbers of `MergePlan.arguments`, and the addresses of the operands."""
        return "iii" + "l" * (4 + len(self.operands))

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, architecture and dtypes."""
        flags = [flag for flag in ("weighted", "chosen", "even", "squares") if getattr(self, flag)]
        return "_".join(["ranks", *flags, *self.results])


@dataclass(frozen=True)
class MergePlan(PlanBase):
    """One launch on the states of so many rows: of each there are `blocks` parts, each of which one of the ranks has.

    ignore, size: the index that does not count, and the length of whole rows, 0 where it is not known; smoothing,
    squares: the bits of float32 numbers.
    """

    kernel: MergeClass
    rows: int
    ranks: int
    blocks: int = 1
    ignore: int = 0
    size: int = 0
    smoothing: int = 0
    squares: int = 0

    scratch: ClassVar[int] = 0

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """None: all are side by side."""
        return ((),) * len(self.kernel.operands)

    @property
    def states(self) -> Layout:
        """(row, (block, rank), number) -> element of the gathered states: a reduction buffer whose peers are ranks."""
        rows, blocks, numbers = self.rows, self.blocks, self.kernel.numbers
        strides = (1, (rows, numbers * blocks * rows), blocks * rows)
        return Layout((rows, (blocks, self.ranks), numbers), strides)

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return math.ceil(self.rows / MERGE_THREADS)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the addresses."""
        return self.rows, self.ranks, self.blocks, self.ignore, self.size, self.smoothing, self.squares


def plan_merge(
    math_name: str,
    dtype: str,
    beside: tuple[str, ...],
    results: tuple[str, ...],
    numbers: tuple[int, ...],
    device: Device,
) -> MergePlan:
    """The plan of a merge. dtype: of the results; beside: which of "weighted", "chosen" and "even" a state has;
    numbers: those of `MergePlan`, the last of which are 0 if they are not given.

    Raises NotPlanned for more than 32 bits count.
    """
    squares = len(numbers) == len(fields(MergePlan)) - 1 and numbers[-1] != 0
    flags = dict.fromkeys(beside, True)
    kernel = MergeClass(
        math_name, device.architecture.name, (dtype,), **flags, results=results, squares=squares
    )
    made = MergePlan(kernel, *numbers)
    check_counts({"rows": made.rows, "parts of rows": made.ranks * made.blocks})
    return made


@dataclass(frozen=True)
class SliceClass(ClassBase):
    """What is compiled to make results of a slice's elements and of numbers of whole rows.

    math: one of `OF_SLICES`; "gradient" is that of numbers of rows. dtypes: of the inputs, the output and, of a
        gradient, what flows back into the numbers.
    vector: elements of one access; edges: whether rows may begin or end off a vector boundary. threads, steps,
        min_blocks: of a CTA, vectors of each, and CTAs that an SM must have room for.
    scaled: whether the scores are multiples of the elements.
    upstream: what of `UPSTREAM` a gradient flows back into; smoothed, squares: whether a loss has a share of all
        classes, or of the square of the logsumexp; shared: whether one factor on it lies on the device.
    """

    movement: ClassVar[str] = "slice"
    early: ClassVar[bool] = False  # likewise

    math: str
    architecture: str
    dtypes: tuple[str, ...]
    vector: int
    edges: bool
    threads: int
    steps: int
    min_blocks: int
    scaled: bool = False
    upstream: tuple[str, ...] = ()
    smoothed: bool = False
    squares: bool = False
    shared: bool = False

    @property
    def inputs(self) -> int:
        """How many full tensors are read."""
        return 1 + self.math.endswith("_backward")

    @property
    def precise(self) -> bool:
        return self.dtypes[self.inputs] == "fp32"

    @property
    def narrowest(self) -> int:
        """The full operand that decides where vectors begin."""
        sizes = [ITEM_SIZE[dtype] for dtype in self.dtypes[: self.inputs + 1]]
        return sizes.index(min(sizes))

    @property
    def chosen(self) -> bool:
        """Whether a chosen element of each row has a part of the gradient for itself."""
        return "found" in self.upstream or "loss" in self.upstream

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors of a launch: the full ones, the whole rows' numbers, the index, what flows back and, of a loss,
        the factor on that."""
        full = ("dy", "y", "dx") if self.inputs == 2 else ("x", "y")
        return (*full, "whole", *["index"] * self.chosen, *self.upstream, *["share"] * self.shared)

    @property
    def signature(self) -> str:
        """The numbers of `SlicePlan.arguments`, and of each operand the address; behind it, of full ones and of what
        flows back, the stride from row to row."""
        return "iiiii" + "l" * (6 + len(self.operands) + self.inputs + 1 + len(self.upstream))

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one math, architecture and dtypes."""
        flags = [flag for flag in ("edges", "scaled", "smoothed", "squares", "shared") if getattr(self, flag)]
        return "_".join([f"{self.threads}x{self.steps}x{self.vector}", *flags, *self.upstream])

    @property
    def tile(self) -> int:
        """Elements that a CTA takes at most."""
        return self.threads * self.steps * self.vector


@dataclass(frozen=True)
class SlicePlan(PlanBase):
    """One launch on a matrix whose rows are contiguous: a row is cut into segments of `share` vectors, a CTA each.

    length: of whole rows; start: the slice's place in them; ignore: see `MergePlan`. scale, smoothing, squares: the
    bits of float32 numbers. evict_last: see `choose.EVICT_LAST_ABOVE`.
    """

    kernel: SliceClass
    rows: int
    columns: int
    segments: int
    share: int
    evict_last: bool
    pitches: tuple[int, ...]
    steps_of_rows: tuple[int, ...] = ()
    length: int = 0
    start: int = 0
    ignore: int = 0
    scale: int = 0
    smoothing: int = 0
    squares: int = 0

    scratch: ClassVar[int] = 0

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """Of the full operands and of what flows back, from row to row; all else is side by side."""
        k = self.kernel
        of_rows = ((),) * (1 + k.chosen)
        upstream = tuple((step,) for step in self.steps_of_rows)
        return (*((pitch,) for pitch in self.pitches), *of_rows, *upstream, *((),) * k.shared)

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return self.rows * self.segments

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the operands."""
        of_rows = self.length, self.start, self.ignore, self.scale, self.smoothing, self.squares
        return self.rows, self.columns, self.segments, self.share, int(self.evict_last), *of_rows


def plan_slice(
    math_name: str,
    shape: tuple[int, int],
    operands: tuple[Operand, ...],
    flags: tuple[str, ...],
    upstream: tuple[str, ...],
    dtype: str,
    steps_of_rows: tuple[int, ...],
    numbers: tuple[int, ...],
    device: Device,
) -> SlicePlan:
    """The plan for a matrix. operands: the full ones; flags: those of `SliceClass` that hold; upstream, dtype,
    steps_of_rows: what flows back, its dtype, and its strides from row to row; numbers: the last ones of `SlicePlan`.

    Raises NotPlanned for rows that are not contiguous, and for more than 32 bits count.
    """
    rows, columns = shape
    if any(o.strides[1] != 1 for o in operands) and columns > 1:
        raise NotPlanned("slices whose elements do not lie side by side")
    sizes = [ITEM_SIZE[o.dtype] for o in operands]
    pitches = tuple(o.strides[0] if rows > 1 else 0 for o in operands)
    # Vectors of 16 bytes of the narrowest elements; of others they are several accesses. What does not lie as these do
    # makes them narrower.
    narrowest = sizes.index(min(sizes))
    starts = [o.offset for o in operands]
    vector = min(ALIGNMENT // min(sizes), 1 << (max(columns, 1).bit_length() - 1))
    for size, start, pitch in zip(sizes, starts, pitches, strict=True):
        alike = math.gcd(ALIGNMENT // size, start - starts[narrowest], pitch - pitches[narrowest])
        vector = min(vector, alike) if alike < ALIGNMENT // size else vector
    edges = any(n % vector for n in (starts[narrowest], pitches[narrowest], columns))
    steps = max(min(STEPS, HELD // (vector * sum(sizes[:-1]))), 1)
    dtypes = (*(o.dtype for o in operands), *[dtype] * bool(upstream))
    kernel = SliceClass(
        math_name,
        device.architecture.name,
        dtypes,
        vector,
        edges,
        THREADS,
        steps,
        MIN_BLOCKS,
        upstream=upstream,
        **dict.fromkeys(flags, True),
    )
    vectors = math.ceil((columns + (vector - 1) * edges) / vector)
    segments = math.ceil(vectors / (kernel.threads * kernel.steps))
    # Segments begin at cache lines, so that no line is written by two CTAs.
    share = math.ceil(math.ceil(vectors / segments) / 8) * 8
    segments = math.ceil(vectors / share)
    check_counts({"segments of rows": rows * segments})
    evict_last = rows * columns * sum(sizes) > EVICT_LAST_ABOVE * device.l2
    return SlicePlan(kernel, rows, columns, segments, share, evict_last, pitches, steps_of_rows, *numbers)
