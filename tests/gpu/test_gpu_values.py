"""What rows may hold: -inf in any pattern, +inf, NaN, the largest and smallest numbers."""

import math

import classes
import pytest
import torch
from checking import DEVICE, DTYPES, Guarded, check_softmax, random

from cute_softmax import softmax
from cute_softmax.plan import RowClass

INF = math.inf
dtypes = pytest.mark.parametrize("dtype", DTYPES)
modes = pytest.mark.parametrize("online", [True, False], ids=["online", "two_pass"])
placements = pytest.mark.parametrize("offset", [0, 3])


def one_length_per_class(arch: str, dtype: str, online: bool = True):
    """(class, a length that leaves the last vector, step or CTA partly empty)."""
    for interval in classes.taken("softmax", arch, (dtype, dtype), online=online):
        yield interval.row_class, max(interval.first, interval.last - 37)


def share(c: RowClass, columns: int) -> int:
    """Columns that each CTA of the cluster takes."""
    return math.ceil(math.ceil(columns / c.cluster_n) / c.line) * c.line if c.cluster_n > 1 else columns


def owners(c: RowClass, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(CTA of the cluster, warp of that CTA's row) that holds each column, head and tail not counted."""
    column = torch.arange(columns, device=device)
    cta, inside = column // share(c, columns), column % share(c, columns)
    return cta, inside % (c.threads_per_row * c.vector) // (32 * c.vector)


def place(x: torch.Tensor, offset: int) -> torch.Tensor:
    return Guarded.of(x, offset=offset, strides=(x.shape[1] + offset, 1)).tensor


def check(x: torch.Tensor, offset: int, online: bool):
    x = place(x, offset)
    for out in (Guarded(x.shape, x.dtype), Guarded(x.shape, x.dtype, offset=offset, strides=x.stride())):
        softmax(x, out=out.tensor, online=online)
        out.check()
        check_softmax(out.tensor, x)


@dtypes
@modes
@placements
def test_minus_infinity(dtype, online, offset, arch):
    """One warp's slice, one CTA's share, all but those, all but one element, random patterns, a whole row."""
    for c, columns in one_length_per_class(arch, dtype, online):
        base = random((1, columns), DTYPES[dtype], seed=columns, scale=2.0)[0]
        cta, warp = owners(c, columns, base.device)
        masks = [torch.ones_like(cta, dtype=torch.bool)]
        masks += [cta == r for r in range(c.cluster_n)] + [cta != r for r in range(c.cluster_n)]
        masks += [warp == w for w in range(c.warps_per_row)]
        masks += [(warp != w) | (cta != c.cluster_n - 1) for w in (0, c.warps_per_row - 1)]
        column = torch.arange(columns, device=base.device)
        for one in {0, 1, 6, 7, columns // 2, columns - 9, columns - 2, columns - 1}:
            masks.append(column != one % columns)
        for share_of in (0.1, 0.5, 0.99, 1 - 2 / columns):
            masks.append(torch.rand(columns, device=base.device) < share_of)
        masks.append(torch.zeros_like(masks[0]))
        x = torch.stack([base.masked_fill(mask, -INF) for mask in masks])
        assert (x == -INF).all(-1).any()
        check(x, offset, online)


@dtypes
@modes
def test_causal_mask(dtype, online):
    for columns in (33, 128, 1000, 2047):
        x = random((columns, columns), DTYPES[dtype], seed=columns)
        x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -INF)
        check(x, 0, online)
        y = softmax(x, online=online)
        assert (y[x == -INF] == 0).all() and y[0, 0] == 1


@dtypes
@modes
@placements
def test_one_nan_or_infinity(dtype, online, offset, arch):
    """In the head, the body, the tail, each warp and each CTA; the rows around it stay right."""
    for c, columns in one_length_per_class(arch, dtype, online):
        part = share(c, columns)
        at = {0, 1, 4, 7, 8, columns // 2, columns - 9, columns - 5, columns - 2, columns - 1}
        at |= {r * part + d for r in range(c.cluster_n) for d in (-1, 0, 5)}
        at |= {32 * c.vector * w + 1 for w in range(c.warps_per_row)}
        at = sorted({a % columns for a in at})
        x = random((2 * len(at) + 1, columns), DTYPES[dtype], seed=columns)
        for value in (math.nan, INF):
            marked = x.clone()
            for i, column in enumerate(at):
                marked[2 * i + 1, column] = value
            check(marked, offset, online)
            y = softmax(marked, online=online)
            assert y[1::2].isnan().all() and not y[::2].isnan().any()


@dtypes
@modes
def test_mixed_infinities(dtype, online):
    for columns in (2, 9, 64, 1000, 20000, 100000):
        rows = [[INF, -INF], [-INF, math.nan], [INF, INF], [math.nan, INF], [-INF, -INF], [0.0, -INF]]
        x = torch.tensor(rows, dtype=DTYPES[dtype], device=DEVICE)
        x = x.repeat(1, columns // 2 + 1)[:, :columns].contiguous()
        check(x, 0, online)


@dtypes
@modes
@placements
def test_extreme_numbers(dtype, online, offset, arch):
    """Differences that overflow, rows of the most negative number, subnormals, constants."""
    info = torch.finfo(DTYPES[dtype])
    for _, columns in one_length_per_class(arch, dtype, online):
        x = random((12, columns), DTYPES[dtype], seed=columns)
        signs = x.sign()
        x[0], x[1] = info.min, info.max
        x[2] = torch.where(signs[2] > 0, info.max, info.min)
        x[3] = (x[3].double() * 1e-3 * info.max).to(x.dtype)
        x[4] = signs[4] * info.tiny
        x[5] = signs[5] * info.smallest_normal * info.eps
        x[6] = 0
        x[7] = info.min
        x[7, columns // 2] = info.max
        x[8] = info.min
        x[8, 0] = -INF
        x[9] = -INF
        x[9, columns - 1] = info.min
        x[10] = torch.linspace(-80, 0, columns, device=x.device).to(x.dtype)
        x[11] = torch.linspace(0, -110, columns, device=x.device).to(x.dtype)
        check(x, offset, online)
        y = softmax(x, online=online)
        for row in (0, 1, 6):
            assert (y[row] == y[row, 0]).all(), (row, columns)


@dtypes
def test_large_numbers(dtype):
    """Logits far from zero, where x * log2(e) would lose or overflow what x - max keeps."""
    for scale in (10.0, 100.0, 1000.0, 1e4):
        for columns in (7, 64, 1000, 20000, 100000):
            x = random((50, columns), DTYPES[dtype], seed=columns, scale=scale)
            check_softmax(softmax(x), x)
            shifted = (x.float() + 3 * scale).to(x.dtype)
            check_softmax(softmax(shifted), shifted)


@dtypes
def test_every_place_counts(dtype, arch):
    """One element that outweighs the row, at each column in turn: none is lost, doubled or misplaced."""
    for _, columns in one_length_per_class(arch, dtype):
        for first in {0, max(0, columns // 2 - 512), max(0, columns - 1024)}:
            count = min(1024, columns - first)
            x = torch.zeros(count, columns, dtype=DTYPES[dtype], device=DEVICE)
            if x.numel() > 1 << 26:
                x = x[: (1 << 26) // columns]
            at = torch.arange(x.shape[0], device=x.device)
            x[at, first + at] = 20.0
            check_softmax(softmax(x), x)
