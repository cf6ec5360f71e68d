"""The backward of softmax_matmul: its Plan classes, and the numbers of a launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import ClassBase, PlanBase, counted
from .hardware import Architecture, Device
from .maths import NotPlanned, check_counts
from .matmul import alignment
from .matmul_class import RESERVED, SLAB, WARPGROUP
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Operand, _coalesce

ROWS = (64, 32)  # of S in one step: the first for which there is room
BATCH_MODES = 2  # of batches that do not share a V; those that do are one mode
FEWEST_STAGES, MOST_STAGES = 3, 8  # one is in work, one on its way out
SHARE_DEPTH = 256  # columns of dV of a warpgroup at most: 128 registers of a thread
MOST_SHARES = 2
DELTA_LANES = 4  # threads that share a row of dO and O: each loads a few vectors at once
# The walk over rows is cut into parts until this share of the SMs has work all the time, if it can be.
ENOUGH = 0.9
MOST_SPLITS = 64
STEPS = 8  # the fewest of a part


@dataclass(frozen=True)
class MatmulBackwardClass(ClassBase):
    """What is compiled: everything that shapes the code, as plain numbers.

    depth: columns of V that a CTA holds, D rounded up to whole slabs; consumers: warpgroups that compute; shares:
    how many of them share a slab of 64 columns of S, each with its share of the columns of dV; rows: rows of S of one
    step; stages: steps on their way or in work at a time.
    lines: whether S is read line by line, as TMA needs rows of 16-bit numbers that begin at multiples of 16 bytes.
    sent: whether dS takes the place of S in shared memory and is copied from there; only lines can be without that,
    for those of dS that begin differently within 16 bytes.
    causal: whether columns beyond the diagonal do not count; mask: whether some others do not; bias: dtype of what is
    added to the scores, or "".
    """

    movement: ClassVar[str] = "matmul_backward"
    math: ClassVar[str] = "softmax_matmul_backward"

    architecture: str
    dtypes: tuple[str, ...]  # of S and dS, of V and dO, of dV (float32: parts that are yet to be added up)
    depth: int
    lines: bool = False
    sent: bool = True
    causal: bool = False
    mask: bool = False
    bias: str = ""
    consumers: int = 2
    shares: int = 1
    rows: int = 64
    stages: int = 6

    @property
    def signature(self) -> str:
        """The numbers of the second of `MatmulBackwardPlan.launches`, addresses and strides."""
        return "i" * 9 + "ff" + "l" * (25 + 6 * (self.mask + bool(self.bias)))

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def columns(self) -> int:
        """Columns of S, and rows of V, of a CTA."""
        return self.slabs * SLAB

    @property
    def slabs(self) -> int:
        return self.consumers // self.shares

    @property
    def share_depth(self) -> int:
        """Columns of dV of a warpgroup."""
        return self.depth // self.shares

    @property
    def deep(self) -> bool:
        """Whether V waits in shared memory, as dV leaves no registers for it."""
        return self.depth > 2 * SLAB

    @property
    def pitch(self) -> int:
        """Elements from line to line of S in shared memory: a line begins anywhere within its first 16 bytes."""
        return self.columns + (ALIGNMENT // ITEM_SIZE[self.dtypes[0]] if self.lines else 0)

    @property
    def score_elements(self) -> int:
        """Elements of S in a stage."""
        return self.rows * self.pitch

    @property
    def score_bytes(self) -> int:
        return self.score_elements * ITEM_SIZE[self.dtypes[0]]

    @property
    def step_bytes(self) -> int:
        """What one step loads to shared memory: tiles of S and dO, and two float32 numbers a row."""
        return self.score_bytes + self.rows * (self.depth * ITEM_SIZE[self.dtypes[1]] + 8)

    @property
    def zeros(self) -> int:
        """Elements of a slab of zeros, for what the diagonal cuts off."""
        return self.rows * SLAB if self.causal and not self.lines else 0

    @property
    def hides(self) -> bool:
        """Whether there may be elements that do not count."""
        return self.causal or self.mask

    @property
    def producers(self) -> int:
        """Warps of the last warpgroup that fill the ring. A warp starts copies of lines one after another, so that
        all share them, but those that write zeros beyond the diagonal."""
        return (2 if self.causal else 4) if self.lines else 1

    @property
    def fillers(self) -> int:
        """Threads that announce bytes to a stage."""
        return 32 * self.producers if self.lines else 1

    @property
    def releases(self) -> int:
        """Threads that release a stage: all that compute, or one of each warpgroup."""
        return self.consumers * (WARPGROUP if self.lines else 1)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA: the ring, two barriers of each of its stages, zeros, V."""
        values = self.columns * self.depth * ITEM_SIZE[self.dtypes[1]] if self.deep else 0
        return self.stages * (self.step_bytes + 16) + self.zeros * ITEM_SIZE[self.dtypes[0]] + values

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        parts = [f"{self.columns}x{self.rows}x{self.depth}_stages{self.stages}"]
        parts += [name for name in ("lines", "causal", "mask") if getattr(self, name)]
        if not self.sent:
            parts.append("elements")
        if self.bias:
            parts.append(f"bias_{self.bias}")
        return "_".join(parts)


