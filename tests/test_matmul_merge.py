"""The launch that merges parts of the columns in softmax(S) @ V, emulated: parts of known sums, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from compiled import compile_and_read
from ptx import Grid, Memory, parse
from test_matmul import planned

from cute_softmax.kernels.matmul.merge_global import MERGE_COLUMNS, Merge
from cute_softmax.kernels.matmul.softmax import HEADROOM


@pytest.mark.parametrize(
    ("rows", "depth", "parts", "mergers", "options"),
    [
        (1, 64, 3, 16, {}),
        (2, 100, 300, 16, {"lse": True}),
        (3, 33, 70, 16, {"lse": True}),
        (2, 64, 17, 16, {"lse": True, "instruction": "mma"}),
        (5, 72, 11, 1, {"lse": True}),
        (300, 128, 4, 1, {"lse": True}),
    ],
)
def test_merged(rows, depth, parts, mergers, options, tmp_path, monkeypatch):
    made = planned((1,), rows, 64 * 4096, depth, **options)
    assert made.kernel.split
    c = replace(made.kernel, mergers=mergers)
    program = parse(compile_and_read(c, tmp_path, monkeypatch, to_run=True).ptx, "merge")
    merge = Merge(c)
    padded = math.ceil(depth / c.depth) * c.depth
    generator = torch.Generator().manual_seed(rows)
    sums = torch.randn(rows, parts, padded, generator=generator)
    refs = torch.randn(rows, parts, generator=generator) * 5
    totals = torch.rand(rows, parts, generator=generator) + 1
    # Parts in which nothing counts, far from the others.
    empty = torch.rand(rows, parts, generator=generator) < 0.3
    empty[:, 1] = False
    refs[empty], totals[empty], sums[empty] = -math.inf, 0.0, 0.0
    refs[0] -= 300
    states = torch.stack((refs, totals), -1)
    kept = torch.cat((sums.flatten(), states.flatten()))
    out = torch.full((rows * depth + 8,), -7.0, dtype=torch.bfloat16)
    lse = torch.full((rows + 1,), -7.0)
    tensors = [out, *([lse] if c.lse else []), kept]
    grid = (math.ceil(rows / merge.rows), math.ceil(depth / (merge.lanes * MERGE_COLUMNS)))
    numbers = [rows, depth, parts, 1.0, *(t.data_ptr() for t in tensors)]
    shared = merge.groups * merge.lanes * MERGE_COLUMNS * 4
    Grid(program, Memory((t.data_ptr(), t.nbytes) for t in tensors), grid, (1, 1), shared).run(numbers)
    weights = torch.exp(refs.double() - refs.double().amax(1, keepdim=True)).nan_to_num()
    total = (weights * totals.double()).sum(1, keepdim=True)
    right = (weights[..., None] * sums.double()).sum(1)[:, :depth] / total
    found = out[: rows * depth].view(rows, depth).double()
    assert torch.allclose(found, right, rtol=2.0**-7, atol=1e-3)
    assert (out[rows * depth :] == -7.0).all() and lse[-1] == -7.0
    if c.lse:
        logs = refs.double().amax(1) + total.log().squeeze(1) - HEADROOM * math.log(2)
        assert torch.allclose(lse[:-1].double(), logs, rtol=1e-5, atol=1e-5)
