"""GPU tests run in the interpreter of kernels, on a GPU's random numbers."""

import os
import subprocess
import sys
from pathlib import Path

import emulated_gpu
import pytest
import torch

SOME = (
    "test_gpu_placement.py::test_dimensions[(2, 3, 4, 127)-3-fp32]",
    "test_gpu_matmul_backward.py::test_shapes[1-8-40-torch.float16]",
    "test_gpu_matmul_backward.py::test_graph_and_stream",  # which asks CUDA
)


def test_random_numbers_are_a_gpus():
    """Those that an H200 has made."""
    found = emulated_gpu.random((1, 5), torch.float32, seed=5)
    assert torch.allclose(found, torch.tensor([[0.3097, 1.2164, 0.7741, 1.6701, 0.4006]]), atol=5e-5)
    large = emulated_gpu.random((8, 50257), torch.bfloat16, seed=50257, scale=2.0)
    first = torch.softmax(large[0].double(), -1)[:3]
    assert torch.allclose(first, torch.tensor([4.5291e-06, 1.2825e-06, 1.9518e-06]).double(), rtol=1e-4)


@pytest.mark.long
def test_some_run_in_the_interpreter():
    tests = [str(Path(__file__).parent / "gpu" / name) for name in SOME]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=environment | {"CUTE_SOFTMAX_TEST_EMULATED": "1"},
        capture_output=True,
        text=True,
    )
    assert "2 passed, 1 skipped" in done.stdout, done.stdout
