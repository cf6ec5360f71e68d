"""Softmax kernels for NVIDIA GPUs, written in the CuTe DSL.

>>> import torch, cute_softmax
>>> y = cute_softmax.softmax(torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16))

Importing the package loads neither torch nor cutlass: a name is loaded on first use, and with it what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__ as __version__

if TYPE_CHECKING:  # what `__getattr__` finds, for those who read sources
    from . import hardware as hardware
    from . import integrations as integrations
    from . import nn as nn
    from . import sampling as sampling
    from .acceleration import accelerate, accelerated, restore
    from .api.cross_entropy import cross_entropy
    from .api.divergence import kl_div
    from .api.explain import explain, plan_reduction, plan_softmax
    from .api.matmul import softmax_matmul, softmax_stats
    from .api.reductions import amax, logsumexp
    from .api.reductions import sum as sum
    from .api.selective import entropy, selective_log_softmax
    from .api.softmax import log_softmax, log_softmax_backward, prepare, softmax, softmax_, softmax_backward
    from .api.statistics import Statistics, merge_statistics, partial_statistics
    from .api.topk import plan_topk_log_softmax, plan_topk_softmax, topk_log_softmax, topk_softmax
    from .api.variants import gumbel_softmax, softmin
    from .plan import NotPlanned
    from .runtime.invariance import batch_invariant

# `sum` is public, too, but no star import shall hide Python's own.
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
    "gumbel_softmax",
    "integrations",
    "kl_div",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "merge_statistics",
    "nn",
    "partial_statistics",
    "plan_reduction",
    "plan_softmax",
    "plan_topk_log_softmax",
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
    "softmin",
    "topk_log_softmax",
    "topk_softmax",
]

_MODULES = ("hardware", "integrations", "nn", "sampling")
_HOMES = {
    "plan": ("NotPlanned",),
    "acceleration": ("accelerate", "accelerated", "restore"),
    "api.cross_entropy": ("cross_entropy",),
    "api.divergence": ("kl_div",),
    "api.explain": ("explain", "plan_reduction", "plan_softmax"),
    "api.matmul": ("softmax_matmul", "softmax_stats"),
    "api.reductions": ("amax", "logsumexp", "sum"),
    "api.selective": ("entropy", "selective_log_softmax"),
    "api.softmax": (
        "log_softmax",
        "log_softmax_backward",
        "prepare",
        "softmax",
        "softmax_",
        "softmax_backward",
    ),
    "api.statistics": ("Statistics", "merge_statistics", "partial_statistics"),
    "api.topk": ("plan_topk_log_softmax", "plan_topk_softmax", "topk_log_softmax", "topk_softmax"),
    "api.variants": ("gumbel_softmax", "softmin"),
    "runtime.invariance": ("batch_invariant",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name on its first use; it stays, so that later uses are plain look-ups."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted((*_MODULES, *_HOME_OF, "__version__"))
