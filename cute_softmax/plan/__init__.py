"""The decisions: which movement, how wide an access, how many threads and CTAs share a row.

`plan(problem, ...)` gives a `Plan`: the numbers of one launch and its *Plan class* (`RowClass`), which is what is
compiled. Row counts, lengths, strides and addresses are not part of the class, so that a new shape compiles
nothing unless it falls into another class. Pure Python: no GPU, torch or cutlass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .base import PlanBase
from .hardware import Device
from .maths import CACHE_LINE, MATHS, WARP, Math, NotPlanned, check_counts, math_of
from .modes import MODES, access_of, offset_of, padded
from .panel import PanelClass, PanelPlan, plan_panel
from .problem import ITEM_SIZE, Mode, Problem
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .row import PART, TEAMS, VECTORS_PER_ROW, RowClass, Team, row_class, vector_of

__all__ = [
    "CACHE_LINE",
    "EVICT_LAST_ABOVE",
    "MATHS",
    "MODES",
    "NO_PROLOGUE",
    "PART",
    "TEAMS",
    "VECTORS_PER_ROW",
    "WARP",
    "Math",
    "NotPlanned",
    "PanelClass",
    "PanelPlan",
    "Plan",
    "Prologue",
    "RowClass",
    "Team",
    "facts_of",
    "math_of",
    "plan",
    "row_class",
    "vector_of",
]

# Reads ask to be evicted from L2 last if the tensors together are larger than this multiple of it. What is written
# then leaves L2 soon after it was written, which long streams gain from; tensors near L2's own size lose.
# Ratio to a copy on one H200 (60 MB of L2), 2026-11-20, bf16, cold L2, evict_last / usual: 34 MB 0.949 / 1.013,
# 67 MB 0.970 / 1.009, 134 MB 0.976 / 0.988; against loads without a policy: 537 MB 0.998 / 0.969, 1074 MB
# 1.020 / 1.005. evict_first was the slowest throughout: 134 MB 0.922, 1074 MB 0.945.
EVICT_LAST_ABOVE = 2.5
# Bytes of a row from which on rows that run together need not be neighbours in memory.
SHARED_LAST_FROM = 4096

_STATES = {8: "online (max, sum) pairs", 16: "online (max, sum, weighted sum) triples"}  # by their bytes


@dataclass(frozen=True)
class Plan(PlanBase):
    """How one launch of the row movement runs: what is compiled, and the numbers that change from call to call.

    Plain numbers, made without a GPU, torch or cutlass. A notebook draws it: the tile of the first CTA.

    Attributes:
        problem: The call in canonical form: its dimensions merged, sizes and strides in elements, dtypes.
        row_class: What is compiled: threads, vectors, cluster, staging.
        rows: How many rows there are.
        columns: Elements of a row.
        ctas: CTAs of the grid; clusters where there are any.
        kept: Sizes of the dimensions that a row's index is taken apart into, the slowest first.
        operand_strides: Per operand, its stride in each of these dimensions, in elements.
        evict_last: Whether reads ask to be evicted from L2 last.
        scratch: Bytes of zeroed memory that a launch needs besides its operands.
    """

    # Bytes of zeroed memory that a launch needs besides its operands.
    scratch: ClassVar[int] = 0

    problem: Problem
    row_class: RowClass
    rows: int
    columns: int
    ctas: int
    kept: tuple[int, ...]
    operand_strides: tuple[tuple[int, ...], ...]
    evict_last: bool

    @property
    def kernel(self) -> RowClass:
        """What is compiled."""
        return self.row_class

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the prologue's numbers and operands."""
        return self.rows, self.columns, self.ctas, int(self.evict_last), *self.kept[1:]

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Per operand the stride between neighbouring rows, in elements."""
        return tuple(strides[-1] for strides in self.operand_strides)

    def row_start(self, operand: int, row: int) -> int:
        """Elements from the beginning of an operand to that of a row."""
        return offset_of(row, self.kept, self.operand_strides[operand])

    @property
    def tiles(self) -> int:
        """How many tiles of rows there are."""
        return math.ceil(self.rows / self.row_class.tiler[0])

    @property
    def share(self) -> int:
        """Columns of a row that one CTA takes at most."""
        c = self.row_class
        if c.cluster_n == 1:
            return self.columns
        return math.ceil(math.ceil(self.columns / c.cluster_n) / c.line) * c.line

    def explain(self) -> str:
        """The plan as a person would want to read it."""
        c = self.row_class
        bytes_moved = self.problem.bytes
        where = {
            1: "a warp holds several rows" if c.threads_per_row < WARP else "a warp holds a row",
        }.get(c.warps_per_row, f"{c.warps_per_row} warps share a row")
        if c.cluster_n > 1:
            where = f"a cluster of {c.cluster_n} CTAs shares a row, {c.warps_per_row} warps in each"
        staging = ", ".join(f"{n}: {s}" for n, s in zip(c.facts.inputs, c.staging, strict=True))
        lines = [
            f"{c.math} of {self.rows} rows of {self.columns}, {' -> '.join(_own_dtypes(c))}, for {c.architecture}",
            f"  movement   row: {where}; class {c.name}",
            *(
                [f"  rows       index in {' x '.join(map(str, self.kept))}: dimensions that do not merge"]
                if c.kept_modes > 1
                else []
            ),
            *([f"  prologue   {told}"] if (told := c.prologue.told) else []),
            f"  threads    {c.threads} a CTA, {c.threads_per_row} a row; tile {c.tiler[0]} x {c.tiler[1]}",
            f"  thread     {c.steps} vectors of {c.vector} elements, {c.rows_per_thread} row(s); "
            f"{'values' if c.keep else 'packed elements'} kept in "
            f"{'shared memory' if c.staging[0] == 'shared' else 'registers'}",
            f"  loads      {staging}; {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            "  edges      "
            + ("head and tail scalars apart" if c.edges else "none: rows begin and end on a vector"),
            f"  reduction  {_STATES.get(c.facts.state_bytes, f'{c.facts.stages} stage(s)')}; "
            + (
                f"buffer {c.reduction_buffer}, {c.reduction_buffer.cosize * c.facts.state_bytes} bytes"
                if c.exchanges
                else "shuffles only"
            ),
            f"  grid       {self.ctas} {'clusters' if c.cluster_n > 1 else 'CTAs'} for {self.tiles} tiles"
            + (", persistent" if c.persistent else "")
            + f"; {c.shared_memory} bytes of shared memory a CTA",
            f"  traffic    {bytes_moved / 1e6:.1f} MB, every element "
            + ("before the diagonal read once" if c.prologue.causal else "read once")
            + (" and written once" if c.facts.outputs else ", one result written per row"),
        ]
        return "\n".join(lines)


def _unique(names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(names))


def _own_dtypes(c: RowClass) -> list[str]:
    """Of the math's tensors, without those of a prologue."""
    extras = {"bias", "mask", *c.facts.group_inputs}
    return _unique(tuple(d for d, name in zip(c.dtypes, c.facts.operands, strict=True) if name not in extras))


