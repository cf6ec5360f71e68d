"""Random calls of softmax_matmul's backward: shapes, sharing, strides, options and dtypes drawn together.

CUTE_SOFTMAX_TEST_CASES: how many. A case follows from its seed, which a failure names.
"""

import os
import random as pyrandom

import pytest
import torch
from checking import FACTOR
from gradients import Call, Gradients, call

from cute_softmax.dispatch.matmul import backward

CASES = int(os.environ.get("CUTE_SOFTMAX_TEST_CASES", "60"))
AT_ONCE = 10


def draw(seed: int) -> Call:
    """One case; everything follows from the seed. Options keep apart, so that classes are few."""
    r = pyrandom.Random(seed)
    rows, columns = (max(1, round(2 ** r.uniform(0, 10)) + r.choice([-1, 0, 0, 1])) for _ in range(2))
    columns = columns if r.random() < 0.4 else -(-columns // 8) * 8
    depth = r.choice([64, 128, r.randrange(1, 129), r.choice([64, 128, 192, 256, 512])])
    batch = tuple(r.randrange(1, 4) for _ in range(r.randrange(3)))
    owners = tuple(1 if r.random() < 0.4 else n for n in batch)[r.choice([0, 0, len(batch)]) :]
    dtype = r.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    full = (*batch, rows, columns)
    spread = tuple(1 if r.random() < 0.3 else n for n in full)
    option = r.choice(["", "", "causal", "mask", "bias"])
    c = call(
        batch,
        rows,
        columns,
        depth,
        dtype,
        owners=owners,
        scores=torch.float32 if r.random() < 0.15 else dtype,
        scale=r.choice([1.0, 0.125, -0.5, 3.0]),
        causal=r.randrange(-rows, columns + 1) if option == "causal" else None,
        mask=spread if option == "mask" else None,
        bias=spread if option == "bias" else None,
        zero=True,
    )
    if r.random() < 0.3:
        pad = min(r.choice([1, 8]), columns)
        c.scores = torch.cat([c.scores[..., :pad], c.scores], -1)[..., pad:]
    if r.random() < 0.3:
        c.grad = c.grad.mT.contiguous().mT if r.random() < 0.5 else c.grad[..., :1].expand_as(c.grad)
    if r.random() < 0.3:
        c.values = torch.cat([c.values, c.values], -1)[..., :depth]
    return c


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_random_calls(first):
    for seed in range(first, min(first + AT_ONCE, CASES)):
        c = draw(seed)
        _, result, lse = c.torch(torch.float64)
        found = backward.operator(
            c.scores,
            c.values,
            result.to(c.values.dtype),
            lse.float(),
            c.grad,
            c.scale,
            c.causal,
            c.zero,
            c.mask,
            c.bias,
            c.bias is not None,
            None,
        )
        try:
            c.check(Gradients(*found), 2 * FACTOR if c.scores.dtype == torch.float32 else FACTOR)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}: {tuple(c.scores.shape)} @ {tuple(c.values.shape)}: {error}"
            ) from error