@dataclass(frozen=True)
class MatmulDeltaClass(ClassBase):
    """What is compiled for the numbers of each row that the backward needs.

    depth: columns of O rounded up; vector: elements of one load; rows: of a block, as in `MatmulBackwardClass`;
    lse_grad: whether the log-sum-exps have a gradient, too; sink: whether there are sinks, whose gradients these are.
    """

    movement: ClassVar[str] = "matmul_delta"
    math: ClassVar[str] = "softmax_matmul_delta"

    architecture: str
    dtypes: tuple[str, ...]  # of dO, of O
    depth: int
    vector: int
    rows: int
    lse_grad: bool = False
    sink: bool = False

    @property
    def signature(self) -> str:
        """The numbers of the first of `MatmulBackwardPlan.launches`, addresses and strides."""
        return "i" * 6 + "f" + "l" * (16 + 5 * self.lse_grad + 10 * self.sink)

    @property
    def vectors(self) -> int:
        """Vectors that each of the threads of a row loads."""
        return -(-self.depth // (DELTA_LANES * self.vector))

    @property
    def name(self) -> str:
        """A readable name, unique among classes of one architecture and dtypes."""
        return f"{self.rows}x{self.depth}_vector{self.vector}{'_lse' * self.lse_grad}{'_sink' * self.sink}"


@dataclass(frozen=True)
class Launch(PlanBase):
    """One launch of a plan that has two: its class, and the numbers of `Plan` of the same names.

    operands: their names; "numbers" are those of each row that the first launch leaves to the second.
    """

    kernel: MatmulBackwardClass | MatmulDeltaClass
    arguments: tuple[int | float, ...]
    operands: tuple[str, ...]
    operand_strides: tuple[tuple[int, ...], ...]

    scratch: ClassVar[int] = 0


@dataclass(frozen=True)
class MatmulBackwardPlan(PlanBase):
    """The two launches of one backward pass: their classes, and the numbers that change from call to call.

    rows, columns, depth: M, N, D; heads: batches of S that share a V; batch: sizes of the other batch modes, the
    fastest first; splits: parts of the walk over the rows of all heads, whose dV are added up afterwards.
    strides: per operand, in elements: of its row (and column, for mask and bias), heads and batch modes.
    offset: of the diagonal; scale, factor: what scores, and their gradients, are multiplied by; zero: whether rows
        without anything that counts have given 0 instead of NaN.
    """

    kernel: MatmulBackwardClass
    delta: MatmulDeltaClass
    rows: int
    columns: int
    depth: int
    heads: int
    batch: tuple[int, ...]
    splits: int
    ctas: int
    strides: Mapping[str, tuple[int, ...]]
    offset: int
    scale: float = 1.0
    factor: float = 1.0
    zero: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of rows of a head."""
        return math.ceil(self.rows / self.kernel.rows)

    @property
    def delta_ctas(self) -> int:
        """CTAs of the first launch: one for each block of rows."""
        return math.prod(self.batch) * self.heads * self.blocks

    @property
    def delta_numbers(self) -> int:
        """float32 numbers that the first launch leaves to the second."""
        return self.delta_ctas * 2 * self.kernel.rows

    @property
    def tiles(self) -> int:
        """Pieces of work: blocks of columns of each batch and part."""
        return math.ceil(self.columns / self.kernel.columns) * math.prod(self.batch) * self.splits

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.kernel
        way = (
            f"line by line, dS {'likewise' if c.sent else 'element by element'}"
            if c.lines
            else "and dS as tiles of TMA, dS in the place of S"
        )
        lines = [
            f"{c.math} of {math.prod(self.batch)} x {self.heads} scores ({self.rows}, {self.columns}), "
            f"D = {self.depth}, {' -> '.join(dict.fromkeys(c.dtypes))}, for {c.architecture}",
            f"  movement   matmul_backward: class {c.name}; before it {self.delta.math}",
            f"  tile       {c.columns} columns of S, steps of {c.rows} rows; D as {c.depth}",
            f"  warpgroups {c.consumers} compute, {c.shares} a slab of 64 columns; one loads",
            f"  operands   V in {'shared memory' if c.deep else 'registers'}; S {way}",
            f"  ring       {c.stages} stages of {c.step_bytes} bytes; {c.shared_memory} bytes of shared memory",
            f"  grid       {counted(self.ctas, 'CTA')} for {counted(self.tiles, 'tile')}, "
            f"{counted(self.splits, 'part')} of a walk over "
            f"{self.heads * self.blocks} steps",
        ]
        if self.splits > 1:
            lines.append("  dV         float32 parts, added up afterwards")
        return "\n".join(lines)

    @property
    def launches(self) -> tuple[Launch, Launch]:
        """The launch that leaves numbers of each row, and that of the gradients."""
        batch, factor = self.batch, self.factor
        sizes = self.rows, self.columns, self.depth, self.heads, *batch
        first = self.rows, self.depth, self.heads, batch[0], self.delta_ctas, int(self.zero), factor
        second = *sizes, self.splits, self.ctas, self.offset, self.scale, factor
        extra = [name for name in ("mask", "bias") if name in self.strides]
        # V and dV are the same for all heads.
        (v_row, _, *v_batch), (dv_row, _, *dv_batch) = self.strides["values"], self.strides["dvalues"]
        elements = math.prod(batch) * self.columns * self.depth
        own = {"values": (v_row, *v_batch), "dvalues": (dv_row, elements, *dv_batch)}

        def launch(kernel, arguments, operands, strides) -> Launch:
            return Launch(kernel, arguments, operands, tuple(strides.get(name, ()) for name in operands))

        beside = ["lse_grad"] * self.delta.lse_grad + ["sink", "sink_grad"] * self.delta.sink
        given = "scores", "grad", "values", "numbers", "dscores", "dvalues", *extra
        return (
            launch(self.delta, first, ("grad", "output", "lse", *beside, "numbers"), self.strides),
            launch(self.kernel, second, given, {**self.strides, **own}),
        )


def plan_matmul_backward(
    shape: Sequence[int],
    shared: Sequence[bool],
    depth: int,
    operands: Mapping[str, Operand],
    device: Device,
    *,
    causal: int | None = None,
    scale: float = 1.0,
    factor: float = 1.0,
    zero: bool = False,
    invariant: bool = False,
) -> MatmulBackwardPlan:
    """The plan for scores of a shape (.., M, N).

    shared: of each batch dimension, whether its batches share V and dV. depth: D.
    operands: scores, grad, values, dscores, dvalues, output, lse, and lse_grad, sink and sink_grad, mask and bias where
        there are some; each with the strides of all batch dimensions, its rows and, but for numbers of a row, its
        columns.
    causal: the offset of the diagonal; scale, factor, zero: see `MatmulBackwardPlan`. invariant: one walk over all
        rows, in an order that follows from their number alone.

    Raises NotPlanned for what the kernels do not take as it lies in memory.
    """
    *sizes, rows, columns = shape
    check_counts({"rows": rows, "columns": columns, "batches": math.prod(sizes)})
    if device.architecture.name != "sm_90a":
        raise NotPlanned(f"the backward of softmax_matmul needs sm_90a, not {device.architecture.name}")
    modes = [Mode(n, tuple(o.strides[i] for o in operands.values())) for i, n in enumerate(sizes)]
    heads, batch = (
        _merged([m for m, s in zip(modes, shared, strict=True) if s == kind], most, len(operands))
        for kind, most in ((True, 1), (False, BATCH_MODES))
    )
    strides = {}
    for i, (name, o) in enumerate(operands.items()):
        own = o.strides[len(sizes) :][: 2 if name in ("mask", "bias") else 1]
        strides[name] = (*own, *(m.strides[i] for m in (*heads, *batch[::-1])))
    for name, size in (("grad", ALIGNMENT), ("values", 2 * ITEM_SIZE[operands["values"].dtype])):
        if not begins_at(operands[name], strides[name], size):
            raise NotPlanned(f"rows of {name} ({strides[name]}) do not begin at multiples of {size} bytes")
    if depth % 2:
        raise NotPlanned(f"the backward of softmax_matmul takes even D, got {depth}")

    lines = operands["scores"].dtype == "fp32" or not all(
        begins_at(operands[name], strides[name], ALIGNMENT) for name in ("scores", "dscores")
    )
    c = matmul_backward_class(
        device.architecture,
        tuple(operands[name].dtype for name in ("scores", "values", "dvalues")),
        depth,
        lines=lines,
        sent=not lines or alike(operands, strides, "scores", "dscores"),
        causal=causal is not None,
        mask="mask" in operands,
        bias=operands["bias"].dtype if "bias" in operands else "",
    )
    walk = math.ceil(rows / c.rows) * heads[0].size
    blocks = math.ceil(columns / c.columns) * math.prod(m.size for m in batch)
    splits = 1 if invariant else splits_of(blocks, walk, device.multiprocessors)
    if splits > 1:
        c = replace(c, dtypes=(*c.dtypes[:2], "fp32"))
    vector = math.gcd(8, depth, *(x for n in ("grad", "output") for x in (*strides[n], operands[n].offset)))
    return MatmulBackwardPlan(
        kernel=c,
        delta=MatmulDeltaClass(
            c.architecture,
            tuple(operands[n].dtype for n in ("grad", "output")),
            c.depth,
            vector,
            c.rows,
            "lse_grad" in operands,
            "sink" in operands,
        ),
        rows=rows,
        columns=columns,
        depth=depth,
        heads=heads[0].size,
        batch=tuple(m.size for m in batch[::-1]),
        splits=splits,
        ctas=min(blocks * splits, device.multiprocessors),
        strides=strides,
        offset=max(-rows, min(causal or 0, columns)),
        scale=scale,
        factor=factor,
        zero=zero,
    )


def matmul_backward_class(
    architecture: Architecture, dtypes: tuple[str, ...], depth: int, **flags: bool | str
) -> MatmulBackwardClass:
    """The class for so many columns of V, with as many stages as there is room for."""
    if depth > MOST_SHARES * SHARE_DEPTH:
        raise NotPlanned(
            f"the backward of softmax_matmul takes D up to {MOST_SHARES * SHARE_DEPTH}, got {depth}"
        )
    shares = math.ceil(depth / SHARE_DEPTH)
    whole = shares * SLAB
    for rows in ROWS:
        c = MatmulBackwardClass(
            architecture.name,
            dtypes,
            math.ceil(depth / whole) * whole,
            **flags,
            shares=shares,
            rows=rows,
            stages=0,
        )
        room = architecture.shared_memory - RESERVED - c.shared_memory
        c = replace(c, stages=min(room // (c.step_bytes + 16), MOST_STAGES))
        if c.stages >= FEWEST_STAGES:
            return c
    raise NotPlanned(f"{c.name}: no room for {FEWEST_STAGES} stages")


def splits_of(blocks: int, walk: int, multiprocessors: int) -> int:
    """Parts of a walk of so many steps: as few as keep the SMs at work, when a part of each block is a CTA."""

    def busy(splits: int) -> float:
        tiles = blocks * splits
        return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)

    candidates = range(1, max(1, min(MOST_SPLITS, walk // STEPS)) + 1)
    return next((n for n in candidates if busy(n) >= ENOUGH), max(candidates, key=busy))


def _merged(modes: list[Mode], count: int, operands: int) -> tuple[Mode, ...]:
    """The modes as exactly so many, the slowest first."""
    merged = _coalesce(modes)
    if len(merged) > count:
        raise NotPlanned(f"batch dimensions of {[m.size for m in merged]} do not merge into {count}")
    # Of one element; with a stride that TMA takes.
    return (Mode(1, (ALIGNMENT,) * operands),) * (count - len(merged)) + merged


def alike(
    operands: Mapping[str, Operand], strides: Mapping[str, Sequence[int]], first: str, second: str
) -> bool:
    """Whether the rows of two operands of a dtype begin alike within 16 bytes, all of them."""
    unit = ALIGNMENT // ITEM_SIZE[operands[first].dtype]
    return operands[first].offset == operands[second].offset and all(
        (a - b) % unit == 0 for a, b in zip(strides[first], strides[second], strict=True)
    )


def begins_at(operand: Operand, strides: Sequence[int], size: int) -> bool:
    """Whether the operand's rows are contiguous and begin at multiples of so many bytes."""
    return operand.strides[-1] == 1 and alignment(operand, strides) % size == 0