def plan(
    math_name: str,
    problem: Problem,
    device: Device,
    *,
    online: bool = True,
    prologue: Prologue = NO_PROLOGUE,
) -> Plan | PanelPlan:
    """The plan for a problem on a device; operands are those of `facts_of`: the math's inputs (with bias and mask), its
    outputs, its group inputs (scale, alpha) and its group outputs.

    online: one pass over the row with (max, sum) pairs instead of two passes.
    prologue: what happens to the scores before and to the results after; a causal one needs a problem with `query`.
    Raises NotPlanned where no movement serves the problem yet, naming what stands in the way, and ValueError for a math
    that there is not (see `math_of`).
    """
    prologue = prologue.of(math_name)
    if prologue.causal != problem.query:
        raise ValueError("a causal prologue needs a problem with a query dimension, and no other has one")
    evict_last = problem.bytes > EVICT_LAST_ABOVE * device.l2
    made = _plan_rows(math_name, problem, device, online, evict_last, prologue)
    if made is None and (prologue or MATHS[math_name, online].group_inputs):
        how = f" with a prologue ({prologue.name})" if prologue else ""
        raise NotPlanned(f"{math_name}{how} of groups that are not contiguous or do not fit on chip")
    return made or plan_panel(math_name, problem, device, evict_last)


