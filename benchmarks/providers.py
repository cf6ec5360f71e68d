"""Who is measured, each called as its users call it.

A provider is a class with one method per operation it has: `method(case)` returns the callable to time, which
takes the operation's tensors and returns the output, a tensor or several. `entry(case)` returns the differentiable
function of one tensor that its users call, for host times. Packages are imported only when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from . import cudnn, information, losses, masked, routers, sampling, selective
from .cases import (
    AND_CAUSAL,
    FLASHINFER,
    INVARIANT,
    ITEM_BYTES,
    LADDER,
    RECOMPUTED,
    STREAMS,
    TRANSPOSED,
    TWO_STEPS,
    Case,
)
from .copies import Call, Copy
from .gradients import Backward
from .information import Informed
from .operations import DTYPES
from .routers import Router
from .timing import event_us


class Refusal(Exception):
    """A provider has no such operation, or takes no such case."""


def _one_dim(case: Case) -> int:
    if len(case.dim) != 1:
        raise Refusal(f"takes one dimension, not {list(case.dim)}")
    return case.dim[0]


def _one_or_several(case: Case) -> int | tuple[int, ...]:
    return case.dim if len(case.dim) > 1 else case.dim[0]


def _own_type_only(case: Case) -> None:
    if case.result != case.dtype:
        raise Refusal("gives results in the input's type")


def _last_dim_only(case: Case) -> None:
    if _one_dim(case) % len(case.shape) != len(case.shape) - 1:
        raise Refusal("takes the last dimension only")


def _in_mode(case: Case, call: Call) -> Call:
    """The call, or the same within `batch_invariant`."""
    if case.mode != INVARIANT:
        return call
    import cute_softmax

    return cute_softmax.batch_invariant()(call)


class CuteSoftmax(Router, Informed):
    """This package."""

    def softmax(self, case: Case) -> Call:
        import cute_softmax

        dim = _one_or_several(case)
        if case.result != case.dtype:
            return lambda x: cute_softmax.softmax(x, dim, DTYPES[case.result])
        return _in_mode(case, lambda x: cute_softmax.softmax(x, dim))

    def softmax_backward(self, case: Case) -> Call:
        import cute_softmax

        dim = _one_or_several(case)
        return lambda dy, y: cute_softmax.softmax_backward(dy, y, dim)

    def _reduction(self, name: str, case: Case) -> Call:
        import cute_softmax

        function, dim = getattr(cute_softmax, name), _one_or_several(case)
        return _in_mode(case, lambda x: function(x, dim))

    def log_softmax(self, case: Case) -> Call:
        import cute_softmax

        dim = _one_or_several(case)
        if case.result != case.dtype:
            return lambda x: cute_softmax.log_softmax(x, dim, DTYPES[case.result])
        return _in_mode(case, lambda x: cute_softmax.log_softmax(x, dim))

    def log_softmax_backward(self, case: Case) -> Call:
        import cute_softmax

        dim = _one_or_several(case)
        return lambda dy, y: cute_softmax.log_softmax_backward(dy, y, dim)

    def masked_softmax(self, case: Case) -> Call:
        return masked.ours(case)

    def sampling(self, case: Case) -> Call:
        from cute_softmax.sampling import softmax

        return sampling.called(case, softmax)

    def selective_log_softmax(self, case: Case) -> Call:
        return selective.forward(selective.ours(case))

    def selective_gradient(self, case: Case) -> Call:
        return selective.gradient(selective.ours(case))

    def of_rows(self, case: Case) -> information.OfRows:
        return information.ours(case)

    def cross_entropy(self, case: Case) -> Call:
        import cute_softmax

        loss = losses.of(cute_softmax.cross_entropy, case)
        return losses.gradient(partial(loss, one_visit=False) if case.mode == RECOMPUTED else loss)

    def router(self, case: Case) -> routers.Choose:
        import cute_softmax

        k, among = case.k, routers.renormalized(case)
        return lambda x: cute_softmax.topk_softmax(x, k, renormalize=among)

    def logsumexp(self, case: Case) -> Call:
        return self._reduction("logsumexp", case)

    def amax(self, case: Case) -> Call:
        return self._reduction("amax", case)

    def sum(self, case: Case) -> Call:
        return self._reduction("sum", case)

    def softmax_matmul(self, case: Case) -> Call:
        import cute_softmax

        causal = case.mode.endswith(AND_CAUSAL)
        if case.mode.endswith(TWO_STEPS):
            return lambda s, v: cute_softmax.softmax_matmul(s, v, stats=cute_softmax.softmax_stats(s))
        return lambda s, v: cute_softmax.softmax_matmul(s, v, causal=causal)

    def softmax_matmul_backward(self, case: Case) -> Call:
        return Backward(self.softmax_matmul(case))

    entry = softmax


class Torch(Router, Informed):
    """torch, eager."""

    def softmax(self, case: Case) -> Call:
        dim, dtype = _one_dim(case), None if case.result == case.dtype else DTYPES[case.result]
        return lambda x: torch.softmax(x, dim, dtype)

    def softmax_backward(self, case: Case) -> Call:
        dim, dtype = _one_dim(case), DTYPES[case.dtype]
        return lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, dim, dtype)

    def log_softmax(self, case: Case) -> Call:
        dim, dtype = _one_dim(case), None if case.result == case.dtype else DTYPES[case.result]
        return lambda x: torch.log_softmax(x, dim, dtype)

    def log_softmax_backward(self, case: Case) -> Call:
        dim, dtype = _one_dim(case), DTYPES[case.dtype]
        return lambda dy, y: torch.ops.aten._log_softmax_backward_data(dy, y, dim, dtype)

    def masked_softmax(self, case: Case) -> Call:
        dim, scores = _one_dim(case), masked.scores(case)
        return lambda *inputs: torch.softmax(scores(*inputs), dim)

    def sampling(self, case: Case) -> Call:
        return sampling.called(case, sampling.torchs)

    def selective_log_softmax(self, case: Case) -> Call:
        return selective.forward(selective.torchs(case))

    def selective_gradient(self, case: Case) -> Call:
        return selective.gradient(selective.torchs(case))

    def of_rows(self, case: Case) -> information.OfRows:
        return information.torchs(case)

    def cross_entropy(self, case: Case) -> Call:
        return losses.gradient(losses.torchs(case))

    def router(self, case: Case) -> routers.Choose:
        return routers.torchs(case)

    def logsumexp(self, case: Case) -> Call:
        return lambda x: torch.logsumexp(x, case.dim)

    def amax(self, case: Case) -> Call:
        return lambda x: torch.amax(x, case.dim)

    def sum(self, case: Case) -> Call:
        return lambda x: torch.sum(x, case.dim)

    def softmax_matmul(self, case: Case) -> Call:
        def call(s: Tensor, v: Tensor) -> Tensor:
            if case.mode.endswith(AND_CAUSAL):
                beyond = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
                s = s.masked_fill(beyond, -math.inf)
            return torch.softmax(s, -1) @ v

        return call

    def softmax_matmul_backward(self, case: Case) -> Call:
        return Backward(self.softmax_matmul(case))

    entry = softmax


class TorchCompile(Router, Informed):
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

    def log_softmax(self, case: Case) -> Call:
        return self._compile(Torch().log_softmax(case))

    def log_softmax_backward(self, case: Case) -> Call:
        return self._compile(Torch().log_softmax_backward(case))

    def masked_softmax(self, case: Case) -> Call:
        return self._compile(Torch().masked_softmax(case))

    def sampling(self, case: Case) -> Call:
        return self._compile(Torch().sampling(case))

    def selective_log_softmax(self, case: Case) -> Call:
        return selective.forward(self._compile(selective.torchs(case)))

    def selective_gradient(self, case: Case) -> Call:
        return selective.gradient(self._compile(selective.torchs(case)))

    def of_rows(self, case: Case) -> information.OfRows:
        return self._compile(information.torchs(case))

    def cross_entropy(self, case: Case) -> Call:
        return losses.gradient(self._compile(losses.torchs(case)))

    def router(self, case: Case) -> routers.Choose:
        return self._compile(routers.torchs(case))

    def logsumexp(self, case: Case) -> Call:
        return self._compile(Torch().logsumexp(case))

    def amax(self, case: Case) -> Call:
        return self._compile(Torch().amax(case))

    def sum(self, case: Case) -> Call:
        return self._compile(Torch().sum(case))

    def softmax_matmul(self, case: Case) -> Call:
        return self._compile(Torch().softmax_matmul(case))

    def softmax_matmul_backward(self, case: Case) -> Call:
        return Backward(self.softmax_matmul(case))

    def entry(self, case: Case) -> Call:
        compiled = self.softmax(case)
        return lambda x: compiled(x)


class Liger:
    """Liger Kernel: what its module's autograd function calls."""

    def softmax(self, case: Case) -> Call:
        _own_type_only(case)
        _last_dim_only(case)
        from liger_kernel.ops.softmax import _softmax_forward

        return lambda x: _softmax_forward(x)[0]

    def softmax_backward(self, case: Case) -> Call:
        _last_dim_only(case)
        from liger_kernel.ops.softmax import _softmax_backward
        from liger_kernel.ops.utils import calculate_settings

        columns = case.shape[-1]
        block, warps = calculate_settings(columns)
        return lambda dy, y: _softmax_backward(dy, y, block, warps, columns > block)

    def cross_entropy(self, case: Case) -> Call:
        from liger_kernel.transformers.functional import liger_cross_entropy

        return losses.OverTheLogits(losses.of(liger_cross_entropy, case))

    def entry(self, case: Case) -> Call:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x: LigerSoftmaxFunction.apply(x)


