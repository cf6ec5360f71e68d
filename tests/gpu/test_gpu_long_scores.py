"""Long rows: every math, with every kind of scores, at lengths of each way to hold a row, against float64."""

import math
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
import torch
from families import Case
from test_gpu_family import BACKWARD, FORWARD, tensor_of

from cute_softmax.plan import NotPlanned

bf16, fp32 = torch.bfloat16, torch.float32
# In one CTA, in clusters of 2 to 16 in registers and in shared memory, persistent, and in parts.
LENGTHS = (9000, 17000, 40001, 70000, 120003, 200000, 300000, 440000, 700001, 1200000, 3000001)
PAIRS = ((bf16, bf16), (fp32, fp32), (bf16, fp32))
KINDS = (
    "", "scale", "groups", "mask", "bias", "causal", "causal scale", "bias causal scale", "mask causal", "sink",
    "sink causal groups", "alpha", "mask zero causal",
)  # fmt: skip
PARTS = 32


def case_of(seed: int, n: int, pair: tuple, name: str, kind: str) -> Case:
    """Of a few rows or of many; with -inf in some; at a vector boundary or off it."""
    rng, kinds, (dtype, result) = Random(seed), kind.split(), pair
    rows = rng.choice((2, 3, 200 if n <= 200000 else 40 if n <= 700001 else 3))
    x = tensor_of(rng, (rows, n), dtype)
    if rng.random() < 0.3:
        x[rows // 2, : n // 2] = -math.inf
    if rng.random() < 0.2:
        x[0] = -math.inf
    beside, numbers = (rng.choice((1, rows)), n), (rows, 1)
    given = {
        "scale": {"scale": 0.5},
        "groups": {"scale": tensor_of(rng, numbers, fp32)},
        "mask": {"mask": tensor_of(rng, beside, fp32) > -0.5},
        "bias": {"bias": tensor_of(rng, beside, dtype)},
        "causal": {"offset": rng.choice([0, n // 3, n - rows // 2, -1])},
        "sink": {"sink": tensor_of(rng, numbers, fp32)},
        "alpha": {"alpha": 2.5},
        "zero": {"zero": True},
    }
    fields = {"place": rng.choice(((0, 0), (1, 3), (0, 1), (0, 0)))}
    for word in kinds:
        fields |= given[word]
    refused = {"log_softmax": {"alpha"}, "logsumexp": {"alpha", "zero"}, "entropy": {"alpha", "sink"}}
    refused |= {"softmax_backward": {"mask", "bias", "zero", "sink"}}
    refused |= {"log_softmax_backward": refused["softmax_backward"] | {"alpha"}}
    fields = {k: v for k, v in fields.items() if k not in refused.get(name, ())}
    if name not in BACKWARD:
        if result is not dtype or name == "entropy":
            fields["dtype"] = result
        return Case(name, x, **fields)
    x = x.nan_to_num(neginf=0.3)
    forward = Case(name.removesuffix("_backward"), x * 0.5, offset=fields.get("offset"), zero=True)
    y = forward.expected(fp32)[0] * fields.get("alpha", 1.0)
    return Case(name, x, y=y.to(dtype), **fields)


def every() -> Iterator[tuple]:
    """Arguments of `case_of`: a third of all, of each length and pair another one."""
    for block, (n, pair) in enumerate(product(LENGTHS, PAIRS)):
        for i, (name, kind) in enumerate(product((*FORWARD, *BACKWARD), KINDS)):
            if (i + block) % 3 == 0:
                yield 100 * block + i, n, pair, name, kind


@pytest.mark.parametrize("part", range(PARTS))
def test_against_float64(part):
    wrong = []
    for given in [*every()][part::PARTS]:
        try:
            case = case_of(*given)
            case.check(case.launched())
        except NotPlanned:
            continue
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{given}: {str(error)[:300]}")
    assert not wrong, "\n".join(["", *wrong])
