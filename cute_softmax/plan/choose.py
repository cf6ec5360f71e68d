"""The decisions: which movement, how wide an access, how many threads and CTAs share a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .hardware import Device
from .in_rows import beside_laid_out, invariant_vector, laid_out
from .maths import MATHS, Math, NotPlanned, check_counts
from .modes import MODES, access_of, padded
from .panel import plan_panel
from .panel_plan import PanelPlan
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Operand, Problem, canonical
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .ranks import ring_class, sms_of
from .row import TURNS_OF_FEW, RowClass, row_class, vector_of
from .row_plan import Plan
from .short_plan import ShortPlan, plan_short
from .stream import long_and_many, stream_class
from .sweep import SweepPlan
from .table import table_of

RowPlan = Plan | ShortPlan | PanelPlan | SweepPlan  # of a row math

# Loads ask L2 to evict their lines last if the tensors together are larger than this multiple of L2. Written lines then
# leave L2 soon after they were written, which helps long streams and hurts tensors of about L2's own size.
# Ratio to a copy on one H200 (60 MB of L2), 2026-11-20, bf16, cold L2, evict_last / usual: 34 MB 0.949 / 1.013,
# 67 MB 0.970 / 1.009, 134 MB 0.976 / 0.988; against loads without a policy: 537 MB 0.998 / 0.969, 1074 MB
# 1.020 / 1.005. evict_first was the slowest throughout: 134 MB 0.922, 1074 MB 0.945.
EVICT_LAST_ABOVE = 2.5
# Short rows that are no more than so many for each SM, or than so many times their elements, are read at once by
# threads that share a row, which is faster than threads with rows of their own: docs/experiments.md, "Short rows".
SHARED_ROWS, SHORTEST_SHARED = 64, 8
SHARED_ROWS_AN_ELEMENT = {"single": 6, "vectors": 24}
# Bytes of a row from which on rows that run together need not be neighbours in memory.
SHARED_LAST_FROM = 4096


def plan_call(
    math_name: str,
    shape: Sequence[int],
    dims: tuple[int, ...],
    operands: Sequence[Operand],
    device: Device,
    *,
    online: bool = True,
    prologue: Prologue = NO_PROLOGUE,
    query: int | None = None,
    in_place: bool = False,
    invariant: bool = False,
) -> RowPlan:
    """The plan of a row math over `dims` of tensors of a shape: the one way from a call to its Plan.

    operands: the math's inputs with bias and mask, the tensors of one number per group, outputs, group outputs.
    query: for a causal prologue the dimension whose index is a row's position. in_place: see `Problem`.
    invariant: a plan whose order of additions (see `plan.order`) is the same for all calls of one math, length of a
    group, dtypes, device and table. It takes contiguous rows: its `laid_out` says which operands are copied, as it does
    in any plan of a bias or a mask whose neighbours lie apart where those of the elements do not.
    Raises NotPlanned where no kernel serves the call, ValueError for a math that there is not.
    """
    prologue, copied = prologue.of(math_name), ()
    order = kernel_order(math_name, prologue)
    if invariant:
        facts = facts_of(math_name, online, prologue)
        operands, copied = laid_out(shape, dims, operands, _given(facts), facts)
    query = query if prologue.causal else None
    problem = canonical(shape, dims, [operands[i] for i in order], query, in_place)
    if prologue and not invariant:
        facts = facts_of(math_name, online, prologue)
        operands, copied = beside_laid_out(shape, dims, operands, order, problem, facts)
        if copied:
            problem = canonical(shape, dims, [operands[i] for i in order], query, in_place)
    made = plan(math_name, problem, device, online=online, prologue=prologue, invariant=invariant)
    strides = tuple(operands[i].strides for i in copied)
    return replace(made, laid_out=copied, laid_strides=strides) if copied else made


def kernel_order(math_name: str, prologue: Prologue) -> tuple[int, ...]:
    """Where each operand of a plan stands among the tensors of a call: those give group inputs before outputs."""
    facts = facts_of(math_name, True, prologue)
    given = _given(facts)
    return tuple(given.index(operand) for operand in facts.operands)


def _given(facts: Math) -> list[str]:
    """The operands as calls give them."""
    return [*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs]


def plan(
    math_name: str,
    problem: Problem,
    device: Device,
    *,
    online: bool = True,
    prologue: Prologue = NO_PROLOGUE,
    invariant: bool = False,
) -> RowPlan:
    """The plan for a problem on a device; operands are those of `facts_of`: the math's inputs (with bias and mask), its
    outputs, its group inputs (scale, alpha) and its group outputs.

    online: one pass over the row with (max, sum) pairs instead of two passes.
    prologue: what happens to the scores before and to the results after; a causal one needs a problem with `query`.
    invariant: see `plan_call`; the problem's full operands lie in rows, see `in_rows`.
    Raises NotPlanned where no movement serves the problem yet, naming what stands in the way, and ValueError for a math
    that there is not (see `math_of`).
    """
    prologue = prologue.of(math_name)
    if prologue.causal != problem.query:
        raise ValueError("a causal prologue needs a problem with a query dimension, and no other has one")
    facts_of(math_name, online, prologue)  # whether there is such a math
    evict_last = problem.bytes > EVICT_LAST_ABOVE * device.l2
    short = None if invariant else plan_short(math_name, problem, device, evict_last, prologue)
    if short and not _shares_rows(math_name, problem, device, prologue):
        return short
    made = _plan_rows(math_name, problem, device, online, evict_last, prologue, invariant)
    if made is None and (prologue.of_rows or MATHS[math_name, online].group_inputs):
        how = f" with a prologue ({prologue.name})" if prologue else ""
        raise NotPlanned(f"{math_name}{how} of groups that are not contiguous or do not fit on chip")
    return made or plan_panel(math_name, problem, device, evict_last, invariant, prologue)


def _shares_rows(math_name: str, problem: Problem, device: Device, prologue: Prologue) -> bool:
    """Whether threads that share a short row are faster than threads with rows of their own."""
    facts, columns = facts_of(math_name, True, prologue), problem.length
    plain, gradient = not (prologue or facts.group_inputs), len(facts.inputs) > 1
    if plain and columns < SHORTEST_SHARED:
        return False
    vector = ALIGNMENT // max(ITEM_SIZE[d] for d in problem.dtypes[: facts.full])
    vectors = 0 if columns % vector or any(problem.offsets) else columns // vector
    filled = vectors > 1 and vectors.bit_count() == 1  # threads that share a row are a power of two
    nearly = filled or vectors > 4
    if plain and facts.outputs and (nearly if gradient else filled and vectors > 2):
        return True
    most = SHARED_ROWS
    if nearly or "index" not in facts.group_inputs:  # whose numbers cost as much in each of the threads
        most = max(most, SHARED_ROWS_AN_ELEMENT["vectors" if nearly else "single"] * columns)
    return problem.groups <= most * device.multiprocessors


def _plan_rows(
    math_name: str,
    problem: Problem,
    device: Device,
    online: bool,
    evict_last: bool,
    prologue: Prologue,
    invariant: bool,
) -> Plan | None:
    """The plan of the row movement; None for groups that are not contiguous or do not fit on chip."""
    facts, table = facts_of(math_name, online, prologue), table_of(device.table)
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
    dtypes = problem.dtypes[: facts.full]
    if invariant:
        # Vectors begin where rows do, and of a row there are whole ones: its address decides nothing.
        vector, reference, edges = invariant_vector(dtypes, columns), (0,) * (1 + len(kept)), False
    else:
        vector = vector_of(dtypes, columns)
        reference = (problem.offsets[facts.reference], *strides[facts.reference])
        edges = any(n % vector for n in (*reference, columns))
    access = tuple(
        0 if single[i] else access_of(vector, (problem.offsets[i], *strides[i]), reference)
        for i in range(len(facts.inputs))
    )
    # Whether what lies beside the elements is the same for all rows.
    common = bool(facts.beside) and all(
        access[i] and not any(s for n, s in zip(kept, strides[i], strict=True) if n.size > 1)
        for i in facts.beside
    )
    how = {"edges": edges, "kept_modes": len(kept), "prologue": prologue}
    streamed = None
    inputs = dtypes[: len(facts.inputs)]
    if not (invariant or prologue.ranks) and long_and_many(rows, columns, inputs, device):
        streamed = stream_class(
            math_name, device.architecture, problem.dtypes, access=access, online=online, **how
        )
    try:
        if prologue.ranks:
            c = ring_class(math_name, device.architecture, problem.dtypes, columns, access=access, **how)
        else:
            c = streamed or row_class(
                math_name,
                device.architecture,
                problem.dtypes,
                columns,
                access=access,
                online=online,
                ctas=ctas_a_row(device, rows),
                table=table,
                invariant=invariant,
                common=common,
                **how,
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
        table=table.title,
        invariant=invariant,
    )


def _shared_last(problem: Problem, facts: Math) -> tuple[Mode, ...]:
    """The kept modes, those along which a bias or a mask is broadcast the fastest, so that CTAs which run together
    find it in L2 (15% of the time, see docs/experiments.md); a query dimension stays the last, and short rows what they
    are: neighbours in memory.
    """
    extras = [i for i, name in enumerate(facts.inputs) if name in ("bias", "mask")]
    row_bytes = problem.length * ITEM_SIZE[problem.dtypes[0]]
    if problem.query or not extras or row_bytes < SHARED_LAST_FROM:
        return problem.kept
    return tuple(sorted(problem.kept, key=lambda m: any(m.strides[i] == 0 for i in extras)))


def _in_clusters(device: Device) -> int:
    """SMs that clusters can have: one needs its SMs in one GPC, which leaves about one in eight over (7 clusters of 16
    on the 132 of an H200; docs/experiments.md)."""
    return device.multiprocessors * 7 // 8


def ctas_a_row(device: Device, rows: int) -> int:
    """CTAs, one an SM, that each of so many rows can have in `TURNS_OF_FEW` turns."""
    return max(TURNS_OF_FEW * device.multiprocessors // max(rows, 1), 1)


def _resident(c: RowClass, device: Device) -> int:
    """Clusters of a persistent grid. Not a promise: more than fit only wait their turn."""
    if c.ring:
        return max(1, sms_of(device) // c.cluster_n)
    return max(1, _in_clusters(device) * max(c.min_blocks, 1) // c.cluster_n)
