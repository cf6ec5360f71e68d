"""Who is measured, each called as its users call it.

A provider is a class with one method per operation it has: `method(case)` returns the callable to time, which
takes the operation's tensors and returns the output. `entry(case)` returns the differentiable function of one
tensor that its users call, for host times. Packages are imported only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .cases import Case
from .operations import DTYPES

Call = Callable[..., Tensor]


class Refusal(Exception):
    """A provider has no such operation, or takes no such case."""


def _one_dim(case: Case) -> int:
    if len(case.dim) != 1:
        raise Refusal(f"takes one dimension, not {list(case.dim)}")
    return case.dim[0]


def _rows_only(case: Case) -> tuple[int, int]:
    if len(case.shape) != 2 or case.dim not in ((-1,), (1,)):
        raise Refusal("takes the last dimension of two only")
    return case.shape[0], case.shape[1]


class CuteSoftmax:
    """This package."""

    def softmax(self, case: Case) -> Call:
        import cute_softmax

        dim = case.dim if len(case.dim) > 1 else case.dim[0]
        return lambda x: cute_softmax.softmax(x, dim)

    def softmax_backward(self, case: Case) -> Call:
        import cute_softmax

        dim = case.dim if len(case.dim) > 1 else case.dim[0]
        return lambda dy, y: cute_softmax.softmax_backward(dy, y, dim)

    entry = softmax


class Copy:
    """The yardstick: the same bytes through torch's own copy, or its add for two inputs."""

    def softmax(self, case: Case) -> Call:
        return lambda x: torch.empty_like(x).copy_(x)

    def softmax_backward(self, case: Case) -> Call:
        return lambda dy, y: torch.add(y, dy, out=torch.empty_like(y))


class Torch:
    """torch, eager."""

    def softmax(self, case: Case) -> Call:
        dim = _one_dim(case)
        return lambda x: torch.softmax(x, dim)

    def softmax_backward(self, case: Case) -> Call:
        dim, dtype = _one_dim(case), DTYPES[case.dtype]
        return lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, dim, dtype)

    entry = softmax


class TorchCompile:
    """torch.compile(dynamic=False) of torch's own, compiled afresh for every case."""

    def _compile(self, function: Call) -> Call:
        from torch import _dynamo

        _dynamo.reset()
        _dynamo.config.recompile_limit = 256
        return torch.compile(function, dynamic=False)

    def softmax(self, case: Case) -> Call:
        return self._compile(Torch().softmax(case))

    def softmax_backward(self, case: Case) -> Call:
        return self._compile(Torch().softmax_backward(case))

    def entry(self, case: Case) -> Call:
        compiled = self.softmax(case)
        return lambda x: compiled(x)


class Liger:
    """Liger Kernel: what its module's autograd function calls."""

    def softmax(self, case: Case) -> Call:
        from liger_kernel.ops.softmax import _softmax_forward

        return lambda x: _softmax_forward(x)[0]

    def softmax_backward(self, case: Case) -> Call:
        from liger_kernel.ops.softmax import _softmax_backward
        from liger_kernel.ops.utils import calculate_settings

        _, columns = _rows_only(case)
        block, warps = calculate_settings(columns)
        return lambda dy, y: _softmax_backward(dy, y, block, warps, columns > block)

    def entry(self, case: Case) -> Call:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x: LigerSoftmaxFunction.apply(x)


class Quack:
    """QuACK."""

    def softmax(self, case: Case) -> Call:
        from quack.softmax import softmax_fwd

        _rows_only(case)
        return lambda x: softmax_fwd(x)

    def softmax_backward(self, case: Case) -> Call:
        from quack.softmax import softmax_bwd

        _rows_only(case)
        return lambda dy, y: softmax_bwd(dy, y)

    def entry(self, case: Case) -> Call:
        from quack.softmax import softmax

        _rows_only(case)
        return lambda x: softmax(x)


class Fastest:
    """Several ways to do the same; the first call tries all of them, and the fastest is kept.

    `note` names it. A way that raises is left out; when all do, the last error is raised.
    """

    def __init__(self, ways: Mapping[str, Call]) -> None:
        self._ways = ways
        self._chosen: Call | None = None
        self.note = ""

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self._chosen is None:
            self._choose(tensors)
        return self._chosen(*tensors)

    def _choose(self, tensors: tuple[Tensor, ...]) -> None:
        best, problem = float("inf"), Refusal("no way to do it")
        for name, way in self._ways.items():
            try:
                us = min(_event_us(way, tensors) for _ in range(3))
            except Exception as error:
                problem = error
                continue
            if us < best:
                best, self._chosen, self.note = us, way, name
        if self._chosen is None:
            raise problem


def _event_us(call: Call, tensors: tuple[Tensor, ...]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*tensors)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class Cudnn:
    """cuDNN, the faster of the two modes that fit rows."""

    def softmax(self, case: Case) -> Call:
        from . import cudnn

        shape, dtype = _rows_only(case), DTYPES[case.dtype]
        return Fastest({mode: cudnn.softmax(*shape, dtype, mode) for mode in cudnn.MODES})

    def softmax_backward(self, case: Case) -> Call:
        from . import cudnn

        shape, dtype = _rows_only(case), DTYPES[case.dtype]
        return Fastest({mode: cudnn.softmax_backward(*shape, dtype, mode) for mode in cudnn.MODES})


REGISTRY: dict[str, object] = {
    "cute_softmax": CuteSoftmax(),
    "copy": Copy(),
    "torch": Torch(),
    "torch.compile": TorchCompile(),
    "liger": Liger(),
    "quack": Quack(),
    "cudnn": Cudnn(),
}


def build(provider: str, operation: str, case: Case) -> Call:
    """The callable by which `provider` does `operation` (an op's name, or "entry") on `case`; may raise."""
    method = getattr(REGISTRY[provider], operation, None)
    if method is None:
        raise Refusal(f"has no {operation}")
    return method(case)
