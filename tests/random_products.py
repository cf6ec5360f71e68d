"""Random calls of softmax_matmul and their gradients: shapes, sharing, strides, offsets, options, dtypes and special
values drawn together. A case follows from its seed. What shapes the code (dtypes, columns of V, options) is drawn from
few kinds, so that few classes are compiled.
"""

import math
import random as pyrandom
from dataclasses import dataclass

import torch
from checking import FACTOR, Guarded, equal_bits, random
from gradients import Call, Gradients

from cute_softmax import softmax_matmul

MOST = 1 << 22  # scores of a case
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Kind:
    """What shapes the code.

    depths: D, from, to and step; unit: elements that rows of scores begin at multiples of, 1 for odd distances;
    parts: whether calls may be so long that they are cut into parts, or so many that warpgroups take two blocks.
    """

    dtype: torch.dtype
    depths: tuple[int, int, int]
    scores: torch.dtype | None = None
    unit: int = 8
    scaled: bool = False
    causal: bool = False
    mask: bool = False
    bias: torch.dtype | None = None
    zero: bool = False
    parts: bool = False


SMALL, MIDDLE, DEEP, DEEPEST = (8, 64, 8), (72, 128, 8), (200, 256, 8), (392, 512, 8)
KINDS = (
    Kind(bf16, SMALL, parts=True),
    Kind(bf16, MIDDLE, scaled=True, causal=True, parts=True),
    Kind(bf16, SMALL, causal=True, zero=True, bias=bf16),
    Kind(bf16, SMALL, scaled=True, mask=True, zero=True),
    Kind(bf16, MIDDLE, scaled=True, bias=fp32),
    Kind(bf16, MIDDLE, fp32, unit=4, scaled=True),
    Kind(bf16, (1, 63, 2), unit=1, scaled=True),
    Kind(bf16, DEEP),
    Kind(bf16, DEEPEST, unit=1, causal=True, mask=True, zero=True),
    Kind(fp16, SMALL),
    Kind(fp16, MIDDLE, unit=1, causal=True, zero=True, parts=True),
    Kind(fp16, SMALL, fp32, unit=1, causal=True, mask=True, bias=fp16, zero=True),
)
VALUES = ("-inf in places", "-inf first", "-inf rows", "nan", "inf", "large", "equal")


