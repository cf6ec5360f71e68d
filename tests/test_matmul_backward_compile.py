"""Compiled backward of softmax_matmul, read without a GPU: registers, stack, wgmma and the ways in and out."""

import re

import pytest
from compiled import compile_and_read

from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.matmul_backward import MatmulDeltaClass, matmul_backward_class

SM_90A = ARCHITECTURES["sm_90a"]
VARIANTS = [
    ("bf16", 64, {}),
    ("bf16", 128, {}),
    ("bf16", 256, {}),
    ("bf16", 512, {}),
    ("bf16", 128, {"causal": True}),
    ("bf16", 128, {"mask": True}),
    ("bf16", 128, {"bias": "fp32"}),
    ("bf16", 128, {"lines": True}),
    ("bf16", 128, {"lines": True, "sent": False}),
    ("fp32", 128, {"lines": True}),
    ("bf16", 512, {"lines": True, "causal": True, "mask": True, "bias": "bf16"}),
]
STACK = 256  # bytes that the deepest and busiest may spill


def identifier(variant) -> str:
    scores, depth, flags = variant
    return "-".join([scores, str(depth), *flags])


@pytest.mark.parametrize("variant", VARIANTS, ids=identifier)
def test_resources_and_instructions(variant, tmp_path, monkeypatch):
    scores, depth, flags = variant
    c = matmul_backward_class(SM_90A, (scores, "bf16", "bf16"), depth, **flags)
    found = compile_and_read(c, tmp_path, monkeypatch)
    plain = depth <= 128 and not {"mask", "bias"} & set(flags)
    assert found.stack <= (0 if plain else STACK) and found.local == 0
    assert found.threads == (c.threads, 1, 1)
    assert c.shared_memory <= found.shared <= SM_90A.shared_memory
    # dP = V dO^T takes depth / 16 instructions, dV += P^T dO rows / 16.
    wgmma = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", found.ptx)
    assert wgmma.count(f"m64n{c.rows}k16") >= depth // 16
    assert wgmma.count(f"m64n{c.share_depth}k16") >= c.rows // 16
    assert len(wgmma) == depth // 16 + c.rows // 16
    # S comes and dS goes once: whole tiles by TMA, or lines and single elements.
    tiles_out = len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", found.ptx))
    assert tiles_out == (0 if c.lines else 1 + c.causal * c.slabs)
    lines_out = len(re.findall(r"cp\.async\.bulk\.global\.shared", found.ptx))
    assert lines_out == (c.lines and c.sent)
    assert ("ldmatrix" in found.ptx) != c.lines
    # Sums in an order of their own would differ from call to call.
    assert not re.search(r"\b(red|atom)\.", found.ptx)


@pytest.mark.parametrize("depth", [64, 512])
@pytest.mark.parametrize("vector", [1, 8])
def test_delta(depth, vector, tmp_path, monkeypatch):
    c = MatmulDeltaClass("sm_90a", ("bf16", "bf16"), depth, vector, 64, vector == 1, depth == 64)
    found = compile_and_read(c, tmp_path, monkeypatch)
    assert found.stack == 0 and found.threads == (256, 1, 1)