class Quack(Router):
    """QuACK, which takes the rows of a matrix: over dim 0 its users transpose before and after it."""

    def _over_rows(self, case: Case, function: Call) -> Call:
        if len(case.shape) != 2 or len(case.dim) != 1:
            raise Refusal("takes the last dimension of two only")
        from cute_softmax.plan.hardware import ARCHITECTURES

        # With longer rows its compiler works for half a minute and more (2^23 elements in float32); the launch fails.
        hopper, inputs = ARCHITECTURES["sm_90a"], STREAMS[case.op] - 1
        room = hopper.cluster_limit * hopper.shared_memory
        if case.shape[case.dim[0]] * ITEM_BYTES[case.dtype] * inputs > room:
            raise Refusal("takes rows only that fit into the shared memory of a cluster")
        if case.dim[0] % 2 == 0:
            # Where the input is a transposed matrix, so is the result, and nothing is copied.
            back = (lambda y: y.t()) if case.view == TRANSPOSED else (lambda y: y.t().contiguous())
            return lambda *tensors: back(function(*(t.t().contiguous() for t in tensors)))
        if case.view == TRANSPOSED:
            return lambda *tensors: function(*(t.contiguous() for t in tensors))
        return function

    def softmax(self, case: Case) -> Call:
        _own_type_only(case)
        from quack.softmax import softmax_fwd

        return self._over_rows(case, lambda x: softmax_fwd(x))

    def sampling(self, case: Case) -> Call:
        if sampling.of_all(case) != 1:
            raise Refusal("has no temperature")
        return self.softmax(case)

    def softmax_backward(self, case: Case) -> Call:
        from quack.softmax import softmax_bwd

        return self._over_rows(case, lambda dy, y: softmax_bwd(dy, y))

    def cross_entropy(self, case: Case) -> Call:
        from quack.cross_entropy import cross_entropy

        if case.mode:
            raise Refusal(f"has no {case.mode}")
        return self._over_rows(case, losses.gradient(cross_entropy))

    def router(self, case: Case) -> routers.Choose:
        if not routers.renormalized(case):
            raise Refusal("has the softmax of the chosen alone")
        if any(n & (n - 1) for n in (case.shape[-1], case.k)):
            raise Refusal("takes powers of two only")
        if case.k * torch.bfloat16.itemsize < 16:  # with fewer its gradient writes beyond its shared memory
            raise Refusal("takes 16 bytes of results only")
        from quack.topk import topk

        return lambda x: topk(x, case.k, softmax=True)

    def softmax_matmul(self, case: Case) -> Call:
        if case.mode.endswith(AND_CAUSAL):
            raise Refusal("has no mask")
        from quack.softmax import softmax_fwd

        return lambda s, v: softmax_fwd(s.flatten(0, -2)).view(s.shape) @ v

    def entry(self, case: Case) -> Call:
        from quack.softmax import softmax

        return self._over_rows(case, lambda x: softmax(x))


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
                us = min(event_us(lambda way=way: way(*tensors)) for _ in range(3))
            except Exception as error:
                problem = error
                continue
            if us < best:
                best, self._chosen, self.note = us, way, name
        if self._chosen is None:
            raise problem


