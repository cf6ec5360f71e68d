"""The `matmul` movement: softmax(S) @ V with S and V in memory, its Plan classes and which serves a call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import PlanBase, counted
from .hardware import Architecture, Device
from .maths import NotPlanned, check_counts
from .matmul_class import BLOCK_ROWS, TILE_N, MatmulClass, matmul_classes
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Operand, merged

BATCH_MODES = 3  # with rows and columns the five modes of a TMA descriptor
MOST_PARTS = 256
INVARIANT_ROWS = 4096  # what a batch-invariant plan's class is chosen for, however many rows there are
FEWEST_STEPS = 4  # of a part, unless warpgroups take turns: then one of each
MERGERS = (1, 16)  # see `MatmulClass`
MERGE_NUMBERS = 512  # that threads of a CTA of the second launch read at a time
RESIDENT_MERGES = 16  # of its CTAs, on an SM
# In nanoseconds on an H200, fitted to 609 times (2026-11-26; those of tiles of warpgroups with rows of their own to 334
# on the day before): what begins and ends a tile, and that for a column of V, by whether warpgroups take turns with its
# steps; what CTAs of a cluster exchange; and a pair that begins where another has ended (2026-11-22).
TILE_COST, COLUMN_COST = {True: 2100.0, False: 3000.0}, {True: 8.0, False: 15.0}
MEET_COST = {True: 400.0, False: 900.0}
RESTART_COST = 3500.0
# A second launch: early, or behind the first one (2026-11-22); a CTA of it, and one more on SMs that the first launch
# leaves idle, where those come together that fit; what a thread reads after what it has read first; and a number of a
# part that is stored and read again.
LAUNCH_COST = {"wgmma": 1100.0, "mma": 6000.0}
MERGE_COST, CROWD_COST, ROUND_COST = 2.4, 170.0, 1270.0
STORE_COST = 1e-3
BANDWIDTH = 4400.0  # bytes of S and V in a nanosecond


@dataclass(frozen=True)
class MatmulPlan(PlanBase):
    """One launch of softmax(S) @ V.

    rows, columns, depth: M, N, D of S (batch, M, N) and V (batch, N, D); batch: sizes of the batch modes, the slowest
    first; operand_strides: of S and V in rows and in each batch mode (elements), those of one element replaced;
    ctas: of the grid, each taking one tile after another; scale, offset: see `softmax_matmul`.
    """

    matmul_class: MatmulClass
    rows: int
    columns: int
    depth: int
    batch: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]
    ctas: int
    parts: int
    part_steps: int
    lines: tuple[int, int]
    scale: float
    offset: int

    scratch: ClassVar[int] = 0

    @property
    def kernel(self) -> MatmulClass:
        return self.matmul_class

    @property
    def tiles(self) -> int:
        """Tiles of rows and of D, of all batches."""
        c = self.matmul_class
        return math.prod(self.batch) * math.ceil(self.rows / c.rows) * math.ceil(self.depth / c.depth)

    def explain(self) -> str:
        """The plan as readable text."""
        c = self.matmul_class
        turns = (
            f"{c.warpgroups} warpgroups take turns" if c.alternate else f"{c.warpgroups} x {c.blocks} blocks"
        )
        lines = [
            f"softmax(S) @ V, S {math.prod(self.batch)} x {self.rows} x {self.columns}, D {self.depth}, "
            f"{', '.join(c.dtypes)}, for {c.architecture}",
            f"  movement   matmul: class {c.name}",
            *(["  products   mma.sync: timed on an H200 only"] if c.instruction == "mma" else []),
            f"  tile       {c.rows} rows of S, {c.depth} columns of V; {TILE_N} columns of S per step; {turns}",
            f"  loads      {c.loads}, {c.score_stages} stages of {c.score_stage_bytes} bytes of S"
            + (", each eighth row by itself" if c.eighths else ", rows by themselves" if c.lines else "")
            + f", {c.value_stages} of {c.value_stage_bytes} of V",
            f"  grid       {counted(self.ctas, 'CTA')} for {counted(self.tiles, 'tile')} "
            f"in {counted(self.parts, 'part')}"
            + (f", merged by clusters of {c.cluster}" if c.cluster > 1 else "")
            + (f", merged from {self.parts_bytes} bytes" if c.split else "")
            + f"; {c.shared_memory} bytes of shared memory per CTA",
        ]
        return "\n".join(lines)

    @property
    def parts_bytes(self) -> int:
        """Bytes of the parts' results: per row and part a pair of numbers, and one for each column of V."""
        c = self.matmul_class
        padded = math.ceil(self.depth / c.depth) * c.depth
        return math.prod(self.batch) * self.rows * self.parts * (padded + 2) * 4

    @property
    def arguments(self) -> tuple:
        return (
            self.rows,
            self.columns,
            self.depth,
            *self.batch,
            self.ctas,
            self.parts,
            self.part_steps,
            *(self.lines if self.matmul_class.instruction == "wgmma" else ()),
            self.scale,
            self.offset,
        )


