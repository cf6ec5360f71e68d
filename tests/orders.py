"""The additions of a row kernel one by one, in numpy's float32, from the numbers of a plan.

It knows which element stands where from the class and the row's address alone, as the kernel does, and nothing of
`cute_softmax.plan.order`, which it is there to check.
"""

from __future__ import annotations

import numpy as np

from cute_softmax.kernels.common.reduce import tree
from cute_softmax.plan import WARP, Plan
from cute_softmax.plan.short_plan import ShortPlan

LOWEST = np.float32(-3.4028234663852886e38)


def _exp(x: np.ndarray) -> np.ndarray:
    """In float64, whose last bit may depend on where in an array a number stands, and rounded."""
    return np.exp(x.astype(np.float64)).astype(np.float32)


def elements_of(plan: Plan | ShortPlan, row: int, values: np.ndarray, padding: float) -> np.ndarray:
    """(CTAs, threads, elements) of a row, as its threads have them in registers: vectors, then scalars."""
    n = plan.columns
    if isinstance(plan, ShortPlan):  # one thread's, as far as its class has room
        held = np.full((1, 1, plan.kernel.capacity), padding, np.float32)
        held[0, 0, :n] = values[:n]
        return held
    c = plan.kernel
    V, T, K, reference = c.vector, c.threads_per_row, c.steps, c.facts.reference
    start = plan.problem.offsets[reference] + plan.row_start(reference, row)
    head = min(-start % V, n) if c.edges else 0
    body = (n - head) // V * V
    held = np.full((c.cluster_n, T, K * V + c.edge_scalars), padding, np.float32)
    for rank in range(c.cluster_n):
        first = rank * plan.share
        limit = min(body - first, plan.share)
        for k in range(K):
            at = (k * T + np.arange(T)) * V
            for v in range(V):
                there = at < limit
                held[rank, there, k * V + v] = values[head + first + at[there] + v]
        for e in range(c.edge_scalars if rank == 0 else 0):
            for t in range(T):
                slot = t + e * T
                after = head + body + slot - (V - 1)
                if slot < head:
                    held[rank, t, K * V + e] = values[slot]
                elif slot >= V - 1 and after < n:
                    held[rank, t, K * V + e] = values[after]
    return held


def butterfly(op, x: np.ndarray, width: int) -> np.ndarray:
    """`width` neighbours along the last axis merged, the result in each of them."""
    offset = 1
    while offset < width:
        x = op(x, x[..., np.arange(x.shape[-1]) ^ offset])
        offset *= 2
    return x


def moved(total: np.ndarray, seen: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Sums of exponentials relative to `seen`, relative to `top`."""
    return (total * _exp(np.maximum(seen, LOWEST) - np.maximum(top, LOWEST))).astype(np.float32)


def exponentials(x: np.ndarray, top: np.ndarray) -> np.ndarray:
    return _exp(x - np.maximum(top, LOWEST)[..., None])


def peers_of(c, x: np.ndarray, identity: float) -> list[np.ndarray]:
    """What each warp of a row left in the reduction buffer, 32 at a time, as the lanes of a warp read it."""
    width = min(c.threads_per_row, WARP)
    flat = x[..., ::width].reshape(-1)
    filled = np.full(-(-flat.size // WARP) * WARP, identity, np.float32)
    filled[: flat.size] = flat
    return np.split(filled, filled.size // WARP)


def row_sum(plan: Plan | ShortPlan, row: int, values: np.ndarray) -> np.float32:
    """The sum of a row by the row math "sum"."""
    c = plan.kernel
    held = elements_of(plan, row, values, 0.0)
    x = butterfly(np.add, tree(np.add, [*np.moveaxis(held, -1, 0)]), min(c.threads_per_row, WARP))
    if isinstance(plan, ShortPlan) or not c.exchanges:
        return x[0, 0]
    parts = peers_of(c, x, 0.0)
    merged = parts[0]
    for part in parts[1:]:
        merged = np.add(merged, part)
    return butterfly(np.add, merged, WARP)[0]


def row_state(
    plan: Plan | ShortPlan, row: int, values: np.ndarray, recurrence: int
) -> tuple[np.float32, np.float32]:
    """(maximum, sum of exponentials) of a row; recurrence: vectors that a thread takes at a time with a maximum of
    their own, 0 where that of its lanes comes first."""
    c = plan.kernel
    held, width = elements_of(plan, row, values, -np.inf), min(c.threads_per_row, WARP)
    if recurrence:
        top = total = None
        whole = c.steps * c.vector
        for k in range(0, c.steps, recurrence):
            end = (k + recurrence) * c.vector
            part = held[..., k * c.vector : held.shape[-1] if end >= whole else end]
            seen = part.max(-1) if top is None else np.maximum(top, part.max(-1))
            sums = tree(np.add, [*np.moveaxis(exponentials(part, seen), -1, 0)])
            total = sums if top is None else moved(total, top, seen) + sums
            top = seen
        row_top = butterfly(np.maximum, top, width)
        total = butterfly(np.add, moved(total, top, row_top), width)
        top = row_top
    else:
        top = butterfly(np.maximum, held.max(-1), width)
        total = butterfly(np.add, tree(np.add, [*np.moveaxis(exponentials(held, top), -1, 0)]), width)
    if isinstance(plan, ShortPlan) or not c.exchanges:
        return top[0, 0], total[0, 0]
    tops, totals = peers_of(c, top, -np.inf), peers_of(c, total, 0.0)
    top, total = tops[0], totals[0]
    for t, s in zip(tops[1:], totals[1:], strict=True):
        seen = np.maximum(top, t)
        top, total = seen, moved(total, top, seen) + moved(s, t, seen)
    seen = butterfly(np.maximum, top, WARP)
    return seen[0], butterfly(np.add, moved(total, top, seen), WARP)[0]
