"""Rows that ranks share, on two GPUs with NCCL: what `test_sharded` does on the CPU, and streams and graphs."""

import on_ranks
import on_ranks_chip
import on_ranks_gpu
import on_ranks_torch
import pytest
import ranks
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("rows are shared by two GPUs, here are fewer", allow_module_level=True)

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def test_values_and_gradients():
    """All functions, in one start of the ranks: processes and groups take most of the time."""
    cuts = ("equal", "unequal", "empty")
    how = [dict(cut=cut, kernels=True, columns=columns) for cut in cuts for columns in (48, 3002)]
    how += [dict(cut="equal", kernels=True, columns=151936, dtype=dtype) for dtype in (bf16, fp32)]
    how += [dict(cut="unequal", kernels=True, columns=50257, dtype=bf16)]
    ranks.run(2, on_ranks_gpu.several, "nccl", works=[(on_ranks.functions, given) for given in how])


def test_bits():
    how = [dict(cut=cut, kernels=True, columns=columns, block=block)
           for cut, columns, block in (("equal", 61, 4), ("turned", 4096, 512), ("unequal", 151936, 2048))]  # fmt: skip
    ranks.run(2, on_ranks_gpu.several, "nccl", works=[(on_ranks.invariant, given) for given in how])


def test_what_is_unusual():
    kernels = dict(kernels=True)
    names = ("padded", "shapes", "several_consumers", "bad_numbers")
    works = [(getattr(on_ranks, name), kernels) for name in names]
    works += [(on_ranks.in_pieces, {}), (on_ranks_torch.two_groups, {}), (on_ranks_torch.dtensors, {})]
    works += [(on_ranks_gpu.memory, {})]
    ranks.run(2, on_ranks_gpu.several, "nccl", works=works)


def test_streams_and_graphs():
    works = [(on_ranks_gpu.streams, {}), (on_ranks_gpu.graphs, {})]
    ranks.run(2, on_ranks_gpu.several, "nccl", works=works)


def test_compiled():
    ranks.run(2, on_ranks_torch.compiled, "nccl", kernels=True)


def test_on_chip():
    ranks.run(2, on_ranks_gpu.several, "nccl", works=[(work, {}) for work in on_ranks_chip.ALL])