@dataclass(frozen=True)
class MatmulProblem:
    """softmax(S) @ V in canonical form.

    rows, columns, depth: M, N, D; batch: sizes of the batch dimensions that do not merge, the slowest first.
    dtypes: of scores, values and output; bias: of the bias, or "".
    sink: of the sinks, or "".
    strides: of scores and values in rows and in each batch mode (elements), 0 where broadcast; of mask, bias and sink,
        those that there are, in rows, columns and each batch mode.
    lines: where rows of S do not begin at multiples of 16 bytes, as TMA needs it, how many follow each other at the
        row stride, and how many of them lie between batches (0: batches begin at multiples of 16 bytes from the first).
    access: bytes in whose multiples all rows of scores, and all of values, begin: 16, 4 or 2.
    """

    rows: int
    columns: int
    depth: int
    batch: tuple[int, ...]
    dtypes: tuple[str, ...]
    strides: Mapping[str, tuple[int, ...]]
    bias: str = ""
    lines: tuple[int, int] | None = None
    access: tuple[int, int] = (ALIGNMENT, ALIGNMENT)
    sink: str = ""


def alignment(operand: Operand, steps: Sequence[int]) -> int:
    """The bytes, at most 16, in whose multiples a tensor begins, and steps of so many elements go."""
    return math.gcd(ALIGNMENT, operand.address, *(n * ITEM_SIZE[operand.dtype] for n in steps))


def steps_of(operand: Operand, shape: Sequence[int]) -> list[int]:
    """The strides from row to row and from batch to batch of a tensor (.., rows, columns)."""
    return [s for n, s in zip(shape[:-1], operand.strides[:-1], strict=True) if n > 1]


def access_of(operand: Operand, shape: Sequence[int]) -> int:
    """The bytes, 16, 4 or 2, in whose multiples all rows of a tensor with contiguous columns begin."""
    # Copies of 8 bytes would be classes of their own.
    common = alignment(operand, steps_of(operand, shape))
    return 4 if common == 8 else common


def aligned(operand: Operand, shape: Sequence[int]) -> bool:
    """Whether TMA can read a tensor (.., rows, columns) as it lies in memory: contiguous columns, and all else in
    steps of 16 bytes."""
    steps = steps_of(operand, shape)
    return (
        alignment(operand, steps) == ALIGNMENT
        and (shape[-1] == 1 or operand.strides[-1] == 1)
        and (shape[-2] == 1 or operand.strides[-2] > 0)
        and all(step >= 0 for step in steps)
    )


def lines_of(operand: Operand, shape: Sequence[int]) -> tuple[int, int] | None:
    """`MatmulProblem.lines` of S; None for what TMA cannot read in this way either."""
    *batch, rows, columns = shape
    *batch_strides, row, last = operand.strides
    if ITEM_SIZE[operand.dtype] != 2 or not (columns == 1 or last == 1) or (rows > 1 and row <= 0):
        return None
    unit = ALIGNMENT // 2
    outer = [(n, s) for n, s in zip(batch, batch_strides, strict=True) if n > 1]
    if all(s % unit == 0 and s >= 0 for _, s in outer):
        return rows, 0
    count = rows
    for n, s in reversed(outer):
        if s != count * row:
            return None
        count *= n
    return count, rows


