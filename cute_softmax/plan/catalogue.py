"""The Plan classes there are: what `precompile` compiles and the docs list. No torch, no cutlass."""

from __future__ import annotations

from collections.abc import Iterator

from . import MATHS, VECTORS_PER_ROW, NotPlanned, RowClass, row_class, vector_of
from .choose import SHORTEST_SHARED
from .hardware import Architecture
from .problem import check_float
from .row import FEW_FILL, TURNS_OF_FEW
from .short import ShortClass, configs_of, short_class
from .stream import StreamClass, stream_class
from .table import Table, table_of


def ctas_counts(table: Table | None = None) -> tuple[int, ...]:
    """CTAs that each row can have, so that other classes come of it: 1 and more."""
    found = {c for configs in (table or table_of()).few.values() for c in configs}
    sms = max((c.sms for c in found), default=1)
    return (1, *sorted({c.takes for c in found} | {TURNS_OF_FEW * sms}))


def operand_dtypes(math: str, dtype: str) -> tuple[str, ...]:
    """The dtypes of a math's operands where all tensors have one dtype ("bf16", "fp16" or "fp32"), but an index and the
    numbers of a row that are kept for gradients, in float32.

    Raises TypeError for another dtype.
    """
    check_float(dtype)
    facts = MATHS[math, True]
    kept = facts.group_outputs if len(facts.group_outputs) > 1 else ()
    known = {"index": "int64", **dict.fromkeys(kept, "fp32")}
    return tuple(known.get(name, dtype) for name in facts.operands)


def used_dtypes(math: str, dtype: str) -> tuple[tuple[str, ...], ...]:
    """All dtypes of the operands that calls on tensors of one dtype have: chosen elements without a gradient are stored
    in it."""
    usual, names = operand_dtypes(math, dtype), MATHS[math, True].operands
    stored = tuple(dtype if name == "found" else d for name, d in zip(names, usual, strict=True))
    return (usual, stored) if math == "selective" and stored != usual else (usual,)


def longest_row(c: RowClass | ShortClass) -> int:
    """The longest row in elements that a class is chosen for, wherever the row begins."""
    if isinstance(c, ShortClass):
        return c.columns or c.capacity
    if isinstance(c, StreamClass):
        return c.capacity
    fits = c.tiler[1] // c.line * c.line * c.cluster_n if c.cluster_n > 1 else c.tiler[1]
    # Short rows have narrower vectors: a class of those ends where wider ones begin.
    return (
        fits if vector_of(c.dtypes[: c.facts.full], fits) == c.vector else 2 * c.vector * VECTORS_PER_ROW - 1
    )


def classes(
    math: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    *,
    edges: bool = False,
    online: bool = True,
    ctas: int = 1,
    table: Table | None = None,
) -> Iterator[RowClass | ShortClass]:
    """The classes of a math for contiguous tensors, in the order of the rows they hold: each takes over where the one
    before ends.

    dtypes: of the math's operands: inputs, outputs, group outputs. table: of configurations, the default one if None.
    edges: those for rows that begin or end off a vector boundary. ctas: CTAs that each row can have at once: 1 where
    there are many rows.

    All inputs are taken to lie towards vector boundaries as the output does. Where one does not (a slice
    with an odd offset, say), the class also says how narrow its loads are; it is compiled when first met. So are
    the classes for short rows that lie with gaps, those for kept dimensions that do not merge, and those with a
    prologue.
    """
    columns, facts, before = 1, MATHS[math, online], None
    few = (table or table_of()).few.values() if ctas > 1 else ()
    starts = {n for configs in few for c in configs for n in (FEW_FILL * c.capacity, c.above)}
    while (short := short_class(math, architecture.name, dtypes, columns, table=table)) is not None:
        if not edges:  # they load whole vectors wherever rows begin
            yield short
        columns = longest_row(short) + 1
    while True:
        vector = vector_of(dtypes[: facts.full], columns)
        access = (vector,) * len(facts.inputs)
        ragged = edges and vector > 1  # no element is off a boundary of single elements
        try:
            c = row_class(
                math,
                architecture,
                dtypes,
                columns,
                edges=ragged,
                access=access,
                online=online,
                ctas=ctas,
                table=table,
            )
        except NotPlanned:
            return
        if ragged == edges and c != before:
            yield c
        before = c
        # Where a configuration for few rows is full enough, or begins, it takes over before the one for many ends.
        end, before_these = longest_row(c), (int(n * vector) for n in starts)
        columns = min([end, *(n for n in before_these if columns <= n < end)]) + 1


def of_long_rows(
    math: str, architecture: Architecture, dtypes: tuple[str, ...], *, edges: bool = False
) -> list:
    """The class of the many rows that are too long to be held, of maths that read alone."""
    found = stream_class(math, architecture, dtypes, edges=edges)
    return [] if found is None else [found]


def of_shared_rows(
    math: str,
    architecture: Architecture,
    dtypes: tuple[str, ...],
    *,
    edges: bool = False,
    table: Table | None = None,
) -> list[RowClass]:
    """The classes of the row movement for rows as short as those of the short movement; see `classes`."""
    facts, found = MATHS[math, True], []
    for columns in range(SHORTEST_SHARED, configs_of(table or table_of(), facts, dtypes)[-1].capacity + 1):
        vector = vector_of(dtypes[: facts.full], columns)
        if (vector > 1) if edges else columns % vector == 0:
            access = (vector,) * len(facts.inputs)
            found.append(
                row_class(math, architecture, dtypes, columns, edges=edges, access=access, table=table)
            )
    return [*dict.fromkeys(found)]


def of_few_rows(math: str, architecture: Architecture, dtypes: tuple[str, ...], **how) -> list[RowClass]:
    """The classes that come only where there are few rows, the shortest first; the rest as of `classes`."""
    many = set(classes(math, architecture, dtypes, **how))
    counts = ctas_counts(how.get("table"))[:0:-1]
    found = [c for ctas in counts for c in classes(math, architecture, dtypes, ctas=ctas, **how)]
    return [c for c in dict.fromkeys(found) if c not in many]
