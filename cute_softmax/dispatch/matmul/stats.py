"""Row statistics for several products with the same scores, in every state of torch."""

from __future__ import annotations

import torch

from ...runtime import launch
from ..common.arguments import served
from ..common.formulas import wide
from ..common.placements import meet
from ..common.spec import Spec
from ..common.state import Ways
from ..softmax.kernels import forward_work
from .formulas import log_sums
from .placements import tell_products
from .request import spec_of


def forward(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: Spec,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows' log-sum-exps by our kernel, in float32."""
    result = torch.full(scores.shape[:-1], -float("inf"), dtype=torch.float32, device=scores.device)
    if not scores.numel():
        return result if sink is None else result.copy_(sink.expand(*scores.shape[:-1], 1).squeeze(-1))
    whole = result.unsqueeze(-1).expand(scores.shape)
    launch.run(*forward_work(scores, bias, mask, None, spec, whole, math="logsumexp", sink=sink))
    return result


@torch.library.custom_op("cute_softmax::softmax_stats", mutates_args=())
def operator(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    causal: int | None,
    invariant: bool = False,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    function = forward if served(scores, torch.float32, bias, sink) else log_sums
    return function(scores, mask, bias, spec_of(scores, scale, causal, invariant=invariant), sink)


def _fake(scores, mask, bias, scale, causal, invariant=False, sink=None):
    dtypes = [t.dtype for t in (scores, bias) if t is not None]
    return scores.new_empty(scores.shape[:-1], dtype=wide(*dtypes))


operator.register_fake(_fake)
tell_products(
    "softmax_stats",
    ("scores", "mask", "bias", "scale", "causal", "invariant", "sink"),
    _fake,
    lambda _: ("lse",),
)


def _by_operator(scores, mask, bias, spec: Spec, sink) -> torch.Tensor:
    meet(scores, mask, bias, sink)
    return operator(scores, mask, bias, spec.factor, spec.causal, spec.invariant, sink)


# No gradient flows through them: nothing is recorded.
_WAYS = Ways(forward, forward, log_sums, _by_operator)


def statistics(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: Spec,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows' log-sum-exps, on any device and in any state of torch."""
    if not served(scores, torch.float32, bias, sink):
        return log_sums(scores, mask, bias, spec, sink)
    return _WAYS.serve((scores, mask, bias, spec, sink), (scores, mask, bias, sink), ())
