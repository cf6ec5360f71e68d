"""Plans of rows, and which of their elements each thread has by the kernel's own index arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace

import classes
import numpy as np
from prologues import DEVICES

from cute_softmax import plan as plans
from cute_softmax.kernels import row_work
from cute_softmax.kernels.common.copy import GlobalTensor
from cute_softmax.plan import MATHS, PanelPlan, Plan, RowClass, plan
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical

ZEROS = (0,) * max(len(facts.operands) for facts in MATHS.values())


def row_plan(
    math_name, pair, rows, columns, arch, *, online=True, offsets=None, pads=None
) -> Plan | PanelPlan:
    """The plan of rows that lie `pad` elements apart and begin `offset` elements past a 16-byte boundary; not by the
    short movement."""
    dtypes = classes.operands(math_name, pair)
    full = MATHS[math_name, online].full
    operands = [
        Operand(d, (columns + pad, 1) if i < full else (1 + pad, 0), offset * ITEM_SIZE[d])
        for i, (d, offset, pad) in enumerate(
            zip(dtypes, (*(offsets or ()), *ZEROS), (*(pads or ()), *ZEROS), strict=False)
        )
    ]
    with classes.by_rows():
        return plan(math_name, canonical((rows, columns), (1,), operands), DEVICES[arch], online=online)


class Coordinates:
    """tXcX of every thread, as arrays: (row, column) in the tile by the named layout `tv`, which the kernel makes its
    coordinates of."""

    def __init__(self, c: RowClass):
        self.height, self.width = c.step_tiler
        self.tv = np.array(c.tv.offsets()).reshape(c.tv[1].size, c.tv[0].size)  # [value, thread]
        self.vector = c.vector

    def __getitem__(self, place) -> tuple[np.ndarray, np.ndarray]:
        (v, m), _, k = place
        index = self.tv[v + m * self.vector]
        return index % self.height, index // self.height + k * self.width


def times_owned(made: Plan, row: int) -> np.ndarray:
    """How often each column of a row is loaded and stored, by the arithmetic of `kernels/row_work.py` on arrays over
    the threads."""
    c, share, places = made.row_class, row_work.share_of(made.row_class, made.columns), []
    assert share == made.share
    thread, reference = np.arange(c.threads), c.facts.reference
    mX = [None] * len(c.dtypes)
    itemsize = ITEM_SIZE[c.dtypes[reference]]
    mX[reference] = GlobalTensor(
        SimpleNamespace(width=8 * itemsize),
        made.problem.offsets[reference] * itemsize,
        made.operand_strides[reference],
    )
    for rank in range(c.cluster_n):
        launch = row_work.Launch(
            spec=c,
            rows=made.rows,
            columns=made.columns,
            share=share,
            first=rank * share,
            rank=rank,
            lane=thread % c.threads_per_row,
            sizes=made.kept[1:],
            numbers={"offset": 0},
            mX=mX,
            tXcX=Coordinates(c),
            policy=None,
            zero=0,
            shared=None,
        )
        for m in range(c.rows_per_thread):
            of = row_work.row_of(launch, row // c.tiler[0], m)
            mine = of.inside & (of.index == row)
            for turn in range(1 if c.movement == "row" else made.columns // c.tiler[1] + 1):
                part = of if c.movement == "row" else row_work.tile_of(of, turn)
                for k in range(c.steps):
                    written = mine & row_work.writes(part, k, row_work.reads(part, k))
                    first = (part.start + k * c.threads_per_row * c.vector)[written]
                    places.append((first[:, None] + np.arange(c.vector)).ravel())
            for e in range(c.edge_scalars):
                column, exists = row_work.edge(of, e)
                places.append(column[mine & exists])
    return np.bincount(np.concatenate(places), minlength=made.columns)


def check(made: Plan):
    """What holds for every plan."""
    c, arch = made.row_class, ARCHITECTURES[made.row_class.architecture]
    assert c.shared_memory <= arch.shared_memory
    assert c.threads <= arch.threads and c.threads % plans.WARP == 0
    assert c.threads_per_row * c.threads_down == c.threads
    assert c.cluster_n <= arch.cluster_limit
    assert c.warps_per_row * plans.WARP == c.threads_per_row or plans.WARP % c.threads_per_row == 0
    assert made.columns <= c.capacity
    assert made.tiles * c.tiler[0] >= made.rows > (made.tiles - 1) * c.tiler[0]
    assert 1 <= made.ctas <= made.tiles and (c.persistent or made.ctas == made.tiles)
    # The packed row alone, in the registers that a thread can have.
    row_bytes = c.vector * c.steps * c.rows_per_thread * sum(
        ITEM_SIZE[d] for d, s in zip(c.dtypes, c.staging, strict=False) if s in ("direct", "async")
    )  # fmt: skip
    threads = c.threads * max(c.min_blocks, 1)
    others = 12  # at least; what spills is in the table of stacks, see test_compile
    assert row_bytes / 4 + others <= min(arch.registers // threads, 255)
    # Widths and the addresses that they must suit.
    full, r = c.facts.full, c.facts.reference
    widest = 16 // max(ITEM_SIZE[d] for d in c.dtypes[:full])
    assert c.vector == widest or made.columns < plans.VECTORS_PER_ROW * widest
    assert made.columns // c.vector >= min(made.columns, plans.VECTORS_PER_ROW)
    assert len(c.access) == len(c.facts.inputs) and len(made.operand_strides) == len(c.dtypes)
    for i, access in enumerate(c.access):
        if access == 0:  # one element a row
            continue
        assert c.vector % access == 0
        assert (made.problem.offsets[i] - made.problem.offsets[r]) % access == 0
        for stride, of_reference in zip(made.operand_strides[i], made.operand_strides[r], strict=True):
            assert (stride - of_reference) % access == 0
    assert len(made.kept) == c.kept_modes and math.prod(made.kept) == made.rows
    assert made.arguments == (made.rows, made.columns, made.ctas, made.evict_last, *made.kept[1:])
    assert made.movement in ("row", "stream") and made.scratch == 0
    if not c.edges:
        assert made.columns % c.vector == 0