def canonical_matmul(
    shape: Sequence[int],
    depth: int,
    scores: Operand,
    values: Operand,
    output: str,
    mask: Operand | None = None,
    bias: Operand | None = None,
    sink: Operand | None = None,
    *,
    tma: bool = True,
) -> MatmulProblem:
    """The canonical form of S (.., M, N), of this shape, and V (.., N, D), all broadcast to the same batch dimensions.

    Batch dimensions keep their order, as the output is contiguous; neighbours merge where they do in all operands.
    tma: whether scores are read by TMA.
    """
    *batch, rows, columns = shape
    given = {"scores": scores, "values": values, "mask": mask, "bias": bias, "sink": sink}
    operands = {name: o for name, o in given.items() if o is not None}
    modes = merged(Mode(n, tuple(o.strides[d] for o in operands.values())) for d, n in enumerate(batch))

    def row_stride(operand: Operand, size: int) -> int:
        return operand.strides[-2] if size > 1 else ALIGNMENT // ITEM_SIZE[operand.dtype]

    lines = None if not tma or aligned(scores, shape) else lines_of(scores, shape)
    strides = {}
    for i, (name, o) in enumerate(operands.items()):
        own = o.strides[-2:]
        if name in ("scores", "values"):
            size = columns if name == "values" else lines[0] if lines else rows
            own = (row_stride(o, size),)
        # Rows of all batches may be one dimension.
        together = name == "scores" and lines and lines[1]
        strides[name] = (*own, *(0 if together else mode.strides[i] for mode in modes))
    return MatmulProblem(
        rows=rows,
        columns=columns,
        depth=depth,
        batch=tuple(mode.size for mode in modes),
        dtypes=(scores.dtype, values.dtype, output),
        strides=strides,
        bias=bias.dtype if bias else "",
        sink=sink.dtype if sink else "",
        lines=lines,
        access=(access_of(scores, shape), access_of(values, (*batch, columns, depth))),
    )


def plan_matmul(
    problem: MatmulProblem,
    device: Device,
    *,
    scale: float = 1.0,
    causal: int | None = None,
    zero: bool = False,
    lse: bool = False,
    stats: bool = False,
    instruction: str | None = None,
    invariant: bool = False,
) -> MatmulPlan:
    """The plan of softmax(scale * S) @ V; causal: the offset of the diagonal, or None without one.

    lse: whether log-sum-exps are wanted; stats: whether they are given. invariant: one class and one part for all
        numbers of rows and batches, so that the order of additions follows from N, D and dtypes; S lies as TMA reads.
    instruction: "wgmma" or "mma"; None for the faster one that there is.
    Raises NotPlanned for more batch modes than a TMA descriptor has, for sizes that 32 bits do not count, and for wgmma
    where there is none.
    """
    p = problem
    rows = max(p.rows, p.lines[0]) if p.lines else p.rows
    check_counts({"rows": rows, "columns": p.columns, "columns of V": p.depth, "batches": math.prod(p.batch)})
    instruction = instruction or instruction_of(device.architecture)
    if instruction == "wgmma" and device.architecture.name != "sm_90a":
        raise NotPlanned(f"{device.architecture.name} has no wgmma")
    if len(p.batch) > BATCH_MODES:
        raise NotPlanned(f"{len(p.batch)} batch dimensions do not merge: at most {BATCH_MODES} are planned")
    flags = {
        "causal": causal is not None,
        "scaled": scale != 1.0,
        "zero": zero,
        "vector": 8 if p.depth % 8 == 0 else 2 if p.depth % 2 == 0 else 1,
        "mask": "mask" in p.strides,
        "bias": p.bias,
        "sink": p.sink,
        "lines": p.lines is not None,
        "instruction": instruction,
        "stats": stats,
    }
    if instruction == "mma":
        flags["lines"] = p.access[0] < ALIGNMENT and ITEM_SIZE[p.dtypes[0]] == 2
        flags["access"] = (ALIGNMENT, p.access[1]) if flags["lines"] else p.access
    dtypes = (*p.dtypes, *(("fp32",) if lse else ()))
    missing = BATCH_MODES - len(p.batch)

    def padded(strides: tuple[int, ...]) -> tuple[int, ...]:
        own = len(strides) - len(p.batch)
        return (*strides[:own], *[0] * missing, *strides[own:])

    end = p.columns if causal is None else max(min(p.columns, p.rows + causal), 1)
    steps = math.ceil(end / TILE_N)
    best = None
    classes = matmul_classes(
        device.architecture, dtypes, INVARIANT_ROWS if invariant else p.rows, p.depth, **flags
    )
    if invariant:
        classes = (next(classes),)
    for c in classes:
        row_tiles = math.ceil(p.rows / c.rows)
        tiles = math.prod(p.batch) * row_tiles * math.ceil(p.depth / c.depth)
        # Causal tiles differ in length: their parts would, too.
        most = 1 if invariant or (row_tiles > 1 and causal is not None) else MOST_PARTS
        for part_steps in part_lengths(c, steps, most):
            parts = math.ceil(steps / part_steps)
            ctas = tiles * parts
            for made in merging(c, parts, device):
                # In more turns, warpgroups with rows of their own are faster, and so are CTAs without clusters.
                if (
                    made.alternate
                    and (p.rows > BLOCK_ROWS or made.cluster > 1)
                    and ctas > at_once(made, device)
                ):
                    continue
                cost = cost_of(made, p, ctas, parts, part_steps, device)
                if best is None or cost < best[0]:
                    best = cost, made, parts, part_steps, ctas
    _, c, parts, part_steps, ctas = best
    if instruction == "wgmma" and c.cluster == 1:
        ctas = min(ctas, at_once(c, device))
    return MatmulPlan(
        matmul_class=c,
        rows=p.rows,
        columns=p.columns,
        depth=p.depth,
        batch=(1,) * missing + p.batch,
        operand_strides=(*map(padded, p.strides.values()), *[()] * (1 + lse + c.split + stats)),
        ctas=ctas,
        parts=parts,
        part_steps=part_steps,
        lines=p.lines or (0, 0),
        scale=float(scale),
        offset=causal or 0,
    )


