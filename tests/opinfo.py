"""PyTorch's own samples and error inputs (its OpInfo database) as judge of our functions and of `accelerate`.

::

    python tests/opinfo.py                    judge on the GPU (the CPU where there is none), print a table
    python tests/opinfo.py --save             and write benchmarks/results/<gpu>/checks/opinfo.json

Each sample is one check per row of `CHECKS`. A result must have torch's dtype and shape (under `accelerate` its strides,
too), its infinities and NaN, and differ from float64 by at most twice what torch's own result does, or by two units
in the last place of the largest element.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
try:
    import expecttest  # noqa: F401
except ImportError:  # torch's testing modules derive a class from its TestCase, which nothing here uses
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo, SampleInput  # noqa: E402

import cute_softmax  # noqa: E402
from cute_softmax import functional, launch  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROUTES = ("functions", "accelerate")


def _masked(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """In the arguments of torch.masked."""

    def masked(input, dim, *, dtype=None, mask=None):
        return function(input, dim, dtype, mask=mask)

    return masked


# By the OpInfo's name: what stands for it here, in the same arguments.
OURS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": cute_softmax.softmax,
    "log_softmax": cute_softmax.log_softmax,
    "logsumexp": cute_softmax.logsumexp,
    "amax": cute_softmax.amax,
    "sum": cute_softmax.sum,
    "masked.softmax": _masked(cute_softmax.softmax),
    "masked.log_softmax": _masked(cute_softmax.log_softmax),
    "_softmax_backward_data": cute_softmax.softmax_backward,
    "torch.ops.aten._safe_softmax.default": lambda input, dim, dtype=None: cute_softmax.softmax(
        input, dim, dtype, empty_rows="zero"
    ),
}
NOT_REPLACED = ("amax", "sum")  # by `accelerate`


@dataclass
class Verdict:
    """The checks of one operator, dtype and route."""

    operator: str
    dtype: str
    route: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    handed_on: Counter[str] = field(default_factory=Counter)  # of those passed or failed: ATen's work

    def row(self) -> dict[str, object]:
        return {**vars(self), "skipped": dict(self.skipped), "handed_on": dict(self.handed_on)}


class Skip(Exception):
    """Why a check does not apply."""


def operators() -> list[OpInfo]:
    """The OpInfos that are judged; each has samples for all of `DTYPES`."""
    return [op for op in op_db if op.name in OURS]


def samples(op: OpInfo, device: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    """Torch's samples, which ask for results in float64 only, and the same for results in each of our dtypes."""
    torch.manual_seed(0)
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        yield sample
        if sample.kwargs.get("dtype") is torch.float64:
            for wanted in DTYPES:
                yield replace_dtype(sample, wanted)


def replace_dtype(sample: SampleInput, dtype: torch.dtype) -> SampleInput:
    """With another dtype asked for."""
    return sample.transform(lambda t: dtype if isinstance(t, torch.dtype) else t)


def detached(sample: SampleInput) -> SampleInput:
    return sample.transform(lambda t: t.detach() if isinstance(t, torch.Tensor) else t)


def in_float64(sample: SampleInput) -> SampleInput:
    """The same values, and the same dtype nowhere."""

    def wide(t):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            return t.detach().double().requires_grad_(t.requires_grad)
        return torch.float64 if isinstance(t, torch.dtype) else t

    return sample.transform(wide)


def called(function: Callable[..., torch.Tensor], sample: SampleInput, **more: object) -> torch.Tensor:
    return function(sample.input, *sample.args, **sample.kwargs, **more)


def compare(ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Raise AssertionError where ours is not as good as torch's. kept: the elements that mean something."""
    assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape), (ours.dtype, ours.shape, torchs.dtype)
    ours, torchs, exact = (t.detach().double() for t in (ours, torchs, exact))
    if kept is not None:
        kept = kept.expand(ours.shape)
        ours, torchs, exact = ours[kept], torchs[kept], exact[kept]
    finite = torchs.isfinite()
    assert torch.equal(ours.isnan(), torchs.isnan()), "NaN elsewhere than in torch's"
    assert torch.equal(ours[torchs.isinf()], torchs[torchs.isinf()]), "infinities elsewhere than in torch's"
    ours, torchs, exact = ours[finite], torchs[finite], exact[finite]
    if not ours.numel():
        return
    error, allowed = (ours - exact).abs().max().item(), 2 * (torchs - exact).abs().max().item()
    allowed = max(allowed, 2 * torch.finfo(_DTYPE[0]).eps * max(exact.abs().max().item(), _UNIT[0]))
    assert error <= allowed, f"off by {error:.3g} where {allowed:.3g} is allowed"
