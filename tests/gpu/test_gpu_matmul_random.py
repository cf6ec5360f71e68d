"""Thousands of random calls of softmax_matmul and their gradients, see `random_products`.

CUTE_SOFTMAX_TEST_CASES: how many, such as 5000. A failure names the seeds.
"""

import os

import pytest
from random_products import check, draw, run, same
from test_gpu_matmul import instruction  # noqa: F401

CASES = int(os.environ.get("CUTE_SOFTMAX_TEST_CASES", "300"))
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part, instruction):  # noqa: F811
    """mma.sync gets a quarter of the cases: both forms handle rows by the same code."""
    wrong = []
    for seed in range(part, CASES if instruction == "wgmma" else CASES // 4, PARTS):
        c, told = draw(seed)
        try:
            found = run(c)
            check(c, found)
            assert seed % 16 or same(found, run(c)), "a second call gave other bits"
        except AssertionError as error:
            wrong.append(f"{told}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