def part_lengths(c: MatmulClass, steps: int, most: int) -> Iterator[int]:
    """How many steps the parts of a class may have, of which there are so many at the most."""
    fewest = c.shares if c.alternate else FEWEST_STEPS
    lengths = (math.ceil(steps / parts) for parts in range(1, min(most, math.ceil(steps / fewest)) + 1))
    yield from dict.fromkeys(lengths)


def merging(c: MatmulClass, parts: int, device: Device) -> Iterator[MatmulClass]:
    """How a class may merge so many parts of the columns: in clusters, or in a second launch."""
    largest = min(device.architecture.cluster_limit, device.multiprocessors)
    if parts == c.cluster <= largest:
        yield c
    elif c.cluster == 1:
        yield from (replace(c, mergers=mergers) for mergers in MERGERS)
    # Of CTAs with more rows, clusters of four and of eight leave SMs idle, and lose to a second launch.
    # With a mask the loop leaves no register for what comes after it.
    if parts == 2 <= largest and c.instruction == "wgmma" and not (c.alternate or c.mask):
        yield replace(c, cluster=2)


def at_once(c: MatmulClass, device: Device) -> int:
    """CTAs that run at once."""
    # Of an H200, 16 clusters of four do, and 32 do not: some SMs of its GPCs are in none.
    idle = device.multiprocessors // 11 if c.cluster > 2 else 0
    return (device.multiprocessors - idle) // c.cluster * c.cluster * c.resident


def cost_of(
    c: MatmulClass, p: MatmulProblem, ctas: int, parts: int, part_steps: int, device: Device
) -> float:
    """About how many nanoseconds a product takes."""
    batches = math.prod(p.batch)
    turns = math.ceil(ctas / at_once(c, device))
    columns = batches * parts * part_steps * TILE_N
    read = columns * (p.rows * ITEM_SIZE[p.dtypes[0]] + p.depth * ITEM_SIZE[p.dtypes[1]])
    steps = turns * c.step_cost * math.ceil(part_steps / c.shares)
    tile = TILE_COST[c.alternate] + COLUMN_COST[c.alternate] * c.depth
    cost = max(steps, read / BANDWIDTH) + turns * tile
    if c.cluster > 1:
        cost += turns * MEET_COST[c.alternate] + (turns - 1) * RESTART_COST
    if c.split:
        numbers = batches * p.rows * p.depth
        merges = numbers * c.mergers / MERGE_NUMBERS
        rounds = math.ceil(parts / (c.mergers * c.merge_loads))
        idle = device.multiprocessors - ctas
        cost += LAUNCH_COST[c.instruction] + merges * MERGE_COST + (rounds - 1) * ROUND_COST
        cost += numbers * parts * STORE_COST
        cost += min(merges / idle, RESIDENT_MERGES) * CROWD_COST if idle > 0 else 0.0
    return cost


def instruction_of(architecture: Architecture) -> str:
    """What multiplies on an architecture where nothing else is asked for."""
    return "wgmma" if architecture.name == "sm_90a" else "mma"