def draw(seed: int, device: str | None = None) -> tuple[Call, str]:
    """One case, and what a failure tells of it; everything follows from the seed."""
    r, kind = pyrandom.Random(seed), KINDS[seed % len(KINDS)]
    unit = kind.unit

    def shared(shape: tuple[int, ...], chance: float) -> tuple[int, ...]:
        return tuple(1 if r.random() < chance else n for n in shape)

    batch = tuple(r.choice([1, 2, 3, 5]) for _ in range(r.choice([0, 1, 1, 2])))
    owners = shared(batch, 0.4)
    rows = round(2 ** r.uniform(0, r.choice([6, 10]))) + r.choice([0, 0, 1])
    columns = round(2 ** r.uniform(0, 11.5))
    if kind.parts and r.random() < 0.15:
        batch = owners = (5, 5)
        rows, columns = r.randrange(700, 1100), r.randrange(1, 150)
    elif not kind.parts:
        rows = max(min(rows, 480 // math.prod(n for n, o in zip(batch, owners, strict=True) if o == 1)), 1)
        columns = min(columns, 256) if rows > 64 else columns
    owners = owners[r.choice([0, 0, len(batch)]) :] if kind.parts else owners
    columns = math.ceil(columns / unit) * unit if unit > 1 else columns | 1
    while math.prod((*batch, rows, columns)) > MOST:
        rows = max(rows // 2, 1)
    first, last, step = kind.depths
    depth = r.randrange(first, last + 1, step)

    def made(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
        return random(shape, dtype, r.randrange(1 << 30), spread, device=device)

    def placed(values: torch.Tensor, unit: int) -> torch.Tensor:
        """Somewhere in memory, in some order of the batch dimensions; around it lies NaN."""
        order = [*range(values.dim() - 2)]
        r.shuffle(order)
        pitch = math.ceil(values.shape[-1] / unit) * unit + r.choice([0, 0, 2, 4]) * unit
        strides, reach = [0] * len(order), pitch * values.shape[-2]
        for d in order:
            reach += r.choice([0, 0, 1]) * unit
            strides[d] = reach
            reach *= values.shape[d]
        return Guarded.of(values, strides=(*strides, pitch, 1), offset=r.choice([0, 0, 1, 3]) * unit).tensor

    scores = (*shared(batch, 0.1), rows, columns)
    batch = torch.broadcast_shapes(scores[:-2], owners)
    full = (*batch, rows, columns)
    scores = made(scores, kind.scores or kind.dtype, r.choice([0.1, 2.0, 2.0, 6.0]))
    special = r.choice(("",) * len(VALUES) + VALUES)
    scale = r.choice([0.125, 0.7, 3.0, -0.5]) if kind.scaled else 1.0
    if special == "-inf in places":
        scores.masked_fill_(made(scores.shape, fp32) > r.choice([-1.0, 0.0, 1.0]), -math.inf)
    elif special == "-inf first":
        scores[..., : r.randrange(columns)] = -math.inf
    elif special == "-inf rows":
        scores[..., r.randrange(rows) :, :] = -math.inf
    elif special in ("nan", "inf"):
        scores.view(-1)[r.randrange(scores.numel())] = math.nan if special == "nan" else math.inf
    elif special == "large":
        scores *= 100.0
    elif special == "equal":
        scores.fill_(r.choice([0.0, -3.0, 1000.0]))
    if special.startswith("-inf"):
        scale = abs(scale)
    causal = r.choice([0, columns - rows, r.randrange(-rows, columns + 1)]) if kind.causal else None
    grad = made((*batch, rows, depth), kind.dtype)
    if r.random() < 0.2:
        grad = grad.mT.contiguous().mT if r.random() < 0.5 else grad[..., :1].expand_as(grad)
    c = Call(
        placed(scores, unit),
        placed(made((*owners, columns, depth), kind.dtype), r.choice([1, 2, 8]) if unit == 1 else 8),
        grad,
        scale=scale,
        causal=causal,
        zero=kind.zero,
        mask=made(shared(full, 0.3), fp32) < 0.7 if kind.mask else None,
        bias=made(shared(full, 0.3), kind.bias) if kind.bias else None,
    )
    if not special and not kind.mask and causal is None and r.random() < 0.3:
        c.lse_grad = made(full[:-1], fp32)
    told = f"seed {seed}: {tuple(scores.shape)} @ {tuple(c.values.shape)}, strides {c.scores.stride()} and "
    told += f"{c.values.stride()}, scale {scale}, causal {causal}, {special!r}, {kind}"
    return c, told


def run(c: Call) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """By the public function and autograd."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (c.scores, c.values, c.bias)]
    out, lse = softmax_matmul(
        *leaves[:2],
        scale=c.scale,
        mask=c.mask,
        bias=leaves[2],
        causal=False if c.causal is None else c.causal,
        empty_rows="zero" if c.zero else "nan",
        return_lse=True,
    )
    outputs, slopes = [out], [c.grad]
    if c.lse_grad is not None:
        outputs.append(lse)
        slopes.append(c.lse_grad)
    found = torch.autograd.grad(outputs, [t for t in leaves if t is not None], slopes)
    return out.detach(), lse.detach(), Gradients(*found)


def same(a: tuple, b: tuple) -> bool:
    pairs = [*zip(a[:2], b[:2], strict=True), *zip(a[2], b[2], strict=True)]
    return all(x is y is None or equal_bits(x, y) for x, y in pairs)


def check(c: Call, found: tuple[torch.Tensor, torch.Tensor, Gradients]):
    """Raise AssertionError where what `run` has found is too far from float64."""
    c.check_result(*found[:2])
    # Where the diagonal cuts off whole tiles dV does not hear of NaN.
    if c.causal is None or not found[0].isnan().any():
        c.check(found[2], 2 * FACTOR if c.scores.dtype == fp32 else FACTOR)