def _plan_rows(
    math_name: str, problem: Problem, device: Device, online: bool, evict_last: bool, prologue: Prologue
) -> Plan | None:
    """The plan of the row movement; None for groups that are not contiguous or do not fit on chip."""
    facts = facts_of(math_name, online, prologue)
    if prologue:
        # An index is taken apart at some cost: no more modes than there are.
        kept = padded(_shared_last(problem, facts), len(problem.dtypes), range(1, MODES[-1] + 1))
    else:
        kept = padded(problem.kept, len(problem.dtypes))
    if prologue:
        check_counts({"groups": problem.groups})
    if len(problem.reduced) > 1 or kept is None:
        return None
    along = problem.reduced[0].strides[: facts.full] if problem.reduced else (1,) * facts.full
    # Of one element for the whole row there can be a bias or a mask.
    single = [
        stride == 0 and name in ("bias", "mask") for name, stride in zip(facts.operands, along, strict=False)
    ]
    if any(stride != 1 and not s for stride, s in zip(along, single, strict=True)):
        return None
    strides = tuple(zip(*(m.strides for m in kept), strict=True))  # per operand
    rows, columns = problem.groups, problem.length
    vector = vector_of(problem.dtypes[: facts.full], columns)
    reference = (problem.offsets[facts.reference], *strides[facts.reference])
    edges = any(n % vector for n in (*reference, columns))
    access = tuple(
        0 if single[i] else access_of(vector, (problem.offsets[i], *strides[i]), reference)
        for i in range(len(facts.inputs))
    )
    try:
        c = row_class(
            math_name,
            device.architecture,
            problem.dtypes,
            columns,
            edges=edges,
            access=access,
            online=online,
            kept_modes=len(kept),
            prologue=prologue,
            ctas=ctas_a_row(device, rows),
        )
    except NotPlanned:
        return None
    tiles = math.ceil(rows / c.tiler[0])
    ctas = min(tiles, _resident(c, device)) if c.persistent else tiles
    check_counts({"clusters" if c.cluster_n > 1 else "CTAs": ctas})
    return Plan(
        problem=problem,
        row_class=c,
        rows=rows,
        columns=columns,
        ctas=ctas,
        kept=tuple(m.size for m in kept),
        operand_strides=strides,
        evict_last=evict_last,
    )


def _shared_last(problem: Problem, facts: Math) -> tuple[Mode, ...]:
    """The kept modes, those along which a bias or a mask is broadcast the fastest, so that CTAs which run together
    find it in L2; a query dimension stays the last, and short rows what they are: neighbours in memory.

    H200, 2026-11-20, softmax of (16, 8192, 8192) bf16 with a mask of 8192 x 8192: 1040 us, 1229 us in the
    order of memory; 4096 columns 527 and 616 us, 2048 columns alike.
    """
    extras = [i for i, name in enumerate(facts.inputs) if name in ("bias", "mask")]
    row_bytes = problem.length * ITEM_SIZE[problem.dtypes[0]]
    if problem.query or not extras or row_bytes < SHARED_LAST_FROM:
        return problem.kept
    return tuple(sorted(problem.kept, key=lambda m: any(m.strides[i] == 0 for i in extras)))


def _in_clusters(device: Device) -> int:
    """SMs that clusters can have: one needs its SMs in one GPC, which leaves about one in eight over. 7 clusters of 16
    on the 132 of an H200 (8 take 1.9 times as long; measured 2026-11-20, bf16, 512 x 1000000)."""
    return device.multiprocessors * 7 // 8


def ctas_a_row(device: Device, rows: int) -> int:
    """CTAs that each of so many rows can have at once."""
    return max(_in_clusters(device) // max(rows, 1), 1)


def _resident(c: RowClass, device: Device) -> int:
    """Clusters of a persistent grid. Not a promise: more than fit only wait their turn."""
    return max(1, _in_clusters(device) * max(c.min_blocks, 1) // c.cluster_n)
