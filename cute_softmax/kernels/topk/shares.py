"""What a CTA reads of a row, and how the CTAs that share one meet in global memory: the last one to end merges.

Zeroed memory has a count for each row, then the states of all shares, then their candidates, the k largest of each; see
`plan.topk_long.LongTopkPlan.scratch`. What a CTA has written there is behind a fence before it counts itself in, and
the last one reads behind another.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...plan.maths import WARP
from ...plan.problem import ALIGNMENT
from ...plan.topk_long import COUNT, FLAG, HEADER, KEY, STATE
from ..common.copy import element
from ..common.index import select
from .candidates import LOWEST, Candidates


@dataclass(frozen=True)
class Share:
    """What a CTA reads of its row, and its operands.

    start: the row's first element, from the beginning of x; head: columns before the first whole vector; first, end: of
    the vectors; tiles: how many there are, one at the least.
    at: addresses in bytes, by the names of operands, `<name>_stride` in elements, and "scratch".
    """

    row: Int64
    number: Int32
    shares: Int32
    columns: Int32
    start: Int64
    head: Int32
    first: Int32
    end: Int32
    tiles: Int32
    at: dict[str, Int64]
    policy: Int64


def states(share: Share, number: Int32) -> Int64:
    """The address of the state of a share of this row."""
    rows = Int64(cute.arch.grid_dim()[0] // share.shares)
    counts = (rows * HEADER + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return share.at["scratch"] + counts + (share.row * share.shares + number) * STATE


def list_of(share: Share, k: Int32) -> Int64:
    """The address of the candidates of this row's first share; behind them are those of the others."""
    ctas = Int64(cute.arch.grid_dim()[0])
    first = states(share, Int32(0)) - share.row * share.shares * STATE
    return first + ctas * STATE + share.row * share.shares * k * KEY


def hand_over(share: Share, k: Int32, place: Int32, key: Int64):
    """Let the last CTA of the row find a candidate."""
    gK = element(Int64, list_of(share, k), Int64(share.number) * k + place)
    gK[0] = key


@cute.jit
def fill(share: Share, candidates: Candidates):
    """The places that no candidate of this share takes."""
    k = candidates.k
    for i in cutlass.range(candidates.sW[COUNT] + candidates.tidx, k, candidates.threads, unroll=1):
        hand_over(share, k, i, LOWEST)


@cute.jit
def last_of(share: Share, state: tuple, above: Int32, sW: cute.Tensor, tidx: Int32) -> Int32:
    """Whether this CTA is the last one of its row to come here, and sees what the others have left."""
    if tidx == 0:
        gS, gA = states(share, share.number), Int64(2)
        for i in cutlass.range_constexpr(2):
            element(Float32, gS, i)[0] = state[i]
        element(Int32, gS, gA)[0] = above
    cute.arch.fence_acq_rel_gpu()
    cute.arch.barrier()
    if tidx == 0:
        counter = element(Int32, share.at["scratch"], share.row).iterator
        came = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        sW[FLAG] = select(came == share.shares - 1, Int32(1), Int32(0))
    cute.arch.barrier()
    cute.arch.fence_acq_rel_gpu()
    return sW[FLAG]


@cute.jit
def gather(share: Share, math: cutlass.Constexpr, candidates: Candidates | None, tidx: Int32) -> tuple:
    """(the state of the whole row, how many elements are larger than the chosen one); the candidates are those of
    all shares."""
    lane = tidx % WARP
    rS = cute.make_rmem_tensor(2, Float32)
    rS[0], rS[1] = Float32(-float("inf")), Float32(0.0)
    rA = cute.make_rmem_tensor(1, Int32)
    rA[0] = Int32(0)
    if lane < share.shares:
        gS = states(share, lane)
        for i in cutlass.range_constexpr(2):
            rS[i] = element(Float32, gS, i)[0]
        rA[0] = element(Int32, gS, 2)[0]
    above = cute.arch.warp_redux_sync(rA[0], "add")
    state = math.whole.lanes((rS[0], rS[1]), WARP)
    if const_expr(candidates is not None):
        sK, sW, k = candidates.sK, candidates.sW, candidates.k
        count, first = share.shares * k, list_of(share, k)
        for i in cutlass.range(tidx, count, candidates.threads, unroll=1):
            sK[i] = element(Int64, first, Int64(i))[0]
        if tidx == 0:
            sW[COUNT] = count
        cute.arch.barrier()
    return state, above
