"""Softmax kernels for NVIDIA GPUs, written in the CuTe DSL.

>>> import torch, cute_softmax
>>> y = cute_softmax.softmax(torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16))
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from . import hardware as hardware
from .plan import NotPlanned
from .plan.base import PlanBase

if TYPE_CHECKING or find_spec("torch"):  # plans, layouts and diagrams work without
    from . import nn, sampling
    from .accelerate import accelerate, accelerated, restore
    from .api.cross_entropy import cross_entropy
    from .api.explain import explain, plan_reduction, plan_softmax
    from .api.matmul import softmax_matmul, softmax_stats
    from .api.reductions import amax, logsumexp, sum
    from .api.selective import entropy, selective_log_softmax
    from .api.softmax import log_softmax, log_softmax_backward, prepare, softmax, softmax_, softmax_backward
    from .api.statistics import Statistics, merge_statistics, partial_statistics
    from .api.topk import plan_topk_softmax, topk_softmax
    from .runtime.invariance import batch_invariant

__all__ = [
    "NotPlanned",
    "Statistics",
    "accelerate",
    "accelerated",
    "amax",
    "batch_invariant",
    "cross_entropy",
    "entropy",
    "explain",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "merge_statistics",
    "nn",
    "partial_statistics",
    "plan_reduction",
    "plan_softmax",
    "plan_topk_softmax",
    "prepare",
    "restore",
    "sampling",
    "selective_log_softmax",
    "softmax",
    "softmax_",
    "softmax_backward",
    "softmax_matmul",
    "softmax_stats",
    "sum",
    "topk_softmax",
]
__version__ = "0.1.0"


def _repr_svg_(plan: PlanBase) -> str:
    """The tile of a plan's first CTA, as a notebook shows it."""
    from .draw import overview

    return overview(plan).svg()


PlanBase._repr_svg_ = _repr_svg_