class Cudnn:
    """cuDNN: over the channels of NCHW, the other dimensions merged; where these are rows, the faster of two modes."""

    def _ways(self, case: Case, function: Callable[..., Call]) -> Call:
        dim = _one_dim(case) % len(case.shape)
        if case.view:
            raise Refusal("takes contiguous tensors only")
        outer, inner = math.prod(case.shape[:dim]), math.prod(case.shape[dim + 1 :])
        # H = 1, W = inner: the layout in memory is the same, and over the channels nothing else matters.
        shape, dtype = (outer, case.shape[dim], 1, inner), DTYPES[case.dtype]
        if inner > 1:
            return function(shape, dtype, "channel")
        return Fastest({mode: function(shape, dtype, mode) for mode in cudnn.MODES})

    def softmax(self, case: Case) -> Call:
        _own_type_only(case)
        return self._ways(case, cudnn.softmax)

    def softmax_backward(self, case: Case) -> Call:
        return self._ways(case, cudnn.softmax_backward)


class Trl:
    """TRL's kernel of log-probabilities and entropies, which `trl.trainer.utils` calls for CUDA tensors."""

    def _both(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        # The kernels need transformers and Triton, the trainers much else.
        from trl.kernels import selective_log_softmax_and_entropy

        return selective_log_softmax_and_entropy

    def selective_log_softmax(self, case: Case) -> Call:
        return selective.forward(selective.fused(case, self._both()))

    def selective_gradient(self, case: Case) -> Call:
        return selective.gradient(selective.fused(case, self._both()))


class TrlForm(Trl):
    """The same form written anew: see `fused`."""

    def _both(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        from .fused import selective_log_softmax_and_entropy

        return selective_log_softmax_and_entropy


class FlashInfer:
    """FlashInfer's softmax of its sampling functions; with its default its kernels begin early where the GPU can."""

    def sampling(self, case: Case) -> Call:
        from flashinfer.sampling import softmax

        return sampling.called(case, softmax)


class Rung:
    """A rung of the ladder: small kernels to learn from, below them the naive form."""

    def __init__(self, number: int) -> None:
        self._number = number

    def softmax(self, case: Case) -> Call:
        _own_type_only(case)
        from cute_softmax import ladder

        dim = _one_dim(case)
        return lambda x: ladder.softmax(x, self._number, dim)


REGISTRY: dict[str, object] = {
    "cute_softmax": CuteSoftmax(),
    "copy": Copy(),
    "torch": Torch(),
    "torch.compile": TorchCompile(),
    "liger": Liger(),
    "quack": Quack(),
    "cudnn": Cudnn(),
    "trl": Trl(),
    "trl-form": TrlForm(),
    FLASHINFER: FlashInfer(),
    **{name: Rung(number) for number, name in enumerate(LADDER)},
}


def build(provider: str, operation: str, case: Case) -> Call:
    """The callable by which `provider` does `operation` (an op's name, or "entry") on `case`; may raise."""
    method = getattr(REGISTRY[provider], operation, None)
    if method is None:
        raise Refusal(f"has no {operation}")
    return method(case)
