"""Softmax kernels for NVIDIA GPUs, written in the CuTe DSL.

>>> import torch, cute_softmax
>>> y = cute_softmax.softmax(torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16))
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("torch"):  # plans, layouts and diagrams work without
    from .functional import explain, plan_softmax, prepare, softmax, softmax_backward
    from .reductions import amax, logsumexp, plan_reduction, sum
    from .softmax_matmul import softmax_matmul

__all__ = [
    "amax",
    "explain",
    "logsumexp",
    "plan_reduction",
    "plan_softmax",
    "prepare",
    "softmax",
    "softmax_backward",
    "softmax_matmul",
    "sum",
]
__version__ = "0.1.0"
