"""Softmax kernels for NVIDIA GPUs, written in the CuTe DSL.

>>> import torch, cute_softmax
>>> y = cute_softmax.softmax(torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16))
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from .plan import NotPlanned

if TYPE_CHECKING or find_spec("torch"):  # plans, layouts and diagrams work without
    from . import nn
    from .accelerate import accelerate, accelerated, restore
    from .family import entropy, log_softmax, log_softmax_backward, selective_log_softmax, softmax_
    from .functional import explain, plan_softmax, prepare, softmax, softmax_backward
    from .matmul_stats import softmax_stats
    from .reductions import amax, logsumexp, plan_reduction, sum
    from .softmax_matmul import softmax_matmul

__all__ = [
    "NotPlanned",
    "accelerate",
    "accelerated",
    "amax",
    "entropy",
    "explain",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "nn",
    "plan_reduction",
    "plan_softmax",
    "prepare",
    "restore",
    "selective_log_softmax",
    "softmax",
    "softmax_",
    "softmax_backward",
    "softmax_matmul",
    "softmax_stats",
    "sum",
]
__version__ = "0.1.0"
